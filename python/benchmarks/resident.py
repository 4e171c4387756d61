"""What offloading costs a step when everything is resident: a Llama, in memory and offloaded with room for all of it, in turns.

    PYTHONPATH=python .venv/bin/python python/benchmarks/resident.py --pool /nvme0 [--hidden 512] [--rounds 9]

Prints the medians of the two and their ratio. Losses have to be equal."""

import argparse
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import offloadd


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", required=True, help="a directory on a drive with direct I/O")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--ram", default="4GiB")
    parser.add_argument("--durability", default="step", help="checkpoint:1000 writes nothing meanwhile")
    parser.add_argument("--update-threads", type=int, default=0, help="of the daemon; 0: as it chooses")
    return parser.parse_args()


class Side:
    """A model and its optimizer, which take steps when they are told to."""

    def __init__(self, given):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=4096, hidden_size=given.hidden, intermediate_size=3 * given.hidden, num_hidden_layers=given.layers,
                             num_attention_heads=max(given.hidden // 64, 1), use_cache=False)
        self.given, self.model, self.done, self.losses = given, LlamaForCausalLM(config), 0, []
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)

    def seconds_of_a_step(self):
        begin = time.perf_counter()
        for _ in range(self.given.steps):
            ids = torch.randint(4096, (self.given.batch, self.given.length), generator=torch.Generator().manual_seed(self.done))
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.done += 1
        return (time.perf_counter() - begin) / self.given.steps


def main():
    given = parse()
    memory, offloaded = Side(given), Side(given)
    with offloadd.attach(offloaded.model, offloaded.optimizer, nvme_path=given.pool, ram=given.ram, job="benchmark-resident",
                         durability=given.durability, update_threads=given.update_threads) as handle:
        if handle.step:
            raise SystemExit(f"job {handle.job} is there already: offloadctl rm {given.pool} {handle.job} --yes")
        for side in (memory, offloaded):
            side.seconds_of_a_step()  # warm
        times = [(memory.seconds_of_a_step(), offloaded.seconds_of_a_step()) for _ in range(given.rounds)]
        plan = handle.plan()
    in_memory, here = (statistics.median(column) for column in zip(*times))
    ratio = statistics.median(b / a for a, b in times)
    print(f"hidden {given.hidden}, {plan['parameters'] / 1e6:.1f} M parameters, gradients {'spilled' if plan['gradients_spilled'] else 'in memory'}: "
          f"in memory {in_memory * 1e3:.1f} ms, offloaded {here * 1e3:.1f} ms a step, "
          f"median of {given.rounds} ratios {ratio:.3f}, losses {'equal' if memory.losses == offloaded.losses else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
