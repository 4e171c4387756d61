"""deepspeed.utils."""

import logging
import os

import torch

from .. import handle as attaching
from .missing import refuse, refusing

logger = logging.getLogger("DeepSpeed")


def log_dist(message, ranks=None, level=logging.INFO):
    from . import comm

    if not ranks or -1 in ranks or comm.get_rank() in ranks:
        logger.log(level, "[Rank %s] %s", comm.get_rank(), message)


def print_rank_0(message, debug=False, force=False):
    log_dist(message, [0])


def see_memory_usage(message, force=False):
    """Says what of this process is in memory."""
    if force:
        with open("/proc/self/status", encoding="ascii") as file:
            resident = next(line.split(":")[1].strip() for line in file if line.startswith("VmRSS"))
        log_dist(f"{message}: {resident} resident", [0])


def set_z3_leaf_modules(model, leaf_module_classes):
    """Tensors are fetched one by one, so that a leaf module is as any other; gives those that match, as DeepSpeed does."""
    names = [each for each in leaf_module_classes if isinstance(each, str)]
    classes = tuple(each for each in leaf_module_classes if isinstance(each, type))
    return [module for module in model.modules() if isinstance(module, classes) or type(module).__name__ in names]


def unset_z3_leaf_modules(model, leaf_module_classes):
    return set_z3_leaf_modules(model, leaf_module_classes)


def get_z3_leaf_modules(model):
    return []


def z3_leaf_module(module):
    return False


def set_z3_leaf_module(module, flag):
    pass


def _handle_of(parameter):
    return next((each for each in attaching.handles() if id(parameter) in each.identities()), None)


def safe_get_full_fp32_param(param):
    """The fp32 master."""
    handle = _handle_of(param)
    return param.detach().float().clone() if handle is None else handle.gather_one(param, "master")


def safe_get_full_grad(param):
    return None if param.grad is None else param.grad.detach().float().clone()


def safe_get_full_optimizer_state(param, optim_state_key):
    handle = _handle_of(param)
    if handle is None:
        return None
    return handle.gather_one(param, optim_state_key)


def safe_set_full_fp32_param(param, value):
    with torch.no_grad():
        param.copy_(value)


def safe_set_full_optimizer_state(param, value, optim_state_key):
    refuse(f"writing the optimizer's {optim_state_key}: it is in the store of the job", "Begin a new job to start without moments")


def safe_set_full_grad(param, value):
    param.grad = value.to(param.dtype)


# Parts of a parameter: with one copy for all ranks, all of it.
safe_get_local_fp32_param, safe_get_local_grad = safe_get_full_fp32_param, safe_get_full_grad
safe_get_local_optimizer_state, safe_set_local_fp32_param = safe_get_full_optimizer_state, safe_set_full_fp32_param
safe_set_local_optimizer_state = safe_set_full_optimizer_state


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
    """The weights of a checkpoint that this engine has saved, as fp32."""
    from .engine import buffers_in, tag_in, weights_in

    folder = os.path.join(checkpoint_dir, tag_in(checkpoint_dir, tag))
    return {**{name: value.float() for name, value in weights_in(folder).items()}, **buffers_in(folder)}


def load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None):
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def clip_grad_norm_(parameters, max_norm, norm_type=2, mpu=None):
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


__getattr__ = refusing("deepspeed.utils")
