"""attach(), and what it gives: the job of a model and its optimizers."""

import atexit
import contextlib
import ctypes
import difflib
import fnmatch
import functools
import gc
import json
import logging
import os
import sys
import threading
import uuid
import weakref

import torch

from . import anew, beneath, followers, in_memory, lightning_teardown, pickled, served, universal
from .beginning import Beginning, has_begun
from .errors import Error
from .library import Engine, is_disabled
from .named_tensors import Reassigned, all_named_parameters_of, buffers_beside, buffers_of, check_has_memory, names_of, tables_of, with_strangers
from .optimizer import Foreign, check_arithmetic, check_free, has_stepped, is_narrow, is_table, parameters_of, recipe_of, refuse_unless_kept, shaped_as

_log = logging.getLogger("offloadd")

OPTIONS = ("nvme_path", "ram", "gpu_ram", "device", "job", "io", "durability", "generations", "update_threads", "update_in_backward", "spill_gradients", "rank",
           "world_size", "local_rank", "local_world_size", "run_id", "gradients", "gradient_average", "raw_access", "weights_at_close",
           "zero_stage", "weights_home", "state_home", "persistence", "prefetch", "max_live")
_STATISTICS = ("bytes_read", "bytes_written", "resident_bytes", "peak_bytes", "budget_bytes", "durable_step", "wait_seconds",
               "raw_accesses", "gpu_ram_bytes", "gpu_peak_bytes", "gpu_waits")
_PLAN = ("parameters", "state_bytes", "gradient_bytes", "store_bytes", "window_bytes", "pipeline_bytes", "resident_bytes",
         "region_bytes", "overhead_bytes", "total_bytes", "gradients_spilled", "read_bytes_per_parameter",
         "write_bytes_per_parameter", "further_read_bytes_per_parameter", "further_write_bytes_per_parameter", "floor_bytes",
         "floor_without_spilling_bytes", "gpu_window_bytes", "gpu_gradient_bytes")
_STATE_MAGIC = b"OFDPY\x01"
_OWN_STATE_BYTES = len(_STATE_MAGIC) + 16

# A job is open while its model, its optimizer or its handle lives.
_open_handles = weakref.WeakSet()
_made = 0  # handles, in this process
_by_model = weakref.WeakKeyDictionary()  # its handle, the last one, or what is left of that
served.steps_taken = lambda: sum(handle.step for handle in handles())
followers.parameter_over = lambda tensor: next(
    (found for found in (handle.parameter_over(served.storage_of(tensor)) for handle in handles()) if found is not None), None)
served.is_attached = lambda parameter: any(id(parameter) in handle.identities() for handle in handles())
_constructed = None  # an engine that init() has opened and no attach() has taken
_constructed_in_memory = {}  # with OFFLOADD_DISABLE=1: the options of such an init()


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


def _listed(given):
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _strings(options):
    pairs = []
    for key, value in options.items():
        if value is None:
            continue
        if key not in OPTIONS:
            meant = difflib.get_close_matches(str(key), OPTIONS, n=1)
            raise Error.of(1002, f"there is no option {key}", f"Did you mean {meant[0]}?" if meant else f"The options are {', '.join(OPTIONS)}")
        is_flag = isinstance(value, bool) and key not in ("ram", "gpu_ram")
        text = str(int(value)) if is_flag else os.fspath(value) if isinstance(value, os.PathLike) else str(value)
        if text != text.encode(errors="replace").decode():
            raise Error.of(1201 if key == "nvme_path" else 1002, f"{key} is {text!r}, which is not UTF-8", "Give it a name in UTF-8")
        pairs += [key, text]
    return pairs


def _options(nvme_path, ram, job, config, others):
    """Arguments count more than the environment, which counts more than a configuration in a file; one in a dictionary counts as arguments do."""
    options = {}
    if config is not None:
        if isinstance(config, dict) and (not config or any(key in OPTIONS for key in config)):
            options.update(config)  # what else it has is refused by name
        elif not isinstance(config, (dict, str, os.PathLike)):
            raise Error.of(1002, f"config is {config!r}", "Give it a dictionary, or the path of a file (offloadd.toml, ds_config.json)")
        else:
            from .config import options_of  # files, and dictionaries in the manner of DeepSpeed

            options.update(options_of(config))
    options.update({key: value for key, value in {"nvme_path": nvme_path, "ram": ram, "job": job, **others}.items() if value is not None})
    if options.get("nvme_path"):
        options["nvme_path"] = absolute_paths(options["nvme_path"])
    return options


def absolute_paths(pools):
    """`pools` (a path, several in a list or separated by commas) for a script that goes to another directory later, separated by commas."""
    several = list(pools) if isinstance(pools, (list, tuple)) else [pools]
    if not all(isinstance(each, (str, os.PathLike)) for each in several):
        raise Error.of(1002, f"nvme_path is {pools!r}, which is no path", "Give it a directory, or a list of several")
    given = [os.fspath(each) for each in pools] if isinstance(pools, (list, tuple)) else map(str.strip, os.fspath(pools).split(","))
    return ",".join(each if not each or os.path.isabs(each) else os.path.join(os.getcwd(), each) for each in given)


def reduces_gradients(options):
    """Whether the trainer makes the ranks' gradients one by itself, with these arguments of attach()."""
    known = {key: value for key, value in options.items() if key in OPTIONS}
    return _options(None, None, None, options.get("config"), known).get("gradients") == "reduced_by_trainer"


def _job_of(options):
    return str(options.get("job") or os.environ.get("OFFLOADD_JOB") or "default")


def _pool_of(options):
    given = options.get("nvme_path") or os.environ.get("OFFLOADD_POOL")
    return absolute_paths(given) if given else str(given)


def _open_engine(options):
    job, pool = _job_of(options), _pool_of(options)
    if _outlived or any(handle.job == job and handle.nvme_path == pool for handle in handles()):
        gc.collect()  # what a notebook has left behind
    for handle in handles():
        if handle.job != job or handle.nvme_path != pool:
            continue
        if handle.models and all(model is None for model in handle.models):
            handle.close()  # nobody can train it any more
        else:
            raise Error.of(1205, f"job {job} is attached already in this process",
                           "Attach several models in one call, attach([a, b], [optimizer_a, optimizer_b]), give each a job of its own, "
                           "or close() the handle first")
    for each in [each for each in _outlived if each.job == job and each.nvme_path == pool]:
        each.close()
    return Engine(_strings(options))


# ---- Models ------------------------------------------------------------------------------------

_OWN_REDUCTION = 'or leave the reduction to it: attach(..., gradients="reduced_by_trainer")'


def _without_wrapper(model):
    """The module that DistributedDataParallel wraps, for jobs whose gradients it reduces."""
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return model
    if model.gradient_as_bucket_view:
        raise Error.of(1601, "DistributedDataParallel was made with gradient_as_bucket_view=True, and gradients of the job have memory of their own",
                       "Leave gradient_as_bucket_view out")
    return model.module


def _without_prepare(optimizer):
    """The script's own, of one that Accelerate's prepare() or Lightning has wrapped."""
    wraps = not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__name__ == "AcceleratedOptimizer"
    return getattr(optimizer, "optimizer", optimizer) if wraps else optimizer


def _with_those_gone(modules):
    """Each of them; an empty one in the place of None, since those that are gone count in names."""
    return [module if module is not None else torch.nn.Module() for module in modules]


def _check_model(model):
    name = type(model).__name__
    if name in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine"):
        way = "Attach the model itself: the daemon adds the gradients of several ranks (torchrun), and nothing has to wrap it"
        raise Error.of(1601, f"the model is wrapped in {name}", f"{way}, {_OWN_REDUCTION}" if name == "DistributedDataParallel" else way)
    for key, parameter in all_named_parameters_of(model):
        if torch.nn.parameter.is_lazy(parameter):
            raise Error.of(1601, f"parameter '{key}' is not initialised (a lazy module)", "Run one forward pass before attach()")
        if parameter.device.type == "meta":
            raise Error.of(1601, f"parameter '{key}' is on device meta, it has no value",
                           "Build the model with `with offloadd.init(...):` instead of on meta")
        check_has_memory(f"parameter '{key}'", parameter)


@functools.lru_cache(maxsize=None)
def _refuse_wrappers():
    """DistributedDataParallel around a model that is attached already, where the daemon adds the gradients of several ranks."""
    wrapper = torch.nn.parallel.DistributedDataParallel
    original = wrapper.__init__

    @functools.wraps(original)
    def initialise(self, module, *args, **kwargs):
        added = [handle.identities() for handle in handles() if handle.adds_gradients]
        if any(id(parameter) in identities for parameter in module.parameters() for identities in added):
            raise Error.of(1601, "the model is attached, and is wrapped in DistributedDataParallel",
                           f"Leave the wrapper out: the daemon adds the gradients of several ranks, {_OWN_REDUCTION}")
        original(self, module, *args, **kwargs)

    wrapper.__init__ = initialise


def _to_unfreeze(named, unfreeze):
    """Frozen parameters that are to be declared as trained: all, or those named, or given."""
    if not unfreeze:
        return []
    frozen = [(name, p) for name, p in named if not p.requires_grad and p.is_floating_point() and p.is_leaf]
    if unfreeze is True:
        return [p for _, p in frozen]
    patterns = [each for each in _listed(unfreeze) if isinstance(each, str)]
    for each in patterns:
        if not any(fnmatch.fnmatchcase(name, each) for name, _ in named):
            raise Error.of(1002, f"unfreeze: no parameter is called {each}", "Name them as model.named_parameters() does, with * for what differs")
    given = {id(each) for each in _listed(unfreeze) if isinstance(each, torch.Tensor)}
    return [p for name, p in frozen if id(p) in given or any(fnmatch.fnmatchcase(name, each) for each in patterns)]


def _stored_state(engine):
    """(the job's identity, the trainer's state); the identity is empty in jobs that were not made from Python."""
    stored = bytes(engine.trainer_state().tolist())
    if stored.startswith(_STATE_MAGIC):
        return stored[len(_STATE_MAGIC):_OWN_STATE_BYTES].hex(), stored[_OWN_STATE_BYTES:]
    return "", stored


# ---- torch.compile -----------------------------------------------------------------------------

_stance = {"told": False, "forced": False}


def _force_eager(tell):
    if tell and not _stance["told"]:
        _stance["told"] = True
        _log.warning("offloadd: torch.compile runs eagerly while a model is offloaded (compiled kernels read memory directly)")
    torch.compiler.set_stance("force_eager")
    _stance["forced"] = True


def _refuse_for_operator(function):
    """torch.cond and other operators over functions compile these, to find the weights that they close over. Run eagerly they would find
    none, and those weights would get no gradients."""
    utils = sys.modules.get("torch._higher_order_ops.utils")
    if not getattr(getattr(utils, "_hop_compile_tls", None), "in_hop_compile", False):
        return
    name = getattr(function, "__qualname__", "operator").partition(".")[0]
    raise Error.of(1601, f"the program calls torch's {name}(), which compiles the functions that it is given, and what is compiled runs eagerly while a model "
                   "is offloaded: weights that those functions use would get no gradients", "Write it as an ordinary if, or a loop, of Python")


def _run_eagerly():
    """Compiled kernels read weights by raw pointers: what is compiled runs eagerly while a job is open. torch._dynamo, which is slow to
    import, is left alone where nobody uses it."""
    if "torch._dynamo" in sys.modules:
        _force_eager(tell=False)
    if getattr(torch.compile, "_offloadd", False):
        return
    original = torch.compile

    @functools.wraps(original)
    def compile(*args, **kwargs):
        if handles():
            _refuse_for_operator(args[0] if args else None)
            _force_eager(tell=True)
        return original(*args, **kwargs)

    compile._offloadd = True
    torch.compile = compile


def _run_as_before():
    if _stance["forced"] and not handles():
        _stance["forced"] = False
        torch.compiler.set_stance("default")


# ---- Jobs whose model is gone ------------------------------------------------------------------

def _is_held(reference):
    """Whether anybody has the parameter, or another tensor over its storage, beside the engine."""
    parameter = reference()
    # The engine's reference, ours, and that of the question.
    return parameter is not None and (sys.getrefcount(parameter) > 3 or served.is_shared(parameter))


class _Outlived:
    """A job that stays open while somebody has one of its weights: a view, a module, a graph."""

    def __init__(self, handle, parameters):
        self.job, self.nvme_path = handle.job, handle.nvme_path
        self._engine, self._process = handle._engine, handle._process
        self._parameters = [weakref.ref(parameter) for parameter in parameters]

    def is_over(self):
        return not any(map(_is_held, self._parameters))

    def close(self):
        _outlived.remove(self)
        engine, self._engine = self._engine, None
        if os.getpid() == self._process:
            engine.close()


_outlived = []


def _close_outlived(phase, _):
    """When the garbage collector is done, which is what ends handles: they and their optimizers refer to each other."""
    if phase == "stop":
        for each in [each for each in _outlived if each.is_over()]:
            each.close()


gc.callbacks.append(_close_outlived)


# ---- The handle --------------------------------------------------------------------------------

class _Ended:
    """What is to be known of a closed handle while its model lives. Nothing that the handle had lives on by it."""

    is_open = False

    def __init__(self, handle):
        self.job, self.last_step = handle.job, handle.last_step
        self._optimizers = [weakref.ref(optimizer) for optimizer in handle.optimizers]

    @property
    def optimizers(self):
        return [optimizer for optimizer in (reference() for reference in self._optimizers) if optimizer is not None]


class Handle:
    """A job that is attached. Its methods may be called between steps, by one thread.

    optimizer    the script's own object (the first, of several: optimizers)
    step         how many steps the job has taken, over all of its runs
    """

    def __init__(self, engine, models, optimizers, options, unfreeze=None, beside=()):
        self._engine = engine
        self._process = os.getpid()
        self._models, self.optimizers = [weakref.ref(model) for model in models], optimizers
        self.options = dict(options)
        self.job, self.nvme_path = _job_of(options), _pool_of(options)
        self.asked_for, self.training = self.job, 1  # the job that attach() was told, and how many of its name have trained these models
        self.followed_by = None  # the job that went on with them
        self._parts = []
        self._versions = {}  # after the last step of this run
        self.last_step = 0  # when it was closed
        self.has_loaded_weights = False
        self._attach(models, unfreeze, beside)
        self._places, self._has_told_of_places = self._places_now(), False
        _open_handles.add(self)
        global _made
        _made += 1
        for model in models:
            _by_model[model] = self

    def _attach(self, models, unfreeze, beside):
        for model in models:
            _check_model(model)
        recipes = []
        for optimizer in self.optimizers:
            former = check_free(optimizer)
            if former is not None and self._engine.step_count() == 0:
                raise Error.of(1604, f"the optimizer's moments are in job {former}, and this is a new one",
                               f"Attach to job {former}, or make a new optimizer")
            recipes.append(recipe_of(optimizer))
        kinds = {recipe.kind for recipe in recipes if not recipe.is_foreign} or {Foreign.kind}
        if any(not recipe.is_foreign for recipe in recipes) and any(p.requires_grad for model in models for p in model.parameters()):
            check_arithmetic()
        if len(kinds) > 1:
            raise Error.of(1604, f"one job with optimizers of several kinds ({', '.join(sorted(kinds))})",
                           "Use optimizers of one kind for all parts of a job, give each model a job of its own, or attach one of the optimizers: "
                           "the other goes on in this process, with what it keeps in memory")
        self._check_once()
        named = with_strangers(names_of(models), self.optimizers)
        served.check_exported(named)
        served.check_not_shared(named)
        with beneath.apart(named):
            self._attach_named(models, named, recipes, kinds, unfreeze, beside)
        served.install()
        served.install_serializers()
        lightning_teardown.serve()
        _run_eagerly()
        for part in self._parts:
            part.swap()
            if part.is_foreign:
                part.tell()

    def _attach_named(self, models, named, recipes, kinds, unfreeze, beside):
        served.give_own_memory(named, self._engine, beneath.is_over_a_source)
        destination = in_memory.destination_of(self.options)
        buffers = buffers_of(models, destination)
        buffers += buffers_beside(beside, buffers, destination)
        foreign = [recipe.name for recipe in recipes if recipe.is_foreign]
        if foreign and self._engine.step_count() > 0:
            raise Error.of(1604, f"the job is at step {self._engine.step_count()}, but what {foreign[0]} keeps is in memory and is not "
                                 "part of it", "Begin a new job with the saved weights, or use AdamW, Adam, SGD, Adagrad or RMSprop of torch.optim")
        parts = [recipe.part(self, optimizer) for optimizer, recipe in zip(self.optimizers, recipes)]
        for part in parts:
            if not part.is_foreign:
                part.check_named_once()
        self._kind = kinds.pop()
        values = [row for part in parts if not part.is_foreign for row in part.group_values()]
        # What an optimizer that runs in this process says to the daemon: a step of nothing.
        self._idle_values = values[0] if values else [0.0] * len(Engine.parameters_of(self._kind))
        values = values or [self._idle_values]
        unfrozen = _to_unfreeze(named, unfreeze)
        for parameter in unfrozen:
            parameter.requires_grad_(True)
        try:
            self._identities = {id(parameter) for _, parameter in named}
            self._engine.attach([name for name, _ in named], [parameter for _, parameter in named],
                                [name for name, _ in buffers], [buffer for _, buffer in buffers], self._kind, values)
            for part in parts:
                self._take_what_was_kept(part)
            self._read_mark()
            self._engine.seal()
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
            _refuse_wrappers()

    def _may_grow(self):
        return self._running().world_size() == 1 and in_memory.destination_of(self.options) is None

    def check_grows(self, parameter):
        """OFD-1601 where a parameter that comes later cannot become the job's."""
        if not self._may_grow() or parameter.device.type != "cpu":
            raise Error.of(1601, f"add_param_group() with a parameter of shape {list(parameter.shape)} that was not in the model when it was "
                                 "attached, and there are several ranks, or a device",
                           "Give attach() all modules that are trained at some time, attach([model, other], …), with those that are frozen at first; "
                           "or give the optimizer their parameters when it is made")

    def names_all(self, parameters):
        """Whether its models have them."""
        has = {id(parameter) for model in self.models if model is not None for _, parameter in all_named_parameters_of(model)}
        return all(id(parameter) in has for parameter in parameters)

    def _is_new(self, parameter):
        return id(parameter) not in self._identities and parameter.numel() > 0 and parameter.is_floating_point()

    def take_what_came(self):
        """Before anybody asks the job for all that its models have: what they have got since becomes the job's, trained or not, and all that
        they have is called as it is now."""
        if self._engine is None:
            return
        named = names_of(_with_those_gone(self.models))
        if any(self._is_new(parameter) for _, parameter in named):
            if self._may_grow():
                self.grow()
        elif None not in self.models and self._has_other_names(named):
            self.grow()

    def _has_other_names(self, named):
        known = [(name, id(parameter)) for name, parameter in self._parameters.items() if not name.startswith("optimizer/")]
        return known != [(name, id(parameter)) for name, parameter in named]

    def grow(self):
        """What its models and optimizers have got since attach() becomes the job's, which is laid out anew for it."""
        engine = self._running()
        self._reassigned.take_alike(engine)
        models, destination = _with_those_gone(self.models), in_memory.destination_of(self.options)
        beside = _with_those_gone(module() for module in self._beside)
        for model in models:
            _check_model(model)
        named = names_of(models)
        # What the models have replaced may be in the groups still.
        had = self._identities - {id(parameter) for name, parameter in self._parameters.items() if name.startswith("optimizer/")}
        named = with_strangers(named, self.optimizers, had)
        new = [(name, parameter) for name, parameter in named if id(parameter) not in self._identities]
        self._part_from_former(new, {id(parameter) for _, parameter in named})
        served.check_exported(new)
        served.check_not_shared(new)
        with beneath.apart(new):
            served.give_own_memory(new, engine, beneath.is_over_a_source)
            buffers = buffers_of(models, destination)
            buffers += buffers_beside(beside, buffers, destination)
            engine.grow([name for name, _ in named], [parameter for _, parameter in named],
                        [name for name, _ in buffers], [buffer for _, buffer in buffers])
        self._identities = self._identities | {id(parameter) for _, parameter in named}
        self._former = [*self._former, *self._parameters.values()]  # the identities are of objects that live
        self._parameters, self._by_storage = dict(named), None
        self._reassigned = Reassigned(models, beside, buffers)

    def _part_from_former(self, new, has):
        """What is new over the memory of a parameter that it has replaced, as weight_norm() makes it, gets memory of its own, where nothing else
        that is trained has it."""
        stepped = {id(parameter) for optimizer in self.optimizers for parameter in parameters_of(optimizer)}
        parts = {}  # of those that are replaced
        for parameter in {id(each): each for _, each in new if served.managed(each)}.values():
            former = self.parameter_over(served.storage_of(parameter))
            if former is not None and id(former) not in has and (former.grad is None or id(former) not in stepped):
                parts.setdefault(id(former), []).append(parameter)
        for several in parts.values():
            several.sort(key=torch.Tensor.storage_offset)
            if all(one.storage_offset() + one.numel() <= other.storage_offset() for one, other in zip(several, several[1:])):
                for parameter in several:
                    parameter.data = served.copy_of(parameter)

    def _take_what_was_kept(self, part):
        """A new job begins with it; one that exists has its own."""
        if part.is_foreign:
            return
        step = self._engine.step_count()
        if step > 0:
            if has_stepped(part.optimizer):
                _log.warning("offloadd: job %s is at step %d and keeps its moments, those of the optimizer are dropped", self.job, step)
            return
        kept = part.kept_in_memory()
        if kept[0]:
            self._engine.begin_with(*kept)

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
        if os.getpid() != self._process:
            raise Error.of(1802, f"job {self.job} is of the process that forked this one, and cannot be used here",
                           "Use it there, give this process what it needs beforehand (copy.deepcopy(model)), or start it by "
                           'multiprocessing.get_context("spawn"); models of its own it may attach, to a job with another name')
        return self._engine

    def commit(self):
        """A step of an optimizer that runs in this process."""
        self.settle()
        self._running().apply(self._kind, [[]], [self._idle_values], [False])
        self._end_step()

    def _in_process(self):
        return {id(parameter) for part in self._parts if part.is_foreign for parameter in parameters_of(part.optimizer)}

    def settle(self):
        """Before a step: what was put in the place of the job's tensors."""
        served.settle_replaced(self._identities, self._in_process())
        followers.check()
        self._tell_of_places()
        self._reassigned.settle(self._identities, self._running())
        self._settle_states()

    def _places_now(self):
        return [id(module) for model in self.models if model is not None for module in model.modules()]

    def _tell_of_places(self):
        """Once, of modules that have changed places: a run that goes on looks for parameters under the names of attach(), or of the last growth."""
        if self._has_told_of_places or None in self.models:
            return
        former, self._places = self._places, self._places_now()
        if former == self._places:
            return
        had = {id(parameter): name for name, parameter in reversed(self._parameters.items())}
        moved = [(had[id(parameter)], name) for name, parameter in names_of(self.models)
                 if id(parameter) in had and self._parameters.get(name, parameter) is not parameter]
        if moved:
            self._has_told_of_places = True
            _log.warning("offloadd: modules have changed places since job %s was attached (%s is %s now), and the job goes by the names of then: a run "
                         "that goes on has to attach the model with each where it was, and change places after that", self.job, *moved[0])

    def _kept_parts(self):
        """Those whose state is the job's."""
        return [part for part in self._parts if not part.is_foreign]

    def _end_states(self):
        with contextlib.suppress(Error):  # a job that has failed: what was shown stays as it was
            for part in self._kept_parts():
                part.end()

    def _settle_states(self):
        for part in self._kept_parts():
            part.settle()

    def apply(self, kind, groups, values, counts):
        self.settle()
        self._running().apply(kind, groups, values, counts)
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
                         "write that anew, before its first step (docs/python.md, the handle)", self.job, self.last_step,
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
        is_known = id(parameter) in self._identities and parameter.numel() and not is_table(parameter)
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
        part = next((part for part in self._parts if part.has(parameter)), None) if plane == "sum" else None
        if part is not None and part.recipe.kind == "adagrad" and self.update_count(parameter) == 0:
            return part.first_sum(parameter)
        return running.gather(parameter, plane)

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

    def mark(self):
        """What a checkpoint says of the job."""
        return {"job": self.job, "id": self._id, "step": self.step}

    # ---- The trainer's state, behind our own ----

    def _read_mark(self):
        self._id, self._trainer_state = _stored_state(self._engine)
        has_none = not self._id and not self._trainer_state
        if has_none and not self._engine.step_count():
            self._id = uuid.uuid4().hex
        if self._engine.world_size() > 1:  # the first rank's
            own = torch.tensor(list(bytes.fromhex(self._id)), dtype=torch.uint8)
            self._id = bytes(self._engine.exchange(own)[0].tolist()).hex()
        if self._id and has_none:
            self._set_state(b"")

    def _set_state(self, data):
        whole = (_STATE_MAGIC + bytes.fromhex(self._id) if self._id else b"") + data
        self._engine.set_trainer_state(torch.frombuffer(bytearray(whole), dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8))
        self._trainer_state = data

    @property
    def trainer_state(self):
        """The trainer's own small state (random numbers, position in the data), as bytes: committed with the next step(), and given
        back when the job is resumed."""
        return self._trainer_state

    @trainer_state.setter
    def trainer_state(self, data):
        self._running()
        self._set_state(bytes(data))

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
        known = {**self._parameters, **dict(names_of(_with_those_gone(self.models)))}  # of a model that has parted from one, too
        if given in known:
            return known[given]
        tables = dict(tables_of([model for model in self.models if model is not None]))
        if given not in tables:
            raise Error.of(1002, f"the job has no parameter '{given}'", "Use a name of model.named_parameters()")
        return tables[given]

    def gather(self, parameters, plane="weight", *, write=False):
        """Private copies in memory of the host: of one parameter (by itself or its name) a tensor, of several a list. `plane` is "weight",
        "master", or a moment by torch's name ("exp_avg"). As a context manager with write=True, changes are written back at its end."""
        if write and plane != "weight":
            raise Error.of(1002, f"gather({plane!r}, write=True)", "Only weights can be written")
        return Gathered.of(self, parameters, plane, write)

    def plan(self):
        values, text = self._running().plan()
        made = Plan(zip(_PLAN, values))
        for key in made:
            if not key.endswith("per_parameter"):
                made[key] = int(made[key])
        made["gradients_spilled"] = bool(made["gradients_spilled"])
        made.text = text
        return made

    def statistics(self):
        made = dict(zip(_STATISTICS, self._running().statistics()))
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
        jobs = [job for daemon in json.loads(run("status", "--json"))["daemons"] for job in daemon["jobs"]]
        for job in jobs:
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

    def save_weights(self, folder, *, shard_bytes=0, left_out=()):
        """Writes the weights as a safetensors folder, in constant memory, without those that are named in `left_out`."""
        running = self._running()
        self.take_what_came()
        self.settle()
        running.save_weights(os.fspath(folder), shard_bytes, list(left_out))

    def load_universal(self, folder):
        """Takes masters and optimizer state of a universal checkpoint of DeepSpeed; durable with the next step()."""
        self.take_what_came()
        universal.load(folder, list(self._parameters.items()), self.optimizers)

    def save_universal(self, folder, tag=None):
        """Writes masters and optimizer state as a universal checkpoint of DeepSpeed, FOLDER/TAG, one parameter at a time."""
        self.take_what_came()
        served.settle_replaced(self._identities, self._in_process())
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
        """Drains what was stepped and ends the job. The model's parameters cannot be used after it."""
        if self._engine is None:
            return
        if os.getpid() == self._process:
            self.last_step = self._engine.step_count()
            self._tell_of_writes()
            self._end_states()
        engine, self._engine = self._engine, None
        served.forget_replaced(self._identities)
        followed = followers.memory_of(self._identities) if self.options.get("weights_at_close") == "memory" else []
        followers.end(self._identities)
        for model in filter(None, (reference() for reference in self._models)):
            if _by_model.get(model) is self:
                _by_model[model] = _Ended(self)
        if os.getpid() == self._process:
            engine.close()
            _run_as_before()
            left = followers.give_memory(followed)
            if left:
                _log.warning("offloadd: job %s is closed, and %d arrays or buffers over its parameters follow them no more: make them anew, "
                             "p.detach().numpy()", self.job, left)

    def __del__(self):
        """The model and the optimizer are gone, too; a state_dict() of the model may live on."""
        # A look at __dict__ would make one, which the garbage collector takes for somebody who still has everything in it.
        parameters = getattr(self, "_parameters", None)
        if parameters and self._engine is not None and os.getpid() == self._process and not sys.is_finalizing():
            self._end_states()
            _outlived.append(_Outlived(self, parameters.values()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        state = f"at step {self.step}" if self.is_open else "closed"
        return f"<offloadd job {self.job} {state}>"

    def __deepcopy__(self, memo):
        return self  # one job, however many objects refer to it

    def __reduce__(self):
        raise Error.of(1002, "the handle of a job cannot be pickled", "Attach again in the other process, to the same job")


def open_ahead(options):
    """Opens the job of attach(**options), which will take it, unless it is open: (engine, the trainer's state). For integrations."""
    global _constructed
    opened = init(**{key: value for key, value in options.items() if key in OPTIONS or key == "config"})
    if _constructed is not None:
        _check_is_of(_constructed.options, opened.options)
    else:
        opened._engine = _open_engine(opened.options)
        _constructed = opened
    return _constructed._engine, _stored_state(_constructed._engine)[1]


def was_made_before(options):
    """Whether the job of attach(**options) was made before and has taken no step. Opens the job."""
    engine = open_ahead(options)[0]
    opened = _constructed.options
    return has_begun(engine, _pool_of(opened), _job_of(opened))


def beginning_of(model, options):
    """What the model brings along to the job of attach(model, …, **options), where that was made before and has taken no step; else
    None. Opens the job."""
    return Beginning(names_of([model])) if was_made_before(options) else None


def _load_again(model, handle):
    """Lightning loads a checkpoint's weights before it asks for optimizers. A job that exists has its own, which attach() has put in their place:
    with the checkpoint's moments, of another step, they are loaded again."""
    connector = getattr(getattr(model, "_trainer", None), "_checkpoint_connector", None)
    loaded = getattr(connector, "_loaded_checkpoint", None) or {}
    marks = [state.get("offloadd") or {} for state in loaded.get("optimizer_states", [])]
    is_of_this_step = all(mark.get("id") == handle.mark()["id"] and mark.get("step") == handle.step for mark in marks)
    if handle.step > 0 and "state_dict" in loaded and marks and not is_of_this_step:
        _log.warning("offloadd: job %s is at step %d: it goes on with the weights of the checkpoint", handle.job, handle.step)
        model.load_state_dict(loaded["state_dict"], strict=model.strict_loading)


# What attach() may be given otherwise than init(), whose values count: results are the same.
_HOW_FAST = ("ram", "io", "durability", "generations", "update_threads", "update_in_backward", "spill_gradients", "zero_stage", "weights_home",
             "state_home", "persistence", "prefetch", "max_live")


def _check_is_of(opened, options):
    """OFD-1002 where options name another job than the one that init() has opened."""
    for key, there in (("job", _job_of(opened)), ("nvme_path", _pool_of(opened))):
        if str(options.get(key, there)) != there:
            raise Error.of(1002, f"attach() was given {key} = {options[key]}, but init() has opened job {_job_of(opened)} in {_pool_of(opened)}, and no "
                                 "attach() has taken it", "Attach to that job: leave its options out, they are init()'s; or start the program again")


def _as_opened(opened, options):
    """Those of attach() behind an init(), whose engine has its own already."""
    _check_is_of(opened, options)
    given = {"device": opened.get("device") or os.environ.get("OFFLOADD_DEVICE"),
             "gpu_ram": opened.get("gpu_ram") or os.environ.get("OFFLOADD_GPU_RAM"),
             "raw_access": opened.get("raw_access", "serve"), "weights_at_close": opened.get("weights_at_close", "released")}
    for key, value in options.items():
        at_first = given.get(key, opened.get(key))
        if key not in OPTIONS or key in ("job", "nvme_path") or str(value) == str(at_first):
            continue
        if key not in _HOW_FAST:
            raise Error.of(1002, f"attach() was given {key} = {value}, but init() has opened the job with {at_first}", f"Give {key} to init()")
        _log.warning("offloadd: %s = %s of attach() counts for nothing: init() has opened job %s with %s", key, value, _job_of(opened),
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
    config           a configuration (docs/python.md)
    unfreeze         frozen parameters whose optimizer state has room in a new job at once: True, names (patterns), or parameters
    initial_weights  a file or folder that a new job takes its weights from: safetensors, or pytorch_model.bin

    raw_access       "serve": pointers (data_ptr(), kernels of one's own) bring a tensor to memory until the end of the step; "error":
                     they are refused
    weights_at_close "released", or "memory": the model is an ordinary one when the job is closed

    Further options: io, durability, generations, update_threads, update_in_backward, spill_gradients; zero_stage, weights_home,
    state_home, persistence, prefetch, max_live, gradients, gradient_average (docs/ranks.md); and rank … for launchers of one's own.
    """
    global _constructed_in_memory
    models = _listed(model) if model is not None else []
    for each in models:
        if not isinstance(each, torch.nn.Module):
            raise Error.of(1601, f"{type(each).__name__} is no torch.nn.Module", "Give attach() the model itself, attach(model, optimizer, …)")
    beside = others.pop("_beside", ())  # modules of which the job is to have the buffers, too
    is_only_read = optimizer is None
    if is_only_read:
        for each in models:
            each.requires_grad_(False)
        optimizer = torch.optim.SGD  # which keeps nothing
    if isinstance(optimizer, type):
        arguments = {key: others.pop(key) for key in list(others) if key not in OPTIONS}
        optimizer = optimizer([p for each in models for p in each.parameters()], **arguments)
    optimizers = _listed(optimizer)
    optimizers = [_without_prepare(each) for each in optimizers]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise Error.of(1604, f"{type(each).__module__}.{type(each).__qualname__} is no torch.optim.Optimizer",
                           "Train with an optimizer of torch.optim, and give attach() that")
        if not hasattr(each, "_optimizer_step_pre_hooks"):
            raise Error.of(1604, f"{type(each).__name__} was made without torch.optim.Optimizer.__init__(), and its steps cannot be seen",
                           "Attach the optimizer that it is around, before it is wrapped, or have it call super().__init__(params, defaults)")
    options = _options(nvme_path, ram, job, config, others)
    if is_disabled():
        options, _constructed_in_memory = {**_constructed_in_memory, **options}, {}
    if reduces_gradients({**(_constructed.options if _constructed is not None else {}), **options}):
        models = [_without_wrapper(each) for each in models]
    if is_disabled():
        return in_memory.Handle(models, optimizers, options, initial_weights)
    if _constructed is not None:
        options = _as_opened(_constructed.options, options)
    former = anew.former_among(handles(), models, optimizers) if not is_only_read else None
    if former is not None:
        return _attach_anew(former, models, optimizers, options, unfreeze, initial_weights, beside)
    return _attach(models, optimizers, options, unfreeze, initial_weights, beside, is_only_read)


def _attach_anew(former, models, optimizers, options, unfreeze, initial_weights, beside):
    gradients = anew.gradients_of(former)
    asked_for = _job_of(options)
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


def _attach(models, optimizers, options, unfreeze, initial_weights, beside, is_only_read=False):
    global _constructed
    engine, _constructed = _constructed, None
    engine = _open_engine(options) if engine is None else engine.take()
    handle = None
    try:
        is_pickled = initial_weights is not None and pickled.files_of(initial_weights) is not None
        if initial_weights is not None and not is_pickled:
            engine.set_initial_weights(os.fspath(initial_weights), [])
        handle = Handle(engine, models, optimizers, options, unfreeze, beside)
        if is_pickled and handle.step == 0:
            handle.load_weights(initial_weights)
        for each in models:
            _load_again(each, handle)
        return handle
    except BaseException as error:
        (handle or engine).close()
        if is_only_read and isinstance(error, Error) and error.id == 1602 and "was trained with" in str(error):
            raise Error.of(1602, f"job {_job_of(options)} was trained, and attach() was given no optimizer",
                           "Give it the optimizer that the job was trained with, which need not step, or read the weights that offloadctl export "
                           "writes in a job of their own") from None
        raise


class init:
    """`with offloadd.init(nvme_path=…, ram=…, job=…):` builds a model that is larger than memory: big tensors made inside go to the
    pool as soon as the operation that fills them ends. attach() then takes the job that was opened here. With `device` the model is
    built in the same way, on the host, and trained there: it is never whole in either memory."""

    def __init__(self, *, nvme_path=None, ram=None, job=None, config=None, **others):
        self.options = _options(nvme_path, ram, job, config, others)
        self._engine = None
        self._constructs_in = None  # the thread

    def __enter__(self):
        global _constructed, _constructed_in_memory
        if is_disabled():
            _constructed_in_memory = self.options
            return self
        if _constructed is not None:
            raise Error.of(1002, "init() inside another init(), or a second one before attach()", "Build all models of a job in one init()")
        self._engine = _open_engine(self.options)
        self._engine.begin_construction()
        _constructed = self
        self._constructs_in = threading.get_ident()
        served.install()
        served.install_serializers()
        return self

    def __exit__(self, failure, *_):
        global _constructed, _constructed_in_memory
        if failure is not None:
            _constructed_in_memory = {}
        self._constructs_in = None
        if self._engine is None:
            return
        self._engine.end_construction()
        if failure is not None:
            _constructed = None
            self.take().close()

    def take(self):
        engine, self._engine = self._engine, None
        return engine


@contextlib.contextmanager
def _in_ordinary_memory():
    """In an init(): new tensors are ordinary ones."""
    opened = _constructed
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


def gather(parameters, plane="weight", *, write=False):
    """As Handle.gather, of whichever job the parameters belong to. Tensors that are in memory are copied."""
    several = not isinstance(parameters, torch.Tensor)
    chosen = list(parameters) if several else [parameters]

    def copy(parameter):
        handle = handle_of(parameter)
        if handle is not None:
            return handle.gather_one(parameter, plane)
        if plane != "weight":
            raise Error.of(1002, f"a parameter of shape {list(parameter.shape)} is in no job, and has no {plane}", "Attach its model and optimizer")
        return served.copy_of(parameter)

    copies = Gathered(chosen, [copy(each) for each in chosen], write)
    return copies if several or write else copies[0]


def _leave_to_the_parent():
    """In a forked child, whose sessions are its parent's: engines are not destroyed here, whatever becomes of what refers to them."""
    opened = [_constructed, *_open_handles]
    for engine in [each._engine for each in opened if each is not None and each._engine is not None]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))


os.register_at_fork(after_in_child=_leave_to_the_parent)


@atexit.register
def _close_all():
    for job in [*handles(), *_outlived]:
        job.close()


def handle_of(parameter):
    """The handle of the job that a parameter is of, with OFFLOADD_DISABLE=1 the one in memory; None where there is none."""
    return next((each for each in [*handles(), *in_memory.handles()] if id(parameter) in each.identities()), None)


def handles():
    """The jobs that are open in this process."""
    return [handle for handle in list(_open_handles) if handle.is_open and getattr(handle, "_process", os.getpid()) == os.getpid()]


def were_made():
    """Whether this process has had a job, open or closed."""
    return _made > 0 or _constructed is not None
