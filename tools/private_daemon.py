"""The private daemon of a trainer, for tools and tests that watch it or end it."""

import os


def private_daemon_of(trainer):
    """Returns the process id of the private daemon that this process has started, or None while there is none. It is no child of it, but of
    a process that waits for its end (base/detached_process.h)."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                arguments = file.read().split(b"\0")
            with open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                command, rest = file.read().split("(", 1)[1].rsplit(")", 1)
            with open(f"/proc/{rest.split()[1]}/comm", encoding="utf-8") as file:
                parent = file.read().rstrip()
        except OSError:
            continue
        if command == "offloadd" and parent == "offloadd-waits" and \
                (b"--parent-pid", str(trainer).encode()) in zip(arguments, arguments[1:]):
            return int(entry)
    return None
