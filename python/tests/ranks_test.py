"""Two ranks as torchrun starts them: a plain loop, Accelerate, and Hugging Face's Trainer, against DistributedDataParallel in memory; where the
daemon adds their gradients, and where DistributedDataParallel reduces them. Ranks are forks of a process that has imported what they need."""

import contextlib
import copy
import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import unittest.mock

import torch

import offloadd
from offloadd import attaching, in_memory, lightning_position, untouched
from battery import case, main

# The ranks' threads are counted when torch is imported.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch.nn.parallel.distributed", "torch.optim", "accelerate", "offloadd", "families_test", "trainers_test", "lightning"])

ONE = {"types": ("fp32",), "memory": ("floor",)}


def rank_of(program, folder, environment, errors, said):
    """A rank's whole life: what it says goes into a pipe, and its messages into a file, unless there is none."""
    os.environ.update(environment)
    if errors:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), sys.stderr.fileno())
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)  # where one that waits for ever was
    torch.set_num_threads(1)
    told = globals()[program](int(environment["RANK"]), folder)
    for each in offloadd.handles():
        each.close()
    said.send(json.dumps(told))


def messages_of(ranks, files):
    """How each has ended, and what it has said."""
    told = []
    for number, (rank, name) in enumerate(zip(ranks, files)):
        told.append(f"rank {number} has ended with {rank.exitcode}:")
        if name and os.path.exists(name):
            with open(name, encoding="utf-8", errors="replace") as file:
                told.append(file.read())
    return "\n".join(told)


def launch(run, program):
    """What the first rank says."""
    # The ranks meet at a store of this process, as at torchrun's: a port that is chosen for them may be another program's by then.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = run.folder if run.offloaded else "-"
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
              "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": f"test-{os.getpid()}-{store.port}", "TORCHELASTIC_RESTART_COUNT": "0",
              "GROUP_RANK": "0"}
    files = [None if "--loud" in sys.argv else os.path.join(run.folder, f"messages{rank}") for rank in range(2)]
    heard, ranks, told = [], [], []
    for rank in range(2):
        hears, said = _processes.Pipe(duplex=False)
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(_processes.Process(target=rank_of, args=(program, folder, environment, files[rank], said)))
        ranks[-1].start()
        said.close()
        heard.append(hears)
    waiting = list(heard)
    try:
        while waiting and (ready := multiprocessing.connection.wait(waiting, 240)):
            for each in ready:
                waiting.remove(each)
                told.append((heard.index(each), json.loads(each.recv())))
    except EOFError:
        pass  # the others may wait for it
    for each in ranks:
        each.join(60 if len(told) == len(ranks) else 5)
        if each.is_alive():
            each.terminate()
            each.join(5)
            each.kill()
            each.join()
    del store
    if len(told) < len(ranks) or any(each.exitcode for each in ranks):
        raise AssertionError(messages_of(ranks, files))
    return dict(told)[0]


@case(**ONE)
def plain_loop(run):
    return launch(run, "loop")


@case(**ONE)
def optimizer_that_has_stepped(run):
    return launch(run, "stepped")


@case(**ONE)
def optimizers_that_run_in_the_process(run):
    return launch(run, "in_process")


@case(**ONE)
def optimizers_that_run_in_the_process_go_on(run):
    return launch(run, "in_process_twice")


@case(**ONE)
def sparse_gradients_are_added_as_dense_ones(run):
    return launch(run, "sparse")


@case(**ONE)
def attached_again_by_one_before_another_has_closed(run):
    return launch(run, "one_after_another")


@case(**ONE)
def what_differs_among_ranks_is_not_kept(run):
    return launch(run, "differing") if run.offloaded else [3, 1604]


@case(**ONE)
def what_ranks_cannot_step_with_is_refused(run):
    return launch(run, "refused") if run.offloaded else [1604, 1604, 1606, 1601, 1805]


@case(**ONE)
def reductions_by_hand(run):
    return launch(run, "reduced_by_hand")


@case(**ONE)
def accelerate_prepares(run):
    return launch(run, "accelerate")


@case(**ONE)
def trainer(run):
    return launch(run, "train")


@case(**ONE)
def reduced_by_trainer(run):
    return launch(run, "reduced")


@case(**ONE)
def reduced_by_trainer_without_sync(run):
    return launch(run, "reduced_without_sync")


@case(types=("bf16",), memory=("floor",))
def reduced_by_trainer_in_half(run):
    return launch(run, "reduced_in_half")


@case(**ONE)
def reduced_by_wrapper_of_attached(run):
    return launch(run, "reduced_attached_first")


@case(**ONE)
def reduced_in_transformers(run):
    return launch(run, "reduced_trainer")


@case(**ONE)
def accelerate_reduces(run):
    return launch(run, "reduced_accelerate")


@case(**ONE)
def reduced_in_an_unchanged_script(run):
    return launch(run, "unchanged")


@case(**ONE)
def reduced_differently_is_refused(run):
    return launch(run, "reduced_differently") if run.offloaded else [1805, True, 1]


@case(**ONE)
def bucket_views_are_refused(run):
    return launch(run, "bucket_views") if run.offloaded else 1601


@case(**ONE)
def lightning_goes_on(run):
    return launch(run, "lightning")


@case(**ONE)
def lightning_with_ranks_of_its_own(run):
    return launch(run, "lightning_of_itself")


@case(**ONE)
def lightning_with_other_ranks_begins_on_all_of_them(run):
    return launch(run, "lightning_of_one_before") if run.offloaded else [[1, 7], True]


@case(**ONE)
def who_nobody_has_numbered_is_told_so(run):
    return launch(run, "not_numbered") if run.offloaded else [1205, True]


@case(**ONE)
def wrapper_is_refused(run):
    return launch(run, "wrapped") if run.offloaded else 1601


# ---- A rank ------------------------------------------------------------------------------------


def network(width=64, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.GELU(), torch.nn.Linear(width, 4))


def batch(step, rank):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 2 + rank))


def steps(model, optimizer, rank, backward=lambda loss: loss.backward(), clip=torch.nn.utils.clip_grad_norm_, first=0):
    told = []
    for step in range(first, first + 3):
        backward(model(batch(step, rank)).pow(2).mean())
        told.append(clip(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return told + [p.tolist() for p in model.parameters()]


def attach(model, optimizer, folder, **options):
    return offloadd.attach(model, optimizer, nvme_path=folder, **{"ram": "128MiB", "job": "ranks", **options})


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


class Whitened(torch.optim.Optimizer):
    """Of its own: writes gradients, and weights in place."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].setdefault("kept", torch.zeros_like(p))
            p.grad.div_(p.grad.norm() + 1e-6)
            kept.mul_(0.9).add_(p.grad)
            p.mul_(0.99).sub_(self.param_groups[0]["lr"] * kept)


def in_process(rank, folder):
    torch.distributed.init_process_group("gloo")
    model = network()
    weights, biases = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    optimizers = []

    class Both:
        @staticmethod
        def step():
            for each in optimizers:
                each.step()

        @staticmethod
        def zero_grad():
            model.zero_grad()

    told = []
    for number, optimizers[:] in enumerate(([torch.optim.NAdam(model.parameters(), 1e-2)], [Whitened(weights), torch.optim.AdamW(biases, 1e-2, fused=True)])):
        if folder == "-":
            told += steps(torch.nn.parallel.DistributedDataParallel(model), Both, rank)
            continue
        with offloadd.attach(model, optimizers, nvme_path=folder, ram="128MiB", job=f"ranks{number}", weights_at_close="memory") as handle:
            told += steps(model, Both, rank)
            assert handle.step == 3 * len(optimizers), handle.step
    return told


def in_process_twice(rank, folder):
    """They keep more than goes with a step."""
    torch.distributed.init_process_group("gloo")
    makes = (lambda p: torch.optim.NAdam(p, 1e-2), Whitened, lambda p: torch.optim.Adafactor(p, 1e-2))
    told = []
    for number, make in enumerate(makes):
        model, lives = None, []
        for life in range(2):
            if model is None or folder != "-":
                model = network(3000, seed=life)
                optimizer = make(model.parameters())
                trained = torch.nn.parallel.DistributedDataParallel(model) if folder == "-" else model
            with contextlib.nullcontext() if folder == "-" else attach(model, optimizer, folder, job=f"ranks{number}") as handle:
                assert handle is None or handle.step == 3 * life, handle.step
                lives.append(steps(trained, optimizer, rank, first=3 * life))
        told += lives
    return told


def sparse(rank, folder):
    """In memory they are dense."""
    torch.distributed.init_process_group("gloo")
    makes = (lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.Adagrad(p, 0.1))
    told = []
    for number, make in enumerate(makes):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(40, 16, sparse=folder != "-"), torch.nn.Linear(16, 4))
        optimizer = make(model.parameters())
        trained = torch.nn.parallel.DistributedDataParallel(model) if folder == "-" else model
        with contextlib.nullcontext() if folder == "-" else attach(model, optimizer, folder, job=f"sparse{number}"):
            for step in range(3):
                ids = torch.randint(20, (3, 9), generator=torch.Generator().manual_seed(2 * step + rank))
                trained(ids).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            told += [p.tolist() for p in model.parameters()]
    return told


def one_after_another(rank, folder):
    """The first rank has closed the job, and attaches again, while the second one still has it."""
    torch.distributed.init_process_group("gloo")
    model, told = None, []
    for life in range(3):
        if model is None or folder != "-":
            model = network(seed=life)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
            trained = torch.nn.parallel.DistributedDataParallel(model) if folder == "-" else model
        with contextlib.nullcontext() if folder == "-" else attach(model, optimizer, folder) as handle:
            assert handle is None or handle.step == 3 * life, handle.step
            told += steps(trained, optimizer, rank, first=3 * life)
            if (rank + life) % 2:
                time.sleep(1)
    return told


def differing(rank, folder):
    """(steps, why it does not go on)"""
    torch.distributed.init_process_group("gloo")

    class Counts(Whitened):
        def step(self):
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p]["rank"] = torch.full_like(p, float(rank))

    def attached():
        model = network(3000)
        optimizer = Counts(model.parameters())
        return model, optimizer, attach(model, optimizer, folder)

    model, optimizer, handle = attached()
    with handle:
        steps(model, optimizer, rank)
        told = [handle.step]
    try:
        attached()
    except offloadd.Error as error:
        assert "not the same in all ranks" in str(error), error
        told.append(error.id)
    return told


def refused(rank, folder):
    torch.distributed.init_process_group("gloo")
    told = []

    def error_of(call):
        try:
            call()
        except offloadd.Error as error:
            told.append(error.id)

    model = network()
    error_of(lambda: attach(model, torch.optim.LBFGS(model.parameters()), folder))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with offloadd.attach(model, optimizer, nvme_path=folder, ram="128MiB", job="hook"):
        model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        error_of(model(batch(0, rank)).sum().backward)
    own = network()
    optimizer = Whitened(own.parameters())
    with offloadd.attach(own, optimizer, nvme_path=folder, ram="128MiB", job="own"):
        own(batch(0, rank)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            own[0].weight.clamp_(-0.1, 0.1)  # alike on both
            error_of(lambda: own[0].weight.mul_(2 + rank))
            vector = torch.nn.utils.parameters_to_vector(own.parameters())
            torch.nn.utils.vector_to_parameters(vector, own.parameters())
            vector.mul_(2)
            error_of(lambda: own(batch(0, rank)))
            if rank == 1:  # rank 0 passes it by
                error_of(lambda: own[0].weight.mul_(2))
                assert told[-1] == 1805, told  # who listens hears the first rank only, and that this one is gone
            else:
                told.append(1805)
    return told


def reduced_by_hand(rank, folder):
    """As in tutorials: weights are sent around at the beginning, and gradients reduced one by one, one after the other or at once."""
    torch.distributed.init_process_group("gloo")
    told = []
    for number, gradients in enumerate(("added", "reduced_by_trainer")):
        model = network()
        if rank == 1 and folder == "-":
            with torch.no_grad():
                model[0].weight.zero_()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        context = contextlib.nullcontext() if folder == "-" else offloadd.attach(
            model, optimizer, nvme_path=folder, ram="128MiB", job=f"by_hand{number}", gradients=gradients)
        with context:
            for p in model.parameters():
                torch.distributed.broadcast(p.data, 0)
            for step in range(3):
                model(batch(step, rank)).pow(2).mean().backward()
                works = [torch.distributed.all_reduce(p.grad, async_op=step == 1) for p in model.parameters()]
                for work in works:
                    work and work.wait()
                for p in model.parameters():
                    p.grad /= 2
                optimizer.step()
                optimizer.zero_grad()
            seen = torch.zeros(64, 16)
            if rank == 0:
                torch.distributed.send(model[0].weight.data, 1)
            else:
                torch.distributed.recv(seen, 0)
                assert torch.equal(seen, model[0].weight)
                if folder != "-":
                    try:
                        torch.distributed.recv(model[0].weight.data, 0)
                    except offloadd.Error as error:
                        assert error.id == 1601, error
                    else:
                        assert False, "received into a weight"
            gathered = [torch.zeros(64, 16) for _ in range(2)]
            torch.distributed.all_gather(gathered, model[0].weight.data)
            assert torch.equal(*gathered)
            told += [p.tolist() for p in model.parameters()]
    return told


# ---- Gradients that the trainer reduces ----


class Paths(torch.nn.Module):
    """A layer that only the ranks with a detour use, and one that nobody does."""

    def __init__(self):
        super().__init__()
        self.main, self.detour, self.spare = network(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, detour):
        x = self.main(x)
        return self.detour(x) if detour else x


def reduced(rank, folder, micro_batches=1, dtype=torch.float32, attached_first=False):
    """DistributedDataParallel, in memory and offloaded: clipping and edits after the reduction."""
    torch.distributed.init_process_group("gloo")
    model = Paths().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)

    def wrap():
        return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    ddp = None if attached_first else wrap()
    if folder == "-":
        handle = contextlib.closing(in_memory.Handle([model], [optimizer], {"job": "memory"}))
    else:
        handle = attach(ddp or model, optimizer, folder, gradients="reduced_by_trainer")
    with handle:
        return reduced_steps(ddp or wrap(), model, optimizer, rank, micro_batches, dtype)


def reduced_steps(ddp, model, optimizer, rank, micro_batches, dtype):
    told = []
    for step in range(4):
        for part in range(micro_batches):
            with contextlib.nullcontext() if part == micro_batches - 1 else ddp.no_sync():
                out = ddp(batch(step * micro_batches + part, rank).to(dtype), detour=rank == 1)
                out.float().pow(2).mean().backward()
        told.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
        told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 if step % 2 else 100.0).item())
        if step == 2:
            with torch.no_grad():
                model.main[0].weight.grad.add_(0.01)
                model.main[2].bias.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    state = optimizer.state_dict()["state"]
    moments = {n: [state[n][plane].tolist() for plane in ("exp_avg", "exp_avg_sq")] for n in state}
    return [told, sorted(moments.items()), [p.tolist() for p in model.parameters()]]


def reduced_without_sync(rank, folder):
    return reduced(rank, folder, micro_batches=3)


def reduced_in_half(rank, folder):
    return reduced(rank, folder, dtype=torch.bfloat16)


def reduced_attached_first(rank, folder):
    return reduced(rank, folder, attached_first=True)


def reduced_trainer(rank, folder):
    return train(rank, folder, gradients="reduced_by_trainer")


def reduced_accelerate(rank, folder):
    return accelerate(rank, folder, gradients="reduced_by_trainer")


def unchanged(rank, folder):
    """What a script does under `python -m offloadd`."""
    torch.distributed.init_process_group("gloo")
    if folder != "-":
        untouched.begin({"nvme_path": folder, "ram": "128MiB", "job": "ranks"})
    torch.manual_seed(0)
    model = Paths()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    told = reduced_steps(ddp, model, optimizer, rank, 2, torch.float32)
    return [told, [handle.world_size for handle in offloadd.handles()] == ([] if folder == "-" else [2])]


def reduced_differently(rank, folder):
    """(error, whether it names tensor and ranks, the step after the next step)"""
    torch.distributed.init_process_group("gloo")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    with attach(ddp, optimizer, folder, gradients="reduced_by_trainer") as handle:
        ddp(batch(0, rank)).pow(2).mean().backward()
        if rank == 1:
            with torch.no_grad():
                model[2].weight.grad[0, 0] += 1
        try:
            optimizer.step()
        except offloadd.Error as error:
            told = [error.id, '"2.weight"' in str(error) and "ranks 0 and 1" in str(error)]
        optimizer.zero_grad()
        ddp(batch(1, rank)).pow(2).mean().backward()
        optimizer.step()
        return told + [handle.step]


def bucket_views(rank, folder):
    torch.distributed.init_process_group("gloo")
    model = network()
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    try:
        attach(ddp, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), folder, gradients="reduced_by_trainer")
    except offloadd.Error as error:
        return error.id
    return 0


def wrapped(rank, folder):
    torch.distributed.init_process_group("gloo")
    model = network()
    with attach(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), folder):
        try:
            torch.nn.parallel.DistributedDataParallel(model)
        except offloadd.Error as error:
            return error.id
    return 0


def accelerate(rank, folder, **options):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    if folder != "-":
        attach(model, optimizer, folder, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    return steps(model, optimizer, rank, accelerator.backward, accelerator.clip_grad_norm_)


def fit_lightning(rank, folder, stop_at=None, devices=2, steps=5):
    """The losses of a rank's batches, until a batch that stops the run, and the weights."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.told = network(), []

        def training_step(self, batch, _):
            if len(self.told) == stop_at:
                raise KeyError
            loss = self.model(batch).pow(2).mean()
            self.told.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2, fused=True)
            if folder != "-":
                self.handle = attach(self.model, optimizer, folder)
            return optimizer

    module = Module()
    trainer = lightning.Trainer(accelerator="cpu", devices=devices, max_steps=steps, gradient_clip_val=0.5, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False)
    rows = list(torch.randn(12, 16, generator=torch.Generator().manual_seed(0)))
    with contextlib.suppress(KeyError):
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True))
    told = module.told, [p.tolist() for p in module.model.parameters()]
    if folder != "-":
        module.handle.close()
    return told


def lightning(rank, folder):
    """Shuffled data; what is stopped in its second epoch goes on there."""
    if folder == "-":
        return fit_lightning(rank, folder)
    losses, _ = fit_lightning(rank, folder, stop_at=4)
    rest, weights = fit_lightning(rank, folder)
    return losses + rest, weights


def unnumbered():
    """As where no launcher has started the ranks."""
    for name in ("RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]


def lightning_of_itself(rank, folder):
    unnumbered()
    return lightning(rank, folder)


def lightning_of_one_before(rank, folder):
    """(how many losses, whether a line says why)"""
    if rank == 0:  # alone
        kept = dict(os.environ)
        unnumbered()
        for name in ("LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
        losses, _ = fit_lightning(rank, folder, stop_at=1, devices=1)
        os.environ.update(kept)
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    with unittest.mock.patch.object(lightning_position._log, "warning") as warning:
        rest, _ = fit_lightning(rank, folder, steps=7)
    says = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    return [len(losses) if rank == 0 else 1, len(rest)], any("the last run of job ranks was one of 1 ranks" in each for each in says)


def not_numbered(rank, folder):
    """As torch.multiprocessing.spawn() starts them, where another one has the job, which is waited for. (error, whether it says why)"""
    torch.distributed.init_process_group("gloo")
    unnumbered()
    model = network()
    error = offloadd.Error("OFD-1205 the store is held by process 1")
    with unittest.mock.patch.object(attaching, "Engine", side_effect=error):
        try:
            attach(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), folder)
        except offloadd.Error as told:
            return [told.id, f"this process is rank {rank} of 2 in torch.distributed" in str(told)]


def train(rank, folder, **options):
    import transformers

    from families_test import llama
    from trainers_test import Data

    torch.manual_seed(0)
    model = llama()
    arguments = transformers.TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[], max_steps=3, per_device_train_batch_size=2,
                                               disable_tqdm=True, save_strategy="no", logging_steps=1)
    callbacks = [] if folder == "-" else [offloadd.TrainerCallback(nvme_path=folder, ram="128MiB", job="ranks", **options)]
    made = transformers.Trainer(model=model, args=arguments, train_dataset=Data(), callbacks=callbacks)
    made.remove_callback(transformers.PrinterCallback)
    made.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in made.state.log_history if "loss" in entry] + [p.tolist() for p in model.parameters()]


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
