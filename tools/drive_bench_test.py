"""Tests tools/drive_bench with its real program and, where there is one, fio: usage: drive_bench_test.py IO_BENCH STEP_BENCH OFFLOADD"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOLS = os.path.dirname(os.path.abspath(__file__))
PROGRAMS = {name: os.path.abspath(sys.argv.pop(1)) for name in ("tools/io_bench", "tools/step_bench", "offloadd/offloadd")}


class DriveBenchTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        for name, path in PROGRAMS.items():
            os.makedirs(os.path.dirname(os.path.join(self.folder, "bin", name)), exist_ok=True)
            os.symlink(path, os.path.join(self.folder, "bin", name))
        self.pool = os.path.join(self.folder, "pool")
        os.mkdir(self.pool)

    def run_bench(self, *flags):
        command = [sys.executable, os.path.join(TOOLS, "drive_bench"), "--bin", os.path.join(self.folder, "bin"),
                   "--nvme-path", self.pool, "--size", "16MiB", "--seconds", "0.05", "--rounds", "2", *flags]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_every_pattern_has_a_row_and_nothing_is_left(self):
        run = self.run_bench("--engines", "threads,libaio", "--blocks", "64KiB", "--json")
        self.assertEqual(run.returncode, 0, run.stderr)
        answer = json.loads(run.stdout)
        rows = answer["rows"]
        self.assertEqual([(row["engine"], row["pattern"]) for row in answer["daemon_rows"]], [(row["engine"], row["pattern"]) for row in rows])
        for row in answer["daemon_rows"]:
            self.assertGreater(row["daemon_gbps"], 0)
        self.assertEqual([(row["engine"], row["pattern"]) for row in rows],
                         [(engine, pattern) for engine in ("threads", "libaio") for pattern in ("read", "write", "mixed")])
        for row in rows:
            self.assertGreater(row["store_gbps"], 0)
            self.assertGreater(row["device_gbps"], 0)
            if shutil.which("fio"):
                self.assertGreater(row["store_to_fio"], 0)
                self.assertLessEqual(row["store_to_fio_range"][0], row["store_to_fio"])
        self.assertEqual(os.listdir(self.pool), [])

    def test_checksums_on_the_polling_thread_and_the_smallest_blocks(self):
        run = self.run_bench("--engines", "threads", "--blocks", "4KiB", "--checksums", "inline", "--no-register")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("store/fio", run.stdout)

    def test_blocks_that_cannot_be_are_refused(self):
        run = self.run_bench("--engines", "threads", "--blocks", "5000")
        self.assertEqual(run.returncode, 1)
        self.assertIn("OFD-1002", run.stderr)
        self.assertEqual(os.listdir(self.pool), [])


if __name__ == "__main__":
    unittest.main()
