"""Optimizers, gradients, schedulers, clipping: the loops that people write."""

import copy
import io
import os
import pickle
import sys

import numpy
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import offloadd
from battery import case, main, muon_beside_adamw, states_of
from offloadd import control

# ---- Optimizers --------------------------------------------------------------------------------


def trains(make, **options):
    """A case that is the ordinary loop with one optimizer."""

    def declare(name):
        def function(run):
            model = run.model()
            optimizer = make(model.parameters())
            run.attach(model, optimizer)
            return run.train(model, optimizer, clip=1.0)

        function.__name__ = name
        case(function, **options)

    return declare


trains(lambda p: AdamW(p, 1e-3, fused=True))("adamw_fused")
trains(lambda p: AdamW(p, 1e-3, fused=True, weight_decay=0.3, betas=(0.5, 0.7), eps=1e-3))("adamw_fused_options")
trains(lambda p: AdamW(p, 1e-3, fused=True, amsgrad=True))("adamw_fused_amsgrad")
trains(lambda p: AdamW(p, 1e-3, fused=True, maximize=True))("adamw_fused_maximize")
trains(lambda p: AdamW(p, torch.tensor(1e-3), fused=True))("adamw_fused_lr_tensor")
trains(lambda p: AdamW(p, 1e-3))("adamw_default")
trains(lambda p: AdamW(p, torch.tensor(0.0123), weight_decay=0.3))("adamw_lr_tensor")
trains(lambda p: Adam(p, torch.tensor(0.0123), amsgrad=True))("adam_lr_tensor")
trains(lambda p: Adagrad(p, torch.tensor(0.0123), lr_decay=0.1))("adagrad_lr_tensor")
trains(lambda p: AdamW(p, 1e-3, foreach=True))("adamw_foreach")
trains(lambda p: AdamW(p, 1e-3, foreach=False))("adamw_loop")
trains(lambda p: AdamW(p, 1e-3, amsgrad=True))("adamw_amsgrad")
trains(lambda p: Adam(p, 1e-3, fused=True))("adam_fused")
trains(lambda p: Adam(p, 1e-3, fused=True, weight_decay=0.1))("adam_fused_l2")
trains(lambda p: Adam(p, 1e-3, fused=True, weight_decay=0.1, decoupled_weight_decay=True))("adam_fused_decoupled")
trains(lambda p: Adam(p, 1e-3, fused=True, amsgrad=True, weight_decay=0.1))("adam_fused_l2_amsgrad")
trains(lambda p: Adam(p, 1e-3, weight_decay=0.1))("adam_l2")
trains(lambda p: Adam(p, 1e-3))("adam_default")
trains(lambda p: Adagrad(p, 1e-2, fused=True))("adagrad_fused")
trains(lambda p: Adagrad(p, 1e-2, fused=True, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5))("adagrad_fused_options")
trains(lambda p: Adagrad(p, 1e-2))("adagrad_default")
trains(lambda p: Adagrad(p, 1e-2, initial_accumulator_value=0.1), types=("bf16",))("adagrad_that_begins_with_a_number_of_fp32")
trains(lambda p: RMSprop(p, 1e-3))("rmsprop")
trains(lambda p: RMSprop(p, 1e-3, momentum=0.9, centered=True, weight_decay=0.1, alpha=0.9))("rmsprop_options")
trains(lambda p: SGD(p, 0.1))("sgd")
trains(lambda p: SGD(p, 0.1, momentum=0.9))("sgd_momentum")
trains(lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True))("sgd_nesterov")
trains(lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.1))("sgd_dampening")
trains(lambda p: SGD(p, 0.1, weight_decay=0.1, maximize=True))("sgd_maximize")
trains(lambda p: SGD(p, torch.tensor(0.1), momentum=0.9, foreach=True))("sgd_foreach_lr_tensor")
trains(lambda p: SGD(p, 0.1, weight_decay=0.1, fused=True))("sgd_fused")
trains(lambda p: SGD(p, torch.tensor(0.1), momentum=0.9, nesterov=True, fused=True))("sgd_fused_lr_tensor")

REFUSED = {"refused": 1604, "types": ("fp32",), "memory": ("floor",)}
trains(lambda p: SGD(p, 0.1, differentiable=True), **REFUSED)("differentiable_is_refused")
trains(lambda p: AdamW(p, 1e-3, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False), **REFUSED)("betas_as_tensors_are_refused")
# torch computes with such a rate in fp32, where the optimizer is not a fused one.
trains(lambda p: AdamW(p, numpy.float32(3e-3)), **REFUSED)("rate_of_numpy_is_refused")
trains(lambda p: AdamW(p, numpy.float32(3e-3), fused=True), types=("fp32",))("rate_of_numpy_fused")
trains(lambda p: SGD(p, numpy.float32(0.1), momentum=0.9), types=("fp32",))("rate_of_numpy_sgd")
trains(lambda p: AdamW(p, torch.tensor(3e-3, dtype=torch.bfloat16)), **REFUSED)("rate_as_narrow_tensor_is_refused")
trains(lambda p: AdamW(p, torch.tensor(3e-3, dtype=torch.bfloat16), fused=True), types=("fp32",))("rate_as_narrow_tensor_fused")
trains(lambda p: SGD(p, torch.tensor(0.1, dtype=torch.bfloat16), momentum=0.9), types=("fp32",))("rate_as_narrow_tensor_sgd")


class OwnStep(AdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.9
        return super().step(closure)


class SignDescent(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])
                    self.state[p]["steps"] = self.state[p].get("steps", 0) + 1


class Renamed(AdamW):
    def describe(self):
        return [group["lr"] for group in self.param_groups]


# What the daemon does not have runs in this process.
trains(lambda p: torch.optim.Adafactor(p))("adafactor")
trains(lambda p: torch.optim.NAdam(p))("nadam")
trains(lambda p: torch.optim.RAdam(p), types=("fp32",))("radam")
trains(lambda p: torch.optim.Adamax(p), types=("fp32",))("adamax")
trains(lambda p: torch.optim.Adadelta(p), types=("fp32",))("adadelta")
trains(lambda p: torch.optim.Rprop(p), types=("fp32",))("rprop")
trains(lambda p: torch.optim.ASGD(p), types=("fp32",))("asgd")
trains(lambda p: OwnStep(p, 1e-3))("step_of_a_subclass")
trains(lambda p: SignDescent(p, 1e-3))("optimizer_of_ones_own")


@case(types=("fp32", "bf16", "fp64"))
def sgd_fused_over_odd_sizes(run):
    """torch's fused kernel rounds the momentum of the last elements in another order."""
    model = run.make(lambda: torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Tanh(), torch.nn.Linear(11, 3)))
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.2, weight_decay=0.1, fused=True)
    run.attach(model, optimizer)
    for step in range(4):
        inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).to(run.dtype)
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return states_of(optimizer)


@case(types=("fp32",))
def checkpoint_inside_an_interval(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    handle = run.attach(model, optimizer, durability="checkpoint:1000")
    told = run.train(model, optimizer, steps=2)
    assert handle.statistics()["durable_step"] == 0
    assert handle.checkpoint() == handle.step == 2
    handle.wait_durable()
    status = handle.status()
    assert handle.statistics()["durable_step"] == status["durable_step"] == (2 if run.offloaded else 0), status
    assert status["job"] == handle.job and status["step"] == 2 and (status["plan"] is not None) == run.offloaded, status
    try:
        handle.gather(5)
        assert False
    except offloadd.Error as error:
        assert str(error).startswith("OFD-1002 gather() was given an int. "), error
    return told + run.train(model, optimizer, first=2)


@case
def step_that_was_taken_before(run):
    """As Accelerate does for fp16; a scheduler has put its own around it. With hooks, and with a closure."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    scheduler = schedulers.StepLR(optimizer, 2)
    step, seen = optimizer.step, []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    handle = run.attach(model, optimizer)
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(model.head.weight.detach().sum())))
    told = []
    for number in range(4):
        def closure():
            loss = run.loss(model, number)
            loss.backward()
            return loss

        if number % 2:
            optimizer.step = lambda *arguments: step(*arguments)
            told.append(optimizer.step(closure).item())
            optimizer.step = step
        else:
            told.append(closure().item())
            assert optimizer.step() is None
        scheduler.step()
        optimizer.zero_grad()
    return told, seen, handle.step, states_of(optimizer)


class SeesOperators(TorchDispatchMode):
    """As what counts FLOPs or looks for races does."""
    seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen += 1
        return function(*args, **(kwargs or {}))


@case
def in_a_mode_that_sees_operators(run):
    """Clipping is over lists of all gradients."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer, raw_access="error")
    with SeesOperators() as mode:
        return run.train(model, optimizer, clip=0.1, micro=2), mode.seen > 100


@case
def lbfgs(run):
    model = run.model()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    handle = run.attach(model, optimizer)
    return run.train_with_closures(model, optimizer, steps=2), handle.step, optimizer.state_dict()["state"][0]["n_iter"]


@case(types=("fp32",))
def state_of_an_optimizer_in_this_process(run):
    model = run.model()
    optimizer = SignDescent(model.parameters(), 1e-3)
    handle = run.attach(model, optimizer)
    run.train(model, optimizer)
    return [state["steps"] for state in optimizer.state.values()], handle.step


@case(types=("fp32",))
def step_that_throws_in_this_process(run):
    """The steps that follow are counted."""
    model = run.model()
    optimizer = torch.optim.NAdam(model.parameters(), 1e-3)
    handle = run.attach(model, optimizer)
    told, counts = [], []
    for step in range(4):
        def closure():
            if step == 1:
                raise KeyError(step)
            optimizer.zero_grad()
            loss = run.loss(model, step)
            loss.backward()
            return loss

        try:
            told.append(optimizer.step(closure).item())
        except KeyError:
            pass
        counts.append(handle.step)
    assert counts == [1, 1, 2, 3], counts
    return told


@case
def optimizer_in_this_process_beside_adamw(run):
    model = run.model()
    optimizers = muon_beside_adamw(model)
    handle = run.attach(model, optimizers)
    told = []
    for step in range(3):
        loss = run.loss(model, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        told.append(loss.item())
    return told, handle.step, [optimizer.state_dict()["state"] for optimizer in optimizers]


@case
def subclass_without_step(run):
    model = run.model()
    optimizer = Renamed(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer), optimizer.describe(), isinstance(optimizer, AdamW), type(optimizer).__name__, repr(optimizer)


class KeepsZeros(AdamW):
    """Its gradients are zeros where others have none: they are updated all the same."""

    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none)

    def state_dict(self, note="none"):
        return {**super().state_dict(), "note": note}

    def load_state_dict(self, state_dict, *, note):
        self.note = state_dict["note"], note
        super().load_state_dict(state_dict)


class TakesNothing(SGD):
    known = []

    def __init_subclass__(cls, kind):
        cls.known.append(kind)

    def zero_grad(self):
        super().zero_grad()

    def add_param_group(self, param_group, note="none"):
        super().add_param_group({**param_group, "note": note})


class Registered(TakesNothing, kind="registered"):
    def __getstate__(self):
        return {**super().__getstate__(), "own": 3}


@case(types=("fp32",))
def subclasses_whose_methods_have_other_arguments(run):
    told = []
    for make in (lambda p: KeepsZeros(p, 1e-2, weight_decay=0.5), lambda p: Registered(p, 0.1, momentum=0.9)):
        model = run.model()
        optimizer = make(model.blocks.parameters())
        run.attach(model, optimizer)
        if isinstance(optimizer, TakesNothing):
            optimizer.add_param_group({"params": list(model.norm.parameters())}, note="norm")
        optimizer.add_param_group(param_group={"params": list(model.embed.parameters())})
        for step in range(4):
            told.append(loss := run.loss(model, step) if step % 2 == 0 else model.embed.weight.square().mean())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(optimizer, KeepsZeros):
            optimizer.load_state_dict(optimizer.state_dict("given"), note="taken")
            told.append(optimizer.note)
        else:
            told.append((copy.deepcopy(optimizer).own, pickle.loads(pickle.dumps(optimizer)).own, list(TakesNothing.known)))
        told.append([group.get("note") for group in optimizer.param_groups])
    return told


@case(refused=1604, types=("fp32",), memory=("floor",))
def momentum_that_begins_late_is_refused(run):
    model = run.model()
    optimizer = SGD([{"params": model.blocks.parameters(), "momentum": 0.9}, {"params": model.head.parameters()}], 0.1)
    run.attach(model, optimizer)
    run.train(model, optimizer)
    optimizer.param_groups[1]["momentum"] = 0.9
    run.train(model, optimizer)


@case(types=("fp32", "bf16"))
def momentum_that_pauses(run):
    model = run.model()
    optimizer = SGD([{"params": model.blocks.parameters()}, {"params": model.head.parameters()}], 0.1, momentum=0.9, dampening=0.1)
    run.attach(model, optimizer)
    run.train(model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0
    run.train(model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    run.train(model, optimizer)


@case(types=("fp32",))
def state_is_read_as_any_tensor(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    run.train(model, optimizer)
    state = optimizer.state[model.norm.weight]["exp_avg"]
    optimizer.state[model.norm.weight]["exp_avg"] = state.to("cpu")
    file = io.BytesIO()
    torch.save([state, state[2:4]], file)
    file.seek(0)
    return [repr(state), f"{state[0]:.6f}", state.tolist(), state.numpy().sum().item(), state + 1, state.norm(), torch.stack([state, state]), len(state),
            copy.deepcopy(state), torch.load(file), state.view(-1, 2).sum(0), [each.item() for each in state.unbind()], state.shape]


# ---- Groups ------------------------------------------------------------------------------------


@case
def groups_with_options(run):
    model = run.model()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 1e-2}], 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer, clip=0.5)


@case
def named_parameters_in_the_optimizer(run):
    model = run.model()
    optimizer = AdamW(model.named_parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer), optimizer.param_groups[0]["param_names"]


@case
def group_added_later(run):
    model = run.model()
    optimizer = AdamW(model.blocks.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    optimizer.add_param_group({"params": model.head.parameters(), "lr": 1e-2})
    for p in model.parameters():
        p.grad = None
    return told + run.train(model, optimizer, first=3)


@case
def optimizer_of_a_part(run):
    model = run.model()
    optimizer = AdamW(model.blocks.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer), model.head.weight.grad


@case
def parameter_outside_of_the_model(run):
    model = run.model()
    scale = torch.nn.Parameter(torch.ones(VECTOR, dtype=run.dtype))
    optimizer = AdamW([*model.parameters(), scale], 1e-3, fused=True)
    run.attach(model, optimizer)
    told = run.steps(optimizer, lambda step: run.loss(model, step) * scale.float().mean())
    return told, scale


VECTOR = 9


@case
def two_optimizers_of_one_job(run):
    model = run.model()
    body, head = SGD(model.blocks.parameters(), 0.1, momentum=0.9), SGD([*model.head.parameters(), *model.embed.parameters()], 0.01, momentum=0.5)
    run.attach(model, [body, head])
    told = []
    for step in range(4):
        loss = run.loss(model, step)
        loss.backward()
        body.step()
        if step % 2:
            head.step()
        body.zero_grad(), head.zero_grad()
        told.append(loss.item())
    return told


def of_three_kinds(model):
    return [SGD(model.head.parameters(), 0.1, momentum=0.9), AdamW(model.blocks.parameters(), 1e-3),
            Adagrad(model.embed.parameters(), 1e-2, initial_accumulator_value=0.1)]


@case
def optimizers_of_three_kinds(run):
    """They take turns, one has a schedule, and what they keep is read, written and loaded."""
    model = run.model()
    optimizers = of_three_kinds(model)
    scheduler = schedulers.OneCycleLR(optimizers[0], 0.2, total_steps=8)
    handle, told = run.attach(model, optimizers), []
    for step in range(6):
        loss = run.loss(model, step)
        loss.backward()
        told += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
        for number, optimizer in enumerate(optimizers):
            if number != step % 4:
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        if step == 2:
            optimizers[0].state[model.head.weight]["momentum_buffer"].mul_(0.5)
            optimizers[2].state[model.embed.weight]["sum"].add_(0.5)
            kept = [optimizer.state_dict() for optimizer in optimizers]
            for each in kept:
                each["state"] = {key: {name: value.clone() for name, value in state.items()} for key, state in each["state"].items()}
        if step == 4:
            for optimizer, state in zip(optimizers, kept):
                optimizer.load_state_dict(state)
    planes = [handle.gather(model.head.weight, "momentum_buffer"), handle.gather(model.embed.weight, "sum")]
    return told, planes, [states_of(optimizer) for optimizer in optimizers], [optimizer.state_dict()["state"] for optimizer in optimizers]


@case
def optimizers_of_several_kinds_go_on(run):
    """With what they kept in memory before attach, and in a run that was stopped between their steps."""
    def make():
        model = run.model()
        return model, [RMSprop(model.blocks.parameters(), 1e-3, momentum=0.5, centered=True), Adam(model.head.parameters(), 1e-3, fused=True)]

    def take(first, last):
        for step in range(first, last):
            optimizer = optimizers[step % 2]
            loss = run.loss(model, step)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            told.append(loss.item())

    told, (model, optimizers) = [], make()
    if run.dtype == torch.float32:
        take(0, 3)
    run.attach(model, optimizers, job="several")
    take(3, 6)
    if run.offloaded:
        run.end()
        model, optimizers = make()
        assert run.attach(model, optimizers, job="several").step == 3
    optimizers[0].add_param_group({"params": list(model.embed.parameters())})
    take(6, 9)
    return told, [states_of(optimizer) for optimizer in optimizers]


@case(refused=1602, types=("fp32",), memory=("floor",))
def kinds_of_another_run_are_refused(run):
    for kinds in ((AdamW, SGD), (AdamW, AdamW)):
        model = run.model()
        optimizers = [kind(part.parameters(), 1e-3, **({"momentum": 0.9} if kind is SGD else {})) for kind, part in zip(kinds, (model.blocks, model.head))]
        run.attach(model, optimizers, job="of_kinds")
        run.loss(model, 0).backward()
        for optimizer in optimizers:
            optimizer.step()
        run.end()
        for arguments in (("export", run.folder, "of_kinds", os.path.join(run.folder, "exported"), "--universal"),
                          ("import", run.folder, "of_kinds", os.path.join(run.folder, "exported"), "--as", "imported")):
            try:
                control.run(*arguments)
            except offloadd.Error as error:
                assert "kinds" in str(error), error
            else:
                raise AssertionError(arguments)


@case(refused=1201, types=("fp32",), memory=("floor",))
def pool_whose_name_is_not_utf8_is_refused(run):
    model = run.model()
    run.attach(model, SGD(model.parameters(), 0.1), nvme_path=os.path.join(run.folder, os.fsdecode(b"\xff")))


@case(refused=1002, types=("fp32",), memory=("floor",))
def parameter_that_is_named_twice_is_refused(run):
    model = run.model()
    model.head.weight = model.embed.weight
    run.attach(model, AdamW([*model.embed.parameters(), *model.blocks.parameters(), *model.head.parameters()], 1e-3))


@case(refused=1002, types=("fp32",), memory=("floor",))
def parameter_that_is_named_again_is_refused(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    run.train(model, optimizer)
    optimizer.param_groups[0]["params"].append(model.head.weight)
    run.train(model, optimizer)


@case(refused=1002, types=("fp32",), memory=("floor",))
def parameter_in_two_optimizers_is_refused(run):
    model = run.model()
    run.attach(model, [SGD(model.parameters(), 0.1), SGD(model.head.parameters())])


@case
def gan(run):
    generator, critic = run.make(lambda: torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))), \
        run.make(lambda: torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LeakyReLU(), torch.nn.Linear(64, 1)))
    for_generator, for_critic = AdamW(generator.parameters(), 1e-3, fused=True), AdamW(critic.parameters(), 1e-3, fused=True)
    run.attach([generator, critic], [for_generator, for_critic])
    told = []
    for step in range(3):
        torch.manual_seed(step)
        real, noise = torch.randn(8, 32, dtype=run.dtype), torch.randn(8, 16, dtype=run.dtype)
        loss = critic(generator(noise).detach()).mean() - critic(real).mean()
        for_critic.zero_grad()
        loss.backward()
        for_critic.step()
        fooled = -critic(generator(noise)).mean()
        for_generator.zero_grad()
        fooled.backward()
        for_generator.step()
        told += [loss.item(), fooled.item()]
    return told


@case(types=("fp32",))
def optimizer_in_memory_for_the_rest(run):
    """A second optimizer, torch's own, on parameters that are offloaded."""
    model = run.model()
    first, second = AdamW(model.blocks.parameters(), 1e-3, fused=True), SGD(model.head.parameters(), 0.1)
    run.attach(model, first)
    told = []
    for step in range(3):
        loss = run.loss(model, step)
        loss.backward()
        first.step()
        second.step()
        first.zero_grad(), second.zero_grad()
        told.append(loss.item())
    return told


# ---- Schedulers, closures, hooks ---------------------------------------------------------------


def scheduled(make, name, before=False, types=("fp32",)):
    def function(run):
        model = run.model()
        optimizer = AdamW(model.parameters(), 1e-3, fused=True)
        if before:
            scheduler = make(optimizer)
            run.attach(model, optimizer)
        else:
            run.attach(model, optimizer)
            scheduler = make(optimizer)
        return run.train(model, optimizer, steps=5, scheduler=scheduler), scheduler.state_dict()["last_epoch"]

    function.__name__ = name
    case(function, types=types)


scheduled(lambda o: schedulers.LambdaLR(o, lambda e: 1 / (1 + e)), "lambda_lr")
scheduled(lambda o: schedulers.LambdaLR(o, lambda e: 1 / (1 + e)), "lambda_lr_made_before", before=True)
scheduled(lambda o: schedulers.CosineAnnealingLR(o, 5), "cosine")
scheduled(lambda o: schedulers.CosineAnnealingLR(o, 5), "cosine_made_before", before=True, types=("fp32", "bf16"))
scheduled(lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=7), "one_cycle_changes_betas")
scheduled(lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=7), "one_cycle_made_before", before=True)
scheduled(lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.StepLR(o, 1, 0.5)], [2]), "sequential")
scheduled(lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, 2, cycle_momentum=False), "cyclic")
scheduled(lambda o: schedulers.MultiStepLR(o, [1, 3]), "multi_step")


def rate_as_tensor_with_a_scheduler(make, name):
    """The scheduler keeps tensors in the groups: the rate that was there at first."""

    def function(run):
        model = run.model()
        optimizer = make(model.parameters())
        run.attach(model, optimizer)
        return run.train(model, optimizer, scheduler=schedulers.ExponentialLR(optimizer, 0.7)), optimizer.param_groups[0]["initial_lr"]

    function.__name__ = name
    case(function, types=("fp32",))


rate_as_tensor_with_a_scheduler(lambda p: AdamW(p, torch.tensor(0.0123), foreach=False), "adamw_lr_tensor_and_a_scheduler")
rate_as_tensor_with_a_scheduler(lambda p: Adagrad(p, torch.tensor(0.0123)), "adagrad_lr_tensor_and_a_scheduler")


@case(types=("fp32",))
def plateau(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    told = []
    for step in range(4):
        told += run.train(model, optimizer, steps=1, first=step)
        scheduler.step(step)
        told.append(optimizer.param_groups[0]["lr"])
    return told


@case(types=("fp32",))
def options_changed_by_hand(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"], group["betas"] = 3e-4, 0.2, (0.8, 0.9)
    return told + run.train(model, optimizer, first=3)


@case
def closure(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    run.attach(model, optimizer)
    return run.train_with_closures(model, optimizer)


@case(types=("fp32",))
def step_hooks(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("before"))
    run.attach(model, optimizer)
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append("after"))
    return run.train(model, optimizer), seen


@case(types=("bf16",))
def step_hooks_of_all_optimizers(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    seen = []
    hook = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(type(o).__name__))
    try:
        return run.train(model, optimizer), seen
    finally:
        hook.remove()


@case(types=("fp32",))
def hook_that_scales_gradients(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)

    def halve(o, args, kwargs):
        for group in o.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    return run.train(model, optimizer)


# ---- Gradients ---------------------------------------------------------------------------------


@case
def accumulation(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer, micro=3, clip=1.0)


def clipped(name, clip):
    def function(run):
        model = run.model()
        optimizer = AdamW(model.parameters(), 1e-3, fused=True)
        run.attach(model, optimizer)
        told = []
        for step in range(3):
            loss = run.loss(model, step)
            loss.backward()
            told += [loss.item(), clip(model)]
            optimizer.step()
            optimizer.zero_grad()
        return told

    function.__name__ = name
    case(function)


clip = torch.nn.utils.clip_grad_norm_
clipped("clip_norm", lambda m: clip(m.parameters(), 0.1).item())
clipped("clip_norm_foreach", lambda m: clip(m.parameters(), 0.1, foreach=True).item())
clipped("clip_norm_loop", lambda m: clip(m.parameters(), 0.1, foreach=False).item())
clipped("clip_norm_inf", lambda m: clip(m.parameters(), 0.1, norm_type=float("inf")).item())
clipped("clip_norm_1", lambda m: clip(m.parameters(), 0.1, norm_type=1).item())
clipped("clip_norm_per_block", lambda m: [clip(block.parameters(), 0.1).item() for block in m.blocks])
clipped("clip_norm_without_bound", lambda m: clip(m.parameters(), float("inf")).item())
clipped("clip_norm_error_if_nonfinite", lambda m: clip(m.parameters(), 0.1, error_if_nonfinite=True).item())
clipped("clip_value", lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3))
clipped("clip_value_loop", lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3, foreach=False))
clipped("total_norm", lambda m: torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]).item())
clipped("norm_by_hand", lambda m: sum(p.grad.float().pow(2).sum().item() for p in m.parameters()) ** 0.5)
clipped("scaled_by_hand", lambda m: [p.grad.mul_(0.3) for p in m.parameters()] and 0)
clipped("scaled_by_data", lambda m: [p.grad.data.div_(3) for p in m.parameters()] and 0)
clipped("noise", lambda m: (torch.manual_seed(3), [p.grad.add_(torch.randn_like(p.grad), alpha=0.01) for p in m.parameters()]) and 0)
clipped("replaced", lambda m: [setattr(p, "grad", p.grad.clone() * 2) for p in m.parameters()] and 0)
clipped("some_dropped", lambda m: [setattr(p, "grad", None) for p in list(m.parameters())[::2]] and 0)
clipped("read", lambda m: [p.grad.abs().max().item() for p in m.parameters()])


def cleared(name, clear):
    def function(run):
        model = run.model()
        optimizer = AdamW(model.parameters(), 1e-3, fused=True)
        run.attach(model, optimizer)
        told = []
        for step in range(3):
            clear(model, optimizer)
            loss = run.loss(model, step)
            loss.backward()
            optimizer.step()
            told.append(loss.item())
        return told, [p.grad for p in model.parameters()]

    function.__name__ = name
    case(function, types=("fp32",))


cleared("cleared_by_optimizer", lambda m, o: o.zero_grad())
cleared("cleared_to_zero", lambda m, o: o.zero_grad(set_to_none=False))
cleared("cleared_by_model", lambda m, o: m.zero_grad())
cleared("cleared_by_model_to_zero", lambda m, o: m.zero_grad(set_to_none=False))
cleared("cleared_by_hand", lambda m, o: [setattr(p, "grad", None) for p in m.parameters()])
cleared("cleared_by_zero_", lambda m, o: [p.grad.zero_() for p in m.parameters() if p.grad is not None])
cleared("cleared_by_fill", lambda m, o: [p.grad.data.fill_(0) for p in m.parameters() if p.grad is not None])
cleared("never_cleared", lambda m, o: None)


@case
def gradients_after_the_step(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
        told.append([p.grad.clone() for p in model.parameters()])
    return told


@case
def gradients_given_other_storages(run):
    """`p.grad.data = …`, with the former value kept."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    averages, told = {}, []
    for step in range(4):
        run.loss(model, step).backward()
        if step == 3:
            run.loss(model, 9).backward()  # adds to what was set below
        for name, p in model.named_parameters():
            averages[name] = p.grad.data.detach() if name not in averages else averages[name] * 0.9 + p.grad.data * 0.1
            p.grad.data = p.grad.data + averages[name] * 2
            if step == 2:
                told.append(p.grad.clone())
        if step != 2:
            optimizer.step()
            optimizer.zero_grad()
    return told, averages


@case(refused=1601, types=("fp32",), memory=("floor",))
def transposed_gradient_of_a_fused_optimizer_is_refused(run):
    """torch's fused kernels would take it as it lies in memory."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    run.loss(model, 0).backward()
    model.head.weight.grad = model.head.weight.grad.t().contiguous().t()
    optimizer.step()


@case(types=("fp32",))
def transposed_gradient(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        loss = run.loss(model, step)
        loss.backward()
        told.append(loss.item())
        model.head.weight.grad = model.head.weight.grad.t().contiguous().t()
        optimizer.step()
        optimizer.zero_grad()
    return told


@case
def gradients_by_autograd_grad(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        loss = run.loss(model, step)
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
            p.grad = g
        optimizer.step()
        told.append(loss.item())
    return told


@case(types=("fp32",))
def hooks(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    seen = []
    model.head.weight.register_hook(lambda g: g * 0.5)
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    model.blocks[0].register_full_backward_hook(lambda m, i, o: seen.append(o[0].norm().item()))
    model.blocks[1].register_forward_hook(lambda m, i, o: o * 1.5)
    return run.train(model, optimizer), seen


@case(types=("fp32",))
def double_backward(run):
    model = run.model(layers=1)
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = []
    for step in range(2):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = run.loss(model, step)
        grads = torch.autograd.grad(loss, [model.head.weight, model.norm.weight], create_graph=True)
        penalty = sum(g.pow(2).sum() for g in grads)
        (loss + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        told += [loss.item(), penalty.item()]
    return told


@case(types=("fp32",))
def weights_written_under_a_graph(run):
    """torch keeps what backward needs, and tells tensors apart by their addresses."""
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    told = []
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        for step in range(3):
            loss = run.loss(model, step)
            with torch.no_grad():
                model.blocks[1].up.weight.mul_(0.9)
                model.head.weight.mul_(0.9)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
    return told


@case(types=("fp32",))
def operators_that_a_dispatch_mode_sees(run):
    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    model = run.model()
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    seen = []
    for step in range(2):
        with Log():
            run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


@case(types=("fp32",))
def dispatch_mode_that_makes_others_of_operators(run):
    """What an operator that overwrites everything has become may look at what was there."""
    class Half(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.copy_.default:
                return args[0].lerp_(args[1], 0.5)
            if function in (torch.ops.aten.zero_.default, torch.ops.aten.normal_.default):
                return args[0]
            return function(*args, **(kwargs or {}))

    model = run.model()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    run.attach(model, optimizer)
    gradients = []
    for step in range(2):
        run.loss(model, step).backward()
        with Half(), torch.no_grad():
            model.head.weight.copy_(torch.ones_like(model.head.weight))
            model.norm.weight.normal_()
            model.embed.weight.data.zero_()
            model.blocks[0].up.weight.grad.copy_(torch.ones_like(model.blocks[0].up.weight))
            model.head.weight.grad.zero_()
        gradients += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return gradients


@case(types=("fp32",))
def retained_graph(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    loss = run.loss(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return loss


def graph_after_a_step(name, make, **options):
    def function(run):
        """As in plain torch: an error, and with fused=True, which does not count what it writes, none."""
        model = run.model()
        optimizer = make(model.parameters())
        run.attach(model, optimizer)
        loss = run.loss(model, 0)
        loss.backward(retain_graph=True)
        optimizer.step()
        try:
            loss.backward()
        except RuntimeError as error:
            told = "modified by an inplace operation" in str(error)
        else:
            told = "goes on"
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        return told, gradients, run.train(model, optimizer, first=1)

    function.__name__ = f"graph_after_a_step_{name}"
    case(function, **options)


graph_after_a_step("of_fused_adamw", lambda p: AdamW(p, 1e-3, fused=True))
graph_after_a_step("of_adamw", lambda p: AdamW(p, 1e-3))


@case(types=("fp32",))
def backward_that_throws(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    handle = model.blocks[0].register_full_backward_pre_hook(lambda m, g: 1 / 0)
    try:
        run.loss(model, 0).backward()
    except ZeroDivisionError:
        handle.remove()
    optimizer.zero_grad()
    return run.train(model, optimizer)


@case(refused=1701, types=("fp32",), memory=("floor",))
def infinite_gradient_is_refused(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    (run.loss(model, 0) * float("inf")).backward()
    optimizer.step()


@case(refused=1701, types=("fp32",), memory=("256MiB",))
def one_infinite_number_of_many_is_refused(run):
    """The last one, where several threads share the look at them."""
    model = run.make(lambda: torch.nn.Linear(700, 900))
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    model(torch.ones(4, 700)).sum().backward()
    model.weight.grad[-1, -1] = float("inf")
    optimizer.step()


def flushing(function):
    """A case whose offloaded run takes the smallest numbers for 0 from somewhere on."""

    def flushed(run):
        try:
            return function(run)
        finally:
            torch.set_flush_denormal(False)

    flushed.__name__ = function.__name__
    case(flushed, refused=1604, types=("fp32",), memory=("floor",))


@flushing
def flushed_denormals_are_refused(run):
    torch.set_flush_denormal(True)
    model = run.model()
    run.attach(model, AdamW(model.parameters(), 1e-3, fused=True))


@flushing
def denormals_flushed_later_are_refused(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    run.loss(model, 0).backward()
    optimizer.step()
    torch.set_flush_denormal(True)
    optimizer.step()


@case(types=("fp32",))
def grad_scaler(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    scaler, told = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2), []
    for step in range(4):
        loss = run.loss(model, step)
        if step == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told += [scaler.get_scale(), run.loss(model, step).item()]
    return told


@case(types=("fp32",), memory=("double",))
def grad_scaler_unscales(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    scaler, told = torch.amp.GradScaler("cpu", init_scale=2.0**12), []
    for step in range(3):
        loss = run.loss(model, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        told += [loss.item(), clip(model.parameters(), 0.1).item()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return told


if __name__ == "__main__":
    sys.exit(main())
