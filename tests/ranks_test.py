"""Several ranks of examples/train, as torchrun starts them, against one process in memory that takes their micro-batches in rank
order: losses, norms, exported weights, and checksums of weights, masters and moments are equal, bit for bit. Then ranks and daemons are killed at random moments and the job
goes on with another number of ranks (1, 2 or 4: a third is rounded): every loss is that of the uninterrupted run with the same global batch.

usage: ranks_test.py TRAIN OFFLOADD [--kills N] [--seed S] [--steps N] [--directory DIR] [--long] [--only CASE]
"""

import argparse
import hashlib
import os
import random
import shutil
import sys
import tempfile
import threading
import time

from launch import Launch, shown
from trainer import Trainer, wait_until_gone

# Ranks, micro-batches of each, model, dtype.
SHORT_CASES = [(1, 2, "llama", "bf16"), (2, 1, "llama", "bf16"), (2, 2, "gpt2", "fp32"), (3, 1, "llama", "fp32"),
               (4, 1, "llama", "bf16")]
LONG_CASES = [(ranks, 2, model, dtype) for ranks in (1, 2, 3, 4) for model in ("llama", "gpt2") for dtype in ("fp32", "bf16")]
GLOBAL_MICRO_BATCHES = 12  # of a step in the kill test: 1, 2, 3 and 4 ranks have equal parts


class Failure(Exception):
    pass


def check(condition, text):
    if not condition:
        raise Failure(text)


def model_flags(model="llama", dtype="bf16", steps=4):
    return ["--model", model, "--params", "3M", "--dtype", dtype, "--steps", str(steps), "--seq", "32", "--batch", "1",
            "--clip", "0.5", "--seed", "7", "--threads", "1", "--sample", "0", "--warm-up", "0"]


class Ranks:
    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.environment = {"OFFLOADD_BINARY": options.offloadd}
        self.jobs = 0

    def job_flags(self, job, export):
        self.jobs += job is None
        return ["--offload", "on", "--ram", "96MiB", "--nvme-path", self.folder, "--job", job or f"job{self.jobs}", "--checksums",
                *(["--export", export] if export else [])]

    def offloaded(self, world_size, flags, micro_batches, job=None, export=None):
        flags = [*flags, "--micro-batches", str(micro_batches), *self.job_flags(job, export)]
        return Launch(self.options.train, world_size, flags, self.environment)

    def in_memory(self, world_size, flags, micro_batches, export=None):
        flags = [*flags, "--micro-batches", str(world_size * micro_batches), "--as-ranks", str(world_size), *self.job_flags(None, export)]
        run = Trainer(self.options.train, flags, {"OFFLOADD_DISABLE": "1"})
        check(run.wait() == 0, f"the run in memory failed: {run.stderr}")
        return run


def weights_in(folder):
    """A checksum per file of weights."""
    return {name: hashlib.sha256(open(os.path.join(folder, name), "rb").read()).hexdigest()
            for name in sorted(os.listdir(folder)) if name.endswith(".safetensors")}


def compare_with_one_process(ranks, world_size, micro_batches, model, dtype):
    name = f"{world_size}x{micro_batches}-{model}-{dtype}"
    flags = model_flags(model, dtype, ranks.options.steps)
    exports = [os.path.join(ranks.folder, f"{name}-{kind}") for kind in ("one", "many")]
    exported = model == "llama"
    one = ranks.in_memory(world_size, flags, micro_batches, exports[0] if exported else None)
    many = ranks.offloaded(world_size, flags, micro_batches, export=exports[1] if exported else None)
    codes = many.wait()
    check(codes == [0] * world_size, f"{name}: exit codes {codes}: {many.messages()}")
    check(shown(one) == shown(many), f"{name}: {shown(one)} in one process, {shown(many)} in {world_size} ranks")
    check(all(rank.lines == [] for rank in many.ranks[1:]), f"{name}: other ranks than the first print")
    check(one.lines[-2]["loss"] == many.ranks[0].lines[-2]["loss"], f"{name}: evaluations differ")
    ours, theirs = (run.lines[-1]["checksums"] for run in (many.ranks[0], one))
    check(set(theirs) == {"weight", "master", "exp_avg", "exp_avg_sq"}, f"{name}: checksums of {sorted(theirs)} alone")
    check(ours == theirs, f"{name}: {[plane for plane in theirs if ours[plane] != theirs[plane]]} differ")
    if exported:
        check(weights_in(exports[0]) and weights_in(exports[0]) == weights_in(exports[1]), f"{name}: weights differ")
    print(f"{name}: {ranks.options.steps} steps equal, and so are {', '.join(theirs)}", flush=True)


class Victim:
    """Runs the job again and again with other numbers of ranks, killing ranks or the daemon, until enough kills have hit."""

    def __init__(self, ranks, options):
        self.ranks, self.options = ranks, options
        self.random = random.Random(options.seed)
        self.flags = model_flags(dtype="fp32", steps=24)
        self.job = 0
        self.kills = 0
        self.printed = 0
        self.seconds = 4.0
        # 1/3 is rounded, so runs with 3 ranks have other bits than those with 1, 2 and 4, which have the same.
        run = ranks.in_memory(1, self.flags, GLOBAL_MICRO_BATCHES)
        self.losses = {line["step"]: line["loss"] for line in run.steps()}

    def launch(self, world_size):
        return self.ranks.offloaded(world_size, self.flags, GLOBAL_MICRO_BATCHES // world_size, job=f"killed{self.job}")

    def run_once(self):
        world_size = self.random.choice([1, 2, 4])
        who = self.random.choice([*range(world_size), "daemon", "all"])
        begin, daemons = time.monotonic(), []
        run = self.launch(world_size)
        timer = threading.Timer(self.random.uniform(0.0, self.seconds), lambda: daemons.append(run.kill(who)))
        timer.start()
        codes = run.wait()
        timer.cancel()
        timer.join()
        for daemon in daemons:
            check(daemon is None or wait_until_gone(daemon), "the daemon of a killed rank did not end")
        self.judge(run, codes, who if daemons else None)
        if codes == [0] * world_size:
            self.seconds = max(self.seconds, time.monotonic() - begin)
            self.job += 1
            self.printed = 0

    def judge(self, run, codes, killed):
        for line in run.steps():
            check(line["loss"] == self.losses[line["step"]],
                  f"step {line['step']} with {len(codes)} ranks: loss {line['loss']!r}, uninterrupted {self.losses[line['step']]!r}")
        start = run.start()
        if start is not None:
            check(start["resumed_step"] >= self.printed - 1,
                  f"resumed at {start['resumed_step']} although step {self.printed} had returned")
        numbers = [line["step"] for line in run.steps()]
        self.printed = max([self.printed if start is None else start["resumed_step"], *numbers])
        if killed is None:
            check(codes == [0] * len(codes), f"exit codes {codes} without a kill: {run.messages()}")
        elif any(codes):
            self.kills += 1
            for number, code in enumerate(codes):
                check(code <= 0 or "OFD-" in run.ranks[number].stderr, f"rank {number} ended with {code}: {run.messages()}")


def kill_at_random(ranks, options):
    victim = Victim(ranks, options)
    while victim.kills < options.kills:
        victim.run_once()
    run = victim.launch(2)  # what is left ends well
    victim.judge(run, run.wait(), None)
    print(f"{victim.kills} kills, {victim.job + 1} jobs: every loss equals the uninterrupted run's", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train")
    parser.add_argument("offloadd")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--long", action="store_true", help="1 to 4 ranks, both models, both dtypes")
    parser.add_argument("--only", choices=["compare", "kill"])
    parser.add_argument("--directory", default=os.environ.get("TEST_TMPDIR"))
    options = parser.parse_args()
    options.train, options.offloadd = os.path.abspath(options.train), os.path.abspath(options.offloadd)
    folder = tempfile.mkdtemp(prefix="ranks-", dir=options.directory)
    ranks = Ranks(options, folder)
    try:
        if options.only != "kill":
            for case in LONG_CASES if options.long else SHORT_CASES:
                compare_with_one_process(ranks, *case)
        if options.only != "compare":
            kill_at_random(ranks, options)
    except Failure as failure:
        print(f"FAILED (seed {options.seed}): {failure}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
