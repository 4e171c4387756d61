#include "zero3/torch/tensor_engine.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cfenv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <span>
#include <unordered_set>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/string_view.h"
#include "kernels/update.h"
#include "proto/shm_abi.h"
#include "zero3/dimension_order.h"
#include "zero3/torch/device_gradient.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/device_move.h"
#include "zero3/torch/device_tier.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/log.h"
#include "zero3/torch/named_optimizer.h"
#include "zero3/torch/operator_gate.h"
#include "zero3/torch/options_check.h"
#include "zero3/torch/parameter_text.h"
#include "zero3/torch/process_memory.h"
#include "zero3/torch/raw_access.h"
#include "zero3/torch/sparse_update.h"
#include "zero3/torch/square_roots.h"
#include "zero3/torch/supported_model.h"
#include "zero3/torch/throw_status.h"
#include "zero3/torch/torch_instructions.h"
#include "zero3/torch/update_counts.h"

namespace offload::zero3 {
namespace {

// Throws OFD-1604 where this thread takes the smallest numbers for 0
// (at::Context::setFlushDenormal), or rounds otherwise than to the nearest (fesetround): an update
// in it has other bits than the daemon's.
void CheckArithmetic() {
  if (std::fegetround() != FE_TONEAREST) {
    ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer,
                          "this thread does not round to the nearest (fesetround), and an update "
                          "in it has other bits than in the daemon",
                          "Call fesetround(FE_TONEAREST) before the step"));
  }
  volatile double smallest = std::numeric_limits<double>::denorm_min();
  if (smallest * 1.0 != 0.0) return;
  ThrowStatus(
      MakeError(ErrorId::kUnsupportedOptimizer,
                "this thread takes denormal numbers for 0 (setFlushDenormal), with which an "
                "update in it has other bits than in the daemon",
                "Call at::globalContext().setFlushDenormal(false) before the step"));
}

}  // namespace

bool ReducesGradients(const Options& options) {
  if (options.gradients == "added") return false;
  if (options.gradients == "reduced_by_trainer") return true;
  ThrowStatus(MakeError(ErrorId::kBadValue, absl::StrCat("gradients is '", options.gradients, "'"),
                        "Set it to added or reduced_by_trainer"));
}

// An eighth of `ram`, and 64 MiB at least: what is more is paged to the first drive.
static std::shared_ptr<ProcessMemory> MakeProcessMemory(const Options& options,
                                                        uint64_t ram_bytes) {
  uint64_t bytes_max = std::max<uint64_t>(ram_bytes / 8, 64 << 20);
  if (const char* const size = std::getenv("OFFLOADD_BESIDE_RAM"))
    bytes_max = ParseByteSize(size).value_or(bytes_max);
  return ProcessMemory::Make(options.nvme_path.substr(0, options.nvme_path.find(',')), bytes_max);
}

TensorEngine::TensorEngine(const Options& options, uint64_t ram_bytes,
                           std::unique_ptr<client::Session> session, client::JobInfo job)
    : options_(options),
      ram_bytes_(ram_bytes),
      exists_(job.exists),
      stored_trainable_(std::move(job.trainable)),
      policy_(PolicyOf(options)),
      good_pipeline_blocks_(std::max(job.pipeline_blocks, PlanInput().good_pipeline_blocks)),
      write_cost_(job.write_cost),
      attachment_(std::make_shared<Attachment>(std::move(session))),
      process_memory_(MakeProcessMemory(options, ram_bytes)),
      step_(job.step),
      state_(ValueOrThrow(DecodeTrainerState(job.trainer_state))),
      averaging_(AveragingOf(options)),
      device_plan_(options.gpu_ram, options.device) {
  // How often tensors were updated is the same in all ranks, what the trainer keeps is not.
  if (!job.trainer_state_is_own) state_.trainer.clear();
  epoch_state_ = state_;
  attachment_->SetServesRaw(ServesRaw(options));
  attachment_->SetSealing([this] { MakeStore(); });
}

// What no step has taken goes with the weights, so that one in memory can.
static void LeaveAtClose(Gradient& gradient) {
  try {
    gradient.LeaveInMemory();
  } catch (const std::exception& error) {
    Log().error("a gradient is lost with the job: {}", error.what());
    gradient.Close();
  }
}

TensorEngine::~TensorEngine() {
  attachment_->SetSealing(nullptr);
  try {
    const bool leaves_gradients = leaves_weights() && attached_.sealed && sums_ == nullptr &&
                                  attachment_->device() == nullptr;
    if (sums_ != nullptr) sums_->Close();
    EndRawAtClose();
    SettleAtClose();
    for (Gradient* gradient : gradients_) {
      if (gradient == nullptr) continue;
      leaves_gradients ? LeaveAtClose(*gradient) : gradient->Close();
      gradient->Unreference();
    }
    for (uint32_t id = 0; id < weights_.size(); ++id) {
      const c10::Storage values = weights_[id]->TakeValues();
      weights_[id]->Close(WeightAtClose(*weights_[id]));
      // There was no store: it is what it was.
      if (values) MoveBack(attached_.moved.at(id), values);
      weights_[id]->Unreference();
    }
    for (auto& [tensor, before] : attached_.others_moved) tensor.set_data(before);
    NoteDurable();
    attachment_->Close();
  } catch (const std::exception& error) {
    SayAtEnd("closing the job", error.what());
  }
}

// The first is the cause of what follows it.
void TensorEngine::SayAtEnd(const char* what, const std::string& error) {
  if (end_ == nullptr) return Log().error("{}: {}", what, error);
  if (!end_->failure.empty()) return;
  end_->failure = error;
  NoteDurable();
}

// As long as there is a session.
void TensorEngine::NoteDurable() {
  try {
    if (end_ != nullptr) end_->durable_step = statistics().durable_step;
  } catch (const std::exception&) {
  }
}

// What was written through pointers since the last step goes the way of all that was.
void TensorEngine::EndRawAtClose() {
  try {
    attachment_->EndRaw();
  } catch (const std::exception& error) {
    SayAtEnd("closing the job", error.what());
  }
}

// What only the device has is lost otherwise, with all steps since the last checkpoint.
void TensorEngine::SettleAtClose() {
  try {
    SettleTier();
  } catch (const std::exception& error) {
    SayAtEnd("the job ends at its last checkpoint", error.what());
  }
}

static c10::DataPtr OnDevice(const c10::DataPtr& host, size_t size_bytes, c10::Device device) {
  at::Tensor tensor = AllocateBytes(size_bytes, device);
  CopyToDevice(static_cast<std::byte*>(tensor.mutable_data_ptr()),
               static_cast<const std::byte*>(host.get()), size_bytes, device);
  return TakeBytes(std::move(tensor));
}

// The bytes that a parameter keeps, none when it keeps none.
c10::DataPtr TensorEngine::WeightAtClose(const WeightResidency& weight) {
  if (!leaves_weights() || !attached_.sealed) return {};
  const uint64_t element_bytes = proto::DtypeBytes(attachment_->tensor(weight.tensor()).dtype);
  c10::DataPtr bytes = c10::GetCPUAllocator()->allocate(weight.size_bytes());
  try {
    ThrowIfError(attachment_->CopyOut(weight.tensor(), proto::Plane::kWeight, element_bytes,
                                      static_cast<std::byte*>(bytes.get())));
    if (const DeviceMemory* const device = attachment_->device())
      bytes = OnDevice(bytes, weight.size_bytes(), device->device());
  } catch (const std::exception& error) {
    Log().error("parameter '{}' has no weights any more: {}", weight.name(), error.what());
    return {};
  }
  return bytes;
}

// ---- The step ----------------------------------------------------------------------------------

Gradient* TensorEngine::GradientOf(const at::Tensor& parameter) const {
  const auto known = ids_.find(parameter.unsafeGetTensorImpl());
  if (known == ids_.end())
    ThrowStatus(MakeError(
        ErrorId::kUnsupportedModel,
        absl::StrCat("a parameter of shape [", absl::StrJoin(parameter.sizes(), ", "),
                     "] was not in the module when it was attached"),
        "Attach the module when it is complete, or register what comes later in an attached module "
        "that a shared_ptr holds before it is trained"));
  const uint32_t id = known->second;
  if (Residency::Of(parameter) != weights_[id]) {
    ThrowUnsupported(
        weights_[id]->name(),
        "has another storage than when it was attached (its storage was resized, or "
        "replaced by other means than set_data() and set_() with its shape and type)",
        "Give it values with copy_() under NoGradGuard, or with set_data(); its memory "
        "need not be freed by resizing, it is offloaded");
  }
  if (!std::ranges::equal(parameter.sizes(), declared_[id].shape) ||
      OrderOf(parameter.sizes(), parameter.strides()) != declared_[id].dimension_order) {
    ThrowUnsupported(weights_[id]->name(),
                     "has another shape or order of dimensions than when it was "
                     "attached (t_(), transpose_(), squeeze_())",
                     "Use a view of it in forward, parameter.t(), or lay the module out before "
                     "attaching it");
  }
  if (gradients_[id] == nullptr)
    ThrowStatus(MakeError(
        ErrorId::kUnsupportedModel,
        absl::StrCat("parameter ", Quoted(weights_[id]->name()),
                     " was frozen when it was attached, and has a gradient now"),
        "With several ranks, call requires_grad_(true) in all of them before attaching: start the "
        "program again, the job goes on with it. Or make the job with options.may_thaw"));
  return gradients_[id];
}

bool TensorEngine::MayHaveGradient(const at::Tensor& parameter) const {
  if (parameter.numel() == 0) return false;
  if (parameter.grad().defined()) return true;
  const auto known = ids_.find(parameter.unsafeGetTensorImpl());
  return sums_ != nullptr && known != ids_.end() && gradients_[known->second] != nullptr;
}

void TensorEngine::SettleGiven(bool writes) const {
  for (WeightResidency* const weight : weights_) weight->SettleGiven(writes);
}

void TensorEngine::RefreshGiven() const {
  for (WeightResidency* const weight : weights_) weight->RefreshGiven();
}

// A rank's own gradients are not those of the step before all ranks have added theirs.
void TensorEngine::CheckIsNotInBackward() const {
  if (attachment_->world_size() == 1 || torch::autograd::get_current_graph_task_id() == -1) return;
  ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer,
                        "a step inside of a backward pass (in a hook), with several ranks",
                        "Step when backward() has returned, or train with one rank"));
}

void TensorEngine::Step(std::span<const GroupUpdate> updates, GroupsNow groups_now) {
  const Turn turn = TakeTurn();
  TakeStep(updates, std::move(groups_now));
  RefreshGiven();
}

void TensorEngine::TakeStep(std::span<const GroupUpdate> updates, GroupsNow groups_now) {
  CheckIsNotInBackward();
  Seal();
  CheckWhole();
  if (const DeviceTier* const tier = Tier()) tier->CheckWhole();
  CheckArithmetic();
  // A step of nothing commits what was computed in this process.
  const bool updates_any = std::ranges::any_of(
      updates, [](const GroupUpdate& update) { return !update.tensors.empty(); });
  if (updates_any && attachment_->device() == nullptr) CheckInstructions();
  SettleGiven(/*writes=*/true);
  CheckGradientsOfWeights(updates);
  StayInFront();
  {
    const OperatorGate::Pass alone(OperatorGate::Passage::kAlone);
    attachment_->EndRaw();
  }
  LeaveUnseenForeign();
  AgreeOnForeign();
  if (const std::vector<at::Tensor> thawed = FindThawed(updates); !thawed.empty()) Thaw(thawed);
  client::StepCommand command;
  command.step = step_ + 1;
  std::vector<uint32_t> stepped, there;
  DeviceTier* const tier = Tier();
  std::vector<client::TensorUpdate> updates_there;
  std::vector<SparseUpdate> sparse;
  struct TrainerState next = state_;
  for (uint32_t group = 0; group < updates.size(); ++group) {
    command.groups.push_back(WithAverage(updates[group].group));
    for (const at::Tensor& parameter : updates[group].tensors) {
      if (!MayHaveGradient(parameter)) continue;
      Gradient* const gradient = GradientOf(parameter);
      // It was frozen until now.
      if (!gradient->is_watched() && parameter.requires_grad()) gradient->Watch();
      if (AddsSparsely(updates[group].group, parameter)) {
        CheckAverages(
            absl::StrCat("a sparse gradient of ", Quoted(declared_[IdOf(parameter)].name)));
        sparse.push_back({parameter, updates[group].group});
        continue;
      }
      if (!gradient->PrepareStep()) continue;
      // Torch's optimizer asks here how many threads there are, if nobody has on this thread:
      // products after that are computed with another number than before (HasFreeCore).
      if (parameter.numel() >= at::internal::GRAIN_SIZE) at::get_num_threads();
      const uint32_t id = ids_.at(parameter.unsafeGetTensorImpl());
      FollowEdits(id);
      if (parameter.scalar_type() == at::kDouble)
        CheckDoubleRoots(updates[group].group, declared_[id].name);
      const bool is_there = tier != nullptr && tier->Has(id);
      (is_there ? there : stepped).push_back(id);
      std::vector<client::TensorUpdate>& list = is_there ? updates_there : command.updates;
      list.push_back({id, group, next.update_counts[id] + 1});
      if (IsCounted(command.groups[group])) ++next.update_counts[id];
      gradient->Describe(list.back());
    }
  }
  next.buffers = buffers_.EncodeSmall();
  for (LaidOutTensor& tensor : next.layout) tensor = {.name = tensor.name};
  command.has_trainer_state = true;
  command.trainer_state = Encoded(next);
  for (const uint32_t id : stepped) gradients_[id]->FinishWriting();
  StoreLargeBuffers();
  for (const SparseUpdate& update : sparse)
    next.update_counts[IdOf(update.parameter)] += Add(update);
  if (!sparse.empty()) command.trainer_state = Encoded(next);
  const OperatorGate::Pass alone(OperatorGate::Passage::kAlone);
  attachment_->EndRaw();  // of pointers that were used since it began
  for (const client::Group& group : command.groups) SayRoots(group);
  const absl::Cleanup fails = [&] {
    if (tier != nullptr) tier->StepFailed(command.step);
  };
  if (tier != nullptr) {
    CheckStep(command, updates_there);
    command.is_partial = UpdateThere(command, updates_there);
  }

  if (sums_ != nullptr) command.passes = sums_->stream().passes();
  std::vector<uint32_t> ahead;
  const bool ends_round = EndsRound(updates);
  if (ends_round) ahead = attachment_->EndScheduleStep();
  {
    const DaemonWait wait(*attachment_);
    ThrowIfError(attachment_->session().Step(command));
  }
  if (tier != nullptr) tier->Stepped(command.is_partial);
  if (sums_ != nullptr) ThrowIfError(sums_->stream().Stepped());
  attachment_->EndEpoch();
  state_ = std::move(next);
  epoch_state_ = state_;
  has_unsettled_states_ = false;
  ++step_;
  // The parameters' versions stay, for classes that write through data(): a graph from before the
  // step goes on with the new weights. Who steps as one that does not says so (CountAsWrites).
  for (const uint32_t id : stepped) {
    gradients_[id]->BeginUpdate();
    weights_[id]->Stepped();
  }
  for (const uint32_t id : there) weights_[id]->Stepped();
  if (DeviceMemory* const device = attachment_->device())
    ends_round ? device->EndRound(stepped) : device->Changed(stepped);
  if (announcement_ != nullptr) announcement_->Stepped(command, std::move(groups_now));
  attachment_->Prefetch(ahead);
}

DeviceTier* TensorEngine::Tier() const {
  DeviceMemory* const device = attachment_->device();
  return device != nullptr ? device->tier() : nullptr;
}

// The daemon would say so when the device has updated.
void TensorEngine::CheckStep(const client::StepCommand& command,
                             std::span<const client::TensorUpdate> there) const {
  const auto unsupported = [](const auto&... text) {
    ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer, absl::StrCat(text...)));
  };
  for (const client::Group& group : command.groups) {
    if (kernels::NeedsNorms(group) != kernels::NeedsNorms(optimizer_))
      unsupported("a step of ", ToAbsl(group.name()), " for a job of ", ToAbsl(optimizer_.name()));
    if (const std::string wrong = group.Violation(); !wrong.empty()) unsupported(wrong);
  }
  const auto check_planes = [&](const client::TensorUpdate& update) {
    const proto::PlaneSet& planes = attachment_->input().catalogue.planes(update.tensor);
    const client::Group& group = command.groups[update.group];
    for (size_t i = 0; i < proto::kStatePlanes.size(); ++i) {
      const kernels::StatePlane* const needed = group.Plane(i);
      if (needed == nullptr || planes.Has(proto::kStatePlanes[i])) continue;
      unsupported(ToAbsl(group.name()), " with these parameters needs ", needed->name, " of ",
                  Quoted(attachment_->tensor(update.tensor).name),
                  ", the job was sealed without it");
    }
  };
  std::ranges::for_each(command.updates, check_planes);
  std::ranges::for_each(there, check_planes);
}

// Those whose planes are on the device. A step that the daemon commits brings them there first;
// true when this one leaves some out.
bool TensorEngine::UpdateThere(const client::StepCommand& command,
                               std::span<const client::TensorUpdate> updates) {
  DeviceTier& tier = *Tier();
  for (const client::TensorUpdate& update : updates) {
    auto& gradient = static_cast<DeviceGradient&>(*gradients_[update.tensor]);
    gradient.GiveToUpdate([&](const at::Tensor& bytes, double scale) {
      tier.Update(update.tensor, command.groups[update.group], update.update_count, bytes, scale);
    });
  }
  if (command.step % attachment_->input().durability.steps == 0) tier.PutAll();
  return tier.has_news();
}

void TensorEngine::SettleTier() {
  if (DeviceTier* const tier = Tier()) tier->Settle();
}

// The step takes all gradients as they are now. torch would take that one as the step has left it.
void TensorEngine::CheckGradientsOfWeights(std::span<const GroupUpdate> updates) const {
  std::unordered_set<const Residency*> stepped;
  for (const GroupUpdate& update : updates) {
    for (const at::Tensor& parameter : update.tensors) {
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined() || parameter.numel() == 0) continue;
      stepped.insert(Residency::Of(parameter));
      const Residency* const of = Residency::Of(gradient);
      if (dynamic_cast<const WeightResidency*>(of) == nullptr || !stepped.contains(of)) continue;
      ThrowStatus(MakeError(
          ErrorId::kUnsupportedModel,
          absl::StrCat("the gradient of a parameter of shape [",
                       absl::StrJoin(parameter.sizes(), ", "), "] is parameter ",
                       Quoted(of->name()),
                       " itself, which the same step changes before it is read or while it is"),
          "Give .grad a copy, weight.detach().clone()"));
    }
  }
}

void TensorEngine::FollowEdits(uint32_t id) {
  const std::optional<std::vector<float>> master = weights_[id]->FollowEdits();
  if (!master.has_value()) return;
  const auto fill = [&](uint64_t begin, uint64_t count, std::byte* target) {
    std::memcpy(target, master->data() + begin, count * sizeof(float));
    return absl::OkStatus();
  };
  absl::Status put;
  if (attachment_->rank() == 0)
    put = attachment_->StreamIn(id, proto::Plane::kMaster, fill, /*digest=*/0);
  put.Update(attachment_->EndPut(id, /*digest=*/0));
  ThrowIfError(put, absl::StrCat("parameter ", Quoted(declared_[id].name)));
}

void TensorEngine::CountAsWrites(std::span<const at::Tensor> tensors) const {
  const bool is_alone = attachment_->world_size() == 1;
  std::vector<c10::TensorImpl*> written;
  for (const at::Tensor& tensor : tensors) {
    if (is_alone && !tensor.grad().defined()) continue;
    c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
    if (!impl->is_inference()) impl->bump_version();
    written.push_back(impl);
  }
  // Parts of one vector share a version: it is looked at when all of them have counted.
  for (const c10::TensorImpl* const impl : written) {
    const auto known = ids_.find(impl);
    if (known != ids_.end()) weights_[known->second]->Stepped();
  }
}

// Where several processes or a device compute, gradients are made dense.
bool TensorEngine::AddsSparsely(const kernels::OptimizerSpec& optimizer,
                                const at::Tensor& parameter) const {
  if (attachment_->world_size() > 1 || attachment_->device() != nullptr) return false;
  const std::string& name = declared_[IdOf(parameter)].name;
  if (!IsSparseUpdate(optimizer, parameter, name)) return false;
  if (at::isfinite(parameter.grad()._values()).all().item<bool>()) return true;
  ThrowStatus(MakeError(ErrorId::kNonFinite,
                        absl::StrCat("the gradient of parameter ", Quoted(name),
                                     " holds NaN or infinity, the step was not taken")));
}

int TensorEngine::Add(const SparseUpdate& update) {
  at::Tensor weight = update.parameter.variable_data();
  KeptState state;
  if (update.optimizer.name() != "sgd") state = GatherState(update.parameter);
  state.parameter = update.parameter;
  AddSparsely(update.optimizer, update.parameter.grad(), weight, state);
  if (update.optimizer.name() == "sgd") return 0;
  PutStates({&state, 1});
  has_unsettled_states_ = true;
  return 1;
}

// Those of fp64 numbers follow no rule that the daemon could take.
void TensorEngine::CheckDoubleRoots(const kernels::OptimizerSpec& optimizer,
                                    std::string_view name) {
  if (!optimizer.TakesLibraryRoots() || TorchDoubleRootsAreNearest()) return;
  ThrowStatus(MakeError(
      ErrorId::kUnsupportedOptimizer,
      absl::StrCat("parameter ", Quoted(std::string(name)), " has dtype Double, and ",
                   std::string(optimizer.name()),
                   " as it is asked for takes the square roots of this libtorch's vector library, "
                   "which are not the nearest and follow no pattern in fp64"),
      "Use SGD, Lion or LAMB, or AdamW and Adam as AdamWFlavour::kFused, whose roots are the "
      "nearest; or attach an optimizer object of torch::optim, which then runs in this process"));
}

void TensorEngine::CheckDoubleRoots(const kernels::OptimizerSpec& optimizer,
                                    const std::vector<Parameter>& parameters) {
  for (const Parameter& parameter : parameters) {
    if (parameter.trainable && parameter.tensor.scalar_type() == at::kDouble)
      CheckDoubleRoots(optimizer, std::string_view(parameter.name));
  }
}

// What torch's operators would take for the roots, the daemon takes.
void TensorEngine::SayRoots(const kernels::OptimizerSpec& optimizer) {
  if (roots_are_said_ || !optimizer.TakesLibraryRoots()) return;
  if (const kernels::SquareRoots& roots = TorchSquareRoots(); !roots.AreNearest())
    ThrowIfError(attachment_->session().SetSquareRoots(roots));
  roots_are_said_ = true;
}

void TensorEngine::CommitStep() {
  RequireAttached();
  const GroupUpdate none{optimizer_, {}};
  Step({&none, 1});
}

// Several optimizers take turns: a round of the schedule ends with the step of one of them, and
// with that of another when this one steps no more.
bool TensorEngine::EndsRound(std::span<const GroupUpdate> updates) {
  constexpr int kStepsOfARoundMax = 64;
  const auto first = std::find_if(updates.begin(), updates.end(), [](const GroupUpdate& update) {
    return !update.tensors.empty();
  });
  const void* const optimizer =
      first == updates.end() ? nullptr : first->tensors.front().unsafeGetTensorImpl();
  if (optimizer != round_ends_with_ && ++steps_of_round_ < kStepsOfARoundMax &&
      round_ends_with_ != nullptr)
    return false;
  round_ends_with_ = optimizer;
  steps_of_round_ = 0;
  return true;
}

// ---- The rest ----------------------------------------------------------------------------------

// Without a model nothing was stepped.
void TensorEngine::WaitDurable() {
  if (declared_.empty()) return;
  Seal();
  attachment_->EndRaw();
  SettleTier();
  const DaemonWait wait(*attachment_);
  ValueOrThrow(attachment_->session().WaitDurable());
}

int64_t TensorEngine::Checkpoint() {
  if (declared_.empty()) return step();
  Seal();
  attachment_->EndRaw();
  SettleTier();
  const DaemonWait wait(*attachment_);
  return static_cast<int64_t>(ValueOrThrow(attachment_->session().Checkpoint()));
}

void TensorEngine::SetTrainerState(std::string blob) {
  struct TrainerState next = state_;
  next.trainer = std::move(blob);
  Encoded(next);  // refuses what is too long here, not at the step
  state_ = std::move(next);
}

size_t TensorEngine::AddLossScale(LossScale* start) {
  const size_t index = loss_scales_++;
  if (index < state_.loss_scales.size()) {
    *start = state_.loss_scales[index];
  } else {
    state_.loss_scales.push_back(*start);
  }
  return index;
}

uint32_t TensorEngine::IdOf(const at::Tensor& parameter) const {
  const auto known = ids_.find(parameter.unsafeGetTensorImpl());
  if (known != ids_.end()) return known->second;
  if (const WeightResidency* const weight = Own(parameter);
      weight != nullptr && weight->IsWhole(parameter))
    return weight->tensor();
  ThrowStatus(MakeError(
      ErrorId::kBadValue,
      parameter.defined()
          ? absl::StrCat("a tensor of shape [", absl::StrJoin(parameter.sizes(), ", "),
                         "] is not an attached parameter")
          : "an undefined tensor is not an attached parameter",
      "Give a parameter of an attached module as the module has it, not a part or a copy of it"));
}

uint64_t TensorEngine::update_count(const at::Tensor& parameter) const {
  if (!Has(parameter) && Own(parameter) == nullptr) return 0;
  const uint32_t id = IdOf(parameter);
  return id < state_.update_counts.size() ? state_.update_counts[id] : 0;
}

at::Tensor TensorEngine::Gather(const at::Tensor& parameter, const std::string& plane) {
  if (parameter.defined() && parameter.numel() == 0)
    return at::empty(parameter.sizes(), plane == "weight"
                                            ? parameter.options().requires_grad(false)
                                            : at::TensorOptions(MasterType(parameter)));
  if (plane == "weight" && parameter.defined() && IsTable(parameter))
    return parameter.detach().clone();
  const uint32_t id = IdOf(parameter);
  weights_[id]->SettleGiven(/*writes=*/false);
  Seal();
  const proto::Tensor& tensor = attachment_->tensor(id);
  const at::ScalarType own = parameter.scalar_type();
  const at::ScalarType master = MasterType(own);
  // An fp32 or fp64 weight is its own master, and so is a frozen one.
  const bool plain_master = own == master || !tensor.trainable;
  if (plane == "average" && averaging_.is_on() && !HasAverage(id))
    return Gather(parameter, "master");
  const proto::PlaneSet& planes = attachment_->input().catalogue.planes(id);
  std::optional<proto::Plane> found = planes.Find(plane);
  if (plane == "master" && plain_master) found = proto::Plane::kWeight;
  if (!found.has_value()) {
    ThrowStatus(
        MakeError(ErrorId::kBadValue,
                  absl::StrCat("parameter ", Quoted(tensor.name), " has no plane ", Quoted(plane)),
                  absl::StrCat("Its planes are ", planes.Names())));
  }
  const at::ScalarType dtype = *found == proto::Plane::kWeight ? own
                               : *found == proto::Plane::kResidual
                                   ? (own == at::kHalf ? at::kInt : at::kShort)
                                   : master;
  if (plane == "master") {
    attachment_->EndRaw();
    if (attachment_->world_size() == 1) {
      FollowEdits(id);
    } else if (weights_[id]->IsItsMaster()) {  // ranks put together, and this one may be alone
      return Gather(parameter, "weight").to(master);
    }
  }
  at::Tensor gathered =
      at::empty_strided(parameter.sizes(), parameter.strides(), at::TensorOptions().dtype(dtype));
  ThrowIfError(CopyOut(id, *found, gathered.element_size(),
                       static_cast<std::byte*>(gathered.mutable_data_ptr())),
               absl::StrCat("parameter ", Quoted(tensor.name)));
  return plane == "master" ? gathered.to(master) : gathered;
}

void TensorEngine::CheckAverages(const std::string& what) const {
  if (averaging_.is_on()) ThrowStatus(AverageStays(averaging_, what));
}

bool TensorEngine::HasAverage(uint32_t id) const {
  return attachment_->input().catalogue.planes(id).Has(proto::Plane::kAverage) &&
         state_.update_counts[id] > 0;
}

absl::Status TensorEngine::CopyOut(uint32_t id, proto::Plane plane, uint64_t element_bytes,
                                   std::byte* target) {
  attachment_->EndRaw();
  return attachment_->CopyOut(id, plane, element_bytes, target);
}

absl::Status TensorEngine::StreamOut(uint32_t id, proto::Plane plane, uint64_t element_bytes,
                                     Attachment::Drain drain) {
  attachment_->EndRaw();
  return attachment_->StreamOut(id, plane, element_bytes, drain);
}

std::vector<std::string> TensorEngine::Exchange(std::string blob) {
  if (attachment_->world_size() == 1) return {std::move(blob)};
  const DaemonWait wait(*attachment_);
  return ValueOrThrow(attachment_->session().Exchange(blob));
}

absl::Status NotAttached() {
  return MakeError(ErrorId::kBadValue, "the engine has no model yet",
                   "Attach it with AdamW() or SGD() first");
}

Statistics TensorEngine::statistics() const {
  const proto::SlabHeader& header = attachment_->session().slab_header();
  Statistics statistics;
  statistics.bytes_read = before_.bytes_read + header.bytes_read.load(std::memory_order_relaxed);
  statistics.bytes_written =
      before_.bytes_written + header.bytes_written.load(std::memory_order_relaxed);
  statistics.resident_bytes = header.resident_bytes.load(std::memory_order_relaxed);
  statistics.peak_bytes =
      std::max(before_.peak_bytes, header.peak_bytes.load(std::memory_order_relaxed));
  statistics.budget_bytes = ram_bytes_;
  statistics.durable_step =
      static_cast<int64_t>(header.durable_step.load(std::memory_order_relaxed));
  statistics.wait_seconds = before_.wait_seconds + attachment_->session().wait_seconds();
  statistics.raw_accesses = attachment_->raw_accesses();
  statistics.gpu_ram_bytes = device_plan_.gpu_ram_bytes();
  if (const DeviceMemory* const device = attachment_->device()) {
    statistics.gpu_peak_bytes = device->bytes_max_ever();
    statistics.gpu_waits = device->host_waits();
  }
  return statistics;
}

PlanSummary TensorEngine::plan() {
  PlanSummary summary;
  if (declared_.empty()) return summary;
  Seal();
  const Plan& plan = attachment_->plan();
  summary.parameters = plan.parameter_count;
  summary.state_bytes = plan.state_bytes;
  summary.gradient_bytes = plan.gradient_bytes;
  summary.store_bytes = plan.store_bytes;
  summary.window_bytes = plan.memory.window_bytes;
  summary.pipeline_bytes = plan.slab.pipeline_block_bytes * plan.memory.pipeline_blocks;
  summary.resident_bytes = plan.resident_weight_bytes + plan.resident_state_bytes;
  summary.region_bytes = plan.memory.region_bytes;
  summary.overhead_bytes = plan.overhead_bytes;
  summary.total_bytes = plan.total_bytes;
  summary.gradients_spilled = plan.gradients_spilled;
  summary.read_bytes_per_parameter = plan.read_bytes_per_parameter;
  summary.write_bytes_per_parameter = plan.write_bytes_per_parameter;
  summary.further_write_bytes_per_parameter = plan.further_write_bytes_per_parameter();
  summary.further_read_bytes_per_parameter =
      plan.bytes_per_further_micro_batch - plan.further_write_bytes_per_parameter();
  summary.floor_bytes = plan.floor_bytes;
  summary.floor_without_spilling_bytes = plan.floor_without_spilling_bytes;
  summary.text = DescribePlan(attachment_->input(), plan);
  if (!device_plan_.is_made()) return summary;
  summary.gpu_window_bytes = device_plan_.plan().window_bytes;
  summary.gpu_gradient_bytes = device_plan_.plan().gradient_bytes;
  summary.text += DescribeGpuPlan(device_plan_.plan(), device_plan_.gpu_ram_bytes(),
                                  device_plan_.why_no_tier());
  if (const DeviceMemory* const device = attachment_->device())
    summary.text += device->DescribeWay() + "\n";
  return summary;
}

}  // namespace offload::zero3
