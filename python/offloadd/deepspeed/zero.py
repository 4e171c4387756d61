"""deepspeed.zero: construction in the pool, and access to whole parameters, which are whole always."""

import contextlib
import enum
import functools
import logging
import threading

import torch

from .. import config as configuration
from .. import attaching, jobs
from ..errors import Error
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
        self._inner = self._own_job = self._before = None

    def _options(self):
        imported = None
        if self._config is not None:
            imported = configuration.import_deepspeed(self._config, has_pool=setup.has_pool() or None, tell=False)
        return setup.options_for(imported)

    def __enter__(self):
        if not self._enabled:
            return self
        if jobs.constructed is not None:
            _log.info("offloadd: a second zero.Init before initialize() builds in memory")
            return self
        options = self._options()
        if not options.get("nvme_path") or not options.get("ram"):
            return self
        if not options.get("job"):
            options["job"] = setup.jobs.new_name()
            self._own_job = options["job"]
        else:
            options["job"] = setup.name_beside_others(options["job"])
        self._before = attaching.managed_tensors()
        self._inner = attaching.init(**options)
        self._inner.__enter__()
        self._inner.is_under_way = True
        return self

    def __exit__(self, *failure):
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.is_under_way = False
            inner.__exit__(*failure)
            # Lightning opens one around each fit() and test(), also of modules that are there already.
            if failure[0] is None and inner.leave_if_empty(self._before) and self._own_job is not None:
                setup.jobs.delete(inner.options["nvme_path"], self._own_job)


def _bits(tensor):
    """A copy of a tensor's bytes, in the order of its elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


class _Held:
    """A parameter of several ranks that has memory of its own while it is gathered: what each rank writes there is its own affair, and
    what the modifying rank has written is everybody's afterwards."""

    def __init__(self, parameter, rank):
        self.parameter, self.rank = parameter, rank
        self.own, self._version = parameter.data, parameter._version
        with torch.no_grad():
            parameter.data = parameter.detach().clone()

    def end(self):
        """Gives the parameter its place in the job back, whose weight nobody has changed, and what was written."""
        written, self.parameter.data = _bits(self.parameter), self.own
        torch._C._autograd._unsafe_set_version_counter((self.parameter,), (self._version,))
        return written

    def is_changed(self, written):
        return not torch.equal(written, _bits(self.parameter))

    @torch.no_grad()
    def take(self, written):
        """The modifying rank's values, in all ranks."""
        torch.distributed.broadcast(written, src=self.rank)
        self.parameter.copy_(written.view(self.parameter.dtype).view(self.parameter.shape))


_held = {}  # id(parameter) -> _Held


def check_is_left(call):
    if _held:
        raise Error.of(1002, f"{call} inside of GatheredParameters(modifier_rank={next(iter(_held.values())).rank})",
                       "Leave its block first: what is written there is not in the job before that")


class GatheredParameters:
    """Parameters are whole for torch's operations always, so that there is nothing to gather. With one rank, and without a modifier_rank,
    what is written counts as outside of it. With a modifier_rank and several ranks, all of which have to come here, parameters are
    copies in each rank's memory, and at the end what that rank has written there is the value of all. Between zero.Init and
    initialize() operations on what was built in the pool work inside of this, as with DeepSpeed."""

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        self._params = [params] if isinstance(params, torch.Tensor) else list(params)
        self._rank = modifier_rank if enabled else None
        self._engine, self._here = None, []

    def __enter__(self):
        pending = jobs.constructed
        if pending is not None and pending._engine is not None and not getattr(pending, "is_under_way", False):
            self._engine, self._pending = pending._engine, pending
            pending.is_under_way = True
            pending._constructs_in = threading.get_ident()
            self._engine.begin_construction()
        if self._rank is None:
            return
        try:
            for parameter in self._params:
                self._hold(parameter)
        except BaseException as failure:  # nobody leaves what was not entered
            self.__exit__(type(failure))
            raise

    def _hold(self, parameter):
        held = _held.get(id(parameter))
        if held is not None and held.rank != self._rank:
            raise Error.of(1002, f"GatheredParameters(modifier_rank={self._rank}) inside of one with modifier_rank={held.rank}, of the same "
                                 "parameter", "Name one rank")
        handle = jobs.handle_of(parameter)
        if held is None and handle is not None and handle.world_size > 1:
            _held[id(parameter)] = _Held(parameter, self._rank)
            self._here.append(_held[id(parameter)])

    def __exit__(self, failure, *_):
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.end_construction()
            self._pending.is_under_way, self._pending._constructs_in = False, None
        here, self._here = self._here, []
        written = [held.end() for held in here]
        for held in here:
            del _held[id(held.parameter)]
        if here and failure is None:
            comm.init_distributed()
            changed = [held.is_changed(bits) for held, bits in zip(here, written)]
            for held, bits, is_changed in zip(here, written, comm.broadcast_object(changed, self._rank)):
                if is_changed:
                    held.take(bits)
        return False


@contextlib.contextmanager
def unwrap_model_for_generation(model):
    with GatheredParameters(model.parameters()):
        yield model


def is_zero_param(parameter):
    """Whether it has DeepSpeed's marks of a parameter in parts: none has."""
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


class ZeroParamStatus(enum.Enum):
    AVAILABLE, NOT_AVAILABLE, INFLIGHT = 1, 2, 3


class ZeroParamType(enum.Enum):
    NORMAL, PARTITIONED, REMOTE = 1, 2, 3


def _stay_whole(parameter, param_list=None, **options):
    """parameter.all_gather() and parameter.partition()."""


def _part_size(parameter):
    return -(-parameter.numel() // comm.get_world_size())


def show_status():
    """What libraries ask parameters for (trl, Lightning). One place for all, so that nothing is written with its parameter. There is no `ds_id`,
    which parameters in parts have."""
    kind = torch.nn.Parameter
    kind.ds_status = ZeroParamStatus.AVAILABLE
    kind.ds_numel, kind.ds_shape = property(torch.Tensor.numel), property(lambda parameter: parameter.shape)
    kind.all_gather = kind.partition = _stay_whole
    kind.partition_numel = _part_size


class ParameterOffload:
    """`optimizer.parameter_offload`, and its module: trl takes hooks away while a model generates, and puts them back. There are none."""

    def __init__(self):
        self.forward_hooks, self.backward_hooks = [], []

    @property
    def module(self):
        return self

    def named_parameters(self, recurse=True):
        return ()

    def ds_external_parameters(self):
        return ()

    def _register_deepspeed_module(self, module, count=None):
        pass


def shutdown_init_context():
    pass


restore_init_context = shutdown_init_context

__getattr__ = refusing("deepspeed.zero")
