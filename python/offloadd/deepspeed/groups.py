"""deepspeed.utils.groups: which ranks work together. All of them are one data-parallel group; of a model, of a sequence and of experts nothing is
split, so that each rank is a group of its own there."""

import torch

from . import comm
from .missing import refusing

mpu = None
_alone = {}  # rank -> its group


def _group_of_this_rank():
    rank = comm.get_rank()
    found = _alone.get(rank)
    if found is None or found not in torch.distributed.distributed_c10d._world.pg_map:
        comm.init_distributed()
        found = _alone[rank] = torch.distributed.new_group([rank], use_local_synchronization=True)
    return found


def _of_all():
    comm.init_distributed()
    return comm.get_world_group()


def get_data_parallel_group():
    return _of_all()


def get_data_parallel_world_size():
    return comm.get_world_size()


def get_data_parallel_rank():
    return comm.get_rank()


def _first():
    return 0


def _one():
    return 1


def get_tensor_model_parallel_src_rank():
    """In the whole world: a rank is the first one of its own group."""
    return comm.get_rank()


def _clone_world_group():
    return _of_all()


def _get_broadcast_src_rank():
    return 0


def _alias_by_kind():
    """DeepSpeed has each question with and without an underscore, its programs use both."""
    questions = {"group": get_data_parallel_group, "world_size": get_data_parallel_world_size, "rank": get_data_parallel_rank}
    of_one = {"group": _group_of_this_rank, "world_size": _one, "rank": _first}
    for kind, table in {"data_parallel": questions, "sequence_data_parallel": questions, "model_parallel": of_one,
                        "tensor_model_parallel": of_one, "sequence_parallel": of_one}.items():
        for what, ask in table.items():
            for name in (f"get_{kind}_{what}", f"_get_{kind}_{what}"):
                globals().setdefault(name, ask)


_alias_by_kind()

__getattr__ = refusing("deepspeed.utils.groups")
