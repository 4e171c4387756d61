// tests/in_process_daemon.h
//
// The whole daemon on a thread of the test, so that a test can break what is below it. Beside that
// it is the one that a user starts: real sockets, a real pool, real ranks (tests/raw_rank.h).
//
// SIGTERM has to be blocked in every thread before the first one begins: BlockTermination() is for
// a static of the test.
//
// Thread safety: one thread; the daemon has its own.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "gtest/gtest.h"
#include "offloadd/daemon.h"
#include "proto/grpc_status.h"
#include "proto/offload.grpc.pb.h"

namespace offload::tests {

inline bool BlockTermination() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  return sigprocmask(SIG_BLOCK, &signals, nullptr) == 0;
}

class InProcessDaemonTest : public testing::Test {
 protected:
  InProcessDaemonTest() {
    std::string directory = "/tmp/offloadd-border-XXXXXX";
    directory_ = mkdtemp(directory.data());
    socket_ = directory_ + "/offloadd.sock";
    const char* const base = getenv("TEST_TMPDIR");
    pool_ = std::string(base == nullptr ? "/tmp" : base) + "/" +
            testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::create_directories(pool_);
  }
  ~InProcessDaemonTest() override {
    StopDaemon();
    std::filesystem::remove_all(pool_);
    std::filesystem::remove_all(directory_);
  }

  daemon::DaemonOptions Options() const {
    return {.socket_path = socket_, .pools = {.default_pool = pool_, .allowed = {pool_}}};
  }
  void StartDaemon(daemon::DaemonOptions options) {
    auto daemon = daemon::Daemon::Create(std::move(options));
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    thread_ = std::thread([this] { daemon_->Run(); });
  }
  void StartDaemon() { StartDaemon(Options()); }
  // As an administrator does.
  void StopDaemon() {
    if (daemon_ == nullptr) return;
    kill(getpid(), SIGTERM);
    WaitForDaemon();
  }
  // For one that ends by itself.
  void WaitForDaemon() {
    thread_.join();
    daemon_.reset();
  }

  // What tools talk to.
  std::unique_ptr<proto::v1::Control::Stub> Tool() const {
    return proto::v1::Control::NewStub(grpc::CreateCustomChannel(
        proto::ControlAddress(directory_ + "/control.sock"), grpc::InsecureChannelCredentials(),
        proto::ControlChannelArguments()));
  }

  std::string directory_, socket_, pool_;

 private:
  std::unique_ptr<daemon::Daemon> daemon_;
  std::thread thread_;
};

}  // namespace offload::tests
