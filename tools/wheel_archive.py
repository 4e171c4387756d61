"""Packs the folder of a Python package into a wheel that is for any Python 3 on Linux: wheel_archive.py TREE TARGET.

TREE holds the package; its version is the package's own."""

import base64
import hashlib
import os
import re
import sys
import zipfile

METADATA = """Metadata-Version: 2.1
Name: offloadd
Version: {version}
Summary: Trains PyTorch models that are bigger than memory from NVMe, with the script as it is
License: Apache-2.0
Requires-Python: >=3.10
Requires-Dist: torch ==2.11.*
"""
WHEEL = "Wheel-Version: 1.0\nGenerator: offloadd\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n"
# Commands on PATH. offloadctl is a program of its own: it needs neither Python nor torch, so torch is not imported for it.
ENTRY_POINTS = "[console_scripts]\noffloadd-run = offloadd.deepspeed.launcher:main\n"
OFFLOADCTL = """#!python
import importlib.util
import os
import sys

program = os.path.join(os.path.dirname(importlib.util.find_spec("offloadd").origin), "offloadctl")
os.execv(program, ["offloadctl", *sys.argv[1:]])
"""
EPOCH = (2020, 1, 1, 0, 0, 0)  # the same bytes for the same files


def version_of(tree):
    with open(os.path.join(tree, "offloadd", "__init__.py"), encoding="utf-8") as file:
        return re.search(r'^__version__ = "([^"]+)"', file.read(), re.MULTILINE).group(1)


def files_of(tree):
    """(name in the archive, bytes, permissions) of every file, in a fixed order."""
    for folder, folders, names in os.walk(tree):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                yield os.path.relpath(path, tree), file.read(), os.stat(path).st_mode & 0o777


def digest(data):
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def pack(tree, target):
    """Returns the path of the wheel."""
    version = version_of(tree)
    info = f"offloadd-{version}.dist-info"
    entries = list(files_of(tree))
    entries += [(f"offloadd-{version}.data/scripts/offloadctl", OFFLOADCTL.encode(), 0o755),
                (f"{info}/METADATA", METADATA.format(version=version).encode(), 0o644), (f"{info}/WHEEL", WHEEL.encode(), 0o644),
                (f"{info}/entry_points.txt", ENTRY_POINTS.encode(), 0o644)]
    record = "".join(f"{name},{digest(data)},{len(data)}\n" for name, data, _ in entries) + f"{info}/RECORD,,\n"
    path = os.path.join(target, f"offloadd-{version}-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data, mode in [*entries, (f"{info}/RECORD", record.encode(), 0o644)]:
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return path


if __name__ == "__main__":
    print(pack(*sys.argv[1:3]))
