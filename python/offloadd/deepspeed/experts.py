"""deepspeed.moe.utils, for programs whose models have no layers of experts: DeepSpeed's own (deepspeed.moe.layer) are not there."""

from .missing import refuse, refusing


def is_moe_param(param):
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group):
    return param_group.get("moe", False)


def has_moe_layers(model):
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(param_groups, max_group_size=None):
    """A list of the groups, none of which has experts."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(param) for group in groups for param in group["params"]):
        refuse("expert parallelism (a parameter with allreduce = False)")
    return groups


__getattr__ = refusing("deepspeed.moe.utils")
