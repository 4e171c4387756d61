"""What programs ask the engine about its configuration: values of the file, DeepSpeed's own where it says nothing, and False for what
is not done."""

import torch

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "bfp16": torch.bfloat16}


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

    def postscale_gradients(self):
        return not self.prescale_gradients()

    pld_enabled = flops_profiler_enabled = autotuning_enabled = elasticity_enabled = curriculum_enabled_legacy = _always(False)
    random_ltd_enabled = data_efficiency_enabled = tensorboard_enabled = wandb_enabled = monitor_enabled = _always(False)
    is_deepcompile_enabled = zero_quantized_weights = use_node_local_storage = _always(False)
    mp_world_size = sp_world_size = 1

    def load_universal_checkpoint(self):
        return self._imported.training["load_universal"]

    @property
    def communication_data_type(self):
        told = _told("communication_data_type", None)(self)
        return _TYPES.get(told, torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32)

    @property
    def basic_optimizer(self):
        return self.optimizer
