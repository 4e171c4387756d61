"""python -m offloadd [--pool DIR] [--ram SIZE] [--job NAME] [--config FILE] script.py [arguments…]

Runs a training script as it is, offloaded. What is not given is taken from OFFLOADD_POOL, OFFLOADD_RAM and OFFLOADD_JOB; the job is
otherwise named after the script."""

import argparse
import hashlib
import os
import re
import runpy
import sys


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m offloadd", description="Runs a training script offloaded.")
    parser.add_argument("--pool", "--nvme-path", dest="nvme_path", help="a directory on a drive with direct I/O")
    parser.add_argument("--ram", help="the memory budget, for example 8GiB")
    parser.add_argument("--job", help="names the run in the pool; the same name resumes it")
    parser.add_argument("--config", help="a configuration file")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _job_after(script, is_module):
    """A name for its job, of the characters that names of jobs have."""
    name = script if is_module else os.path.splitext(os.path.basename(os.path.abspath(script)))[0]
    plain = re.sub(r"[^A-Za-z0-9._#-]", "_", name).lstrip(".")[:100] or "script"
    # What two scripts would share is told apart.
    return plain if plain == name else f"{plain[:93]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:6]}"


def main():
    given = _arguments()
    from . import untouched

    job = given.job or os.environ.get("OFFLOADD_JOB") or _job_after(given.script, given.module)
    options = {"nvme_path": given.nvme_path, "ram": given.ram, "job": job, "config": given.config}
    watch = untouched.begin({key: value for key, value in options.items() if value is not None})
    sys.argv = [given.script, *given.arguments]
    if given.module:
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(given.script)))
        runpy.run_path(given.script, run_name="__main__")
    watch.tell_at_the_end()


if __name__ == "__main__":
    main()
