"""A process dies and its writes go on landing, because the drive is slow: the next owner of the store must wait for the last of them.

A writer under a throttle is killed in the middle of its writes. Until they have landed, who opens the store is refused (OFD-1205) when
it will not wait, and gets a whole epoch when it will; from then on not a byte of the file changes any more.

usage: zombie_writes_test.py STORE_WORKER [--kills N] [--seed S] [--directory DIR]
"""

import argparse
import hashlib
import os
import random
import sys
import time

from store_lab import Job, Scratch, Skip, Throttle, check, kill, main

BYTES_PER_SECOND = 300 * 1024  # an epoch of the worker is about as long


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def wait_for_pending(job, writer):
    before = sum(1 for _ in open(job.oracle, encoding="utf-8"))
    while sum(1 for _ in open(job.oracle, encoding="utf-8")) == before:
        check(writer.poll() is None, "the writer has ended by itself")
        time.sleep(0.002)


def one_kill(options, job, slow, dice, counts):
    writer = slow.start("--epochs", "1000000")
    wait_for_pending(job, writer)
    time.sleep(dice.uniform(0.02, 0.1))
    code, said = job.try_check("--lock-timeout", "0")
    check(code == 1 and "OFD-1205" in said["error"], f"opened beside its living owner: {said}")
    kill(writer)
    begin = time.monotonic()
    code, said = job.try_check("--lock-timeout", "0")
    counts["refused while writes landed"] += code == 1 and "OFD-1205" in said["error"]
    check(code == 0 or "OFD-1205" in said["error"], f"{said}")
    job.check("--lock-timeout", "60")
    counts["seconds waited"] = round(counts["seconds waited"] + time.monotonic() - begin, 1)
    store = os.path.join(job.pool, "job.offload")
    granted = digest(store)
    time.sleep(0.5)
    check(digest(store) == granted, "the dead one's writes land under the next owner")
    counts["kills"] += 1


def test(options):
    if os.geteuid() != 0:
        raise Skip("not root: no blkio throttle")
    dice = random.Random(options.seed)
    counts = {"kills": 0, "refused while writes landed": 0, "seconds waited": 0.0}
    with Scratch("zombie-", options.directory) as folder, Throttle(folder, BYTES_PER_SECOND) as throttle:
        pool, oracle = os.path.join(folder, "pool"), os.path.join(folder, "oracle")
        os.mkdir(pool, 0o700)
        job, slow = Job(options.worker, pool, oracle), Job(options.worker, pool, oracle, throttle.launcher())
        code, said = job.write("--epochs", "2")
        check(code == 0, f"{said}")
        for _ in range(options.kills):
            one_kill(options, job, slow, dice, counts)
    check(counts["refused while writes landed"] > 0, f"no write has outlived its process, so nothing is proved: {counts}")
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worker")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", help="where the store stands, on a drive (default: TEST_TMPDIR)")
    sys.exit(main(test, parser.parse_args()))
