"""deepspeed.comm: torch.distributed under another name. A program without a launcher is a world of one rank."""

import ctypes
import functools
import logging
import os
import sys

import torch

from . import placement
from .missing import refusing

_log = logging.getLogger("DeepSpeed")


def is_available():
    return torch.distributed.is_available()


def _tell_accelerate():
    """Accelerate takes several ranks without a GPU for one unless it is told a backend, and each would train on all of the data. It
    asks is_initialized() while its state is made."""
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    state = accelerate.PartialState._shared_state
    if "backend" in state and state["backend"] is None and "num_processes" not in state:
        state["backend"] = "gloo"


def is_initialized():
    _tell_accelerate()
    return is_available() and torch.distributed.is_initialized()


def _is_launched():
    return all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _leave_groups_to_the_parent():
    """In a forked child: a group of gloo that is destroyed waits for threads that are not there. So it never is."""
    if is_initialized():
        for group, (_, store) in torch.distributed.distributed_c10d._world.pg_map.items():
            for each in (group, store):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


@functools.lru_cache(maxsize=None)
def _survive_forks():
    os.register_at_fork(after_in_child=_leave_groups_to_the_parent)


def init_distributed(dist_backend=None, auto_mpi_discovery=True, distributed_port=29500, verbose=True, timeout=None, init_method=None,
                     dist_init_required=None, config=None, rank=-1, world_size=-1):
    """Makes the process group: with gloo, and where models are trained on CUDA's devices with NCCL for tensors there."""
    _survive_forks()
    if is_initialized() or dist_init_required is False:
        return
    backend = "gloo"
    if dist_backend != "gloo" and placement.uses_cuda() and torch.distributed.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
    elif dist_backend not in (None, "gloo"):
        _log.info("backend %s: gloo is used, tensors are on the CPU", dist_backend)
    more = {} if timeout is None else {"timeout": timeout}
    if _is_launched() or init_method is not None:
        if init_method is not None and rank >= 0:
            more.update(init_method=init_method, rank=rank, world_size=world_size)
        torch.distributed.init_process_group(backend, **more)
    else:
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1, **more)


def get_rank(group=None):
    return torch.distributed.get_rank(group) if is_initialized() else int(os.environ.get("RANK", "0"))


def get_world_size(group=None):
    return torch.distributed.get_world_size(group) if is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank():
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group=None, group_rank=0):
    return group_rank if group is None else torch.distributed.get_global_rank(group, group_rank)


def barrier(group=None, async_op=False, device_ids=None, prof=False, log_name="", debug=None):
    return torch.distributed.barrier(group) if is_initialized() and get_world_size() > 1 else None


def get_world_group():
    return torch.distributed.group.WORLD


def destroy_process_group(group=None):
    if is_initialized():
        torch.distributed.destroy_process_group(group)


def get_all_ranks_from_group(group=None):
    return torch.distributed.get_process_group_ranks(group if group is not None else get_world_group())


def inference_all_reduce(tensor, op=None, group=None):
    return torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.SUM if op is None else op, group)


def has_all_gather_into_tensor():
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor


def configure(deepspeed_config=None, enabled=None, prof_all=None, prof_ops=None, verbose=None, debug=None):
    """Of DeepSpeed's log of communication, which nobody keeps here."""


def log_summary(show_straggler=False, return_dict=False):
    _log.info("log_summary(): communication is not logged; offloadctl status --json counts what the daemon moves")
    return {} if return_dict else None


def broadcast_object(value, source=0):
    """The first rank's value, in all ranks."""
    if not is_initialized() or get_world_size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=source)
    return box[0]


# What is called the same in torch, with the same arguments.
_SAME = {"all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter", "reduce_scatter_tensor", "gather",
         "scatter", "send", "recv", "isend", "irecv", "new_group", "ReduceOp", "all_gather_object", "broadcast_object_list", "monitored_barrier",
         "all_to_all", "all_to_all_single", "get_backend", "group", "ProcessGroup", "P2POp", "batch_isend_irecv", "gather_object",
         "scatter_object_list"}


_RENAMED = {"allgather_fn": "all_gather_into_tensor", "reduce_scatter_fn": "reduce_scatter_tensor"}


_refuse = refusing("deepspeed.comm")


def __getattr__(name):
    name = _RENAMED.get(name, name)
    if name == "default_pg_timeout":
        return torch.distributed.constants.default_pg_timeout
    if name in _SAME:
        return getattr(torch.distributed, name)
    return _refuse(name)
