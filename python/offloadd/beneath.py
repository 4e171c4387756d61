"""Memory of others beneath parameters that are to be attached: of the arrays that numpy() gave, and of what from_numpy(), as_tensor(), frombuffer() were
given. The job's parameters are elsewhere. While somebody has such an array or buffer, it gets the parameter's values again after every step; what
is written there, which the parameter would not see, is refused."""

import bisect
import contextlib
import ctypes
import functools
import logging
import sys
import weakref

import torch
from torch.utils import _device

from . import followers, served
from .errors import Error
from .library import Engine

_log = logging.getLogger("offloadd")

_arrays = weakref.WeakValueDictionary()  # those that numpy() gave of tensors in memory, by id
_given = weakref.WeakKeyDictionary()  # a storage -> the array or buffer that a tensor was made over


# ---- What is noted -----------------------------------------------------------------------------

def _noting_array(original):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        array = original(self, *args, **kwargs)
        _arrays[id(array)] = array
        return array

    return call


_TORCHS_OR_COPIED = (torch.UntypedStorage, torch.TypedStorage, list, tuple, int, float)


def _noting_given(original):
    @functools.wraps(original)
    def call(*args, **kwargs):
        made = original(*args, **kwargs)
        source = args[0] if args else next(iter(kwargs.values()))
        if type(made) is torch.Tensor and not isinstance(source, _TORCHS_OR_COPIED) and made.device.type == "cpu":
            storage = made.untyped_storage()
            is_the_same = isinstance(source, torch.Tensor) and served.storage_of(source) == storage._cdata
            if not storage.resizable() and not is_the_same:  # not torch's own memory
                _given[storage] = source
        return made

    return call


_from_buffer = torch.frombuffer
served.wrap(torch.Tensor, "numpy", _noting_array)
_device._device_constructors()  # keeps, from now on, those that torch itself calls
for _name in ("from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack"):
    served.wrap(torch, _name, _noting_given)
torch.utils.dlpack.from_dlpack = torch.from_dlpack
torch.jit._builtins._register_builtin(torch.as_tensor, "aten::as_tensor")


# ---- What is beneath ---------------------------------------------------------------------------

def _is_array(owner):
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(owner, numpy.ndarray)


def _owners_of(source):
    """It, and what it has its memory from, one after the other."""
    owners = []
    while source is not None:
        owners.append(source)
        source = source.obj if isinstance(source, memoryview) else source.base if _is_array(source) else None
    return owners


def _can_be_written(owner):
    if _is_array(owner):
        return owner.flags.writeable
    try:
        return isinstance(owner, torch.Tensor) or not memoryview(owner).readonly
    except TypeError:  # of another library, which shows its memory in a way of its own
        return False


def _extent(tensor):
    """(begin, end) in memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class _Beneath:
    """The memory that a parameter had."""

    def __init__(self, name, parameter, former, owners):
        """`former`: a tensor over it; `owners`: who keeps it."""
        self.name, self.key, self._parameter, self._owners = name, id(parameter), weakref.ref(parameter, lambda _: followers.drop(self)), owners
        begin, end = _extent(former)
        memory = _from_buffer((ctypes.c_uint8 * (end - begin)).from_address(begin), dtype=former.dtype)
        self._memory = memory.as_strided(former.size(), former.stride(), 0)
        self._digest = self._version = None  # of what it was given last
        self._closed = []  # arrays that were writeable
        self._has_data = False  # whether `p.data` was asked for

    def is_of(self, identities):
        parameter = self._parameter()
        return parameter is not None and id(parameter) in identities

    def is_held(self):
        """Whether anybody else could look."""
        if self._parameter() is None:
            return False
        # The list's reference, that of the question, and that of the owner before it.
        is_referred_to = any(sys.getrefcount(self._owners[n]) > 2 + (n > 0) for n in range(len(self._owners)))
        return is_referred_to or (isinstance(self._owners[-1], torch.Tensor) and served.is_shared(self._owners[-1]))

    def is_trained(self):
        parameter = self._parameter()
        return parameter is not None and parameter.requires_grad

    def close_arrays(self, arrays):
        """Of these (weak references), those that are over the parameter's elements and no others become read-only."""
        for reference in arrays:
            array = reference()
            if array is not None and array.flags.writeable and array.nbytes == self._memory.nbytes:
                array.flags.writeable = False
                self._closed.append(reference)

    def arrays(self):
        return [owner for owner in self._owners if _is_array(owner)]

    def _digest_now(self):
        return Engine.digest(self._memory.contiguous())

    def is_written(self):
        return self._digest is not None and self._digest_now() != self._digest

    def refresh(self):
        parameter = self._parameter()
        version = None if parameter.is_inference() else parameter._version
        if self._digest is not None and version == self._version and not parameter.requires_grad and not self._has_data:
            return  # frozen, and nobody has written it
        with torch.no_grad():
            self._memory.copy_(parameter.detach())
        self._version, self._digest = version, self._digest_now()

    def note_data_of(self, parameter):
        if self._parameter() is parameter:
            self._has_data = True

    def memory(self):
        """As that of an array (followers.py); of a source of from_numpy() nobody here could keep the tensor alive."""
        return self._parameter(), self._owners[-1] if isinstance(self._owners[-1], torch.Tensor) else None

    def check(self):
        if self.is_written():
            raise Error.of(1601, f"an array or a buffer over the memory that parameter {self.name} had has been written since, which the "
                                 "parameter does not see", "Write into the parameter, p.copy_() under torch.no_grad()")

    def end(self):
        """It follows no more."""
        if self.is_held() and self.is_written():
            _log.warning("offloadd: an array or a buffer over the memory that parameter %s had was written after the last step: the "
                         "parameter did not see it", self.name)
        self._owners = []
        for reference in self._closed:
            array = reference()
            with contextlib.suppress(ValueError):  # one over a tensor's own memory, of which numpy does not know
                if array is not None:
                    array.flags.writeable = True


def _refuse_overlaps(named):
    """OFD-1601 where two parameters are over the same memory, and torch does not know it."""
    storages = {served.storage_of(parameter): (parameter.untyped_storage(), name) for name, parameter in named}
    places = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name) for storage, name in storages.values() if storage.nbytes())
    for (_, end, name), (begin, _, other) in zip(places, places[1:]):
        if begin < end:
            raise Error.of(1601, f"parameters '{name}' and '{other}' are over the same memory (two tensors of one array)",
                           "Give both modules the same parameter, or each a copy, torch.tensor(array)")


def _arrays_over(storage, places):
    """Those that numpy() gave. `places`: (begin, array), sorted by begin."""
    begin, end = (bisect.bisect_left(places, address, key=lambda place: place[0]) for address in (storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return [array for _, array in places[begin:end] if isinstance(array.base, torch.Tensor) and served.storage_of(array.base) == storage._cdata]


def _give_own_memory(name, parameter, arrays):
    """The tensor over the memory that it had, which only arrays have from now on."""
    former, copied = parameter.detach(), parameter.detach().clone()
    # Of each array one, the parameter's, this one, and that of the object that asks.
    others = torch._C._storage_Use_Count(served.storage_of(former)) - len(arrays) - 3
    if others > 0 or copied.stride() != former.stride():
        raise Error.of(1601, f"a numpy array is over the memory of parameter '{name}' (numpy() before attach()), which will be elsewhere, and so is another "
                             "tensor", "Keep no other tensor (y = p.detach()), or keep a copy, p.detach().numpy().copy(), or make the array after attach()")
    parameter.data = copied
    return former


def is_over_a_source(storage):
    """Whether its memory is an array's or a buffer's that can follow."""
    source = _given.get(storage)
    return source is not None and all(map(_can_be_written, _owners_of(source)))


def follower_of(parameter):
    """For an attached parameter that was given such memory, `p.data = torch.from_numpy(array)`, and is about to leave it; else None."""
    storage = parameter.untyped_storage()
    return _Beneath("of shape " + str(list(parameter.shape)), parameter, parameter, _owners_of(_given[storage])) if is_over_a_source(storage) else None


class _OfGraphs(_Beneath):
    """The memory that a parameter was given, `p.data = x`, and that graphs of outputs and losses still have."""

    def __init__(self, parameter):
        self._former = served.data_of(parameter)
        super().__init__("of shape " + str(list(parameter.shape)), parameter, self._former, [])

    def is_held(self):
        return self._parameter() is not None and self._former is not None and served.is_shared(self._former)

    def memory(self):
        return self._parameter(), self._former

    def end(self):
        super().end()
        self._former = None


served.follower_of_graphs = _OfGraphs
served.is_of_others = lambda storage: storage in _given
served.follower_of = follower_of


@contextlib.contextmanager
def apart(named):
    """In it parameters are attached. Those that arrays of numpy() are over have memory of their own then; not if that fails."""
    here = {}
    for name, p in named:
        if p.device.type == "cpu" and p.layout == torch.strided and p.numel() and not served.managed(p):
            here.setdefault(id(p), (name, p))
    _refuse_overlaps(here.values())
    places = sorted(((array.__array_interface__["data"][0], array) for array in list(_arrays.values()) if array.nbytes), key=lambda place: place[0])
    served.refuse_shared([(name, p) for name, p in here.values() if is_over_a_source(p.untyped_storage())])
    beneath, fixed, moved = [], [], []
    try:
        for name, parameter in here.values():
            source, arrays = _given.get(parameter.untyped_storage()), _arrays_over(parameter.untyped_storage(), places)
            if source is not None:
                owners = _owners_of(source)
                (beneath if all(map(_can_be_written, owners)) else fixed).append((_Beneath(name, parameter, parameter, owners), []))
            if arrays:
                former = _give_own_memory(name, parameter, arrays)
                moved.append((parameter, former))
                beneath.append((_Beneath(name, parameter, former, [former]), [weakref.ref(array) for array in arrays]))
        source = owners = arrays = places = former = None  # which would be taken for somebody who has them
        yield
    except BaseException:
        for parameter, former in moved:
            parameter.data = former
        raise
    moved.clear()
    for _, parameter in here.values():
        _given.pop(parameter.untyped_storage(), None)
    for each, _ in fixed:
        if each.is_held() and each.is_trained():
            _log.warning("offloadd: parameter %s was made over an array or a buffer (torch.from_numpy(), torch.frombuffer()) that is still there and cannot "
                         "be written: it keeps what it has now, and does not see what is trained", each.name)
    for each, arrays in beneath:
        if each.is_held():
            each.close_arrays([*map(weakref.ref, each.arrays()), *arrays])
            followers.add(each)
