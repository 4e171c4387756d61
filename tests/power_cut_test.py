"""Cuts the power under a store, with a drive whose cache is volatile, and judges what is left by an oracle.

Two nested file systems play the drive: outer.img > loop, direct > ext4 > inner.img > loop, buffered > ext4 > the store. What the
store has written and not flushed is in the page cache of inner.img, which stands for the drive's cache; a flush goes through to
outer.img. Shutting the outer file system down drops that cache: a power cut. Starting writeback of random parts of inner.img before
makes it a torn one.

Quiet cuts come when a writer has acknowledged an epoch and has then written extents without a commit; the blocks of the store's
file before and after tell how much was lost, and how much of what was lost was torn. Busy cuts come at a random moment of commits.
A round in which no quiet cut lost anything proves nothing and fails.

usage: power_cut_test.py STORE_WORKER [--cuts N] [--seed S] [--directory DIR]
"""

import argparse
import ctypes
import fcntl
import os
import random
import struct
import subprocess
import sys
import time

from store_lab import Job, NothingLeftBehind, Scratch, Skip, check, kill, main, retry, run

MIB = 1 << 20
OUTER_MIB, INNER_MIB = 96, 64
BLOCK_BYTES = 4096
SHUTDOWN_IOCTL = 0x8004587D  # _IOR('X', 125, __u32), of ext4 and of xfs
SHUTDOWN_WITHOUT_LOG = 2  # nothing more is written, not even the journal
SYNC_FILE_RANGE_WRITE = 2
CUTS_PER_STORE = 10


class Lab:
    """The two file systems. What is mounted is kept in mind: after a shutdown the kernel would answer a question with EIO."""

    def __init__(self, base):
        self.image, self.outer, self.inner = (os.path.join(base, name) for name in ("outer.img", "outer", "inner"))
        self.inner_image = os.path.join(self.outer, "inner.img")
        self.undo = []
        self.outer_loop = None
        os.mkdir(self.outer)
        os.mkdir(self.inner)

    def __enter__(self):
        try:
            self._format()
        except RuntimeError as refused:
            self.power_off()
            raise Skip(f"no nested loop devices: {refused}") from None
        except BaseException:
            self.power_off()
            raise
        return self

    def __exit__(self, *unused):
        self.power_off()

    def _format(self):
        with open(self.image, "wb") as image:
            os.posix_fallocate(image.fileno(), 0, OUTER_MIB * MIB)
        self._attach_outer()
        run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0", self.outer_loop)
        self._mount(self.outer_loop, self.outer)
        with open(self.inner_image, "wb") as image:  # written whole: no block is allocated later, only overwritten
            for _ in range(INNER_MIB):
                image.write(bytes(MIB))
            image.flush()
            os.fsync(image.fileno())
        inner_loop = self._attach(self.inner_image)
        run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0", inner_loop)
        self._mount(inner_loop, self.inner)
        os.sync()

    def _attach(self, image, *options):
        device = run("losetup", "-f", "--show", *options, image)
        self.undo.append(("losetup", "-d", device))
        return device

    def _attach_outer(self):
        self.outer_loop = self._attach(self.image, "--direct-io=on")

    def _mount(self, device, folder):
        run("mount", "-t", "ext4", device, folder)
        self.undo.append(("umount", folder))

    def cut(self):
        """From here on no write reaches the drive, and what was in its cache is gone."""
        outer = os.open(self.outer, os.O_RDONLY)
        try:
            fcntl.ioctl(outer, SHUTDOWN_IOCTL, struct.pack("I", SHUTDOWN_WITHOUT_LOG))
        finally:
            os.close(outer)

    def power_off(self):
        while self.undo:
            retry(*self.undo[-1])
            self.undo.pop()

    def power_on(self):
        self._attach_outer()
        self._mount(self.outer_loop, self.outer)
        self._mount(self._attach(self.inner_image), self.inner)

    def sync(self):
        """What is there now is there after a cut."""
        run("sync", "-f", self.inner)

    def write_back_some(self, dice):
        """Lets random parts of the cache reach the drive."""
        libc = ctypes.CDLL(None, use_errno=True)
        image = os.open(self.inner_image, os.O_RDWR)
        try:
            for _ in range(64):
                length = BLOCK_BYTES * dice.randrange(1, 256)
                offset = BLOCK_BYTES * dice.randrange(INNER_MIB * MIB // BLOCK_BYTES)
                libc.sync_file_range(image, ctypes.c_int64(offset), ctypes.c_int64(length), SYNC_FILE_RANGE_WRITE)
            time.sleep(dice.uniform(0, 0.02))
        finally:
            os.close(image)


def blocks(path):
    """What the file holds, read around the page cache of the file system that it is on."""
    content = subprocess.run(["dd", "iflag=direct", "bs=1M", "status=none", f"if={path}"], check=True, stdout=subprocess.PIPE).stdout
    return [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]


class Cuts:
    def __init__(self, lab, options, dice, oracle):
        self.lab, self.options, self.dice = lab, options, dice
        self.oracle = oracle
        self.counts = {"cuts": 0, "busy": 0, "quiet": 0, "epochs acknowledged": 0, "unacknowledged epochs found": 0,
                       "blocks written": 0, "blocks lost": 0, "cuts that lost": 0, "cuts that tore": 0}

    def new_store(self):
        pool = os.path.join(self.lab.inner, "pool")
        run("rm", "-rf", pool)
        self.lab.sync()  # else a cut in the format brings the old store back, of which the new oracle knows nothing
        run("rm", "-f", self.oracle)
        os.mkdir(pool, 0o700)
        return Job(self.options.worker, pool, self.oracle)

    def quiet(self, job, partly):
        store = os.path.join(job.pool, "job.offload")
        writer = job.start("--epochs", "1", "--pause")
        try:
            self._wait_for_acks(writer, job, 1)
            flushed = blocks(store)
            writer.stdin.write("\n")
            writer.stdin.flush()
            check(writer.stdout.readline() == "written\n", "the writer does not write")
            written = blocks(store)
            if partly:
                self.lab.write_back_some(self.dice)
            self.lab.cut()
        finally:
            kill(writer)
        self.lab.power_off()
        self.lab.power_on()
        self._compare(flushed, written, blocks(store))
        self.counts["quiet"] += 1

    def _compare(self, flushed, written, left):
        changed = [i for i in range(len(flushed)) if flushed[i] != written[i]]
        lost = [i for i in changed if left[i] == flushed[i]]
        self.counts["blocks written"] += len(changed)
        self.counts["blocks lost"] += len(lost)
        self.counts["cuts that lost"] += bool(lost)
        self.counts["cuts that tore"] += 0 < len(lost) < len(changed)
        changed = set(changed)
        check(all(left[i] == flushed[i] for i in range(len(flushed)) if i not in changed), "flushed blocks are lost: no drive")

    def busy(self, job, partly):
        writer = job.start("--epochs", "1000000")
        try:
            if self.dice.random() < 0.8:  # the others hit the format, or the opening
                self._wait_for_acks(writer, job, self.dice.randrange(1, 5))
            time.sleep(self.dice.uniform(0, 0.03))
            if partly:
                self.lab.write_back_some(self.dice)
            self.lab.cut()
        finally:
            kill(writer)
        self.lab.power_off()
        self.lab.power_on()
        self.counts["busy"] += 1

    def _wait_for_acks(self, writer, job, count):
        enough, deadline = job.acked() + count, time.monotonic() + 60
        while job.acked() < enough:
            check(writer.poll() is None and time.monotonic() < deadline, "the writer does not commit")
            time.sleep(0.001)

    def round(self, cuts):
        job = self.new_store()
        for cut in range(cuts):
            before = job.acked()
            partly = self.dice.random() < 0.75
            if cut % 2 == 0:
                self.busy(job, partly)
            else:
                self.quiet(job, partly)
            # After a cut in a format there may be no store, not even a pool.
            if not os.path.isdir(job.pool):
                check(job.acked() == 0, "the pool is lost")
                os.mkdir(job.pool, 0o700)
            said = job.check()
            self.counts["cuts"] += 1
            self.counts["epochs acknowledged"] += job.acked() - before
            self.counts["unacknowledged epochs found"] += said["found"] != said["acked"]


def need_root_and_loop():
    if os.geteuid() != 0:
        raise Skip("not root")
    if not os.path.exists("/dev/loop-control"):
        raise Skip("no /dev/loop-control")


def test(options):
    need_root_and_loop()
    dice = random.Random(options.seed)
    with Scratch("cut-", options.directory) as folder, NothingLeftBehind(folder):
        with Lab(folder) as lab:
            cuts = Cuts(lab, options, dice, os.path.join(folder, "oracle"))
            while cuts.counts["cuts"] < options.cuts:
                cuts.round(min(CUTS_PER_STORE, options.cuts - cuts.counts["cuts"]))
    check(cuts.counts["cuts that lost"] > 0, f"nothing was lost, so nothing is proved: {cuts.counts}")
    check(cuts.counts["cuts that tore"] > 0 or options.cuts < 20, f"nothing was torn: {cuts.counts}")
    return cuts.counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worker")
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", help="where the drive's image stands: ext4 or xfs (default: TEST_TMPDIR)")
    sys.exit(main(test, parser.parse_args()))
