"""The ranks of this library against DistributedDataParallel over Gloo, on the same model, numbers and optimizer: with two ranks
and one micro-batch the same bits; with more, DDP adds in an order of its own, and the results agree up to the order of sums.

usage: ddp_test.py DDP_RANK OFFLOADD          skipped, with 0, where libtorch is not that of a Python
"""

import array
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile

WIDTH, INNER, ROWS = 64, 512, 4
STEPS = 4
CASES = [(2, 1), (2, 2), (3, 1), (4, 1)]  # ranks, micro-batches
# Of weights after STEPS steps: fp32 sums in another order (relative norm 6e-8 of a gradient) under AdamW.
TOLERANCE = 1e-5


def name_of(world_size, micro_batches):
    return f"{world_size}x{micro_batches}"


def torch_python(program):
    """The Python of the environment whose libtorch the program was built with; None when that is not one of Python's."""
    libraries = subprocess.run(["ldd", program], capture_output=True, check=True, text=True).stdout
    for line in libraries.splitlines():
        library = line.split("=>")[-1].split()[0]
        if "/site-packages/torch/" in library:
            python = os.path.join(library.split("/lib/python3")[0], "bin", "python")
            return python if os.path.exists(python) else None
    return None


# ---- a rank with DistributedDataParallel ----------------------------------------------------------------


def train_with_ddp(rank, world_size, micro_batches, store, output):
    import torch
    import torch.distributed as dist

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Parameter(torch.randn(INNER, WIDTH) * 0.1)
            self.down = torch.nn.Parameter(torch.randn(WIDTH, INNER) * 0.1)
            self.bias = torch.nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x):
            return x + torch.nn.functional.linear(torch.tanh(torch.nn.functional.linear(x, self.up)), self.down, self.bias)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(3)
    model = Model()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with open(output, "wb") as file:
        for step in range(STEPS):
            for micro_batch in range(micro_batches):
                torch.manual_seed((step * 10 + micro_batch) * 10 + rank)
                x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
                last = micro_batch == micro_batches - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    (torch.nn.functional.mse_loss(ddp(x), y) / micro_batches).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                file.write(array.array("f", [norm.item()]).tobytes())
                for parameter in model.parameters():
                    file.write(array.array("f", parameter.detach().flatten().tolist()).tobytes())
    dist.destroy_process_group()


def train_all_with_ddp(folder):
    """Every case, in forks of a process that has imported torch."""
    import importlib

    for module in ("torch.distributed", "torch.nn.parallel", "torch._dynamo"):
        importlib.import_module(module)
    for world_size, micro_batches in CASES:
        name, ranks = name_of(world_size, micro_batches), []
        for rank in range(world_size):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                train_with_ddp(rank, world_size, micro_batches, os.path.join(folder, f"{name}.store"),
                               os.path.join(folder, f"{name}.ddp{'' if rank == 0 else rank}"))
                return 0
        statuses = [os.waitpid(rank, 0)[1] for rank in ranks]
        if statuses != [0] * world_size:
            raise RuntimeError(f"{name}: ranks ended with {statuses}")
    return 0


# ---- both -----------------------------------------------------------------------------------------------


def run_all(commands):
    processes = [subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE)
                 for command, environment in commands]
    messages = [process.communicate()[1].decode(errors="replace") for process in processes]
    codes = [process.returncode for process in processes]
    if codes != [0] * len(codes):
        raise RuntimeError(f"exit codes {codes}: {messages}")


def numbers_in(path):
    values = array.array("f")
    with open(path, "rb") as file:
        values.frombytes(file.read())
    return values


def compare(options, folder, world_size, micro_batches):
    name = name_of(world_size, micro_batches)
    ours, theirs = os.path.join(folder, f"{name}.ours"), os.path.join(folder, f"{name}.ddp")
    launcher = lambda rank: {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                             "LOCAL_WORLD_SIZE": str(world_size), "TORCHELASTIC_RUN_ID": f"ddp{os.getpid()}-{name}",
                             "OFFLOADD_BINARY": options["offloadd"]}
    run_all([([options["rank"], folder, name, str(STEPS), str(micro_batches), f"{ours}{'' if rank == 0 else rank}"], launcher(rank))
             for rank in range(world_size)])
    ours, theirs = numbers_in(ours), numbers_in(theirs)
    if len(ours) != len(theirs) or len(ours) != STEPS * (1 + 2 * WIDTH * INNER + WIDTH):
        raise RuntimeError(f"{name}: {len(ours)} and {len(theirs)} numbers")
    differing = sum(a != b for a, b in zip(ours, theirs))
    difference = sum((a - b) ** 2 for a, b in zip(ours, theirs)) ** 0.5 / sum(b * b for b in theirs) ** 0.5
    print(f"{world_size} ranks, {micro_batches} micro-batches: {differing} of {len(ours)} numbers differ, relative norm {difference:.1e}",
          flush=True)
    exact = world_size == 2 and micro_batches == 1
    return differing == 0 if exact else difference <= TOLERANCE


def main():
    if sys.argv[1] == "--ddp":
        return train_all_with_ddp(sys.argv[2])
    python = torch_python(sys.argv[1])
    if python is None:
        print("SKIPPED: the libtorch of this build is not in an environment of Python's")
        return 0
    options = {"rank": os.path.abspath(sys.argv[1]), "offloadd": os.path.abspath(sys.argv[2])}
    folder = tempfile.mkdtemp(prefix="ddp-", dir=os.environ.get("TEST_TMPDIR"))
    try:
        run_all([([python, os.path.realpath(__file__), "--ddp", folder], {})])
        results = [compare(options, folder, *case) for case in CASES]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
