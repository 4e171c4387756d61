"""OFFLOADD_DISABLE=1: the same script in memory, to compare with. Parameters of fp32 and fp64 are trained by torch's optimizer as it is;
those of bf16 and fp16 by the same on fp32 masters and moments, as the daemon does it."""

import collections
import copy
import functools
import itertools
import os
import weakref

import torch

from . import pickled, served, state_hooks, universal
from .errors import Error
from .library import Engine
from .named_tensors import all_named_parameters_of, buffers_of, check_left_out, names_of
from .optimizer import CopiedAsItWas, after_steps, have_hooks, loss_of, refuse_unless_kept, shaped_as, swap_class
from .optimizer_part import check_unscale, is_cast_of, masters_in, numbered
from .options import own_state_of
from .recipes import is_narrow, parameters_of, recipe_of, step_function


class _WithMasters(CopiedAsItWas):
    """What the instance's class gets before its own when a parameter is of a narrow type. `_masters` is the optimizer that steps."""

    @torch.no_grad()
    def _masters_step(self, closure=None):
        loss = loss_of(closure)
        self._masters.step(self)
        self._opt_called = True
        return loss

    def state_dict(self):
        return state_hooks.give(self, lambda: self._masters.state_dict(self))

    def load_state_dict(self, state_dict):
        state_hooks.take(self, state_dict, functools.partial(self._masters.load_state_dict, self))

    @property
    def state(self):
        return self._masters.states

    @state.setter
    def state(self, states):
        if states is not self.state:
            kept = dict(states.items())
            self.state.clear()
            self.state.update(kept)

    def __setstate__(self, state):
        super().__setstate__({key: value for key, value in state.items() if key != "state"})
        if "state" in state:
            self.state = state["state"]

    def _each_master(self):
        for parameter in parameters_of(self):
            yield self._masters.state_of(parameter)[0] if is_narrow(parameter) else None


class _StateByParameter(collections.abc.MutableMapping):
    """`optimizer.state`, where it is that of the masters."""

    def __init__(self, optimizer, master_of, make_master):
        self.of_masters, self._master_of = optimizer, master_of  # the optimizer that has them; parameter -> master
        self._make_master = make_master

    def _master(self, parameter):
        return self._master_of.get(parameter, parameter)

    def _master_to_be(self, parameter):
        """Also of a parameter that is given a state before it is in a group."""
        return self._make_master(parameter) if isinstance(parameter, torch.nn.Parameter) else self._master(parameter)

    def __getitem__(self, parameter):
        return self.of_masters.state[self._master_to_be(parameter)]

    def __contains__(self, parameter):
        return self._master(parameter) in self.of_masters.state

    def get(self, parameter, default=None):
        """Which makes no state, as that of a defaultdict."""
        return self.of_masters.state.get(self._master(parameter), default)

    def __setitem__(self, parameter, state):
        self.of_masters.state[self._master_to_be(parameter)] = state

    def __delitem__(self, parameter):
        del self.of_masters.state[self._master(parameter)]

    def __iter__(self):
        return iter([parameter for parameter, master in self._master_of.items() if self.of_masters.state.get(master)])

    def __len__(self):
        return len(list(iter(self)))

    def __deepcopy__(self, memo):
        return copy.deepcopy(collections.defaultdict(dict, self), memo)

    def __reduce_ex__(self, protocol):
        return collections.defaultdict, (dict,), None, None, iter(list(self.items()))


class Masters:
    """An optimizer of the same class over fp32 masters, which follows the groups of the script's."""

    def __init__(self, cls, optimizer):
        self._master_of, self._seen = {}, {}
        self._given = []  # (parameter, master) of a checkpoint that was loaded since the last step
        self.unscale = None  # as Part's
        self._optimizer = cls.__new__(cls)
        state = {"defaults": optimizer.defaults, "state": collections.defaultdict(dict), "param_groups": self._groups(optimizer)}
        self._optimizer.__setstate__(state)
        for parameter, master in self._pairs(optimizer):
            if parameter in optimizer.state:  # Adagrad's, from the beginning
                self._optimizer.state[master] = {key: self._widened(value) for key, value in optimizer.state[parameter].items()}
        self._begin_sums()
        self.states = _StateByParameter(self._optimizer, self._master_of, self._master)

    def _begin_sums(self):
        """Adagrad's of no step, which were rounded to the type of the parameter."""
        for group in self._optimizer.param_groups:
            for state in (self._optimizer.state.get(master, {}) for master in group["params"]):
                if "initial_accumulator_value" in group and "sum" in state and not state["step"]:
                    state["sum"].fill_(group["initial_accumulator_value"])

    @staticmethod
    def _widened(value):
        if not isinstance(value, torch.Tensor):
            return value
        return (value.float() if is_narrow(value) else value).clone()

    def _master(self, parameter):
        if parameter not in self._master_of:
            self._master_of[parameter] = parameter if not is_narrow(parameter) else \
                torch.nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
            self.see(parameter)
        return self._master_of[parameter]

    def _groups(self, optimizer):
        return [{**group, "params": [self._master(parameter) for parameter in group["params"]]} for group in optimizer.param_groups]

    def see(self, parameter):
        """Remembers what tells that somebody has written to it since."""
        self._seen[parameter] = parameter._version, parameter.data_ptr()

    def _is_written(self, parameter, master):
        """Also by `p.data = x`, or through .data."""
        return self._seen[parameter] != (parameter._version, parameter.data_ptr()) or not torch.equal(parameter, master.to(parameter.dtype))

    def _pairs(self, optimizer):
        return [(parameter, self._master(parameter)) for parameter in parameters_of(optimizer)]

    def _follow(self, optimizer):
        self._optimizer.param_groups[:] = self._groups(optimizer)

    def step(self, optimizer):
        check_unscale(self.unscale)
        self._follow(optimizer)
        self._take_given()
        for parameter, master in self._pairs(optimizer):
            if master is parameter:
                continue
            if self._is_written(parameter, master):
                master.copy_(parameter)
            master.grad = None if parameter.grad is None else self._widened_gradient(parameter.grad)
            if master.grad is not None and self.unscale is not None:
                master.grad.mul_(self.unscale)
        self._widen_states()
        step_function(type(self._optimizer))(self._optimizer)  # without torch's hooks, which were called for the script's own
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                master = self._master(parameter)
                if master is not parameter and master.grad is not None:
                    # torch's fused kernels do not count what they write: a graph from before the step goes backward after it.
                    (parameter.data if group.get("fused") else parameter).copy_(master)
                    master.grad = None
        for parameter in parameters_of(optimizer):  # when all are written: parts of one vector have one version
            self.see(parameter)

    def _widened_gradient(self, gradient):
        """Of a sparse one the dense sum, with the optimizers that take it."""
        is_taken = gradient.layout != torch.strided and isinstance(self._optimizer, (torch.optim.SGD, torch.optim.Adagrad))
        return (gradient.to_dense() if is_taken else gradient).float()

    def _widen_states(self):
        """What a program has put into them may be as narrow as its parameters."""
        for state in self._optimizer.state.values():
            state.update({key: value.float() for key, value in state.items() if isinstance(value, torch.Tensor) and is_narrow(value)})

    def state_dict(self, optimizer):
        """With the masters beside torch's, as Part.state_dict()."""
        self._follow(optimizer)
        whole = self._optimizer.state_dict()
        numbered = enumerate(self._pairs(optimizer))
        masters = {index: master.detach() for index, (parameter, master) in numbered if master is not parameter and self._optimizer.state.get(master)}
        return {**whole, "offloadd": {"masters": masters}}

    def load_state_dict(self, optimizer, state_dict):
        self._follow(optimizer)
        state = {key: {name: value for name, value in kept.items() if name != "master"} for key, kept in state_dict["state"].items()}
        self._optimizer.load_state_dict({**state_dict, "state": state})
        for key, parameter in numbered(state_dict, optimizer):
            if "master" in state_dict["state"].get(key, {}):
                self.replace(parameter, self._master(parameter), state_dict["state"][key]["master"])
        for theirs, ours in zip(optimizer.param_groups, self._optimizer.param_groups):
            theirs.update({key: value for key, value in ours.items() if key != "params"})
        self.note_masters(masters_in(state_dict, optimizer))

    def note_masters(self, masters):
        """As Part's."""
        self._given = masters

    def _take_given(self):
        """As Part._take_masters()."""
        given, self._given = self._given, []
        if all(is_cast_of(parameter, value) for parameter, value in given):
            for parameter, value in given:
                self._master_of[parameter].copy_(value)
                self.see(parameter)

    @torch.no_grad()
    def replace(self, parameter, master, value):
        master.copy_(value)
        parameter.copy_(value)
        self.see(parameter)

    def begin_with(self, parameter, value):
        """The value of a master under a weight that is its cast, or was written since."""
        if torch.equal(parameter, value.to(parameter)):
            self._master_of[parameter].copy_(value)

    def values(self):
        """(parameter, its master now) of every one of a narrow type."""
        return [(parameter, self.state_of(parameter)[0]) for parameter in self._master_of if is_narrow(parameter)]

    def state_of(self, parameter):
        master = self._master_of.get(parameter, parameter)
        state = self._optimizer.state.get(master, {})
        is_written = master is not parameter and self._is_written(parameter, master)
        return (parameter.detach().float() if is_written else master), state


@functools.lru_cache(maxsize=None)
def _class_with_masters(cls):
    made = type(cls.__name__, (_WithMasters, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    made._class_of_copies = cls
    made.step = torch.optim.Optimizer.profile_hook_step(_WithMasters._masters_step)
    made.step.hooked = True
    return made


def _has_narrow(optimizer):
    return any(map(is_narrow, parameters_of(optimizer)))


@torch.no_grad()
def give_masters(optimizer, values=()):
    """Has masters train the parameters of narrow types. `values`: of each parameter the master's, or None, in the optimizer's order; without them
    they are the parameters'."""
    cls = type(optimizer)
    masters = Masters(cls, optimizer)
    for parameter, value in zip(parameters_of(optimizer), values):
        if value is not None:
            masters.begin_with(parameter, value)
    optimizer._masters = masters
    optimizer._step_supports_amp_scaling = False
    optimizer.__dict__["state"] = collections.defaultdict(dict)  # the masters' optimizer has it
    swap_class(optimizer, _class_with_masters(cls))


class Averages:
    """What attach(average=…) has the daemon keep, of what it would update."""

    def __init__(self, text):
        self.text = text
        self._updates, self._averages = collections.Counter(), {}
        Engine.average_step(text, 1)  # refuses another text

    def check(self, optimizer, models):
        if recipe_of(optimizer, models).is_foreign:
            raise self._stays(f"{type(optimizer).__name__} runs in the trainer's process")

    def _stays(self, what):
        return Error.of(1604, f"average is {self.text}, and {what}", "Leave the option out and average in the trainer")

    @torch.no_grad()
    def move(self, optimizer):
        for parameter in parameters_of(optimizer):
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise self._stays("a sparse gradient")
            master = optimizer._masters.state_of(parameter)[0] if hasattr(optimizer, "_masters") else parameter.detach()
            self._updates[parameter] += 1
            kind, value = Engine.average_step(self.text, self._updates[parameter])
            if kind == 1:
                self._averages[parameter] = master.clone()
            elif kind == 2:
                self._averages[parameter].lerp_(master, value)
            elif kind == 3:
                self._averages[parameter].add_((master - self._averages[parameter]).div_(value))

    def of(self, parameter):
        """None before the first update."""
        return self._averages.get(parameter)


_handles = weakref.WeakSet()


def handles():
    """Those of this process."""
    return list(_handles)


def destination_of(options):
    """Where attach(device=…) has a model of the host trained; None: it stays."""
    device = torch.device(str(options.get("device") or os.environ.get("OFFLOADD_DEVICE") or "cpu"))
    return None if device.type == "cpu" else device


def _move(models, optimizers, device):
    """As model.to(), with what optimizers have, too; parameters that share memory go on to share it."""
    if device is None:
        return
    for model in models:
        sharing = {}
        for parameter in model.parameters():
            if parameter.numel():
                key = parameter.untyped_storage().data_ptr(), parameter.storage_offset(), parameter.shape, parameter.stride(), parameter.dtype
                sharing.setdefault(key, []).append(parameter)
        model.to(device)
        for first, *others in sharing.values():  # which to() has taken apart
            for other in others:
                other.data = first.data
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            stays = () if group.get("fused") or group.get("capturable") else ("step",)
            for parameter in group["params"]:
                if parameter.device.type == "cpu":
                    parameter.data = parameter.data.to(device)
                state = optimizer.state.get(parameter, {})
                state.update({key: value.to(device) for key, value in state.items() if isinstance(value, torch.Tensor) and key not in stays})


# What handles of jobs know, by name.
STATISTICS = ("bytes_read", "bytes_written", "resident_bytes", "peak_bytes", "budget_bytes", "durable_step", "wait_seconds",
              "raw_accesses", "gpu_ram_bytes", "gpu_peak_bytes", "gpu_waits")
STATUS = ("durable_step", "seconds_per_step", "ram_bytes", "allocated_bytes", "resident_bytes", "bytes_read", "bytes_written",
          "read_bytes_per_second", "written_bytes_per_second")
PLAN = ("parameters", "state_bytes", "gradient_bytes", "store_bytes", "window_bytes", "pipeline_bytes", "resident_bytes",
        "region_bytes", "overhead_bytes", "total_bytes", "gradients_spilled", "read_bytes_per_parameter",
        "write_bytes_per_parameter", "further_read_bytes_per_parameter", "further_write_bytes_per_parameter", "floor_bytes",
        "floor_without_spilling_bytes", "gpu_window_bytes", "gpu_gradient_bytes")


class Plan(dict):
    text = "OFFLOADD_DISABLE is set: everything is in memory\n"

    def __str__(self):
        return self.text


class Handle:
    """As offloadd.Handle, without a job."""

    rank, world_size, is_open = 0, 1, True

    def __init__(self, models, optimizers, options, initial_weights=None):
        self.models, self.optimizers, self.options = models, optimizers, dict(options)
        _handles.add(self)
        self.job = str(options.get("job") or os.environ.get("OFFLOADD_JOB") or "default")
        self.nvme_path = str(options.get("nvme_path") or "")
        self.step, self._trainer_state = 0, b""
        _move(models, optimizers, destination_of(options))
        if initial_weights is not None:
            self.load_weights(initial_weights)
        self._averages = Averages(str(options["average"])) if options.get("average") not in (None, "none") else None
        for optimizer in optimizers:
            if self._averages is not None:
                self._averages.check(optimizer, models)
            if _has_narrow(optimizer) and not hasattr(optimizer, "_masters") and not recipe_of(optimizer, models).is_foreign:
                give_masters(optimizer)
            have_hooks(optimizer)
            after_steps(optimizer, functools.partial(self._end_step, optimizer))

    def _end_step(self, optimizer):
        self.step += 1
        if self._averages is not None:
            self._averages.move(optimizer)

    @property
    def optimizer(self):
        return self.optimizers[0]

    @property
    def model(self):
        return self.models[0]

    def parameter(self, given):
        if not isinstance(given, str):
            return given
        return dict(named for model in self.models for named in all_named_parameters_of(model))[given]

    def gather_one(self, parameter, plane="weight"):
        if plane == "average" and self._averages is not None:
            average = self._averages.of(parameter)
            return average.clone() if average is not None else self.gather_one(parameter, "master")
        if plane == "weight":
            return served.copy_of(parameter).cpu()
        master, state = parameter, {}
        for optimizer in self.optimizers:
            if hasattr(optimizer, "_masters"):
                master, state = optimizer._masters.state_of(parameter)
            else:
                state = optimizer.state.get(parameter, {})
            if state:
                break
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        found = master.to(wide) if plane == "master" else state.get(plane)
        return torch.zeros_like(parameter, dtype=wide, device="cpu") if found is None else served.copy_of(found).cpu()

    def identities(self):
        of_models = (parameter for model in self.models for parameter in model.parameters())
        return {id(parameter) for parameter in itertools.chain(of_models, *map(parameters_of, self.optimizers))}

    @torch.no_grad()
    def write_one(self, parameter, plane, value):
        """As offloadd.Handle's."""
        value = shaped_as(parameter, value)
        masters = next((o._masters for o in self.optimizers if hasattr(o, "_masters") and parameter in o._masters._master_of), None)
        if plane == "master" and masters is not None and masters._master_of[parameter] is not parameter:
            masters.replace(parameter, masters._master_of[parameter], value)
        elif plane in ("weight", "master"):
            parameter.copy_(value)
        else:
            refuse_unless_kept(self._state_of(parameter), plane)[plane].copy_(value)

    def gather(self, parameters, plane="weight", *, write=False):
        from .handle import Gathered

        return Gathered.of(self, parameters, plane, write)

    def begin_loss_scale(self, scale, count):
        return 0, scale, count

    def keep_loss_scale(self, number, scale, count):
        pass

    def plan(self):
        """Nothing is planned."""
        count = sum(parameter.numel() for model in self.models for parameter in model.parameters())
        return Plan({**dict.fromkeys(PLAN, 0), "gradients_spilled": False, "parameters": count})

    def statistics(self):
        """Nothing is moved, and no step durable."""
        return dict.fromkeys(STATISTICS, 0)

    def metrics(self):
        return {**{f"offloadd/{key}": 0.0 for key in STATISTICS}, "offloadd/step": float(self.step)}

    def status(self):
        """There is no daemon: what a script may print is zero, or nothing."""
        return {"job": self.job, "pool": "", "phase": "in memory", "client_pid": os.getpid(), "ranks": [], "step": self.step, **dict.fromkeys(STATUS, 0),
                "last_step": None, "plan": None, "io_engine": "", "devices": []}

    @property
    def trainer_state(self):
        return self._trainer_state

    @trainer_state.setter
    def trainer_state(self, data):
        self._trainer_state = own_state_of(data)

    def wait_durable(self):
        pass

    def checkpoint(self):
        return self.step

    def _named(self):
        """(parameters, buffers) as they are called in files."""
        return names_of(self.models), [(name, buffer) for name, buffer in buffers_of(self.models) if name]

    def _in_lists(self, left_out=()):
        named_of_both = [[each for each in named if each[0] not in left_out] for named in self._named()]
        return [list(column) for named in named_of_both for column in ((name for name, _ in named), (tensor for _, tensor in named))]

    def load_weights(self, path, *, ignored=()):
        files = pickled.files_of(path)
        if files is None:
            Engine.load_into_memory(*self._in_lists(), os.fspath(path), list(ignored))
        else:
            pickled.load(files, *self._named(), ignored)

    def save_weights(self, folder, *, shard_bytes=0, left_out=(), plane="weight"):
        check_left_out(left_out, self._named()[0], self.models)
        names, weights, *buffers = self._in_lists(left_out)
        if plane == "average" and self._averages is not None:
            weights = [self.gather_one(weight, "average").to(weight.dtype) for weight in weights]
        elif plane != "weight":
            raise Error.of(1002, f'save_weights() of plane "{plane}"', 'Save "weight", or with attach(average=…) "average"')
        Engine.save_from_memory(names, weights, *buffers, os.fspath(folder), shard_bytes)

    def load_universal(self, folder):
        universal.load(folder, self._named()[0], self.optimizers)

    def save_universal(self, folder, tag=None):
        universal.save(folder, tag or f"global_step{self.step}_universal", self.step, self._named()[0],
                       lambda parameter: self.gather_one(parameter, "master"), self._state_of)

    def _state_of(self, parameter):
        for optimizer in self.optimizers:
            state = optimizer._masters.state_of(parameter)[1] if hasattr(optimizer, "_masters") else \
                optimizer.state.get(parameter, {})
            if state:
                return state
        return {}

    def snapshot(self, name):
        pass

    def close(self):
        _handles.discard(self)

    end = close

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __deepcopy__(self, memo):
        return self
