"""The shared library: found, checked, loaded once. `Engine` is its class (zero3/torch/python_binding.cc)."""

import ctypes
import os

import torch

from .errors import Error

TORCH_VERSION = "2.11"


def _check_torch():
    if torch.__version__.split("+")[0].split(".")[:2] != TORCH_VERSION.split("."):
        raise ImportError(f"OFD-1601 this offloadd is for torch {TORCH_VERSION}, and this is torch {torch.__version__}. "
                          f"Install torch {TORCH_VERSION}, or the offloadd that is made for torch {torch.__version__}.")


def _find():
    here = os.path.dirname(os.path.abspath(__file__))
    candidates = [
        os.environ.get("OFFLOADD_LIBRARY", ""),
        os.path.join(here, "_C.so"),
        os.path.join(here, "..", "..", "bazel-bin", "python", "offloadd", "_C.so"),  # in a checkout
    ]
    for path in candidates:
        if path and os.path.exists(path):
            return os.path.abspath(path)
    raise ImportError(f"offloadd: there is no _C.so in {here}. Install the wheel, or build //python:package and use bazel-bin.")


def _load():
    _check_torch()
    path = _find()
    torch.classes.load_library(path)
    ctypes.CDLL(path).offloadd_set_error_class(ctypes.py_object(Error))
    return path


PATH = _load()
Engine = torch.classes.offloadd.Engine


def tensor_of(data):
    """Bytes, as the library takes them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def bytes_of(tensor):
    return bytes(tensor.tolist())


def is_disabled():
    """OFFLOADD_DISABLE=1: the same script, in memory."""
    value = os.environ.get("OFFLOADD_DISABLE", "")
    if value not in ("", "0", "1", "true", "yes", "on"):
        raise Error.of(1002, f'the environment variable OFFLOADD_DISABLE is "{value}"', "Set it to one of 0, 1, true, yes, on, or leave it out")
    return value not in ("", "0")
