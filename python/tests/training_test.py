"""Optimizers, gradients, schedulers, clipping: the loops that people write."""

import copy
import io
import logging
import os
import sys
import tempfile

import numpy
import safetensors.torch
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook

import offloadd
from battery import VOCABULARY, Transformer, case, main, states_of

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
    assert handle.statistics().get("durable_step", 0) == 0
    assert handle.checkpoint() == handle.step == 2
    handle.wait_durable()
    assert handle.statistics().get("durable_step", 2) == 2
    return told + run.train(model, optimizer, first=2)


@case
def lbfgs(run):
    model = run.model()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    handle = run.attach(model, optimizer)
    told = []
    for step in range(2):
        def again():
            optimizer.zero_grad()
            loss = run.loss(model, step)
            loss.backward()
            return loss

        told.append(optimizer.step(again).item())
    return told, handle.step, optimizer.state_dict()["state"][0]["n_iter"]


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


@case(refused=1604, types=("fp32",), memory=("floor",))
def job_of_an_optimizer_in_this_process_is_not_resumed(run):
    for _ in range(2):
        model = run.model()
        optimizer = SignDescent(model.parameters(), 1e-3)
        handle = run.attach(model, optimizer, job="own")
        run.train(model, optimizer)
        handle.close()


def beside_adamw(run, **options):
    """Muon for matrices, which runs in this process, and AdamW for the rest."""
    model = run.model()
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is each for each in matrices)]
    optimizers = [torch.optim.Muon(matrices, 1e-2), AdamW(rest, 1e-3, fused=True)]
    handle = run.attach(model, optimizers, **options)
    told = []
    for step in range(3):
        loss = run.loss(model, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        told.append(loss.item())
    return told, handle, [optimizer.state_dict()["state"] for optimizer in optimizers]


@case
def optimizer_in_this_process_beside_adamw(run):
    told, handle, states = beside_adamw(run)
    return told, handle.step, states


@case(refused=1604, types=("fp32",), memory=("floor",))
def job_with_an_optimizer_in_this_process_is_not_resumed(run):
    for _ in range(2):
        beside_adamw(run, job="both")[1].close()


@case
def subclass_without_step(run):
    model = run.model()
    optimizer = Renamed(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer), optimizer.describe(), isinstance(optimizer, AdamW), type(optimizer).__name__, repr(optimizer)


@case(refused=1604, types=("fp32",), memory=("floor",))
def momentum_that_begins_late_is_refused(run):
    model = run.model()
    optimizer = SGD([{"params": model.blocks.parameters(), "momentum": 0.9}, {"params": model.head.parameters()}], 0.1)
    run.attach(model, optimizer)
    run.train(model, optimizer)
    optimizer.param_groups[1]["momentum"] = 0.9
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


@case(refused=1601, types=("fp32",), memory=("floor",))
def group_of_a_stranger_is_refused(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    optimizer.add_param_group({"params": torch.nn.Linear(3, 3).parameters()})


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
    told = []
    for step in range(3):
        loss = run.loss(model, step) * scale.float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
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


@case(refused=1604, types=("fp32",), memory=("floor",))
def optimizers_of_two_kinds_are_refused(run):
    model = run.model()
    run.attach(model, [SGD(model.blocks.parameters(), 0.1), AdamW(model.head.parameters())])


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
    told = []
    for step in range(3):
        def again():
            optimizer.zero_grad()
            loss = run.loss(model, step)
            loss.backward()
            return loss

        told.append(optimizer.step(again).item())
    return told


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


# ---- The model ---------------------------------------------------------------------------------


@case
def tied(run):
    model = run.model(tied=True)
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer, clip=1.0), model.head.weight is model.embed.weight


@case
def checkpointing(run):
    model = run.model(checkpointing="modern")
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer, micro=2)


@case
def checkpointing_reentrant(run):
    model = run.model(checkpointing="reentrant")
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer, micro=2)


@case
def frozen(run):
    model = run.model()
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer)


class Quantised(torch.nn.Module):
    """A frozen matrix of whole numbers, with trained scales."""

    def __init__(self, size=64):
        super().__init__()
        numbers = torch.randint(-127, 128, (size, 16), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
        self.numbers = torch.nn.Parameter(numbers, requires_grad=False)
        self.mask = torch.nn.Parameter(numbers > 0, requires_grad=False)
        self.scale = torch.nn.Parameter(torch.rand(size, 1))
        self.head = torch.nn.Linear(size, 4)

    def forward(self, x):
        weight = self.numbers.to(x.dtype) / 127 * self.mask * self.scale
        return self.head(torch.nn.functional.linear(x, weight))


def train_quantised(run, model, optimizer, first=0):
    told = []
    for step in range(first, first + 2):
        loss = model(torch.randn(3, 16, generator=torch.Generator().manual_seed(step)).to(run.dtype)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


@case
def tables_of_whole_numbers(run):
    """They are in the optimizer, too, as model.parameters() gives them."""
    model = run.make(Quantised)
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    handle = run.attach(model, optimizer)
    told = [train_quantised(run, model, optimizer), copy.deepcopy(optimizer.state_dict()["state"]), handle.gather("numbers"), model.state_dict()]
    handle.save_weights(os.path.join(run.folder, "weights"))
    with torch.no_grad():
        model.numbers.zero_()
    handle.load_weights(os.path.join(run.folder, "weights"))
    return told, train_quantised(run, model, optimizer, first=2)


@case
def tables_are_resumed(run):
    """Those that are small, and one that is a tensor of the store."""

    def attached():
        model = run.make(lambda: Quantised(size=20000))
        optimizer = SGD([model.scale, *model.head.parameters()], 1e-3)
        return model, optimizer, run.attach(model, optimizer, job="tables")

    model, optimizer, handle = attached()
    with torch.no_grad():
        model.numbers[3] = 5
    model.mask = torch.nn.Parameter(~model.mask, requires_grad=False)
    told = train_quantised(run, model, optimizer)
    if run.offloaded:
        run.end()
        model, optimizer, handle = attached()
        assert handle.step == 2, handle.step
    return told, train_quantised(run, model, optimizer, first=2), model.numbers, model.mask


@case
def frozen_in_the_optimizer(run):
    model = run.model()
    model.blocks[0].requires_grad_(False)
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer)


@case
def frozen_later(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    model.blocks[0].requires_grad_(False)
    return told + run.train(model, optimizer, first=3)


@case
def unfrozen_later(run):
    model = run.model()
    model.blocks.requires_grad_(False)
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    if run.offloaded:
        run.attach(model, optimizer, unfreeze=True)
    else:
        run.attach(model, optimizer)
    told = run.train(model, optimizer)
    for block in reversed(model.blocks):
        block.requires_grad_(True)
        told += run.train(model, optimizer, clip=1.0)
    return told


@case(types=("fp32",))
def unfrozen_by_name(run):
    model = run.model()
    model.blocks.requires_grad_(False)
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    if run.offloaded:
        run.attach(model, optimizer, unfreeze=["blocks.1.*"])
    else:
        run.attach(model, optimizer)
    told = run.train(model, optimizer)
    model.blocks[1].requires_grad_(True)
    return told + run.train(model, optimizer)


@case(memory=("1GiB",))
def unfrozen_unannounced(run):
    model = run.model()
    model.blocks.requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, fused=True)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    for block in reversed(model.blocks):
        block.requires_grad_(True)
        optimizer.add_param_group({"params": list(block.parameters())})
        told += run.train(model, optimizer, clip=1.0)
    return told


@case
def unused_parameters(run):
    model = run.model()
    model.extra = torch.nn.Linear(7, 5).to(run.dtype)
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer), model.extra.weight.grad


@case(types=("fp32",))
def convolutions(run):
    model = run.make(lambda: torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 16, 3, groups=4), torch.nn.GroupNorm(4, 16), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        torch.nn.Linear(16, 10)))
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        torch.manual_seed(step)
        loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 12, 12)), torch.arange(4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told, model[1].running_mean, model.eval()(torch.ones(1, 3, 12, 12))


def pictures_model(memory_format=torch.channels_last):
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3, groups=64),
        torch.nn.Conv2d(64, 96, 3), torch.nn.ConvTranspose2d(96, 8, 2)).to(memory_format=memory_format)


def train_pictures(run, model, optimizer, first=0):
    told = []
    for step in range(first, first + 3):
        for part in range(2):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + part)).to(run.dtype)
            loss = model(x.to(memory_format=torch.channels_last)).float().pow(2).mean()
            loss.backward()
            told.append(loss.item())
        told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        told.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return told


@case
def channels_last(run):
    model = run.make(pictures_model)
    optimizer = AdamW(model.parameters(), 1e-2, amsgrad=True)
    handle = run.attach(model, optimizer, **({"job": "again"} if run.offloaded else {}))
    told = train_pictures(run, model, optimizer)
    if run.offloaded:
        run.end()
        model = run.make(pictures_model)
        optimizer = AdamW(model.parameters(), 1e-2, amsgrad=True)
        run.attach(model, optimizer, job="again")
    told += train_pictures(run, model, optimizer, first=3)
    model.to(memory_format=torch.channels_last)
    state = run.handles[0].gather(model[4].weight, "exp_avg")
    return told, state, state.stride(), [p.stride() for p in model.parameters()], copy.deepcopy(model).state_dict()


@case(refused=1601, types=("fp32",), memory=("floor",))
def channels_last_after_attach_is_refused(run):
    model = run.make(lambda: pictures_model(torch.contiguous_format))
    run.attach(model, SGD(model.parameters(), 0.1))
    model.to(memory_format=torch.channels_last)


@case(refused=1602, types=("fp32",), memory=("double",))
def job_of_another_layout_is_refused(run):
    for layout in torch.channels_last, torch.contiguous_format:
        model = run.make(lambda: pictures_model(layout))
        with run.attach(model, SGD(model.parameters(), 0.1), job="again"):
            pass


@case(types=("fp32",))
def recurrent(run):
    model = run.make(lambda: torch.nn.GRU(16, 24, batch_first=True))
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(2, 5, 16))[0].pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


@case(types=("fp32",))
def embedding_bag_and_dropout(run):
    model = run.make(lambda: torch.nn.Sequential(torch.nn.EmbeddingBag(100, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 2)))
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        torch.manual_seed(step)
        loss = torch.nn.functional.cross_entropy(model(torch.randint(100, (4, 6))), torch.tensor([0, 1, 0, 1]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


def train_sparse(run, make):
    model = run.make(lambda: torch.nn.Sequential(torch.nn.Embedding(400, 96, sparse=True), torch.nn.Linear(96, 8)))
    optimizer = make(model.parameters())
    run.attach(model, optimizer)
    told = []
    for step in range(4):  # indices come several times
        ids = torch.randint(30, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = model(ids).float().pow(2).mean() * (1e4 if step == 2 else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


@case(types=("fp32",))
def sparse_gradients(run):
    return train_sparse(run, lambda p: SGD(p, 0.7))


@case(types=("fp32",))
def sparse_gradients_maximized(run):
    return train_sparse(run, lambda p: SGD(p, 0.001, maximize=True))


@case(types=("fp32",))
def sparse_adam(run):
    model = run.make(lambda: torch.nn.Embedding(400, 96, sparse=True))
    optimizer = torch.optim.SparseAdam(list(model.parameters()), 0.01)
    run.attach(model, optimizer)
    for step in range(3):
        model(torch.arange(3 * step, 3 * step + 7)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@case(refused=1601, types=("fp32",), memory=("floor",))
def sparse_gradients_with_momentum_are_refused(run):
    train_sparse(run, lambda p: SGD(p, 0.1, momentum=0.9))


@case(types=("fp32",))
def parametrizations(run):
    model = run.make(lambda: torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 16)),
                                                 torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(16, 16))))
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


@case(types=("fp32",))
def autocast(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.loss(model, step)
        loss.backward()
        told += [loss.item(), clip(model.parameters(), 1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    return told


@case
def evaluation_between(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        told += run.train(model, optimizer, steps=1, first=step)
        model.eval()
        with torch.no_grad():
            told.append(run.loss(model, 99).item())
        with torch.inference_mode():
            told.append(run.loss(model, 98).item())
        model.train()
    return told


@case
def average_of_weights(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    told = []
    for step in range(3):
        told += run.train(model, optimizer, steps=1, first=step)
        average.update_parameters(model)
    return told, [p.detach() for p in average.parameters()], run.loss(average, 1)


@case
def weights_given_other_storages(run):
    """`p.data = …`, of trained and of frozen parameters: what MoCo does; put back in between, as for an evaluation."""
    def make():
        query = run.model(layers=1)
        return torch.nn.ModuleList([query, copy.deepcopy(query).requires_grad_(False)])

    def go(model, optimizer, steps):
        told = []
        for step in steps:
            loss = run.loss(model[0], step) + (model[1](run.batch(step)).float() - model[0](run.batch(step)).float()).square().mean()
            for q, k in zip(model[0].parameters(), model[1].parameters()):
                k.data = k.data * 0.5 + q.data * 0.5
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = [p.data for p in model[0].parameters()]
            for p in model[0].parameters():
                p.data = torch.zeros_like(p)
            told += [loss.item(), run.loss(model[0], step).item()]
            for p, before in zip(model[0].parameters(), kept):
                p.data = before
            del p, kept, before
            for p in model[0].parameters():
                p.data = p.data * 0.99
        return told

    model = make()
    optimizer = SGD(model[0].parameters(), 0.1, momentum=0.9)
    handle = run.attach(model, optimizer, job="replaced")
    if not run.offloaded:
        return go(model, optimizer, range(4))
    told = go(model, optimizer, range(2))
    # What comes behind the last step is not of the job.
    scaled = [p.detach().clone() for p in model[0].parameters()]
    handle.close()
    run.models.pop()
    model = make()
    optimizer = SGD(model[0].parameters(), 0.1, momentum=0.9)
    run.attach(model, optimizer, job="replaced")
    run.handles.pop(0)
    with torch.no_grad():
        for p, value in zip(model[0].parameters(), scaled):
            p.copy_(value)
    return told + go(model, optimizer, range(2, 4))


@case(types=("fp32",), memory=("floor",))
def started_under_any_umask(run):
    model = run.model(layers=1)
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    before = os.umask(0o777)
    try:
        run.attach(model, optimizer)
    finally:
        os.umask(before)
    return run.train(model, optimizer)


@case(types=("fp32",), memory=("floor",))
def files_and_pointers_while_a_model_is_built(run):
    """What follows pointers has a copy in memory: torch.save and torch.load, safetensors, numpy."""
    def make():
        model = torch.nn.Sequential(torch.nn.Linear(256, 300), torch.nn.Linear(300, 256))
        torch.save(model.state_dict(), path := os.path.join(run.folder, "built.pt"))
        safetensors.torch.save_file(model.state_dict(), path + ".safetensors")
        told = [torch.load(path)["0.weight"].sum().item(), safetensors.torch.load_file(path + ".safetensors")["1.weight"].sum().item(),
                float(model[0].weight.detach().numpy()[0, 0]), model[1].weight.tolist()[-1][-1], repr(model[0].weight)]
        model.load_state_dict({name: value * 2 for name, value in torch.load(path).items()})
        return model, told

    torch.manual_seed(0)
    if run.offloaded:
        with offloadd.init(nvme_path=run.folder, ram=f"{64 << 20}", job="built"):
            model, told = make()
        handle = offloadd.attach(model, SGD(model.parameters(), 0.1))
        values = [handle.gather(p) for p in model.parameters()]
        handle.close()
        return told, values
    model, told = make()
    return told, [p.detach() for p in model.parameters()]


class Cropped(torch.nn.Module):
    """Its parameters are parts of tensors that nobody has any more."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 8)
        self.embed.weight = torch.nn.Parameter(self.embed.weight[:64])
        both = torch.randn(16)
        self.scale, self.shift = torch.nn.Parameter(both[:8]), torch.nn.Parameter(both[8:])

    def forward(self, ids):
        return (self.embed(ids % 64) * self.scale + self.shift) @ self.embed.weight.t()


@case
def parameters_that_are_parts_of_nobodys_tensors(run):
    model = run.make(Cropped)
    optimizer = AdamW(model.parameters(), 1e-2)
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        ids = run.batch(step) % 64
        loss = torch.nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


@case(refused=1601, types=("fp32",), memory=("floor",))
def parameter_that_is_a_part_of_somebodys_tensor_is_refused(run):
    model = torch.nn.Linear(8, 8)
    whole = torch.zeros(16, 8)
    model.weight = torch.nn.Parameter(whole[:8])
    run.attach(model, SGD(model.parameters(), 0.1))


@case(refused=1601, types=("fp32",), memory=("floor",))
def storage_that_two_tensors_are_over_is_refused(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    average = [torch.zeros(2 * p.numel()) for p in model.parameters()]
    for p, value in zip(model.parameters(), average):
        p.data = value[:p.numel()].view_as(p)
    run.train(model, optimizer)


@case
def values_that_live_on_beside_the_weights_that_they_were_given_to(run):
    """`p.data = x`, and x is kept: both are one from then on, also after steps."""
    model = run.model(layers=1)
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    told = run.train(model, optimizer, 1)
    kept = [p.detach() * 0.5 for p in model.parameters()]
    for p, value in zip(model.parameters(), kept):
        p.data = value
    for step in range(1, 4):
        told += run.train(model, optimizer, 1, first=step)
        told += [torch.equal(p, value) for p, value in zip(model.parameters(), kept)]
        told += [value.clone() for value in kept]
        for value in kept:
            value.mul_(0.75)
        told.append(run.loss(model, step).item())
    return told


class SharpnessAware(torch.optim.Optimizer):
    """Goes back to weights that it has kept, and keeps them on: both are over one storage."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.base = SGD(self.param_groups, lr, momentum=0.9)

    @torch.no_grad()
    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            self.state[p]["kept"] = p.data.clone()
            p.add_(p.grad, alpha=0.1)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["kept"]
        self.base.step()
        self.zero_grad()


@case
def storages_shared_with_an_optimizer_in_this_process(run):
    model = run.model(layers=1)
    optimizer = SharpnessAware(model.parameters(), 0.1)
    handle = run.attach(model, optimizer)
    told = []
    for step in range(3):
        def closure():
            loss = run.loss(model, step)
            loss.backward()
            told.append(loss.item())

        closure()
        optimizer.step(closure)
        told.append(handle.gather("head.weight"))
    return told


@case
def moving_average_by_hand(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    teacher = copy.deepcopy(model)
    told = []
    for step in range(3):
        told += run.train(model, optimizer, steps=1, first=step)
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), model.parameters()):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
    return told, [p.detach() for p in teacher.parameters()]


@case
def initialised_after_attach(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    torch.manual_seed(5)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    told = run.train(model, optimizer)
    with torch.no_grad():
        model.head.weight[3].zero_()
        model.embed.weight.data.mul_(0.5)
    return told + run.train(model, optimizer, first=3)


@case
def state_dict_loaded_after_attach(run):
    model, other = run.model(), run.make(lambda: Transformer(2))
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01)
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    model.load_state_dict(other.state_dict())
    return told + run.train(model, optimizer, first=3)


@case(types=("fp32",))
def functional_call(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    scaled = {name: p * 2 for name, p in model.named_parameters()}
    return told, torch.func.functional_call(model, scaled, (run.batch(1),))


@case(types=("fp32",))
def casts_that_change_nothing(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    model.to("cpu").float().train().cpu()
    return run.train(model, optimizer)


@case(refused=1601, types=("fp32",), memory=("floor",))
def cast_after_attach_is_refused(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    model.to(torch.bfloat16)
    run.train(model, optimizer)


@case(refused=1601, types=("fp32",), memory=("floor",))
def complex_weights_are_refused(run):
    model = torch.nn.Linear(8, 8, dtype=torch.complex64)
    run.attach(model, AdamW(model.parameters()))


@case(refused=1601, types=("fp32",), memory=("floor",))
def data_parallel_is_refused(run):
    model = torch.nn.DataParallel(run.model())
    optimizer = AdamW(model.parameters())
    if run.offloaded:
        offload(run, model, optimizer)


def offload(run, model, optimizer):
    import offloadd

    offloadd.attach(model, optimizer, nvme_path=run.folder, ram="256MiB")


@case(refused=1601, types=("fp32",), memory=("floor",))
def distributed_tensors_are_refused(run):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = run.model()
        model.head.weight = torch.nn.Parameter(distribute_tensor(model.head.weight.detach(), init_device_mesh("cpu", (1,)), [Replicate()]))
        offload(run, model, AdamW(model.parameters()))
    finally:
        torch.distributed.destroy_process_group()


@case(refused=1601, types=("fp32",), memory=("floor",))
def model_on_meta_is_refused(run):
    with torch.device("meta"):
        model = Transformer()
    offload(run, model, AdamW(model.parameters()))


@case(refused=1205, types=("fp32",), memory=("floor",))
def one_job_twice_is_refused(run):
    model, other = run.model(), run.model()
    run.attach(model, AdamW(model.parameters()), job="same")
    run.attach(other, AdamW(other.parameters()), job="same")


@case(refused=1604, types=("fp32",), memory=("floor",))
def attached_twice_is_refused(run):
    model = run.model()
    optimizer = AdamW(model.parameters())
    run.attach(model, optimizer)
    run.attach(model, optimizer)


@case(refused=1802, types=("fp32",), memory=("floor",))
def use_after_close_is_refused(run):
    model = run.model()
    optimizer = AdamW(model.parameters())
    run.attach(model, optimizer).close()
    run.loss(model, 0)


@case(refused=1301, types=("fp32",), memory=("16MiB", "1MiB"))
def too_little_memory_is_refused(run):
    model = run.model()
    run.attach(model, AdamW(model.parameters()))


@case(types=("fp32",), memory=("256MiB",))
def two_jobs_side_by_side(run):
    first, second = run.model(), run.make(lambda: Transformer(1))
    for_first, for_second = AdamW(first.parameters(), 1e-3, fused=True), SGD(second.parameters(), 0.1)
    run.attach(first, for_first)
    run.attach(second, for_second)
    return run.train(first, for_first), run.train(second, for_second)


@case
def closed_and_attached_again(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    handle = run.attach(model, optimizer, **({"job": "again"} if run.offloaded else {}))
    told = run.train(model, optimizer)
    if run.offloaded:
        run.end()
        model = run.make(lambda: Transformer(2))
        optimizer = AdamW(model.parameters(), 1e-3, fused=True)
        assert run.attach(model, optimizer, job="again").step == 3
    return told + run.train(model, optimizer, first=3)


@case(types=("fp32",))
def closed_and_the_same_objects_attached_again(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    scheduler = schedulers.CosineAnnealingLR(optimizer, 8)
    handle = run.attach(model, optimizer, **({"job": "again"} if run.offloaded else {}))
    told = run.train(model, optimizer, scheduler=scheduler)
    if run.offloaded:
        run.end()
        run.attach(model, optimizer, job="again")
    return told + run.train(model, optimizer, first=3, scheduler=scheduler)


@case(refused=1604, types=("fp32",), memory=("double",))
def moments_do_not_go_to_a_new_job(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    handle = run.attach(model, optimizer, weights_at_close="memory")
    run.train(model, optimizer)
    handle.close()
    run.attach(model, optimizer, job="new")


@case(types=("fp32",))
def running_statistics_are_resumed(run):
    def make():
        return run.make(lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
                                                    torch.nn.Linear(8 * 36, 4)))

    def train(model, optimizer, first):
        told = []
        for step in range(first, first + 2):
            torch.manual_seed(step)
            loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.arange(4))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
        return told

    model = make()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    handle = run.attach(model, optimizer, **({"job": "again"} if run.offloaded else {}))
    told = train(model, optimizer, 0)
    if run.offloaded:
        run.end()
        model = make()
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        run.attach(model, optimizer, job="again")
    told += train(model, optimizer, 2)
    return told, model[1].running_mean, model[1].num_batches_tracked, model.eval()(torch.ones(1, 3, 8, 8))


def around_a_restart(run, build, job, look=lambda handle: None):
    """Three steps, a restart, three steps: (the model, losses, what `look` saw of the handle before, between and after them)."""
    told, seen = [], []

    def attached():
        model = run.make(build)
        optimizer = AdamW(model.parameters(), 1e-2, fused=True)
        return model, optimizer, run.attach(model, optimizer, job=job)

    def train(first):
        for step in range(first, first + 3):
            loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
        seen.append(look(handle))

    model, optimizer, handle = attached()
    seen.append(look(handle))
    train(0)
    if run.offloaded:
        run.end()
        model, optimizer, handle = attached()
        assert handle.step == 3, handle.step
    train(3)
    return model, told, seen


class Centred(torch.nn.Module):
    """Its buffer is another tensor after every forward pass, and the one before is kept."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.means = []

    def forward(self, x):
        self.means.append(self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.layer(x - self.mean)


@case(types=("fp32",))
def buffers_assigned_anew_are_resumed(run):
    model, told, _ = around_a_restart(run, Centred, "centred")
    return told, model.mean, model.means[-3:]


class Exchanging(torch.nn.Module):
    """Its buffers take each other's tensors."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        for name in ("one", "other", "last", "last_but_one"):
            self.register_buffer(name, torch.zeros(8))

    def forward(self, x):
        x = self.layer(x)
        self.one, self.other = self.other, self.one
        self.one.add_(x.detach().mean(0))
        self.last_but_one = self.last
        self.last = x.detach().mean(0)
        return x + self.one * 0.5 + self.other + self.last_but_one


@case(types=("fp32",))
def buffers_that_take_each_others_tensors(run):
    model, told, _ = around_a_restart(run, Exchanging, "exchanging")
    return told, dict(model.named_buffers())


class Observed(torch.nn.Module):
    """As observers of quantisation: a scale of one element, and an empty maximum, which are as large as they have to be after the first pass; a least
    value is another tensor then."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("most", torch.empty(0))
        self.register_buffer("least", torch.tensor(0.0))

    def forward(self, x):
        x = self.layer(x)
        if not self.most.numel():
            self.scale.resize_(8).fill_(1)
            self.most.resize_(8).zero_()
            self.least = torch.zeros(8)
        with torch.no_grad():
            self.most.copy_(torch.maximum(self.most * 0.9, x.abs().amax(0)))
            self.scale.lerp_(self.most, 0.5)
            self.least = torch.minimum(self.least * 0.9, x.amin(0))
        return x / self.scale + self.least


@case(types=("fp32",))
def buffers_that_get_their_size_later_are_resumed_and_saved(run):
    def saved(handle):
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            handle.save_weights(folder)
            return dict(sorted(safetensors.torch.load_file(os.path.join(folder, "model.safetensors")).items()))

    model, told, files = around_a_restart(run, Observed, "observed", saved)
    return told, files, model.scale, model.most, model.least


@case(types=("fp32",), memory=("floor",), refused=1601)
def large_buffer_that_grows_is_refused(run):
    model = run.make(lambda: torch.nn.Linear(8, 8))
    model.register_buffer("queue", torch.zeros(1 << 17))
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    model.queue.resize_(1 << 18).zero_()
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()


class Lines:
    """What is told meanwhile."""

    def __enter__(self):
        self._handler, lines = logging.Handler(), []
        self._handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("offloadd").addHandler(self._handler)
        return lines

    def __exit__(self, *_):
        logging.getLogger("offloadd").removeHandler(self._handler)


class LateMeans(torch.nn.Module):
    """Buffers that the first forward pass makes."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("mean", None)
        self.register_buffer("never", None)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if self.mean is None:
            self.register_buffer("count", torch.zeros(()))
            self.table = torch.ones(8)
        self.mean = x.mean(0) * self.table if self.mean is None else 0.9 * self.mean + 0.1 * x.mean(0)
        self.count += 1
        return self.layer(x - self.mean)


@case(types=("fp32",))
def buffers_that_are_made_later_are_told_of(run):
    model = run.make(LateMeans)
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    told = []
    with Lines() as lines:
        for step in range(3):
            loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
    if run.offloaded:
        assert [line.split()[2] for line in lines if "was not there" in line] == ["mean", "count"], lines
    return told, model.mean, model.count


@case(types=("fp32",))
def arrays_that_parameters_were_made_over_are_told_of(run):
    """Where somebody has them who could look, and the parameter is trained."""
    model = run.make(lambda: torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("kept", "part", "frozen", "gone")}))
    kept = {name: numpy.full((8, 4), 0.5, "float32") for name in ("kept", "part", "frozen")}
    kept["kept"] = kept["kept"][:4].copy()
    model["kept"].weight = torch.nn.Parameter(torch.from_numpy(kept["kept"]))
    model["part"].weight.data = torch.from_numpy(kept["part"].reshape(8, 4)[:4])
    model["frozen"].weight = torch.nn.Parameter(torch.from_numpy(kept["frozen"][:4]), requires_grad=False)
    model["gone"].weight = torch.nn.Parameter(torch.from_numpy(numpy.full((4, 4), 0.5, "float32")))
    optimizer = SGD(model.parameters(), 0.1)
    with Lines() as lines:
        run.attach(model, optimizer)
    if run.offloaded:
        assert [line.split()[2] for line in lines if "numpy array" in line] == ["kept.weight", "part.weight"], lines
    for _ in range(2):
        sum(layer(torch.ones(1, 4)).pow(2).sum() for layer in model.values()).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(types=("fp32", "bf16"))
def another_optimizer_of_its_class(run):
    """It is an ordinary one."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = run.train(model, optimizer, steps=2)
    other = torch.nn.Linear(4, 4)
    second = type(optimizer)(other.parameters(), lr=1e-2)
    for step in range(2):
        other(torch.full((2, 4), step + 1.0)).pow(2).sum().backward()
        second.step()
        second.zero_grad()
    assert type(second) is AdamW
    return told + run.train(model, optimizer, first=2), other.weight, second.state_dict()


@case(types=("fp32",))
def parameters_assigned_anew_are_told_of(run):
    """In plain torch nothing trains them either."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = run.train(model, optimizer, steps=1)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("offloadd").addHandler(handler)
    try:
        told += run.train(model, optimizer, first=1)
    finally:
        logging.getLogger("offloadd").removeHandler(handler)
    if run.offloaded:
        assert len(lines) == len(list(model.parameters())) and all("assign=True" in line for line in lines), lines
    return told


@case(types=("bf16",))
def groups_changed_by_hand(run):
    """Their order, and what is in them."""
    model = run.model()
    optimizer = AdamW([{"params": [p], "lr": 1e-3 * (n + 1)} for n, p in enumerate(model.parameters())], fused=True)
    run.attach(model, optimizer)
    told = run.train(model, optimizer, steps=2)
    optimizer.param_groups.reverse()
    told += run.train(model, optimizer, first=2, steps=1)
    optimizer.param_groups[0]["params"] += optimizer.param_groups.pop(1)["params"]
    absent = optimizer.param_groups[1]["params"].pop()
    told += run.train(model, optimizer, first=3, steps=1)
    optimizer.param_groups[0]["params"].append(absent)
    return told + run.train(model, optimizer, first=4), [optimizer.state[p]["step"].item() for p in model.parameters()]


@case(refused=1601, types=("fp32",), memory=("floor",))
def swapped_tensors_are_refused(run):
    model = run.model()
    run.attach(model, AdamW(model.parameters(), 1e-3, fused=True))
    torch.utils.swap_tensors(model.norm.weight, torch.nn.Parameter(torch.ones_like(model.norm.weight)))


@case
def weights_moved_and_put_back(run):
    """Sharpness-aware: the gradient of a neighbour; the old values come back as other tensors."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    for step in range(3):
        run.loss(model, step).backward()
        kept = [p.data.clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.add_(p.grad, alpha=0.1)
        optimizer.zero_grad()
        run.loss(model, step).backward()
        for p in model.parameters():
            p.data = kept.pop(0)
        optimizer.step()
        optimizer.zero_grad()


@case(types=("fp32",))
def model_in_memory_after_close(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    handle = run.attach(model, optimizer, **({"weights_at_close": "memory"} if run.offloaded else {}))
    told = run.train(model, optimizer)
    if run.offloaded:
        handle.close()
        run.handles.clear()
    return told, run.loss(model, 9), [p.detach().numpy().tolist() for p in model.parameters()], model.head.weight.data_ptr() > 0


@case(types=("fp32",))
def scripted_model(run):
    model = torch.jit.script(run.make(lambda: torch.nn.Sequential(torch.nn.Embedding(256, 16), torch.nn.GELU(), torch.nn.Linear(16, 256))))
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer)


@case(types=("fp64",), memory=("floor",))
def steps_have_torchs_type(run):
    torch.set_default_dtype(torch.float64)
    try:
        model = run.model(layers=1)
        optimizers = [AdamW(model.blocks.parameters(), 1e-3, fused=True), AdamW([model.embed.weight], 1e-3, fused=True)]
        run.attach(model, optimizers)
        told = run.train(model, optimizers[0], steps=2)
        return told, [each["step"] for each in optimizers[0].state.values()]
    finally:
        torch.set_default_dtype(torch.float32)


@case(types=("fp32",))
def compiled_model_runs_eagerly(run):
    model = run.model(layers=1)
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    if run.offloaded:
        model = torch.compile(model)
    return run.train(model, optimizer)


@case(types=("fp32",), memory=("double",))
def a_gpu_that_is_not_there(run):
    """The package has the plug-in, which says so; the model is what it was."""
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1)
    if run.offloaded and not torch.cuda.is_available():
        try:
            run.attach(model, optimizer, device="cuda:0")
            raise AssertionError("attached")
        except offloadd.Error as error:
            assert error.id in (2001, 2002) and "cannot open" not in str(error), error
        run.models.clear()
    run.attach(model, optimizer)
    return run.train(model, optimizer)


if __name__ == "__main__":
    sys.exit(main())
