"""Python tests, with the machine's python3 (run_python_test.sh)."""

def python_test(name, size = "small", src = None, programs = [], data = [], args = [], **others):
    """Declares a test of NAME.py, which is called with the paths of `programs`, then with `args`.

    Args:
      name: of the test; ends in _test.
      size: as sh_test's.
      src: the program, where it is not NAME.py.
      programs: the built programs that it runs.
      data: further files, such as the modules that it imports.
      args: further arguments.
      **others: as sh_test's.
    """
    src = src or name + ".py"
    native.sh_test(
        name = name,
        size = size,
        srcs = ["//tools:run_python_test.sh"],
        args = ["$(rootpath %s)" % path for path in [src] + programs] + args,
        data = [src] + data + programs,
        **others
    )
