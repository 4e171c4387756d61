"""What models and optimizers have got since attach() becomes the job's."""

import torch

from . import beneath, in_memory, served
from .attachable import check_model
from .errors import Error
from .named_tensors import Reassigned, all_named_parameters_of, buffers_beside, buffers_of, names_of, with_strangers
from .recipes import parameters_of


def with_those_gone(modules):
    """Each of them; an empty one in the place of None, since those that are gone count in names."""
    return [module if module is not None else torch.nn.Module() for module in modules]


class Grows:
    """A part of the handle's class."""

    def may_grow(self):
        return not self._why_fixed()

    def _why_fixed(self):
        return "the job is on a device" if in_memory.destination_of(self.options) is not None else self._running().why_fixed()

    def check_grows(self, parameter):
        """OFD-1601 where a parameter that comes later cannot become the job's."""
        why = self._why_fixed() or ("it is on a device" if parameter.device.type != "cpu" else "")
        if why:
            raise Error.of(1601, f"add_param_group() with a parameter of shape {list(parameter.shape)} that was not in the model when it was "
                                 f"attached, and {why}",
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
        named = names_of(with_those_gone(self.models))
        if any(self._is_new(parameter) for _, parameter in named):
            if self.may_grow():
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
        models, destination = with_those_gone(self.models), in_memory.destination_of(self.options)
        beside = with_those_gone(module() for module in self._beside)
        for model in models:
            check_model(model)
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
