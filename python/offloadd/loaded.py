"""What a script that knows of no job has loaded of its own checkpoint, before its job is attached.

A job that exists has weights and moments of its own, of its last step. A script that was killed goes on where its checkpoint is, and
counts its steps from there; so the job takes what was loaded, unless that is what it has."""

import copy
import logging

import torch

from . import attaching, process_state
from .errors import Error
from .library import is_disabled
from .recipes import is_table, number, parameters_of, recipe_of
from .served import copy_of

_log = logging.getLogger("offloadd")


def _tensors_of(module, optimizers, beside):
    """Parameters and buffers, each once."""
    found = {id(p): p for p in module.parameters()}
    found.update((id(p), p) for optimizer in optimizers for p in parameters_of(optimizer))
    found.update((id(b), b) for each in (module, *beside) for b in each.buffers())
    return list(found.values())


class Loaded:
    """Weights, buffers and moments in memory; taken out of the optimizers, which the job is to fill."""

    def __init__(self, module, optimizers, beside):
        self._values = [(tensor, copy_of(tensor)) for tensor in _tensors_of(module, optimizers, beside)]
        self._states, self._foreign = [], []
        for optimizer in optimizers:
            if recipe_of(optimizer).is_foreign:
                self._foreign.append(_Foreign(optimizer))
            else:
                self._states.append((optimizer, dict(optimizer.state)))
                optimizer.state.clear()

    @classmethod
    def before(cls, module, optimizers, options, is_loaded, beside=()):
        """`is_loaded`: of one of the optimizers load_state_dict() was called; `beside`: further modules, whose buffers are the job's. None where the job of attach(**options), which this opens, is new,
        and begins with what is in memory; and where it has steps, and goes on with its own. One that was made before, and ended before its
        first step, begins with what is in memory now."""
        if is_disabled():
            return None
        is_further = attaching.open_ahead(options)[0].step_count() > 0
        return cls(module, optimizers, beside) if (is_loaded if is_further else attaching.was_made_before(options)) else None

    def take(self, handle, masters):
        """Has the job go on with it, unless it is there; returns whether it was not. `masters`: of each optimizer those that the checkpoint had."""
        written = [(tensor, value) for tensor, value in self._values if not _is_equal(tensor, value)]
        if not written and all(_has_moments(handle, optimizer, state) for optimizer, state in self._states) and \
                all(foreign.is_there() for foreign in self._foreign):
            if handle.step:
                _log.warning("offloadd: job %s continues after %d steps, where the script's checkpoint is", handle.job, handle.step)
            return False
        # Also where they are equal: the masters that the job has of them are those of another step.
        narrow = [(tensor, value) for tensor, value in self._values if tensor.requires_grad and value.dtype in (torch.bfloat16, torch.float16)]
        known = {id(tensor) for tensor, _ in written}
        written += [each for each in narrow if id(each[0]) not in known]
        if any(isinstance(value, str) for _, states in self._states for state in states.values() for value in state.values()):
            raise Error.of(1602, f"the script has loaded a checkpoint of another step than job {handle.job}, which is at step {handle.step}, and the "
                                 "checkpoint says only where the moments are",
                           "Let the script begin without its checkpoint: the job continues at its last step. Checkpoints of Hugging "
                           "Face's and Lightning's Trainer hold the moments where these are less than a quarter of ram")
        if handle.step:
            _log.warning("offloadd: job %s is at step %d, and goes on with what the script has loaded%s", handle.job, handle.step,
                         "" if {id(tensor) for tensor, _ in narrow} <= {id(p) for its in masters for p, _ in its} else
                         ": its 16-bit weights are the masters now, and its moments are rounded as they are")
        else:
            _log.warning("offloadd: job %s ended before its first step, and begins with what the script has now", handle.job)
        with torch.no_grad():
            for tensor, value in written:
                tensor.copy_(value)
        for optimizer, states in self._states:
            optimizer._offload_part.replace(states)
        for foreign in self._foreign:
            foreign.give()
        return True


class _Foreign:
    """What one that runs in this process has, as the script has left it."""

    def __init__(self, optimizer):
        self._optimizer, self._state = optimizer, copy.deepcopy(optimizer.state_dict())
        self._parameters = {str(number): parameter for number, parameter in enumerate(parameters_of(optimizer))}
        describer = process_state.Describer({id(p): name for name, p in self._parameters.items()}, set(process_state.options_of(optimizer)))
        try:
            self._described = describer.of(optimizer)
        except process_state.NotKept:
            self._described = None  # nor does the job have it, and attach() says so
        self._storages = [storage.clone() for storage in describer.storages]
        optimizer._offload_is_given_back = True  # attach() says nothing of what it drops

    def is_there(self):
        return _are_equal(self._optimizer.state_dict(), self._state)

    def give(self):
        process_state.Giver(self._described, self._storages, self._parameters).give(self._optimizer)


def _are_equal(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _is_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(each, other[key]) for key, each in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return one == other


def _is_equal(tensor, value):
    """Also where both are NaN."""
    now = copy_of(tensor)
    return torch.equal(now, value) or (now.is_floating_point() and torch.equal(now.nan_to_num(7), value.nan_to_num(7)))


def _has_moments(handle, optimizer, states):
    part = optimizer._offload_part
    for group in optimizer.param_groups:
        planes = part.recipe.planes(part.recipe.values(group))
        for parameter in group["params"]:
            state = states.get(parameter) or {}
            if is_table(parameter):
                continue
            if part.recipe.counts and handle.update_count(parameter) != int(number(state.get("step", 0))):
                return False
            for name in planes:
                value = state.get(name)
                if isinstance(value, str):  # where it is
                    continue
                if value is None and handle.update_count(parameter) == 0:
                    continue
                # Loading has rounded it to the type of the parameter.
                if value is None or not torch.equal(value.cpu(), handle.gather_one(parameter, name).to(value.dtype)):
                    return False
    return True
