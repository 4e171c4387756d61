"""deepspeed.initialize() and the engine that it gives."""

import contextlib
import json
import logging
import os
import shutil

import safetensors.torch
import torch

from .. import attaching, in_memory, jobs
from .. import config as configuration
from ..errors import Error
from ..handle import gather
from ..library import is_disabled
from ..named_tensors import all_named_parameters_of, buffers_of
from . import comm, loss_scale, of_optimizer, schedules, setup, snapshots, trainers, zero
from .checkpoints import Checkpoints
from .files import write_text
from .from_configuration import make_scheduler, optimizer_of
from .missing import missing, refuse, refusing
from .questions import Questions, Throughput

_log = logging.getLogger("offloadd")


class _Settings:
    """What of the configuration the engine asks for."""

    def __init__(self, imported, world_size):
        training = imported.training
        self.accumulation = training["accumulation"] or 1
        self.micro_batch = training["micro_batch_size"]
        self.batch = training["batch_size"] or (self.micro_batch * self.accumulation * world_size if self.micro_batch else None)
        self.clipping = training["gradient_clipping"] if training["gradient_clipping"] is not None else 1.0
        self.bf16, self.autocast = bool(training["bf16"]), training["autocast"]


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


def _hooked(value, hook):
    """What the loop is given in place of an output: a loss that was computed of another one inside of the model is divided once."""
    if isinstance(value, torch.Tensor) and value.requires_grad:
        given = value.view_as(value)
        given.register_hook(hook)
        return given
    if isinstance(value, (list, tuple)):
        values = [_hooked(each, hook) for each in value]
        if all(new is old for new, old in zip(values, value)):
            return value
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if isinstance(value, dict):
        for key, each in list(value.items()):
            if (new := _hooked(each, hook)) is not each:
                value[key] = new
    return value


class _BackwardPasses:
    under_way = 0  # of engines: a loss may come through several


_backward_passes = _BackwardPasses()


class DeepSpeedEngine(loss_scale.ScalesLosses, Checkpoints, Questions, torch.nn.Module):
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
        self._backward_count = 0  # since the last step
        self._continues_at = 0  # the steps that the job had, where its name has it go on
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
        else:
            options = {**options, "job": setup.name_beside_others(options["job"], self.module)}
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
        of_optimizer.answer(self, optimizer)
        if own and not is_disabled():
            setup.jobs.own(self._handle, self.module)
        self._begin_scaling()
        if self._handle.step and not own:
            _log.warning("offloadd: job %s continues at step %s: a loop that begins with engine.global_steps goes on there, and one that begins with 0 "
                         "(a Trainer's without resume_from_checkpoint) takes its steps once more", self._handle.job, self._handle.step)
            self._continues_at = self.global_steps = self._handle.step
            if self._scaler is not None:  # it counts those that were skipped, too
                self.global_steps, self.skipped_steps = self._scaler.cur_iter, self._scaler.cur_iter - self._handle.step
            self.micro_steps = self.global_steps * self._settings.accumulation
            self.global_samples = self.global_steps * (self._settings.batch or 0)

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
            if not self._imported.training["scheduler"]:
                return None
            made = make_scheduler(self._imported.training, self.optimizer)
            schedules.take_steps(made, self._continues_at)
            return made
        if self._continues_at:
            _log.warning("offloadd: job %s continues at step %s, and the schedule, which is the program's own, is at its beginning: load its state, "
                         "or call its step() as often; one of the configuration goes on by itself", self._handle.job, self._continues_at)
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
        if name in ("param_groups", "defaults", "state") and self.optimizer is not None:
            return getattr(self.optimizer, name)  # Fabric steps what has them, and else the optimizer alone, which clips nothing
        if name.startswith("__"):
            raise AttributeError(name)
        raise missing("DeepSpeedEngine", name)

    # ---- The loop ----

    def forward(self, *args, **kwargs):
        with self._autocast():
            result = self.module(*(loss_scale.as_half(args) if self.fp16_auto_cast() else args), **kwargs)
        if (self._settings.accumulation > 1 or self._scaler is not None) and torch.is_grad_enabled() and self.module.training:
            self._is_scaled = False
            return self._scale_when_called_directly(result)
        return result

    def _autocast(self):
        """Without its cache, where it would keep what was cast of all weights until the end of the pass, activation checkpointing or not."""
        if not self._settings.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def _scale_when_called_directly(self, result):
        """loss.backward() in place of engine.backward(loss): DeepSpeed divides what flows in, too."""

        def divide(grad):
            if _backward_passes.under_way or grad is None:
                return None
            self._check_is_scaled()
            return grad / self._settings.accumulation if self._settings.accumulation > 1 else None

        return _hooked(result, divide)

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True, **others):
        self._need_optimizer("backward")
        others.pop("allreduce_gradients", None), others.pop("release_loss", None)
        if others:
            refuse(f"engine.backward() with {', '.join(others)}")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise Error.of(1002, "engine.backward() was given something that is no scalar tensor", "Give it the loss")
        scaled = loss / self._settings.accumulation if scale_wrt_gas and self._settings.accumulation > 1 else loss
        self._has_scaled = True
        self._backward_count += 1
        _backward_passes.under_way += 1
        try:
            (scaled if self._scaler is None else scaled * self.cur_scale).backward(retain_graph=retain_graph)
        finally:
            _backward_passes.under_way -= 1
        return scaled

    def is_gradient_accumulation_boundary(self):
        """Where the program owns the boundary, step() is one, and nothing else."""
        if self._boundary is not None:
            return self._boundary
        return self.managed_gradient_accumulation() and (self.micro_steps + 1) % self._settings.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary):
        if not self.managed_gradient_accumulation():
            refuse("set_gradient_accumulation_boundary() with \"managed_gradient_accumulation\": false", "Leave it out: every step() is a boundary there")
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self):
        """Gradients of ranks are added when the step is taken, so there is nothing to leave out."""
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    coalesce_grad_reduction = no_sync

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
        if self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation():
            self._applied = self._take_step(self._trained())
            self._clear_gradients()
            self.skipped_steps += not self._applied
            if self._applied and self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            self.global_steps += 1
            if snapshots.kept.have_deleted():
                setup.jobs.drop_unmarked()
            self.global_samples += self._samples_of_step()
            self._backward_count = 0
        self.micro_steps += 1

    def _samples_of_step(self):
        batch = self._settings.batch or 0
        return batch if self.managed_gradient_accumulation() else batch // self._settings.accumulation * self._backward_count

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
    optimizer = optimizer_of(optimizer, model, model_parameters, imported.training)
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


__getattr__ = refusing("deepspeed.runtime.engine")
