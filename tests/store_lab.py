"""What the tests of a store in real processes share: the worker with its oracle, and what a test as root must not leave behind."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time


class Failure(Exception):
    pass


class Skip(Exception):
    """What is missing on this machine."""


def check(condition, text):
    if not condition:
        raise Failure(text)


def run(*command):
    """Returns what the command printed; a failing one is an error with its words."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


def retry(*command, seconds=10.0):
    """For umount and losetup -d, which may be busy for a moment after a crash."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return run(*command)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class Scratch:
    """A folder that is gone afterwards. `base` must be on a real drive."""

    def __init__(self, prefix, base=None):
        self.path = tempfile.mkdtemp(prefix=prefix, dir=base or os.environ.get("TEST_TMPDIR"))

    def __enter__(self):
        return self.path

    def __exit__(self, *unused):
        shutil.rmtree(self.path, ignore_errors=True)


class Job:
    """One store, its oracle, and the processes that work on it."""

    def __init__(self, program, pool, oracle, launcher=()):
        self.program, self.pool, self.oracle, self.launcher = os.path.abspath(program), pool, oracle, list(launcher)

    def start(self, *arguments):
        """A writer that is under way."""
        return subprocess.Popen([*self.launcher, self.program, "write", self.pool, self.oracle, *arguments],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def write(self, *arguments):
        """A writer from beginning to end. Returns (exit code, what it says)."""
        return self._finish("write", *arguments)

    def check(self, *arguments):
        """Judges what is left; returns what the worker says of it."""
        code, said = self._finish("check", *arguments)
        check(code == 0, f"what is left is wrong: {said}")
        return said

    def try_check(self, *arguments):
        return self._finish("check", *arguments)

    def _finish(self, *arguments):
        command, *options = arguments
        done = subprocess.run([*self.launcher, self.program, command, self.pool, self.oracle, *options],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300)
        try:
            return done.returncode, json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            raise Failure(f"{arguments}: exit code {done.returncode}: {done.stdout} {done.stderr}") from None

    def acked(self):
        """The last acknowledged commit, 0 before the first."""
        try:
            with open(self.oracle, encoding="utf-8") as lines:
                numbers = [int(line.split()[1]) for line in lines if line.startswith("acked ") and line.endswith("\n")]
        except FileNotFoundError:
            return 0
        return numbers[-1] if numbers else 0


def kill(process):
    """SIGKILL, and waits. The kernel may still be writing for the dead one."""
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()


def loop_devices():
    return set(run("losetup", "-n", "-O", "NAME,BACK-FILE").splitlines())


def mounts():
    with open("/proc/self/mounts", encoding="utf-8") as lines:
        return {tuple(line.split()[:2]) for line in lines}


class NothingLeftBehind:
    """Notes loop devices, mounts and cgroups of the path before, and compares after."""

    def __init__(self, path):
        self.path = os.path.realpath(path)

    def _ours(self):
        left = [" ".join(mount) for mount in mounts() if self.path in mount[1]]
        left += [line for line in loop_devices() if self.path in line]
        return sorted(left)

    def __enter__(self):
        return self

    def __exit__(self, kind, *unused):
        left = self._ours()
        if kind is None:
            check(not left, f"left behind: {left}")


def main(test, options):
    """Runs a test to its exit code: prints its counts as one line of JSON, or why it failed or was skipped."""
    try:
        print(json.dumps(test(options)))
        return 0
    except Skip as skip:
        print(json.dumps({"skipped": str(skip)}))
        return 0
    except Failure as failure:
        print(f"FAILED (--seed {options.seed}): {failure}")
        return 1
