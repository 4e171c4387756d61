"""python -m offloadd [--pool DIR] [--ram SIZE] [--job NAME] [--config FILE] script.py [arguments…]

Runs a training script as it is, offloaded. What is not given is taken from OFFLOADD_POOL, OFFLOADD_RAM and OFFLOADD_JOB, or from FILE; the
job is otherwise named after the script."""

import argparse
import builtins
import hashlib
import os
import re
import runpy
import sys
import types


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m offloadd", description="Runs a training script offloaded.")
    parser.add_argument("--pool", "--nvme-path", dest="nvme_path", help="a directory on a drive with direct I/O")
    parser.add_argument("--ram", help="the memory budget, for example 8GiB")
    parser.add_argument("--job", help="names the run in the pool; the same name resumes it")
    parser.add_argument("--config", help="a configuration file")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if not given.module and not os.path.exists(given.script):
        parser.error(f"there is no file {os.path.abspath(given.script)}")
    return given


def _job_after(script, is_module):
    """A name for its job, of the characters that names of jobs have."""
    name = script if is_module else os.path.splitext(os.path.basename(os.path.abspath(script)))[0]
    plain = re.sub(r"[^A-Za-z0-9._#-]", "_", name).lstrip(".")[:100] or "script"
    # What two scripts would share is told apart.
    return plain if plain == name else f"{plain[:93]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:6]}"


def _options(given):
    """Of attach(). Paths are where they are now, wherever the script goes; and a mistake in them is told before the script does an hour's work."""
    from .config import options_of, read_toml
    from .errors import Error
    from .options import absolute_paths
    from .library import is_disabled

    if given.config and not os.path.isfile(given.config):
        raise Error.of(1101, f"there is no file {os.path.abspath(given.config)}", "Correct --config")
    options = options_of(given.config) if given.config else {}
    elsewhere = {} if is_disabled() else read_toml()
    pools = given.nvme_path or options.get("nvme_path") or os.environ.get("OFFLOADD_POOL") or None
    if not pools and not elsewhere.get("nvme_path") and not is_disabled():
        raise Error.of(1201, "nvme_path is not set", "Name a directory on a drive, --pool DIR or OFFLOADD_POOL")
    pools = pools and absolute_paths(pools)
    for pool in pools.split(",") if pools and not is_disabled() else ():
        if not os.path.isdir(pool.strip()):
            raise Error.of(1201, f"nvme_path {pool.strip()} is no directory", "Create it, or correct nvme_path")
    if not (given.ram or options.get("ram") or os.environ.get("OFFLOADD_RAM") or elsewhere.get("ram") or is_disabled()):
        raise Error.of(1002, "ram is not set", "Set it to a size, --ram 8GiB or OFFLOADD_RAM")
    job = given.job or options.get("job") or os.environ.get("OFFLOADD_JOB") or _job_after(given.script, given.module)
    given_here = {"nvme_path": pools, "ram": given.ram, "job": job}
    return options | {key: value for key, value in given_here.items() if value is not None}


def _run_file(path):
    """As `python path` does: its classes are those of __main__ until the process ends, which pickles at its exit ask for."""
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    module = types.ModuleType("__main__")
    module.__file__, module.__builtins__ = path, builtins
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _run(given):
    if given.module:
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, os.path.dirname(os.path.abspath(given.script)))
    if given.script.endswith(".py") and os.path.isfile(given.script):
        _run_file(given.script)
    else:
        runpy.run_path(given.script, run_name="__main__")


def main():
    given = _arguments()
    from . import untouched
    from .errors import Error

    try:
        watch = untouched.begin(_options(given))
    except Error as error:
        sys.exit(str(error))
    sys.argv = [given.script, *given.arguments]
    try:
        _run(given)
    except SystemExit as end:  # as scripts end that return a code
        if end.code in (None, 0):
            watch.tell_at_the_end()
        raise
    watch.tell_at_the_end()


if __name__ == "__main__":
    main()
