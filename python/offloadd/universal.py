"""DeepSpeed's universal checkpoints, in and out: a folder per parameter with its fp32 value and what the optimizer keeps of it.

    FOLDER/latest_universal                 the name of TAG, where FOLDER holds several
    FOLDER/TAG/zero/NAME/fp32.pt            the master
    FOLDER/TAG/zero/NAME/exp_avg.pt …       each plane of the optimizer, under torch's name
    FOLDER/TAG/zero/NAME/step.pt            how often the parameter was updated; DeepSpeed's stage 3 leaves it out
    FOLDER/TAG/zero/optimizer_state.pt      the step, and groups without options
    FOLDER/TAG/…_model_states.pt            the step, for the engine of each stage

Each file holds a tensor in the parameter's shape, or flat, or {"param": tensor, …}; what is written is the latter. What the files hold is
mapped, not read at once; nothing but tensors, numbers and dictionaries is taken from a pickle: what else optimizer_state.pt holds (the
loss scaler of DeepSpeed) is left out, and not run.
"""

import functools
import os
import pickle
import shutil

import torch

from . import progress
from .errors import Error

_LATEST = "latest_universal"
_FORMAT_VERSION = "0.19.6"  # of DeepSpeed
# It reads as many groups as its program has, and of each what takes the place of the program's own options: nothing.
_GROUPS = 1024
_AGAIN = "Make the checkpoint again, with DeepSpeed's ds_to_universal.py; nothing was loaded from it"


# What a checkpoint says of DeepSpeed's engine; all else there is the program's own (client_state).
ENGINE_KEYS = ("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
               "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples",
               "dp_world_size", "mp_world_size", "ds_config", "ds_version", "universal_checkpoint_info")


def folder_of(folder, tag=None):
    """The checkpoint's own folder: FOLDER/TAG, the one that FOLDER calls its latest, or FOLDER."""
    folder = os.fspath(folder)
    if tag is not None:
        return os.path.join(folder, str(tag))
    latest = os.path.join(folder, _LATEST)
    if not os.path.isfile(latest):
        return folder
    with open(latest, encoding="utf-8") as file:
        tag = file.read().strip()
    if tag in ("", ".", "..") or os.path.basename(tag) != tag:
        raise Error.of(1401, f"{latest} names {tag!r}, which is no folder beside it", _AGAIN)
    return os.path.join(folder, tag)


def engine_state(folder):
    """What the checkpoint in that folder says of the engine, and what the program has put beside it: plain values; empty where it says nothing."""
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        held = _data_of(path)
        if not isinstance(held, dict):
            raise Error.of(1401, f"{path} holds no state of an engine", _AGAIN)
        return {key: value for key, value in held.items() if isinstance(key, str) and not isinstance(value, _LeftOut)}
    return {}


def _zero_folder(folder):
    """The folder whose folders are parameters."""
    folder = folder_of(folder)
    zero = os.path.join(folder, "zero")
    if not os.path.isdir(zero):
        raise Error.of(1405, f"{folder} has no folder zero: it is no universal checkpoint of DeepSpeed",
                       "Convert a checkpoint of DeepSpeed with its ds_to_universal.py")
    return zero


def _read(path):
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise Error.of(1405, f"{path} cannot be read: {error.strerror}", "Name a whole universal checkpoint") from None
    except pickle.UnpicklingError:
        raise Error.of(1401, f"{path} holds more than a tensor, and is not run", _AGAIN) from None
    except Exception as error:  # noqa: torch has many for a file that is none of its own
        raise Error.of(1401, f"{path} is no file of torch.save(): {str(error).splitlines()[0]}", _AGAIN) from None
    return held.get("param") if isinstance(held, dict) else held


def _tensor(path, name, parameter):
    held = _read(path)
    if not isinstance(held, torch.Tensor) or not held.is_floating_point():
        raise Error.of(1401, f"{path} holds no tensor of numbers", _AGAIN)
    if held.shape != parameter.shape and (held.dim() != 1 or held.numel() != parameter.numel()):
        raise Error.of(1402, f"{path} does not fit the model: '{name}' has shape {list(held.shape)}, the model's has {list(parameter.shape)}",
                       "Use the checkpoint of this model")
    return held.reshape(parameter.shape)


def _count(path):
    held = _read(path)
    if isinstance(held, torch.Tensor) and held.numel() == 1:
        held = held.item()
    if not isinstance(held, (int, float)) or held < 0 or held != int(held):
        raise Error.of(1401, f"{path} holds no number of steps", _AGAIN)
    return int(held)


class _LeftOut:
    """In the place of an object of any other class."""

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, state):
        pass

    append = extend = __setitem__ = __init__


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")) or \
                (module == "torch" and name.endswith("Storage")):
            return super().find_class(module, name)
        return _LeftOut


class _DataOnly:
    """A module that torch.load() unpickles with."""

    Unpickler = _Unpickler


def _data_of(path):
    """What a file holds, without the objects that would have to be made."""
    try:
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True, pickle_module=_DataOnly)
    except Exception as error:  # noqa: torch has many for a file that is none of its own
        raise Error.of(1401, f"{path} is no file of torch.save(): {str(error).splitlines()[0]}", _AGAIN) from None


def _common_count(zero):
    """How often all parameters were updated, as the optimizer's own state says; None where it does not."""
    path = os.path.join(zero, "optimizer_state.pt")
    if not os.path.isfile(path):
        return None
    held = _data_of(path)
    try:
        states = held["optimizer_state_dict"]["state"].values()
        steps = {float(state["step"]) for state in states if "step" in state}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError):
        return None
    if len(steps) > 1:
        raise Error.of(1401, f"{path} holds several counts of steps, and the parameters have none of their own", _AGAIN)
    count = steps.pop() if steps else None
    if count is not None and (count < 0 or count != int(count)):
        raise Error.of(1401, f"{path} holds no number of steps", _AGAIN)
    return count


def _state(folder, name, parameter, common_count):
    """torch's state of one parameter, as the folder has it; empty when it was never updated."""
    files = sorted(os.listdir(folder))
    planes = [file[:-3] for file in files if file.endswith(".pt") and file not in ("fp32.pt", "step.pt")]
    state = {"step": torch.tensor(float(_count(os.path.join(folder, "step.pt"))))} if "step.pt" in files else {}
    if not state and set(planes) - {"momentum_buffer"}:  # SGD counts nothing
        count = common_count()
        if count is None:
            raise Error.of(1401, f"{folder} has no step.pt, and the checkpoint says nowhere how often '{name}' was updated", _AGAIN)
        state = {"step": torch.tensor(count)}
    state.update({plane: _tensor(os.path.join(folder, f"{plane}.pt"), name, parameter) for plane in planes})
    return state


def load(folder, parameters, optimizers):
    """Gives parameters, (name, tensor) each, and optimizers the values of the checkpoint: all of them fit, or nothing is changed. bf16
    weights are rounded to the nearest, their masters are the values themselves."""
    zero = _zero_folder(folder)
    values, states, known = {}, {}, {}
    common_count = functools.lru_cache(maxsize=None)(lambda: _common_count(zero))
    for name, parameter in parameters:
        own = os.path.join(zero, name)
        if parameter in known and not os.path.isdir(own):
            continue  # a second name of a tied one
        if not os.path.isdir(own):
            raise Error.of(1402, f"{zero} does not fit the model: '{name}' is missing", "Use the checkpoint of this model")
        known[parameter] = name
        values[parameter] = _tensor(os.path.join(own, "fp32.pt"), name, parameter)
        states[parameter] = _state(own, name, parameter, common_count)
        if parameter.dtype not in (torch.float32, torch.float64) and parameter.requires_grad:
            states[parameter]["master"] = values[parameter]
    _check_names(zero, parameters)
    with torch.no_grad():
        for parameter, value in progress.over(list(values.items()), "loading a universal checkpoint"):
            parameter.copy_(value)
    for optimizer in optimizers:
        optimizer.load_state_dict(_state_dict(optimizer, states))


def _check_names(zero, parameters):
    names = {name for name, _ in parameters}
    for name in sorted(os.listdir(zero)):
        if name not in names and os.path.isfile(os.path.join(zero, name, "fp32.pt")):
            raise Error.of(1402, f"{zero} does not fit the model: the model has no '{name}'", "Use the checkpoint of this model")


def _state_dict(optimizer, states):
    """As torch's, with the groups that the optimizer has."""
    groups, state, index = [], {}, 0
    for group in optimizer.param_groups:
        packed = {key: value for key, value in group.items() if key != "params"}
        packed["params"] = list(range(index, index + len(group["params"])))
        for parameter in group["params"]:
            if states.get(parameter):
                state[index] = states[parameter]
            index += 1
        groups.append(packed)
    return {"state": state, "param_groups": groups}


def save(folder, tag, step, parameters, master_of, state_of):
    """Writes a checkpoint, one parameter after the other. `state_of(parameter)` is torch's state of it."""
    folder = os.fspath(folder)
    target = os.path.join(folder, tag)
    if os.path.exists(target):
        raise Error.of(1404, f"{target} is there already", "Choose another folder, or remove it")
    building = f"{target}.part"
    shutil.rmtree(building, ignore_errors=True)
    written = set()
    try:
        for name, parameter in progress.over(parameters, "saving a universal checkpoint"):
            if id(parameter) in written:
                continue
            written.add(id(parameter))
            _write(os.path.join(building, "zero", name), master_of(parameter), state_of(parameter))
        _write_global_state(building, step)
        os.rename(building, target)
        with open(os.path.join(folder, _LATEST), "w", encoding="utf-8") as file:
            file.write(tag)
    except OSError as error:
        raise Error.of(1404, f"{target} cannot be written: {error.strerror}",
                       "Choose a folder with enough free space that this user may write to") from None


def _wide(value):
    return (value if value.dtype == torch.float64 else value.float()).contiguous()  # row by row, for whoever reads it without torch


def _write(folder, master, state):
    os.makedirs(folder)
    _write_file(os.path.join(folder, "fp32.pt"), {"param": _wide(master.cpu()), "cat_dim": 0})
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        _write_file(os.path.join(folder, f"{key}.pt"), value.cpu() if key == "step" else {"param": _wide(value.cpu()), "cat_dim": 0})


def _write_global_state(folder, step):
    """What DeepSpeed reads beside the parameters: the state of its optimizer (stages 1 and 2 look for the groups at the top, stage 3
    below), and that of its engine, under the names of all stages."""
    groups = [{"params": []} for _ in range(_GROUPS)]
    optimizer = {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": groups}
    _write_file(os.path.join(folder, "zero", "optimizer_state.pt"),
                {"ds_version": _FORMAT_VERSION, "optimizer_state_dict": optimizer, "param_groups": groups})
    engine = {"module": {}, "ds_version": _FORMAT_VERSION, "dp_world_size": 1, "mp_world_size": 1, "skipped_steps": 0, "global_steps": step}
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        _write_file(os.path.join(folder, name), engine)


class _Target:
    """A file for torch.save(), whose writer makes something else of an error: it is kept."""

    def __init__(self, file):
        self._file, self.error = file, None

    def write(self, data):
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self):
        self._file.flush()


def _write_file(path, value):
    with open(path, "wb") as file:
        target = _Target(file)
        try:
            torch.save(value, target)
        except RuntimeError:
            if target.error is None:
                raise
            raise target.error from None
        file.flush()
        os.fsync(file.fileno())
