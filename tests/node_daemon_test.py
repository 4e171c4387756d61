"""One daemon for all runs of a machine, as an administrator starts it: the ordinary trainer finds it through OFFLOADD_SOCKET, runs
share it without harming each other, and whatever ends one of them leaves the daemon clean.

usage: node_daemon_test.py TRAIN OFFLOADD OFFLOADCTL
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from trainer import Trainer

TRAIN, OFFLOADD, OFFLOADCTL = (os.path.abspath(path) for path in sys.argv[1:4])
MODEL = ["--params", "1M", "--seq", "16", "--batch", "1", "--threads", "1", "--sample", "0"]
FOR_EVER = ["--steps", "1000000"]


def wait_until(condition, seconds=60):
    """A bound for what would hang otherwise; nothing is measured."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("it did not happen")
        time.sleep(0.005)


class NodeDaemonTest(unittest.TestCase):
    def setUp(self):
        self.pool = tempfile.mkdtemp(prefix="node-", dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(shutil.rmtree, self.pool, True)
        sockets = tempfile.mkdtemp(prefix="offloadd-node-", dir="/tmp")  # paths of sockets are short
        self.addCleanup(shutil.rmtree, sockets, True)
        self.socket = os.path.join(sockets, "offloadd.sock")
        self.daemon = None
        self.start_daemon()

    def start_daemon(self):
        self.daemon = subprocess.Popen([OFFLOADD, "--socket", self.socket, "--pool", self.pool], stdin=subprocess.DEVNULL)
        self.addCleanup(self.daemon.wait)
        self.addCleanup(self.daemon.kill)
        wait_until(lambda: os.path.exists(os.path.join(os.path.dirname(self.socket), "control.sock")) or self.daemon.poll() is not None)
        self.assertIsNone(self.daemon.poll())

    def start(self, job, *flags):
        """`flags` with values replace or add to those of a small run."""
        plain = [*MODEL, "--offload", "on", "--ram", "64MiB", "--nvme-path", self.pool, "--job", job, *flags]
        arguments = dict(zip(plain[::2], plain[1::2]))
        run = Trainer(TRAIN, [word for flag in arguments.items() for word in flag],
                      {"OFFLOADD_SOCKET": self.socket, "OFFLOADD_BINARY": "/nonexistent"})
        self.addCleanup(self.end, run)
        return run

    def end(self, run):
        if not run.process.stdout.closed:
            run.process.kill()
            run.wait()

    def read_steps(self, run, count):
        begin = len(run.steps())
        while len(run.steps()) < begin + count:
            self.assertIsNotNone(run.read_line(), "the trainer ended")

    def ctl(self, *arguments, code=0):
        answer = subprocess.run([OFFLOADCTL, *arguments, "--json"], capture_output=True, text=True, check=False)
        self.assertEqual(answer.returncode == 0, code == 0, answer.stdout + answer.stderr)
        return answer

    def jobs(self):
        return json.loads(self.ctl("status", "--socket", self.socket, "--interval", "0.01").stdout)["daemons"][0]["jobs"]

    def building(self):
        return [name for name in os.listdir(self.pool) if "building" in name]

    def test_two_runs_share_the_daemon_and_a_third_of_the_same_job_is_refused(self):
        runs = [self.start(job, *FOR_EVER) for job in ("first", "second")]
        for run in runs:
            self.read_steps(run, 2)
            self.assertIsNone(run.daemon())  # no private one
        self.assertEqual(sorted(job["job"] for job in self.jobs()), ["first", "second"])
        third = self.start("first", "--steps", "1")
        self.assertEqual(third.wait(), 1, third.stderr)
        self.assertIn("OFD-1205", third.stderr)
        self.assertIn(f"process {runs[0].process.pid}", third.stderr)
        listed = json.loads(self.ctl("ls", self.pool).stdout)["jobs"]
        self.assertEqual([(job["job"], job["in_use"]) for job in listed], [("first", True), ("second", True)])
        self.assertIn("OFD-1205", str(self.ctl("rm", self.pool, "first", "--yes", code=1)))
        for run in runs:
            self.read_steps(run, 2)  # unharmed

        runs[0].process.kill()
        runs[0].wait()
        fourth = self.start("first", "--steps", str(runs[0].steps()[-1]["step"] + 3))  # at once: no lock to wait for
        self.assertEqual(fourth.wait(), 0, fourth.stderr)
        self.assertGreaterEqual(fourth.start()["resumed_step"], runs[0].steps()[-1]["step"] - 1)
        wait_until(lambda: [job["job"] for job in self.jobs()] == ["second"])
        self.ctl("rm", self.pool, "first", "--yes")
        self.assertEqual(os.listdir(self.pool), ["second.offload"])
        self.read_steps(runs[1], 2)

    def test_stopped_trainer_stops_nobody_else(self):
        stopped, other = self.start("stopped", *FOR_EVER), self.start("other", *FOR_EVER)
        self.read_steps(stopped, 1)
        stopped.process.send_signal(signal.SIGSTOP)
        self.read_steps(other, 3)
        self.assertEqual(len(self.jobs()), 2)
        self.start("third", "--steps", "2").wait()
        stopped.process.send_signal(signal.SIGCONT)
        self.read_steps(stopped, 3)

    def test_trainer_killed_during_format_leaves_nothing(self):
        run = self.start("job", "--params", "8M", "--ram", "256MiB", *FOR_EVER)
        wait_until(lambda: self.building() or run.process.poll() is not None)
        run.process.kill()
        run.wait()
        wait_until(lambda: not self.building() and not self.jobs())
        self.assertIsNone(self.daemon.poll())
        run = self.start("job", "--params", "8M", "--ram", "256MiB", "--steps", "1")
        self.assertEqual(run.wait(), 0, run.stderr)

    def test_terminated_daemon_ends_cleanly_and_the_next_one_goes_on(self):
        whole = self.start("whole", "--steps", "12")
        self.assertEqual(whole.wait(), 0, whole.stderr)
        losses = {line["step"]: line["loss"] for line in whole.steps()}
        run = self.start("job", "--steps", "12")
        self.read_steps(run, 3)
        self.daemon.send_signal(signal.SIGTERM)
        run.wait()
        self.assertIn("OFD-1801", run.stderr.splitlines()[-1])
        self.assertEqual(self.daemon.wait(), 0)
        self.assertFalse(os.path.exists(self.socket))
        self.start_daemon()
        rest = self.start("job", "--steps", "12")
        self.assertEqual(rest.wait(), 0, rest.stderr)
        self.assertGreaterEqual(rest.start()["resumed_step"], run.steps()[-1]["step"] - 1)
        for line in [*run.steps(), *rest.steps()]:
            self.assertEqual(line["loss"], losses[line["step"]])

    def test_pool_of_another_is_refused(self):
        other = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(shutil.rmtree, other, True)
        run = self.start("job", "--nvme-path", other)
        self.assertEqual(run.wait(), 1)
        self.assertIn("OFD-1504", run.stderr)
        self.assertEqual(os.listdir(other), [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
