"""Tests the counting of test cases."""

import json
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

import count_tests  # noqa: E402  (needs the path above)

XML = """<testsuites><testsuite name="A">
<testcase name="passes" status="run" result="completed" />
<testcase name="fails" status="run" result="completed"><failure message="no"/></testcase>
<testcase name="skips" status="run" result="skipped"><skipped message="no drive"/></testcase>
<testcase name="filtered" status="notrun" result="suppressed" />
</testsuite></testsuites>"""


class CountTestsTest(unittest.TestCase):
    def write(self, text):
        file = tempfile.NamedTemporaryFile("w", suffix=".xml", delete=False, dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(os.unlink, file.name)
        with file:
            file.write(text)
        return file.name

    def test_cases_are_counted_by_their_result(self):
        self.assertEqual(str(count_tests.count_target("FAILED", [self.write(XML)])),
                         "1 passed, 1 failed, 1 skipped")

    def test_target_without_cases_counts_as_one(self):
        self.assertEqual(str(count_tests.count_target("PASSED", [])), "1 passed, 0 failed, 0 skipped")
        self.assertEqual(str(count_tests.count_target("FAILED_TO_BUILD", [])),
                         "0 passed, 1 failed, 0 skipped")

    def test_cases_of_unittest_are_those_of_its_summary(self):
        def counted(verdict, output):
            return str(count_tests.count_target(verdict, [self.write(
                '<testsuites><testsuite name="t"><testcase name="t" status="run"></testcase>'
                f"<system-out>log:\n<![CDATA[{output}]]></system-out></testsuite></testsuites>")]))

        self.assertEqual(counted("PASSED", "of a child:\nRan 9 tests in 1s\n\nOK\n---\nRan 5 tests in 0.5s\n\nOK\nmore"), "5 passed, 0 failed, 0 skipped")
        self.assertEqual(counted("PASSED", "Ran 5 tests in 0.5s\n\nOK (skipped=4)"), "1 passed, 0 failed, 4 skipped")
        self.assertEqual(counted("FAILED", "Ran 7 tests in 0.5s\n\nFAILED (failures=1, errors=2, skipped=1)\n"), "3 passed, 3 failed, 1 skipped")
        self.assertEqual(counted("FAILED", "Ran 1 test in 0.5s\n\nOK\nand then it crashed"), "1 passed, 1 failed, 0 skipped")
        self.assertEqual(counted("PASSED", "a script that is no unittest"), "1 passed, 0 failed, 0 skipped")

    def test_failed_target_without_failed_case_counts_as_failed(self):
        good = self.write('<testsuite><testcase name="a" status="run"/></testsuite>')
        self.assertEqual(str(count_tests.count_target("TIMEOUT", [good])), "1 passed, 1 failed, 0 skipped")
        self.assertEqual(str(count_tests.count_target("FAILED", [self.write("<cut off")])),
                         "0 passed, 1 failed, 0 skipped")

    def test_events_lead_to_targets_and_files(self):
        path = self.write(XML)
        events = [
            {"id": {"testResult": {"label": "//a:b"}},
             "testResult": {"testActionOutput": [{"name": "test.log", "uri": "file:///x"},
                                                 {"name": "test.xml", "uri": "file://" + path}]}},
            {"id": {"testSummary": {"label": "//a:b"}}, "testSummary": {"overallStatus": "FAILED"}},
            {"id": {"buildFinished": {}}},
        ]
        self.assertEqual(count_tests.read_events(map(json.dumps, events)), {"//a:b": ("FAILED", [path], [])})

    def test_last_attempt_of_every_shard_counts(self):
        def attempt(shard, number, status, path):
            return {"id": {"testResult": {"label": "//a:b", "run": 1, "shard": shard, "attempt": number}},
                    "testResult": {"status": status, "testActionOutput": [
                        {"name": "test.log", "uri": f"file:///{shard}.{number}.log"},
                        {"name": "test.xml", "uri": "file://" + path}]}}

        events = [
            attempt(1, 1, "FAILED", "/1.1"), attempt(2, 1, "PASSED", "/2.1"), attempt(1, 2, "PASSED", "/1.2"),
            {"id": {"testSummary": {"label": "//a:b"}}, "testSummary": {"overallStatus": "FLAKY"}},
        ]
        self.assertEqual(count_tests.read_events(map(json.dumps, events)),
                         {"//a:b": ("FLAKY", ["/1.2", "/2.1"], ["/1.1.log"])})


if __name__ == "__main__":
    unittest.main(verbosity=2)
