#include "zero3/torch/tensor_engine.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <sched.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cfenv>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <thread>
#include <unordered_set>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/byte_size.h"
#include "base/crc32c.h"
#include "base/durability.h"
#include "base/error.h"
#include "base/string_view.h"
#include "proto/buffer_tensors.h"
#include "proto/shm_abi.h"
#include "zero3/dimension_order.h"
#include "zero3/gpu/peer_group.h"
#include "zero3/stored_buffers.h"
#include "zero3/torch/born_residency.h"
#include "zero3/torch/device_gradient.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/device_move.h"
#include "zero3/torch/device_tier.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/log.h"
#include "zero3/torch/operator_gate.h"
#include "zero3/torch/progress.h"
#include "zero3/torch/raw_access.h"
#include "zero3/torch/sparse_update.h"
#include "zero3/torch/square_roots.h"
#include "zero3/torch/summed_device_gradient.h"
#include "zero3/torch/summed_gradient.h"
#include "zero3/torch/supported_model.h"
#include "zero3/torch/throw_status.h"
#include "zero3/torch/update_counts.h"

namespace offload::zero3 {
namespace {

[[noreturn]] void Unsupported(std::string_view name, std::string_view why, std::string fix) {
  ThrowStatus(MakeError(ErrorId::kUnsupportedModel,
                        absl::StrCat("parameter '", std::string(name), "' ", std::string(why)),
                        std::move(fix)));
}

std::string Key(const std::string& text) { return absl::StrCat("'", text, "'"); }

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
    Unsupported(named.name,
                absl::StrCat("shares the memory of parameter ", Key(first.name),
                             " with another shape, type or order of dimensions"),
                "Give it memory of its own before attaching the module, "
                "parameter.set_data(parameter.clone()), or make it a view of the other in forward");
  }
  if (own.trainable && first.trainable) {
    Unsupported(named.name,
                absl::StrCat("shares the memory of parameter ", Key(first.name),
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

bool Serves(const std::string& raw_access) {
  if (raw_access == "serve") return true;
  if (raw_access == "error") return false;
  ThrowStatus(MakeError(ErrorId::kBadValue, absl::StrCat("raw_access is '", raw_access, "'"),
                        "Set it to serve or error"));
}

void CheckWeightsAtClose(const std::string& value) {
  if (value == "released" || value == "memory") return;
  ThrowStatus(MakeError(ErrorId::kBadValue, absl::StrCat("weights_at_close is '", value, "'"),
                        "Set it to released or memory"));
}

// Of all buffers but the `large_count` largest.
uint64_t SmallBytes(const Buffers& buffers, size_t large_count) {
  std::vector<uint64_t> sizes;
  for (const NamedTensor& named : buffers.all()) sizes.push_back(buffers.FirstBytes(named));
  std::sort(sizes.begin(), sizes.end());
  sizes.resize(sizes.size() - std::min(sizes.size(), large_count));
  return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
}

// A rank's part of what is committed with a step.
uint64_t StateBytesMax(const Attachment& attachment) {
  const uint32_t ranks = attachment.world_size();
  constexpr uint64_t kLengthsBytes = 64;  // and more than those, that stand between several
  return ranks == 1 ? kTrainerStateBytesMax : kTrainerStateBytesMax / ranks - kLengthsBytes;
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

spdlog::logger& Log() {
  static const auto* const kLogger =
      new std::shared_ptr<spdlog::logger>(std::make_shared<spdlog::logger>(
          "offload", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
  return **kLogger;
}

static ZeroPolicy PolicyOf(const Options& options) {
  const auto hint = [](const char* name, int64_t elements) {
    if (elements >= 0) return static_cast<uint64_t>(elements);
    ThrowStatus(MakeError(ErrorId::kBadValue, absl::StrCat(name, " is ", elements)));
  };
  return {.stage = ValueOrThrow(CheckStage(options.zero_stage)),
          .weights = ValueOrThrow(ParseHome("weights_home", options.weights_home)),
          .state = ValueOrThrow(ParseHome("state_home", options.state_home)),
          .persistence = hint("persistence", options.persistence),
          .prefetch = hint("prefetch", options.prefetch),
          .max_live = hint("max_live", options.max_live)};
}

bool ReducesGradients(const Options& options) {
  if (options.gradients == "added") return false;
  if (options.gradients == "reduced_by_trainer") return true;
  ThrowStatus(MakeError(ErrorId::kBadValue, absl::StrCat("gradients is '", options.gradients, "'"),
                        "Set it to added or reduced_by_trainer"));
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
      step_(job.step),
      state_(ValueOrThrow(DecodeTrainerState(job.trainer_state))),
      device_plan_(options.gpu_ram, options.device) {
  // How often tensors were updated is the same in all ranks, what the trainer keeps is not.
  if (!job.trainer_state_is_own) state_.trainer.clear();
  epoch_state_ = state_;
  attachment_->SetServesRaw(Serves(options.raw_access));
  CheckWeightsAtClose(options.weights_at_close);
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
    attachment_->Close();
  } catch (const std::exception& error) {
    Log().error("closing the job: {}", error.what());
  }
}

// What was written through pointers since the last step goes the way of all that was.
void TensorEngine::EndRawAtClose() {
  try {
    attachment_->EndRaw();
  } catch (const std::exception& error) {
    Log().error("closing the job: {}", error.what());
  }
}

// What only the device has is lost otherwise, with all steps since the last checkpoint.
void TensorEngine::SettleAtClose() {
  try {
    SettleTier();
  } catch (const std::exception& error) {
    Log().error("the job ends at its last checkpoint: {}", error.what());
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

// ---- Attach ------------------------------------------------------------------------------------

void TensorEngine::CheckFree(const NamedTensor& named) const {
  Residency* const residency = Residency::Of(named.tensor);
  if (residency == nullptr) return;
  if (const auto* born = dynamic_cast<const BornResidency*>(residency)) {
    if (born->attachment() != attachment_.get())
      Unsupported(named.name, "was constructed for another engine",
                  "Attach it to the engine of its InitGuard");
    return;
  }
  auto* const weight = dynamic_cast<WeightResidency*>(residency);
  if (weight == nullptr || !weight->closed()) {
    Unsupported(named.name, "belongs to another engine",
                "Close that one before, opened with weights_at_close = memory, or give each engine "
                "models of its own");
  }
  if (!exists_ && initial_weights_.empty()) {
    Unsupported(named.name,
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

WeightResidency* TensorEngine::Own(const at::Tensor& tensor) const {
  auto* const weight = dynamic_cast<WeightResidency*>(Residency::Of(tensor));
  return weight != nullptr && weight->attachment() == attachment_.get() ? weight : nullptr;
}

bool KeepTheSame(const kernels::OptimizerSpec& a, const kernels::OptimizerSpec& b) {
  if (a.index() != b.index()) return false;
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
  ThrowIfError(MakePlan(DescribeJob(more, optimizer, all)).status());
}

void TensorEngine::PlanForDevice(const Parameter& parameter, const PlanInput& input,
                                 const kernels::OptimizerSpec& optimizer) {
  const c10::Device device = device_plan_.TrainedOn(parameter.tensor.device());
  if (!device.is_cpu() && input.gradients_reduced) {
    // What communicates on streams of its own would write after the operator was launched.
    Unsupported(parameter.name,
                absl::StrCat("is on ", device.str(),
                             " in a job whose gradients the trainer "
                             "reduces (gradients = reduced_by_trainer)"),
                "Let the daemon add them, gradients = added, or move the module to the host");
  }
  device_plan_.Make(
      device, input.catalogue,
      {.optimizer = optimizer, .durability = input.durability, .world_size = input.world_size});
}

bool TensorEngine::Attach(std::span<const NamedTensor> tensors,
                          const kernels::OptimizerSpec& optimizer,
                          std::span<const NamedTensor> buffers, bool takes_now) {
  std::vector<Parameter> parameters = FindNew(tensors);
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

void TensorEngine::Adopt(Parameter parameter, bool takes_now) {
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
  client::Session& session = attachment_->session();
  ThrowIfError(session.DeclareTensors(input.catalogue.tensors));
  ThrowIfError(session.Seal(optimizer_, plan.memory, plan.pins_offset,
                            Progress("formatting the store"), others));
  ThrowIfError(session.CountUses(plan.use_times_offset));
  attachment_->SetPlan(std::move(input), std::move(plan));
  if (device_plan_.is_made()) {
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

// Puts those whose bytes have changed, or of these the ones that were never put.
void TensorEngine::StoreLargeBuffers(bool new_ones_only) {
  if (attachment_->rank() > 0) return;
  for (size_t n = 0; n < buffers_.large().size(); ++n) {
    Buffers::Large& buffer = buffers_.large()[n];
    if (new_ones_only && buffer.is_stored) continue;
    const std::string bytes = Buffers::BytesOf(buffer);
    const uint32_t crc = Crc32c(0, bytes.data(), bytes.size());
    if (buffer.is_stored && buffer.crc == crc) continue;
    const auto fill = [&](uint64_t begin, uint64_t count, std::byte* target) {
      std::memcpy(target, bytes.data() + begin * sizeof(float), count * sizeof(float));
      return absl::OkStatus();
    };
    ThrowIfError(attachment_->StreamIn(IdOfLarge(n), proto::Plane::kWeight, fill, /*digest=*/0),
                 absl::StrCat("buffer ", Key(buffer.name)));
    buffer.crc = crc;
    buffer.is_stored = true;
  }
}

void TensorEngine::RestoreLargeBuffers() {
  for (size_t n = 0; n < buffers_.large().size(); ++n) {
    Buffers::Large& buffer = buffers_.large()[n];
    if (IsNewInStore(IdOfLarge(n))) continue;
    std::string bytes(buffer.element_count * sizeof(float), '\0');
    ThrowIfError(CopyOut(IdOfLarge(n), proto::Plane::kWeight, sizeof(float),
                         reinterpret_cast<std::byte*>(bytes.data())),
                 absl::StrCat("buffer ", Key(buffer.name)));
    Buffers::Assign(buffer, bytes);
    buffer.crc = Crc32c(0, bytes.data(), bytes.size());
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

// Where torch computes on every core, updates beside it take the backward more than they give the
// forward.
static bool HasFreeCore() {
  cpu_set_t own;
  CPU_ZERO(&own);
  if (sched_getaffinity(0, sizeof own, &own) != 0) return false;
  // torch settles a thread's number of threads at the first question, and products before it are
  // computed with another one: asked on the trainer's thread, it would change the bits of its
  // first.
  int computing = 0;
  std::thread([&] { computing = at::get_num_threads(); }).join();
  return computing < CPU_COUNT(&own);
}

// Of one rank: what several add up the daemon has to wait for. Within an interval there is no place
// for a second step. What stays in memory is updated at step(): there is nothing to begin before.
std::shared_ptr<StepAnnouncement> TensorEngine::MakeAnnouncement() const {
  if (!HasFreeCore()) return nullptr;
  if (attachment_->world_size() > 1 || attachment_->device() != nullptr ||
      options_.update_in_backward == "never" || attachment_->input().durability.has_intervals() ||
      proto::ExtentsInMemory(attachment_->input().catalogue, attachment_->plan().memory)
          .has_value())
    return nullptr;
  return std::make_shared<StepAnnouncement>(
      StepAnnouncement::Channel{.begin_step =
                                    [attachment = attachment_](const client::StepCommand& command) {
                                      return attachment->session().BeginStep(command);
                                    },
                                .release_gradient =
                                    [attachment = attachment_](uint32_t tensor) {
                                      attachment->session().ReleaseGradient(tensor);
                                    }},
      weights_.size());
}

// From what the tensors held, where a new job finds its weights.
void TensorEngine::LoadInitial(uint32_t id) {
  const uint64_t element_bytes = proto::DtypeBytes(attachment_->tensor(id).dtype);
  const auto fill = [&](uint64_t begin, uint64_t count, std::byte* target) {
    return weights_[id]->ReadInitial(begin * element_bytes, count * element_bytes, target);
  };
  ThrowIfError(attachment_->StreamIn(id, proto::Plane::kWeight, fill, /*digest=*/0),
               absl::StrCat("parameter ", Key(weights_[id]->name())));
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
    Unsupported(weights_[id]->name(),
                "has another storage than when it was attached (its storage was resized, or "
                "replaced by other means than set_data() and set_() with its shape and type)",
                "Give it values with copy_() under NoGradGuard, or with set_data(); its memory "
                "need not be freed by resizing, it is offloaded");
  }
  if (!std::ranges::equal(parameter.sizes(), declared_[id].shape) ||
      OrderOf(parameter.sizes(), parameter.strides()) != declared_[id].dimension_order) {
    Unsupported(weights_[id]->name(),
                "has another shape or order of dimensions than when it was "
                "attached (t_(), transpose_(), squeeze_())",
                "Use a view of it in forward, parameter.t(), or lay the module out before "
                "attaching it");
  }
  if (gradients_[id] == nullptr)
    ThrowStatus(MakeError(
        ErrorId::kUnsupportedModel,
        absl::StrCat("parameter ", Key(weights_[id]->name()),
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

void TensorEngine::CheckGiven(bool writes) const {
  for (WeightResidency* const weight : weights_) weight->CheckGiven(writes);
}

// A rank's own gradients are not those of the step before all ranks have added theirs.
void TensorEngine::CheckIsNotInBackward() const {
  if (attachment_->world_size() == 1 || torch::autograd::get_current_graph_task_id() == -1) return;
  ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer,
                        "a step inside of a backward pass (in a hook), with several ranks",
                        "Step when backward() has returned, or train with one rank"));
}

void TensorEngine::Step(std::span<const GroupUpdate> updates, GroupsNow groups_now) {
  CheckIsNotInBackward();
  Seal();
  CheckWhole();
  if (const DeviceTier* const tier = Tier()) tier->CheckWhole();
  CheckArithmetic();
  CheckGiven(/*writes=*/true);
  CheckGradientsOfWeights(updates);
  StayInFront();
  {
    const OperatorGate::Pass alone(OperatorGate::Passage::kAlone);
    attachment_->EndRaw();
  }
  if (const std::vector<at::Tensor> thawed = FindThawed(updates); !thawed.empty()) Thaw(thawed);
  client::StepCommand command;
  command.step = step_ + 1;
  std::vector<uint32_t> stepped, there;
  DeviceTier* const tier = Tier();
  std::vector<client::TensorUpdate> updates_there;
  std::vector<SparseUpdate> sparse;
  struct TrainerState next = state_;
  for (uint32_t group = 0; group < updates.size(); ++group) {
    command.groups.push_back(updates[group].group);
    for (const at::Tensor& parameter : updates[group].tensors) {
      if (!MayHaveGradient(parameter)) continue;
      Gradient* const gradient = GradientOf(parameter);
      // It was frozen until now.
      if (!gradient->is_watched() && parameter.requires_grad()) gradient->Watch();
      if (AddsSparsely(updates[group].group, parameter)) {
        sparse.push_back({parameter, updates[group].group});
        continue;
      }
      if (!gradient->PrepareStep()) continue;
      const uint32_t id = ids_.at(parameter.unsafeGetTensorImpl());
      FollowEdits(id);
      if (parameter.scalar_type() == at::kDouble)
        CheckDoubleRoots(updates[group].group, declared_[id].name);
      const bool is_there = tier != nullptr && tier->Has(id);
      (is_there ? there : stepped).push_back(id);
      std::vector<client::TensorUpdate>& list = is_there ? updates_there : command.updates;
      list.push_back({id, group, next.update_counts[id] + 1});
      if (IsCounted(updates[group].group)) ++next.update_counts[id];
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
    if (group.name() != optimizer_.name())
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
                  Key(attachment_->tensor(update.tensor).name), ", the job was sealed without it");
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
                       absl::StrJoin(parameter.sizes(), ", "), "] is parameter ", Key(of->name()),
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
  ThrowIfError(put, absl::StrCat("parameter ", Key(declared_[id].name)));
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
                        absl::StrCat("the gradient of parameter ", Key(name),
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
      absl::StrCat("parameter ", Key(std::string(name)), " has dtype Double, and ",
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
  ThrowStatus(MakeError(ErrorId::kBadValue,
                        absl::StrCat("a tensor of shape [", absl::StrJoin(parameter.sizes(), ", "),
                                     "] is not an attached parameter")));
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
  weights_[id]->CheckGiven(/*writes=*/false);
  Seal();
  const proto::Tensor& tensor = attachment_->tensor(id);
  const at::ScalarType own = parameter.scalar_type();
  const at::ScalarType master = MasterType(own);
  // An fp32 or fp64 weight is its own master, and so is a frozen one.
  const bool plain_master = own == master || !tensor.trainable;
  const proto::PlaneSet& planes = attachment_->input().catalogue.planes(id);
  std::optional<proto::Plane> found = planes.Find(plane);
  if (plane == "master" && plain_master) found = proto::Plane::kWeight;
  if (!found.has_value()) {
    ThrowStatus(
        MakeError(ErrorId::kBadValue,
                  absl::StrCat("parameter ", Key(tensor.name), " has no plane ", Key(plane)),
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
               absl::StrCat("parameter ", Key(tensor.name)));
  return plane == "master" ? gathered.to(master) : gathered;
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
