"""Which optimizers the daemon has, and how one is said to it: its kind, the values of a group in the daemon's order."""

import functools
import itertools
import math

import torch

from .errors import Error
from .library import Engine

# A daemon's AdamWFlavour: whose roundings the update has.
FUSED, LERP = 0.0, 1.0


def number(value):
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def _is_narrow_number(value):
    """A number of numpy 2 that is not as wide as Python's: what is computed with it has its width, too."""
    return type(value).__module__ == "numpy" and not isinstance(value, float) and value.dtype.kind == "f" and type(value * 1.0) is type(value)


def is_table(parameter):
    """Whether it is frozen and of whole numbers: it stays in memory, and no optimizer does anything with it."""
    return not parameter.requires_grad and not parameter.is_floating_point() and not parameter.is_complex()


def is_narrow(parameter):
    """Whether what trains it is an fp32 master."""
    return parameter.dtype in (torch.bfloat16, torch.float16)


def _has_tensor_lr(group):
    """torch's loops then compute with it in fp32; its fused kernels do not, and those over a float64 tensor compute as with a number."""
    return isinstance(group["lr"], torch.Tensor) and group["lr"].dtype != torch.float64 and not group.get("fused")


def _adam(group):
    beta1, beta2 = group["betas"]
    return {
        "lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": group["weight_decay"],
        "flavour": FUSED if group.get("fused") else LERP, "amsgrad": bool(group.get("amsgrad")),
        "tensor_lr": _has_tensor_lr(group),
    }


def _sgd(group):
    return {name: group[name] for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov")} | {"fused": bool(group.get("fused"))}


def _adagrad(group):
    names = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
    return {name: group[name] for name in names} | {"fused": bool(group.get("fused")), "tensor_lr": _has_tensor_lr(group)}


def _rmsprop(group):
    return {name: group[name] for name in ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")} | {"lerp": True}


# Class -> (kind for a group, its values, whether there is a number of updates in its state).
_SERVED = {
    torch.optim.AdamW: (lambda group: "adamw", _adam, True),
    torch.optim.Adam: (lambda group: "adamw" if group.get("decoupled_weight_decay") else "adam", _adam, True),
    torch.optim.SGD: (lambda group: "sgd", _sgd, False),
    torch.optim.Adagrad: (lambda group: "adagrad", _adagrad, True),
    torch.optim.RMSprop: (lambda group: "rmsprop", _rmsprop, True),
}


def serve(cls, kind, values):
    """One more class, which has no number of updates in its state: `values` gives those of a group by the daemon's names."""
    _SERVED[cls] = (lambda group: kind, values, False)


_TYPES_OF_RATES = (torch.float32, torch.float64)  # that are tensors
_COMPUTED_WITH = frozenset(("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "alpha", "lr_decay", "initial_accumulator_value"))


def step_function(cls):
    """Its step(), without what torch and others have put around it."""
    function = cls.step
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def refuse(what, fix):
    raise Error.of(1604, what, fix)


def served_class_of(cls):
    """The class of the table whose step() it has, None when it has another one. Of an instance whose class was swapped that counts which it had."""
    cls = getattr(cls, "_class_of_copies", cls)
    base = next((known for known in cls.__mro__ if known in _SERVED), None)
    return base if base is not None and step_function(cls) is step_function(base) else None


@functools.cache
def _are_double_roots_nearest():
    """Whether torch's square roots of float64 numbers are those that the daemon takes: a library that gives up the last place does so for one
    number in a hundred."""
    values = torch.rand(1 << 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
    return values.sqrt().tolist() == [math.sqrt(value) for value in values.tolist()]


def _has_own_roots(base, optimizer):
    """Whether it takes roots of float64 that the daemon does not have: those of torch's vector library, which its fused kernels do without."""
    if base is torch.optim.SGD or not any(parameter.dtype == torch.float64 for group in optimizer.param_groups for parameter in group["params"]):
        return False
    return not (all(group.get("fused") for group in optimizer.param_groups) or _are_double_roots_nearest())


def keeps_sparsely(group):
    """Whether torch's SGD keeps sparse buffers of sparse gradients, whose elements are added one by one: no plane of a job has their bits."""
    return group["momentum"] != 0 and group["weight_decay"] == 0 and not group.get("fused")


def _has_sparse_momentum(base, optimizer, models):
    """Whether modules say so before there are gradients."""
    if base is not torch.optim.SGD:
        return False
    embeddings = (module for model in models for module in model.modules() if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)))
    sparse = {id(each.weight) for each in embeddings if each.sparse and each.weight.requires_grad and not is_narrow(each.weight)}
    return bool(sparse) and any(keeps_sparsely(group) and any(id(parameter) in sparse for parameter in group["params"])
                                for group in optimizer.param_groups)


def recipe_of(optimizer, models=()):
    """`models`: those whose gradients are the optimizer's as they come from the backward, of one rank."""
    base = served_class_of(type(optimizer))
    is_foreign = base is None or _has_own_roots(base, optimizer) or _has_sparse_momentum(base, optimizer, models)
    return Foreign(optimizer) if is_foreign else Recipe(optimizer)


class Foreign:
    """An optimizer that the daemon does not have (foreign.py)."""

    is_foreign, kind = True, "sgd"  # which keeps nothing

    def __init__(self, optimizer):
        self.name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


class Recipe:
    """How an optimizer is said to the daemon."""

    is_foreign = False

    def __init__(self, optimizer):
        base = served_class_of(type(optimizer))
        self.name = base.__name__
        self.kind_of, self._values_of, self.counts = _SERVED[base]
        kinds = {self.kind_of(group) for group in optimizer.param_groups}
        if len(kinds) > 1:
            refuse(f"{self.name} with decoupled_weight_decay in some groups only", "Use one kind of weight decay in all groups")
        self.kind = kinds.pop() if kinds else self.kind_of(optimizer.defaults)
        self.parameters = Engine.parameters_of(self.kind)
        for group in optimizer.param_groups:
            self.values(group)

    def values(self, group):
        """The values of a group in the daemon's order; OFD-1604 for what it does not do."""
        for flag in ("differentiable", "capturable"):
            if group.get(flag):
                refuse(f"{self.name} with {flag}=True", f"Leave {flag} out")
        if self.kind_of(group) != self.kind:
            refuse(f"{self.name} whose kind of weight decay changes", "Use one kind of weight decay in all groups")
        self._check_types(group)
        values = self._values_of(group)
        values["maximize"], values["unscale"] = bool(group.get("maximize")), 1.0
        return [number(values[name]) for name in self.parameters]

    def _check_types(self, group):
        """torch's loops compute with what they are given; its fused kernels, and the rates of SGD and RMSprop, take everything as a double."""
        if group.get("fused"):
            return
        for name, value in group.items():
            # What schedulers keep in a group (initial_lr, max_lr) is not computed with.
            if name not in _COMPUTED_WITH or (self.kind in ("sgd", "rmsprop") and name in ("lr", "weight_decay")):
                continue
            for each in value if isinstance(value, (tuple, list)) else (value,):
                if _is_narrow_number(each) or (isinstance(each, torch.Tensor) and (name != "lr" or each.dtype not in _TYPES_OF_RATES)):
                    what = f"a tensor of {each.dtype}" if isinstance(each, torch.Tensor) else f"a {each.dtype} of numpy"
                    refuse(f"{self.name} with {name} given as {what}, which rounds what torch's loop computes with it", f"Write float({name})")

    def planes(self, values):
        return Engine.planes_of(self.kind, values)


def parameters_of(optimizer):
    """Of all groups, in their order."""
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


_SMALLEST, _ONE = 5e-324, 1.0


def check_arithmetic():
    """OFD-1604 where this thread takes the smallest numbers for 0: the daemon's do not."""
    if _SMALLEST * _ONE == 0.0:
        refuse("torch.set_flush_denormal(True) is set, with which an update in this thread has other bits than in the daemon",
               "Call torch.set_flush_denormal(False)")
