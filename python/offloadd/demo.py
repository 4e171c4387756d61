"""python -m offloadd.demo [--pool DIR]: trains a small model in memory and offloaded, stops in the middle, goes on, and compares."""

import argparse
import shutil
import sys
import tempfile

import torch

import offloadd


def build():
    torch.manual_seed(0)
    width = 512
    layers = [torch.nn.Embedding(2048, width)]
    for _ in range(4):
        layers += [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width), torch.nn.LayerNorm(width)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 2048, bias=False))


def train(model, optimizer, first, steps):
    losses = []
    for step in range(first, first + steps):
        ids = torch.randint(2048, (4, 32), generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def offloaded(pool, first, steps):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    with offloadd.attach(model, optimizer, nvme_path=pool, ram="96MiB", job="demo") as handle:
        assert handle.step == first
        losses = train(model, optimizer, first, steps)
        figures = handle.statistics()
        return losses, [handle.gather(p) for p in model.parameters()], figures


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", help="a directory on a drive with direct I/O (default: a temporary one)")
    given = parser.parse_args()
    pool = tempfile.mkdtemp(prefix="offloadd-demo-", dir=given.pool or "/var/tmp")
    try:
        model = build()
        expected = train(model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True), 0, 6)
        parameters = sum(p.numel() for p in model.parameters())
        first, _, _ = offloaded(pool, 0, 3)
        second, weights, figures = offloaded(pool, 3, 3)
    finally:
        shutil.rmtree(pool, ignore_errors=True)
    equal = first + second == expected and all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    for step, (there, here) in enumerate(zip(expected, first + second)):
        print(f"step {step}  in memory {there:.9f}  offloaded {here:.9f}")
    print(f"{parameters / 1e6:.1f} M parameters, {parameters * 16 / 2**20:.0f} MiB of state in {figures['peak_bytes'] / 2**20:.0f} MiB, "
          f"stopped after step 2 and resumed: {'every loss and every weight is equal' if equal else 'DIFFERENT'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
