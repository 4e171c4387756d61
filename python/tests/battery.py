"""Runs small training programs twice, in memory and offloaded, and compares everything they return, and the weights, bit for bit.

A case is a function of a Run. It builds what it trains from the run, calls run.attach() where a script would, and returns what it has
seen. It is run in memory once per type, and offloaded with the least memory that trains (gradients on the drive) or with twice that.

    serving_test.py [--all] [--loud] [--types=TYPE,...] [NAME...]

--all: each type with each memory; --loud: what the daemons say; --types: in place of a case's own, where it has both of the usual ones
"""

import contextlib
import gc
import io
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings

import torch

import cases
import offloadd
from offloadd import in_memory

VOCABULARY, WIDTH, LENGTH = 256, 48, 12
_cases = []
device = None  # where models and batches are, if not in memory of the host
reference = contextlib.nullcontext  # what a run in memory is inside of
unattached = contextlib.nullcontext  # what an offloaded one is inside of, for what trains before it is attached
USUAL_TYPES = ("fp32", "bf16")


def case(function=None, *, types=USUAL_TYPES, tolerance=0.0, refused=None, memory=("floor", "double"), may_refuse=None):
    """`refused`: the number of the error that the offloaded run must end with; `tolerance`: of what is not promised bit for bit, in
    fp32; `may_refuse`: an error that is right, too."""
    if function is None:
        return lambda each: case(each, types=types, tolerance=tolerance, refused=refused, memory=memory, may_refuse=may_refuse)
    function.may_refuse = may_refuse
    _cases.append((function, types, tolerance, refused, memory))
    return function


def retype(types, names=None):
    """Gives the cases so far, or those of these names and no others, other types in place of the usual ones."""
    _cases[:] = [(function, types if its == USUAL_TYPES else its, *rest) for function, its, *rest in _cases
                 if names is None or function.__name__ in names]
    missing = set(names or ()) - {function.__name__ for function, *_ in _cases}
    assert not missing, missing


# ---- What is trained ---------------------------------------------------------------------------

class Block(torch.nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width, bias=False), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class Transformer(torch.nn.Module):
    def __init__(self, layers=2, tied=False, checkpointing=None, width=WIDTH):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, VOCABULARY, bias=False)
        self.checkpointing = checkpointing
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(self.norm(x))


class Run:
    def __init__(self, memory, dtype, folder):
        self.memory, self.dtype, self.folder = memory, dtype, folder
        self.offloaded = memory is not None
        self.handles, self.models = [], []
        self._jobs = 0

    def model(self, **options):
        return self.make(lambda: Transformer(**options))

    def make(self, build):
        """Another model, with the weights of a seed."""
        torch.manual_seed(0)
        model = build().to(self.dtype)
        return model if device is None else model.to(device)

    def attach(self, model, optimizer, **options):
        models = model if isinstance(model, list) else [model]
        self.models += models
        if not self.offloaded:
            optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
            handle = in_memory.Handle(models, optimizers, {"job": "memory", "device": options.get("device"), "average": options.get("average")})
        else:
            if "job" not in options:
                self._jobs += 1
            options = {"job": f"job{self._jobs}", **options}
            if device is not None and self.memory == "floor":
                options = {"gpu_ram": gpu_ram_of(models), **options}
            options.setdefault("nvme_path", self.folder)
            options = {"spill_gradients": self.memory == "floor", **options}
            handle = offloadd.attach(model, optimizer, ram=self.ram(models, optimizer, bool(options.get("unfreeze")), options.get("average")),
                                     **options)
        self.handles.append(handle)
        return handle

    def attach_constructed(self, model, optimizer):
        """What was built in an init(), to the job that was opened there."""
        if not self.offloaded:
            return self.attach(model, optimizer)
        self.models.append(model)
        self.handles.append(offloadd.attach(model, optimizer))
        return self.handles[-1]

    def end(self):
        """All jobs, whose models are looked at no more: what follows begins as another process does."""
        for handle in self.handles:
            handle.close()
        self.handles.clear()
        self.models.clear()

    def ram(self, models, optimizer, unfreeze=False, average=None):
        """Bytes: the least that trains such a model with any optimizer."""
        if self.memory not in ("floor", "double"):
            return self.memory
        copies = [torch.nn.ParameterList(torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad) for p in m.parameters())
                  for m in models]
        buffers = [(copied, buffer) for copied, m in zip(copies, models) for buffer in m.buffers()]
        for number, (copied, buffer) in enumerate(buffers):  # large ones count
            copied.register_buffer(f"buffer{number}", torch.empty(buffer.shape, dtype=buffer.dtype))
        parameters = [p for each in copies for p in each]
        # On a device what is not spilled is another path: with twice the memory all of them stay in it.
        floor = "floor_bytes" if device is None or self.memory == "floor" else "floor_without_spilling_bytes"
        shapes = [(tuple(each.shape), each.dtype, each.requires_grad) for each in parameters + [buffer for _, buffer in buffers]]
        key = (tuple(shapes), unfreeze, average, floor)
        if key not in _floors:
            try:
                probe = torch.optim.AdamW(parameters, amsgrad=True, fused=True)
                with offloadd.attach(copies, probe, nvme_path=self.folder, ram="1GiB", job="probe", spill_gradients=True,
                                     unfreeze=unfreeze, average=average) as handle:
                    _floors[key] = handle.plan()[floor]
            finally:
                shutil.rmtree(os.path.join(self.folder, "probe"), ignore_errors=True)
                for name in os.listdir(self.folder):
                    if name.startswith("probe"):
                        path = os.path.join(self.folder, name)
                        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        return str(_floors[key] * (1 if self.memory == "floor" else 2))

    def batch(self, step, size=2):
        ids = torch.randint(VOCABULARY, (size, LENGTH), generator=torch.Generator().manual_seed(step))
        return ids if device is None else ids.to(device)

    def loss(self, model, step, size=2):
        ids = self.batch(step, size)
        return torch.nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())

    def train(self, model, optimizer, steps=3, first=0, clip=None, scheduler=None, micro=1):
        """The ordinary loop; losses and norms."""
        told = []
        for step in range(first, first + steps):
            for part in range(micro):
                loss = self.loss(model, step * micro + part) / micro
                loss.backward()
                told.append(loss.item())
            if clip is not None:
                told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
                told.append(scheduler.get_last_lr())
        return told

    @staticmethod
    def steps(optimizer, loss_of, steps=3, first=0):
        """The ordinary loop over `loss_of(step)`; losses."""
        told = []
        for step in range(first, first + steps):
            loss = loss_of(step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
        return told

    def train_with_closures(self, model, optimizer, steps=3, first=0):
        """Each step calls a closure, which computes the loss and its gradients; losses."""
        told = []
        for step in range(first, first + steps):
            def again():
                optimizer.zero_grad()
                loss = self.loss(model, step)
                loss.backward()
                return loss

            told.append(optimizer.step(again).item())
        return told

    def resumed(self, make_optimizer, **how):
        """Three steps, the end of the offloaded run, and three more of its job, with a model and an optimizer made anew."""
        def make():
            model = self.model()
            optimizer = make_optimizer(model)
            if self.offloaded or not self.handles:
                self.attach(model, optimizer, job="resumed")
            return model, optimizer

        model, optimizer = make()
        told = self.train(model, optimizer, **how)
        if self.offloaded:
            self.handles.pop().close()
            self.models.clear()
            model, optimizer = make()
            assert self.handles[-1].step == 3
        return told + self.train(model, optimizer, first=3, **how), states_of(optimizer)

    def fit(self, model, batches, make=None):
        """The ordinary loop of a Hugging Face model; losses and norms."""
        model.train()
        optimizer = (make or (lambda p: torch.optim.AdamW(p, 1e-3, fused=True)))(model.parameters())
        self.attach(model, optimizer)
        told = []
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            told += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
            optimizer.step()
            optimizer.zero_grad()
        return told

    def weights(self):
        return [p.detach().clone() for model in self.models for p in model.parameters()]

    def close(self):
        for handle in self.handles:
            handle.close()


_floors = {}


class Lines:
    """What is told meanwhile."""

    def __enter__(self):
        self._handler, lines = logging.Handler(), []
        self._handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("offloadd").addHandler(self._handler)
        return lines

    def __exit__(self, *_):
        logging.getLogger("offloadd").removeHandler(self._handler)


def saved(data, **options):
    """As a file gives it back."""
    file = io.BytesIO()
    torch.save(data, file, **options)
    file.seek(0)
    return torch.load(file)


def copied_states_of(optimizer):
    """As state_dict() gives them, without what is None."""
    states = sorted(optimizer.state_dict()["state"].items())
    return [{key: value.clone() for key, value in state.items() if value is not None} for _, state in states]


def muon_beside_adamw(model):
    """Muon for matrices, which runs in this process, and AdamW for the rest."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is each for each in matrices)]
    return [torch.optim.Muon(matrices, 1e-2), torch.optim.AdamW(rest, 1e-3, fused=True)]


def states_of(optimizer):
    return [dict(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]


def gpu_ram_of(models):
    """Bytes of a device in which any such model trains: room for three of its largest weights and two gradients."""
    return str(5 * max(256 * (p.numel() * p.element_size() // 256 + 1) for model in models for p in model.parameters()))


# ---- Comparing ---------------------------------------------------------------------------------

def own(result):
    """The same with tensors that outlive the job."""
    if isinstance(result, torch.Tensor):
        with torch.no_grad():
            return result.detach().clone()
    if isinstance(result, dict):
        return {key: own(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [own(value) for value in result]
    return result


def difference(there, here, tolerance, path="result"):
    """What differs first, or None."""
    if isinstance(there, torch.Tensor) and isinstance(here, torch.Tensor):
        if there.shape != here.shape or there.dtype != here.dtype or there.device != here.device:
            return f"{path}: {there.dtype}{list(there.shape)} of {there.device} and {here.dtype}{list(here.shape)} of {here.device}"
        with torch.no_grad():
            there, here = there.detach().clone(), here.detach().clone()
            if torch.equal(there, here) or (there.is_floating_point() and torch.equal(there.nan_to_num(7), here.nan_to_num(7))):
                return None
            if not there.is_floating_point():
                return f"{path} differs"
            most = (there.double() - here.double()).abs().max().item()
            return None if most <= tolerance else f"{path} differs by {most:g} in {int((there != here).sum())} of {there.numel()}"
    if type(there) is not type(here):
        return f"{path}: {type(there).__name__} and {type(here).__name__}"
    if isinstance(there, dict):
        if list(there) != list(here):
            return f"{path}: keys {list(there)} and {list(here)}"
        return next((d for key in there if (d := difference(there[key], here[key], tolerance, f"{path}[{key!r}]"))), None)
    if isinstance(there, (list, tuple)):
        if len(there) != len(here):
            return f"{path}: {len(there)} and {len(here)} items"
        return next((d for i, (a, b) in enumerate(zip(there, here)) if (d := difference(a, b, tolerance, f"{path}[{i}]"))), None)
    if isinstance(there, float):
        if there == here or (there != there and here != here) or abs(there - here) <= tolerance:
            return None
        return f"{path}: {there!r} and {here!r}"
    return None if there == here else f"{path}: {there!r} and {here!r}"


def _execute(function, memory, dtype):
    """(result and weights, error)."""
    folder = tempfile.mkdtemp(prefix="battery-", dir=os.environ.get("TEST_TMPDIR") or None)
    run = Run(memory, dtype, folder)
    torch.manual_seed(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with reference() if memory is None else unattached():
                result = own(function(run))
            return (result, run.weights() if all(handle.is_open for handle in run.handles) else []), None
    except Exception as error:  # noqa: the case says which one is right
        return None, error
    finally:
        run.close()
        shutil.rmtree(folder, ignore_errors=True)


def _verdict(function, dtype, tolerance, refused, memory, expected):
    result, error = _execute(function, memory, dtype)
    if refused is not None:
        if isinstance(error, offloadd.Error) and error.id == refused:
            return None
        return f"expected OFD-{refused}, got {error!r}"
    if error is not None:
        is_right = isinstance(error, offloadd.Error) and error.id == function.may_refuse
        return None if is_right else "".join(traceback.format_exception(error))
    return difference(expected, result, tolerance * (64 if dtype == torch.bfloat16 else 1))


def _types(name):
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64, "fp16": torch.float16}[name]


def _variants():
    """(number of the case, its type, "NAME/TYPE")."""
    return [(number, type_name, f"{function.__name__}/{type_name}")
            for number, (function, types, *_) in enumerate(_cases) for type_name in types]


def chosen(only):
    """Those of _variants() whose names have one of these in them; all without."""
    return [variant for variant in _variants() if not only or any(each in variant[2] for each in only)]


def results_of(number, type_name, everything):
    """(name, what is wrong or None, seconds) of a case with one type."""
    function, types, tolerance, refused, memories = _cases[number]
    name, expected, begin = f"{function.__name__}/{type_name}", None, time.monotonic()
    if refused is None:
        expected, error = _execute(function, None, _types(type_name))
        if error is not None:
            yield f"{name}/memory", "".join(traceback.format_exception(error)), 0.0
            return
    # Without --all, types take turns with memories.
    turn = (number + types.index(type_name)) % len(memories)
    for memory in memories if everything else memories[turn:turn + 1]:
        wrong = _verdict(function, _types(type_name), tolerance, refused, memory, expected)
        if wrong and refused is None and device is not None:  # kernels of a device may have no fixed order
            again, _ = _execute(function, None, _types(type_name))
            if itself := difference(expected, again, tolerance):
                wrong += f"\nin memory it differs from itself, too: {itself}"
        yield f"{name}/{memory}", wrong, time.monotonic() - begin
        begin = time.monotonic()


def _results(only, everything):
    """(name, what is wrong or None, seconds) of every case and variant."""
    for number, type_name, _ in cases.share(chosen(only)):
        yield from results_of(number, type_name, everything)


def leave_out(reason, names=("all",)):
    """Ends a program whose cases cannot run here."""
    print(f"skipped: {reason}")
    cases.write_xml([(name, None, None) for name in cases.share(names)])
    sys.exit(0)


@contextlib.contextmanager
def _quiet():
    """Daemons tell what they do; that is kept for failures only."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as messages:
        os.dup2(messages.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def main():
    torch.set_num_threads(1)
    gc.freeze()  # collections look at what cases make, not at what was imported
    results = []
    for option in sys.argv[1:]:
        if option.startswith("--types="):
            retype(tuple(option.split("=")[1].split(",")))
    with contextlib.nullcontext() if "--loud" in sys.argv else _quiet():
        for name, wrong, seconds in _results([each for each in sys.argv[1:] if not each.startswith("-")], "--all" in sys.argv):
            results.append((name, wrong, seconds))
            print(f"{'FAILED' if wrong else 'ok':<7} {name} {seconds:.2f} s" + (f"\n{wrong}" if wrong else ""), flush=True)
    cases.write_xml(results)
    failed = sum(1 for _, wrong, _ in results if wrong)
    print(f"{len(results) - failed} equal or refused as they should be, {failed} failed")
    return 1 if failed or not results else 0
