// offloadd/session_fixture.h
//
// For tests: a session whose rank is the test itself.
//
// Thread safety: one thread; the session has its own.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "offloadd/session.h"
#include "proto/handshake.h"
#include "spdlog/spdlog.h"

namespace offload::daemon {

class SessionFixture {
 public:
  explicit SessionFixture(Session::Options options = {.id = 1},
                          const std::function<void(proto::Peer&)>& change_peer = {}) {
    int pair[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    rank_.reset(pair[0]);
    UniqueFd socket(pair[1]);
    auto peer = proto::PeerOf(socket.get());
    EXPECT_TRUE(peer.ok()) << peer.status();
    if (change_peer) change_peer(*peer);
    auto session = Session::Create(std::move(socket), *std::move(peer), std::move(options),
                                   [this](uint64_t) { ended_.set_value(); });
    EXPECT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
  }
  // The loop ends with the rank's socket. A table may keep the session for longer.
  ~SessionFixture() {
    Go();
    rank_.reset();
    if (started_) WaitForEnd();
  }
  SessionFixture(const SessionFixture&) = delete;
  SessionFixture& operator=(const SessionFixture&) = delete;

  void Start() {
    spdlog::default_logger_raw();  // is made by whoever asks first: before there are two threads
    started_ = true;
    session_->Start();
  }
  // Between the two the loop does nothing but wait.
  void Halt() {
    std::promise<void> halted;
    halted_ = std::make_unique<std::promise<void>>();
    std::shared_future<void> go = halted_->get_future().share();
    ASSERT_TRUE(session_->loop().Post([&halted, go] {
      halted.set_value();
      go.wait();
    }));
    halted.get_future().wait();
  }
  void Go() {
    if (halted_ != nullptr) halted_->set_value();
    halted_.reset();
  }
  void WaitForEnd() const { has_ended_.wait(); }

  int rank() const { return rank_.get(); }
  void LeaveRank() { rank_.reset(); }
  Session& operator*() const { return *session_; }
  Session* operator->() const { return session_.get(); }
  const std::shared_ptr<Session>& get() const { return session_; }

 private:
  UniqueFd rank_;
  std::promise<void> ended_;
  const std::shared_future<void> has_ended_ = ended_.get_future().share();
  bool started_ = false;
  std::unique_ptr<std::promise<void>> halted_;
  std::shared_ptr<Session> session_;
};

}  // namespace offload::daemon
