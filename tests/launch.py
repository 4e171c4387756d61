"""Starts several ranks of examples/train as a launcher does: one process each, with torchrun's variables."""

import itertools
import os
import signal

from trainer import Trainer

_runs = itertools.count()


def shown(run):
    """(step, loss, norm) of each step that a Trainer or a Launch has told of."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in run.steps()]


class Launch:
    """One launch. `ranks[r]` is the Trainer of rank r, with the variables of `environment` and `of_rank(r)`; the first prints for all."""

    def __init__(self, train, world_size, arguments, environment=None, of_rank=lambda rank: {}):
        run_id = f"launch{os.getpid()}-{next(_runs)}"
        self.ranks = [
            Trainer(train, arguments, {**(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank),
                                       "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
                                       "TORCHELASTIC_RUN_ID": run_id, **of_rank(rank)})
            for rank in range(world_size)
        ]

    def wait(self):
        """Returns the exit codes in the order of ranks."""
        return [rank.wait() for rank in self.ranks]

    def daemon(self):
        """The pid of the private daemon, which one of the ranks has started; None while there is none."""
        return next((found for found in (rank.daemon() for rank in self.ranks) if found is not None), None)

    def kill(self, who):
        """Sends SIGKILL to the rank of this number, to "daemon", or to "all". Returns the daemon's pid."""
        daemon = self.daemon()
        if who in ("daemon", "all") and daemon is not None:
            os.kill(daemon, signal.SIGKILL)
        for number, rank in enumerate(self.ranks):
            if who in (number, "all") or (who == "daemon" and daemon is None):
                rank.process.kill()
        return daemon

    def steps(self):
        return self.ranks[0].steps()

    def start(self):
        return self.ranks[0].start()

    def messages(self):
        """What all ranks wrote to stderr; after wait()."""
        return "\n".join(f"rank {number}: {rank.stderr}" for number, rank in enumerate(self.ranks))
