#include "config/ds_config_keys.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "base/suggest.h"

namespace offload::config {
namespace {

using enum Shape;
using enum Treatment;

constexpr char kBuckets[] = "nothing is gathered or reduced in buckets";
constexpr char kParallel[] = "another kind of parallelism; ranks here hold all of the model";
constexpr char kTune[] = "the daemon chooses by itself; see offloadctl doctor and tuning.md";
constexpr char kOneArena[] = "memory.ram is the only budget; all of it is one arena";
constexpr char kMonitor[] = "offloadctl status --json has the counters";
constexpr char kLogged[] =
    "nothing is written; handle.metrics() and offloadctl status --json have figures for loggers";
constexpr char kLearned[] = "the order of tensors is learned in the first step and read ahead";
constexpr char kCheckpoints[] = "every step is a checkpoint in the pool";
constexpr char kActivations[] =
    "activations are the trainer's; torch.utils.checkpoint recomputes them with equal results";

constexpr DsKey kKeys[] = {
    {"train_batch_size", kInteger, kSpecial, ""},
    {"train_micro_batch_size_per_gpu", kInteger, kSpecial, ""},
    {"gradient_accumulation_steps", kInteger, kSpecial, ""},
    {"gradient_clipping", kNumber, kSpecial, ""},
    {"managed_gradient_accumulation", kBool, kTrainer, ""},

    {"optimizer", kSection, kRecurse, ""},
    {"optimizer.type", kText, kSpecial, ""},
    {"optimizer.params", kSection, kSpecial, ""},
    {"optimizer.legacy_fusion", kBool, kIgnored, "there is one optimizer"},
    {"scheduler", kSection, kRecurse, ""},
    {"scheduler.type", kText, kSpecial, ""},
    {"scheduler.params", kSection, kSpecial, ""},

    {"fp16", kSection, kRecurse, ""},
    {"fp16.enabled", kBool, kSpecial, ""},
    {"fp16.auto_cast", kBool, kSpecial, ""},
    {"fp16.loss_scale", kNumber, kSpecial, ""},
    {"fp16.initial_scale_power", kInteger, kSpecial, ""},
    {"fp16.loss_scale_window", kInteger, kSpecial, ""},
    {"fp16.hysteresis", kInteger, kSpecial, ""},
    {"fp16.consecutive_hysteresis", kBool, kSpecial, ""},
    {"fp16.min_loss_scale", kNumber, kSpecial, ""},
    {"fp16.fp16_scale_tolerance", kNumber, kIgnored, "DeepSpeed has no use for it, either"},
    {"fp16.opt_level", kText, kIgnored, "belongs to apex"},
    {"fp16.fp16_master_weights_and_grads", kBool, kRejectedIfLossy, "masters are fp32"},
    {"bf16", kSection, kRecurse, ""},
    {"bf16.enabled", kBool, kSpecial, ""},
    {"bf16.check_grad_overflow", kBool, kIgnored, "a step with NaN or infinity is refused always"},
    {"bf16.check_overflow", kBool, kIgnored, "a step with NaN or infinity is refused always"},
    {"bf16.immediate_grad_update", kBool, kIgnored, "gradients reach the daemon as they come"},
    {"bf16.bf16_master_weights_and_grads", kBool, kRejectedIfLossy, "masters are fp32"},
    {"bf16.bf16_master_weights_and_gradients", kBool, kRejectedIfLossy, "masters are fp32"},
    {"bf16.bf16_optimizer_states", kBool, kRejectedIfLossy, "moments are fp32"},
    {"bf16.loss_scale", kNumber, kIgnored, "bf16 has no loss scale"},
    {"bf16.initial_scale_power", kNumber, kIgnored, "bf16 has no loss scale"},
    {"bf16.loss_scale_window", kNumber, kIgnored, "bf16 has no loss scale"},
    {"bf16.hysteresis", kNumber, kIgnored, "bf16 has no loss scale"},
    {"bf16.min_loss_scale", kNumber, kIgnored, "bf16 has no loss scale"},
    {"bf16.auto_cast", kBool, kIgnored, "belongs to fp16"},
    {"torch_autocast", kSection, kSpecial, ""},
    {"amp", kSection, kSpecial, ""},
    {"data_types", kSection, kRecurse, ""},
    {"data_types.grad_accum_dtype", kText, kSpecial, ""},
    {"data_types.param_dtype", kText, kTrainer, "the type of the model's parameters counts"},
    {"data_types.buffer_dtype", kText, kTrainer, "the type of the model's buffers counts"},

    {"communication_data_type", kText, kIgnored,
     "the daemon adds the ranks' gradients exactly once"},
    {"seq_parallel_communication_data_type", kText, kIgnored, "there is no such parallelism"},
    {"prescale_gradients", kBool, kIgnored, "the mean of the ranks is taken once, at the end"},
    {"gradient_predivide_factor", kNumber, kIgnored, "the mean is taken once, at the end"},
    {"gradient_allreduce_op", kText, kSpecial, ""},
    {"sparse_gradients", kBool, kRejectedIfSet, "gradients are dense"},
    {"disable_allgather", kBool, kIgnored, kBuckets},
    {"zero_allow_untested_optimizer", kBool, kIgnored, "optimizers are served or refused by name"},
    {"zero_force_ds_cpu_optimizer", kBool, kIgnored, "there is one implementation"},

    {"zero_optimization", kSection, kSpecial, ""},
    {"zero_optimization.stage", kInteger, kSpecial, ""},
    {"zero_optimization.offload_param", kSection, kSpecial, ""},
    {"zero_optimization.offload_param.device", kText, kSpecial, ""},
    {"zero_optimization.offload_param.nvme_path", kAny, kSpecial, ""},
    {"zero_optimization.offload_param.pin_memory", kBool, kIgnored, kOneArena},
    {"zero_optimization.offload_param.buffer_count", kInteger, kIgnored, kOneArena},
    {"zero_optimization.offload_param.buffer_size", kInteger, kIgnored, kOneArena},
    {"zero_optimization.offload_param.max_in_cpu", kInteger, kIgnored, kOneArena},
    {"zero_optimization.offload_optimizer", kSection, kSpecial, ""},
    {"zero_optimization.offload_optimizer.device", kText, kSpecial, ""},
    {"zero_optimization.offload_optimizer.nvme_path", kAny, kSpecial, ""},
    {"zero_optimization.offload_optimizer.pin_memory", kBool, kIgnored, kOneArena},
    {"zero_optimization.offload_optimizer.buffer_count", kInteger, kIgnored, kOneArena},
    {"zero_optimization.offload_optimizer.buffer_size", kInteger, kIgnored, kOneArena},
    {"zero_optimization.offload_optimizer.max_in_cpu", kInteger, kIgnored, kOneArena},
    {"zero_optimization.offload_optimizer.pipeline", kBool, kIgnored,
     "reads and writes overlap always"},
    {"zero_optimization.offload_optimizer.pipeline_read", kBool, kIgnored,
     "reads and writes overlap always"},
    {"zero_optimization.offload_optimizer.pipeline_write", kBool, kIgnored,
     "reads and writes overlap always"},
    {"zero_optimization.offload_optimizer.fast_init", kBool, kIgnored, "state begins as zeros"},
    {"zero_optimization.offload_optimizer.ratio", kNumber, kIgnored,
     "ram decides what stays in memory"},
    {"zero_optimization.offload_optimizer.super_offload", kBool, kIgnored, "there is one way"},
    {"zero_optimization.offload_optimizer.cpuadam_cores_perc", kNumber, kSpecial, ""},
    {"zero_optimization.cpu_offload", kAny, kSpecial, ""},
    {"zero_optimization.cpu_offload_param", kAny, kSpecial, ""},
    {"zero_optimization.cpu_offload_params", kAny, kSpecial, ""},
    {"zero_optimization.cpu_offload_use_pin_memory", kBool, kIgnored, kOneArena},
    {"zero_optimization.zenflow", kSection, kSpecial, ""},
    {"zero_optimization.sub_group_size", kInteger, kIgnored, "state is updated extent by extent"},
    {"zero_optimization.prefetch_bucket_size", kNumber, kSpecial, ""},
    {"zero_optimization.param_persistence_threshold", kNumber, kSpecial, ""},
    {"zero_optimization.model_persistence_threshold", kNumber, kIgnored,
     "ram decides what stays in memory"},
    {"zero_optimization.max_live_parameters", kNumber, kSpecial, ""},
    {"zero_optimization.max_reuse_distance", kNumber, kIgnored, kLearned},
    {"zero_optimization.gather_16bit_weights_on_model_save", kBool, kIgnored,
     "what is saved is complete always"},
    {"zero_optimization.gather_fp16_weights_on_model_save", kBool, kIgnored,
     "what is saved is complete always"},
    {"zero_optimization.module_granularity_threshold", kInteger, kIgnored, kLearned},
    {"zero_optimization.use_all_reduce_for_fetch_params", kBool, kIgnored, kBuckets},
    {"zero_optimization.allgather_sequential", kBool, kIgnored, kBuckets},
    {"zero_optimization.leaf_module", kSection, kIgnored, "tensors are fetched one by one"},
    {"zero_optimization.ignore_unused_parameters", kBool, kIgnored,
     "a parameter without a gradient is skipped, as in torch"},
    {"zero_optimization.overlap_comm", kBool, kIgnored, kBuckets},
    {"zero_optimization.contiguous_gradients", kBool, kIgnored, kBuckets},
    {"zero_optimization.reduce_scatter", kBool, kIgnored, kBuckets},
    {"zero_optimization.allgather_partitions", kBool, kIgnored, kBuckets},
    {"zero_optimization.reduce_bucket_size", kNumber, kIgnored, kBuckets},
    {"zero_optimization.allgather_bucket_size", kNumber, kIgnored, kBuckets},
    {"zero_optimization.use_multi_rank_bucket_allreduce", kBool, kIgnored, kBuckets},
    {"zero_optimization.round_robin_gradients", kBool, kIgnored, kBuckets},
    {"zero_optimization.legacy_stage1", kBool, kIgnored, "there is one way"},
    {"zero_optimization.load_from_fp32_weights", kBool, kIgnored, kCheckpoints},
    {"zero_optimization.elastic_checkpoint", kBool, kIgnored, kCheckpoints},
    {"zero_optimization.pipeline_loading_checkpoint", kBool, kIgnored, kCheckpoints},
    {"zero_optimization.memory_efficient_linear", kBool, kIgnored, "modules are not replaced"},
    {"zero_optimization.override_module_apply", kBool, kIgnored, "modules are not replaced"},
    {"zero_optimization.log_trace_cache_warnings", kBool, kIgnored, kLearned},
    {"zero_optimization.enable_sanity_checks", kBool, kIgnored, "checks are always on"},
    {"zero_optimization.save_muon_momentum_buffer_in_memory", kBool, kIgnored, "there is no Muon"},
    {"zero_optimization.zero_hpz_partition_size", kInteger, kRejectedIfSet,
     "it belongs to several nodes"},
    {"zero_optimization.zero_quantized_weights", kBool, kRejectedIfLossy,
     "weights are sent rounded"},
    {"zero_optimization.zero_quantized_nontrainable_weights", kBool, kRejectedIfLossy,
     "weights are sent rounded"},
    {"zero_optimization.zero_quantized_gradients", kBool, kRejectedIfLossy,
     "gradients are sent rounded"},
    {"zero_optimization.zeropp_loco_param", kAny, kRejectedIfLossy, "gradients are sent rounded"},
    {"zero_optimization.mics_shard_size", kInteger, kRejectedIfSet, "it belongs to several nodes"},
    {"zero_optimization.mics_hierarchical_params_gather", kBool, kRejectedIfSet,
     "it belongs to several nodes"},
    {"zero_optimization.aio", kSection, kSpecial, ""},

    {"aio", kSection, kSpecial, ""},
    {"aio.block_size", kInteger, kIgnored, kTune},
    {"aio.queue_depth", kInteger, kIgnored, kTune},
    {"aio.intra_op_parallelism", kInteger, kIgnored, kTune},
    {"aio.thread_count", kInteger, kIgnored,
     "DeepSpeed ignores this name and would use 1; here the daemon chooses"},
    {"aio.num_threads", kInteger, kIgnored,
     "DeepSpeed ignores this name and would use 1; here the daemon chooses"},
    {"aio.single_submit", kBool, kIgnored, kTune},
    {"aio.overlap_events", kBool, kIgnored, kTune},
    {"aio.use_gds", kBool, kIgnored, "bytes pass through memory"},

    {"activation_checkpointing", kSection, kRecurse, ""},
    {"activation_checkpointing.cpu_checkpointing", kBool, kMissed, kActivations},
    {"activation_checkpointing.partition_activations", kBool, kIgnored, kActivations},
    {"activation_checkpointing.contiguous_memory_optimization", kBool, kIgnored, kActivations},
    {"activation_checkpointing.number_checkpoints", kInteger, kIgnored, kActivations},
    {"activation_checkpointing.synchronize_checkpoint_boundary", kBool, kIgnored, kActivations},
    {"activation_checkpointing.profile", kBool, kIgnored, kActivations},
    {"checkpoint", kSection, kRecurse, ""},
    {"checkpoint.load_universal", kBool, kSpecial, ""},
    {"checkpoint.tag_validation", kAny, kIgnored, kCheckpoints},
    {"checkpoint.checkpoint_serialization", kBool, kIgnored, kCheckpoints},
    {"checkpoint.use_node_local_storage", kBool, kIgnored, kCheckpoints},
    {"checkpoint.parallel_write", kAny, kIgnored, kCheckpoints},
    {"checkpoint.writer", kAny, kIgnored, kCheckpoints},
    {"nebula", kSection, kRejectedIfSet, "it stores checkpoints elsewhere"},
    {"datastates_ckpt", kSection, kRejectedIfSet, "it stores checkpoints elsewhere"},
    {"compile", kSection, kRecurse, ""},
    {"compile.deepcompile", kBool, kRejectedIfSet, "generated kernels read raw pointers"},
    {"compile.enabled", kBool, kIgnored, "the model runs as it is"},
    {"compile.backend", kText, kIgnored, "the model runs as it is"},
    {"compile.kwargs", kAny, kIgnored, "the model runs as it is"},

    {"tensor_parallel", kSection, kRejectedIfSet, kParallel},
    {"expert_parallel", kSection, kRejectedIfSet, kParallel},
    {"sequence_parallel_size", kInteger, kRejectedIfSet, kParallel},
    {"use_data_before_expert_parallelism", kBool, kIgnored, "there is no such parallelism"},
    {"pipeline", kSection, kIgnored, "counts for a PipelineModule only, which is refused"},
    {"sparse_attention", kAny, kRejectedIfLossy, "it replaces the model's attention"},
    {"hybrid_engine", kSection, kRejectedIfSet, "it replaces the model's layers"},
    {"elasticity", kSection, kRejectedIfSet, "it changes batch sizes during the run"},
    {"graph_harvesting", kBool, kRejectedIfSet, "it captures CUDA graphs"},
    {"compression_training", kSection, kRejectedIfLossy, "it changes the weights"},
    {"weight_quantization", kSection, kRejectedIfLossy, "it changes the weights"},
    {"quantize_training", kSection, kRejectedIfLossy, "it changes the weights"},
    {"eigenvalue", kSection, kRejectedIfLossy, "it steers quantization"},
    {"progressive_layer_drop", kSection, kRejectedIfLossy, "it drops layers"},
    {"data_efficiency", kSection, kRejectedIfSet, "it changes which data a step sees"},
    {"curriculum_learning", kSection, kRejectedIfSet, "it changes what a step sees"},
    {"dataloader_drop_last", kBool, kTrainer, ""},
    {"vocabulary_size", kInteger, kTrainer, ""},

    {"steps_per_print", kNumber, kIgnored, "progress is the trainer's to print"},
    {"wall_clock_breakdown", kBool, kMissed, kMonitor},
    {"memory_breakdown", kBool, kMissed, kMonitor},
    {"dump_state", kBool, kIgnored, "offloadctl config dump shows the settings"},
    {"timers", kAny, kIgnored, kMonitor},
    {"log_level", kAny, kIgnored, "logging is the program's"},
    {"flops_profiler", kSection, kMissed, kMonitor},
    {"comms_logger", kSection, kMissed, kMonitor},
    {"autotuning", kSection, kRejectedIfSet, "it searches for keys that there are not here"},
    {"tensorboard", kSection, kMissed, kLogged},
    {"wandb", kSection, kMissed, kLogged},
    {"csv_monitor", kSection, kMissed, kLogged},
    {"comet", kSection, kMissed, kLogged},
};

constexpr std::string_view kZero = "zero_optimization.";
constexpr std::string_view kStage3 = "stage3_";
constexpr std::string_view kOtherBf16 = "bfloat16";

// As the table has it: one spelling for what DeepSpeed spells in two ways.
std::string Canonical(std::string_view name) {
  std::string canonical(name);
  if (name == kOtherBf16 || name.starts_with(std::string(kOtherBf16) + "."))
    canonical.replace(0, kOtherBf16.size(), "bf16");
  if (name.starts_with(kZero) && name.substr(kZero.size()).starts_with(kStage3))
    canonical.erase(kZero.size(), kStage3.size());
  return canonical;
}

}  // namespace

std::span<const DsKey> AllDsKeys() { return kKeys; }

const DsKey* FindDsKey(std::string_view name) {
  const std::string canonical = Canonical(name);
  for (const DsKey& key : kKeys) {
    if (canonical == key.name) return &key;
  }
  return nullptr;
}

bool IsOffUnlessEnabled(std::string_view section) {
  constexpr std::string_view kOff[] = {
      "amp",        "autotuning",     "curriculum_learning",    "data_efficiency",
      "eigenvalue", "elasticity",     "flops_profiler",         "hybrid_engine",
      "nebula",     "torch_autocast", "progressive_layer_drop",
  };
  return std::find(std::begin(kOff), std::end(kOff), section) != std::end(kOff);
}

namespace {

// What is called so in one other section; empty when there is none, or in several.
std::string InAnotherSection(const std::string& own, const std::string& section) {
  std::string found;
  for (const DsKey& key : kKeys) {
    const std::string_view known(key.name);
    if (!known.ends_with("." + own)) continue;
    if (!found.empty() || known == section + own) return "";
    found = known;
  }
  return found;
}

}  // namespace

std::string NearestDsKey(std::string_view name) {
  const size_t dot = name.rfind('.');
  const std::string section(dot == std::string_view::npos ? "" : name.substr(0, dot + 1));
  std::vector<std::string> siblings;
  for (const DsKey& key : kKeys) {
    const std::string_view known(key.name);
    if (known.starts_with(section) && known.find('.', section.size()) == std::string_view::npos)
      siblings.emplace_back(known.substr(section.size()));
  }
  std::string own(name.substr(section.size()));
  absl::AsciiStrToLower(&own);
  const std::string elsewhere = InAnotherSection(own, section);
  return elsewhere.empty() ? NearestWord(own, siblings) : elsewhere;
}

}  // namespace offload::config
