"""A trainer in C: steps, resumes, trains a tensor that was frozen, and is refused what is wrong.

usage: c_client_test.py C_TRAINER OFFLOADD
"""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

TRAINER, OFFLOADD = (os.path.abspath(path) for path in sys.argv[1:3])


class CClientTest(unittest.TestCase):
    def setUp(self):
        self.pool = tempfile.mkdtemp(prefix="c-", dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(shutil.rmtree, self.pool, True)

    def run_trainer(self, *arguments, expect=0, **environment):
        """Returns what the trainer says."""
        result = subprocess.run([TRAINER, self.pool, *arguments], env=os.environ | {"OFFLOADD_BINARY": OFFLOADD} | environment,
                                capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result.stdout if expect == 0 else result.stderr

    def test_it_goes_on_where_it_was_and_trains_what_was_frozen(self):
        self.assertEqual(self.run_trainer(), "step 3 weight 128 bias 3f80\n")
        self.assertEqual(self.run_trainer(), "step 6 weight 16 bias 3f80\n")
        self.assertEqual(self.run_trainer("thaw"), "step 9 weight 2 bias bf00\n")  # 1 - 3 * 0.5
        self.assertEqual(self.run_trainer("thaw"), "step 12 weight 0.25 bias c000\n")
        self.assertEqual(os.listdir(self.pool), ["c.offload"])

    def test_a_daemon_that_dies_while_it_lays_the_store_out_anew_leaves_a_whole_job(self):
        self.run_trainer()
        for step, place in ((6, "job.laid_out_anew:1"), (9, "store.after_rename:1")):
            self.assertIn("1801", self.run_trainer("thaw", expect=1, OFFLOADD_FAULT_POINT=place, OFFLOADD_SANDBOX="off"))
            if place.startswith("job"):  # the store is as it was
                self.assertEqual(self.run_trainer(), f"step {step} weight 16 bias 3f80\n")
        self.assertEqual(self.run_trainer("thaw"), "step 9 weight 2 bias bf00\n")
        self.assertEqual(os.listdir(self.pool), ["c.offload"])

    def test_frozen_again_is_said_by_name(self):
        self.run_trainer("thaw")
        self.assertIn('1602: OFD-1602 job "c" has "bias" [3] bfloat16 as parameter 1, the model has "bias" [3] bfloat16 frozen',
                      self.run_trainer(expect=1))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
