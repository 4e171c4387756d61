// Options, and which engine Open() gives: the one that offloads, or with OFFLOADD_DISABLE=1 the one
// that does not.

#include <c10/util/Exception.h>
#include <offload/torch.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "client/session.h"
#include "zero3/torch/in_memory.h"
#include "zero3/torch/offload_engine.h"
#include "zero3/torch/optimizers.h"
#include "zero3/torch/throw_status.h"

namespace offload {
namespace zero3 {
namespace {

std::string Environment(const char* name, std::string otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

bool IsDisabled() {
  const char* const value = std::getenv("OFFLOADD_DISABLE");
  return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
}

// The same arithmetic without a daemon.
class InMemoryEngine final : public Engine {
 public:
  std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(
      torch::nn::Module& module, std::vector<torch::optim::OptimizerParamGroup> groups,
      NamedOptimizer&& optimizer) override {
    return Keep(std::make_unique<InMemoryOptimizer>(std::move(groups), std::move(optimizer)),
                module);
  }
  int64_t step() const override {
    int64_t step = 0;
    for (const at::Tensor& parameter : parameters_) {
      if (const InMemoryState* state = StateOf(parameter)) step = std::max(step, state->step);
    }
    return step;
  }
  void WaitDurable() override {}
  void SetTrainerState(std::string blob) override { trainer_state_ = std::move(blob); }
  std::string TrainerState() const override { return trainer_state_; }
  torch::Tensor Gather(const torch::Tensor& parameter, const std::string& plane) override {
    if (optimizer_ == nullptr) ThrowStatus(NotAttached());
    return optimizer_->Gather(parameter, plane);
  }
  void SetInitialWeights(std::string path, LoadOptions options) override {
    initial_weights_ = std::move(path);
    initial_options_ = std::move(options);
  }
  void LoadWeights(const std::string& path, const LoadOptions& options) override {
    offload::LoadWeights(AttachedModule(), path, options);
  }
  void SaveWeights(const std::string& folder, const SaveOptions& options) override {
    offload::SaveWeights(AttachedModule(), folder, options);
  }
  Statistics statistics() const override { return {}; }
  PlanSummary plan() const override {
    PlanSummary summary;
    for (const at::Tensor& parameter : parameters_) summary.parameters += parameter.numel();
    summary.text = "OFFLOADD_DISABLE is set: everything is in memory\n";
    return summary;
  }

 private:
  std::unique_ptr<torch::optim::Optimizer> Keep(std::unique_ptr<torch::optim::Optimizer> optimizer,
                                                torch::nn::Module& module) {
    if (!initial_weights_.empty()) offload::LoadWeights(module, initial_weights_, initial_options_);
    optimizer_ = dynamic_cast<const InMemoryOptimizer*>(optimizer.get());
    module_ = &module;
    parameters_ = module.parameters();
    return optimizer;
  }
  torch::nn::Module& AttachedModule() const {
    if (module_ == nullptr) ThrowStatus(NotAttached());
    return *module_;
  }
  const InMemoryState* StateOf(const at::Tensor& parameter) const {
    return optimizer_ == nullptr ? nullptr : optimizer_->StateOf(parameter);
  }

  const InMemoryOptimizer* optimizer_ =
      nullptr;                           // the trainer's; it outlives the questions about it
  torch::nn::Module* module_ = nullptr;  // likewise
  std::vector<at::Tensor> parameters_;
  std::string trainer_state_;
  std::string initial_weights_;
  LoadOptions initial_options_;
};

}  // namespace

std::unique_ptr<torch::optim::Optimizer> OffloadEngine::MakeOptimizer(
    torch::nn::Module& module, std::vector<torch::optim::OptimizerParamGroup> groups,
    NamedOptimizer&& optimizer) {
  Attach(module, SpecOfAll(optimizer, groups));
  auto self = std::static_pointer_cast<OffloadEngine>(shared_from_this());
  return MakeOffloadOptimizer(std::move(self), std::move(groups), std::move(optimizer));
}

}  // namespace zero3

Options Options::FromEnvironment() {
  Options options;
  options.nvme_path = zero3::Environment("OFFLOADD_POOL", options.nvme_path);
  options.ram = zero3::Environment("OFFLOADD_RAM", options.ram);
  options.job = zero3::Environment("OFFLOADD_JOB", options.job);
  options.io = zero3::Environment("OFFLOADD_IO", options.io);
  return options;
}

std::shared_ptr<Engine> Engine::Open(const Options& options) {
  if (zero3::IsDisabled()) return std::make_shared<zero3::InMemoryEngine>();
  if (options.nvme_path.empty())
    zero3::ThrowStatus(MakeError(ErrorId::kPoolMissing, "nvme_path is not set"));
  if (options.ram.empty())
    zero3::ThrowStatus(
        MakeError(ErrorId::kBadValue, "ram is not set", "Set ram to a size, for example \"8GiB\""));
  const uint64_t ram_bytes = zero3::ValueOrThrow(ParseByteSize(options.ram));
  auto session = zero3::ValueOrThrow(client::Session::Connect(client::ConnectOptions()));
  client::JobOptions job;
  job.job = options.job;
  job.pool = options.nvme_path;
  job.ram_bytes = ram_bytes;
  job.io_engine = options.io;
  job.durability = options.durability;
  job.generations = static_cast<uint32_t>(std::max(options.generations, 0));
  job.update_threads = static_cast<uint32_t>(std::max(options.update_threads, 0));
  client::JobInfo info = zero3::ValueOrThrow(session->OpenJob(job));
  return std::make_shared<zero3::OffloadEngine>(options, ram_bytes, std::move(session),
                                                std::move(info));
}

}  // namespace offload
