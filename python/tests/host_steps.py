"""Training on a device whose optimizers step on the host, as offloaded training has it: in `with host_steps():` every step of an optimizer of
torch that is not attached finds its tensors in memory of the host, and what it has written goes back to where they are.

    python host_steps.py SCRIPT [ARGUMENT...]   runs a script so"""

import contextlib
import runpy
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from offloadd.recipes import recipe_of


def reproducible():
    """Before CUDA is initialised, with CUBLAS_WORKSPACE_CONFIG=:4096:8."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    # The backward passes of the other kernels for attention add in an order of their own, in 16 bits, where they are not told otherwise.
    for kernel in ("cudnn", "flash", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)


class _Moved:
    """A tensor whose data are on the host for a while: it stays the same tensor, over the same memory afterwards."""

    def __init__(self, tensor):
        self._tensor, self._there = tensor, tensor.data
        tensor.data = self._there.cpu()

    def back(self):
        here = self._tensor.data
        if here.layout == torch.strided and here.shape == self._there.shape and here.dtype == self._there.dtype:
            self._there.copy_(here)
            self._tensor.data = self._there
        else:
            self._tensor.data = here.to(self._there.device)


def _is_elsewhere(tensor):
    return isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu"


class _Step:
    """One of an optimizer."""

    def __init__(self, optimizer):
        self._optimizer, self._moved, self._device = optimizer, [], None
        self._masters = getattr(optimizer, "_masters", None)

    def _parameters(self):
        """(parameter, its state, group)."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, self._optimizer.state.get(parameter, {}), group

    @torch.no_grad()
    def to_host(self):
        unwritten = []
        for parameter, state, _ in self._parameters():
            master = self._masters._master_of.get(parameter, parameter) if self._masters else parameter
            if master is not parameter and not self._masters._is_written(parameter, master):
                unwritten.append(parameter)
            tensors = [parameter, parameter.grad, *state.values(), *([master] if master is not parameter else [])]
            for tensor in filter(_is_elsewhere, tensors):
                self._device = tensor.device
                self._moved.append(_Moved(tensor))
        for parameter in unwritten:
            self._masters.see(parameter)

    @torch.no_grad()
    def back(self):
        if self._device is None:
            return
        for moved in self._moved:
            moved.back()
        for parameter, state, group in self._parameters():
            keeps_count_there = group.get("fused") or group.get("capturable")
            for key, value in state.items():  # what this step has made
                if isinstance(value, torch.Tensor) and not _is_elsewhere(value) and (keeps_count_there or value.dim()):
                    state[key] = value.to(self._device)
            if self._masters is not None:
                master = self._masters._master_of.get(parameter, parameter)
                if not _is_elsewhere(master):
                    master.data = master.data.to(self._device)
                self._masters.see(parameter)
        self._moved.clear()


@contextlib.contextmanager
def host_steps():
    steps = []

    def begin(optimizer, arguments, named):
        if hasattr(optimizer, "_offload_part") or recipe_of(optimizer).is_foreign:  # offloaded, too, a foreign one runs on the device
            return None
        step = _Step(optimizer)
        steps.append(step)
        step.to_host()

        def around(closure):
            def called():
                step.back()
                loss = closure()
                step.to_host()
                return loss

            return called

        named = {key: around(value) if callable(value) else value for key, value in named.items()}
        return tuple(around(each) if callable(each) else each for each in arguments), named

    def end(optimizer, *_):
        if steps and steps[-1]._optimizer is optimizer:
            steps.pop().back()

    hooks = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


if __name__ == "__main__":
    reproducible()
    del sys.argv[0]
    with host_steps():
        runpy.run_path(sys.argv[0], run_name="__main__")
