"""What tests of DeepSpeed's programs have in common: a small model, the loop with an engine, and the same loop of plain torch."""

import os
import tempfile
import unittest

import torch

import offloadd
import offloadd.deepspeed

WIDTH = 32
RAM = "64MiB"


class Net(torch.nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = torch.nn.Embedding(64, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 64, bias=False)
        self.register_buffer("calls", torch.zeros(1))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        self.calls += 1
        x = self.embed(ids)
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return torch.nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.roll(1, 1).flatten())


def make(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return Net(**options).to(dtype)


def batch(i):
    return torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(i))


def copies(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Masters:
    """The plain loop's optimizer for bf16: fp32 masters and moments, cast back."""

    def __init__(self, model, make_optimizer):
        self.pairs = [(p, torch.nn.Parameter(p.detach().float())) for p in model.parameters()]
        self.optimizer = make_optimizer([master for _, master in self.pairs])
        self.param_groups, self.defaults = self.optimizer.param_groups, self.optimizer.defaults

    def step(self):
        for p, master in self.pairs:
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for p, master in self.pairs:
                p.copy_(master)

    def zero_grad(self):
        for p, _ in self.pairs:
            p.grad = None


def plain(model, optimizer, steps, micro=1, clip=None, scheduler=None, first=0):
    """The loop in memory."""
    told = []
    for step in range(first, first + steps):
        for k in range(micro):
            loss = model(batch(step * micro + k))
            (loss / micro if micro > 1 else loss).backward()
            told.append(loss.item())
        if clip:
            told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        told.append(optimizer.param_groups[0]["lr"])
    return told


def engine_loop(engine, steps, micro=1, clip=None, first=0):
    told = []
    for step in range(first, first + steps):
        for k in range(micro):
            loss = engine(batch(step * micro + k))
            engine.backward(loss)
            engine.step()
            told.append(loss.item())
        if clip:
            told.append(engine.get_global_grad_norm())
        told.append(engine.get_lr()[0])
    return told


class DeepSpeedCase(unittest.TestCase):
    """What the tests of engines begin with."""

    def setUp(self):
        torch.set_num_threads(1)
        self.folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR") or None)
        self.pool = os.path.join(self.folder.name, "pool")
        os.mkdir(self.pool)
        os.environ["OFFLOADD_RAM"] = RAM
        for name in ("OFFLOADD_POOL", "OFFLOADD_JOB", "OFFLOADD_CONFIG"):
            os.environ.pop(name, None)
        self.engines = []

    def tearDown(self):
        for engine in self.engines:
            engine.destroy()
        offloadd.deepspeed.setup.set_installed({})
        self.folder.cleanup()

    def config(self, **changes):
        whole = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0,
                 "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
                 "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": self.pool},
                                       "offload_optimizer": {"device": "nvme", "nvme_path": self.pool}}}
        whole.update(changes)
        return {key: value for key, value in whole.items() if value is not None}

    def initialize(self, model, config, **others):
        others.setdefault("model_parameters", None if "optimizer" in others else model.parameters())
        made = offloadd.deepspeed.initialize(model=model, config=config, **others)
        self.engines.append(made[0])
        return made

    def check_equal(self, here, there):
        for name, value in there.state_dict().items():
            self.assertTrue(torch.equal(here.state_dict()[name], value), name)

    def check(self, config, make_optimizer, make_scheduler=None, steps=4, micro=1, clip=None, dtype=torch.float32, **options):
        """One configuration against the plain loop."""
        here, there = make(**options), make(dtype, **options)
        engine, _, _, _ = self.initialize(here, config)
        optimizer = make_optimizer(there.parameters()) if dtype == torch.float32 else Masters(there, make_optimizer)
        scheduler = make_scheduler(optimizer) if make_scheduler else None
        self.assertEqual(engine_loop(engine, steps, micro, clip), plain(there, optimizer, steps, micro, clip, scheduler))
        self.check_equal(here, there)
        self.assertEqual(engine.global_steps, steps)
        return engine

    def jobs(self):
        return sorted(name for name in os.listdir(self.pool) if name.endswith(".offload"))

    @staticmethod
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)
