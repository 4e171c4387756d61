"""Bytes of the drive per step, counted by the kernel, against those that were planned: for several ram, and both durabilities.

Of two runs, one longer than the other by whole intervals, the difference is counted: it holds neither openings nor ends, nor a step or
a checkpoint that is half written where counting begins.

usage: planned_bytes_test.py TRAIN OFFLOADD
"""

import contextlib
import ctypes
import os
import shutil
import sys
import tempfile

from trainer import Trainer

TRAIN, OFFLOADD = (os.path.abspath(path) for path in sys.argv[1:3])
# No update is done in vain: none begins before its step.
MODEL = ["--model", "llama", "--params", "4M", "--micro-batches", "1", "--seq", "16", "--batch", "1", "--seed", "7", "--threads", "1",
         "--sample", "0", "--dtype", "bf16", "--clip", "1", "--update-in-backward", "never", "--offload", "on"]
INTERVAL = 10
SHORT, LONG = INTERVAL, 3 * INTERVAL
BLOCK_BYTES = 512  # of ru_inblock and ru_oublock
MOST = 0.03
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h


def run(pool, steps, ram, durability):
    """(What was planned per step, what trainer and daemon have read and written in all.)"""
    arguments = [*MODEL, "--steps", str(steps), "--ram", ram, "--durability", durability, "--nvme-path", pool, "--job", f"job{steps}"]
    # Planned is what is assumed of the drive, whatever it gives beside other tests; and without what a run of more than a minute reads back.
    trainer = Trainer(TRAIN, arguments, {"OFFLOADD_BINARY": OFFLOADD, "OFFLOADD_REPLAN": "0", "OFFLOADD_SCRUB": "0"})
    while trainer.read_line() is not None:
        pass
    blocks = [0, 0]
    with contextlib.suppress(ChildProcessError):
        while True:  # the trainer, and who waits for its daemon, with what that has used
            pid, status, used = os.wait4(-1, 0)
            if pid == trainer.process.pid:
                trainer.process.returncode = os.waitstatus_to_exitcode(status)
            blocks = [blocks[0] + used.ru_inblock, blocks[1] + used.ru_oublock]
    if trainer.wait() != 0:
        raise AssertionError(trainer.stderr)
    planned = trainer.start()["planned"]
    return (planned["read_bytes_per_step"], planned["write_bytes_per_step"]), [count * BLOCK_BYTES for count in blocks]


def check(ram, durability):
    pool = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
    try:
        (planned, short), (_, long) = (run(pool, steps, ram, durability) for steps in (SHORT, LONG))
    finally:
        shutil.rmtree(pool)
    counted = [(more - less) / (LONG - SHORT) for less, more in zip(short, long)]
    off = abs(sum(counted) / sum(planned) - 1)
    print(f"{ram} {durability}: a step reads {counted[0]:.0f} and writes {counted[1]:.0f} bytes, planned {planned[0]:.0f} and {planned[1]:.0f}: "
          f"{100 * off:.2f}% off")
    return off <= MOST


if __name__ == "__main__":
    # Processes without a parent become children of this one.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    results = [check(ram, durability) for ram in ("40MiB", "90MiB", "120MiB") for durability in ("step", f"checkpoint:{INTERVAL}")]
    sys.exit(0 if all(results) else 1)
