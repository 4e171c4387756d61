"""Names Debian's libraries as Bazel targets, so that a BUILD file says what it uses: @debian//:spdlog and so on.

The headers stand in /usr/include, which the compiler knows; a target adds only what has to be linked.
"""

_ABSL = [
    "absl_status", "absl_statusor", "absl_strings", "absl_strings_internal", "absl_str_format_internal", "absl_cord",
    "absl_cord_internal", "absl_cordz_info", "absl_cordz_handle", "absl_cordz_functions", "absl_exponential_biased",
    "absl_synchronization", "absl_graphcycles_internal", "absl_time", "absl_civil_time", "absl_time_zone",
    "absl_base", "absl_raw_logging_internal", "absl_log_severity", "absl_spinlock_wait", "absl_throw_delegate",
    "absl_int128", "absl_stacktrace", "absl_symbolize", "absl_debugging_internal", "absl_demangle_internal",
    "absl_malloc_internal", "absl_bad_optional_access", "absl_bad_variant_access", "absl_hash", "absl_city",
    "absl_low_level_hash", "absl_raw_hash_set", "absl_hashtablez_sampler",
]

_LIBRARIES = {
    "absl": ["-l" + name for name in _ABSL],
    "grpc": ["-lgrpc++", "-lgrpc", "-lgpr", "-lprotobuf"],
    "spdlog": ["-lspdlog", "-lfmt"],
    "uring": ["-l:liburing.a"],
    "aio": ["-l:libaio.a"],
    "gtest": ["-lgtest", "-lpthread"],
    "gtest_main": ["-lgtest_main", "-lgtest", "-lpthread"],
    "gmock": ["-lgmock", "-lgtest", "-lpthread"],
    "benchmark": ["-lbenchmark", "-lpthread"],
    "cli11": [],
    "json": [],
    "tomlplusplus": [],
    "fuse3": ["-lfuse3"],
    "seccomp": ["-lseccomp"],
}

# These must be on the compiler's command line for the library to be used as Debian built it.
_DEFINES = {"spdlog": ["SPDLOG_COMPILED_LIB", "SPDLOG_FMT_EXTERNAL", "SPDLOG_SHARED_LIB"]}

def _debian_libraries_impl(repository_ctx):
    lines = []
    for name, linkopts in _LIBRARIES.items():
        lines.append('cc_library(name = "{}", linkopts = {}, defines = {}, visibility = ["//visibility:public"])'.format(
            name,
            repr(linkopts),
            repr(_DEFINES.get(name, [])),
        ))
    repository_ctx.file("BUILD", "\n".join(lines) + "\n")

debian_libraries = repository_rule(implementation = _debian_libraries_impl, local = True)
