"""Checkpoints of every kind together: at the ends of intervals, by steps or by the clock, asked for, waited for, snapshots, closed runs.
Losses and norms are those in memory, clipped steps among them, and a snapshot holds the weights of its step, bit for bit, also later.

    checkpoints_test.py [SEED...]
"""

import os
import random
import sys
import tempfile

import torch
from safetensors.torch import load_file

import offloadd
from offloadd import control, in_memory

WIDTH, LAYERS, STEPS, LIVES = 320, 3, 14, 3
# Of `ram` everything is spilled and passes, some stays, all stays.
CASES = [(torch.float32, "45MiB", "checkpoint:2"), (torch.bfloat16, "60MiB", "checkpoint:1s"), (torch.float32, "100MiB", "checkpoint:5")]
ACTIONS = ["nothing", "nothing", "checkpoint", "checkpoint", "checkpoint twice", "snapshot", "checkpoint, snapshot", "wait", "delete"]


def make(dtype):
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, 900), torch.nn.GELU(), torch.nn.Linear(900, WIDTH)) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def train(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    data = torch.randn(4, WIDTH, generator=generator).to(next(model.parameters()).dtype)
    loss = (model(data) - data).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05 if step % 3 == 0 else 1e3)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def in_memory_run(dtype):
    """Loss and norm of each step, and the weights after it."""
    model, optimizer = make(dtype)
    handle = in_memory.Handle([model], [optimizer], {"job": "memory"})
    told, weights = [], []
    for step in range(STEPS):
        told.append(train(model, optimizer, step))
        weights.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    handle.close()
    assert any(norm > 0.05 for _, norm in told[::3]), "nothing is clipped"
    return told, weights


class Run:
    def __init__(self, seed, folder):
        self.random, self.folder, self.job = random.Random(seed), folder, f"job{seed}"
        self.dtype, self.ram, self.durability = CASES[seed % len(CASES)]
        self.told, self.weights = in_memory_run(self.dtype)
        self.snapshots, self.done = {}, []

    def act(self, handle, step):
        action = self.random.choice(ACTIONS)
        self.done.append((step, action))
        for _ in range(2 if "twice" in action else 1):
            if "checkpoint" in action:
                assert handle.checkpoint() == step + 1
        if "snapshot" in action and len(self.snapshots) < 2:
            handle.snapshot(f"after{step}")
            self.snapshots[f"after{step}"] = step
        if action == "wait":
            handle.wait_durable()
            assert handle.statistics()["durable_step"] == step + 1
        if action == "delete" and self.snapshots:
            name = self.random.choice(list(self.snapshots))
            del self.snapshots[name]
            control.run("snapshot", "rm", self.folder, self.job, name, "--yes")

    def check_snapshots(self):
        for name, step in self.snapshots.items():
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                control.run("export", self.folder, self.job, os.path.join(folder, "weights"), "--snapshot", name)
                found = load_file(os.path.join(folder, "weights", "model.safetensors"))
                for key, value in self.weights[step].items():
                    assert torch.equal(found[key], value), f"{name}: {key}; {self.done}"

    def live(self, begin, end):
        model, optimizer = make(self.dtype)
        handle = offloadd.attach(model, optimizer, nvme_path=self.folder, ram=self.ram, job=self.job, durability=self.durability, generations=2)
        assert handle.step == begin, (handle.step, begin, self.done)
        for step in range(begin, end):
            told = train(model, optimizer, step)
            assert told == self.told[step], f"step {step}: {told} instead of {self.told[step]}; {self.done}"
            self.act(handle, step)
        self.check_snapshots()
        handle.close()

    def run(self):
        ends = sorted(self.random.sample(range(1, STEPS), LIVES - 1)) + [STEPS]
        for begin, end in zip([0, *ends], ends):
            self.live(begin, end)


def main():
    torch.set_num_threads(1)
    for seed in [int(text) for text in sys.argv[1:]] or range(len(CASES)):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder:
            run = Run(seed, folder)
            run.run()
            print(f"seed {seed}, {run.dtype}, {run.ram}, {run.durability}: equal; {run.done}", flush=True)


if __name__ == "__main__":
    main()
