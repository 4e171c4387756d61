"""The tensors of models that are attached, by the names that the job has for them."""

import inspect
import logging
import weakref

import torch

from .errors import Error, class_of
from .recipes import is_table

_log = logging.getLogger("offloadd")


def is_wrapper(tensor):
    """A DTensor, and other classes with a __torch_dispatch__ of their own, hold other tensors."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def check_has_memory(what, tensor):
    if is_wrapper(tensor):
        raise Error.of(1601, f"{what} is {class_of(tensor)}, which has no memory of its own",
                       "Attach the model as it is before fully_shard(), parallelize_module() or quantize_(): ranks of a node share weights and "
                       "optimizer state in any case")


def check_left_out(left_out, named, models):
    """OFD-1002 for names of weights that are not to be saved and that there are not: `named` has those of the job, by name."""
    if isinstance(left_out, str):
        raise Error.of(1002, f"left_out is {left_out!r}", "Give it a list of names")
    known = {name for name, _ in named}
    for model in models:
        known.update(name for name, _ in [*all_named_parameters_of(model), *model.named_buffers()])
    for each in left_out:
        if each not in known:
            raise Error.of(1002, f"left_out: no weight is called {each}", "Name them as model.state_dict() does")


def all_named_parameters_of(model):
    """Those that are tied by each of their names. A class may have a named_parameters() of its own that does not know of this: then torch's."""
    own = model.named_parameters
    try:
        inspect.signature(own).bind(remove_duplicate=False)
    except TypeError:
        return torch.nn.Module.named_parameters(model, remove_duplicate=False)
    return own(remove_duplicate=False)


def _all_names_of(models):
    named = []
    for n, model in enumerate(models):
        prefix = "" if n == 0 else f"{n}/"
        for key, parameter in all_named_parameters_of(model):
            key = key.replace("_orig_mod.", "")  # of torch.compile
            named.append((prefix + key, parameter))
    return named


def names_of(models):
    """(name, parameter) of all models; those of the first have their own names, those of the n-th further one begin with "n/"."""
    return [(name, parameter) for name, parameter in _all_names_of(models) if not is_table(parameter)]


def tables_of(models):
    """Frozen parameters of whole numbers (quantised weights): they are buffers of the job."""
    return [(name, parameter) for name, parameter in _all_names_of(models) if is_table(parameter)]


class Reassigned:
    """What a module assigns anew after attach(): the tensor that a buffer becomes (`self.mean = 0.9 * self.mean + …`) is the job's from the next
    step on; where the job has a parameter that nobody trains, the new one is told of once."""

    def __init__(self, models, beside, buffers):
        """`beside`: further modules of which the job has the buffers alone. `buffers`: (name, buffer) as attached, those without a name are not
        kept."""
        self._parameters = []
        names = {}  # of the job: a buffer that several modules share has the first of its names
        for name, buffer in buffers:
            if name:
                names.setdefault(id(buffer), name)
        places = {}  # name -> where modules have it
        self._now = {}  # name -> the tensor that it is
        own = {id(module): module for model in models for module in model.modules()}
        others = {id(module): module for model in beside for module in model.modules()}
        for module in {**own, **others}.values():
            for key, buffer in module._buffers.items():
                if id(buffer) in names and key not in module._non_persistent_buffers_set:
                    places.setdefault(names[id(buffer)], []).append((weakref.ref(module), "_buffers", key))
                    self._now[names[id(buffer)]] = buffer
            for key, parameter in module._parameters.items() if id(module) in own else ():
                if id(parameter) in names and is_table(parameter):
                    places.setdefault(names[id(parameter)], []).append((weakref.ref(module), "_parameters", key))
                    self._now[names[id(parameter)]] = parameter
                elif parameter is not None:
                    self._parameters.append((weakref.ref(module), key, parameter))
        self._places = list(places.items())
        self._told = set()
        # (module, how many buffers it has, the keys of those that are there)
        self._there = [(weakref.ref(module), len(module._buffers), {key for key, buffer in module._buffers.items() if buffer is not None})
                       for module in {**own, **others}.values() if not isinstance(module, torch.jit.ScriptModule)]
        self._not_kept = [(weakref.ref(module), key, []) for module in {**own, **others}.values() if not isinstance(module, torch.jit.ScriptModule)
                          for key, buffer in sorted(module._buffers.items())
                          if key in module._non_persistent_buffers_set or (buffer is not None and buffer.dtype not in _BUFFER_TYPES)]

    @staticmethod
    def _at(place, kind, key):
        """What is there; None where the module is gone."""
        module = place()
        there = getattr(module, kind, {})
        return there.get(key) if isinstance(there, dict) else dict(there.items()).get(key)  # of a ScriptModule no dictionary

    def buffers(self):
        """(name, tensor), as modules have them now."""
        for name, places in self._places:
            there = [now for now in (self._at(*place) for place in places) if now is not None]
            yield name, next((each for each in there if each is not self._now[name]), self._now[name])

    def _tell(self, key, text):
        if key not in self._told:
            self._told.add(key)
            _log.warning("offloadd: %s", text)

    def _tell_of_new(self):
        """Of buffers that modules have made since (masks, as of torch.nn.utils.prune), in a line for all modules of a class."""
        made = {}  # (key, class) -> how many modules
        for n, (place, count, there) in enumerate(self._there):
            module = place()
            if module is None or count == len(module._buffers) == len(there):
                continue
            new = [key for key, buffer in module._buffers.items() if buffer is not None and key not in there]
            self._there[n] = place, len(module._buffers), there.union(new)
            for key in new:
                if key not in module._non_persistent_buffers_set:
                    made[key, class_of(module)] = made.get((key, class_of(module)), 0) + 1
        for (key, name), count in made.items():
            _log.warning("offloadd: buffer %s of %s was not there when it was attached: what it holds is not part of the job, and a run that is resumed "
                         "begins without it. Give it a value before attach()", key, name + (f", and of {count - 1} more," if count > 1 else ""))

    def _tell_of_not_kept(self):
        """Once, of buffers that are in no state_dict(), or of types that the job does not have, and that training changes (a queue): not of those that the
        first step has filled (tables)."""
        told = len(self._told)
        for place, key, seen in self._not_kept:
            module = place()
            buffer = module._buffers.get(key) if module is not None else None
            if buffer is None or buffer.is_inference():
                continue
            if seen and (seen[0]() is not buffer or seen[1] != buffer._version):
                is_left_out = key in module._non_persistent_buffers_set
                why, whose, way = ("is registered with persistent=False", ", nor of a state_dict()", "Register it without that") if is_left_out else \
                    (f"is {buffer.dtype}", "", "Keep it in another type, complex numbers as torch.view_as_real(), or save and load it")
                self._tell((class_of(module), key), f"buffer {key} of {class_of(module)} changes while it is trained, and {why}: what it holds is not part of "
                           f"the job{whose}, and a run that is resumed begins without it. {way}, if the training depends on it")
            seen[:] = weakref.ref(buffer), buffer._version
        if len(self._told) > told:  # of these nothing more
            self._not_kept = [each for each in self._not_kept if (place := each[0]()) is not None and (class_of(place), each[1]) not in self._told]

    def take_alike(self, engine):
        """Buffers that others like them have replaced."""
        for name, places in self._places:
            now = next((each for each in (self._at(*place) for place in places) if each is not None and each is not self._now[name]), None)
            if now is not None and not is_wrapper(now) and engine.replace_buffer(name, now):
                self._now[name] = now

    def settle(self, identities, engine):
        self._tell_of_new()
        self._tell_of_not_kept()
        for name, places in self._places:
            there = [now for now in (self._at(*place) for place in places) if now is not None]
            was = self._now[name]
            now = next((each for each in there if each is not was), None)
            if now is None:
                continue
            if any(each is not now for each in there):
                self._tell((name, "shared"), f"buffer {name} was shared when it was attached, and its modules have tensors of their own now: a run "
                                             "that is resumed gives both the value of one")
            self._now[name] = now
            if is_wrapper(now) or not engine.replace_buffer(name, now):
                self._tell(name, f"buffer {name} has become {now.dtype}{list(now.shape)} on {now.device}, it was {was.dtype}{list(was.shape)} on "
                                 f"{was.device} before: what it holds from now on is not part of the job")
        for place, key, parameter in self._parameters:
            now = self._at(place, "_parameters", key)
            if now is None or now is parameter:
                continue
            if now.is_meta:
                raise Error.of(1601, f"parameter {key} of {class_of(place())} was moved to device meta after attach(), where it has no value",
                               "Of a model that is trained on build shapes anew, `with torch.device(\"meta\"):`; one that is not may be left there")
            if now.device != parameter.device:
                raise Error.of(1601, f"parameter {key} of {class_of(place())} was moved from {parameter.device} to {now.device} after "
                                     "attach()", "Move the model before attach(), or after close() with weights_at_close=\"memory\"")
            if id(now) not in identities:
                self._tell(id(parameter), f"parameter {key} of {class_of(place())} is another one than when it was attached "
                                          "(load_state_dict(assign=True), or an assignment): neither the optimizer nor the job has it. Replace "
                                          "parameters before attach(), and set values with p.copy_()")


# Types of buffers that are committed; others (complex tables) are constants.
_BUFFER_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
                 torch.bool)


def buffers_of(models, destination=None):
    """(name, buffer). Those that belong to a state_dict (running statistics, masks) stay in memory and are committed with every step;
    others, which the model makes anew, have an empty name. Those on other devices than the parameters, or where these go, are not part of
    the job."""
    named = []
    devices = {torch.device("cpu"), destination, *(p.device for model in models for p in model.parameters())} - {torch.device("meta")}
    for n, model in enumerate(models):
        prefix = "" if n == 0 else f"{n}/"
        for path, module in model.named_modules(remove_duplicate=False):
            for key, buffer in module._buffers.items():
                if buffer is None or buffer.device not in devices or buffer.layout != torch.strided or is_wrapper(buffer):
                    continue
                is_kept = key not in module._non_persistent_buffers_set and buffer.dtype in _BUFFER_TYPES
                name = f"{path}.{key}" if path else key
                named.append((prefix + name.replace("_orig_mod.", "") if is_kept else "", buffer))
    return named + tables_of(models)


def buffers_beside(beside, buffers, destination=None):
    """(name, buffer) of those that further modules keep and `buffers` has not."""
    known = {id(buffer) for _, buffer in buffers}
    named = []
    for n, module in enumerate(beside):
        for name, buffer in buffers_of([module], destination):
            if name and id(buffer) not in known:
                known.add(id(buffer))
                named.append((f"beside/{n}/{name}", buffer))
    return named


def with_strangers(named, optimizers, others=frozenset()):
    """Parameters that an optimizer has and no model. `others`: ids of those that have been a model's, which do not count."""
    known = {id(parameter) for _, parameter in named} | others
    for n, optimizer in enumerate(optimizers):
        count = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known and not is_table(parameter):
                    check_has_memory("a parameter of the optimizer", parameter)
                    known.add(id(parameter))
                    named.append((f"optimizer/{n}/{count}", parameter))
                    count += 1
    return named
