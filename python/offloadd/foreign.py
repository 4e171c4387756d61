"""An optimizer that the daemon does not have: it runs as it is, in this process, weight by weight. What it keeps is in memory of
this process, where that is much in pages of the pool (zero3/torch/process_memory.h), and is committed with every step (process_state.py says in
which form)."""

import logging

import torch

from . import process_state
from .errors import Error
from .library import Engine, bytes_of, tensor_of
from .optimizer import after_steps, has_stepped, have_hooks, refuse_unless_kept
from .recipes import parameters_of, refuse, step_function

_log = logging.getLogger("offloadd")


class ForeignPart:
    """Counts the steps of an optimizer that runs in this process: each is one of the job, which has what it keeps as the `number`-th of them."""

    is_foreign = True

    def __init__(self, handle, optimizer, name, number):
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            refuse("ZeroRedundancyOptimizer, which divides what an optimizer keeps among ranks: they share a job's in any case",
                   "Attach the optimizer that it would make, such as torch.optim.AdamW(model.parameters())")
        if handle.world_size > 1 and isinstance(optimizer, torch.optim.LBFGS):
            refuse(f"{name} with several ranks: it decides by the loss, which is another one in each of them",
                   "Use an optimizer that takes gradients only, or train with one rank")
        self.handle, self.optimizer, self.name, self.number = handle, optimizer, name, number
        self._options, self._changed = None, set()
        self._flags = self._flags_now()
        self._has_told, self._waits = False, []

    # ---- What the job has of it ----

    def expected_bytes(self):
        """Sizes of what it is going to keep: as much as each parameter twice for one of torch's, four times for others (Adan and Prodigy keep so
        much); where the job cannot have other room later, two moments of fp32."""
        trained = [parameter for parameter in parameters_of(self.optimizer) if parameter.requires_grad]
        sizes = [parameter.nbytes for parameter in trained]
        if isinstance(self.optimizer, torch.optim.LBFGS):
            return [sum(sizes)] * (2 * max(group["history_size"] for group in self.optimizer.param_groups) + 4)
        if not self.handle.may_grow() or any(parameter.device.type != "cpu" for parameter in trained):
            return 2 * [parameter.numel() * max(parameter.itemsize, 4) for parameter in trained]
        return (2 if type(self.optimizer).__module__.startswith("torch.optim.") else 4) * sizes

    def _flags_now(self):
        return {key: value for key, value in process_state.options_of(self.optimizer).items() if type(value) is bool}

    def check_goes_on(self, engine):
        """OFD-1604 where the job, which exists, does not have what it has kept."""
        there, is_kept, described = engine.foreign(self.number)
        if there == self.name and is_kept:
            return
        step = engine.step_count()
        if there == self.name:
            raise Error.of(1604, f"the job is at step {step}, but what {self.name} keeps is not part of it: {bytes_of(described).decode()}",
                           "Begin a new job with the saved weights: with more ram where that is what was missing, or with an optimizer whose state consists of "
                           "tensors and numbers")
        keeps = f"keeps what {there} does" if there else "was trained without it"
        raise Error.of(1604, f"the job is at step {step} and {keeps}, and what {self.name} keeps is not part of it",
                       "Attach the optimizers that it was trained with, or begin a new job with the saved weights")

    def take(self, engine, parameters):
        """What the job has of it; nothing, before its first step there."""
        described, is_given_back = bytes_of(engine.foreign(self.number)[2]), vars(self.optimizer).pop("_offload_is_given_back", False)
        if not described:
            return
        if has_stepped(self.optimizer) and not is_given_back:
            _log.warning("offloadd: job %s is at step %d and goes on there with what %s keeps in it; that of the script is dropped. Count from handle.step; "
                         "to go on at a checkpoint, load it after attach()", self.handle.job, engine.step_count(), self.name)
        try:
            giver = process_state.Giver(described, engine.take_foreign_storages(self.number), parameters)
            giver.give(self.optimizer, with_options=not vars(self.optimizer).pop("_offload_has_options", False))
        except process_state.NotKept as reason:
            raise Error.of(1604, f"the job is at step {engine.step_count()}, and {self.name} cannot take what it has kept: {reason}",
                           "Make the optimizer as in the run before, or begin a new job with the saved weights") from None
        self._changed = giver.changed

    def keep(self):
        """Before each step of the job, whoever takes it: as the program has left it."""
        engine = self.handle.engine()
        # What a method of the optimizer other than step() has switched (train() and eval() of schedule-free ones); no schedule changes these.
        self._changed |= {key for key, value in self._flags_now().items() if self._flags.get(key, value) is not value}
        describer = process_state.Describer(self.handle.names(), self._changed)
        try:
            described = describer.of(self.optimizer)
            reason = engine.keep_foreign(self.number, tensor_of(described), describer.storages)
        except process_state.NotKept as unknown:
            reason = str(unknown)
        if not reason:
            return
        engine.leave_foreign(self.number, reason)
        if not self._waits and not engine.make_room_for_foreign():
            self._waits = [model.register_forward_pre_hook(self._make_room) for model in self.handle.models if model is not None]
        elif not self._has_told:
            self._has_told = True
            _log.warning("offloadd: what %s keeps is not part of job %s, which cannot be resumed: %s", self.name, self.handle.job, reason)

    def _make_room(self, *_):
        """Before a forward pass, where gradients may be gone."""
        if torch.is_grad_enabled() and self.handle.engine().make_room_for_foreign():
            self._end_waiting()

    def _end_waiting(self):
        for hook in self._waits:
            hook.remove()
        self._waits = []

    # ---- Its steps ----

    def swap(self):
        self.optimizer._offload_part = self
        have_hooks(self.optimizer)
        self._hooks = [self.optimizer.register_step_pre_hook(self._begin), after_steps(self.optimizer, self._end)]

    def release(self):
        self._end_waiting()
        for hook in self._hooks:
            hook.remove()
        del self.optimizer._offload_part

    def _begin(self, _, args, kwargs):
        Engine.set_writes_alike(True)
        # A closure computes, too.
        self.handle.engine().begin_own_step(any(callable(each) for each in (*args, *kwargs.values())))
        if self._options is None:  # not one of its base class, within its own
            self._options = process_state.options_of(self.optimizer)

    def is_within_step(self):
        """Or one has raised an error."""
        return self._options is not None

    def _end(self):
        Engine.set_writes_alike(False)
        before, self._options = self._options, None
        if before is not None:  # else the step began before the optimizer was attached, in a closure
            now = process_state.options_of(self.optimizer)
            self._changed |= {key for key, value in now.items() if key not in before or before[key] != value}
        try:
            self.handle.commit()
        finally:
            Engine.end_own_step()

    def step(self, **others):
        """That of one whose class was the daemon's until a step (Handle.bring_here), called as it was then."""
        if others:
            refuse(f"step() with {', '.join(others)}", "Call step() without arguments, or with a closure")
        step_function(type(self.optimizer))(self.optimizer)

    def step_at_once(self):
        """Within a step that began before the optimizer was brought here: its end is that of this one."""
        self._begin(None, (), {})
        self.step()

    def tell(self):
        _log.warning("offloadd: %s runs in this process, weight by weight, which takes longer than in the daemon; what it keeps is beside ram, and "
                     "part of the job", self.name)

    def has(self, parameter):
        return any(parameter is each for each in parameters_of(self.optimizer))

    def write(self, parameter, plane, value):
        """As Part.write(); there are no masters."""
        if plane != "master":
            with torch.no_grad():
                refuse_unless_kept(self.optimizer.state.get(parameter, {}), plane)[plane].copy_(value)
