"""What becomes of the optimizer that the script holds.

The class of the instance is swapped for a subclass of it: isinstance, repr, param_groups, defaults and schedulers stay as they are,
`step` runs in the daemon, and `state` is gathered when it is looked at. Hyper-parameters are read at every step.
"""

import collections
import contextlib
import copy
import copyreg
import functools
import gc
import sys
import weakref

import torch

from . import state_hooks
from .errors import Error
from .optimizer_state import StateOfAll, refuse_write
from .recipes import is_narrow, number, parameters_of, refuse


asked = weakref.WeakKeyDictionary()  # optimizer -> what answers for attributes that it has not, by (optimizer, name)
_OURS = ("_offload", "_masters", "_former_steps")  # attributes of an instance


def loss_of(closure):
    """What the closure of a step() gives, which computes gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class CopiedAsItWas:
    """Copies of the instance, and those in a file, are of the class that it had (`_class_of_copies`), with the state as it is now. Parameters of
    narrow types have fp32 masters in copies, too (`_each_master`), which train them as the instance does, in memory."""

    def __new__(cls, *args, **kwargs):
        """`type(optimizer)(parameters, …)` is another one of the class that it had."""
        return cls._class_of_copies(*args, **kwargs) if "_class_of_copies" in vars(cls) else super().__new__(cls)

    def __init_subclass__(cls, **kwargs):
        """Classes of the script's that look at their subclasses (registries) hear of none of ours."""

    def __getattr__(self, name):
        """What the class of the script's answers counts."""
        own, ask = getattr(super(), "__getattr__", None), None if name.startswith("_") else asked.get(self)
        if own is not None:
            with contextlib.nullcontext() if ask is None else contextlib.suppress(AttributeError):
                return own(name)
        return ask(self, name) if ask is not None else self.__getattribute__(name)  # which says why not

    def __getstate__(self):
        """A class of the script's may give more than torch's."""
        own = super().__getstate__()
        return {**{name: value for name, value in own.items() if not name.startswith(_OURS)}, "state": self.state}

    def __reduce_ex__(self, protocol):
        if any(map(is_narrow, parameters_of(self))):
            return _make_again, (self._class_of_copies, self.__getstate__(), list(self._each_master()))
        state = {**self.__getstate__(), "state": collections.defaultdict(dict, self.state)}
        return copyreg._reconstructor, (self._class_of_copies, object, None), state  # whoever loads it need not have this package

    def __deepcopy__(self, memo):
        made = self._class_of_copies.__new__(self._class_of_copies)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return _with_masters(made, self._each_master())


class _Offloaded(CopiedAsItWas):
    """What the instance's class gets before its own."""

    @torch.no_grad()
    def _offload_step(self, closure=None, **others):
        loss = loss_of(closure)
        self._offload_part.step(**others)
        self._opt_called = True  # what torch's schedulers look for
        return loss

    # A class of the script's may have other arguments, and other defaults of them, than torch's.

    def zero_grad(self, *args, **kwargs):
        super().zero_grad(*args, **kwargs)
        self._offload_part.foresee()

    def add_param_group(self, *args, **kwargs):
        super().add_param_group(*args, **kwargs)
        try:
            self._offload_part.check_groups()
            self._offload_part.take_early()
        except Error:
            self.param_groups.pop()
            raise

    def state_dict(self, *args, **kwargs):
        own = super().state_dict
        return state_hooks.give(self, lambda: self._offload_part.state_dict(own(*args, **kwargs)))

    def load_state_dict(self, state_dict, *args, **kwargs):
        own = super().load_state_dict
        state_hooks.take(self, state_dict, functools.partial(self._offload_part.load, lambda groups: own(groups, *args, **kwargs)))

    def __setstate__(self, state):
        super().__setstate__({key: value for key, value in state.items() if key != "state"})
        if "state" in state and not self._offload_part.is_loading:  # torch's load_state_dict() ends here, too
            self._offload_part.adopt(state["state"])

    def _each_master(self):
        for parameter in parameters_of(self):
            yield self._offload_part.handle.gather_one(parameter, "master") if is_narrow(parameter) else None


def _make_again(cls, state, masters=()):
    made = cls.__new__(cls)
    made.__setstate__({**state, "state": collections.defaultdict(dict, state["state"])})
    return _with_masters(made, masters)


def _with_masters(made, masters):
    """A copy, over the parameters in their order: of each its fp32 master, None where it is its own."""
    if any(map(is_narrow, parameters_of(made))):
        from . import in_memory

        in_memory.give_masters(made, masters)
    return made


@functools.lru_cache(maxsize=None)
def offloaded_class(cls):
    made = type(cls.__name__, (_Offloaded, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__})
    made._offload_class = made._class_of_copies = cls
    made.step = torch.optim.Optimizer.profile_hook_step(_Offloaded._offload_step)  # torch's step hooks
    made.step.hooked = True
    return made


def has_stepped(optimizer):
    """Whether it holds moments of steps that were taken in memory."""
    for state in optimizer.state.values():
        if not isinstance(state, dict):
            return True
        if "step" in state:
            if number(state["step"]) > 0:
                return True
        elif any(value is not None for value in state.values()):
            return True
    return False


def _kept_tensors(optimizer):
    return [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values() if isinstance(value, torch.Tensor)]


def shares_state(optimizer):
    """Whether an optimizer of other parameters, which is alive, goes on with tensors of its state: torch's load_state_dict() takes those of another's
    state_dict() as they are, and a step of either is in both."""
    kept = _kept_tensors(optimizer)
    if not kept:
        return False
    ids, mine = set(map(id, kept)), set(map(id, parameters_of(optimizer)))
    gc.collect()  # one that is gone steps no more
    for other in [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]:
        state = getattr(other, "state", None)
        if not isinstance(state, dict) or other is getattr(optimizer.state, "of_masters", None) or not mine.isdisjoint(map(id, parameters_of(other))):
            continue  # itself, one around it, or one in whose place it is
        if state.goes_on_with(kept) if isinstance(state, StateOfAll) else not ids.isdisjoint(map(id, _kept_tensors(other))):
            return True
    return False


def check_state_is_its_own(optimizer):
    """The job has the moments elsewhere than in these tensors."""
    if shares_state(optimizer):
        refuse("the optimizer and another one have the same tensors in their state, since one has loaded what state_dict() of the other gives: torch's "
               "would both go on with them", "Load copies, optimizer.load_state_dict(copy.deepcopy(other.state_dict())), or drop the other one before "
               "attach()")


def put_step(optimizer, step):
    """On the instance, marked as torch's schedulers want a step() that they need not wrap."""
    step._wrapped_by_lr_sched = True
    step.__func__ = type(optimizer).step
    optimizer.step = step


def _take_former_step(optimizer, args, kwargs):
    """Before a step of the instance, torch's hook. A step() that somebody has taken from it when it had another class (Accelerate, with fp16) is
    that class's: it gets no parameters, and the step of now for a closure."""
    wrapper, own = sys._getframe(1), getattr(type(optimizer).step, "__wrapped__", None)
    if wrapper.f_code is not _wrapper_code or wrapper.f_locals["func"] is own:
        return None
    former = object.__new__(type(optimizer)._class_of_copies)
    former.__dict__.update(optimizer.__dict__, param_groups=[])
    return (former, functools.partial(own, *args, **kwargs)), {}


def swap_class(optimizer, cls):
    """The instance's class becomes one with another step()."""
    wrapped = optimizer.__dict__.pop("step", None)  # a scheduler's, made before: it would call the step of the former class
    optimizer.__class__ = cls
    forget_former_steps(optimizer)
    optimizer._former_steps = optimizer.register_step_pre_hook(_take_former_step)
    if wrapped is not None:
        wrap_again(optimizer, cls)


def wrap_again(optimizer, cls):
    @functools.wraps(cls.step)
    def again(*args, **kwargs):
        optimizer._opt_called = True  # as torch's schedulers have it
        return cls.step(optimizer, *args, **kwargs)

    put_step(optimizer, again)


def have_hooks(optimizer):
    """torch calls hooks of step() where the constructor of its class has been run, or zero_grad(): of some wrappers it is not (Lookahead of timm)."""
    if getattr(type(optimizer).step, "hooked", False):
        return
    wrapped = optimizer.__dict__.pop("step", None)  # a scheduler's, made before: it would call the step without hooks
    optimizer._patch_step_function()
    if wrapped is not None:
        wrap_again(optimizer, type(optimizer))


def forget_former_steps(optimizer):
    if hook := optimizer.__dict__.pop("_former_steps", None):
        hook.remove()


def _check_own_step(optimizer):
    """A step that somebody put on the instance would not reach the daemon."""
    own = optimizer.__dict__.get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        refuse("the optimizer's step() was replaced on the instance", "Attach before whatever replaces it")


def refuse_unless_kept(state, plane):
    """Returns the state, of a parameter that was updated."""
    if plane not in state:
        kept = f"it has {', '.join(state)}" if state else "it was not updated yet"
        raise Error.of(1002, f"a parameter's optimizer keeps no {plane}: {kept}", "Write what step() has made")
    return state


def shaped_as(parameter, value):
    """The values that are to be written into something of a parameter."""
    if value.numel() != parameter.numel():
        raise Error.of(1002, f"values of shape {list(value.shape)} for a parameter of shape {list(parameter.shape)}", "Give a whole tensor")
    return value.reshape(parameter.shape)


def check_free(optimizer):
    """Refuses what cannot be attached. One whose job is closed becomes what it was before; returns that job when it has moments there."""
    part = getattr(optimizer, "_offload_part", None)
    if part is not None:
        if part.handle.is_open:
            refuse("the optimizer is attached already", "Make an optimizer for each attach(), or close() its handle before")
        part.release()
        return part.handle.job if part.handle.last_step > 0 and not part.is_foreign else None
    _check_own_step(optimizer)
    return None


_wrapper_code = torch.optim.Optimizer.profile_hook_step(refuse_write).__code__  # torch's, around every step()


def after_steps(optimizer, then):
    """Calls a function after every step() of the optimizer; returns the hook. One that calls that of its base class is one step. There may have
    been others that have raised an error."""

    def end(*_):
        frame = sys._getframe(1).f_back
        while frame is not None:
            if frame.f_code is _wrapper_code and frame.f_locals["args"][0] is optimizer:
                return
            frame = frame.f_back
        then()

    return optimizer.register_step_post_hook(end)
