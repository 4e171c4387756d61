"""What an optimizer has kept in memory goes into a job: attached after it has stepped, or loaded from a checkpoint."""

import contextlib
import copy
import hashlib
import os
import pickle
import resource
import shutil
import sys
import unittest.mock
import zipfile

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import offloadd
from battery import Lines, Transformer, case, copied_states_of, difference, main, saved

FP32 = {"types": ("fp32",)}
REFUSED = {"types": ("fp32",), "memory": ("floor",)}


def fused(parameters):
    return AdamW(parameters, 1e-3, fused=True)


# ---- Attached in the middle --------------------------------------------------------------------


def attached_in_the_middle(make, **options):
    """A case that takes steps in memory first."""

    def declare(name):
        def function(run):
            model = run.model()
            optimizer = make(model.parameters())
            told = run.train(model, optimizer, steps=3)
            run.attach(model, optimizer)
            return told + run.train(model, optimizer, first=3), copied_states_of(optimizer)

        function.__name__ = name
        case(function, **options)

    return declare


attached_in_the_middle(fused)("adamw_fused")
attached_in_the_middle(lambda p: AdamW(p, 1e-3, amsgrad=True))("adamw_amsgrad")
attached_in_the_middle(lambda p: Adam(p, 1e-3, weight_decay=0.1))("adam")
attached_in_the_middle(lambda p: Adagrad(p, 1e-2, lr_decay=0.1, initial_accumulator_value=0.5), types=("fp32",))("adagrad")
attached_in_the_middle(lambda p: RMSprop(p, 1e-3, momentum=0.9, centered=True))("rmsprop")
attached_in_the_middle(lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.1, nesterov=False))("sgd_momentum")
attached_in_the_middle(lambda p: SGD(p, 0.1))("sgd")


@case(types=("fp32",))
def state_dict_of_before_attach_goes_on(run):
    """It has the optimizer's own tensors, and is loaded later."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    told = run.train(model, optimizer, steps=2)
    kept = optimizer.state_dict()
    run.attach(model, optimizer)
    told += run.train(model, optimizer, steps=2, first=2)
    optimizer.load_state_dict(kept)
    return told + run.train(model, optimizer, steps=2, first=4), copied_states_of(optimizer)


def state_from_before_attach_follows_the_steps(make, name):
    """A case: tensors of the state, views of them and dictionaries that a program has go on to be the optimizer's."""

    def function(run):
        model = run.model()
        optimizer = make(model.parameters())
        told = run.train(model, optimizer, steps=2)
        kept, whole = dict(optimizer.state[model.head.weight]), optimizer.state_dict()
        largest = list(kept.values())[-1]
        row = largest[1]
        run.attach(model, optimizer)
        for step in range(2, 5):
            run.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append([row.clone(), copy.deepcopy(kept), copy.deepcopy(whole["state"])])
            largest.mul_(0.5)
            row.add_(1e-3)
        assert all(optimizer.state[model.head.weight][key] is value for key, value in kept.items())
        optimizer.load_state_dict(saved(whole))
        told += run.train(model, optimizer, first=5)
        return told, row, kept, copied_states_of(optimizer)

    function.__name__ = f"state_from_before_attach_follows_the_steps_{name}"
    case(function, types=("fp32",))


state_from_before_attach_follows_the_steps(fused, "of_adamw")
state_from_before_attach_follows_the_steps(lambda p: SGD(p, 0.1, momentum=0.9), "of_momentum")
state_from_before_attach_follows_the_steps(lambda p: Adagrad(p, 1e-2), "of_sums")


@case(types=("fp32",))
def state_from_before_attach_is_that_of_a_job_that_goes_on(run):
    for _ in range(2 if run.offloaded else 1):
        model = run.model()
        optimizer = fused(model.parameters())
        told = run.train(model, optimizer, steps=1)
        kept = optimizer.state[model.head.weight]["exp_avg"]
        handle = run.attach(model, optimizer, job="goes-on")
        if handle.step == 0:
            told += run.train(model, optimizer, first=1)
            before = told, kept.clone()
        run.end()
    return before, kept


@case(memory=("floor",))
def state_from_before_attach_that_cannot_follow_is_told_of(run):
    model = run.model()
    optimizer = fused(model.parameters())
    run.train(model, optimizer, steps=1)
    moment = optimizer.state[model.head.weight]["exp_avg"]
    kept, dictionary = moment if run.dtype == torch.bfloat16 else moment.numpy(), optimizer.state
    del moment
    with Lines() as lines:
        run.attach(model, optimizer)
    for text in ("from before attach() keeps the values of then", "the dictionary that the optimizer's state was"):
        assert len([line for line in lines if text in line]) == (1 if run.offloaded else 0), lines
    del kept, dictionary


@case(refused=1604, **REFUSED)
def dictionary_that_another_optimizer_has_loaded_is_refused(run):
    model = run.model()
    twin, optimizer = copy.deepcopy(model), fused(model.parameters())
    run.attach(model, optimizer)
    run.train(model, optimizer)
    other = fused(twin.parameters())
    run.attach(twin, other)
    file = saved(optimizer.state_dict())
    optimizer.load_state_dict(file)
    other.load_state_dict(file)


@case(types=("fp32",))
def dictionary_that_was_loaded_follows_the_steps(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    told = run.train(model, optimizer, steps=2)
    file = saved(optimizer.state_dict())
    optimizer.load_state_dict(file)
    for first in (2, 4):
        told += run.train(model, optimizer, first=first, steps=2)
        told.append(copy.deepcopy(file["state"]))
        file["state"][3]["exp_avg"].mul_(0.5)
    return told, copied_states_of(optimizer)


def tensors_of_two_optimizers_are_refused(how):
    """A case: one optimizer has loaded what the other's state_dict() gives, and torch's go on with the same tensors."""

    def function(run):
        model = run.model()
        optimizer = fused(model.parameters())
        run.train(model, optimizer)
        if not run.offloaded:
            return
        twin = copy.deepcopy(model)
        other = fused(twin.parameters())
        if how == "attached":
            run.attach(model, optimizer)
        other.load_state_dict(optimizer.state_dict())
        if how == "together":
            run.attach([model, twin], [optimizer, other])
        elif how == "in_turn":
            run.attach(model, optimizer)
        run.attach(twin, other)

    function.__name__ = f"tensors_of_two_optimizers_are_refused_{how}"
    case(function, refused=1604, **REFUSED)


for each in ("together", "in_turn", "attached", "beside_one_in_memory"):
    tensors_of_two_optimizers_are_refused(each)


@case(types=("fp32",))
def state_of_an_optimizer_that_is_gone_or_of_the_same_parameters(run):
    model = run.model()
    gone, former = AdamW(copy.deepcopy(model).parameters(), 1e-3), AdamW(model.parameters(), 1e-3)
    told = run.train(model, former)
    gone.load_state_dict(former.state_dict())
    optimizer = AdamW(model.parameters(), 1e-2)
    optimizer.load_state_dict(gone.state_dict())
    del gone
    run.attach(model, optimizer)
    return told + run.train(model, optimizer, first=3), copied_states_of(optimizer)


@case
def parameters_of_different_ages(run):
    model = run.model()
    model.head.weight.requires_grad_(False)
    optimizer = fused(model.parameters())
    told = run.train(model, optimizer, steps=2)
    model.head.weight.requires_grad_(True)
    run.attach(model, optimizer)
    return told + run.train(model, optimizer, first=2), copied_states_of(optimizer)


@case(**FP32)
def groups_that_keep_different_things(run):
    model = run.model()
    optimizer = SGD([{"params": model.blocks.parameters(), "momentum": 0.9}, {"params": model.head.parameters()}], 0.1)
    told = run.train(model, optimizer, steps=2)
    model.zero_grad()
    run.attach(model, optimizer)
    return told + run.train(model, optimizer, first=2)


@case(**FP32)
def two_optimizers_of_one_job(run):
    model = run.model()
    pair = [fused(model.blocks.parameters()), fused([model.head.weight])]
    for optimizer in pair:
        run.train(model, optimizer, steps=2)
    model.zero_grad()
    run.attach(model, pair)
    return [run.train(model, optimizer, first=2) for optimizer in pair]


@case
def job_that_began_in_the_middle_is_resumed(run):
    model = run.model()
    optimizer = fused(model.parameters())
    told = run.train(model, optimizer, steps=2)
    run.attach(model, optimizer, job="resumed")
    told += run.train(model, optimizer, first=2)
    if run.offloaded:
        run.handles.pop().close()
        run.models.clear()
        model = run.model()
        optimizer = fused(model.parameters())
        run.train(model, optimizer, steps=1)  # the job keeps what it has
        handle = run.attach(model, optimizer, job="resumed")
        assert handle.step == 3, handle.step
    return told + run.train(model, optimizer, first=5), copied_states_of(optimizer)


def copied(make, types=("fp32", "bf16", "fp16")):
    """A case that copies model and optimizer after some steps, in memory and by a file: what they train on is what the original trains, and what a
    job of the copy trains."""

    def declare(name):
        def function(run):
            model = run.model()
            optimizer = make(model.parameters())
            run.attach(model, optimizer)
            told = run.train(model, optimizer)
            copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
            attached = copy.deepcopy((model, optimizer))
            told.append(run.train(model, optimizer, first=3))
            for each in copies:
                again = run.train(*each, first=3), copied_states_of(each[1]), [p.detach().clone() for p in each[0].parameters()]
                assert difference([told[-1], copied_states_of(optimizer), list(model.parameters())], list(again), 0.0) is None
            run.attach(*attached)
            return told, run.train(*attached, first=3), run.train(*attached, first=6), run.train(*copies[0], first=6), copied_states_of(attached[1])

        function.__name__ = name
        case(function, types=types)

    return declare


copied(fused)("copies_train_as_the_original")
copied(lambda p: SGD(p, 0.1, momentum=0.9))("copies_with_momentum_train_as_the_original")
copied(lambda p: SGD(p, 0.1), types=("bf16",))("copies_of_plain_sgd_train_as_the_original")


@case(refused=1604, **REFUSED)
def adagrad_that_begins_elsewhere_is_refused(run):
    model = run.model()
    optimizer = Adagrad(model.parameters(), 1e-2)
    for state in optimizer.state.values():
        state["sum"].fill_(3.0)
    run.attach(model, optimizer)


# ---- Checkpoints -------------------------------------------------------------------------------


@case
def adagrad_has_sums_from_the_beginning(run):
    """Also of a parameter without a gradient: a copy, and a dictionary that is loaded in memory, train it."""
    model = run.model()
    model.norm.requires_grad_(False)
    optimizer = Adagrad(model.parameters(), 1e-2, initial_accumulator_value=0.5)
    run.attach(model, optimizer)
    copies = copy.deepcopy((model, optimizer))
    told, first = run.train(*copies, steps=2), copied_states_of(optimizer)
    told += run.train(model, optimizer, steps=2)
    return told, first, copied_states_of(optimizer), copied_states_of(copies[1])


def loads(make):
    """A case that loads what plain torch has saved, into a job that has steps of its own."""

    def declare(name):
        def function(run):
            source = run.model()
            plain = make(source.parameters())
            run.train(source, plain, steps=2)
            checkpoint = saved({"model": source.state_dict(), "optimizer": plain.state_dict()})
            model = run.model()
            optimizer = make(model.parameters())
            run.attach(model, optimizer)
            told = run.train(model, optimizer, first=10)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            at_once = copied_states_of(optimizer)
            return told + run.train(model, optimizer, first=2), at_once, copied_states_of(optimizer)

        function.__name__ = name
        case(function, types=("fp32",))

    return declare


loads(fused)("checkpoint_of_memory")
loads(lambda p: Adam(p, 1e-3, amsgrad=True))("checkpoint_of_memory_adam_amsgrad")
loads(lambda p: SGD(p, 0.1, momentum=0.9))("checkpoint_of_memory_sgd")
loads(lambda p: RMSprop(p, 1e-3, centered=True))("checkpoint_of_memory_rmsprop")
loads(lambda p: Adagrad(p, 1e-2))("checkpoint_of_memory_adagrad")


@case(types=("bf16", "fp16"))
def checkpoint_that_is_loaded_before_a_new_job_is_attached(run):
    """With its masters and moments, which torch rounds."""
    model = run.model()
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    if run.offloaded:
        checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        run.end()
        model = run.model()
        optimizer = fused(model.parameters())
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        run.attach(model, optimizer)
    return told + run.train(model, optimizer, first=3), copied_states_of(optimizer)


@case
def checkpoint_of_fp32_moments(run):
    """bf16 weights with fp32 moments, as DeepSpeed and others write them: they are not rounded."""
    model = run.model()
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    run.train(model, optimizer)
    checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    checkpoint["optimizer"].pop("offloadd", None)
    run.train(model, optimizer, first=7)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return run.train(model, optimizer, first=3), copied_states_of(optimizer)


class Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Conv2d(16, 32, 3)
        self.head = torch.nn.Linear(32 * 36, 10)

    def forward(self, x):
        return self.head(self.second(torch.relu(self.first(x))).flatten(1))


@case(**FP32)
def moments_lie_as_their_parameters_do(run):
    torch.manual_seed(0)
    model = Convolutions().to(memory_format=torch.channels_last)
    optimizer, losses = fused(model.parameters()), []

    def train(first, steps):
        for step in range(first, first + steps):
            images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
            loss = model(images.to(memory_format=torch.channels_last)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    train(0, 2)
    run.attach(model, optimizer)
    train(2, 2)
    if run.offloaded:  # torch's fused kernel in memory does not look at the order
        rows = copy.deepcopy(optimizer.state_dict())
        del rows["offloadd"]
        for state in rows["state"].values():
            state.update({name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items() if value.dim() == 4})
        optimizer.load_state_dict(rows)
    train(4, 2)
    return losses, copied_states_of(optimizer)


def edits(change):
    """A case that loads what state_dict() gives, changed."""

    def declare(name):
        def function(run):
            model = run.model()
            optimizer = AdamW(model.parameters(), 1e-3)
            run.attach(model, optimizer)
            told = run.train(model, optimizer)
            state_dict = optimizer.state_dict()
            change(state_dict["state"])
            optimizer.load_state_dict(state_dict)
            return told + run.train(model, optimizer, first=3), copied_states_of(optimizer)

        function.__name__ = name
        case(function, **FP32)

    return declare


edits(lambda states: None)("state_as_it_is")
edits(lambda states: [state["exp_avg"].zero_() for state in states.values()])("state_without_momentum")
edits(lambda states: states[0]["step"].fill_(1))("state_with_another_count")
edits(lambda states: states.pop(0))("state_without_a_parameter")
edits(lambda states: states.clear())("state_that_is_cleared")


@case
def hooks_around_the_state(run):
    """Of state_dict() and load_state_dict(): they see and change what they would in plain torch."""
    model = run.model()
    optimizer = AdamW(list(model.named_parameters()), 1e-3, fused=True)
    run.attach(model, optimizer)
    told, seen = run.train(model, optimizer), []

    def halve(_, given):
        return {**given, "state": {key: {**state, "exp_avg": state["exp_avg"] * 0.5} for key, state in given["state"].items()}}

    def double(_, given):
        given["param_groups"][0]["lr"] = 2e-3
        for state in given["state"].values():
            state["exp_avg_sq"].mul_(2)

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("asked"))
    optimizer.register_state_dict_post_hook(halve)
    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_post_hook(lambda each: seen.append([state["exp_avg_sq"].clone() for state in each.state.values()]))
    optimizer.load_state_dict(optimizer.state_dict())
    return told, seen, run.train(model, optimizer, first=3), copied_states_of(optimizer), optimizer.param_groups[0]["lr"]


@case
def checkpoint_of_another_step(run):
    model = run.model()
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    run.train(model, optimizer)
    checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    run.train(model, optimizer, first=3)
    for _ in range(2):  # the second time nothing was stepped between
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    return run.train(model, optimizer, first=3), copied_states_of(optimizer)


@case(**FP32)
def checkpoint_of_another_job(run):
    source = run.model()
    former = fused(source.parameters())
    run.attach(source, former)
    run.train(source, former)
    checkpoint = saved({"model": source.state_dict(), "optimizer": former.state_dict()})
    model = run.make(Transformer)
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return run.train(model, optimizer, first=3), copied_states_of(optimizer)


@case(refused=1602, **REFUSED)
def moments_of_another_step_without_weights_are_refused(run):
    """As of a script that loads the weights of a checkpoint, attaches, and loads the optimizer's state then."""
    model = run.model()
    optimizer = fused(model.parameters())
    with run.attach(model, optimizer, job="job"):
        run.train(model, optimizer)
        kept, weights = saved(optimizer.state_dict()), {name: value.clone() for name, value in model.state_dict().items()}
        run.train(model, optimizer)
    run.models.clear()
    model = run.model()
    model.load_state_dict(weights)
    optimizer = fused(model.parameters())
    run.attach(model, optimizer, job="job")
    optimizer.load_state_dict(kept)
    run.train(model, optimizer)


@case(**FP32)
def fresh_state_begins_anew(run):
    model = run.model()
    optimizer = fused(model.parameters())
    fresh = copy.deepcopy(optimizer.state_dict())
    run.attach(model, optimizer)
    run.train(model, optimizer)
    optimizer.load_state_dict(fresh)
    return copied_states_of(optimizer), run.train(model, optimizer, first=3), copied_states_of(optimizer)


@case(**FP32)
def loaded_state_is_dropped_without_a_step(run):
    model = run.model()
    optimizer = fused(model.parameters())
    run.attach(model, optimizer, job="dropped")
    run.train(model, optimizer, steps=1)
    kept = saved(optimizer.state_dict())
    kept.pop("offloadd", None)
    run.train(model, optimizer, first=1, steps=1)
    if run.offloaded:
        optimizer.load_state_dict(kept)
        run.handles.pop().close()
        run.models.clear()
        model = run.model()
        optimizer = fused(model.parameters())
        run.attach(model, optimizer, job="dropped")
    return run.train(model, optimizer, first=2), copied_states_of(optimizer)


def as_of_a_trainer(handle):
    """Its state is large, and checkpoints lead to the job."""
    handle.is_state_small, handle.has_trainer = lambda: False, True
    return handle


@case(refused=1602, **REFUSED)
def checkpoint_without_its_moments_is_refused(run):
    model = run.model()
    optimizer = fused(model.parameters())
    as_of_a_trainer(run.attach(model, optimizer))
    run.train(model, optimizer)
    state = optimizer.state_dict()
    run.train(model, optimizer, first=3)
    optimizer.load_state_dict(state)


@case(refused=1602, **REFUSED)
def optimizer_with_moments_elsewhere_is_refused(run):
    model = run.model()
    optimizer = fused(model.parameters())
    as_of_a_trainer(run.attach(model, optimizer))
    run.train(model, optimizer)
    other = run.make(Transformer)
    plain = fused(other.parameters())
    plain.load_state_dict(optimizer.state_dict())
    run.attach(other, plain)


@case(**FP32)
def optimizer_with_moments_in_its_job(run):
    model = run.model()
    optimizer = fused(model.parameters())
    as_of_a_trainer(run.attach(model, optimizer, job="elsewhere"))
    told = run.train(model, optimizer)
    if run.offloaded:
        state = optimizer.state_dict()
        run.handles.pop().close()
        run.models.clear()
        model = run.model()
        optimizer = fused(model.parameters())
        optimizer.load_state_dict(state)
        run.attach(model, optimizer, job="elsewhere")
    return told + run.train(model, optimizer, first=3), copied_states_of(optimizer)


def goes_back(run, take, weights_are_first=True):
    """To a checkpoint of before, whose state is large."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer).is_state_small = lambda: False
    told = run.train(model, optimizer)
    weights, state = take(run, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}).values()
    told += run.train(model, optimizer, first=3)
    steps = [lambda: model.load_state_dict(weights), lambda: optimizer.load_state_dict(state)]
    for step in steps if weights_are_first else reversed(steps):
        step()
    again = run.train(model, optimizer, first=3)
    assert again == told[-len(again):]
    return told + again, copied_states_of(optimizer)


def through_a_file(run, whole):
    path = os.path.join(run.folder, "whole.pt")
    torch.save(whole, path)
    return torch.load(path)


@case
def goes_back_to_a_file(run):
    return goes_back(run, through_a_file)


@case
def goes_back_to_a_file_weights_last(run):
    return goes_back(run, through_a_file, weights_are_first=False)


@case
def goes_back_to_a_copy(run):
    return goes_back(run, lambda run, whole: copy.deepcopy(whole))


@case
def goes_back_to_a_pickle(run):
    return goes_back(run, lambda run, whole: pickle.loads(pickle.dumps(whole)))


@case(**FP32)
def large_state_in_a_file_is_that_of_plain_torch(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer).is_state_small = lambda: False
    run.train(model, optimizer)
    whole = optimizer.state_dict()
    whole.pop("offloadd", None)
    path = os.path.join(run.folder, "state.pt")
    torch.save(whole, path)
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


@case(**FP32)
def large_state_is_seen_and_followed(run):
    """Shapes without values, values as they are after further steps, and what has not been looked at when the job is closed."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    handle = run.attach(model, optimizer)
    handle.is_state_small = lambda: False
    run.train(model, optimizer)
    states = optimizer.state_dict()["state"]
    seen = [[(list(value.shape), str(value.dtype), value.numel()) for value in state.values()] for state in states.values()]
    moment, unseen = states[0]["exp_avg"], states[1]["exp_avg"]
    seen.append(moment.tolist())
    run.train(model, optimizer, first=3)
    seen.append((moment.tolist(), (moment * 2).sum().item()))
    run.models.clear()
    if run.offloaded:
        run.handles.pop().close()
        seen.append(moment.tolist())
        try:
            unseen.sum()
            assert False, "it was gathered from a job that is closed"
        except offloadd.Error as error:
            assert error.id == 1802, error
    else:
        seen.append(moment.tolist())
    return seen


@case
def universal_checkpoint_of_plain_sgd(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1)
    handle = run.attach(model, optimizer)
    run.train(model, optimizer)
    folder = os.path.join(run.folder, "plain")
    os.mkdir(folder)
    handle.save_universal(folder, "here")
    run.train(model, optimizer, first=7)
    handle.load_universal(folder)
    return run.train(model, optimizer, first=3), handle.gather(list(model.parameters()), "master")


@case(refused=1002, **REFUSED)
def state_of_another_model_is_refused(run):
    other = Transformer(1)
    plain = fused(other.parameters())
    run.train(other, plain, steps=1)
    model = Transformer(1)
    model.embed = torch.nn.Embedding(300, 48)
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    optimizer.load_state_dict(plain.state_dict())


@case(refused=1604, **REFUSED)
def state_of_another_optimizer_is_refused(run):
    model = run.model()
    plain = RMSprop(model.parameters())
    run.train(model, plain, steps=1)
    other = run.make(Transformer)
    optimizer = fused(other.parameters())
    run.attach(other, optimizer)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": plain.state_dict()["state"], "param_groups": groups})


@case(**FP32)
def refused_state_leaves_the_job_as_it_was(run):
    model = run.model()
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    run.train(model, optimizer)
    if run.offloaded:
        state = saved(optimizer.state_dict())
        state.pop("offloadd")
        state["state"][2]["exp_avg"] = torch.zeros(3)
        try:
            optimizer.load_state_dict(state)
            raise AssertionError("a state of another shape was taken")
        except offloadd.Error as error:
            assert "of shape" in str(error), error
    return run.train(model, optimizer, first=3), copied_states_of(optimizer)


# ---- DeepSpeed's universal checkpoints ---------------------------------------------------------


def folders_of(run, model, optimizer, steps):
    """As ds_to_universal.py lays them out: a folder per parameter, with flat tensors, or tensors in a dictionary."""
    zero = os.path.join(run.folder, "deepspeed", "global_step2_universal", "zero")
    for number, (name, parameter) in enumerate(model.named_parameters()):
        os.makedirs(os.path.join(zero, name))
        tensors = {"fp32": parameter.detach().float(), **{key: value for key, value in optimizer.state[parameter].items() if key != "step"}}
        for key, value in tensors.items():
            held = value.float().flatten() if number % 2 else {"param": value.float(), "cat_dim": 0}
            torch.save(held, os.path.join(zero, name, f"{key}.pt"))
        torch.save(torch.tensor(float(steps)) if number % 2 else steps, os.path.join(zero, name, "step.pt"))
    with open(os.path.join(run.folder, "deepspeed", "latest_universal"), "w", encoding="utf-8") as file:
        file.write("global_step2_universal")
    return os.path.join(run.folder, "deepspeed")


@case(**FP32)
def universal_checkpoint_is_loaded(run):
    source = run.model()
    plain = fused(source.parameters())
    run.train(source, plain, steps=2)
    folder = folders_of(run, source, plain, steps=2)
    expected = run.train(source, plain, first=2)
    model = run.model()
    optimizer = fused(model.parameters())
    handle = run.attach(model, optimizer)
    run.train(model, optimizer, first=10)
    handle.load_universal(folder)
    told = run.train(model, optimizer, first=2)
    assert told == expected, (told, expected)
    return told, copied_states_of(optimizer)


class Scaler:
    """What DeepSpeed's loss scaler is to whoever reads its files: a class that is not there, and that may do anything."""

    def __reduce__(self):
        return os.mkdir, (Scaler.made,)


def steps_in_the_middle(folder, state):
    """As DeepSpeed's stage 3 lays it out: how often is said once for all parameters, beside other things."""
    zero = os.path.join(folder, "global_step2_universal", "zero")
    for name in os.listdir(zero):
        os.remove(os.path.join(zero, name, "step.pt"))
    if state is not None:
        Scaler.made = os.path.join(folder, "made")
        torch.save({"loss_scaler": Scaler(), "optimizer_state_dict": {"state": state}, "param_groups": []}, os.path.join(zero, "optimizer_state.pt"))


def universal_checkpoint_of_stage_3(name, state, **options):
    """A case: no parameter has a count of its own."""

    def function(run):
        source = run.model()
        plain = fused(source.parameters())
        run.train(source, plain, steps=2)
        folder = folders_of(run, source, plain, steps=2)
        steps_in_the_middle(folder, state)
        expected = run.train(source, plain, first=2)
        model = run.model()
        optimizer = fused(model.parameters())
        run.attach(model, optimizer).load_universal(folder)
        assert not os.path.exists(os.path.join(folder, "made")), "it was run"
        told = run.train(model, optimizer, first=2)
        assert told == expected, (told, expected)
        return told, copied_states_of(optimizer)

    function.__name__ = name
    case(function, **options)


universal_checkpoint_of_stage_3("universal_checkpoint_of_stage_3_is_loaded", {0: {"step": 2}, 1: {"step": torch.tensor(2.0)}}, **FP32)
universal_checkpoint_of_stage_3("universal_checkpoint_of_two_counts_is_refused", {0: {"step": 2}, 1: {"step": 3}}, refused=1401, **REFUSED)
universal_checkpoint_of_stage_3("universal_checkpoint_that_does_not_count_is_refused", {0: {}}, refused=1401, **REFUSED)
universal_checkpoint_of_stage_3("universal_checkpoint_without_any_count_is_refused", None, refused=1401, **REFUSED)


@case
def universal_checkpoint_comes_back(run):
    model = run.model(tied=True)
    optimizer = fused(model.parameters())
    handle = run.attach(model, optimizer)
    run.train(model, optimizer)
    folder = os.path.join(run.folder, "universal")
    os.mkdir(folder)
    handle.save_universal(folder)
    run.train(model, optimizer, first=7)
    handle.load_universal(os.path.join(folder, "global_step3_universal"))
    return run.train(model, optimizer, first=3), copied_states_of(optimizer), sorted(os.listdir(os.path.join(folder, "global_step3_universal", "zero")))


@case(types=("bf16",))
def universal_checkpoint_has_the_masters(run):
    """A bf16 run that is saved and loaded into another job goes on as the one that was not."""
    model = run.model()
    optimizer = fused(model.parameters())
    handle = run.attach(model, optimizer)
    run.train(model, optimizer)
    folder = os.path.join(run.folder, "universal")
    os.mkdir(folder)
    handle.save_universal(folder)
    expected = run.train(model, optimizer, first=3)
    other = run.make(Transformer)
    another = fused(other.parameters())
    handle = run.attach(other, another)
    run.train(other, another, first=20)
    handle.load_universal(folder)
    masters = handle.gather(list(other.parameters()), "master")
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters)
    told = run.train(other, another, first=3)
    assert told == expected, (told, expected)
    return told, masters, copied_states_of(another)


def damaged_universal(run, damage):
    model = run.model()
    optimizer = fused(model.parameters())
    handle = run.attach(model, optimizer)
    run.train(model, optimizer, steps=1)
    folder = os.path.join(run.folder, "universal")
    os.mkdir(folder)
    handle.save_universal(folder, "here")
    damage(os.path.join(folder, "here", "zero"))
    handle.load_universal(folder)


@case(refused=1402, **REFUSED)
def universal_checkpoint_without_a_parameter_is_refused(run):
    damaged_universal(run, lambda zero: shutil.rmtree(os.path.join(zero, "norm.weight")))


@case(refused=1402, **REFUSED)
def universal_checkpoint_of_another_shape_is_refused(run):
    damaged_universal(run, lambda zero: torch.save(torch.zeros(3), os.path.join(zero, "norm.weight", "exp_avg.pt")))


@case(refused=1401, **REFUSED)
def universal_checkpoint_with_code_in_it_is_refused(run):
    damaged_universal(run, lambda zero: torch.save(Transformer(1), os.path.join(zero, "norm.weight", "fp32.pt")))


@case(refused=1401, **REFUSED)
def universal_checkpoint_without_steps_is_refused(run):
    damaged_universal(run, lambda zero: torch.save(-1, os.path.join(zero, "norm.weight", "step.pt")))


@case(refused=1405, **REFUSED)
def folder_that_is_no_universal_checkpoint_is_refused(run):
    damaged_universal(run, lambda zero: os.rename(zero, zero + "_gone"))


# ---- The same by offloadctl, with neither torch nor trainer ------------------------------------


def made_of_universal(name, make, **options):
    """A case: a job that offloadctl has made of a checkpoint goes on as the one that has written it."""

    def begin(run, job):
        model = run.make(Net)
        model.frozen.requires_grad_(False)
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        return model, optimizer, run.attach(model, optimizer, job=job)

    def function(run):
        model, optimizer, handle = begin(run, "source")
        told = [train_net(run, model, optimizer, step) for step in range(2)]
        if run.offloaded:
            from offloadd import control

            folder = os.path.join(run.folder, "universal")
            handle.save_universal(folder)
            train_net(run, model, optimizer, 7)  # the job is like the new one, its values are not
            run.models.clear()
            run.handles.pop().close()
            assert "would make job made" in control.run("import", run.folder, "source", folder, "--as", "made")
            control.run("import", run.folder, "source", folder, "--as", "made", "--yes")
            model, optimizer, handle = begin(run, "made")
            assert handle.step == 2, handle.step
            assert bool((model.running == 3).all()), "buffers are not in the checkpoint"
        masters = handle.gather([p for p in model.parameters() if p.requires_grad], "master")
        told += [masters, copied_states_of(optimizer), model.frozen.detach().clone()]
        return told, [train_net(run, model, optimizer, step) for step in (2, 3)]

    function.__name__ = name
    case(function, **options)


class Net(torch.nn.Module):
    """Weights of several extents, small ones that share one, one that does not lie row by row, and buffers."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(600, 500)
        self.turned = torch.nn.Parameter((torch.randn(300, 200) * 0.05).t())
        self.frozen = torch.nn.Parameter(torch.randn(200) * 0.1)
        self.norm = torch.nn.LayerNorm(200)
        self.register_buffer("running", torch.zeros(90_000))

    def forward(self, x):
        with torch.no_grad():
            self.running += 1
        return self.norm(self.wide(x)[:, :300] @ self.turned.t()) * self.frozen


def train_net(run, model, optimizer, step):
    x = torch.randn(3, 600, generator=torch.Generator().manual_seed(step)).to(run.dtype)
    loss = model(x).double().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


made_of_universal("job_of_a_universal_checkpoint", fused, types=("fp32", "bf16", "fp16", "fp64"))
made_of_universal("job_of_a_universal_checkpoint_of_rmsprop", lambda p: RMSprop(p, 1e-3, centered=True, momentum=0.5), **FP32)
made_of_universal("job_of_a_universal_checkpoint_of_momentum", lambda p: SGD(p, 1e-2, momentum=0.9, dampening=0.1), types=("bf16",))


def damaged(folder, what):
    """Damages a checkpoint; the number that the refusal has."""
    wide = os.path.join(folder, "here", "zero", "wide.weight")
    if what == "flipped":
        with open(os.path.join(wide, "exp_avg.pt"), "r+b") as file:
            file.seek(500_000)
            byte = file.read(1)
            file.seek(500_000)
            file.write(bytes([byte[0] ^ 1]))
    elif what == "short":
        os.truncate(os.path.join(wide, "fp32.pt"), 700_000)
    elif what == "code":
        torch.save(Transformer(1), os.path.join(wide, "fp32.pt"))
    elif what == "text":
        torch.save({"param": "weights"}, os.path.join(wide, "fp32.pt"))
    elif what == "old form":
        torch.save(torch.zeros(500, 600), os.path.join(wide, "fp32.pt"), _use_new_zipfile_serialization=False)
    elif what == "compressed":
        with zipfile.ZipFile(os.path.join(wide, "fp32.pt")) as archive, \
                zipfile.ZipFile(os.path.join(wide, "packed"), "w", zipfile.ZIP_DEFLATED) as packed:
            for name in archive.namelist():
                packed.writestr(name, archive.read(name))
        os.rename(os.path.join(wide, "packed"), os.path.join(wide, "fp32.pt"))
    elif what == "turned":
        torch.save({"param": torch.zeros(600, 500).t()}, os.path.join(wide, "fp32.pt"))
    elif what == "negative":
        torch.save(-1, os.path.join(wide, "step.pt"))
    elif what == "gone":
        shutil.rmtree(wide)
        return 1402
    elif what == "other shape":
        torch.save(torch.zeros(3), os.path.join(wide, "exp_avg.pt"))
        return 1402
    elif what == "one more":
        shutil.copytree(wide, wide + "2")
        return 1402
    elif what == "one moment":
        os.remove(os.path.join(wide, "exp_avg_sq.pt"))
        return 1402
    elif what == "of another optimizer":
        shutil.copy(os.path.join(wide, "exp_avg.pt"), os.path.join(wide, "momentum_buffer.pt"))
        return 1402
    elif what == "no checkpoint":
        shutil.rmtree(os.path.join(folder, "here", "zero"))
        return 1405
    return 1401


@case(**REFUSED)
def universal_checkpoints_that_offloadctl_refuses(run):
    model = run.make(Net)
    optimizer = fused(model.parameters())
    handle = run.attach(model, optimizer, job="source")
    told = train_net(run, model, optimizer, 0)
    run.models.clear()
    if not run.offloaded:
        return told
    from offloadd import control

    handle.save_universal(os.path.join(run.folder, "good"), "here")
    run.handles.pop().close()
    for what in ("flipped", "short", "code", "text", "old form", "compressed", "turned", "negative", "gone", "other shape", "one more", "one moment",
                 "of another optimizer", "no checkpoint"):
        folder = os.path.join(run.folder, what.replace(" ", "_"))
        shutil.copytree(os.path.join(run.folder, "good"), folder)
        expected = damaged(folder, what)
        try:
            control.run("import", run.folder, "source", folder, "--as", "made", "--yes")
            raise AssertionError(f"{what}: was taken")
        except offloadd.Error as error:
            assert error.id == expected, (what, error)
        assert "made" not in control.run("ls", run.folder), what
        shutil.rmtree(folder)
    control.run("import", run.folder, "source", os.path.join(run.folder, "good"), "--as", "made", "--yes")
    good = os.path.join(run.folder, "good")
    for job, name, how, error_id in (("source", "made", ["--yes"], 1205), ("source", "made", [], 1205), ("source", "a/b", [], 1002),
                                     ("none", "other", ["--yes"], 1002)):
        try:
            control.run("import", run.folder, job, good, "--as", name, *how)
            raise AssertionError("was taken")
        except offloadd.Error as error:
            assert error.id == error_id, error
    return told


@case(**REFUSED)
def universal_checkpoints_that_find_no_room(run):
    model = run.make(Net)
    optimizer = fused(model.parameters())
    handle = run.attach(model, optimizer)
    told = train_net(run, model, optimizer, 0)
    folder = os.path.join(run.folder, f"little-{run.offloaded}")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        handle.save_universal(folder, "here")
        raise AssertionError("there was room")
    except offloadd.Error as error:
        assert error.id == 1404, error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not os.path.exists(os.path.join(folder, "here")), "a part of one"
    handle.save_universal(folder, "here")
    return told


# ---- Pieces of a vector ------------------------------------------------------------------------


def _set_as_pieces(model, vector):
    begin = 0
    for parameter in model.parameters():
        parameter.data = vector[begin:begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()


def _flat(model):
    return parameters_to_vector(model.parameters()).detach()


@case(**FP32)
def pieces_of_a_vector_that_is_gone(run):
    """p.data = vector[begin:end], as evolution strategies and trust regions do."""
    model = run.model()
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    told = []
    for step in range(3):
        told += run.train(model, optimizer, steps=1, first=step)
        _set_as_pieces(model, _flat(model) * 0.99)
        told.append(run.loss(model, step).item())
    return told + run.train(model, optimizer, first=3)


@case(**FP32)
def pieces_of_a_vector_that_is_kept(run):
    """It is the parameters' memory, before and after the step that takes it."""
    model = run.model()
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    vector = _flat(model) * 0.99
    _set_as_pieces(model, vector)
    vector.mul_(1.25)
    told = [run.loss(model, 0).item()]
    for step in range(4):
        told += [*run.train(model, optimizer, steps=1, first=step), vector.clone()]
        vector.mul_(0.99)
        told += [run.loss(model, step).item(), vector.clone()]
    return told, [p.detach().clone() for p in model.parameters()]


@case(types=("fp32", "bf16"))
def what_looks_at_the_memory_that_a_vector_gave(run):
    """Keeps it when the parameter has other memory, and sees what is written into the vector."""
    model = _small(run)
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    before = model[2].bias.data
    vector = _flat(model) * 0.99
    vector_to_parameters(vector, model.parameters())
    told = [before.clone(), _step(model, optimizer, 0)]
    weight, part = model[0].weight.data, model[2].weight.detach()[1:]
    model[0].weight.data = weight * 0.5
    vector_to_parameters(torch.full((model[2].weight.numel(),), 0.125).to(weight.dtype), [model[2].weight])
    vector.mul_(0.5)
    told += [weight.clone(), _step(model, optimizer, 1), vector.clone()]
    weight.add_(1)
    vector_to_parameters(vector, model.parameters())
    return told + [part.clone(), vector, _step(model, optimizer, 2), weight, *(p.detach().clone() for p in model.parameters())]


@case(**FP32)
def vector_after_the_job(run):
    """The parameters are over it again."""
    model = run.model()
    optimizer = fused(model.parameters())
    run.attach(model, optimizer, **({"weights_at_close": "memory"} if run.offloaded else {}))
    vector = _flat(model) * 0.99
    vector_to_parameters(vector, model.parameters())
    told = run.train(model, optimizer)
    vector.mul_(0.5)
    if run.offloaded:
        run.handles.pop().close()
    told.append(run.loss(model, 0).item())
    vector.mul_(0.5)
    told.append(run.loss(model, 0).item())
    with torch.no_grad():
        model.head.weight.add_(1)
    return told, vector


def _small(run):
    return run.make(lambda: torch.nn.Sequential(torch.nn.Linear(32, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8)))


def _step(model, optimizer, step):
    loss = model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def _backward_of_old(kept, model):
    """The gradients, or that torch refuses them."""
    model.zero_grad()
    try:
        kept.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), str(error)
        return "refused by torch"
    return [p.grad.clone() for p in model.parameters()]


def graph_of_a_kept_loss(name, is_replaced_first, is_fused, keep=lambda value: None):
    """It has the memory that the weight is given, or that which it had; nobody calls its backward() before the step. `keep`: what the program keeps of
    what it gives."""

    def body(run):
        model = _small(run)
        optimizer = AdamW(model.parameters(), 1e-2, fused=is_fused)
        run.attach(model, optimizer)
        weight, inputs = model[2].weight, torch.ones(4, 32)
        told = [_step(model, optimizer, 0)]
        for step in range(1, 4):
            if is_replaced_first:
                value = weight.data * 0.99
                weight.data = value
                kept_value, value = keep(value), None
            kept = model(inputs).mean()
            if not is_replaced_first:
                weight.data = weight.data * 0.99
            told += [_step(model, optimizer, step), kept.item()]
            if is_replaced_first and kept_value is not None:
                told.append(kept_value.clone())
        told += [_step(model, optimizer, 4), _backward_of_old(kept, model)]
        del kept
        return told + [_step(model, optimizer, step) for step in range(5, 7)] + [p.detach().clone() for p in model.parameters()]

    body.__name__ = name
    case(types=("fp32",))(body)


graph_of_a_kept_loss("value_that_the_graph_of_a_kept_loss_has", True, False)
graph_of_a_kept_loss("value_that_the_graph_of_a_kept_loss_has_fused", True, True)
graph_of_a_kept_loss("value_that_the_program_and_the_graph_of_a_kept_loss_have", True, True, keep=lambda value: value)
graph_of_a_kept_loss("former_value_that_the_graph_of_a_kept_loss_has", False, False)
graph_of_a_kept_loss("former_value_that_the_graph_of_a_kept_loss_has_fused", False, True)


@case(types=("fp32", "bf16"))
def former_value_is_kept_in_a_variable(run):
    """A loop over parameters in the script itself leaves the last one in its variable."""
    model = _small(run)
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    told = [_step(model, optimizer, 0)]
    for step in range(1, 4):
        for parameter in model.parameters():
            old = parameter.data
            parameter.data = old * 0.99
        told += [old.clone(), _step(model, optimizer, step), old.clone()]
        old.add_(1.0)  # is the parameter's no more
        told += [old.clone(), parameter.detach().clone()]
    return told + [_step(model, optimizer, 4), old.clone()]


@case(types=("fp32",))
def weights_trained_on_their_average_and_put_back(run):
    """With a backup of them, as lookahead does it."""
    model = _small(run)
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    told = [_step(model, optimizer, 0)]
    backup = [p.data for p in model.parameters()]
    for parameter, kept in zip(model.parameters(), backup):
        parameter.data = kept * 0.9
    told += [_step(model, optimizer, step) for step in range(1, 3)] + [kept.clone() for kept in backup]
    for parameter, kept in zip(model.parameters(), backup):
        parameter.data = kept
    del parameter, kept, backup
    return told + [_step(model, optimizer, step) for step in range(3, 5)] + [p.detach().clone() for p in model.parameters()]


@case(**FP32)
def value_of_which_the_program_keeps_a_part(run):
    """Also where a graph has it, too, and no collection looks at what the program had before."""
    model = _small(run)
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    value = torch.ones(8, 24)
    part = value[:2]
    model[2].weight.data = value
    del value
    kept = model(torch.ones(4, 32)).mean()
    told = [_step(model, optimizer, 0), part.clone()]
    part.fill_(0.5)
    told += [_step(model, optimizer, 1), part.clone(), kept.item(), _backward_of_old(kept, model)]
    return told + [_step(model, optimizer, step) for step in range(2, 4)] + [part, *(p.detach().clone() for p in model.parameters())]


@case(**REFUSED, refused=1601)
def one_piece_of_a_vector_for_two_parameters_is_refused(run):
    model = run.model()
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    first, second = model.blocks[0].first.weight, model.blocks[1].first.weight
    first.data = torch.ones_like(first)
    second.data = first.data
    return run.train(model, optimizer)


@case(**FP32)
def vector_to_parameters_imported_by_its_name(run):
    """By this file, before anything was attached. The vector is kept."""
    model = run.model()
    optimizer = fused(model.parameters())
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    vector = _flat(model) * 0.99
    vector_to_parameters(vector, model.parameters())
    told += run.train(model, optimizer, first=3)
    return told, vector


class Means(torch.nn.Module):
    """One buffer is written in place, another is assigned."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.norm(self.layer(x) - self.mean)


@case(types=("fp32",))
def average_that_is_written_behind_the_last_step(run):
    """It is told of, and what a run that goes on writes anew is the same."""

    def begin():
        model = run.make(Means)
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        average.requires_grad_(False)
        optimizer = AdamW(model.parameters(), 1e-2, fused=True)
        handle = run.attach([model, average], optimizer, job="average")
        return model, average, optimizer, handle

    def step(model, average, optimizer, number):
        model(torch.randn(8, 8, generator=torch.Generator().manual_seed(number))).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)

    model, average, optimizer, handle = begin()
    for number in range(3):
        step(model, average, optimizer, number)
    if run.offloaded:
        with Lines() as lines:
            run.end()
        assert any("ends at step 3" in line and "1/module." in line for line in lines), lines
        model, average, optimizer, handle = begin()
        average.update_parameters(model)
    for number in range(3, 5):
        step(model, average, optimizer, number)
    return [value.clone() for value in average.state_dict().values()]


@case(types=("fp32",), memory=("floor",))
def only_what_is_written_behind_the_last_step_is_told_of(run):
    if not run.offloaded:
        return
    for write, names in ((lambda model: model.eval()(torch.ones(8, 8)), ""), (lambda model: model(torch.ones(8, 8)), "mean, norm.num_batches_tracked"),
                         (lambda model: torch.nn.init.zeros_(model.layer.bias), "layer.bias")):
        model = run.make(Means)
        optimizer = AdamW(model.parameters(), 1e-2, fused=True)
        run.attach(model, optimizer)
        model(torch.randn(8, 8)).pow(2).sum().backward()
        optimizer.step()
        optimizer.state_dict(), model.state_dict(), [repr(p) for p in model.parameters()]
        write(model)
        with Lines() as lines:
            run.end()
        assert [line.split("not part of it: ")[1].split(". A run")[0] for line in lines if "has written since" in line] == [names] * bool(names), lines


class EndsAmidAStep(torch.optim.NAdam):
    def step(self, closure=None):
        super().step(closure)
        raise KeyboardInterrupt


@case(types=("fp32",), memory=("floor",))
def an_error_amid_a_step_of_this_process_is_no_writing_behind_the_last(run):
    """A run that goes on takes that step anew, and has nothing to write."""
    if not run.offloaded:
        return
    model = run.make(Means)
    optimizer = EndsAmidAStep(model.parameters(), 1e-2)
    run.attach(model, optimizer)
    model(torch.randn(8, 8)).pow(2).sum().backward()
    try:
        optimizer.step()
        assert False, "no error"
    except KeyboardInterrupt:
        pass
    with Lines() as lines:
        run.end()
    assert not any("has written since" in line for line in lines), lines


@case(types=("fp32",), memory=("floor",))
def interrupt_while_a_step_is_taken(run):
    """Python raises it when the step is there: nothing was written behind it, and arrays have its weights."""
    if not run.offloaded:
        return
    model = run.make(Means)
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    handle = run.attach(model, optimizer)
    array = model.layer.bias.detach().numpy()
    for _ in range(2):
        model(torch.randn(8, 8)).pow(2).sum().backward()
        if not handle.step:
            optimizer.step()
    engine = handle.engine()

    class Interrupted:
        def __getattr__(self, name):
            return getattr(engine, name)

        def apply(self, *step):
            engine.apply(*step)
            raise KeyboardInterrupt

    with unittest.mock.patch.object(handle, "_engine", Interrupted()), contextlib.suppress(KeyboardInterrupt):
        optimizer.step()
    assert handle.step == 2 and (array == model.layer.bias.detach().numpy()).all(), handle.step
    with Lines() as lines:
        run.end()
    assert not lines, lines


if __name__ == "__main__":
    sys.exit(main())
