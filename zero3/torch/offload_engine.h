// zero3/torch/offload_engine.h
//
// The engine behind offload::Engine: attaches a module's parameters to a job, steps, gathers.
//
// Thread safety: as offload::Engine.
#pragma once

#include <offload/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/functional/function_ref.h"
#include "client/session.h"
#include "zero3/torch/attachment.h"
#include "zero3/torch/gradient.h"
#include "zero3/torch/named_optimizer.h"
#include "zero3/torch/trainer_state.h"
#include "zero3/torch/weight_record.h"
#include "zero3/torch/weights_io.h"

namespace offload::zero3 {

class OffloadEngine final : public Engine {
 public:
  OffloadEngine(const Options& options, uint64_t ram_bytes,
                std::unique_ptr<client::Session> session, client::JobInfo job);
  ~OffloadEngine() override;

  std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(
      torch::nn::Module& module, std::vector<torch::optim::OptimizerParamGroup> groups,
      NamedOptimizer&& optimizer) override;
  int64_t step() const override { return static_cast<int64_t>(step_); }
  void WaitDurable() override;
  void SetTrainerState(std::string blob) override;
  std::string TrainerState() const override { return state_.trainer; }
  torch::Tensor Gather(const torch::Tensor& parameter, const std::string& plane) override;
  void SetInitialWeights(std::string path, LoadOptions options) override;
  void LoadWeights(const std::string& path, const LoadOptions& options) override;
  void SaveWeights(const std::string& folder, const SaveOptions& options) override;
  Statistics statistics() const override;
  PlanSummary plan() const override;

  // ---- For the optimizer ----
  // Takes one optimizer step: `groups[i]` are the hyper-parameters of `param_groups[i]`. Nothing
  // has changed when it throws.
  void Step(std::vector<torch::optim::OptimizerParamGroup>& param_groups,
            std::vector<client::Group> groups);
  const kernels::OptimizerSpec& optimizer() const { return optimizer_; }  // the job's

  const std::shared_ptr<Attachment>& attachment() const { return attachment_; }
  bool attached() const { return attached_; }

 private:
  // A parameter of the module, or several names and tensors of one.
  struct Parameter {
    std::string name;
    at::Tensor tensor;                // the first
    std::vector<at::Tensor> aliases;  // others over the same storage
    bool trainable = false;
  };

  void Attach(torch::nn::Module& module, const kernels::OptimizerSpec& optimizer);
  static std::vector<Parameter> FindParameters(torch::nn::Module& module);
  void Declare(const std::vector<Parameter>& parameters, const kernels::OptimizerSpec& optimizer);
  void TakeOver(const std::vector<Parameter>& parameters, WeightFile* initial);
  void LoadFrom(uint32_t id, const at::Tensor& parameter);
  void LoadFrom(WeightFile& file);
  // What opens before anything of a new job is made; nothing when it takes the module's weights.
  std::optional<WeightFile> OpenInitialWeights();
  // OFD-1406 after a load that has failed midway.
  void CheckWhole() const;

  // Moves a tensor through the staging buffer, an extent at a time in order, several in flight.
  // `fill` puts elements [begin, begin + count) of the weight at an offset of the region; `drain`
  // takes them from memory that is lent for the call.
  using Fill = absl::FunctionRef<absl::Status(uint64_t begin, uint64_t count, uint64_t offset)>;
  using Drain =
      absl::FunctionRef<absl::Status(uint64_t begin, uint64_t count, const std::byte* bytes)>;
  absl::Status StreamIn(uint32_t id, Fill fill);
  absl::Status StreamOut(uint32_t id, proto::Plane plane, uint64_t element_bytes, Drain drain);
  uint32_t IdOf(const at::Tensor& parameter) const;
  Gradient* GradientOf(const at::Tensor& parameter) const;

  const Options options_;
  const uint64_t ram_bytes_;
  const bool exists_;  // the job, when it was opened
  const std::shared_ptr<Attachment> attachment_;
  kernels::OptimizerSpec optimizer_;
  uint64_t step_;
  struct TrainerState state_;
  bool attached_ = false;
  std::string initial_weights_;
  LoadOptions initial_options_;
  bool half_loaded_ = false;
  std::vector<FileWeight> file_weights_;  // of the attached module, without tensors
  std::shared_ptr<GradientWindow> gradient_window_;
  std::vector<WeightRecord*> weights_;  // by id; one reference each
  std::vector<Gradient*> gradients_;    // by id, null when frozen; one reference each
  std::unordered_map<const c10::TensorImpl*, uint32_t> ids_;  // of every attached tensor
};

// The error of a call that needs an attached module.
absl::Status NotAttached();

}  // namespace offload::zero3
