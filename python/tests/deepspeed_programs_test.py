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

import torch

import cases
from programs import Programs

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

# What public examples (cifar10_deepspeed.py, DeepSpeed-Chat) import and ask, also where they have no experts and no adapters.
EXAMPLES = PROGRAM.replace("import deepspeed\n", """import deepspeed
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.moe.utils import has_moe_layers, split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd, save_without_random_ltd
""").replace("model_parameters=model.parameters()", """
    model_parameters=split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "parameters"})""") + """
engine.tput_timer.update_epoch_count()
assert engine.tput_timer.epoch_count == 1 and has_moe_layers(engine)[0] is False
nested = torch.nn.Sequential(model, torch.nn.Identity())
recursive_setattr(nested, "0.1", torch.nn.ReLU())
recursive_setattr(nested, "1", model)
assert recursive_getattr(nested, "0.1") is model[1] is nested[1][1] and isinstance(model[1], torch.nn.ReLU)

def refused(ask, number):
    try:
        ask()
    except Exception as error:
        assert str(number) in str(error), error
    else:
        raise SystemExit("nothing was refused")

refused(lambda: convert_to_random_ltd(engine, torch.nn.Linear), 1104)
saved = save_without_random_ltd(engine)
assert list(saved) == list(model.state_dict()) and all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
expert = torch.nn.Parameter(torch.ones(2))
expert.allreduce = False
refused(lambda: split_params_into_different_moe_groups_for_optimizer({"params": [expert]}), 1104)
refused(lambda: deepspeed.moe.layer.MoE, 1108)
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

# fp16 on several ranks, each of which computes what all of them have to have trained: sums of the ranks' gradients over fp32 masters.
FP16_RANKS = """
import argparse, json
import torch
import deepspeed

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--output")
args = parser.parse_args()
torch.set_num_threads(1)
deepspeed.init_distributed()
rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))

def loss_of(model, step, micro, rank):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 100 + micro * 10 + rank)).half()
    x = x * 30 if step == 5 and rank == 1 else x  # only this rank's gradients overflow
    return (model(x) - x).float().pow(2).mean()

model = make()
engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
mine = []
for step in range(12):
    scale, losses = optimizer.cur_scale, []
    for micro in range(2):
        loss = loss_of(engine, step, micro, rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    mine.append([scale, engine.get_global_grad_norm() if engine.was_step_applied() else None, losses])
told = [None] * ranks
deepspeed.comm.all_gather_object(told, mine)

plain = make().half()
masters = [torch.nn.Parameter(p.detach().float()) for p in plain.parameters()]
adam = torch.optim.AdamW(masters, lr=1e-2, fused=True, weight_decay=0.0)
for step in range(12):
    scale, sums = told[0][step][0], [None] * len(masters)
    for micro in range(2):
        for each in range(ranks):
            loss = loss_of(plain, step, micro, each)
            assert loss.item() == told[each][step][2][micro], (step, micro, each)
            plain.zero_grad()
            (loss / 2 * scale).backward()
            parts = [p.grad * (1 / ranks) for p in plain.parameters()]
            sums = [part if total is None else total + part for total, part in zip(sums, parts)]
    norm = None
    if all(total.isfinite().all() for total in sums):
        for master, total in zip(masters, sums):
            master.grad = total.float() / scale
        norm = torch.nn.utils.clip_grad_norm_(masters, 0.05).item()
        adam.step()
        with torch.no_grad():
            for p, master in zip(plain.parameters(), masters):
                p.copy_(master)
    assert [each[step][:2] for each in told] == [[scale, norm]] * ranks, (step, scale, norm, told)
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))
if rank == 0:
    with open(args.output, "w") as file:
        json.dump({"skipped": engine.skipped_steps, "overflowed": [step for step in range(12) if mine[step][1] is None]}, file)
"""

# What one rank writes into gathered parameters is the value of all. Every rank has the same batch, so that the average of their gradients
# is that of one process, to the bit.
GATHERED = """
import argparse, contextlib, json
import torch
import deepspeed
import offloadd
torch.set_num_threads(1)
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
parser.add_argument("--output")
args = parser.parse_args()
with open(args.deepspeed_config) as file:
    dtype = torch.bfloat16 if json.load(file).get("bf16") else torch.float32

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.GELU(), torch.nn.Linear(24, 16)).to(dtype)

model = make()
engine, *_ = deepspeed.initialize(args, model, model_parameters=model.parameters())
rank, plain = deepspeed.comm.get_rank(), make()
masters = list(plain.parameters()) if dtype == torch.float32 else [torch.nn.Parameter(p.detach().float()) for p in plain.parameters()]
adam = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, fused=True)

def step(number):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).to(dtype)
    losses = [engine(x).float().square().mean(), plain(x).float().square().mean()]
    assert losses[0].item() == losses[1].item(), number
    engine.backward(losses[0]), losses[1].backward()
    engine.step()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    for master, p in zip(masters, plain.parameters()):
        master.grad = p.grad.float()
    adam.step()
    with torch.no_grad():
        [p.copy_(master) for master, p in zip(masters, plain.parameters()) if master is not p]
    plain.zero_grad()

def whole(ps):
    ps[0].copy_(torch.full(ps[0].shape, 0.25))

def view(ps):
    ps[0][0].fill_(0.5)
    ps[0].view(-1)[::3] = -0.25

def data(ps):
    ps[0].data.mul_(0.5)
    ps[1].data.view(-1)[0] += 1

def drawn(ps):
    torch.nn.init.uniform_(ps[0], -0.1, 0.1, generator=torch.Generator().manual_seed(5))

def lists(ps):
    torch._foreach_mul_(ps, 0.5)

def array(ps):
    if dtype == torch.float32:
        ps[0].detach().numpy()[1] = 0.125

def nothing(ps):
    pass

def check():
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert torch.equal(ours, theirs), (rank, write.__name__, modifier)

write, modifier = nothing, 0
step(0)
for number, write in enumerate((whole, view, data, drawn, lists, array, nothing)):
    for modifier in (0, 1):
        params = list(model.parameters())
        with deepspeed.zero.GatheredParameters(params if number % 2 else params[:2], modifier_rank=modifier), torch.no_grad():
            if rank == modifier:
                write(params[:2])
            elif number % 2:
                params[0].fill_(9)  # which counts for nobody
                assert params[0].min() == 9
            with deepspeed.zero.GatheredParameters(params[0], modifier_rank=modifier):
                pass
        before = [p.detach().clone() for p in plain.parameters()]
        with torch.no_grad():
            write(list(plain.parameters())[:2])
            if dtype != torch.float32:
                [master.copy_(p) for master, p, old in zip(masters, plain.parameters(), before) if not torch.equal(p, old)]
        check()
        step(2 * number + modifier + 1)
        check()

def refused(text, call):
    try:
        call()
    except offloadd.Error as error:
        assert text in str(error), error
    else:
        assert False, text

weight = model[0].weight
utils, odd = deepspeed.utils, model[0].bias  # of 24 elements: 12 each
part = utils.safe_get_local_fp32_param(odd)
assert torch.equal(part, utils.safe_get_full_fp32_param(odd)[12 * rank:12 * rank + 12])
if dtype == torch.float32:
    utils.safe_set_local_fp32_param(odd, part + rank)
    with torch.no_grad():
        plain[0].bias[12:] += 1
    check()

with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
    refused("OFD-1002 engine.step() inside of GatheredParameters", engine.step)
    refused("OFD-1002 GatheredParameters(modifier_rank=1) inside", deepspeed.zero.GatheredParameters([odd, weight], modifier_rank=1).__enter__)
with deepspeed.zero.GatheredParameters(odd, modifier_rank=0):
    pass  # what was refused holds nothing
with contextlib.suppress(KeyError), deepspeed.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
    weight.fill_(7)
    raise KeyError
check()
deepspeed.comm.barrier()
if rank == 0:
    with open(args.output, "w") as file:
        json.dump(engine.handle.step, file)
"""

# Children that drop what they have of their parent's model, in the ways that there are.
FORKS = """
import gc, multiprocessing, os, sys
import torch
import deepspeed
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={"train_batch_size": 8, "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})

def train(seed):
    loss = engine(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))).square().mean()
    engine.backward(loss)
    engine.step()

def drops():
    global engine, model
    del engine, model
    gc.collect()

def ends():
    engine.destroy()

def nothing():
    pass

train(0)
codes = []
for act in (drops, ends, nothing):
    child = os.fork()
    if child == 0:
        act()
        sys.exit(4)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
process = multiprocessing.get_context("fork").Process(target=drops)
process.start()
process.join()
train(1)
print(codes, process.exitcode, engine.handle.step)
"""

# Children that train, one model after the other and one model again, as those of a notebook's launcher.
TRAINING_FORKS = """
import os, sys
import torch
import deepspeed
torch.set_num_threads(1)

def train(model):
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={"train_batch_size": 8, "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})
    for seed in range(2):
        loss = engine(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))).square().mean()
        engine.backward(loss)
        engine.step()
    return engine, loss.item()

def train_twice():
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    _, first = train(model)
    engine, second = train(model)
    engine.destroy()
    return first, second

if len(sys.argv) > 1:
    engine, _ = train(torch.nn.Linear(16, 16))
child = os.fork()
if child == 0:
    print(train_twice(), flush=True)
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
print(train_twice())
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
config = {"zero_optimization": {"stage": int(os.environ.get("STAGE", "3")), "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"},
                                "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                                "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": True},
          "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
          "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
if os.environ.get("FP16"):
    config["fp16"] = {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 22, "loss_scale_window": 3, "hysteresis": 1}
more = {"use_cpu": True} if mode == "memory" else {"deepspeed": config, "fp16": bool(os.environ.get("FP16"))}
args = TrainingArguments(folder, report_to=[], max_steps=int(steps), per_device_train_batch_size=2,
                         gradient_accumulation_steps=int(os.environ.get("ACCUMULATION", "2")),
                         disable_tqdm=True, save_strategy="steps", save_steps=2, logging_steps=1, learning_rate=1e-3, **more)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                     num_key_value_heads=1, tie_word_embeddings="TIED" in os.environ))
if os.environ.get("STAGE") == "3":  # what is loaded behind `args` is built by zero.Init
    model.save_pretrained(os.path.join(folder, "first"))
    model = LlamaForCausalLM.from_pretrained(os.path.join(folder, "first"))
torch.manual_seed(1)
data = [{"input_ids": (x := torch.randint(128, (8,))), "labels": x} for _ in range(64)]
trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:4])
trainer.train(resume_from_checkpoint=sys.argv[4] if len(sys.argv) > 4 else None)
if "AGAIN" in os.environ:  # with an optimizer of its own, as with DeepSpeed
    trainer.optimizer = None
    trainer.train()
told = [[h["loss"], h.get("grad_norm"), h["learning_rate"]] for h in trainer.state.log_history if "loss" in h]
told.append(trainer.evaluate()["eval_loss"])
trainer.save_model(os.path.join(folder, "final"))
if trainer.is_world_process_zero():
    from safetensors.torch import load_file
    weights = load_file(os.path.join(folder, "final", "model.safetensors"))
    told += [{name: value.flatten().tolist() for name, value in sorted(weights.items())}, args.world_size]
    with open(os.path.join(folder, "told.json"), "w") as file:
        json.dump(told, file)
"""


# fit(), test(), a fit() that goes on from a checkpoint, and the file that Lightning makes of that.
LIGHTNING = """
import json, os, sys
import torch
mode, folder = sys.argv[1:3]
if mode == "installed":
    import offloadd.deepspeed
    offloadd.deepspeed.install()
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
torch.set_num_threads(1)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.told = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)), []

    def training_step(self, batch, index):
        loss = (self.net(batch) - batch).square().mean()
        self.told.append(loss.item())
        return loss

    test_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2, fused=True)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)), "interval": "step"}]

def trainer(steps):
    return lightning.Trainer(accelerator="cpu", devices=1, strategy="auto" if mode == "memory" else "deepspeed_stage_3", max_steps=steps, logger=False,
                             enable_progress_bar=False, gradient_clip_val=0.5, default_root_dir=folder, use_distributed_sampler=False,
                             callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)])

data = torch.utils.data.DataLoader(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)
first, again = Module(), Module()
whole = trainer(4)
whole.fit(first, data)
whole.test(first, data)
checkpoint = os.path.join(folder, "step=2.ckpt")
trainer(4).fit(again, data, ckpt_path=checkpoint, weights_only=False)
if mode == "installed":
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
    convert_zero_checkpoint_to_fp32_state_dict(checkpoint, os.path.join(folder, "whole.ckpt"))
    checkpoint = os.path.join(folder, "whole.ckpt")
kept = torch.load(checkpoint, weights_only=False)
with open(os.path.join(folder, "told.json"), "w") as file:
    json.dump([first.told, again.told, {name: value.tolist() for name, value in kept["state_dict"].items()}, kept["global_step"]], file)
"""


def prepare_program():
    """Imports what every program here does."""
    import offloadd.deepspeed

    _ = offloadd.deepspeed.__version__, torch.distributed
    if importlib.util.find_spec("transformers"):
        importlib.import_module("transformers.utils")


def prepare_trainer():
    """The Trainer looks for deepspeed once, when it is imported: here there is none."""
    import transformers

    _ = transformers.Trainer, transformers.LlamaForCausalLM


def prepare_installed_trainer():
    import offloadd.deepspeed

    offloadd.deepspeed.install()
    prepare_trainer()


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
        """A fresh interpreter, which imports what there is."""
        done = subprocess.run([sys.executable, *arguments], env={**self.environment, **environment}, capture_output=True, text=True,
                              timeout=300, check=False)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done

    def run_forked(self, *arguments, of=None, status=0, **environment):
        """What has imported it already."""
        done = (of or programs).run(*arguments, timeout=300, **{**self.environment, **environment})
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done

    def read(self, name):
        with open(os.path.join(self.folder, name), encoding="utf-8") as file:
            return json.load(file)

    def plain(self):
        self.run_forked("-c", PLAIN, os.path.join(self.folder, "plain.json"))
        return self.read("plain.json")

    def launch(self, *flags, program_flags=(), status=0, run=None):
        return (run or self.run_forked)("-m", "offloadd.deepspeed", *flags, self.program, "--deepspeed", "--deepspeed_config", self.config,
                               "--output", os.path.join(self.folder, "told.json"), *program_flags, status=status)

    def test_one_rank_is_the_plain_loop(self):
        self.launch("--num_gpus", "1", run=self.run_python)
        told, plain = self.read("told.json"), self.plain()
        self.assertEqual([told["losses"], told["weights"]], [plain["losses"], plain["weights"]])
        self.assertEqual(told["rank"], [0, 1])
        self.assertEqual(os.listdir(self.pool), [], "the run's own job is deleted at its end")

    def test_programs_in_the_manner_of_public_examples(self):
        self.program = self.write("example.py", EXAMPLES)
        self.launch()
        told, plain = self.read("told.json"), self.plain()
        self.assertEqual([told["losses"], told["weights"]], [plain["losses"], plain["weights"]])

    def test_two_ranks_train_the_same_model(self):
        self.launch("--include", "localhost:0,1", "--no_local_rank")
        told, plain = self.read("told.json"), self.plain()
        self.assertEqual(told["rank"], [-1, 2])
        for here, there in zip(told["weights"], plain["weights"]):
            self.assertLess(max(abs(a - b) for a, b in zip(here, there)), 1e-4, "sums of two halves are rounded otherwise")

    def test_a_rank_that_fails_ends_all_with_its_status(self):
        self.launch("--num_gpus", "2", program_flags=["--fail_at", "2"], status=3)

    def test_fp16_on_two_ranks(self):
        self.program = self.write("fp16.py", FP16_RANKS)
        self.config = self.write("fp16.json", json.dumps({
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.05,
            "fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}))
        self.launch("--num_gpus", "2")
        told = self.read("told.json")
        self.assertEqual(told["skipped"], len(told["overflowed"]))
        self.assertIn(5, told["overflowed"], "where one rank's gradients overflow no rank steps")

    def test_what_one_rank_writes_into_gathered_parameters_is_for_all(self):
        self.program = self.write("gathered.py", GATHERED)
        for dtype in ({}, {"bf16": {"enabled": True}}):
            self.config = self.write("gathered.json", json.dumps({
                "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.5, **dtype, "zero_optimization": {"stage": 3},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}))
            self.launch("--num_gpus", "2")
            self.assertEqual(self.read("told.json"), 15)

    def test_forked_children_end_silently(self):
        done = self.run_forked("-m", "offloadd.deepspeed", self.write("forks.py", FORKS))
        self.assertEqual(done.stdout, "[4, 4, 4] 0 2\n")
        self.assertNotIn("OFD-", done.stderr)
        self.assertEqual(os.listdir(self.pool), [], "the parent has deleted its job")

    def test_forked_children_train(self):
        for flags in ([], ["after the parent"]):
            done = self.run_forked("-m", "offloadd.deepspeed", self.write("forks.py", TRAINING_FORKS), *flags)
            child, parent = done.stdout.splitlines()
            self.assertEqual(child, parent)
            self.assertNotIn("OFD-", done.stderr)
            self.assertEqual(os.listdir(self.pool), [], "each has deleted its jobs")

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
            self.run_forked("-c", TRAINER, mode, folder, *arguments, of=trainers[mode], **environment)
            return self.read(os.path.join(folder, "told.json"))

        memory = told("memory", "memory", "4")
        self.assertEqual(told("installed", "offloaded", "4"), memory)
        first = os.path.join(self.folder, "offloaded", "checkpoint-2")
        self.assertEqual(told("installed", "resumed", "4", first)[-3:], memory[-3:], "as if it had not been interrupted")
        tied = told("memory", "tied_memory", "2", TIED="1", AGAIN="1")
        for stage in ("2", "3"):
            self.assertEqual(told("installed", f"tied{stage}", "2", TIED="1", AGAIN="1", STAGE=stage), tied, stage)
        in_memory = told("installed", "fp16_memory", "8", FP16="1", OFFLOADD_DISABLE="1")
        self.assertEqual(told("installed", "fp16", "8", FP16="1"), in_memory)
        at = [step[2] for step in in_memory[:-3]]
        self.assertLess(len(set(at)), len(at), "the schedule has waited for steps that were skipped")

    @unittest.skipUnless(importlib.util.find_spec("lightning"), "lightning is not installed: its strategy is not tested")
    def test_lightning_with_its_strategy(self):
        told = []
        for mode in ("memory", "installed"):
            folder = os.path.join(self.folder, mode)
            os.mkdir(folder)
            self.run_python("-c", LIGHTNING, mode, folder)
            told.append(self.read(os.path.join(folder, "told.json")))
        self.assertEqual(*told)

    @unittest.skipUnless(importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"),
                         "transformers and accelerate are not installed: the Trainer is not tested")
    def test_two_ranks_of_the_trainer_share_the_data(self):
        """As with DistributedDataParallel in memory. Without a GPU Accelerate has to be told that there are ranks."""
        program, told = self.write("trainer.py", TRAINER), {}
        for mode in ("memory", "installed"):
            folder = os.path.join(self.folder, mode)
            self.run_forked("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, mode, folder, "2",
                            of=trainers[mode], ACCUMULATION="1", STAGE="2", OMP_NUM_THREADS="1")
            told[mode] = self.read(os.path.join(folder, "told.json"))
        self.assertEqual(told["installed"], told["memory"])
        self.assertEqual(told["memory"][-1], 2)


if __name__ == "__main__":
    programs = Programs(prepare_program)
    trainers = {"memory": Programs(prepare_trainer), "installed": Programs(prepare_installed_trainer)}
    cases.run_unit_tests(sys.modules[__name__])
