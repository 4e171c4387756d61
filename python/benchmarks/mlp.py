"""Trains a stack of residual blocks, in memory, with offloadd or with DeepSpeed, on the same numbers, and prints a line of JSON for
every step. tools/bench --against deepspeed runs it, each time in a process of its own.

    PYTHONPATH=python .venv/bin/python python/benchmarks/mlp.py --with offloadd --pool /nvme0 --ram 1GiB

Eight blocks x + Linear(GELU(Linear(LayerNorm(x)))) of 2048 and 8192 and a head: 272,746,496 parameters in bf16; AdamW, gradients
clipped to 1, and a batch of 4 x 64."""

import argparse
import json
import os
import time

import torch

LEARNING_RATE, BETAS, EPSILON, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="side", required=True, choices=["memory", "offloadd", "deepspeed"])
    parser.add_argument("--pool", help="a directory on a drive with direct I/O")
    parser.add_argument("--ram", help="of offloadd")
    parser.add_argument("--durability", default="step", help="of offloadd")
    parser.add_argument("--update-in-backward", default="auto", help="of offloadd: auto or never")
    parser.add_argument("--clip", type=float, default=CLIP, help="of all sides: the largest norm of the gradients, which pass 1 in nearly every step")
    parser.add_argument("--parameters", choices=["cpu", "nvme"], default="nvme", help="where DeepSpeed keeps them")
    parser.add_argument("--optimizer", choices=["cpu", "nvme"], default="nvme", help="where DeepSpeed keeps masters and moments")
    parser.add_argument("--pipelined", action="store_true", help="DeepSpeed reads and writes the optimizer's state beside its arithmetic")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def build(given):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(Block(given.width) for _ in range(given.blocks)), torch.nn.Linear(given.width, given.width)).to(torch.bfloat16)


def loss_of(model, step, width):
    x = torch.randn(4, 64, width, generator=torch.Generator().manual_seed(1000 + step)).to(torch.bfloat16)
    return torch.nn.functional.mse_loss(model(x).float(), torch.tanh(torch.roll(x.float(), 1, dims=-1)))


def say(event, **facts):
    print(json.dumps({"event": event, **facts}), flush=True)


def train(given, model, backward, step_optimizer):
    """backward(loss) and step_optimizer() are the side's own."""
    for step in range(given.steps):
        marks = [time.perf_counter()]
        loss = loss_of(model, step, given.width)
        marks.append(time.perf_counter())
        backward(loss)
        marks.append(time.perf_counter())
        step_optimizer()
        marks.append(time.perf_counter())
        seconds = dict(zip(("forward", "backward", "step"), (after - before for before, after in zip(marks, marks[1:]))))
        say("step", step=step, loss=loss.item(), seconds=seconds)


def train_ordinarily(given):
    """As a trainer of one's own does it. In memory the same lines keep fp32 masters, too, as all sides do."""
    if given.side == "memory":
        os.environ["OFFLOADD_DISABLE"] = "1"
    import offloadd
    model = build(given)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, BETAS, EPSILON, DECAY, fused=True)
    attached = offloadd.attach(model, optimizer, nvme_path=given.pool, ram=given.ram, durability=given.durability,
                               update_in_backward=given.update_in_backward, job="benchmark-mlp")

    def step_optimizer():
        torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip)
        optimizer.step()
        optimizer.zero_grad()

    say("start", parameters=sum(p.numel() for p in model.parameters()), torch=torch.__version__)
    with attached:
        train(given, model, lambda loss: loss.backward(), step_optimizer)


def deepspeed_config(given):
    """Settings that were found to be its best on one drive; parameters really leave memory, as max_in_cpu 0 says."""
    elements = 4 * given.width * given.width
    place = {"nvme_path": given.pool, "pin_memory": False}
    optimizer = {"device": given.optimizer, **place, "buffer_count": 12 if given.pipelined else 4,
                 "pipeline_read": given.pipelined, "pipeline_write": given.pipelined}
    parameters = {"device": given.parameters, **place, "buffer_count": 12, "buffer_size": elements + 1024, "max_in_cpu": 0}
    return {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "gradient_clipping": given.clip,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": DECAY}},
            "zero_optimization": {"stage": 3, "offload_param": parameters, "offload_optimizer": optimizer, "sub_group_size": 50_000_000,
                                  "reduce_bucket_size": 4_000_000, "stage3_param_persistence_threshold": 10_000,
                                  "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 2 * elements,
                                  "stage3_max_reuse_distance": 0},
            "aio": {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}}


def train_with_deepspeed(given):
    import deepspeed
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29503"))
    deepspeed.init_distributed("gloo")
    model = build(given)
    parameters = sum(p.numel() for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=deepspeed_config(given))
    torch.set_num_threads(given.threads)
    say("start", parameters=parameters, torch=torch.__version__, deepspeed=deepspeed.__version__)
    train(given, engine, engine.backward, engine.step)
    torch.distributed.destroy_process_group()


def main():
    given = parse()
    torch.set_num_threads(given.threads)
    train_with_deepspeed(given) if given.side == "deepspeed" else train_ordinarily(given)


if __name__ == "__main__":
    main()
