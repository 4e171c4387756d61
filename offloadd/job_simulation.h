// offloadd/job_simulation.h
//
// One run of the job's simulator: a job on a simulated machine, launch after launch, its ranks and
// the scripts that they go through, and the model that judges them. job_simulator.cc has launches
// and what is found after them, job_simulation_scripts.cc what a seed makes ranks do,
// simulated_rank.cc how a rank does it, simulated_rank_gradients.cc and simulated_rank_transfers.cc
// its gradients and its transfers.
//
// Internal to the simulator.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/random.h"
#include "offloadd/job.h"
#include "offloadd/job_model.h"
#include "offloadd/job_simulator.h"
#include "offloadd/simulated_machine.h"
#include "proto/ring.h"

namespace offload::daemon {

// What a trainer would say of its model, and where it wants everything.
struct SimulatedPlan {
  proto::Catalogue catalogue;
  kernels::OptimizerSpec optimizer;
  std::vector<kernels::OptimizerSpec> groups;
  uint64_t interval = 1;  // steps from commit to commit
  uint32_t update_threads = 0;
  std::string update_in_backward;
  uint32_t generations = 0;
  bool gradient_sum = false;
  uint64_t ram_bytes = 0;
  uint32_t world_size = 1;
  proto::MemoryPlan memory;
  proto::SlabLayout layout;
  // Tensors that this launch updates elsewhere, and puts now and then.
  std::set<uint32_t> elsewhere;
  bool holds_all = false;  // the window, so that ranks may keep pins while they wait
  // Of a region.
  uint64_t pins_offset = 0, slots_offset = 0, slot_bytes = 0, transfer_offset = 0;
  uint32_t slots = 1;
  std::vector<uint64_t> own_offset;  // per tensor: room for a gradient

  float factor() const {
    return world_size == 1 || gradient_sum ? 1.0f : 1.0f / static_cast<float>(world_size);
  }
};

// What the ranks do in one step, as far as they have to agree.
struct StepScript {
  enum class Refusal : uint8_t { kNone, kNotFinite, kRanksDiffer };
  struct Round {
    bool begins_anew = false;
    bool goes_on = false;  // to the next one after a look, without beginning anew
    uint32_t beginning = 0, first_pass = 0;
    std::vector<std::vector<std::vector<uint32_t>>> given;  // by rank, by pass: tensors
    std::vector<std::vector<uint32_t>> looks;               // by rank: tensors
  };
  uint64_t id = 0;  // of the run
  uint64_t step = 0;
  bool exchanges = false;
  std::vector<uint32_t> puts;       // of the first rank
  std::set<uint32_t> puts_states;   // of them: what the optimizer keeps, too
  std::set<uint32_t> puts_masters;  // of them: bf16 masters instead of weights
  std::set<uint32_t> changes;       // of them: made from the old value by all ranks alike
  std::vector<uint32_t> differing;  // made from the old value, by the last rank otherwise
  bool followed_by_exchange = false, ends_load = false;
  std::vector<Round> rounds;
  std::vector<std::map<uint32_t, proto::GradientStart>> starts;  // by beginning
  std::set<uint32_t> given;                                      // in the last beginning
  std::vector<std::set<uint32_t>> named;                         // in the step, by rank
  std::set<uint32_t> own;                                        // gradients that the trainer wrote
  float gradient_scale = 1;
  bool is_partial = false;     // some tensors have become something else elsewhere
  bool hides_partial = false;  // a mistake: and it does not say so
  Refusal refusal = Refusal::kNone;
  std::vector<std::optional<std::string>> trainer_states;  // by rank

  uint32_t calls = 0;                                   // of ranks that have called for the step
  bool is_done = false;                                 // answered
  std::set<uint32_t> puts_done;                         // seen by some rank
  std::map<std::pair<uint32_t, uint32_t>, Bytes> sums;  // by round, tensor: made
};

class Simulation;

// A rank of a launch: does one thing after the other, each in as many turns as it needs.
class SimulatedRank {
 public:
  SimulatedRank(Simulation* simulation, uint32_t number);
  uint32_t number() const { return number_; }
  uint64_t session() const { return 100 + number_; }

  // Goes on, or finds that it still waits (false).
  bool Act();
  bool is_gone() const { return is_gone_; }
  // What the job has made of the step that it has called for by its ring.
  void LookForStep();
  void Die();  // at once
  // Where it is, for messages.
  std::string Describe() const;

 private:
  struct Action {
    const char* what;
    std::function<bool()> action;  // false: not yet
  };

  void Then(const char* what, std::function<bool()> action) {
    actions_.push_back({what, std::move(action)});
  }
  // Joining.
  void Join();
  void Open();
  bool Seal();
  void PutAll();
  void Publish();
  // A script.
  void AddScript(const std::shared_ptr<StepScript>& script);
  void AddForward();
  void AddHold();
  void AddRound(const std::shared_ptr<StepScript>& script, uint32_t round);
  void AddGradientsOfOne(const std::shared_ptr<StepScript>& script);
  void AddGradientOfOne(const std::shared_ptr<StepScript>& script, uint32_t tensor);
  void AnnounceStep(const std::shared_ptr<StepScript>& script);
  void WriteInRegion(uint32_t tensor, const std::function<Bytes()>& values);
  void AddPause();
  void Release(uint32_t tensor);
  void AddStep(const std::shared_ptr<StepScript>& script);
  void AddCheckpoint();
  void AddEnd();

  void Use(uint32_t tensor);
  void Give(const std::shared_ptr<StepScript>& script, uint32_t round, uint32_t pass,
            uint32_t tensor);
  void Look(const std::shared_ptr<StepScript>& script, uint32_t round, uint32_t tensor);
  void JudgeLook(const StepScript& script, uint32_t round, uint32_t tensor, uint64_t word);
  void ReadSpilled(const std::shared_ptr<StepScript>& script, uint32_t round, uint32_t tensor);
  void Put(const std::shared_ptr<StepScript>& script, uint32_t tensor);
  void PutPlane(uint32_t tensor, proto::Plane plane, uint64_t digest,
                const std::function<Bytes()>& values);
  void Differ(const std::shared_ptr<StepScript>& script, uint32_t tensor);
  void Follow(const std::shared_ptr<StepScript>& script, uint32_t tensor);
  void Get(uint32_t tensor, proto::Plane plane);
  void Exchange();
  void WriteOwn(const std::shared_ptr<StepScript>& script, uint32_t tensor);
  std::vector<proto::v1::StepRequest> StepMessages(const StepScript& script) const;
  void ApplyStep(StepScript& script, const absl::StatusOr<uint64_t>& durable_step);
  void AnsweredStep(StepScript& script, const absl::StatusOr<uint64_t>& durable_step);

  // Its ring.
  uint64_t Submit(proto::SubmissionEntry entry);
  static proto::SubmissionEntry Entry(proto::RingOperation operation, uint32_t tensor = 0);
  proto::SubmissionEntry StepCommand(proto::RingOperation operation,
                                     const proto::v1::StepRequest& message);
  void ReadCompletions();
  // Missing while it has not come; of a failure the rank ends.
  std::optional<uint64_t> Completed(uint64_t tag);
  // Submits, and then waits: two actions.
  void Await(const char* what, std::function<proto::SubmissionEntry()> entry,
             std::function<void(uint64_t value)> then = nullptr);
  void CheckUse(uint32_t tensor, uint64_t word);

  // The same of what the job refuses.
  void AwaitRefusal(const char* what, const proto::SubmissionEntry& entry, ErrorId error);

  // A call that was answered; of an error the rank ends.
  void Answered(const char* call, const absl::Status& status);
  void Fail(const std::string& what, const absl::Status& status);
  void Leave();

  Job& job() const;
  Rank* rank() const;
  proto::PinWord& pin(uint32_t tensor) const;
  uint64_t tensor_word(uint32_t tensor) const;

  Simulation& sim_;
  const uint32_t number_;
  std::byte* region_ = nullptr;
  std::optional<proto::SubmissionProducer> submissions_;
  std::optional<proto::CompletionConsumer> completions_;
  std::optional<proto::Doorbell> bell_;
  std::map<uint64_t, proto::CompletionEntry> completed_;
  std::set<uint64_t> unwatched_;     // tags that nobody waits for: they must succeed all the same
  std::vector<uint64_t> slot_tags_;  // 0: free
  uint64_t tags_ = 0;
  std::deque<Action> actions_;
  std::optional<absl::Status> answer_;  // of the call that it waits for
  size_t scripts_ = 0;                  // begun
  std::shared_ptr<StepScript> called_;  // by its ring, and not answered
  uint64_t step_tag_ = 0;
  bool is_heard_ = false;  // and the job has heard of it
  // A tensor that it goes on reading while it steps, as it was before.
  std::optional<uint32_t> held_;
  std::shared_ptr<const TensorValues> held_values_;
  uint64_t held_word_ = 0;
  uint32_t touches_ = 0;
  uint64_t exchanges_ = 0;
  bool is_gone_ = false, is_ending_ = false, has_opened_ = false;
};

class Simulation {
 public:
  explicit Simulation(const JobSimulationOptions& options);
  JobSimulationResult Run();

  // ---- For ranks.
  Random& random() { return random_; }
  swap::Trace& trace() { return trace_; }
  JobSimulationResult& result() { return result_; }
  Job& job() { return *job_; }
  const SimulatedPlan& plan() const { return plan_; }
  const std::byte* slab() const { return job_->slab_memory().data(); }
  bool is_new() const { return is_new_; }
  const std::string& run_id() const { return run_id_; }
  proto::v1::OpenJobRequest OpenRequest(uint32_t rank) const;
  std::vector<proto::v1::SealRequest> SealMessages() const;
  // The n-th of the launch; null: there are no more.
  std::shared_ptr<StepScript> Script(size_t index);
  const TensorValues& now(uint32_t tensor) const { return *now_.tensors[tensor]; }
  std::shared_ptr<const TensorValues> share(uint32_t tensor) const { return now_.tensors[tensor]; }
  uint64_t epoch() const { return now_.epoch; }
  void SetInitial(uint32_t tensor);
  // Whether a new job's tensor begins with what an optimizer has kept before.
  bool BeginsWithStates(uint32_t tensor) const {
    return tensors_[tensor].trainable && tensor % 2 == 1;
  }
  void JudgeOpening(uint32_t rank, const proto::v1::OpenJobReply& reply);
  std::string FirstState(uint32_t rank) const;
  void BeginPublish();
  uint64_t Key(const StepScript& script, uint64_t what, uint64_t a = 0, uint64_t b = 0,
               uint64_t c = 0) const;
  Bytes PartValues(const StepScript& script, uint32_t round, uint32_t pass, uint32_t rank,
                   uint32_t tensor) const;
  // As after a round; empty when there is none.
  const Bytes& Sum(StepScript& script, uint32_t round, uint32_t tensor);
  Bytes PutValues(const StepScript& script, uint32_t tensor) const;
  Bytes PutMasterValues(const StepScript& script, uint32_t tensor) const;
  Bytes PutStateValues(const StepScript& script, uint32_t tensor, size_t state) const;
  void ApplyPut(StepScript& script, uint32_t tensor);
  void BeginEndLoad();
  void EndLoadHasBegun() { is_load_begun_ = true; }  // unless it is answered by then
  void EndEndLoad(const absl::Status& status);
  void ApplyStep(StepScript& script, const absl::StatusOr<uint64_t>& durable_step);
  void KnowDurable(uint64_t step);
  // The last step was partial, and nothing has made it whole.
  bool is_partial() const { return is_partial_; }
  // An error that a rank has got: false when nothing has happened that may lead to one.
  bool MayFail() const { return may_fail_; }
  void Violate(std::string what);
  bool ended() const { return !result_.violation.empty(); }

 private:
  struct Version {
    JobState state;
    bool is_load = false;     // by EndLoad
    bool is_partial = false;  // no state that may be found
  };
  struct Snapshot {
    std::vector<JobState> candidates;
    bool is_sure = false;
  };
  enum class Fate : uint8_t { kCloses, kLosesRank, kLosesAll, kKilled, kPowerCut };

  // What a seed chooses.
  void ChooseModel();
  void ChooseLaunch();
  void ChooseRates();
  void ChooseElsewhere();
  bool IsBundled(uint32_t tensor) const {
    return plan_.catalogue.store_tensors[plan_.catalogue.placements[tensor].store_tensor].bundle;
  }
  void ChooseMemory();
  void ChooseGradientHomes();
  void ChooseRegions();
  std::shared_ptr<StepScript> MakeScript(uint64_t step, bool after_refusal);
  void AddRounds(StepScript& script);
  void ChooseStarts(StepScript& script, bool after_refusal);
  void ChooseStep(StepScript& script);
  Bytes StateValues(uint32_t tensor, uint64_t key) const;
  std::vector<uint32_t> Some(uint64_t one_in, bool trainable_only);

  // A launch.
  void Launch();
  void Turn();
  void AdvanceClock();
  void ActSome();
  bool IsFateful() const;
  bool CalledByAll(const StepScript& script) const;
  void MeetFate();
  void AddFault();
  void ChangeSnapshots();
  // job_simulation_mistakes.cc: one of options_.mistake, when there is an opportunity.
  void PlantMistake();
  bool ChangesAmid();
  bool DropsUnwritten();
  bool TakesAsRead();
  bool HasTwoOwners();
  std::optional<uint32_t> WhoKeeps(bool next) const;
  bool IsBetweenSteps() const;
  void EndLaunch();
  bool IsOver() const;
  bool AllAreGone() const;
  void SayWhoWaits();
  size_t OldestThatMayBeFound() const;
  std::vector<JobState> StatesThatMayBeFound() const;
  void Judge();
  void JudgeSnapshots(swap::Store& store);

  const JobSimulationOptions options_;
  Random random_;
  swap::Trace trace_;
  SimulatedMachine machine_;
  JobSimulationResult result_;
  SimulatedPlan plan_;
  bool favours_ahead_ = false;    // much may be updated before it is called for
  bool favours_replans_ = false;  // places may pass between pipeline and what stays
  bool favours_beside_ = false;   // intervals of a slow drive end while steps go on
  bool favours_partial_ = false;  // steps of one rank that are partial
  std::vector<proto::Tensor> tensors_;

  // A launch.
  std::shared_ptr<Job> job_;
  std::vector<std::unique_ptr<SimulatedRank>> ranks_;
  std::vector<uint32_t> slowness_;  // by rank: acts once in so many times
  std::vector<std::shared_ptr<StepScript>> scripts_;
  uint64_t scripts_made_ = 0;
  uint32_t steps_left_ = 0;
  std::string run_id_;
  bool is_new_ = true;
  Fate fate_ = Fate::kCloses;
  uint64_t fate_turn_ = 0, turns_ = 0;
  bool has_met_fate_ = false;
  bool has_mistaken_ = false;
  bool is_dead_ = false;  // the daemon is
  bool may_fail_ = false, drive_failed_ = false;
  bool changing_snapshots_ = false;
  std::shared_ptr<StepScript> called_by_all_;  // when a rank was lost, and must be taken
  uint64_t snapshots_named_ = 0;

  // The model.
  JobState now_;
  bool has_unsettled_puts_ = false;
  bool is_partial_ = false;
  bool is_load_begun_ = false;
  bool is_loading_ = false;  // EndLoad is called with puts, or after a partial step
  bool was_partial_ = false, had_unsettled_puts_ = false;  // before it
  std::vector<std::string> trainer_states_;                // by rank
  std::vector<Bytes> sums_;        // by tensor: of this launch's last gradients
  std::vector<Version> versions_;  // begun; the first durable or later
  size_t durable_ = 0;             // index of the last one that is known to be
  std::map<std::string, Snapshot> snapshots_;
};

}  // namespace offload::daemon
