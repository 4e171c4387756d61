"""Two ranks of examples/train on CUDA, connected by NCCL: on a GPU each where there are two, which have to reach each other, else on one
that they share, each as a host of its own."""

import os
import sys
import tempfile
import unittest

from launch import Launch, shown
from trainer import Trainer

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python", "tests"))
import cases

TRAIN, DAEMON = (os.path.abspath(path) for path in ("examples/train", "offloadd/offloadd"))
MODEL = ["--params", "2M", "--seq", "64", "--batch", "1", "--sample", "0", "--threads", "1", "--clip", "0.5"]
ENVIRONMENT = {"OFFLOADD_BINARY": DAEMON, "OFFLOADD_CUDA_PLUGIN": os.path.abspath("accelerator/liboffload_cuda.so"), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def shares_one(rank):
    return {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "OFFLOADD_GPU_PEERS": "always"}


class CudaRanksTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(self.folder.cleanup)
        probe = Trainer(TRAIN, [*MODEL, "--steps", "1", "--micro-batches", "1", "--device", "cuda:0"])
        if probe.wait() != 0 and os.environ.get("OFFLOADD_REQUIRE_GPU", "") == "":
            self.skipTest("no GPU: " + probe.stderr)
        probe = Trainer(TRAIN, [*MODEL, "--steps", "1", "--micro-batches", "1", "--device", "cuda:1"])
        self.device, self.of_rank = ("cuda", lambda rank: {}) if probe.wait() == 0 else ("cuda:0", shares_one)

    def flags(self, job, device, micro_batches, steps, *more):
        return [*MODEL, "--device", device, "--nvme-path", self.folder.name, "--ram", "256MiB", "--job", job, "--checksums",
                "--micro-batches", str(micro_batches), "--steps", str(steps), *more]

    def one_process(self, steps, *more):
        trainer = Trainer(TRAIN, [*self.flags("one" + "".join(more), "cuda:0", 4, steps, *more), "--as-ranks", "2"], ENVIRONMENT)
        self.assertEqual(trainer.wait(), 0, trainer.stderr)
        return trainer

    def ranks(self, job, steps, *more):
        return Launch(TRAIN, 2, self.flags(job, self.device, 2, steps, *more), ENVIRONMENT, self.of_rank)

    # Weights come again in each pass; then all that there is stays on the device.
    def test_ranks_compute_what_one_process_does(self):
        for gpu_ram, home, dtype in [("8MiB", "nvme", "bf16"), ("1GiB", "auto", "fp32")]:
            more = ["--gpu-ram", gpu_ram, "--weights-home", home, "--dtype", dtype]
            one = self.one_process(4, *more)
            many = self.ranks("two" + dtype, 4, *more)
            self.assertEqual(many.wait(), [0, 0], many.messages())
            self.assertIn("weights: each of 2 devices copies its part", many.messages())
            self.assertIn("gradients: each of 2 devices adds a slice", many.messages())
            self.assertEqual(shown(one), shown(many))
            self.assertEqual(len(shown(one)), 4)
            self.assertEqual(one.lines[-1]["checksums"], many.ranks[0].lines[-1]["checksums"])
            print("\n".join(line for line in many.messages().splitlines() if "gather" in line or "exchang" in line))

    def test_a_rank_that_is_killed_ends_the_others_and_the_job_goes_on(self):
        steps, more = 12, ["--gpu-ram", "8MiB", "--weights-home", "nvme", "--dtype", "fp32"]
        expected = {step: line for step, *line in shown(self.one_process(steps, *more))}
        run = self.ranks("killed", steps, *more)
        while len(run.steps()) < 2:
            self.assertIsNotNone(run.ranks[0].read_line())
        run.kill(1)
        self.assertEqual(run.wait(), [1, -9], run.messages())
        self.assertIn("OFD-1803", run.ranks[0].stderr)
        seen = shown(run)
        run = self.ranks("killed", steps, *more)
        self.assertEqual(run.wait(), [0, 0], run.messages())
        for step, *line in seen + shown(run):
            self.assertEqual(line, expected[step])
        self.assertEqual(shown(run)[-1][0], steps)


if __name__ == "__main__":
    cases.run_unit_tests(sys.modules[__name__])
