"""What Python does with a parameter or a gradient without asking torch's dispatcher.

Bytes are served by a private copy, one tensor at a time: printing, numpy (read-only: what is written there would be lost), lists,
pickles. Code that only compares addresses gets a number that tells storages apart. Everybody else who asks for an address gets one that
the library serves, or, with raw_access="error", OFD-1603.
"""

import collections
import contextlib
import copy
import functools
import gc
import itertools
import logging
import multiprocessing.reduction
import sys
import threading
import types
import weakref

import torch

from . import followers
from .errors import Error, error_id
from .library import Engine

_log = logging.getLogger("offloadd")

_COMPARES_ADDRESSES = {"transformers", "accelerate", "peft", "huggingface_hub", "safetensors", "lightning", "pytorch_lightning",
                       "lightning_fabric", "diffusers", "torch"}
_BETWEEN = {"torch._tensor", "torch.storage", "torch.nn.parameter", __name__}  # frames that only pass the question on

_is_managed = Engine.is_managed
_identity_of = Engine.identity_of


def _is_plain(cls):
    """Whether tensors of a class are as torch's, under whatever name: those of a class of parameters are that has no functions of its own."""
    if cls in (torch.Tensor, torch.nn.Parameter):
        return True
    return issubclass(cls, torch.nn.Parameter) and (cls.__torch_function__, cls.__torch_dispatch__) == (
        torch.nn.Parameter.__torch_function__, torch.nn.Parameter.__torch_dispatch__)


def managed(tensor):
    return _is_plain(type(tensor)) and tensor.layout == torch.strided and _is_managed(tensor)


ordinary_memory = contextlib.nullcontext  # in an init() a context, true, in which new tensors are in memory; it is for making them alone


def _in_memory(tensor):
    """clone(), for those who follow pointers: in an init() the clone would be offloaded, too."""
    with ordinary_memory() as is_constructing:
        if is_constructing:
            made = torch.empty_like(tensor, requires_grad=False)
    return made.copy_(tensor) if is_constructing else tensor.clone()


def copy_of(tensor):
    """Its values now, in a tensor of its own."""
    with torch.no_grad():
        return _in_memory(tensor.detach())


# ---- Addresses ---------------------------------------------------------------------------------

class _in_our_words:
    """torch raises what a released storage says as a RuntimeError of its own."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is RuntimeError and error_id(error):
            raise Error(str(error)) from None


def _refused_in_our_words(original):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        with _in_our_words():
            return original(self, *args, **kwargs)

    return call


def _asks_for_identity():
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in _BETWEEN:
            return name.split(".")[0] in _COMPARES_ADDRESSES
        frame = frame.f_back
    return False


def _tensor_address(original):
    @functools.wraps(original)
    def data_ptr(self):
        if managed(self) and _asks_for_identity():
            return _identity_of(self)
        with _in_our_words():
            return original(self)

    return data_ptr


def _storage_address(original):
    @functools.wraps(original)
    def data_ptr(self):
        if self.device.type != "meta" and _asks_for_identity():
            return Engine.identity_of_storage(self._cdata) or original(self)
        with _in_our_words():
            return original(self)

    return data_ptr


def _is_memory_shared(original):
    """Among processes, which torch asks of the address, in a function that may not throw."""

    @functools.wraps(original)
    def is_shared(self):
        return not (self.device.type == "cpu" and Engine.identity_of_storage(self._cdata)) and original(self)

    return is_shared


# ---- Bytes -------------------------------------------------------------------------------------

def of_a_copy(original):
    """A function of a tensor's values: of its first argument."""

    @functools.wraps(original)
    def call(tensor, *args, **kwargs):
        return original(copy_of(tensor) if managed(tensor) else tensor, *args, **kwargs)

    return call


_exported = weakref.WeakSet()  # storages of which there was a DLPack


def _noting_storage(original):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        if self.layout == torch.strided and not managed(self):
            _exported.add(self.untyped_storage())
        return original(self, *args, **kwargs)

    return call


def check_exported(named):
    """OFD-1601 where others have the memory of a parameter by DLPack."""
    if not _exported:
        return
    counts = collections.Counter(storage_of(p) for p in {id(p): p for _, p in named if p.layout == torch.strided}.values())
    for name, parameter in named:
        if parameter.layout != torch.strided or managed(parameter) or parameter.untyped_storage() not in _exported:
            continue
        if torch._C._storage_Use_Count(storage_of(parameter)) > counts[storage_of(parameter)] + 1:
            raise Error.of(1601, f"others have the memory of parameter '{name}' by DLPack (from_dlpack() before attach()), which will be elsewhere",
                           "Give them a copy, p.detach().clone(), or do so after attach()")


def give_own_memory(named, engine, may_part):
    """Parameters that are parts of a larger tensor which nothing else uses, as `torch.nn.Parameter(weight[:n])` makes them, get memory of their
    own, one after the other; those that were constructed in an init() outside of memory. Others stay as they are, and are refused. `may_part`: whether
    they may leave a storage whose memory is not torch's."""
    by_storage = {}
    for _, parameter in named:
        if parameter.device.type != "meta" and parameter.layout == torch.strided and parameter.numel() and not is_attached(parameter):
            by_storage.setdefault(storage_of(parameter), {})[id(parameter)] = parameter
    for parts in by_storage.values():
        parts = sorted(parts.values(), key=torch.Tensor.storage_offset)
        storage = parts[0].untyped_storage()
        if len(parts) == 1 and storage.nbytes() == parts[0].nbytes:
            continue
        # The object that asks is one of both: that of the parameter's storage, of which Python has one, with a reference of torch's.
        is_used = torch._C._storage_Use_Count(storage._cdata) > len(parts) + 1 or sys.getrefcount(storage) > 3
        overlap = any(one.storage_offset() + one.numel() > next_.storage_offset() for one, next_ in zip(parts, parts[1:]))
        if is_used or overlap or not (storage.resizable() or may_part(storage)) or len({part.dtype for part in parts}) > 1:
            continue
        for part in parts:
            is_constructed = managed(part)
            if is_constructed:
                engine.begin_construction()
            try:
                copied = part.detach().clone()
            finally:
                if is_constructed:
                    engine.end_construction()
            if copied.stride() == part.stride():  # else it has gaps
                part.data = copied


def _shared_memory():
    """(begin, end) of what this process has mapped to share it."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        places = [line.split()[:2] for line in file]
    return [tuple(int(each, 16) for each in place.split("-")) for place, flags in places if flags.endswith("s")]


def refuse_shared(named):
    """OFD-1603 where others, or a file, have the memory of a parameter: what is trained would not reach them."""
    places = _shared_memory() if named else ()  # files may be mapped privately (torch.load(mmap=True))
    for name, parameter in named:
        address = parameter.untyped_storage().data_ptr()
        if any(begin <= address < end for begin, end in places):
            raise Error.of(1603, f"parameter '{name}' is in memory that is shared with other processes or a file (share_memory(), torch.multiprocessing, "
                                 "numpy.memmap): they would not see how it is trained",
                           "Attach a copy, copy.deepcopy(model), or train this model in memory")


def check_not_shared(named):
    """OFD-1603 for parameters that torch has put where other processes see them."""
    refuse_shared([(name, p) for name, p in named if p.device.type == "cpu" and p.numel() and not managed(p) and p.untyped_storage().is_shared()])


def _read_only(original):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        if not managed(self):
            return original(self, *args, **kwargs)
        if self.requires_grad and torch.is_grad_enabled() and not kwargs.get("force"):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        copied = followers.copy_for_array(self, copy_of)
        array = original(copied, *args, **kwargs)
        if array.__array_interface__["data"][0] == copied.data_ptr():  # not one of another type, which is somebody's own in any case
            array.flags.writeable = False
        return array

    return call


# Storages that were copied for a pickle that may still be under way, by (storage, its age): tied tensors stay tied in a file.
_copied = weakref.WeakValueDictionary()
steps_taken = int  # a function: grows with every step of any job


def _over_a_copy(tensor, copies, clone=torch.clone):
    """The same view of a copy of its whole storage, which `copies` remembers."""
    with torch.no_grad():
        storage, flat = tensor.untyped_storage(), tensor.detach()
        key = (storage._cdata, tensor._version, steps_taken())
        copied = copies.get(key)
        if copied is None:
            copied = clone(flat.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)).untyped_storage()
            copies[key] = copied
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(copied, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.__dict__:
        made.__dict__.update(tensor.__dict__)
    return made.requires_grad_(tensor.requires_grad)


_saves = threading.local()  # .bytes_of: storages that torch.save() is told of now -> what gives one with their bytes


def is_saving():
    """Whether torch.save() asks for what it writes."""
    return getattr(_saves, "bytes_of", None) is not None


def pickled_later(tensor, protocol, values):
    """tensor.__reduce_ex__() in torch.save(), which writes what `values()` gives, a tensor in the same order, when it comes to its storage."""
    _saves.bytes_of[storage_of(tensor)] = lambda: values().untyped_storage()
    return tensor.__reduce_ex__(protocol)


def _pickled(original):
    @functools.wraps(original)
    def call(self, protocol):
        if not managed(self):
            return original(self, protocol)
        if not is_saving() or self.device.type != "cpu":
            return original(_over_a_copy(self, _copied, _in_memory), protocol)
        values = self.detach()
        _saves.bytes_of[storage_of(self)] = lambda: _over_a_copy(values, {}, _in_memory).untyped_storage()
        return original(self, protocol)

    return call


class _Records:
    """The file that torch.save() writes one storage after the other into; of those that are offloaded, a copy meanwhile."""

    def __init__(self, file, bytes_of):
        self._file, self._bytes_of = file, bytes_of

    def write_record(self, name, data, *size):
        of_offloaded = self._bytes_of.get(data._cdata) if isinstance(data, torch.UntypedStorage) else None
        return self._file.write_record(name, data if of_offloaded is None else of_offloaded(), *size)

    def __getattr__(self, name):
        return getattr(self._file, name)


def _one_after_the_other(original):
    """What torch.save() writes: what it pickles are storages, whose bytes come when all are known."""

    @functools.wraps(original)
    def call(obj, zip_file, *args, **kwargs):
        outer, _saves.bytes_of = getattr(_saves, "bytes_of", None), {}
        try:
            return original(obj, _Records(zip_file, _saves.bytes_of), *args, **kwargs)
        finally:
            _saves.bytes_of = outer

    return call


def _deeply_copied(original):
    @functools.wraps(original)
    def call(self, memo):
        if not managed(self) or not self.is_leaf or id(self) in memo:
            return original(self, memo)
        memo[id(self)] = made = _over_a_copy(self, memo.setdefault("offloadd", {}))
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    return call


def _copied_shallowly(self):
    """copy.copy(): another tensor over the same storage. Its default goes through a pickle."""
    if not managed(self):
        return copy._reconstruct(self, None, *self.__reduce_ex__(4))
    is_parameter = isinstance(self, torch.nn.Parameter)
    made = torch.nn.Parameter(self.data, self.requires_grad) if is_parameter else self.detach().requires_grad_(self.requires_grad)
    made.__dict__.update(self.__dict__)
    return made


def _new_tensor(original):
    @functools.wraps(original)
    def call(self, data, *, dtype=None, device=None, requires_grad=False, **others):
        if not managed(self):
            return original(self, data, dtype=dtype, device=device, requires_grad=requires_grad, **others)
        return torch.empty(0, dtype=self.dtype, device=self.device).new_tensor(data, dtype=dtype, device=device, requires_grad=requires_grad, **others)

    return call


def _new(original):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        return original(torch.empty(0, dtype=self.dtype, device=self.device) if managed(self) else self, *args, **kwargs)

    return call


# ---- p.data = x --------------------------------------------------------------------------------

_parameter_data = torch.nn.Parameter.data
_replaced = {}  # id of a parameter -> _Replaced
is_of_others = bool  # a function: whether the memory of a storage is an array's, or a buffer's
follower_of = bool  # a function: what has such memory follow a parameter that is about to leave it
follower_of_graphs = bool  # a function: the same for memory of torch's that only graphs have
is_attached = bool  # a function: whether a parameter is one of an open job, and not one that is being constructed


def data_of(parameter):
    """`parameter.data`, as torch has it."""
    return _parameter_data.__get__(parameter)


def storage_of(tensor):
    return tensor.untyped_storage()._cdata


def is_shared(tensor):
    """Whether another tensor is over its storage."""
    return torch._C._storage_Use_Count(storage_of(tensor)) > 2  # the tensor's and that of the object that asks


def _storages_of_parameters_alone():
    """Storages that parameters were given pieces of, next to each other, and no other tensor is over: a vector that is gone (vector_to_parameters())."""
    pieces = collections.defaultdict(list)
    for each in _replaced.values():
        parameter = each.parameter()
        if parameter is not None and parameter.is_contiguous():
            begin = parameter.storage_offset() * parameter.element_size()
            pieces[storage_of(parameter)].append((begin, begin + parameter.numel() * parameter.element_size()))
    return {storage for storage, own in pieces.items()
            if torch._C._storage_Use_Count(storage) == len(own) + 1  # and the object that asks
            and all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(own)))}


def seen_storages():
    """References to the tensors that Python has over each."""
    seen = collections.defaultdict(list)
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            with contextlib.suppress(NotImplementedError, RuntimeError):  # it has none
                seen[storage_of(each)].append(weakref.ref(each))
    return seen


def _order_of(tensor):
    """Its dimensions, outermost in memory first; those of one element do not count."""
    return sorted((n for n in range(tensor.dim()) if tensor.size(n) > 1), key=tensor.stride, reverse=True)


def _have_same_order(parameter, value):
    """For another one torch may take other kernels, which give other bits."""
    return value.layout != torch.strided or _order_of(parameter) == _order_of(value)


def _set_version(tensor, version):
    """torch counts no write where `p.data = x` is one: graphs of before go backward."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


class _Replaced:
    """A parameter that was given another storage, and the tensor that is the job's."""

    def __init__(self, parameter):
        key = id(parameter)
        self.parameter = weakref.ref(parameter, lambda _: _replaced.pop(key, None))
        self.own = parameter.detach()
        self.given = weakref.ref(self.own)  # the tensor whose storage the parameter has now
        self._frozen_then = None

    def _source(self, parameter, seen):
        """The tensor that was given; of `p.data = q.data`, whose right side is gone, q, where there is no other."""
        given = self.given()
        if given is not None:
            return given
        others = [each for each in (reference() for reference in seen()[storage_of(parameter)]) if each is not None and each is not parameter]
        return others[0] if len(others) == 1 and not is_attached(others[0]) else None

    def _follower(self, parameter, may_leave, seen):
        """The tensor that was given, where it, the parameter and graphs are all that is over the storage, and it can be over the job's instead."""
        if not is_shared(parameter):
            return None
        given = self._source(parameter, seen)
        if given is None or given is self.own or given._base is not None or given.grad_fn is not None:
            return None
        if type(given) is not torch.Tensor and (type(given) is not torch.nn.Parameter or is_attached(given)):
            return None
        if given.requires_grad and type(given) is not torch.nn.Parameter:
            return None
        # Somebody else's memory: numpy's, another process's. Of CUDA torch says so of all.
        if is_of_others(given.untyped_storage()) or (given.device.type == "cpu" and given.is_shared()):
            return None
        if storage_of(given) != storage_of(parameter):
            return None
        # A second tensor beside the parameter's, and the object that asks.
        if torch._C._storage_Use_Count(storage_of(parameter)) != 3 and not (may_leave and self._is_of_graphs(parameter, given, seen)):
            return None
        is_whole = given.storage_offset() == self.own.storage_offset() == 0
        return given if is_whole and given.shape == self.own.shape and given.stride() == self.own.stride() else None

    def give(self, value):
        """`p.data = value` has been said. Notes whether a tensor that no collection looks at may be over its storage, too."""
        self.given = weakref.ref(value)
        is_alone = torch._C._storage_Use_Count(storage_of(value)) == 3  # with the parameter, and who asks
        self._frozen_then = gc.get_freeze_count() if is_alone else None

    def _is_of_graphs(self, parameter, follower, seen):
        """Whether what is over its storage, beside it and the follower (or None), is in graphs of autograd, those of outputs and losses that are kept:
        nobody can write there."""
        if parameter.device.type != "cpu" or managed(parameter) or parameter.is_shared() or is_of_others(parameter.untyped_storage()):
            return False
        frozen, given = gc.get_freeze_count(), self.given()
        if frozen and (frozen != self._frozen_then or (given is not None and given is not follower)):
            return False
        return len(seen()[storage_of(parameter)]) == 1 + (follower is not None)

    def _leave_to_others(self, parameter):
        """Has what was made of the former storage (y = p.data) keep that, with what is in it, in memory, as in plain torch: the job's values are elsewhere
        from now on. Whether that could be: not on a device, nor with tied parameters."""
        if parameter.device.type != "cpu" or self.own.is_inference():
            return False
        value, version = data_of(parameter), parameter._version
        _parameter_data.__set__(parameter, self.own)
        with torch.no_grad():
            parameter.set_(self.own.clone())
        _set_version(parameter, version)
        own = parameter.detach()
        is_left = storage_of(own) != storage_of(self.own)
        _parameter_data.__set__(parameter, value)
        if is_left:
            self.own = own
        return is_left

    def settle(self, may_stay, may_leave, of_parameters_alone, seen):
        """Has the job take the value; whether the parameter has its own storage again."""
        parameter = self.parameter()
        if parameter.shape != self.own.shape or parameter.dtype != self.own.dtype:
            raise Error.of(1601, f"a parameter of {self.own.dtype}, shape {list(self.own.shape)}, has become one of {parameter.dtype}, shape "
                                 f"{list(parameter.shape)} (p.data = …, or a cast such as model.to(dtype))",
                           "Change types and shapes before attach(). A model that casts parameters in its own forward pass (routers of experts) has done so "
                           "after one: call it once before attach()")
        is_left = is_shared(self.own)
        if is_left and not (may_leave and self._leave_to_others(parameter)):
            raise Error.of(1601, f"a parameter of shape {list(parameter.shape)} was given another storage (p.data = x), and a tensor that was made of "
                                 "its former one is still there (y = p.data)", "Set the value with p.copy_(x) under torch.no_grad(), or keep no y")
        is_taken = storage_of(parameter) not in of_parameters_alone and is_shared(parameter)
        stays = may_stay and is_taken
        follower = None if stays else self._follower(parameter, may_leave, seen)
        is_followed = follower is not None and torch._C._storage_Use_Count(storage_of(parameter)) == 3
        is_of_graphs = is_taken and not stays and not is_followed and may_leave and self._is_of_graphs(parameter, follower, seen)
        is_seen = is_taken and not stays and follower is None and not is_of_graphs  # by tensors that can be told of every write
        followers.forget(parameter)
        memory = None
        if is_of_graphs:
            memory = follower_of_graphs(parameter)
        elif not stays and not is_seen and parameter.device.type == "cpu":
            memory = follower_of(parameter)
        version = self.own._version
        with torch.no_grad():
            if not is_seen:
                Engine.forget_given(self.own)
                self.own.copy_(parameter.detach())
            elif not Engine.share(self.own, parameter):
                raise Error.of(1601, f"a parameter of shape {list(self.own.shape)} was given a storage (p.data = x) that another tensor is over, "
                                     "too: x, a view of it, or one in the graph of an output or a loss that is kept",
                               "Set the value with p.copy_(x) under torch.no_grad(), or keep neither x nor the graph (loss.detach())")
        if (is_left or is_of_graphs or is_seen) and parameter.dtype.itemsize > 2:  # the version of narrower ones tells their masters
            _set_version(self.own, version)
        if not stays:
            _parameter_data.__set__(parameter, self.own)
        if memory:
            followers.add(memory)
        if follower is not None:  # both go on to be one
            _parameter_data.__set__(follower, self.own)
        return not stays


def settle_replaced(identities, in_process=frozenset(), *, may_leave):
    """Before a step: `p.data = x` has given parameters storages of their own. The job takes the values, and the parameters their storages
    back, which nobody can tell where no other tensor is over what they were given, but for other such parameters, or only x, which gets the job's storage,
    too, or graphs, which get the values again after every step. Those whose optimizer runs in this process (`in_process`) may share x
    with what it keeps, and stay in memory as that does; else OFD-1601. What is over the former storage keeps it, with what was in it (`may_leave`: of one
    rank)."""
    keys = [key for key in _replaced if key in identities]
    of_parameters_alone = _storages_of_parameters_alone() if keys else ()
    seen = functools.cache(seen_storages)
    for key in keys:
        if _replaced[key].settle(key in in_process, may_leave, of_parameters_alone, seen):
            del _replaced[key]


def is_replaced(parameter):
    """Whether it has a value by `p.data = x` that the job takes with the next step."""
    return id(parameter) in _replaced


followers.is_replaced = is_replaced


def forget_replaced(identities):
    for key in [key for key in _replaced if key in identities]:
        del _replaced[key]


def _replaceable(original):
    def set_data(self, value):
        if managed(self) and is_attached(self):
            if self.device != value.device:
                to_host = value.device.type == "cpu"
                raise Error.of(1601, f"a parameter of shape {list(self.shape)} would move from {self.device} to {value.device} (p.data = …, "
                                     "model.to(device))",
                               ("Leave it there: state_dict(), torch.save() and handle.save_weights() need no move. Or move the model" if to_host else
                                f'Name the device, attach(…, device="{value.device}"), or move the model before attach(), or')
                               + ' after close() with weights_at_close="memory"')
            if self.shape != value.shape:  # which autograd stumbles over before the next step
                raise Error.of(1601, f"a parameter of shape {list(self.shape)} would become one of {list(value.shape)} (p.data = …, "
                                     "resize_token_embeddings())",
                               'Change shapes before attach(), or after close() with weights_at_close="memory", and attach to a new job')
            if not _have_same_order(self, value):
                raise Error.of(1601, f"a parameter of shape {list(self.shape)} would lie in memory in another order (p.data = …, "
                                     "model.to(memory_format=…))", "Lay the model out before attach(), and set values with p.copy_()")
            if id(self) not in _replaced and storage_of(value) != storage_of(self):
                _replaced[id(self)] = _Replaced(self)
        original.__set__(self, value)
        there = _replaced.get(id(self))
        if there is not None:
            there.give(value)
        if there is not None and storage_of(there.own) == storage_of(self):
            del _replaced[id(self)]  # put back

    def get_data(self):
        followers.note_data_of(self)
        return original.__get__(self)

    return property(get_data, set_data, original.__delete__, original.__doc__)


def _into_memory(original):
    """torch.load(), which reads a file into storages by their addresses."""

    @functools.wraps(original)
    def call(*args, **kwargs):
        with ordinary_memory():
            return original(*args, **kwargs)

    return call


def wrap(owner, name, make):
    """Puts make(what a class or a module has by this name) in its place, where pickles find it."""
    if not hasattr(owner, name):
        return
    made = make(getattr(owner, name))
    if isinstance(made, types.FunctionType):
        is_class = isinstance(owner, type)
        made.__module__, made.__qualname__ = (owner.__module__, f"{owner.__qualname__}.{name}") if is_class else (owner.__name__, name)
    setattr(owner, name, made)


def _wrap_by_name(owner, name, make):
    """Also where it was imported by its name."""
    original = getattr(owner, name)
    made = make(original)
    for module in [each for each in sys.modules.values() if isinstance(each, types.ModuleType)]:
        for key in [key for key, value in list(vars(module).items()) if value is original]:
            setattr(module, key, made)


wrap(torch.Tensor, "__dlpack__", _noting_storage)
_wrap_by_name(torch.utils.dlpack, "to_dlpack", _noting_storage)


@functools.lru_cache(maxsize=None)
def install():
    """Once, with the first attach()."""
    tensor = torch.Tensor
    wrap(torch._tensor_str, "_tensor_str", of_a_copy)  # the part of repr() that looks at the values
    wrap(tensor, "tolist", of_a_copy)
    wrap(tensor, "numpy", _read_only)
    wrap(tensor, "__array__", _read_only)
    wrap(tensor, "__reduce_ex__", _pickled)
    wrap(tensor, "__deepcopy__", _deeply_copied)
    tensor.__copy__ = _copied_shallowly
    wrap(tensor, "new_tensor", _new_tensor)
    wrap(tensor, "new", _new)
    wrap(tensor, "data_ptr", _tensor_address)
    Engine.leave_data()
    wrap(torch.nn.Parameter, "data", _replaceable)
    wrap(tensor, "__dlpack__", _refused_in_our_words)
    _wrap_by_name(torch.utils.dlpack, "to_dlpack", _refused_in_our_words)
    wrap(tensor, "share_memory_", _refuse_to_share)
    wrap(torch.UntypedStorage, "data_ptr", _storage_address)
    wrap(torch.UntypedStorage, "is_shared", _is_memory_shared)
    for kind, names in ((torch.UntypedStorage, ("__getitem__", "__setitem__", "copy_", "clone", "fill_", "tolist")),
                        (torch.TypedStorage, ("__getitem__", "__setitem__"))):
        for name in names:
            wrap(kind, name, _refused_in_our_words)
    _wrap_by_name(torch.nn.utils, "vector_to_parameters", _set_from_vector)
    wrap(torch.utils, "swap_tensors", _refuse_to_swap)
    wrap(torch.nn.RNNBase, "flatten_parameters", _unless_managed)
    wrap(torch, "load", _into_memory)
    wrap(torch.serialization, "_save", _one_after_the_other)
    reducers = multiprocessing.reduction.ForkingPickler._extra_reducers  # torch's
    for kind in (torch.Tensor, torch.nn.Parameter):
        if kind in reducers:
            reducers[kind] = _refuse_to_share(reducers[kind])


def _refuse_to_swap(original):
    """What load_state_dict() and .to() do to parameters under torch.__future__.set_swap_module_params_on_conversion(True)."""

    @functools.wraps(original)
    def call(t1, t2):
        if managed(t1) or managed(t2):
            raise Error.of(1601, f"swap_tensors() with a parameter of shape {list(t1.shape)} that is attached",
                           "Set its value with p.copy_() under torch.no_grad(), or swap before attach()")
        return original(t1, t2)

    return call


def _unless_managed(original):
    """RNNBase.flatten_parameters(), which puts weights into one memory of the device for cuDNN. Those that are offloaded stay where they are."""

    @functools.wraps(original)
    def call(self):
        if not any(isinstance(weight, torch.Tensor) and managed(weight) for weight in self._flat_weights):
            original(self)

    return call


def _refuse_to_share(original):
    """share_memory_(), and what torch does to a tensor that goes through a queue or to a process that is spawned: both processes write it."""

    @functools.wraps(original)
    def call(tensor):
        if managed(tensor):
            raise Error.of(1603, f"a parameter of shape {list(tensor.shape)} would be shared with another process",
                           "Send a copy, copy.deepcopy(model), or attach to a job in the other process")
        return original(tensor)

    return call


def _set_from_vector(original):
    """vector_to_parameters() points parameters at pieces of the vector; those that are offloaded take the values, and follow what is written there."""

    @functools.wraps(original)
    def call(vec, parameters):
        parameters = list(parameters)
        if not any(managed(parameter) for parameter in parameters):
            return original(vec, parameters)
        begin, apart = 0, []
        with torch.no_grad():
            for parameter in parameters:
                piece = vec[begin:begin + parameter.numel()].view_as(parameter)
                is_alike = (piece.dtype, piece.device) == (parameter.dtype, parameter.device)
                if not managed(parameter) or is_shared(parameter) or not is_alike:  # who looks at the memory that it had keeps that
                    parameter.data = piece
                elif not Engine.share(parameter, piece):
                    parameter.copy_(piece)
                    apart.append((begin, parameter))
                begin += parameter.numel()
        followers.follow_vector(vec, apart)

    return call
