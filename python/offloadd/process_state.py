"""What an optimizer that runs in this process keeps, as bytes and tensors, and back.

Described are its state, the options that its own steps change, its further attributes, and all of that of optimizers that it holds. Tensors are
described by the memory that they are over, and containers by who they are, so that what is shared is shared again when a run goes on. What
cannot be described that way is named (NotKept): the job then cannot be resumed, instead of going on with something else.
"""

import base64
import collections
import enum
import functools
import json
import logging
import random
import sys
import types
import zlib

import numpy
import torch

from . import served

_MAGIC = b"OFDPS\x01"
# What torch and this package keep in an instance, beside what its class does.
_OF_TORCH = ("state", "param_groups", "defaults", "step", "grad_scale", "found_inf")
_OF_TORCH_PREFIXES = ("_optimizer_", "_zero_grad_profile", "_offload", "_former_steps", "_opt_called", "_warned_", "_step_supports_amp", "_patch",
                      "_hook_for_profile")
_PLAIN = (type(None), bool, int, float, str)
_CONTAINERS = {list: "list", dict: "dict", set: "set", collections.OrderedDict: "ordered", collections.deque: "deque",
               collections.defaultdict: "default"}
_FACTORIES = {each.__name__: each for each in (dict, list, set, int, float)}
_NAMED = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout", torch.memory_format: "memory_format"}
_ADDRESSES = 1 << 32  # and more: ids of objects
# What a program makes anew, and no step changes.
_AS_MADE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, functools.partial, type, logging.Logger)
_text = json.JSONEncoder(separators=(",", ":")).encode
_FLAGS = ("false", "true")
_PARTS_MAX = 200_000  # that are described, with each step


class NotKept(Exception):
    """Says what it is that cannot be described."""


def _own_attributes(thing):
    skips = isinstance(thing, torch.optim.Optimizer)
    return {name: value for name, value in vars(thing).items()
            if not (skips and (name in _OF_TORCH or name.startswith(_OF_TORCH_PREFIXES)))}


def _is_as_made(value):
    return isinstance(value, _AS_MADE) or (callable(value) and not isinstance(value, torch.nn.Module) and not hasattr(value, "__dict__"))


def _are_optimizers(value):
    return type(value) in (list, tuple) and len(value) > 0 and all(isinstance(each, torch.optim.Optimizer) for each in value)


def optimizers_in(optimizer, found=None):
    """It, and those that its attributes are."""
    found = {} if found is None else found
    if id(optimizer) not in found:
        found[id(optimizer)] = optimizer
        for value in _own_attributes(optimizer).values():
            for each in value if _are_optimizers(value) else (value,):
                if isinstance(each, torch.optim.Optimizer):
                    optimizers_in(each, found)
    return list(found.values())


def options_of(optimizer):
    """Of all groups, in a form that tells when a step has changed one."""
    def told(value):
        return (id(value), value._version) if isinstance(value, torch.Tensor) else value if isinstance(value, _PLAIN) else repr(value)

    return {(id(group), key): told(value) for each in optimizers_in(optimizer) for group in each.param_groups for key, value in group.items()
            if key != "params"}


def _class_name(kind):
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_plain_object(value):
    """Whether it is what its attributes are."""
    kind = type(value)
    return hasattr(value, "__dict__") and kind.__module__ != "builtins" and kind.__reduce_ex__ is object.__reduce_ex__ \
        and not isinstance(value, (torch.Tensor, *_CONTAINERS)) and not hasattr(kind, "__slots__") and "<locals>" not in kind.__qualname__


def _packages_of(optimizer):
    return {each.__module__.partition(".")[0] for each in type(optimizer).__mro__} - {"builtins"}


def _is_sparse(tensor):
    return type(tensor) is torch.Tensor and tensor.layout == torch.sparse_coo and not tensor.requires_grad


def _tensors_of(module):
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def _array(texts):
    return f"[{','.join(texts)}]"


def _told(*values):
    """Of what texts tell, and lists of it."""
    return _text(values)


class Describer:
    """Of one optimizer, as it is now. `names`: of the job's parameters, by id; `changed`: (id of the group, option) that steps have changed.

    Things are described by texts of JSON, which no collection looks at: with lists, those that a thousand parameters began took as long as the
    step."""

    def __init__(self, names, changed):
        self.storages = []  # as bytes
        self._names, self._changed = names, changed
        self._by_storage, self._tensors, self._seen, self._alive = {}, {}, {}, []
        self._table, self._parts = [], 0  # of tensors; how many things
        self._packages = set()  # of the optimizers' classes
        self._where = "it"

    def of(self, optimizer):
        try:
            with torch.no_grad():
                described = f'{{"optimizer":{self._optimizer(optimizer)},"tensors":{_array(self._table)}}}'
        except NotKept:
            raise
        except Exception as error:  # of whatever it has that tells about itself: its steps go on
            raise NotKept(f"{self._where} cannot be looked at: {error}") from error
        return _MAGIC + zlib.compress(described.encode(), 1)

    def _optimizer(self, optimizer):
        if id(optimizer) in self._seen:
            return _told("again", self._seen[id(optimizer)])
        if optimizer.state is not optimizer.state or optimizer.param_groups is not optimizer.param_groups:
            raise NotKept("its state or its groups are made anew whenever they are looked at")
        self._packages |= _packages_of(optimizer)
        number = self._seen[id(optimizer)] = len(self._seen)
        groups = []
        for place, group in enumerate(optimizer.param_groups):
            self._where = f"option of group {place}"
            changed = {key: value for key, value in group.items() if (id(group), key) in self._changed}
            groups.append(_array([f"[{self.value(key)},{self.value(value)}]" for key, value in changed.items()]))
        self._where = "its state"
        state = "null" if id(optimizer.state) in self._seen else self.value(optimizer.state)
        return f'["optimizer",{number},{_array(groups)},{state},{self._attributes(optimizer)}]'

    def _attributes(self, thing):
        described = []
        for name, value in _own_attributes(thing).items():
            self._where = f"its attribute {name}"
            if not _is_as_made(value):
                described.append(f"[{_text(name)},{self._attribute(value)}]")
        return _array(described)

    def _attribute(self, value):
        """Things that are filled where they are when a run goes on."""
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value)
        if _are_optimizers(value):
            return f'["several",{_array([self._optimizer(each) for each in value])}]'
        if isinstance(value, torch.nn.Module):
            own = {name: tensor for name, tensor in _tensors_of(value).items() if id(tensor) not in self._names}
            return f'["module",{_array([f"[{_text(name)},{self.value(tensor)}]" for name, tensor in own.items()])}]'
        if isinstance(value, torch.Generator):
            return f'["generator",{self.value(value.get_state())}]'
        if isinstance(value, random.Random):
            return f'["random",{self.value(value.getstate())}]'
        return self._object(value) if _is_plain_object(value) else self.value(value)

    def _object(self, value, is_made_anew=False):
        for name, each in vars(value).items() if is_made_anew else ():
            if _is_as_made(each):  # nobody would make it
                raise NotKept(f"{self._where} has a {_class_name(type(value))} with a function, {name}")
        if id(value) in self._seen:
            return _told("again", self._seen[id(value)])
        number = self._seen[id(value)] = len(self._seen)
        return f'["object",{number},{_text(_class_name(type(value)))},{self._attributes(value)}]'

    def value(self, value):
        kind, self._parts = type(value), self._parts + 1
        if self._parts > _PARTS_MAX:
            raise NotKept(f"{self._where} is one of more than {_PARTS_MAX:,} things")
        if kind is int and value in self._names:  # id(parameter)
            return _told("id", self._names[value])
        if kind in _PLAIN:
            return int.__repr__(value) if kind is int else _text(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind in _CONTAINERS:
            return self._container(value, kind)
        if kind is tuple:
            return f'["tuple",{_array([self.value(each) for each in value])}]'
        if kind is complex:
            return _told("complex", value.real, value.imag)
        if kind is bytes:
            return _told("bytes", base64.b64encode(value).decode())
        if kind in _NAMED:
            return _told(_NAMED[kind], str(value).removeprefix("torch."))
        if isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
            return _told("number", value.dtype.str, base64.b64encode(value.tobytes()).decode())
        if kind is numpy.ndarray and value.dtype.kind in "biufc":
            return _told("array", value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode())
        if isinstance(value, torch.Size):
            return _told("size", list(value))
        if kind.__module__.partition(".")[0] in self._packages:
            if isinstance(value, enum.Enum):
                return _told("enum", _class_name(kind), value.name)
            if _is_plain_object(value):
                return self._object(value, is_made_anew=True)
        raise NotKept(f"{self._where} has a {kind.__module__}.{kind.__qualname__}")

    def _container(self, value, kind):
        if id(value) in self._seen:
            return _told("again", self._seen[id(value)])
        number = self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        if kind in (list, set, collections.deque):
            items = [self.value(each) for each in value]
        else:
            items = [f"[{self.value(key)},{self.value(each)}]" for key, each in value.items()]
        for key in value if kind not in (list, collections.deque) else ():
            if type(key) is int and key >= _ADDRESSES and key not in self._names:
                raise NotKept(f"{self._where} has a number for a key that is an address")
        further = None
        if kind is collections.deque:
            further = value.maxlen
        elif kind is collections.defaultdict:
            further = getattr(value.default_factory, "__name__", None)
            if value.default_factory is not None and _FACTORIES.get(further) is not value.default_factory:
                raise NotKept(f"{self._where} has a defaultdict of {value.default_factory}")
        return f'["{_CONTAINERS[kind]}",{number},{_array(items)},{_text(further)}]'

    def _tensor(self, tensor):
        if id(tensor) in self._names:
            return f'["parameter",{_text(self._names[id(tensor)])}]'
        return f'["tensor",{self._row(tensor)}]'

    def _row(self, tensor):
        """Of the table."""
        if id(tensor) not in self._tensors:
            described = self._described_sparse(tensor) if _is_sparse(tensor) else self._described(tensor)
            self._tensors[id(tensor)] = len(self._table)
            self._alive.append(tensor)
            self._table.append(described)
        return self._tensors[id(tensor)]

    def _described_sparse(self, tensor):
        """By the rows of its indices and its values, which come before its own."""
        return _told("sparse", self._row(tensor._indices()), self._row(tensor._values()), list(tensor.shape), tensor.is_coalesced())

    def _described(self, tensor):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided or tensor.is_quantized \
                or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
            raise NotKept(f"{self._where} has a {type(tensor).__name__} that is not an ordinary dense tensor")
        if served.managed(tensor):
            raise NotKept(f"{self._where} has a tensor over a weight or a gradient, not a copy of it")
        is_parameter = type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter)
        dtype, device = str(tensor.dtype).removeprefix("torch."), "cpu" if tensor.is_cpu else tensor.device
        return (f'[{self._storage(tensor)},{tensor.storage_offset()},"{dtype}",{list(tensor.shape)},{list(tensor.stride())},'
                f'{_FLAGS[tensor.requires_grad and tensor.is_leaf]},{_FLAGS[is_parameter]},"{device}"]')

    def _storage(self, tensor):
        storage = tensor.untyped_storage()
        number = self._by_storage.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            made = torch.ByteTensor(storage) if tensor.is_cpu else \
                torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
            self.storages.append(made)
        return number


class Giver:
    """Gives an optimizer what was described of one. `parameters`: the job's, by their names."""

    def __init__(self, described, storages, parameters):
        if not described.startswith(_MAGIC):
            raise NotKept("it was written by another version of offloadd")
        whole = json.loads(zlib.decompress(described[len(_MAGIC):]))
        self._described, self._parameters = whole["optimizer"], parameters
        self._seen, self._packages = {}, set()
        self._storages, self._there = storages, {}  # those of devices: once there
        self._tensors = []
        with torch.no_grad():
            for each in whole["tensors"]:
                self._tensors.append(self._sparse(*each[1:]) if each[0] == "sparse" else self._tensor(*each))
        self.changed = set()  # as Describer's, of the optimizer that was given it

    def _tensor(self, storage, offset, dtype, shape, stride, requires_grad, is_parameter, device):
        if (storage, device) not in self._there:
            self._there[storage, device] = self._storages[storage].to(device)
        memory = self._there[storage, device].untyped_storage()
        made = torch.empty(0, dtype=getattr(torch, dtype), device=device).set_(memory, offset, shape, stride)
        return torch.nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)

    def _sparse(self, indices, values, shape, is_coalesced):
        return torch.sparse_coo_tensor(self._tensors[indices], self._tensors[values], shape, check_invariants=False, is_coalesced=is_coalesced)

    def give(self, optimizer, with_options=True):
        self._with_options = with_options
        with torch.no_grad():
            self._fill(optimizer, self._described)

    def _fill(self, optimizer, described):
        _, number, groups, state, attributes = described
        self._seen[number] = optimizer
        self._packages |= _packages_of(optimizer)
        if len(groups) != len(optimizer.param_groups):
            raise NotKept(f"it had {len(groups)} groups, and has {len(optimizer.param_groups)} now")
        for group, options in zip(optimizer.param_groups, groups):
            for key, value in options:
                self.changed.add((id(group), key))
                if self._with_options or key not in group:
                    group[key] = self.value(value)
        if state is not None:
            self._seen[state[1]] = optimizer.state
            there = dict(optimizer.state)
            optimizer.state.clear()
            for key, each in state[2]:
                parameter = self.value(key)
                optimizer.state[parameter] = self._state_of_one(there.get(parameter), each)
        self._fill_attributes(optimizer, attributes)

    def _state_of_one(self, there, described):
        """A step that calls a closure, in which the model is attached, has the dictionary of its parameter already (LBFGS)."""
        if type(there) is not dict or not isinstance(described, list) or described[0] != "dict":
            return self.value(described)
        self._seen[described[1]] = there
        there.clear()
        there.update((self.value(key), self.value(each)) for key, each in described[2])
        return there

    def _fill_attributes(self, thing, attributes):
        for name, value in attributes:
            self._fill_attribute(thing, name, value)

    def _fill_attribute(self, thing, name, value):
        there, kind = vars(thing).get(name), value[0] if isinstance(value, list) else None
        if kind == "optimizer" and isinstance(there, torch.optim.Optimizer):
            self._fill(there, value)
        elif kind == "several" and _are_optimizers(there) and len(there) == len(value[1]):
            for each, its in zip(there, value[1]):
                if its[0] == "optimizer":  # else it was filled already
                    self._fill(each, its)
        elif kind == "module" and isinstance(there, torch.nn.Module):
            tensors = _tensors_of(there)
            for key, tensor in value[1]:
                if key not in tensors:
                    raise NotKept(f"its attribute {name} had {key}")
                tensors[key].copy_(self.value(tensor))
        elif kind == "generator" and isinstance(there, torch.Generator):
            there.set_state(self.value(value[1]))
        elif kind == "random" and isinstance(there, random.Random):
            there.setstate(self.value(value[1]))
        elif kind == "object" and _class_name(type(there)) == value[2]:
            self._seen[value[1]] = there
            self._fill_attributes(there, value[3])
        elif kind in ("optimizer", "several", "module", "generator", "random"):
            raise NotKept(f"its attribute {name} was another thing than {type(there).__name__}")
        else:
            vars(thing)[name] = self.value(value)

    def value(self, value):
        if not isinstance(value, list):
            return value
        kind, *rest = value
        if kind == "again":
            return self._seen[rest[0]]
        if kind == "parameter":
            if rest[0] not in self._parameters:
                raise NotKept(f"it has something of parameter '{rest[0]}', which the model has not")
            return self._parameters[rest[0]]
        if kind == "id":
            return id(self.value(["parameter", rest[0]]))
        if kind == "tensor":
            return self._tensors[rest[0]]
        if kind == "object":
            return self._object(*rest)
        if kind in _CONTAINERS.values():
            return self._container(kind, *rest)
        return _MAKERS[kind](self, *rest)

    def _object(self, number, name, attributes):
        its = self.class_of(name)
        if its.__reduce_ex__ is not object.__reduce_ex__:
            raise NotKept(f"{name} is made by a function now")
        made = self._seen[number] = its.__new__(its)
        self._fill_attributes(made, attributes)
        return made

    def class_of(self, name):
        """One that the optimizers' packages have: nothing is imported."""
        module, _, qualified = name.partition(":")
        found = sys.modules.get(module) if module.partition(".")[0] in self._packages else None
        for part in qualified.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, type):
            raise NotKept(f"it had a {name}, which there is not")
        return found

    def _container(self, kind, number, items, further):
        if kind == "deque":
            made = collections.deque(maxlen=further)
        elif kind == "default":
            made = collections.defaultdict(_FACTORIES.get(further))
        else:
            made = {"list": list, "dict": dict, "set": set, "ordered": collections.OrderedDict}[kind]()
        self._seen[number] = made
        if kind in ("list", "deque"):
            made.extend(self.value(each) for each in items)
        elif kind == "set":
            made.update(self.value(each) for each in items)
        else:
            made.update((self.value(key), self.value(each)) for key, each in items)
        return made


_MAKERS = {
    "tuple": lambda giver, items: tuple(giver.value(each) for each in items),
    "enum": lambda giver, its, name: giver.class_of(its)[name],
    "complex": lambda giver, real, imaginary: complex(real, imaginary),
    "bytes": lambda giver, text: base64.b64decode(text),
    "size": lambda giver, sizes: torch.Size(sizes),
    "dtype": lambda giver, name: getattr(torch, name),
    "layout": lambda giver, name: getattr(torch, name),
    "memory_format": lambda giver, name: getattr(torch, name),
    "device": lambda giver, name: torch.device(name),
    "number": lambda giver, dtype, text: numpy.frombuffer(base64.b64decode(text), dtype)[0],
    "array": lambda giver, dtype, shape, text: numpy.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy(),
}
