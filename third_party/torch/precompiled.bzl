"""Torch's headers, compiled once for all files that include them.

Parsing them takes the compiler longer than the rest of such a file. cc_library, cc_test and cc_binary of this file are
the usual ones, but a target that depends on @torch begins with the precompiled header where .bazelrc asks for it
(--define=torch=precompiled; the format is the compiler's own, and other workspaces have other flags). A file still
includes what it uses: without the define nothing else brings it.
"""

load("@rules_cc//cc:defs.bzl", _cc_binary = "cc_binary", _cc_library = "cc_library", _cc_test = "cc_test")

_CPP_COMPILE = "c++-compile"

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
        quote_include_directories = context.quote_includes,
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
        inputs = depset([plain, ctx.file.src], transitive = [context.headers, toolchain.all_files]),
        executable = cc_common.get_tool_for_action(feature_configuration = features, action_name = _CPP_COMPILE),
        arguments = arguments,
        env = cc_common.get_environment_variables(
            feature_configuration = features,
            action_name = _CPP_COMPILE,
            variables = variables,
        ),
        mnemonic = "CppPrecompile",
        progress_message = "Compiling torch's headers",
    )
    return [
        DefaultInfo(files = depset([plain, precompiled])),
        CcInfo(compilation_context = cc_common.create_compilation_context(headers = depset([plain, precompiled]))),
    ]

precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        "src": attr.label(allow_single_file = [".h"], mandatory = True),
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def _includes_torch(attributes):
    return "@torch" in attributes.get("deps", [])

def _begun_with_torch(attributes, optimized):
    if not _includes_torch(attributes):
        return attributes

    optimization = [] if optimized else UNOPTIMIZED
    header = "headers" if optimized else "unoptimized_headers"
    begin = {
        "//third_party/torch:precompile": ["-Winvalid-pch", "-include", "third_party/torch/%s.h" % header],
        "//conditions:default": [],
    }
    precompiled = {
        "//third_party/torch:precompile": ["//third_party/torch:" + header],
        "//conditions:default": [],
    }
    return dict(
        attributes,
        copts = attributes.get("copts", []) + optimization + select(begin),
        deps = attributes["deps"] + select(precompiled),
    )

def cc_binary(**attributes):
    _cc_binary(**_begun_with_torch(attributes, optimized = True))

def cc_library(**attributes):
    _cc_library(**_begun_with_torch(attributes, optimized = not attributes.get("testonly", False)))

# Tests are compiled to be ready soon, not to run fast: optimized is for those that compute for long themselves.
def cc_test(optimized = False, **attributes):
    if not optimized and not _includes_torch(attributes):
        attributes["copts"] = attributes.get("copts", []) + UNOPTIMIZED
    _cc_test(**_begun_with_torch(attributes, optimized))
