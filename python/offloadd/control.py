"""What the handle asks of offloadctl, the program beside the library."""

import json
import os
import shutil
import subprocess

from .errors import Error
from .library import PATH


def program():
    chosen = os.environ.get("OFFLOADCTL_BINARY", "")
    if chosen and not os.path.exists(chosen):
        raise Error.of(1501, f"OFFLOADCTL_BINARY names {chosen}, which is not there", "Correct it, or leave it out")
    beside = os.path.join(os.path.dirname(PATH), "offloadctl")
    found = chosen or (beside if os.path.exists(beside) else shutil.which("offloadctl"))
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
