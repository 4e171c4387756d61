"""What users of several ranks get wrong: each gives an identified error on every rank within a bounded time, and damages nothing.

usage: bad_ranks_test.py TRAIN OFFLOADD [CASE…]
"""

import os
import shutil
import sys
import tempfile
import time
import unittest

from trainer import Trainer

TRAIN, OFFLOADD = (os.path.abspath(path) for path in sys.argv[1:3])
MODEL = ["--params", "1M", "--seq", "16", "--batch", "1", "--threads", "1", "--sample", "0", "--seed", "3", "--offload", "on", "--job", "job"]


def flags_with(changes):
    """Flags of a small run of two steps; `changes` replaces some of them or adds to them."""
    flags = dict(zip(MODEL[::2], MODEL[1::2])) | {"--steps": "2", "--ram": "64MiB"} | changes
    return [word for flag in flags.items() for word in flag]


class BadRanksTest(unittest.TestCase):
    def setUp(self):
        self.pool = tempfile.mkdtemp(prefix="bad-ranks-", dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(shutil.rmtree, self.pool, True)

    def start(self, rank, world_size, flags=None, run_id=None, **variables):
        """A rank; `variables` replace what a launcher says, None takes one away."""
        said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
                "OFFLOADD_LOCK_TIMEOUT": 1, "TORCHELASTIC_RUN_ID": run_id or f"{os.getpid()}-{self.id()}", "OFFLOADD_BINARY": OFFLOADD} | variables
        arguments = flags_with({"--nvme-path": self.pool} | (flags or {}))
        environment = {name: str(value) for name, value in said.items() if value is not None}
        return Trainer(TRAIN, arguments, environment, ["env", *(f"-u{name}" for name, value in said.items() if value is None)])

    def ended(self, *ranks):
        """What ranks that were refused have said."""
        for rank in ranks:
            code = rank.wait()
            self.assertEqual(code, 1, rank.stderr)
        return [rank.stderr for rank in ranks]

    def stores(self):
        return [name for name in os.listdir(self.pool) if name.endswith(".offload")]

    def trains(self, world_size, steps, begins=0):
        """The job is unharmed: it goes on from there."""
        ranks = [self.start(rank, world_size, {"--steps": str(steps)}, run_id=f"{os.getpid()}-{self.id()}-{steps}") for rank in range(world_size)]
        for rank in ranks:
            code = rank.wait()
            self.assertEqual(code, 0, rank.stderr)
        self.assertEqual(ranks[0].start()["resumed_step"], begins)

    def differ(self, text, flags):
        """Two ranks of which the second is started otherwise: both are told the difference, and nothing is made."""
        for said in self.ended(self.start(0, 2), self.start(1, 2, flags)):
            self.assertIn("OFD-1805", said)
            self.assertIn(text, said)
        self.assertEqual(self.stores(), [])

    def is_refused(self, text, *ranks):
        """Who comes second is told, and is no rank; the other goes on waiting."""
        while all(rank.process.poll() is None for rank in ranks):
            time.sleep(0.05)
        second = next(rank for rank in ranks if rank.process.poll() is not None)
        for rank in ranks:
            if rank is not second:
                rank.process.kill()
                rank.wait()
        said = self.ended(second)[0]
        self.assertIn("OFD-1805", said)
        self.assertIn(text, said)
        self.assertEqual(self.stores(), [])

    def test_two_with_one_number(self):
        self.is_refused("both are rank 0 of 2", self.start(0, 2), self.start(0, 2))

    def test_missing_ones_are_named(self):
        # Two seconds are enough for the other one, or it is named, too.
        for text in self.ended(*(self.start(rank, 4, OFFLOADD_JOIN_TIMEOUT=2) for rank in (0, 2))):
            self.assertIn("OFD-1804", text)
            self.assertRegex(text, r"waited in vain for ranks .*1.* and 3 of 4")
        self.assertEqual(self.stores(), [])

    def test_other_model(self):
        self.differ("\"model.", {"--params": "2M"})

    def test_other_optimizer(self):
        self.differ("optimizer", {"--optimizer": "sgd"})

    def test_other_rate(self):
        self.differ("the optimizer: lr is ", {"--lr": "0.5"})

    def test_other_budget(self):
        self.is_refused("ram is ", self.start(0, 2), self.start(1, 2, {"--ram": "96MiB"}))

    def test_other_world(self):
        self.is_refused("world size is ", self.start(0, 2), self.start(1, 2, WORLD_SIZE=3, LOCAL_WORLD_SIZE=3))

    def test_other_number_of_steps(self):
        # The rate of the second step is another one: that is taken by nobody.
        ranks = [self.start(rank, 2, {"--steps": str(4 - rank), "--warm-up": "0"}) for rank in range(2)]
        for text in self.ended(*ranks):
            self.assertIn("OFD-1805", text)
            self.assertIn("the optimizer of group 0 of step 2", text)
        self.trains(2, steps=3, begins=1)

    def test_worlds_that_cannot_be(self):
        for variables, text in [({"WORLD_SIZE": 0}, "a world of 0 ranks"), ({"WORLD_SIZE": 65}, "a world of 65 ranks"),
                                ({"RANK": 2}, "rank 2 in a world of 2"), ({"RANK": "x"}, 'RANK is "x"'),
                                ({"LOCAL_WORLD_SIZE": 1}, "several nodes are not supported"),
                                ({"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}, "LOCAL_RANK and LOCAL_WORLD_SIZE are not set")]:
            with self.subTest(text):
                said = self.ended(self.start(0, 2, **variables))[0]
                self.assertIn("OFD-1002", said)
                self.assertIn(text, said)

    def test_launch_beside_an_earlier_one_that_runs(self):
        first = [self.start(rank, 2, {"--steps": "100000"}) for rank in range(2)]
        try:
            while (line := first[0].read_line()) is not None and line["event"] != "step":
                pass
            self.assertIsNotNone(line)
            for run_id in ("another", None):
                for text in self.ended(self.start(0, 2, run_id=run_id), self.start(1, 2, run_id=run_id)):
                    self.assertIn("OFD-1205", text)
            self.assertEqual(first[0].read_line()["event"], "step")  # unharmed
        finally:
            for rank in first:
                rank.process.kill()
                rank.wait()


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
