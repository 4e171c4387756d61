"""deepspeed.accelerator: the CPU."""

import contextlib
import os

import torch

from .missing import missing, refusing


class Accelerator:
    _name = "cpu"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise missing("deepspeed.accelerator.get_accelerator()", name)

    def is_available(self):
        return True

    def is_synchronized_device(self):
        return True

    def use_host_timers(self):
        return True

    def device_name(self, device_index=None):
        return "cpu"

    def device(self, device_index=None):
        return contextlib.nullcontext()

    def set_device(self, device_index):
        os.environ["LOCAL_RANK"] = str(device_index)

    def current_device(self):
        return int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self):
        return "cpu"

    def device_count(self):
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def synchronize(self, device_index=None):
        pass

    def empty_cache(self):
        pass

    def reset_peak_memory_stats(self, device_index=None):
        pass

    def memory_allocated(self, device_index=None):
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def communication_backend_name(self):
        return "gloo"

    def is_bf16_supported(self):
        return True

    def is_fp16_supported(self):
        return False

    def supported_dtypes(self):
        return [torch.float32, torch.bfloat16]

    def preferred_dtype(self):
        return torch.bfloat16

    def is_pinned(self, tensor):
        return False

    def pin_memory(self, tensor, align_bytes=1):
        return tensor

    def on_accelerator(self, tensor):
        return tensor.device.type == "cpu"

    def random(self):
        return torch.random

    def manual_seed(self, seed):
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self, seed=None):
        return torch.initial_seed()

    def get_rng_state(self, device_index=None):
        return torch.get_rng_state()

    def set_rng_state(self, new_state, device_index=None):
        torch.set_rng_state(new_state)

    def range_push(self, message):
        pass

    def range_pop(self):
        pass


_accelerator = Accelerator()


def get_accelerator():
    return _accelerator


__getattr__ = refusing("deepspeed.accelerator")
