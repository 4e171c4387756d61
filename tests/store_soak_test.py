"""Lets stores work for a long time: one that is never disturbed, whose memory and descriptors must not grow, beside one whose writers
are killed at random moments. The drive is slowed down where there is a throttle.

usage: store_soak_test.py STORE_WORKER [--minutes N] [--seed S] [--directory DIR]
"""

import argparse
import contextlib
import os
import random
import sys
import time

from store_lab import Job, Scratch, Skip, Throttle, check, kill, main

BYTES_PER_SECOND = 16 << 20
WARM_UP_EPOCHS = 50  # the allocator has then seen everything that there is
GROWTH_MAX = 0.01
SAMPLES = 100
LATE_PAGES_BYTES = 64 << 10  # of an allocator and libraries of few MiB: less than that is no leak


def resident_bytes(pid):
    """The least of some seconds: what an epoch under way has mapped comes and goes."""

    def now():
        with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))

    samples = []
    for _ in range(SAMPLES):
        samples.append(now())
        time.sleep(0.02)
    return min(samples)


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


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
        self.steady, self.victim = (new_job(options, folder, name, launcher) for name in ("steady", "victim"))
        self.counts = {"kills": 0, "throttled": bool(launcher), "epochs undisturbed": 0, "epochs between kills": 0}

    def kill_one(self):
        writer = self.victim.start("--epochs", "1000000")
        time.sleep(self.dice.uniform(0, self.dice.choice((0.3, 2.0))))
        check(writer.poll() is None, "the writer has ended by itself")
        kill(writer)
        self.victim.check("--lock-timeout", "60")
        self.counts["kills"] += 1

    def run(self, seconds):
        deadline = time.monotonic() + seconds
        process = self.steady.start("--epochs", "100000000")
        try:
            while self.steady.acked() < WARM_UP_EPOCHS:
                check(process.poll() is None, "the undisturbed writer has ended")
                time.sleep(0.05)
            first_bytes, first_count = resident_bytes(process.pid), descriptors(process.pid)
            while time.monotonic() < deadline:
                self.kill_one()
                check(process.poll() is None, "the undisturbed writer has ended")
            last_bytes, last_count = resident_bytes(process.pid), descriptors(process.pid)
        finally:
            kill(process)
        self.steady.check("--lock-timeout", "60")
        self.counts["epochs undisturbed"] = self.steady.acked()
        self.counts["epochs between kills"] = self.victim.acked()
        self.counts["resident KiB"] = last_bytes // 1024
        self.counts["grown KiB"] = (last_bytes - first_bytes) // 1024
        self.counts["descriptors"] = last_count
        check(last_count == first_count, f"descriptors: {first_count}, then {last_count}")
        check(last_bytes - first_bytes <= max(GROWTH_MAX * first_bytes, LATE_PAGES_BYTES),
              f"resident memory: {first_bytes} bytes, then {last_bytes}")


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
