"""Hugging Face's Trainer: `Trainer(..., callbacks=[offloadd.TrainerCallback(nvme_path=…, ram=…, job=…)])`.

The callback attaches when training begins: the optimizer is made, a checkpoint is loaded, nothing has been computed. A new job begins
with what Trainer has then, also with weights and moments of a checkpoint that was written in memory. A job that has steps already is
continued: with resume_from_checkpoint that names one at its step, which has to be the job's; without, at the job's last step, as if the
process had never ended: the callback keeps Trainer's own state, the scheduler's and the random numbers in the job.
"""

import contextlib
import fcntl
import functools
import glob
import io
import json
import logging
import os
import shutil
import tempfile
import time
import weakref

import torch
import transformers

from . import attaching, jobs, position, unfinished
from .beginning import Beginning
from .errors import Error
from .given import give_back, give_masters
from .library import is_disabled
from .log_history import LogHistory, unpack
from .named_tensors import names_of
from .optimizer import has_stepped
from .options import OPTIONS, job_of, reduces_gradients
from .recipes import is_narrow, recipe_of

_log = logging.getLogger("offloadd")
_MAGIC = "offloadd.TrainerCallback"
_FOLDER = "offloadd-trainer-"  # in the folder for temporary files
_LOCKED_WITHIN = 60.0  # seconds
_KEPT_BYTES_MAX = 900_000  # of all ranks, beside buffers, in a step's state of the trainer
_LOG_BYTES_MAX = 400_000  # of them, of all ranks: of the log, compressed


def _bytes_of(data):
    file = io.BytesIO()
    torch.save(data, file)
    return file.getvalue()


def _kept_in(data, job_step):
    """What the callback has kept in a job at that step; None for anything else."""
    if not data:
        return None
    kept = torch.load(io.BytesIO(data), weights_only=False)  # our own, of this user's job
    return kept if isinstance(kept, dict) and kept.get("magic") == _MAGIC and kept["job_step"] == job_step else None


def _steps_before(data, job_step):
    """How many steps Trainer had taken when the job began."""
    kept = _kept_in(data, job_step)
    return kept["step"] - kept["job_step"] if kept is not None else 0


def _moments_are(handle, optimizer, state):
    """Whether moments that a checkpoint has brought into memory are the job's: those of the smallest parameters are compared."""
    chosen = sorted((p for p in state if state[p]), key=lambda p: p.numel())[:4]
    part = optimizer._offload_part
    for parameter in chosen:
        for name in part.recipe.planes(part.recipe.values(optimizer.param_groups[0])):
            theirs = state[parameter].get(name)
            # Loading has rounded them to the type of the parameter.
            if isinstance(theirs, torch.Tensor) and not torch.equal(theirs.cpu(), handle.gather_one(parameter, name).to(theirs.dtype)):
                return False
    return True


class TrainerCallback(transformers.TrainerCallback):
    """`handle` is the job while training runs. Further arguments are those of offloadd.attach()."""

    def __init__(self, *, resume=True, **options):
        self.options, self.resume, self.handle = options, resume, None
        self._first_job, self._training = None, 1  # the job of the first train(), and how many have had one of their own
        self.begins_anew = False  # this train() has a job of its own, after another's
        self._has_begun = False  # this train()
        self._is_again = False  # the job is in a further train() with the optimizer that the one before had
        self.trainer = lambda: None  # while it trains
        self.checkpoint = None  # that it was told to resume from
        self.norm = None  # of the gradients, the last one
        self.position = None  # in the data
        self._scheduler = None
        self._step_hook = None  # in front of the step that is due
        self._log = LogHistory(_LOG_BYTES_MAX // int(os.environ.get("WORLD_SIZE", "1")))
        _patch_trainer()

    # ---- Trainer's events ----

    def on_init_end(self, args, state, control, model=None, **kwargs):
        # Where the daemon adds the gradients of several ranks nobody has to wrap the model in DistributedDataParallel.
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if model is not None and several and not is_disabled() and not reduces_gradients(self.options):
            model._is_accelerate_prepared = True

    def before_training(self, trainer):
        """A train() after another one, whose optimizer is a new one, trains on in a job of its own: run1-2 after run1 (anew.py)."""
        self._has_begun = False
        former, optimizer = self.handle, getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        is_new = trainer.model_init is not None or former is None or not any(each is optimizer for each in former.optimizers)
        self.begins_anew = is_new and former is not None and former.is_open and not is_disabled() and former.world_size == 1
        if self.begins_anew:
            kept = {key: value for key, value in self.options.items() if key == "unfreeze" or (key == "initial_weights" and trainer.model_init)}
            of_job = {key: value for key, value in former.options.items() if key in OPTIONS}
            self.options = {**kept, **of_job, "job": f"{self._first_job}-{self._training + 1}"}

    def on_train_begin(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        optimizer = getattr(optimizer, "optimizer", optimizer)
        is_retried, self._has_begun = self._has_begun, True  # with a smaller batch (auto_find_batch_size)
        self._scheduler = lr_scheduler
        if self.trainer() is not None:
            model = self.trainer().model  # SetFit gives another one, which is no module
        if self.handle is not None and self.handle.is_open:
            if any(each is optimizer for each in self.handle.optimizers):
                self._is_again = self._is_again or (state.global_step == 0 and not is_retried)
                return  # train() again
            if not self.begins_anew or not any(each is model for each in self.handle.models):
                self.handle.close()
        beginning = None if is_disabled() else attaching.beginning_of(model, self.options)
        brought = self._brought_by_checkpoint(model, state, beginning is not None)
        masters = give_back(optimizer)
        loaded = self._take_loaded(optimizer, beginning is not None)
        if not is_disabled() and recipe_of(optimizer).is_foreign:
            optimizer._offload_has_options = True  # those of the step that it goes on after
        self.handle = attaching.attach(model, optimizer, **self.options)
        if self.handle.step == 0:
            give_masters([optimizer], [masters])
        self.handle.has_trainer = True
        self._first_job = self._first_job or self.handle.job
        self._training, self.begins_anew, self._is_again = self._training + self.begins_anew, False, False
        if self.trainer() is not None and not is_disabled():
            unfinished.remember_norms(self.trainer(), self)
        if state.global_step > 0 == self.handle.step and not is_disabled():
            _log.warning("offloadd: job %s begins with the checkpoint of step %d%s", self.handle.job, state.global_step, _what_is_rounded(model, masters))
        try:
            if beginning is not None:
                self._begin_with(beginning, state, optimizer, loaded)
            else:
                self._check(state, optimizer, loaded)
                if brought is not None:
                    self._load_what_was_written(brought, model)
        except BaseException:
            self.handle.end()
            raise

    def _brought_by_checkpoint(self, model, state, has_begun):
        """The weights of a checkpoint that Trainer has loaded, where a job that has steps is to go on with them; else None."""
        if self.checkpoint is None or state.global_step == 0 or self.trainer() is None or has_begun or is_disabled():
            return None
        engine = attaching.open_ahead(self.options)[0]
        return Beginning(names_of([model])) if engine.step_count() > 0 and engine.world_size() == 1 else None

    def _load_what_was_written(self, brought, model):
        """What callbacks wrote into weights after the job's step is in the checkpoint, which was written after them, and not in the job."""
        name = brought.difference(self.handle)
        if name is not None:
            _log.warning("offloadd: job %s goes on with the weights of the checkpoint, in which '%s' was written after step %d%s", self.handle.job, name,
                         self.handle.step, _what_is_rounded(model))
            self.trainer()._load_from_checkpoint(self.checkpoint)

    def _begin_with(self, beginning, state, optimizer, loaded):
        """The job ended before its first step, with whatever it was made with: it begins with the checkpoint all the same."""
        trainer = self.trainer()
        if state.global_step == 0:
            return self._begin_anew(beginning, optimizer)
        if self.handle.world_size > 1:
            raise Error.of(1602, f"job {self.handle.job} ended before its first step, and a checkpoint is to be resumed in it by several ranks",
                           f"Remove it, offloadctl rm {self.handle.nvme_path} {self.handle.job} --yes: a new job begins with the checkpoint")
        if trainer is not None and self.checkpoint is not None and beginning.difference(self.handle) is not None:
            trainer._load_from_checkpoint(self.checkpoint)
        beginning.check(self.handle, "the checkpoint")
        if not optimizer._offload_part.is_foreign:
            optimizer._offload_part.replace(loaded)

    def _begin_anew(self, beginning, optimizer):
        """Without a checkpoint the job's own weights are what it begins with, unless they came with a checkpoint."""
        handle = self.handle
        if any(handle.update_count(p) for group in optimizer.param_groups for p in group["params"]):
            raise Error.of(1602, f"job {handle.job} was made with a checkpoint and ended before its first step, the Trainer has none",
                           f"Resume from a checkpoint, or remove the job: offloadctl rm {handle.nvme_path} {handle.job} --yes")
        if (name := beginning.difference(handle)) is not None:
            _log.warning("offloadd: job %s ended before its first step: it begins with the weights that it was made with, and '%s' has "
                         "others in the model", handle.job, name)

    def _take_loaded(self, optimizer, has_begun):
        """What a checkpoint has brought into the optimizer, out of it where the job has its own; a new job begins with it."""
        if is_disabled() or recipe_of(optimizer).is_foreign or not has_stepped(optimizer):
            return {}
        if attaching.open_ahead(self.options)[0].step_count() == 0 and not has_begun:
            return {}
        loaded = dict(optimizer.state)
        optimizer.state.clear()
        return loaded

    def _check(self, state, optimizer, loaded):
        handle = self.handle
        if is_disabled():
            return
        job_step = handle.step + _steps_before(handle.trainer_state, handle.step)  # as Trainer counts
        if handle.step > 0 and job_step != state.global_step:
            fix = "Leave resume_from_checkpoint out: the job continues at its last step by itself; or name a new job, which begins with the " \
                "checkpoint" if state.global_step else "Name a new job to begin anew, or leave resume=False out to continue this one"
            raise Error.of(1602, f"the job {handle.job} is at step {job_step}, the Trainer at step {state.global_step}", fix)
        if loaded and not _moments_are(handle, optimizer, loaded):
            raise Error.of(1602, f"the moments of the checkpoint are not those of job {handle.job}, although both are at step {handle.step}",
                           "Resume the job that the checkpoint was written by")

    def on_epoch_begin(self, args, state, control, **kwargs):
        if self.position is not None:
            self.position.begin_epoch()

    def _count_batch(self):
        if self.position is not None:
            self.position.batches += 1

    def on_substep_end(self, args, state, control, **kwargs):
        self._count_batch()

    def on_step_end(self, args, state, control, **kwargs):
        self._stop_waiting()
        self._count_batch()

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, train_dataloader=None, **kwargs):
        """What is needed to go on after this step travels with it: as it is when all callbacks have been told, of which some may change it."""
        if self.handle is None or is_disabled():
            return

        its = getattr(optimizer, "optimizer", optimizer)
        if getattr(its, "_offload_part", None) is not None and its._offload_part.is_foreign:  # its step may change options, and draw random numbers
            self.handle.before_commit = lambda: self._keep(state, train_dataloader)
            return

        def keep(*_):
            if pending:
                self._keep(*pending.pop())

        pending = [(state, train_dataloader)]
        self._stop_waiting()  # for a step that was not taken: gradients of fp16 that overflow, an interrupt
        self._step_hook = its.register_step_pre_hook(keep)

    def _stop_waiting(self):
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None

    def _keep(self, state, train_dataloader):
        steps = {"magic": _MAGIC, "step": state.global_step + 1, "job_step": self.handle.step + 1, "is_again": self._is_again}
        if self.position is not None:
            steps["position"] = self.position.after_this(train_dataloader, self.trainer())
        loop = unfinished.loop_of(self.trainer(), self.norm)
        kept = _bytes_of({**steps, "random": position.random_state(), "epoch": state.epoch, "scheduler": self._scheduler_state(),
                          "groups": self._groups(), "trainer": self._trainer_state(state, loop), "log": self._log.pack(state.log_history), "loop": loop})
        self.handle.trainer_state = kept if len(kept) <= _KEPT_BYTES_MAX // self.handle.world_size else _bytes_of(steps)

    def _scheduler_state(self):
        """The scheduler's, which will step once more after the optimizer, or with what an evaluation gives."""
        return self._scheduler.state_dict() if self._scheduler is not None else None

    def _groups(self):
        """Options of the optimizer, which callbacks may change."""
        kept = (bool, int, float, str, tuple, type(None))
        return [{key: value for key, value in group.items() if isinstance(value, kept)} for group in self.handle.optimizer.param_groups]

    def _trainer_state(self, state, loop):
        """As trainer_state.json has it, without the log."""
        kept = {key: value for key, value in vars(state).items() if key not in ("log_history", "stateful_callbacks")}
        whole = json.loads(json.dumps(kept, default=lambda _: None))
        trainer = self.trainer()
        if loop is None:
            whole["total_flos"] += getattr(trainer, "current_flos", 0)  # not added up yet
        whole["stateful_callbacks"] = json.loads(json.dumps(self._callback_states(), default=str))
        return json.dumps(whole)

    def _callback_states(self):
        states, trainer = {}, self.trainer()
        if trainer is None:
            return states
        for each in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(each, transformers.trainer_callback.ExportableState):
                name = type(each).__name__
                if name in states:
                    states[name] = [*(states[name] if isinstance(states[name], list) else [states[name]]), each.state()]
                else:
                    states[name] = each.state()
        return states

    def on_train_end(self, args, state, control, **kwargs):
        if self.handle is not None:
            self.handle.wait_durable()

    def close(self):
        if self.handle is not None:
            self.handle.close()

    # ---- Continuing a job ----

    def position_at(self, step):
        """Where the job is in the data, if that is Trainer's step and its micro-batches are the same."""
        if is_disabled():
            return None
        if self.handle is not None and self.handle.is_open and not self.begins_anew:
            job_step, data = self.handle.step, self.handle.trainer_state
        else:
            engine, data = attaching.open_ahead(self.options)
            job_step = engine.step_count()
        kept = _kept_in(data, job_step)
        return position.kept_for(self.trainer(), kept.get("position")) if kept is not None and kept["step"] == step else None

    def kept_state(self):
        """What the job has to continue from, None for a new one. Opens it; attach() will take it over."""
        if is_disabled() or not self.resume:
            return None
        engine, mark = attaching.open_ahead(self.options)
        if engine.step_count() == 0:
            return None
        kept = _kept_in(mark, engine.step_count())
        if kept is not None and kept.get("is_again"):
            opened, jobs.constructed = jobs.constructed, None
            opened.take().close()
            job = job_of(opened.options)
            raise Error.of(1602, f"job {job} is at step {kept['step']} of a further train() with the optimizer of the one before, and this process "
                                 "begins with the first",
                           "Give each train() an optimizer that is new, trainer.optimizer = None, and with it a job of its own, which go on by "
                           "themselves; or name another job to begin anew")
        return kept if kept is not None and "trainer" in kept else None


def _is_stepped_by_evaluation(scheduler):
    scheduler = getattr(scheduler, "scheduler", scheduler)
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


def _what_is_rounded(model, masters=()):
    """A checkpoint of bf16 or fp16 weights may have no masters; Trainer's optimizer loads its moments in the type of their weights then."""
    has = {id(parameter) for parameter, _ in masters}
    is_rounded = any(is_narrow(p) and p.requires_grad and id(p) not in has for p in model.parameters())
    return ": its 16-bit weights are the masters now, and its moments are rounded as they are" if is_rounded else ""


def callback_of(trainer):
    return next((each for each in trainer.callback_handler.callbacks if isinstance(each, TrainerCallback)), None)


def _tell_of_copies(trainer, step):
    """Models that callbacks keep beside the one that is trained (averages of it, a reference that follows it) are in no checkpoint."""
    mine = {id(parameter) for parameter in trainer.model.parameters()}
    for callback in trainer.callback_handler.callbacks:
        for name, value in getattr(callback, "__dict__", {}).items():
            its = [id(parameter) for parameter in value.parameters()] if isinstance(value, torch.nn.Module) else []
            if its and mine.isdisjoint(its):
                _log.warning("offloadd: the model that %s has as '%s' is not part of the job: it is as the program has made it, and not as it was "
                             "after step %d. If it follows the training, let the program save and load it", type(callback).__name__, name, step)


def _tell_of_generated(trainer, step):
    """Trainers of TRL that train on what the model generates (GRPO, RLOO) generate for several steps at once, and keep it in the process."""
    passes = getattr(trainer.args, "steps_per_generation", None)
    if passes is None or not hasattr(trainer, "_buffered_inputs"):
        return
    steps = passes * getattr(trainer, "num_iterations", 1) // trainer.args.gradient_accumulation_steps
    if steps > 1 and step % steps:
        _log.warning("offloadd: %s generates for %d steps at once, and step %d is amid them: what the run before had generated is gone with its process, so "
                     "that this one generates anew and trains on other completions. With steps_per_generation = gradient_accumulation_steps and "
                     "num_iterations = 1 every step has its own", type(trainer).__name__, steps, step)


def _lock(folder):
    """A descriptor that has it while this process lives; None when another one has."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return opened
    except OSError:
        os.close(opened)
        return None


def _remove_left():
    """The folders of processes that were killed."""
    for folder in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), _FOLDER + "*")):
        with contextlib.suppress(OSError):  # others' folders, and what another process removes
            about = os.stat(folder, follow_symlinks=False)
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < _LOCKED_WITHIN:
                continue
            if (lock := _lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _write_checkpoint(trainer, kept):
    """A folder with all that Trainer reads of a checkpoint, but weights and moments; and what says that it is in use."""
    _remove_left()
    made = tempfile.mkdtemp(prefix=_FOLDER)
    lock, folder = _lock(made), os.path.join(made, f"checkpoint-{kept['step']}")
    os.mkdir(folder)
    state = json.loads(kept["trainer"])
    state["global_step"] = kept["step"]
    if "log" in kept:  # of earlier versions it is in the state
        state["log_history"] = unpack(kept["log"])
    with open(os.path.join(folder, "trainer_state.json"), "w", encoding="utf-8") as file:
        json.dump(state, file)
    torch.save(kept["random"], unfinished.random_file(trainer, folder))
    return folder, lock


def _continue(trainer, kept, original, kwargs):
    """Runs train() as from a checkpoint of the job's last step, whose weights and moments are in the job."""
    folder, lock = _write_checkpoint(trainer, kept)

    def set_rates():
        for group, lr in zip(trainer.optimizer.param_groups, trainer.lr_scheduler.get_last_lr()):
            group["lr"] = lr

    def take_options():
        """Those of the step; of jobs of earlier versions the rates alone, which are the scheduler's."""
        for group, options in zip(trainer.optimizer.param_groups, kept.get("groups", ())):
            group.update(options)
        if "groups" not in kept:
            set_rates()

    def load_scheduler(checkpoint):
        # The state that was kept is from before the scheduler's own step, which may begin with the groups' rates.
        if kept["scheduler"] is not None:
            trainer.lr_scheduler.load_state_dict(kept["scheduler"])
            trainer.lr_scheduler.optimizer._opt_called = True
            take_options()
            if not _is_stepped_by_evaluation(trainer.lr_scheduler):
                getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler).step()
        if "groups" not in kept:
            set_rates()

    callback_of(trainer).checkpoint = None
    trainer._load_from_checkpoint = lambda *_, **__: None
    trainer._load_optimizer_and_scheduler = load_scheduler
    take_back = unfinished.finish_first(trainer, callback_of(trainer), kept, kwargs.get("ignore_keys_for_eval"), unfinished.random_file(trainer, folder))
    try:
        return original(trainer, resume_from_checkpoint=folder, **kwargs)
    finally:
        for name in ("_load_from_checkpoint", "_load_optimizer_and_scheduler"):
            trainer.__dict__.pop(name, None)
        take_back()
        shutil.rmtree(os.path.dirname(folder), ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _last_checkpoint(folder):
    """The step of Trainer's last checkpoint; 0 when there is none, or a kill cut it short."""
    found = transformers.trainer_utils.get_last_checkpoint(folder) if os.path.isdir(folder) else None
    is_whole = found is not None and os.path.exists(os.path.join(found, "trainer_state.json"))
    return int(found.rsplit("-", 1)[1]) if is_whole else 0


def _checkpoint_of(trainer, given):
    """The folder that train(resume_from_checkpoint=given) loads."""
    return transformers.trainer_utils.get_last_checkpoint(trainer.args.output_dir) if given is True else given or None


def _is_the_last(trainer, given):
    """Whether it names the checkpoint that True means, as scripts do that look for it with get_last_checkpoint()."""
    folder = trainer.args.output_dir
    if not isinstance(given, (str, os.PathLike)) or not os.path.isdir(folder):
        return False
    found = transformers.trainer_utils.get_last_checkpoint(folder)
    return found is not None and os.path.realpath(found) == os.path.realpath(given)


@functools.lru_cache(maxsize=None)
def _patch_trainer():
    """train() continues a job that has steps: always without resume_from_checkpoint, and with True, or the last checkpoint's name, when the
    job is further than that. Another checkpoint has to be of the job's step."""
    original = transformers.Trainer.train

    @functools.wraps(original)
    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        callback = callback_of(self)
        if callback is None:
            return original(self, resume_from_checkpoint, *args, **kwargs)
        if _is_the_last(self, resume_from_checkpoint):
            resume_from_checkpoint = True
        callback.trainer = weakref.ref(self)
        callback.checkpoint = _checkpoint_of(self, resume_from_checkpoint)
        callback.before_training(self)
        position.follow(self, callback, callback.position_at)
        try:
            return begin(self, callback, resume_from_checkpoint, *args, **kwargs)
        finally:
            position.leave(self)
            attaching.close_ahead()

    def begin(self, callback, resume_from_checkpoint, *args, **kwargs):
        if args or isinstance(resume_from_checkpoint, (str, os.PathLike)):
            return original(self, resume_from_checkpoint, *args, **kwargs)
        if callback.handle is not None and not callback.begins_anew:
            return original(self, resume_from_checkpoint, **kwargs)  # not the first time in this process, with this optimizer
        kept = callback.kept_state()
        if kept is None or (resume_from_checkpoint and kept["step"] <= _last_checkpoint(self.args.output_dir)):
            return original(self, resume_from_checkpoint, **kwargs)
        _log.warning("offloadd: continuing at step %d, where the job is; no checkpoint is read", kept["step"])
        _tell_of_copies(self, kept["step"])
        _tell_of_generated(self, kept["step"])
        return _continue(self, kept, original, kwargs)

    transformers.Trainer.train = train
