"""Where a run of Lightning is: kept in the job with every step, and where fit() goes on that is given no checkpoint.

Kept is what Lightning's own checkpoints have beside weights and what optimizers keep, the random numbers of the step, and those of which the order
of the epoch's data was made. The loops are kept as they were before the batch that took the step. A run that goes on fetches that batch once more, and has
Lightning do all of it but what led to the step: what was due after it (schedulers, callbacks, an evaluation, a checkpoint) is done as in a run that
was not stopped. With manual optimization training_step() is called again, and the steps that the job has are left out.
"""

import functools
import importlib
import logging
import pickle
import sys
import warnings
import weakref

import torch

from . import jobs, lightning_kept
from .lightning_kept import Beside
from .optimizer import loss_of, put_step
from .position import random_state, set_random_state

_log = logging.getLogger("offloadd")
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_KEPT_BYTES_MAX = 900_000  # of all ranks, beside buffers, in a step's state of the trainer
_SMALL_BYTES = 1 << 16  # of what training_step() has given beside the loss


def _is_among(optimizer, others):
    return any(optimizer is each for each in others)


def _optimizers_of(trainer):
    """Without that which stands for none."""
    return [each for each in trainer.optimizers if type(each).__name__ != "_MockOptimizer"]


def _handles_of(trainer):
    """The jobs that train with optimizers of this fit(), or with the module where that steps others by itself."""
    if optimizers := _optimizers_of(trainer):
        return [handle for handle in jobs.handles() if any(_is_among(each, optimizers) for each in handle.optimizers)]
    modules = set(map(id, trainer.lightning_module.modules()))
    return [handle for handle in jobs.handles() if any(id(model) in modules for model in handle.models)]


def _is_tried(trainer):
    """Whether this fit() is one of a search (for a rate, a size of batches), or a dry run."""
    return trainer.fast_dev_run or type(trainer.logger).__name__ == "DummyLogger"


def tell_where_it_begins(handle, ranks=None):
    """Lightning, which has no checkpoint, in a job that has steps. `ranks`: how many the run before had, where it could go on with as many only."""
    if ranks not in (None, handle.world_size):
        _log.warning("offloadd: the last run of job %s was one of %d ranks, and this is one of %d: where it was in its data is known for as many ranks only",
                     handle.job, ranks, handle.world_size)
    _log.warning("offloadd: job %s is at step %d, and Lightning begins at its first one, with no checkpoint: it takes all of its steps once more, on what "
                 "the job has. To go on where the run before was, give fit() the last checkpoint, ckpt_path=…; to begin anew name another job, or remove "
                 "this one, offloadctl rm %s %s --yes", handle.job, handle.step, handle.nvme_path, handle.job)


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
    loader), and before the "first" batch of the epoch, and how many batches of the epoch are not of this iterator ("before"); of several loaders also those
    before a batch in which a shorter one has begun once more ("cycles")."""

    def __init__(self, trainer, call):
        self._of, self._call = weakref.ref(trainer), call
        self._handle, self._kept, self._buffers = None, None, []
        self._beside, self._number = None, 0  # of the job; which fit() this is of those with it
        self.is_replaying, self._versions_before = False, {}
        self._data, self._packed_data, self._is_first = {}, None, False
        self._loops, self._begun_at, self._numbers = None, 0, None  # of the batch
        self._fetcher, self._iterators = None, []  # in front of it
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
        if self._is_first:
            self._is_first = False
            self._note_data(first=random_state(), cycles={})
        if self._handle is not None:
            self._loops, self._begun_at = self._trainer.fit_loop.state_dict(), self._handle.step
            self._iterators = _iterators_of(fetcher)
            is_drawn_from = (not self._trainer.lightning_module.automatic_optimization or fetcher.length is None  # which fetches one batch ahead
                             or len(self._iterators) > 1)
            self._fetcher, self._numbers = fetcher, random_state() if is_drawn_from else None

    def _note_cycle(self):
        """Once the batch is fetched."""
        if len(self._iterators) > 1 and any(now is not before for now, before in zip(_iterators_of(self._fetcher), self._iterators)):
            number = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1 - self._data["before"]
            self._note_data(cycles={**self._data["cycles"], number: self._numbers})
        self._iterators = []

    def end_batch(self):
        if self._loops is not None:
            self._note_cycle()
            if self._handle.is_open:
                self._usual = self._handle.step - self._begun_at or self._usual
        self._loops, self.closure = None, None

    def _keep(self):
        handle = self._handle
        if self._loops is None:  # not a step of fit()
            return
        if handle.trainer_state != self._kept_last:  # the script has a state of its own
            handle.at_steps = None
            return
        self._note_cycle()
        limit, why = _KEPT_BYTES_MAX // handle.world_size, "too much to be kept with every step"
        try:
            self._check_data()
            now = self._now()
            packed = self._packed(now) if lightning_kept.size_of(now) <= limit else b""
        except Exception as error:  # of what callbacks and data of the program's own keep
            packed, why = b"", f"not to be kept ({error})"
        if not 0 < len(packed) <= limit:
            packed, handle.at_steps = b"", None
            _log.warning("offloadd: what Lightning's callbacks, schedulers and data keep is %s: a run that goes on in job %s needs a checkpoint, "
                         "fit(ckpt_path=…)", why, handle.job)
        handle.trainer_state = self._kept_last = packed

    def _check_data(self):
        """Loaders with a state go on at it, the others' batches are fetched again, and all of them at once."""
        have = set(map(_has_state, self._trainer.fit_loop._combined_loader.flattened))
        if len(have) > 1:
            raise ValueError("only some of the data's loaders have a state_dict()")

    def _packed(self, now):
        handle, is_automatic = self._handle, self._trainer.lightning_module.automatic_optimization
        if self._packed_data is None:
            self._packed_data = lightning_kept.bytes_of(self._data)
        return lightning_kept.marked({"number": self._number, "ranks": handle.world_size, "job_step": handle.step + 1, "steps": handle.step + 1 - self._begun_at,
                                      "usual": self._usual or len(handle.optimizers), "is_automatic": is_automatic, "data": self._packed_data,
                                      "numbers": self._numbers, "random": random_state(), "loops": self._loops,
                                      "outputs": self._outputs() if is_automatic else None, **now})

    def _now(self):
        """As it is after the backward pass, and before the step."""
        trainer = self._trainer
        return {"callbacks": self._call._call_callbacks_state_dict(trainer),
                "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
                "groups": list(map(lightning_kept.options_of, trainer.optimizers)), "precision": trainer.precision_plugin.state_dict(),
                "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else None,
                "metrics": lightning_kept.metrics_of(trainer), "beside": self._beside.changed(),
                "evaluated_at": trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch}

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
        found = _handles_of(trainer)
        begun = [each for each in found if each.step == each.begun_at > 0]  # else it trains on in this process, as in memory
        if trainer._checkpoint_connector._loaded_checkpoint:
            begun = []
        if _is_tried(trainer) or len(found) != 1 or not all(_is_among(each, found[0].optimizers) for each in _optimizers_of(trainer)):
            for each in begun:
                tell_where_it_begins(each)
            return
        handle = self._handle = found[0]
        self._beside = Beside(trainer.lightning_module, handle)
        self._number = _fits[handle] = _fits.get(handle, 0) + 1
        kept = lightning_kept.kept_in(handle.trainer_state)
        if kept is not None or not handle.trainer_state:
            handle.at_steps, self._kept_last = self._keep, handle.trainer_state
        has_no_step_of_this = not begun or (kept is not None and kept["number"] < self._number)
        goes_on = kept is not None and (kept["job_step"], kept["number"], kept.get("ranks", 1)) == (handle.step, self._number, handle.world_size)
        if trainer.world_size > 1:  # they all go on, or none does
            has_no_step_of_this = trainer.strategy.reduce_boolean_decision(has_no_step_of_this)
            goes_on = trainer.strategy.reduce_boolean_decision(goes_on)
        if has_no_step_of_this:
            return
        if not goes_on:
            tell_where_it_begins(handle, kept and kept.get("ranks", 1))
            return
        _log.warning("offloadd: continuing at step %d, where job %s is; no checkpoint is read", handle.step, handle.job)
        if kept["steps"] < kept["usual"]:
            _log.warning("offloadd: the run before was stopped between the steps of a batch. training_step() goes on behind step %d of it: what it has "
                         "computed in front of that, and what a further step of the batch makes use of, it computes with the weights that are there now",
                         kept["steps"])
        self._kept, self._data = kept, lightning_kept.data_of(kept["data"])
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
            lightning_kept.give_options(optimizer, groups)
        self._beside.give(kept["beside"])

    def _take_step(self):
        """All is as it was before the step, and is going to be."""
        trainer, kept = self._trainer, self._kept
        self._tell_of_writes()
        self._load()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        lightning_kept.give_metrics(trainer, kept["metrics"])
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and kept["is_automatic"]:
            lightning_kept.count_step(scaler)
        set_random_state(kept["random"])

    def _versions(self):
        return {name: parameter._version for name, parameter in self._trainer.lightning_module.named_parameters() if not parameter.is_inference()}

    def _tell_of_writes(self):
        """The job has what was written in front of the step."""
        written = [name for name, version in self._versions().items() if self._versions_before.get(name, version) != version]
        if written:
            _log.warning("offloadd: what the program writes into parameters in front of a step (on_train_batch_start(), or training_step() with manual "
                         "optimization) was written once more in front of step %d of job %s, which has it: %s. A run that was not stopped has written it once",
                         self._handle.step, self._handle.job, ", ".join(written[:3]) + (f" and {len(written) - 3} more" if len(written) > 3 else ""))

    def make_loader(self, loop, make):
        """The loop's setup_data(), where it makes one."""
        if not self.goes_on:
            self._note_data(made=random_state(), begun=None, made_at=self._trainer.current_epoch)
            make()
        else:
            set_random_state(self._data["made"])
            make()
            loop._last_train_dl_reload_epoch = self._data["made_at"]

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
        loop.val_loop._last_val_dl_reload_epoch = self._kept["evaluated_at"]
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
        for number in range(loop.batch_progress.current.ready - self._data["before"]):
            if number in self._data["cycles"]:
                set_random_state(self._data["cycles"][number])
            next(fetcher)
        fetcher.fetched += self._data["before"]

    def replay(self, loop, advance):
        """The batch that took the step, without what led to it."""
        kept, plugin, automatic = self._kept, self._trainer.precision_plugin, loop.automatic_optimization
        self._begun_at, self._loops, self._numbers = self._handle.step - kept["steps"], kept["loops"], kept["numbers"]
        left = _LeavesOut(self._handle.optimizers, kept["steps"], self._take_step)
        self.is_replaying, self._versions_before = True, self._versions()
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


def _iterators_of(fetcher):
    """Of the loaders, as they are now."""
    return list(getattr(getattr(fetcher.iterator, "_iterator", None), "iterators", ()))


def _has_state(loader):
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


# ---- In Lightning ----

_runs = weakref.WeakKeyDictionary()  # of Trainers, the last fit() of each
_fits = weakref.WeakKeyDictionary()  # of handles, how many fit() have trained their jobs
_served = []


def is_served(trainer, handle):
    """Whether fit() of this Trainer has yet to ask where it goes on: it has no optimizers of the job."""
    return any(type(trainer).__module__.startswith(each) for each in _served) and not any(_is_among(each, trainer.optimizers) for each in handle.optimizers)


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
                         (fit_loop, ("setup_data", "on_advance_start", "_should_reload_train_dl", "is_resuming", "restarted_mid_epoch")),
                         (epoch_loop, ("on_run_start", "reset", "advance", "reset_restart_stage")),
                         (optimization, ("_make_closure",)), (automatic, ("Closure",))):
        for name in names:
            getattr(owner, name)

    def call_hooks(original):
        def hooks(trainer, hook_name, *args, **kwargs):
            # DeepSpeed's strategies go on at checkpoints of its engine.
            if hook_name == "on_fit_start" and original.__name__ == "_call_callback_hooks" and type(trainer.strategy).__name__ != "DeepSpeedStrategy":
                _runs[trainer] = _Run(trainer, call)
                _runs[trainer].begin()
            run = _runs.get(trainer)
            told = original(trainer, hook_name, *args, **kwargs)
            is_left_out = hook_name == "on_train_batch_start" and run is not None and run.is_replaying
            return None if is_left_out else told  # that the epoch ends: it took its step

        return hooks

    def set_up(original):
        def setup_data(loop):
            run = _runs.get(loop.trainer)
            if run is not None and (loop._combined_loader is None or loop._should_reload_train_dl):
                return run.make_loader(loop, lambda: original(loop))
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
            if run is None or not run.goes_on:
                return original(loop)
            with warnings.catch_warnings():
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
