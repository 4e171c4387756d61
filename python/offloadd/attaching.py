"""attach() and init(): how a job is opened, and what a handle is made of."""

import contextlib
import gc
import logging
import os
import threading
import weakref

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from . import anew, followers, given, in_memory, jobs, lightning_position, lightning_ranks, pickled, safetensors_files, served
from .attachable import without_prepare, without_wrapper
from .beginning import Beginning, has_begun
from .errors import Error
from .handle import Handle, stored_state
from .library import Engine, is_disabled
from .named_tensors import names_of
from .options import OPTIONS, job_of, listed, of_arguments, pool_of, reduces_gradients, strings

_log = logging.getLogger("offloadd")

_constructed_in_memory = {}  # with OFFLOADD_DISABLE=1: the options of such an init()


def _open_engine(options):
    job, pool = job_of(options), pool_of(options)
    if jobs.outlived or any(handle.job == job and handle.nvme_path == pool for handle in jobs.handles()):
        gc.collect()  # what a notebook has left behind
    for handle in jobs.handles():
        if handle.job != job or handle.nvme_path != pool:
            continue
        if handle.models and all(model is None for model in handle.models):
            handle.end()  # nobody can train it any more
        else:
            raise Error.of(1205, f"job {job} is attached already in this process",
                           "Attach several models in one call, attach([a, b], [optimizer_a, optimizer_b]), give each a job of its own, "
                           "or close() the handle first")
    for each in [each for each in jobs.outlived if each.job == job and each.nvme_path == pool]:
        each.close()
    return Engine(strings(options))


def open_ahead(options):
    """Opens the job of attach(**options), which will take it, unless it is open: (engine, the trainer's state). For integrations."""
    opened = init(**{key: value for key, value in options.items() if key in OPTIONS or key == "config"})
    if jobs.constructed is not None:
        _check_is_of(jobs.constructed.options, opened.options)
    else:
        opened._engine, opened.is_ahead = _open_engine(opened.options), True
        jobs.constructed = opened
    return jobs.constructed._engine, stored_state(jobs.constructed._engine)[1]


def close_ahead():
    """Where what open_ahead() was for has failed: a job that no attach() has taken, unless the program has opened it itself."""
    if jobs.constructed is not None and jobs.constructed.is_ahead:
        opened, jobs.constructed = jobs.constructed, None
        opened.take().close()


def was_made_before(options):
    """Whether the job of attach(**options) was made before and has taken no step. Opens the job."""
    engine = open_ahead(options)[0]
    opened = jobs.constructed.options
    return has_begun(engine, pool_of(opened), job_of(opened))


def beginning_of(model, options):
    """What the model brings along to the job of attach(model, …, **options), where that was made before and has taken no step; else
    None. Opens the job."""
    return Beginning(names_of([model])) if was_made_before(options) else None


def _of_lightning(model):
    """The checkpoint that Lightning's Trainer has loaded into the model, and has not done with; {} without one."""
    connector = getattr(getattr(model, "_trainer", None), "_checkpoint_connector", None)
    loaded = getattr(connector, "_loaded_checkpoint", None) or {}
    return loaded if "state_dict" in loaded and loaded.get("optimizer_states") else {}


def _tell_where_it_begins(model, handle):
    trainer = getattr(model, "_trainer", None)
    if handle.step > 0 and getattr(trainer, "global_step", None) == 0 and hasattr(trainer, "_checkpoint_connector") \
            and not lightning_position.is_served(trainer, handle):
        lightning_position.tell_where_it_begins(handle)


def _is_in(model_value, value):
    return value.shape == model_value.shape and torch.equal(value.to(model_value.device, model_value.dtype), model_value)


def _brought_by_checkpoint(model):
    """What the model has of such a checkpoint: its weights, or what callbacks have put in their place (WeightAveraging, whose checkpoints have the
    averages where weights are expected). None without a checkpoint."""
    loaded = _of_lightning(model)
    if not loaded:
        return None
    brought = dict(loaded["state_dict"])
    for name, value in model.state_dict().items():
        if isinstance(brought.get(name), torch.Tensor) and isinstance(value, torch.Tensor) and not _is_in(value, brought[name]):
            brought[name] = served.copy_of(value)
    return brought


def _load_again(model, handle, brought):
    """Lightning loads a checkpoint's weights before it asks for optimizers. A job that exists has its own, which attach() has put in their place:
    with the checkpoint's moments, of another step, they are loaded again. Of this step what the checkpoint has otherwise: it was written after the
    step."""
    if brought is None:
        _tell_where_it_begins(model, handle)
    if handle.step == 0 or brought is None:
        return
    marks = [state.get("offloadd") or {} for state in _of_lightning(model).get("optimizer_states", [])]
    here = handle.mark()
    if not all(mark.get("id") == here["id"] and mark.get("step") == here["step"] and not mark.get("is_loaded") for mark in marks):
        _log.warning("offloadd: job %s is at step %d: it goes on with the weights of the checkpoint", handle.job, handle.step)
        model.load_state_dict(brought, strict=model.strict_loading)
        return
    others = {name: brought[name] for name, value in model.state_dict().items()
              if isinstance(value, torch.Tensor) and isinstance(brought.get(name), torch.Tensor) and not _is_in(value, brought[name])}
    if others:
        model.load_state_dict(others, strict=False)


# What attach() may be given otherwise than init(), whose values count: results are the same.
_HOW_FAST = ("ram", "io", "durability", "generations", "update_threads", "update_in_backward", "spill_gradients", "zero_stage", "weights_home",
             "state_home", "persistence", "prefetch", "max_live")


def _check_is_of(opened, options):
    """OFD-1002 where options name another job than the one that init() has opened."""
    for key, there in (("job", job_of(opened)), ("nvme_path", pool_of(opened))):
        if str(options.get(key, there)) != there:
            raise Error.of(1002, f"attach() was given {key} = {options[key]}, but init() has opened job {job_of(opened)} in {pool_of(opened)}, and no "
                                 "attach() has taken it", "Attach to that job: leave its options out, they are init()'s; or start the program again")


def _as_opened(opened, options):
    """Those of attach() behind an init(), whose engine has its own already."""
    _check_is_of(opened, options)
    defaults = {"device": opened.get("device") or os.environ.get("OFFLOADD_DEVICE"),
                "gpu_ram": opened.get("gpu_ram") or os.environ.get("OFFLOADD_GPU_RAM"),
                "raw_access": opened.get("raw_access", "serve"), "weights_at_close": opened.get("weights_at_close", "released")}
    for key, value in options.items():
        at_first = defaults.get(key, opened.get(key))
        if key not in OPTIONS or key in ("job", "nvme_path") or str(value) == str(at_first):
            continue
        if key not in _HOW_FAST:
            raise Error.of(1002, f"attach() was given {key} = {value}, but init() has opened the job with {at_first}", f"Give {key} to init()")
        _log.warning("offloadd: %s = %s of attach() counts for nothing: init() has opened job %s with %s", key, value, job_of(opened),
                     "its default" if at_first is None else at_first)
    return {**options, **opened}


def attach(model, optimizer=None, *, nvme_path=None, ram=None, job=None, config=None, unfreeze=None, initial_weights=None, **others):
    """Offloads the model's weights, gradients and optimizer state; the script goes on with the same `model` and `optimizer`.

    model            a module, or several of one job (a list)
    optimizer        the instance, or several; a class, with its arguments behind it, makes one. Without one the model is frozen, and only
                     read: for generate() and evaluation
    nvme_path        a directory on a drive with direct I/O, or several over which the state is striped
    ram              the memory budget, "8GiB"
    gpu_ram          of a model on a GPU: that of the device's memory, or "auto" (docs/gpu.md)
    device           "cuda:0": where the model is trained; what it has in memory of the host goes there, parameters without ever being there
                     as a whole, so that it may be larger than the device's memory. Without it the model stays where it is
    job              names the run in the pool; the same name resumes it
    config           a configuration: an offloadd.toml, or DeepSpeed's (docs/configuration.md)
    unfreeze         frozen parameters whose optimizer state has room in a new job at once: True, names (patterns), or parameters
    initial_weights  a file or folder that a new job takes its weights from: safetensors, or pytorch_model.bin

    raw_access       "serve": pointers (data_ptr(), kernels of one's own) bring a tensor to memory until the end of the step; "error":
                     they are refused
    weights_at_close "released", or "memory": the model is an ordinary one when the job is closed

    average          "ema:0.999" or "swa:1000:100": the daemon keeps a moving average of the weights, of all updates or of every 100th from the
                     1000th on, as torch.optim.swa_utils.AveragedModel does; handle.gather(p, "average"), handle.save_weights(…, plane="average")

    Further options: io, durability, generations, update_threads, update_in_backward, spill_gradients; zero_stage, weights_home,
    state_home, persistence, prefetch, max_live, gradients, gradient_average (docs/ranks.md); and rank … for launchers of one's own.
    """
    global _constructed_in_memory
    models = listed(model) if model is not None else []
    for each in models:
        if not isinstance(each, torch.nn.Module):
            raise Error.of(1601, f"{type(each).__name__} is no torch.nn.Module", "Give attach() the model itself, attach(model, optimizer, …)")
    if optimizer is not None and not isinstance(optimizer, type) and not listed(optimizer):
        raise Error.of(1604, "attach() was given a list of no optimizers", "Give it the optimizer; without one, optimizer=None, a model is only read")
    if not models and (optimizer is None or isinstance(optimizer, type)):
        raise Error.of(1601, "attach() was given no model", "Give it the model, attach(model, optimizer, …)")
    is_untouched = "_beside" in others
    beside = others.pop("_beside", ())  # modules of which the job is to have the buffers, too
    is_only_read = optimizer is None
    if is_only_read:
        for each in models:
            each.requires_grad_(False)
        optimizer = torch.optim.SGD  # which keeps nothing
    if isinstance(optimizer, type):
        arguments = {key: others.pop(key) for key in list(others) if key not in OPTIONS}
        optimizer = optimizer([p for each in models for p in each.parameters()], **arguments)
    optimizers = listed(optimizer)
    optimizers = [without_prepare(each) for each in optimizers]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise Error.of(1604, f"{type(each).__module__}.{type(each).__qualname__} is no torch.optim.Optimizer",
                           "Train with an optimizer of torch.optim, and give attach() that")
        if not hasattr(each, "_optimizer_step_pre_hooks"):
            raise Error.of(1604, f"{type(each).__name__} was made without torch.optim.Optimizer.__init__(), and its steps cannot be seen",
                           "Attach the optimizer that it is around, before it is wrapped, or have it call super().__init__(params, defaults)")
    options = of_arguments(nvme_path, ram, job, config, others)
    if is_disabled():
        options, _constructed_in_memory = {**_constructed_in_memory, **options}, {}
    if not is_untouched:
        options = lightning_ranks.options_in(models, options)
    if reduces_gradients({**(jobs.constructed.options if jobs.constructed is not None else {}), **options}):
        models = [without_wrapper(each) for each in models]
    masters = [given.give_back(each) for each in optimizers]
    handle = _handle_of(models, optimizers, options, unfreeze, initial_weights, beside, is_only_read)
    if handle.step == 0:
        given.give_masters(optimizers, masters)
    return handle


def _handle_of(models, optimizers, options, unfreeze, initial_weights, beside, is_only_read):
    if is_disabled():
        return in_memory.Handle(models, optimizers, options, initial_weights)
    if jobs.constructed is not None:
        options = _as_opened(jobs.constructed.options, options)
    former = anew.former_among(jobs.handles(), models, optimizers) if not is_only_read else None
    if former is not None:
        return _attach_anew(former, models, optimizers, options, unfreeze, initial_weights, beside)
    return _attach(models, optimizers, options, unfreeze, initial_weights, beside, is_only_read)


def _attach_anew(former, models, optimizers, options, unfreeze, initial_weights, beside):
    gradients = anew.gradients_of(former)
    asked_for = job_of(options)
    job, number = anew.name_after(former, asked_for)
    options = {**options, "job": job}
    with anew.weights_of(former, job) as folder:
        was_made = initial_weights is None and was_made_before(options)
        handle = _attach(models, optimizers, options, unfreeze, None if was_made else initial_weights or folder, beside)
        if was_made:
            handle.load_weights(folder)
    for parameter, gradient in gradients:
        parameter.grad = gradient.to(parameter.device)
    handle.asked_for, handle.training = asked_for, number
    return handle


@contextlib.contextmanager
def _outside_of_transforms():
    """As if no transform of torch.func were running, and no mode that sees operators: what attach() computes is not of the script's function,
    and its tensors are none that either has wrapped."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


@_outside_of_transforms()
def _attach(models, optimizers, options, unfreeze, initial_weights, beside, is_only_read=False):
    opened, jobs.constructed = jobs.constructed, None
    with lightning_ranks.explaining(options):
        engine = _open_engine(options) if opened is None else opened.take()
        return _attached(engine, models, optimizers, options, unfreeze, initial_weights, beside, is_only_read)


def _attached(engine, models, optimizers, options, unfreeze, initial_weights, beside, is_only_read):
    handle = None
    try:
        is_pickled = initial_weights is not None and pickled.files_of(initial_weights) is not None
        if initial_weights is not None and not is_pickled:
            engine.set_initial_weights(os.fspath(initial_weights), [])
        brought = [_brought_by_checkpoint(each) for each in models]
        handle = Handle(engine, models, optimizers, options, unfreeze, beside)
        if is_pickled and handle.step == 0:
            handle.load_weights(initial_weights)
        for each, its in zip(models, brought):
            _load_again(each, handle, its)
        for each in beside:  # around the first module that was called
            _tell_where_it_begins(each, handle)
        return handle
    except BaseException as error:
        engine.close() if handle is None else handle.end()
        if is_only_read and isinstance(error, Error) and error.id == 1602 and "was trained with" in str(error):
            raise Error.of(1602, f"job {job_of(options)} was trained, and attach() was given no optimizer",
                           "Give it the optimizer that the job was trained with, which need not step, or read the weights that offloadctl export "
                           "writes in a job of their own") from None
        raise


def _has_tensors(seen):
    """Whether the program still has what was built in an init() that no attach() has taken."""
    return any(isinstance(each, torch.Tensor) and served.managed(each) and followers.parameter_over(each) is None for each in seen)


def managed_tensors():
    """Those of the program that are offloaded: weak references by id()."""
    return {id(each): weakref.ref(each) for each in gc.get_objects() if isinstance(each, torch.Tensor) and served.managed(each)}


class init:
    """`with offloadd.init(nvme_path=…, ram=…, job=…):` builds a model that is larger than memory: big tensors made inside go to the
    pool as soon as the operation that fills them ends. attach() then takes the job that was opened here. With `device` the model is
    built in the same way, on the host, and trained there: it is never whole in either memory."""

    def __init__(self, *, nvme_path=None, ram=None, job=None, config=None, **others):
        self.options = of_arguments(nvme_path, ram, job, config, others)
        self.is_ahead = False  # it is open_ahead()'s
        self._engine = None
        self._constructs_in = None  # the thread
        self._is_built = False

    def __enter__(self):
        global _constructed_in_memory
        if is_disabled():
            _constructed_in_memory = self.options
            return self
        if jobs.constructed is not None:
            jobs.constructed._make_way()
        self._engine = _open_engine(self.options)
        self._engine.begin_construction()
        jobs.constructed = self
        self._constructs_in = threading.get_ident()
        served.install()
        safetensors_files.install()
        return self

    def __exit__(self, failure, *_):
        global _constructed_in_memory
        if failure is not None:
            _constructed_in_memory = {}
        self._constructs_in = None
        if self._engine is None:
            return
        self._engine.end_construction()
        self._is_built = failure is None
        if failure is not None:
            jobs.constructed = None
            self.take().close()

    def _make_way(self):
        """For another init(): a cell of a notebook builds its model again, before anything has attached it. OFD-1002 where that is still there."""
        if not self._is_built:
            raise Error.of(1002, "init() inside another init(), or a second one before attach()", "Build all models of a job in one init()")
        gc.collect()
        if _has_tensors(gc.get_objects()):
            raise Error.of(1002, "a second init() before attach(), and the model that was built in the first one is still there",
                           "Build all models of a job in one init(); to build one anew, drop it first (del model)")
        jobs.constructed = None
        self.take().close()

    def leave_if_empty(self, before):
        """After it: closes the job where nothing was built in it, when `before` is what managed_tensors() gave in front of it. Whether it has."""
        known = {number for number, each in before.items() if each() is not None}
        if managed_tensors().keys() - known:
            return False
        jobs.constructed = None
        self.take().close()
        return True

    def take(self):
        engine, self._engine = self._engine, None
        return engine


@contextlib.contextmanager
def _in_ordinary_memory():
    """In an init(): new tensors are ordinary ones."""
    opened = jobs.constructed
    if opened is None or opened._engine is None or opened._constructs_in != threading.get_ident():
        yield False
        return
    opened._engine.end_construction()
    constructs_in, opened._constructs_in = opened._constructs_in, None  # what is loaded may load something itself
    try:
        yield True
    finally:
        if opened._engine is not None:
            opened._engine.begin_construction()
            opened._constructs_in = constructs_in


served.ordinary_memory = _in_ordinary_memory
