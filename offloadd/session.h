// offloadd/session.h
//
// One connected rank: its handshake, its life, its job. Every session has a thread of its own with
// an event loop, so that a job that waits for a drive, a lock or its rank stops no other job.
//
// Invariants
//   * A session ends when its socket or its process ends, when it breaks the protocol or is too
//   slow with the handshake, or when the daemon shuts down; then its job is
//     drained, its store closed, its memory freed, in this order, and `ended` is called from the
//     session's thread as its last act.
//   * The token is bound to the socket and dies with it.
//   * A user who is not trusted (proto::IsTrusted) reaches only jobs whose names begin with its
//   number.
//
// Thread safety: id, token, loop, peer, StoredName, calls, stream memory, Shutdown and IsLeaving
// from any thread; the rest on the session's loop only.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "offloadd/event_loop.h"
#include "offloadd/job.h"
#include "offloadd/limits.h"
#include "offloadd/pool_policy.h"
#include "proto/handshake.h"

namespace offload::daemon {

class Session {
 public:
  struct Options {
    uint64_t id = 0;
    std::string control_path;
    PoolPolicy pools;
    double handshake_timeout_seconds = kLimits.handshake_timeout_seconds;
  };

  static absl::StatusOr<std::shared_ptr<Session>> Create(UniqueFd socket, proto::Peer peer,
                                                         Options options,
                                                         std::function<void(uint64_t id)> ended);
  // Begins to listen to the rank; once, and after the session can be found by its token.
  void Start();
  ~Session();  // joins the thread
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  uint64_t id() const { return options_.id; }
  const proto::Token& token() const { return token_; }
  EventLoop& loop() { return *loop_; }
  const proto::Peer& peer() const { return peer_; }
  pid_t client_pid() const { return peer_.pid; }
  // The name that this session's job `name` has in its pool.
  std::string StoredName(const std::string& name) const;

  // Control calls at a time, and the memory that their streams take: false beyond the limit.
  bool BeginCall();
  void EndCall() { calls_.fetch_sub(1); }
  bool TakeStreamMemory(uint64_t bytes);
  void ReturnStreamMemory(uint64_t bytes) { stream_bytes_.fetch_sub(bytes); }

  // Drains and ends.
  void Shutdown();
  // True once nobody needs the job any more: the rank has closed it or is gone, or the daemon shuts
  // down.
  bool IsLeaving() const;

  // ---- On the loop.
  // Null before OpenJob.
  Job* job() { return job_.get(); }
  // Once, for the job that the session has claimed; again only after an error.
  absl::StatusOr<proto::v1::OpenJobReply> OpenJob(const proto::v1::OpenJobRequest& request);
  // Drains the job and closes its store; the session stays, without a job that does anything.
  void CloseJob(std::function<void(absl::Status)> done);

 private:
  Session(UniqueFd socket, proto::Peer peer, Options options, std::unique_ptr<EventLoop> loop,
          proto::Token token, std::function<void(uint64_t)> ended);
  void Run();
  int Turn();
  void ReadSocket();
  absl::Status Handle(const proto::RankMessage& message);
  absl::Status SendMemory();
  bool RankHasLeft() const;
  // Milliseconds until the rank is too late, at most `timeout_ms`; ends the session when it is.
  int WatchHandshake(int timeout_ms);
  void End(std::string_view reason);

  UniqueFd socket_;
  proto::Peer peer_;
  Options options_;
  proto::Token token_;
  std::function<void(uint64_t)> ended_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Job> job_;
  std::optional<proto::Doorbell> doorbell_;  // ours, until the rank has mapped its memory
  bool greeted_ = false;
  bool memory_sent_ = false;
  double handshake_deadline_seconds_ = 0;  // 0: nothing is owed
  std::atomic<int> calls_{0};
  std::atomic<uint64_t> stream_bytes_{0};
  bool ending_ = false;
  std::atomic<bool> leaving_{false};
  std::thread thread_;
};

}  // namespace offload::daemon
