"""Fine-tunes a causal language model of Hugging Face with a loop of one's own: a training script like many, and three lines of offloadd.

    python examples/finetune_plain.py MODEL_FOLDER TEXT_FILE --pool /nvme0 --ram 8GiB

Kill it and start it again: it continues. OFFLOADD_DISABLE=1 trains in memory."""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import offloadd  # 1


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("text", help="a text file")
    parser.add_argument("--pool", required=True, help="a directory on a drive with direct I/O")
    parser.add_argument("--ram", default="8GiB", help="the memory budget of weights, gradients and optimizer state")
    parser.add_argument("--job", default="finetune")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--out", help="where the weights are written at the end")
    return parser.parse_args()


def main():
    given = parse()
    with offloadd.init(nvme_path=given.pool, ram=given.ram, job=given.job):  # 2: for models larger than memory
        model = AutoModelForCausalLM.from_pretrained(given.model)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    with open(given.text, encoding="utf-8") as file:
        ids = torch.tensor(tokenizer(file.read())["input_ids"])

    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, fused=True)
    handle = offloadd.attach(model, optimizer)  # 3
    print(handle.plan())

    model.train()
    for step in range(handle.step, given.steps):  # where the job is: 0 for a new one
        begin = step * given.length % max(len(ids) - given.length, 1)
        batch = ids[begin:begin + given.length].unsqueeze(0)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if given.out:
        handle.save_weights(given.out)  # in constant memory; model.save_pretrained(given.out) where the model fits


if __name__ == "__main__":
    main()
