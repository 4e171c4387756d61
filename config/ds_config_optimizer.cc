#include "config/ds_config_optimizer.h"

#include <algorithm>
#include <map>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/suggest.h"
#include "config/ds_config_values.h"

namespace offload::config {

const std::vector<OptimizerSection::Optimizer>& OptimizerSection::Optimizers() {
  static const auto* const all = new std::vector<Optimizer>{
      {"adam",
       "AdamW",
       {{"lr", 1e-3}, {"betas", {0.9, 0.999}}, {"eps", 1e-8}, {"weight_decay", 0.0}}},
      {"adamw",
       "AdamW",
       {{"lr", 1e-3}, {"betas", {0.9, 0.999}}, {"eps", 1e-8}, {"weight_decay", 0.0}}},
      {"sgd",
       "SGD",
       {{"lr", 1e-3},
        {"momentum", 0.0},
        {"dampening", 0.0},
        {"weight_decay", 0.0},
        {"nesterov", false}}},
      {"adagrad", "Adagrad", {{"lr", 1e-2}, {"eps", 1e-10}, {"weight_decay", 0.0}}},
      {"rmsprop",
       "RMSprop",
       {{"lr", 1e-2},
        {"alpha", 0.99},
        {"eps", 1e-8},
        {"weight_decay", 0.0},
        {"momentum", 0.0},
        {"centered", false}}},
      {"lion", "Lion", {{"lr", 1e-3}, {"betas", {0.9, 0.99}}, {"weight_decay", 0.0}}},
  };
  return *all;
}

bool OptimizerSection::TakeType(std::string_view type, size_t fate) {
  for (const Optimizer& optimizer : Optimizers()) {
    if (type != optimizer.type) continue;
    optimizer_ = &optimizer;
    fate_ = fate;
    return true;
  }
  return false;
}

std::string OptimizerSection::Types() {
  std::vector<std::string> types;
  for (const Optimizer& optimizer : Optimizers()) types.push_back(optimizer.type);
  return absl::StrJoin(types, ", ");
}

void OptimizerSection::TakeParam(const std::string& name, const Json& value, size_t fate) {
  params_.push_back({name, value, fate});
}

void OptimizerSection::Finish(Import& import) {
  if (optimizer_ == nullptr) {
    for (const Param& param : params_)
      import.fates[param.fate].note = "there is no optimizer to take it";
    return;
  }
  import.training.optimizer = optimizer_->named;
  import.training.optimizer_params = optimizer_->params;
  for (const Param& param : params_) FinishParam(param, import);
}

void OptimizerSection::FinishParam(const Param& param, Import& import) const {
  Fate& fate = import.fates[param.fate];
  Json& params = import.training.optimizer_params;
  if (param.value.is_null()) {
    fate.note = "null counts as absent";
  } else if (IsAdam() && AdamSwitch(param, import)) {
  } else if (!params.contains(param.name)) {
    std::vector<std::string> names;
    for (const auto& [name, value] : params.items()) names.push_back(name);
    const std::string nearest = NearestWord(param.name, names);
    fate.Refuse(
        ErrorId::kDsConfigValue,
        absl::StrCat("no parameter of ", optimizer_->named,
                     nearest.empty() ? "" : absl::StrCat("; did you mean \"", nearest, "\"?")));
  } else if (IsAuto(param.value)) {
    params[param.name] = "auto";
    fate.verdict = Verdict::kTrainer;
    fate.note = "decided at attach";
  } else if (!Take(param, params[param.name])) {
    fate.Refuse(ErrorId::kDsConfigValue,
                absl::StrCat("is ", fate.value, " where a value such as ",
                             Shown(optimizer_->params[param.name]), " belongs"));
  } else {
    fate.verdict = Verdict::kMapped;
    fate.target = "training.optimizer." + param.name;
  }
}

bool OptimizerSection::Take(const Param& param, Json& slot) {
  std::string note;
  if (slot.is_array()) {
    if (!param.value.is_array() || param.value.size() != slot.size()) return false;
    for (size_t i = 0; i < slot.size(); ++i) {
      const std::optional<Json> number = Fitted(Shape::kNumber, param.value[i], note);
      if (!number.has_value() || IsAuto(*number)) return false;
      const double beta = number->get<double>();
      if (beta < 0 || beta >= 1) return false;
      slot[i] = beta;
    }
    return true;
  }
  const Shape shape = slot.is_boolean() ? Shape::kBool : Shape::kNumber;
  const std::optional<Json> value = Fitted(shape, param.value, note);
  if (!value.has_value()) return false;
  if (shape == Shape::kNumber && value->get<double>() < 0) return false;
  slot = shape == Shape::kNumber ? Json(value->get<double>()) : *value;
  return true;
}

bool OptimizerSection::AdamSwitch(const Param& param, Import& import) const {
  static const std::map<std::string, bool> defaults = {
      {"adam_w_mode", true},   {"bias_correction", true}, {"fp32_optimizer_states", true},
      {"torch_adam", false},   {"amsgrad", false},        {"fused", false},
      {"set_grad_none", true}, {"foreach", false}};
  if (param.name == "max_grad_norm") {
    import.fates[param.fate].Refuse(ErrorId::kDsConfigUnsupported, "use gradient_clipping instead");
    return true;
  }
  const auto found = defaults.find(param.name);
  if (found == defaults.end()) return false;
  std::string note;
  const std::optional<Json> value = Fitted(Shape::kBool, param.value, note);
  Fate& fate = import.fates[param.fate];
  if (!value.has_value() || IsAuto(*value)) {
    if (!value.has_value()) fate.Refuse(ErrorId::kDsConfigValue, "is neither true nor false");
    fate.note = fate.note.empty() ? "auto" : fate.note;
    return true;
  }
  AdamSwitch(param, value->get<bool>(), found->second, import);
  return true;
}

void OptimizerSection::AdamSwitch(const Param& param, bool on, bool otherwise,
                                  Import& import) const {
  Fate& fate = import.fates[param.fate];
  if (param.name == "adam_w_mode" && !on && std::string(optimizer_->type) == "adam") {
    import.training.optimizer = "Adam";
    import.fates[fate_].target = "training.optimizer = Adam";
    fate.verdict = Verdict::kMapped;
    fate.target = "training.optimizer = Adam";
    fate.note = "weight decay is part of the gradient";
  } else if (param.name == "amsgrad" && on) {
    fate.Refuse(ErrorId::kDsConfigUnsupported, "DeepSpeed's Adam has no amsgrad either");
  } else if (param.name == "bias_correction" && !on) {
    fate.Refuse(ErrorId::kDsConfigUnsupported, "moments are corrected for their bias always");
  } else if (param.name == "fp32_optimizer_states" && !on) {
    fate.Refuse(ErrorId::kDsConfigResults, "moments are fp32");
  } else if (param.name == "torch_adam" && on && !HasParam("weight_decay")) {
    import.training.optimizer_params["weight_decay"] =
        std::string(optimizer_->type) == "adamw" ? 0.01 : 0.0;
    fate.note = "the defaults are torch's: weight_decay";
  } else {
    fate.note = on == otherwise ? "the default" : "there is one implementation";
  }
}

bool OptimizerSection::HasParam(std::string_view name) const {
  return std::any_of(params_.begin(), params_.end(),
                     [&](const Param& param) { return param.name == name; });
}

}  // namespace offload::config
