"""The handle of a job that is attached: what its optimizers ask of the job, and what users do."""

import contextlib
import itertools
import json
import logging
import os
import sys
import uuid
import weakref

import torch

from . import beneath, followers, in_memory, jobs, lightning_position, lightning_ranks, lightning_teardown, pickled, safetensors_files, served, \
    universal
from .attachable import check_model, refuse_wrappers, to_unfreeze
from .eager import run_as_before, run_eagerly
from .errors import Error, class_of
from .foreign import ForeignPart
from .growth import Grows, with_those_gone
from .kinds import Kinds, check_together
from .library import Engine, bytes_of, tensor_of
from .named_tensors import Reassigned, buffers_beside, buffers_of, check_left_out, names_of, tables_of, with_strangers
from .optimizer import check_free, check_state_is_its_own, has_stepped, refuse_unless_kept, shaped_as
from .optimizer_part import Part
from .options import job_of, own_state_of, pool_of, reduces_gradients
from .recipes import check_arithmetic, is_narrow, is_table, parameters_of, recipe_of

_log = logging.getLogger("offloadd")

# The trainer's state: magic, 16 bytes of identity, then the trainer's own; in the second form first the length and bytes of what kinds.py says.
_STATE_MAGIC, _STATE_MAGIC_OF_KINDS = b"OFDPY\x01", b"OFDPY\x02"
_OWN_STATE_BYTES = len(_STATE_MAGIC) + 16


class Plan(dict):
    """Bytes by name; `text` is a table for people, as is str()."""

    text = ""

    def __str__(self):
        return self.text


class Gathered(list):
    """Private copies of parameters. As a context manager with write=True, what was changed in them is written back at the end."""

    def __init__(self, parameters, copies, write):
        super().__init__(copies)
        self._parameters, self._write = parameters, write

    @classmethod
    def of(cls, handle, parameters, plane, write):
        """What Handle.gather() gives: a tensor for one parameter that is only read, else a list."""
        is_one = isinstance(parameters, (torch.Tensor, str))
        if not is_one and not hasattr(parameters, "__iter__"):
            raise Error.of(1002, f"gather() was given {class_of(parameters)}", "Give it a parameter, its name, or several")
        chosen = [handle.parameter(each) for each in ([parameters] if is_one else parameters)]
        copies = [handle.gather_one(each, plane) for each in chosen]
        return copies[0] if is_one and not write else cls(chosen, copies, write)

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        if self._write and failure is None:
            with torch.no_grad():
                for parameter, copy in zip(self._parameters, self):
                    parameter.copy_(copy)


def stored_state(engine):
    """(the job's identity, the trainer's state, what kinds.py says); the identity is empty in jobs that were not made from Python."""
    stored = bytes_of(engine.trainer_state())
    if not stored.startswith((_STATE_MAGIC, _STATE_MAGIC_OF_KINDS)):
        return "", stored, b""
    identity, rest = stored[len(_STATE_MAGIC):_OWN_STATE_BYTES].hex(), stored[_OWN_STATE_BYTES:]
    if stored.startswith(_STATE_MAGIC):
        return identity, rest, b""
    end = 4 + int.from_bytes(rest[:4], "little")
    return identity, rest[end:], rest[4:end]


class _Ended:
    """What is to be known of a closed handle while its model lives. Nothing that the handle had lives on by it."""

    is_open = False

    def __init__(self, handle):
        self.job, self.last_step = handle.job, handle.last_step
        self._optimizers = [weakref.ref(optimizer) for optimizer in handle.optimizers]

    @property
    def optimizers(self):
        return [optimizer for optimizer in (reference() for reference in self._optimizers) if optimizer is not None]


class Handle(Grows, jobs.OfProcess):
    """A job that is attached. Its methods may be called between steps, by one thread.

    optimizer    the script's own object (the first, of several: optimizers)
    step         how many steps the job has taken, over all of its runs
    """

    def __init__(self, engine, models, optimizers, options, unfreeze=None, beside=()):
        super().__init__()
        self._engine = engine
        self._models, self.optimizers = [weakref.ref(model) for model in models], optimizers
        self.options = dict(options)
        self.job, self.nvme_path = job_of(options), pool_of(options)
        self.asked_for, self.training = self.job, 1  # the job that attach() was told, and how many of its name have trained these models
        self.followed_by = None  # the job that went on with them
        self.before_commit = None  # what is called when an optimizer has stepped in this process, once
        self.at_steps = None  # what is called before each step, when its gradients are there
        self._parts = []
        self._versions = {}  # after the last step of this run
        self.last_step = 0  # when it was closed
        self.has_loaded_weights = False
        self.has_trainer = False  # which writes checkpoints, and goes on with the job where they say
        self._attach(models, unfreeze, beside)
        self.begun_at = self.step  # when it was attached
        self._places, self._has_told_of_places = self._places_now(), False
        jobs.add(self)

    def _attach(self, models, unfreeze, beside):
        for model in models:
            check_model(model)
        recipes = []
        for optimizer in self.optimizers:
            former = check_free(optimizer)
            if former is not None and self._engine.step_count() == 0:
                raise Error.of(1604, f"the optimizer's moments are in job {former}, and this is a new one",
                               f"Attach to job {former}, or make a new optimizer")
            recipes.append(recipe_of(optimizer, models if self._engine.world_size() == 1 else ()))
            if not recipes[-1].is_foreign and self._engine.step_count() == 0:
                check_state_is_its_own(optimizer)
        check_together({recipe.kind for recipe in recipes if not recipe.is_foreign})
        if any(not recipe.is_foreign for recipe in recipes) and any(p.requires_grad for model in models for p in model.parameters()):
            check_arithmetic()
        self._check_once()
        named = with_strangers(names_of(models), self.optimizers)
        served.check_exported(named)
        served.check_not_shared(named)
        with beneath.apart(named):
            self._attach_named(models, named, recipes, unfreeze, beside)
        served.install()
        safetensors_files.install()
        lightning_teardown.serve()
        lightning_position.serve()
        run_eagerly()
        for part in self._parts:
            part.swap()
            if part.is_foreign:
                part.tell()

    def _attach_named(self, models, named, recipes, unfreeze, beside):
        served.give_own_memory(named, self._engine, beneath.is_over_a_source)
        destination = in_memory.destination_of(self.options)
        buffers = buffers_of(models, destination)
        buffers += buffers_beside(beside, buffers, destination)
        numbers = itertools.count()
        parts = [ForeignPart(self, optimizer, recipe.name, next(numbers)) if recipe.is_foreign else Part(self, optimizer, recipe)
                 for optimizer, recipe in zip(self.optimizers, recipes)]
        self._kinds, self._described_kinds = Kinds(parts), (None, b"")
        parts = [part if part.is_foreign else self._brought_here_before(part) for part in parts]
        is_of_host = destination is None and any(parameter.device.type == "cpu" for _, parameter in named)
        if is_of_host and not all(part.is_foreign for part in parts):
            Engine.check_instructions()
        for part in parts:
            if not part.is_foreign:
                part.check_named_once()
            elif self._engine.step_count() > 0:
                part.check_goes_on(self._engine)
            else:
                self._engine.expect_foreign(part.expected_bytes())
                self._engine.add_foreign(part.number, part.name)
        unfrozen = to_unfreeze(named, unfreeze)
        for parameter in unfrozen:
            parameter.requires_grad_(True)
        try:
            self._identities = {id(parameter) for _, parameter in named}
            self._engine.attach([name for name, _ in named], [parameter for _, parameter in named],
                                [name for name, _ in buffers], [buffer for _, buffer in buffers],
                                self._kinds.kind, self._kinds.rows)
            for part in parts:
                self._take_what_was_kept(part)
            self._read_mark({id(parameter): name for name, parameter in named})
            self._engine.seal()
            for part in parts:
                if part.is_foreign:
                    part.take(self._engine, dict(named))
        finally:
            for parameter in unfrozen:
                parameter.requires_grad_(False)
        self._parameters, self._by_storage, self._former = dict(named), None, []
        self._beside = [weakref.ref(module) for module in beside]
        self._reassigned = Reassigned(models, beside, buffers)
        self._parts = parts
        self.adds_gradients = self._engine.world_size() > 1 and not reduces_gradients(self.options)
        if self.adds_gradients:
            for model in models:
                model._is_accelerate_prepared = True  # Accelerate leaves it alone
            refuse_wrappers()

    def _take_what_was_kept(self, part):
        """A new job begins with it; one that exists has its own."""
        if part.is_foreign:
            return
        step = self._engine.step_count()
        if step > 0:
            if has_stepped(part.optimizer):
                _log.warning("offloadd: job %s is at step %d and goes on there with its own weights and moments; those of the script are dropped. Count from "
                             "handle.step; to go on at a checkpoint, load it after attach()", self.job, step)
            return
        kept = part.kept_in_memory()
        if kept[0]:
            self._engine.begin_with(*kept)

    # ---- An optimizer of the daemon's that goes on in this process ----

    def _name_here(self, part):
        """Of such a one, in the job."""
        return f"{part.recipe.name} (optimizer {next(i for i, each in enumerate(self.optimizers) if each is part.optimizer)})"

    def _numbers_here(self):
        """Of those that the job has: (number, name)."""
        named = ((number, self._engine.foreign(number)[0]) for number in itertools.count())
        return list(itertools.takewhile(lambda each: each[1], named))

    def _brought_here_before(self, part):
        """In its place the one that steps in this process, where the job says so."""
        name = self._name_here(part)
        number = next((number for number, its in self._numbers_here() if its == name), None)
        return part if number is None else ForeignPart(self, part.optimizer, name, number)

    def bring_here(self, part):
        """From now on the optimizer's steps run in this process, with what it has kept in the job; returns what it is now."""
        number = len(self._numbers_here())
        states = part.leave()
        here = ForeignPart(self, part.optimizer, self._name_here(part), number)
        part.optimizer.__dict__["state"].update(states)
        self._engine.add_foreign(number, here.name)
        self._parts = [here if each is part else each for each in self._parts]
        here.swap()
        here.tell()
        return here

    def _check_once(self):
        seen = set()
        for optimizer in self.optimizers:
            mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if mine & seen:
                raise Error.of(1002, "a parameter is in two optimizers", "Attach one of them: the other goes on in this process, with what it keeps "
                               "in memory. Or name every parameter in the groups of one optimizer")
            seen |= mine

    # ---- What optimizers ask ----

    def _running(self):
        if self._engine is None and self.followed_by is not None:
            raise Error.of(1802, f"job {self.job} ended when its model was attached again, with another optimizer, to job {self.followed_by}",
                           "Step that optimizer; optimizers that take turns are given to one attach(), or are groups of one")
        if self._engine is None:
            raise Error.of(1802, f"job {self.job} is closed", "Attach again, to the same job: it continues at its last step")
        if not self.is_of_this_process():
            raise Error.of(1802, f"job {self.job} is of the process that forked this one, and cannot be used here",
                           "Use it there, give this process what it needs beforehand (copy.deepcopy(model)), or start it by "
                           'multiprocessing.get_context("spawn"); models of its own it may attach, to a job with another name')
        return self._engine

    def engine(self):
        return self._running()

    def names(self):
        """Of the parameters, by their ids."""
        return {id(parameter): name for name, parameter in reversed(self._parameters.items())}

    def commit(self):
        """A step of an optimizer that runs in this process."""
        before, self.before_commit = self.before_commit, None
        if before is not None:
            before()
        self.apply(self._kinds.kind, [[]], self._kinds.rows[:1], [False])  # a step of nothing

    def _in_process(self):
        return {id(parameter) for part in self._foreign_parts() for parameter in parameters_of(part.optimizer)}

    def _settle_replaced(self):
        is_alone = self._engine is not None and self._engine.world_size() == 1
        served.settle_replaced(self._identities, self._in_process(), may_leave=is_alone)

    def settle(self):
        """Before a step: what was put in the place of the job's tensors."""
        self._settle_replaced()
        followers.check()
        self._tell_of_places()
        self._reassigned.settle(self._identities, self._running())
        self._settle_states()

    def _places_now(self):
        return [id(module) for model in self.models if model is not None for module in model.modules()]

    def _tell_of_places(self):
        """Once, of modules that have changed places: a run that goes on looks for parameters under the names of attach(), or of the last growth."""
        if self._has_told_of_places or any(model is None for model in self.models):
            return
        former, self._places = self._places, self._places_now()
        if former == self._places:
            return
        had = self.names()
        moved = [(had[id(parameter)], name) for name, parameter in names_of(self.models)
                 if id(parameter) in had and self._parameters.get(name, parameter) is not parameter]
        if moved:
            self._has_told_of_places = True
            _log.warning("offloadd: modules have changed places since job %s was attached (%s is %s now), and the job goes by the names of then: a run "
                         "that goes on has to attach the model with each where it was, and change places after that", self.job, *moved[0])

    def _kept_parts(self):
        """Those whose state is the job's."""
        return [part for part in self._parts if not part.is_foreign]

    def _foreign_parts(self):
        return [part for part in self._parts if part.is_foreign]

    def _end_states(self):
        with contextlib.suppress(Error):  # a job that has failed: what was shown stays as it was
            for part in self._kept_parts():
                part.end()

    def _settle_states(self):
        for part in self._kept_parts():
            part.settle()

    def _settle_before_step(self):
        if self.at_steps is not None:
            self.at_steps()
        self.settle()
        self._note_kinds()
        for part in self._foreign_parts():
            part.keep()

    def apply(self, kind, groups, values, counts):
        self._settle_before_step()
        engine = self._running()
        before = engine.step_count()
        try:
            engine.apply(kind, groups, values, counts)
        except BaseException:
            if engine.step_count() != before:  # Ctrl-C meanwhile is an error behind a step that was taken
                self._end_step()
            raise
        self._end_step()

    def _end_step(self):
        followers.refresh(self._identities)
        self._versions = self._versions_now()

    def _versions_now(self):
        """Of all that a step commits: which tensor it is, and how often it was written."""
        return {name: (id(tensor), tensor._version) for name, tensor in [*self._parameters.items(), *self._reassigned.buffers()] if not tensor.is_inference()}

    def _tell_of_writes(self):
        """Of what was written after the last step, which no step will commit."""
        now = self._versions_now() if self._versions else {}
        written = [name for name, version in now.items() if self._versions.get(name, version) != version or
                   (name in self._parameters and served.is_replaced(self._parameters[name]))]
        if written:
            _log.warning("offloadd: job %s ends at step %d, and what the program has written since is not part of it: %s. A run that goes on has to "
                         "write that anew, before its first step where its loop does not (docs/python.md, the handle)", self.job, self.last_step,
                         ", ".join(written[:3]) + (f" and {len(written) - 3} more" if len(written) > 3 else ""))

    def foresee(self, kind, values):
        self._running().foresee(kind, values)

    def replace_state(self, parameters, counts, names, planes):
        if not all(id(parameter) in self._identities for parameter in parameters):
            self.grow()
        self._running().replace_state(parameters, counts, names, planes)

    def begin_loss_scale(self, scale, count):
        """One more pair of numbers of a loss scaler, fp32 and a 32-bit integer, which is committed with every step: (its number, and the pair
        as the job has it, else as given)."""
        return self._running().add_loss_scale(scale, count)

    def keep_loss_scale(self, number, scale, count):
        """Part of the next step."""
        self._running().set_loss_scale(number, scale, count)

    def update_count(self, parameter):
        if not parameter.numel():
            part = next((part for part in self._parts if not part.is_foreign and part.has(parameter)), None)
            return part.count_of_empty(parameter) if part is not None else 0
        is_known = id(parameter) in self._identities and not is_table(parameter)
        return self._running().update_count(parameter) if is_known else 0

    def identities(self):
        return self._identities

    def parameter_over(self, storage):
        """The one whose storage (its address in torch) it is."""
        if self._by_storage is None:
            self._by_storage = {served.storage_of(parameter): weakref.ref(parameter) for parameter in self._parameters.values()}
        return self._by_storage.get(storage, lambda: None)()

    def gather_one(self, parameter, plane="weight"):
        """As the program has left it."""
        if plane != "weight":
            self._settle_states()
        if plane in ("weight", "master") and self.is_open and served.is_replaced(parameter):
            value = served.copy_of(parameter).cpu()
            return value.float() if plane == "master" and is_narrow(parameter) else value
        return self.gather_stored(parameter, plane)

    def gather_stored(self, parameter, plane):
        """As the job has it."""
        running = self._running()
        if self._is_new(parameter):
            self.take_what_came()
        if plane not in ("weight", "master"):
            part = next((part for part in self._kept_parts() if part.had(parameter)), None)
            if part is not None and part.recipe.kind == "adagrad" and self.update_count(parameter) == 0 and plane == "sum":
                return part.first_sum(parameter)
            plane = self.stored_name(part, plane) if part is not None and plane != "average" else plane
        return running.gather(parameter, plane)

    def stored_name(self, part, plane):
        return self._kinds.stored_name(part, plane)

    def write_one(self, parameter, plane, value):
        """Gives a weight, its "master" or a moment the values of a tensor; durable with the next step()."""
        self._running()
        value = shaped_as(parameter, value)
        if plane in ("weight", "master"):
            with torch.no_grad():
                parameter.copy_(value)
        part = next((part for part in self._parts if part.has(parameter)), None)
        if plane == "weight" or (plane == "master" and (part is None or parameter.dtype in (torch.float32, torch.float64))):
            return
        if part is None:
            refuse_unless_kept({}, plane)
        part.write(parameter, plane, value)

    def is_state_small(self):
        """Whether all moments, twice, are little beside the memory budget."""
        plan = self.plan()
        return plan["state_bytes"] * 4 <= self.statistics()["budget_bytes"]

    def leads_from_checkpoints(self):
        """Whether who writes them goes on with the job, so that they need not have moments that are many."""
        return self.has_trainer or lightning_ranks.trainer_of(self.models) is not None

    def mark(self):
        """What a checkpoint says of the job. One that is written between moments that were loaded and the next step is not of the job's step."""
        waits = any(part.waits_for_a_step() for part in self._kept_parts())
        return {"job": self.job, "id": self._id, "step": self.step, **({"is_loaded": True} if waits else {})}

    # ---- The trainer's state, behind our own ----

    def _read_mark(self, names):
        self._id, self._trainer_state, kinds = stored_state(self._engine)
        has_none = not self._id and not self._trainer_state
        if has_none and not self._engine.step_count():
            self._id = uuid.uuid4().hex
        if self._engine.world_size() > 1:  # the first rank's
            self._id = bytes_of(self._engine.exchange(tensor_of(bytes.fromhex(self._id)))[0]).hex()
        self._kinds.check_as_before(kinds, names, self.update_count)
        if self._id and has_none:
            self._set_state(b"")

    def _set_state(self, data):
        kinds = self._described_kinds[1]
        identity = self._id or ("0" * 32 if kinds else "")
        whole = (_STATE_MAGIC_OF_KINDS if kinds else _STATE_MAGIC) + bytes.fromhex(identity) if identity else b""
        whole += len(kinds).to_bytes(4, "little") + kinds if kinds else b""
        self._engine.set_trainer_state(tensor_of(whole + data))
        self._trainer_state = data

    def _note_kinds(self):
        """Before a step: parameters may have come."""
        if not self._kinds.are_several:
            return
        now = [id(self._parameters), *(len(group["params"]) for part in self._kept_parts() for group in part.optimizer.param_groups)]
        if now != self._described_kinds[0]:
            self._described_kinds = now, self._kinds.described(self.names())
            self._set_state(self._trainer_state)

    @property
    def trainer_state(self):
        """The trainer's own small state (random numbers, position in the data), as bytes: committed with the next step(), and given
        back when the job is resumed."""
        return self._trainer_state

    @trainer_state.setter
    def trainer_state(self, data):
        self._running()
        self._set_state(own_state_of(data))

    # ---- For users ----

    @property
    def optimizer(self):
        return self.optimizers[0]

    @property
    def models(self):
        return [model() for model in self._models]

    @property
    def model(self):
        return self.models[0]

    @property
    def is_open(self):
        return self._engine is not None

    @property
    def step(self):
        return self._running().step_count()

    @property
    def rank(self):
        return self._running().rank()

    @property
    def world_size(self):
        return self._running().world_size()

    def parameter(self, given):
        """A parameter by its name, or itself."""
        if not isinstance(given, str):
            return given
        known = {**self._parameters, **dict(names_of(with_those_gone(self.models)))}  # of a model that has parted from one, too
        if given in known:
            return known[given]
        tables = dict(tables_of([model for model in self.models if model is not None]))
        if given not in tables:
            raise Error.of(1002, f"the job has no parameter '{given}'", "Use a name of model.named_parameters()")
        return tables[given]

    def gather(self, parameters, plane="weight", *, write=False):
        """Private copies in memory of the host: of one parameter (by itself or its name) a tensor, of several a list. `plane` is "weight",
        "master", a moment by torch's name ("exp_avg"), or "average", where attach(average=…) keeps one. As a context manager with write=True,
        changes are written back at its end."""
        if write and plane != "weight":
            raise Error.of(1002, f"gather({plane!r}, write=True)", "Only weights can be written")
        return Gathered.of(self, parameters, plane, write)

    def plan(self):
        values, text = self._running().plan()
        made = Plan(zip(in_memory.PLAN, values))
        for key in made:
            if not key.endswith("per_parameter"):
                made[key] = int(made[key])
        made["gradients_spilled"] = bool(made["gradients_spilled"])
        made.text = text
        return made

    def statistics(self):
        made = dict(zip(in_memory.STATISTICS, self._running().statistics()))
        return {key: value if key == "wait_seconds" else int(value) for key, value in made.items()}

    def metrics(self):
        """A flat dictionary of floats, for wandb.log() and the like."""
        made = {f"offloadd/{key}": float(value) for key, value in self.statistics().items()}
        made["offloadd/step"] = float(self.step)
        return made

    def status(self):
        """What the daemon knows of this job, as `offloadctl status --json` says it: bytes, latencies, phases and waits, and under "plan"
        what a step is to move and take beside what steps were ("comparison": None before ten of them)."""
        from .control import run

        self._running()
        daemons = json.loads(run("status", "--json", "--interval", "0.1"))["daemons"]
        for job in [job for daemon in daemons for job in daemon["jobs"]]:
            if job["job"] == self.job and any(rank["pid"] == os.getpid() for rank in job["ranks"]):
                return job
        raise Error.of(1501, f"no daemon that answers has job {self.job} of this process", "Ask the daemon's own user for it")

    def wait_durable(self):
        """Blocks until every step that was taken is on the drive."""
        self._running().wait_durable()

    def checkpoint(self):
        """Makes the last step() a checkpoint, whatever `durability` says, and returns its number at once: it is written
        beside the steps that follow. wait_durable() waits for it."""
        return int(self._running().checkpoint())

    def load_weights(self, path, *, ignored=()):
        """Takes the weights of a safetensors file or folder, or of one that torch.save() has written; moments and step stay."""
        engine, files = self._running(), pickled.files_of(path)
        self.take_what_came()
        self.has_loaded_weights = True
        if files is None:
            self.settle()
            engine.load_weights(os.fspath(path), list(ignored))
        else:
            pickled.load(files, list(self._parameters.items()), self._kept_buffers(), ignored)

    def save_weights(self, folder, *, shard_bytes=0, left_out=(), plane="weight"):
        """Writes the weights as a safetensors folder, in constant memory, without those that are named in `left_out`; or, with
        plane="average", what attach(average=…) keeps of them, in the model's types."""
        running = self._running()
        self.take_what_came()
        check_left_out(left_out, self._parameters.items(), [model for model in self.models if model is not None])
        self.settle()
        running.save_weights(os.fspath(folder), shard_bytes, list(left_out), plane)

    def load_universal(self, folder):
        """Takes masters and optimizer state of a universal checkpoint of DeepSpeed; durable with the next step()."""
        self.take_what_came()
        universal.load(folder, list(self._parameters.items()), self.optimizers)

    def save_universal(self, folder, tag=None):
        """Writes masters and optimizer state as a universal checkpoint of DeepSpeed, FOLDER/TAG, one parameter at a time."""
        self.take_what_came()
        self._settle_replaced()
        universal.save(folder, tag or f"global_step{self.step}_universal", self.step, list(self._parameters.items()),
                       lambda parameter: self.gather_one(parameter, "master"), self._state_of)

    def _state_of(self, parameter):
        return next((optimizer.state[parameter] for optimizer in self.optimizers if parameter in optimizer.state), {})

    def _kept_buffers(self):
        return [(name, buffer) for name, buffer in buffers_of([model for model in self.models if model is not None]) if name]

    def check_is_stepped(self):
        """OFD-1602 where moments were loaded since the last step, which a snapshot would not have."""
        self._settle_states()
        if any(part.waits_for_a_step() for part in self._kept_parts()):
            raise Error.of(1602, f"what was loaded into job {self.job} is part of its next step, and a snapshot is of the last one",
                           "Take a step first, or keep the checkpoint that was loaded")

    def snapshot(self, name):
        """Keeps the job as it is after the last step, under a name (`offloadctl snapshot` lists, forks and deletes)."""
        from .control import snapshot

        self.check_is_stepped()
        self.wait_durable()
        snapshot(self.nvme_path, self.job, name)

    def close(self):
        """Drains what was stepped and ends the job. The model's parameters cannot be used after it. Raises what went wrong in that."""
        if (error := self._end()) is not None:
            raise error

    def end(self):
        """As close(), where something else has gone wrong already, or nobody listens: what went wrong in it is told."""
        if (error := self._end()) is not None:
            _log.error("offloadd: %s", error)

    def _end(self):
        """Closes; an error, or None."""
        if self._engine is None:
            return None
        error = None
        if self.is_of_this_process():
            self.last_step = self._engine.step_count()
            if not any(part.is_within_step() for part in self._foreign_parts()):  # which is taken anew, where an error has ended it
                self._tell_of_writes()
            self._end_states()
        engine, self._engine = self._engine, None
        served.forget_replaced(self._identities)
        followed = followers.memory_of(self._identities) if self.options.get("weights_at_close") == "memory" else []
        followers.end(self._identities)
        for model in self.models:
            if model is not None and jobs.by_model.get(model) is self:
                jobs.by_model[model] = _Ended(self)
        if self.is_of_this_process():
            Engine.end_own_step()  # of one that has raised an error
            error = self._error_of(*engine.end())
            run_as_before()
            left = followers.give_memory(followed)
            if left:
                _log.warning("offloadd: job %s is closed, and %d arrays or buffers over its parameters follow them no more: make them anew, "
                             "p.detach().numpy()", self.job, left)
        return error

    def _error_of(self, failure, durable):
        """What went wrong at the end, in words, and the last step that is known to be durable."""
        if not failure:
            return None
        error = Error(failure)
        if error.id == 1207:  # there is nothing to go on with
            return error
        left = self.last_step - durable
        steps = f"all its {self.last_step} steps are durable" if left <= 0 else \
            f"of its {self.last_step} steps the first {durable} are durable for sure, the last {left} may be lost"
        if self.options.get("weights_at_close") == "memory":
            steps += ", and its weights are not all in memory"
        return Error(f"{failure} Job {self.job} was not closed as it should be: {steps}. Attach to the same job again: it continues at the last step that is "
                     "durable.")

    def __del__(self):
        """The model and the optimizer are gone, too; a state_dict() of the model may live on."""
        # A look at __dict__ would make one, which the garbage collector takes for somebody who still has everything in it.
        parameters = getattr(self, "_parameters", None)
        if parameters and self._engine is not None and self.is_of_this_process() and not sys.is_finalizing():
            self._end_states()
            jobs.outlived.append(jobs.Outlived(self, parameters.values()))

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        self.close() if failure is None else self.end()

    def __repr__(self):
        state = f"at step {self.step}" if self.is_open else "closed"
        return f"<offloadd job {self.job} {state}>"

    def __deepcopy__(self, memo):
        return self  # one job, however many objects refer to it

    def __reduce__(self):
        raise Error.of(1002, "the handle of a job cannot be pickled", "Attach again in the other process, to the same job")


def gather(parameters, plane="weight", *, write=False):
    """As Handle.gather, of whichever job the parameters belong to. Tensors that are in memory are copied."""
    several = not isinstance(parameters, torch.Tensor)
    chosen = list(parameters) if several else [parameters]

    def copy(parameter):
        handle = jobs.handle_of(parameter)
        if handle is not None:
            return handle.gather_one(parameter, plane)
        if plane != "weight":
            raise Error.of(1002, f"a parameter of shape {list(parameter.shape)} is in no job, and has no {plane}", "Attach its model and optimizer")
        return served.copy_of(parameter)

    copies = Gathered(chosen, [copy(each) for each in chosen], write)
    return copies if several or write else copies[0]
