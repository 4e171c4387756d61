#include "config/ds_config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/string_view.h"
#include "base/suggest.h"
#include "config/ds_config_keys.h"

namespace offload::config {
namespace {

constexpr size_t kShownMax = 60;
// DeepSpeed clips since 0.19.3 where nothing is said; before, it did not.
constexpr double kClippingOtherwise = 1.0;
constexpr char kParamsSetting[] = "policy.params", kOptimizerSetting[] = "policy.optimizer";
constexpr int64_t kElementsMax = int64_t{1} << 44;  // of a model
// Of fp32, with room for doubling.
constexpr double kLossScalePowerMax = 100;
constexpr double kLossScaleMax = 0x1p100, kLossScaleMin = 0x1p-100;
constexpr double kCountMax = 0x1p24;

bool IsAuto(const Json& value) { return value.is_string() && value == "auto"; }

std::string Shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kShownMax) text = text.substr(0, kShownMax) + "…";
  return text;
}

const char* NameOf(Shape shape) {
  switch (shape) {
    case Shape::kAny:
      return "anything";
    case Shape::kBool:
      return "true or false";
    case Shape::kInteger:
      return "an integer";
    case Shape::kNumber:
      return "a number";
    case Shape::kText:
      return "a text";
    case Shape::kList:
      return "a list";
    case Shape::kSection:
      return "a section";
  }
  return "";
}

std::optional<double> NumberIn(const std::string& text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(number))
    return std::nullopt;
  return number;
}

std::optional<int64_t> IntegerIn(const Json& value) {
  if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX})
    return std::nullopt;
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const double number = value.get<double>();
  if (std::abs(number) >= 9e18 || number != std::floor(number)) return std::nullopt;
  return static_cast<int64_t>(number);
}

// The value in the shape of its key, "auto" as it is; nothing when it does not fit. `note` tells of
// quotes that were taken off.
std::optional<Json> Fitted(Shape shape, const Json& value, std::string& note) {
  if (shape == Shape::kAny || IsAuto(value)) return value;
  Json plain = value;
  const bool wants_number = shape == Shape::kInteger || shape == Shape::kNumber;
  if (value.is_string() && shape == Shape::kBool) {
    const std::string word = absl::AsciiStrToLower(value.get<std::string>());
    if (word == "true" || word == "false") plain = word == "true", note = "read without quotes";
  } else if (value.is_string() && wants_number) {
    if (const auto number = NumberIn(value.get<std::string>())) {
      plain = *number;
      note = "read without quotes";
    }
  }
  switch (shape) {
    case Shape::kBool:
      // 0 and 1 are what Python takes them for.
      if (plain.is_number_integer() && (plain == 0 || plain == 1)) plain = plain == 1;
      return plain.is_boolean() ? std::optional(plain) : std::nullopt;
    case Shape::kInteger:
      if (const auto integer = IntegerIn(plain)) return Json(*integer);
      return std::nullopt;
    case Shape::kNumber:
      return plain.is_number() && std::isfinite(plain.get<double>()) ? std::optional(plain)
                                                                     : std::nullopt;
    case Shape::kText:
      return plain.is_string() ? std::optional(plain) : std::nullopt;
    case Shape::kList:
      return plain.is_array() ? std::optional(plain) : std::nullopt;
    case Shape::kSection:
      return plain.is_object() ? std::optional(plain) : std::nullopt;
    case Shape::kAny:
      break;
  }
  return plain;
}

// True for what switches a feature on: true, a number above 1, a text, a list, or a section that
// says so (by "enabled" where it has one, otherwise by being there with something in it).
bool IsSet(const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() > 1;
  if (value.is_string()) return !IsAuto(value) && value != "" && value != "none";
  if (value.is_array()) return !value.empty();
  if (!value.is_object()) return false;
  if (const auto enabled = value.find("enabled"); enabled != value.end())
    return IsSet(*enabled) && *enabled != "false";
  return std::any_of(value.begin(), value.end(), [](const Json& member) { return IsSet(member); });
}

// What an optimizer takes, and its value where the file has none. Null: it has to be there.
struct Optimizer {
  const char* type;   // DeepSpeed's, in small letters
  const char* named;  // as torch.optim names it
  Json params;
};

const std::vector<Optimizer>& Optimizers() {
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

const std::set<std::string>& SchedulersOfDeepSpeed() {
  static const auto* const all = new std::set<std::string>{
      "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"};
  return *all;
}

class Importer {
 public:
  explicit Importer(const ImportOptions& options) : options_(options) {}

  Import Run(const Json& root) {
    Members("", root);
    Finish();
    return std::move(import_);
  }

 private:
  using Handler = void (Importer::*)(const std::string& name, const Json& value);

  // The members of a section whose name with its dot is `prefix`.
  void Members(const std::string& prefix, const Json& section) {
    for (const auto& [member, value] : section.items()) {
      if (member.find('.') != std::string::npos) {
        Dotted(prefix + member, value);
      } else {
        Key(prefix + member, value);
      }
    }
  }

  // As trl adds them for its models of reference: DeepSpeed looks into the section alone.
  void Dotted(const std::string& name, const Json& value) {
    fate_ = {name, Shown(value), Verdict::kIgnored, "", "", std::nullopt};
    Ignore("DeepSpeed reads keys in their sections only");
  }

  void Key(const std::string& name, const Json& value) {
    fate_ = {name, Shown(value), Verdict::kIgnored, "", "", std::nullopt};
    const DsKey* const key = FindDsKey(name);
    if (key == nullptr) return Unknown(name);
    // In the table's spelling from here; messages have the file's.
    const std::string known = key->name;
    if (!seen_.insert(known).second)
      return Reject(ErrorId::kDsConfigConflict, "the key is there under another name, too");
    if (value.is_null()) return Ignore("null counts as absent");
    if (key->shape == Shape::kSection && known == "zero_optimization" && value.is_boolean())
      return ZeroAsBool(value.get<bool>());
    std::string note;
    const std::optional<Json> fitted = Fitted(key->shape, value, note);
    if (!fitted.has_value()) {
      return Reject(ErrorId::kDsConfigValue,
                    absl::StrCat("is ", Shown(value), " where ", NameOf(key->shape), " belongs"));
    }
    fate_.note = note;
    Treat(*key, known, *fitted);
  }

  void Treat(const DsKey& key, const std::string& known, const Json& value) {
    const bool lossy = key.treatment == Treatment::kRejectedIfLossy;
    switch (key.treatment) {
      case Treatment::kRecurse:
        if (IsAuto(value)) return Ignore("auto");
        return Members(fate_.key + ".", value);
      case Treatment::kIgnored:
        return Ignore(key.note);
      case Treatment::kMissed:
        if (IsSet(value)) Warn(absl::StrCat(fate_.key, " has no effect: ", key.note));
        return Ignore(key.note);
      case Treatment::kTrainer:
        return ToTrainer(key.note);
      case Treatment::kRejectedIfSet:
      case Treatment::kRejectedIfLossy:
        if (!IsSet(value)) return Ignore("off");
        return Reject(lossy ? ErrorId::kDsConfigResults : ErrorId::kDsConfigUnsupported, key.note);
      case Treatment::kSpecial:
        return (this->*HandlerOf(known))(known, value);
    }
  }

  static Handler HandlerOf(const std::string& known) {
    static const auto* const handlers = new std::map<std::string, Handler>{
        {"train_batch_size", &Importer::BatchSize},
        {"train_micro_batch_size_per_gpu", &Importer::MicroBatchSize},
        {"gradient_accumulation_steps", &Importer::Accumulation},
        {"gradient_clipping", &Importer::Clipping},
        {"optimizer.type", &Importer::OptimizerType},
        {"optimizer.params", &Importer::OptimizerParams},
        {"scheduler.type", &Importer::SchedulerType},
        {"scheduler.params", &Importer::SchedulerParams},
        {"fp16.enabled", &Importer::Fp16},
        {"fp16.auto_cast", &Importer::AutoCast},
        {"fp16.loss_scale", &Importer::LossScale},
        {"fp16.initial_scale_power", &Importer::InitialScalePower},
        {"fp16.loss_scale_window", &Importer::LossScaleWindow},
        {"fp16.hysteresis", &Importer::Hysteresis},
        {"fp16.consecutive_hysteresis", &Importer::ConsecutiveHysteresis},
        {"fp16.min_loss_scale", &Importer::MinLossScale},
        {"bf16.enabled", &Importer::Bf16},
        {"torch_autocast", &Importer::Autocast},
        {"amp", &Importer::Amp},
        {"data_types.grad_accum_dtype", &Importer::GradientType},
        {"gradient_allreduce_op", &Importer::AllReduce},
        {"zero_optimization", &Importer::Zero},
        {"zero_optimization.stage", &Importer::Stage},
        {"zero_optimization.offload_param", &Importer::OffloadSection},
        {"zero_optimization.offload_optimizer", &Importer::OffloadSection},
        {"zero_optimization.offload_param.device", &Importer::ParamDevice},
        {"zero_optimization.offload_optimizer.device", &Importer::OptimizerDevice},
        {"zero_optimization.offload_param.nvme_path", &Importer::NvmePath},
        {"zero_optimization.offload_optimizer.nvme_path", &Importer::NvmePath},
        {"zero_optimization.offload_optimizer.cpuadam_cores_perc", &Importer::Cores},
        {"zero_optimization.cpu_offload", &Importer::OldOffload},
        {"zero_optimization.cpu_offload_param", &Importer::OldOffload},
        {"zero_optimization.cpu_offload_params", &Importer::OldOffload},
        {"zero_optimization.param_persistence_threshold", &Importer::Threshold},
        {"zero_optimization.prefetch_bucket_size", &Importer::Threshold},
        {"zero_optimization.max_live_parameters", &Importer::Threshold},
        {"zero_optimization.zenflow", &Importer::ZenFlow},
        {"zero_optimization.aio", &Importer::Aio},
        {"checkpoint.load_universal", &Importer::LoadUniversal},
        {"aio", &Importer::Aio},
    };
    return handlers->at(known);
  }

  // Ends of a key.
  void Add(Verdict verdict, const std::string& target, const std::string& note) {
    fate_.verdict = verdict;
    fate_.target = target;
    if (!note.empty()) fate_.note = fate_.note.empty() ? note : fate_.note + "; " + note;
    import_.fates.push_back(fate_);
  }
  void Ignore(const std::string& note) { Add(Verdict::kIgnored, "", note); }
  void ToTrainer(const std::string& note) { Add(Verdict::kTrainer, "", note); }
  void Map(const std::string& target, const std::string& note = "") {
    Add(Verdict::kMapped, target, note);
  }
  void Reject(ErrorId id, const std::string& why) {
    fate_.error = id;
    Add(Verdict::kRejected, "", why);
  }
  void MapSetting(const char* setting, const std::string& value, const std::string& note = "") {
    const absl::Status set = import_.settings.Set(setting, value, options_.name);
    if (!set.ok()) return Reject(ErrorId::kDsConfigValue, "the value does not fit its setting");
    Map(absl::StrCat(setting, " = ", value), note);
  }
  void Warn(const std::string& text) { import_.warnings.push_back(text); }

  void Unknown(const std::string& name) {
    const std::string nearest = NearestDsKey(name);
    const std::string note =
        absl::StrCat("DeepSpeed has no such key",
                     nearest.empty() ? "" : absl::StrCat("; did you mean \"", nearest, "\"?"));
    Warn(absl::StrCat(name, ": ", note));
    Ignore(note);
  }

  // Batches.
  void Count(const Json& value, std::optional<int64_t>& count, bool& is_auto, const char* target) {
    if (IsAuto(value)) {
      is_auto = true;
      return ToTrainer("decided at attach");
    }
    count = value.get<int64_t>();
    if (*count < 1) {
      count.reset();
      return Reject(ErrorId::kDsConfigValue, "is less than 1");
    }
    Map(absl::StrCat(target, " = ", *count));
  }
  void BatchSize(const std::string&, const Json& value) {
    Count(value, import_.training.batch_size, batches_auto_, "training.batch_size");
  }
  void MicroBatchSize(const std::string&, const Json& value) {
    Count(value, import_.training.micro_batch_size, batches_auto_, "training.micro_batch_size");
  }
  void Accumulation(const std::string&, const Json& value) {
    Count(value, import_.training.accumulation, accumulation_auto_, "training.accumulation");
  }
  void Clipping(const std::string&, const Json& value) {
    clipping_seen_ = true;
    if (IsAuto(value)) return ToTrainer("decided at attach");
    if (value.get<double>() < 0) return Reject(ErrorId::kDsConfigValue, "is negative");
    import_.training.gradient_clipping = value.get<double>();
    Map(absl::StrCat("training.gradient_clipping = ", value.get<double>()));
  }

  // Optimizer and scheduler: type and parameters come in any order, so Finish() puts them together.
  void OptimizerType(const std::string&, const Json& value) {
    if (IsAuto(value)) return ToTrainer("the trainer's own optimizer");
    const std::string type = absl::AsciiStrToLower(value.get<std::string>());
    for (const Optimizer& optimizer : Optimizers()) {
      if (type != optimizer.type) continue;
      optimizer_ = &optimizer;
      optimizer_fate_ = import_.fates.size();
      return Map(absl::StrCat("training.optimizer = ", optimizer.named));
    }
    std::vector<std::string> types;
    for (const Optimizer& optimizer : Optimizers()) types.push_back(optimizer.type);
    Reject(ErrorId::kDsConfigUnsupported,
           absl::StrCat("there is no such optimizer here, only ", absl::StrJoin(types, ", ")));
  }
  void OptimizerParams(const std::string&, const Json& value) {
    if (IsAuto(value)) return Ignore("auto: defaults");
    for (const auto& [name, param] : value.items()) {
      optimizer_params_.push_back({fate_.key + "." + name, name, param, import_.fates.size()});
      import_.fates.push_back({fate_.key + "." + name, Shown(param)});
    }
  }
  void LoadUniversal(const std::string&, const Json& value) {
    if (!IsSet(value)) return Ignore("off");
    import_.training.load_universal = true;
    ToTrainer("load_checkpoint() loads it; a loop of your own: handle.load_universal()");
  }
  void SchedulerType(const std::string&, const Json& value) {
    if (IsAuto(value)) return ToTrainer("the trainer's own scheduler");
    import_.training.scheduler = value.get<std::string>();
    ToTrainer(SchedulersOfDeepSpeed().contains(import_.training.scheduler)
                  ? ""
                  : "one of torch.optim.lr_scheduler, if it has that name");
  }
  void SchedulerParams(const std::string&, const Json& value) {
    if (IsAuto(value)) return ToTrainer("decided at attach");
    const std::string prefix = fate_.key + ".";
    for (const auto& [name, param] : value.items()) {
      fate_ = {prefix + name, Shown(param)};
      if (param.is_null()) {
        Ignore("null counts as absent");
        continue;
      }
      Json plain = param;
      // A number in quotes; warmup_type and the like stay texts.
      if (param.is_string() && NumberIn(param.get<std::string>()).has_value())
        plain = *NumberIn(param.get<std::string>());
      if (const auto integer = IntegerIn(plain); integer.has_value() && EndsInCount(name))
        plain = *integer;
      import_.training.scheduler_params[name] = plain;
      ToTrainer(IsAuto(param) ? "decided at attach" : "");
    }
  }
  // 1e3 steps are 1000.
  static bool EndsInCount(const std::string& name) {
    return name.ends_with("_steps") || name.ends_with("_size") || name.ends_with("_count");
  }

  // Types.
  void Fp16(const std::string&, const Json& value) {
    if (IsAuto(value)) return ToTrainer("decided at attach");
    if (!value.get<bool>()) return Ignore("off");
    fp16_fate_ = import_.fates.size();
    Map("training.fp16.enabled = true");
  }
  // What belongs to fp16; of no effect where that is off, which FinishTypes() says.
  void Scaling(const Json& value, double least, double most) {
    if (IsAuto(value)) return ToTrainer("decided at attach");
    const double number = value.is_boolean() ? value.get<bool>() : value.get<double>();
    if (!(number >= least && number <= most)) {
      scaling_wrong_.emplace_back(import_.fates.size(),
                                  absl::StrCat("is not between ", least, " and ", most));
    }
    scaling_.push_back(import_.fates.size());
    Map(absl::StrCat("training.", fate_.key, " = ", Shown(value)));
  }
  void AutoCast(const std::string&, const Json& value) { Scaling(value, 0, 1); }
  void LossScale(const std::string&, const Json& value) { Scaling(value, 0, kLossScaleMax); }
  void InitialScalePower(const std::string&, const Json& value) {
    Scaling(value, 0, kLossScalePowerMax);
  }
  void LossScaleWindow(const std::string&, const Json& value) { Scaling(value, 1, kCountMax); }
  void Hysteresis(const std::string&, const Json& value) { Scaling(value, 1, kCountMax); }
  void ConsecutiveHysteresis(const std::string&, const Json& value) { Scaling(value, 0, 1); }
  void MinLossScale(const std::string&, const Json& value) {
    Scaling(value, kLossScaleMin, kLossScaleMax);
  }
  void Bf16(const std::string&, const Json& value) {
    bf16_seen_ = true;
    if (IsAuto(value)) return ToTrainer("decided at attach");
    import_.training.bf16 = value.get<bool>();
    Map(absl::StrCat("training.bf16 = ", value.get<bool>() ? "true" : "false"));
  }
  void Autocast(const std::string&, const Json& value) {
    if (!IsSet(value)) return Ignore("off");
    Reject(ErrorId::kDsConfigUnsupported,
           "write torch.autocast around the forward pass yourself: weights stay fp32");
  }
  void Amp(const std::string&, const Json& value) {
    if (!IsSet(value)) return Ignore("off");
    Reject(ErrorId::kDsConfigUnsupported, "apex is not there; use bf16");
  }
  void GradientType(const std::string&, const Json& value) {
    if (IsAuto(value)) return Ignore("auto");
    gradient_type_ = absl::AsciiStrToLower(value.get<std::string>());
    gradient_type_fate_ = import_.fates.size();
    Ignore("gradients add up in the parameters' type, as in torch");
  }
  void AllReduce(const std::string&, const Json& value) {
    if (IsAuto(value)) return Ignore("auto");
    const std::string operation = absl::AsciiStrToLower(value.get<std::string>());
    if (operation == "mean" || operation == "avg") return MapSetting("ranks.gradients", "mean");
    if (operation == "sum") return MapSetting("ranks.gradients", "sum");
    Reject(ErrorId::kDsConfigValue, "is neither mean nor sum");
  }

  // zero_optimization.
  void ZeroAsBool(bool value) {
    stage_ = value ? 1 : 0;
    MapSetting("policy.stage", absl::StrCat(stage_), "true is the old form of stage 1");
  }
  void Zero(const std::string&, const Json& value) {
    if (IsAuto(value)) return Ignore("auto");
    Members(fate_.key + ".", value);
  }
  void Stage(const std::string&, const Json& value) {
    if (IsAuto(value)) return ToTrainer("memory goes where it saves most");
    stage_ = static_cast<int>(std::clamp<int64_t>(value.get<int64_t>(), -1, 4));
    if (stage_ < 0 || stage_ > 3) return Reject(ErrorId::kDsConfigValue, "is none of 0, 1, 2, 3");
    stage_fate_ = import_.fates.size();
    if (stage_ == 3)
      return MapSetting("policy.stage", "auto",
                        "all is offloaded: memory goes where it saves most");
    MapSetting("policy.stage", absl::StrCat(stage_),
               "parameters are offloaded as well as state: results are the same");
  }
  // Of elements; a hint.
  void Threshold(const std::string& name, const Json& value) {
    if (IsAuto(value)) return Ignore("auto");
    const std::optional<int64_t> elements = IntegerIn(value);
    if (!elements.has_value() || *elements < 0)
      return Reject(ErrorId::kDsConfigValue, "is no number of elements");
    if (*elements == 0) return Ignore("none");
    const std::string setting = name.ends_with("prefetch_bucket_size")  ? "policy.prefetch"
                                : name.ends_with("max_live_parameters") ? "policy.max_live"
                                                                        : "policy.persistence";
    MapSetting(setting.c_str(), absl::StrCat(std::min(*elements, kElementsMax)), "a hint");
  }
  void OffloadSection(const std::string&, const Json& value) {
    if (IsAuto(value)) return Ignore("auto");
    Members(fate_.key + ".", value);
  }
  void Device(const Json& value, const char* setting) {
    if (IsAuto(value)) return Ignore("auto");
    const std::string device = absl::AsciiStrToLower(value.get<std::string>());
    if (device == "none") return Ignore("off: the pool holds what ram does not");
    if (device != "cpu" && device != "nvme")
      return Reject(ErrorId::kDsConfigValue, "is none of none, cpu, nvme");
    offloads_optimizer_ |= std::string_view(setting) == kOptimizerSetting;
    if (device == "cpu")
      return MapSetting(setting, "auto",
                        "in memory as far as memory.ram reaches, else on the pool");
    wants_nvme_ = true;
    MapSetting(setting, "auto", "on the pool, and as much of it in memory as memory.ram holds");
  }
  void ParamDevice(const std::string&, const Json& value) { Device(value, kParamsSetting); }
  void OptimizerDevice(const std::string&, const Json& value) { Device(value, kOptimizerSetting); }
  void NvmePath(const std::string&, const Json& value) {
    if (IsAuto(value)) return Ignore("auto");
    std::vector<std::string> paths;
    const Json list = value.is_array() ? value : Json::array({value});
    for (const Json& path : list) {
      std::string text = path.is_string() ? path.get<std::string>() : "";
      while (text.size() > 1 && text.ends_with('/')) text.pop_back();
      if (text.empty()) return Reject(ErrorId::kDsConfigValue, "is no path");
      if (text.find(',') != std::string::npos)
        return Reject(ErrorId::kDsConfigValue, "has a comma in its path");
      paths.push_back(text);
    }
    if (paths.empty()) return Reject(ErrorId::kDsConfigValue, "is no path");
    for (const std::string& path : paths) {
      if (std::find(pools_.begin(), pools_.end(), path) == pools_.end()) pools_.push_back(path);
    }
    MapSetting("pool", absl::StrJoin(pools_, ","));
  }
  void Cores(const std::string&, const Json& value) {
    if (IsAuto(value)) return Ignore("auto");
    const double share = value.get<double>();
    if (share < 0 || share > 1) return Reject(ErrorId::kDsConfigValue, "is not between 0 and 1");
    const int threads = std::max(1, static_cast<int>(share * options_.processors));
    MapSetting("update.threads", absl::StrCat(threads));
  }
  void OldOffload(const std::string& name, const Json& value) {
    std::string note;
    const std::optional<Json> on = Fitted(Shape::kBool, value, note);
    if (!on.has_value() || IsAuto(*on))
      return Reject(ErrorId::kDsConfigValue, "is neither true nor false");
    if (!on->get<bool>()) return Ignore("off");
    const bool is_optimizer = name.ends_with("cpu_offload");
    offloads_optimizer_ |= is_optimizer;
    MapSetting(is_optimizer ? kOptimizerSetting : kParamsSetting, "auto",
               "the old form of an offload section with device cpu");
  }
  void ZenFlow(const std::string&, const Json&) {
    Reject(ErrorId::kDsConfigResults, "stale updates change results");
  }
  void Aio(const std::string& name, const Json& value) {
    if (IsAuto(value)) return Ignore("auto");
    const bool is_nested = name != "aio";
    if (is_nested) Warn("aio inside zero_optimization: DeepSpeed refuses it there; it is read");
    const std::string prefix = fate_.key + ".";
    for (const auto& [member, setting] : value.items()) {
      const auto other = aio_.find(member);
      fate_ = {prefix + member, Shown(setting)};
      if (other != aio_.end() && other->second != setting) {
        Reject(ErrorId::kDsConfigConflict, "aio is there twice, with different values");
        continue;
      }
      if (other != aio_.end()) {
        Ignore("the same as in the other aio section");
        continue;
      }
      aio_.emplace(member, setting);
      AioMember(prefix, member, setting);
    }
  }
  void AioMember(const std::string& prefix, const std::string& member, const Json& value) {
    const DsKey* const key = FindDsKey("aio." + member);
    if (key == nullptr) return Unknown(prefix + member);
    std::string note;
    if (value.is_null()) return Ignore("null counts as absent");
    if (!Fitted(key->shape, value, note).has_value()) {
      return Reject(ErrorId::kDsConfigValue,
                    absl::StrCat("is ", fate_.value, " where ", NameOf(key->shape), " belongs"));
    }
    fate_.note = note;
    Ignore(key->note);
  }

  bool IsRejected(std::string_view key) const {
    return std::ranges::any_of(import_.fates, [key](const Fate& fate) {
      return fate.key == key && fate.verdict == Verdict::kRejected;
    });
  }

  // What several keys decide together.
  void Finish() {
    FinishOptimizer();
    FinishBatches();
    FinishTypes();
    if (!clipping_seen_ && !IsRejected("gradient_clipping")) {
      import_.training.gradient_clipping = kClippingOtherwise;
      Warn(
          "gradient_clipping is absent: gradients are clipped at 1.0, the default of DeepSpeed "
          "since 0.19.3 (none before); write \"gradient_clipping\": 0 for none");
    }
    // Parameters are offloaded at stage 3 only; below it DeepSpeed does not read their section.
    if (stage_ == 0 && offloads_optimizer_ && stage_fate_.has_value()) {
      Refuse(*stage_fate_, ErrorId::kDsConfigConflict,
             "stage 0 offloads nothing, and offload_optimizer is there; choose stage 3");
    }
    if (wants_nvme_ && pools_.empty() && !options_.has_pool) {
      fate_ = {"zero_optimization", "", Verdict::kRejected, "", "", std::nullopt};
      Reject(ErrorId::kDsConfigMissing,
             "device nvme without nvme_path; add it, or set OFFLOADD_POOL");
    }
  }

  // Makes a rejection of what was something else.
  void Refuse(size_t fate, ErrorId id, const std::string& why) {
    Fate& refused = import_.fates[fate];
    refused.verdict = Verdict::kRejected;
    refused.target.clear();
    refused.note = why;
    refused.error = id;
  }

  struct Param {
    std::string key, name;
    Json value;
    size_t fate;
  };

  void FinishOptimizer() {
    if (optimizer_ == nullptr) {
      for (const Param& param : optimizer_params_)
        import_.fates[param.fate].note = "there is no optimizer to take it";
      return;
    }
    import_.training.optimizer = optimizer_->named;
    import_.training.optimizer_params = optimizer_->params;
    for (const Param& param : optimizer_params_) OptimizerParam(param);
  }

  void OptimizerParam(const Param& param) {
    Fate& fate = import_.fates[param.fate];
    Json& params = import_.training.optimizer_params;
    if (param.value.is_null()) {
      fate.note = "null counts as absent";
    } else if (IsAdam() && AdamSwitch(param)) {
    } else if (!params.contains(param.name)) {
      std::vector<std::string> names;
      for (const auto& [name, value] : params.items()) names.push_back(name);
      const std::string nearest = NearestWord(param.name, names);
      Refuse(
          param.fate, ErrorId::kDsConfigValue,
          absl::StrCat("no parameter of ", optimizer_->named,
                       nearest.empty() ? "" : absl::StrCat("; did you mean \"", nearest, "\"?")));
    } else if (IsAuto(param.value)) {
      params[param.name] = "auto";
      fate.verdict = Verdict::kTrainer;
      fate.note = "decided at attach";
    } else if (!TakeParam(param, params[param.name])) {
      Refuse(param.fate, ErrorId::kDsConfigValue,
             absl::StrCat("is ", fate.value, " where a value such as ",
                          Shown(optimizer_->params[param.name]), " belongs"));
    } else {
      fate.verdict = Verdict::kMapped;
      fate.target = "training.optimizer." + param.name;
    }
  }

  static bool TakeParam(const Param& param, Json& slot) {
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

  bool IsAdam() const { return std::string(optimizer_->named) == "AdamW"; }

  // Switches of DeepSpeed's Adam that torch's does not have; true when `param` was one.
  bool AdamSwitch(const Param& param) {
    static const std::map<std::string, bool> defaults = {
        {"adam_w_mode", true},   {"bias_correction", true}, {"fp32_optimizer_states", true},
        {"torch_adam", false},   {"amsgrad", false},        {"fused", false},
        {"set_grad_none", true}, {"foreach", false}};
    if (param.name == "max_grad_norm") {
      Refuse(param.fate, ErrorId::kDsConfigUnsupported, "use gradient_clipping instead");
      return true;
    }
    const auto found = defaults.find(param.name);
    if (found == defaults.end()) return false;
    std::string note;
    const std::optional<Json> value = Fitted(Shape::kBool, param.value, note);
    Fate& fate = import_.fates[param.fate];
    if (!value.has_value() || IsAuto(*value)) {
      if (!value.has_value())
        Refuse(param.fate, ErrorId::kDsConfigValue, "is neither true nor false");
      fate.note = fate.note.empty() ? "auto" : fate.note;
      return true;
    }
    AdamSwitch(param, value->get<bool>(), found->second);
    return true;
  }
  void AdamSwitch(const Param& param, bool on, bool otherwise) {
    Fate& fate = import_.fates[param.fate];
    if (param.name == "adam_w_mode" && !on && std::string(optimizer_->type) == "adam") {
      import_.training.optimizer = "Adam";
      import_.fates[optimizer_fate_].target = "training.optimizer = Adam";
      fate.verdict = Verdict::kMapped;
      fate.target = "training.optimizer = Adam";
      fate.note = "weight decay is part of the gradient";
    } else if (param.name == "amsgrad" && on) {
      Refuse(param.fate, ErrorId::kDsConfigUnsupported, "DeepSpeed's Adam has no amsgrad either");
    } else if (param.name == "bias_correction" && !on) {
      Refuse(param.fate, ErrorId::kDsConfigUnsupported,
             "moments are corrected for their bias always");
    } else if (param.name == "fp32_optimizer_states" && !on) {
      Refuse(param.fate, ErrorId::kDsConfigResults, "moments are fp32");
    } else if (param.name == "torch_adam" && on && !HasParam("weight_decay")) {
      import_.training.optimizer_params["weight_decay"] =
          std::string(optimizer_->type) == "adamw" ? 0.01 : 0.0;
      fate.note = "the defaults are torch's: weight_decay";
    } else {
      fate.note = on == otherwise ? "the default" : "there is one implementation";
    }
  }
  bool HasParam(const std::string& name) const {
    return std::any_of(optimizer_params_.begin(), optimizer_params_.end(),
                       [&](const Param& param) { return param.name == name; });
  }

  // As DeepSpeed completes them: batch = micro-batch × accumulation × ranks.
  void FinishBatches() {
    Training& training = import_.training;
    const int64_t ranks = options_.world_size;
    std::optional<int64_t>&batch = training.batch_size, &micro = training.micro_batch_size,
    &accumulation = training.accumulation;
    if (batch && micro && accumulation) {
      if (*batch % *micro == 0 && *batch / *micro % *accumulation == 0 &&
          *batch / *micro / *accumulation == ranks)
        return;
      return Contradict(absl::StrCat("train_batch_size ", *batch, " is not ", *micro, " × ",
                                     *accumulation, " × ", ranks, " ranks"));
    }
    if (batches_auto_ || accumulation_auto_) return;  // somebody else completes them
    if (batch && micro) {
      if (*batch % *micro != 0 || *batch / *micro % ranks != 0)
        return Contradict(absl::StrCat("train_batch_size ", *batch, " is no multiple of ", *micro,
                                       " × ", ranks, " ranks"));
      accumulation = *batch / *micro / ranks;
    } else if (batch && accumulation) {
      if (*batch % *accumulation != 0 || *batch / *accumulation % ranks != 0)
        return Contradict(absl::StrCat("train_batch_size ", *batch, " is no multiple of ",
                                       *accumulation, " × ", ranks, " ranks"));
      micro = *batch / *accumulation / ranks;
    } else if (batch) {
      if (*batch % ranks != 0)
        return Contradict(
            absl::StrCat("train_batch_size ", *batch, " is no multiple of ", ranks, " ranks"));
      micro = *batch / ranks;
      accumulation = 1;
    } else if (!accumulation) {
      accumulation = 1;
    }
  }
  void Contradict(const std::string& why) {
    fate_ = {"train_batch_size",
             import_.training.batch_size ? absl::StrCat(*import_.training.batch_size) : ""};
    for (size_t i = 0; i < import_.fates.size(); ++i) {
      if (import_.fates[i].key == "train_batch_size")
        return Refuse(i, ErrorId::kDsConfigConflict, why);
    }
    Reject(ErrorId::kDsConfigConflict, why);
  }

  void FinishTypes() {
    if (!bf16_seen_) import_.training.bf16 = false;
    FinishScaling();
    if (gradient_type_.empty() || !import_.training.bf16.has_value()) return;
    const bool is_fp16 = fp16_fate_.has_value();
    const char* const type = is_fp16 ? "fp16" : *import_.training.bf16 ? "bf16" : "fp32";
    const char* const long_type = is_fp16                  ? "float16"
                                  : *import_.training.bf16 ? "bfloat16"
                                                           : "float32";
    if (gradient_type_ != type && gradient_type_ != long_type) {
      Refuse(gradient_type_fate_, ErrorId::kDsConfigUnsupported,
             absl::StrCat("gradients add up in the parameters' type, which is ", type));
    }
  }
  void FinishScaling() {
    if (!fp16_fate_.has_value()) {
      for (const size_t i : scaling_) {
        import_.fates[i].verdict = Verdict::kIgnored;
        import_.fates[i].target.clear();
        import_.fates[i].note = "belongs to fp16";
      }
      return;
    }
    for (const auto& [i, why] : scaling_wrong_) Refuse(i, ErrorId::kDsConfigValue, why);
    if (import_.training.bf16.value_or(false))
      Refuse(*fp16_fate_, ErrorId::kDsConfigConflict, "fp16 and bf16 are both on; switch one off");
  }

  const ImportOptions& options_;
  Import import_;
  Fate fate_;  // of the key that is being read
  std::set<std::string> seen_;
  const Optimizer* optimizer_ = nullptr;
  size_t optimizer_fate_ = 0;
  std::vector<Param> optimizer_params_;
  std::map<std::string, Json> aio_;
  std::vector<std::string> pools_;
  std::optional<size_t> fp16_fate_;
  std::vector<size_t> scaling_;  // fates of what belongs to fp16
  std::vector<std::pair<size_t, std::string>> scaling_wrong_;
  std::string gradient_type_;
  size_t gradient_type_fate_ = 0;
  int stage_ = 0;
  std::optional<size_t> stage_fate_;
  bool offloads_optimizer_ = false, wants_nvme_ = false, bf16_seen_ = false;
  bool clipping_seen_ = false, batches_auto_ = false, accumulation_auto_ = false;
};

absl::Status StatusOf(const Fate& fate, size_t more) {
  const std::string others =
      more == 0 ? "" : absl::StrCat(" (and ", more, " more: offloadctl config import lists them)");
  return MakeError(*fate.error, absl::StrCat(fate.key, fate.value.empty() ? "" : " = ", fate.value,
                                             ": ", fate.note, others));
}

}  // namespace

size_t Import::Count(Verdict verdict) const {
  return static_cast<size_t>(std::count_if(
      fates.begin(), fates.end(), [&](const Fate& fate) { return fate.verdict == verdict; }));
}

absl::Status Import::Problem() const {
  for (const Fate& fate : fates) {
    if (fate.verdict == Verdict::kRejected) return StatusOf(fate, Count(Verdict::kRejected) - 1);
  }
  return absl::OkStatus();
}

absl::StatusOr<Import> ImportDsConfig(std::string_view text, const ImportOptions& options) {
  std::string decoded;
  const absl::string_view stripped = absl::StripAsciiWhitespace(ToAbsl(text));
  if (!stripped.empty() && stripped[0] != '{' && stripped[0] != '/' && stripped[0] != '#' &&
      absl::WebSafeBase64Unescape(stripped, &decoded))
    text = decoded;
  absl::StatusOr<Json> root = ReadRelaxedJson(text, options.name);
  if (!root.ok()) return root.status();
  if (!root->is_object())
    return MakeError(ErrorId::kDsConfigText, absl::StrCat(options.name, " is no JSON object"));
  return Importer(options).Run(*root);
}

const char* VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kMapped:
      return "mapped";
    case Verdict::kIgnored:
      return "ignored";
    case Verdict::kTrainer:
      return "trainer";
    case Verdict::kRejected:
      return "rejected";
  }
  return "";
}

std::string ImportTable(const Import& import) {
  std::string table;
  for (const Fate& fate : import.fates) {
    std::string line = VerdictName(fate.verdict);
    line.resize(10, ' ');
    absl::StrAppend(&line, fate.key, fate.value.empty() ? "" : " = ", fate.value);
    if (!fate.target.empty()) absl::StrAppend(&line, "   -> ", fate.target);
    if (fate.error.has_value())
      absl::StrAppend(&line, "   OFD-", static_cast<int>(*fate.error), " ", fate.note);
    else if (!fate.note.empty())
      absl::StrAppend(&line, "   (", fate.note, ")");
    absl::StrAppend(&table, line, "\n");
  }
  for (const std::string& warning : import.warnings)
    absl::StrAppend(&table, "note      ", warning, "\n");
  absl::StrAppend(&table, import.Count(Verdict::kMapped), " mapped, ",
                  import.Count(Verdict::kIgnored), " ignored, ", import.Count(Verdict::kTrainer),
                  " trainer, ", import.Count(Verdict::kRejected), " rejected.\n");
  return table;
}

namespace {

// What is mapped of the section fp16; empty where that is off. The keys without their prefix.
Json Fp16AsJson(const Import& import) {
  constexpr std::string_view kTarget = "training.fp16.";
  Json section = Json::object();
  for (const Fate& fate : import.fates) {
    const std::string_view target = fate.target;
    if (fate.verdict != Verdict::kMapped || !target.starts_with(kTarget)) continue;
    const size_t value = target.find(" = ");
    section[std::string(target.substr(kTarget.size(), value - kTarget.size()))] =
        Json::parse(target.substr(value + 3));
  }
  return section;
}

}  // namespace

Json ImportAsJson(const Import& import) {
  const auto or_null = [](const auto& value) { return value ? Json(*value) : Json(nullptr); };
  const Training& training = import.training;
  Json object;
  object["settings"] = Json::object();
  for (const Key& key : AllKeys()) {
    if (import.settings.has(key.name))
      object["settings"][key.name] = import.settings.Get(key.name).value;
  }
  object["options"] = Json::object();
  for (const auto& [name, value] : import.settings.EngineOptions()) object["options"][name] = value;
  object["training"] = {{"batch_size", or_null(training.batch_size)},
                        {"micro_batch_size", or_null(training.micro_batch_size)},
                        {"accumulation", or_null(training.accumulation)},
                        {"gradient_clipping", or_null(training.gradient_clipping)},
                        {"bf16", or_null(training.bf16)},
                        {"fp16", Fp16AsJson(import)},
                        {"optimizer", training.optimizer},
                        {"optimizer_params", training.optimizer_params},
                        {"scheduler", training.scheduler},
                        {"scheduler_params", training.scheduler_params},
                        {"load_universal", training.load_universal}};
  object["keys"] = Json::array();
  object["rejected"] = Json::array();
  for (const Fate& fate : import.fates) {
    object["keys"].push_back({{"key", fate.key},
                              {"value", fate.value},
                              {"verdict", VerdictName(fate.verdict)},
                              {"target", fate.target},
                              {"note", fate.note}});
    if (fate.error.has_value())
      object["rejected"].push_back(std::string(StatusOf(fate, 0).message()));
  }
  object["warnings"] = import.warnings;
  return object;
}

}  // namespace offload::config
