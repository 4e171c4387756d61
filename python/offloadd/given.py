"""What optimizers of a script were given by load_state_dict() before they are attached. torch rounds it to the types of the parameters: moments of
bfloat16 and float16 weights are had from the checkpoint again, and so are their masters."""

import weakref

import torch

from .optimizer_part import is_cast_of, masters_in, numbered
from .recipes import is_narrow, parameters_of, recipe_of


def _is_rounded(value, given):
    return isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor) and is_narrow(value) and given.dtype == torch.float32 and is_cast_of(value, given)


class Given:
    """The last dictionary of each optimizer with such parameters."""

    def __init__(self):
        self._of = weakref.WeakKeyDictionary()

    def note(self, optimizer, state_dict):
        """Before torch takes it."""
        if any(map(is_narrow, parameters_of(optimizer))):
            self._of[optimizer] = state_dict

    def give_back(self, optimizer):
        """The optimizer has what was rounded as the checkpoint has it, but for what the script has changed since. Returns the checkpoint's
        masters."""
        state_dict = self._of.pop(optimizer, None)
        if state_dict is None or recipe_of(optimizer).is_foreign:
            return []
        for key, parameter in numbered(state_dict, optimizer):
            state, given = optimizer.state.get(parameter, {}), state_dict["state"].get(key, {})
            state.update({name: given[name] for name, value in state.items() if _is_rounded(value, given.get(name))})
        return masters_in(state_dict, optimizer)
