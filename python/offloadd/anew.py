"""A model whose job is open is attached again, with optimizers that are new: a second fit() of Lightning, a search for a rate before it, a
Trainer after another one. In plain torch it trains on from the weights that it has, and moments begin anew. So it does here, in another job:
the one that attach() is told, or NAME-2 after NAME."""

import contextlib
import logging
import os
import shutil

from .errors import Error
from .recipes import parameters_of
from .served import copy_of

_log = logging.getLogger("offloadd")


def former_among(handles, models, optimizers):
    """The handle that has these very models, if the optimizers are new and take the place of its own; else None. Those of other parameters would be
    beside them, and belong into one attach()."""
    if any(hasattr(each, "_offload_part") for each in optimizers):
        return None
    given = {id(parameter) for each in optimizers for parameter in parameters_of(each)}
    for handle in handles:
        theirs = handle.models
        if handle.world_size != 1 or len(theirs) != len(models) or not all(a is b for a, b in zip(theirs, models)):
            continue
        return handle if any(id(parameter) in given for each in handle.optimizers for parameter in parameters_of(each)) else None
    return None


def name_after(former, job):
    """The job that goes on with its models, where attach() was told this one, and how many of the name there were then."""
    number = former.training + 1 if former.asked_for == job else 1
    return job if number == 1 else f"{job}-{number}", number


def gradients_of(former):
    """Those that the models have, which stay what they are, as in plain torch: (parameter, copy) of each."""
    having = [parameter for model in former.models for parameter in model.parameters() if parameter.grad is not None]
    size = sum(parameter.grad.nbytes for parameter in having)
    if size * 4 > former.statistics()["budget_bytes"]:
        raise Error.of(1205, f"job {former.job} is attached already in this process, and its model, which is attached again, has {size} bytes of gradients",
                       "Call model.zero_grad() before attach(), so that it begins without them; or close() the handle first, and give this one another job")
    return [(parameter, copy_of(parameter.grad)) for parameter in having]


@contextlib.contextmanager
def weights_of(former, job):
    """Ends the former job. Gives a folder that has its weights until `job` has taken them over."""
    folder = os.path.join(former.nvme_path.split(",")[0], f"{former.job}-weights")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    try:
        former.save_weights(folder)
        former.followed_by = job
        former.close()
        _log.warning("offloadd: the model of job %s, which ends at step %d, is attached with another optimizer: it trains on in job %s", former.job,
                     former.last_step, job)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
