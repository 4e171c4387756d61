"""python -m offloadd [--pool DIR] [--ram SIZE] [--job NAME] [--config FILE] (script.py | -m module | -c text | -) [arguments…]

Runs a training script as it is, offloaded, as Python itself would run it. What is not given is taken from OFFLOADD_POOL, OFFLOADD_RAM and
OFFLOADD_JOB, or from FILE, or from the machine's or the user's offloadd.toml; the job is otherwise named after the script."""

import argparse
import builtins
import hashlib
import importlib.machinery
import os
import re
import runpy
import sys
import types
import zipfile


def _parser():
    parser = argparse.ArgumentParser(prog="python -m offloadd", description="Runs a training script offloaded.",
                                     usage="%(prog)s [options] (script.py | -m module | -c text | -) [arguments...]",
                                     epilog="The script, a module, a text, or the standard input is run as Python itself runs it; all that stands "
                                            "behind it is its own.")
    parser.add_argument("--pool", "--nvme-path", dest="nvme_path", help="a directory on a drive with direct I/O")
    parser.add_argument("--ram", help="the memory budget, for example 8GiB")
    parser.add_argument("--job", help="names the run in the pool; the same name resumes it")
    parser.add_argument("--config", help="a configuration file")
    return parser


def _split(arguments):
    """(our own, each of which has a value; how the script is named: "-m", "-c", "-" for the standard input, "" for a file; what stands behind that)."""
    own = 0
    while own < len(arguments) and arguments[own].startswith("--") and arguments[own] not in ("--", "--help"):
        own += 1 if "=" in arguments[own] else 2
    own = min(own, len(arguments))
    rest = arguments[own + (arguments[own:own + 1] == ["--"]):]
    if rest[:1] == ["-"]:
        return arguments[:own], "-", rest[1:]
    if rest and rest[0][:2] in ("-m", "-c"):
        return arguments[:own], rest[0][:2], [each for each in (rest[0][2:],) if each] + rest[1:]
    if rest and rest[0].startswith("-"):  # -h, and what there is not
        return arguments, "", []
    return arguments[:own], "", rest


def _arguments():
    parser = _parser()
    own, how, rest = _split(sys.argv[1:])
    given = parser.parse_args(own)
    is_terminal = sys.stdin is None or sys.stdin.isatty()
    if not how and not rest and not is_terminal:
        how, rest = "-", [""]
    elif how == "-":
        rest = ["-", *rest]
    elif not rest:
        parser.error({"-m": "-m needs the name of a module", "-c": "-c needs a text"}.get(how, "a script is needed"))
    given.how, given.script, given.arguments = how, rest[0], rest[1:]
    if how == "-":
        if is_terminal:
            parser.error("the standard input is a terminal; name a script")
        given.text = sys.stdin.buffer.read()
    elif how == "-c":
        given.text = given.script.encode(errors="surrogateescape")
    elif not how and not os.path.exists(given.script):
        parser.error(f"there is no file {os.path.abspath(given.script)}")
    return given


def _job_after(script, is_module):
    """A name for its job, of the characters that names of jobs have."""
    name = script if is_module else os.path.splitext(os.path.basename(os.path.abspath(script)))[0]
    plain = re.sub(r"[^A-Za-z0-9._#-]", "_", name).lstrip(".")[:100] or "script"
    # What two scripts would share is told apart.
    return plain if plain == name else f"{plain[:93]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:6]}"


def _job_of(given):
    """A text has one of its own."""
    if given.how in ("-c", "-"):
        return f"text-{hashlib.sha256(given.text).hexdigest()[:12]}"
    return _job_after(given.script, given.how == "-m")


def _options(given):
    """Of attach(). Paths are where they are now, wherever the script goes; and a mistake in them is told before the script does an hour's work."""
    from .config import options_of, read_toml
    from .errors import Error
    from .options import absolute_paths, strings
    from .library import Engine, is_disabled

    if given.config and not os.path.isfile(given.config):
        raise Error.of(1405, f"there is no file {os.path.abspath(given.config)}", "Correct --config")
    is_whole = is_disabled() or str(given.config).endswith(".toml")  # the file that is named takes the place of the machine's and the user's
    options = ({} if is_whole else read_toml()) | (options_of(given.config) if given.config else {})
    pools = given.nvme_path or options.get("nvme_path") or os.environ.get("OFFLOADD_POOL") or None
    if not pools and not is_disabled():
        raise Error.of(1201, "nvme_path is not set", "Name a directory on a drive, --pool DIR or OFFLOADD_POOL")
    pools = pools and absolute_paths(pools)
    for pool in pools.split(",") if pools and not is_disabled() else ():
        if not os.path.isdir(pool.strip()) and not pool.startswith("~"):
            raise Error.of(1201, f"nvme_path {pool.strip()} is no directory", "Create it, or correct nvme_path")
    if not (given.ram or options.get("ram") or os.environ.get("OFFLOADD_RAM") or is_disabled()):
        raise Error.of(1002, "ram is not set", "Set it to a size, --ram 8GiB or OFFLOADD_RAM")
    job = given.job or options.get("job") or os.environ.get("OFFLOADD_JOB") or _job_of(given)
    given_here = {"nvme_path": pools, "ram": given.ram, "job": job}
    options |= {key: value for key, value in given_here.items() if value is not None}
    if not is_disabled():
        Engine.check(strings(options))
    return options


def _main_module(**attributes):
    """A __main__ of its own, which lasts until the process ends: pickles at its exit ask for classes of it."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __annotations__={}, **attributes)
    sys.modules["__main__"] = module
    return module


def _run_file(path):
    path = os.path.abspath(path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    exec(code, _main_module(__file__=path, __cached__=None, __loader__=loader).__dict__)


def _run_text(text, name):
    its = {"__file__": name, "__cached__": None} if name == "<stdin>" else {}
    exec(compile(text, name, "exec", dont_inherit=True), _main_module(__loader__=importlib.machinery.BuiltinImporter, **its).__dict__)


def _looks_nowhere():
    """Whether Python was told (-P, -I) to look for modules in none of a script's folders."""
    return getattr(sys.flags, "safe_path", False) or sys.flags.isolated


def _search_first(path):
    """Where modules are looked for first, instead of where `python -m offloadd` was started."""
    if not _looks_nowhere():
        sys.path[0] = path


def _run(given):
    sys.argv = ["-c" if given.how == "-c" else given.script, *given.arguments]
    if given.how in ("-c", "-"):
        _search_first("")
        _run_text(given.text, "<string>" if given.how == "-c" else "<stdin>")
    elif given.how == "-m":  # modules are looked for where they were: in the folder that this one is
        _main_module(__loader__=None)
        runpy._run_module_as_main(given.script)
    elif os.path.isdir(given.script) or zipfile.is_zipfile(given.script):
        sys.path.insert(0, os.path.abspath(given.script)) if _looks_nowhere() else _search_first(os.path.abspath(given.script))
        _main_module(__loader__=None)
        runpy._run_module_as_main("__main__", alter_argv=False)
    else:
        _search_first(os.path.dirname(os.path.realpath(given.script)))
        runpy.run_path(given.script, run_name="__main__") if given.script.endswith(".pyc") else _run_file(given.script)


def main():
    given = _arguments()
    from . import untouched
    from .errors import Error

    try:
        watch = untouched.begin(_options(given))
    except Error as error:
        sys.exit(str(error))
    try:
        _run(given)
    except SystemExit as end:  # as scripts end that return a code
        if end.code in (None, 0):
            watch.tell_at_the_end()
        raise
    watch.tell_at_the_end()


if __name__ == "__main__":
    main()
