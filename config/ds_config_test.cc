#include "config/ds_config.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/random.h"
#include "config/ds_config_keys.h"

namespace offload::config {
namespace {

Import Read(const std::string& text, ImportOptions options = {.has_pool = true}) {
  auto import = ImportDsConfig(text, options);
  EXPECT_TRUE(import.ok()) << import.status() << " for " << text;
  return import.ok() ? *std::move(import) : Import();
}

// The fate of the key in a configuration that holds it.
Fate FateOf(const std::string& text, const std::string& key) {
  const Import import = Read(text);
  Fate found;
  int count = 0;
  for (const Fate& fate : import.fates) {
    if (fate.key == key) found = fate, ++count;
  }
  EXPECT_EQ(count, 1) << key << " in " << text << "\n" << ImportTable(import);
  return found;
}

// A configuration with one key, given with its sections.
std::string With(const std::string& key, const std::string& value) {
  const size_t dot = key.find('.');
  if (dot == std::string::npos) return absl::StrCat("{\"", key, "\": ", value, "}");
  return absl::StrCat("{\"", key.substr(0, dot), "\": ", With(key.substr(dot + 1), value), "}");
}

void ExpectRejected(const std::string& text, const std::string& key, ErrorId id) {
  const Fate fate = FateOf(text, key);
  EXPECT_EQ(fate.verdict, Verdict::kRejected) << text;
  EXPECT_EQ(fate.error, id) << text << ": " << fate.note;
  EXPECT_FALSE(fate.note.empty());
  EXPECT_FALSE(Read(text).Problem().ok());
}

std::string Fitting(Shape shape) {
  switch (shape) {
    case Shape::kBool:
    case Shape::kAny:
      return "false";
    case Shape::kInteger:
      return "1e0";
    case Shape::kNumber:
      return "1";
    case Shape::kText:
      return "\"none\"";
    case Shape::kList:
      return "[]";
    case Shape::kSection:
      return "{}";
  }
  return "";
}

TEST(DsConfigTest, EveryKeyWithAFittingValueHasOneLineAndAReason) {
  for (const DsKey& key : AllDsKeys()) {
    if (key.shape == Shape::kSection || key.treatment == Treatment::kSpecial) continue;
    const Fate fate = FateOf(With(key.name, Fitting(key.shape)), key.name);
    EXPECT_NE(fate.verdict, Verdict::kRejected) << key.name;
    EXPECT_TRUE(fate.verdict != Verdict::kIgnored || !fate.note.empty()) << key.name;
  }
}

TEST(DsConfigTest, EveryKeyRejectsAValueOfAnotherType) {
  for (const DsKey& key : AllDsKeys()) {
    if (key.shape == Shape::kAny) continue;
    const std::string wrong = key.shape == Shape::kList ? "{}" : "[[1]]";
    ExpectRejected(With(key.name, wrong), key.name, ErrorId::kDsConfigValue);
  }
}

TEST(DsConfigTest, EveryKeyTakesAutoAndNull) {
  for (const DsKey& key : AllDsKeys()) {
    for (const char* value : {"\"auto\"", "null"}) {
      for (const Fate& fate : Read(With(key.name, value)).fates) {
        const bool refuses = std::string(key.name) == "zero_optimization.zenflow" ||
                             std::string(key.name).find("cpu_offload") != std::string::npos ||
                             std::string(key.name).find("nvme_path") != std::string::npos;
        EXPECT_TRUE(refuses || fate.verdict != Verdict::kRejected) << key.name << " = " << value;
      }
    }
  }
}

TEST(DsConfigTest, FeaturesThatAreOnAreRejectedAndThoseThatAreOffAreNot) {
  for (const DsKey& key : AllDsKeys()) {
    const bool lossy = key.treatment == Treatment::kRejectedIfLossy;
    if (!lossy && key.treatment != Treatment::kRejectedIfSet) continue;
    const bool section = key.shape == Shape::kSection;
    const bool number = key.shape == Shape::kInteger;
    const std::string on = section ? "{\"enabled\": true}" : number ? "2" : "true";
    const std::string off = section ? "{\"enabled\": false, \"size\": 4}" : number ? "1" : "false";
    ExpectRejected(With(key.name, on), key.name,
                   lossy ? ErrorId::kDsConfigResults : ErrorId::kDsConfigUnsupported);
    EXPECT_EQ(FateOf(With(key.name, off), key.name).verdict, Verdict::kIgnored) << key.name;
  }
}

TEST(DsConfigTest, SectionsThatSayNothingOfItAreAsDeepSpeedHasThem) {
  for (const char* const section :
       {"amp", "autotuning", "curriculum_learning", "data_efficiency", "eigenvalue", "elasticity",
        "hybrid_engine", "nebula", "progressive_layer_drop", "torch_autocast"}) {
    const std::string text = With(section, R"({"level": "O1"})");
    EXPECT_EQ(FateOf(text, section).verdict, Verdict::kIgnored) << section;
  }
  ExpectRejected(With("compression_training", R"({"weight_quantization": {"bits": 8}})"),
                 "compression_training", ErrorId::kDsConfigResults);
}

TEST(DsConfigTest, NamesAreUniqueAndAllSectionsExist) {
  std::vector<std::string> names;
  for (const DsKey& key : AllDsKeys()) {
    const std::string name = key.name;
    EXPECT_EQ(FindDsKey(name), &key);
    const size_t dot = name.rfind('.');
    EXPECT_TRUE(dot == std::string::npos || FindDsKey(name.substr(0, dot)) != nullptr) << name;
  }
}

constexpr char kUsual[] = R"({
  "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                            "weight_decay": "auto", "torch_adam": true}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto",
     "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {"stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true,
                          "buffer_count": 4, "fast_init": false},
    "offload_param": {"device": "nvme", "nvme_path": "/local_nvme/", "pin_memory": true,
                      "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
    "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2e3,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
  "wall_clock_breakdown": false
})";

TEST(DsConfigTest, TheUsualConfigurationIsAccepted) {
  const Import import = Read(kUsual, {});
  EXPECT_TRUE(import.Problem().ok()) << import.Problem();
  EXPECT_EQ(import.settings.Get("pool").value, "/local_nvme") << "a slash at the end is none";
  EXPECT_EQ(import.settings.Get("policy.params").value, "auto");
  EXPECT_EQ(import.settings.Get("policy.optimizer").value, "auto");
  EXPECT_EQ(import.training.optimizer, "AdamW");
  EXPECT_EQ(import.training.optimizer_params["lr"], "auto");
  EXPECT_EQ(import.training.scheduler, "WarmupDecayLR");
  EXPECT_EQ(import.training.accumulation, std::nullopt) << "auto: the trainer decides";
  EXPECT_EQ(import.training.gradient_clipping, std::nullopt);
  EXPECT_EQ(import.training.bf16, std::nullopt);
  EXPECT_EQ(import.Count(Verdict::kRejected), 0u);
}

TEST(DsConfigTest, NumbersBecomeTraining) {
  const Import import = Read(R"({"train_batch_size": 32, "train_micro_batch_size_per_gpu": "4",
    "gradient_clipping": 0.5, "bf16": {"enabled": "True"},
    "optimizer": {"type": "ADAMW", "params": {"lr": "3e-4", "betas": [0.9, "0.95"], "eps": 1e-9,
      "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1e2, "warmup_max_lr": 1e-3,
      "warmup_type": "linear"}}})");
  EXPECT_TRUE(import.Problem().ok()) << import.Problem();
  EXPECT_EQ(import.training.batch_size, 32);
  EXPECT_EQ(import.training.micro_batch_size, 4);
  EXPECT_EQ(import.training.accumulation, 8);
  EXPECT_EQ(import.training.gradient_clipping, 0.5);
  EXPECT_EQ(import.training.bf16, true);
  EXPECT_EQ(import.training.optimizer_params["lr"], 3e-4);
  EXPECT_EQ(import.training.optimizer_params["betas"], Json({0.9, 0.95}));
  EXPECT_EQ(import.training.scheduler_params["warmup_num_steps"], 100);
  EXPECT_TRUE(import.training.scheduler_params["warmup_num_steps"].is_number_integer());
  EXPECT_EQ(import.training.scheduler_params["warmup_type"], "linear");
}

TEST(DsConfigTest, BatchesAreCompletedAndHaveToMultiply) {
  EXPECT_EQ(Read(R"({"train_batch_size": 8})").training.micro_batch_size, 8);
  EXPECT_EQ(Read(R"({"train_batch_size": 8})").training.accumulation, 1);
  EXPECT_EQ(Read(R"({"train_micro_batch_size_per_gpu": 2})").training.accumulation, 1);
  EXPECT_EQ(Read(R"({"train_batch_size": 8, "gradient_accumulation_steps": 4})")
                .training.micro_batch_size,
            2);
  EXPECT_EQ(Read(R"({})").training.accumulation, 1);
  const char* const triple = R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
                                 "gradient_accumulation_steps": 2})";
  ExpectRejected(triple, "train_batch_size", ErrorId::kDsConfigConflict);
  EXPECT_TRUE(Read(triple, {.world_size = 2, .has_pool = true}).Problem().ok());
  ExpectRejected(R"({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2})",
                 "train_batch_size", ErrorId::kDsConfigConflict);
  ExpectRejected(R"({"train_batch_size": 7, "gradient_accumulation_steps": 2})", "train_batch_size",
                 ErrorId::kDsConfigConflict);
  ExpectRejected(R"({"train_batch_size": 0})", "train_batch_size", ErrorId::kDsConfigValue);
}

TEST(DsConfigTest, AbsentClippingIsDeepSpeedsAndSaid) {
  const Import import = Read("{}");
  EXPECT_EQ(import.training.gradient_clipping, 1.0);
  ASSERT_EQ(import.warnings.size(), 1u);
  EXPECT_NE(import.warnings[0].find("clipped at 1.0"), std::string::npos);
  EXPECT_EQ(Read(R"({"gradient_clipping": 0})").training.gradient_clipping, 0.0);
  EXPECT_TRUE(Read(R"({"gradient_clipping": 0})").warnings.empty());
}

TEST(DsConfigTest, TrapZenFlowIsRejectedWhateverItHolds) {
  for (const char* value : {"{}", R"({"topk_ratio": 0.1, "update_interval": 4})"}) {
    ExpectRejected(With("zero_optimization.zenflow", value), "zero_optimization.zenflow",
                   ErrorId::kDsConfigResults);
  }
}

TEST(DsConfigTest, TrapOldOffloadKeysAreSections) {
  for (const char* value : {"true", "\"true\"", "1"}) {
    const Import import = Read(With("zero_optimization.cpu_offload", value));
    EXPECT_TRUE(import.Problem().ok()) << import.Problem();
    EXPECT_EQ(import.settings.Get("policy.optimizer").origin, "ds_config.json");
  }
  EXPECT_FALSE(
      Read(With("zero_optimization.cpu_offload", "false")).settings.has("policy.optimizer"));
  EXPECT_TRUE(
      Read(With("zero_optimization.cpu_offload_params", "true")).settings.has("policy.params"));
}

TEST(DsConfigTest, TrapKeysOfStage3NeedNoPrefix) {
  for (const char* key : {"gather_16bit_weights_on_model_save", "max_live_parameters",
                          "max_reuse_distance", "prefetch_bucket_size"}) {
    const std::string bare = absl::StrCat("zero_optimization.", key);
    const std::string full = absl::StrCat("zero_optimization.stage3_", key);
    EXPECT_EQ(FateOf(With(bare, "0"), bare).verdict, Verdict::kIgnored);
    EXPECT_EQ(FateOf(With(full, "0"), full).note, FateOf(With(bare, "0"), bare).note);
  }
  for (const auto& [key, setting] :
       {std::pair{"stage3_param_persistence_threshold", "policy.persistence"},
        {"stage3_prefetch_bucket_size", "policy.prefetch"},
        {"max_live_parameters", "policy.max_live"}}) {
    const std::string name = absl::StrCat("zero_optimization.", key);
    EXPECT_EQ(Read(With(name, "1e6")).settings.Get(setting).value, "1000000") << key;
    EXPECT_EQ(FateOf(With(name, "1e6"), name).note, "a hint");
    EXPECT_EQ(FateOf(With(name, "\"auto\""), name).verdict, Verdict::kIgnored);
    ExpectRejected(With(name, "-1"), name, ErrorId::kDsConfigValue);
    ExpectRejected(With(name, "0.5"), name, ErrorId::kDsConfigValue);
  }
  ExpectRejected(R"({"zero_optimization": {"max_live_parameters": 1,
                     "stage3_max_live_parameters": 2}})",
                 "zero_optimization.stage3_max_live_parameters", ErrorId::kDsConfigConflict);
}

TEST(DsConfigTest, TrapAioInsideZeroOptimizationIsReadThere) {
  const Import nested = Read(R"({"zero_optimization": {"aio": {"block_size": 262144,
                                 "thread_count": "8", "overlap_events": "true"}}})");
  EXPECT_TRUE(nested.Problem().ok()) << nested.Problem();
  EXPECT_EQ(nested.Count(Verdict::kIgnored), 3u);
  EXPECT_NE(nested.warnings[0].find("aio inside zero_optimization"), std::string::npos);
  EXPECT_TRUE(Read(R"({"zero_optimization": {"aio": {"block_size": 1}}, "aio": {"block_size": 1}})")
                  .Problem()
                  .ok());
  ExpectRejected(R"({"zero_optimization": {"aio": {"block_size": 1}}, "aio": {"block_size": 2}})",
                 "aio.block_size", ErrorId::kDsConfigConflict);
  ExpectRejected(With("zero_optimization.aio.queue_depth", "\"deep\""),
                 "zero_optimization.aio.queue_depth", ErrorId::kDsConfigValue);
  EXPECT_NE(FateOf(With("aio.thread_count", "8"), "aio.thread_count").note.find("would use 1"),
            std::string::npos);
}

TEST(DsConfigTest, TrapZeroOptimizationAsBoolIsStageOne) {
  EXPECT_EQ(FateOf(R"({"zero_optimization": true})", "zero_optimization").target,
            "policy.stage = 1");
  EXPECT_EQ(Read(With("zero_optimization.stage", "2")).settings.Get("policy.stage").value, "2");
}

TEST(DsConfigTest, TrapNullSectionsCountAsAbsent) {
  const Import import =
      Read(R"({"zero_optimization": {"stage": 3, "offload_param": null}, "fp16": null})");
  EXPECT_TRUE(import.Problem().ok());
  EXPECT_EQ(import.Count(Verdict::kIgnored), 2u);
}

TEST(DsConfigTest, TrapNestedWrongTypes) {
  ExpectRejected(R"({"zero_optimization": "stage 3"})", "zero_optimization",
                 ErrorId::kDsConfigValue);
  ExpectRejected(R"({"zero_optimization": {"offload_param": "nvme"}})",
                 "zero_optimization.offload_param", ErrorId::kDsConfigValue);
  ExpectRejected(R"({"zero_optimization": {"stage": {"a": 1}}})", "zero_optimization.stage",
                 ErrorId::kDsConfigValue);
  ExpectRejected(R"({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}})",
                 "optimizer.params.betas", ErrorId::kDsConfigValue);
  ExpectRejected(R"({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.0]}}})",
                 "optimizer.params.betas", ErrorId::kDsConfigValue);
  ExpectRejected(R"({"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}})",
                 "optimizer.params.lr", ErrorId::kDsConfigValue);
  ExpectRejected(R"({"optimizer": {"type": "AdamW", "params": {"lr": -1}}})", "optimizer.params.lr",
                 ErrorId::kDsConfigValue);
  ExpectRejected(R"({"optimizer": {"type": "AdamW", "params": 1}})", "optimizer.params",
                 ErrorId::kDsConfigValue);
  ExpectRejected(R"({"optimizer": [1]})", "optimizer", ErrorId::kDsConfigValue);
  ExpectRejected(R"({"bf16": true})", "bf16", ErrorId::kDsConfigValue);
}

TEST(DsConfigTest, AdamIsAdamWUnlessItsModeIsOff) {
  EXPECT_EQ(Read(R"({"optimizer": {"type": "Adam"}})").training.optimizer, "AdamW");
  EXPECT_EQ(Read(R"({"optimizer": {"params": {"adam_w_mode": false}, "type": "Adam"}})")
                .training.optimizer,
            "Adam");
  EXPECT_EQ(Read(R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}})")
                .training.optimizer,
            "AdamW");
  EXPECT_EQ(Read(R"({"optimizer": {"type": "AdamW", "params": {"torch_adam": true}}})")
                .training.optimizer_params["weight_decay"],
            0.01);
}

TEST(DsConfigTest, OptimizersThatAreNotThereAndTheirWrongParametersAreRejected) {
  for (const char* type :
       {"Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "Muon", "MuAdam", ""}) {
    const std::string text = With("optimizer.type", absl::StrCat("\"", type, "\""));
    ExpectRejected(text, "optimizer.type", ErrorId::kDsConfigUnsupported);
    EXPECT_NE(FateOf(text, "optimizer.type").note.find("initialize(optimizer="), std::string::npos);
  }
  const auto adam = [](const std::string& param) {
    return R"({"optimizer": {"type": "Adam", "params": {)" + param + "}}}";
  };
  ExpectRejected(adam(R"("amsgrad": true)"), "optimizer.params.amsgrad",
                 ErrorId::kDsConfigUnsupported);
  ExpectRejected(adam(R"("bias_correction": false)"), "optimizer.params.bias_correction",
                 ErrorId::kDsConfigUnsupported);
  ExpectRejected(adam(R"("max_grad_norm": 1.0)"), "optimizer.params.max_grad_norm",
                 ErrorId::kDsConfigUnsupported);
  ExpectRejected(adam(R"("fp32_optimizer_states": false)"),
                 "optimizer.params.fp32_optimizer_states", ErrorId::kDsConfigResults);
  const Fate typo = FateOf(adam(R"("weight_deacy": 0.1)"), "optimizer.params.weight_deacy");
  EXPECT_EQ(typo.verdict, Verdict::kRejected);
  EXPECT_NE(typo.note.find("weight_decay"), std::string::npos);
}

TEST(DsConfigTest, OtherOptimizersHaveTheirOwnParameters) {
  const Import sgd = Read(R"({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9,
                              "nesterov": true}}})");
  EXPECT_TRUE(sgd.Problem().ok()) << sgd.Problem();
  EXPECT_EQ(sgd.training.optimizer_params["nesterov"], true);
  EXPECT_EQ(Read(R"({"optimizer": {"type": "Lion"}})").training.optimizer_params["betas"][1], 0.99);
  ExpectRejected(R"({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}}})",
                 "optimizer.params.betas", ErrorId::kDsConfigValue);
}

TEST(DsConfigTest, NvmeNeedsAPath) {
  const std::string text = With("zero_optimization.offload_param.device", "\"nvme\"");
  EXPECT_EQ(ErrorIdOf(Read(text, {}).Problem()), ErrorId::kDsConfigMissing);
  EXPECT_TRUE(Read(text, {.has_pool = true}).Problem().ok());
  const Import two = Read(R"({"zero_optimization": {"stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": ["/a/", "/b"]},
    "offload_param": {"device": "nvme", "nvme_path": "/a"}}})");
  EXPECT_EQ(two.settings.Get("pool").value, "/a,/b");
  EXPECT_EQ(Read(R"({"zero_optimization": {"offload_optimizer": {"device": "cpu",
                     "nvme_path": "/a"}}})")
                .settings.Get("pool")
                .value,
            "/a");
  for (const char* wrong : {"7", "\"\"", "[]", "[7]", "\"/a,/b\"", "{}"}) {
    ExpectRejected(With("zero_optimization.offload_param.nvme_path", wrong),
                   "zero_optimization.offload_param.nvme_path", ErrorId::kDsConfigValue);
  }
}

TEST(DsConfigTest, KeysWithDotsAreNotRead) {
  const Import import = Read(R"({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
      "zero_optimization.reduce_bucket_size": 1024,
      "zero_optimization.stage3_prefetch_bucket_size": 921.6, "zero_optimization.stage": 7})");
  EXPECT_TRUE(import.Problem().ok());
}

TEST(DsConfigTest, StageZeroWithOffloadingContradictsItself) {
  ExpectRejected(R"({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}})",
                 "zero_optimization.stage", ErrorId::kDsConfigConflict);
  EXPECT_TRUE(Read(R"({"zero_optimization": {"stage": 0}})").Problem().ok());
  EXPECT_TRUE(Read(R"({"zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}}})")
                  .Problem()
                  .ok());
  ExpectRejected(With("zero_optimization.stage", "4"), "zero_optimization.stage",
                 ErrorId::kDsConfigValue);
}

TEST(DsConfigTest, OtherTypesOfNumbersAreRejected) {
  ExpectRejected(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})", "fp16.enabled",
                 ErrorId::kDsConfigConflict);
  ExpectRejected(R"({"fp16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}})",
                 "data_types.grad_accum_dtype", ErrorId::kDsConfigUnsupported);
  ExpectRejected(With("amp.enabled", "true"), "amp", ErrorId::kDsConfigUnsupported);
  for (const char* const section :
       {R"({"enabled": true})", R"({"enabled": true, "dtype": "float16"})",
        R"({"enabled": true, "dtype": 16})"}) {
    ExpectRejected(absl::StrCat(R"({"torch_autocast": )", section, "}"), "torch_autocast",
                   ErrorId::kDsConfigUnsupported);
  }
  ExpectRejected(R"({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}})",
                 "data_types.grad_accum_dtype", ErrorId::kDsConfigUnsupported);
  EXPECT_TRUE(Read(With("data_types.grad_accum_dtype", "\"fp32\"")).Problem().ok());
  EXPECT_EQ(Read(With("bfloat16.enabled", "true")).training.bf16, true);
}

TEST(DsConfigTest, ForwardPassesAreCast) {
  for (const char* const type : {"bfloat16", "torch.bfloat16", "bf16"}) {
    const Import import =
        Read(absl::StrCat(R"({"torch_autocast": {"enabled": true, "dtype": ")", type, "\"}}"));
    EXPECT_TRUE(import.Problem().ok()) << type;
    EXPECT_TRUE(import.training.autocast) << type;
  }
  for (const char* const off :
       {R"({"enabled": false, "dtype": "bfloat16"})", R"({"dtype": "bfloat16"})", R"({})",
        R"({"enabled": true, "dtype": "fp32"})", R"("auto")"}) {
    const Import import = Read(absl::StrCat(R"({"torch_autocast": )", off, "}"));
    EXPECT_TRUE(import.Problem().ok()) << off;
    EXPECT_FALSE(import.training.autocast) << off;
  }
}

TEST(DsConfigTest, ModulesOfAutocastAreNames) {
  const auto with = [](const char* modules) {
    return absl::StrCat(R"({"torch_autocast": {"enabled": true, "dtype": "bf16", )",
                        R"("lower_precision_safe_modules": )", modules, "}}");
  };
  EXPECT_TRUE(Read(with(R"(["torch.nn.Linear"])")).Problem().ok());
  ExpectRejected(with(R"("torch.nn.Linear")"), "torch_autocast", ErrorId::kDsConfigValue);
  ExpectRejected(with("[1]"), "torch_autocast", ErrorId::kDsConfigValue);
}

TEST(DsConfigTest, LossesOfFp16AreScaled) {
  const auto fp16_of = [](const std::string& text) {
    return ImportAsJson(Read(text))["training"]["fp16"];
  };
  const Json section = fp16_of(R"({"fp16": {"enabled": "true", "loss_scale": 0,
      "initial_scale_power": "12", "loss_scale_window": 1e2, "hysteresis": 3,
      "consecutive_hysteresis": true, "min_loss_scale": 0.25, "auto_cast": 1}})");
  EXPECT_EQ(section, Json::parse(R"({"enabled": true, "loss_scale": 0, "initial_scale_power": 12,
      "loss_scale_window": 100, "hysteresis": 3, "consecutive_hysteresis": true,
      "min_loss_scale": 0.25, "auto_cast": true})"));
  EXPECT_EQ(fp16_of(With("fp16.enabled", "\"auto\"")), Json::object());
  EXPECT_EQ(fp16_of(R"({"fp16": {"enabled": false, "loss_scale": 8}})"), Json::object());
  for (const char* const wrong :
       {R"("loss_scale": -1)", R"("loss_scale_window": 0)", R"("min_loss_scale": 0)",
        R"("hysteresis": 0)", R"("initial_scale_power": 2000)"}) {
    const std::string text = absl::StrCat("{\"fp16\": {", wrong, ", \"enabled\": true}}");
    EXPECT_EQ(Read(text).Count(Verdict::kRejected), 1u) << text;
    const std::string off = absl::StrCat("{\"fp16\": {", wrong, "}}");
    EXPECT_EQ(Read(off).Count(Verdict::kRejected), 0u) << off;
    EXPECT_EQ(Read(off).Count(Verdict::kIgnored), 1u) << off;
  }
}

TEST(DsConfigTest, RanksAddOrAverage) {
  EXPECT_EQ(Read(With("gradient_allreduce_op", "\"SUM\"")).settings.Get("ranks.gradients").value,
            "sum");
  ExpectRejected(With("gradient_allreduce_op", "\"max\""), "gradient_allreduce_op",
                 ErrorId::kDsConfigValue);
}

TEST(DsConfigTest, CoresBecomeThreads) {
  const std::string key = "zero_optimization.offload_optimizer.cpuadam_cores_perc";
  const Import import = Read(With(key, "0.5"), {.processors = 8, .has_pool = true});
  EXPECT_EQ(import.settings.Get("update.threads").value, "4");
  ExpectRejected(With(key, "8"), key, ErrorId::kDsConfigValue);
}

TEST(DsConfigTest, UniversalCheckpointsAreLoadedByTheProgram) {
  const Import import = Read(R"({"checkpoint": {"load_universal": true}})");
  EXPECT_TRUE(import.Problem().ok());
  EXPECT_TRUE(import.training.load_universal);
  EXPECT_TRUE(ImportAsJson(import)["training"]["load_universal"].get<bool>());
  EXPECT_FALSE(Read(R"({"checkpoint": {"load_universal": "false"}})").training.load_universal);
}

TEST(DsConfigTest, UnknownKeysAreSaidWithASuggestion) {
  const Import import = Read(R"({"gradient_cliping": 1.0, "zero_optimization": {"infinity": {}},
                                 "monitor_config": {}})");
  EXPECT_TRUE(import.Problem().ok());
  EXPECT_EQ(import.Count(Verdict::kIgnored), 3u);
  EXPECT_NE(import.warnings[0].find("did you mean \"gradient_clipping\"?"), std::string::npos);
}

TEST(DsConfigTest, KeysOfOtherSectionsAndInCapitalsAreSuggested) {
  const Import import = Read(R"({"offload_optimizer": {"device": "nvme"}, "gradient_clipping": 1.0,
                                 "ZERO_OPTIMIZATION": {}, "enabled": true})");
  ASSERT_EQ(import.warnings.size(), 3u);
  EXPECT_NE(import.warnings[0].find("\"zero_optimization.offload_optimizer\"?"), std::string::npos)
      << import.warnings[0];
  EXPECT_NE(import.warnings[1].find("\"zero_optimization\"?"), std::string::npos);
  EXPECT_EQ(import.warnings[2].find("did you mean"), std::string::npos);
}

TEST(DsConfigTest, ClippingThatIsRejectedIsNotAbsent) {
  const Import import = Read(R"({"gradient_clipping": true})");
  EXPECT_EQ(import.Count(Verdict::kRejected), 1u);
  EXPECT_TRUE(import.warnings.empty());
}

TEST(DsConfigTest, SaysWhatASwitchedOnMonitorMisses) {
  const Import import = Read(R"({"gradient_clipping": 0, "tensorboard": {"enabled": true},
                                 "wall_clock_breakdown": true, "wandb": {"enabled": false}})");
  EXPECT_EQ(import.Count(Verdict::kIgnored), 3u);
  ASSERT_EQ(import.warnings.size(), 2u);
  EXPECT_EQ(import.warnings[0].find("tensorboard has no effect: nothing is written"), 0u);
  EXPECT_EQ(import.warnings[1].find("wall_clock_breakdown has no effect"), 0u);
}

TEST(DsConfigTest, SyntaxIsGenerousAndDuplicatesAreNot) {
  EXPECT_EQ(Read("# a comment\n{ // another\n \"train_batch_size\": 8, /* and \n one */ }")
                .training.batch_size,
            8);
  EXPECT_EQ(Read("{\"scheduler\": {\"type\": \"a // b, }\"},}").training.scheduler, "a // b, }");
  EXPECT_TRUE(Read("{\"steps_per_print\": Infinity, \"wandb\": {\"a\": -Infinity}}").Problem().ok())
      << "Python writes it so";
  std::string base64;
  absl::WebSafeBase64Escape("{\"train_batch_size\": 8}", &base64);
  EXPECT_EQ(Read(base64).training.batch_size, 8);
  const struct {
    const char *text, *words;
  } wrong[] = {{"{\"a\": 1, \"a\": 2}", "twice"}, {"{\"a\": {\"b\": 1, \"b\": 2}}", "twice"},
               {"{\"a\":\n  1 2}", "2:5"},        {"", "is no JSON"},
               {"[1]", "no JSON object"},         {"{\"a\": 1e999}", "'1e999', which is too large"},
               {"{\"a\": NaN}", "is no JSON"},    {"{\"a\": \"\xff\"}", "is no JSON"}};
  for (const auto& each : wrong) {
    const absl::Status status = ImportDsConfig(each.text, {}).status();
    EXPECT_EQ(ErrorIdOf(status), ErrorId::kDsConfigText) << each.text;
    EXPECT_NE(status.message().find(each.words), absl::string_view::npos) << status;
  }
  EXPECT_EQ(ErrorIdOf(ImportDsConfig(std::string(100000, '['), {}).status()),
            ErrorId::kDsConfigText);
}

TEST(DsConfigTest, TheTableEndsWithItsSum) {
  const std::string table = ImportTable(Read(kUsual));
  EXPECT_NE(table.find("mapped    zero_optimization.offload_optimizer.device = \"nvme\"   -> "
                       "policy.optimizer = auto   (on the pool, "),
            std::string::npos)
      << table;
  EXPECT_NE(table.find(" rejected.\n"), std::string::npos);
  const Json json = ImportAsJson(Read(R"({"amp": {"enabled": true}})"));
  EXPECT_EQ(json["rejected"].size(), 1u);
  EXPECT_TRUE(json["rejected"][0].get<std::string>().starts_with("OFD-1104 amp = "));
  EXPECT_EQ(json["training"]["batch_size"], nullptr);
}

// Whatever comes, an answer comes: every key has a line, and nothing crashes.
TEST(DsConfigTest, RandomValuesAndRandomBytesAreAnswered) {
  Random random(20261122);
  const char* const values[] = {"null",
                                "true",
                                "\"auto\"",
                                "-1",
                                "1e300",
                                "18446744073709551615",
                                "\"1e9\"",
                                "[]",
                                "[1, \"a\"]",
                                "{}",
                                "{\"enabled\": true}",
                                "\"\"",
                                "0.5",
                                "{\"type\": 3, \"params\": [], \"device\": \"nvme\"}"};
  const auto keys = AllDsKeys();
  for (int round = 0; round < 3000; ++round) {
    Json root = Json::object();
    for (uint64_t i = 0, count = random.Below(12); i < count; ++i) {
      const std::string name = keys[random.Below(keys.size())].name;
      const Json value = Json::parse(values[random.Below(std::size(values))]);
      const size_t dot = name.find('.');
      Json& member = root[name.substr(0, dot)];
      if (dot == std::string::npos || (!member.is_null() && !member.is_object()))
        member = value;
      else
        member[name.substr(dot + 1)] = value;
    }
    const auto import = ImportDsConfig(root.dump(), {});
    ASSERT_TRUE(import.ok()) << root.dump();
    EXPECT_FALSE(ImportTable(*import).empty());
    EXPECT_TRUE(ImportAsJson(*import).is_object());
  }
  for (int round = 0; round < 3000; ++round) {
    std::string text = kUsual;
    for (uint64_t i = 0, count = 1 + random.Below(8); i < count; ++i) {
      const size_t at = random.Below(text.size());
      if (random.Below(2) == 0)
        text[at] = static_cast<char>(random.Below(256));
      else
        text.erase(at, random.Below(20));
      if (text.empty()) text = "{";
    }
    const auto import = ImportDsConfig(text, {});
    EXPECT_TRUE(!import.ok() || !ImportTable(*import).empty());
  }
}

}  // namespace
}  // namespace offload::config
