"""What programs ask the engine about itself and its configuration: values of the file, DeepSpeed's own where it says nothing, and False
for what is not done."""

import sys

import torch

from ..errors import Error
from . import comm

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "bfp16": torch.bfloat16}
_CAST_MODULES = ("torch.nn.modules.linear.Linear", *(f"torch.nn.modules.conv.Conv{n}d" for n in (1, 2, 3)))


class Monitor:
    """`engine.monitor`: nothing is written anywhere; handle.metrics() has figures for loggers."""

    enabled = False

    def write_events(self, event_list):
        pass


class Throughput:
    """`engine.tput_timer`: programs tell it of their epochs. Nothing is measured; handle.metrics() has figures."""

    def __init__(self):
        self.epoch_count = 0

    def update_epoch_count(self):
        self.epoch_count += 1

    def start(self):
        pass

    def stop(self, global_step=False, report_speed=True):
        pass


def _told(key, otherwise, section=None):
    def ask(self):
        whole = self._raw if isinstance(self._raw, dict) else {}
        if section is not None:
            whole = whole.get(section)
            whole = whole if isinstance(whole, dict) else {}  # of zero_optimization it may be true
        value = whole.get(key, otherwise)
        return otherwise if value == "auto" else value

    return ask


def _always(value):
    return lambda self: value


def _zero(key, otherwise):
    return _told(key, otherwise, "zero_optimization")


class Questions:
    """A part of the engine's class."""

    monitor = Monitor()

    managed_gradient_accumulation = _told("managed_gradient_accumulation", True)
    steps_per_print = _told("steps_per_print", 10)
    dump_state = _told("dump_state", False)
    memory_breakdown = _told("memory_breakdown", False)
    prescale_gradients = _told("prescale_gradients", False)
    gradient_predivide_factor = _told("gradient_predivide_factor", 1.0)
    optimizer_params = _told("params", None, "optimizer")
    scheduler_params = _told("params", None, "scheduler")
    zero_reduce_scatter = _zero("reduce_scatter", True)
    zero_overlap_comm = _zero("overlap_comm", True)
    zero_contiguous_gradients = _zero("contiguous_gradients", True)
    zero_allgather_partitions = _zero("allgather_partitions", True)
    zero_reduce_bucket_size = _zero("reduce_bucket_size", 500_000_000)
    zero_allgather_bucket_size = _zero("allgather_bucket_size", 500_000_000)
    zero_sub_group_size = _zero("sub_group_size", 1_000_000_000)
    zero_ignore_unused_parameters = _zero("ignore_unused_parameters", True)
    zero_round_robin_gradients = _zero("round_robin_gradients", False)
    zero_elastic_checkpoint = _zero("elastic_checkpoint", False)
    zero_load_from_fp32_weights = _zero("load_from_fp32_weights", True)
    zero_max_live_parameters = _zero("stage3_max_live_parameters", 1_000_000_000)
    zero_max_reuse_distance = _zero("stage3_max_reuse_distance", 1_000_000_000)
    zero_prefetch_bucket_size = _zero("stage3_prefetch_bucket_size", 50_000_000)
    zero_param_persistence_threshold = _zero("stage3_param_persistence_threshold", 100_000)
    zero_model_persistence_threshold = _zero("stage3_model_persistence_threshold", sys.maxsize)
    zero_offload_param, zero_offload_optimizer = _zero("offload_param", None), _zero("offload_optimizer", None)
    dataloader_drop_last = _told("dataloader_drop_last", False)

    def zero_cpu_offload(self):
        """Of the optimizer; in the configuration's old form, too."""
        section = self.zero_offload_optimizer()
        return (section or {}).get("device") == "cpu" or bool(_zero("cpu_offload", False)(self))

    def zero_has_nvme_offload(self):
        return any((section or {}).get("device") == "nvme" for section in (self.zero_offload_param(), self.zero_offload_optimizer()))

    def postscale_gradients(self):
        return not self.prescale_gradients()

    pld_enabled = flops_profiler_enabled = autotuning_enabled = elasticity_enabled = curriculum_enabled_legacy = _always(False)
    random_ltd_enabled = data_efficiency_enabled = tensorboard_enabled = wandb_enabled = monitor_enabled = _always(False)
    zero_quantized_gradients = zero_quantized_nontrainable_weights = super_offload = _always(False)
    bf16_master_weights_and_gradients = bf16_optimizer_states = checkpoint_tag_validation_enabled = is_deepcompile_active = _always(False)
    is_deepcompile_enabled = zero_quantized_weights = use_node_local_storage = curriculum_learning_enabled = _always(False)
    amp_params = optimizer_legacy_fusion = fp16_master_weights_and_gradients = _always(False)
    mp_world_size = sp_world_size = sequence_parallel_size = 1
    zero_hpz_partition_size = _always(1)
    mpu = None
    has_moe_layers = pipeline_parallelism = False
    num_experts = ()
    enable_backward_allreduce = gradient_average = True  # programs write the first one; gradients are added with the step in any case

    def load_universal_checkpoint(self):
        return self._imported.training["load_universal"]

    @property
    def communication_data_type(self):
        told = _told("communication_data_type", None)(self)
        return _TYPES.get(told, torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32)

    @property
    def basic_optimizer(self):
        return self.optimizer

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_type(self):
        return [group.get("type") for group in self.optimizer.param_groups]

    def get_mom(self):
        return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in self.optimizer.param_groups]

    def get_data_types(self):
        """(of the weights, of gradients that are added up)."""
        model = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        return model, _TYPES.get(_told("grad_accum_dtype", None, "data_types")(self), model)

    @property
    def data_parallel_group(self):
        """All ranks."""
        return comm.get_world_group()

    seq_data_parallel_group = data_parallel_group

    @property
    def inside_no_sync_ctxt(self):
        return self._in_no_sync

    def _needs_batch(self, value, name):
        if value is None:
            raise Error.of(1105, f"{name} is not in the configuration", "Add it")
        return value

    def train_batch_size(self):
        return self._needs_batch(self._settings.batch, "train_batch_size")

    def train_micro_batch_size_per_gpu(self):
        return self._needs_batch(self._settings.micro_batch, "train_micro_batch_size_per_gpu")

    def gradient_accumulation_steps(self):
        return self._settings.accumulation

    def get_batch_info(self):
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size):
        step = self.train_micro_batch_size_per_gpu() * comm.get_world_size()
        if train_batch_size % step:
            raise Error.of(1103, f"train_batch_size {train_batch_size} is no multiple of {step}", "Choose a multiple")
        self._settings.batch, self._settings.accumulation = train_batch_size, train_batch_size // step

    def set_train_micro_batch_size(self, micro_batch_size):
        self._settings.micro_batch = micro_batch_size
        self._settings.batch = micro_batch_size * self._settings.accumulation * comm.get_world_size()

    def gradient_clipping(self):
        return self._settings.clipping

    def bfloat16_enabled(self):
        return self._settings.bf16

    def torch_autocast_enabled(self):
        return self._settings.autocast

    def torch_autocast_dtype(self):
        return torch.bfloat16 if self._settings.autocast else None

    def torch_autocast_lower_precision_safe_modules(self):
        """What the configuration says, which has no effect: torch.autocast chooses by operators, and gradients keep the type of their weights."""
        return _told("lower_precision_safe_modules", list(_CAST_MODULES), "torch_autocast")(self)

    def amp_enabled(self):
        return False

    wall_clock_breakdown = eigenvalue_enabled = sparse_gradients_enabled = amp_enabled

    def zero_optimization(self):
        return True

    zero_optimization_partition_gradients = zero_optimization_partition_weights = zero_gather_16bit_weights_on_model_save = zero_optimization

    def zero_optimization_stage(self):
        return 3

    def optimizer_name(self):
        return self._imported.training["optimizer"].lower() or None

    def scheduler_name(self):
        return self._imported.training["scheduler"] or None

    @property
    def config(self):
        return self._raw

    @property
    def device(self):
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def global_rank(self):
        return comm.get_rank()

    @property
    def local_rank(self):
        return comm.get_local_rank()

    @property
    def world_size(self):
        return comm.get_world_size()

    dp_world_size = world_size
