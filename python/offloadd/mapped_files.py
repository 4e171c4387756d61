"""torch.load() of a script's own checkpoint, which holds the moments of a model that may be larger than memory: they stay in the file until
they are asked for. torch.save() over such a file makes another one in its place: what is mapped stays as it is."""

import functools
import os
import zipfile

import torch

_BYTES_MIN = 64 << 20  # smaller files are read
_DEPTH = 3  # of dictionaries, down to that of an optimizer

_mapped = set()  # (device, inode)


def _identity(path):
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _has_moments(value, depth=_DEPTH):
    """Whether the state_dict() of an optimizer is in it."""
    if isinstance(value, (list, tuple)):
        return depth > 0 and any(_has_moments(each, depth - 1) for each in value[:8])
    if not isinstance(value, dict):
        return False
    return {"state", "param_groups"} <= value.keys() or (depth > 0 and any(_has_moments(each, depth - 1) for each in value.values()))


def _is_path(file):
    return isinstance(file, (str, os.PathLike))


def _may_be_mapped(file, location):
    return _is_path(file) and location in (None, "cpu", torch.device("cpu")) and os.path.isfile(file) and \
        os.path.getsize(file) >= _BYTES_MIN and zipfile.is_zipfile(file)


def _mapping(original):
    @functools.wraps(original)
    def load(f, map_location=None, *args, mmap=None, **kwargs):
        if mmap is None and _may_be_mapped(f, map_location):
            identity = _identity(f)
            found = original(f, map_location, *args, mmap=True, **kwargs)
            if _has_moments(found):
                _mapped.add(identity)
                return found
        return original(f, map_location, *args, mmap=mmap, **kwargs)

    return load


def _leaving(original):
    @functools.wraps(original)
    def save(obj, f, *args, **kwargs):
        if _mapped and _is_path(f) and os.path.isfile(f) and _identity(f) in _mapped:
            os.unlink(f)
        return original(obj, f, *args, **kwargs)

    return save


def serve():
    """Once in a process."""
    torch.load = torch.serialization.load = _mapping(torch.serialization.load)
    torch.save = torch.serialization.save = _leaving(torch.serialization.save)
