// The public names of the optimizers: what torch's options are in the table, and the functions of
// <offload/torch.h> that take them. An optimizer stands here in one place.
#include "zero3/torch/named_optimizer.h"

#include <offload/torch.h>

#include <tuple>
#include <typeinfo>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "zero3/torch/in_memory.h"
#include "zero3/torch/own_options.h"
#include "zero3/torch/throw_status.h"

namespace offload {
namespace zero3 {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;

template <class Options>
constexpr bool kIsTorchs =
    OptionsList<torch::optim::AdamWOptions, torch::optim::AdamOptions, torch::optim::SGDOptions,
                torch::optim::AdagradOptions, torch::optim::RMSpropOptions>::kHas<Options>;

// `spec_of` reads options of the class.
template <class Options, class SpecOf>
NamedOptimizer Named(Options defaults, SpecOf spec_of, bool counts_as_write = false) {
  static_assert(kIsTorchs<Options> || OwnOptions::kHas<Options>, "to be listed in own_options.h");
  return {
      .defaults = std::make_unique<Options>(std::move(defaults)),
      .spec_of =
          [spec_of](const OptimizerOptions& any) {
            const auto* const options = dynamic_cast<const Options*>(&any);
            if (options == nullptr) {
              ThrowStatus(MakeError(ErrorId::kBadValue,
                                    "a group of parameters has the options of another optimizer"));
            }
            return spec_of(*options);
          },
      .counts_as_write = counts_as_write};
}

}  // namespace

std::unordered_set<const void*> ParametersOf(std::span<const OptimizerParamGroup> groups) {
  std::unordered_set<const void*> parameters;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& parameter : group.params())
      parameters.insert(parameter.unsafeGetTensorImpl());
  }
  return parameters;
}

std::vector<OptimizerParamGroup> OneGroup(const torch::nn::Module& module) {
  std::vector<at::Tensor> parameters;
  std::unordered_set<const void*> seen;
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.defined() && seen.insert(parameter.unsafeGetTensorImpl()).second)
      parameters.push_back(parameter);
  }
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::move(parameters));
  return groups;
}

kernels::OptimizerSpec CheckedSpec(const NamedOptimizer& optimizer,
                                   const OptimizerOptions& options) {
  const kernels::OptimizerSpec spec = optimizer.spec_of(options);
  const std::string violation = spec.Violation();
  if (violation.empty()) return spec;
  ThrowStatus(MakeError(ErrorId::kBadValue,
                        absl::StrCat("optimizer options that cannot be: ", violation),
                        "Set it in the options of the group (param_groups()[i].options()) before "
                        "the step; a schedule "
                        "or a loss may have made it, too"));
}

// As the constructors of torch's classes do, which look at the defaults only: those of groups may
// be changed to anything later.
static void CheckDefaults(const kernels::OptimizerSpec& defaults) {
  const std::string violation = defaults.ViolationWhenNew();
  if (violation.empty()) return;
  ThrowStatus(MakeError(
      ErrorId::kBadValue,
      absl::StrCat("options that an optimizer cannot be made with: ", violation),
      "Make it with others, as torch's classes demand; those of a group may be changed later"));
}

void CheckEachOnce(std::span<const OptimizerParamGroup> groups) {
  std::unordered_set<const void*> seen;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) {
        ThrowStatus(MakeError(
            ErrorId::kBadValue,
            absl::StrCat("a parameter of shape [", absl::StrJoin(parameter.sizes(), ", "),
                         "] is in two places of the optimizer's groups, and every step would "
                         "update it twice; parameters() of a module names those of a submodule "
                         "that is registered in two places twice"),
            "Give the optimizer every parameter once: register the shared submodule in one place, "
            "or make the optimizer with engine->AdamW(module, …) or its siblings, which take each "
            "once"));
      }
    }
  }
}

void CheckKeeps(const kernels::OptimizerSpec& kept, const kernels::OptimizerSpec& needed) {
  for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
    const kernels::StatePlane* const plane = needed.Plane(i);
    if (plane == nullptr || kept.Plane(i) != nullptr) continue;
    ThrowStatus(MakeError(
        ErrorId::kUnsupportedOptimizer,
        absl::StrCat("options that need ", plane->name, ", for a job that was made without"),
        "Give the optimizer these options when it is made, with a new job"));
  }
}

absl::Status AverageStays(const Averaging& averaging, const std::string& what) {
  return MakeError(
      ErrorId::kUnsupportedOptimizer, absl::StrCat("average is ", averaging.Text(), ", and ", what),
      "An average moves with every update that the daemon makes, from the first one on. Leave the "
      "option out and average in the trainer, or train with AdamW, Adam, SGD, Adagrad, RMSprop, "
      "Lion or LAMB, dense gradients and a new optimizer");
}

absl::Status AverageHasMovedOtherwise(const Averaging& averaging, const std::string& what,
                                      uint64_t given, uint64_t here) {
  return MakeError(ErrorId::kUnsupportedOptimizer,
                   absl::StrCat("average is ", averaging.Text(), ", and a state of ", given,
                                " updates of ", what, ", which has had ", here, " in this job"),
                   "An average moves with every update. Go on with the state that the job has, at "
                   "its last step; or leave the option out and average in the trainer");
}

kernels::OptimizerSpec SpecOfAll(const NamedOptimizer& optimizer,
                                 std::span<const OptimizerParamGroup> groups) {
  kernels::OptimizerSpec all = CheckedSpec(optimizer, *optimizer.defaults);
  CheckDefaults(all);
  for (const OptimizerParamGroup& group : groups) {
    if (group.has_options()) all.KeepToo(CheckedSpec(optimizer, group.options()));
  }
  CheckEachOnce(groups);
  return all;
}

}  // namespace zero3

namespace {

using torch::optim::OptimizerParamGroup;
using OptimizerPointer = std::unique_ptr<torch::optim::Optimizer>;
using Groups = std::vector<OptimizerParamGroup>;

OptimizerPointer InMemory(const torch::nn::Module& module, zero3::NamedOptimizer optimizer) {
  return std::make_unique<zero3::InMemoryOptimizer>(zero3::OneGroup(module), std::move(optimizer));
}

}  // namespace

// ---- AdamW -------------------------------------------------------------------------------------

namespace {

// Of Adam and AdamW, whose options have the same names.
template <class Options>
zero3::NamedOptimizer NamedAdam(const char* kernel, Options options, AdamWFlavour flavour) {
  const auto spec_of = [kernel, flavour](const Options& o) {
    return kernels::OptimizerSpec(kernel, {{"lr", o.lr()},
                                           {"beta1", std::get<0>(o.betas())},
                                           {"beta2", std::get<1>(o.betas())},
                                           {"eps", o.eps()},
                                           {"weight_decay", o.weight_decay()},
                                           {"flavour", static_cast<double>(flavour)},
                                           {"amsgrad", o.amsgrad() ? 1 : 0}});
  };
  // torch's fused kernels do not.
  return zero3::Named(std::move(options), spec_of, flavour != AdamWFlavour::kFused);
}

zero3::NamedOptimizer Named(torch::optim::AdamWOptions options, AdamWFlavour flavour) {
  return NamedAdam("adamw", std::move(options), flavour);
}

}  // namespace

OptimizerPointer Engine::AdamW(torch::nn::Module& module, torch::optim::AdamWOptions options,
                               AdamWFlavour flavour) {
  return MakeOptimizer(module, zero3::OneGroup(module), Named(std::move(options), flavour));
}
OptimizerPointer Engine::AdamW(torch::nn::Module& module, Groups groups,
                               torch::optim::AdamWOptions defaults, AdamWFlavour flavour) {
  return MakeOptimizer(module, std::move(groups), Named(std::move(defaults), flavour));
}
OptimizerPointer InMemoryAdamW(torch::nn::Module& module, torch::optim::AdamWOptions options,
                               AdamWFlavour flavour) {
  return InMemory(module, Named(std::move(options), flavour));
}

// ---- SGD ---------------------------------------------------------------------------------------

namespace {

zero3::NamedOptimizer Named(torch::optim::SGDOptions options) {
  return zero3::Named(std::move(options), [](const torch::optim::SGDOptions& o) {
    return kernels::OptimizerSpec("sgd", {{"lr", o.lr()},
                                          {"momentum", o.momentum()},
                                          {"dampening", o.dampening()},
                                          {"weight_decay", o.weight_decay()},
                                          {"nesterov", o.nesterov() ? 1 : 0}});
  });
}

}  // namespace

OptimizerPointer Engine::SGD(torch::nn::Module& module, torch::optim::SGDOptions options) {
  return MakeOptimizer(module, zero3::OneGroup(module), Named(std::move(options)));
}
OptimizerPointer Engine::SGD(torch::nn::Module& module, Groups groups,
                             torch::optim::SGDOptions defaults) {
  return MakeOptimizer(module, std::move(groups), Named(std::move(defaults)));
}
OptimizerPointer InMemorySGD(torch::nn::Module& module, torch::optim::SGDOptions options) {
  return InMemory(module, Named(std::move(options)));
}

// ---- Adam ---------------------------------------------------------------------------------------

namespace {

zero3::NamedOptimizer Named(torch::optim::AdamOptions options, AdamWFlavour flavour) {
  return NamedAdam("adam", std::move(options), flavour);
}

}  // namespace

OptimizerPointer Engine::Adam(torch::nn::Module& module, torch::optim::AdamOptions options,
                              AdamWFlavour flavour) {
  return MakeOptimizer(module, zero3::OneGroup(module), Named(std::move(options), flavour));
}
OptimizerPointer Engine::Adam(torch::nn::Module& module, Groups groups,
                              torch::optim::AdamOptions defaults, AdamWFlavour flavour) {
  return MakeOptimizer(module, std::move(groups), Named(std::move(defaults), flavour));
}
OptimizerPointer InMemoryAdam(torch::nn::Module& module, torch::optim::AdamOptions options,
                              AdamWFlavour flavour) {
  return InMemory(module, Named(std::move(options), flavour));
}

// ---- Adagrad ------------------------------------------------------------------------------------

namespace {

// torch begins all sums with the value of the defaults when the optimizer is made, whatever groups
// of their own say, and looks at none later.
zero3::NamedOptimizer Named(torch::optim::AdagradOptions options) {
  const double beginning = options.initial_accumulator_value();
  const auto spec_of = [beginning](const torch::optim::AdagradOptions& o) {
    return kernels::OptimizerSpec("adagrad", {{"lr", o.lr()},
                                              {"lr_decay", o.lr_decay()},
                                              {"weight_decay", o.weight_decay()},
                                              {"initial_accumulator_value", beginning},
                                              {"eps", o.eps()},
                                              {"fused", 0}});
  };
  return zero3::Named(std::move(options), spec_of, /*counts_as_write=*/true);
}

}  // namespace

OptimizerPointer Engine::Adagrad(torch::nn::Module& module, torch::optim::AdagradOptions options) {
  return MakeOptimizer(module, zero3::OneGroup(module), Named(std::move(options)));
}
OptimizerPointer Engine::Adagrad(torch::nn::Module& module, Groups groups,
                                 torch::optim::AdagradOptions defaults) {
  return MakeOptimizer(module, std::move(groups), Named(std::move(defaults)));
}
OptimizerPointer InMemoryAdagrad(torch::nn::Module& module, torch::optim::AdagradOptions options) {
  return InMemory(module, Named(std::move(options)));
}

// ---- RMSprop ------------------------------------------------------------------------------------

namespace {

zero3::NamedOptimizer Named(torch::optim::RMSpropOptions options) {
  const auto spec_of = [](const torch::optim::RMSpropOptions& o) {
    return kernels::OptimizerSpec("rmsprop", {{"lr", o.lr()},
                                              {"alpha", o.alpha()},
                                              {"eps", o.eps()},
                                              {"weight_decay", o.weight_decay()},
                                              {"momentum", o.momentum()},
                                              {"centered", o.centered() ? 1 : 0},
                                              {"lerp", 0}});
  };
  return zero3::Named(std::move(options), spec_of, /*counts_as_write=*/true);
}

}  // namespace

OptimizerPointer Engine::RMSprop(torch::nn::Module& module, torch::optim::RMSpropOptions options) {
  return MakeOptimizer(module, zero3::OneGroup(module), Named(std::move(options)));
}
OptimizerPointer Engine::RMSprop(torch::nn::Module& module, Groups groups,
                                 torch::optim::RMSpropOptions defaults) {
  return MakeOptimizer(module, std::move(groups), Named(std::move(defaults)));
}
OptimizerPointer InMemoryRMSprop(torch::nn::Module& module, torch::optim::RMSpropOptions options) {
  return InMemory(module, Named(std::move(options)));
}

// ---- Lion ---------------------------------------------------------------------------------------

namespace {

zero3::NamedOptimizer Named(LionOptions options) {
  return zero3::Named(std::move(options), [](const LionOptions& o) {
    return kernels::OptimizerSpec("lion", {{"lr", o.lr()},
                                           {"beta1", std::get<0>(o.betas())},
                                           {"beta2", std::get<1>(o.betas())},
                                           {"weight_decay", o.weight_decay()}});
  });
}

}  // namespace

OptimizerPointer Engine::Lion(torch::nn::Module& module, LionOptions options) {
  return MakeOptimizer(module, zero3::OneGroup(module), Named(std::move(options)));
}
OptimizerPointer Engine::Lion(torch::nn::Module& module, Groups groups, LionOptions defaults) {
  return MakeOptimizer(module, std::move(groups), Named(std::move(defaults)));
}
OptimizerPointer InMemoryLion(torch::nn::Module& module, LionOptions options) {
  return InMemory(module, Named(std::move(options)));
}

// ---- LAMB ---------------------------------------------------------------------------------------

namespace {

zero3::NamedOptimizer Named(LAMBOptions options) {
  return zero3::Named(std::move(options), [](const LAMBOptions& o) {
    return kernels::OptimizerSpec("lamb", {{"lr", o.lr()},
                                           {"beta1", std::get<0>(o.betas())},
                                           {"beta2", std::get<1>(o.betas())},
                                           {"eps", o.eps()},
                                           {"weight_decay", o.weight_decay()}});
  });
}

}  // namespace

OptimizerPointer Engine::LAMB(torch::nn::Module& module, LAMBOptions options) {
  return MakeOptimizer(module, zero3::OneGroup(module), Named(std::move(options)));
}
OptimizerPointer Engine::LAMB(torch::nn::Module& module, Groups groups, LAMBOptions defaults) {
  return MakeOptimizer(module, std::move(groups), Named(std::move(defaults)));
}
OptimizerPointer InMemoryLAMB(torch::nn::Module& module, LAMBOptions options) {
  return InMemory(module, Named(std::move(options)));
}

// ---- torch's own objects ------------------------------------------------------------------------

namespace zero3 {

std::optional<NamedOptimizer> NamedAs(const torch::optim::Optimizer& optimizer) {
  const OptimizerOptions& any = optimizer.defaults();
  // A class derived from one of these may have a step of its own.
  const auto is = [&optimizer](const std::type_info& type) { return typeid(optimizer) == type; };
  if (is(typeid(torch::optim::AdamW)))
    return offload::Named(dynamic_cast<const torch::optim::AdamWOptions&>(any),
                          AdamWFlavour::kMulAdd);
  if (is(typeid(torch::optim::Adam)))
    return offload::Named(dynamic_cast<const torch::optim::AdamOptions&>(any),
                          AdamWFlavour::kMulAdd);
  if (is(typeid(torch::optim::SGD)))
    return offload::Named(dynamic_cast<const torch::optim::SGDOptions&>(any));
  if (is(typeid(torch::optim::Adagrad)))
    return offload::Named(dynamic_cast<const torch::optim::AdagradOptions&>(any));
  if (is(typeid(torch::optim::RMSprop)))
    return offload::Named(dynamic_cast<const torch::optim::RMSpropOptions&>(any));
  return std::nullopt;
}

}  // namespace zero3
}  // namespace offload
