"""What a program writes into the state of an optimizer, puts in its place, removes or keeps."""

import collections
import copy
import functools
import os
import pickle
import sys
import tempfile

import torch
from safetensors.torch import load_file
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from battery import case, copied_states_of, main, saved
from offloadd import Error, control

REFUSED = {"types": ("fp32",), "memory": ("floor",)}


@case(refused=1002, **REFUSED)
def state_of_another_shape_is_refused(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    run.attach(model, optimizer)
    run.train(model, optimizer)
    optimizer.state[model.head.weight]["momentum_buffer"] = torch.zeros(1)
    run.train(model, optimizer)


def state_written(name, make, key, write):
    """Between steps, and between a backward pass and its step."""

    def function(run):
        model = run.model()
        optimizer = make(model.parameters())
        run.attach(model, optimizer)
        told = []
        for step in range(5):
            loss = run.loss(model, step)
            loss.backward()
            state = optimizer.state[model.head.weight]
            if step == 3:
                write(state[key]) if key else write(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                write(state[key]) if key else write(model, optimizer)
            told += [loss.item(), {name: value.clone() for name, value in optimizer.state[model.head.weight].items()}]
        return told, copied_states_of(optimizer)

    function.__name__ = f"state_written_{name}"
    case(function, memory=("floor",))


with_momentum = functools.partial(SGD, lr=0.1, momentum=0.9)
with_adamw = functools.partial(AdamW, lr=1e-3)
with_fused = functools.partial(AdamW, lr=1e-3, fused=True, amsgrad=True)


def replaced(optimizer, state):
    optimizer.state = state


state_written("in_place", with_momentum, "momentum_buffer", lambda state: state.mul_(0.5))
state_written("through_data", with_momentum, "momentum_buffer", lambda state: state.data.zero_())
state_written("through_a_view", with_momentum, "momentum_buffer", lambda state: state.detach()[1:].zero_())
state_written("by_index", with_adamw, "exp_avg", lambda state: state.__setitem__(torch.tensor([1, 3]), 0.25))
state_written("in_inference_mode", with_adamw, "exp_avg", torch.inference_mode()(lambda state: state.view(-1)[:3].fill_(0.25)))
state_written("as_an_output", with_fused, "max_exp_avg_sq", lambda state: torch.mul(state, 2, out=state))
state_written("by_its_data", with_adamw, "exp_avg_sq", lambda state: setattr(state, "data", torch.full_like(state, 1e-4)))
state_written("number_of_steps", with_adamw, "step", lambda state: state.sub_(1))
state_written("number_of_steps_fused", with_fused, "step", lambda state: state.fill_(7))
state_written("number_of_steps_anew", with_adamw, "step", lambda state: state.zero_())
state_written("by_lists", with_adamw, None, lambda _, optimizer: torch._foreach_mul_([state["exp_avg"] for state in optimizer.state.values()], 0.5))
state_written("entry", with_adamw, None, lambda m, optimizer: optimizer.state[m.head.weight].update(exp_avg=torch.zeros_like(m.head.weight)))
state_written("entries", with_fused, None, lambda m, optimizer: optimizer.state.__setitem__(
    m.head.weight, {name: value / 2 for name, value in optimizer.state[m.head.weight].items()}))
state_written("cleared", with_adamw, None, lambda _, optimizer: optimizer.state.clear())
state_written("cleared_fused", with_fused, None, lambda _, optimizer: optimizer.state.clear())
state_written("replaced_by_nothing", with_momentum, None, lambda _, optimizer: replaced(optimizer, collections.defaultdict(dict)))
state_written("replaced_by_a_copy", with_adamw, None, lambda m, optimizer: replaced(optimizer, collections.defaultdict(
    dict, {m.norm.weight: {name: value.clone() for name, value in optimizer.state[m.norm.weight].items()}})))
state_written("set_anew", with_adamw, None, lambda _, optimizer: optimizer.__setstate__({"state": collections.defaultdict(dict)}))
state_written("of_one_removed", with_adamw, None, lambda m, optimizer: optimizer.state.pop(m.head.weight))
state_written("of_one_emptied", with_momentum, None, lambda m, optimizer: optimizer.state[m.head.weight].clear())
state_written("of_one_deleted", with_momentum, None, lambda m, optimizer: optimizer.state[m.head.weight].__delitem__("momentum_buffer"))
state_written("of_one_empty", with_adamw, None, lambda m, optimizer: optimizer.state.__setitem__(m.head.weight, {}))


@case(memory=("floor",))
def state_that_is_replaced_and_then_loaded(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    file = saved(optimizer.state_dict())
    told += run.train(model, optimizer, first=3)
    optimizer.state = collections.defaultdict(dict)
    optimizer.load_state_dict(file)
    return told + run.train(model, optimizer, first=6), copied_states_of(optimizer)


@case(memory=("floor",))
def state_given_before_the_first_step(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    for p in model.parameters():
        state = optimizer.state[p]
        state["step"] = torch.tensor(10.0)
        state["exp_avg"] = torch.full_like(p, 1e-3, dtype=torch.float32)
        state["exp_avg_sq"] = torch.full_like(p, 1e-5, dtype=torch.float32)
    return run.train(model, optimizer), copied_states_of(optimizer)


@case(types=("fp32",))
def state_that_is_kept_follows_the_steps(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    kept = dict(optimizer.state[model.head.weight])
    row = kept["exp_avg"][1]
    for step in range(3):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append([row.clone(), *(value.clone() for value in kept.values())])
        kept["exp_avg_sq"].mul_(0.5)
        row.add_(1e-3)
    optimizer.state.clear()
    run.train(model, optimizer)
    return told, row, kept


@case
def dictionary_that_is_kept_follows_the_steps(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = run.train(model, optimizer, steps=2)
    kept = optimizer.state_dict()
    told += run.train(model, optimizer, first=2, steps=2)
    kept["state"][3]["exp_avg"].mul_(0.5)
    told += run.train(model, optimizer, first=4, steps=2)
    optimizer.load_state_dict(kept)  # as it is now
    told += run.train(model, optimizer, first=6, steps=2)
    return told, {index: dict(state) for index, state in kept["state"].items()}


@case(types=("fp32",))
def state_stays_when_the_job_is_closed(run):
    def train():
        model = run.make(lambda: torch.nn.Linear(8, 8))
        optimizer = AdamW(model.parameters(), 1e-3, fused=True)
        handle = run.attach(model, optimizer)
        for step in range(3):
            model(torch.full((4, 8), step + 1.0)).pow(2).sum().backward()
            optimizer.step()
            if step == 0:
                kept = optimizer.state[model.weight]["exp_avg"]
        if run.offloaded:
            handle.close()
            run.handles.clear()
        run.models.clear()
        return kept

    return train()


@case
def dictionary_that_was_loaded_twice(run):
    """torch's optimizers go on with the tensors of what they have loaded."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    told = run.train(model, optimizer, steps=2)
    file = {"model": copy.deepcopy(model.state_dict()), "optimizer": saved(optimizer.state_dict())}
    for first in (2, 4, 6):
        told += run.train(model, optimizer, first=first, steps=2)
        model.load_state_dict(file["model"])
        optimizer.load_state_dict(file["optimizer"])
    return told + run.train(model, optimizer, first=8), copied_states_of(optimizer)


@case
def dictionary_that_is_kept_while_an_equal_one_is_loaded(run):
    """What was kept follows no more, as in plain torch."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    told = run.train(model, optimizer, steps=2)
    kept = optimizer.state_dict()
    optimizer.load_state_dict(saved(kept))
    told += run.train(model, optimizer, first=2, steps=2)
    told.append(copy.deepcopy(kept["state"]))
    optimizer.load_state_dict(kept)
    return told + run.train(model, optimizer, first=4, steps=2), copied_states_of(optimizer)


class WithEmpty(torch.nn.Module):
    """A parameter without elements, as MobileBERT has one."""

    def __init__(self):
        super().__init__()
        self.out, self.none = torch.nn.Linear(12, 5), torch.nn.Parameter(torch.empty(0, 5))

    def forward(self, x):
        return torch.cat([self.out(x), self.none])


def parameter_without_elements(make, name):
    """It has a state as any other: in a run that goes on, and in one that goes on with what another optimizer has."""

    def function(run):
        def begin(job):
            model = run.make(WithEmpty)
            optimizer = make(model.parameters())
            if run.offloaded or job == "other" or not run.handles:
                run.attach(model, optimizer, job=job)
            return model, optimizer

        def train(first):
            def loss_of(step):
                return model(torch.randn(4, 12, generator=torch.Generator().manual_seed(step)).to(run.dtype)).float().pow(2).mean()

            return [run.steps(optimizer, loss_of, first=first), saved(optimizer.state_dict())["state"], copy.deepcopy(optimizer.state.get(model.none))]

        model, optimizer = begin("one")
        told = train(0)
        if run.offloaded:
            run.end()
            model, optimizer = begin("one")
        told += train(3)
        optimizer.load_state_dict(saved(optimizer.state_dict()))
        told += train(6)
        file = saved(optimizer.state_dict())
        run.end()
        model, optimizer = begin("other")
        optimizer.load_state_dict(file)
        return told + train(0)

    function.__name__ = f"parameter_without_elements_{name}"
    case(function, memory=("floor",))


parameter_without_elements(with_adamw, "adamw")
parameter_without_elements(with_momentum, "momentum")
parameter_without_elements(functools.partial(torch.optim.Adagrad, lr=0.1), "adagrad")
parameter_without_elements(functools.partial(SGD, lr=0.1), "sgd")


@case(types=("fp32",))
def momentum_that_pauses_beside_a_parameter_without_elements(run):
    model = run.make(WithEmpty)
    optimizer = with_momentum(model.parameters())
    run.attach(model, optimizer)
    told = []
    for momentum in (0.9, 0.9, 0, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        model(torch.ones(4, 12)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(copied_states_of(optimizer))
    return told


@case
def momentum_that_pauses_stays_in_the_state(run):
    """Also in a run that goes on while it pauses, which makes its optimizer with momentum."""
    def make():
        model = run.model()
        optimizer = with_momentum(model.parameters())
        if run.offloaded or not run.handles:
            run.attach(model, optimizer, job="pauses")
        return model, optimizer

    model, optimizer = make()
    told = run.train(model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0
    told += [run.train(model, optimizer, first=3), copied_states_of(optimizer)]
    if run.offloaded:
        run.end()
        model, optimizer = make()
        optimizer.param_groups[0]["momentum"] = 0
    told.append(copied_states_of(optimizer))
    optimizer.load_state_dict(saved(optimizer.state_dict()))
    optimizer.param_groups[0]["momentum"] = 0.9
    return told + run.train(model, optimizer, first=6), copied_states_of(optimizer)


@case
def momentum_that_is_taken_away_before_the_first_step(run):
    model = run.model()
    optimizer = with_momentum(model.parameters())
    run.attach(model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0
    return run.train(model, optimizer), copied_states_of(optimizer)


@case(types=("fp32",))
def loss_with_the_state(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-2)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    first = model.head.weight.detach().clone()

    def loss_of(step):
        return run.loss(model, step) + (optimizer.state[model.head.weight]["exp_avg_sq"] * (model.head.weight - first) ** 2).sum()

    return told + run.steps(optimizer, loss_of)


def two_optimizers(run):
    optimizers = []
    for job in ("one", "other"):
        model = run.model()
        optimizer = AdamW(model.parameters(), 1e-3)
        run.attach(model, optimizer, job=job)
        run.train(model, optimizer)
        optimizers.append((model, optimizer))
    return optimizers


@case(memory=("floor",))
def state_of_another_optimizer_is_copied(run):
    (_, one), (model, other) = two_optimizers(run)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    return run.train(model, other), copied_states_of(one), copied_states_of(other)


@case(refused=1604, **REFUSED)
def state_that_another_optimizer_goes_on_with_is_refused(run):
    (_, one), (_, other) = two_optimizers(run)
    other.load_state_dict(one.state_dict())


@case(refused=1604, **REFUSED)
def more_than_the_optimizer_keeps_is_refused(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    optimizer.state[model.head.weight]["average"] = torch.zeros_like(model.head.weight)


@case(refused=1604, **REFUSED)
def replacing_the_state_by_no_dictionary_is_refused(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    run.attach(model, optimizer)
    run.train(model, optimizer)
    optimizer.state = []
    run.train(model, optimizer)


@case(**REFUSED)
def state_that_is_copied(run):
    """Without its tensors, as a dictionary is."""
    model = run.model()
    optimizer = with_adamw(model.parameters())
    run.attach(model, optimizer)
    told = run.train(model, optimizer, steps=2)
    for copied in (optimizer.state.copy(), copy.copy(optimizer.state), optimizer.state | {}, {} | optimizer.state):
        told.append([dict(copied[parameter]) for parameter in model.parameters()])
        told.append([type(copied), len(copied), copied[model.head.weight] is optimizer.state[model.head.weight]])
    return told, run.train(model, optimizer, first=2)


@case(**REFUSED)
def state_in_the_order_in_which_it_began(run):
    """Of parameters that are thawed later, loaded in another order, removed and begun anew; also in a run that continues."""
    def make():
        model = run.model()
        model.embed.weight.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        optimizer = with_adamw(model.parameters())
        if run.offloaded or not run.handles:
            run.attach(model, optimizer, job="order", unfreeze=True)
        return model, optimizer

    model, optimizer = make()
    told = run.train(model, optimizer, steps=1)
    for part in (model.blocks[0], model):
        part.requires_grad_(True)
        told += run.train(model, optimizer, steps=1, first=len(told))
        told.append(list(optimizer.state_dict()["state"]))
    if run.offloaded:
        run.end()
        model, optimizer = make()
        model.requires_grad_(True)
    told += run.train(model, optimizer, steps=1, first=9)
    told.append(list(optimizer.state_dict()["state"]))
    given = copied_states_of(optimizer)
    whole = copy.deepcopy(optimizer.state_dict())
    whole["state"] = dict(sorted(whole["state"].items()))
    optimizer.load_state_dict(whole)
    told.append(list(optimizer.state_dict()["state"]))
    del optimizer.state[model.head.weight], optimizer.state[model.embed.weight]
    told += run.train(model, optimizer, steps=1, first=10)
    told.append(list(optimizer.state_dict()["state"]))
    return told, given


# ---- Of parameters that no group has any more -----------------------------------------------------

def left_by_its_group(name, make, change, **options):
    """`change`, between steps, has the parameters of the only group, and takes some of them out of it."""

    def function(run):
        model = run.model()
        optimizer = make(model.parameters())
        run.attach(model, optimizer)
        told = run.train(model, optimizer, steps=2)
        parameters = optimizer.param_groups[0]["params"]
        told.append(change(optimizer, parameters))
        told += [[parameter in optimizer.state for parameter in parameters], len(optimizer.state)]
        told += run.train(model, optimizer, steps=2, first=2)
        if len(optimizer.param_groups) == 1 and len(optimizer.param_groups[0]["params"]) < len(parameters):
            optimizer.add_param_group({"params": parameters[3:]})
        return told + run.train(model, optimizer, steps=2, first=4), copied_states_of(optimizer)

    function.__name__ = f"left_by_its_group_{name}"
    case(function, **{"types": ("fp32",), "memory": ("floor",), **options})


def only_three(optimizer, parameters):
    optimizer.param_groups[0]["params"] = parameters[:3]


def all_groups_anew(optimizer, parameters, empty):
    optimizer.param_groups.clear()
    empty(optimizer)
    optimizer.add_param_group({"params": parameters})


left_by_its_group("keeps_it", with_adamw, only_three, types=("fp32", "bf16"))
left_by_its_group("is_looked_at", with_adamw, lambda optimizer, parameters: (
    only_three(optimizer, parameters), [optimizer.state[each]["exp_avg"].clone() for each in parameters])[1])
left_by_its_group("is_written", with_momentum, lambda optimizer, parameters: (
    only_three(optimizer, parameters), optimizer.state[parameters[5]]["momentum_buffer"].mul_(0.5), None)[2])
left_by_its_group("is_removed", with_adamw, lambda optimizer, parameters: (
    only_three(optimizer, parameters), optimizer.state.pop(parameters[5]))[1])
left_by_its_group("is_cleared", with_adamw, lambda optimizer, parameters: (only_three(optimizer, parameters), optimizer.state.clear())[1])
left_by_its_group("is_replaced", with_fused, lambda optimizer, parameters: (
    only_three(optimizer, parameters), replaced(optimizer, collections.defaultdict(dict)))[1])
left_by_its_group("all_cleared", with_adamw, lambda optimizer, parameters: all_groups_anew(optimizer, parameters, lambda o: o.state.clear()))
left_by_its_group("all_kept", with_adamw, lambda optimizer, parameters: all_groups_anew(optimizer, parameters, lambda o: None))
left_by_its_group("all_removed", with_momentum, lambda optimizer, parameters: all_groups_anew(
    optimizer, parameters, lambda o: [o.state.pop(each) for each in parameters] and None))


@case(types=("fp32", "bf16"))
def state_that_is_not_there(run):
    """Asking for it makes none, as with a dictionary of torch's."""
    model = run.model()
    model.head.weight.requires_grad_(False)
    optimizer = AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    told += [optimizer.state.get(model.head.weight), optimizer.state.get(model.head.weight, "none"), model.head.weight in optimizer.state]
    return told + [len(optimizer.state), sorted(optimizer.state_dict()["state"])]


def average(name, make, kept, torchs=None):
    """Of every weight, and of one that has had no update. `torchs`: the one of torch.optim.swa_utils that it is equal to."""

    def function(run):
        model = run.model()
        optimizer = make(model.parameters())
        handle = run.attach(model, optimizer, average=kept)
        averaged = AveragedModel(model, multi_avg_fn=torchs) if not run.offloaded else None
        told = []
        for step in range(5):
            told += run.train(model, optimizer, first=step, steps=1)
            if averaged is not None:
                averaged.update_parameters(model)
            if step == 2:
                told += handle.gather(list(model.parameters()), "average")
        averages = handle.gather(list(model.parameters()), "average")
        if averaged is not None and next(model.parameters()).dtype == torch.float32:
            assert all(map(torch.equal, averages, averaged.module.parameters()))
        with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder:
            handle.save_weights(folder, plane="average")
            return told, averages, load_file(os.path.join(folder, "model.safetensors"))

    function.__name__ = f"average_{name}"
    case(function)


average("ema", with_adamw, "ema:0.9", get_ema_multi_avg_fn(0.9))
average("ema_of_sgd", functools.partial(SGD, lr=0.1), "ema:0.3", get_ema_multi_avg_fn(0.3))
average("mean", with_fused, "swa:1:1")


@case(types=("fp32", "bf16", "fp16", "fp64"), memory=("floor",))
def average_in_a_file_without_a_trainer(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    model.head.weight.requires_grad_(False)
    handle = run.attach(model, optimizer, average="ema:0.9", job="averaged")
    told = run.train(model, optimizer)
    averages = {name: handle.gather(parameter, "average") for name, parameter in model.named_parameters()}
    run.end()
    if run.offloaded:
        folder = os.path.join(run.folder, "averages")
        control.run("export", run.folder, "averaged", folder, "--average")
        exported = load_file(os.path.join(folder, "model.safetensors"))
        assert all(torch.equal(exported[name], average.to(exported[name].dtype)) for name, average in averages.items())
    return told, averages


@case(refused=1604, **REFUSED)
def average_of_an_optimizer_of_the_process_is_refused(run):
    model = run.model()
    run.attach(model, torch.optim.NAdam(model.parameters()), average="ema:0.9")


@case(types=("fp32",))
def pickles_are_plain_torchs(run):
    """Whoever loads them needs nothing but torch."""
    told = []
    for make in (functools.partial(AdamW, lr=1e-2, fused=True), functools.partial(SGD, lr=0.1, momentum=0.9), functools.partial(torch.optim.NAdam, lr=1e-2)):
        model = run.model()
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
        run.attach(model, optimizer)
        run.train(model, optimizer, scheduler=scheduler)
        for protocol in (2, pickle.HIGHEST_PROTOCOL):
            assert b"offloadd" not in (written := pickle.dumps((model, optimizer, scheduler), protocol))
            copied = pickle.loads(written)
            assert type(copied[1].state) is collections.defaultdict
            told.append(run.train(copied[0], copied[1], first=3, scheduler=copied[2]))
        told.append(run.train(model, optimizer, first=3, scheduler=scheduler))
    return told


class OwnSGD(SGD):
    def step(self, closure=None):
        return super().step(closure)


class Sums:
    """As schedulefree's wrapper: around an optimizer, in whose state it keeps something of its own."""

    def __init__(self, inner):
        self.inner = inner

    @torch.no_grad()
    def step(self):
        self.inner.step()
        for p in self.inner.param_groups[0]["params"]:
            state = self.inner.state[p]
            if "sum" not in state:
                state["sum"] = torch.zeros_like(p)
            state["sum"].add_(p)
            p.lerp_(state["sum"], 0.01)

    def zero_grad(self):
        self.inner.zero_grad()


def with_sums(run, cls):
    model = run.model()
    optimizer = cls(model.parameters(), 0.1, momentum=0.9)
    run.attach(model, optimizer)
    return run.train(model, Sums(optimizer))


@case(refused=1604, **REFUSED)
def state_that_torch_does_not_know_is_refused(run):
    try:
        with_sums(run, SGD)
    except Error as error:
        assert "a subclass of the optimizer's class with a step() of its own" in str(error), error
        raise


@case
def state_that_torch_does_not_know_in_an_optimizer_with_its_own_step(run):
    """The way out that the refusal names."""
    return with_sums(run, OwnSGD)


if __name__ == "__main__":
    sys.exit(main())
