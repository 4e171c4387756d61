"""A hook before the forward pass of every module, of which torch.compile() does not warn."""

import warnings

import torch

_OF_HOOKS = "Using `torch.compile\\(module\\)` when there are global hooks on modules"


class BeforeForward:
    def __init__(self, look):
        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
        warnings.filterwarnings("ignore", _OF_HOOKS)
        self._filter = warnings.filters[0]

    def remove(self):
        self._hook.remove()
        if self._filter in warnings.filters:  # the script may have changed them
            warnings.filters.remove(self._filter)
