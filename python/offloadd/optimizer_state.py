"""`optimizer.state` of an attached optimizer, whose tensors are in the store of the job: they are gathered when they are looked at. What a program
writes into them, puts in their place or removes is the state that the next step goes on with, as in plain torch."""

import collections
import collections.abc
import copy
import functools
import mmap
import sys
import weakref

import torch

from . import served
from .errors import Error, class_of

STEP = "step"  # the key under which torch counts a parameter's updates

# What was written is given to the job when it is more than this, else before the next step.
_WRITTEN_BYTES_MAX = 64 << 20

_OWN_REFERENCES = 3  # to a ParameterState: the dictionary's, a name's and the question's

_MAP_NORESERVE = 0x4000  # of Linux, which Python's module does not name before 3.13

_IN_ALL_RANKS = "Change it in what state_dict() gives, and load_state_dict() that in all ranks"


def refuse_write(what, fix="Change it in what state_dict() gives, and load_state_dict() that; lr and other options are in param_groups"):
    raise Error.of(1604, what, fix)


class ShownState(torch.Tensor):
    """One entry of a parameter's state: has the value that the job has, also after further steps, and gives it what is written here. Views of it
    (`_base` is the whole) are as it is; numpy arrays of it are read-only."""

    @staticmethod
    def of(values, place):
        with torch.inference_mode(False), torch.no_grad():
            shown = torch.Tensor._make_subclass(ShownState, values.clone())
            shown._place = place
        return shown

    @staticmethod
    def late(parameter, place):
        """The same of a moment of a parameter, gathered when its values are first asked for; torch.save() asks for one after the other, and
        keeps none. Until then it has addresses, and no memory. In the memory of the host, wherever the parameter is."""
        kind = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        memory = mmap.mmap(-1, parameter.numel() * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        with torch.inference_mode(False), torch.no_grad():
            values = torch.frombuffer(memory, dtype=kind).as_strided(parameter.size(), parameter.stride())
            shown = torch.Tensor._make_subclass(ShownState, values)
            shown._place = place
        return shown

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in _ALIASES:
            return args[0]
        if function in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function == torch.Tensor.data.__set__:
            return args[0].copy_(args[1]) if args[1] is not args[0] else None
        with torch._C.DisableTorchFunctionSubclass():
            wholes = [_whole(each) for each in _shown_among((*args, *(kwargs or {}).values()))]
            for whole in wholes:
                whole._place.refresh(whole)
            versions = [whole._version for whole in wholes]  # which their views share
            result = function(*args, **(kwargs or {}))
            for whole, version in zip(wholes, versions):
                if whole._version != version:
                    whole._place.written(whole)
            if isinstance(result, (tuple, list)):
                return type(result)(map(_shown, result)) if type(result) in (tuple, list) else result
            return _shown(result)

    def __repr__(self, *, tensor_contents=None):
        return repr(self.clone())

    def __format__(self, form):
        return format(self.clone(), form)

    def __reduce_ex__(self, protocol):
        with torch._C.DisableTorchFunctionSubclass():
            is_whole = not self._is_view()
            if is_whole and self._place.is_late() and served.is_saving():
                return served.pickled_later(self.as_subclass(torch.Tensor), protocol, self._place.gather)
        return self.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return self.clone()


# What says nothing of the values.
_DESCRIPTIONS = {getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_cuda",
                                                                  "is_sparse", "is_meta", "nbytes", "itemsize")}
_DESCRIPTIONS |= {getattr(torch.Tensor, name) for name in ("size", "stride", "dim", "numel", "nelement", "element_size", "storage_offset", "is_contiguous",
                                                           "is_floating_point", "is_complex", "__len__")}

_ALIASES = {torch.Tensor.data.__get__, torch.Tensor.detach}  # which have a version of their own, or are no views


def _whole(shown):
    """Where torch functions are those of torch.Tensor."""
    return shown._base if shown._is_view() else shown


def _shown_among(values):
    for value in values:
        if isinstance(value, ShownState):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _shown_among(value)


def _shown(result):
    """Of something that was made of a ShownState."""
    if isinstance(result, torch.Tensor):
        is_of_one = not isinstance(result, ShownState) and result._is_view() and isinstance(result._base, ShownState)
        return result.as_subclass(ShownState) if is_of_one else result
    if hasattr(result, "flags"):  # numpy
        result.flags.writeable = False
    return result


def _can_show(value):
    """Whether an ordinary tensor, or what was shown once, may be shown. Where torch functions are those of torch.Tensor."""
    if value.requires_grad or value.is_inference() or value._is_view() or value.layout != torch.strided:
        return False
    return type(value) is torch.Tensor or (isinstance(value, ShownState) and not value._place.is_of_open())


def is_of_another(value, state):
    """Whether a value is shown of an open job, and not of this StateOfAll."""
    if not isinstance(value, ShownState):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        place = _whole(value)._place
    return place.is_of_open() and place.state() is not state


class _Place:
    """Where the job has what a ShownState shows, and when it was looked at."""

    def __init__(self, state, parameter, key, is_late=False, has_values=True):
        """`has_values`: of one that is not late, whether what it shows is the job's."""
        self._state, self.parameter, self.key = weakref.ref(state), parameter, key
        self._age = None if is_late else state.age() if has_values else ()

    def state(self):
        return self._state()

    def is_of_open(self):
        state = self._state()
        return state is not None and state.is_open()

    def is_late(self):
        """Whether nobody has asked for the values yet."""
        return self._age is None

    def gather(self):
        """The values of one that is late, in memory of their own."""
        return self._of_open().gather(self.parameter, self.key).cpu()

    def _of_open(self):
        if not self.is_of_open():
            raise Error.of(1802, f"{self.key} of a state_dict(), of which nobody had asked for the values when its job was closed: moments of more than a "
                                 "quarter of ram are gathered when they are asked for",
                           "Save it, or copy.deepcopy() it, before the job is closed")
        return self._state()

    def refresh(self, shown):
        if self.is_late() or self.is_of_open():
            self.refresh_from(self._of_open(), shown)

    def refresh_from(self, state, shown):
        now = state.age()
        if now != self._age:
            if not state.is_written(self.parameter, self.key):
                shown.copy_(state.gather(self.parameter, self.key))
            self._age = now

    def written(self, shown):
        state = self._state()
        if state is not None:
            state.write(self.parameter, {self.key: shown})

    def leave(self):
        """What is shown is not the parameter's state any more."""
        self._state = _nothing


def _nothing():
    return None


class ParameterState(dict):
    """What torch keeps of one parameter. One that was removed, and that somebody has, keeps the values (leave())."""

    def __init__(self, state, parameter, keys):
        super().__init__(dict.fromkeys(keys))
        self._state, self._parameter = state, parameter

    def __getitem__(self, key):
        value = super().__getitem__(key)
        return self._state.shown(self._parameter, key) if self._state is not None else value

    def __setitem__(self, key, value):
        """What was read may be put back: some move the state to the device where it is."""
        if self._state is None:
            return super().__setitem__(key, value)
        if key in self and self._state.is_shown(self._parameter, key, value):
            return
        self._state.put(self._parameter, {key: value})
        super().__setitem__(key, None)

    def __iter__(self):
        """As it is; with one of our own dict(state) asks for the values, instead of copying what stands for them."""
        return super().__iter__()

    def get(self, key, default=None):
        return self[key] if key in self else default

    def items(self):
        return [(key, self[key]) for key in self]

    def values(self):
        return [self[key] for key in self]

    def late(self):
        """An ordinary dictionary of it, whose tensors are gathered when somebody asks for their values."""
        return {key: self._state.late(self._parameter, key) for key in self}

    def ordinary(self):
        """A dictionary of tensors that are nobody else's."""
        return {key: value.clone() for key, value in self.items()}

    def copy(self):
        return dict(self.items())

    update = collections.abc.MutableMapping.update

    def setdefault(self, key, value=None):
        if key not in self:
            self[key] = value
        return self[key]

    def leave(self):
        """It is an ordinary dictionary from now on."""
        values = self.ordinary()
        self._state = None
        super().update(values)

    def clear(self):
        if self._state is not None:
            self._state.drop([self._parameter])
        super().clear()

    def __delitem__(self, key):
        if self._state is None:
            return super().__delitem__(key)
        super().__getitem__(key)
        if len(self) > 1:
            refuse_write(f"'{key}' of a parameter's state cannot be removed alone")
        self.clear()

    def pop(self, key, *default):
        if key not in self and default:
            return default[0]
        value = self[key].clone()
        del self[key]
        return value

    def popitem(self):
        key = next(reversed(self))
        return key, self.pop(key)

    def __deepcopy__(self, memo):
        return self.ordinary()

    def __repr__(self):
        return repr(dict(self.items()))

    def __reduce_ex__(self, protocol):
        return collections.OrderedDict, (), None, None, iter(self.ordinary().items())


def _when_filled(name):
    """A method of a dictionary that looks at what StateOfAll has."""
    method = getattr(collections.defaultdict, name)

    def call(self, *args):
        self._fill()
        return method(self, *args)

    return call


class StateOfAll(collections.defaultdict):
    """`optimizer.state`: parameter -> ParameterState, for the parameters that were updated. `part` is the optimizer's: it says what there is
    (`keys_of_all`, `age`), gathers it and takes rows of it."""

    def __init__(self, part):
        super().__init__(dict)
        self._part, self._filled = part, None
        self._shown = weakref.WeakValueDictionary()  # (id of the parameter, key) -> ShownState
        self._written = {}  # id of the parameter -> (it, {key: value}), which the job does not have yet
        self._written_bytes = 0  # of these, or more

    # ---- What its entries ask ----

    def is_open(self):
        return self._part.handle.is_open

    def age(self):
        return self._part.age()

    def gather(self, parameter, key):
        return self._part.gather(parameter, key)

    def is_written(self, parameter, key):
        return key in self._written.get(id(parameter), (parameter, {}))[1]

    def is_shown(self, parameter, key, value):
        return value is not None and value is self._shown.get((id(parameter), key))

    def shown(self, parameter, key):
        shown = self._shown.get((id(parameter), key))
        if shown is None:
            values = self._written[id(parameter)][1][key] if self.is_written(parameter, key) else self.gather(parameter, key)
            shown = ShownState.of(values, _Place(self, parameter, key))
            self._shown[id(parameter), key] = shown
            if self.is_written(parameter, key):
                self._written[id(parameter)][1][key] = shown
        with torch._C.DisableTorchFunctionSubclass():
            shown._place.refresh(shown)
        return shown

    def late(self, parameter, key):
        """The same, gathered when somebody asks for the values."""
        if key == STEP or self.is_written(parameter, key) or not parameter.numel():
            return self.shown(parameter, key)
        shown = self._shown.get((id(parameter), key))
        if shown is None:
            shown = self._shown[id(parameter), key] = ShownState.late(parameter, _Place(self, parameter, key, is_late=True))
        return shown

    def write(self, parameter, values):
        """What the job takes before its next step."""
        if self._part.handle.world_size > 1:
            refuse_write("the optimizer's state is one for all ranks, and cannot be written in one of them", _IN_ALL_RANKS)
        strange = [str(key) for key in values if key not in self._part.possible_keys_of(parameter)]
        if strange and not self._part.may_get(parameter):
            refuse_write(f"the optimizer's state has no room for {', '.join(strange)}",
                         "Keep it in a dictionary of your own; or give attach() a subclass of the optimizer's class with a step() of its own, which may "
                         "call torch's: it runs in this process, and keeps what it is given")
        written = self._written.setdefault(id(parameter), (parameter, {}))[1]
        self._written_bytes += sum(value.nbytes for key, value in values.items() if key not in written)
        written.update(values)
        if self._written_bytes > _WRITTEN_BYTES_MAX:
            self.flush(but=parameter)

    def put(self, parameter, values):
        """In the place of what is there."""
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                value = torch.tensor(float(value))
            self._leave(parameter, key)
            self.write(parameter, {key: torch.Tensor.clone(value.detach())})

    def _leave(self, parameter, key):
        """What was shown goes on as an ordinary tensor."""
        shown = self._shown.pop((id(parameter), key), None)
        if shown is not None:
            with torch._C.DisableTorchFunctionSubclass():
                shown._place.refresh_from(self, shown)
            shown._place.leave()

    def replaced(self, states):
        """The job is given other states, {parameter: {key: tensor}}. What is shown among them goes on to be."""
        parameters = {id(parameter): parameter for parameter in states}
        for parameter_id, key in list(self._shown):
            parameter = parameters.get(parameter_id)
            if parameter is not None and not self.is_shown(parameter, key, states[parameter].get(key)):
                self._leave(parameter, key)
        for parameter_id in parameters:
            self._written.pop(parameter_id, None)

    def adopt(self, rows, has_values=True):
        """Tensors with which torch goes on, and that the program has: (parameter, key, tensor). They show what the job has from now on, as their views do.
        Returns the rows for which that cannot be all."""
        seen, others = functools.cache(served.seen_storages), []
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, key, value in rows:
                if self.is_shown(parameter, key, value):
                    continue
                if not _can_show(value):
                    others.append((parameter, key, value))
                    continue
                storage = value.untyped_storage()
                is_of_file = not storage.resizable() and not self._part.handle.is_state_small()  # and is not to be brought to memory
                over = [each() for each in seen()[storage._cdata]] if served.is_shared(value) else ()
                views = [each for each in over if type(each) is torch.Tensor and each._is_view() and each._base is value]
                for each in (value, *views):
                    each.__class__ = ShownState
                value._place = _Place(self, parameter, key, is_of_file, has_values)
                self._shown[id(parameter), key] = value
                if torch._C._storage_Use_Count(storage._cdata) > 2 + len(views):  # the tensor's, and that of the object that asks
                    others.append((parameter, key, value))
        return others

    def goes_on_with(self, tensors):
        """Whether torch would, with one of these."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.is_open() and any(isinstance(each, ShownState) and _whole(each)._place.state() is self for each in tensors)

    def end(self):
        """Before the job is closed: what somebody has of it stays as it is now."""
        for parameter_id, key in list(self._shown):
            shown = self._shown.get((parameter_id, key))
            if shown is not None and not shown._place.is_late():
                self._leave(shown._place.parameter, key)

    def drop(self, parameters):
        """They are as before their first update."""
        if self._part.handle.world_size > 1 and parameters:
            refuse_write("the optimizer's state is one for all ranks, and cannot be removed in one of them", _IN_ALL_RANKS)
        states = {parameter: {} for parameter in parameters}
        self.replaced(states)
        self._part.put_states(states)

    def flush(self, but=None):
        """Gives the job what was written; of what is in no group yet it is kept."""
        self._give([each for each, _ in self._written.values() if each is not but and not self._part.may_get(each)])

    def _give(self, parameters):
        for parameter in parameters:
            values = self._written[id(parameter)][1]
            others = [key for key in self._part.keys_of(parameter) if key not in values]
            self._part.put_states({parameter: {**{key: self.gather(parameter, key) for key in others}, **values}})
            del self._written[id(parameter)]
        self._written_bytes = sum(value.nbytes for _, written in self._written.values() for value in written.values())

    # ---- A dictionary ----

    def _fill(self):
        now = self.age()
        if now == self._filled:
            return
        super().clear()
        for parameter, keys in self._part.keys_of_all():
            super().__setitem__(parameter, ParameterState(self, parameter, keys))
        for parameter, written in self._written.values():
            if not super().__contains__(parameter):
                super().__setitem__(parameter, ParameterState(self, parameter, written))
        self._filled = now

    def __getitem__(self, parameter):
        """Of a parameter without state an empty one, which takes what is put into it."""
        self._fill()
        if not super().__contains__(parameter):
            super().__setitem__(parameter, ParameterState(self, parameter, ()))
        return super().__getitem__(parameter)

    get, __contains__, __iter__, __len__, keys, items, values = map(
        _when_filled, ("get", "__contains__", "__iter__", "__len__", "keys", "items", "values"))

    def __setitem__(self, parameter, state):
        if isinstance(state, ParameterState) and self.get(parameter) is state:
            return
        if not isinstance(state, collections.abc.Mapping):
            refuse_write(f"the optimizer's state was given {class_of(state)}", "Keep it in a dictionary of your own")
        values = {key: value for key, value in state.items() if value is not None}
        if parameter in self:
            self.drop([parameter])
        self[parameter].update(values)

    def _remove(self, parameters):
        for parameter in parameters:
            state = super().__getitem__(parameter)
            if sys.getrefcount(state) > _OWN_REFERENCES:
                state.leave()
        self.drop(parameters)
        self._part.forget(parameters)

    def __delitem__(self, parameter):
        if parameter not in self:
            raise KeyError(parameter)
        self._remove([parameter])

    def pop(self, parameter, *default):
        if parameter not in self and default:
            return default[0]
        state = self[parameter].ordinary()
        del self[parameter]
        return state

    def copy(self):
        """Another dictionary of the same states."""
        return collections.defaultdict(dict, self.items())

    __copy__ = copy

    def __or__(self, others):
        return self.copy() | others

    def __ror__(self, others):
        return others | self.copy()

    def popitem(self):
        parameter = next(reversed(list(self)))
        return parameter, self.pop(parameter)

    def clear(self):
        self._remove(list(self))

    update = collections.abc.MutableMapping.update

    def setdefault(self, parameter, state=None):
        if parameter not in self:
            self[parameter] = {} if state is None else state
        return self[parameter]

    def __deepcopy__(self, memo):
        made = collections.defaultdict(dict)
        for parameter, state in self.items():
            made[copy.deepcopy(parameter, memo)] = state.ordinary()
        return made

    def __reduce_ex__(self, protocol):
        return collections.defaultdict, (dict,), None, None, iter(list(self.items()))
