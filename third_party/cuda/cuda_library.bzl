"""cuda_library: .cu files, compiled by nvcc with the system's g++, as a cc_library."""

load("@rules_cc//cc:defs.bzl", "cc_library")
load("@cuda//:defs.bzl", "HAS_CUDA", "NVCC")

# Machine code for what torch's wheels run on: T4, A100 and what follows it, H100, B200; and code that the driver translates for
# what comes after.
_ARCHITECTURES = [
    "-gencode=arch=compute_75,code=sm_75",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_100,code=[sm_100,compute_100]",
]

# What rounds once and what rounds twice is the contract of the kernels (kernels/BUILD): IEEE 754, nothing fused, subnormal numbers kept.
_ARITHMETIC = ["-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]

_FLAGS = ["-ccbin", "g++", "-std=c++20", "-O3", "-DNDEBUG", "-lineinfo", "--expt-relaxed-constexpr"]

def _nvcc(ctx, source, output, flags):
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    arguments = ctx.actions.args()
    arguments.add_all(_FLAGS + _ARITHMETIC + flags)
    arguments.add_all([".", ctx.bin_dir.path], before_each = "-I")
    arguments.add_all(context.includes, before_each = "-I")
    arguments.add_all(context.quote_includes, before_each = "-I")
    arguments.add_all(context.system_includes, before_each = "-isystem")
    arguments.add(source)
    arguments.add("-o", output)
    ctx.actions.run(
        executable = NVCC,
        arguments = [arguments],
        inputs = depset(ctx.files.srcs, transitive = [context.headers]),
        outputs = [output],
        env = {"PATH": "/usr/bin:/bin"},
        mnemonic = "NvccCompile",
        progress_message = "Compiling %s for the GPU" % source.short_path,
    )

def _nvcc_objects_impl(ctx):
    outputs = []
    for source in ctx.files.srcs:
        base = ctx.label.name + "/" + source.basename
        if ctx.attr.ptx:
            output = ctx.actions.declare_file(base + ".ptx")
            _nvcc(ctx, source, output, ["-arch=compute_75", "-ptx"])
        else:
            output = ctx.actions.declare_file(base + ".pic.o")
            _nvcc(ctx, source, output, _ARCHITECTURES + ["-Xcompiler", "-fPIC,-Wall,-fno-omit-frame-pointer", "-c"])
        outputs.append(output)
    return [DefaultInfo(files = depset(outputs), runfiles = ctx.runfiles(files = outputs))]

_nvcc_objects = rule(
    implementation = _nvcc_objects_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"]),
        "deps": attr.label_list(providers = [CcInfo]),
        "ptx": attr.bool(),
    },
)

def cuda_library(name, srcs, hdrs = [], without = [], deps = [], **kwargs):
    """Declares a cc_library of .cu files; NAME_ptx holds their PTX, for tests that read it.

    Args:
      name: of the library.
      srcs: .cu files, and .cc files that include CUDA's headers.
      hdrs: as cc_library's.
      without: the sources that define the same functions where there is no nvcc.
      deps: as cc_library's; @cuda//:cudart is added.
      **kwargs: as cc_library's.
    """
    device = [source for source in srcs if source.endswith(".cu")]
    host = [source for source in srcs if not source.endswith(".cu")]
    objects = []
    if HAS_CUDA and device:
        # Headers of the library itself, in a form that both compilers may depend on.
        cc_library(
            name = name + "_headers",
            hdrs = hdrs,
            deps = deps + ["@cuda//:headers"],
        )
        _nvcc_objects(
            name = name + "_objects",
            srcs = device,
            deps = [":" + name + "_headers"],
        )
        _nvcc_objects(
            name = name + "_ptx",
            srcs = device,
            ptx = True,
            tags = ["manual"],
            deps = [":" + name + "_headers"],
        )
        objects = [":" + name + "_objects"]
    cc_library(
        name = name,
        srcs = objects + host if HAS_CUDA else without,
        hdrs = hdrs,
        deps = deps + ["@cuda//:cudart"],
        **kwargs
    )
