"""What the engine saves and loads: checkpoints, which are snapshots of its job with files beside them, and weights alone."""

import json
import logging
import os
import shutil

import torch

from .. import attaching, universal
from ..errors import Error
from ..library import is_disabled
from ..named_tensors import all_named_parameters_of
from . import comm, schedules, setup, snapshots, to_fp32
from .files import CLIENT, LATEST, STATE, TRAINER, WEIGHTS, client_state_in, kept_in, mark_in, tag_in, weights_in, write_text
from .missing import refuse

_log = logging.getLogger("offloadd")


def _masters_of(optimizer):
    """With OFFLOADD_DISABLE=1: the fp32 masters of bf16 parameters."""
    if not hasattr(optimizer, "_masters"):
        return []
    return [master for group in optimizer._masters._optimizer.param_groups for master in group["params"]]


def _load_masters(optimizer, stored):
    with torch.no_grad():
        for master, value in zip(_masters_of(optimizer), stored):
            master.copy_(value)
    if stored:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer._masters.see(parameter)  # what was written is no news


def _as_it_was(optimizer):
    """Undoes what attach() has done to the instance."""
    part = getattr(optimizer, "_offload_part", None)
    if part is not None:
        part.release()


def _reattach(model, old, options):
    """The model and its optimizer, taken over by another job that has been made of this one's state."""
    optimizer = old.optimizer
    old.close()
    _as_it_was(optimizer)
    return attaching.attach(model, optimizer, **options)


class Checkpoints:
    """A part of the engine's class."""

    # ---- Weights ----

    def module_state_dict(self, destination=None, prefix="", keep_vars=False, exclude_frozen_parameters=False):
        whole = self.module.state_dict(prefix=prefix)
        if exclude_frozen_parameters:
            for name, parameter in all_named_parameters_of(self.module):
                if not parameter.requires_grad:
                    whole.pop(prefix + name, None)
        return whole

    def _copied(self, exclude_frozen_parameters=False):
        with torch.no_grad():
            made, seen = {}, {}
            for name, value in self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters).items():
                if isinstance(value, torch.Tensor):
                    # Tied weights stay tied in a file.
                    key = id(self._tied().get(name, value))
                    seen.setdefault(key, value.detach().to("cpu", copy=True))
                    value = seen[key]
                made[name] = value
            return made

    def _tied(self):
        return dict(all_named_parameters_of(self.module))

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict = _copied

    def load_module_state_dict(self, checkpoint, strict=True, custom_load_fn=None, fetch_z3_params=False):
        state = checkpoint.get("module", checkpoint)
        if custom_load_fn:
            return custom_load_fn(src=state, dst=self.module)
        self.module.load_state_dict(state, strict=strict)

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        if comm.get_rank() == 0:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(self._copied(exclude_frozen_parameters), os.path.join(save_dir, save_filename))
        comm.barrier()
        return True

    save_fp16_model = save_16bit_model

    # ---- Checkpoints ----

    def _frozen(self):
        return [name for name, parameter in self.module.named_parameters() if not parameter.requires_grad]

    def _bookkeeping(self):
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        scheduler = self.lr_scheduler.state_dict() if hasattr(self.lr_scheduler, "state_dict") else None
        return {"global_steps": self.global_steps, "global_samples": self.global_samples, "micro_steps": self.micro_steps, "frozen": self._frozen(),
                "skipped_steps": self.skipped_steps, "groups": groups, "lr_scheduler": scheduler,
                "loss_scale": None if self._scaler is None else self._scaler.state(),
                "buffers": {name: buffer.detach().to("cpu", copy=True) for name, buffer in self.module.named_buffers()},
                "transient": [f"{prefix}.{name}".lstrip(".") for prefix, module in self.module.named_modules()
                              for name in module._non_persistent_buffers_set],
                "tied": self._tied_names(), "optimizer_state_dict": {"zero_stage": 3}}  # the last is what Lightning's converter looks for

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        """Keeps weights, moments and step as a snapshot of the job in the pool, and in the folder what leads to it, the weights for
        others to read (with exclude_frozen_parameters those that are trained), and the trainer's state."""
        self._need_optimizer("save_checkpoint")
        if not is_disabled():
            self._handle.check_is_stepped()
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        folder = os.path.join(os.path.abspath(save_dir), tag)
        comm.barrier()
        if comm.get_rank() == 0:
            os.makedirs(folder, exist_ok=True)
            if os.path.exists(os.path.join(folder, STATE)):
                os.unlink(os.path.join(folder, STATE))  # what is half written is no checkpoint
            mark = self._save_state(folder, self._frozen() if exclude_frozen_parameters else [])
            torch.save(self._bookkeeping(), os.path.join(folder, TRAINER))
            torch.save(dict(client_state or {}), os.path.join(folder, CLIENT))
            write_text(os.path.join(folder, STATE), json.dumps(mark, indent=1))
            if "snapshot" in mark:
                snapshots.kept.keep(mark, os.path.join(folder, STATE))
            if save_latest:
                write_text(os.path.join(save_dir, LATEST), tag)
            to_fp32.leave_at(os.path.join(save_dir, "zero_to_fp32.py"))
        comm.barrier()
        return True

    def _save_state(self, folder, left_out):
        """What leads to it: as load_checkpoint() reads it. `left_out`: names of weights that the files do not have."""
        if is_disabled():
            torch.save(self._copied(exclude_frozen_parameters=bool(left_out)), os.path.join(folder, "model.pt"))
            masters = [master.detach() for master in _masters_of(self.optimizer)]
            named = {id(parameter): name for name, parameter in self.module.named_parameters()}
            names = [named.get(id(parameter), "") for group in self.optimizer.param_groups for parameter in group["params"]]
            torch.save({"optimizer": self.optimizer.state_dict(), "masters": masters, "names": names}, os.path.join(folder, "optimizer.pt"))
            return {"version": 1, "in_memory": True, "step": self._handle.step, "left_out": left_out}
        shutil.rmtree(os.path.join(folder, WEIGHTS), ignore_errors=True)
        self._handle.save_weights(os.path.join(folder, WEIGHTS), left_out=left_out)
        if self._runs_in_process():
            # What it keeps is in memory, and all else are the weights.
            torch.save({"optimizer": self.optimizer.state_dict(), "masters": []}, os.path.join(folder, "optimizer.pt"))
            return {"version": 1, "in_process": True, "step": self._handle.step, "left_out": left_out}
        setup.jobs.drop_unmarked()
        name = snapshots.make(self._handle)
        setup.jobs.keep(self._handle.job)
        return {"version": 1, "job": self._handle.job, "pool": self._handle.nvme_path, "snapshot": name, "step": self._handle.step,
                "left_out": left_out, "of_a_run": setup.jobs.are_own(self._handle.job), "keeps": self.optimizer._offload_part.what_it_keeps(),
                **snapshots.kept.place(folder)}

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True,
                        load_module_only=False, custom_load_fn=None):
        if self._imported.training["load_universal"]:
            return self._load_universal(load_dir, tag, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn)
        tag = tag_in(load_dir, tag)
        folder = None if tag is None else os.path.join(os.path.abspath(load_dir), tag)
        if folder is None or not os.path.exists(os.path.join(folder, STATE)):
            self._refuse_foreign(load_dir, folder)
            _log.warning("offloadd: %s has no checkpoint to load", load_dir)
            return None, None
        mark = mark_in(folder)
        trainer = kept_in(folder)
        if load_module_only or not load_optimizer_states or custom_load_fn is not None or self.optimizer is None:
            self._load_weights(folder, load_module_strict, custom_load_fn)
        else:
            self._load_state(folder, mark)
        self._load_buffers(trainer["buffers"])
        if not load_module_only and self.optimizer is not None:
            self._load_bookkeeping(trainer, load_optimizer_states, load_lr_scheduler_states)
        return folder, client_state_in(folder)

    def _load_universal(self, load_dir, tag, with_state, with_scheduler, module_only, custom_load_fn):
        """"checkpoint": {"load_universal": true}: masters and moments, durable with the next step(), and the engine's counts."""
        if custom_load_fn is not None:
            refuse("load_checkpoint(custom_load_fn=…) of a universal checkpoint", "Leave it out")
        folder = universal.folder_of(load_dir, tag)
        if with_state and not module_only and self.optimizer is not None:
            self._handle.load_universal(folder)
        else:
            universal.load(folder, list(all_named_parameters_of(self.module)), [])
        state = universal.engine_state(folder)
        if not module_only:
            self._take_counts(folder, state, with_scheduler)
        return folder, {key: value for key, value in state.items() if key not in universal.ENGINE_KEYS}

    def _take_counts(self, folder, state, with_scheduler):
        """Those of a universal checkpoint, and its schedule."""
        self.global_steps, self.skipped_steps = state.get("global_steps", 0), state.get("skipped_steps", 0)
        self.global_samples = state.get("global_samples", self.global_steps * (self._settings.batch or 0))
        self.micro_steps = self.global_steps * self._settings.accumulation
        if with_scheduler and self.lr_scheduler is not None:
            if not isinstance(state.get("lr_scheduler"), dict):
                raise Error.of(1402, f"{folder} has no state of a schedule, and the program has {type(self.lr_scheduler).__name__}",
                               "load_checkpoint(…, load_lr_scheduler_states=False), and set the schedule yourself")
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
            schedules.write_rates(self.lr_scheduler)

    def _load_weights(self, folder, strict, custom_load_fn):
        if self._handle is not None and not is_disabled() and custom_load_fn is None and os.path.isdir(os.path.join(folder, WEIGHTS)):
            return self._load_files(folder, strict)
        whole = weights_in(folder)
        if custom_load_fn is not None:
            return custom_load_fn(src=whole, dst=self.module)
        absent = set(self.module.state_dict()) - set(whole) - {name for name, _ in self.module.named_buffers()} - self._second_names()
        absent -= set(mark_in(folder).get("left_out", ()))
        if absent and strict:
            raise Error.of(1402, f"{folder} has no weights of {', '.join(sorted(absent))}", "Use the checkpoint of this model")
        self.module.load_state_dict(whole, strict=False)

    def _load_files(self, folder, strict=True):
        """Weights that were left out stay as they are, and without `strict` those that are not there."""
        if not strict or mark_in(folder).get("left_out"):
            self.module.load_state_dict(weights_in(folder), strict=False)
        else:
            self._handle.load_weights(os.path.join(folder, WEIGHTS))

    def _tied_names(self):
        """Name -> the first name of the same parameter."""
        first = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return {name: first[id(parameter)] for name, parameter in all_named_parameters_of(self.module) if first[id(parameter)] != name}

    def _second_names(self):
        return set(self._tied_names())

    @staticmethod
    def _refuse_foreign(load_dir, folder):
        """A checkpoint of DeepSpeed itself is in shards that only it can read."""
        where = folder if folder is not None and os.path.isdir(folder) else load_dir
        names = os.listdir(where) if os.path.isdir(where) else []
        if any(name.endswith("_states.pt") for name in names):
            refuse(f"{where} is a checkpoint of DeepSpeed itself, in its shards",
                   "Convert it with DeepSpeed's ds_to_universal.py, and load that with \"checkpoint\": {\"load_universal\": true} in the configuration; "
                   "or its weights alone with zero_to_fp32.py and model.load_state_dict()")

    def _load_state(self, folder, mark):
        if is_disabled() or mark.get("in_memory"):
            if not (is_disabled() and mark.get("in_memory")):
                raise Error.of(1602, f"{folder} was saved with OFFLOADD_DISABLE={'1' if mark.get('in_memory') else '0'}, and this run is otherwise",
                               "Load it in a run of its kind")
            self.module.load_state_dict(weights_in(folder), strict=not mark.get("left_out"))
            stored = torch.load(os.path.join(folder, "optimizer.pt"), map_location="cpu", weights_only=True)
            self._load_optimizer(stored["optimizer"])
            _load_masters(self.optimizer, stored["masters"])
            self._handle.step = mark["step"]
            return
        if mark.get("in_process") or self._runs_in_process():
            if not (mark.get("in_process") and self._runs_in_process()):
                raise Error.of(1602, f"{folder} is of an optimizer that runs in {'this process' if mark.get('in_process') else 'the daemon'}, "
                                     f"and {type(self.optimizer).__name__} in the other",
                               "Use the optimizer of the checkpoint, or load_optimizer_states=False")
            self._load_files(folder)
            self._load_optimizer(torch.load(os.path.join(folder, "optimizer.pt"), map_location="cpu", weights_only=True)["optimizer"])
            return
        self._check_fits(folder, mark)
        self._check_keeps(folder, mark)
        if comm.get_rank() == 0:
            snapshots.kept.take_over(mark, os.path.join(folder, STATE))
        self._continue_from(mark)
        self._take_edits(folder)

    def _load_optimizer(self, state):
        """Its groups stay the dictionaries that they are: a schedule of another optimizer, which DeepSpeedCPUAdam has replaced, writes into them."""
        groups = self.optimizer.param_groups
        self.optimizer.load_state_dict(state)
        for group, loaded in zip(groups, self.optimizer.param_groups):
            group.update(loaded)
        self.optimizer.param_groups = groups

    def _check_fits(self, folder, mark):
        """OFD-1402 for a checkpoint of another model, while this one still has its job."""
        stored, mine = weights_in(folder), dict(self.module.named_parameters())
        left_out = set(mark.get("left_out", ()))
        wrong = [f"no weights of {name}" for name in mine if name not in stored and name not in left_out]
        wrong += [f"{value.dtype}{list(value.shape)} as {name}, which is {mine[name].dtype}{list(mine[name].shape)} in the model"
                  for name, value in stored.items() if name in mine and (value.shape, value.dtype) != (mine[name].shape, mine[name].dtype)]
        others = {name for name, _ in self.module.named_buffers()} | self._second_names()
        wrong += [f"weights of {name}, which the model has not" for name in stored if name not in mine and name not in others]
        if wrong:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise Error.of(1402, f"{folder} has {wrong[0]}{more}",
                           "Use the checkpoint of this model; the weights alone that fit: load_checkpoint(…, load_optimizer_states=False, "
                           "load_module_strict=False)")

    def _check_keeps(self, folder, mark):
        """OFD-1602 for a checkpoint of another optimizer, while this one still has its job."""
        mine, theirs = self.optimizer._offload_part.what_it_keeps(), mark.get("keeps")
        if theirs is not None and theirs != mine:
            told = [f"{kind} (it keeps {', '.join(names) if names else 'nothing'})" for kind, names in (theirs, mine)]
            raise Error.of(1602, f"{folder} was trained with {told[0]}, and this program has {told[1]}",
                           "Use the optimizer of the checkpoint, with its options, or load_checkpoint(…, load_optimizer_states=False)")

    @torch.no_grad()
    def _take_edits(self, folder):
        """What the program had written into weights since its last step is in the files, and not in the snapshot."""
        named = dict(self.module.named_parameters())
        for name, value in weights_in(folder).items():
            if name in named and not torch.equal(named[name], value.to(named[name].device)):
                named[name].copy_(value)

    def _runs_in_process(self):
        part = getattr(self.optimizer, "_offload_part", None)
        return part is not None and part.is_foreign

    def _continue_from(self, mark):
        """A new job of the snapshot takes the place of the present one."""
        name = setup.jobs.new_name(mark["job"].split("-from-")[0] + f"-from-{mark['step']}")
        old = self._handle
        if comm.get_rank() == 0:
            snapshots.fork(mark, name)
        comm.barrier()
        self._handle = _reattach(self.module, old, {**self._options, "nvme_path": mark["pool"], "job": name})
        self._begin_scaling()
        setup.jobs.remove(old.job)
        setup.jobs.own(self._handle, self.module)

    def _load_buffers(self, stored):
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in stored:
                    buffer.copy_(stored[name])

    def _load_bookkeeping(self, trainer, load_optimizer_states, load_lr_scheduler_states):
        self.global_steps, self.global_samples = trainer["global_steps"], trainer["global_samples"]
        self.micro_steps, self.skipped_steps = trainer["micro_steps"], trainer["skipped_steps"]
        if load_optimizer_states:
            self._load_scale(trainer.get("loss_scale"))
            for group, stored in zip(self.optimizer.param_groups, trainer["groups"]):
                group.update(stored)
        if load_lr_scheduler_states and self.lr_scheduler is not None and trainer["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(trainer["lr_scheduler"])
