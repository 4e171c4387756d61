"""Where a run of Lightning is: kept in the job with every step, and where fit() goes on that is given no checkpoint.

Kept is what Lightning's own checkpoints have beside weights and what optimizers keep, the random numbers of the step, and those of which the order
of the epoch's data was made. The loops are kept as they were before the batch that took the step. A run that goes on fetches that batch once more, and has
Lightning do all of it but what led to the step: what was due after it (schedulers, callbacks, an evaluation, a checkpoint) is done as in a run that
was not stopped. With manual optimization training_step() is called again, and the steps that the job has are left out.
"""

import functools
import importlib
import io
import logging
import pickle
import sys
import warnings
import weakref

import torch

from . import jobs
from .optimizer import loss_of, put_step
from .position import random_state, set_random_state

_log = logging.getLogger("offloadd")
_MAGIC = "offloadd.Lightning"
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_KEPT_BYTES_MAX = 900_000  # of all ranks, beside buffers, in a step's state of the trainer
_SMALL_BYTES = 1 << 16  # of what training_step() has given beside the loss
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def _bytes_of(data):
    file = io.BytesIO()
    torch.save(data, file)
    return file.getvalue()


def _kept_in(data):
    """What was kept in a job; None for a state of the script's own."""
    try:
        kept = torch.load(io.BytesIO(data), weights_only=False)  # our own, of this user's job
    except Exception:
        return None
    return kept if isinstance(kept, dict) and kept.get("magic") == _MAGIC else None


def _handle_of(trainer):
    """The one job that has modules of what is trained."""
    modules = {id(module) for module in trainer.lightning_module.modules()}
    handles = [handle for handle in jobs.handles() if handle.is_open and any(id(model) in modules for model in handle.models if model is not None)]
    return handles[0] if len(handles) == 1 else None


def _is_tried(trainer):
    """Whether this fit() is one of a search (for a rate, a size of batches), or a dry run."""
    return trainer.fast_dev_run or type(trainer.logger).__name__ == "DummyLogger"


def _detached(outputs):
    return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in outputs.items()}


def tell_where_it_begins(handle):
    """Lightning, which has no checkpoint, in a job that has steps."""
    _log.warning("offloadd: job %s is at step %d, and Lightning begins at its first one, with no checkpoint: it takes all of its steps once more, on what "
                 "the job has. To go on where the run before was, give fit() the last checkpoint, ckpt_path=…; to begin anew name another job, or remove "
                 "this one, offloadctl rm %s %s --yes", handle.job, handle.step, handle.nvme_path, handle.job)


_OF_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx", "metric_attribute")
_OF_LOGGED = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")


def _small(value):
    return value.detach() if isinstance(value, torch.Tensor) else value


def _logged_in(results):
    """What self.log() was given in this epoch: of each its options, and what it has come to."""
    rows = []
    for key, logged in results.items():
        meta, sync = logged.meta, logged.meta.sync
        if sync.group is None:
            rows.append({"key": key, "meta": {name: getattr(meta, name) for name in _OF_META}, "reduce": meta.reduce_fx.__name__,
                         "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only, "_op": sync.op}, "is_tensor": logged.is_tensor,
                         "state": {name: _small(vars(logged)[name]) for name in _OF_LOGGED if name in vars(logged)} if logged.is_tensor else {}})
    return rows


def _log_again(trainer, rows):
    results = trainer.fit_loop.epoch_loop._results
    made = sys.modules[type(results).__module__]
    metrics = {name: module for name, module in trainer.lightning_module.named_modules() if hasattr(module, "_update_count")}
    for row in rows:
        meta = made._Metadata(**row["meta"], reduce_fx=getattr(torch, row["reduce"]))
        meta.sync = made._Sync(fn=trainer.strategy.reduce, **row["sync"])
        logged = made._ResultMetric(meta, row["is_tensor"])
        vars(logged).update(row["state"])
        if not row["is_tensor"]:
            if meta.metric_attribute not in metrics:
                continue
            logged.value = metrics[meta.metric_attribute]
        results[row["key"]] = logged


def _measured_by(model):
    """What metrics of the module (of torchmetrics) have come to."""
    measured = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "_defaults", None), dict) and hasattr(module, "_update_count"):
            measured[name] = {"_update_count": module._update_count, **{key: _small(getattr(module, key)) for key in module._defaults}}
    return measured


def _measure_again(model, measured):
    modules = dict(model.named_modules())
    for name, values in measured.items():
        for key, value in values.items() if name in modules else ():
            setattr(modules[name], key, value)


def _count_step(scaler):
    """As its update() after a step that was taken."""
    state = scaler.state_dict()
    if state:
        state["_growth_tracker"] += 1
        if state["_growth_tracker"] == state["growth_interval"]:
            state["scale"], state["_growth_tracker"] = state["scale"] * state["growth_factor"], 0
        scaler.load_state_dict(state)


class _LeavesOut:
    """step() of a job's optimizers until `count` of them are left out; `then` is called in the last one."""

    def __init__(self, optimizers, count, then):
        self._formers, self.count, self._then = [(optimizer, optimizer.__dict__.get("step")) for optimizer in optimizers], count, then
        for optimizer in optimizers:
            put_step(optimizer, self._step_of(optimizer))

    def _step_of(self, optimizer):
        def step(closure=None):
            return self.leave_out(optimizer, loss_of(closure))

        return step

    def leave_out(self, optimizer, loss=None):
        optimizer._opt_called = True  # what torch's schedulers look for
        self.count -= 1
        if self.count == 0:
            self.end()
            self._then()
        return loss

    def end(self):
        for optimizer, former in self._formers:
            if former is None:
                optimizer.__dict__.pop("step", None)
            else:
                optimizer.step = former
        self._formers = []


class _Run:
    """One fit() of a Trainer. What is kept of its data are the random numbers when the loader was "made", when its iterator has "begun" (None: with the
    loader), and before the "first" batch of the epoch, and how many batches of the epoch are not of this iterator ("before")."""

    def __init__(self, trainer, call):
        self._of, self._call = weakref.ref(trainer), call
        self._handle, self._kept, self._buffers = None, None, []
        self.is_replaying = False
        self._data, self._packed_data, self._is_first = {}, None, False
        self.is_in_batch = False
        self._loops, self._begun_at, self._numbers = None, 0, None  # of the batch
        self._kept_last = b""
        self._usual = 0  # steps that the batch before has taken
        self.closure = None  # of the batch, with automatic optimization

    @property
    def _trainer(self):
        return self._of()

    # ---- At every step ----

    def _note_data(self, **numbers):
        self._data.update(numbers)
        self._packed_data = None

    def begin_batch(self, fetcher):
        self.is_in_batch = True
        if self._is_first:
            self._is_first = False
            self._note_data(first=random_state())
        if self._handle is not None:
            self._loops, self._begun_at = self._trainer.fit_loop.state_dict(), self._handle.step
            is_drawn_from = not self._trainer.lightning_module.automatic_optimization or fetcher.length is None  # which fetches one batch ahead
            self._numbers = random_state() if is_drawn_from else None

    def end_batch(self):
        if self._loops is not None and self._handle.is_open:
            self._usual = self._handle.step - self._begun_at or self._usual
        self._loops, self.closure, self.is_in_batch = None, None, False

    def _keep(self):
        handle = self._handle
        if self._loops is None:  # not a step of fit()
            return
        if handle.trainer_state != self._kept_last:  # the script has a state of its own
            handle.at_steps = None
            return
        try:
            packed, why = self._packed(), "too much to be kept with every step"
        except Exception as error:  # of what callbacks and data of the program's own keep
            packed, why = b"", f"not to be kept ({error})"
        if not 0 < len(packed) <= _KEPT_BYTES_MAX // handle.world_size:
            packed, handle.at_steps = b"", None
            _log.warning("offloadd: what Lightning's callbacks, schedulers and data keep is %s: a run that goes on in job %s needs a checkpoint, "
                         "fit(ckpt_path=…)", why, handle.job)
        handle.trainer_state = self._kept_last = packed

    def _packed(self):
        handle, is_automatic = self._handle, self._trainer.lightning_module.automatic_optimization
        if self._packed_data is None:
            self._packed_data = _bytes_of(self._data)
        return _bytes_of({"magic": _MAGIC, "job_step": handle.step + 1, "steps": handle.step + 1 - self._begun_at,
                          "usual": self._usual or len(handle.optimizers), "is_automatic": is_automatic,
                          "data": self._packed_data, "numbers": self._numbers, "loops": self._loops, **self._now(),
                          "outputs": self._outputs() if is_automatic else None})

    def _now(self):
        """As it is after the backward pass, and before the step."""
        trainer, kinds = self._trainer, (bool, int, float, str, tuple, type(None))
        return {"random": random_state(), "callbacks": self._call._call_callbacks_state_dict(trainer),
                "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
                "groups": [[{key: value for key, value in group.items() if isinstance(value, kinds)} for group in optimizer.param_groups]
                           for optimizer in trainer.optimizers],
                "precision": trainer.precision_plugin.state_dict(),
                "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else None,
                "metrics": {name: dict(getattr(trainer._logger_connector, name, {})) for name in _METRICS},
                "logged": _logged_in(trainer.fit_loop.epoch_loop._results), "measured": _measured_by(trainer.lightning_module)}

    def _outputs(self):
        """What training_step() has given, which callbacks are told at the end of the batch."""
        result = getattr(self.closure, "_result", None)
        if result is None or result.closure_loss is None:
            return None
        extra = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in result.extra.items()}
        try:
            packed = pickle.dumps(extra)
        except Exception:
            packed = b""
        return result.closure_loss.detach(), packed if 0 < len(packed) <= _SMALL_BYTES else pickle.dumps({})

    # ---- Where it goes on ----

    @property
    def goes_on(self):
        return self._kept is not None

    def begin(self):
        """Before on_fit_start: the optimizers are there."""
        trainer = self._trainer
        handle = _handle_of(trainer)
        if handle is None:
            return
        is_begun = handle.step > 0 and not trainer._checkpoint_connector._loaded_checkpoint
        if _is_tried(trainer):
            if is_begun:
                tell_where_it_begins(handle)
            return
        self._handle = handle
        kept = _kept_in(handle.trainer_state)
        if kept is not None or not handle.trainer_state:
            handle.at_steps, self._kept_last = self._keep, handle.trainer_state
        if kept is not None and kept["job_step"] != handle.step:
            kept = None
        if not is_begun:
            return
        if kept is None:
            tell_where_it_begins(handle)
            return
        _log.warning("offloadd: continuing at step %d, where job %s is; no checkpoint is read", handle.step, handle.job)
        if kept["steps"] < kept["usual"]:
            _log.warning("offloadd: the run before was stopped between the steps of a batch. training_step() goes on behind step %d of it: what it has computed "
                         "in front of that, and what a further step of the batch makes use of, it computes with the weights that are there now", kept["steps"])
        self._kept = kept
        self._data = torch.load(io.BytesIO(kept["data"]), weights_only=False)
        self._buffers = [(buffer, buffer.clone()) for model in handle.models if model is not None for buffer in model.buffers()]
        self._load()
        trainer.fit_loop.load_state_dict(kept["loops"])

    def _load(self):
        trainer, kept = self._trainer, self._kept
        self._call._call_callbacks_load_state_dict(trainer, {"callbacks": kept["callbacks"]})
        if kept["datamodule"]:
            trainer.datamodule.load_state_dict(kept["datamodule"])
        if kept["precision"]:
            trainer.precision_plugin.load_state_dict(kept["precision"])
        for config, state in zip(trainer.lr_scheduler_configs, kept["schedulers"]):
            config.scheduler.load_state_dict(state)
        for optimizer, groups in zip(trainer.optimizers, kept["groups"]):
            for group, options in zip(optimizer.param_groups, groups):
                group.update(options)

    def _take_step(self):
        """All is as it was before the step, and is going to be."""
        trainer, kept = self._trainer, self._kept
        self._load()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for name, values in kept["metrics"].items():
            getattr(trainer._logger_connector, name).update(values)
        _log_again(trainer, kept["logged"])
        _measure_again(trainer.lightning_module, kept["measured"])
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and kept["is_automatic"]:
            _count_step(scaler)
        set_random_state(kept["random"])

    def before_loader(self):
        if not self.goes_on:
            self._note_data(made=random_state(), begun=None)
        elif "made" in self._data:
            set_random_state(self._data["made"])

    def begin_epoch(self, loop, fetcher, begin):
        """The loop's on_run_start()."""
        if type(fetcher).__name__ == "_DataLoaderIterDataFetcher" and self._handle is not None:  # training_step() takes batches itself
            self._handle.at_steps = self._handle = None
        if not self.goes_on:
            if self._trainer.current_epoch > 0 and not self._trainer.fit_loop.is_resuming and not loop.restarting:
                self._note_data(begun=random_state())
            begin()
            self._note_data(before=loop.batch_progress.current.ready)
            self._is_first = True
            return
        fetched = fetcher.fetched
        begin()
        loop.restarting = False
        loop.reset_restart_stage()
        loop.val_loop.reset_restart_stage()
        loaders = self._trainer.fit_loop._combined_loader.flattened
        if not all(map(_has_state, loaders)):
            self._fetch_again(loop, fetcher, fetched)
        if self._trainer.current_epoch > 0 and any(getattr(each, "persistent_workers", False) for each in loaders):
            _log.warning("offloadd: random numbers that the data draw in processes which are kept from epoch to epoch (persistent_workers) begin anew, and are "
                         "not those of a run that was not stopped. Without it, or with numbers that follow from the index, they are")

    def _fetch_again(self, loop, fetcher, fetched):
        """The epoch's batches before the one that took the step."""
        if self._data.get("begun") is not None:
            set_random_state(self._data["begun"])
            iter(fetcher)
            fetched = fetcher.fetched
        fetcher.fetched = fetched
        set_random_state(self._data["first"])
        for _ in range(loop.batch_progress.current.ready - self._data["before"]):
            next(fetcher)
        fetcher.fetched += self._data["before"]

    def replay(self, loop, advance):
        """The batch that took the step, without what led to it."""
        kept, plugin, automatic = self._kept, self._trainer.precision_plugin, loop.automatic_optimization
        self._begun_at, self._loops, self._numbers = self._handle.step - kept["steps"], kept["loops"], kept["numbers"]
        left = _LeavesOut(self._handle.optimizers, kept["steps"], self._take_step)
        self.is_replaying = True
        try:
            if kept["is_automatic"]:
                automatic._make_closure = lambda *_: self._closure_again(automatic)
                plugin.optimizer_step = lambda optimizer, *_, **__: left.leave_out(optimizer)
            if kept["numbers"] is not None:
                set_random_state(kept["numbers"])
            advance()
        finally:
            left.end()
            automatic.__dict__.pop("_make_closure", None)
            plugin.__dict__.pop("optimizer_step", None)
            self.is_replaying, self._kept, self._buffers = False, None, []

    def _closure_again(self, automatic):
        """It computes nothing."""
        loss, extra = self._kept["outputs"] or (None, pickle.dumps({}))
        result = automatic.output_result_cls(loss, extra=pickle.loads(extra))
        closure = sys.modules[type(automatic).__module__].Closure(lambda: result)
        closure._result = result
        return closure

def _has_state(loader):
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


# ---- In Lightning ----

_runs = weakref.WeakKeyDictionary()


def is_served(trainer):
    """Whether fit() of this Trainer has yet to ask where it goes on."""
    run = _runs.get(trainer)
    return (run is None or not run.is_in_batch) and any(type(trainer).__module__.startswith(each) for each in _served)


_served = []


def _put(owner, name, make):
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def serve():
    """Once for each of the packages that are there."""
    for package in _PACKAGES:
        if package in sys.modules and package not in _served:
            try:
                _serve(package)
            except (ImportError, AttributeError):  # of another release
                continue
            _served.append(package)


def _serve(package):
    call, fit, epoch, automatic = (importlib.import_module(f"{package}.{name}") for name in
                                   ("trainer.call", "loops.fit_loop", "loops.training_epoch_loop", "loops.optimization.automatic"))
    fit_loop, epoch_loop, optimization = fit._FitLoop, epoch._TrainingEpochLoop, automatic._AutomaticOptimization
    for owner, names in ((call, ("_call_callback_hooks", "_call_lightning_module_hook", "_call_callbacks_state_dict", "_call_callbacks_load_state_dict")),
                         (fit_loop, ("setup_data", "on_advance_start", "_should_reload_train_dl")), (epoch_loop, ("on_run_start", "reset", "advance")),
                         (optimization, ("_make_closure",)), (automatic, ("Closure",))):
        for name in names:
            getattr(owner, name)

    def call_hooks(original):
        def hooks(trainer, hook_name, *args, **kwargs):
            if hook_name == "on_fit_start" and original.__name__ == "_call_callback_hooks":
                _runs[trainer] = _Run(trainer, call)
                _runs[trainer].begin()
            run = _runs.get(trainer)
            if hook_name == "on_train_batch_start" and run is not None and run.is_replaying:
                return None  # what they keep is as it was after it
            return original(trainer, hook_name, *args, **kwargs)

        return hooks

    def set_up(original):
        def setup_data(loop):
            run = _runs.get(loop.trainer)
            if run is not None and (loop._combined_loader is None or loop._should_reload_train_dl):
                run.before_loader()
            return original(loop)

        return setup_data

    def begin_fit_epoch(original):
        def on_advance_start(loop):
            run = _runs.get(loop.trainer)
            if run is None or not run.goes_on:
                return original(loop)
            leaves_out = loop.restarted_mid_epoch
            original(loop)
            if leaves_out:  # Lightning, in the middle of an epoch
                call._call_callback_hooks(loop.trainer, "on_train_epoch_start")
                call._call_lightning_module_hook(loop.trainer, "on_train_epoch_start")
            loop._restarting = False  # nothing is left out at the epoch's end

        return on_advance_start

    def reset(original):
        def reset_quietly(loop):
            run = _runs.get(loop.trainer)
            with warnings.catch_warnings():
                if run is not None and run.goes_on:
                    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
                return original(loop)

        return reset_quietly

    def begin_epoch(original):
        def on_run_start(loop, fetcher):
            run = _runs.get(loop.trainer)
            return original(loop, fetcher) if run is None else run.begin_epoch(loop, fetcher, lambda: original(loop, fetcher))

        return on_run_start

    def advance(original):
        def advance_in_job(loop, fetcher):
            run = _runs.get(loop.trainer)
            if run is None:
                return original(loop, fetcher)
            try:
                if run.goes_on:
                    return run.replay(loop, lambda: original(loop, fetcher))
                run.begin_batch(fetcher)
                return original(loop, fetcher)
            finally:
                run.end_batch()

        return advance_in_job

    def make_closure(original):
        def remembered(loop, *args, **kwargs):
            closure = original(loop, *args, **kwargs)
            if (run := _runs.get(loop.trainer)) is not None:
                run.closure = closure
            return closure

        return remembered

    _put(call, "_call_callback_hooks", call_hooks)
    _put(call, "_call_lightning_module_hook", call_hooks)
    _put(fit_loop, "setup_data", set_up)
    _put(fit_loop, "on_advance_start", begin_fit_epoch)
    _put(epoch_loop, "reset", reset)
    _put(epoch_loop, "on_run_start", begin_epoch)
    _put(epoch_loop, "advance", advance)
    _put(optimization, "_make_closure", make_closure)
