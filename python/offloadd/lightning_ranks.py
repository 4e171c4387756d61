"""Lightning with several ranks. It wraps the module in DistributedDataParallel before configure_optimizers() is called, so that the gradients are
reduced there; and where it starts the ranks itself no launcher's variables say which one a process is."""

import contextlib
import gc
import os
import sys

import torch

from . import jobs
from .errors import Error
from .library import is_disabled

_PACKAGES = ("lightning", "pytorch_lightning")
_NUMBERS = ("rank", "world_size", "local_rank", "local_world_size")


def process_of_several():
    """(rank, ranks) of torch.distributed, or None of one alone."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized() or torch.distributed.get_world_size() < 2:
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def trainer_of(models):
    """That which fits a module with one of these in it, or None."""
    if not any(each in sys.modules for each in _PACKAGES):
        return None
    mine = {id(each) for model in models for each in model.modules()}
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module) and each.__dict__.get("_trainer") is not None and type(each._trainer).__module__.startswith(_PACKAGES) \
                and not mine.isdisjoint(map(id, each.modules())):
            return each._trainer
    return None


def _is_numbered(options):
    """Whether options, or a launcher, say which rank this is."""
    return any(options.get(each) is not None for each in _NUMBERS) or any(
        name in os.environ for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")) or "SLURM_STEP_ID" in os.environ


def options_in(models, options, is_untouched=False):
    """Those of attach(), with what Lightning knows of ranks. `is_untouched`: the script does not call attach() itself."""
    if is_disabled() or process_of_several() is None:
        return options
    trainer = trainer_of(models)
    if trainer is None or trainer.world_size < 2:
        return options
    strategy, added = trainer.strategy, {}
    if not _is_numbered(options):
        starts_itself = type(strategy.launcher).__name__ == "_SubprocessScriptLauncher"
        if is_untouched and starts_itself:
            raise Error.of(1002, f"Lightning has started {trainer.world_size - 1} of {trainer.world_size} ranks itself, which are not run by python -m offloadd",
                           f"Start all of them: torchrun --nproc-per-node {trainer.num_devices} -m offloadd …")
        if jobs.constructed is not None:
            raise Error.of(1002, f"init() has opened the job for one rank, and Lightning has started {trainer.world_size}",
                           f"Start all of them: torchrun --nproc-per-node {trainer.num_devices} script.py")
        environment = strategy.cluster_environment
        place = f"{environment.main_address}.{environment.main_port}" if environment is not None else os.getppid()
        added = {"rank": trainer.global_rank, "world_size": trainer.world_size, "local_rank": trainer.local_rank,
                 "local_world_size": trainer.num_devices, "run_id": f"lightning.{place}"}
    if isinstance(strategy.model, torch.nn.parallel.DistributedDataParallel):
        if strategy.model.gradient_as_bucket_view:
            raise Error.of(1601, "Lightning's strategy has gradient_as_bucket_view=True, and gradients of the job have memory of their own",
                           "Leave it out, DDPStrategy()")
        if "gradients" not in options:
            added["gradients"] = "reduced_by_trainer"
    return {**added, **options}


@contextlib.contextmanager
def explaining(options):
    """OFD-1205 of a process that is one of several, and that nobody has told so: another one has the job."""
    try:
        yield
    except Error as error:
        several = process_of_several()
        if error.id != 1205 or several is None or _is_numbered(options):
            raise
        raise Error.of(1205, f"this process is rank {several[0]} of {several[1]} in torch.distributed, and no launcher's variables say so: it is alone in its "
                       f"job, which another one has ({error})", "Start the ranks with torchrun, or give attach() rank, world_size, local_rank and "
                       "local_world_size. With Lightning call attach() in configure_optimizers()") from None
