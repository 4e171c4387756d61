"""Finds the CUDA toolkit: $CUDA_HOME, else nvcc from the package index in .venv, else /usr/local/cuda.

CUDA_HOME=none, or a machine without a toolkit, gives an empty @cuda: everything builds, and what would need CUDA says so when
it is used. A CUDA_HOME that cannot be used is an error; what is merely found and does not fit is passed over.
"""

# torch's wheels bring the runtime of this major version; a process can have only one.
_MAJOR = 13

_BUILD = """
cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)

# By its full name: wheels have no libcudart.so. A process that has torch's copy loaded uses that one.
cc_library(
    name = "cudart",
    linkopts = ["-L{lib}", "-l:libcudart.so.{major}", "-Wl,-rpath,{lib}"],
    visibility = ["//visibility:public"],
    deps = [":headers"],
)

# Its header alone: the library is opened when it is used, the one that torch brings.
cc_library(
    name = "nccl",
    hdrs = glob(["nccl/**"]),
    includes = ["nccl"],
    visibility = ["//visibility:public"],
)
"""

_EMPTY_BUILD = """
[cc_library(name = name, visibility = ["//visibility:public"]) for name in ["headers", "cudart", "nccl"]]
"""

_DEFS = """
HAS_CUDA = {has_cuda}
HAS_NCCL = {has_nccl}
NVCC = "{nvcc}"
"""

def _lib(repository_ctx, home):
    for folder in ["lib64", "lib"]:
        lib = home + "/" + folder
        if repository_ctx.path(lib + "/libcudart.so.%d" % _MAJOR).exists:
            return lib
    return None

def _nccl(repository_ctx, home):
    """Returns the folder of nccl.h, of the toolkit or of the wheel beside torch's, or None."""
    root = str(repository_ctx.path(Label("//:WORKSPACE")).dirname)
    wheels = [root + "/.venv/lib/python3." + minor + "/site-packages/nvidia/nccl/include" for minor in ["11", "10", "12", "13"]]
    for folder in [home + "/include"] + wheels + ["/usr/include"]:
        if repository_ctx.path(folder + "/nccl.h").exists:
            return folder
    return None

def _defect(repository_ctx, home):
    """Says why a folder cannot be used, or None."""
    if not repository_ctx.path(home + "/bin/nvcc").exists:
        return "has no bin/nvcc"
    if not repository_ctx.path(home + "/include/cuda_runtime_api.h").exists:
        return "has no include/cuda_runtime_api.h"
    if _lib(repository_ctx, home) == None:
        return "has no libcudart.so.%d in lib64 or lib: CUDA %d is needed, the one of torch" % (_MAJOR, _MAJOR)
    return None

def _candidates(repository_ctx):
    root = str(repository_ctx.path(Label("//:WORKSPACE")).dirname)
    folders = [root + "/.venv/lib/python3." + minor + "/site-packages/nvidia/cu13" for minor in ["11", "10", "12", "13"]]
    return folders + ["/usr/local/cuda"]

def _home(repository_ctx):
    wanted = repository_ctx.os.environ.get("CUDA_HOME", "")
    if wanted == "none":
        return None
    if wanted:
        defect = _defect(repository_ctx, wanted)
        if defect != None:
            fail("CUDA_HOME=%s %s. Correct it, unset it, or set CUDA_HOME=none to build without CUDA." % (wanted, defect))
        return wanted
    for home in _candidates(repository_ctx):
        if _defect(repository_ctx, home) == None:
            return home
    return None

def _local_cuda_impl(repository_ctx):
    home = _home(repository_ctx)
    if home == None:
        repository_ctx.file("defs.bzl", _DEFS.format(has_cuda = False, has_nccl = False, nvcc = ""))
        repository_ctx.file("BUILD", _EMPTY_BUILD)
        return
    repository_ctx.symlink(home + "/include", "include")
    nccl = _nccl(repository_ctx, home)
    if nccl != None:
        repository_ctx.symlink(nccl + "/nccl.h", "nccl/nccl.h")
    repository_ctx.file("defs.bzl", _DEFS.format(has_cuda = True, has_nccl = nccl != None, nvcc = home + "/bin/nvcc"))
    repository_ctx.file("BUILD", _BUILD.format(lib = _lib(repository_ctx, home), major = _MAJOR))

local_cuda = repository_rule(
    implementation = _local_cuda_impl,
    environ = ["CUDA_HOME"],
    local = True,
)
