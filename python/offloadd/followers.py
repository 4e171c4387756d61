"""Memory outside of a job that is a parameter's in plain torch: the array that numpy() gives, the vector of vector_to_parameters(). While somebody
has it, it gets the parameter's values again after every step."""

import weakref

import torch

from .errors import Error
from .module_hooks import BeforeForward

_arrays = {}  # (id of the parameter, offset, size, stride) -> _Array
_vectors = {}  # id of the vector -> _Vector
_beneath = {}  # id of a parameter -> memory that it had (beneath.py)
_looks = []  # the hook that looks before modules compute, while there is something to look at
parameter_over = bool  # a function: the parameter of an open job that is over the storage of a tensor, None when there is none
is_replaced = bool  # a function: whether it has a value by `p.data = x`, and its memory, until the next step


class _Array:
    """The memory of arrays. These hold its storage, and so do their parts; the tensor that it was is gone."""

    def __init__(self, key, parameter, copied):
        self._key, self._parameter = key, weakref.ref(parameter)
        self._storage = weakref.ref(copied.untyped_storage(), lambda _: _arrays.pop(key, None))
        self._view = copied.dtype, copied.storage_offset(), copied.size(), copied.stride()

    def copied(self):
        """None where no array is over it any more."""
        storage, (dtype, *view) = self._storage(), self._view
        return torch.empty(0, dtype=dtype).set_(storage, *view) if storage is not None else None

    def refresh(self, identities):
        parameter, copied = self._parameter(), self.copied()
        if copied is not None and self.is_of(identities):
            _, offset, size, stride = self._key
            copied.copy_(parameter.detach().as_strided(size, stride, offset))

    def is_of(self, identities):
        parameter = self._parameter()
        return parameter is not None and id(parameter) in identities

    def memory(self):
        """(the parameter, a tensor over the memory that can be all of the parameter's, or None); None where nobody has it."""
        parameter, copied = self._parameter(), self.copied()
        if copied is None:
            return None
        is_whole = (copied.dtype, self._key[1:]) == (parameter.dtype, (0, parameter.size(), parameter.stride()))
        return parameter, copied if is_whole and copied.stride() == parameter.stride() else None


def copy_for_array(tensor, copy_of):
    """The memory of a read-only array over a tensor of a job: one for all arrays over the same elements, as they are now."""
    parameter = parameter_over(tensor)
    if parameter is None:
        return copy_of(tensor)
    key = id(parameter), tensor.storage_offset(), tensor.size(), tensor.stride()
    there = _arrays.get(key)
    copied = there.copied() if there is not None else None
    if copied is None:
        copied = copy_of(tensor)
        _arrays[key] = _Array(key, parameter, copied)
    else:
        with torch.no_grad():
            there.refresh({id(parameter)})
    return copied


class _Vector:
    """Of pieces that the shared object does not follow: of several ranks, on devices, of other strides."""

    def __init__(self, vector, pieces):
        key = id(vector)
        self._vector, self._version = weakref.ref(vector, lambda _: _vectors.pop(key, None)), vector._version
        self._pieces = [(begin, weakref.ref(parameter)) for begin, parameter in pieces]

    def is_of(self, ids):
        return any(id(each()) in ids for _, each in self._pieces)

    def is_written(self):
        vector = self._vector()
        return vector is not None and vector._version != self._version

    def check(self):
        if self.is_written():
            raise Error.of(1601, f"the vector of {self._vector().numel()} elements that vector_to_parameters() was given has been written since, which the "
                                 "parameters do not see", "Call vector_to_parameters() again, or keep no vector")

    def refresh(self, identities):
        vector = self._vector()
        for begin, parameter in [(begin, each()) for begin, each in self._pieces] if vector is not None else ():
            if parameter is not None and id(parameter) in identities:
                vector.data[begin:begin + parameter.numel()].copy_(parameter.detach().reshape(-1))  # which torch does not count as a write


def follow_vector(vector, pieces):
    """A vector, and (where one begins, the parameter that has been given it)."""
    ids = {id(parameter) for _, parameter in pieces}
    for key in [key for key, each in list(_vectors.items()) if each.is_of(ids)]:
        _vectors.pop(key, None)
    if pieces and not vector.is_inference():
        _vectors[id(vector)] = _Vector(vector, pieces)
        _look()


def add(beneath):
    beneath.refresh()
    _beneath.setdefault(beneath.key, []).append(beneath)
    _look()


def _look():
    if not _looks:
        _looks.append(BeforeForward(_before_forward))


def _look_no_more():
    """Where there is nothing to look at."""
    if _vectors or _beneath:
        return False
    while _looks:
        _looks.pop().remove()
    return True


def _before_forward(module, _):
    """OFD-1601 where a module is about to compute with parameters that do not have what a program has written."""
    if _look_no_more():
        return
    ids = {id(parameter) for parameter in module._parameters.values() if parameter is not None and not is_replaced(parameter)}
    tracing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # what looks is no part of the trace
    try:
        for each in [each for each in list(_vectors.values()) if each.is_written() and each.is_of(ids)]:
            each.check()
        for each in [each for key in ids for each in _beneath.get(key, ())]:
            each.check()
    finally:
        torch._C._set_tracing_state(tracing)


def _held():
    """Of such memory: that which somebody still has."""
    for each in [each for each in _all_beneath() if not each.is_held()]:
        drop(each)
    return _all_beneath()


def _all_beneath():
    return [each for several in _beneath.values() for each in several]


def check():
    """Before a step: as before a forward pass, of all parameters."""
    for each in [*_vectors.values(), *_held()]:
        each.check()


def refresh(identities):
    """After a step of the parameters with these ids."""
    if _arrays or _vectors or _beneath:
        with torch.no_grad():
            for each in [*_arrays.values(), *_vectors.values()]:
                each.refresh(identities)
            for each in _held():
                if each.is_of(identities):
                    each.refresh()


def drop(beneath):
    """Its parameter is gone, has other memory, or is in no job any more."""
    several = _beneath.get(beneath.key, [])
    if beneath in several:
        several.remove(beneath)
        if not several:
            del _beneath[beneath.key]
        beneath.end()


def forget(parameter):
    """It has been given other memory."""
    for key in [key for key in _arrays if key[0] == id(parameter)]:
        del _arrays[key]
    end({id(parameter)})


def note_data_of(parameter):
    """`p.data` was asked for: what is written there leaves no mark."""
    for each in _beneath.get(id(parameter), ()):
        each.note_data_of(parameter)


def memory_of(identities):
    """(parameter, memory that somebody has, or None for memory that cannot be the parameter's) of all that follow these parameters."""
    followed = [each.memory() for each in [*_arrays.values(), *_held()] if each.is_of(identities)]
    return [each for each in followed if each is not None]


def give_memory(followed):
    """Parameters whose job has ended, and that are in memory, get that which arrays have, as in plain torch. Returns of how many arrays or buffers
    that cannot be: they follow no more."""
    given, left = {}, 0
    for parameter, memory in followed:
        if memory is None or id(parameter) in given:
            left += 1
            continue
        given[id(parameter)] = parameter
        with torch.no_grad():
            memory.copy_(parameter.detach())
        parameter.data = memory
    return left


def end(identities):
    """A job ends: what follows its parameters stays as it is."""
    for each in [each for each in _all_beneath() if each.is_of(identities)]:
        drop(each)
    _look_no_more()
