"""Counts test cases of a Bazel run: prints "N passed, N failed, N skipped".

Reads the build events (--build_event_json_file) for the targets that ran and their verdicts, and
each target's test.xml for its cases. Of a program of unittest's, which writes none, Bazel makes one with its output, whose
last lines count. A target without cases counts as one; a target that failed
although no case did (a crash after the last one, a time-out) adds one failure. A target that
passed only when it was tried again counts as it did then, and is named: its first failure is a defect to
be looked for, of the test or of what it tests.

Exit code 1 when anything failed.
"""

import json
import re
import sys
import urllib.parse
import xml.etree.ElementTree


# The end of a run of unittest: how many tests there were, and what was not well with how many.
SUMMARY = re.compile(r"^Ran (\d+) tests? in .*\n+(?:OK|FAILED)(?: \((.*)\))?$", re.MULTILINE)


class Count:
    def __init__(self, passed=0, failed=0, skipped=0):
        self.passed, self.failed, self.skipped = passed, failed, skipped

    def add(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def __str__(self):
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def count_summary(output):
    """Counts the cases that unittest's last summary in an output tells of; None where there is none."""
    summaries = SUMMARY.findall(output)
    if not summaries:
        return None
    of = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", summaries[-1][1])}
    failed, skipped = of.get("failures", 0) + of.get("errors", 0), of.get("skipped", 0)
    return Count(max(0, int(summaries[-1][0]) - failed - skipped), failed, skipped)  # subtests fail one by one


def count_cases(xml_path):
    """Counts the cases of one test.xml; nothing when it is missing or not XML."""
    count = Count()
    try:
        root = xml.etree.ElementTree.parse(xml_path).getroot()
    except (OSError, xml.etree.ElementTree.ParseError):
        return count
    for output in root.iter("system-out"):  # Bazel's: GoogleTest and cases.py write none
        return count_summary("".join(output.itertext())) or count
    for case in root.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            count.failed += 1
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            count.skipped += 1
        elif case.get("status") != "notrun":  # left out by a filter
            count.passed += 1
    return count


def read_events(lines):
    """Returns {label: (verdict, [test.xml of every shard's last attempt], [logs of attempts that failed])}."""
    verdicts, files, failures = {}, {}, {}
    for line in lines:
        event = json.loads(line)
        if "testSummary" in event:
            label = event["id"]["testSummary"]["label"]
            verdicts[label] = event["testSummary"].get("overallStatus", "NO_STATUS")
        if "testResult" in event:
            attempt = event["id"]["testResult"]
            label = attempt["label"]
            outputs = {
                output.get("name"): urllib.parse.unquote(urllib.parse.urlparse(output.get("uri", "")).path)
                for output in event["testResult"].get("testActionOutput", [])}
            if "test.xml" in outputs:
                number = (attempt.get("attempt", 1), outputs["test.xml"])
                shard = files.setdefault(label, {})
                part = (attempt.get("run", 1), attempt.get("shard", 1))
                shard[part] = max(shard.get(part, number), number)
            if event["testResult"].get("status", "PASSED") != "PASSED":
                failures.setdefault(label, []).append(outputs.get("test.log", "no log"))
    return {
        label: (verdict, [path for _, path in files.get(label, {}).values()], failures.get(label, []))
        for label, verdict in verdicts.items()}


def count_target(verdict, xml_paths):
    count = Count()
    for path in xml_paths:
        count.add(count_cases(path))
    good = verdict in ("PASSED", "FLAKY")
    if not good and count.failed == 0:
        count.failed += 1
    if good and count.passed + count.failed + count.skipped == 0:
        count.passed += 1
    return count


def main(path):
    total = Count()
    with open(path, encoding="utf-8") as lines:
        for label, (verdict, xml_paths, logs) in sorted(read_events(lines).items()):
            count = count_target(verdict, xml_paths)
            total.add(count)
            if verdict == "FLAKY":
                print(f"{label}: passed when tried again, failed before: {', '.join(logs)}")
            if count.failed > 0:
                print(f"{label}: {count}")
    print(total)
    return 1 if total.failed > 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
