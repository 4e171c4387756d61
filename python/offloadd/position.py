"""Where a run of Hugging Face's Trainer is in its data: kept with every step, and where a run that continues goes on.

Trainer derives it from the number of steps, which says nothing where data have no length, and end and begin again before max_steps, or
where a callback has ended an epoch early."""

import logging
import random

import torch

_log = logging.getLogger("offloadd")
_NEEDED = "_init_training_state"  # of transformers 5
_NUMBERS = "_load_rng_state"


def random_state():
    import numpy

    state = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.random.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else state


def set_random_state(state):
    import numpy

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def length_of(loader):
    """Batches of an epoch; None where nobody knows."""
    try:
        return len(loader)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def _micro_batch_of(trainer):
    """What decides how much of the data a micro-batch is, and which are one step."""
    return [trainer._train_batch_size, trainer.args.gradient_accumulation_steps, trainer.args.world_size]


def kept_for(trainer, kept):
    """`kept`, a job's position, for a Trainer with the same micro-batches. None for others: to them it is another place in the data, and Trainer
    derives its own."""
    return kept if kept is not None and kept.get("of") == _micro_batch_of(trainer) else None


class Position:
    """The epoch of the loop, how many micro-batches of it are behind, and the random numbers at its beginning, of which a sampler may have
    made its order. `numbers`: those of an epoch that was begun in a process that has ended."""

    def __init__(self, epoch, batches, numbers=None):
        self._start = epoch, batches, numbers
        self.restart()

    def restart(self):
        self.epoch, self.batches, self._numbers = self._start
        self._is_before_first = True

    def begin_epoch(self):
        if not self._is_before_first:
            self.epoch, self.batches, self._numbers = self.epoch + 1, 0, None
        self._is_before_first = False
        if self._numbers is not None:
            set_random_state(self._numbers)  # Trainer sets those of the step when it has left out what is behind
        else:
            self._numbers = random_state()

    def numbers_were_loaded(self):
        """Trainer has set the random numbers of the checkpoint, where an epoch begins: its order is made of these."""
        if self.batches == 0 and not self._is_before_first:
            self._numbers = random_state()

    def after_this(self, loader, trainer):
        """What is kept with the step that this micro-batch ends."""
        batches = self.batches + 1
        return {"epoch": self.epoch, "batches": batches, "is_last": batches == length_of(loader), "random": self._numbers,
                "of": _micro_batch_of(trainer)}


def _position_after(kept, args):
    if kept["is_last"]:
        return Position(kept["epoch"] + 1, 0)
    return Position(kept["epoch"], 0) if args.ignore_data_skip else Position(kept["epoch"], kept["batches"], kept["random"])


def epoch_of(kept, trainer):
    """As Trainer's state has it: epochs and a fraction."""
    batches = length_of(trainer.callback_handler.train_dataloader) or trainer.args.max_steps * trainer.args.gradient_accumulation_steps
    return kept["epoch"] + kept["batches"] / batches


def follow(trainer, callback, kept_at):
    """Has the loop of the train() that follows begin where the job is, and callback.position follow it. `kept_at(step)`: what the job
    has kept of its position at that step of Trainer, or None."""
    if not hasattr(trainer, _NEEDED):
        return

    def begin(*args, **kwargs):
        start = getattr(type(trainer), _NEEDED)(trainer, *args, **kwargs)
        kept = kept_at(trainer.state.global_step) if trainer.state.global_step else None
        callback.position = _position_after(kept, trainer.args) if kept is not None else Position(*start)
        if kept is None and (trainer.state.epoch or 0) > 1 and not trainer.args.ignore_data_skip and start[0] == 0:
            _log.warning("offloadd: the data of the checkpoint have no length, and ended before its step: Trainer goes on elsewhere in them than "
                         "the run that wrote it. A job that is continued goes on where it was")
        return callback.position.epoch, callback.position.batches

    def load_numbers(*args, **kwargs):
        getattr(type(trainer), _NUMBERS)(trainer, *args, **kwargs)
        if callback.position is not None:
            callback.position.numbers_were_loaded()

    setattr(trainer, _NEEDED, begin)
    if hasattr(trainer, _NUMBERS):
        setattr(trainer, _NUMBERS, load_numbers)


def leave(trainer):
    for name in (_NEEDED, _NUMBERS):
        trainer.__dict__.pop(name, None)
