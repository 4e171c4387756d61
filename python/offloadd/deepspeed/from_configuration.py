"""The optimizer and the schedule of a configuration."""

import inspect

import torch

from ..errors import Error
from . import schedules
from .adam import DeepSpeedCPUAdam
from .lion import DeepSpeedCPULion
from .missing import refuse

_OPTIMIZERS = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "RMSprop": torch.optim.RMSprop, "Lion": DeepSpeedCPULion}


def _decided(params):
    """Those that say something: what is "auto" is the optimizer's default, but for the rate, which there is no default for."""
    if params.get("lr") == "auto":
        raise Error.of(1105, "optimizer.params.lr is \"auto\", and nobody has decided it", "Write a number for lr")
    return {name: value for name, value in params.items() if value != "auto"}


def _make_optimizer(training, parameters):
    kind, params = training["optimizer"], _decided(training["optimizer_params"])
    if kind in ("AdamW", "Adam"):
        return DeepSpeedCPUAdam(parameters, **params, adamw_mode=kind == "AdamW")
    if kind not in _OPTIMIZERS:
        refuse(f"optimizer.type {kind} in Python", f"Use AdamW, Adam, {', '.join(_OPTIMIZERS)}")
    if kind == "Lion":
        params.setdefault("betas", (0.9, 0.99))  # those of a configuration that has none
    return _OPTIMIZERS[kind](parameters, **params)


def _scheduler_class(name):
    cls = schedules.BY_NAME.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    base = torch.optim.lr_scheduler.LRScheduler
    if cls is None or cls is base or not (name in schedules.BY_NAME or isinstance(cls, type) and issubclass(cls, base)):
        refuse(f"scheduler.type {name}", f"Use {', '.join(schedules.BY_NAME)}, or one of torch.optim.lr_scheduler")
    return cls


def make_scheduler(training, optimizer):
    name, params = training["scheduler"], training["scheduler_params"]
    cls = _scheduler_class(name)
    known = dict(list(inspect.signature(cls.__init__).parameters.items())[2:])
    for key in params:
        if key not in known:
            raise Error.of(1102, f"scheduler.params.{key} is no parameter of {name}", f"It takes {', '.join(known)}")
    decided = {key: value for key, value in params.items() if value != "auto"}
    for key, parameter in known.items():
        if key not in decided and parameter.default is parameter.empty:
            what = "is \"auto\", and nobody has decided it" if key in params else f"is missing, which {name} needs"
            raise Error.of(1105, f"scheduler.params.{key} {what}", f"Write a value for {key}")
    try:
        return cls(optimizer, **decided)
    except (TypeError, ValueError, AttributeError) as error:  # of torch's, which take functions and schedules, too
        raise Error.of(1102, f"{name} takes no such scheduler.params: {error}",
                       "Correct them, or make the schedule in the program: initialize(lr_scheduler=…)") from error


def optimizer_of(given, model, model_parameters, training):
    while type(given).__name__ in ("DeepSpeedOptimizerWrapper", "AcceleratedOptimizer"):  # of another initialize()
        given = given.optimizer
    if isinstance(given, torch.optim.Optimizer):
        return given
    if model_parameters is None:
        parameters = [p for p in model.parameters() if p.requires_grad]
    elif isinstance(model_parameters, torch.nn.Module):
        parameters = [p for p in model_parameters.parameters() if p.requires_grad]
    else:
        parameters = list(model_parameters)
        if parameters and not isinstance(parameters[0], dict):
            parameters = [p[1] if isinstance(p, tuple) else p for p in parameters]
            parameters = [p for p in parameters if p.requires_grad]
    if given is not None:
        if not callable(given):
            raise Error.of(1604, f"{type(given).__name__} is no torch.optim.Optimizer", "Give initialize() an optimizer of torch's")
        return given(parameters)
    return _make_optimizer(training, parameters) if training["optimizer"] else None
