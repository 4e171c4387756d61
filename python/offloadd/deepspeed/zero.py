"""deepspeed.zero: construction in the pool, and access to whole parameters, which are whole always."""

import contextlib
import functools
import logging
import sys
import threading

import torch

from .. import config as configuration
from .. import handle as attaching
from ..library import is_disabled
from . import comm, setup
from .missing import refuse, refusing

_log = logging.getLogger("offloadd")


class Init(contextlib.ContextDecorator):
    """`with deepspeed.zero.Init(config_dict_or_path=…):` builds a model larger than memory, for the initialize() that follows. A further
    one before that, and one without a drive or a budget, builds in memory."""

    def __init__(self, module=None, data_parallel_group=None, mem_efficient_linear=True, remote_device=None, pin_memory=False,
                 config_dict_or_path=None, config=None, enabled=True, dtype=None, mpu=None, zero_param_parallel_group=None,
                 zero_quantized_weights=False, zero_quantized_nontrainable_weights=False, sequence_data_parallel_group=None,
                 param_swapper=None):
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            refuse("zero.Init with quantized weights")
        if enabled:
            comm.init_distributed()  # transformers asks for the rank while it loads
        self._config = config if config_dict_or_path is None else config_dict_or_path
        self._enabled = enabled and module is None and not is_disabled()
        self._inner = None

    def _options(self):
        imported = None
        if self._config is not None:
            imported = configuration.import_deepspeed(self._config, has_pool=setup.has_pool() or None, tell=False)
        return setup.options_for(imported)

    def __enter__(self):
        if not self._enabled:
            return self
        if attaching._constructed is not None:
            _log.info("offloadd: a second zero.Init before initialize() builds in memory")
            return self
        options = self._options()
        if not options.get("nvme_path") or not options.get("ram"):
            return self
        if not options.get("job"):
            options["job"] = setup.jobs.new_name()
            self._own_job = options["job"]
        self._inner = attaching.init(**options)
        self._inner.__enter__()
        self._inner.is_under_way = True
        return self

    def __exit__(self, *failure):
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.is_under_way = False
            return inner.__exit__(*failure)


class GatheredParameters:
    """Parameters are whole for torch's operations always, and what is written into them counts; so there is nothing to gather. Between
    zero.Init and initialize() operations on what was built in the pool work inside of this, as with DeepSpeed."""

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        self._engine = None

    def __enter__(self):
        pending = attaching._constructed
        if pending is not None and pending._engine is not None and not getattr(pending, "is_under_way", False):
            self._engine, self._pending = pending._engine, pending
            pending.is_under_way = True
            pending._constructs_in = threading.get_ident()
            self._engine.begin_construction()

    def __exit__(self, *_):
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.end_construction()
            self._pending.is_under_way, self._pending._constructs_in = False, None
        return False


def register_external_parameter(module, parameter):
    if not isinstance(parameter, torch.nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")


def unregister_external_parameter(module, parameter):
    pass


# What transformers takes from partition_parameters while it builds a model: torch's own, unchanged.
_orig_torch_arange = torch.arange
_orig_torch_empty, _orig_torch_zeros, _orig_torch_ones, _orig_torch_full = torch.empty, torch.zeros, torch.ones, torch.full
_orig_torch_tensor, _orig_torch_eye, _orig_torch_randn = torch.tensor, torch.eye, torch.randn


def zero_wrapper_for_fp_tensor_constructor(function, target_fp_dtype=None):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class ZeroParamStatus:
    AVAILABLE, NOT_AVAILABLE, INFLIGHT = 1, 2, 3


def shutdown_init_context():
    pass


restore_init_context = shutdown_init_context

partition_parameters = sys.modules[__name__]  # in DeepSpeed a module of its own

__getattr__ = refusing("deepspeed.zero")
