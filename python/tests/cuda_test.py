"""Models on a GPU: the cases of device_test.py on CUDA, and those that only CUDA has, in memory and offloaded, compared bit by bit.

    cuda_test.py [--all] [--list] [--brief] [--workers=N] [--seconds=N] [--log=FILE] [NAME...]

--brief: failures only; --workers: processes at once; --seconds: of a case; --log: a file for whole texts. OFFLOADD_TEST_DEVICE=cpu has the
cases of this file on the host, =privateuseone:0 all that the stand-in has; otherwise every case is skipped where there is no GPU.

In memory the optimizers step on the host, as offloaded (host_steps.py); all that is said here of bits is said of torch's deterministic kernels."""

import copy
import functools
import gc
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import unittest.mock

os.environ.setdefault("OFFLOADD_TEST_DEVICE", "cuda:0")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint

import device_test  # before the package, whose library it names for the stand-in
import battery
import cases
import host_steps
import isolated
import offloadd
from battery import VOCABULARY, WIDTH, Transformer, case, states_of
from device_test import DEVICE, IS_STANDIN, ONE, adamw

IS_CUDA = DEVICE.type == "cuda"
HERE = os.path.dirname(os.path.abspath(__file__))
FP32 = {"types": ("fp32",)}
OF_DEVICES = len(battery._cases)  # those of device_test.py are before
HEAVY = []  # names of cases that import large libraries: two processes have them all
PROGRAMS = []  # of those that run others, which take long and begin first


def gpu_case(function=None, **options):
    """One that only CUDA has."""
    if function is None:
        return lambda each: gpu_case(each, **options)
    return case(function, **options) if IS_CUDA else function


def torchs_case(function=None, **options):
    """One of what torch has not for devices such as the stand-in."""
    if function is None:
        return lambda each: torchs_case(each, **options)
    return function if IS_STANDIN else case(function, **options)


def place(value):
    return value if battery.device is None else value.to(battery.device)


def trained(run, build, steps=4, make=adamw, look=lambda model: None, **how):
    """The ordinary loop: what it tells, state, buffers."""
    model = run.make(build)
    optimizer = make(model)
    run.attach(model, optimizer)
    torch.manual_seed(7)
    told = run.train(model, optimizer, steps=steps, **how)
    return told, look(model), states_of(optimizer), list(model.buffers())


def custom(run, build, loss_of, steps=4, make=adamw):
    """As trained(), with `loss_of(model, step)`."""
    model = run.make(build)
    optimizer = make(model)
    run.attach(model, optimizer)
    torch.manual_seed(7)
    told = run.steps(optimizer, lambda step: loss_of(model, step), steps)
    return told, states_of(optimizer), list(model.buffers())


def random_numbers(step, *shape):
    return place(torch.randn(*shape, generator=torch.Generator().manual_seed(step)))


# ---- Random numbers, mixed precision -----------------------------------------------------------


class Dropping(Transformer):
    def forward(self, ids):
        x = functional.dropout(self.embed(ids), 0.2, self.training)
        for block in self.blocks:
            if self.checkpointing is None:
                x = functional.dropout(block(x), 0.1, self.training)
            else:
                x = checkpoint(lambda x, block=block: functional.dropout(block(x), 0.1, self.training), x,
                               use_reentrant=self.checkpointing == "reentrant")
        return self.head(self.norm(x))


@case
def dropout(run):
    """The generator of the device is drawn from as in memory."""
    told = trained(run, Dropping, clip=0.5, micro=2)
    return told, torch.get_rng_state(), torch.cuda.get_rng_state() if IS_CUDA else None


@case
def checkpointing_with_dropout(run):
    return trained(run, lambda: Dropping(checkpointing="at will"), micro=2)


@case(**FP32)
def checkpointing_reentrant_with_dropout(run):
    return trained(run, lambda: Dropping(checkpointing="reentrant"))


def autocast(name, dtype, scaled=False, clip=None, micro=1, make=adamw, **options):
    def function(run):
        model = run.make(Dropping)
        optimizer = make(model)
        run.attach(model, optimizer)
        torch.manual_seed(7)
        scaler, told = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=2, enabled=scaled), []
        for step in range(5):
            for part in range(micro):
                with torch.autocast(DEVICE.type, dtype=dtype):
                    loss = run.loss(model, step * micro + part) / micro
                scaler.scale(loss * (float("inf") if scaled and step == 2 else 1)).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                told.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            told += [loss.item(), scaler.get_scale()]
        return told, states_of(optimizer)

    function.__name__ = name
    torchs_case(function, **{**FP32, **options})


autocast("autocast_bf16", torch.bfloat16)
autocast("autocast_bf16_clipped", torch.bfloat16, clip=0.3)
autocast("autocast_fp16_scaled", torch.float16, scaled=True)
autocast("autocast_fp16_scaled_clipped", torch.float16, scaled=True, clip=0.3)
autocast("autocast_fp16_scaled_clipped_accumulated", torch.float16, scaled=True, clip=0.3, micro=3)
autocast("autocast_fp16_scaled_not_fused", torch.float16, scaled=True, clip=0.3, make=lambda m: AdamW(m.parameters(), 1e-2))
autocast("autocast_fp16_scaled_sgd", torch.float16, scaled=True, make=lambda m: SGD(m.parameters(), 0.1, momentum=0.9))


@case(types=("fp32",), tolerance=1e-5)
def optimizer_of_the_device_is_close(run):
    """Without steps on the host in memory: what CUDA's own kernels give."""
    model = run.model()
    optimizer = SGD(model.parameters(), 0.01)
    run.attach(model, optimizer)
    if run.offloaded or not IS_CUDA:
        return run.train(model, optimizer)
    told = []
    for step in range(3):
        loss = run.loss(model, step)
        loss.backward()
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), [p.grad for p in model.parameters()], alpha=-0.01)
        optimizer.zero_grad()
        told.append(loss.item())
    return told


# ---- Kernels -----------------------------------------------------------------------------------


def pictures(layout=torch.contiguous_format):
    """A network of convolutions."""
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, groups=2, bias=False),
                         nn.BatchNorm2d(16), nn.GELU(), nn.ConvTranspose2d(16, 8, 2), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                         nn.Dropout(0.1), nn.Linear(32, 4)).to(memory_format=layout)


def convolutions(name, layout=torch.contiguous_format, dtype=None, **options):
    def loss_of(model, step):
        x = random_numbers(step, 4, 3, 16, 16).to(next(model.parameters()).dtype)
        with torch.autocast(DEVICE.type, dtype=dtype, enabled=dtype is not None):
            out = model(x.to(memory_format=layout))
        return functional.cross_entropy(out.float(), place(torch.arange(4)))

    def function(run):
        told = custom(run, lambda: pictures(layout), loss_of)
        run.models[0].eval()
        with torch.no_grad():
            return told, loss_of(run.models[0], 9)

    function.__name__ = name
    torchs_case(function, **{**FP32, **options})


convolutions("convolutions_and_batch_norm", types=("fp32", "bf16"))
convolutions("convolutions_channels_last", torch.channels_last)
convolutions("convolutions_under_autocast", torch.channels_last, torch.bfloat16)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        dropped = 0.1 if self.training else 0.0
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped).transpose(1, 2).flatten(2))


def attention(backend):
    def function(run):
        def loss_of(model, step):
            with torch.nn.attention.sdpa_kernel(backend), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                return model(random_numbers(step, 2, 32, 64)).float().square().mean()

        torch.use_deterministic_algorithms(True)  # where it only warns, the backward of one of them adds in no fixed order
        try:
            return custom(run, Attends, loss_of)
        finally:
            torch.use_deterministic_algorithms(True, warn_only=True)

    function.__name__ = f"attention_{backend.name.lower()}"
    gpu_case(function, **FP32)


for each in (torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
    attention(each)


@case(types=("fp32", "bf16"))
def encoder_layers(run):
    """In evaluation they are one operator of torch."""
    def build():
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)

    def loss_of(model, step):
        return model(random_numbers(step, 2, 8, 32).to(run.dtype)).float().square().mean()

    told = custom(run, build, loss_of)
    model = run.models[0].eval()
    with torch.no_grad():
        return told, loss_of(model, 9), loss_of(model.train(), 10)


def recurrent(kind):
    """Whose weights are parts of one memory, as cuDNN has them."""
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.read, self.head = nn.Embedding(VOCABULARY, 16), kind(16, 24, 2, batch_first=True, dropout=0.1), nn.Linear(24, 8)

        def forward(self, ids):
            return self.head(self.read(self.embed(ids))[0])

    def function(run):
        return custom(run, Reads, lambda model, step: model(run.batch(step)).square().mean())

    function.__name__ = f"recurrent_{kind.__name__.lower()}"
    torchs_case(function, **FP32)


recurrent(nn.LSTM)
recurrent(nn.GRU)


@case(types=("fp32",), memory=("double",), may_refuse=1303)
def vectors_of_all_parameters(run):
    """Which the window may be too small for."""
    def look(model):
        vector = nn.utils.parameters_to_vector(model.parameters())
        norm = nn.utils.get_total_norm([p.detach() for p in model.parameters()], foreach=False)
        return vector.sum(dtype=torch.float64), norm, [(p.get_device(), p.is_cuda, str(p.device)) for p in model.parameters()]

    return trained(run, Transformer, look=look)


# ---- Streams, threads, copies ------------------------------------------------------------------


def streamed(name, loop):
    def function(run):
        model = run.make(Dropping)
        optimizer = adamw(model)
        run.attach(model, optimizer)
        torch.manual_seed(7)
        return loop(run, model, optimizer), states_of(optimizer)

    function.__name__ = name
    gpu_case(function, types=("fp32", "bf16"))


def beside(stream):
    """In this stream, in the order that the program has."""
    class Beside:
        def __enter__(self):
            self.current = torch.cuda.current_stream()
            stream.wait_stream(self.current)
            self.context = torch.cuda.stream(stream)
            self.context.__enter__()

        def __exit__(self, *failure):
            self.context.__exit__(*failure)
            self.current.wait_stream(stream)

    return Beside()


def forward_in_a_stream(run, model, optimizer):
    stream, told = torch.cuda.Stream(), []
    for step in range(4):
        with beside(stream):
            loss = run.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


def all_in_a_stream(run, model, optimizer):
    with beside(torch.cuda.Stream()):
        return run.train(model, optimizer, clip=0.5, micro=2)


def evaluated_in_another_stream(run, model, optimizer):
    stream, told = torch.cuda.Stream(), []
    for step in range(4):
        told += run.train(model, optimizer, steps=1, first=step)
        model.eval()
        with beside(stream), torch.no_grad():
            evaluated = run.loss(model, 100 + step)
        model.train()
        told.append(evaluated.item())
    return told


def evaluated_in_a_thread(run, model, optimizer):
    told = []
    for step in range(3):
        told += run.train(model, optimizer, steps=1, first=step)

        def evaluate():
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                told.append(run.loss(model, 100).item())

        torch.cuda.synchronize()
        model.eval()
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        model.train()
    return told


streamed("forward_in_a_stream", forward_in_a_stream)
streamed("all_in_a_stream", all_in_a_stream)
streamed("evaluated_in_another_stream", evaluated_in_another_stream)
streamed("evaluated_in_a_thread", evaluated_in_a_thread)


@case(**FP32)
def batches_of_a_loader(run):
    """Pinned, and copied while the host goes on."""
    data = [torch.randint(VOCABULARY, (12,), generator=torch.Generator().manual_seed(i)) for i in range(12)]
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=IS_CUDA, num_workers=1)
    model = run.make(Dropping)
    optimizer = adamw(model)
    run.attach(model, optimizer)
    torch.manual_seed(7)
    told = []
    for ids in loader:
        ids = ids.to(DEVICE, non_blocking=True)
        loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        told.append(loss.item())
    return told


@torchs_case
def values_go_to_the_host(run):
    """In every way that torch has."""
    model = run.model()
    optimizer = adamw(model)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    ways = [[p.detach().to("cpu") for p in model.parameters()], [p.cpu().detach() for p in model.parameters()],
            [p.data.float().cpu().numpy().copy().sum().item() for p in model.parameters()],
            [p.detach().to("cpu", non_blocking=True) for p in model.parameters()], {k: v.cpu() for k, v in model.state_dict().items()}]
    if IS_CUDA:
        pinned = [torch.empty(p.shape, dtype=p.dtype, pin_memory=True) for p in model.parameters()]
        for value, parameter in zip(pinned, model.parameters()):
            value.copy_(parameter.detach(), non_blocking=True)
        torch.cuda.synchronize()
        ways.append(pinned)
    return told, ways, run.train(model, optimizer, first=3)


@torchs_case
def saved_and_loaded(run):
    """torch.save, and torch.load with each kind of map_location."""
    model = run.make(Dropping)
    optimizer = adamw(model)
    run.attach(model, optimizer)
    torch.manual_seed(7)
    told, file = run.train(model, optimizer), io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    loaded = []
    for where in ("cpu", DEVICE, None, str(DEVICE), lambda storage, tag: storage):
        file.seek(0)
        loaded.append(torch.load(file, map_location=where))
    kept = copy.deepcopy([(each["model"], each["optimizer"]["state"]) for each in loaded])  # in memory, what is loaded from the device goes on as state
    told += run.train(model, optimizer, first=3)
    for each in loaded[:2]:
        model.load_state_dict(each["model"])
        optimizer.load_state_dict(each["optimizer"])
        told += run.train(model, optimizer, first=3)
    return told, kept, states_of(optimizer)


# ---- Where models come from --------------------------------------------------------------------


@case
def built_on_the_host_and_attached_there(run):
    torch.manual_seed(0)
    model = Dropping().to(run.dtype)
    optimizer = adamw(model)
    run.attach(model, optimizer, **({} if battery.device is None else {"device": str(DEVICE)}))
    assert all(p.device == DEVICE for p in model.parameters())
    assert model.to(DEVICE) is model
    torch.manual_seed(7)
    return run.train(model, optimizer, clip=0.5), states_of(optimizer)


@gpu_case(**FP32)
def built_on_the_device(run):
    """With the device as torch's default, and as an argument."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = nn.Sequential(Dropping(), nn.Linear(VOCABULARY, VOCABULARY, device=DEVICE))
    optimizer = adamw(model)
    run.attach(model, optimizer)
    return run.train(model, optimizer), states_of(optimizer)


@case(types=("fp32", "bf16"), memory=("256MiB",))
def born_in_init(run):
    torch.manual_seed(0)
    options = {"job": "born", **({} if battery.device is None else {"device": str(DEVICE), "gpu_ram": "64MiB"})}
    if run.offloaded:
        with offloadd.init(nvme_path=run.folder, ram="256MiB", **options):
            model = Dropping().to(run.dtype)
    else:
        model = Dropping().to(run.dtype)
    optimizer = adamw(model)
    run.attach(model, optimizer, **options)
    assert all(p.device == DEVICE for p in model.parameters())
    torch.manual_seed(7)
    return run.train(model, optimizer, clip=0.5), states_of(optimizer)


class Adapted(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear, width = linear.requires_grad_(False), linear.in_features
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, linear.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x):
        return self.linear(x) + self.up(functional.dropout(self.down(x), 0.1, self.training))


def with_adapters():
    model = Transformer().requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.up = Adapted(block.qkv), Adapted(block.up)
    return model


@case
def frozen_model_with_adapters(run):
    model = run.make(with_adapters)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, fused=True)
    run.attach(model, optimizer)
    torch.manual_seed(7)
    told = run.train(model, optimizer, clip=0.5, micro=2)
    return told, states_of(optimizer), {k: v for k, v in model.state_dict().items() if "down" in k or "up" in k}


@case(**FP32)
def copied_teacher(run):
    """A model of the job and a copy of it outside."""
    model = run.make(Dropping)
    optimizer = Adam(model.parameters(), 1e-2)
    run.attach(model, optimizer)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    torch.manual_seed(7)
    told = []
    for step in range(4):
        ids = run.batch(step)
        with torch.no_grad():
            wanted = teacher(ids).softmax(-1)
        told += run.steps(optimizer, lambda step: functional.cross_entropy(model(ids).flatten(0, 1), wanted.flatten(0, 1)), 1)
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), model.parameters()):
                ours.lerp_(theirs, 0.1)
    return told, list(teacher.parameters())


# ---- Memory ------------------------------------------------------------------------------------


_in_memory = {}


@gpu_case(types=("fp32", "bf16"))
def memory_is_that_of_the_window_and_of_activations(run):
    width, layers = 512, 12
    little = nn.Linear(width, width, device=DEVICE, dtype=run.dtype)  # what cuBLAS keeps for the threads of forward and backward
    little(random_numbers(0, width, width).to(run.dtype)).sum().backward()
    del little
    held = torch.cuda.memory_allocated()  # the battery has what the run in memory has given
    model = run.make(lambda: nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]))
    weights, largest = sum(p.numel() * p.element_size() for p in model.parameters()), width * width * model[0].weight.element_size()

    def loss_of(step):
        return model(random_numbers(step, 256, width).to(run.dtype)).float().square().mean()

    def peak_of(train):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        told = train()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held, told

    if not run.offloaded:  # activations, and a gradient at a time
        hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
        _in_memory[run.dtype] = peak_of(lambda: loss_of(0).backward())[0] - weights
        for hook in hooks:
            hook.remove()
    optimizer = adamw(model)
    handle = run.attach(model, optimizer, **({"gpu_ram": "8MiB"} if run.offloaded else {}))
    peak, told = peak_of(lambda: run.steps(optimizer, loss_of))
    if run.offloaded:
        statistics = handle.statistics()
        assert 0 < statistics["gpu_peak_bytes"] <= statistics["gpu_ram_bytes"] <= 8 << 20, statistics
        # Gradients of gpu_ram are torch's memory, the window of weights is not.
        most = _in_memory[run.dtype] + statistics["gpu_ram_bytes"] - handle.plan()["gpu_window_bytes"] + 2 * largest + (1 << 20)
        assert peak <= most, f"{peak >> 10} KiB, at most {most >> 10}: activations {_in_memory[run.dtype] >> 10}, weights {weights >> 10}, {statistics}"
    return told


@gpu_case(**FP32)
def cache_emptied_between_steps(run):
    def look(step):
        torch.cuda.empty_cache()
        return run.loss(model, step)

    model = run.make(Dropping)
    optimizer = adamw(model)
    run.attach(model, optimizer)
    torch.manual_seed(7)
    return run.steps(optimizer, look), states_of(optimizer)


@case(**FP32)
def two_jobs_on_one_device(run):
    """Trained in turns, the second by what the first one says."""
    models = [run.make(Dropping), run.make(lambda: nn.Sequential(nn.Linear(VOCABULARY, 64), nn.GELU(), nn.Linear(64, 1)))]
    optimizers = [adamw(models[0]), Adam(models[1].parameters(), 1e-2)]
    for model, optimizer in zip(models, optimizers):
        run.attach(model, optimizer)
    torch.manual_seed(7)
    told = []
    for step in range(3):
        told += run.steps(optimizers[1], lambda step: models[1](models[0](run.batch(step)).detach().to(run.dtype)).square().mean(), 1, step)
        loss = run.loss(models[0], step) - 0.01 * models[1](models[0](run.batch(step))).mean()
        loss.backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        told.append(loss.item())
    return told, [states_of(optimizer) for optimizer in optimizers]


# ---- What is updated on the device -------------------------------------------------------------


class Wide(nn.Module):
    """Whose tensors are large enough to stay."""
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(VOCABULARY, 192), nn.Linear(192, 256), nn.BatchNorm1d(256)
        self.down = nn.Linear(256, VOCABULARY)

    def forward(self, ids):
        x = functional.dropout(self.up(self.embed(ids)).transpose(1, 2), 0.1, self.training)
        return self.down(self.norm(x).transpose(1, 2))


def stays(name, make):
    def function(run):
        model = run.make(Wide)
        optimizer = make(model.parameters())
        options = {"durability": "checkpoint:3", "gpu_ram": "auto" if IS_CUDA else "64MiB"} if run.offloaded else {}
        handle = run.attach(model, optimizer, **options)
        if run.offloaded and battery.device is not None:
            assert "updated on the device: 3 tensors" in handle.plan().text, handle.plan().text
        torch.manual_seed(7)
        told = run.train(model, optimizer, steps=4, clip=0.5, micro=2)
        model.eval()
        with torch.no_grad():
            told.append(run.loss(model, 50).item())
        model.train()
        told.append(battery.copied_states_of(optimizer))
        handle.checkpoint()
        told += run.train(model, optimizer, steps=4, first=4)
        kept = battery.own({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        told += run.train(model, optimizer, first=8)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        told += run.train(model, optimizer, steps=2, first=8)
        handle.wait_durable()
        return told, states_of(optimizer), list(model.buffers())

    function.__name__ = f"updated_there_by_{name}"
    case(function, memory=("double",))


stays("adamw", lambda p: AdamW(p, 1e-2))
stays("fused_adamw", lambda p: AdamW(p, 1e-2, fused=True))
stays("adam", lambda p: Adam(p, 1e-3, weight_decay=0.1))
stays("sgd", lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True))


# ---- What is refused ---------------------------------------------------------------------------


def id_of(error):
    """Of the first of its causes that is offloadd's."""
    while error is not None and not isinstance(error, offloadd.Error):
        error = error.__cause__ or error.__context__
    return error and error.id


@case(**FP32)
def told_how_much_gpu_ram_is_needed(run):
    """Which is enough then."""
    model = run.model()
    optimizer = adamw(model)
    options = {}
    if run.offloaded and battery.device is not None:
        try:
            run.attach(model, optimizer, gpu_ram="64KiB")
        except offloadd.Error as error:
            assert error.id == 2003, error
            options["gpu_ram"] = re.search(r"Set gpu_ram to (\d+) bytes", str(error)).group(1)
            run.models.clear()
    run.attach(model, optimizer, **options)
    assert not run.offloaded or battery.device is None or options
    return run.train(model, optimizer), states_of(optimizer)


@torchs_case(**FP32)
def compiled(run):
    """Runs as it is written."""
    model = run.make(Dropping)
    optimizer = adamw(model)
    run.attach(model, optimizer)
    torch.manual_seed(7)
    return run.train(torch.compile(model) if run.offloaded else model, optimizer), states_of(optimizer)


@gpu_case(types=("fp32",))
def graph_of_cuda_is_refused(run):
    """And training goes on."""
    model = run.model()
    optimizer = adamw(model)
    run.attach(model, optimizer)
    told, ids = run.train(model, optimizer), run.batch(0)
    if run.offloaded:
        found = None
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                model(ids)
        except Exception as error:  # noqa: torch's own may be around it
            found = error
        assert id_of(found) == 2005, repr(found)
        torch.cuda.synchronize()
    return told + run.train(model, optimizer, first=3)


@gpu_case(types=("fp32",))
def graph_of_another_model(run):
    """Which is not attached."""
    model = run.model()
    optimizer = adamw(model)
    run.attach(model, optimizer)
    told, x = run.train(model, optimizer), random_numbers(0, 4, WIDTH)
    torch.manual_seed(3)
    other = nn.Linear(WIDTH, WIDTH, device=DEVICE)
    stream = torch.cuda.Stream()
    with beside(stream), torch.no_grad():
        other(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = other(x)
    for step in range(3):
        told += run.train(model, optimizer, steps=1, first=3 + step)
        graph.replay()
        told.append(y.clone())
    return told


# ---- Programs ----------------------------------------------------------------------------------


PRELUDE = {
    "cuda": """
import json, os, sys, torch
import host_steps
host_steps.reproducible()
DEVICE = "cuda:0"
""", "cpu": """
import json, os, sys, torch
DEVICE = "cpu"
""", "standin": """
import json, os, sys, torch
import device_test
device_test.use_device()
DEVICE = "privateuseone:0"
"""}["standin" if IS_STANDIN else DEVICE.type]


def process_of(run, text, *arguments, launcher=(), **environment):
    path = os.path.join(run.folder, "script.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(PRELUDE + text)
    around = launcher if run.offloaded else (os.path.join(HERE, "host_steps.py"),)
    return subprocess.Popen([sys.executable, *around, path, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


def program(function):
    PROGRAMS.append(function.__name__)
    return case(function, **ONE)


def said_by(run, text, *arguments, **how):
    """What the last line says."""
    process = process_of(run, text, *arguments, **how)
    try:
        output, errors = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode == 0, f"{process.returncode}: {errors}"
    return json.loads(output.splitlines()[-1])


UNTOUCHED = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 64))
model.to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
told = []
for step in range(6):
    ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step)).to(DEVICE, non_blocking=True)
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    told.append(loss.item())
torch.save({name: value.cpu() for name, value in model.state_dict().items()}, os.path.join(sys.argv[1], "model.pt"))
kept = torch.load(os.path.join(sys.argv[1], "model.pt"), map_location="cpu")
print(json.dumps([told, {name: value.tolist() for name, value in kept.items()}, hasattr(optimizer, "_offload_part")]))
"""


@program
def untouched_script(run):
    launcher = ("-m", "offloadd", "--pool", run.folder, "--ram", "128MiB")
    *told, attached = said_by(run, UNTOUCHED, run.folder, launcher=launcher)
    assert attached == run.offloaded
    return told


@program
def untouched_script_in_a_little_of_the_device(run):
    launcher = ("-m", "offloadd", "--pool", run.folder, "--ram", "128MiB")
    environment = {} if battery.device is None or not run.offloaded else {"OFFLOADD_GPU_RAM": "128KiB"}
    return said_by(run, UNTOUCHED, run.folder, launcher=launcher, **environment)[:-1]


KILLED = """
import pickle
import offloadd
import cuda_test
folder, kill_at, steps = sys.argv[1], int(sys.argv[2]), 8
durability, build = sys.argv[3:]
torch.manual_seed(0)
model = getattr(cuda_test, build)().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
handle, begin, told = None, 0, []
if folder != "-":
    handle = offloadd.attach(model, optimizer, nvme_path=folder, ram="128MiB", job="killed", durability=durability)
    begin = handle.step
module = torch.cuda if DEVICE.startswith("cuda") else torch
module.manual_seed(5)
if handle is not None and handle.trainer_state:
    module.set_rng_state(torch.tensor(list(handle.trainer_state), dtype=torch.uint8))
for step in range(begin, steps):
    ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(step)).to(DEVICE)
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    if handle is not None:
        handle.trainer_state = bytes(module.get_rng_state().tolist())
    optimizer.step()
    optimizer.zero_grad()
    if step + 1 == kill_at:
        if durability == "step":
            handle.wait_durable()
        os.kill(os.getpid(), 9)
print(json.dumps([loss.item(), [p.tolist() for p in (*model.parameters(), *model.buffers())]]))
"""


def killed(run, durability, build):
    if not run.offloaded:
        return said_by(run, KILLED, "-", "0", durability, build)
    for kill_at in ("3", "6"):
        process = process_of(run, KILLED, run.folder, kill_at, durability, build)
        _, errors = process.communicate(timeout=150)
        assert process.returncode == -signal.SIGKILL, errors
    return said_by(run, KILLED, run.folder, "0", durability, build)


@program
def killed_and_resumed(run):
    """With the generator of the device, which the program keeps in the job."""
    return killed(run, "step", "Dropping")


@program
def killed_between_checkpoints(run):
    """Of tensors that stay on the device: the job goes on at the last one."""
    return killed(run, "checkpoint:2", "Wide")


# ---- DeepSpeed, Hugging Face, Accelerate -------------------------------------------------------


def deepspeed_door(name, config, is_moved, names_device=True):
    """As with DeepSpeed, which brings the model to the device itself."""
    def function(run):
        torch.manual_seed(0)
        model, told = Dropping(), []
        if is_moved:
            model.to(DEVICE)
        options = {"nvme_path": run.folder, "ram": "256MiB", "job": "door"} if run.offloaded else {}
        if battery.device is not None and (names_device or not run.offloaded):
            options |= {"device": str(DEVICE)}
        if battery.device is not None and run.offloaded:
            options |= {"gpu_ram": "64MiB"}
        with unittest.mock.patch.dict(os.environ, {} if run.offloaded else {"OFFLOADD_DISABLE": "1"}):
            offloadd.deepspeed.setup.set_installed(options)
            engine, *_ = offloadd.deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
                "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **config})
            torch.manual_seed(7)
            for step in range(6):
                ids = run.batch(step).to(engine.device)
                loss = functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
                engine.backward(loss)
                engine.step()
                told += [loss.item(), str(engine.device)]
            told.append([p.detach().clone() for p in model.parameters()])
            engine.destroy()
        return told

    function.__name__ = name
    case(function, **ONE)


ZERO3 = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}
deepspeed_door("deepspeed_door", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, True)
deepspeed_door("deepspeed_door_bf16", {"zero_optimization": ZERO3, "bf16": {"enabled": True}}, False)
if IS_CUDA:
    deepspeed_door("deepspeed_door_that_is_told_of_no_device", {"zero_optimization": ZERO3}, False, names_device=False)


def heavy(function=None, **options):
    """One that imports Hugging Face's libraries."""
    if function is None:
        return lambda each: heavy(each, **options)
    if IS_STANDIN or importlib.util.find_spec("transformers") is None:
        return function
    HEAVY.append(function.__name__)
    return case(function, **{**ONE, **options})


def heavy_program(function):
    """One whose programs import them."""
    return function if IS_STANDIN or importlib.util.find_spec("transformers") is None else program(function)


@functools.cache
def libraries():
    import transformers

    import families_test

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers, families_test


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        ids = torch.randint(3, 128, (10,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def fit(run, family, callback=True, optimizer=False, prepare=lambda model: model, host_memory=False, **options):
    """Trainer; its log."""
    transformers, families = libraries()
    model = prepare(run.make(getattr(families, family)))
    if host_memory:
        model = model.cpu()
    arguments = transformers.TrainingArguments(
        os.path.join(run.folder, "out"), report_to=[], disable_tqdm=True, per_device_train_batch_size=2, logging_steps=1, use_cpu=not IS_CUDA,
        **{"max_steps": 4, "save_strategy": "no", **options})
    given, callbacks = (None, None), []
    if optimizer:
        given = (AdamW(model.parameters(), 1e-3, fused=True), None)
        run.attach(model, given[0])
    elif run.offloaded and callback:
        more = {"device": str(DEVICE)} if host_memory and IS_CUDA else {}
        callbacks = [offloadd.TrainerCallback(nvme_path=run.folder, ram="256MiB", job="trainer", **more)]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Data(), eval_dataset=Data(), optimizers=given, callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    if callbacks:
        run.handles.append(callbacks[0].handle)
    if not optimizer:
        run.models.append(model)
    return [{key: value for key, value in entry.items() if "runtime" not in key and "per_second" not in key} for entry in trainer.state.log_history]


def trainer(name, family, **how):
    def function(run):
        return fit(run, family, **how)

    function.__name__ = f"trainer_{name}"
    heavy(function)


trainer("llama", "llama")
trainer("gpt2", "gpt2", gradient_accumulation_steps=2)
trainer("llama_bf16", "llama", bf16=True, gradient_checkpointing=True)
trainer("llama_fp16", "llama", **({"fp16": True} if IS_CUDA else {}))
trainer("gpt2_evaluates_and_saves", "gpt2", eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True)
trainer("llama_optimizers", "llama", optimizer=True)
trainer("llama_on_the_host", "llama", host_memory=True)


def adapters(model):
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


if importlib.util.find_spec("peft") is not None:
    trainer("llama_lora", "llama", prepare=adapters)


DEEPSPEED_TRAINER = """
import offloadd.deepspeed
if sys.argv[2] == "offloaded":
    offloadd.deepspeed.install()
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
          "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
more = {"deepspeed": config} if sys.argv[2] == "offloaded" else {"use_cpu": DEVICE == "cpu"}
args = TrainingArguments(sys.argv[1], report_to=[], max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, disable_tqdm=True,
                         save_strategy="no", logging_steps=1, learning_rate=1e-3, **more)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                     num_key_value_heads=1, attention_dropout=0.1))
data = [{"input_ids": (x := torch.randint(128, (8,), generator=torch.Generator().manual_seed(i))), "labels": x} for i in range(64)]
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
told = [[h["loss"], h.get("grad_norm"), h["learning_rate"]] for h in trainer.state.log_history if "loss" in h]
trainer.save_model(os.path.join(sys.argv[1], "final"))
from safetensors.torch import load_file
kept = load_file(os.path.join(sys.argv[1], "final", "model.safetensors"))
print(json.dumps([told, {name: value.tolist() for name, value in sorted(kept.items())}, str(args.device)]))
"""


def configured_trainer(run, **environment):
    return said_by(run, DEEPSPEED_TRAINER, os.path.join(run.folder, "out"), "offloaded" if run.offloaded else "memory",
                   **({"OFFLOADD_POOL": run.folder, "OFFLOADD_RAM": "128MiB", **environment} if run.offloaded else {}))


@heavy_program
def trainer_with_a_configuration_of_deepspeed(run):
    return configured_trainer(run, OFFLOADD_DEVICE=str(DEVICE))


@heavy_program
def trainer_with_a_configuration_that_names_no_device(run):
    return configured_trainer(run)


KILLED_TRAINER = """
import offloadd, transformers
from cuda_test import Data
from families_test import gpt2
folder, kill_at = sys.argv[1], int(sys.argv[2])
class Kill(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == kill_at:
            offloadd.handles()[0].wait_durable()
            os.kill(os.getpid(), 9)
torch.manual_seed(0)
arguments = transformers.TrainingArguments(os.path.join(folder, "out"), use_cpu=DEVICE == "cpu", report_to=[], disable_tqdm=True, logging_steps=1,
                                           per_device_train_batch_size=2, max_steps=8, save_strategy="no")
callbacks = [offloadd.TrainerCallback(nvme_path=folder, ram="256MiB", job="killed")] if sys.argv[3] == "offloaded" else []
model = gpt2()
trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Data(), callbacks=callbacks + ([Kill()] if kill_at else []))
trainer.train()
print(json.dumps([[entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1], [p.tolist() for p in model.parameters()]]))
"""


@heavy_program
def trainer_killed_and_resumed(run):
    """With dropout."""
    if not run.offloaded:
        return said_by(run, KILLED_TRAINER, run.folder, "0", "memory")
    process = process_of(run, KILLED_TRAINER, run.folder, "4", "offloaded")
    _, errors = process.communicate(timeout=150)
    assert process.returncode == -signal.SIGKILL, errors
    return said_by(run, KILLED_TRAINER, run.folder, "0", "offloaded")


def by_accelerate(name, prepared_first, **options):
    def function(run):
        _, families = libraries()
        import accelerate

        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=not IS_CUDA, gradient_accumulation_steps=2, **options)
        torch.manual_seed(0)
        model = families.gpt2()
        if not prepared_first:
            model.to(DEVICE)
        optimizer = AdamW(model.parameters(), 1e-3, fused=True)
        if not prepared_first:
            run.attach(model, optimizer)
        loader = torch.utils.data.DataLoader(Data(), batch_size=2)
        prepared, wrapped, loader = accelerator.prepare(model, optimizer, loader)
        if prepared_first:
            run.attach(model, optimizer)
        torch.manual_seed(7)
        told = []
        for batch in loader:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    told.append(accelerator.clip_grad_norm_(prepared.parameters(), 1.0).item())
                wrapped.step()
                wrapped.zero_grad()
            told.append(loss.item())
            if len(told) > 10:
                break
        accelerator.save_state(os.path.join(run.folder, "state"))
        accelerator.load_state(os.path.join(run.folder, "state"))
        accelerator.free_memory()
        return told

    function.__name__ = name
    heavy(function)


by_accelerate("accelerate", False)
by_accelerate("accelerate_prepared_before", True)
by_accelerate("accelerate_bf16", True, mixed_precision="bf16")


@heavy
def lightning_module(run):
    _, families = libraries()
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model, self.told = families.gpt2(), []

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.told.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = AdamW(self.parameters(), 1e-3, fused=True)
            run.attach(self, optimizer)
            return optimizer

    module = Module()
    torch.manual_seed(7)
    trainer = lightning.Trainer(accelerator="gpu" if IS_CUDA else "cpu", devices=1, max_steps=4, logger=False, accumulate_grad_batches=2,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, torch.utils.data.DataLoader(Data(), batch_size=2))
    if not run.offloaded:
        module.to(DEVICE)  # where Lightning leaves what is attached
    trainer.save_checkpoint(file := os.path.join(run.folder, "lightning.ckpt"))
    return module.told, {name: value.cpu() for name, value in torch.load(file, weights_only=False)["state_dict"].items()}


# ---- Running -----------------------------------------------------------------------------------


def option(name, default):
    return next((each.split("=", 1)[1] for each in sys.argv if each.startswith(f"--{name}=")), default)


_held = [0]  # bytes of the device, behind the last case


def warm_up():
    """Makes what libraries of CUDA keep of the device for good."""
    read = nn.LSTM(4, 4, 2, dropout=0.1, device=DEVICE)
    read(torch.zeros(2, 1, 4, device=DEVICE))[0].sum().backward()
    del read
    left_over()


def left_over():
    """What a case has left behind, as text: a closed job, its model and optimizer go in one collection."""
    gc.collect()
    found, held, before = device_test.violations(), device_test.allocated_bytes(), _held[0]
    _held[0] = held
    return found + (f"{held} bytes of the device are held after the case, {before} before" if held > before else "")


def groups_of(variants):
    of_libraries = [variant for variant in variants if variant[2].split("/")[0] in HEAVY]
    others = sorted((variant for variant in variants if variant not in of_libraries), key=lambda variant: variant[2].split("/")[0] not in PROGRAMS)
    return [*filter(None, (of_libraries[::2], of_libraries[1::2])), *([variant] for variant in others)]


def select():
    if DEVICE.type == "cpu":
        del battery._cases[:OF_DEVICES]


def main():
    variants = battery.chosen([each for each in sys.argv[1:] if not each.startswith("-")])
    if "--list" in sys.argv:
        print("\n".join(name for *_, name in variants))
        return 0
    results = []
    with open(option("log", os.devnull), "w", encoding="utf-8") as log:
        def report(name, wrong, seconds):
            results.append((name, wrong, seconds))
            print(f"{'FAILED' if wrong else 'ok'} {name} {seconds:.2f} s\n{wrong or ''}", file=log, flush=True)
            if wrong or "--brief" not in sys.argv:
                print(f"{'FAILED' if wrong else 'ok':<7} {name} {seconds:.1f} s" + (f"\n{isolated.shortened(wrong)}" if wrong else ""), flush=True)

        isolated.main(groups_of(variants), int(option("workers", "1")), "--all" in sys.argv, report)
    cases.write_xml(results)
    failed = sum(1 for _, wrong, _ in results if wrong)
    print(f"{len(results) - failed} equal or refused as they should be, {failed} failed")
    return 1 if failed or not results else 0


def be_a_worker():
    torch.set_num_threads(1)
    device_test.use_device()
    if IS_CUDA:
        warm_up()
    battery.reference = battery.unattached = host_steps.host_steps
    isolated.work(int(option("seconds", "180")), left_over)


if __name__ == "__main__":
    if IS_CUDA and not torch.cuda.is_available():
        assert not os.environ.get("OFFLOADD_REQUIRE_GPU"), "torch finds no GPU"
        battery.leave_out("torch finds no GPU", [name for *_, name in battery.chosen([])])
    select()
    if "--worker" in sys.argv:
        be_a_worker()
        sys.exit(0)
    sys.exit(main())
