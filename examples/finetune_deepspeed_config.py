"""Trains a small language model with DeepSpeed's interface and a ds_config.json, offloaded to a drive:

    python examples/finetune_deepspeed_config.py --pool /nvme0 --ram 256MiB
    offloadd-run examples/finetune_deepspeed_config.py       # the same, with `import deepspeed` in place of the first import

Run it twice with --checkpoint FOLDER: the second run continues where the first one has saved.
"""

import argparse
import json
import os

import torch

import offloadd.deepspeed as deepspeed

WIDTH, VOCABULARY, LENGTH = 256, 256, 64


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class LanguageModel(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(layers)))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        logits = self.head(self.blocks(self.embed(ids[:, :-1])))
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def configuration(pool):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 5, "total_num_steps": 1000}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": pool},
            "offload_optimizer": {"device": "nvme", "nvme_path": pool},
        },
    }


def batches(text, count, first):
    """(4, LENGTH) bytes of a text, in an order that depends on the number of the batch only."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for i in range(first, first + count):
        starts = torch.randint(len(data) - LENGTH, (4,), generator=torch.Generator().manual_seed(i))
        yield torch.stack([data[start:start + LENGTH] for start in starts])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pool", default=os.environ.get("OFFLOADD_POOL"), help="a directory on a drive with direct I/O")
    parser.add_argument("--ram", default=os.environ.get("OFFLOADD_RAM", "256MiB"))
    parser.add_argument("--text", default=__file__, help="what it learns")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpoint", help="a folder")
    parser.add_argument("--local_rank", type=int, default=0)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    os.environ["OFFLOADD_RAM"] = args.ram

    config = json.load(open(args.deepspeed_config, encoding="utf-8")) if args.deepspeed_config else configuration(args.pool)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LanguageModel(args.layers)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if args.checkpoint:
        engine.load_checkpoint(args.checkpoint)

    micro = engine.gradient_accumulation_steps()
    with open(args.text, "rb") as file:
        text = file.read()
    for ids in batches(text, args.steps * micro, engine.global_steps * micro):
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        if engine.was_step_applied():
            print(f"step {engine.global_steps}  loss {loss.item():.6f}  norm {engine.get_global_grad_norm():.3f}  lr {engine.get_lr()[0]:.2e}")
    if args.checkpoint:
        engine.save_checkpoint(args.checkpoint)


if __name__ == "__main__":
    main()
