"""examples/train --device: the same numbers on a device as in its memory, with one rank and with several, each with a device of its own;
a rank that is killed; names that are no devices; and what is copied beside what `offloadctl plan` says."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

from launch import Launch, shown
from trainer import Trainer

TRAIN, STANDIN, DAEMON, OFFLOADCTL = None, None, None, None
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

    def planned(self, gpu_ram):
        command = [OFFLOADCTL, "plan", "--params", "400K", "--dtype", "fp32", "--ram", "256MiB", "--micro-batches", "2", "--gpu-ram", gpu_ram]
        return json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)

    def copied(self, gpu_ram):
        """Bytes of a step to the device and back, the mean."""
        log = os.path.join(self.folder.name, gpu_ram + ".jsonl")
        flags = [*MODEL[:2], "--steps", "8", *MODEL[4:], "--clip", "0", "--device", "standin", "--nvme-path", self.folder.name, "--ram", "256MiB", "--job", gpu_ram]
        trainer = Trainer(STANDIN, [*flags, "--gpu-ram", gpu_ram], {"OFFLOADD_BINARY": DAEMON, "OFFLOADD_STEP_LOG": log})
        self.assertEqual(trainer.wait(), 0, trainer.stderr)
        with open(log, encoding="utf-8") as file:
            steps = [json.loads(line)["gpu"] for line in file]
        return [sum(step[name] for step in steps) / len(steps) for name in ("bytes_to_device", "bytes_to_host")]

    # The least, where weights come again for the backward and gradients for the second micro-batch, and one that holds everything. The model
    # uses its tensors in nearly the planned order; the log may count a copy with the step before.
    def test_a_step_copies_what_offloadctl_plans(self):
        least = str(self.planned("1GiB")["gpu"]["floor_bytes"])
        for gpu_ram in [least, "64MiB"]:
            link = self.planned(gpu_ram)["link"]
            to_device, to_host = self.copied(gpu_ram)
            self.assertAlmostEqual(to_device / link["to_device_bytes"], 1, delta=0.25, msg=(gpu_ram, to_device, link))
            self.assertAlmostEqual(to_host / link["to_host_bytes"], 1, delta=0.25, msg=(gpu_ram, to_host, link))
            self.assertEqual(link["fetched_gradient_bytes"] > 0, gpu_ram == least)

    def test_a_device_that_is_not_there_is_refused_by_name(self):
        trainer, code = run(TRAIN, "--device", "standin")
        self.assertEqual(code, 1)
        self.assertIn("--device standin is no device of this program", trainer.stderr)
        trainer, code = run(TRAIN, "--gpu-ram", "1GiB", "--nvme-path", self.folder.name)
        self.assertEqual(code, 2)
        self.assertIn("--gpu-ram has no effect on the CPU", trainer.stderr)


class RanksOnDevicesTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(self.folder.cleanup)

    def flags(self, dtype, steps, micro_batches, job):
        return ["--device", "standin", "--params", "400K", "--seq", "32", "--batch", "1", "--sample", "0", "--threads", "1", "--clip", "0.5",
                "--dtype", dtype, "--steps", str(steps), "--micro-batches", str(micro_batches), "--nvme-path", self.folder.name,
                "--ram", "256MiB", "--gpu-ram", "4MiB", "--weights-home", "nvme", "--job", job, "--checksums"]

    def in_memory(self, ranks, dtype, steps, micro_batches=2):
        flags = [*self.flags(dtype, steps, ranks * micro_batches, "memory"), "--as-ranks", str(ranks)]
        trainer = Trainer(STANDIN, flags, {"OFFLOADD_DISABLE": "1"})
        self.assertEqual(trainer.wait(), 0, trainer.stderr)
        return trainer

    def ranks(self, ranks, dtype, steps, job):
        return Launch(STANDIN, ranks, self.flags(dtype, steps, 2, job), {"OFFLOADD_BINARY": DAEMON})

    def test_ranks_compute_what_one_process_does(self):
        for ranks, dtype in [(2, "bf16"), (4, "fp32")]:
            one = self.in_memory(ranks, dtype, steps=3)
            many = self.ranks(ranks, dtype, 3, f"{ranks}{dtype}")
            self.assertEqual(many.wait(), [0] * ranks, many.messages())
            self.assertEqual(shown(one), shown(many))
            self.assertEqual(len(shown(one)), 3)
            self.assertEqual(one.lines[-1]["checksums"], many.ranks[0].lines[-1]["checksums"])
            self.assertEqual(set(one.lines[-1]["checksums"]), {"weight", "master", "exp_avg", "exp_avg_sq"})

    def test_a_rank_that_is_killed_ends_the_others_and_the_job_goes_on(self):
        steps = 40
        expected = {step: line for step, *line in shown(self.in_memory(2, "fp32", steps))}
        run = self.ranks(2, "fp32", steps, "killed")
        while not run.steps():
            self.assertIsNotNone(run.ranks[0].read_line())
        run.kill(1)
        codes = run.wait()
        self.assertEqual(codes, [1, -9], run.messages())
        self.assertIn("OFD-1803", run.ranks[0].stderr)
        seen = shown(run)
        run = self.ranks(2, "fp32", steps, "killed")
        self.assertEqual(run.wait(), [0, 0], run.messages())
        self.assertGreaterEqual(run.start()["resumed_step"], len(seen) - 1)
        for step, *line in seen + shown(run):
            self.assertEqual(line, expected[step])
        self.assertEqual(shown(run)[-1][0], steps)


if __name__ == "__main__":
    TRAIN, STANDIN, DAEMON, OFFLOADCTL = (os.path.abspath(path) for path in sys.argv[1:5])
    unittest.main(argv=sys.argv[:1])
