"""Two ranks as torchrun starts them: a plain loop, Accelerate, and Hugging Face's Trainer, against DistributedDataParallel in memory.

    ranks_test.py RANK_PROGRAM FOLDER       is a rank itself"""

import contextlib
import copy
import json
import os
import socket
import subprocess
import sys
import tempfile

import torch

import offloadd
from battery import case, main

ONE = {"types": ("fp32",), "memory": ("floor",)}


def launch(run, program):
    """What the first rank says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folder = run.folder if run.offloaded else "-"
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
              "TORCHELASTIC_RUN_ID": f"test-{os.getpid()}-{port}", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_RANK": "0"}
    ranks = [
        subprocess.Popen([sys.executable, __file__, program, folder], stdout=subprocess.PIPE, stderr=None if "--loud" in sys.argv else subprocess.DEVNULL,
                         text=True, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    return json.loads(said[0].splitlines()[-1])


@case(**ONE)
def plain_loop(run):
    return launch(run, "loop")


@case(**ONE)
def optimizer_that_has_stepped(run):
    return launch(run, "stepped")


@case(**ONE)
def accelerate_prepares(run):
    return launch(run, "accelerate")


@case(**ONE)
def trainer(run):
    return launch(run, "trainer")


@case(**ONE)
def wrapper_is_refused(run):
    return launch(run, "wrapped") if run.offloaded else 1601


# ---- A rank ------------------------------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))


def batch(step, rank):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 2 + rank))


def steps(model, optimizer, rank, backward=lambda loss: loss.backward(), clip=torch.nn.utils.clip_grad_norm_):
    told = []
    for step in range(3):
        backward(model(batch(step, rank)).pow(2).mean())
        told.append(clip(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return told + [p.tolist() for p in model.parameters()]


def attach(model, optimizer, folder):
    return offloadd.attach(model, optimizer, nvme_path=folder, ram="128MiB", job="ranks")


def loop(rank, folder):
    torch.distributed.init_process_group("gloo")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    if folder == "-":
        return steps(torch.nn.parallel.DistributedDataParallel(model), optimizer, rank)
    with attach(model, optimizer, folder) as handle:
        assert (handle.rank, handle.world_size) == (rank, 2)
        return steps(model, optimizer, rank)


def stepped(rank, folder):
    """Attached in the middle, and set back to there."""
    torch.distributed.init_process_group("gloo")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    steps(model, optimizer, rank=0)  # the same in both
    kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    if folder == "-":
        trained, handle = torch.nn.parallel.DistributedDataParallel(model), contextlib.nullcontext()
    else:
        trained, handle = model, attach(model, optimizer, folder)
    with handle:
        told = steps(trained, optimizer, rank)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        return told + steps(trained, optimizer, rank)


def wrapped(rank, folder):
    torch.distributed.init_process_group("gloo")
    model = network()
    with attach(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), folder):
        try:
            torch.nn.parallel.DistributedDataParallel(model)
        except offloadd.Error as error:
            return error.id
    return 0


def accelerate(rank, folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    if folder != "-":
        attach(model, optimizer, folder)
    model, optimizer = accelerator.prepare(model, optimizer)
    return steps(model, optimizer, rank, accelerator.backward, accelerator.clip_grad_norm_)


def train(rank, folder):
    import transformers

    from families_test import llama
    from trainers_test import Data

    torch.manual_seed(0)
    model = llama()
    arguments = transformers.TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[], max_steps=3, per_device_train_batch_size=2,
                                               disable_tqdm=True, save_strategy="no", logging_steps=1)
    callbacks = [] if folder == "-" else [offloadd.TrainerCallback(nvme_path=folder, ram="128MiB", job="ranks")]
    made = transformers.Trainer(model=model, args=arguments, train_dataset=Data(), callbacks=callbacks)
    made.remove_callback(transformers.PrinterCallback)
    made.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in made.state.log_history if "loss" in entry] + [p.tolist() for p in model.parameters()]


if __name__ == "__main__":
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        programs = {"loop": loop, "stepped": stepped, "wrapped": wrapped, "accelerate": accelerate, "trainer": train}
        print(json.dumps(programs[sys.argv[1]](int(os.environ["RANK"]), sys.argv[2])), flush=True)
        for each in offloadd.handles():
            each.close()
        sys.exit(0)
    sys.exit(main())
