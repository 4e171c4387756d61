"""Universal checkpoints between offloadd and DeepSpeed itself, where that is installed (tools/bench --against deepspeed does it, into
build/deepspeed): what `offloadctl export --universal` writes is loaded by DeepSpeed at each stage, what its ds_to_universal.py writes by
the handle. Values are compared bit for bit."""

import os
import subprocess
import tempfile
import unittest

import torch

import offloadd
from offloadd import control

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
ENVIRONMENT = os.environ.get("OFFLOADD_DEEPSPEED_ENVIRONMENT", os.path.join(ROOT, "build", "deepspeed"))
STEPS, MORE = 3, 3

MODEL = """
import torch
def build(dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.LayerNorm(24), torch.nn.GELU(), torch.nn.Linear(24, 5, bias=False))
    return model.to(dtype)
def loss_of(model, step, dtype):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
    return model(x).float().pow(2).mean()
"""

# argv: stage, type, folder of ours, folder for its own, result, port
PROGRAM = MODEL + """
import os, sys
stage, dtype, given, made, result, port = int(sys.argv[1]), getattr(torch, sys.argv[2]), *sys.argv[3:]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
import deepspeed
from deepspeed.checkpoint import ds_to_universal

def engine(universal):
    model = build(torch.float32)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "bf16": {"enabled": dtype == torch.bfloat16},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "checkpoint": {"load_universal": universal},
              "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

def values(engine):
    # The getters of stages 1 and 2 give a moment for the master after a universal checkpoint was loaded.
    told, optimizer = {}, engine.optimizer
    for name, p in engine.module.named_parameters():
        if stage == 3:
            told[name] = {"fp32": optimizer.get_full_hp_param(p) if hasattr(optimizer, "get_full_hp_param") else
                          deepspeed.utils.safe_get_full_fp32_param(p)}
            told[name] |= {key: deepspeed.utils.safe_get_full_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq")}
        else:
            flat, at = optimizer.single_partition_of_fp32_groups[0], p._hp_mapping.get_hp_fragment_address()
            state = optimizer.optimizer.state[flat]
            told[name] = {key: whole.detach().narrow(0, at.start, at.numel).clone().view(p.shape)
                          for key, whole in {"fp32": flat, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}.items()}
        told[name] = {key: value.detach().clone() for key, value in told[name].items()}
    return told

def train(engine, first, steps):
    told = []
    for step in range(first, first + steps):
        loss = loss_of(engine, step, dtype)
        engine.backward(loss)
        engine.step()
        told.append(loss.item())
    return told

own = engine(False)
train(own, 0, 3)
own_values = values(own)
own.save_checkpoint(os.path.join(made, "checkpoint"))
more = train(own, 3, 3)
arguments = ["--input_folder", os.path.join(made, "checkpoint", "global_step3"), "--output_folder", os.path.join(made, "global_step3_universal")]
sys.argv[1:] = arguments + (["--inject_missing_state"] if stage < 3 else [])
ds_to_universal.main(ds_to_universal.parse_arguments())
its = engine(True)
path, _ = its.load_checkpoint(made)
assert path is not None
again = values(its)
loaded = engine(True)
path, _ = loaded.load_checkpoint(given)
assert path is not None and loaded.global_steps == 3
told = {"own": own_values, "again": again, "more": more, "more again": train(its, 3, 3), "loaded": values(loaded), "losses": train(loaded, 3, 3)}
torch.save(told, result)
"""

namespace = {}
exec(MODEL, namespace)


def values_of(handle, names):
    planes = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    return {name: {key: handle.gather(name, plane).float() for key, plane in planes.items()} for name in names}


@unittest.skipUnless(os.path.exists(os.path.join(ENVIRONMENT, "installed")), f"DeepSpeed is not installed in {ENVIRONMENT}: nothing to compare with")
class DeepSpeedUniversalTest(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR") or None)
        self.folder = self.temporary.name
        self.addCleanup(self.temporary.cleanup)

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def attached(self, dtype, job):
        model = namespace["build"](dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return model, optimizer, offloadd.attach(model, optimizer, nvme_path=self.folder, ram="128MiB", job=job)

    def exported(self, dtype):
        """Trains, and writes a universal checkpoint without the trainer; its values."""
        model, optimizer, handle = self.attached(dtype, "there")
        for step in range(STEPS):
            namespace["loss_of"](model, step, dtype).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        values = values_of(handle, [name for name, _ in model.named_parameters()])
        handle.close()
        control.run("export", self.folder, "there", self.path("ours"), "--universal")
        return values

    def deepspeed(self, stage, dtype, port):
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OFFLOADD_POOL")}
        environment.update(TORCH_EXTENSIONS_DIR=os.path.join(ENVIRONMENT, "operators"), OMP_NUM_THREADS="1",
                           PATH=os.path.join(ENVIRONMENT, "bin") + os.pathsep + os.environ["PATH"])
        program = self.path("program.py")
        with open(program, "w", encoding="utf-8") as file:
            file.write(PROGRAM)
        done = subprocess.run([os.path.join(ENVIRONMENT, "bin", "python"), program, str(stage), str(dtype).removeprefix("torch."),
                               self.path("ours"), self.path("theirs"), self.path("told.pt"), str(port)],
                              cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-4000:])
        return torch.load(self.path("told.pt"))

    def assert_equal_values(self, here, there):
        self.assertEqual(list(here), list(there))
        for name, planes in here.items():
            for key, value in planes.items():
                self.assertTrue(torch.equal(value, there[name][key]), f"{name} {key}")

    def both_ways(self, stage, dtype):
        values = self.exported(dtype)
        told = self.deepspeed(stage, dtype, 29700 + 10 * stage + (dtype == torch.float32))
        self.assert_equal_values(values, told["loaded"])
        self.assertEqual(len(set(told["losses"])), MORE)
        self.assertNotEqual(told["losses"], told["more"], "other values of the same model")
        self.assert_equal_values(told["own"], told["again"])  # DeepSpeed reads its own
        self.assertEqual(told["more"], told["more again"])
        _, optimizer, handle = self.attached(dtype, "here")
        with handle:
            handle.load_universal(self.path("theirs"))
            self.assert_equal_values(told["own"], values_of(handle, list(told["own"])))
            self.assertEqual({float(state["step"]) for state in optimizer.state.values()}, {float(STEPS)})

    def test_stage_1(self):
        self.both_ways(1, torch.bfloat16)

    def test_stage_2(self):
        self.both_ways(2, torch.bfloat16)

    def test_stage_3(self):
        self.both_ways(3, torch.bfloat16)

    def test_stage_3_in_fp32(self):
        self.both_ways(3, torch.float32)


if __name__ == "__main__":
    unittest.main()
