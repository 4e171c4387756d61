"""Finds libtorch: $TORCH_DIR, else .venv beside WORKSPACE. Only the headers that do not clash are visible."""

# The wheel also ships protobuf, fmt, pybind11 and more, which differ from Debian's.
_FOLDERS = ["ATen", "c10", "caffe2", "torch"]

_BUILD = """
cc_library(
    name = "torch",
    hdrs = glob(["include/**/*.h", "include/**/*.hpp"]),
    includes = ["include", "include/torch/csrc/api/include"],
    # Every file that includes torch: a class layout in it depends on NDEBUG, which fastbuild and dbg leave out.
    defines = ["NDEBUG"],
    linkopts = [
        "-L{lib}",
        "-ltorch_cpu",
        "-lc10",
        "-Wl,-rpath,{lib}",
        "-Wl,--allow-shlib-undefined",
    ],
    visibility = ["//visibility:public"],
)
"""

def _local_torch_impl(repository_ctx):
    root = str(repository_ctx.path(Label("//:WORKSPACE")).dirname)
    candidates = []
    if repository_ctx.os.environ.get("TORCH_DIR"):
        candidates.append(repository_ctx.os.environ["TORCH_DIR"])
    for minor in ["11", "10", "12", "13"]:
        candidates.append(root + "/.venv/lib/python3." + minor + "/site-packages/torch")
    for torch in candidates:
        if repository_ctx.path(torch + "/include/ATen/ATen.h").exists:
            for folder in _FOLDERS:
                repository_ctx.symlink(torch + "/include/" + folder, "include/" + folder)
            repository_ctx.file("BUILD", _BUILD.format(lib = torch + "/lib"))
            return
    fail("libtorch not found. Run ./tools/setup, or set TORCH_DIR. Looked in: " + ", ".join(candidates))

local_torch = repository_rule(
    implementation = _local_torch_impl,
    environ = ["TORCH_DIR"],
    local = True,
)
