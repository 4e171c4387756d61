"""What the C++ tests have in common."""

load("//third_party/precompiled:cc.bzl", "cc_test")

def offload_test(name, deps = [], size = "small", srcs = None, programs = {}, data = [], **others):
    """Declares a test of NAME.cc with GoogleTest, its main function and Abseil.

    Args:
      name: of the test; ends in _test.
      deps: what it uses beside GoogleTest and Abseil.
      size: as cc_test's.
      srcs: the sources, where they are not NAME.cc.
      programs: environment variable -> program that the test starts and finds there.
      data: further files.
      **others: as cc_test's.
    """
    cc_test(
        name = name,
        size = size,
        srcs = srcs or [name + ".cc"],
        data = data + programs.values(),
        env = {variable: "$(rootpath %s)" % program for variable, program in programs.items()},
        deps = deps + [
            "@debian//:absl",
            "@debian//:gtest_main",
        ],
        **others
    )
