"""Lightning's strategies for DeepSpeed take CUDA's devices only. Here they take the CPU, too: they ask before anything is trained."""

import importlib
import sys

from ..imported import when_imported

_STRATEGIES = [f"{package}.strategies.deepspeed" for package in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")]


def _admit(name):
    module = sys.modules[name]
    cuda, check = getattr(module, "CUDAAccelerator", None), getattr(module, "_validate_device_index_selection", None)
    if not isinstance(cuda, type) or check is None:
        return
    cpu = importlib.import_module(f"{name.removesuffix('.strategies.deepspeed')}.accelerators").CPUAccelerator
    module.CUDAAccelerator = (cuda, cpu)  # for isinstance()
    module._validate_device_index_selection = lambda devices: check([each for each in devices if each.type != "cpu"])


def begin():
    for name in _STRATEGIES:
        when_imported(name, lambda name=name: _admit(name))
