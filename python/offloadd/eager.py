"""What is compiled runs eagerly while a job is open: compiled kernels read weights by raw pointers."""

import functools
import logging
import sys

import torch

from . import jobs
from .errors import Error

_log = logging.getLogger("offloadd")

_stance = {"told": False, "forced": False}


def _force_eager(tell):
    if tell and not _stance["told"]:
        _stance["told"] = True
        _log.warning("offloadd: torch.compile runs eagerly while a model is offloaded (compiled kernels read memory directly)")
    torch.compiler.set_stance("force_eager")
    _stance["forced"] = True


def _refuse_for_operator(function):
    """torch.cond and other operators over functions compile these, to find the weights that they close over. Run eagerly they would find
    none, and those weights would get no gradients."""
    utils = sys.modules.get("torch._higher_order_ops.utils")
    if not getattr(getattr(utils, "_hop_compile_tls", None), "in_hop_compile", False):
        return
    name = getattr(function, "__qualname__", "operator").partition(".")[0]
    raise Error.of(1601, f"the program calls torch's {name}(), which compiles the functions that it is given, and what is compiled runs eagerly while a model "
                   "is offloaded: weights that those functions use would get no gradients", "Write it as an ordinary if, or a loop, of Python")


def _has_compiled():
    """Whether torch.compile() was called; torch itself imports torch._dynamo for optimizers."""
    return any(map(callable, getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {}).values()))


def run_eagerly():
    """Compiled kernels read weights by raw pointers: what is compiled runs eagerly while a job is open. torch._dynamo, which is slow to
    import, is left alone where nobody uses it."""
    if "torch._dynamo" in sys.modules:
        _force_eager(tell=_has_compiled())
    if getattr(torch.compile, "_offloadd", False):
        return
    original = torch.compile

    @functools.wraps(original)
    def compile(*args, **kwargs):
        if jobs.handles():
            _refuse_for_operator(args[0] if args else None)
            _force_eager(tell=True)
        return original(*args, **kwargs)

    compile._offloadd = True
    torch.compile = compile


def run_as_before():
    if _stance["forced"] and not jobs.handles():
        _stance["forced"] = False
        torch.compiler.set_stance("default")
