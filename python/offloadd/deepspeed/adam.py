"""DeepSpeed's Adam by its name: torch's fused one, which it equals, and which the daemon computes bit for bit. Also its Adagrad."""

import sys

import torch

from ..recipes import served_class_of
from .missing import refuse, refusing

_KEEP = "Write \"zero_force_ds_cpu_optimizer\": false into the configuration to keep yours"


# Of groups that other optimizers of torch and of transformers have made.
_OF_OTHERS = {"momentum", "dampening", "nesterov", "alpha", "centered", "lr_decay", "initial_accumulator_value", "rho", "etas", "history_size",
              "relative_step", "clip_threshold", "decay_rate", "scale_parameter"}


def _group(group, decoupled):
    """A group of anybody's, with what decides the arithmetic ours: the same dictionary, since a schedule of an optimizer that this one
    replaces (accelerate does that) goes on writing into it."""
    if isinstance(group, dict):
        foreign = sorted(_OF_OTHERS.intersection(group))
        if not foreign and "maximize" in group and "amsgrad" not in group:  # those of torch's Adam and AdamW have both
            foreign = ["no amsgrad"]
        if foreign:
            refuse(f"DeepSpeedCPUAdam over groups of another optimizer (they have {', '.join(foreign)}): accelerate would put it in the place "
                   "of any optimizer", _KEEP)
        group.update(fused=True, foreach=None, capturable=False, differentiable=False, decoupled_weight_decay=decoupled)
    return group


def _check_place():
    """OFD-1104 where accelerate makes one of these in the place of an optimizer that computes something else, which groups need not show."""
    caller = sys._getframe(2)
    replaced = caller.f_locals.get("optimizer") if caller.f_code.co_name == "map_pytorch_optim_to_deepspeed" else None
    if replaced is not None and served_class_of(type(replaced)) not in (torch.optim.Adam, torch.optim.AdamW):
        refuse(f"DeepSpeedCPUAdam in the place of {type(replaced).__name__}, where accelerate puts it when the optimizer's state is offloaded", _KEEP)


class DeepSpeedCPUAdam(torch.optim.Adam):
    """`adamw_mode`: weight decay apart from the gradient."""

    def __init__(self, model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False,
                 adamw_mode=True, fp32_optimizer_states=True, adam_w_mode=None, set_grad_none=True):
        _check_place()
        if not bias_correction:
            refuse(f"{type(self).__name__} without bias_correction", "Leave it on: moments are corrected for their bias always")
        if not fp32_optimizer_states:
            refuse(f"{type(self).__name__} with fp32_optimizer_states=False", "Leave it on: moments are fp32")
        if amsgrad:
            refuse(f"{type(self).__name__} with amsgrad=True, which DeepSpeed's does not have either", "Use torch.optim.AdamW(amsgrad=True)")
        decoupled = bool(adamw_mode if adam_w_mode is None else adam_w_mode)
        given = [_group(each, decoupled) for each in model_params]
        super().__init__(given, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, fused=True, decoupled_weight_decay=decoupled)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    def __init__(self, model_params, lr=1e-2, eps=1e-10, weight_decay=0, amsgrad=False, fp32_optimizer_states=True):
        if not fp32_optimizer_states:
            refuse("DeepSpeedCPUAdagrad with fp32_optimizer_states=False", "Leave it on: sums are fp32")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedAdam(DeepSpeedCPUAdam):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0, amsgrad=False,
                 set_grad_none=True):
        super().__init__(params, lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
                         adam_w_mode=adam_w_mode)


__getattr__ = refusing("deepspeed.ops.adam")
