"""Where a run of Hugging Face's Trainer is in its data: kept with every step, and where a run that continues goes on.

Trainer derives it from the number of steps, which says nothing where data have no length, and end and begin again before max_steps, or
where a callback has ended an epoch early."""

import functools
import logging
import random
import weakref

import torch
from torch.utils.data import dataloader

_log = logging.getLogger("offloadd")
_NEEDED = "_init_training_state"  # of transformers 5
_NUMBERS = "_load_rng_state"
_FETCHES = "get_batch_samples"
_fetching = None  # the Position whose Trainer is asking for batches
_followed = None  # a reference to the Position of the Trainer that trains


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


def _is_same(a, b):
    """Whether no random number was drawn on the host between two states."""
    return torch.equal(a["cpu"], b["cpu"]) and a["python"] == b["python"] and all((x == y) if isinstance(x, (str, int, float)) else (x == y).all()
                                                                                for x, y in zip(a["numpy"], b["numpy"]))


@functools.lru_cache(maxsize=None)
def _watch_fetches():
    """Batches of data with an index that are made in this process, one after the other, tell `_fetching`."""
    iterator = dataloader._SingleProcessDataLoaderIter
    original = iterator._next_index

    def next_index(self):
        position = _fetching
        if position is None or self._dataset_kind != dataloader._DatasetKind.Map or not position.reads(self):
            return original(self)
        position.before_index()
        index = original(self)
        position.before_fetch()
        return index

    iterator._next_index = next_index


@functools.lru_cache(maxsize=None)
def _watch_processes():
    """Processes that are kept from epoch to epoch (dataloader_persistent_workers) begin once, and their loader draws a number then."""
    iterator = dataloader._MultiProcessingDataLoaderIter
    original = iterator.__init__

    @functools.wraps(original)
    def begin(self, loader, *args, **kwargs):
        position = _followed() if _followed is not None else None
        if position is None or loader.generator is not None or not position.had_processes(loader):
            return original(self, loader, *args, **kwargs)
        loader.generator = torch.Generator()
        loader.generator.set_state(torch.random.get_rng_state())
        try:
            return original(self, loader, *args, **kwargs)
        finally:
            loader.generator = None

    iterator.__init__ = begin


def _is_kept(loader):
    """Whether a loader has processes that it keeps."""
    return loader is not None and getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is not None


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
    made its order. `numbers`: those of an epoch that was begun in a process that has ended.

    Data and collators may draw random numbers (masks, crops), and a batch may be made before the step that comes before its own: `fetch`
    says of the step that the job is at how many batches were `ahead` of it, and which were the numbers `before` the last of them. `load`
    sets those of the step.

    `processes`: the loaders whose processes had begun in the process that has ended, and `at_beginning`: at the beginning of its epoch."""

    def __init__(self, epoch, batches, numbers=None, fetch=None, load=None, processes=(), at_beginning=()):
        self._start = epoch, batches, numbers, fetch, set(at_beginning if batches else processes)
        self._load, self._processes = load, set(processes)
        self._loaders = lambda: {}
        self.restart()

    def follow(self, trainer):
        """Whose loaders these are, by names of theirs."""
        of = weakref.ref(trainer)
        self._loaders = lambda: {"train": of().callback_handler.train_dataloader, **getattr(of(), "_eval_dataloaders", {})} if of() is not None else {}

    def _with_processes(self):
        return self._processes | {name for name, loader in self._loaders().items() if _is_kept(loader)}

    def had_processes(self, loader):
        """Whether those of this loader, which are about to begin, had begun in the process that has ended."""
        if not loader.persistent_workers:
            return False
        loaders = self._loaders()
        if loader.dataset is getattr(loaders.get("train"), "dataset", None):  # or the rest of an epoch of it
            return "train" in self._at_beginning
        return any(loader is getattr(each, "base_dataloader", each) and name in self._processes for name, each in loaders.items())

    def restart(self):
        self.epoch, self.batches, self._numbers, self._kept_fetch, self._at_beginning = self._start
        self._is_before_first, self.has_loaded = True, False
        self._begin_fetches()

    def _begin_fetches(self):
        self._iterator, self._before_last, self._fetched = None, None, self.batches

    def reads(self, iterator):
        """Whether this is what the epoch's batches come from: others are read by it, or by the data."""
        if self._iterator is None:
            self._iterator = weakref.ref(iterator)
        return self._iterator() is iterator

    def before_index(self):
        if self._fetched > self.batches:  # the first index of an epoch draws its order
            self._go_on()

    def before_fetch(self):
        self._go_on()
        if self._kept_fetch is not None and self._kept_fetch["before"] is not None:
            set_random_state(self._kept_fetch["before"])
        self._before_last = random_state()
        self._fetched += 1

    def _go_on(self):
        """Where the batches that were ahead are behind, the numbers are those of the step."""
        if self._kept_fetch is not None and self._fetched - self.batches == self._kept_fetch["ahead"]:
            self._kept_fetch = None
            self._load()
            self.has_loaded = True

    def end_fetches(self):
        if self._before_last is not None and _is_same(self._before_last, random_state()):
            self._before_last = None  # no numbers in these data

    def _fetch(self):
        """What is kept with the step that the next micro-batch ends; None where nothing is known, or more batches are ahead than the last."""
        ahead = self._fetched - self.batches - 1
        return {"ahead": ahead, "before": self._before_last if ahead else None} if self._iterator is not None and ahead in (0, 1) else None

    def begin_epoch(self):
        if not self._is_before_first:
            self.epoch, self.batches, self._numbers, self._kept_fetch = self.epoch + 1, 0, None, None
            self._at_beginning = self._with_processes()
        self._is_before_first = False
        self._begin_fetches()
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
                "of": _micro_batch_of(trainer), "fetch": self._fetch(), "processes": sorted(self._with_processes()),
                "at_beginning": sorted(self._at_beginning)}


def _position_after(kept, args, load):
    processes = kept.get("processes", ())
    if kept["is_last"]:
        return Position(kept["epoch"] + 1, 0, processes=processes)
    if args.ignore_data_skip:
        return Position(kept["epoch"], 0, processes=processes)
    return Position(kept["epoch"], kept["batches"], kept["random"], kept.get("fetch"), load, processes, kept.get("at_beginning", ()))


def epoch_of(kept, trainer):
    """As Trainer's state has it: epochs and a fraction."""
    batches = length_of(trainer.callback_handler.train_dataloader) or trainer.args.max_steps * trainer.args.gradient_accumulation_steps
    return kept["epoch"] + kept["batches"] / batches


def _draws_elsewhere(trainer, batches):
    """Whether processes that make batches begin at another place than the epoch. Data without an index are read from there in any case."""
    return batches > 0 and trainer.args.dataloader_num_workers > 0 and not isinstance(trainer.train_dataset, torch.utils.data.IterableDataset)


def _watch(position):
    global _followed
    _followed = weakref.ref(position)
    if hasattr(dataloader, "_MultiProcessingDataLoaderIter"):
        _watch_processes()


def follow(trainer, callback, kept_at):
    """Has the loop of the train() that follows begin where the job is, and callback.position follow it. `kept_at(step)`: what the job
    has kept of its position at that step of Trainer, or None."""
    if not hasattr(trainer, _NEEDED):
        return

    def begin(max_steps, updates, epochs, checkpoint, *args, **kwargs):
        args = max_steps, updates, epochs, checkpoint, *args
        start = getattr(type(trainer), _NEEDED)(trainer, *args, **kwargs)
        kept = kept_at(trainer.state.global_step) if trainer.state.global_step else None
        load = functools.partial(getattr(type(trainer), _NUMBERS, lambda *_: None), trainer, checkpoint)
        callback.position = _position_after(kept, trainer.args, load) if kept is not None else Position(*start)
        callback.position.follow(trainer)
        _watch(callback.position)
        if kept is None and (trainer.state.epoch or 0) > 1 and not trainer.args.ignore_data_skip and start[0] == 0:
            _log.warning("offloadd: the data of the checkpoint have no length, and ended before its step: Trainer goes on elsewhere in them than "
                         "the run that wrote it. A job that is continued goes on where it was")
        if kept is not None and _draws_elsewhere(trainer, callback.position.batches):
            _log.warning("offloadd: %d batches of epoch %d are behind, and are not made again: random numbers that the data draw in the %d processes of "
                         "dataloader_num_workers begin anew for the rest of the epoch, and are not those of a run that was not killed. With 0, or numbers "
                         "that follow from the index, they are", callback.position.batches, callback.position.epoch + 1, trainer.args.dataloader_num_workers)
        return callback.position.epoch, callback.position.batches

    def load_numbers(*args, **kwargs):
        if callback.position is not None and callback.position.has_loaded:
            callback.position.has_loaded = False
            return
        getattr(type(trainer), _NUMBERS)(trainer, *args, **kwargs)
        if callback.position is not None:
            callback.position.numbers_were_loaded()

    def get_batches(*args, **kwargs):
        global _fetching
        before, _fetching = _fetching, callback.position
        try:
            return getattr(type(trainer), _FETCHES)(trainer, *args, **kwargs)
        finally:
            if _fetching is not None:
                _fetching.end_fetches()
            _fetching = before

    setattr(trainer, _NEEDED, begin)
    if hasattr(trainer, _FETCHES) and hasattr(dataloader, "_SingleProcessDataLoaderIter"):
        _watch_fetches()
        setattr(trainer, _FETCHES, get_batches)
    if hasattr(trainer, _NUMBERS):
        setattr(trainer, _NUMBERS, load_numbers)


def leave(trainer):
    global _followed
    _followed = None
    for name in (_NEEDED, _NUMBERS, _FETCHES):
        trainer.__dict__.pop(name, None)
