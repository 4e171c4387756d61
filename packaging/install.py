"""Puts a built offload into a prefix: library, headers, programs, CMake package, pkg-config file, man pages,
what shells complete.

Usage: install.py --prefix DIR --library FILE --preloaded FILE --plugin FILE --header FILE [--header FILE …] --daemon FILE --tool FILE --version-header FILE

The libtorch that the library was built with is read from the library itself; its release is what users need.
tools/install builds everything and calls this.
"""

import argparse
import os
import re
import shutil
import stat
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SONAME = "liboffload.so.0"


class InstallError(Exception):
    """Says what is wrong and the way out."""


def torch_folder(library):
    """Returns the folder of libtorch (with include and lib) in which a library looks for it."""
    dynamic = subprocess.run(["readelf", "--dynamic", "--wide", library], check=True, capture_output=True, text=True)
    for path in re.findall(r"(?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic.stdout):
        for folder in path.split(":"):
            if os.path.exists(os.path.join(folder, "libtorch_cpu.so")):
                return os.path.dirname(folder)
    raise InstallError(f"{library} names no folder with libtorch_cpu.so. Build it again: tools/install --prefix DIR")


def torch_release(folder):
    """Returns the release of a libtorch, "2.11.0"."""
    for name in ("include/torch/headeronly/version.h", "include/torch/version.h"):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        with open(path, encoding="utf-8") as file:
            numbers = dict(re.findall(r"#define TORCH_VERSION_(MAJOR|MINOR|PATCH) (\d+)", file.read()))
        if len(numbers) == 3:
            return f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}"
    raise InstallError(f"{folder} does not say which libtorch it is. Run tools/setup, then tools/install again")


def release_of(version_header):
    """Returns the release of this tree."""
    with open(version_header, encoding="utf-8") as file:
        return re.search(r'kVersion\[\] = "([^"]+)"', file.read()).group(1)


def put(source, target, mode):
    """Copies a file over whatever is there, so that a program which has the old one mapped keeps it."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = target + ".new"
    shutil.copyfile(source, temporary)
    os.chmod(temporary, mode)
    os.replace(temporary, target)


def put_filled(source, target, values):
    """Copies a text with @NAME@ replaced."""
    with open(source, encoding="utf-8") as file:
        text = re.sub(r"@([A-Z_]+)@", lambda match: values[match.group(1)], file.read())
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(target + ".new", 0o644)
    os.replace(target + ".new", target)


def link(target, name):
    """Makes `name` a symbolic link to `target`."""
    if os.path.lexists(name):
        os.remove(name)
    os.symlink(target, name)


def put_completions(tool, share):
    """Puts what shells complete of the installed tool where each looks for it."""
    for shell, name in (("bash", "bash-completion/completions/offloadctl"), ("zsh", "zsh/site-functions/_offloadctl"),
                        ("fish", "fish/vendor_completions.d/offloadctl.fish")):
        script = os.path.join(share, name)
        os.makedirs(os.path.dirname(script), exist_ok=True)
        with open(script + ".new", "w", encoding="utf-8") as file:
            subprocess.run([tool, "completion", shell], check=True, stdout=file)
        os.chmod(script + ".new", 0o644)
        os.replace(script + ".new", script)


def install(options):
    """Does what the module says."""
    torch = torch_folder(options.library)
    values = {"VERSION": release_of(options.version_header), "TORCH_DIR": torch, "TORCH_VERSION": torch_release(torch)}
    executable = stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH

    def under(*parts):
        return os.path.join(options.prefix, *parts)

    put(options.library, under("lib", SONAME), executable)
    link(SONAME, under("lib", "liboffload.so"))
    put(options.preloaded, under("lib", "liboffload_untouched.so"), executable)
    put(options.plugin, under("lib", "liboffload_cuda.so"), executable)
    put(options.daemon, under("bin", "offloadd"), executable)
    put(options.tool, under("bin", "offloadctl"), executable)
    for header in options.header:
        put(header, under("include", "offload", os.path.basename(header)), 0o644)
    for name in ("offload-config.cmake", "offload-config-version.cmake"):
        put_filled(os.path.join(HERE, name + ".in"), under("lib", "cmake", "offload", name), values)
    put_filled(os.path.join(HERE, "offload.pc.in"), under("lib", "pkgconfig", "offload.pc"), values)
    put_filled(os.path.join(HERE, "offloadctl.1"), under("share", "man", "man1", "offloadctl.1"), values)
    put_filled(os.path.join(HERE, "offloadd.8"), under("share", "man", "man8", "offloadd.8"), values)
    put_completions(under("bin", "offloadctl"), under("share"))
    print(f"offload {values['VERSION']} for libtorch {values['TORCH_VERSION']} is in {options.prefix}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("prefix", "library", "preloaded", "plugin", "daemon", "tool", "version-header"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--header", action="append", required=True)
    options = parser.parse_args()
    options.prefix = os.path.abspath(options.prefix)
    try:
        install(options)
    except (InstallError, OSError) as error:
        print(f"OFD-1001 {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
