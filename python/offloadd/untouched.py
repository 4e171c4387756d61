"""Scripts that do not know of offloadd (`python -m offloadd script.py`): the first forward pass that trains attaches the module it is
of, with all optimizers that were made. Hugging Face's Trainer is attached by its callback."""

import functools
import logging
import sys
import weakref

import torch

from . import handle as handles

_log = logging.getLogger("offloadd")


class Watch:
    """Sees optimizers being made, and waits for the first forward pass."""

    def __init__(self, options):
        self.options = options
        self._order = []
        self._forward = None

    def begin(self):
        original = torch.optim.Optimizer.__init__
        watch = self

        @functools.wraps(original)
        def initialise(self, *args, **kwargs):
            original(self, *args, **kwargs)
            watch.add(self)

        torch.optim.Optimizer.__init__ = initialise

    def add(self, optimizer):
        """An optimizer that was just made."""
        self._tell_of_late(optimizer)
        self._order.append(weakref.ref(optimizer))
        if self._forward is None and not handles.handles():
            self._forward = torch.nn.modules.module.register_module_forward_pre_hook(self._before_forward)

    @staticmethod
    def _tell_of_late(optimizer):
        of_jobs = {each for handle in handles.handles() for each in handle.identities()}
        if any(id(parameter) in of_jobs for group in optimizer.param_groups for parameter in group["params"]):
            _log.warning("offloadd: a %s is made after training has begun: what it keeps stays in memory, and its steps are not part of the "
                         "job. Make all optimizers before the first step, or give this one's parameters to add_param_group()",
                         type(optimizer).__name__)

    def made(self):
        """The optimizers that are alive and were not attached, in their order."""
        alive = [each() for each in self._order]
        return [each for each in alive if each is not None and not hasattr(each, "_offload_part")]

    def _before_forward(self, module, inputs):
        if not torch.is_grad_enabled() or not module.training:
            return
        optimizers = self.made()
        mine = {id(parameter) for parameter in module.parameters()}
        is_attached = bool(handles.handles())
        if not is_attached and not any(id(p) in mine for each in optimizers for group in each.param_groups for p in group["params"]):
            return
        self._forward.remove()
        self._forward = None
        if is_attached:
            return
        handle = handles.attach(module, optimizers, **self.options)
        if handle.step:
            _log.warning("offloadd: job %s continues after %d steps", handle.job, handle.step)


class _WhenImported:
    """Calls a function when a module has been imported by the script."""

    def __init__(self, name, then):
        self.name, self.then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.then()

        spec.loader.exec_module = exec_module
        return spec


def begin(options):
    Watch(options).begin()
    sys.meta_path.insert(0, _WhenImported("transformers.trainer", lambda: watch_trainer(options)))


def watch_trainer(options):
    """transformers.trainer was just executed: a Trainer that is made gets the callback. The package is complete by then."""
    module = sys.modules["transformers.trainer"]
    original = module.Trainer.__init__

    @functools.wraps(original)
    def initialise(self, *args, **kwargs):
        original(self, *args, **kwargs)
        from .trainer import TrainerCallback, callback_of

        if callback_of(self) is None:
            self.add_callback(TrainerCallback(**options))

    module.Trainer.__init__ = initialise
