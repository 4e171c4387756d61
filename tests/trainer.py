"""Runs examples/train as a user does, for the tests that cross processes: start, read its lines, kill, look at what is left."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tools"))
from private_daemon import private_daemon_of  # noqa: E402


class Trainer:
    """One run of the trainer. `lines` are its JSON lines so far; `stderr` is complete after wait(). stderr goes through a file, so
    that a chatty run never blocks."""

    def __init__(self, train, arguments, environment=None, launcher=()):
        self.messages = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [*launcher, train, "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=self.messages,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
        self.lines = []
        self.stderr = ""

    def read_line(self):
        """Returns the next JSON line, None at the end; a line that a kill cut short counts as the end."""
        text = self.process.stdout.readline()
        try:
            line = json.loads(text)
        except ValueError:
            return None
        self.lines.append(line)
        return line

    def wait(self):
        """Reads to the end; returns the exit code, negative for a signal."""
        while self.read_line() is not None:
            pass
        code = self.process.wait()
        self.process.stdout.close()
        self.messages.seek(0)
        self.stderr = self.messages.read().decode(errors="replace")
        self.messages.close()
        return code

    def daemon(self):
        """The pid of the private daemon, or None while there is none."""
        return private_daemon_of(self.process.pid)

    def kill(self, who):
        """Sends SIGKILL to "trainer", "daemon" or "both"."""
        daemon = self.daemon()
        if who != "trainer" and daemon is not None:
            os.kill(daemon, signal.SIGKILL)
        if who != "daemon" or daemon is None:
            self.process.kill()
        return daemon

    def steps(self):
        return [line for line in self.lines if line["event"] == "step"]

    def start(self):
        return next((line for line in self.lines if line["event"] == "start"), None)


def wait_until_gone(pid, seconds=60):
    """A killed trainer's daemon drains before it ends: waits for that. True when it is gone."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.02)
    return False
