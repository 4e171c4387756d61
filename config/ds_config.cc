#include "config/ds_config.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/string_view.h"
#include "config/ds_config_batches.h"
#include "config/ds_config_keys.h"
#include "config/ds_config_optimizer.h"
#include "config/ds_config_values.h"

namespace offload::config {
namespace {

// DeepSpeed clips since 0.19.3 where nothing is said; before, it did not.
constexpr double kClippingOtherwise = 1.0;
constexpr char kParamsSetting[] = "policy.params", kOptimizerSetting[] = "policy.optimizer";
constexpr int64_t kElementsMax = int64_t{1} << 44;  // of a model
// Of fp32, with room for doubling.
constexpr double kLossScalePowerMax = 100;
constexpr double kLossScaleMax = 0x1p100, kLossScaleMin = 0x1p-100;
constexpr double kCountMax = 0x1p24;

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
      return Reject(ErrorId::kDsConfigValue, absl::StrCat("is ", Shown(value), " where ",
                                                          ShapeName(key->shape), " belongs"));
    }
    fate_.note = note;
    Treat(*key, known, *fitted);
  }

  static bool IsOn(const std::string& known, const Json& value) {
    if (value.is_object() && !value.contains("enabled") && IsOffUnlessEnabled(known)) return false;
    return IsSet(value);
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
        if (IsOn(known, value)) Warn(absl::StrCat(fate_.key, " has no effect: ", key.note));
        return Ignore(key.note);
      case Treatment::kTrainer:
        return ToTrainer(key.note);
      case Treatment::kRejectedIfSet:
      case Treatment::kRejectedIfLossy:
        if (!IsOn(known, value)) return Ignore("off");
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
    if (optimizer_.TakeType(type, import_.fates.size()))
      return Map(absl::StrCat("training.optimizer = ", optimizer_.named()));
    Reject(ErrorId::kDsConfigUnsupported,
           absl::StrCat("there is no such optimizer here, only ", OptimizerSection::Types(),
                        "; one of torch's, or of your own, is given to initialize(optimizer=...), "
                        "without the section \"optimizer\""));
  }
  void OptimizerParams(const std::string&, const Json& value) {
    if (IsAuto(value)) return Ignore("auto: defaults");
    for (const auto& [name, param] : value.items()) {
      optimizer_.TakeParam(name, param, import_.fates.size());
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
  void Autocast(const std::string& known, const Json& value) {
    if (!IsOn(known, value)) return Ignore("off");
    const auto of_modules = value.find("lower_precision_safe_modules");
    if (of_modules != value.end() && !IsListOfTexts(*of_modules)) {
      return Reject(ErrorId::kDsConfigValue, "lower_precision_safe_modules is no list of names");
    }
    const auto given = value.find("dtype");
    const bool is_text = given != value.end() && given->is_string();
    const std::string type = is_text ? given->get<std::string>() : "";
    if (type == "bfloat16" || type == "torch.bfloat16" || type == "bf16") {
      import_.training.autocast = true;
      return Map("training.autocast = bfloat16",
                 "forward passes are under torch.autocast; weights and gradients keep their type");
    }
    if (type == "float32" || type == "torch.float32" || type == "fp32" || type == "float")
      return Ignore("to float32 torch.autocast casts nothing");
    Reject(
        ErrorId::kDsConfigUnsupported,
        "of torch.autocast there is bfloat16, whose losses need no scale; set \"dtype\" to that, "
        "or write torch.autocast around the forward pass yourself");
  }
  void Amp(const std::string& known, const Json& value) {
    if (!IsOn(known, value)) return Ignore("off");
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
                    absl::StrCat("is ", fate_.value, " where ", ShapeName(key->shape), " belongs"));
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
    optimizer_.Finish(import_);
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
      import_.fates[*stage_fate_].Refuse(
          ErrorId::kDsConfigConflict,
          "stage 0 offloads nothing, and offload_optimizer is there; choose stage 3");
    }
    if (wants_nvme_ && pools_.empty() && !options_.has_pool) {
      fate_ = {"zero_optimization", "", Verdict::kRejected, "", "", std::nullopt};
      Reject(ErrorId::kDsConfigMissing,
             "device nvme without nvme_path; add it, or set OFFLOADD_POOL");
    }
  }

  void FinishBatches() {
    const std::optional<std::string> contradiction =
        CompleteBatches(import_.training, options_.world_size, batches_auto_ || accumulation_auto_);
    if (contradiction.has_value()) Contradict(*contradiction);
  }
  void Contradict(const std::string& why) {
    fate_ = {"train_batch_size",
             import_.training.batch_size ? absl::StrCat(*import_.training.batch_size) : ""};
    for (size_t i = 0; i < import_.fates.size(); ++i) {
      if (import_.fates[i].key == "train_batch_size")
        return import_.fates[i].Refuse(ErrorId::kDsConfigConflict, why);
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
      import_.fates[gradient_type_fate_].Refuse(
          ErrorId::kDsConfigUnsupported,
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
    for (const auto& [i, why] : scaling_wrong_)
      import_.fates[i].Refuse(ErrorId::kDsConfigValue, why);
    if (import_.training.bf16.value_or(false))
      import_.fates[*fp16_fate_].Refuse(ErrorId::kDsConfigConflict,
                                        "fp16 and bf16 are both on; switch one off");
  }

  const ImportOptions& options_;
  Import import_;
  Fate fate_;  // of the key that is being read
  std::set<std::string> seen_;
  OptimizerSection optimizer_;
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

}  // namespace

void Fate::Refuse(ErrorId id, const std::string& why) {
  verdict = Verdict::kRejected;
  target.clear();
  note = why;
  error = id;
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

}  // namespace offload::config
