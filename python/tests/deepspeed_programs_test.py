"""Programs and libraries that know nothing of offloadd: the launcher, the wheel that owns the name, and transformers' Trainer with
deepspeed=ds_config.json."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import unittest

HERE = os.path.dirname(os.path.realpath(__file__))
WHEEL_TOOL = os.path.join(HERE, "../../tools/deepspeed_wheel")

# An ordinary program for DeepSpeed, which says what it has seen as JSON.
PROGRAM = """
import argparse, json, os, sys
import torch
import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--fail_at", type=int, default=-1)
parser.add_argument("--output")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
deepspeed.init_distributed()
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
losses = []
for step in range(4):
    if step == args.fail_at and rank == ranks - 1:
        sys.exit(3)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
    loss = (engine(x) - x).pow(2).mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if rank == 0:
    with open(args.output, "w") as file:
        json.dump({"losses": losses, "weights": [p.detach().clone().flatten().tolist() for p in model.parameters()],
                   "rank": [args.local_rank, ranks]}, file)
"""

PLAIN = """
import json, sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
losses = []
for step in range(4):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    loss = (model(x) - x).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
with open(sys.argv[1], "w") as file:
    json.dump({"losses": losses, "weights": [p.detach().flatten().tolist() for p in model.parameters()]}, file)
"""

# The Trainer's own optimizer and schedule, so that the same program trains in memory without deepspeed=.
TRAINER = """
import json, os, sys
import torch
mode, folder, steps = sys.argv[1:4]
if mode == "installed":
    import offloadd.deepspeed
    offloadd.deepspeed.install()
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.set_num_threads(1)
config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"},
                                "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                                "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": True},
          "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
          "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
if os.environ.get("FP16"):
    config["fp16"] = {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 22, "loss_scale_window": 3, "hysteresis": 1}
more = {"use_cpu": True} if mode == "memory" else {"deepspeed": config, "fp16": bool(os.environ.get("FP16"))}
args = TrainingArguments(folder, report_to=[], max_steps=int(steps), per_device_train_batch_size=2, gradient_accumulation_steps=2,
                         disable_tqdm=True, save_strategy="steps", save_steps=2, logging_steps=1, learning_rate=1e-3, **more)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                     num_key_value_heads=1))
torch.manual_seed(1)
data = [{"input_ids": (x := torch.randint(128, (8,))), "labels": x} for _ in range(64)]
trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:4])
trainer.train(resume_from_checkpoint=sys.argv[4] if len(sys.argv) > 4 else None)
told = [[h["loss"], h.get("grad_norm"), h["learning_rate"]] for h in trainer.state.log_history if "loss" in h]
told.append(trainer.evaluate()["eval_loss"])
trainer.save_model(os.path.join(folder, "final"))
from safetensors.torch import load_file
weights = load_file(os.path.join(folder, "final", "model.safetensors"))
told.append({name: value.flatten().tolist() for name, value in sorted(weights.items())})
with open(os.path.join(folder, "told.json"), "w") as file:
    json.dump(told, file)
"""


class ProgramsTest(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR") or None)
        self.folder = self.temporary.name
        self.pool = os.path.join(self.folder, "pool")
        os.mkdir(self.pool)
        self.environment = {**os.environ, "OFFLOADD_POOL": self.pool, "OFFLOADD_RAM": "64MiB"}
        self.program = self.write("train.py", PROGRAM)
        self.config = self.write("ds_config.json", json.dumps({
            "train_batch_size": 8, "gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}))

    def tearDown(self):
        self.temporary.cleanup()

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(textwrap.dedent(text))
        return path

    def run_python(self, *arguments, status=0, **environment):
        done = subprocess.run([sys.executable, *arguments], env={**self.environment, **environment}, capture_output=True, text=True,
                              timeout=300, check=False)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done

    def read(self, name):
        with open(os.path.join(self.folder, name), encoding="utf-8") as file:
            return json.load(file)

    def plain(self):
        self.run_python("-c", PLAIN, os.path.join(self.folder, "plain.json"))
        return self.read("plain.json")

    def launch(self, *flags, program_flags=(), status=0):
        return self.run_python("-m", "offloadd.deepspeed", *flags, self.program, "--deepspeed", "--deepspeed_config", self.config,
                               "--output", os.path.join(self.folder, "told.json"), *program_flags, status=status)

    def test_one_rank_is_the_plain_loop(self):
        self.launch("--num_gpus", "1")
        told, plain = self.read("told.json"), self.plain()
        self.assertEqual([told["losses"], told["weights"]], [plain["losses"], plain["weights"]])
        self.assertEqual(told["rank"], [0, 1])
        self.assertEqual(os.listdir(self.pool), [], "the run's own job is deleted at its end")

    def test_two_ranks_train_the_same_model(self):
        self.launch("--include", "localhost:0,1", "--no_local_rank")
        told, plain = self.read("told.json"), self.plain()
        self.assertEqual(told["rank"], [-1, 2])
        for here, there in zip(told["weights"], plain["weights"]):
            self.assertLess(max(abs(a - b) for a, b in zip(here, there)), 1e-4, "sums of two halves are rounded otherwise")

    def test_a_rank_that_fails_ends_all_with_its_status(self):
        self.launch("--num_gpus", "2", program_flags=["--fail_at", "2"], status=3)

    def test_what_the_launcher_does_not_do_is_refused(self):
        for flags in (["--num_nodes", "2"], ["--autotuning", "run"], ["--exclude", "localhost:0"], ["--num_gpus", "0"]):
            self.assertRegex(self.launch(*flags, status=2).stderr, "OFD-1(104|002)")

    def test_the_wheel_owns_the_name(self):
        made = subprocess.run([WHEEL_TOOL, self.folder], capture_output=True, text=True, check=True).stdout.strip()
        site = os.path.join(self.folder, "site")
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, made], check=True)
        self.assertTrue(os.path.exists(os.path.join(site, "bin", "deepspeed")))
        path = os.pathsep.join([site, os.environ.get("PYTHONPATH", "")])
        self.run_python(self.program, "--deepspeed_config", self.config, "--output", os.path.join(self.folder, "told.json"), PYTHONPATH=path)
        self.assertEqual(self.read("told.json")["losses"], self.plain()["losses"])
        found = self.run_python("-c", "import importlib.metadata as m; print(m.version('deepspeed'))\nimport deepspeed.comm as c; print(c.__name__)",
                                PYTHONPATH=path)
        self.assertEqual(found.stdout.split(), ["0.19.6+offloadd", "offloadd.deepspeed.comm"])

    @unittest.skipUnless(importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"),
                         "transformers and accelerate are not installed: the Trainer is not tested")
    def test_the_trainer_with_a_configuration(self):
        def told(mode, folder, *arguments, **environment):
            folder = os.path.join(self.folder, folder)
            self.run_python("-c", TRAINER, mode, folder, *arguments, **environment)
            return self.read(os.path.join(folder, "told.json"))

        memory = told("memory", "memory", "4")
        self.assertEqual(told("installed", "offloaded", "4"), memory)
        first = os.path.join(self.folder, "offloaded", "checkpoint-2")
        self.assertEqual(told("installed", "resumed", "4", first)[-2:], memory[-2:], "as if it had not been interrupted")
        in_memory = told("installed", "fp16_memory", "8", FP16="1", OFFLOADD_DISABLE="1")
        self.assertEqual(told("installed", "fp16", "8", FP16="1"), in_memory)
        at = [step[2] for step in in_memory[:-2]]
        self.assertLess(len(set(at)), len(at), "the schedule has waited for steps that were skipped")


if __name__ == "__main__":
    unittest.main()
