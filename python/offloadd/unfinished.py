"""The end of a step of Hugging Face's Trainer, for a process that was killed in it.

A step is in the job before Trainer has logged, evaluated and saved what is due after it, and before callbacks were told. A run that
continues there does all of that again: what a killed process has done of it is gone, or done again with the same result.
"""

import contextlib
import logging
import os
import time
import weakref

import torch
import transformers
from torch.overrides import TorchFunctionMode

from .errors import Error
from .named_tensors import is_wrapper
from .position import epoch_of, kept_for, length_of, random_state, set_random_state

_log = logging.getLogger("offloadd")
# Of Trainer's own: its methods, and what its loop adds up. Releases of transformers differ in them.
_NEEDED = ("_run_epoch", "_maybe_log_save_evaluate", "_get_learning_rate", "_load_rng_state")
_TOTALS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")
_FIRST = "_initial_global_step"  # the mean loss of a run is over the steps behind it; where it is not there, over all
_ADDED_UP = {"metrics": "_metrics", "stored_metrics": "_stored_metrics"}  # as it is kept -> where trainers of TRL have it
_NUMBERS_MAX = 10_000  # of a log, that a step keeps


def _packed(values):
    """Numbers as they are, tensors of one number each as one; None for others."""
    if values and all(isinstance(value, torch.Tensor) and value.numel() == 1 for value in values):
        return torch.stack([value.detach().cpu() for value in values])
    return list(values) if all(isinstance(value, (int, float)) for value in values) else None


def _lists_of(metrics):
    """{mode: {name: values}}; empty where they are other things, or too many to be kept with every step."""
    if not isinstance(metrics, dict) or not all(isinstance(lists, dict) for lists in metrics.values()):
        return {}
    found = {mode: {name: _packed(values) for name, values in lists.items() if isinstance(values, list)} for mode, lists in metrics.items()}
    packed = [values for lists in found.values() for values in lists.values()]
    is_kept = all(values is not None for values in packed) and sum(map(len, packed)) <= _NUMBERS_MAX
    return found if is_kept else {}


def _added_up_for_the_log(trainer):
    """What trainers of TRL do: lists of numbers by their names, for training and evaluation, and how many tokens there were."""
    tokens = getattr(trainer, "_total_train_tokens", None)
    kept = {"tokens": tokens} if isinstance(tokens, (int, float)) else {}
    found = {key: _lists_of(getattr(trainer, name, None)) for key, name in _ADDED_UP.items()}
    return kept | {key: lists for key, lists in found.items() if lists}


def _add_up_for_the_log(trainer, kept):
    if "tokens" in kept and hasattr(trainer, "_total_train_tokens"):
        trainer._total_train_tokens = kept["tokens"]
    for key, name in _ADDED_UP.items():
        metrics = getattr(trainer, name, None)
        for mode, lists in kept.get(key, {}).items():
            with contextlib.suppress(KeyError, TypeError, AttributeError):  # this trainer has it otherwise
                metrics[mode].update({name: list(values) for name, values in lists.items()})


def remember_norms(trainer, callback):
    """The norm that Trainer logs is a variable of its loop: callback.norm is the last one."""
    if "_get_grad_norm" in vars(trainer) or not hasattr(trainer, "_get_grad_norm"):
        return
    of, to = weakref.ref(trainer), weakref.ref(callback)

    def get_grad_norm(*args, **kwargs):
        norm = type(of())._get_grad_norm(of(), *args, **kwargs)
        if to() is not None:
            to().norm = norm
        return norm

    trainer._get_grad_norm = get_grad_norm


def loop_of(trainer, norm):
    """What the loop has added up, before a step of the optimizer; None where this Trainer has other names for it."""
    if trainer is None or not all(hasattr(trainer, name) for name in (*_NEEDED, *_TOTALS)):
        return None
    return {"loss": trainer._tr_loss.detach().cpu().clone(), "total_loss": trainer._total_loss_scalar, "last_logged": trainer._globalstep_last_logged,
            "first": getattr(trainer, _FIRST, 0), "norm": norm.item() if isinstance(norm, torch.Tensor) else norm,
            "learning_rate": trainer._get_learning_rate(), "flos": trainer.current_flos, "for_the_log": _added_up_for_the_log(trainer)}


def _epoch_after(trainer, step):
    """(epoch as Trainer's state has it after so many steps, its number, whether it ends there)."""
    args, loader = trainer.args, trainer.callback_handler.train_dataloader
    micro = args.gradient_accumulation_steps
    batches = length_of(loader)
    if batches is None:
        batches = args.max_steps * micro
    steps = max(-(-batches // micro), 1)
    epoch, before = divmod(step - 1, steps)
    return epoch + min((before + 1) * micro, batches) / batches, epoch, before + 1 == steps


def _restore_callbacks(trainer):
    """What callbacks export (EarlyStoppingCallback's patience). Trainer restores it on demand, where a run begins again; this one goes on."""
    kept = {name: list(data) if isinstance(data, list) else [data] for name, data in trainer.state.stateful_callbacks.items()}
    for callback in trainer.callback_handler.callbacks:
        states = kept.get(type(callback).__name__)
        for name, value in (states.pop(0).get("attributes", {}) if states else {}).items():
            if not isinstance(value, str) or isinstance(getattr(callback, name, None), str):  # others have become texts
                setattr(callback, name, value)


def _tensors_of(model):
    """Weights and buffers that have memory of their own."""
    return [each for each in [*model.parameters(), *model.buffers()] if each.layout == torch.strided and not is_wrapper(each)]


# Functions in the manner of those that write, and write nothing.
_NO_VALUES = ("requires_grad_", "detach_", "share_memory_")


class _WritesCountForNothing(TorchFunctionMode):
    """Functions that write weights or buffers of a model write copies of them."""

    def __init__(self, model):
        super().__init__()
        self._storages = {each.untyped_storage()._cdata for each in _tensors_of(model)}

    def _instead(self, given):
        if isinstance(given, (list, tuple)):
            return [self._instead(each) for each in given]
        is_plain = isinstance(given, torch.Tensor) and given.layout == torch.strided and not is_wrapper(given)
        is_kept = is_plain and given.untyped_storage()._cdata in self._storages
        return given.detach().clone() if is_kept else given

    @staticmethod
    def _writes(name):
        in_place = name.endswith("_") and not name.startswith("__") and name not in _NO_VALUES
        return in_place or name == "__setitem__" or (name.startswith("__i") and hasattr(torch.Tensor, "__" + name[3:]))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, first = dict(kwargs or {}), args[:1]
        if args and self._writes(getattr(func, "__name__", "")):
            args = (self._instead(args[0]), *args[1:])
        if kwargs.get("out") is not None:
            first, kwargs["out"] = (kwargs["out"],), self._instead(kwargs["out"])
        result = func(*args, **kwargs)
        return first[0] if result is not None and (result is kwargs.get("out") or (args and result is args[0])) else result


@contextlib.contextmanager
def _done_before(trainer):
    """What is written inside into weights, buffers and options of the optimizer counts for nothing, nor do buffers that take others' places."""
    tensors = [(each, each.detach()) for each in _tensors_of(trainer.model)]
    buffers = [(module, dict(module._buffers)) for module in trainer.model.modules()]
    groups = [(group, {key: value for key, value in group.items() if key != "params"}) for group in trainer.optimizer.param_groups]
    with _WritesCountForNothing(trainer.model):
        yield
    for module, own in buffers:
        module._buffers.update(own)
    for tensor, own in tensors:
        if tensor.untyped_storage()._cdata != own.untyped_storage()._cdata:  # p.data = …
            tensor.data = own
    for group, options in groups:
        group.update(options)


def _epoch_was_begun(trainer):
    """The loop tells callbacks again of the beginning of the epoch that it goes on in."""
    handler = trainer.callback_handler
    original = handler.on_epoch_begin

    def on_epoch_begin(*args):
        vars(handler).pop("on_epoch_begin", None)
        with _done_before(trainer):
            return original(*args)

    handler.on_epoch_begin = on_epoch_begin


def _told_of_the_step(trainer):
    """Callbacks hear of the optimizer's step once more, as they may write weights. What they have read of its gradients is gone."""
    try:
        return trainer.callback_handler.on_optimizer_step(trainer.args, trainer.state, trainer.control)
    except Error:
        raise
    except Exception as error:
        raise Error.of(1604, f"a callback's on_optimizer_step cannot be told again of step {trainer.state.global_step + 1}, at which the job is "
                             f"({type(error).__name__}: {error}): the gradients of that step are in no job",
                       "Name another job, and go on at a checkpoint of Trainer's (resume_from_checkpoint) or anew") from error


def _finish(trainer, callback, kept, ignore_keys):
    loop, state, handler = kept["loop"], trainer.state, trainer.callback_handler
    trainer._tr_loss = loop["loss"].to(trainer.args.device)
    trainer._total_loss_scalar, trainer._globalstep_last_logged = loop["total_loss"], loop["last_logged"]
    trainer.current_flos = loop["flos"]
    if hasattr(trainer, _FIRST):
        setattr(trainer, _FIRST, loop["first"])
    _add_up_for_the_log(trainer, loop.get("for_the_log", {}))
    _restore_callbacks(trainer)
    trainer.model.train()  # as a step leaves it: what is in the log may depend on that
    # What callbacks note at the beginnings of the epoch and the step (the time) is gone with the process.
    state.global_step -= 1
    with _done_before(trainer):  # the step has been taken with what they have written
        trainer.control = handler.on_epoch_begin(trainer.args, state, trainer.control)
        trainer.control = handler.on_step_begin(trainer.args, state, trainer.control)
    set_random_state(kept["random"])
    trainer.control = _told_of_the_step(trainer)
    state.global_step += 1
    at = kept_for(trainer, kept.get("position"))
    if at is not None:
        state.epoch, epoch, is_last = epoch_of(at, trainer), at["epoch"], at["is_last"]
    else:
        state.epoch, epoch, is_last = _epoch_after(trainer, state.global_step)

    def do_what_is_due():
        trainer._maybe_log_save_evaluate(trainer._tr_loss, loop["norm"], trainer.model_wrapped, None, epoch, ignore_keys, time.time(),
                                         learning_rate=loop["learning_rate"])

    trainer.control = handler.on_step_end(trainer.args, state, trainer.control)
    do_what_is_due()
    if is_last or trainer.control.should_epoch_stop or trainer.control.should_training_stop:
        trainer.control = handler.on_epoch_end(trainer.args, state, trainer.control)
        do_what_is_due()
    else:
        _epoch_was_begun(trainer)
    if trainer.control.should_training_stop or (trainer.control.should_epoch_stop and not is_last):
        _leave_out(trainer, epoch)
    if callback.position is not None:
        callback.position.restart()


def _leave_out(trainer, ended):
    """An epoch that has ended, or a training, begins with no further step."""
    is_over = trainer.control.should_training_stop

    def run_epoch(*args, epoch, **kwargs):
        if not is_over and epoch != ended:
            return type(trainer)._run_epoch(trainer, *args, epoch=epoch, **kwargs)
        trainer._load_rng_state(kwargs["resume_from_checkpoint"])

    trainer._run_epoch = run_epoch


def random_file(trainer, folder):
    """Where Trainer looks for this rank's random numbers in a checkpoint."""
    several = trainer.args.world_size > 1
    return os.path.join(folder, f"rng_state_{trainer.args.process_index}.pth" if several else "rng_state.pth")


def finish_first(trainer, callback, kept, ignore_keys, rng_file):
    """Has the end of the step that the job is at done when training begins; then the random numbers are in the file that Trainer goes on
    with. Returns a function that takes this back."""
    handler = trainer.callback_handler
    if kept.get("loop") is None or not all(hasattr(trainer, name) for name in _NEEDED):
        _log.warning("offloadd: what was due after step %d (the log, an evaluation, a checkpoint) is left out, the mean loss at the end is of this "
                     "process, and the place in the data is the one that Trainer derives: it is made otherwise in transformers %s. With 5.3 and newer "
                     "it is done", kept["step"], transformers.__version__)
        return lambda: None
    original = handler.on_train_begin

    def on_train_begin(args, state, control):
        trainer.control = original(args, state, control)
        _finish(trainer, callback, kept, ignore_keys)
        state_now = random_state()
        if "cuda" in state_now and args.world_size > 1:  # as Trainer has it then: of all devices
            state_now["cuda"] = torch.cuda.get_rng_state_all()
        torch.save(state_now, rng_file)
        return trainer.control

    def evaluate(*args, skip_scheduler=False, **kwargs):
        return None if skip_scheduler else type(trainer)._evaluate(trainer, *args, **kwargs)

    handler.on_train_begin = on_train_begin
    if "_evaluate" not in vars(trainer):
        trainer._evaluate = evaluate  # but what eval_on_start asks for: it was done when the run began

    def take_back():
        vars(handler).pop("on_train_begin", None)
        vars(handler).pop("on_epoch_begin", None)
        vars(trainer).pop("_run_epoch", None)
        if vars(trainer).get("_evaluate") is evaluate:
            del trainer._evaluate

    return take_back
