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


class Throttle:
    """A cgroup whose processes write to the drive under `path` at so many bytes a second. Skips where there is no such thing."""

    ROOT = "/sys/fs/cgroup/blkio"

    def __init__(self, path, bytes_per_second):
        self.path, self.bytes_per_second = path, bytes_per_second
        self.group = os.path.join(self.ROOT, f"offloadd-test-{os.getpid()}")

    @staticmethod
    def drive_of(path):
        """major:minor of the whole drive: the throttle knows no partitions."""
        device = os.stat(path).st_dev
        folder = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        if os.path.exists(os.path.join(folder, "partition")):
            folder = os.path.dirname(folder)
        with open(os.path.join(folder, "dev"), encoding="utf-8") as number:
            return number.read().strip()

    def __enter__(self):
        try:
            os.mkdir(self.group)
        except OSError as refused:
            raise Skip(f"no blkio throttle: {refused}") from None
        try:
            with open(os.path.join(self.group, "blkio.throttle.write_bps_device"), "w", encoding="utf-8") as limit:
                limit.write(f"{self.drive_of(self.path)} {self.bytes_per_second}")
        except OSError as refused:
            os.rmdir(self.group)
            raise Skip(f"no blkio throttle: {refused}") from None
        return self

    def __exit__(self, *unused):
        deadline = time.monotonic() + 30
        while True:  # busy until the last killed process is gone
            try:
                return os.rmdir(self.group)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def launcher(self):
        """What a command begins with to run under the throttle."""
        return ["sh", "-c", f'echo $$ > {self.group}/cgroup.procs && exec "$@"', "sh"]


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
