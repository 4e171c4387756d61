"""What Bazel asks of a test's main function: to run the share of one shard, and to name its cases in test.xml."""

import os
import time
import unittest
import xml.sax.saxutils


def share(cases):
    """Those of the shard that this process is, or all."""
    if not os.environ.get("TEST_TOTAL_SHARDS"):
        return list(cases)
    with open(os.environ["TEST_SHARD_STATUS_FILE"], "w", encoding="utf-8"):
        pass  # says that shards are known of
    return list(cases)[int(os.environ["TEST_SHARD_INDEX"])::int(os.environ["TEST_TOTAL_SHARDS"])]


def write_xml(results):
    """Of (name, what is wrong or None, seconds or None where it was skipped)."""
    if not os.environ.get("XML_OUTPUT_FILE"):
        return
    lines = ["<testsuites><testsuite name='cases'>"]
    for name, wrong, seconds in results:
        failure = f"<failure>{xml.sax.saxutils.escape(''.join(c for c in wrong if c.isprintable() or c == chr(10)))}</failure>" if wrong else ""
        how = "result='skipped'" if seconds is None else f"time='{seconds:.3f}'"
        lines.append(f"<testcase name={xml.sax.saxutils.quoteattr(name)} status='run' {how}>{failure}</testcase>")
    with open(os.environ["XML_OUTPUT_FILE"], "w", encoding="utf-8") as file:
        file.write("\n".join([*lines, "</testsuite></testsuites>", ""]))


class _Result(unittest.TextTestResult):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cases, self._began = [], 0.0

    def startTest(self, test):
        self._began = time.monotonic()
        super().startTest(test)

    def stopTest(self, test):
        wrong = "\n".join(text for its, text in self.failures + self.errors if getattr(its, "test_case", its) is test)
        is_skipped = any(its is test for its, _ in self.skipped)
        self.cases.append((test.id(), wrong or None, None if is_skipped else time.monotonic() - self._began))
        super().stopTest(test)


def _each(suite):
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _each(each)
        else:
            yield each


def _load(loader, tests, pattern):
    return unittest.TestSuite(share(_each(tests)))


def run_unit_tests(module):
    """As unittest.main() of the module."""
    module.load_tests = _load
    done = unittest.main(module, exit=False, verbosity=2, testRunner=unittest.TextTestRunner(resultclass=_Result, verbosity=2)).result
    write_xml(done.cases)
    raise SystemExit(not done.wasSuccessful())
