"""An optimizer that the daemon does not have: it runs as it is, in this process, weight by weight; what it keeps is in memory."""

import logging

import torch

from .library import Engine
from .optimizer import after_steps, refuse_unless_kept
from .recipes import parameters_of, refuse

_log = logging.getLogger("offloadd")


class ForeignPart:
    """Counts the steps of an optimizer that runs in this process: each is one of the job."""

    is_foreign = True

    def __init__(self, handle, optimizer, name):
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            refuse("ZeroRedundancyOptimizer, which divides what an optimizer keeps among ranks: they share a job's in any case",
                   "Attach the optimizer that it would make, such as torch.optim.AdamW(model.parameters())")
        if handle.world_size > 1 and isinstance(optimizer, torch.optim.LBFGS):
            refuse(f"{name} with several ranks: it decides by the loss, which is another one in each of them",
                   "Use an optimizer that takes gradients only, or train with one rank")
        self.handle, self.optimizer, self.name = handle, optimizer, name

    def swap(self):
        self.optimizer._offload_part = self
        self._hooks = [self.optimizer.register_step_pre_hook(self._begin), after_steps(self.optimizer, self._end)]

    def release(self):
        for hook in self._hooks:
            hook.remove()
        del self.optimizer._offload_part

    @staticmethod
    def _begin(*_):
        Engine.set_writes_alike(True)

    def _end(self):
        Engine.set_writes_alike(False)
        self.handle.commit()

    def tell(self):
        _log.warning("offloadd: %s runs in this process; what it keeps is in memory and is not part of the job, which cannot be resumed",
                     self.name)

    def has(self, parameter):
        return any(parameter is each for each in parameters_of(self.optimizer))

    def write(self, parameter, plane, value):
        """As Part.write(); there are no masters."""
        if plane != "master":
            with torch.no_grad():
                refuse_unless_kept(self.optimizer.state.get(parameter, {}), plane)[plane].copy_(value)
