"""fp16: losses are multiplied by a scale, so that small gradients survive in fp16, and a step whose gradients overflow is not taken.

The scale follows DeepSpeed's rule. Gradients stay as the backward pass has left them; the update multiplies them by a clip coefficient over the
scale, in fp32. So what is trained is what a loop of plain torch trains over fp32 masters, with gradients `p.grad.float() * (1 / scale)`, which of powers of
two is the quotient, and a clip coefficient in the same factor.
"""

import ctypes
import logging

import torch

from ..errors import Error
from ..optimizer_part import UNKNOWN
from ..recipes import parameters_of, recipe_of
from .missing import refuse, refusing

_log = logging.getLogger("offloadd")
_FACTOR = 2.0
_DEFAULTS = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "consecutive_hysteresis": False,
             "min_loss_scale": 1, "auto_cast": False}


def _narrow(value):
    """As the job keeps it."""
    return ctypes.c_float(value).value


class LossScaler:
    """The scale: it halves when `hysteresis` steps have overflowed, and doubles after `window` that have not. `loss_scale` that is not 0 in the
    configuration is a scale that stays."""

    def __init__(self, section):
        """Of the configuration's section fp16."""
        scaling = {**_DEFAULTS, **section}
        self.dynamic = scaling["loss_scale"] == 0
        self.cur_scale = 2.0 ** scaling["initial_scale_power"] if self.dynamic else _narrow(scaling["loss_scale"])
        self.min_scale, self.scale_window = _narrow(scaling["min_loss_scale"]), scaling["loss_scale_window"]
        self.delayed_shift = self.cur_hysteresis = scaling["hysteresis"]
        self.consecutive_hysteresis = scaling["consecutive_hysteresis"]
        self.cur_iter, self.last_overflow_iter = 0, -1

    @property
    def loss_scale(self):
        return self.cur_scale

    def state(self):
        """What changes."""
        return {name: getattr(self, name) for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")}

    def load(self, state):
        if not self.dynamic:
            state = {"cur_iter": state["cur_iter"]}
        self.__dict__.update(state)

    def next_state(self, overflow):
        """state() as it is after a step. OFD-1701 where the scale would have to go below its least."""
        state = {**self.state(), "cur_iter": self.cur_iter + 1}
        if not self.dynamic:
            return state
        if overflow:
            state["last_overflow_iter"] = self.cur_iter
            if self.cur_hysteresis > 1:
                state["cur_hysteresis"] -= 1
            elif self.cur_scale == self.min_scale:
                raise Error.of(1701, f"gradients overflow with the least loss scale, {self.min_scale:g}, the step was not taken",
                               "Lower the learning rate or fp16.min_loss_scale, or use bf16; the last epoch is intact")
            else:
                state["cur_scale"] = max(self.cur_scale / _FACTOR, self.min_scale)
            return state
        stable = self.cur_iter - self.last_overflow_iter - 1
        grows = stable > 0 and stable % self.scale_window == 0
        if grows:
            state["cur_scale"] = self.cur_scale * _FACTOR
        if grows or self.consecutive_hysteresis:
            state["cur_hysteresis"] = self.delayed_shift
        return state


def check(optimizer):
    """OFD-1104 for what does not unscale."""
    recipe, fix = recipe_of(optimizer), "Use AdamW, Adam, SGD, Adagrad or RMSprop, or \"bf16\": {\"enabled\": true}"
    if recipe.is_foreign:
        refuse(f"fp16.enabled with {type(optimizer).__name__}, whose update runs in this process and has no fp32 masters", fix)
    if "unscale" not in recipe.parameters:
        refuse(f"fp16.enabled with {type(optimizer).__name__}, whose update does not take the loss scale out of gradients", fix)
    other = next((p for p in parameters_of(optimizer) if p.dtype != torch.float16), None)
    if other is not None:
        refuse(f"fp16.enabled with a parameter of {other.dtype}, shape {list(other.shape)}, in the optimizer", "Give initialize() the model that has it")


def as_half(inputs):
    """fp16.auto_cast: floating point tensors of the positional arguments."""
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(map(as_half, inputs))
    if isinstance(inputs, dict):
        return {key: as_half(value) for key, value in inputs.items()}
    return inputs.half() if isinstance(inputs, torch.Tensor) and inputs.is_floating_point() else inputs


class ScalesLosses:
    """A part of the engine's class."""

    _scaler = None  # of fp16 that is trained
    _is_scaled = False  # by scale(), since the last forward pass
    _has_scaled = False  # a loss, since the last step

    def _begin_scaling(self):
        """After an attach(): what the job has of the scale counts, if it has taken steps."""
        if not self._imported.training["fp16"] or self.optimizer is None:
            return
        fresh = self._scaler is None
        if fresh:
            self._scaler = LossScaler(self._imported.training["fp16"])
        state = self._scaler.state()
        first, scale, count = self._handle.begin_loss_scale(state["cur_scale"], state["cur_iter"])
        second, hysteresis, last = self._handle.begin_loss_scale(state["cur_hysteresis"], state["last_overflow_iter"])
        self._scale_places = first, second
        if fresh:
            # Steps of a job that had no scale count, too.
            self._scaler.load({"cur_scale": scale, "cur_iter": max(count, self._handle.step), "last_overflow_iter": last,
                               "cur_hysteresis": int(hysteresis)})
        self._put_unscale(UNKNOWN)
        self._tell_scale(False)

    def _keep_scale(self, state):
        """As part of the next step."""
        self._handle.keep_loss_scale(self._scale_places[0], state["cur_scale"], state["cur_iter"])
        self._handle.keep_loss_scale(self._scale_places[1], state["cur_hysteresis"], state["last_overflow_iter"])

    def _load_scale(self, state):
        if self._scaler is not None and state is not None:
            self._scaler.load(state)
            self._keep_scale(self._scaler.state())
            self._tell_scale(False)

    def _tell_scale(self, overflow):
        """What programs ask DeepSpeed's optimizer."""
        told = {"overflow": overflow, "loss_scale": self._scaler.cur_scale, "cur_scale": self._scaler.cur_scale, "loss_scaler": self._scaler,
                "dynamic_loss_scale": self._scaler.dynamic}
        self.optimizer.__dict__.update(told)
        self._told_scale = self._scaler.cur_scale

    def _put_unscale(self, factor):
        part = getattr(self.optimizer, "_offload_part", None)
        (self.optimizer._masters if part is None else part).unscale = factor

    @property
    def cur_scale(self):
        """What the next loss is multiplied by. A program may set it on the optimizer."""
        if self._scaler is None:
            return 1.0
        for name in ("loss_scale", "cur_scale"):
            value = self.optimizer.__dict__.get(name, self._told_scale)
            if value != self._told_scale:
                self._scaler.cur_scale = _narrow(value)
                self._tell_scale(self.optimizer.overflow)
        return self._scaler.cur_scale

    def scale(self, loss):
        """The loss to call backward() of, without engine.backward()."""
        self._is_scaled = self._has_scaled = True
        return loss if self._scaler is None else loss * self.cur_scale

    def _check_is_scaled(self):
        """In a backward pass."""
        if self._scaler is not None and not self._is_scaled:
            raise Error.of(1002, "backward() of a loss that the scale of fp16 is missing in", "Call engine.backward(loss), or engine.scale(loss).backward()")

    @torch.no_grad()
    def _step_scaled(self, parameters, clipping):
        """Takes the step, or finds that gradients have overflowed; whether it was taken."""
        scale, factor, norm = self.cur_scale, 1.0, None
        if parameters and not self._has_scaled:
            raise Error.of(1002, "engine.step() after backward() of a loss that the scale of fp16 is missing in",
                           "Call engine.backward(loss), or engine.scale(loss).backward()")
        self._has_scaled = False
        if parameters:
            norms = [torch.linalg.vector_norm(parameter.grad, 2.0, dtype=torch.float32) for parameter in parameters]
            norm = torch.linalg.vector_norm(torch.stack(norms)) * (1.0 / scale)
            if clipping > 0:
                factor = (clipping / (norm + 1e-6)).clamp(max=1.0)
        overflow = norm is not None and not norm.isfinite().item()
        state = self._scaler.next_state(overflow)
        self._keep_scale(state)
        if overflow:
            _log.info("offloadd: gradients overflow with loss scale %g, the step is skipped", scale)
        else:
            self._norm = norm if norm is not None else self._norm
            self._put_unscale(_narrow(float(factor * (1.0 / scale))))
            try:
                self.optimizer.step()
            finally:
                self._put_unscale(UNKNOWN)
        self._scaler.load(state)
        self._tell_scale(overflow)
        return not overflow

    # ---- What scripts ask ----

    def _fp16(self, key):
        return self._imported.training["fp16"].get(key, _DEFAULTS[key])

    def fp16_enabled(self):
        return bool(self._imported.training["fp16"])

    def fp16_auto_cast(self):
        return self._fp16("auto_cast")

    def dynamic_loss_scale(self):
        return self.fp16_enabled() and self._fp16("loss_scale") == 0

    def loss_scale(self):
        """That of the configuration, 0 where it is dynamic; optimizer.cur_scale is what losses are multiplied by."""
        return self._fp16("loss_scale") if self.fp16_enabled() else 1.0

    def initial_dynamic_scale(self):
        return 2 ** self._fp16("initial_scale_power")

    def dynamic_loss_scale_args(self):
        return {"init_scale": self.initial_dynamic_scale(), "scale_window": self._fp16("loss_scale_window"), "delayed_shift": self._fp16("hysteresis"),
                "consecutive_hysteresis": self._fp16("consecutive_hysteresis"), "min_scale": self._fp16("min_loss_scale")}


__getattr__ = refusing("deepspeed.runtime.fp16.loss_scaler")
