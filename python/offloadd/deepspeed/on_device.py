"""deepspeed.OnDevice: tensors that are constructed inside are of a type and on a device, such as meta for a model of which only shapes are wanted."""

import torch
from torch.utils import _device

from .missing import refusing


class _Cast(torch.overrides.TorchFunctionMode):
    """What torch's constructors make, as numbers with fractions of a type."""

    def __init__(self, dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function in _device._device_constructors() and isinstance(made, torch.Tensor) and made.is_floating_point():
            return made.to(self._dtype)
        return made


class OnDevice:
    def __init__(self, dtype, device="meta", enabled=True):
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._modes = []

    def __enter__(self):
        if self.enabled:
            self._modes = [torch.device(self.device), _Cast(self.dtype)] if self.dtype is not None else [torch.device(self.device)]
            for mode in self._modes:
                mode.__enter__()
        return self

    def __exit__(self, *failure):
        while self._modes:
            self._modes.pop().__exit__(*failure)


__getattr__ = refusing("deepspeed.utils.init_on_device")
