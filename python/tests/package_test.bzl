"""Tests of the Python package, with the Python that has torch (run_in_venv.sh)."""

def package_test(name, size = "medium", data = [], args = [], **others):
    """Declares a test of NAME.py, which may import offloadd.

    Args:
      name: of the test; ends in _test.
      size: as sh_test's.
      data: further files, such as the modules that it imports.
      args: of the program.
      **others: as sh_test's.
    """
    native.sh_test(
        name = name,
        size = size,
        srcs = ["run_in_venv.sh"],
        args = ["$(rootpath %s.py)" % name] + args,
        data = [name + ".py", "cases.py", "//python:package"] + data,
        **others
    )
