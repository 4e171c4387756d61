"""Jobs that ended after they were made and before their first step.

Such a job has weights and moments that it was made with, and keeps them when it is attached again. What a checkpoint has brought into
the model since then is therefore compared with them."""

import hashlib

import torch

from . import control
from .errors import Error
from .served import copy_of


def _digest(tensor):
    """Of its elements, row by row."""
    rows = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(memoryview(rows.numpy()), digest_size=16).digest()


def has_begun(engine, pool, job):
    """Whether the job's store was there when it was opened, and no step was taken. With several ranks all of them ask."""
    if engine.step_count() > 0:
        return False
    is_there = job in control.jobs_in(pool)
    if engine.world_size() > 1:  # nobody makes it before all have looked
        engine.exchange(torch.zeros(1, dtype=torch.uint8))
    return is_there


class Beginning:
    """What a model brings along, before it is attached."""

    def __init__(self, named):
        self._named = [(name, parameter, _digest(copy_of(parameter))) for name, parameter in named if parameter.numel()]

    def difference(self, handle):
        """The first name whose weights are others in the job; None when they are equal."""
        return next((name for name, parameter, digest in self._named if _digest(handle.gather_one(parameter)) != digest), None)

    def check(self, handle, of):
        """OFD-1602 when the job has other weights. `of`: what the model has, in words."""
        name = self.difference(handle)
        if name is not None:
            pool, job = handle.nvme_path, handle.job
            raise Error.of(1602, f"job {job} ended before its first step, and '{name}' has other values there than {of}",
                           f"Remove it, offloadctl rm {pool} {job} --yes, or name another: a new job begins with the model as it is")
