"""A model whose job is open is attached under the same name with optimizers that are new: a second fit() of Lightning, a search for a rate
before it. In plain torch it trains on from the weights that it has, and moments begin anew. So it does here, in a job of its own: NAME-2 after
NAME."""

import contextlib
import logging
import os
import shutil

from .errors import Error
from .served import copy_of

_log = logging.getLogger("offloadd")


def former_among(handles, models, optimizers, job, pool):
    """The handle that has trained these very models for attach(…, job=job), if none of the optimizers is its own; else None."""
    for handle in handles:
        theirs = handle.models
        is_it = handle.asked_for == job and handle.nvme_path == pool and handle.world_size == 1
        if is_it and len(theirs) == len(models) and all(a is b for a, b in zip(theirs, models)):
            return None if any(hasattr(each, "_offload_part") for each in optimizers) else handle
    return None


def gradients_of(former):
    """Those that the models have, which stay what they are, as in plain torch: (parameter, copy) of each."""
    having = [parameter for model in former.models for parameter in model.parameters() if parameter.grad is not None]
    size = sum(parameter.grad.nbytes for parameter in having)
    if size * 4 > former.statistics()["budget_bytes"]:
        raise Error.of(1205, f"job {former.job} is attached already in this process, and its model, which is attached again, has {size} bytes of gradients",
                       "Call model.zero_grad() before attach(), so that it begins without them; or close() the handle first, and give this one another job")
    return [(parameter, copy_of(parameter.grad)) for parameter in having]


@contextlib.contextmanager
def weights_of(former):
    """Ends the job, whose models another one takes over. Gives the options of that one, and a folder that has the weights until it is attached."""
    number = former.training + 1
    job = f"{former.asked_for}-{number}"
    folder = os.path.join(former.nvme_path.split(",")[0], f"{former.job}-weights")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    try:
        former.save_weights(folder)
        former.close()
        _log.warning("offloadd: the model of job %s, which ends at step %d, is attached with another optimizer: it trains on in job %s", former.job,
                     former.last_step, job)
        yield {"job": job}, number, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
