"""Runs the suites of store and device as a machine that refuses things would, and tells what ran and what was refused with which error.

Suites must pass, by falling back, without io_uring (seccomp), as another user with little lockable memory, and with few descriptors.
One writer meets limits under which no store can work: files that may not grow, and fewer and fewer descriptors. It must work or say
no with an identifier.

usage: refusals_test.py STORE_WORKER NO_URING SUITE... [--parts N] [--seed S] [--directory DIR]
"""

import argparse
import json
import os
import re
import subprocess
import sys

from store_lab import Scratch, check, main

NOBODY = 65534
OTHER_USER = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
NO_PRIVILEGES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
LOADER_FAILED = 127  # not even the libraries could be opened: no matter of ours
REFUSALS = {"files of at most 1 MiB": ["OFD-1204"], "descriptors": ["OFD-1218", "OFD-1211"]}


def may_be_used_by_others(folder):
    return subprocess.run([*OTHER_USER, "test", "-w", folder], check=False).returncode == 0


def conditions(no_uring, folder):
    little = ["prlimit", "--memlock=65536"]
    yield "no io_uring (seccomp)", [no_uring]
    yield "few descriptors (64)", ["prlimit", "--nofile=64"]
    if os.geteuid() != 0:
        yield "64 KiB lockable", little
    elif may_be_used_by_others(folder):
        yield "uid 65534, 64 KiB lockable", [*little, *OTHER_USER]
    else:  # it is in the home of root
        yield "uid 0 unprivileged, 64 KiB", [*little, *NO_PRIVILEGES]


def count(text, what):
    found = re.search(rf"\[  {what} *\] (\d+) test", text)
    return int(found.group(1)) if found else 0


class Refusals:
    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.counts = {"suites": 0, "cases passed": 0, "cases skipped": 0, "writers that worked": 0, "writers refused": 0}
        self.rows = []

    def suite(self, condition, launcher, suite):
        environment = {**os.environ, "TEST_TMPDIR": self.folder, "GTEST_TOTAL_SHARDS": str(self.options.parts),
                       "GTEST_SHARD_INDEX": str(self.options.seed % self.options.parts)}
        done = subprocess.run([*launcher, suite], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", check=False, timeout=600)
        passed, skipped = count(done.stdout, "PASSED"), count(done.stdout, "SKIPPED")
        check(done.returncode == 0, f"{condition}: {os.path.basename(suite)}: exit code {done.returncode}\n{done.stdout[-3000:]}")
        check(passed > 0, f"{condition}: {os.path.basename(suite)}: every case was skipped")
        self.counts["suites"] += 1
        self.counts["cases passed"] += passed
        self.counts["cases skipped"] += skipped
        reasons = sorted(set(re.findall(r": Skipped\n(.*)", done.stdout)))
        self.rows.append((condition, os.path.basename(suite), f"{passed} passed, {skipped} skipped", "; ".join(reasons)))

    def writer(self, condition, launcher, refusals):
        with Scratch("refused-", self.folder) as pool:
            done = subprocess.run([*launcher, self.options.worker, "write", pool, pool + ".oracle"], stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, check=False, timeout=120)
            os.path.exists(pool + ".oracle") and os.unlink(pool + ".oracle")
            if done.returncode == LOADER_FAILED:
                return
            said = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
            if done.returncode == 0:
                self.counts["writers that worked"] += 1
                return self.rows.append((condition, "writer", "works", f"engine {said['engine']}"))
            check(done.returncode == 1 and any(each in said.get("error", "") for each in refusals),
                  f"{condition}: exit code {done.returncode}: {done.stdout} {done.stderr}")
            check(not os.listdir(pool), f"{condition}: left behind: {os.listdir(pool)}")
            self.counts["writers refused"] += 1
            self.rows.append((condition, "writer", "refused", said["error"][:100]))

    def print_table(self):
        for row in self.rows:
            print("{:<28} {:<14} {:<26} {}".format(*row).rstrip())


def test(options):
    with Scratch("refusals-", options.directory) as folder:
        os.chmod(folder, 0o777)  # for the other user
        refusals = Refusals(options, folder)
        for condition, launcher in conditions(options.no_uring, folder):
            # Not as the other user, who may not see the libraries of a dynamically linked program.
            is_other = launcher[-len(OTHER_USER):] == OTHER_USER
            refusals.writer(condition, launcher[:-len(OTHER_USER)] if is_other else launcher, [])
            for suite in options.suites:
                refusals.suite(condition, launcher, os.path.abspath(suite))
        refusals.writer("files of at most 1 MiB", ["prlimit", f"--fsize={1 << 20}"], REFUSALS["files of at most 1 MiB"])
        for limit in range(16, 2, -1):
            refusals.writer(f"{limit} descriptors", ["prlimit", f"--nofile={limit}"], REFUSALS["descriptors"])
        refusals.print_table()
        return refusals.counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worker", type=os.path.abspath)
    parser.add_argument("no_uring", type=os.path.abspath)
    parser.add_argument("suites", nargs="+")
    parser.add_argument("--parts", type=int, default=1, help="run one of so many parts of each suite")
    parser.add_argument("--seed", type=int, default=0, help="says which part")
    parser.add_argument("--directory", help="where the stores stand (default: TEST_TMPDIR)")
    sys.exit(main(test, parser.parse_args()))
