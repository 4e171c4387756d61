"""Checks that includes follow the arrows of the map (ARCHITECTURE.md).

Bazel's visibility says which targets may depend on which; this says it once more from the #include lines,
and adds what visibility cannot say: where torch and liburing may be included.

Usage: layer_check.py ROOT. Prints one line per violation; exit code 1 when there is one.
"""

import os
import re
import sys

# Layer -> layers it may include beside itself. A file belongs to the longest layer that is a prefix of its
# path; what is in no layer may include nothing of ours.
ARROWS = {
    "base": [],
    "kernels": ["base"],
    "accelerator": ["base", "kernels"],
    "config": ["base"],
    "proto": ["base", "kernels"],
    "aio": ["base"],
    "swap": ["base", "aio"],
    "offloadd": ["base", "aio", "swap", "proto", "kernels"],
    "client": ["base", "proto", "kernels"],
    "zero3": ["base", "proto", "client", "kernels", "accelerator"],
    "zero3/torch": ["base", "config", "proto", "client", "zero3", "kernels", "accelerator"],
    "examples": ["base", "zero3", "zero3/torch"],
    "tools": ["base", "config", "proto", "client", "zero3", "swap", "aio", "kernels", "accelerator"],
    "tests": ["base", "config", "kernels", "accelerator", "proto", "aio", "swap", "offloadd", "client", "zero3", "zero3/torch",
              "examples", "tools"],
}

# Header (a prefix of its name) -> files that may include it (regular expression on the path).
RESTRICTED = {
    "torch/": r"(zero3/torch|examples|third_party/precompiled)/|tests/.*torch|kernels/.*torch.*_test\.cc",
    "ATen/": r"(zero3/torch|examples)/|tests/.*torch|kernels/.*torch.*_test\.cc",
    "c10/": r"(zero3/torch|examples)/|tests/.*torch|kernels/.*torch.*_test\.cc",
    "offload/torch": r"(zero3/torch|examples)/|tests/",
    "liburing.h": r"aio/uring_",
    "seccomp.h": r"offloadd/sandbox(_test)?\.cc",
    "cuda": r"kernels/.*\.cu|accelerator/cuda_(accelerator|calls|calls_test|peers)\.(h|cc)",
    "nccl": r"accelerator/cuda_peers\.cc",
}

SOURCE = re.compile(r"\.(h|cc|cu|def)$")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)
GENERATED = ("bazel-", ".")


def layer_of(path):
    """Returns the layer of a path, "zero3/torch" before "zero3"; None outside of all layers."""
    fitting = [layer for layer in ARROWS if path.startswith(layer + "/")]
    return max(fitting, key=len, default=None)


def violations_in(path, text):
    """Yields one message per forbidden #include in a file, `path` relative to the root."""
    layer = layer_of(path)
    for _, header in INCLUDE.findall(text):
        target = layer_of(header)
        if target is not None and target != layer and target not in ARROWS.get(layer, []):
            yield f'{path}: "{header}": {layer or "this folder"} may not include {target}'
        for prefix, allowed in RESTRICTED.items():
            if header.startswith(prefix) and not re.match(allowed, path):
                yield f"{path}: <{header}>: only {allowed} may include {prefix}"


def source_files(root):
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(GENERATED) and f != "build")
        for name in sorted(files):
            if SOURCE.search(name):
                yield os.path.relpath(os.path.join(folder, name), root)


def main(root):
    paths = list(source_files(root))
    if not paths:
        print(f"{root}: no source files found")
        return 1
    found = []
    for path in paths:
        with open(os.path.join(root, path), encoding="utf-8") as file:
            found += violations_in(path, file.read())
    print("\n".join(found) if found else f"{len(paths)} files follow the arrows")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "."))
