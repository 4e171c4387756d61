"""DeepSpeed's Lion by its name: the operators of the program that was published with its paper (arXiv:2302.06675), which the daemon
computes bit for bit."""

import torch

from .. import recipes
from ..optimizer import loss_of
from .missing import refuse, refusing


class DeepSpeedCPULion(torch.optim.Optimizer):
    def __init__(self, model_params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0, fp32_optimizer_states=True):
        if not fp32_optimizer_states:
            refuse(f"{type(self).__name__} with fp32_optimizer_states=False", "Leave it on: moments are fp32")
        super().__init__(model_params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """What counts where nothing is offloaded."""
        loss = loss_of(closure)
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                exp_avg = state["exp_avg"]
                parameter.mul_(1 - lr * group["weight_decay"])
                update = exp_avg * beta1 + parameter.grad * (1 - beta1)
                parameter.add_(update.sign_(), alpha=-lr)
                exp_avg.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)
        return loss


class FusedLion(DeepSpeedCPULion):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, set_grad_none=True):
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


def _values(group):
    beta1, beta2 = group["betas"]
    return {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"]}


recipes.serve(DeepSpeedCPULion, "lion", _values)

__getattr__ = refusing("deepspeed.ops.lion")
