"""What counts beside a configuration: what install() was told. Also, how jobs are named.

DeepSpeed's programs begin anew with each run, unless they load a checkpoint. So a run has a job of its own, which is deleted at its end
unless a checkpoint is in it; with a name of the job (install(job=…), OFFLOADD_JOB, offloadd.toml) it is that one, and continues where it
is. Further engines beside it have NAME-2, …, in their order.
"""

import atexit
import itertools
import logging
import os
import time
import uuid
import weakref

from .. import config, control
from .. import jobs as open_jobs
from ..errors import Error
from . import comm, placement, snapshots

_log = logging.getLogger("offloadd")
_REMOVE_ATTEMPTS = 40
_installed = {}  # options of attach(), from install()


def set_installed(options):
    _installed.clear()
    _installed.update({key: value for key, value in options.items() if value is not None})
    placement.set_installed(_installed.get("device"))


def options_for(imported, model=None):
    """Options of attach() for a configuration, the strongest first: install(), variables, the configuration, offloadd.toml. Where none of
    them names a device it is CUDA's of this rank, if there is one, unless the model is on a device already."""
    options = config.read_toml()
    from_file = {} if imported is None else imported.options
    options.update({key: value for key, value in from_file.items() if not os.environ.get(config._VARIABLES.get(key, ""))})
    options.update(_installed)
    if model is None or not placement.is_on_a_device(model):
        found = placement.chosen()
        if found is not None:
            options["device"] = found
    return options


def has_pool():
    return bool(_installed.get("nvme_path") or config.read_toml().get("nvme_path"))


def check_options(options):
    if not options.get("nvme_path"):
        raise Error.of(1105, "no drive is named to offload to",
                       "Set OFFLOADD_POOL (or offload_param.nvme_path in the DeepSpeed configuration) to a directory on a drive")
    if not options.get("ram"):
        raise Error.of(1105, "no memory budget is named", "Set OFFLOADD_RAM to what offloaded state may hold in memory, such as 8GiB")


def name_beside_others(job, model=None):
    """The user's name of a job, or where models of others are trained in that, the next that is free: NAME-2, …"""
    taken = {handle.job for handle in open_jobs.handles()
             if any(each is not None for each in handle.models) and not any(each is model is not None for each in handle.models)}
    return next(name for name in itertools.chain([job], (f"{job}-{number}" for number in itertools.count(2))) if name not in taken)


class Jobs:
    """The jobs that this process has made without a name of the user's."""

    def __init__(self):
        self._own = {}  # job -> (pool, handle)
        self._kept = set()
        self._ended = set()  # jobs whose engine was destroyed
        self._left = []

    def leave_to_the_parent(self):
        """In a forked child, which has jobs of its own from here."""
        self._left.append(self._own)  # handles would be closed if they were dropped
        self._own, self._kept, self._ended = {}, set(), set()

    def new_name(self, base="deepspeed"):
        """Equal in all ranks."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            comm.init_distributed()
        return comm.broadcast_object(f"{base}-{time.strftime('%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}")

    def own(self, handle, model):
        """From now on the job is deleted with its model, at the latest when the process ends."""
        if not self._own:
            atexit.unregister(self.remove_at_exit)
            atexit.register(self.remove_at_exit)
        self._own[handle.job] = (handle.nvme_path, handle)
        weakref.finalize(model, self.remove, handle.job).atexit = False

    def former_of(self, model):
        """The handle of the job that has parameters of this model, or None."""
        mine = {id(parameter) for parameter in model.parameters()}
        return next((handle for _, handle in self._own.values() if handle.is_open and mine & handle.identities()), None)

    def end(self, handle):
        """Its engine is destroyed. The model has its weights until it ends, or another one trains."""
        if handle.job in self._own:
            self._ended.add(handle.job)
        else:
            handle.close()

    def make_room(self, but):
        """For another job: those whose engine was destroyed end here, but for the handle `but`."""
        for job in [job for job in self._ended if but is None or job != but.job]:
            self.remove(job)

    def keep(self, job):
        """A checkpoint is in it."""
        self._kept.add(job)

    def are_own(self, job):
        """Whether it is one of these."""
        return job in self._own

    def drop_unmarked(self):
        """Snapshots whose checkpoints are gone."""
        snapshots.kept.drop_unmarked(self.are_own)

    @staticmethod
    def _may_have_checkpoints(pool, job):
        try:
            return snapshots.are_in(pool, job)
        except Error:
            return True

    def remove(self, job):
        """Closes a job, and deletes it unless a checkpoint is in it."""
        pool, handle = self._own.pop(job, (None, None))
        self._ended.discard(job)
        if handle is None:
            return
        try:
            handle.close()
        except Error as error:
            if error.id != 1207:  # it went with its pool, which its log says
                raise
        if comm.get_rank() != 0:
            return
        self.drop_unmarked()
        if job not in self._kept or not self._may_have_checkpoints(pool, job):
            self.delete(pool, job)

    @staticmethod
    def delete(pool, job):
        """One that is closed here, by the first rank."""
        if comm.get_rank() != 0:
            return None
        for attempt in range(_REMOVE_ATTEMPTS):
            try:
                return control.run("rm", pool, job, "--yes")
            except (Error, OSError) as error:
                if getattr(error, "id", 0) == 1201:  # it went with its pool
                    return None
                # Other ranks may not have closed it yet.
                if getattr(error, "id", 0) != 1205 or attempt + 1 == _REMOVE_ATTEMPTS:
                    return _log.warning("offloadd: job %s of this run stays in %s: %s", job, pool, error)
            time.sleep(0.25)

    def remove_at_exit(self):
        for job in list(self._own):
            self.remove(job)


jobs = Jobs()
os.register_at_fork(after_in_child=jobs.leave_to_the_parent)
