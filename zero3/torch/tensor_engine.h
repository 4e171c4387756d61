// zero3/torch/tensor_engine.h
//
// The engine behind every language: attaches lists of named tensors to one job, steps over lists of
// updates, gathers, loads and saves. Knows no modules and no optimizer classes; those of C++ are
// adapters over it (module_engine.h).
//
// A job's store is made once, for all its tensors: Attach() declares and takes over, Seal() makes
// the store and moves the weights there. Several engines live side by side, each with its own job
// and session; nothing is shared but the dispatch key.
//
// Invariants
//   * Attach() checks everything that can be checked without the daemon before it changes a tensor.
//   * A tensor has the same number at the daemon in every run that attaches the same lists in the
//   same order.
//   * Step() has changed nothing when it throws.
//
// Thread safety: one thread, when no operation runs on the tensors; operations on any. Steps may be
// taken by threads that train a module each: they come one after another (TakeTurn).
#pragma once

#include <offload/torch.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "client/session.h"
#include "kernels/optimizer.h"
#include "zero3/torch/accumulation_locks.h"
#include "zero3/torch/attachment.h"
#include "zero3/torch/buffers.h"
#include "zero3/torch/device_plan.h"
#include "zero3/torch/gradient.h"
#include "zero3/torch/gradient_sums.h"
#include "zero3/torch/kept_state.h"
#include "zero3/torch/operator_gate.h"
#include "zero3/torch/step_announcement.h"
#include "zero3/torch/weight_residency.h"
#include "zero3/torch/weights_io.h"
#include "zero3/trainer_state.h"

namespace offload::zero3 {

// The tensors that are updated with one set of hyper-parameters; those without gradient are left
// out.
struct GroupUpdate {
  client::Group group;
  std::span<const at::Tensor> tensors;
};

class DeviceTier;

class ProcessMemory;

// A rank's part of what is committed with a step.
uint64_t StateBytesMax(const Attachment& attachment);

// What went wrong when an engine was destroyed, "" for nothing, and a step that was durable then.
struct EndOfJob {
  std::string failure;
  int64_t durable_step = 0;
};

class TensorEngine {
 public:
  TensorEngine(const Options& options, uint64_t ram_bytes, std::unique_ptr<client::Session> session,
               client::JobInfo job);
  ~TensorEngine();
  TensorEngine(const TensorEngine&) = delete;
  TensorEngine& operator=(const TensorEngine&) = delete;
  // The destructor throws nothing: it says there what it says in the log otherwise.
  void SetEnd(std::shared_ptr<EndOfJob> end) { end_ = std::move(end); }

  // Adds parameters to the job; several names or tensors of one storage are one tensor with its
  // first name. Those that it has already are skipped; true when there was a new one. OFD-1601 for
  // what is not supported, 1604 for another optimizer than the job's, 1301 when the state does not
  // fit `ram`. Where the store is made already, it is laid out anew for those that are new.
  // With Options::device those of the host become tensors of the device; where their values are
  // taken later (`takes_now` is false: Seal() does not follow at once), those whose memory others
  // see, too, get a copy first. `buffers`: those that AttachBuffers() is given next, which `ram`
  // has to hold as well.
  bool Attach(std::span<const NamedTensor> tensors, const kernels::OptimizerSpec& optimizer,
              std::span<const NamedTensor> buffers, bool takes_now = false);
  // Adds what of these lists the job does not have; where it is sealed its store is laid out anew.
  // Theirs are the names of all that is trained, and those that the job has take them; what has
  // none any more is left where it is, until a run goes on without it. Throws as Attach() does and
  // has changed nothing then; what the daemon refuses ends the session.
  bool Grow(std::span<const NamedTensor> tensors, std::span<const NamedTensor> buffers);
  // Not with several ranks, on a device, or over several pools; why_fixed() says which, or nothing.
  bool may_grow() const { return why_fixed().empty(); }
  std::string_view why_fixed() const;
  // Files have what is in these lists, all of it the job's, under the names that it has there.
  void NameForFilesAnew(std::span<const NamedTensor> tensors, std::span<const NamedTensor> buffers);
  // What of a module is no parameter of the job goes to Options::device, too; before
  // AttachBuffers(). Nothing without one.
  void MoveOthers(std::span<const at::Tensor> tensors);
  // Adds buffers of the same module, which stay where they are, to what is committed. Those of a
  // job that exists get their values: the small ones now, the others when the store is opened,
  // which is now, too, when all parameters of the job are there.
  void AttachBuffers(std::span<const NamedTensor> buffers);
  // A module has assigned another tensor to a buffer: it is committed from the next step on. False
  // where that cannot be (Buffers::Replace).
  bool ReplaceBuffer(std::string_view name, const at::Tensor& tensor);
  // Makes the store of a new job or opens that of an existing one, and brings the weights there.
  // The first operator that touches a tensor does it, too, and so does whatever needs it here.
  void Seal();

  // Where tensors of the host go when they are attached; nothing when they stay.
  std::optional<c10::Device> destination() const { return device_plan_.destination(); }
  // OFD-1301 when `ram` is less than what a construction outside memory passes through.
  void CheckConstructs() const;

  int64_t step() const { return static_cast<int64_t>(step_); }
  // Takes one step of the job. OFD-1701 for gradients that are not finite. `groups_now`: the
  // hyper-parameters of the same groups, for the backward of the next step; null: they will be the
  // same.
  void Step(std::span<const GroupUpdate> updates, GroupsNow groups_now = nullptr);
  // Waits for the step of another thread, with all that belongs to it; others wait for this one.
  // No closure of the program runs meanwhile, which may wait for another thread.
  using Turn = std::unique_lock<std::recursive_mutex>;
  Turn TakeTurn() { return Turn(turns_); }
  // After a step that torch counts as a write of all these tensors: their versions change, which
  // lets the backward of a graph from before the step fail. Masters do not take it for an edit.
  void CountAsWrites(std::span<const at::Tensor> tensors) const;
  // A step of somebody else's optimizer: commits what it wrote into weights.
  void CommitStep();
  void WaitDurable();
  int64_t Checkpoint();
  // What every rank has said, in the order of ranks.
  std::vector<std::string> Exchange(std::string blob);
  void SetTrainerState(std::string blob);
  const std::string& trainer_state() const { return state_.trainer; }
  // Of one more GradScaler of the program: its number, and what the job has of it in the place of
  // `start`.
  size_t AddLossScale(LossScale* start);
  // What is committed with the next step.
  void SetLossScale(size_t index, LossScale scale) { state_.loss_scales.at(index) = scale; }
  // ---- Of optimizers that run in the trainer's process (tensor_engine_foreign.cc) ----
  // They have numbers, in the order in which a program attaches them.
  //
  // What the job has of one; null where it does not know of it.
  const ForeignState* foreign(size_t number) const;
  // Its storages, as bytes (uint8), which are the caller's from now on. Opens the store where that
  // has some of them.
  std::vector<at::Tensor> TakeForeignStorages(size_t number);
  // The job knows of it from now on. Where nobody sees its steps (`commits_itself` is false), a
  // step of the job with weights that were written, and without KeepForeign(), loses what it keeps.
  void AddForeign(size_t number, const std::string& optimizer, bool commits_itself = true);
  // Before that: the sizes of what it is going to keep, as far as can be known.
  void ExpectForeign(std::span<const uint64_t> storages_bytes);
  // What one keeps: `described` in the form of the trainer's language, and the memory of its
  // tensors as bytes (uint8). The next step commits it, with the bytes as they are then. Otherwise
  // it says why it cannot: the caller leaves it.
  // `is_first_ranks`: of several ranks, only the first one's bytes are those to keep.
  absl::Status KeepForeign(size_t number, std::string described,
                           std::span<const at::Tensor> storages, bool is_first_ranks = false);
  // Behind a step: its bytes need not be in memory any more.
  void ForgetForeignBytes(size_t number);
  // The next step commits that it is not kept, and why.
  void LeaveForeign(size_t number, const std::string& reason);
  // Between steps: makes the room that one of them was refused because too much would have been in
  // memory then. False where it still would be.
  bool MakeRoomForForeign();

  // Of this process, beside `ram`.
  const std::shared_ptr<ProcessMemory>& process_memory() const { return process_memory_; }
  // Whether so much may be held there: it is little, or can be paged.
  bool MayHold(uint64_t size_bytes) const;

  at::Tensor Gather(const at::Tensor& parameter, const std::string& plane);
  // As StateKeeper: what an optimizer keeps of parameters of the job, as of the last step. With
  // several ranks all of them call with the same, and the first one's counts.
  void BeginWith(std::vector<KeptState> states);
  void ReplaceState(std::span<const KeptState> states);
  KeptState GatherState(const at::Tensor& parameter);
  void SetInitialWeights(std::string path, LoadOptions options);
  void LoadWeights(const std::string& path, const LoadOptions& options);
  // `left_out`: names of tensors that are not in the files.
  void SaveWeights(const std::string& folder, const SaveOptions& options,
                   std::span<const std::string> left_out = {});
  Statistics statistics() const;
  PlanSummary plan();

  // Whether the weights are ordinary tensors in memory when the engine is closed.
  bool leaves_weights() const { return options_.weights_at_close == "memory"; }

  // Whether it was attached.
  bool Has(const at::Tensor& parameter) const {
    return ids_.contains(parameter.unsafeGetTensorImpl());
  }
  // Whether it was attached, and is not trained by the job.
  bool IsFrozen(const at::Tensor& parameter) const {
    const auto known = ids_.find(parameter.unsafeGetTensorImpl());
    return known != ids_.end() && !declared_[known->second].trainable;
  }
  // Successions (zero3/trainer_state.h) are counted from now on, where the job is new. Returns how
  // many it has had.
  uint64_t CountSuccessions();
  // An object of torch::optim takes the place of one that was destroyed. True when the job has not
  // seen as many before: none of its steps is that object's.
  bool Succeed();
  // Whether the parameters of a job that exists have all been attached.
  bool HasAllOfStore() const;
  // Whether there is anything to gather; does not make the store.
  bool keeps_state() const;
  // How often the job has updated a parameter; never, where it does not have it (yet).
  uint64_t update_count(const at::Tensor& parameter) const;

  const kernels::OptimizerSpec& optimizer() const { return optimizer_; }  // the job's
  const std::shared_ptr<Attachment>& attachment() const { return attachment_; }

 private:
  // A tensor of the job.
  struct Parameter {
    std::string name;
    at::Tensor tensor;                // the first
    std::vector<at::Tensor> aliases;  // others over the same storage
    bool trainable = false;
  };

  // What of the list the job does not have, as it would be declared.
  std::vector<Parameter> FindNew(std::span<const NamedTensor> tensors) const;
  // A declared one, which a module has no more under its name.
  bool HasNameOfAnother(const std::vector<Parameter>& parameters) const;
  kernels::OptimizerSpec WithAverage(kernels::OptimizerSpec optimizer) const {
    optimizer.SetAveraging(averaging_);
    return optimizer;
  }
  // OFD-1604 where the job keeps an average that would not move with the updates of `what`.
  void CheckAverages(const std::string& what) const;
  void CheckCounts(std::span<const KeptState> states) const;
  // False where "average" is the weight: of what is frozen, and before the first update.
  bool HasAverage(uint32_t id) const;
  // With the large ones of `buffers` behind the parameters.
  PlanInput DescribeJob(const std::vector<Parameter>& more, const kernels::OptimizerSpec& optimizer,
                        const Buffers& buffers) const;
  void CheckRam(const std::vector<Parameter>& more, const kernels::OptimizerSpec& optimizer,
                std::span<const NamedTensor> buffers) const;
  void PlanForDevice(const Parameter& parameter, const PlanInput& input,
                     const kernels::OptimizerSpec& optimizer);
  void CheckFree(const NamedTensor& named) const;
  // The weight over a tensor's storage when it is one of the job's.
  WeightResidency* Own(const at::Tensor& tensor) const;
  void Adopt(Parameter parameter, bool takes_now);
  c10::Storage MoveToDevice(Parameter& parameter, bool takes_now);
  void Mark(at::Tensor tensor, uint32_t id);
  void NameForFiles(std::span<const NamedTensor> tensors);
  void MarkAliases(std::span<const NamedTensor> tensors);
  void MakeStore();
  // Makes the parameters trainable tensors of the job that require gradients now.
  void TakeThawed();
  void Declare(const client::OtherTensors* others);
  void BeginCounts();
  void StartWeights(WeightFile* initial);
  // `trained` by id, undefined when frozen.
  void WatchGradients(std::span<const at::Tensor> trained);
  // Those with a gradient that the job does not train yet.
  std::vector<at::Tensor> FindThawed(std::span<const GroupUpdate> updates) const;
  // The store gets room for what the optimizer keeps of them. Throws, and has changed nothing, when
  // `ram` does not do; what the daemon refuses ends the session.
  void Thaw(std::span<const at::Tensor> parameters);
  // Alone, and no backward of another thread adds to a gradient: while a store is laid out anew.
  struct LayoutPass {
    explicit LayoutPass(const TensorEngine& engine) : locks(engine.Accumulations()) {}

    const AccumulationLocks locks;
    const OperatorGate::Pass alone{OperatorGate::Passage::kAloneForLong};
  };
  std::vector<std::shared_ptr<torch::autograd::Node>> Accumulations() const;
  // `work` lays the store out anew and watches gradients again. What it throws ends the session.
  void LayOutAnew(const std::function<void()>& work);
  void Reopen(const client::OtherTensors* others);
  void CheckLeavable(const std::string& what, const std::string& way_out) const;
  // The store gets room for `parameters`, and for `buffers` that are new.
  void AddLater(std::vector<Parameter> parameters, std::span<const NamedTensor> tensors,
                std::span<const NamedTensor> buffers, bool are_all);
  void CheckGrows(const Parameter& first) const;
  std::vector<proto::Tensor> NamedAnew(std::span<const NamedTensor> tensors,
                                       const std::vector<Parameter>& added, bool are_all) const;
  struct BeforeGrowth;
  BeforeGrowth TakeBeforeGrowth();
  // For what is declared now and was not before. `trained` by id, undefined when frozen.
  void LayOutMore(const BeforeGrowth& before, std::span<const at::Tensor> trained);
  client::OtherTensors MoreTensors(const std::vector<proto::Tensor>& before, const Buffers& kept);
  void PutNew(uint32_t first);
  void NameLaterForFiles(std::span<const NamedTensor> tensors, uint32_t first,
                         const Buffers& buffers);
  // What the store is called to have: of this run, parameters first.
  std::vector<std::string> NamesInStore(const Buffers& buffers) const;
  std::unordered_map<std::string_view, uint32_t> IdsByName() const;
  std::unordered_map<std::string_view, uint32_t> IdsInFiles() const;
  // Of a job that was laid out for other tensors, what the model calls so.
  const LaidOutTensor* FindLaidOut(std::string_view name) const;
  bool WasTrained(const std::string& name, size_t id) const;
  bool IsNewInStore(uint32_t id) const;
  void SortAsLaidOut(std::vector<Parameter>& parameters) const;
  bool HasBuffersInStore() const;
  size_t StoredBuffers() const;
  std::string Encoded(const struct TrainerState& state) const;
  void DivideBuffers();
  // With what the store is laid out anew for the model's tensors; nothing when it has these.
  std::optional<client::OtherTensors> MatchLayout(const std::vector<LaidOutTensor>& in_store);
  bool IsOfBefore() const;
  void CheckNamesOfLastStep() const;
  void SettleLayout();
  void CheckThaws() const;
  std::vector<at::Tensor> LeaveGradients();
  void LoadInitial(uint32_t id);
  std::vector<at::Tensor> FrozenWithState(std::span<const KeptState> states) const;
  // All that is kept, where some of it was replaced since the last step: no epoch has it.
  std::vector<KeptState> GatherUnsettled();
  // What was written into a weight since the last step.
  struct Edit {
    uint32_t id;
    proto::Plane plane;
    at::Tensor values;  // as bytes
  };
  // All of it, to be put again where the store is laid out anew with the last epoch. Nothing where
  // that is too much: KeepEdits() makes it part of the epoch.
  std::optional<std::vector<Edit>> GatherEdits();
  uint64_t EditBytes() const;
  proto::Plane PlaneOfEdits(uint32_t id) const;
  uint64_t SpilledGradientBytes() const;
  void KeepEdits();
  void PutEdits(const std::vector<Edit>& edits);
  struct BeforeGrowth {
    std::vector<KeptState> unsettled;
    std::optional<std::vector<Edit>> edits;
    std::vector<proto::Tensor> declared;
    Buffers buffers;
  };
  // The slots that a job that exists has.
  void TakeSlots();
  at::Tensor ReadPieces(std::span<const ForeignState::Piece> pieces);
  bool MayLayOutNow() const { return MayHold(std::max(SpilledGradientBytes(), EditBytes())); }
  // Why they cannot be, or cannot be yet.
  absl::Status AddSlots(const std::vector<uint64_t>& sizes_bytes);
  absl::Status MakeRoom(std::vector<uint64_t> sizes_bytes);
  static uint64_t PieceBytesMax(std::span<const proto::Tensor> tensors);
  absl::Status PlaceForeign(size_t number, std::span<const at::Tensor> storages,
                            ForeignState& state);
  // Of optimizers that have not stepped yet. Their room is part of the least `ram` that the plan
  // says, so that a job that begins with it is one that can be resumed.
  std::vector<uint64_t> ExpectedSlots(std::span<const proto::Tensor> tensors) const;
  void RaiseFloor(Plan& plan) const;
  void AddExpectedSlots();
  // Of what one of them keeps, bytes in all that go with the trainer's state.
  uint64_t SmallForeignBytes() const {
    return SmallBuffersBytes() / std::max<size_t>(state_.foreign.size(), 1);
  }
  void AgreeOnForeign();
  uint32_t DigestOf(size_t number);  // of what goes into slots, and which
  bool FitsWith(std::span<const uint64_t> slots) const;
  std::vector<uint64_t> GiveSlots(size_t number, std::span<const at::Tensor> parts,
                                  ForeignState& state);
  void SetForeign(size_t number, ForeignState state);
  void LeaveUnseenForeign();
  std::unordered_set<uint32_t> SlotsOfOthers(size_t number) const;
  void PutInitialStates();
  void CheckStates(std::span<const KeptState> states) const;
  void PutStates(std::span<const KeptState> states);
  absl::Status PutState(uint32_t id, const KeptState& state);
  absl::Status PutValues(uint32_t id, proto::Plane plane, const at::Tensor& values);
  void CountAs(std::span<const KeptState> states);
  // The number at the daemon of the n-th large buffer.
  uint32_t IdOfLarge(size_t n) const { return static_cast<uint32_t>(declared_.size() + n); }
  uint64_t SmallBuffersBytes() const { return Buffers::kSmallBytesMax / attachment_->world_size(); }
  struct ChangedBuffer {
    size_t number = 0;  // among large ones
    uint32_t crc = 0;
    at::Tensor in_order;  // its bytes; undefined for zeros
  };
  void PutLarge(std::span<const ChangedBuffer> changed);
  void StoreLargeBuffers(bool new_ones_only = false);
  void SayAtEnd(const char* what, const std::string& error);
  void NoteDurable();
  void EndRawAtClose();
  void SettleAtClose();
  c10::DataPtr WeightAtClose(const WeightResidency& weight);
  void RestoreLargeBuffers();
  void LoadFrom(WeightFile& file);
  absl::Status LoadRows(uint32_t id, const FileWeight& weight, WeightFile& file);
  absl::Status LoadReordered(uint32_t id, const FileWeight& weight, WeightFile& file);
  absl::Status SaveRows(uint32_t id, proto::Plane plane, const FileWeight& weight,
                        HfCheckpointWriter& writer);
  absl::Status SaveReordered(uint32_t id, proto::Plane plane, const FileWeight& weight,
                             HfCheckpointWriter& writer);
  void FollowBufferSizes();
  void LoadAlone(const std::string& path, const LoadOptions& options);
  // What opens before anything of a new job is made; nothing when it takes the tensors' values.
  std::optional<WeightFile> OpenInitialWeights();
  void RequireAttached() const;
  void TakeStep(std::span<const GroupUpdate> updates, GroupsNow groups_now);
  // Memory that set_data() gave parameters, before what the daemon does and after it.
  void SettleGiven(bool writes) const;
  void RefreshGiven() const;
  // OFD-1604 inside of a backward pass, with several ranks.
  void CheckIsNotInBackward() const;
  // OFD-1406 after a load that has failed midway.
  void CheckWhole() const;

  void DropFromDevice();
  // The attachment's, after what was written through pointers.
  absl::Status StreamOut(uint32_t id, proto::Plane plane, uint64_t element_bytes,
                         Attachment::Drain drain);
  absl::Status CopyOut(uint32_t id, proto::Plane plane, uint64_t element_bytes, std::byte* target);
  bool EndsRound(std::span<const GroupUpdate> updates);
  // Null where nothing is updated on a device.
  DeviceTier* Tier() const;
  void CheckStep(const client::StepCommand& command,
                 std::span<const client::TensorUpdate> there) const;
  bool UpdateThere(const client::StepCommand& command,
                   std::span<const client::TensorUpdate> updates);
  // Before the job's last step is to be durable.
  void SettleTier();
  // The master of a weight that is about to be updated is what it would be in memory.
  void FollowEdits(uint32_t id);
  void CheckGradientsOfWeights(std::span<const GroupUpdate> updates) const;
  // A sparse gradient that is added in this process (sparse_update.h).
  struct SparseUpdate {
    at::Tensor parameter;
    kernels::OptimizerSpec optimizer;
  };
  bool AddsSparsely(const kernels::OptimizerSpec& optimizer, const at::Tensor& parameter) const;
  // Returns by how much the parameter's count of updates grows.
  int Add(const SparseUpdate& update);
  static void CheckDoubleRoots(const kernels::OptimizerSpec& optimizer, std::string_view name);
  static void CheckDoubleRoots(const kernels::OptimizerSpec& optimizer,
                               const std::vector<Parameter>& parameters);
  void SayRoots(const kernels::OptimizerSpec& optimizer);
  uint32_t IdOf(const at::Tensor& parameter) const;
  Gradient* GradientOf(const at::Tensor& parameter) const;
  Gradient* MakeGradient(uint32_t id, const at::Tensor& parameter);
  std::shared_ptr<StepAnnouncement> MakeAnnouncement() const;
  // Whether the step has to do with a parameter's gradient, defined here or only in other ranks.
  bool MayHaveGradient(const at::Tensor& parameter) const;

  const Options options_;
  const uint64_t ram_bytes_;
  const bool exists_;                         // the job, when it was opened
  const std::vector<bool> stored_trainable_;  // of a job that exists, by id
  const ZeroPolicy policy_;
  const uint32_t good_pipeline_blocks_;
  const double write_cost_;
  const std::shared_ptr<Attachment> attachment_;
  std::shared_ptr<EndOfJob> end_;
  const std::shared_ptr<ProcessMemory> process_memory_;
  std::recursive_mutex turns_;
  uint64_t step_;
  struct TrainerState state_;
  struct TrainerState epoch_state_;  // of the last epoch: what was set since is the next one's
  size_t loss_scales_ = 0;           // of this run
  uint64_t successions_ = 0;         // of this run
  const Averaging averaging_;
  kernels::OptimizerSpec optimizer_;
  bool roots_are_said_ = false;
  std::unordered_set<size_t> unseen_foreign_;      // those whose steps nobody sees
  std::unordered_set<size_t> committing_foreign_;  // with the next step
  std::unordered_set<size_t> first_ranks_foreign_, differing_foreign_;
  std::vector<uint64_t> missing_slots_;      // their sizes, in bytes
  std::vector<uint64_t> expected_storages_;  // ExpectForeign()
  absl::Status no_slots_;                    // why the job cannot have more of them
  bool half_loaded_ = false;
  bool has_unsettled_states_ = false;      // replaced since the last step
  std::vector<KeptState> initial_states_;  // until the store of a new job is made
  std::string initial_weights_;
  LoadOptions initial_options_;
  std::vector<proto::Tensor> declared_;  // by id
  // While the store is opened, of a job that was laid out anew: names there, by the model's.
  std::unordered_map<std::string, std::string> stored_names_;
  Buffers buffers_;
  struct {
    bool sealed = false;
    std::vector<NamedTensor> names;                               // of all tensors
    std::vector<at::Tensor> tensors;                              // by id
    std::unordered_map<uint32_t, std::vector<at::Tensor>> moved;  // those that were of the host
    std::vector<std::pair<at::Tensor, at::Tensor>> others_moved;  // and what they were
  } attached_;                                                    // empty after the seal
  std::unordered_map<const c10::TensorImpl*, uint32_t> ids_;      // of every attached tensor
  Statistics before_;  // of sessions that a thaw has ended
  std::exception_ptr store_failure_;
  std::vector<FileWeight> file_weights_;                // of the job, without tensors
  std::unordered_map<std::string, uint32_t> file_ids_;  // of those that were named later
  std::shared_ptr<GradientWindow> gradient_window_;
  const void* round_ends_with_ = nullptr;  // the first tensor of an optimizer
  int steps_of_round_ = 0;
  std::shared_ptr<GradientSums> sums_;              // where the daemon adds those of several ranks
  std::shared_ptr<StepAnnouncement> announcement_;  // where updates may begin in a backward
  std::vector<WeightResidency*> weights_;           // by id; one reference each
  std::vector<Gradient*> gradients_;                // by id, null when frozen; one reference each
  DevicePlan device_plan_;
};

// Whether what one keeps of a tensor is what the other does.
bool KeepTheSame(const kernels::OptimizerSpec& a, const kernels::OptimizerSpec& b);

// The error of a call that needs an attached module.
absl::Status NotAttached();

// Whether the ranks' gradients are reduced by the trainer. OFD-1002 for a word that is none.
bool ReducesGradients(const Options& options);

}  // namespace offload::zero3
