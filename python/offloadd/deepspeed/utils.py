"""deepspeed.utils."""

import functools
import os
import random
from logging import INFO, getLogger

import torch

from .. import jobs
from ..errors import Error
from . import comm, groups, timer
from .missing import refuse, refusing
from .on_device import OnDevice

logger = getLogger("DeepSpeed")


def log_dist(message, ranks=None, level=INFO):
    if not ranks or -1 in ranks or comm.get_rank() in ranks:
        logger.log(level, "[Rank %s] %s", comm.get_rank(), message)


@functools.lru_cache(maxsize=None)
def _log_once(message, ranks, level):
    log_dist(message, ranks, level)


def log_dist_once(message, ranks=None, level=INFO):
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.lru_cache(maxsize=None)
def warning_once(*args, **kwargs):
    logger.warning(*args, **kwargs)


logger.warning_once, logger.log_dist_once = warning_once, log_dist_once


def set_log_level_from_string(log_level_str, custom_logger=None):
    (custom_logger or logger).setLevel(log_level_str.upper())


def set_random_seed(seed):
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def print_rank_0(message, debug=False, force=False):
    log_dist(message, [0])


def see_memory_usage(message, force=False):
    """Says what of this process is in memory."""
    if force:
        with open("/proc/self/status", encoding="ascii") as file:
            resident = next(line.split(":")[1].strip() for line in file if line.startswith("VmRSS"))
        log_dist(f"{message}: {resident} resident", [0])


def set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Tensors are fetched one by one, so that a leaf module is as any other; gives those that match, as DeepSpeed does."""
    names = [each for each in leaf_module_classes if isinstance(each, str)]
    classes = tuple(each for each in leaf_module_classes if isinstance(each, type))
    return [module for module in model.modules() if isinstance(module, classes) or type(module).__name__ in names]


def unset_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    return set_z3_leaf_modules(model, leaf_module_classes)


def _leaf_modules_where(model, names, matches, raise_if_not_found):
    """(modules with a name that one of these matches, those that match none)."""
    found = {each: [module for name, module in model.named_modules() if matches(name, each)] for each in names}
    missing = [each for each, modules in found.items() if not modules]
    if missing and raise_if_not_found:
        raise ValueError(f"there are no modules {', '.join(missing)} in {type(model).__name__}")
    return list(dict.fromkeys(module for modules in found.values() for module in modules)), missing


def set_z3_leaf_modules_by_name(model, module_names, flag=True, raise_if_not_found=True):
    return _leaf_modules_where(model, module_names, str.__eq__, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(model, module_name_suffixes, flag=True, raise_if_not_found=True):
    return _leaf_modules_where(model, module_name_suffixes, str.endswith, raise_if_not_found)


def get_z3_leaf_modules(model):
    return []


def z3_leaf_module(module):
    return False


z3_leaf_parameter = z3_leaf_module


def set_z3_leaf_module(module, flag):
    pass


def safe_get_full_fp32_param(param):
    """The fp32 master."""
    handle = jobs.handle_of(param)
    return param.detach().float().clone() if handle is None else handle.gather_one(param, "master").to(param.device)


def safe_get_full_grad(param):
    return None if param.grad is None else param.grad.detach().float().clone()


def safe_get_full_optimizer_state(param, optim_state_key):
    handle = jobs.handle_of(param)
    return None if handle is None else handle.gather_one(param, optim_state_key).to(param.device)


@torch.no_grad()
def safe_set_full_fp32_param(param, value):
    """Of bf16 weights the master, whose rounding they become."""
    handle = jobs.handle_of(param)
    if handle is None:
        param.copy_(value)
    else:
        handle.write_one(param, "master", value)


def safe_set_full_optimizer_state(param, value, optim_state_key):
    handle = jobs.handle_of(param)
    if handle is None:
        refuse(f"writing {optim_state_key} of a parameter that no engine has", "Call it after deepspeed.initialize()")
    handle.write_one(param, optim_state_key, value)


def safe_set_full_grad(param, value):
    param.grad = value.to(param.dtype)


def safe_update_full_grad_vectorized(param_list, update_func):
    """`update_func(gradient, parameter)` gives the new gradient."""
    for param in param_list:
        if param.grad is not None:
            safe_set_full_grad(param, update_func(safe_get_full_grad(param), param))


# Parts of a parameter: there is one copy for all ranks, and each rank is shown the part that it would have of it.


def _part_of(whole):
    """A rank's part: of all elements in a row, as many for every rank, zeros behind the last one."""
    if whole is None:
        return None
    count, world_size = whole.numel(), comm.get_world_size()
    size = -(-count // world_size)
    begin = min(count, size * comm.get_rank())
    part = whole.new_zeros(size)
    part[:min(count, begin + size) - begin] = whole.reshape(-1)[begin:begin + size]
    return part


def _whole_of(param, part):
    """Of the parts that all ranks give, each its own."""
    world_size = comm.get_world_size()
    size = -(-param.numel() // world_size)
    if part.numel() != size:
        raise Error.of(1002, f"a part of {part.numel()} elements, of a parameter of shape {list(param.shape)} and {world_size} ranks",
                       f"Give {size} elements on every rank, as safe_get_local_… does")
    own = part.detach().reshape(-1).contiguous()
    parts = [own]
    if world_size > 1:
        parts = [torch.empty_like(own) for _ in range(world_size)]
        torch.distributed.all_gather(parts, own)
    return torch.cat(parts)[:param.numel()].reshape(param.shape)


def safe_get_local_fp32_param(param):
    return _part_of(safe_get_full_fp32_param(param))


def safe_get_local_grad(param):
    return _part_of(safe_get_full_grad(param))


def safe_get_local_optimizer_state(param, optim_state_key):
    return _part_of(safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_fp32_param(param, value):
    """Of this and those that follow: by all ranks together."""
    safe_set_full_fp32_param(param, _whole_of(param, value))


def safe_set_local_grad(param, value):
    safe_set_full_grad(param, _whole_of(param, value))


def safe_set_local_optimizer_state(param, value, optim_state_key):
    safe_set_full_optimizer_state(param, _whole_of(param, value), optim_state_key)


class RepeatingLoader:
    def __init__(self, loader):
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self):
        return self

    def __len__(self):
        return len(self.loader)

    def __next__(self):
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def instrument_w_nvtx(function):
    return function


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=None, exclude_frozen_parameters=False, lazy_mode=False):
    """The weights of a checkpoint that this engine has saved, as fp32: of bf16 models the masters, where the pool is there; tied ones under
    all of their names, and buffers: what load_state_dict() of the model asks for."""
    state, tied = _fp32_state_of(checkpoint_dir, tag, exclude_frozen_parameters)
    state.update((name, state[first]) for name, first in tied.items() if first in state)
    return state


def _fp32_state_of(checkpoint_dir, tag, exclude_frozen_parameters):
    """Tensors by their first names, and these by the others."""
    from .files import kept_in, masters_in, tag_in, weights_in

    found = tag_in(checkpoint_dir, tag)
    if found is None:
        raise Error.of(1405, f"{checkpoint_dir} has no file latest", "Name the tag of the checkpoint, or the folder that holds it")
    folder = os.path.join(checkpoint_dir, found)
    weights, kept = weights_in(folder), kept_in(folder)
    tied, left_out = kept.get("tied", {}), set(kept.get("frozen", ()) if exclude_frozen_parameters else ())
    if any(value.dtype in (torch.bfloat16, torch.float16) for value in weights.values()):
        weights.update((name, value) for name, value in masters_in(folder).items() if name in weights)  # not those that the files leave out
    # Copies: what is read there is a part of a mapped file, which torch.save() would write as a whole.
    state = {name: value.to(torch.float32, copy=True) for name, value in weights.items() if name not in left_out and name not in tied}
    state.update((name, value) for name, value in kept["buffers"].items() if name not in kept.get("transient", ()))
    return state, tied


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_dir, max_shard_size="5GB", safe_serialization=False, tag=None,
                                               exclude_frozen_parameters=False):
    """Writes the same into a folder, in one file whatever max_shard_size says: pytorch_model.bin, or model.safetensors, which has tied
    weights under their first names."""
    os.makedirs(output_dir, exist_ok=True)
    if safe_serialization:
        from safetensors.torch import save_file

        state, _ = _fp32_state_of(checkpoint_dir, tag, exclude_frozen_parameters)
        save_file({name: value.contiguous() for name, value in state.items()}, os.path.join(output_dir, "model.safetensors"), {"format": "pt"})
    else:
        torch.save(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters),
                   os.path.join(output_dir, "pytorch_model.bin"))


def load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None):
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def get_optim_files(checkpoint_dir):
    """Of the folder that is called by its tag: files in which Lightning's converter finds the stage, and (the other function) the program's state."""
    from .files import TRAINER

    return [_file_in(checkpoint_dir, TRAINER)]


def get_model_state_file(checkpoint_dir, zero_stage):
    from .files import CLIENT

    return _file_in(checkpoint_dir, CLIENT)


def _file_in(folder, name):
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        raise Error.of(1405, f"{folder} has no file {name}", "Name the folder of a checkpoint that DeepSpeedEngine.save_checkpoint() has written")
    return path


def clone_tensors_for_torch_save(item, device="cpu"):
    """The same lists and dictionaries over copies of their tensors, on the device. Tied weights stay one tensor, so that they are written once."""
    copies = {}

    def copied(value):
        if isinstance(value, torch.Tensor):
            place = (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype)
            if place not in copies:
                copies[place] = (value, value.detach().to(device, copy=True))
            return copies[place][1]
        if isinstance(value, dict):
            return type(value)((key, copied(each)) for key, each in value.items())
        if isinstance(value, (list, tuple)):
            return type(value)(map(copied, value))
        return value

    return copied(item)


def clip_grad_norm_(parameters, max_norm, norm_type=2, mpu=None):
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


__getattr__ = refusing("deepspeed.utils")
