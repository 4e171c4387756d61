"""Where a program for DeepSpeed trains: on CUDA's device of its rank, as with DeepSpeed, where there is one and nobody has said otherwise."""

import functools
import logging
import os

import torch

from .. import config
from ..errors import Error

_log = logging.getLogger("offloadd")
_installed = {}  # of install(): "device"


def set_installed(device):
    _installed.clear()
    if device is not None:
        _installed["device"] = str(device)


def _said():
    """The device that somebody has named, "cpu" for none; None where nobody has. DS_ACCELERATOR is DeepSpeed's own way to choose."""
    named = _installed.get("device") or os.environ.get("OFFLOADD_DEVICE") or config.read_toml().get("device")
    return named or ("cpu" if os.environ.get("DS_ACCELERATOR", "cuda") != "cuda" else None)


def cuda_of_this_rank():
    """cuda:LOCAL_RANK, torch's current device from now on; None where there is no CUDA. OFD-2001 where this rank has no device."""
    if not torch.cuda.is_available():
        return None
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise Error.of(2001, f"LOCAL_RANK is {number}, and CUDA shows {count} device{'s' if count > 1 else ''}",
                       "Start no more ranks than there are devices, or name one for all: OFFLOADD_DEVICE=cuda:0; with OFFLOADD_DEVICE=cpu models are "
                       "trained in the host's memory")
    torch.cuda.set_device(found := torch.device("cuda", number))
    return found


def uses_cuda():
    """Whether models are trained on CUDA's devices."""
    named = _said()
    return torch.cuda.is_available() if named is None else named.partition(":")[0] == "cuda"


def is_on_a_device(model):
    return any(parameter.device.type not in ("cpu", "meta") for parameter in model.parameters())


@functools.lru_cache(maxsize=None)
def _tell(text):
    _log.warning("offloadd: models are trained on %s, as with DeepSpeed; OFFLOADD_DEVICE=cpu leaves them in the host's memory", text)


def chosen():
    """The device for a model of the host as attach() takes it, where nobody has named one; None: it stays there."""
    if _said() is not None:
        return None
    found = cuda_of_this_rank()
    if found is None:
        return None
    _tell(str(found))
    return str(found)
