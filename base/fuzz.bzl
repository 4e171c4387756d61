"""A fuzz target, and a part of it as an ordinary test."""

load("//third_party/precompiled:cc.bzl", "cc_binary", "cc_test")

def fuzz_target(name, srcs, deps, tags = []):
    """Declares NAME, which is run by libFuzzer (tools/fuzz), and NAME_test, which replays the corpus and some mutations of it.

    The sources define LLVMFuzzerTestOneInput. The corpus is the files in corpus/NAME.

    Args:
      name: of the target; ends in _fuzz.
      srcs: the sources.
      deps: what they use.
      tags: of the test.
    """
    cc_binary(
        name = name,
        testonly = True,
        srcs = srcs,
        tags = ["manual"],
        deps = deps,
    )
    cc_test(
        name = name + "_test",
        optimized = True,
        size = "small",
        srcs = srcs,
        data = native.glob(["corpus/" + name + "/*"]),
        env = {"FUZZ_CORPUS": native.package_name() + "/corpus/" + name},
        tags = tags,
        deps = deps + ["//base:fuzz_driver"],
    )
