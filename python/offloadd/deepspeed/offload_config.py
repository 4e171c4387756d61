"""deepspeed.runtime.zero.offload_config: the words that programs give engine.offload_states(), for which there is nothing to move. Also those of
deepspeed.runtime.zero.config."""

import enum

from .missing import refusing


class OffloadDeviceEnum(str, enum.Enum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


__getattr__ = refusing("deepspeed.runtime.zero.offload_config")
