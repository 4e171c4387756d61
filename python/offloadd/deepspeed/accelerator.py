"""deepspeed.accelerator: the CPU, or CUDA where models are trained there."""

import contextlib
import functools
import os

import torch

from . import placement
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

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_cached = max_memory_cached = memory_allocated

    def memory_stats(self, device_index=None):
        return {}

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index=None):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index=None):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    # Operations are over when they return: there is nothing to order.

    Stream = Event = None

    def stream(self, stream):
        return contextlib.nullcontext()

    def current_stream(self, device_index=None):
        return None

    default_stream = current_stream

    def resolves_data_dependency(self):
        return True

    def handles_memory_backpressure(self):
        return False

    def is_graph_supported(self):
        return False

    def lazy_call(self, callback):
        return callback()

    def amp(self):
        return torch.cpu.amp

    def default_generator(self, device_index):
        return torch.default_generator

    def get_compile_backend(self):
        return "eager"

    def visible_devices_envs(self):
        return []

    def export_envs(self):
        return []

    BFloat16Tensor, ByteTensor, DoubleTensor, FloatTensor = torch.BFloat16Tensor, torch.ByteTensor, torch.DoubleTensor, torch.FloatTensor
    HalfTensor, IntTensor, LongTensor = torch.HalfTensor, torch.IntTensor, torch.LongTensor

    def communication_backend_name(self):
        return "gloo"

    def is_bf16_supported(self):
        return True

    is_fp16_supported = is_bf16_supported

    def is_triton_supported(self):
        return False

    def supported_dtypes(self):
        return [torch.float32, torch.bfloat16, torch.float16]

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


class CudaAccelerator(Accelerator):
    _name = "cuda"

    def is_available(self):
        return torch.cuda.is_available()

    def is_synchronized_device(self):
        return False

    use_host_timers = resolves_data_dependency = is_synchronized_device

    def device_name(self, device_index=None):
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index=None):
        return torch.cuda.device(device_index)

    def set_device(self, device_index):
        torch.cuda.set_device(device_index)

    def current_device(self):
        return torch.cuda.current_device()

    def current_device_name(self):
        return f"cuda:{torch.cuda.current_device()}"

    def device_count(self):
        return torch.cuda.device_count()

    def synchronize(self, device_index=None):
        torch.cuda.synchronize(device_index)

    def empty_cache(self):
        torch.cuda.empty_cache()

    def reset_peak_memory_stats(self, device_index=None):
        torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_allocated(self, device_index=None):
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index=None):
        return torch.cuda.max_memory_allocated(device_index)

    def memory_reserved(self, device_index=None):
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index=None):
        return torch.cuda.max_memory_reserved(device_index)

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index=None):
        return torch.cuda.memory_stats(device_index)

    def total_memory(self, device_index=None):
        return torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index=None):
        return torch.cuda.mem_get_info(device_index)[0]

    @property
    def Stream(self):
        return torch.cuda.Stream

    @property
    def Event(self):
        return torch.cuda.Event

    def stream(self, stream):
        return torch.cuda.stream(stream)

    def current_stream(self, device_index=None):
        return torch.cuda.current_stream(device_index)

    def default_stream(self, device_index=None):
        return torch.cuda.default_stream(device_index)

    def lazy_call(self, callback):
        return torch.cuda._lazy_call(callback)

    def amp(self):
        return torch.cuda.amp

    def default_generator(self, device_index):
        return torch.cuda.default_generators[device_index]

    def visible_devices_envs(self):
        return ["CUDA_VISIBLE_DEVICES"]

    def export_envs(self):
        return ["NCCL"]

    BFloat16Tensor = staticmethod(functools.partial(torch.tensor, dtype=torch.bfloat16, device="cuda"))
    ByteTensor = staticmethod(functools.partial(torch.tensor, dtype=torch.uint8, device="cuda"))
    DoubleTensor = staticmethod(functools.partial(torch.tensor, dtype=torch.double, device="cuda"))
    FloatTensor = staticmethod(functools.partial(torch.tensor, dtype=torch.float, device="cuda"))
    HalfTensor = staticmethod(functools.partial(torch.tensor, dtype=torch.half, device="cuda"))
    IntTensor = staticmethod(functools.partial(torch.tensor, dtype=torch.int, device="cuda"))
    LongTensor = staticmethod(functools.partial(torch.tensor, dtype=torch.long, device="cuda"))

    def communication_backend_name(self):
        return "nccl"

    def is_bf16_supported(self):
        return torch.cuda.is_bf16_supported()

    def is_fp16_supported(self):
        return torch.cuda.get_device_capability()[0] >= 7

    def is_triton_supported(self):
        return torch.cuda.get_device_capability()[0] >= 8

    def preferred_dtype(self):
        return torch.bfloat16 if self.is_bf16_supported() else torch.float16

    def is_pinned(self, tensor):
        return tensor.is_pinned()

    def pin_memory(self, tensor, align_bytes=1):
        return tensor.pin_memory()

    def on_accelerator(self, tensor):
        return tensor.device.type == "cuda"

    def manual_seed(self, seed):
        return torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed):
        return torch.cuda.manual_seed_all(seed)

    def initial_seed(self, seed=None):
        return torch.cuda.initial_seed()

    def get_rng_state(self, device_index=None):
        return torch.cuda.get_rng_state() if device_index is None else torch.cuda.get_rng_state(device_index)

    def set_rng_state(self, new_state, device_index=None):
        torch.cuda.set_rng_state(new_state, *(() if device_index is None else (device_index,)))

    def range_push(self, message):
        torch.cuda.nvtx.range_push(message)

    def range_pop(self):
        torch.cuda.nvtx.range_pop()


_accelerator, _cuda_accelerator = Accelerator(), CudaAccelerator()


def get_accelerator():
    return _cuda_accelerator if placement.uses_cuda() else _accelerator


__getattr__ = refusing("deepspeed.accelerator")
