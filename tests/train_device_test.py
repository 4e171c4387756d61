"""examples/train --device: the same numbers on a device as in its memory, and names that are no devices."""

import os
import re
import sys
import tempfile
import unittest

from trainer import Trainer

TRAIN, STANDIN, DAEMON = None, None, None
MODEL = ["--params", "400K", "--steps", "3", "--micro-batches", "2", "--seq", "32", "--batch", "2", "--sample", "0", "--threads", "1"]


def run(program, *arguments):
    trainer = Trainer(program, [*MODEL, *arguments], {"OFFLOADD_BINARY": DAEMON})
    return trainer, trainer.wait()


class TrainDeviceTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(self.folder.cleanup)

    def offloaded(self, *arguments):
        return run(STANDIN, "--device", "standin", "--nvme-path", self.folder.name, "--ram", "256MiB", *arguments)

    def test_trains_as_in_memory(self):
        for dtype in ["fp32", "bf16"]:
            alone, code = run(STANDIN, "--device", "standin", "--dtype", dtype)
            self.assertEqual(code, 0, alone.stderr)
            exported = os.path.join(self.folder.name, dtype)
            attached, code = self.offloaded("--dtype", dtype, "--job", dtype, "--export", exported)
            self.assertEqual(code, 0, attached.stderr)
            self.assertIn("gpu_ram", attached.stderr)
            self.assertTrue(os.listdir(exported))
            seen = [[(line["loss"], line.get("grad_norm")) for line in trainer.lines if "loss" in line] for trainer in (alone, attached)]
            self.assertEqual(len(seen[0]), 4)  # three steps and an evaluation
            self.assertEqual(seen[0], seen[1])

    def test_gpu_ram_that_is_too_small_names_the_number_that_does(self):
        trainer, code = self.offloaded("--gpu-ram", "1KiB")
        self.assertEqual(code, 1)
        self.assertIn("OFD-2003", trainer.stderr)
        least = re.search(r"Set gpu_ram to (\d+) bytes", trainer.stderr)
        self.assertIsNotNone(least, trainer.stderr)
        trainer, code = self.offloaded("--gpu-ram", least.group(1))
        self.assertEqual(code, 0, trainer.stderr)

    def test_a_device_that_is_not_there_is_refused_by_name(self):
        trainer, code = run(TRAIN, "--device", "standin")
        self.assertEqual(code, 1)
        self.assertIn("--device standin is no device of this program", trainer.stderr)
        trainer, code = run(TRAIN, "--gpu-ram", "1GiB", "--nvme-path", self.folder.name)
        self.assertEqual(code, 2)
        self.assertIn("--gpu-ram has no effect on the CPU", trainer.stderr)


if __name__ == "__main__":
    TRAIN, STANDIN, DAEMON = (os.path.abspath(path) for path in sys.argv[1:4])
    unittest.main(argv=sys.argv[:1])
