"""What programs ask of the optimizer that DeepSpeed would have put around theirs: the optimizer that initialize() gives is torch's."""

import functools
import weakref

from .. import optimizer as optimizers
from ..errors import class_of
from ..library import is_disabled
from .missing import MissingAttribute

_WAYS = {"fp32": "the masters: engine.handle.gather(p, \"master\"), deepspeed.utils.safe_get_full_fp32_param(p)",
         "grad": "gradients: p.grad, deepspeed.utils.safe_get_full_grad(p), engine.get_global_grad_norm()",
         "overflow": "engine.was_step_applied()", "scale": "optimizer.cur_scale, and engine.scale(loss)"}


class _Answers:
    """Of an engine, for its optimizer."""

    def __init__(self, engine, optimizer):
        self._engine, self._optimizer = engine, optimizer

    @property
    def clip_grad(self):
        return self._engine.gradient_clipping()

    @property
    def gradient_accumulation_steps(self):
        return self._engine.gradient_accumulation_steps()

    @property
    def bit16_groups(self):
        return [list(group["params"]) for group in self._optimizer.param_groups]

    fp16_groups = bit16_groups
    dynamic_loss_scale = custom_loss_scaler = False
    external_loss_scale = None

    def get_lr(self):
        return self._optimizer.param_groups[0]["lr"]

    def set_lr(self, lr):
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def backward(self, loss, retain_graph=False):
        """Divided by nothing: programs that call this do it themselves."""
        return self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def has_overflow(self, *_, **__):
        return self._optimizer.overflow

    def offload_states(self, *_, **__):
        """They are where they belong."""

    reload_states = empty_partition_cache = refresh_fp32_params = destroy = offload_states


def _ask(engine, optimizer, name):
    engine = engine()
    if engine is not None and hasattr(_Answers, name):
        return getattr(_Answers(engine, optimizer), name)
    # Not its `optimizer`, either: programs take one wrapper off after the other, as long as there is one.
    ways = ["the optimizer itself"] if name == "optimizer" else [way for part, way in _WAYS.items() if part in name]
    raise MissingAttribute.of(1108, f"optimizer.{name} is not there: it is {class_of(optimizer)} itself, with nothing of DeepSpeed's around it",
                              "Use " + "; ".join(ways) if ways else "See docs/from_deepspeed.md for what there is, and for another way to the same")


def answer(engine, optimizer):
    """From now on the optimizer, which is attached, has what programs ask DeepSpeed's own; what there is not is refused by name. One whose class is the
    script's still (of this process; in memory) has what can be called, and no more in a job, which would keep it."""
    if isinstance(optimizer, optimizers.CopiedAsItWas):
        optimizers.asked[optimizer] = functools.partial(_ask, weakref.ref(engine))
        return
    answers = _Answers(weakref.proxy(engine), weakref.proxy(optimizer))
    for name in filter(lambda name: not name.startswith("_"), dir(answers)):
        value = getattr(answers, name)
        if callable(value) or is_disabled():
            optimizer.__dict__.setdefault(name, value)
