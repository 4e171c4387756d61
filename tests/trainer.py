"""Runs examples/train as a user does, for the tests that cross processes: start, read its lines, kill, look at what is left."""

import json
import os
import signal
import subprocess
import tempfile
import time


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
        return child_named(self.process.pid, "offloadd")

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


def child_named(parent, name):
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8") as stat:
                text = stat.read()
        except OSError:
            continue
        command = text[text.index("(") + 1 : text.rindex(")")]
        state, owner = text[text.rindex(")") + 2 :].split()[:2]
        if command == name and int(owner) == parent and state != "Z":
            return int(entry)
    return None


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
