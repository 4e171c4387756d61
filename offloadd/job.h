// offloadd/job.h
//
// A job from open to close: its store, its budget, its two memories, and the parts that work on
// them.
//
//   OpenJob → DeclareTensors… → Seal → (Put… → Publish) → SetSchedule, Step, Step, … → Close
//
// Between steps the rank may put weights; the next Step makes them part of its epoch, EndLoad part
// of the present one.
//
// Invariants
//   * Everything that ram promises is reserved at Seal; after that the job allocates nothing but
//   small bookkeeping.
//   * Every call is answered once, also when the rank or the daemon goes away.
//   * A job ends drained: no transfer or computation is under way, every recorded step is committed
//   unless the job has failed.
//   * Only a step or the end of a load makes puts durable. What was put since is in no commit and
//   in no snapshot, and is gone when the job ends, however it ends.
//   * A snapshot is made or deleted between two steps, when all of them are committed.
//
// One session per job for now: the rank that opened it. Several will share context, store and slab,
// and bring a region each.
//
// Thread safety: the loop's thread only. Blocking calls (Open, Seal, Publish) block the loop, which
// serves nobody else.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/worker_pool.h"
#include "offloadd/event_loop.h"
#include "offloadd/job_context.h"
#include "offloadd/resident_state.h"
#include "offloadd/transfers.h"
#include "offloadd/update_executor.h"
#include "offloadd/weight_cache.h"
#include "proto/daemon_rings.h"
#include "proto/offload.pb.h"
#include "proto/shared_memory.h"
#include "swap/scrubber.h"

namespace offload::daemon {

class Job {
 public:
  using Done = std::function<void(absl::Status)>;
  using StepDone = std::function<void(absl::StatusOr<uint64_t> durable_step)>;
  using Progress = std::function<void(uint64_t bytes_formatted, uint64_t bytes_total)>;

  // Opens the store of the job or finds that there is none, and makes the two memories. Blocking.
  // `cancelled` is asked while Open and Seal wait for a lock or format a store; true: nobody wants
  // the job any more.
  static absl::StatusOr<std::unique_ptr<Job>> Open(EventLoop* loop,
                                                   const proto::v1::OpenJobRequest& request,
                                                   const std::string& pool,
                                                   std::function<bool()> cancelled,
                                                   proto::v1::OpenJobReply* reply);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  proto::SharedMemory& slab_memory() { return slab_; }
  proto::SharedMemory& region_memory() { return region_; }
  // The rank has mapped its memories: its rings are read from now on.
  void AttachRings(proto::Doorbell doorbell);

  absl::Status DeclareTensors(const std::vector<proto::v1::DeclareTensorsRequest>& messages,
                              uint64_t* tensor_count);
  absl::Status ReserveScratch(uint64_t bytes);
  absl::Status Seal(const std::vector<proto::v1::SealRequest>& messages, const Progress& progress);
  void Publish(const std::string& trainer_state, Done done);
  // Commits what was put since the last step, as a whole, under the epoch that there is. The puts
  // are answered before.
  void EndLoad(Done done);
  absl::Status SetSchedule(const std::vector<uint32_t>& tensors);
  void Step(std::vector<proto::v1::StepRequest> messages, StepDone done);
  void WaitDurable(StepDone done);
  // Drains, commits, and answers; the job does nothing any more, and what the rank still submits is
  // answered with OFD-1802.
  void Close(Done done);
  // The rank needs no tensor any more, whatever its pins say.
  void IgnorePins() { context_.pins = nullptr; }
  // The rank is gone: nothing is pinned, nobody is answered. Drains as Close().
  void RankGone();
  std::string ExplainFailure(uint64_t tag) const;

  // Names the next commit, at the end of the step that is under way or at once; answers with the
  // step that the snapshot holds. When no spare generation is free the store grows by one first,
  // or, unless `may_grow`, the answer is OFD-1216. The job goes on meanwhile. `progress` tells of
  // the growth, on the loop.
  void CreateSnapshot(const std::string& name, bool may_grow, Progress progress, StepDone done);
  // Answers with the step that is committed.
  void DeleteSnapshot(const std::string& name, StepDone done);

  // Does what can be done now; returns how long the loop may sleep, as EventLoop::SetTurn says.
  int Turn();
  // True when nothing is under way any more after Close() or RankGone().
  bool drained() const { return drained_; }
  // True when the rank wrote nonsense into its ring: its session must end.
  bool rank_at_fault() const { return rank_at_fault_; }
  void FillStatus(proto::v1::JobStatus* status) const;

 private:
  struct SnapshotChange {
    bool creates = false;  // else deletes
    std::string name;
    bool may_grow = false;
    Progress progress;
    StepDone done;
    bool under_way = false;  // in the store
  };

  explicit Job(EventLoop* loop);
  swap::StoreOptions MakeStoreOptions() const;
  absl::Status OpenStore();
  absl::Status MakeMemories();
  absl::Status SetScratch();
  absl::Status ReadPlan(const std::vector<proto::v1::SealRequest>& messages);
  absl::Status CheckBudget() const;
  absl::Status CompareCatalogue() const;
  absl::Status CreateStore(const Progress& progress);
  absl::Status ReserveMemory();
  void MakeParts();
  void MakeScrubber();
  void UpdateLimits();

  void ReadRing(uint32_t entries_max);
  void Handle(const proto::SubmissionEntry& entry);
  void ScratchWrite(const proto::SubmissionEntry& entry);
  void Complete(uint64_t tag, absl::Status status, uint64_t value);
  void Fail(absl::Status status);
  size_t PollDevices();
  void StartRecordedStep();
  void OnCommitted(uint64_t step);
  void OnStepDone();
  void AddChange(SnapshotChange change);
  void RunChanges();
  bool NeedsGrowth(const SnapshotChange& change) const;
  void GrowFor(SnapshotChange& change);
  void FinishChange(absl::Status status);
  void FinishPublish(Done done, const std::string& trainer_state, absl::Status status);
  void Drain();
  int SleepLimit(bool waiting, size_t completions, double scrub_seconds);
  void UpdateHeader();
  proto::SlabHeader* header() const { return reinterpret_cast<proto::SlabHeader*>(slab_.data()); }

  EventLoop* loop_;
  std::string name_, pool_;
  uint64_t ram_bytes_ = 0;
  aio::OpenOptions io_;
  std::function<bool()> cancelled_;
  std::string io_engine_;
  uint64_t pins_offset_ = 0;
  uint64_t scratch_bytes_ = 0;  // that the rank may use
  uint32_t generations_ = 0;    // spare ones of a new store
  bool exists_ = false;         // a committed store of this name was there
  bool sealed_ = false;
  std::vector<proto::Tensor> declared_;

  proto::SharedMemory slab_, region_;
  std::unique_ptr<WorkerPool> workers_;
  std::unique_ptr<swap::Store> store_;
  std::unique_ptr<swap::Scratch> scratch_;
  JobContext context_;
  std::optional<proto::DaemonRings> rings_;
  std::unique_ptr<WeightCache> cache_;
  std::unique_ptr<ResidentState> state_;
  std::unique_ptr<UpdateExecutor> executor_;
  std::unique_ptr<Transfers> transfers_;
  std::unique_ptr<swap::Scrubber> scrubber_;  // when the job has a committed store

  uint64_t step_ = 0;  // the last recorded one
  struct WaitingStep {
    std::vector<proto::v1::StepRequest> messages;
    StepDone done;
  };
  std::optional<WaitingStep> waiting_step_;
  std::vector<StepDone> durable_waiters_;
  std::deque<SnapshotChange> changes_;  // one at a time
  std::vector<Done> close_waiters_;
  bool publishing_ = false;
  bool closing_ = false;
  bool rank_gone_ = false;
  bool rank_at_fault_ = false;
  bool drained_ = false;
  std::deque<std::pair<uint64_t, std::string>> failure_texts_;
  double last_step_seconds_ = 0, seconds_per_step_ = 0;
  uint64_t peak_bytes_ = 0;
};

}  // namespace offload::daemon
