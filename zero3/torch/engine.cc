// Options, and which engine Open() gives: the one that offloads, or with OFFLOADD_DISABLE=1 the one
// that does not.

#include <c10/util/Exception.h>
#include <offload/torch.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/environment.h"
#include "base/error.h"
#include "proto/pool_path.h"
#include "zero3/hf_layout.h"
#include "zero3/torch/device_move.h"
#include "zero3/torch/in_memory.h"
#include "zero3/torch/log.h"
#include "zero3/torch/module_engine.h"
#include "zero3/torch/open_job.h"
#include "zero3/torch/options_check.h"
#include "zero3/torch/own_optimizer.h"
#include "zero3/torch/supported_model.h"
#include "zero3/torch/throw_status.h"
#include "zero3/torch/weights_io.h"

namespace offload {
namespace zero3 {
namespace {

std::string Environment(const char* name, std::string otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

// Each once in a process, however many engines it has.
void TellUnknownVariables() {
  [[maybe_unused]] static const bool told = [] {
    for (const std::string& unknown : UnknownVariables(EnvironmentOfThisProcess()))
      Log().warn("{}", unknown);
    return true;
  }();
}

// The same arithmetic without a daemon.
class InMemoryEngine final : public Engine {
 public:
  explicit InMemoryEngine(const Options& options)
      : destination_(DestinationOf(options.device)), averaging_(AveragingOf(options)) {}

  std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(torch::nn::Module& module,
                                                         ParameterGroups groups,
                                                         NamedOptimizer&& optimizer) override {
    if (auto own = MakeSparselyKept(*this, module, groups, optimizer)) return own;
    const std::lock_guard lock(mutex_);
    groups = modules_.LeaveToOthers(module, std::move(groups));
    CheckSupportedTypes(modules_.Names(module));
    if (destination_.has_value()) MoveWithBytes(module, *destination_);
    auto made = std::make_unique<InMemoryOptimizer>(groups, std::move(optimizer), averaging_);
    return Keep(std::move(made), module, groups);
  }
  size_t AttachForeign(torch::nn::Module& module, ParameterGroups groups,
                       const std::string& optimizer, bool) override {
    const std::lock_guard lock(mutex_);
    if (averaging_.is_on())
      ThrowStatus(AverageStays(averaging_, optimizer + " runs in the trainer's process"));
    CheckSupportedTypes(modules_.Names(module));
    if (destination_.has_value()) MoveWithBytes(module, *destination_);
    const std::vector<at::Tensor> parameters = module.parameters();
    const auto is_known = [this](const at::Tensor& parameter) {
      return known_.contains(parameter.unsafeGetTensorImpl());
    };
    if (!std::all_of(parameters.begin(), parameters.end(), is_known)) Remember(module, groups);
    return 0;
  }
  void GiveForeign(size_t, torch::optim::Optimizer&) override {}
  void CommitForeign(size_t, torch::optim::Optimizer&) override { CommitStep(); }
  void CommitStep() override {
    const std::lock_guard lock(mutex_);
    ++own_steps_;
  }
  void Seal() override {}
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  std::vector<std::string> Exchange(std::string blob) override { return {std::move(blob)}; }
  // Every optimizer's steps are steps of the job.
  int64_t step() const override {
    const std::lock_guard lock(mutex_);
    int64_t steps = own_steps_;
    for (const auto& states : states_) steps += states->steps();
    return steps;
  }
  void WaitDurable() override {}
  int64_t Checkpoint() override { return step(); }
  void SetTrainerState(std::string blob) override { trainer_state_ = std::move(blob); }
  std::string TrainerState() const override { return trainer_state_; }
  torch::Tensor Gather(const torch::Tensor& parameter, const std::string& plane) override {
    const std::lock_guard lock(mutex_);
    if (names_.empty()) ThrowStatus(NotAttached());
    if (states_.empty())
      return InMemoryStates(kernels::OptimizerSpec("sgd", {})).Gather(parameter, plane);
    // The last one that had it.
    for (auto states = states_.rbegin(); states != states_.rend(); ++states) {
      if ((*states)->StateOf(parameter) != nullptr) return (*states)->Gather(parameter, plane);
    }
    return states_.front()->Gather(parameter, plane);
  }
  // Modules that are attached already take them at their first use when they are offloaded.
  void SetInitialWeights(std::string path, LoadOptions options) override {
    if (path.empty())
      ThrowStatus(MakeError(ErrorId::kFileRead, "SetInitialWeights() is given an empty path"));
    if (!names_.empty()) LoadIntoMemory(AttachedWeights(), path, options);
    initial_weights_ = std::move(path);
    initial_options_ = std::move(options);
  }
  void LoadWeights(const std::string& path, const LoadOptions& options) override {
    LoadIntoMemory(AttachedWeights(), path, options);
  }
  void SaveWeights(const std::string& folder, const SaveOptions& options) override {
    std::vector<FileWeight> weights = AttachedWeights();
    if (SavesAverage(options, averaging_.is_on())) {
      for (FileWeight& weight : weights) {
        if (!weight.is_buffer && weight.tensor.numel() > 0)
          weight.tensor = Gather(weight.tensor, "average").to(weight.dtype);
      }
    }
    SaveFromMemory(weights, folder, options);
  }
  Statistics statistics() const override { return {}; }
  PlanSummary plan() const override {
    PlanSummary summary;
    for (const at::Tensor& parameter : parameters_) summary.parameters += parameter.numel();
    summary.text = "OFFLOADD_DISABLE is set: everything is in memory\n";
    return summary;
  }

 private:
  // Gives the optimizer its groups and remembers both.
  std::unique_ptr<torch::optim::Optimizer> Keep(std::unique_ptr<torch::optim::Optimizer> optimizer,
                                                torch::nn::Module& module,
                                                const ParameterGroups& groups) {
    optimizer->param_groups().clear();
    for (const auto& group : groups) optimizer->add_param_group(group);
    Remember(module, groups);
    ForgetFormer(groups);
    states_.push_back(dynamic_cast<const InMemoryOptimizer&>(*optimizer).states());
    return optimizer;
  }
  // What others kept of these parameters that are dead, as an offloaded job does.
  void ForgetFormer(const ParameterGroups& groups) {
    const std::unordered_set<const void*> stepped = ParametersOf(groups);
    std::erase_if(states_, [&](const auto& states) {
      const bool is_former = states.use_count() == 1 && states->AreWithin(stepped);
      if (is_former) own_steps_ += states->steps();
      return is_former;
    });
  }
  void Remember(torch::nn::Module& module, const ParameterGroups& groups) {
    modules_.CheckFree(groups);
    const std::vector<NamedTensor> names = modules_.Names(module);
    const std::vector<NamedTensor> buffers = modules_.BufferNames(module);
    bool has_new = false;
    for (const NamedTensor& named : names) {
      if (!named.tensor.defined() || !known_.insert(named.tensor.unsafeGetTensorImpl()).second)
        continue;
      parameters_.push_back(named.tensor);
      has_new = true;
    }
    if (has_new) {
      if (!initial_weights_.empty()) LoadInitial(names, buffers);
      buffers_.insert(buffers_.end(), buffers.begin(), buffers.end());
      names_.insert(names_.end(), names.begin(), names.end());
    }
    modules_.Add(module, has_new);
    modules_.Claim(groups);
  }
  // What the file has for this module; the others take theirs when they are attached.
  void LoadInitial(const std::vector<NamedTensor>& names,
                   const std::vector<NamedTensor>& buffers) const {
    std::vector<FileWeight> weights = ValueOrThrow(FindFileWeights(names));
    ThrowIfError(AddFileBuffers(buffers, weights));
    LoadOptions options = initial_options_;
    for (const std::string& name : ValueOrThrow(HfCheckpoint::Open(initial_weights_)).Names()) {
      if (ModuleList::NumberOf(name) != ModuleList::NumberOf(names.front().name))
        options.ignored.push_back(name);
    }
    LoadIntoMemory(weights, initial_weights_, options);
  }
  std::vector<FileWeight> AttachedWeights() const {
    if (names_.empty()) ThrowStatus(NotAttached());
    const bool are_there = modules_.AreAllThere();  // and may have grown
    std::vector<FileWeight> weights =
        ValueOrThrow(FindFileWeights(are_there ? modules_.NamesNow() : names_));
    ThrowIfError(AddFileBuffers(are_there ? modules_.BufferNamesNow() : buffers_, weights));
    return weights;
  }
  const std::optional<c10::Device> destination_;
  const Averaging averaging_;
  mutable std::mutex mutex_;  // threads may attach at once
  ModuleList modules_;
  std::vector<std::shared_ptr<InMemoryStates>> states_;  // one of each optimizer
  int64_t own_steps_ = 0;                                // of optimizers that are not ours, or dead
  std::vector<NamedTensor> names_, buffers_;
  std::vector<at::Tensor> parameters_;  // each once
  std::unordered_set<const void*> known_;
  std::string trainer_state_;
  std::string initial_weights_;
  LoadOptions initial_options_;
};

}  // namespace

}  // namespace zero3

Options Options::FromEnvironment() {
  Options options;
  options.nvme_path = zero3::Environment("OFFLOADD_POOL", options.nvme_path);
  options.ram = zero3::Environment("OFFLOADD_RAM", options.ram);
  options.job = zero3::Environment("OFFLOADD_JOB", options.job);
  options.io = zero3::Environment("OFFLOADD_IO", options.io);
  options.device = zero3::Environment("OFFLOADD_DEVICE", options.device);
  options.gpu_ram = zero3::Environment("OFFLOADD_GPU_RAM", options.gpu_ram);
  return options;
}

std::shared_ptr<Engine> Engine::Open(const Options& options) {
  zero3::ThrowIfError(CheckEnvironment(EnvironmentOfThisProcess()));
  zero3::TellUnknownVariables();
  const client::World world = zero3::WorldOf(options);
  if (zero3::IsDisabled()) {
    if (world.world_size == 1) return std::make_shared<zero3::InMemoryEngine>(options);
    zero3::ThrowStatus(MakeError(ErrorId::kBadValue,
                                 absl::StrCat(world.world_size,
                                              " ranks cannot train in memory: nobody would add "
                                              "their gradients (OFFLOADD_DISABLE, --offload off)"),
                                 "Compare with one process that takes all micro-batches"));
  }
  if (options.nvme_path.empty())
    zero3::ThrowStatus(MakeError(ErrorId::kPoolMissing, "nvme_path is not set"));
  if (options.ram.empty())
    zero3::ThrowStatus(
        MakeError(ErrorId::kBadValue, "ram is not set", "Set ram to a size, for example \"8GiB\""));
  const uint64_t ram_bytes = zero3::CheckOptions(options);
  // The program may go to another folder before a store is laid out anew, or memory is paged.
  Options from_anywhere = options;
  from_anywhere.nvme_path = proto::AbsolutePools(options.nvme_path);
  zero3::OpenedJob opened = zero3::OpenJob(from_anywhere, world, ram_bytes);
  return std::make_shared<zero3::ModuleEngine>(std::make_shared<zero3::TensorEngine>(
      from_anywhere, ram_bytes, std::move(opened.session), std::move(opened.info)));
}

}  // namespace offload
