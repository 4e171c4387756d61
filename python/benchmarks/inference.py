"""generate() of a model that does not fit memory: offloadd beside accelerate's disk offload, each in a process of its own, with the same
weights, the same memory and the same tokens asked for.

    PYTHONPATH=python .venv/bin/python python/benchmarks/inference.py --pool /nvme0 [--ram 200MiB] [--limit 1500]

With --limit (MiB; root, cgroup v1) each process and its page cache get so much memory and no more; without it the page cache of the machine
holds what accelerate has read, and its drive is not measured."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

PARENT = "/sys/fs/cgroup/memory"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", required=True, help="a directory on a drive with direct I/O")
    parser.add_argument("--ram", default="200MiB", help="for weights")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--limit", type=int, help="MiB of a process with its page cache")
    parser.add_argument("--side", choices=["offloadd", "accelerate"], help=argparse.SUPPRESS)
    return parser.parse_args()


def folder(given):
    return os.path.join(given.pool, "benchmark-model")


def make_model(given):
    config = LlamaConfig(vocab_size=8192, hidden_size=given.hidden, intermediate_size=11 * given.hidden // 4, num_hidden_layers=given.layers,
                         num_attention_heads=given.hidden // 64, num_key_value_heads=given.hidden // 64, pad_token_id=0)
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder(given))


def forget(path):
    """The page cache of its files: it is charged to whoever has read or written them first."""
    for name in os.listdir(path):
        with open(os.path.join(path, name), "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def by_offloadd(given):
    import offloadd

    with offloadd.init(nvme_path=given.pool, ram=given.ram, job="benchmark-inference"):
        model = AutoModelForCausalLM.from_pretrained(folder(given), dtype=torch.bfloat16)
    offloadd.attach(model)
    return model


def by_accelerate(given):
    mebibytes = given.ram.removesuffix("MiB")
    return AutoModelForCausalLM.from_pretrained(folder(given), dtype=torch.bfloat16, device_map="auto", offload_folder=os.path.join(given.pool, "disk"),
                                                max_memory={"cpu": f"{mebibytes}MiB"})


def measure(given):
    model = (by_offloadd if given.side == "offloadd" else by_accelerate)(given).eval()
    ids = torch.arange(1, 9)[None]
    settings = {"do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        model.generate(ids, max_new_tokens=2, min_new_tokens=2, **settings)  # warm
        begin = time.perf_counter()
        out = model.generate(ids, max_new_tokens=given.tokens, min_new_tokens=given.tokens, **settings)
    seconds = time.perf_counter() - begin
    with open("/proc/self/status", encoding="ascii") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    print(json.dumps({"tokens_per_second": given.tokens / seconds, "peak": peak, "out": out[0].tolist()}))


def run(given, side):
    """The side's answer, from a process that has no more memory than `limit`."""
    group = os.path.join(PARENT, "offloadd-benchmark")
    forget(folder(given))

    def enter():
        with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as file:
            file.write(str(os.getpid()))

    if given.limit:
        os.makedirs(group, exist_ok=True)
        with open(os.path.join(group, "memory.limit_in_bytes"), "w", encoding="ascii") as file:
            file.write(str(given.limit << 20))
    try:
        done = subprocess.run([sys.executable, *sys.argv, "--side", side], stdout=subprocess.PIPE, text=True, check=True,
                              preexec_fn=enter if given.limit else None)
    finally:
        if given.limit:
            time.sleep(1)  # a daemon that ends
            os.rmdir(group)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    given = parse()
    if given.side:
        return measure(given)
    make_model(given)
    size = sum(os.path.getsize(os.path.join(folder(given), name)) for name in os.listdir(folder(given)))
    answers = {side: run(given, side) for side in ("accelerate", "offloadd")}
    for side, answer in answers.items():
        print(f"{side:<10} {answer['tokens_per_second']:.2f} tokens/s, peak of the process {answer['peak']:.0f} MiB")
    equal = answers["offloadd"]["out"] == answers["accelerate"]["out"]
    print(f"weights {size / 2**20:.0f} MiB in {given.ram}: {answers['offloadd']['tokens_per_second'] / answers['accelerate']['tokens_per_second']:.2f} "
          f"times the tokens/s, tokens {'equal' if equal else 'DIFFERENT'}")
    shutil.rmtree(folder(given))
    shutil.rmtree(os.path.join(given.pool, "disk"), ignore_errors=True)
    os.unlink(os.path.join(given.pool, "benchmark-inference.offload"))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
