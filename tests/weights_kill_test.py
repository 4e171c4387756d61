"""Kills trainers and daemons with SIGKILL while weights are being replaced, and shows that a job never has a part of them.

All weights have one value, and are replaced again and again by the next value: by LoadWeights, or by operators and a step. For
every kill: the next run finds one value everywhere, the one that was being written or the one before, and never an older one than
was said to be durable.

usage: weights_kill_test.py WEIGHTS_WRITER OFFLOADD [--kills N] [--seed S] [--directory DIR]
"""

import argparse
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

from trainer import private_daemon_of, wait_until_gone

VALUES = 8
SHAPES = {"weight0": [1100, 1024], "weight1": [300], "weight2": [7], "weight3": [512, 512], "weight4": [1000000],
          "weight5": [70001]}
LATEST_SECONDS = 0.6  # of a kill, after the first replacement has begun: several of them


class Failure(Exception):
    pass


def check(condition, text):
    if not condition:
        raise Failure(text)


def write_checkpoint(path, value):
    header, end = {}, 0
    for name, shape in SHAPES.items():
        count = 1
        for size in shape:
            count *= size
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + 4 * count]}
        end += 4 * count
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + struct.pack("<f", value) * (end // 4))


class Writer:
    """One run of weights_writer and what it has said."""

    def __init__(self, options, pool, job, mode):
        self.messages = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [options.writer, pool, job, mode, options.folder], stdout=subprocess.PIPE, stderr=self.messages,
            stdin=subprocess.DEVNULL, env={**os.environ, "OFFLOADD_BINARY": options.offloadd})
        self.lines = []

    def read_line(self):
        text = self.process.stdout.readline()
        try:
            self.lines.append(json.loads(text))
        except ValueError:  # the end, or cut short by a kill
            return None
        return self.lines[-1]

    def kill(self, who):
        daemon = private_daemon_of(self.process.pid)
        if who != "trainer" and daemon is not None:
            os.kill(daemon, signal.SIGKILL)
        if who != "daemon" or daemon is None:
            self.process.kill()
        return daemon

    def wait(self):
        while self.read_line() is not None:
            pass
        code = self.process.wait()
        self.process.stdout.close()
        self.messages.seek(0)
        self.stderr = self.messages.read().decode(errors="replace")
        self.messages.close()
        return code


class Victim:
    """Replaces the weights of one job, killing it, and judges what every next run finds."""

    def __init__(self, options, pool, mode):
        self.options, self.pool, self.mode = options, pool, mode
        self.random = random.Random(f"{options.seed} {mode}")
        self.allowed = [0]
        self.step = 0
        self.kills = {"trainer": 0, "daemon": 0, "both": 0}
        self.inside = self.new = self.old = 0

    def judge_found(self, run, code):
        check(code != 3, f"{self.mode}: the weights are a mixture: {run.stderr}")
        check(run.lines, f"{self.mode}: code {code}, and nothing was found: {run.stderr}")
        found = run.lines[0]
        check(found["value"] in self.allowed, f"{self.mode}: found {found}, and not a value of {self.allowed}")
        check(found["step"] >= self.step, f"{self.mode}: found {found}, and step {self.step} was durable")
        if len(self.allowed) == 2:
            self.new += found["value"] == self.allowed[1]
            self.old += found["value"] == self.allowed[0]
        self.step = found["step"]

    def remember(self, run):
        """What the next run may find."""
        last = run.lines[-1]
        if last["event"] == "begin":
            self.inside += 1
            self.allowed = [(last["value"] - 1) % VALUES, last["value"]]
        else:
            self.allowed = [last["value"]]
        for line in run.lines:
            if line["event"] == "end":
                # A step beside a load may be lost with the process; those of edits were waited for.
                self.step = line["step"] if self.mode == "edits" else max(self.step, line["step"] - 1)

    def run_once(self):
        run = Writer(self.options, self.pool, self.mode, self.mode)
        while run.read_line() is not None and run.lines[-1]["event"] != "begin":
            pass
        who = self.random.choice(list(self.kills))
        daemons = []
        timer = threading.Timer(self.random.uniform(0, LATEST_SECONDS), lambda: daemons.append(run.kill(who)))
        timer.start()
        code = run.wait()
        timer.cancel()
        timer.join()
        for daemon in daemons:
            check(daemon is None or wait_until_gone(daemon), "the daemon of a killed trainer did not end")
        self.judge_found(run, code)
        check(daemons, f"{self.mode}: ended with code {code} before it was killed: {run.stderr}")
        if code > 0:
            check("OFD-1801" in run.stderr, f"{self.mode}: the daemon was killed: {run.stderr}")
        self.kills[who] += 1
        self.remember(run)

    def look(self):
        run = Writer(self.options, self.pool, self.mode, "looks")
        code = run.wait()
        self.judge_found(run, code)
        check(code == 0, f"{self.mode}: {run.stderr}")

    def total(self):
        return sum(self.kills.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("writer")
    parser.add_argument("offloadd")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default=os.environ.get("TEST_TMPDIR"))
    options = parser.parse_args()
    options.writer, options.offloadd = os.path.abspath(options.writer), os.path.abspath(options.offloadd)
    pool = tempfile.mkdtemp(prefix="weights-kill-", dir=options.directory)
    options.folder = os.path.join(pool, "weights")
    begin = time.monotonic()
    try:
        os.mkdir(options.folder)
        for value in range(VALUES):
            write_checkpoint(os.path.join(options.folder, f"{value}.safetensors"), value)
        victims = [Victim(options, pool, mode) for mode in ("loads", "edits")]
        for kill in range(options.kills):
            victims[kill % 2].run_once()
        for victim in victims:
            victim.look()
    except Failure as failure:
        print(f"FAILED (seed {options.seed}): {failure}")
        return 1
    finally:
        shutil.rmtree(pool, ignore_errors=True)
    for victim in victims:
        print(f"{victim.mode}: {victim.total()} kills {victim.kills}, {victim.inside} of them inside a replacement: {victim.old} times "
              f"the weights before it, {victim.new} times those of it, never a mixture")
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
