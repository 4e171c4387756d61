"""Kills trainers and daemons with SIGKILL at random moments and shows that every next run continues exactly.

For every kill: the next run resumes at a whole epoch that is at most one step behind the last step whose line was printed, and each
loss, before and after, equals the uninterrupted run's, in all digits. Kills also fall into format and construction. One job of three
commits now and then only, has all of its state in memory, and loses to a kill of its daemon what came after the last checkpoint: kills
fall into checkpoints that are written beside the steps. One of three keeps its gradients, so that updates begin in the backward, and
replans, since its daemon believes at first that the drive gives next to nothing.

usage: crash_test.py TRAIN OFFLOADD [--kills N] [--seed S] [--dtype fp32|bf16] [--directory DIR]
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
import time

from trainer import Trainer, wait_until_gone

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tools"))
from trainer_run import usual_dtype_here  # noqa: E402

MODEL = ["--model", "llama", "--params", "4M", "--steps", "40", "--micro-batches", "2", "--seq", "32", "--batch", "2",
         "--seed", "7", "--threads", "1", "--sample", "0"]
INTERVAL_STEPS = 4
NEXT_TO_NOTHING = {name: "1" for name in ("OFFLOADD_POOL_READ", "OFFLOADD_POOL_WRITE", "OFFLOADD_REPLAN", "OFFLOADD_REPLAN_STEPS")}
# The largest norm, arguments and environment of jobs, in turn. Most steps are clipped at 1: what was updated before such a step was in
# vain; none is at 100.
STEPS = "1.0", ["--ram", "52MiB"], {}
INTERVALS = "1.0", ["--ram", "160MiB", "--durability", f"checkpoint:{INTERVAL_STEPS}"], {}
FORESEEN = "100", ["--ram", "72MiB"], NEXT_TO_NOTHING
KINDS = STEPS, INTERVALS, FORESEEN
KILLS_OF_JOB = 4  # then it comes to its end, and the next kind has its turn


class Failure(Exception):
    pass


def check(condition, text):
    if not condition:
        raise Failure(text)


def reference_losses(train, dtype, clip):
    """Of the uninterrupted run."""
    run = Trainer(train, [*MODEL, "--dtype", dtype, "--clip", clip, "--offload", "off"])
    check(run.wait() == 0, f"the run in memory failed: {run.stderr}")
    return {line["step"]: line["loss"] for line in run.steps()}


def check_losses(run, reference):
    for line in run.steps():
        check(line["loss"] == reference[line["step"]],
              f"step {line['step']}: loss {line['loss']!r}, uninterrupted {reference[line['step']]!r}")


class Victim:
    """Runs the job again and again, killing it, until enough kills have hit."""

    def __init__(self, options, pool):
        self.options, self.pool = options, pool
        begin = time.monotonic()
        self.references = {clip: reference_losses(options.train, options.dtype, clip) for clip in {kind[0] for kind in KINDS}}
        seconds = (time.monotonic() - begin) / len(self.references)
        self.random = random.Random(options.seed)
        self.job_index = 0
        self.kept = 0  # the step that the next run has to find, or a later one
        self.kills = {"trainer": 0, "daemon": 0, "both": 0}
        self.before_first_step = 0
        self.kills_of_job = 0
        self.replans = 0
        self.seconds = max(3.0, seconds)  # of a whole run, learnt

    def arguments(self):
        clip, memory, _ = self.kind()
        return [*MODEL, "--dtype", self.options.dtype, "--clip", clip, "--offload", "on", *memory, "--nvme-path", self.pool,
                "--job", f"job{self.job_index}"]

    def kind(self):
        return KINDS[self.job_index % len(KINDS)]

    def has_intervals(self):
        return self.kind() is INTERVALS

    def environment(self):
        return {"OFFLOADD_BINARY": self.options.offloadd, **self.kind()[2]}

    def run_once(self):
        who = self.random.choice(list(self.kills))
        moment = self.random.uniform(0.0, self.seconds)
        begin = time.monotonic()
        run = Trainer(self.options.train, self.arguments(), self.environment())
        daemons = []
        timer = threading.Timer(moment, lambda: daemons.append(run.kill(who)))
        if self.kills_of_job < KILLS_OF_JOB:
            timer.start()
        code = run.wait()
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        for daemon in daemons:
            check(daemon is None or wait_until_gone(daemon), "the daemon of a killed trainer did not end")
        self.judge(run, code, who if daemons else None)
        if code == 0:
            self.seconds = time.monotonic() - begin
            self.job_index += 1
            self.kept = self.kills_of_job = 0

    def judge(self, run, code, killed):
        check_losses(run, self.references[self.kind()[0]])
        self.replans += run.stderr.count(": replanned before step ")
        start = run.start()
        if start is not None:
            check(start["resumed_step"] >= self.kept, f"resumed at {start['resumed_step']} although step {self.kept} was committed")
            self.kept = start["resumed_step"]
        numbers = [line["step"] for line in run.steps()]
        if numbers:
            check(numbers == list(range(start["resumed_step"] + 1, numbers[-1] + 1)), f"steps {numbers} do not follow {start}")
            committed = numbers[-1] - 1  # before the last step began; a daemon that lives on commits that one, too
            if self.has_intervals() and killed != "trainer":
                # The commit of a checkpoint goes on beside the steps that follow, and ends before the next checkpoint's begins.
                committed = max(0, committed - committed % INTERVAL_STEPS - INTERVAL_STEPS)
            committed = max(committed, run.steps()[-1]["durable_epoch"])
            self.kept = max(self.kept, committed)
        if killed is None:
            check(code == 0, f"exit code {code} without a kill: {run.stderr}")
        elif code != 0:
            self.kills[killed] += 1
            self.kills_of_job += 1
            self.before_first_step += not numbers
            if code > 0:
                check("OFD-1801" in run.stderr or "OFD-1501" in run.stderr, f"the daemon was killed: {run.stderr}")

    def total(self):
        return sum(self.kills.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train")
    parser.add_argument("offloadd")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default=usual_dtype_here())
    parser.add_argument("--directory", default=os.environ.get("TEST_TMPDIR"))
    options = parser.parse_args()
    options.train, options.offloadd = os.path.abspath(options.train), os.path.abspath(options.offloadd)
    pool = tempfile.mkdtemp(prefix="crash-", dir=options.directory)
    try:
        victim = Victim(options, pool)
        while victim.total() < options.kills:
            victim.run_once()
        run = Trainer(options.train, victim.arguments(), victim.environment())  # what is left ends well
        victim.judge(run, run.wait(), None)
        check(victim.replans > 0, "nothing was replanned")
        leftovers = [name for name in os.listdir(pool) if "building" in name]
        check(not leftovers, f"left behind: {leftovers}")
    except Failure as failure:
        print(f"FAILED (seed {options.seed}): {failure}")
        return 1
    finally:
        shutil.rmtree(pool, ignore_errors=True)
    print(f"{victim.total()} kills {victim.kills}, {victim.before_first_step} of them before the first step, "
          f"{victim.job_index + 1} jobs, {victim.replans} replans: every loss equals the uninterrupted run's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
