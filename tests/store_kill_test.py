"""Kills writers of a store with SIGKILL at random moments, formats included, and judges what is left by an oracle that outlives them.

usage: store_kill_test.py STORE_WORKER [--kills N] [--seed S] [--directory DIR]
"""

import argparse
import os
import random
import sys
import time

from store_lab import Job, Scratch, check, kill, main

FORMATS = 5  # every so many kills the store is thrown away, so that kills hit the making of one


def kill_at_a_random_moment(job, dice):
    """Half of the kills come soon after an acknowledgement, the others at any moment of the start."""
    writer = job.start("--epochs", "1000000")
    if dice.random() < 0.5:
        before, enough = job.acked(), dice.randrange(1, 4)
        while writer.poll() is None and job.acked() < before + enough:
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 0.01))
    else:
        time.sleep(dice.uniform(0, 0.08))
    check(writer.poll() is None, f"the writer has ended by itself: {writer.stdout.read() if writer.poll() is not None else ''}")
    kill(writer)


def test(options):
    dice = random.Random(options.seed)
    counts = {"kills": 0, "stores": 0, "epochs acknowledged": 0, "before the first": 0, "unacknowledged epochs found": 0}
    with Scratch("kill-", options.directory) as folder, Scratch("oracle-", options.oracles) as oracles:
        while counts["kills"] < options.kills:
            number = counts["stores"]
            pool = os.path.join(folder, str(number))
            os.mkdir(pool, 0o700)
            job = Job(options.worker, pool, os.path.join(oracles, str(number)))
            for _ in range(min(FORMATS, options.kills - counts["kills"])):
                kill_at_a_random_moment(job, dice)
                said = job.check()
                counts["kills"] += 1
                counts["before the first"] += said["acked"] == 0
                counts["unacknowledged epochs found"] += said["found"] != said["acked"]
            code, said = job.write("--epochs", "2")  # what is left is a store like any other
            check(code == 0, f"after the kills: {said}")
            job.check()
            check(os.listdir(pool) == ["job.offload"], f"left behind: {os.listdir(pool)}")
            counts["stores"] += 1
            counts["epochs acknowledged"] += job.acked()
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worker")
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", help="where the stores stand (default: TEST_TMPDIR)")
    parser.add_argument("--oracles", help="where the oracles stand (default: TEST_TMPDIR)")
    sys.exit(main(test, parser.parse_args()))
