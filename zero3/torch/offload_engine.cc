#include "zero3/torch/offload_engine.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <malloc.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <span>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/byte_size.h"
#include "base/check.h"
#include "base/error.h"
#include "proto/shm_abi.h"
#include "zero3/torch/born_record.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

constexpr uint64_t kBlockBytes = 8ull << 20;  // of staging, for loading and gathering

spdlog::logger& Log() {
  static const auto* const kLogger =
      new std::shared_ptr<spdlog::logger>(std::make_shared<spdlog::logger>(
          "offload", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
  return **kLogger;
}

[[noreturn]] void Unsupported(std::string_view name, std::string_view why) {
  ThrowStatus(MakeError(ErrorId::kUnsupportedModel,
                        absl::StrCat("parameter '", std::string(name), "' ", std::string(why))));
}

void CheckSupported(const std::string& name, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) Unsupported(name, "is sparse");
  if (!tensor.device().is_cpu())
    Unsupported(name, absl::StrCat("is on device ", tensor.device().str()));
  if (tensor.scalar_type() != at::kFloat && tensor.scalar_type() != at::kBFloat16) {
    Unsupported(name, absl::StrCat("has dtype ", c10::toString(tensor.scalar_type()),
                                   ", float32 and bfloat16 are supported"));
  }
  if (!tensor.is_contiguous()) Unsupported(name, "is not contiguous");
  const size_t size_bytes = tensor.numel() * tensor.element_size();
  const size_t storage_bytes = tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes();
  if (tensor.storage_offset() != 0 || storage_bytes != size_bytes) {
    Unsupported(name, absl::StrCat("is a view of a larger tensor (", size_bytes, " of ",
                                   storage_bytes, " bytes)"));
  }
}

std::string Key(const std::string& text) { return absl::StrCat("'", text, "'"); }

// Tells on stderr how far a format is, when it takes long.
class Progress {
 public:
  void operator()(uint64_t done, uint64_t total) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::seconds(2)) return;
    last_ = now;
    Log().info("formatting the store: {} of {}", FormatDecimalBytes(done),
               FormatDecimalBytes(total));
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace

OffloadEngine::OffloadEngine(const Options& options, uint64_t ram_bytes,
                             std::unique_ptr<client::Session> session, client::JobInfo job)
    : options_(options),
      ram_bytes_(ram_bytes),
      exists_(job.exists),
      attachment_(std::make_shared<Attachment>(std::move(session))),
      step_(job.step),
      state_(ValueOrThrow(DecodeTrainerState(job.trainer_state))) {}

OffloadEngine::~OffloadEngine() {
  try {
    for (Gradient* gradient : gradients_) {
      if (gradient == nullptr) continue;
      gradient->Close();
      gradient->Unreference();
    }
    for (WeightRecord* weight : weights_) {
      weight->Close();
      weight->Unreference();
    }
    attachment_->Close();
  } catch (const std::exception& error) {
    Log().error("closing the job: {}", error.what());
  }
}

// ---- Attach ------------------------------------------------------------------------------------

std::vector<OffloadEngine::Parameter> OffloadEngine::FindParameters(torch::nn::Module& module) {
  std::vector<Parameter> parameters;
  std::unordered_map<const void*, size_t> by_storage;
  std::unordered_set<const void*> seen;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || tensor.numel() == 0 ||
        !seen.insert(tensor.unsafeGetTensorImpl()).second)
      continue;
    CheckSupported(item.key(), tensor);
    const void* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    const auto [known, is_new] = by_storage.emplace(storage, parameters.size());
    if (is_new) {
      parameters.push_back({item.key(), tensor, {}, tensor.requires_grad()});
      continue;
    }
    Parameter& first = parameters[known->second];
    if (tensor.sizes() != first.tensor.sizes() ||
        tensor.scalar_type() != first.tensor.scalar_type()) {
      Unsupported(item.key(), absl::StrCat("shares the memory of parameter ", Key(first.name),
                                           " with another shape or type"));
    }
    if (tensor.requires_grad() && first.trainable) {
      Unsupported(item.key(),
                  absl::StrCat("shares the memory of parameter ", Key(first.name),
                               " but has a gradient of its own: register the same tensor twice"));
    }
    // The one with the gradient stands for all.
    first.aliases.push_back(tensor);
    if (tensor.requires_grad()) std::swap(first.tensor, first.aliases.back());
    first.trainable |= tensor.requires_grad();
  }
  return parameters;
}

void OffloadEngine::Declare(const std::vector<Parameter>& parameters,
                            const kernels::OptimizerSpec& optimizer) {
  std::vector<proto::Tensor> tensors;
  for (const Parameter& parameter : parameters) {
    tensors.push_back({.name = parameter.name,
                       .shape = parameter.tensor.sizes().vec(),
                       .dtype = parameter.tensor.scalar_type() == at::kFloat
                                    ? proto::Dtype::kFloat32
                                    : proto::Dtype::kBFloat16,
                       .trainable = parameter.trainable,
                       .element_count = static_cast<uint64_t>(parameter.tensor.numel())});
  }
  optimizer_ = optimizer;
  PlanInput input = {
      .catalogue = ValueOrThrow(proto::BuildCatalogue(std::move(tensors), optimizer)),
      .ram_bytes = ram_bytes_,
      .always_spill_gradients = options_.spill_gradients};
  Plan plan = ValueOrThrow(MakePlan(input));
  client::Session& session = attachment_->session();
  ThrowIfError(session.DeclareTensors(input.catalogue.tensors));
  ThrowIfError(session.Seal(optimizer, plan.memory, plan.pins_offset, Progress()));
  attachment_->SetPlan(std::move(input), std::move(plan));
}

absl::Status OffloadEngine::StreamIn(uint32_t id, Fill fill) {
  const proto::Tensor& tensor = attachment_->tensor(id);
  const uint64_t element_bytes = proto::DtypeBytes(tensor.dtype);
  const uint64_t extent_bytes = proto::kExtentElements * element_bytes;
  Staging::Piece piece = attachment_->staging().Take(
      std::min(kBlockBytes, proto::PaddedBytes(tensor.element_count * element_bytes)));
  const uint64_t blocks = std::max<uint64_t>(piece.size_bytes() / extent_bytes, 1);
  std::deque<client::Ticket> tickets;
  absl::Status failure;
  const auto wait_for_oldest = [&] {
    failure.Update(attachment_->session().Wait(tickets.front()));
    tickets.pop_front();
  };
  for (uint64_t begin = 0, block = 0; begin < tensor.element_count && failure.ok();
       begin += proto::kExtentElements, ++block) {
    if (tickets.size() == blocks) wait_for_oldest();
    const uint64_t count = std::min<uint64_t>(tensor.element_count - begin, proto::kExtentElements);
    const uint64_t offset = piece.region_offset() + block % blocks * extent_bytes;
    failure.Update(fill(begin, count, offset));
    if (failure.ok()) tickets.push_back(attachment_->session().Put(id, begin, count, offset));
  }
  while (!tickets.empty()) wait_for_oldest();
  return failure;
}

// From the module, where a new job finds its weights.
void OffloadEngine::LoadFrom(uint32_t id, const at::Tensor& parameter) {
  const proto::Tensor& tensor = attachment_->tensor(id);
  const uint64_t element_bytes = proto::DtypeBytes(tensor.dtype);
  Record* const record = Record::Of(parameter);
  auto* const born = dynamic_cast<BornRecord*>(record);
  if (record != nullptr && born == nullptr) Unsupported(tensor.name, "belongs to another engine");
  const auto* const source =
      born == nullptr ? static_cast<const std::byte*>(parameter.const_data_ptr()) : nullptr;
  const auto fill = [&](uint64_t begin, uint64_t count, uint64_t offset) -> absl::Status {
    if (born != nullptr)
      return born->ReadInto(begin * element_bytes, count * element_bytes, offset);
    std::memcpy(attachment_->region() + offset, source + begin * element_bytes,
                count * element_bytes);
    return absl::OkStatus();
  };
  ThrowIfError(StreamIn(id, fill), absl::StrCat("parameter ", Key(tensor.name)));
}

// From a file that fits.
void OffloadEngine::LoadFrom(WeightFile& file) {
  for (uint32_t id = 0, at = 0; at < file_weights_.size(); ++at) {
    const FileWeight& weight = file_weights_[at];
    if (weight.ElementCount() == 0) continue;  // the daemon does not know it
    OFFLOAD_CHECK(weight.name == attachment_->tensor(id).name) << weight.name;
    const auto fill = [&](uint64_t begin, uint64_t count, uint64_t offset) {
      return file.Read(weight, begin, count, attachment_->region() + offset);
    };
    ThrowIfError(StreamIn(id, fill), absl::StrCat("parameter ", Key(weight.name)));
    ++id;
  }
}

std::optional<WeightFile> OffloadEngine::OpenInitialWeights() {
  if (initial_weights_.empty()) return std::nullopt;
  if (exists_) {
    Log().info("job {} exists, at step {}: it keeps its weights, {} is not loaded", options_.job,
               step_, initial_weights_);
    return std::nullopt;
  }
  return ValueOrThrow(WeightFile::Open(initial_weights_, file_weights_, initial_options_),
                      initial_weights_);
}

void OffloadEngine::TakeOver(const std::vector<Parameter>& parameters, WeightFile* initial) {
  const at::NoGradGuard no_grad;
  if (initial != nullptr) LoadFrom(*initial);
  for (uint32_t id = 0; id < parameters.size(); ++id) {
    const Parameter& parameter = parameters[id];
    if (!exists_ && initial == nullptr) LoadFrom(id, parameter.tensor);
    std::vector<at::Tensor> tensors = parameter.aliases;
    tensors.push_back(parameter.tensor);
    for (at::Tensor& tensor : tensors) {
      if (!tensor.key_set().has(kManagedKey)) tensor.set_data(WithManagedKey(tensor));
      ids_[tensor.unsafeGetTensorImpl()] = id;
    }
    const size_t size_bytes = parameter.tensor.numel() * parameter.tensor.element_size();
    auto* record = new WeightRecord(attachment_, id, size_bytes);
    weights_.push_back(record);
    record->Manage(parameter.tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    gradients_.push_back(nullptr);
    if (!parameter.trainable) continue;
    const bool spilled =
        attachment_->plan().memory.gradients[id].home == proto::GradientHome::kScratch;
    gradients_.back() =
        new Gradient(attachment_, spilled ? gradient_window_ : nullptr, id, parameter.tensor);
    gradients_.back()->Watch();
  }
}

void OffloadEngine::Attach(torch::nn::Module& module, const kernels::OptimizerSpec& optimizer) {
  if (attached_)
    ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer, "this engine has an optimizer already",
                          "Open one engine per model"));
  EndConstruction();
  const std::vector<Parameter> parameters = FindParameters(module);
  if (parameters.empty())
    ThrowStatus(MakeError(ErrorId::kUnsupportedModel, "the module has no parameters"));
  file_weights_ = ValueOrThrow(FindFileWeights(module));
  for (FileWeight& weight : file_weights_) weight.tensor.reset();
  std::optional<WeightFile> initial = OpenInitialWeights();
  Declare(parameters, optimizer);
  const Plan& plan = attachment_->plan();
  if (plan.gradients_spilled)
    gradient_window_ =
        std::make_shared<GradientWindow>(plan.gradient_window_offset, plan.gradient_window_bytes);
  if (!exists_ || state_.update_counts.empty()) state_.update_counts.assign(parameters.size(), 0);
  if (state_.update_counts.size() != parameters.size()) {
    ThrowStatus(MakeError(ErrorId::kOtherModel,
                          absl::StrCat("the job has ", state_.update_counts.size(),
                                       " parameters, the model ", parameters.size())));
  }
  TakeOver(parameters, initial.has_value() ? &*initial : nullptr);
  BringHome(module);
  if (!exists_)
    ThrowIfError(attachment_->session().Publish(ValueOrThrow(EncodeTrainerState(state_))));
  attached_ = true;
  malloc_trim(0);  // the model's own bytes go back to the kernel
}

// ---- The step ----------------------------------------------------------------------------------

Gradient* OffloadEngine::GradientOf(const at::Tensor& parameter) const {
  const auto known = ids_.find(parameter.unsafeGetTensorImpl());
  if (known == ids_.end())
    Unsupported("?", absl::StrCat("of shape [", absl::StrJoin(parameter.sizes(), ", "),
                                  "] was not in the module when it was attached"));
  const uint32_t id = known->second;
  if (Record::Of(parameter) != weights_[id]) {
    Unsupported(weights_[id]->name(),
                "has another storage than when it was attached (set_data, or a cast): attach after "
                "such changes");
  }
  if (gradients_[id] == nullptr)
    Unsupported(weights_[id]->name(), "was frozen when it was attached, and has a gradient now");
  return gradients_[id];
}

void OffloadEngine::Step(std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                         std::vector<client::Group> groups) {
  CheckWhole();
  client::StepCommand command;
  command.step = step_ + 1;
  command.groups = std::move(groups);
  std::vector<uint32_t> stepped;
  for (uint32_t group = 0; group < param_groups.size(); ++group) {
    for (const at::Tensor& parameter : param_groups[group].params()) {
      if (!parameter.grad().defined() || parameter.numel() == 0) continue;
      Gradient* const gradient = GradientOf(parameter);
      gradient->PrepareStep();
      const uint32_t id = ids_.at(parameter.unsafeGetTensorImpl());
      stepped.push_back(id);
      command.updates.push_back({id, group, state_.update_counts[id] + 1, gradient->scale()});
    }
  }
  struct TrainerState next = state_;
  for (const uint32_t id : stepped) ++next.update_counts[id];
  command.has_trainer_state = true;
  command.trainer_state = ValueOrThrow(EncodeTrainerState(next));
  for (const uint32_t id : stepped) gradients_[id]->FinishWriting();

  const std::vector<uint32_t> ahead = attachment_->EndScheduleStep();
  ThrowIfError(attachment_->session().Step(command));
  state_ = std::move(next);
  ++step_;
  for (const uint32_t id : stepped) gradients_[id]->BeginUpdate();
  attachment_->Prefetch(ahead);
}

// ---- The rest ----------------------------------------------------------------------------------

void OffloadEngine::WaitDurable() { ValueOrThrow(attachment_->session().WaitDurable()); }

void OffloadEngine::SetTrainerState(std::string blob) {
  struct TrainerState next = state_;
  next.trainer = std::move(blob);
  ValueOrThrow(EncodeTrainerState(next));  // refuses what is too long here, not at the step
  state_ = std::move(next);
}

uint32_t OffloadEngine::IdOf(const at::Tensor& parameter) const {
  const auto known = ids_.find(parameter.unsafeGetTensorImpl());
  if (known != ids_.end()) return known->second;
  if (auto* weight = dynamic_cast<WeightRecord*>(Record::Of(parameter));
      weight != nullptr && weight->IsWhole(parameter))
    return weight->tensor();
  ThrowStatus(MakeError(ErrorId::kBadValue,
                        absl::StrCat("a tensor of shape [", absl::StrJoin(parameter.sizes(), ", "),
                                     "] is not an attached parameter")));
}

torch::Tensor OffloadEngine::Gather(const torch::Tensor& parameter, const std::string& plane) {
  const uint32_t id = IdOf(parameter);
  const proto::Tensor& tensor = attachment_->tensor(id);
  const at::ScalarType own = parameter.scalar_type();
  // An fp32 weight is its own master, and so is a frozen one.
  const bool plain_master = own == at::kFloat || !tensor.trainable;
  const proto::PlaneSet& planes = attachment_->input().catalogue.planes(id);
  std::optional<proto::Plane> found = planes.Find(plane);
  if (plane == "master" && plain_master) found = proto::Plane::kWeight;
  if (!found.has_value()) {
    ThrowStatus(
        MakeError(ErrorId::kBadValue,
                  absl::StrCat("parameter ", Key(tensor.name), " has no plane ", Key(plane)),
                  absl::StrCat("Its planes are ", planes.Names())));
  }
  const at::ScalarType dtype = *found == proto::Plane::kWeight     ? own
                               : *found == proto::Plane::kResidual ? at::kShort
                                                                   : at::kFloat;
  at::Tensor gathered = at::empty(parameter.sizes(), at::TensorOptions().dtype(dtype));
  auto* const target = static_cast<std::byte*>(gathered.mutable_data_ptr());
  const uint64_t element_bytes = gathered.element_size();
  const auto drain = [&](uint64_t begin, uint64_t count, const std::byte* bytes) {
    std::memcpy(target + begin * element_bytes, bytes, count * element_bytes);
    return absl::OkStatus();
  };
  ThrowIfError(StreamOut(id, *found, element_bytes, drain),
               absl::StrCat("parameter ", Key(tensor.name)));
  return plane == "master" ? gathered.to(at::kFloat) : gathered;
}

absl::Status OffloadEngine::StreamOut(uint32_t id, proto::Plane plane, uint64_t element_bytes,
                                      Drain drain) {
  const uint64_t element_count = attachment_->tensor(id).element_count;
  const uint64_t extent_bytes = proto::kExtentElements * element_bytes;
  Staging::Piece piece = attachment_->staging().Take(
      std::min(kBlockBytes / 2, proto::PaddedBytes(element_count * element_bytes)));
  const uint64_t blocks = std::max<uint64_t>(piece.size_bytes() / extent_bytes, 1);
  struct Transfer {
    client::Ticket ticket;
    uint64_t begin, count, offset;
  };
  std::deque<Transfer> transfers;
  absl::Status failure;
  const auto take_oldest = [&] {
    const Transfer done = transfers.front();
    transfers.pop_front();
    failure.Update(attachment_->session().Wait(done.ticket));
    if (failure.ok())
      failure.Update(drain(done.begin, done.count, attachment_->region() + done.offset));
  };
  for (uint64_t begin = 0, block = 0; begin < element_count && failure.ok();
       begin += proto::kExtentElements, ++block) {
    if (transfers.size() == blocks) take_oldest();
    const uint64_t count = std::min<uint64_t>(element_count - begin, proto::kExtentElements);
    const uint64_t offset = piece.region_offset() + block % blocks * extent_bytes;
    transfers.push_back(
        {attachment_->session().Get(id, plane, begin, count, offset), begin, count, offset});
  }
  while (!transfers.empty()) take_oldest();
  return failure;
}

void OffloadEngine::SetInitialWeights(std::string path, LoadOptions options) {
  initial_weights_ = std::move(path);
  initial_options_ = std::move(options);
}

void OffloadEngine::LoadWeights(const std::string& path, const LoadOptions& options) {
  if (!attached_) ThrowStatus(NotAttached());
  WeightFile file = ValueOrThrow(WeightFile::Open(path, file_weights_, options), path);
  half_loaded_ = true;
  LoadFrom(file);
  ThrowIfError(attachment_->session().EndLoad(), path);
  half_loaded_ = false;
}

// The daemon drops half a load by itself, unless a step would make it part of its epoch.
void OffloadEngine::CheckWhole() const {
  if (half_loaded_)
    ThrowStatus(MakeError(ErrorId::kHalfLoaded, absl::StrCat("job ", options_.job)));
}

void OffloadEngine::SaveWeights(const std::string& folder, const SaveOptions& options) {
  if (!attached_) ThrowStatus(NotAttached());
  CheckWhole();
  auto writer = ValueOrThrow(CreateWeightFiles(folder, file_weights_, options), folder);
  for (uint32_t id = 0, at = 0; at < file_weights_.size(); ++at) {
    const FileWeight& weight = file_weights_[at];
    if (weight.ElementCount() == 0) continue;
    const uint64_t element_bytes = c10::elementSize(weight.dtype);
    const auto drain = [&](uint64_t, uint64_t count, const std::byte* bytes) {
      return writer->Append(weight.name, std::span(bytes, count * element_bytes));
    };
    ThrowIfError(StreamOut(id++, proto::Plane::kWeight, element_bytes, drain),
                 absl::StrCat("parameter ", Key(weight.name)));
  }
  ThrowIfError(writer->Commit(), folder);
}

absl::Status NotAttached() {
  return MakeError(ErrorId::kBadValue, "the engine has no model yet",
                   "Attach it with AdamW() or SGD() first");
}

Statistics OffloadEngine::statistics() const {
  const proto::SlabHeader& header = attachment_->session().slab_header();
  Statistics statistics;
  statistics.bytes_read = header.bytes_read.load(std::memory_order_relaxed);
  statistics.bytes_written = header.bytes_written.load(std::memory_order_relaxed);
  statistics.resident_bytes = header.resident_bytes.load(std::memory_order_relaxed);
  statistics.peak_bytes = header.peak_bytes.load(std::memory_order_relaxed);
  statistics.budget_bytes = ram_bytes_;
  statistics.durable_step =
      static_cast<int64_t>(header.durable_step.load(std::memory_order_relaxed));
  statistics.wait_seconds = attachment_->session().wait_seconds();
  return statistics;
}

PlanSummary OffloadEngine::plan() const {
  const Plan& plan = attachment_->plan();
  PlanSummary summary;
  if (!attached_) return summary;
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
  summary.floor_bytes = plan.floor_bytes;
  summary.floor_without_spilling_bytes = plan.floor_without_spilling_bytes;
  summary.text = DescribePlan(attachment_->input(), plan);
  return summary;
}

}  // namespace offload::zero3
