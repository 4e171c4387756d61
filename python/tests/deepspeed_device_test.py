"""Which device a program for DeepSpeed trains on: CUDA's of its rank where there is CUDA, unless somebody says otherwise. There is none
here: torch.cuda is asked through mocks. And how many ranks the launcher starts. On the stand-in: device_test.py; on CUDA: cuda_test.py."""

import os
import tempfile
import unittest
import unittest.mock

import torch

import offloadd
import offloadd.deepspeed
from offloadd.deepspeed import comm, launcher, placement, setup


class Attached(Exception):
    """In the place of an attach(), with its options."""


def attach(model, optimizer, **options):
    raise Attached(options)


class Placed(unittest.TestCase):
    def setUp(self):
        comm.init_distributed("gloo")  # no other one can be made here
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.enterContext(unittest.mock.patch.dict(os.environ, {"OFFLOADD_POOL": self.folder, "OFFLOADD_RAM": "64MiB"}))
        for name in ("OFFLOADD_DEVICE", "OFFLOADD_DISABLE", "DS_ACCELERATOR", "LOCAL_RANK"):
            os.environ.pop(name, None)
        cuda = {"is_available": lambda: True, "device_count": lambda: 2, "current_device": lambda: 1, "manual_seed": lambda seed: ("seeded", seed)}
        for name, value in cuda.items():
            self.enterContext(unittest.mock.patch.object(torch.cuda, name, value))
        self.set_device = self.enterContext(unittest.mock.patch.object(torch.cuda, "set_device"))
        self.enterContext(unittest.mock.patch.object(offloadd.attaching, "attach", attach))
        self.addCleanup(setup.set_installed, {})
        setup.set_installed({})
        placement._tell.cache_clear()

    @staticmethod
    def options(model=None):
        """What initialize() gives attach()."""
        model = torch.nn.Linear(2, 2) if model is None else model
        try:
            offloadd.deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
                "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
        except Attached as attached:
            return attached.args[0]
        raise AssertionError("nothing was attached")

    def test_the_device_of_the_rank(self):
        with self.assertLogs("offloadd", "WARNING") as log:
            self.assertEqual(self.options()["device"], "cuda:0")
            self.assertEqual(self.options()["device"], "cuda:0")
        self.assertEqual(sum("trained on cuda:0" in line for line in log.output), 1)
        os.environ["LOCAL_RANK"] = "1"
        self.assertEqual(self.options()["device"], "cuda:1")
        self.set_device.assert_called_with(torch.device("cuda:1"))

    def test_what_was_said_counts_more(self):
        os.environ["OFFLOADD_DEVICE"] = "cpu"
        self.assertNotEqual(self.options().get("device", "cpu"), "cuda:0")
        self.assertEqual(offloadd.deepspeed.get_accelerator().device_name(), "cpu")
        os.environ["OFFLOADD_DEVICE"] = "cuda:1"
        self.assertEqual(self.options().get("device", "cuda:1"), "cuda:1")
        self.assertEqual(offloadd.deepspeed.get_accelerator().device_name(), "cuda")
        del os.environ["OFFLOADD_DEVICE"]
        setup.set_installed({"device": "cpu"})
        self.assertEqual(self.options()["device"], "cpu")
        self.assertFalse(placement.uses_cuda())
        setup.set_installed({})
        os.environ["DS_ACCELERATOR"] = "cpu"
        self.assertNotIn("device", self.options())
        self.assertFalse(placement.uses_cuda())
        self.set_device.assert_not_called()

    def test_a_model_on_a_device_stays_there(self):
        with unittest.mock.patch.object(torch.nn.Parameter, "device", torch.device("cuda:1")):
            self.assertNotIn("device", self.options())

    def test_without_cuda_nothing_is_chosen(self):
        with unittest.mock.patch.object(torch.cuda, "is_available", lambda: False):
            self.assertNotIn("device", self.options())
            self.assertEqual(offloadd.deepspeed.get_accelerator().device_name(), "cpu")
            self.assertEqual(offloadd.deepspeed.get_accelerator().communication_backend_name(), "gloo")

    def test_more_ranks_than_devices(self):
        os.environ["LOCAL_RANK"] = "2"
        with self.assertRaisesRegex(offloadd.Error, "OFD-2001 LOCAL_RANK is 2, and CUDA shows 2 devices.*OFFLOADD_DEVICE=cuda:0"):
            self.options()

    def test_zero_init_builds_for_the_device(self):
        self.assertEqual(offloadd.deepspeed.zero.Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 1})._options()["device"], "cuda:0")

    def test_the_accelerator(self):
        accelerator = offloadd.deepspeed.get_accelerator()
        self.assertEqual((accelerator.device_name(), accelerator.device_name(1), accelerator.current_device_name()), ("cuda", "cuda:1", "cuda:1"))
        self.assertEqual((accelerator.device_count(), accelerator.current_device(), accelerator.is_available()), (2, 1, True))
        self.assertEqual((accelerator.communication_backend_name(), accelerator.manual_seed(3)), ("nccl", ("seeded", 3)))
        self.assertIs(accelerator.Stream, torch.cuda.Stream)
        self.assertIs(accelerator.Event, torch.cuda.Event)
        self.assertFalse(accelerator.is_synchronized_device() or accelerator.use_host_timers())
        accelerator.set_device(1)
        self.set_device.assert_called_once_with(1)
        with self.assertRaisesRegex(AttributeError, "OFD-1108"):
            accelerator.op_builder_dir()
        ours = {name for name in dir(type(accelerator)) if not name.startswith("_")}
        same_on_both = {"handles_memory_backpressure", "is_graph_supported", "get_compile_backend", "supported_dtypes", "random"}
        self.assertEqual(ours - {name for name in vars(type(accelerator))}, same_on_both)

    def test_communication(self):
        with unittest.mock.patch.object(torch.distributed, "init_process_group") as made, \
                unittest.mock.patch.object(torch.distributed, "is_nccl_available", lambda: True), \
                unittest.mock.patch.object(comm, "is_initialized", lambda: False):
            comm.init_distributed("nccl")
            comm.init_distributed("gloo")
            os.environ["OFFLOADD_DEVICE"] = "cpu"
            comm.init_distributed("nccl")
        self.assertEqual([call.args[0] for call in made.call_args_list], ["cpu:gloo,cuda:nccl", "gloo", "gloo"])

    def test_ranks_of_some_devices(self):
        flags = launcher.parser().parse_args(["--include", "localhost:2,3", "train.py"])
        self.assertEqual(launcher.environment_of(flags, 2, 1, 29500)["CUDA_VISIBLE_DEVICES"], "2,3")
        with unittest.mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "1"}):
            self.assertEqual(launcher.environment_of(flags, 2, 1, 29500)["CUDA_VISIBLE_DEVICES"], "1")

    def test_ranks_of_a_hostfile(self):
        def ranks(text, *flags):
            path = os.path.join(self.folder, "hostfile")
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            return launcher.rank_count(launcher.parser().parse_args([*flags, "--hostfile", path, "train.py"]))

        self.assertEqual(ranks("# ours\n\nlocalhost slots=3  # of 4\n"), 3)
        self.assertEqual(ranks("localhost\n"), 1)
        self.assertEqual(ranks("localhost slots=3\n", "--num_gpus", "2"), 2)
        self.assertEqual(ranks("localhost slots=3\n", "--include", "localhost:1"), 1)
        with self.assertRaisesRegex(offloadd.Error, "OFD-1104.*several machines"):
            ranks("a slots=1\nb slots=1\n")
        with self.assertRaisesRegex(offloadd.Error, "OFD-1002.*'localhost slots=all'"):
            ranks("localhost slots=all\n")


if __name__ == "__main__":
    unittest.main()
