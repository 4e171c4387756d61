"""Which models can be attached, and what is taken off them and their optimizers before."""

import fnmatch
import functools
from collections.abc import Iterable

import torch

from . import jobs
from .errors import Error, class_of
from .named_tensors import all_named_parameters_of, check_has_memory

_OWN_REDUCTION = 'or leave the reduction to it: attach(..., gradients="reduced_by_trainer")'


def without_wrapper(model):
    """The module that DistributedDataParallel wraps, for jobs whose gradients it reduces."""
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return model
    if model.gradient_as_bucket_view:
        raise Error.of(1601, "DistributedDataParallel was made with gradient_as_bucket_view=True, and gradients of the job have memory of their own",
                       "Leave gradient_as_bucket_view out")
    return model.module


def without_prepare(optimizer):
    """The script's own, of one that Accelerate's prepare() or Lightning has wrapped."""
    wraps = not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__name__ == "AcceleratedOptimizer"
    return getattr(optimizer, "optimizer", optimizer) if wraps else optimizer


def check_model(model):
    name = type(model).__name__
    if name in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine"):
        way = "Attach the model itself: the daemon adds the gradients of several ranks (torchrun), and nothing has to wrap it"
        raise Error.of(1601, f"the model is wrapped in {name}", f"{way}, {_OWN_REDUCTION}" if name == "DistributedDataParallel" else way)
    for key, parameter in all_named_parameters_of(model):
        if torch.nn.parameter.is_lazy(parameter):
            raise Error.of(1601, f"parameter '{key}' is not initialised (a lazy module)", "Run one forward pass before attach()")
        if parameter.device.type == "meta":
            raise Error.of(1601, f"parameter '{key}' is on device meta, it has no value",
                           "Build the model with `with offloadd.init(...):` instead of on meta")
        if parameter.has_names():
            raise Error.of(1601, f"the dimensions of parameter '{key}' have names, and such tensors are not offloaded",
                           "Make the parameter without names, and give them in forward(): parameter.refine_names(...)")
        check_has_memory(f"parameter '{key}'", parameter)


@functools.lru_cache(maxsize=None)
def refuse_wrappers():
    """DistributedDataParallel around a model that is attached already, where the daemon adds the gradients of several ranks."""
    wrapper = torch.nn.parallel.DistributedDataParallel
    original = wrapper.__init__

    @functools.wraps(original)
    def initialise(self, module, *args, **kwargs):
        added = [handle.identities() for handle in jobs.handles() if handle.adds_gradients]
        if any(id(parameter) in identities for parameter in module.parameters() for identities in added):
            raise Error.of(1601, "the model is attached, and is wrapped in DistributedDataParallel",
                           f"Leave the wrapper out: the daemon adds the gradients of several ranks, {_OWN_REDUCTION}")
        original(self, module, *args, **kwargs)

    wrapper.__init__ = initialise


def to_unfreeze(named, unfreeze):
    """Frozen parameters that are to be declared as trained: all, or those named, or given."""
    if not unfreeze:
        return []
    frozen = [(name, p) for name, p in named if not p.requires_grad and p.is_floating_point() and p.is_leaf]
    if unfreeze is True:
        return [p for _, p in frozen]
    chosen = [unfreeze] if isinstance(unfreeze, (str, torch.Tensor)) or not isinstance(unfreeze, Iterable) else list(unfreeze)
    for each in chosen:
        if not isinstance(each, (str, torch.Tensor)):
            raise Error.of(1002, f"unfreeze names {class_of(each)}, which is no parameter", "Give it True, names with * for what differs, or parameters")
    patterns = [each for each in chosen if isinstance(each, str)]
    for each in patterns:
        if not any(fnmatch.fnmatchcase(name, each) for name, _ in named):
            raise Error.of(1002, f"unfreeze: no parameter is called {each}", "Name them as model.named_parameters() does, with * for what differs")
    given = {id(each) for each in chosen if isinstance(each, torch.Tensor)}
    return [p for name, p in frozen if id(p) in given or any(fnmatch.fnmatchcase(name, each) for each in patterns)]
