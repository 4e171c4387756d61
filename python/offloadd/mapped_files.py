"""torch.load() of a script's own checkpoint, which holds the moments of a model that may be larger than memory: they stay in the file until
they are asked for. torch.save() over such a file makes another one in its place: what is mapped stays as it is."""

import functools
import os
import zipfile

import torch

_BYTES_MIN = 64 << 20  # smaller files are read

_mapped = set()  # (device, inode)


def _identity(path):
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _has_moments(file):
    """Whether the state_dict() of an optimizer is in it: what it holds is pickled, but for tensors."""
    with zipfile.ZipFile(file) as archive:
        return any(b"param_groups" in archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))


def _is_path(file):
    return isinstance(file, (str, os.PathLike))


def _may_be_mapped(file, location):
    try:
        return _is_path(file) and location in (None, "cpu", torch.device("cpu")) and os.path.getsize(file) >= _BYTES_MIN and \
            zipfile.is_zipfile(file) and _has_moments(file)
    except (OSError, zipfile.BadZipFile):  # torch says it
        return False


def _mapping(original):
    @functools.wraps(original)
    def load(f, map_location=None, *args, mmap=None, **kwargs):
        if mmap is not None or not _may_be_mapped(f, map_location):
            return original(f, map_location, *args, mmap=mmap, **kwargs)
        _mapped.add(_identity(f))
        try:
            return original(f, map_location, *args, mmap=True, **kwargs)
        except RuntimeError:  # of file systems that map nothing, and of what torch says again
            return original(f, map_location, *args, mmap=False, **kwargs)

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
