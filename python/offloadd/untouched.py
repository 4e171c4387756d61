"""Scripts that do not know of offloadd (`python -m offloadd script.py`): the first forward pass that trains attaches the module it is
of, with all optimizers that were made. Hugging Face's Trainer is attached by its callback."""

import functools
import gc
import itertools
import logging
import os
import sys
import weakref

import torch
from torch._guards import active_fake_mode

from . import attaching, given, jobs, lightning_ranks, mapped_files
from .errors import class_of
from .imported import when_imported
from .kinds import are_together
from .library import is_disabled
from .loaded import Loaded
from .module_hooks import BeforeForward
from .optimizer import has_stepped, shares_state
from .recipes import parameters_of, recipe_of, served_class_of

_log = logging.getLogger("offloadd")

_closure_first = set()  # classes


def _run_closure_first(cls):
    """step(closure), with the first forward pass in the closure (Lightning): the step has to be that of the class which the optimizer has behind
    it. torch's own run the closure once, before anything else. On the class: what is on an instance does not keep it alive."""
    if cls in _closure_first:
        return
    _closure_first.add(cls)
    own = cls.step

    @functools.wraps(own)
    def step(self, closure=None, **others):
        if closure is None or type(self) is not cls:
            return own(self, closure, **others)
        with torch.enable_grad():
            loss = closure()
        return (own if type(self) is cls else type(self).step)(self, lambda: loss, **others)

    cls.step = step


def _modules_alive():
    # By type(): others may answer anything when they are asked for their class.
    return [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module) and "_modules" in each.__dict__]


def _modules_beside(module, optimizers):
    """The outermost modules around parameters of the optimizers, other than `module`, in the order of these: their buffers belong to what is
    trained, too. A script may call a module inside of its model, or train several at once."""
    alive = _modules_alive()
    around, holders = {}, {}
    for each in alive:
        for child in each._modules.values():
            around.setdefault(id(child), []).append(each)
        for parameter in each._parameters.values():
            holders.setdefault(id(parameter), []).append(each)
    found, seen = {}, set()
    ascending = [each for optimizer in optimizers for parameter in parameters_of(optimizer) for each in holders.get(id(parameter), ())]
    while ascending:
        each = ascending.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        parents = around.get(id(each), [])
        if not parents:
            found[id(each)] = each
        ascending[:0] = parents
    found.pop(id(module), None)
    # Where they share a part: by what each has, which is the same in every run.
    place = {id(p): number for number, p in enumerate(p for optimizer in optimizers for p in parameters_of(optimizer))}
    return sorted(found.values(), key=lambda each: [place[id(p)] for p in each.parameters() if id(p) in place])


def _shapes_of(module):
    return [parameter.shape for parameter in module.parameters()]


def _copies_of(modules, trained):
    """Those alive that look like one of them, and have none of the parameters with these ids."""
    kinds = [(type(each), _shapes_of(each)) for each in modules]
    return [each for each in _modules_alive() if any(type(each) is cls and _shapes_of(each) == shapes for cls, shapes in kinds)
            and trained.isdisjoint(map(id, each.parameters()))]


def _are_like(tensors, shapes, trained):
    return len(tensors) == len(shapes) and all(
        isinstance(each, torch.Tensor) and each.shape == shape and each.is_floating_point() and id(each) not in trained
        for each, shape in zip(tensors, shapes))


def _holder_of(tensors):
    """The object of a class that has this list or dictionary as an attribute, or None."""
    for referrer in gc.get_referrers(tensors):
        is_of_instance = type(referrer) is dict and not isinstance(referrer.get("__name__"), str)
        for each in gc.get_referrers(referrer) if is_of_instance else (referrer,):
            attributes = getattr(each, "__dict__", None)
            if isinstance(attributes, dict) and any(value is tensors for value in attributes.values()) and type(each).__module__ != "builtins":
                return each
    return None


def _shadows_of(module, trained):
    """What keeps a list, or a dictionary by name, of tensors that look like the module's parameters, or like those that are trained: averages
    (diffusers' EMAModel, torch_ema)."""
    named = list(module.named_parameters())
    kinds = [each for each in (named, [(name, p) for name, p in named if p.requires_grad]) if len(each) > 1]
    found = {}
    for each in gc.get_objects():
        if type(each) not in (list, dict) or not any(len(each) == len(kind) for kind in kinds):
            continue
        for kind in kinds:
            if type(each) is dict and list(each) != [name for name, _ in kind]:
                continue
            if _are_like(list(each.values() if type(each) is dict else each), [p.shape for _, p in kind], trained):
                holder = _holder_of(each)
                if holder is not None and not isinstance(holder, (torch.nn.Module, torch.optim.Optimizer)):
                    found[id(holder)] = holder
    return list(found.values())


def _is_held_by(other, optimizer):
    """Whether one optimizer is an attribute of another, as that of sharpness-aware ones is, or in a container there."""
    for value in vars(other).values():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        if any(each is optimizer for each in inner):
            return True
    return False


class Watch:
    """Sees optimizers being made, and waits for the first forward pass with a parameter of one."""

    def __init__(self, options):
        self.options = options
        self._order = []
        self._forward = None
        self._jobs = 0
        self._forks, self._process = 0, ""  # of this process; which one it is, of those that were forked
        self._within = {}  # modules, by their ids, in one that was called and has no parameter of an optimizer
        self._waiting = {}  # classes of optimizers, by their ids, while only modules that share parameters with an open job were called
        self._attaches_itself = False  # the script
        self._loaded = weakref.WeakSet()  # optimizers whose load_state_dict() was called
        self._given_weights = weakref.WeakSet()  # modules

    def begin(self):
        original = torch.optim.Optimizer.__init__
        watch = self

        @functools.wraps(original)
        def initialise(self, *args, **kwargs):
            original(self, *args, **kwargs)
            watch.add(self)

        torch.optim.Optimizer.__init__ = initialise
        load_state_dict = torch.nn.Module.load_state_dict

        @functools.wraps(load_state_dict)
        def load(self, *args, **kwargs):
            watch._given_weights.add(self)
            return load_state_dict(self, *args, **kwargs)

        torch.nn.Module.load_state_dict = load
        mapped_files.serve()
        os.register_at_fork(before=self._before_fork, after_in_child=self._after_fork)
        jobs.note_those_of_forks()

    def _before_fork(self):
        self._forks += 1

    def _after_fork(self):
        self._process += f"-p{self._forks}"
        self._jobs = self._forks = 0

    def add(self, optimizer):
        """An optimizer that was just made."""
        self._tell_of_late(optimizer)
        self._order.append(weakref.ref(optimizer))
        self._within.clear()
        optimizer.register_load_state_dict_post_hook(self._note_loaded)
        if served_class_of(type(optimizer)) is not None:
            _run_closure_first(type(optimizer))
        if self._forward is None:
            self._forward = BeforeForward(self._before_forward)

    def _note_loaded(self, optimizer):
        """One that keeps something, and has nothing after its load_state_dict(), was given no checkpoint."""
        recipe = recipe_of(optimizer)
        keeps = recipe.is_foreign or recipe.counts or any(recipe.planes(recipe.values(group)) for group in optimizer.param_groups)
        if has_stepped(optimizer) or not keeps:
            self._loaded.add(optimizer)

    @staticmethod
    def _tell_of_late(optimizer):
        of_jobs = {each for handle in jobs.handles() for each in handle.identities()}
        if any(id(parameter) in of_jobs for group in optimizer.param_groups for parameter in group["params"]):
            _log.warning("offloadd: %s is made after training has begun: what it keeps stays in memory, and its steps are not part of the "
                         "job. Make all optimizers before the first step, or give this one's parameters to add_param_group()",
                         class_of(optimizer))

    def made(self):
        """The optimizers that are alive and were not attached, in their order."""
        alive = [each() for each in self._order]
        return [each for each in alive if each is not None and not hasattr(each, "_offload_part")]

    @staticmethod
    def of_one_job(optimizers):
        """Those that one job can have. The others go on as they are: those of parameters that one before has, too (LBFGS after Adam; sharpness-aware
        ones hold another optimizer for the same parameters)."""
        chosen, kinds, taken = [], set(), set()
        for optimizer in optimizers:
            recipe = recipe_of(optimizer)
            mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            together = kinds if recipe.is_foreign else kinds | {recipe.kind}
            if mine & taken or not are_together(together):
                if any(recipe_of(each).is_foreign and _is_held_by(each, optimizer) for each in chosen):
                    continue  # what it keeps is the other's, and part of the job with that
                _log.warning("offloadd: %s goes on beside the optimizers of the job: what it keeps stays in memory, and its steps are not part "
                             "of the job", type(optimizer).__name__)
                continue
            kinds = together
            taken |= mine
            chosen.append(optimizer)
        return chosen

    def options_of_next(self, options=None):
        """`options`, by default our own, of the next job of this process: a script that trains several models, one after the other, has a job for each, as has one that
        forks a process for each."""
        self._jobs += 1
        options = self.options if options is None else options
        job = options.get("job")
        if job is None:
            return options
        process = "" if int(options.get("world_size") or os.environ.get("WORLD_SIZE") or 1) > 1 else self._process  # ranks have one together
        return {**options, "job": job + process + (f"-{self._jobs}" if self._jobs > 1 else "")}

    def tell_at_the_end(self):
        """A script may train without a torch.optim.Optimizer, or without ever calling a module: then nothing is offloaded."""
        for name in dict.fromkeys(self._waiting.values()):
            _log.warning("offloadd: what %s has trained stayed in memory: it was in modules with parameters of another job only. Call "
                         "offloadd.attach() in the script", name)
        if self._jobs or self._attaches_itself or jobs.were_made() or is_disabled():
            return
        why = ("no forward pass of a torch.nn.Module with parameters of an optimizer was seen" if self._order
               else "the script has made no torch.optim.Optimizer, and what it computes without one stays in memory")
        _log.warning("offloadd: nothing was offloaded: %s. Call offloadd.attach(model, optimizer, …) in the script", why)

    def _before_forward(self, module, inputs):
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch.jit.is_tracing() or active_fake_mode() is not None:
            return  # nothing is trained in it
        if self._is_within(module):
            return
        optimizers = self.made()
        mine = {id(parameter) for parameter in module.parameters()}
        if optimizers and not any(id(p) in mine for each in optimizers for group in each.param_groups for p in group["params"]):
            self._within.update((id(each), weakref.ref(each)) for each in module.modules() if each is not module)
            return
        if any(torch.nn.parameter.is_lazy(p) for p in itertools.chain(module.parameters(), *map(parameters_of, optimizers))):
            return  # they get their shapes in this pass
        if not optimizers:
            self._wait_no_more()
            self._attaches_itself = True
            return
        optimizers = self._for_a_job_beside(optimizers, module, mine)
        if not optimizers:
            return
        self._wait_no_more()
        chosen, options = self.of_one_job(optimizers), self.options_of_next(lightning_ranks.options_in([module], self.options, is_untouched=True))
        for each in chosen:
            self._waiting.pop(id(each), None)
        called = module
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            options, called = {"gradients": "reduced_by_trainer", **options}, module.module
        beside = _modules_beside(module, chosen)
        masters = [given.give_back(each) for each in chosen]
        loaded = Loaded.before(module, chosen, options, any(each in self._loaded for each in chosen), beside)
        handle = attaching.attach(module, chosen, _beside=beside, **options)
        if loaded is not None:
            goes_on_with_them = loaded.take(handle, masters)
        else:
            goes_on_with_them = handle.step == 0
            self._tell_where_it_goes_on(handle, mine)
        if goes_on_with_them:
            given.give_masters(chosen, masters)
        if handle.step:
            self._tell_of_copies(handle, [] if loaded is not None else [called, *beside])

    def _tell_where_it_goes_on(self, handle, mine):
        """With what the job has, since the script has loaded nothing, or weights alone."""
        if handle.step and any(not mine.isdisjoint(map(id, each.parameters())) for each in self._given_weights):
            _log.warning("offloadd: job %s continues after %d steps, with its own weights: those that the script has loaded came without its "
                         "optimizer's state, and are not taken. To begin with them name another job (--job), or remove this one, offloadctl rm "
                         "%s %s --yes; to go on at a checkpoint, have the script load its optimizer's state, too", handle.job, handle.step,
                         handle.nvme_path, handle.job)
        elif handle.step:
            _log.warning("offloadd: job %s continues after %d steps", handle.job, handle.step)

    def _is_within(self, module):
        """Its parameters were looked through with those of what it is in, at that one's call."""
        known = self._within.get(id(module))
        return known is not None and known() is module

    def _wait_no_more(self):
        self._forward.remove()
        self._forward = None
        self._within.clear()

    def _for_a_job_beside(self, optimizers, module, mine):
        """Those that the module, with these parameters, can be attached with: jobs of before may be open, and no parameter is of two."""
        if jobs.handles() and not all(id(each) in self._waiting for each in optimizers):
            gc.collect()  # models of before
        open_handles = jobs.handles()
        taken = set().union(*(handle.identities() for handle in open_handles))
        free = [each for each in optimizers if taken.isdisjoint(map(id, parameters_of(each)))]
        if not free:
            self._wait_no_more()  # it was told when they were made
        elif not mine.isdisjoint(taken):  # a part of it, a new head of a model that was trained, has its forward pass, too
            self._waiting.update((id(each), class_of(each)) for each in free)
            free = []
        else:
            free = self._with_a_state_of_their_own(free)
        if free and open_handles:
            _log.warning("offloadd: %s is trained while the model of job %s is still there: it has a job of its own, with as much ram again",
                         class_of(module), open_handles[0].job)
        return free

    def _with_a_state_of_their_own(self, optimizers):
        """The others go on with tensors of one of another model, whose state_dict() they have loaded, and stay beside that."""
        shared = [each for each in optimizers if shares_state(each)]
        for each in shared:
            _log.warning("offloadd: %s has loaded what state_dict() of another optimizer gives, and goes on with the same tensors as that: what it trains "
                         "stays in memory, and its steps are not part of a job. To change that have it load copies, copy.deepcopy(state_dict)",
                         class_of(each))
        if len(shared) == len(optimizers):
            self._wait_no_more()
        return [each for each in optimizers if each not in shared]

    @staticmethod
    def _tell_of_copies(handle, trained):
        """Averages and target networks, which no optimizer trains, are nobody's."""
        found = [each for each in _modules_alive() if issubclass(type(each), torch.optim.swa_utils.AveragedModel)]
        found += _copies_of(trained, handle.identities())
        inner = {id(part) for each in found for part in each.modules() if part is not each}
        for name in dict.fromkeys(type(each).__name__ for each in found if id(each) not in inner):
            _log.warning("offloadd: another %s, whose weights are not trained, is not part of job %s, and begins anew after its step %d: if it "
                         "follows the training, let the script save and load it", name, handle.job, handle.step)
        shadows = [each for module in trained for each in _shadows_of(module, handle.identities())]
        for holder in dict.fromkeys(map(class_of, shadows)):
            _log.warning("offloadd: what %s keeps, tensors like the parameters, is not part of job %s, and begins anew after its step %d: if it "
                         "follows the training (an average), let the script save and load it", holder, handle.job, handle.step)


def begin(options):
    watch = Watch(options)
    watch.begin()
    when_imported("transformers.trainer", lambda: watch_trainer(watch))
    return watch


def watch_trainer(watch):
    """transformers.trainer was just executed: a Trainer that is made gets the callback. The package is complete by then."""
    module = sys.modules["transformers.trainer"]
    original = module.Trainer.__init__

    @functools.wraps(original)
    def initialise(self, *args, **kwargs):
        original(self, *args, **kwargs)
        from .trainer import TrainerCallback, callback_of

        if callback_of(self) is None:
            self.add_callback(TrainerCallback(**watch.options_of_next()))

    module.Trainer.__init__ = initialise
