"""cc_library, cc_binary and cc_test, which begin with headers that are compiled once.

Parsing the headers of the standard library, Abseil or torch takes the compiler longer than the rest of most files. A
target that names one of these libraries among its deps begins with the precompiled header for it where .bazelrc asks for
that (--define=headers=precompiled; the format is the compiler's own, and other workspaces have other flags). A file still
includes what it uses: without the define nothing else brings it.
"""

load("@rules_cc//cc:defs.bzl", _cc_binary = "cc_binary", _cc_library = "cc_library", _cc_test = "cc_test")

_CPP_COMPILE = "c++-compile"
_PRECOMPILE = "//third_party/precompiled:precompile"

# The C library's checked functions need optimization.
UNOPTIMIZED = ["-O0", "-U_FORTIFY_SOURCE"]

def _precompiled_header_impl(ctx):
    toolchain = ctx.attr._toolchain[cc_common.CcToolchainInfo]
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )

    # Beside each other in the folder of outputs, which is searched for quoted headers: the compiler takes the
    # precompiled file when it looks for the plain one.
    plain = ctx.actions.declare_file(ctx.label.name + ".h")
    precompiled = ctx.actions.declare_file(ctx.label.name + ".h.gch")
    ctx.actions.symlink(output = plain, target_file = ctx.file.src)

    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    variables = cc_common.create_compile_variables(
        feature_configuration = features,
        cc_toolchain = toolchain,
        source_file = plain.path,
        output_file = precompiled.path,
        user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts + ["-x", "c++-header"],
        include_directories = context.includes,
        quote_include_directories = depset(["."], transitive = [context.quote_includes]),
        system_include_directories = context.system_includes,
        preprocessor_defines = context.defines,
        # .bazelrc: --force_pic.
        use_pic = True,
    )
    arguments = cc_common.get_memory_inefficient_command_line(
        feature_configuration = features,
        action_name = _CPP_COMPILE,
        variables = variables,
    )
    ctx.actions.run(
        outputs = [precompiled],
        inputs = depset([plain, ctx.file.src] + ctx.files.includes, transitive = [context.headers, toolchain.all_files]),
        executable = cc_common.get_tool_for_action(feature_configuration = features, action_name = _CPP_COMPILE),
        arguments = arguments,
        env = cc_common.get_environment_variables(
            feature_configuration = features,
            action_name = _CPP_COMPILE,
            variables = variables,
        ),
        mnemonic = "CppPrecompile",
        progress_message = "Compiling %s" % ctx.file.src.short_path,
    )
    return [
        DefaultInfo(files = depset([plain, precompiled])),
        CcInfo(compilation_context = cc_common.create_compilation_context(headers = depset([plain, precompiled]))),
    ]

precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        "src": attr.label(allow_single_file = [".h"], mandatory = True),
        "includes": attr.label_list(allow_files = [".h"]),
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

# Of what a target depends on, the first of these decides: (dependency, header, header of what is not optimized).
_HEADERS = [
    ("@torch", "tensor_headers", "torch_headers"),
    ("@debian//:cli11", "command_headers", "test_headers"),
    ("@debian//:json", "command_headers", "test_headers"),
    ("@debian//:absl", "common_headers", "test_headers"),
    ("@debian//:gtest_main", "common_headers", "test_headers"),
]

# `header`: instead of that which dependencies decide.
def _begun_with_headers(attributes, optimized, header = None):
    # With other flags the compiler takes no header of these.
    copts = attributes.get("copts", [])
    deps = attributes.get("deps", [])
    headers = [names for names in _HEADERS if names[0] in deps and (not copts or names[0] == "@torch")]
    if not optimized:
        copts = copts + UNOPTIMIZED
    if headers:
        header = header or headers[0][1 if optimized else 2]
        copts = copts + select({
            _PRECOMPILE: ["-Winvalid-pch", "-include", "third_party/precompiled/%s.h" % header],
            "//conditions:default": [],
        })
        deps = deps + select({
            _PRECOMPILE: ["//third_party/precompiled:" + header],
            "//conditions:default": [],
        })
    return dict(attributes, copts = copts, deps = deps)

def cc_binary(optimized = True, **attributes):
    _cc_binary(**_begun_with_headers(attributes, optimized))

def cc_library(header = None, **attributes):
    # Tests' parts that include torch: most of a compilation is what they do not need to be fast.
    optimized = not (attributes.get("testonly", False) and "@torch" in attributes.get("deps", []))
    _cc_library(**_begun_with_headers(attributes, optimized, header))

# Tests are compiled to be ready soon, not to run fast: optimized is for those that compute for long themselves.
def cc_test(optimized = False, **attributes):
    _cc_test(**_begun_with_headers(attributes, optimized))
