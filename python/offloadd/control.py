"""What the handle asks of offloadctl, the program beside the library."""

import json
import os
import shutil
import subprocess

from .errors import Error
from .library import PATH


def program():
    for path in (os.environ.get("OFFLOADCTL_BINARY", ""), os.path.join(os.path.dirname(PATH), "offloadctl")):
        if path and os.path.exists(path):
            return path
    found = shutil.which("offloadctl")
    if found is None:
        raise Error.of(1501, "the program offloadctl was not found beside the library or on PATH", "Install it, or set OFFLOADCTL_BINARY")
    return found


def _done(arguments):
    return subprocess.run([program(), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def _refuse(done):
    said = (done.stderr or done.stdout).strip()
    raise Error(said.splitlines()[-1] if said else "offloadctl failed")


def run(*arguments):
    done = _done(arguments)
    if done.returncode != 0:
        _refuse(done)
    return done.stdout


def jobs_in(pool):
    """Names of those that are there, also of damaged ones."""
    done = _done(["ls", pool, "--json"])
    try:
        return [each["job"] for each in json.loads(done.stdout)["jobs"]]
    except (ValueError, KeyError):
        _refuse(done)


def snapshot(pool, job, name):
    run("snapshot", "create", pool, job, name, "--yes")
