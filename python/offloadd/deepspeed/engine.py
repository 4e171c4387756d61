"""deepspeed.initialize() and the engine that it gives."""

import contextlib
import inspect
import json
import logging
import os
import shutil

import safetensors.torch
import torch

from .. import attaching, in_memory, jobs, universal
from .. import config as configuration
from ..errors import Error
from ..handle import gather
from ..library import is_disabled
from ..named_tensors import all_named_parameters_of, buffers_of
from . import comm, loss_scale, schedules, setup, snapshots, to_fp32, trainers, zero
from .adam import DeepSpeedCPUAdam
from .files import LATEST, STATE, WEIGHTS, mark_in, tag_in, weights_in, write_text
from .lion import DeepSpeedCPULion
from .missing import missing, refuse, refusing
from .questions import Questions, Throughput

_log = logging.getLogger("offloadd")

_OPTIMIZERS = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "RMSprop": torch.optim.RMSprop, "Lion": DeepSpeedCPULion}


# ---- What a configuration makes --------------------------------------------------------------------

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


def _make_scheduler(training, optimizer):
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


class _Settings:
    """What of the configuration the engine asks for."""

    def __init__(self, imported, world_size):
        training = imported.training
        self.accumulation = training["accumulation"] or 1
        self.micro_batch = training["micro_batch_size"]
        self.batch = training["batch_size"] or (self.micro_batch * self.accumulation * world_size if self.micro_batch else None)
        self.clipping = training["gradient_clipping"] if training["gradient_clipping"] is not None else 1.0
        self.bf16 = bool(training["bf16"])


def _as_it_was(optimizer):
    """Undoes what attach() has done to the instance."""
    part = getattr(optimizer, "_offload_part", None)
    if part is not None:
        part.release()


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


def _write_weights(former, model, folder):
    """What a model is that has parameters of a job: in constant memory where it is the job's own, else one file for each tensor."""
    theirs = {name: id(parameter) for name, parameter in former._parameters.items()}
    mine = dict(all_named_parameters_of(model))
    if theirs == {name: id(parameter) for name, parameter in mine.items()}:
        return former.save_weights(folder)
    os.makedirs(folder, exist_ok=True)
    places = {}
    for name, tensor in [*mine.items(), *buffers_of([model])]:
        if name:
            places[name] = f"{len(places)}.safetensors"
            safetensors.torch.save_file({name: gather(tensor).contiguous()}, os.path.join(folder, places[name]))
    write_text(os.path.join(folder, "model.safetensors.index.json"), json.dumps({"weight_map": places}))


def _end_former(former, model):
    """Weights as they are now of a model whose job another one takes over, in files beside it: their folder, equal in all ranks."""
    folder = os.path.join(former.nvme_path.split(",")[0], f"{former.job}-weights")
    comm.barrier()
    if comm.get_rank() == 0:
        _write_weights(former, model, folder)
    comm.barrier()
    setup.jobs.remove(former.job)
    return folder


def _reattach(model, old, options):
    """The model and its optimizer, taken over by another job that has been made of this one's state."""
    optimizer = old.optimizer
    old.close()
    _as_it_was(optimizer)
    return attaching.attach(model, optimizer, **options)


# ---- The engine ------------------------------------------------------------------------------------

class _BackwardPasses:
    under_way = 0  # of engines: a loss may come through several


_backward_passes = _BackwardPasses()


class DeepSpeedEngine(loss_scale.ScalesLosses, Questions, torch.nn.Module):
    """The model, its optimizer in the daemon, and the loop's bookkeeping. Gradients are clipped by torch's clip_grad_norm_; weights,
    moments and results are those of the same loop in memory, bit for bit."""

    def __init__(self, model, optimizer, imported, raw, lr_scheduler=None, collate_fn=None, training_data=None, options=None):
        super().__init__()
        zero.show_status()
        self.module = model
        self.optimizer, self._imported, self._raw = optimizer, imported, raw
        self._settings = _Settings(imported, comm.get_world_size())
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self._boundary, self._norm, self._applied = None, None, False
        self._in_no_sync = self._is_destroyed = False
        self.tput_timer = Throughput()
        self.collate_fn = collate_fn
        self._options = options
        self._handle = None
        if optimizer is not None:
            self._attach(options, optimizer)
        elif jobs.constructed is not None:
            # Built in the pool: there it stays, with an optimizer that never steps.
            self._attach({**options, "job": None}, torch.optim.SGD(list(model.parameters()), lr=0.0))
        else:
            self._stay_in_memory(options)
        self.lr_scheduler = self._scheduler(lr_scheduler)
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)

    def _stay_in_memory(self, options):
        destination = in_memory.destination_of(options)
        _log.warning("offloadd: no optimizer, so that the model stays in memory%s", "" if destination is None else f" of {destination}, as a whole")
        if destination is not None:
            self.module.to(destination)

    def _attach(self, options, optimizer):
        own = not options.get("job")
        pending = jobs.constructed
        if own:
            options = {**options, "job": pending.options["job"] if pending is not None else setup.jobs.new_name()}
        if not is_disabled():
            setup.check_options(options)
            self._check_goes_on(options["job"], optimizer)
            former = setup.jobs.former_of(self.module)
            setup.jobs.make_room(but=former)
        if pending is None and own and not is_disabled():
            self._attach_anew(options, optimizer, former)
        else:
            of_job = options if pending is None else {"job": options["job"]}  # what zero.Init has opened has its own
            self._handle = attaching.attach(self.module, optimizer, **of_job)
        for name, value in (("overflow", False), ("loss_scale", 1.0), ("cur_scale", 1.0), ("parameter_offload", zero.ParameterOffload())):
            optimizer.__dict__.setdefault(name, value)  # what programs ask DeepSpeed's own
        if own and not is_disabled():
            setup.jobs.own(self._handle, self.module)
        self._begin_scaling()
        if self._handle.step and not own:
            _log.warning("offloadd: job %s continues at step %s", self._handle.job, self._handle.step)
            self.global_steps = self._handle.step
            if self._scaler is not None:  # it counts those that were skipped, too
                self.global_steps, self.skipped_steps = self._scaler.cur_iter, self._scaler.cur_iter - self._handle.step

    def _attach_anew(self, options, optimizer, former):
        """A model that another engine has trained comes with its weights, and an optimizer that has moments there with its job."""
        if former is None:
            self._handle = attaching.attach(self.module, optimizer, **options)
        elif former.optimizer is optimizer and not optimizer._offload_part.is_foreign:
            former.close()
            if self._imported.training["fp16"]:
                self._scaler = loss_scale.LossScaler(self._imported.training["fp16"])  # as with every engine
            self._handle = attaching.attach(self.module, optimizer, **{**options, "nvme_path": former.nvme_path, "job": former.job})
        else:
            folder = _end_former(former, self.module)
            try:
                self._handle = attaching.attach(self.module, optimizer, initial_weights=folder, **options)
            finally:
                comm.barrier()
                if comm.get_rank() == 0:
                    shutil.rmtree(folder, ignore_errors=True)

    def _check_goes_on(self, job, optimizer):
        """OFD-1205 for an optimizer that is to begin in a job which has moments of the one before."""
        former = jobs.by_model.get(self.module)
        if former is not None and not former.is_open and former.job == job and former.last_step and optimizer not in former.optimizers:
            raise Error.of(1205, f"job {job} has trained this model in this process with another optimizer, whose moments it has",
                           "Leave the name of the job out (OFFLOADD_JOB, install(job=…)), so that each engine has its own; or give initialize() "
                           "the same optimizer, which continues it")

    def _scheduler(self, given):
        if self.optimizer is None:
            return None
        if given is None:
            return _make_scheduler(self._imported.training, self.optimizer) if self._imported.training["scheduler"] else None
        return given(self.optimizer) if callable(given) and not hasattr(given, "step") else given

    @property
    def handle(self):
        """offloadd's own view of the job: plan(), statistics(), gather()."""
        return self._handle

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        if name == "module":  # not there yet
            raise AttributeError(name)
        module = super().__getattr__("module")
        if hasattr(module, name):
            return getattr(module, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise missing("DeepSpeedEngine", name)

    # ---- The loop ----

    def forward(self, *args, **kwargs):
        result = self.module(*(loss_scale.as_half(args) if self.fp16_auto_cast() else args), **kwargs)
        if (self._settings.accumulation > 1 or self._scaler is not None) and torch.is_grad_enabled() and self.module.training:
            self._is_scaled = False
            return self._scale_when_called_directly(result)
        return result

    def _scale_when_called_directly(self, result):
        """loss.backward() in place of engine.backward(loss): DeepSpeed divides what flows in, too."""

        def divide(grad):
            if _backward_passes.under_way or grad is None:
                return None
            self._check_is_scaled()
            return grad / self._settings.accumulation if self._settings.accumulation > 1 else None

        def seen(value):
            """What the loop is given in place of an output: a loss that was computed of another one inside of the model is divided once."""
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            given = value.view_as(value)
            given.register_hook(divide)
            return given

        if isinstance(result, torch.Tensor):
            return seen(result)
        if isinstance(result, (list, tuple)):
            values = [seen(value) for value in result]
            return type(result)(*values) if hasattr(result, "_fields") else type(result)(values)
        if isinstance(result, dict):
            for key, value in list(result.items()):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    result[key] = seen(value)
        return result

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True, **others):
        self._need_optimizer("backward")
        others.pop("allreduce_gradients", None), others.pop("release_loss", None)
        if others:
            refuse(f"engine.backward() with {', '.join(others)}")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise Error.of(1002, "engine.backward() was given something that is no scalar tensor", "Give it the loss")
        scaled = loss / self._settings.accumulation if scale_wrt_gas and self._settings.accumulation > 1 else loss
        self._has_scaled = True
        _backward_passes.under_way += 1
        try:
            (scaled if self._scaler is None else scaled * self.cur_scale).backward(retain_graph=retain_graph)
        finally:
            _backward_passes.under_way -= 1
        return scaled

    def is_gradient_accumulation_boundary(self):
        return (self.micro_steps + 1) % self._settings.accumulation == 0 if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary):
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self):
        """Gradients of ranks are added when the step is taken, so there is nothing to leave out."""
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def _trained(self):
        """In the order of model.parameters(), in which a loop of one's own adds up the norm."""
        optimized = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
        ordered = [optimized.pop(id(p)) for p in self.module.parameters() if id(p) in optimized]
        return [p for p in ordered + list(optimized.values()) if p.grad is not None]

    def step(self, lr_kwargs=None):
        self._need_optimizer("step")
        if self._in_no_sync:
            raise Error.of(1002, "engine.step() inside engine.no_sync()", "Leave the context first")
        zero.check_is_left("engine.step()")
        self._applied = False
        if self.is_gradient_accumulation_boundary():
            self._applied = self._take_step(self._trained())
            self._clear_gradients()
            self.skipped_steps += not self._applied
            if self._applied and self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            self.global_steps += 1
            if snapshots.kept.have_deleted():
                setup.jobs.drop_unmarked()
            self.global_samples += self._settings.batch or 0
        self.micro_steps += 1

    def _take_step(self, parameters):
        """Whether it was taken: with fp16 one whose gradients overflow is not."""
        if self._scaler is not None:
            return self._step_scaled(parameters, self._settings.clipping)
        if parameters and self._settings.clipping > 0:
            self._norm = torch.nn.utils.clip_grad_norm_(parameters, self._settings.clipping)
        elif parameters:
            self._norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        self.optimizer.step()
        return True

    def was_step_applied(self):
        return self._applied

    def zero_grad(self, set_to_none=True):
        """Between the micro-batches of one step nothing is lost, as with DeepSpeed, which adds gradients up elsewhere."""
        if self._boundary is not None or self.micro_steps % self._settings.accumulation == 0:
            self._clear_gradients()

    def _clear_gradients(self):
        for parameter in self.module.parameters():
            parameter.grad = None

    def _need_optimizer(self, what):
        if self.optimizer is None:
            raise Error.of(1105, f"engine.{what}() without an optimizer",
                           "Give initialize() an optimizer or its parameters, with a section \"optimizer\" in the configuration")
        if self._handle is None or not self._handle.is_open:
            raise Error.of(1802, f"engine.{what}() of an engine that was destroyed, or whose model another initialize() was given",
                           "Use the engine that the last initialize() of the model has given")

    # ---- What scripts ask ----

    def get_global_grad_norm(self):
        return None if self._norm is None else self._norm.item()

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_type(self):
        return [group.get("type") for group in self.optimizer.param_groups]

    def get_mom(self):
        return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in self.optimizer.param_groups]

    def _needs_batch(self, value, name):
        if value is None:
            raise Error.of(1105, f"{name} is not in the configuration", "Add it")
        return value

    def train_batch_size(self):
        return self._needs_batch(self._settings.batch, "train_batch_size")

    def train_micro_batch_size_per_gpu(self):
        return self._needs_batch(self._settings.micro_batch, "train_micro_batch_size_per_gpu")

    def gradient_accumulation_steps(self):
        return self._settings.accumulation

    def get_batch_info(self):
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size):
        step = self.train_micro_batch_size_per_gpu() * comm.get_world_size()
        if train_batch_size % step:
            raise Error.of(1103, f"train_batch_size {train_batch_size} is no multiple of {step}", "Choose a multiple")
        self._settings.batch, self._settings.accumulation = train_batch_size, train_batch_size // step

    def set_train_micro_batch_size(self, micro_batch_size):
        self._settings.micro_batch = micro_batch_size
        self._settings.batch = micro_batch_size * self._settings.accumulation * comm.get_world_size()

    def gradient_clipping(self):
        return self._settings.clipping

    def bfloat16_enabled(self):
        return self._settings.bf16

    def amp_enabled(self):
        return False

    wall_clock_breakdown = eigenvalue_enabled = sparse_gradients_enabled = amp_enabled

    def zero_optimization(self):
        return True

    zero_optimization_partition_gradients = zero_optimization_partition_weights = zero_gather_16bit_weights_on_model_save = zero_optimization

    def zero_optimization_stage(self):
        return 3

    def optimizer_name(self):
        return self._imported.training["optimizer"].lower() or None

    def scheduler_name(self):
        return self._imported.training["scheduler"] or None

    @property
    def config(self):
        return self._raw

    @property
    def device(self):
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def global_rank(self):
        return comm.get_rank()

    @property
    def local_rank(self):
        return comm.get_local_rank()

    @property
    def world_size(self):
        return comm.get_world_size()

    dp_world_size = world_size

    def compile(self, *args, **kwargs):
        """Generated kernels read raw pointers: the model runs as it is."""
        _log.warning("offloadd: engine.compile() has no effect, the model runs eagerly")

    is_compiled = False

    def empty_partition_cache(self):
        pass

    def allreduce_gradients(self, *_, **__):
        """The daemon adds the gradients of ranks by itself."""

    def offload_states(self, *_, **__):
        pass

    reload_states = offload_states

    def deepspeed_io(self, dataset, batch_size=None, route="train", pin_memory=False, data_sampler=None, collate_fn=None,
                     num_local_io_workers=None):
        """A loader of micro-batches, shuffled where DeepSpeed's is: by a DistributedSampler."""
        if data_sampler is None and not isinstance(dataset, torch.utils.data.IterableDataset):
            ranks = max(1, comm.get_world_size())
            data_sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=ranks, rank=comm.get_rank(), shuffle=route == "train")
        return torch.utils.data.DataLoader(
            dataset, batch_size=batch_size or self.train_micro_batch_size_per_gpu(), sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn, num_workers=num_local_io_workers or 0,
            drop_last=bool((self._raw or {}).get("dataloader_drop_last", False)))

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
                "tied": self._tied_names()}

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
            torch.save({**self._bookkeeping(), "client_state": dict(client_state or {})}, os.path.join(folder, "trainer.pt"))
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
                "left_out": left_out, "of_a_run": setup.jobs.are_own(self._handle.job), **snapshots.kept.place(folder)}

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
        trainer = torch.load(os.path.join(folder, "trainer.pt"), map_location="cpu", weights_only=False)
        if load_module_only or not load_optimizer_states or custom_load_fn is not None or self.optimizer is None:
            self._load_weights(folder, load_module_strict, custom_load_fn)
        else:
            self._load_state(folder, mark)
        self._load_buffers(trainer["buffers"])
        if not load_module_only and self.optimizer is not None:
            self._load_bookkeeping(trainer, load_optimizer_states, load_lr_scheduler_states)
        return folder, trainer["client_state"]

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

    def destroy(self):
        """Ends training with this engine. The model goes on: it has its weights until it is dropped or another model is trained, and a further
        initialize() takes it."""
        handle, self._handle = self._handle, None
        self._is_destroyed = True
        trainers.begin_anew(DeepSpeedEngine)
        if handle is not None:
            setup.jobs.end(handle) if not is_disabled() else handle.close()


def initialize(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None, distributed_port=29500,
               mpu=None, dist_init_required=None, collate_fn=None, config=None, mesh_param=None, config_params=None):
    """(engine, optimizer, loader of training_data or None, schedule or None), as DeepSpeed's."""
    if not isinstance(model, torch.nn.Module):
        raise Error.of(1002, "deepspeed.initialize() without a model", "Give it model=, a torch.nn.Module")
    if type(model).__name__ == "PipelineModule" or mpu is not None or mesh_param is not None:
        refuse("initialize() with another kind of parallelism (a PipelineModule, mpu or mesh_param)")
    given = _configuration(args, config, config_params)
    if dist_init_required is not False:
        comm.init_distributed()
    world_size = comm.get_world_size()
    imported = configuration.import_deepspeed(given, world_size=world_size, has_pool=setup.has_pool() or None, tell=comm.get_rank() == 0)
    if imported.training["bf16"] or imported.training["fp16"]:
        with zero.GatheredParameters(list(model.parameters())):  # of zero.Init they may be in the pool
            model.to(torch.bfloat16 if imported.training["bf16"] else torch.float16)
    optimizer = _optimizer(optimizer, model, model_parameters, imported.training)
    if imported.training["fp16"] and optimizer is not None:
        loss_scale.check(optimizer)
    engine = DeepSpeedEngine(model, optimizer, imported, imported.raw, lr_scheduler, collate_fn, training_data, setup.options_for(imported, model))
    return engine, optimizer, engine.training_dataloader, engine.lr_scheduler


def _configuration(args, config, config_params):
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if given is None:
        raise Error.of(1105, "deepspeed.initialize() without a configuration", "Give it config=, a dictionary or the path of a file")
    return given


def _optimizer(given, model, model_parameters, training):
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


__getattr__ = refusing("deepspeed.runtime.engine")
