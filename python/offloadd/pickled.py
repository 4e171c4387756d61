"""Weights in files of torch.save() (pytorch_model.bin, shards with an index), read without running what else a pickle may hold."""

import json
import os
import pickle

import torch

from . import progress
from .errors import Error

_SUFFIXES = (".bin", ".pt", ".pth")
_SINGLE, _INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_UNUSED = "rotary_emb.inv_freq"  # a table that old checkpoints hold, and no model takes


def files_of(path):
    """The files of such a checkpoint: a file, or a folder that holds no safetensors; None for anything else."""
    path = os.fspath(path)
    if os.path.isfile(path):
        return [path] if path.endswith(_SUFFIXES) else None
    if any(os.path.exists(os.path.join(path, name)) for name in ("model.safetensors", "model.safetensors.index.json")):
        return None
    index = os.path.join(path, _INDEX)
    if os.path.exists(index):
        return [os.path.join(path, name) for name in _shards(index)]
    single = os.path.join(path, _SINGLE)
    return [single] if os.path.exists(single) else None


def _shards(index):
    try:
        with open(index, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Error.of(1401, f"{index} is no index of shards: {error}", "Make the file again; nothing was loaded from it") from None
    if not names or not all(isinstance(name, str) and os.path.basename(name) == name for name in names):
        raise Error.of(1401, f"{index} names files outside of its folder", "Make the file again; nothing was loaded from it")
    return names


def _read(path):
    """Its tensors by name; their bytes stay in the file until they are looked at, where its format allows that."""
    try:
        try:
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # of before torch 1.6
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise Error.of(1405, f"{path} cannot be read: {error.strerror}", "Name a readable file or folder") from None
    except pickle.UnpicklingError:
        raise Error.of(1401, f"{path} holds more than tensors by name, and is not run",
                       "Save model.state_dict() alone, as safetensors or with torch.save()") from None
    except Exception as error:  # noqa: torch has many for a file that is none of its own
        raise Error.of(1401, f"{path} is no file of torch.save(): {str(error).splitlines()[0]}",
                       "Make the file again; nothing was loaded from it") from None
    if isinstance(contents, dict) and contents and all(isinstance(name, str) and isinstance(value, torch.Tensor)
                                                       for name, value in contents.items()):
        return contents
    raise Error.of(1401, f"{path} holds other things than tensors by name", "Save model.state_dict() alone")


def _misfit(path, what):
    raise Error.of(1402, f"{path} does not fit the model: {what}", "Use the file of this model, or name what to leave out in ignored=[…]")


def _check(path, found, parameters, buffers, ignored):
    known = dict([*parameters, *buffers])
    for name, value in found.items():
        if name in known and value.shape != known[name].shape:
            _misfit(path, f"'{name}' has shape {list(value.shape)}, the model's has {list(known[name].shape)}")
        if name not in known and name not in ignored and not name.endswith(_UNUSED):
            _misfit(path, f"the model has no '{name}'")
    there = {id(tensor) for name, tensor in parameters if name in found}  # tied ones have several names
    for name, tensor in parameters:
        if id(tensor) not in there and name not in ignored:
            _misfit(path, f"'{name}' is missing")
    if any(name in found for name, _ in buffers):
        missing = next((name for name, _ in buffers if name not in found and name not in ignored), None)
        if missing is not None:
            _misfit(path, f"'{missing}' is missing")


def load(files, parameters, buffers, ignored=()):
    """Gives tensors, (name, tensor) each, the values of the files: all of them fit, or nothing is written."""
    ignored = set(ignored)
    found = {}
    for file in files:
        found.update(_read(file))
    _check(files[0] if len(files) == 1 else os.path.dirname(files[0]), found, parameters, buffers, ignored)
    written = set()
    with torch.no_grad():
        for name, tensor in progress.over([*parameters, *buffers], "loading weights"):
            if name in found and name not in ignored and id(tensor) not in written:
                written.add(id(tensor))
                tensor.copy_(found[name])
