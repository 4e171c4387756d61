"""Generates text with the weights of a folder, or of a job that was trained, in a fixed amount of memory.

    python examples/generate.py MODEL_FOLDER "Once upon" --pool /nvme0 --ram 8GiB
    python examples/generate.py MODEL_FOLDER "Once upon" --pool /nvme0 --ram 8GiB --job finetune

MODEL_FOLDER gives configuration and tokenizer, and the weights where no job is named: they alone are written to the drive, once."""

import argparse
import os

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import offloadd


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("prompt")
    parser.add_argument("--pool", required=True, help="a directory on a drive with direct I/O")
    parser.add_argument("--ram", default="8GiB", help="the memory budget of the weights")
    parser.add_argument("--job", help="one that was trained with AdamW")
    parser.add_argument("--tokens", type=int, default=40)
    return parser.parse_args()


def main():
    given = parse()
    job = given.job or "generate-" + os.path.basename(os.path.abspath(given.model))
    with offloadd.init(nvme_path=given.pool, ram=given.ram, job=job):
        model = AutoModelForCausalLM.from_pretrained(given.model)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    # A job is attached as it was made. Without an optimizer there are weights alone.
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if given.job else None
    with offloadd.attach(model, optimizer) as handle, torch.no_grad():
        model.eval()
        ids = tokenizer(given.prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=given.tokens, do_sample=False)
        print(tokenizer.decode(out[0], skip_special_tokens=True))
        print(f"(job {handle.job}, after {handle.step} steps, at most {handle.statistics()['peak_bytes'] / 2**20:.0f} MiB of weights in memory)")


if __name__ == "__main__":
    main()
