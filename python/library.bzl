"""The library of the Python package: one for all versions of Python."""

load("//third_party/precompiled:cc.bzl", "cc_binary")

def python_library(name, export_map, **kwargs):
    """A shared object that exports what `export_map` says.

    Of libtorch and of Debian's libraries nothing is exported again; what has registered itself with
    torch is never unloaded.
    """
    cc_binary(
        name = name,
        additional_linker_inputs = [export_map],
        linkopts = [
            "-Wl,--version-script=$(location %s)" % export_map,
            "-Wl,-z,nodelete",
            "-Wl,--gc-sections",
            "-Wl,--as-needed",
        ],
        linkshared = True,
        visibility = ["//python:__subpackages__"],
        **kwargs
    )
