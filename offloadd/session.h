// offloadd/session.h
//
// One connected rank: its handshake, its token, its limits, and its place in a job. Every session
// has a thread of its own, which mostly sleeps; the job that it belongs to has another.
//
// Invariants
//   * A session ends when its socket or its process ends, when it breaks the protocol or is too
//   slow with the handshake, or when the daemon shuts down; but not before its job lets it go,
//   which the last one of a job does drained. `ended` is called from the session's thread as its
//   last act.
//   * The token is bound to the socket and dies with it.
//   * A session belongs to one job in its life, unless that could not be opened.
//   * A user who is not trusted (proto::IsTrusted) reaches only jobs whose names begin with its
//   number.
//
// Thread safety: all public methods from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
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

  // The job that it belongs to; null before OpenJob.
  std::shared_ptr<Job> job() const;
  // OFD-1503 when it belongs to one already, Ended() when it ends. Everybody who asks the job's
  // loop to let a rank in afterwards asks IsLeaving() there first.
  absl::Status JoinJob(std::shared_ptr<Job> job);
  // The job could not be opened.
  void DropJob();
  // What it is to its job, which gives it a number.
  Rank::Member MemberOfJob();

  // Drains and ends.
  void Shutdown();
  // True once the rank is gone, or the daemon shuts down.
  bool IsLeaving() const;
  // Why it takes no calls then: OFD-1801 of a daemon that ends, OFD-1802 otherwise.
  absl::Status Ended() const;

 private:
  Session(UniqueFd socket, proto::Peer peer, Options options, std::unique_ptr<EventLoop> loop,
          proto::Token token, std::function<void(uint64_t)> ended);
  // ---- On the loop.
  void Run();
  void ReadSocket();
  absl::Status Handle(const proto::RankMessage& message);
  absl::Status SendMemory();
  absl::Status Attach(proto::Doorbell doorbell);
  // Milliseconds until the rank is too late, -1 when nothing is owed; ends the session when it is.
  int WatchHandshake();
  void End(std::string_view reason);
  // Tells the job, if there is one, by `leave`, which is given what to call when the session may
  // end.
  void LeaveJob(const std::function<void(Job& job, std::function<void()> done)>& leave);

  UniqueFd socket_;
  proto::Peer peer_;
  Options options_;
  proto::Token token_;
  std::function<void(uint64_t)> ended_;
  std::unique_ptr<EventLoop> loop_;
  mutable std::mutex job_mutex_;
  std::shared_ptr<Job> job_;                 // guarded by job_mutex_
  std::optional<proto::Doorbell> doorbell_;  // ours, until the rank has mapped its memory
  bool greeted_ = false;
  bool memory_sent_ = false;
  double handshake_deadline_seconds_ = 0;  // 0: nothing is owed
  std::atomic<int> calls_{0};
  std::atomic<uint64_t> stream_bytes_{0};
  bool ending_ = false;
  std::atomic<bool> leaving_{false};
  std::atomic<bool> daemon_ends_{false};
  std::thread thread_;
};

}  // namespace offload::daemon
