#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <malloc.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <span>
#include <string_view>
#include <system_error>
#include <thread>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/crc32c.h"
#include "base/durability.h"
#include "base/error.h"
#include "client/own_processors.h"
#include "proto/buffer_tensors.h"
#include "proto/shm_abi.h"
#include "proto/step_words.h"
#include "zero3/dimension_order.h"
#include "zero3/gpu/peer_group.h"
#include "zero3/stored_buffers.h"
#include "zero3/torch/born_residency.h"
#include "zero3/torch/device_gradient.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/device_move.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/log.h"
#include "zero3/torch/parameter_text.h"
#include "zero3/torch/process_memory.h"
#include "zero3/torch/progress.h"
#include "zero3/torch/raw_access.h"
#include "zero3/torch/summed_device_gradient.h"
#include "zero3/torch/summed_gradient.h"
#include "zero3/torch/supported_model.h"
#include "zero3/torch/tensor_engine.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

// As the daemon knows it.
proto::Tensor Described(const std::string& name, const at::Tensor& tensor, bool trainable) {
  return {.name = name,
          .shape = tensor.sizes().vec(),
          .dtype = TrainedDtype(tensor.scalar_type()).value(),
          .trainable = trainable,
          .element_count = static_cast<uint64_t>(tensor.numel()),
          .dimension_order = OrderOf(tensor.sizes(), tensor.strides())};
}

// Of a tensor over the storage of one that is known.
void CheckShared(const NamedTensor& named, const proto::Tensor& first) {
  const proto::Tensor own = Described(named.name, named.tensor, named.tensor.requires_grad());
  if (own.shape != first.shape || own.dtype != first.dtype ||
      own.dimension_order != first.dimension_order) {
    ThrowUnsupported(
        named.name,
        absl::StrCat("shares the memory of parameter ", Quoted(first.name),
                     " with another shape, type or order of dimensions"),
        "Give it memory of its own before attaching the module, "
        "parameter.set_data(parameter.clone()), or make it a view of the other in forward");
  }
  if (own.trainable && first.trainable) {
    ThrowUnsupported(named.name,
                     absl::StrCat("shares the memory of parameter ", Quoted(first.name),
                                  " but has a gradient of its own"),
                     "Register the same tensor under both names");
  }
}

// Those that are trained, the others undefined.
std::vector<at::Tensor> TrainedOf(std::span<const at::Tensor> tensors,
                                  std::span<const proto::Tensor> declared) {
  std::vector<at::Tensor> trained(tensors.begin(), tensors.end());
  for (size_t id = 0; id < trained.size(); ++id) {
    if (!declared[id].trainable) trained[id].reset();
  }
  return trained;
}

// Of all buffers but the `large_count` largest.
uint64_t SmallBytes(const Buffers& buffers, size_t large_count) {
  std::vector<uint64_t> sizes;
  for (const NamedTensor& named : buffers.all()) sizes.push_back(buffers.FirstBytes(named));
  std::sort(sizes.begin(), sizes.end());
  sizes.resize(sizes.size() - std::min(sizes.size(), large_count));
  return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
}

// What the job has of a model's buffers, beside those in the store.
std::unordered_set<std::string> KnownNames(std::string_view stored) {
  std::unordered_set<std::string> names;
  for (const StoredBuffer& buffer : ValueOrThrow(DecodeStoredBuffers(stored)))
    names.insert(buffer.name);
  return names;
}

// Divides the buffers of a job that exists as it has them: `large_count` are in the store. Jobs of
// several ranks were once made without their large ones, and a model may have got some since: where
// they do not fit into a step, those that the job does not know are no part of it.
void DivideAsStored(Buffers& buffers, size_t large_count, const struct TrainerState& state,
                    const Attachment& attachment, const std::string& job) {
  const uint64_t small_bytes = SmallBytes(buffers, large_count);
  struct TrainerState rest = state;
  rest.trainer.clear();
  rest.buffers.clear();
  uint64_t encoded_bytes = ValueOrThrow(EncodeTrainerState(rest)).size() + small_bytes;
  for (const NamedTensor& named : buffers.all())
    encoded_bytes += 64 + named.name.size() + named.tensor.dim() * sizeof(int64_t);
  if (large_count > 0 || encoded_bytes <= StateBytesMax(attachment))
    return buffers.Divide(small_bytes);
  buffers.DivideByNames(KnownNames(state.buffers));
  if (buffers.large().empty()) return;
  Log().warn(
      "job '{}' was made without {} of the model's buffers, among them '{}', which do not fit into "
      "its steps: they begin as the program builds them at every start. A new job that begins with "
      "these weights has them",
      job, buffers.large().size(), buffers.large().front().name);
  buffers.large().clear();
}

}  // namespace

// ---- Attach ------------------------------------------------------------------------------------

void TensorEngine::CheckFree(const NamedTensor& named) const {
  Residency* const residency = Residency::Of(named.tensor);
  if (residency == nullptr) return;
  if (const auto* born = dynamic_cast<const BornResidency*>(residency)) {
    if (born->attachment() != attachment_.get())
      ThrowUnsupported(named.name, "was constructed for another engine",
                       "Attach it to the engine of its InitGuard");
    return;
  }
  auto* const weight = dynamic_cast<WeightResidency*>(residency);
  if (weight == nullptr || !weight->closed()) {
    ThrowUnsupported(
        named.name, "belongs to another engine",
        "Close that one before, opened with weights_at_close = memory, or give each engine "
        "models of its own");
  }
  if (!exists_ && initial_weights_.empty()) {
    ThrowUnsupported(
        named.name,
        "has its values in the job of an engine that is closed, a new job cannot begin "
        "with them",
        "Open the first engine with weights_at_close = memory, or give the new job a model "
        "in memory");
  }
}

// Several of one storage become one.
std::vector<TensorEngine::Parameter> TensorEngine::FindNew(
    std::span<const NamedTensor> tensors) const {
  std::vector<Parameter> parameters;
  std::map<std::pair<const void*, int64_t>, size_t> by_storage;  // and offset: parts have several
  std::unordered_set<const void*> seen;
  CheckSupported(tensors, Memory::kAny, destination());
  for (const NamedTensor& named : tensors) {
    const at::Tensor& tensor = named.tensor;
    if (!tensor.defined() || tensor.numel() == 0 ||
        !seen.insert(tensor.unsafeGetTensorImpl()).second ||
        ids_.contains(tensor.unsafeGetTensorImpl()))
      continue;
    if (const WeightResidency* const weight = Own(tensor)) {
      CheckShared(named, declared_[weight->tensor()]);
      continue;
    }
    CheckFree(named);
    const void* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    const auto [known, is_new] =
        by_storage.try_emplace({storage, tensor.storage_offset()}, parameters.size());
    if (is_new) {
      // What a job has been trained of keeps its state when it is frozen.
      const bool was_trained = WasTrained(named.name, declared_.size() + parameters.size());
      parameters.push_back(
          {named.name, tensor, {}, tensor.requires_grad() || options_.may_thaw || was_trained});
      continue;
    }
    Parameter& first = parameters[known->second];
    CheckShared(named, Described(first.name, first.tensor, first.tensor.requires_grad()));
    // The one with the gradient stands for all.
    first.aliases.push_back(tensor);
    if (tensor.requires_grad()) std::swap(first.tensor, first.aliases.back());
    first.trainable |= tensor.requires_grad();
  }
  SortAsLaidOut(parameters);
  return parameters;
}

bool TensorEngine::HasNameOfAnother(const std::vector<Parameter>& parameters) const {
  std::unordered_set<std::string_view> names;
  for (const proto::Tensor& tensor : declared_) names.insert(tensor.name);
  return std::any_of(parameters.begin(), parameters.end(),
                     [&](const Parameter& parameter) { return names.contains(parameter.name); });
}

WeightResidency* TensorEngine::Own(const at::Tensor& tensor) const {
  auto* const weight = dynamic_cast<WeightResidency*>(Residency::Of(tensor));
  return weight != nullptr && weight->attachment() == attachment_.get() ? weight : nullptr;
}

bool KeepTheSame(const kernels::OptimizerSpec& a, const kernels::OptimizerSpec& b) {
  if (a.index() != b.index()) return false;
  if (a.averaging().is_on() != b.averaging().is_on()) return false;
  for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
    if ((a.Plane(i) == nullptr) != (b.Plane(i) == nullptr)) return false;
  }
  return true;
}

PlanInput TensorEngine::DescribeJob(const std::vector<Parameter>& more,
                                    const kernels::OptimizerSpec& optimizer,
                                    const Buffers& buffers) const {
  std::vector<proto::Tensor> tensors = declared_;
  for (const Parameter& parameter : more) {
    tensors.push_back(Described(parameter.name, parameter.tensor, parameter.trainable));
  }
  for (const Buffers::Large& buffer : buffers.large()) {
    tensors.push_back({.name = proto::BufferTensorName(buffer.name),
                       .shape = {static_cast<int64_t>(buffer.element_count)},
                       .dtype = proto::Dtype::kFloat32,
                       .trainable = false,
                       .element_count = buffer.element_count});
  }
  return {.catalogue = ValueOrThrow(proto::BuildCatalogue(std::move(tensors), optimizer)),
          .ram_bytes = ram_bytes_,
          .always_spill_gradients = options_.spill_gradients,
          .gradients_reduced = attachment_->world_size() > 1 && ReducesGradients(options_),
          .world_size = attachment_->world_size(),
          .durability = ValueOrThrow(ParseDurability(options_.durability)),
          .good_pipeline_blocks = good_pipeline_blocks_,
          .write_cost = write_cost_,
          .policy = policy_};
}

// Said before anything moves. Which buffers of a job that exists are large ones is its own affair.
void TensorEngine::CheckRam(const std::vector<Parameter>& more,
                            const kernels::OptimizerSpec& optimizer,
                            std::span<const NamedTensor> buffers) const {
  Buffers all = buffers_;
  if (!exists_) {
    std::unordered_set<const void*> storages;
    for (const Parameter& parameter : more)
      storages.insert(parameter.tensor.storage().unsafeGetStorageImpl());
    std::vector<NamedTensor> others(buffers.begin(), buffers.end());
    std::erase_if(others, [&](const NamedTensor& named) {
      return named.tensor.defined() && named.tensor.has_storage() &&
             storages.contains(named.tensor.storage().unsafeGetStorageImpl());
    });
    all.Add(others);
    all.Divide(SmallBuffersBytes());
  }
  const PlanInput input = DescribeJob(more, optimizer, all);
  if (MakePlan(input).ok()) return;
  all.AddSlots(ExpectedSlots(input.catalogue.tensors));
  PlanInput with_slots = DescribeJob(more, optimizer, all);
  with_slots.more_may_come = true;
  ThrowIfError(MakePlan(with_slots).status());
}

void TensorEngine::PlanForDevice(const Parameter& parameter, const PlanInput& input,
                                 const kernels::OptimizerSpec& optimizer) {
  const c10::Device device = device_plan_.TrainedOn(parameter.tensor.device());
  if (!device.is_cpu() && input.gradients_reduced) {
    // What communicates on streams of its own would write after the operator was launched.
    ThrowUnsupported(parameter.name,
                     absl::StrCat("is on ", device.str(),
                                  " in a job whose gradients the trainer "
                                  "reduces (gradients = reduced_by_trainer)"),
                     "Let the daemon add them, gradients = added, or move the module to the host");
  }
  device_plan_.Make(
      device, input.catalogue,
      {.optimizer = optimizer, .durability = input.durability, .world_size = input.world_size});
}

bool TensorEngine::Attach(std::span<const NamedTensor> tensors, const kernels::OptimizerSpec& given,
                          std::span<const NamedTensor> buffers, bool takes_now) {
  const kernels::OptimizerSpec optimizer = WithAverage(given);
  std::vector<Parameter> parameters = FindNew(tensors);
  if (!attached_.sealed && HasNameOfAnother(parameters)) {
    Seal();  // the model has changed since it was attached: what comes now is laid out anew
    parameters = FindNew(tensors);
  }
  if (parameters.empty() && declared_.empty())
    ThrowStatus(MakeError(ErrorId::kUnsupportedModel, "the module has no parameters",
                          "Attach it when it has what is to be trained"));
  if (!declared_.empty() && !KeepTheSame(optimizer, optimizer_)) {
    ThrowStatus(MakeError(
        ErrorId::kUnsupportedOptimizer, "the job has an optimizer that keeps other moments",
        "Use optimizers of one kind for all parts of a job, or a job for each; those that run in "
        "the trainer (LBFGS, your own, an object of torch::optim of another kind) are attached "
        "after them"));
  }
  CheckDoubleRoots(optimizer, parameters);
  if (attached_.sealed && !parameters.empty()) {
    AddLater(std::move(parameters), tensors, buffers, /*are_all=*/false);
    return true;
  }
  PlanInput input = DescribeJob(parameters, optimizer, buffers_);
  if (!parameters.empty()) {
    CheckRam(parameters, optimizer, buffers);
    PlanForDevice(parameters.front(), input, optimizer);
  }
  SayRoots(optimizer);
  NameForFiles(tensors);
  if (!parameters.empty()) {
    declared_ = std::move(input.catalogue.tensors);
    optimizer_ = optimizer;
  }
  const bool has_new = !parameters.empty();
  for (Parameter& parameter : parameters) Adopt(std::move(parameter), takes_now);
  MarkAliases(tensors);
  for (const NamedTensor& named : tensors) {
    if (named.tensor.defined() && named.tensor.numel() == 0) MoveOthers({&named.tensor, 1});
  }
  return has_new;
}

void TensorEngine::AttachBuffers(std::span<const NamedTensor> buffers) {
  if (attached_.sealed) return;
  buffers_.Add(buffers);
  std::erase_if(file_weights_, [](const FileWeight& weight) { return weight.is_buffer; });
  ThrowIfError(AddFileBuffers(buffers_.all(), file_weights_));
  if (!exists_) return;
  ThrowIfError(buffers_.Restore(state_.buffers));
  // Those in the store come before anything uses them, which may be before any parameter is used.
  if (HasAllOfStore() && HasBuffersInStore()) Seal();
}

// The values stay where they are until the store is made.
c10::Storage TensorEngine::MoveToDevice(Parameter& parameter, bool takes_now) {
  const auto id = static_cast<uint32_t>(weights_.size());
  const auto& storage = parameter.tensor.unsafeGetTensorImpl()->unsafe_storage();
  const bool is_seen = storage.use_count() > parameter.aliases.size();
  // Who has them, too, may write them before.
  if (is_seen && !takes_now) {
    const at::Tensor copy = parameter.tensor.clone(at::MemoryFormat::Preserve);
    for (at::Tensor& alias : parameter.aliases) alias.set_data(copy);
  }
  attached_.moved[id] = parameter.aliases;
  return MoveWithoutBytes(parameter.aliases, *destination());
}

void TensorEngine::MoveOthers(std::span<const at::Tensor> tensors) {
  if (!destination().has_value()) return;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.device().is_cpu()) continue;
    // One that was constructed outside memory is not brought home for it.
    if (Residency::Of(tensor) == nullptr)
      attached_.others_moved.emplace_back(tensor, tensor.detach());
    MoveWithBytes(tensor, *destination());
  }
}

// Wherever that is, under InferenceMode, too: its tensors stay ordinary ones.
void TensorEngine::Adopt(Parameter parameter, bool takes_now) {
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_grad;
  const auto id = static_cast<uint32_t>(weights_.size());
  // Nobody looks at the whole (CheckSupported).
  if (IsPart(parameter.tensor))
    parameter.tensor.set_data(parameter.tensor.clone(at::MemoryFormat::Preserve));
  parameter.aliases.push_back(parameter.tensor);
  const size_t size_bytes = parameter.tensor.numel() * parameter.tensor.element_size();
  c10::Storage values;
  if (parameter.tensor.device().is_cpu() && destination().has_value())
    values = MoveToDevice(parameter, takes_now);
  c10::StorageImpl* const storage =
      parameter.tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  weights_.push_back(new WeightResidency(attachment_, id, parameter.name, parameter.tensor.device(),
                                         size_bytes,
                                         attachment_->homes().TakeFor(*storage, size_bytes)));
  for (at::Tensor& tensor : parameter.aliases) Mark(tensor, id);
  weights_.back()->Adopt(storage, std::move(values));
  gradients_.push_back(nullptr);
  attached_.tensors.push_back(parameter.tensor);
}

void TensorEngine::Mark(at::Tensor tensor, uint32_t id) {
  if (!tensor.key_set().has(kManagedKey)) tensor.set_data(WithManagedKey(tensor));
  ids_[tensor.unsafeGetTensorImpl()] = id;
  weights_[id]->AddParameter(tensor);
}

// Tensors of this list over storages that an earlier one brought.
void TensorEngine::MarkAliases(std::span<const NamedTensor> tensors) {
  const at::NoGradGuard no_grad;
  for (const NamedTensor& named : tensors) {
    if (!named.tensor.defined() || ids_.contains(named.tensor.unsafeGetTensorImpl())) continue;
    if (const WeightResidency* const weight = Own(named.tensor))
      Mark(named.tensor, weight->tensor());
  }
}

void TensorEngine::CheckConstructs() const {
  const uint64_t open_bytes = proto::OpenBytes(attachment_->world_size());
  if (ram_bytes_ >= open_bytes) return;
  ThrowStatus(MakeError(
      ErrorId::kBudgetTooSmall,
      absl::StrCat("ram is ", FormatBytes(ram_bytes_), ", a model that is built outside of memory ",
                   "passes through ", FormatBytes(open_bytes)),
      "Raise ram: offloadctl plan shows the floors of a model"));
}

// ---- The store ---------------------------------------------------------------------------------

void TensorEngine::Seal() {
  RequireAttached();
  attachment_->EnsureSealed();
}

void TensorEngine::RequireAttached() const {
  if (declared_.empty()) ThrowStatus(NotAttached());
}

// Runs where the first operator happens to be: what it makes is of ordinary mode nevertheless.
void TensorEngine::MakeStore() {
  if (store_failure_) std::rethrow_exception(store_failure_);
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_grad;
  std::optional<WeightFile> initial = OpenInitialWeights();
  try {
    const std::vector<LaidOutTensor> in_store = state_.layout;
    SettleLayout();
    DivideBuffers();
    TakeThawed();
    if (!exists_) AddExpectedSlots();
    const std::optional<client::OtherTensors> others = MatchLayout(in_store);
    Declare(others.has_value() ? &*others : nullptr);
    BeginCounts();
    StartWeights(initial.has_value() ? &*initial : nullptr);
    PutInitialStates();
    WatchGradients(TrainedOf(attached_.tensors, declared_));
    BringHome(attachment_.get());
    if (exists_) {
      RestoreLargeBuffers();
      struct TrainerState next = state_;
      next.trainer.clear();  // the trainer may give less
      next.buffers = buffers_.EncodeSmall();
      Encoded(next);  // or there are too many ranks for them
      epoch_state_.layout = state_.layout;
      epoch_state_.update_counts = state_.update_counts;
    } else {
      StoreLargeBuffers();
      state_.buffers = buffers_.EncodeSmall();
    }
    if (!exists_) {
      ThrowIfError(attachment_->session().Publish(Encoded(state_)));
      attachment_->EndEpoch();
      epoch_state_ = state_;
    }
  } catch (...) {
    store_failure_ = std::current_exception();  // the daemon takes a declaration once
    throw;
  }
  attached_ = {.sealed = true};
  malloc_trim(0);  // the model's own bytes go back to the kernel
}

// Of a job that exists, whose tensors are those of the model, and then its large buffers.
size_t TensorEngine::StoredBuffers() const {
  return stored_trainable_.size() - std::min(stored_trainable_.size(), declared_.size());
}

// Every rank has small ones of its own, in its part of the trainer's state; large ones are in the
// store, the first rank's. A job has as many of those as when it was made, however many ranks go on
// with it.
void TensorEngine::DivideBuffers() {
  if (!exists_) return buffers_.Divide(SmallBuffersBytes());
  if (state_.layout.empty())
    return DivideAsStored(buffers_, StoredBuffers(), state_, *attachment_, options_.job);
  std::unordered_set<std::string> small;
  for (const NamedTensor& named : buffers_.all()) {
    if (!stored_names_.contains(proto::BufferTensorName(named.name))) small.insert(named.name);
  }
  buffers_.DivideByNames(small);
  TakeSlots();
  std::unordered_map<std::string, size_t> places;
  for (size_t i = 0; i < state_.layout.size(); ++i) places.emplace(state_.layout[i].name, i);
  buffers_.SortLarge(places);
}

uint64_t StateBytesMax(const Attachment& attachment) {
  const uint32_t ranks = attachment.world_size();
  constexpr uint64_t kLengthsBytes = 64;  // and more than those, that stand between several
  return ranks == 1 ? kTrainerStateBytesMax : kTrainerStateBytesMax / ranks - kLengthsBytes;
}

// What a rank gives with a step. Throws OFD-1002 when it is more than its part of a commit.
std::string TensorEngine::Encoded(const struct TrainerState& state) const {
  std::string bytes = ValueOrThrow(EncodeTrainerState(state));
  const uint64_t bytes_max = StateBytesMax(*attachment_);
  if (bytes.size() > bytes_max) {
    ThrowStatus(MakeError(
        ErrorId::kBadValue,
        absl::StrCat("the trainer's state has ", state.trainer.size(), " bytes, buffers and ",
                     "update counts ", bytes.size() - state.trainer.size(), "; of each of ",
                     attachment_->world_size(), " ranks a step takes at most ", bytes_max),
        "Keep less in the trainer's state, or train with fewer ranks"));
  }
  return bytes;
}

bool TensorEngine::ReplaceBuffer(std::string_view name, const at::Tensor& tensor) {
  const at::Tensor kept = tensor.requires_grad() ? tensor.detach() : tensor;  // not its graph
  if (!buffers_.Replace(name, kept)) return false;
  for (FileWeight& weight : file_weights_) {
    if (weight.is_buffer && weight.name == name) weight.tensor = kept;
  }
  return true;
}

void TensorEngine::TakeThawed() {
  for (uint32_t id = 0; id < declared_.size(); ++id)
    declared_[id].trainable |= attached_.tensors[id].requires_grad();
}

void TensorEngine::Declare(const client::OtherTensors* others) {
  PlanInput input = DescribeJob({}, optimizer_, buffers_);
  Plan plan = ValueOrThrow(MakePlan(input));
  RaiseFloor(plan);
  client::Session& session = attachment_->session();
  ThrowIfError(session.DeclareTensors(input.catalogue.tensors));
  ThrowIfError(session.Seal(optimizer_, plan.memory, plan.pins_offset,
                            Progress("formatting the store"), others));
  ThrowIfError(session.CountUses(plan.use_times_offset));
  attachment_->SetPlan(std::move(input), std::move(plan));
  if (device_plan_.is_made()) {
    FreeUnused(device_plan_.device());  // by the program since the plan was made
    attachment_->SetDevice(std::make_shared<DeviceMemory>(
        *attachment_, device_plan_.device(), device_plan_.accelerator(), device_plan_.plan(),
        device_plan_.gpu_ram_bytes(), options_.gradient_average));
  } else if (attachment_->world_size() > 1) {
    ThrowIfError(PeerGroup::StayOut(  // ranks with a device ask all of them
        [&](const std::string& says) { return attachment_->session().Exchange(says); }));
  }
}

void TensorEngine::BeginCounts() {
  const size_t count = declared_.size();
  if (!exists_ || state_.update_counts.empty()) state_.update_counts.assign(count, 0);
  if (state_.update_counts.size() != count) {
    ThrowStatus(
        MakeError(ErrorId::kOtherModel, absl::StrCat("the job has ", state_.update_counts.size(),
                                                     " parameters, the model ", count)));
  }
}

void TensorEngine::PutLarge(std::span<const ChangedBuffer> changed) {
  if (changed.empty()) return;
  std::vector<uint32_t> ids;
  for (const ChangedBuffer& each : changed) ids.push_back(IdOfLarge(each.number));
  const auto fill = [&](size_t i, uint64_t begin, uint64_t count, std::byte* target) {
    const at::Tensor& bytes = changed[i].in_order;
    const uint64_t size_bytes = bytes.defined() ? bytes.nbytes() : 0;
    const uint64_t first = std::min(begin * sizeof(float), size_bytes);
    const uint64_t there = std::min(count * sizeof(float), size_bytes - first);
    if (there > 0)
      std::memcpy(target, static_cast<const char*>(bytes.const_data_ptr()) + first, there);
    std::memset(target + there, 0, count * sizeof(float) - there);
    return absl::OkStatus();
  };
  ThrowIfError(attachment_->StreamInAll(ids, proto::Plane::kWeight, fill, /*digest=*/0),
               absl::StrCat("one of ", changed.size(), " buffers, of which the first is ",
                            Quoted(buffers_.large()[changed[0].number].name)));
  for (const ChangedBuffer& each : changed) {
    buffers_.large()[each.number].crc = each.crc;
    buffers_.large()[each.number].is_stored = true;
  }
}

// Puts those whose bytes have changed, or of these the ones that were never put.
void TensorEngine::StoreLargeBuffers(bool new_ones_only) {
  if (attachment_->rank() > 0) return;
  // At a time: those on a device are copied, and those in pages are still in memory.
  constexpr uint64_t kTogetherBytes = 32 << 20;
  std::vector<ChangedBuffer> changed;
  uint64_t together_bytes = 0;
  for (size_t n = 0; n < buffers_.large().size(); ++n) {
    const Buffers::Large& buffer = buffers_.large()[n];
    if (buffer.is_stored && (new_ones_only || !buffer.tensor.defined())) continue;
    const at::Tensor bytes = Buffers::InOrder(buffer);
    const uint32_t crc = Buffers::CrcOf(bytes);
    if (buffer.is_stored && buffer.crc == crc) continue;
    changed.push_back({.number = n, .crc = crc, .in_order = bytes});
    together_bytes += bytes.defined() ? bytes.nbytes() : 0;
    if (together_bytes < kTogetherBytes) continue;
    PutLarge(std::exchange(changed, {}));
    together_bytes = 0;
  }
  PutLarge(changed);
}

void TensorEngine::RestoreLargeBuffers() {
  const ProcessMemory::Use use(process_memory_, /*inside_passes=*/false);
  for (size_t n = 0; n < buffers_.large().size(); ++n) {
    Buffers::Large& buffer = buffers_.large()[n];
    if (IsNewInStore(IdOfLarge(n))) continue;
    if (!buffer.tensor.defined()) {
      buffer.is_stored = true;
      continue;
    }
    std::string bytes(buffer.element_count * sizeof(float), '\0');
    ThrowIfError(CopyOut(IdOfLarge(n), proto::Plane::kWeight, sizeof(float),
                         reinterpret_cast<std::byte*>(bytes.data())),
                 absl::StrCat("buffer ", Quoted(buffer.name)));
    Buffers::Assign(buffer, bytes);
    buffer.crc = Crc32c(0, bytes.data(), buffer.tensor.nbytes());
    buffer.is_stored = true;
  }
  // The first rank may put others with its next step.
  if (!buffers_.large().empty() && attachment_->world_size() > 1)
    ThrowIfError(attachment_->session().Exchange("").status());
}

// Those of a new job are the first rank's.
void TensorEngine::StartWeights(WeightFile* initial) {
  const bool puts = !exists_ && attachment_->rank() == 0;
  if (puts && initial != nullptr) LoadFrom(*initial);
  for (uint32_t id = 0; id < weights_.size(); ++id) {
    const bool is_new = IsNewInStore(id);
    if ((puts && initial == nullptr) || is_new) LoadInitial(id);
    weights_[id]->Start(/*goes_on=*/exists_ && !is_new);
  }
}

// The daemon adds what other ranks have of a gradient from the first backward after a thaw on.
// Hooks need a tensor that requires gradients, and stay with one that does not any more.
static void WatchFrozen(at::Tensor parameter, Gradient* gradient) {
  parameter.set_requires_grad(true);
  gradient->Watch();
  parameter.set_requires_grad(false);
}

void TensorEngine::WatchGradients(std::span<const at::Tensor> trained) {
  const Plan& plan = attachment_->plan();
  if (plan.gradients_spilled)
    gradient_window_ =
        std::make_shared<GradientWindow>(plan.gradient_window_offset, plan.gradient_window_bytes);
  if (attachment_->input().gradients_reduced && attachment_->rank() == 0) {
    Log().info(
        "gradients are reduced by the trainer: {} of them stay in memory in each of {} ranks",
        FormatBytes(plan.gradient_bytes), plan.memory.world_size);
  }
  if (attachment_->input().AddsGradients())
    sums_ = std::make_shared<GradientSums>(attachment_, /*step=*/step_ + 1);
  announcement_ = MakeAnnouncement();
  for (uint32_t id = 0; id < weights_.size(); ++id) {
    if (!trained[id].defined()) continue;
    gradients_[id] = MakeGradient(id, trained[id]);
    if (trained[id].requires_grad()) {
      gradients_[id]->Watch();
    } else if (sums_ != nullptr) {
      WatchFrozen(trained[id], gradients_[id]);
    }
  }
}

Gradient* TensorEngine::MakeGradient(uint32_t id, const at::Tensor& parameter) {
  const proto::GradientHome home = attachment_->plan().memory.gradients[id].home;
  const bool spilled =
      home == proto::GradientHome::kScratch || home == proto::GradientHome::kSlabScratch;
  DeviceMemory* const device = attachment_->device();
  auto window = spilled && !(device != nullptr && device->Stays(id)) ? gradient_window_ : nullptr;
  if (device != nullptr && sums_ != nullptr)
    return new SummedDeviceGradient(attachment_, std::move(window), sums_, id, parameter);
  if (device != nullptr) return new DeviceGradient(attachment_, std::move(window), id, parameter);
  if (sums_ != nullptr)
    return new SummedGradient(attachment_, std::move(window), sums_, id, parameter);
  auto* const gradient = new Gradient(attachment_, std::move(window), id, parameter);
  gradient->AnnounceTo(announcement_);
  return gradient;
}

// The daemon has other weights than the device. One that has failed has none, and says so to the
// next operator.
void TensorEngine::DropFromDevice() {
  if (attachment_->device() == nullptr) return;
  std::vector<uint32_t> all(weights_.size());
  std::iota(all.begin(), all.end(), 0);
  try {
    attachment_->device()->Changed(all);
  } catch (const std::exception& error) {
    Log().error("{}", error.what());
  }
}

// One that torch does not compute on.
static bool HasFreeCore() {
  // torch settles a thread's number of threads at the first question, and products before it are
  // computed with another one: asked on the trainer's thread, it would change the bits of its
  // first.
  size_t computing = 0;
  try {
    std::thread([&] { computing = static_cast<size_t>(at::get_num_threads()); }).join();
  } catch (const std::system_error&) {
    return false;  // no further thread may be made
  }
  return computing < client::OwnProcessors().size();
}

static StepCosts CostsOf(const client::Session& session) {
  const proto::StepSums sums = proto::ReadStepWords(*proto::StepWordsOf(session.region()));
  const auto& stalls = sums.stall_nanoseconds[static_cast<size_t>(proto::StepPhase::kForward)];
  StepCosts costs;
  for (const proto::StallCause cause :
       {proto::StallCause::kUpdate, proto::StallCause::kLate, proto::StallCause::kMiss})
    costs.forward_wait_nanoseconds += stalls[static_cast<size_t>(cause)];
  costs.computed_nanoseconds =
      session.slab_header().computed_nanoseconds.load(std::memory_order_relaxed);
  return costs;
}

// Of one rank: what several add up the daemon has to wait for. Within an interval there is no place
// for a second step. What stays in memory is updated at step(): there is nothing to begin before.
std::shared_ptr<StepAnnouncement> TensorEngine::MakeAnnouncement() const {
  if (attachment_->world_size() > 1 || attachment_->device() != nullptr ||
      options_.update_in_backward == "never" || attachment_->input().durability.has_intervals() ||
      proto::ExtentsInMemory(attachment_->input().catalogue, attachment_->plan().memory)
          .has_value())
    return nullptr;
  StepAnnouncement::Channel channel{
      .begin_step =
          [attachment = attachment_, averaging = averaging_](client::StepCommand command) {
            for (client::Group& group : command.groups) group.SetAveraging(averaging);
            return attachment->session().BeginStep(command);
          },
      .release_gradient = [attachment = attachment_](
                              uint32_t tensor) { attachment->session().ReleaseGradient(tensor); }};
  if (!HasFreeCore()) {
    channel.costs = [attachment = attachment_] { return CostsOf(attachment->session()); };
  }
  return std::make_shared<StepAnnouncement>(std::move(channel), weights_.size());
}

// From what the tensors held, where a new job finds its weights.
void TensorEngine::LoadInitial(uint32_t id) {
  const uint64_t element_bytes = proto::DtypeBytes(attachment_->tensor(id).dtype);
  const auto fill = [&](uint64_t begin, uint64_t count, std::byte* target) {
    return weights_[id]->ReadInitial(begin * element_bytes, count * element_bytes, target);
  };
  ThrowIfError(attachment_->StreamIn(id, proto::Plane::kWeight, fill, /*digest=*/0),
               absl::StrCat("parameter ", Quoted(weights_[id]->name())));
}

}  // namespace offload::zero3
