"""deepspeed.runtime.zero.offload_config: the words that programs give engine.offload_states(), for which there is nothing to move."""

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


__getattr__ = refusing("deepspeed.runtime.zero.offload_config")
