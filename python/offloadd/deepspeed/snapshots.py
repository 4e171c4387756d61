"""Snapshots of a job that checkpoints lead to. Each lasts as long as the mark in its folder, wherever the folder is moved. A job has room
for some; when it is full, the oldest becomes a job of its own in the pool, whose name says where it was."""

import json
import os
import re
import uuid

from .. import control
from ..errors import Error

_OURS = re.compile(r"step\d+-[0-9a-f]{8}")


def _moved(job, name):
    return f"{job}-{name}"


def _has_job(pool, job):
    return any(each["job"] == job for each in json.loads(control.run("ls", pool, "--json"))["jobs"])


def _listed(pool, job):
    return json.loads(control.run("snapshot", "ls", pool, job, "--json"))["snapshots"] if _has_job(pool, job) else []


def place_of(pool, job, name):
    """What offloadctl is told of a snapshot: its job and its name, or the job alone that it has become."""
    is_moved = all(each["name"] != name for each in _listed(pool, job)) and _has_job(pool, _moved(job, name))
    return [_moved(job, name)] if is_moved else [job, name]


def fork(mark, name):
    """Makes a new job of the snapshot that a mark leads to."""
    control.run("snapshot", "fork", mark["pool"], *place_of(mark["pool"], mark["job"], mark["snapshot"]), "--as", name, "--yes")


def export(mark, folder):
    """Writes the weights of the snapshot that a mark leads to, in fp32."""
    job, *name = place_of(mark["pool"], mark["job"], mark["snapshot"])
    control.run("export", mark["pool"].split(",")[0], job, folder, *(["--snapshot", *name] if name else []), "--dtype", "float32")


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


class _Snapshot:
    def __init__(self, mark, path):
        self._place = mark["pool"], mark["job"], mark["snapshot"]
        self._mark = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self):
        os.close(self._mark)

    def is_gone(self):
        return os.fstat(self._mark).st_nlink == 0

    def drop(self):
        place = place_of(*self._place)
        control.run(*(["snapshot", "rm"] if len(place) == 2 else ["rm"]), self._place[0], *place, "--yes")


class Snapshots:
    """Those that this run has made."""

    def __init__(self):
        self._made = []

    def keep(self, mark, path):
        """The one that a mark leads to, which is this file."""
        self._made.append(_Snapshot(mark, path))

    def drop_unmarked(self):
        """Those whose folders were deleted, or have another checkpoint."""
        gone = [each for each in self._made if each.is_gone()]
        self._made = [each for each in self._made if each not in gone]
        for each in gone:
            each.drop()
