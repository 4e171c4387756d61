"""What optimizers were given by load_state_dict() before they are attached. torch rounds it to the types of the parameters, and leaves masters out: of
this package's checkpoints both are had from what was loaded."""

import functools
import weakref

import torch

from . import served
from .optimizer_part import is_cast_of, masters_in, numbered
from .recipes import is_narrow, parameters_of, recipe_of

_of = weakref.WeakKeyDictionary()  # the last dictionary of each optimizer, where it had masters


def _noting(original):
    @functools.wraps(original)
    def load_state_dict(self, state_dict):
        original(self, state_dict)
        if masters_in(state_dict, self):  # whose dictionaries the script may change
            _of[self] = {**state_dict, "state": {key: dict(state) for key, state in state_dict["state"].items()}}
        else:
            _of.pop(self, None)

    return load_state_dict


served.wrap(torch.optim.Optimizer, "load_state_dict", _noting)


def _is_rounded(value, given):
    return isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor) and is_narrow(value) and given.dtype == torch.float32 and is_cast_of(value, given)


def give_back(optimizer):
    """The optimizer has what was rounded as the checkpoint has it, but for what the script has changed since. Returns the checkpoint's masters."""
    state_dict = _of.pop(optimizer, None) if isinstance(optimizer, torch.optim.Optimizer) else None
    if state_dict is None or recipe_of(optimizer).is_foreign or not any(map(is_narrow, parameters_of(optimizer))):
        return []
    for key, parameter in numbered(state_dict, optimizer):
        state, given = optimizer.state.get(parameter, {}), state_dict["state"].get(key, {})
        state.update({name: given[name] for name, value in state.items() if _is_rounded(value, given.get(name))})
    return masters_in(state_dict, optimizer)


def give_masters(optimizers, masters):
    """For the next step, to those that are attached: of each what give_back() has returned."""
    for optimizer, its in zip(optimizers, masters):
        if its:
            (optimizer._masters if hasattr(optimizer, "_masters") else optimizer._offload_part).note_masters(its)
