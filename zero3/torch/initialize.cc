// Engine::Initialize: a DeepSpeed configuration becomes options, an optimizer and its clipping.

#include <offload/torch.h>
#include <torch/nn/utils/clip_grad.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "client/rank_environment.h"
#include "config/ds_config.h"
#include "config/toml_file.h"
#include "zero3/torch/option_text.h"
#include "zero3/torch/throw_status.h"

namespace offload {
namespace zero3 {
namespace {

using config::Json;

// Clips, then lets the daemon's optimizer step with the options that the groups have here.
class ClippingOptimizer final : public torch::optim::Optimizer {
 public:
  ClippingOptimizer(std::unique_ptr<torch::optim::Optimizer> inner, double most)
      : Optimizer(Groups(*inner), inner->defaults().clone()),
        inner_(std::move(inner)),
        most_(most) {}

  torch::Tensor step(LossClosure closure) override {
    torch::Tensor loss;
    if (closure != nullptr) {
      const torch::AutoGradMode with_gradients(true);
      loss = closure();
    }
    std::vector<at::Tensor> parameters;
    for (size_t i = 0; i < param_groups().size(); ++i) {
      inner_->param_groups().at(i).set_options(param_groups()[i].options().clone());
      const auto& group = param_groups()[i].params();
      parameters.insert(parameters.end(), group.begin(), group.end());
    }
    torch::nn::utils::clip_grad_norm_(parameters, most_);
    inner_->step();
    return loss;
  }

 private:
  static std::vector<torch::optim::OptimizerParamGroup> Groups(torch::optim::Optimizer& inner) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (const auto& group : inner.param_groups())
      groups.emplace_back(group.params(), group.options().clone());
    return groups;
  }

  const std::unique_ptr<torch::optim::Optimizer> inner_;
  const double most_;
};

Options OptionsOf(const config::Settings& settings) {
  Options options;
  for (const auto& [name, value] : settings.EngineOptions()) SetOption(options, name, value);
  return options;
}

// A number of the optimizer; "auto" is decided by nobody here.
double Number(const config::Training& training, const char* name,
              std::optional<double> otherwise = std::nullopt) {
  const Json& value = training.optimizer_params.at(name);
  if (value.is_number()) return value.get<double>();
  if (otherwise.has_value()) return *otherwise;
  ThrowStatus(
      MakeError(ErrorId::kDsConfigMissing,
                absl::StrCat("optimizer.params.", name, " is \"auto\", and nobody has decided it"),
                "Write a number"));
}

std::tuple<double, double> Betas(const config::Training& training, double first, double second) {
  const Json& betas = training.optimizer_params.at("betas");
  if (!betas.is_array()) return {first, second};
  return {betas.at(0).get<double>(), betas.at(1).get<double>()};
}

bool Flag(const config::Training& training, const char* name) {
  return training.optimizer_params.at(name) == true;
}

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(Engine& engine, torch::nn::Module& module,
                                                       const config::Training& training) {
  const double lr = Number(training, "lr"), decay = Number(training, "weight_decay", 0);
  const std::string& kind = training.optimizer;
  if (kind == "AdamW") {
    return engine.AdamW(module, torch::optim::AdamWOptions(lr)
                                    .betas(Betas(training, 0.9, 0.999))
                                    .eps(Number(training, "eps", 1e-8))
                                    .weight_decay(decay));
  }
  if (kind == "Adam") {
    return engine.Adam(module, torch::optim::AdamOptions(lr)
                                   .betas(Betas(training, 0.9, 0.999))
                                   .eps(Number(training, "eps", 1e-8))
                                   .weight_decay(decay));
  }
  if (kind == "SGD") {
    return engine.SGD(module, torch::optim::SGDOptions(lr)
                                  .momentum(Number(training, "momentum", 0))
                                  .dampening(Number(training, "dampening", 0))
                                  .weight_decay(decay)
                                  .nesterov(Flag(training, "nesterov")));
  }
  if (kind == "Adagrad") {
    return engine.Adagrad(
        module,
        torch::optim::AdagradOptions(lr).eps(Number(training, "eps", 1e-10)).weight_decay(decay));
  }
  if (kind == "RMSprop") {
    return engine.RMSprop(module, torch::optim::RMSpropOptions(lr)
                                      .alpha(Number(training, "alpha", 0.99))
                                      .eps(Number(training, "eps", 1e-8))
                                      .weight_decay(decay)
                                      .momentum(Number(training, "momentum", 0))
                                      .centered(Flag(training, "centered")));
  }
  return engine.Lion(module, LionOptions(lr).betas(Betas(training, 0.9, 0.99)).weight_decay(decay));
}

// The path of a file, or the text itself.
std::string TextOf(const std::string& given) {
  std::error_code error;
  if (given.size() < 4096 && std::filesystem::exists(given, error))
    return ValueOrThrow(config::ReadSmallFile(given));
  if (given.find('{') != std::string::npos) return given;
  if (given.empty())
    ThrowStatus(MakeError(ErrorId::kBadValue, "ds_config is empty",
                          "Give the path of a DeepSpeed configuration, or its JSON"));
  ThrowStatus(MakeError(ErrorId::kFileRead, absl::StrCat(given, " cannot be read")));
}

void CheckTraining(const config::Training& training) {
  if (training.optimizer.empty()) {
    ThrowStatus(MakeError(ErrorId::kDsConfigMissing, "the configuration has no optimizer",
                          "Add one, or use Engine::Open() and AdamW()"));
  }
  if (!training.scheduler.empty()) {
    ThrowStatus(MakeError(
        ErrorId::kDsConfigUnsupported,
        absl::StrCat("scheduler.type = ", training.scheduler, ": in C++ schedules are the loop's"),
        "Remove the section, and set lr in param_groups()"));
  }
  if (training.load_universal) {
    ThrowStatus(
        MakeError(ErrorId::kDsConfigUnsupported,
                  "checkpoint.load_universal = true: in C++ no universal checkpoint is loaded",
                  "Remove the key, and make the job with offloadctl import"));
  }
  if (training.autocast) {
    ThrowStatus(MakeError(ErrorId::kDsConfigUnsupported,
                          "torch_autocast.enabled = true: in C++ forward passes are the loop's",
                          "Remove the section, and use at::autocast in the loop"));
  }
}

void CheckFp16(const config::Import& import) {
  for (const config::Fate& fate : import.fates) {
    if (fate.verdict != config::Verdict::kMapped || fate.key != "fp16.enabled") continue;
    ThrowStatus(MakeError(ErrorId::kDsConfigUnsupported,
                          "fp16.enabled = true: in C++ the loop scales its losses",
                          "Set bf16, or remove the section, cast the module to torch::kHalf and "
                          "use offload::GradScaler"));
  }
}

}  // namespace
}  // namespace zero3

Initialized Engine::Initialize(torch::nn::Module& module, const std::string& ds_config) {
  const auto environment = config::ProcessEnvironment();
  config::Settings settings = zero3::ValueOrThrow(config::ReadFiles("", environment));
  config::Settings variables;
  zero3::ThrowIfError(config::ReadEnvironment(environment, variables));

  config::ImportOptions import_options;
  import_options.name = ds_config.find('{') == std::string::npos ? ds_config : "ds_config";
  import_options.processors = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  import_options.has_pool = settings.has("pool") || variables.has("pool");
  import_options.world_size =
      zero3::ValueOrThrow(client::WorldFromEnvironment(client::EnvironmentOfProcess(), ::getppid()))
          .world_size;
  const config::Import import =
      zero3::ValueOrThrow(config::ImportDsConfig(zero3::TextOf(ds_config), import_options));
  zero3::ThrowIfError(import.Problem());
  zero3::CheckTraining(import.training);
  zero3::CheckFp16(import);
  settings.Override(import.settings);
  settings.Override(variables);

  Initialized made;
  made.report = config::ImportTable(import);
  made.accumulation = import.training.accumulation.value_or(1);
  if (import.training.bf16.value_or(false)) module.to(torch::kBFloat16);
  made.engine = Open(zero3::OptionsOf(settings));
  made.optimizer = zero3::MakeOptimizer(*made.engine, module, import.training);
  // "auto": nobody has decided it, so that DeepSpeed's own default counts.
  const double clipping = import.training.gradient_clipping.value_or(1.0);
  if (clipping > 0) {
    made.optimizer =
        std::make_unique<zero3::ClippingOptimizer>(std::move(made.optimizer), clipping);
  }
  return made;
}

}  // namespace offload
