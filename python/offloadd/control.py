"""What the handle asks of offloadctl, the program beside the library."""

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


def run(*arguments):
    done = subprocess.run([program(), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Error((done.stderr or done.stdout).strip().splitlines()[-1] if (done.stderr or done.stdout).strip() else "offloadctl failed")
    return done.stdout


def snapshot(pool, job, name):
    run("snapshot", "create", pool.split(",")[0], job, name, "--yes")
