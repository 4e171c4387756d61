"""Lets stores work for a long time: one that is never disturbed, whose memory and descriptors must not grow, beside one whose writers
are killed at random moments. The drive is slowed down where there is a throttle.

The writer itself tells what it holds, between two epochs. Seen from outside, at some moment, it has an epoch's buffers as well, and
behind a throttle one epoch takes longer than one would look.

usage: store_soak_test.py STORE_WORKER [--minutes N] [--seed S] [--directory DIR]
"""

import argparse
import contextlib
import json
import os
import random
import sys
import time

from store_lab import Job, Scratch, Skip, Throttle, check, kill, main

BYTES_PER_SECOND = 16 << 20
WARM_UP_EPOCHS = 50  # and a quarter of the time: the allocator reaches its level after some hundred
GROWTH_MAX_BYTES = 48 << 10  # in the rest of the time, however long: late pages of an allocator


def throttled(stack, folder):
    """A launcher under a throttle, or an empty one."""
    try:
        return stack.enter_context(Throttle(folder, BYTES_PER_SECOND)).launcher()
    except Skip as skip:
        print(f"full speed: {skip}", file=sys.stderr)
        return []


def new_job(options, folder, name, launcher):
    pool = os.path.join(folder, name)
    os.mkdir(pool, 0o700)
    return Job(options.worker, pool, os.path.join(folder, name + ".oracle"), launcher)


class Soak:
    def __init__(self, options, folder, launcher):
        self.dice = random.Random(options.seed)
        self.reports = os.path.join(folder, "reports")
        self.steady, self.victim = (new_job(options, folder, name, launcher) for name in ("steady", "victim"))
        self.counts = {"kills": 0, "throttled": bool(launcher), "epochs undisturbed": 0, "epochs between kills": 0}

    def kill_one(self):
        writer = self.victim.start("--epochs", "1000000")
        time.sleep(self.dice.uniform(0, self.dice.choice((0.3, 2.0))))
        check(writer.poll() is None, "the writer has ended by itself")
        kill(writer)
        self.victim.check("--lock-timeout", "60")
        self.counts["kills"] += 1

    def kill_for(self, seconds, undisturbed):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.kill_one()
            check(undisturbed.poll() is None, "the undisturbed writer has ended")

    def report(self):
        with open(self.reports, encoding="utf-8") as report:
            return json.load(report)

    def run(self, seconds):
        process = self.steady.start("--epochs", "100000000", "--reports", self.reports)
        try:
            while self.steady.acked() <= WARM_UP_EPOCHS:
                check(process.poll() is None, "the undisturbed writer has ended")
                time.sleep(0.05)
            self.kill_for(seconds / 4, process)
            first = self.report()
            self.kill_for(seconds * 3 / 4, process)
            last = self.report()
        finally:
            kill(process)
        self.steady.check("--lock-timeout", "60")
        grown_bytes = last["private bytes"] - first["private bytes"]
        self.counts["epochs undisturbed"] = self.steady.acked()
        self.counts["epochs between kills"] = self.victim.acked()
        self.counts["private KiB"] = last["private bytes"] // 1024
        self.counts["grown KiB"] = grown_bytes // 1024
        self.counts["descriptors"] = last["descriptors"]
        check(last["descriptors"] == first["descriptors"], f"what the writer holds: {first}, then {last}")
        check(first["private bytes"] > 0 and grown_bytes <= GROWTH_MAX_BYTES, f"what the writer holds: {first}, then {last}")


def test(options):
    with Scratch("soak-", options.directory) as folder, contextlib.ExitStack() as stack:
        soak = Soak(options, folder, throttled(stack, folder))
        soak.run(options.minutes * 60)
        return soak.counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worker")
    parser.add_argument("--minutes", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", help="where the stores stand (default: TEST_TMPDIR)")
    sys.exit(main(test, parser.parse_args()))
