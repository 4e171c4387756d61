// offloadd/job.h
//
// A job from open to close: its thread, its store, its budget, its slab, its ranks, and the parts
// that work on them.
//
//   OpenJob → DeclareTensors… → Seal → (Put… → Publish) → SetSchedule, Step, Step, … → Close
//
// Several ranks of one launch share it: each of these calls waits until all have called it, and
// what they ask for has to agree (Membership, agreement.h, StepGate); the first difference is told
// to all of them, by name. The job ends drained when all have closed it. When one is lost the job
// ends, too: a step that all had called for is finished and committed, one that they had not is
// dropped whole, and the others are told which rank it was.
//
// Between steps the (first) rank may put weights; the next Step makes them part of its epoch,
// EndLoad part of the present one.
//
// Invariants
//   * Everything that ram promises is reserved at Seal; after that the job allocates nothing but
//   small bookkeeping.
//   * Every call is answered once, also when its rank or the daemon goes away.
//   * A job ends drained: no transfer or computation is under way, every recorded step is committed
//   unless the job has failed, the store is closed. Its memories stay until the object goes.
//   * Partial steps are no state of the job: nothing is committed, and no snapshot made, until a
//   whole one or the end of a load; where neither comes the job ends at its last commit.
//   * Only a step or the end of a load makes puts durable. What was put since is in no commit and
//   in no snapshot, and is gone when the job ends, however it ends.
//   * A snapshot is made or deleted between two steps, when all of them are committed.
//   * What takes long without needing the loop (opening, formatting, reserving) runs on a thread of
//   the job's own. Nothing is under way in store or scratch file then, no ring is read and nobody
//   polls; the loop goes on answering calls.
//
// Thread safety: Create, identity, loop, IsLeaving and phase from any thread; the rest on the job's
// loop. The last reference must not be dropped on that loop.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "offloadd/activity_log.h"
#include "offloadd/event_loop.h"
#include "offloadd/gradient_sum.h"
#include "offloadd/job_catalogue.h"
#include "offloadd/job_context.h"
#include "offloadd/job_phase.h"
#include "offloadd/machine.h"
#include "offloadd/membership.h"
#include "offloadd/plan_comparison.h"
#include "offloadd/rank.h"
#include "offloadd/rate_meter.h"
#include "offloadd/relayout.h"
#include "offloadd/replan_policy.h"
#include "offloadd/resident_state.h"
#include "offloadd/step_gate.h"
#include "offloadd/step_history.h"
#include "offloadd/transfers.h"
#include "offloadd/update_executor.h"
#include "offloadd/weight_cache.h"
#include "proto/offload.pb.h"
#include "proto/planned_traffic.h"
#include "proto/shared_memory.h"
#include "swap/scrubber.h"

namespace offload::daemon {

// What tells jobs apart, and what others are told of them.
struct JobIdentity {
  uid_t user = 0;
  std::string name;         // in its pool
  std::string pool;         // as it was asked for
  std::string store;        // the same for the same store, whatever the pool is called
  std::string run_id;       // of the launch; empty: of one rank, which nobody joins
  pid_t pid = 0;            // of the rank that opened it
  bool is_private = false;  // of a daemon that serves one launch only
};

class Job {
 public:
  using Done = std::function<void(absl::Status)>;
  using StepDone = std::function<void(absl::StatusOr<uint64_t> durable_step)>;
  using OpenDone = Rank::OpenDone;
  using ExchangeDone = Rank::ExchangeDone;
  using Progress = std::function<void(uint64_t bytes_formatted, uint64_t bytes_total)>;

  // A job without ranks, its loop running, if the machine runs loops. Nothing is looked at yet. The
  // machine outlives the job.
  static absl::StatusOr<std::shared_ptr<Job>> Create(JobIdentity identity,
                                                     Machine& machine = Machine::Real());
  // Requires that everybody who joined has left; and that it is drained, where nobody runs its
  // loop.
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  const JobIdentity& identity() const { return identity_; }
  EventLoop& loop() { return *loop_; }
  // True once nobody needs the job any more: its ranks have closed it or are gone, or it could not
  // be opened, or the daemon shuts down. Another one of this name may wait for its store.
  bool IsLeaving() const { return leaving_.load(std::memory_order_acquire); }
  JobPhase phase() const { return phase_.load(std::memory_order_acquire); }
  // True when the session has a rank here, or is on the way to one. Asks the loop.
  bool HasMember(uint64_t session);
  // True when this rank has closed the job. It ends when the others have, too. Asks the loop.
  bool IsLeftBy(uint32_t rank);

  // ---- For the simulator: what a sealed job has, null before; and who has which memory.
  UpdateExecutor* executor() { return executor_.get(); }
  ResidentState* resident_state() { return state_.get(); }

  // ---- On the loop: who comes and goes.

  // Opens the store of the job or finds that there is none, makes the memories, and waits for the
  // other ranks of the launch; when that takes long, the reply names them, and the call has to be
  // made again. After an error the member is no rank of the job.
  void OpenJob(Rank::Member member, const proto::v1::OpenJobRequest& request, OpenDone done);
  // Null when the session has no rank here.
  Rank* FindRank(uint64_t session);
  proto::SharedMemory& slab_memory() { return slab_; }
  // The rank has mapped its memories: its rings are read from now on.
  absl::Status Map(Rank& rank, proto::Doorbell doorbell);
  // The rank is ready with the job: what it still submits is answered with OFD-1802, what it has
  // pinned is waited for no more. Answers when everything that is recorded is committed; the last
  // rank's job is drained then and does nothing any more.
  void Close(Rank& rank, Done done);
  // The rank's process or connection is gone, `how` says it: it is answered no more. `done` runs
  // when its session may end: at once when there is no such rank or there are others, else when the
  // job is drained.
  void Leave(uint64_t session, const std::string& how, std::function<void()> done);
  // The daemon ends: as Close(), but pins count. `done` runs when the job is drained.
  void Shutdown(std::function<void()> done);
  // The same, and calls of ranks that come or wait are told that it is the daemon which ends.
  void EndWithDaemon(std::function<void()> done);

  // ---- On the loop: calls of ranks.
  absl::Status DeclareTensors(Rank& rank,
                              const std::vector<proto::v1::DeclareTensorsRequest>& messages,
                              uint64_t* tensor_count);
  void ReserveScratch(uint64_t bytes, Done done);
  // `progress` is called on another thread, before `done`.
  void Seal(Rank& rank, std::vector<proto::v1::SealRequest> messages, Progress progress, Done done);
  void Publish(Rank& rank, const std::string& trainer_state, Done done);
  // Commits what was put since the last step, as a whole, under the epoch that there is. The puts
  // are answered before.
  void EndLoad(Done done);
  absl::Status SetSchedule(Rank& rank, const std::vector<uint32_t>& tensors);
  // OFD-1805 when another rank has said others.
  absl::Status SetSquareRoots(std::shared_ptr<const kernels::SquareRoots> roots);
  // What the next Step will probably say. Ignored where nothing is made of it: the job works ahead
  // of no steps, has several ranks, or has been called for that step or another one.
  absl::Status BeginStep(const std::vector<proto::v1::StepRequest>& messages);
  void Step(Rank& rank, std::vector<proto::v1::StepRequest> messages, StepDone done);
  void WaitDurable(StepDone done);
  // Has the last recorded step committed, and does not wait for it; returns its number.
  absl::StatusOr<uint64_t> Checkpoint();
  // Gives every rank what every rank said.
  void Exchange(Rank& rank, const proto::v1::ExchangeRequest& request, ExchangeDone done);
  std::string ExplainFailure(const Rank& rank, uint64_t tag) const;

  // ---- On the loop: calls of tools.

  // Names the next commit, at the end of the step that is under way or at once; answers with the
  // step that the snapshot holds. When no spare generation is free the store grows by one first,
  // or, unless `may_grow`, the answer is OFD-1216. The job goes on meanwhile. `progress` tells of
  // the growth, on the loop.
  void CreateSnapshot(const std::string& name, bool may_grow, Progress progress, StepDone done);
  // Answers with the step that is committed.
  void DeleteSnapshot(const std::string& name, StepDone done);
  void FillStatus(proto::v1::JobStatus* status) const;
  // In messages of bounded size.
  std::vector<proto::v1::ReportPart> Report() const;
  // Those that have ended since the last call.
  void TakeTransfers(proto::v1::TakeTransfersReply* reply);

 private:
  struct SnapshotChange {
    bool creates = false;  // else deletes
    std::string name;
    bool may_grow = false;
    Progress progress;
    StepDone done;
    bool under_way = false;  // in the store
  };
  // What opening, sealing and reserving make off the loop, for the loop to take over.
  struct Made {
    absl::Status status;
    proto::MachineRates rates;
    proto::SharedMemory slab;
    std::unique_ptr<swap::Store> store;
    std::unique_ptr<swap::Scratch> scratch;
  };

  Job(JobIdentity identity, std::unique_ptr<EventLoop> loop, Machine& machine);
  void SetPhase(JobPhase phase);
  absl::Status Check(JobCall call) const;
  // Why the job does nothing any more.
  absl::Status Ending() const;
  // Asks the loop; false, too, when that has ended.
  bool Holds(const std::function<bool()>& question);

  // ---- Off the loop.
  // Runs `work` there, from a turn on in which nothing is under way, and then `done` on the loop;
  // without work only `done`, when it is its turn.
  void OffLoop(std::function<void()> work, std::function<void()> done);
  bool OffLoopIsBusy() const { return off_loop_running_ || !off_loop_.empty(); }
  void StartOffLoop();
  int TurnOffLoop();
  void UnwatchDevices();
  void WatchDevices();
  void TakeOver(Made& made);

  // ---- Opening and sealing.
  absl::Status ReadOptions(const proto::v1::OpenJobRequest& request);
  absl::Status AddRank(Rank::Member member, const proto::v1::OpenJobRequest& request, Rank** added);
  bool OpeningIsDone() const;
  swap::StoreOptions MakeStoreOptions() const;
  Placement PlacementFor(const CpuList& processors) const;
  Placement SlabPlacement() const;
  void RunNearRanks();
  void OpenStore(const Placement& placement, Made& made);
  absl::Status MakeSlab(const Placement& placement, Made& made) const;
  absl::Status MakeScratch(uint64_t bytes, Made& made);
  void FinishOpening(Made& made);
  void StartWorkers();
  void GiveUpOpening(const absl::Status& status);
  void AnswerOpening();
  void WatchJoining();
  proto::v1::OpenJobReply OpenReply(const Rank& rank) const;
  void StartSealing();
  absl::Status CompareRanks() const;
  absl::Status PrepareSeal(const std::vector<proto::v1::SealRequest>& messages);
  absl::Status ReadPlan(const std::vector<proto::v1::SealRequest>& messages);
  uint64_t RegionBytes(uint32_t rank) const;
  bool IsGoodRegion(uint64_t region_bytes, uint64_t pins_bytes) const;
  absl::Status CheckHome(uint32_t tensor) const;
  absl::Status CheckOtherTensors() const;
  absl::Status CheckBudget() const;
  absl::Status CompareCatalogue();
  absl::Status CheckMayOutgrow(bool has_others) const;
  absl::StatusOr<std::unique_ptr<swap::Store>> FormatStore();
  absl::StatusOr<std::unique_ptr<swap::Store>> LayOutAnew();
  void MakeWhatIsSealed(Made& made);
  absl::Status ReserveRegion(Rank& rank, uint64_t bytes) const;
  void FinishSeal(Made& made);
  void AnswerSeal(const absl::Status& status);
  void MakeParts();
  void MakeScrubber();
  void UpdateLimits();

  // ---- Rings.
  void ReadRing(Rank& rank, uint32_t entries_max);
  void BreakOff(Rank& rank, const absl::Status& fault);
  void Handle(Rank& rank, const proto::SubmissionEntry& entry);
  void HandleStepCommand(Rank& rank, const proto::SubmissionEntry& entry);
  void ScratchWrite(Rank& rank, const proto::SubmissionEntry& entry);
  void DetachRings(Rank& rank);
  std::byte* RegionOf(const Rank& rank) const { return context_.ranks[rank.number()].region; }

  // ---- Several ranks.
  uint32_t world_size() const { return membership_.world_size(); }
  bool All(bool (*holds)(const Rank& rank)) const;
  // "rank 2 (process 4711)".
  static std::string Describe(const Rank& rank);
  struct Wait {
    std::string what;               // that some do
    std::vector<uint32_t> missing;  // whom they wait for
    uint64_t said = 0;              // by these, of gradients
    friend bool operator==(const Wait&, const Wait&) = default;
  };
  std::optional<Wait> FindWait() const;
  void WatchRanks();
  int LateRankMilliseconds(int sleep_ms) const;
  absl::Status FindDeadExchange(bool for_long) const;
  absl::StatusOr<std::vector<std::string>> Exchanged();
  void AnswerExchange(const absl::StatusOr<std::vector<std::string>>& answer);
  // OFD-1803 naming a rank that has closed the job already.
  absl::Status CheckAllAreHere() const;
  // Answers the calls that wait for ranks that will not make them.
  void AnswerLooks();
  void AnswerWaiting(const absl::Status& status);
  // Ends the job since a rank is gone or at fault.
  void EndBecause(const absl::Status& reason);
  void UpdateMemory(const Rank& rank);

  // ---- Steps and the end.
  void Fail(absl::Status status);
  size_t PollDevices();
  // The sums of gradients are the daemon's.
  bool AddsGradients() const { return world_size() > 1 && !membership_.gradients_reduced(); }
  bool StepIsReady() const { return gate_.has_value() && gate_->IsComplete(); }
  absl::Status CheckStep() const;
  // What the rank has said before it is handled.
  void AddStep(Rank& rank, std::vector<proto::v1::StepRequest> messages, StepDone done);
  void StartRecordedStep();
  absl::StatusOr<StepPlan> TakeStep();
  absl::Status CheckNobodyIsBehind() const;
  absl::Status CheckSums(const StepMessages& messages) const;
  void AnswerStep(const absl::StatusOr<uint64_t>& durable_step);
  std::optional<std::string> TakeTrainerStates();
  void OnCommitted(uint64_t step);
  void CheckFiles();
  void SaveRemovedFiles();
  void OnStepDone();
  void StartPublishing();
  void FinishPublish(absl::Status status);
  void AnswerPublish(const absl::Status& status);
  void BeginClosing();
  void Drain();
  void FinishDraining();

  void AddChange(SnapshotChange change);
  void RunChanges();
  bool NeedsGrowth(const SnapshotChange& change) const;
  void GrowFor(SnapshotChange& change);
  void FinishChange(absl::Status status);

  // ---- The plan of a step.
  // `touches`: as SetSchedule has them; empty: not known.
  void PlanStep(std::span<const uint32_t> touches);
  void ConsiderReplan();
  void ShareCores();
  void FillPlan(proto::v1::PlanStatus* plan) const;

  // How long the loop may sleep, as EventLoop::SetTurn says.
  int Turn();
  void TakePositions();
  int SleepLimit(bool waiting, size_t completions, double scrub_seconds);
  WorkDone Work() const;
  void AddToHistory();
  void UpdateHeader();
  proto::SlabHeader* header() const { return reinterpret_cast<proto::SlabHeader*>(slab_.data()); }
  bool IsSealed() const { return cache_ != nullptr; }

  const JobIdentity identity_;
  const std::unique_ptr<EventLoop> loop_;
  Machine& machine_;
  std::atomic<JobPhase> phase_{JobPhase::kOpening};
  std::atomic<bool> leaving_{false};
  std::atomic<bool> cancelled_{false};  // asked off the loop: nobody wants the job any more

  uint64_t ram_bytes_ = 0;
  CpuList processors_;  // on which the ranks that have come compute; empty: it is not known
  uint32_t update_threads_asked_ = 0;  // 0: as DepthsOfPlan() says
  aio::OpenOptions io_;
  std::string io_engine_;
  uint64_t pins_offset_ = 0;
  uint64_t scratch_bytes_ = 0;  // that ranks may use
  uint32_t generations_ = 0;    // spare ones of a new store
  bool store_existed_ = false;
  // Of a store that has other tensors, or no room for all that is trained now.
  struct Outgrown {
    proto::Catalogue catalogue;  // by which it is laid out
    Moves moves;
  };
  std::optional<OtherTensors> other_tensors_;  // that the trainer has, until the seal
  std::optional<Outgrown> outgrown_;

  proto::SharedMemory slab_;
  Membership membership_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // by number; null: not there yet
  bool opened_ = false;                       // the store has been looked for
  double join_deadline_seconds_ = 0;
  absl::Status end_reason_;  // a rank is gone or at fault, or the daemon ends: ranks are told
  std::vector<Progress> seal_progress_;
  std::vector<std::string> trainer_states_;  // by rank, as they will be committed
  ActivityLog activity_;                     // watches store and scratch file,
  RateMeter meter_;                          // and so does this
  StepHistory history_;
  std::unique_ptr<swap::Store> store_;
  std::unique_ptr<swap::Scratch> scratch_;
  JobContext context_;
  std::unique_ptr<WeightCache> cache_;
  std::unique_ptr<ResidentState> state_;
  std::unique_ptr<UpdateExecutor> executor_;
  std::unique_ptr<Transfers> transfers_;
  std::unique_ptr<GradientSum> gradients_;    // when the daemon adds up those of several ranks
  std::unique_ptr<swap::Scrubber> scrubber_;  // when the job has a committed store

  uint64_t step_ = 0;             // the last recorded one
  std::optional<StepGate> gate_;  // once it is sealed
  std::optional<Wait> wait_;      // for late ranks
  double wait_since_seconds_ = 0, wait_report_seconds_ = 0;
  struct DurableWaiter {
    uint64_t step = 0;  // that is to be committed
    StepDone done;
  };
  std::vector<DurableWaiter> durable_waiters_;
  std::deque<SnapshotChange> changes_;  // one at a time
  std::vector<Done> close_waiters_;
  std::vector<std::function<void()>> leave_waiters_;
  proto::MachineRates opened_rates_;  // of the pool, when it was opened
  std::vector<uint32_t> touches_;     // of a step, by the schedule; empty: not known, or too many
  proto::StepTraffic planned_;
  PlanComparison comparison_;
  std::optional<ReplanPolicy> replan_;  // once it is sealed
  uint64_t replans_ = 0;
  std::string last_replan_;
  uint64_t commits_ = 0;       // of steps
  std::string removed_files_;  // what was said of them
  double last_step_seconds_ = 0, seconds_per_step_ = 0;
  uint64_t peak_bytes_ = 0;

  struct Task {
    std::function<void()> work, done;
  };
  std::deque<Task> off_loop_;  // that wait
  bool off_loop_running_ = false;
  std::vector<int> watched_devices_;  // descriptors; none while off_loop_running_
  Executor off_loop_thread_;
  std::thread thread_;  // the loop's
};

}  // namespace offload::daemon
