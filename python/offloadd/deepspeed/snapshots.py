"""Snapshots of a job that checkpoints lead to. Each lasts as long as the mark in its folder, wherever the folder is moved. A job has room
for some; when it is full, the oldest becomes a job of its own in the pool, whose name says where it was."""

import contextlib
import glob
import json
import logging
import os
import re
import shlex
import uuid

from .. import control
from ..errors import Error

_log = logging.getLogger("offloadd")
_UP_MAX = 2  # folders up from that of a checkpoint: DIR/TAG, and DIR/checkpoint-N/TAG
_LEAD = ("pool", "job", "snapshot", "of_a_run")  # what of a mark leads to a snapshot
_OURS = re.compile(r"step\d+-[0-9a-f]{8}")


def _moved(job, name):
    return f"{job}-{name}"


def _has_job(pool, job):
    return job in control.jobs_in(pool)


def _of_job(pool, job):
    return json.loads(control.run("snapshot", "ls", pool, job, "--json"))["snapshots"]


def _listed(pool, job):
    return _of_job(pool, job) if _has_job(pool, job) else []


def are_in(pool, job):
    """Whether a job has any, of ours or of others."""
    return bool(_listed(pool, job))


def _find(mark):
    """Where a snapshot is: its job and its name, or the job alone that it has become; None when it is not there."""
    pool, job, name = mark["pool"], mark["job"], mark["snapshot"]
    jobs = control.jobs_in(pool)
    if job in jobs and any(each["name"] == name for each in _of_job(pool, job)):
        return [job, name]
    return [_moved(job, name)] if _moved(job, name) in jobs else None


def _place_of(mark):
    """The same; what is not there offloadctl refuses by its name."""
    return _find(mark) or [mark["job"], mark["snapshot"]]


def fork(mark, name):
    """Makes a new job of the snapshot that a mark leads to."""
    control.run("snapshot", "fork", mark["pool"], *_place_of(mark), "--as", name, "--yes")


def export(mark, folder):
    """Writes the weights of the snapshot that a mark leads to, in fp32."""
    job, *name = _place_of(mark)
    control.run("export", mark["pool"], job, folder, *(["--snapshot", *name] if name else []), "--dtype", "float32")


def _make_room(pool, job):
    """Whether there was a snapshot of ours to move out."""
    ours = [each for each in _listed(pool, job) if _OURS.fullmatch(each["name"]) and not each["lost"]]
    if not ours:
        return False
    oldest = min(ours, key=lambda each: (each["created"], each["step"]))["name"]
    if not _has_job(pool, _moved(job, oldest)):
        control.run("snapshot", "fork", pool, job, oldest, "--as", _moved(job, oldest), "--yes")
    control.run("snapshot", "rm", pool, job, oldest, "--yes")
    return True


def make(handle):
    """Keeps the job as it is now: the snapshot's name."""
    name = f"step{handle.step}-{uuid.uuid4().hex[:8]}"
    try:
        handle.snapshot(name)
    except Error as error:
        if error.id != 1216 or not _make_room(handle.nvme_path, handle.job):
            raise
        handle.snapshot(name)
    return name


def _is_deleted_at_once(folder):
    """Whether a file that is open there is gone when it is deleted. NFS and the like keep it in the folder, which then cannot be deleted."""
    path = os.path.join(folder, ".offloadd-probe")  # what a process that was killed here has left goes with the next
    try:
        probe = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # nor can it be written to
        return False
    try:
        with contextlib.suppress(FileNotFoundError):  # another rank's unlink
            os.unlink(path)
        return os.fstat(probe).st_nlink == 0
    finally:
        os.close(probe)


def _named_in(path):
    """The snapshot that a mark leads to; None where there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file).get("snapshot")
    except (OSError, ValueError):
        return None


def _removal_of(mark):
    """What offloadctl is told to remove the snapshot that a mark leads to; None when it is not there."""
    place = _find(mark)
    if place is None:
        return None
    return [*(["snapshot", "rm"] if len(place) == 2 else ["rm"]), mark["pool"], *place, "--yes"]


def _tell_of_lost(mark, folder):
    """Of a checkpoint that was deleted as the run before ended, or moved since: who moved it still wants it."""
    with contextlib.suppress(Error):  # it went with its pool
        if removes := _removal_of(mark):
            _log.warning("offloadd: the checkpoint in %s is gone, and what it led to stays in the pool. If it was not moved elsewhere, this gives its "
                         "room back: offloadctl %s", folder, shlex.join(removes))


class _Snapshot:
    def __init__(self, mark, path):
        self.lead = {"of_a_run": False} | {key: mark[key] for key in _LEAD if key in mark}
        self._path, self._mark = path, None
        if os.path.exists(path) and _is_deleted_at_once(os.path.dirname(path)):
            self._mark = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self):
        if self._mark is not None:
            os.close(self._mark)

    def is_deleted(self):
        """Cheap: what an open file does not tell is not found."""
        return self._mark is not None and os.fstat(self._mark).st_nlink == 0

    def path(self):
        """Where its mark is; None when it is gone."""
        if self._mark is not None:
            return os.readlink(f"/proc/self/fd/{self._mark}") if os.fstat(self._mark).st_nlink else None
        if _named_in(self._path) == self.lead["snapshot"]:
            return self._path
        save_dir = os.path.dirname(os.path.dirname(self._path))
        near = (found for folder in (save_dir, os.path.dirname(save_dir)) for depth in ("*", "*/*")
                for found in glob.iglob(f"{glob.escape(folder)}/{depth}/{os.path.basename(self._path)}"))
        return next((found for found in near if _named_in(found) == self.lead["snapshot"]), None)

    def drop(self):
        if removes := _removal_of(self.lead):
            control.run(*removes)


class Snapshots:
    """Those that this process has made, and those of the runs before that it goes on from."""

    def __init__(self):
        self._kept = []

    def keep(self, mark, path):
        """The one that a mark leads to, which is this file."""
        if all(each.lead["snapshot"] != mark["snapshot"] for each in self._kept):
            self._kept.append(_Snapshot(mark, path))

    def take_over(self, mark, path):
        """A run goes on from a mark: with it come those that were near it. Of a copy, or one that was moved between runs, nobody knows whether
        the others are still where they were."""
        if mark.get("at") != os.path.realpath(os.path.dirname(path)):
            return
        for relative, beside in mark.get("beside", {}).items():
            if relative.split(os.sep).count(os.pardir) > _UP_MAX:
                continue
            its = os.path.normpath(os.path.join(os.path.dirname(path), relative))
            if _named_in(its) == beside["snapshot"]:
                self.keep(beside, its)
            else:
                _tell_of_lost(beside, os.path.dirname(its))
        self.keep(mark, path)

    def have_deleted(self):
        """Whether there is anything to drop; may be asked at each step."""
        return any(each.is_deleted() for each in self._kept)

    def place(self, folder):
        """What a mark in this folder says of it, and of the others."""
        folder = os.path.realpath(folder)
        return {"at": folder, "beside": self._beside(folder)}

    def _beside(self, folder):
        return {os.path.relpath(path, folder): each.lead for each in self._kept if (path := each.path()) is not None}

    def leave_to_the_parent(self):
        """In a forked child."""
        self._kept = []

    def drop_unmarked(self, is_open):
        """Those whose folders were deleted, or have another checkpoint; and the jobs of runs that have ended and have no other. `is_open(job)`:
        whether it is one of this process."""
        gone = [each for each in self._kept if each.path() is None]
        self._kept = [each for each in self._kept if each not in gone]
        for each in gone:
            try:
                each.drop()
            except Error as error:
                if error.id != 1201:  # it went with its pool
                    _log.warning("offloadd: snapshot %(snapshot)s of job %(job)s stays in %(pool)s, although its checkpoint is gone: %(error)s",
                                 {**each.lead, "error": error})
        ended = {(each.lead["pool"], each.lead["job"]) for each in gone if each.lead["of_a_run"] and not is_open(each.lead["job"])}
        for pool, job in sorted(ended):
            with contextlib.suppress(Error):  # another process has it
                if _has_job(pool, job) and not _of_job(pool, job):
                    control.run("rm", pool, job, "--yes")


kept = Snapshots()
os.register_at_fork(after_in_child=kept.leave_to_the_parent)
