"""Makes docs/errors.md from base/errors.def.

Usage: errors_page.py [--check]. Writes the page; with --check only says whether it is current (exit code 1).
"""

import ast
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
REGISTRY = os.path.join(ROOT, "base/errors.def")
PAGE = os.path.join(ROOT, "docs/errors.md")

# OFFLOAD_ERROR(number, name, canonical code, text, cause, fix), one a line.
LINE = re.compile(r'OFFLOAD_ERROR\((\d+), (\w+), k(\w+), ("(?:[^"\\]|\\.)*"), ("(?:[^"\\]|\\.)*"), ("(?:[^"\\]|\\.)*")\)')
GROUPS = {10: "Commands and configuration", 11: "DeepSpeed", 12: "Pool and I/O", 13: "Memory", 14: "Checkpoints and formats",
          15: "Connection and protocol", 16: "Attach", 17: "Numerics", 18: "Daemon and system", 19: "Internal", 20: "GPUs"}
HEAD = """# Errors

Every error that a user can meet has a number that never changes its meaning. A message is the number, what happened with
its values, and what to do: `OFD-1203 /tmp/pool is on tmpfs. Set nvme_path to a directory on an ext4 or xfs mount.`
`offloadctl explain 1203` says the same as this page. In C++: `offload::Error::id()` is 1203.

This page is made from [base/errors.def](../base/errors.def) by `python3 tools/errors_page.py`.
"""


def errors_in(registry):
    """Returns [(number, text, cause, fix)]; raises ValueError for a line that it cannot read."""
    errors = []
    for line in registry.splitlines():
        if not line.startswith("OFFLOAD_ERROR("):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"not a line of the registry: {line}")
        errors.append((int(match[1]), *(ast.literal_eval(match[group]) for group in (4, 5, 6))))
    return errors


def page_of(registry):
    parts, group = [HEAD], None
    for number, text, cause, fix in errors_in(registry):
        if number // 100 != group:
            group = number // 100
            parts.append(f"\n## {GROUPS[group]}\n\n| error | means | why | what to do |\n|---|---|---|---|\n")
        parts.append(f"| OFD-{number} | {text} | {cause} | {fix}. |\n".replace("nvme_path", "`nvme_path`"))
    return "".join(parts)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def is_current():
    return os.path.exists(PAGE) and read(PAGE) == page_of(read(REGISTRY))


def main(arguments):
    if arguments == ["--check"]:
        if not is_current():
            print("docs/errors.md is not what base/errors.def says: run python3 tools/errors_page.py")
        return 0 if is_current() else 1
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    with open(PAGE, "w", encoding="utf-8") as file:
        file.write(page_of(read(REGISTRY)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
