"""Models on a device, the stand-in of tests/standin_torch.h: what people do with the package, in the device's memory and offloaded from
there, compared bit by bit. The cases are those of models on the CPU, and a few of its own; the device's checker judges all of them.

    device_test.py [NAME...]                as training_test.py
    device_test.py --rank FOLDER            is a rank itself

cuda_test.py has them on the device of $OFFLOADD_TEST_DEVICE."""

import contextlib
import ctypes
import functools
import gc
import json
import os
import subprocess
import sys
import time
import types
import unittest.mock
import warnings

DEVICE = os.environ.get("OFFLOADD_TEST_DEVICE", "privateuseone:0")
IS_STANDIN = DEVICE.startswith("privateuseone")
if IS_STANDIN:
    os.environ.setdefault("OFFLOADD_LIBRARY", os.path.abspath(os.path.join("tests", "offloadd_standin.so")))
    for name in ("offloadd", "offloadctl"):
        os.environ.setdefault(f"{name.upper()}_BINARY", os.path.abspath(os.path.join("python", "offloadd", name)))

import torch
from torch.optim import SGD, AdamW

import battery
import offloadd
import offloadd.deepspeed
import host_steps
import modules_test  # noqa: its cases are declared
import serving_test  # noqa
import training_test  # noqa
from battery import case, main, retype, states_of
from offloadd import jobs
from programs import Programs

DEVICE = torch.device(DEVICE)
if IS_STANDIN:
    _standin = ctypes.CDLL(os.environ["OFFLOADD_LIBRARY"])
    _standin.offloadd_standin_violations.restype = ctypes.c_char_p
    _standin.offloadd_standin_bytes_to_device.restype = ctypes.c_uint64
    _standin.offloadd_standin_allocated_bytes.restype = ctypes.c_uint64


def use_standin(seed=1, is_late=False, registers_slab=True):
    _standin.offloadd_standin_use(ctypes.c_uint64(seed), int(is_late), int(registers_slab))
    module = types.ModuleType("torch.standin")
    module.is_available, module.device_count, module.current_device = lambda: True, lambda: 1, lambda: 0
    module._is_in_bad_fork, module._is_initialized = lambda: False, lambda: True
    # Its random operators draw from the CPU's generator.
    module.manual_seed_all = module.manual_seed = lambda seed: None
    module.get_rng_state, module.set_rng_state = lambda *_: torch.get_rng_state(), lambda state, *_: torch.set_rng_state(state)
    module.device = lambda *_: contextlib.nullcontext()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("standin", module)
    battery.device = DEVICE


def use_device(is_late=False):
    if IS_STANDIN:
        use_standin(is_late=is_late)
    else:
        host_steps.reproducible()
        battery.device = None if DEVICE.type == "cpu" else DEVICE


def violations():
    return _standin.offloadd_standin_violations().decode() if IS_STANDIN else ""


def allocated_bytes():
    """Of the device, by all tensors, without what cuBLAS keeps."""
    if DEVICE.type != "cuda":
        return _standin.offloadd_standin_allocated_bytes() if IS_STANDIN else 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


ONE = {"types": ("fp32",), "memory": ("floor",)}
BOTH = {"types": ("fp32", "bf16"), "memory": ("floor",)}

# What is the same on a device.
retype(("fp32", "bf16"), {
    "adamw_fused", "adamw_default", "adagrad_default", "rmsprop_options", "sgd_nesterov", "groups_with_options", "closure", "accumulation",
    "gathered_where_storages_were_given", "gradients_after_the_step", "gradients_given_other_storages", "tied", "checkpointing", "frozen", "evaluation_between",
    "weights_given_other_storages", "initialised_after_attach", "state_dict_loaded_after_attach", "functional_call", "closed_and_attached_again",
    "optimizers_of_three_kinds", "saved_by_safetensors", "in_a_mode_that_sees_operators", "repr_of_a_parameter", "tolist",
    "deepcopy_model", "state_dict_cloned", "new_tensor", "new",
})


def adamw(model):
    return AdamW(model.parameters(), 1e-2, fused=True)


# ---- What is right -----------------------------------------------------------------------------


@case(**BOTH)
def resumed(run):
    return run.resumed(adamw, clip=0.1, micro=2)


@case(**BOTH)
def state_is_where_the_parameter_is(run):
    """As torch keeps it; what the handle gathers is in memory of the host."""
    model = run.model(tied=True)
    optimizer = adamw(model)
    handle = run.attach(model, optimizer)
    told = run.train(model, optimizer)
    weight = model.blocks[0].up.weight
    assert weight.device == DEVICE
    assert optimizer.state[weight]["exp_avg"].device == DEVICE
    gathered = [handle.gather(weight, plane) for plane in ("weight", "master", "exp_avg", "exp_avg_sq")]
    assert all(each.device.type == "cpu" for each in gathered)
    return told, gathered, states_of(optimizer)


@case(**BOTH)
def goes_back_to_a_file_of_a_large_state(run):
    """Whose moments, and masters, are in the memory of the host. In memory they are on the stand-in, of which torch.save() knows nothing."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-2)
    run.attach(model, optimizer).is_state_small = lambda: False
    told = run.train(model, optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if run.offloaded:
        path = os.path.join(run.folder, "state.pt")
        torch.save(optimizer.state_dict(), path)
        state = torch.load(path)
    else:
        state = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, optimizer.state_dict())
    told += run.train(model, optimizer, first=3)
    optimizer.load_state_dict(state)
    model.load_state_dict(weights)
    again = run.train(model, optimizer, first=3)
    assert again == told[-len(again):]
    return told + again, states_of(optimizer)


@case(**ONE)
def state_dict_goes_both_ways(run):
    model = run.model()
    optimizer = adamw(model)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    saved = optimizer.state_dict()
    states = {key: {name: value.clone() for name, value in state.items()} for key, state in saved["state"].items()}
    kept = {"model": {name: value.clone() for name, value in model.state_dict().items()}, "optimizer": {**saved, "state": states}}
    told += run.train(model, optimizer, first=3)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    return told + run.train(model, optimizer, first=3), states_of(optimizer)


@case(**ONE)
def optimizer_that_has_stepped(run):
    """A new job begins with its moments."""
    model = run.model()
    optimizer = adamw(model)
    told = run.train(model, optimizer, steps=2)
    run.attach(model, optimizer)
    return told + run.train(model, optimizer, first=2), states_of(optimizer)


@case(**ONE)
def weights_in_files(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    handle = run.attach(model, optimizer)
    told = run.train(model, optimizer)
    folder = os.path.join(run.folder, "weights")
    if run.offloaded:
        handle.save_weights(folder)
    else:  # files are written of offloaded models, and of those in memory of the host
        kept = [p.detach().clone() for p in model.parameters()]
    told += run.train(model, optimizer, first=3)
    if run.offloaded:
        handle.load_weights(folder)
    else:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept):
                parameter.copy_(value)
    return told + run.train(model, optimizer, first=3)


@case(**BOTH)
def weights_that_are_written(run):
    """The master becomes what was written."""
    model = run.model()
    optimizer = adamw(model)
    handle = run.attach(model, optimizer)
    told = run.train(model, optimizer)
    with torch.no_grad():
        model.head.weight.mul_(0.9)
        model.blocks[0].first.bias.add_(0.25)
    model.embed.weight.data[3] = 0.125
    with handle.gather([model.norm.weight], write=True) as copies:
        copies[0][2] = 5.0
    told.append([handle.gather(p, "master") for p in (model.head.weight, model.blocks[0].first.bias, model.embed.weight, model.norm.weight)])
    return told + run.train(model, optimizer, first=3)


@case(**ONE)
def memory_of_the_device_is_what_was_said(run):
    model = run.model()
    optimizer = adamw(model)
    handle = run.attach(model, optimizer)
    told = run.train(model, optimizer, micro=2)
    if run.offloaded:
        statistics, plan = handle.statistics(), handle.plan()
        assert 0 < statistics["gpu_peak_bytes"] <= statistics["gpu_ram_bytes"] < sum(p.numel() * 8 for p in model.parameters()), statistics
        assert statistics["peak_bytes"] <= statistics["budget_bytes"], statistics
        assert plan["gpu_window_bytes"] + plan["gpu_gradient_bytes"] <= statistics["gpu_ram_bytes"]
        assert "gpu_ram" in plan.text, plan.text
    return told


def device_in_status():
    """What offloadctl shows of the device of this process."""
    while True:  # other daemons of this machine may end just then
        said = subprocess.run([os.path.join(os.path.dirname(offloadd.__file__), "offloadctl"), "status", "--json", "--interval", "0.01"], capture_output=True, text=True, check=False)
        daemons = json.loads(said.stdout).get("daemons", []) if said.stdout else []
        ranks = [rank for daemon in daemons for job in daemon["jobs"] for rank in job["ranks"] if rank["pid"] == os.getpid()]
        if ranks and ranks[0]["gpu"]:
            return ranks[0]["gpu"]
        time.sleep(0.1)


@case(**BOTH)
def status_shows_the_device(run):
    model = run.model()
    optimizer = adamw(model)
    handle = run.attach(model, optimizer)
    told = run.train(model, optimizer, steps=2, micro=2)
    if run.offloaded:
        gpu, statistics = device_in_status(), handle.statistics()
        assert gpu["device"].startswith("standin:0" if IS_STANDIN else str(DEVICE)) and gpu["gpu_ram_bytes"] == statistics["gpu_ram_bytes"], gpu
        assert gpu["window_bytes"] == handle.plan()["gpu_window_bytes"], gpu
        assert 0 < gpu["used_bytes"] <= gpu["peak_bytes"] == statistics["gpu_peak_bytes"], (gpu, statistics)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        assert gpu["bytes_to_device"] >= 2 * weights and gpu["bytes_to_host"] >= 2 * 2 * weights, (gpu, weights)
        assert gpu["stall_seconds"] >= 0, gpu
    return told + run.train(model, optimizer, first=2)


LAYERS = 8
ROOM = 1 << 30


def on_host(model, optimizer):
    """Weights and what the optimizer keeps, one tensor at a time."""
    states = [{key: value.detach().cpu() for key, value in optimizer.state[p].items()} for p in model.parameters()]
    return [p.detach().cpu() for p in model.parameters()], states


def larger_model(run):
    """On the host."""
    torch.manual_seed(0)
    return battery.Transformer(layers=LAYERS, checkpointing="at will").to(run.dtype)


@contextlib.contextmanager
def little_memory(run):
    """Of the stand-in, for an offloaded run: three quarters of what the weights of larger_model() need."""
    if not IS_STANDIN:
        yield
        return
    weights = sum(p.numel() * p.element_size() for p in larger_model(run).parameters())
    if run.offloaded:
        _standin.offloadd_standin_set_memory_bytes(ctypes.c_uint64(_standin.offloadd_standin_allocated_bytes() + weights * 3 // 4))
    try:
        yield
    finally:
        _standin.offloadd_standin_set_memory_bytes(ctypes.c_uint64(ROOM))


@case(**BOTH)
def larger_than_the_device(run):
    """Built on the host and resumed; the script's objects stay what they are."""
    told = []
    with little_memory(run):
        for part in range(2):
            if part == 0 or run.offloaded:
                model = larger_model(run)
                if part == 1:
                    torch.nn.init.zeros_(model.head.weight)  # what the job has counts
                optimizer = adamw(model)
                weight = model.head.weight
                run.attach(model, optimizer, device=DEVICE, job="larger")
                assert weight is model.head.weight and weight.device == DEVICE and all(p.device == DEVICE for p in model.parameters())
            told += run.train(model, optimizer, first=3 * part, clip=0.1)
            if part == 0 and run.offloaded:
                assert optimizer.state[weight]["exp_avg"].device == DEVICE
                run.handles.pop().close()
                run.models.clear()
        return told, on_host(model, optimizer)


@case(**BOTH)
def larger_than_both_memories(run):
    """Built inside init()."""
    with little_memory(run):
        options = {"job": "born", "device": DEVICE}
        if run.offloaded:
            probe = larger_model(run)
            options["gpu_ram"] = battery.gpu_ram_of([probe])
            ram = run.ram([probe], None)
            with offloadd.init(nvme_path=run.folder, ram=ram, **options):
                model = larger_model(run)
        else:
            model = larger_model(run)
        optimizer = adamw(model)
        handle = run.attach(model, optimizer, **options)
        told = run.train(model, optimizer, clip=0.1)
        if run.offloaded:
            statistics = handle.statistics()
            assert statistics["gpu_peak_bytes"] <= statistics["gpu_ram_bytes"], statistics
        return told, on_host(model, optimizer)


@case(**BOTH)
def norms_of_lists_and_of_one(run):
    """A device's kernel for lists adds in another order than that for one tensor."""
    model = run.model()
    optimizer = adamw(model)
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        for part in range(2):
            run.loss(model, 2 * step + part).backward()
        gradients = [p.grad for p in model.parameters()]
        lists = [gradients, gradients[3:5], [*gradients[:2], torch.ones(33, device=DEVICE, dtype=run.dtype)], list(model.parameters())]
        told += [norm.item() for each in lists for norm in torch._foreach_norm(each)]
        told += [norm.item() for norm in torch._foreach_norm(gradients, float("inf"))]
        told += [gradient.norm().item() for gradient in gradients]
        told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=step != 1).item())
        told += [norm.item() for norm in torch._foreach_norm(gradients)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    return told


@case(types=("fp32",), memory=("floor",))
def stream_of_ones_own(run):
    """On which the model is used first, behind attach(): nothing is warned of that is not in memory."""
    model = run.model()
    optimizer = adamw(model)
    run.attach(model, optimizer)
    stream = torch.Stream(device=DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with warnings.catch_warnings(), stream:
        warnings.simplefilter("error")
        told = run.train(model, optimizer, clip=0.1)
    torch.accelerator.current_stream().wait_stream(stream)
    return told


@case(types=("fp32",), memory=("floor",))
def convolutions_with_running_statistics(run):
    model = run.make(lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
                                                 torch.nn.ConvTranspose2d(16, 8, 2, groups=2), torch.nn.BatchNorm2d(8, momentum=None)))
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        inputs = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(step)).pin_memory().to(DEVICE, non_blocking=True)
        loss = model(inputs).square().mean()
        loss.backward()
        told += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()]
        optimizer.step()
        optimizer.zero_grad()
    return told, dict(model.named_buffers())


class WithBuffers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16)
        self.register_buffer("kept", torch.randn(16))
        self.register_buffer("made_anew", torch.randn(16), persistent=False)
        self.table = torch.nn.Parameter(torch.randperm(16), requires_grad=False)
        self.nothing = torch.nn.Parameter(torch.empty(0, 16))

    def forward(self, x):
        return self.norm(self.linear(x) * self.kept + self.made_anew)[:, self.table] + self.nothing.sum()


@case(types=("fp32",), memory=("double",))
def buffers_go_along(run):
    """With an optimizer that has stepped on the host, and a gradient that is there."""
    torch.manual_seed(0)
    model = WithBuffers()
    optimizer = adamw(model)
    x = torch.randn(8, 16)
    model(x).square().sum().backward()
    optimizer.step()
    buffers = list(model.buffers())
    run.attach(model, optimizer, device=str(DEVICE))
    assert all(a is b for a, b in zip(model.buffers(), buffers)) or not run.offloaded
    assert all(t.device == DEVICE for t in [*model.buffers(), *model.parameters(), model.linear.weight.grad])
    told = []
    for step in range(3):
        loss = model(x.to(DEVICE) + step).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told, [dict(optimizer.state[p]) for p in model.parameters() if p.requires_grad and p.numel()], list(model.buffers())


@case(types=("fp32", "bf16", "fp16", "fp64"), memory=("floor",))
def every_type(run):
    model = run.model()
    optimizer = adamw(model)
    handle = run.attach(model, optimizer)
    told = run.train(model, optimizer, clip=0.1, micro=2)
    with torch.no_grad():
        model.head.weight.mul_(0.9)
    model.embed.weight.data[3] = 0.125
    told += run.train(model, optimizer, first=3)
    return told, [handle.gather(p, plane) for p in model.parameters() for plane in ("weight", "master", "exp_avg", "exp_avg_sq")]


@case(types=("fp32",), memory=("floor",))
def fp16_of_deepspeed(run):
    """The engine casts the model and scales losses; steps that overflow are skipped."""
    model, told = run.model(), []
    options = {"nvme_path": run.folder, "ram": "256MiB", "gpu_ram": "256MiB", "job": "fp16"} if run.offloaded else {}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
              "fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}}
    with unittest.mock.patch.dict(os.environ, {} if run.offloaded else {"OFFLOADD_DISABLE": "1"}):
        offloadd.deepspeed.setup.set_installed(options)
        engine, optimizer, *_ = offloadd.deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        for step in range(10):
            scale = optimizer.cur_scale
            loss = run.loss(engine, step)
            engine.backward(loss)
            engine.step()
            told.append((scale, loss.item(), engine.get_global_grad_norm()))
        assert 0 < engine.skipped_steps < 10, told
        weights = [p.detach().clone() for p in model.parameters()]
        masters = [offloadd.deepspeed.utils.safe_get_full_fp32_param(p).cpu() for p in model.parameters()]
        engine.destroy()
    return told, weights, masters


@case(types=("fp32",), memory=("floor",))
def fp16_of_deepspeed_is_updated_on_the_device(run):
    """The update there unscales gradients in fp32, as the daemon's does."""
    model = run.make(lambda: torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 200)))
    options = {"nvme_path": run.folder, "ram": "256MiB", "gpu_ram": "256MiB", "job": "there", "durability": "checkpoint:3"} if run.offloaded else {}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
              "fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}}
    told = []
    with unittest.mock.patch.dict(os.environ, {} if run.offloaded else {"OFFLOADD_DISABLE": "1"}):
        offloadd.deepspeed.setup.set_installed(options)
        engine, optimizer, *_ = offloadd.deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        for step in range(11):
            torch.manual_seed(step)
            inputs, targets = torch.randn(4, 256).half().to(DEVICE), torch.randn(4, 200).to(DEVICE)
            scale = optimizer.cur_scale
            loss = ((engine(inputs).float() - targets) ** 2).mean() * 30
            engine.backward(loss)
            engine.step()
            told.append((scale, loss.item(), engine.get_global_grad_norm()))
        assert 0 < engine.skipped_steps < 10, told
        if run.offloaded:
            assert "updated on the device: 2 tensors" in engine._handle.plan().text, engine._handle.plan().text
        masters = [offloadd.deepspeed.utils.safe_get_full_fp32_param(p).cpu() for p in model.parameters()]
        moments = [offloadd.deepspeed.utils.safe_get_full_optimizer_state(p, "exp_avg").cpu() for p in model.parameters()]
        weights = [p.detach().clone() for p in model.parameters()]
        engine.destroy()
    return told, weights, masters, moments


@case(types=("fp32", "bf16"), memory=("floor",))
def deepspeed_where_there_is_a_device(run):
    """The engine brings a model of the host there, as DeepSpeed does, nobody having named the device; so do a checkpoint that is loaded,
    zero.Init, and an engine without an optimizer."""
    options = {"nvme_path": run.folder, "ram": "256MiB"} if run.offloaded else {}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.1, "bf16": {"enabled": run.dtype == torch.bfloat16}}
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    told, found = [], []

    def engine_of(seed, config, built_in=contextlib.nullcontext()):
        torch.manual_seed(seed)
        with built_in:
            model = battery.Transformer()
            model.register_buffer("scale", torch.full((3,), 0.5))
        engine, *_ = offloadd.deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        found.extend([engine.device, *(each.device for each in [*model.parameters(), *model.buffers()])])
        return engine

    def train(engine, first):
        for step in range(first, first + 3):
            loss = run.loss(engine, step)
            engine.backward(loss)
            engine.step()
            told.append((loss.item(), engine.get_global_grad_norm()))

    with unittest.mock.patch.dict(os.environ, {} if run.offloaded else {"OFFLOADD_DISABLE": "1"}), \
            unittest.mock.patch.object(offloadd.deepspeed.placement, "cuda_of_this_rank", lambda: DEVICE):
        offloadd.deepspeed.setup.set_installed(options)
        engine = engine_of(0, {**config, **optimizer})
        train(engine, 0)
        if run.offloaded:  # torch.save() knows no memory of the stand-in
            engine.save_checkpoint(os.path.join(run.folder, "kept"))
            assert all(value.device.type == "cpu" for value in engine._zero3_consolidated_16bit_state_dict().values())
            assert all(offloadd.deepspeed.utils.safe_get_full_fp32_param(p).device == DEVICE for p in engine.module.parameters())
            before = len(told)
            train(engine, 3)
            engine.destroy()
            engine = engine_of(1, {**config, **optimizer})
            engine.load_checkpoint(os.path.join(run.folder, "kept"))
            found += [p.device for p in engine.module.parameters()]
            del told[before:]
        train(engine, 3)
        weights = [p.detach().clone() for p in engine.module.parameters()]
        engine.destroy()
        engine, *_ = offloadd.deepspeed.initialize(model=engine.module, model_parameters=engine.module.parameters(), config={**config, **optimizer})
        train(engine, 6)  # with the weights, and a new optimizer
        engine, *_ = offloadd.deepspeed.initialize(model=engine.module, optimizer=engine.optimizer, config=config)
        train(engine, 9)
        engine.destroy()
        only_read = engine_of(0, config)
        told.append(run.loss(only_read, 0).item())
        engine = engine_of(2, {**config, **optimizer}, offloadd.deepspeed.zero.Init(config_dict_or_path=config))
        train(engine, 0)
        engine.destroy()
        assert set(found) == {DEVICE}, set(found)
    return told, weights


def lightning_trainer(steps):
    import lightning

    class Accelerator(lightning.pytorch.accelerators.CPUAccelerator):
        def setup_device(self, device):
            pass

    strategy = lightning.pytorch.strategies.SingleDeviceStrategy(DEVICE, Accelerator())
    return lightning.Trainer(strategy=strategy, max_steps=steps, logger=False, accumulate_grad_batches=2, enable_checkpointing=False,
                             enable_progress_bar=False, enable_model_summary=False)


def by_lightning(name, in_configure):
    """fit(), test(), predict() and fit() again: Lightning brings the module and the optimizer's state to the host's memory behind each of them.
    Attached in configure_optimizers(), or, which a model that is larger than the device's memory needs, before fit()."""

    def function(run):
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.model, self.optimizer, self.told = battery.Transformer(), None, []
                self.model.register_buffer("calls", torch.zeros(2))

            def seen(self, loss):
                self.told.append(loss.item())
                return loss

            def training_step(self, step, index):
                self.model.calls += 1
                return self.seen(run.loss(self.model, step))

            def test_step(self, step, index):
                self.seen(run.loss(self.model, step))

            def predict_step(self, step, index):
                self.seen(run.loss(self.model, step))

            def begin(self):
                self.optimizer = adamw(self)
                self.handle = run.attach(self, self.optimizer, **({} if in_configure else {"device": DEVICE}))

            def configure_optimizers(self):
                if self.optimizer is None:
                    self.begin()
                return self.optimizer

        module, steps = Module(), list(range(4))
        if not in_configure:
            module.begin()
        lightning_trainer(2).fit(module, steps)
        lightning_trainer(2).test(module, steps[:1], verbose=False)
        lightning_trainer(2).predict(module, steps[:1])
        if run.offloaded:
            assert module.device == DEVICE and {each.device for each in [*module.parameters(), *module.buffers()]} == {DEVICE}
            module.handle.check_is_stepped()  # no state was put in its own place
        lightning_trainer(2).fit(module, steps)
        module.to(DEVICE)
        return module.told, {name: value.clone() for name, value in module.state_dict().items()}

    function.__name__ = name
    case(function, **ONE)


by_lightning("lightning_attached_in_configure_optimizers", True)
by_lightning("lightning_attached_before_fit", False)


class SignOfTheMean(torch.optim.Optimizer):
    """Of the script's own."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.1)
                    p.add_(mean.sign(), alpha=-group["lr"])


@case(types=("fp32", "bf16", "fp64"), memory=("floor",))
def optimizers_that_run_in_this_process(run):
    told = []
    for make in (lambda p: torch.optim.NAdam(p, 1e-2), lambda p: torch.optim.Adafactor(p, 1e-2), lambda p: SignOfTheMean(p, 1e-3)):
        model = run.model()
        optimizer = make(model.parameters())
        run.attach(model, optimizer)
        told += run.train(model, optimizer, clip=0.1, micro=2)
    return told


@case(types=("fp32", "bf16"), memory=("double",))
def optimizers_that_run_in_this_process_go_on(run):
    """With more than goes with a step."""
    run.model = functools.partial(run.model, width=128)
    return run.resumed(lambda model: torch.optim.NAdam(model.parameters(), 1e-2))


@case(types=("fp32",), memory=("double",))
def history_of_lbfgs_goes_on(run):
    """A small model's."""
    told, model = [], None
    for life in range(2):
        if model is None or run.offloaded:
            model = run.model(width=64)
            optimizer = torch.optim.LBFGS(model.parameters(), history_size=3, max_iter=2)
            run.attach(model, optimizer, job="history")
        for step in range(2 * life, 2 * life + 2):
            def closure(step=step):
                optimizer.zero_grad()
                loss = run.loss(model, step)
                loss.backward()
                return loss

            told.append(optimizer.step(closure).item())
        if run.offloaded and life == 0:
            run.handles.pop().close()
            run.models.clear()
    return told


@case(types=("fp32", "bf16"), memory=("double",))
def optimizers_of_ones_own_go_on(run):
    run.model = functools.partial(run.model, width=128)
    return run.resumed(lambda model: SignOfTheMean(model.parameters(), 1e-3))


@case(**ONE)
def closed_jobs_leave_the_device(run):
    """With buffers, states and weights that were given other storages, when their model is gone: in one collection."""
    def train():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).to(DEVICE)
        optimizers = [torch.optim.NAdam(model[0].parameters(), 1e-2), adamw(model[1])]
        run.attach(model, optimizers)
        model(torch.ones(4, 8).to(DEVICE)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        model[0].bias.data = model[0].bias.data * 2
        run.end()

    gc.collect()
    before = allocated_bytes()
    train()
    gc.collect()
    assert allocated_bytes() <= before, (allocated_bytes(), before)


@case(types=("fp32",), memory=("double",))
def two_ranks(run):
    """Each has a device of its own."""
    if not run.offloaded:
        model = run.model()
        optimizer = adamw(model)
        run.attach(model, optimizer)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
        told = rank_loop(run, model, optimizer, range(2))
        run.models.clear()  # what it trains is in other processes
        return told
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": f"device-{os.getpid()}"}
    ranks = [start_rank(run.folder, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    said = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    assert said[0] == said[1]
    return said[0]


programs = None  # of this test alone: what has used CUDA cannot be forked


def start_rank(folder, **environment):
    command = [__file__, "--rank", folder]
    if programs is not None:
        return programs.start(*command, **environment)
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


def rank_loop(run, model, optimizer, ranks):
    """Norms, and sums over what the job keeps, of two micro-batches a rank."""
    told = []
    for step in range(3):
        for micro in range(2):
            for rank in ranks:
                run.loss(model, step * 10 + micro * 2 + rank).backward()
        told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return told + [p.detach().double().sum().item() for p in model.parameters()] + \
        [run.handles[0].gather(p, "exp_avg").double().sum().item() for p in model.parameters()]


def be_a_rank(folder):
    torch.set_num_threads(1)
    use_device(is_late=os.environ["RANK"] == "1")
    run = battery.Run("256MiB", torch.float32, folder)
    model = run.model()
    optimizer = adamw(model)
    handle = run.attach(model, optimizer)
    told = rank_loop(run, model, optimizer, [handle.rank])
    handle.close()
    found = violations()
    assert not found, found
    print(json.dumps(told))


# ---- What is refused ---------------------------------------------------------------------------


def refusal(id, **options):
    return case(**{"refused": id, "types": ("fp32",), "memory": ("floor",), **options})


@refusal(1601)
def moved_while_attached(run):
    model = run.model()
    run.attach(model, adamw(model))
    model.to("cpu")


@refusal(1601)
def parameter_replaced_by_one_elsewhere(run):
    model = run.model()
    optimizer = adamw(model)
    run.attach(model, optimizer)
    run.loss(model, 0).backward()
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().cpu())
    optimizer.step()


@refusal(1002)
def device_that_is_none(run):
    model = larger_model(run)
    run.attach(model, adamw(model), device="gpu")


@refusal(1002)
def device_after_init(run):
    """The job is open already, without one."""
    with offloadd.init(nvme_path=run.folder, ram="64MiB", job="opened"):
        model = larger_model(run)
    try:
        run.attach(model, adamw(model), job="opened", device=DEVICE)
    finally:
        jobs.constructed.take().close()
        jobs.constructed = None


@refusal(2003)
def too_little_of_the_device(run):
    model = run.model()
    run.attach(model, adamw(model), gpu_ram="1KiB")


@refusal(1603)
def pointer_to_a_weight(run):
    model = run.model()
    run.attach(model, adamw(model))
    run.loss(model, 0)
    ctypes.string_at(model.head.weight.data_ptr(), 4)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        be_a_rank(sys.argv[-1])
        sys.exit(0)
    programs = Programs()
    use_device()
    code = main()
    found = violations()
    print(found, end="")
    sys.exit(1 if found else code)
