// An ordinary libtorch trainer. Offloading is one call, in MakeOptimizer(): everything else is what
// it would be without.
#include "examples/train.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <offload/torch.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <numeric>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "examples/amx_probe.h"
#include "examples/flags.h"
#include "examples/language_model.h"
#include "examples/model_config.h"
#include "examples/report.h"
#include "examples/text_data.h"
#include "zero3/hf_layout.h"

namespace offload::examples {
namespace {

constexpr int64_t kEvaluationBatches = 4;
constexpr int64_t kPromptTokens = 32;
constexpr int64_t kStepsCompared = 10;  // with the plan
constexpr double kSampleTemperature = 0.8;

constexpr int kFailed = 1;
constexpr int kUsageError = 2;

class Stopwatch {
 public:
  // Seconds since the last call, or since construction.
  double Lap() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// The mean loss of one batch, [rows, length + 1] tokens row after row.
torch::Tensor Loss(LanguageModel& model, std::vector<int64_t> batch, int64_t rows,
                   c10::Device device) {
  const at::Tensor tokens = torch::tensor(batch, at::kLong)
                                .view({rows, static_cast<int64_t>(batch.size()) / rows})
                                .to(device);
  const int64_t length = tokens.size(1) - 1;
  const at::Tensor logits = model.forward(tokens.narrow(1, 0, length));
  return at::cross_entropy_loss(logits.reshape({rows * length, -1}).to(at::kFloat),
                                tokens.narrow(1, 1, length).reshape({-1}));
}

// Old checkpoints of tied models hold the output matrix, too.
LoadOptions LoadOptionsOf(const ModelShape& shape) {
  return {.ignored = shape.tied_embedding ? std::vector<std::string>{"lm_head.weight"}
                                          : std::vector<std::string>{}};
}

// What a rank has measured, for all ranks to see.
std::string ToBytes(const std::vector<double>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)};
}
double ValueAt(const std::string& bytes, size_t index) {
  double value = 0;
  std::memcpy(&value, bytes.data() + index * sizeof(value), sizeof(value));
  return value;
}

// With an engine the model is never whole in memory, not even while it is made, nor in that of a
// device, where it goes when it is attached.
std::shared_ptr<LanguageModel> NewModel(const Flags& flags, const ModelShape& shape,
                                        c10::Device device, const std::shared_ptr<Engine>& engine) {
  std::optional<InitGuard> guard;
  if (engine != nullptr) guard.emplace(engine);
  torch::manual_seed(flags.seed);
  const std::shared_ptr<LanguageModel> model = MakeModel(shape);
  if (flags.precision == Precision::kBFloat16) model->to(at::kBFloat16);
  if (engine == nullptr && !flags.init_from.empty()) {
    LoadWeights(*model, flags.init_from, LoadOptionsOf(shape));
  }
  if (engine == nullptr) model->to(device);
  return model;
}

std::shared_ptr<Engine> OpenEngine(const Flags& flags, const ModelShape& shape,
                                   c10::Device device) {
  if (!flags.offload) {
    // Under a launcher of several processes each would train a model of its own: refused.
    setenv("OFFLOADD_DISABLE", "1", /*overwrite=*/1);
    Engine::Open(Options());
    return nullptr;
  }
  Options options = Options::FromEnvironment();
  options.nvme_path = flags.nvme_path;
  options.ram = flags.ram;
  options.gpu_ram = flags.gpu_ram;
  options.device = device.str();
  options.job = flags.job;
  options.io = flags.io;
  options.durability = flags.durability;
  options.update_in_backward = flags.update_in_backward;
  options.generations = static_cast<int>(flags.generations);
  options.zero_stage = static_cast<int>(flags.zero_stage);
  options.weights_home = flags.weights_home;
  options.state_home = flags.state_home;
  std::shared_ptr<Engine> engine = Engine::Open(options);
  if (!flags.init_from.empty()) engine->SetInitialWeights(flags.init_from, LoadOptionsOf(shape));
  return engine;
}

// The only place where offloading differs from training in memory.
std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(const Flags& flags, LanguageModel& model,
                                                       Engine* engine) {
  if (flags.optimizer == OptimizerKind::kSgd) {
    const auto options = torch::optim::SGDOptions(flags.learning_rate)
                             .momentum(flags.momentum)
                             .weight_decay(flags.weight_decay);
    return engine != nullptr ? engine->SGD(model, options) : InMemorySGD(model, options);
  }
  const auto options =
      torch::optim::AdamWOptions(flags.learning_rate).weight_decay(flags.weight_decay);
  constexpr AdamWFlavour kFastest = AdamWFlavour::kFused;
  return engine != nullptr ? engine->AdamW(model, options, kFastest)
                           : InMemoryAdamW(model, options, kFastest);
}

// Bytes of weights (as fp32 masters) and optimizer state of the run in memory.
uint64_t StateBytes(const Flags& flags, int64_t parameters) {
  const bool has_one_plane = flags.optimizer == OptimizerKind::kSgd && flags.momentum == 0;
  const uint64_t planes = flags.optimizer == OptimizerKind::kAdamW ? 3 : has_one_plane ? 1 : 2;
  return planes * sizeof(float) * static_cast<uint64_t>(parameters);
}

class Trainer {
 public:
  Trainer(const Flags& flags, const ModelShape& shape, c10::Device device, const TextData& data)
      : flags_(flags),
        shape_(shape),
        device_(device),
        data_(data),
        engine_(OpenEngine(flags, shape, device)),
        rank_(engine_ != nullptr ? engine_->rank() : 0),
        world_size_(engine_ != nullptr ? engine_->world_size() : 1),
        model_(NewModel(flags, shape, device, engine_)),
        optimizer_(MakeOptimizer(flags, *model_, engine_.get())),
        reporter_(flags.json, rank_ == 0 ? std::cout : silence_) {
    if (engine_ != nullptr) engine_->Seal();  // what there is to refuse is refused here
    if (flags.as_ranks > 1) ScaleGradients(1.0 / static_cast<double>(flags.as_ranks));
  }

  void Run() {
    int64_t step = engine_ != nullptr ? engine_->step() : 0;
    ReportStart(step);
    last_ = ReadStatistics();
    while (step < flags_.steps) {
      StepReport report = Step(step);
      ReportStep(++step, report);
      if (rank_ == 0 && flags_.eval_every > 0 && step % flags_.eval_every == 0) {
        reporter_.Evaluation(step, EvaluationLoss());
      }
    }
    if (rank_ == 0) Finish(step);
  }

 private:
  // What one rank does for all.
  void Finish(int64_t step) {
    if (flags_.eval_every == 0 || step % flags_.eval_every != 0) {
      reporter_.Evaluation(step, EvaluationLoss());
    }
    if (flags_.sample_bytes > 0) reporter_.Sample(step, Sample());
    if (engine_ != nullptr) engine_->WaitDurable();
    if (!flags_.export_folder.empty()) Export();
    reporter_.End(step, ReadStatistics().durable_step,
                  flags_.checksums ? Checksums() : std::map<std::string, uint32_t>());
  }

  // What the job keeps of every parameter, by the names of Engine::Gather.
  std::vector<std::string> Planes() const {
    if (flags_.optimizer == OptimizerKind::kAdamW)
      return {"weight", "master", "exp_avg", "exp_avg_sq"};
    if (flags_.momentum == 0) return {"weight", "master"};
    return {"weight", "master", "momentum_buffer"};
  }

  std::map<std::string, uint32_t> Checksums() {
    std::map<std::string, uint32_t> checksums;
    for (const std::string& plane : Planes()) {
      uint32_t& checksum = checksums[plane];
      for (const at::Tensor& parameter : model_->parameters()) {
        const at::Tensor values = engine_->Gather(parameter, plane).contiguous();
        checksum = Crc32c(checksum, values.const_data_ptr(), values.nbytes());
      }
    }
    return checksums;
  }

  // Every gradient of a micro-batch, before it is added to the others.
  void ScaleGradients(double factor) {
    for (const at::Tensor& parameter : model_->parameters()) {
      parameter.register_hook([factor](const at::Tensor& gradient) { return gradient * factor; });
    }
  }

  // Takes one optimizer step; `step` counts the steps before it.
  StepReport Step(int64_t step) {
    StepReport report;
    report.learning_rate = LearningRate(flags_, step);
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(report.learning_rate);
    Stopwatch stopwatch;
    std::vector<double> losses;
    const int64_t micro_batches_of_rank = flags_.micro_batches / flags_.as_ranks;
    for (int64_t micro_batch = 0; micro_batch < flags_.micro_batches; ++micro_batch) {
      const int64_t number = micro_batch * world_size_ + rank_;
      const at::Tensor loss =
          Loss(*model_, data_.TrainingBatch(flags_.seed, step, number, flags_.batch_rows),
               flags_.batch_rows, device_);
      losses.push_back(loss.item<double>());
      report.seconds.forward += stopwatch.Lap();
      (loss / static_cast<double>(micro_batches_of_rank)).backward();
      report.seconds.backward += stopwatch.Lap();
    }
    report.loss = MeanLoss(losses);
    if (flags_.clip > 0) {
      report.grad_norm = torch::nn::utils::clip_grad_norm_(model_->parameters(), flags_.clip);
    }
    optimizer_->step();
    optimizer_->zero_grad();
    report.seconds.step = stopwatch.Lap();
    return report;
  }

  // Over the micro-batches of all ranks, in the order of their numbers.
  double MeanLoss(const std::vector<double>& losses) {
    std::vector<std::string> ranks = {ToBytes(losses)};
    if (world_size_ > 1) ranks = engine_->Exchange(ranks.front());
    const auto count = static_cast<double>(losses.size() * ranks.size());
    double mean = 0;
    for (size_t micro_batch = 0; micro_batch < losses.size(); ++micro_batch) {
      for (const std::string& rank : ranks) mean += ValueAt(rank, micro_batch) / count;
    }
    return mean;
  }

  double EvaluationLoss() {
    const at::NoGradGuard no_gradients;
    double sum = 0;
    for (int64_t index = 0; index < kEvaluationBatches; ++index) {
      auto batch = data_.EvaluationBatch(index, kEvaluationBatches, flags_.batch_rows);
      sum += Loss(*model_, std::move(batch), flags_.batch_rows, device_).item<double>();
    }
    return sum / static_cast<double>(kEvaluationBatches);
  }

  // Continues a held-out prompt, one byte at a time; no cache of keys and values, to stay short.
  std::string Sample() {
    const at::NoGradGuard no_gradients;
    std::vector<int64_t> tokens = data_.Prompt(std::min(kPromptTokens, flags_.sequence_length));
    std::string text;
    for (int64_t index = 0; index < flags_.sample_bytes; ++index) {
      const int64_t count = static_cast<int64_t>(tokens.size());
      const int64_t length = std::min(count, flags_.sequence_length);
      const at::Tensor input =
          torch::tensor(tokens, at::kLong).narrow(0, count - length, length).unsqueeze(0);
      const at::Tensor logits =
          model_->forward(input.to(device_)).select(1, length - 1).select(0, 0).cpu();
      const int64_t token = Choose(logits.to(at::kDouble) / kSampleTemperature, index);
      tokens.push_back(token);
      if (token == kEndOfText) break;
      if (token < kBeginOfText) text.push_back(static_cast<char>(token));
    }
    return text;
  }

  // Draws a token with the probabilities of the logits; a pure function of seed and index.
  int64_t Choose(const at::Tensor& logits, int64_t index) const {
    const at::Tensor cumulative = at::softmax(logits, 0).cumsum(0);
    const double draw =
        static_cast<double>(Mix(flags_.seed, static_cast<uint64_t>(index)) >> 11) * 0x1p-53;
    const int64_t token = at::sum(cumulative <= draw).item<int64_t>();
    return std::min(token, logits.size(0) - 1);
  }

  // As transformers reads it.
  void Export() {
    const SaveOptions options{.shard_bytes = flags_.export_shard_bytes};
    if (engine_ != nullptr) {
      engine_->SaveWeights(flags_.export_folder, options);
    } else {
      SaveWeights(*model_, flags_.export_folder, options);
    }
    const bool is_half = flags_.precision == Precision::kBFloat16;
    const absl::Status written =
        zero3::WriteTextFile(flags_.export_folder + "/config.json",
                             ModelConfigText(shape_, is_half ? "bfloat16" : "float32"));
    if (!written.ok()) throw std::runtime_error(std::string(written.message()));
    std::cerr << "exported to " << flags_.export_folder << std::endl;
  }

  Statistics ReadStatistics() const {
    return engine_ != nullptr ? engine_->statistics() : Statistics();
  }

  void ReportStart(int64_t resumed_step) {
    StartReport report;
    report.parameters = static_cast<int64_t>(ParameterCount(shape_));
    report.model = absl::StrFormat("%s, %.1f M parameters", Describe(shape_),
                                   static_cast<double>(report.parameters) * 1e-6);
    report.resumed_step = resumed_step;
    report.steps = flags_.steps;
    if (engine_ != nullptr) {
      const PlanSummary plan = engine_->plan();
      const double parameters = static_cast<double>(plan.parameters);
      const auto further = static_cast<double>(flags_.micro_batches - 1);
      report.state_bytes = plan.state_bytes;
      report.gradient_bytes = plan.gradient_bytes;
      report.planned_read_bytes = parameters * (plan.read_bytes_per_parameter +
                                                further * plan.further_read_bytes_per_parameter);
      report.planned_write_bytes = parameters * (plan.write_bytes_per_parameter +
                                                 further * plan.further_write_bytes_per_parameter);
      report.planned_memory_bytes = plan.total_bytes;
      report.ram_bytes = engine_->statistics().budget_bytes;
      comparison_ = {.planned_read_bytes = report.planned_read_bytes,
                     .planned_write_bytes = report.planned_write_bytes,
                     .planned_memory_bytes = plan.total_bytes};
      if (rank_ == 0) std::cerr << plan.text << std::endl;
    } else {
      report.state_bytes = StateBytes(flags_, report.parameters);
      report.gradient_bytes = static_cast<uint64_t>(report.parameters) *
                              (flags_.precision == Precision::kBFloat16 ? 2 : 4);
    }
    reporter_.Start(report);
  }

  void ReportStep(int64_t step, StepReport& report) {
    const Statistics now = ReadStatistics();
    report.step = step;
    report.steps = flags_.steps;
    report.tokens = world_size_ * flags_.micro_batches * flags_.batch_rows * flags_.sequence_length;
    report.seconds.wait = now.wait_seconds - last_.wait_seconds;
    report.bytes_read = now.bytes_read - last_.bytes_read;
    report.bytes_written = now.bytes_written - last_.bytes_written;
    report.resident_bytes = now.resident_bytes;
    report.peak_bytes = now.peak_bytes;
    report.durable_epoch = now.durable_step;
    last_ = now;
    reporter_.Step(report);
    if (comparison_.planned_memory_bytes > 0) ComparePlan(report);
  }

  // Once, after the first steps, but for that in which the order of tensors is learned, and the
  // next, beside which the update of the first one runs: of a new job's state it has nothing to
  // read.
  void ComparePlan(const StepReport& report) {
    if (++steps_reported_ <= 2 || comparison_.steps == kStepsCompared) return;
    ++comparison_.steps;
    comparison_.read_bytes += static_cast<double>(report.bytes_read) / kStepsCompared;
    comparison_.written_bytes += static_cast<double>(report.bytes_written) / kStepsCompared;
    comparison_.peak_bytes = report.peak_bytes;
    if (comparison_.steps == kStepsCompared) reporter_.Plan(comparison_);
  }

  const Flags& flags_;
  const ModelShape& shape_;
  const c10::Device device_;
  const TextData& data_;
  std::shared_ptr<Engine> engine_;  // null with --offload off
  const int64_t rank_, world_size_;
  std::shared_ptr<LanguageModel> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::ostream silence_{nullptr};
  Reporter reporter_;
  Statistics last_;
  PlanComparison comparison_;
  int64_t steps_reported_ = 0;
};

absl::StatusOr<ModelShape> ShapeOf(const Flags& flags) {
  if (!flags.init_from.empty()) return ReadModelConfig(flags.init_from, flags.sequence_length);
  return zero3::ShapeForParameters({.kind = flags.model,
                                    .parameters = static_cast<uint64_t>(flags.parameters),
                                    .key_value_heads = flags.key_value_heads,
                                    .context = flags.sequence_length,
                                    .tied_embedding = flags.tied_embedding});
}

// The device of torch that --device names.
absl::StatusOr<c10::Device> DeviceOf(const Flags& flags) {
  std::optional<c10::Device> device;
  try {
    device.emplace(flags.device);
  } catch (const c10::Error&) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrFormat("--device %s is no device of this program", flags.device),
                     "Use cpu, or cuda");
  }
  if (!device->is_cuda()) return *device;
  const char* const local_rank = std::getenv("LOCAL_RANK");  // torchrun's
  if (!device->has_index() && local_rank != nullptr)
    device->set_index(static_cast<c10::DeviceIndex>(std::atoi(local_rank)));
  // Programs that do not need it are not linked with it: it costs half a second and 2 GB of
  // addresses. Torch looks for it once.
  dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL);
  if (!at::globalContext().hasCUDA()) {
    return MakeError(ErrorId::kGpuMissing,
                     absl::StrFormat("--device %s, and torch finds no GPU", flags.device));
  }
  return *device;
}

absl::Status Train(const Flags& flags) {
  if (!flags.export_folder.empty()) {
    OFFLOAD_RETURN_IF_ERROR(zero3::CheckHoldsNoCheckpoint(flags.export_folder));
  }
  OFFLOAD_ASSIGN_OR_RETURN(const c10::Device device, DeviceOf(flags));
  OFFLOAD_ASSIGN_OR_RETURN(const ModelShape shape, ShapeOf(flags));
  OFFLOAD_ASSIGN_OR_RETURN(std::vector<uint16_t> tokens, ReadTokens(flags.text_paths));
  OFFLOAD_ASSIGN_OR_RETURN(const TextData data,
                           TextData::Make(std::move(tokens), flags.sequence_length));
  if (flags.threads > 0) at::set_num_threads(static_cast<int>(flags.threads));
  Trainer(flags, shape, device, data).Run();
  return absl::OkStatus();
}

void MultiplyInHalfPrecision() {
  const at::Tensor matrix = at::ones({256, 256}, at::kBFloat16);
  at::matmul(matrix, matrix);
}

}  // namespace

int TrainMain(int argc, char** argv) {
  const absl::StatusOr<Flags> flags = ParseFlags(argc, argv);
  if (!flags.ok()) {
    std::cerr << flags.status().message() << std::endl;
    return kUsageError;
  }
  if (flags->help) {
    std::cout << flags->help_text;
    return 0;
  }
  if (flags->precision == Precision::kBFloat16) AvoidBrokenAmx(argv, MultiplyInHalfPrecision);
  try {
    const absl::Status status = Train(*flags);
    if (status.ok()) return 0;
    std::cerr << status.message() << std::endl;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {  // offload::Error among them: what() begins with OFD-nnnn
    std::cerr << error.what() << std::endl;
  }
  return kFailed;
}

}  // namespace offload::examples
