"""What optimizers keep that run in this process belongs to the job: a run that goes on has it, whatever it is made of, or says what it cannot keep."""

import collections
import enum
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import unittest.mock

import numpy
import torch
from safetensors import safe_open
from torch.optim import AdamW

import offloadd
from battery import Transformer, case, main, muon_beside_adamw, states_of
from offloadd import control
from offloadd.recipes import parameters_of
from programs import Programs, run_fresh

FP32 = {"types": ("fp32",)}
REFUSED = {"types": ("fp32",), "memory": ("floor",), "refused": 1604}


def goes_on(make, **options):
    """A case: half of the steps in one run, half in another that makes everything anew."""

    def declare(name):
        def function(run):
            return run.resumed(lambda model: make(list(model.parameters())))

        function.__name__ = name
        case(function, **options)

    return declare


goes_on(lambda p: torch.optim.Adafactor(p, 1e-2))("adafactor")
goes_on(lambda p: torch.optim.NAdam(p, 1e-3))("nadam")
goes_on(lambda p: torch.optim.RAdam(p, 1e-3), **FP32)("radam")
goes_on(lambda p: torch.optim.Adamax(p, 1e-3), **FP32)("adamax")
goes_on(lambda p: torch.optim.Adadelta(p), **FP32)("adadelta")
goes_on(lambda p: torch.optim.Rprop(p, 1e-3), **FP32)("rprop")
goes_on(lambda p: torch.optim.ASGD(p, 1e-2), **FP32)("asgd")


class OwnStep(AdamW):
    """Changes an option at every step: it goes on with that."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.9
        return super().step(closure)


goes_on(lambda p: OwnStep(p, 1e-3), **FP32)("options_that_its_steps_change")


def around(optimizer):
    """Of a class of its own, as in a new process: the first zero_grad() of a class has torch call hooks of its steps."""

    class Around(torch.optim.Optimizer):
        """Holds another one, and does without the constructor of its class."""

        def __init__(self):
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = collections.OrderedDict(), collections.OrderedDict()
            self.its, self.defaults, self.param_groups, self.state = optimizer, {}, optimizer.param_groups, collections.defaultdict(dict)
            for group in self.param_groups:
                group["steps"] = 0

        @torch.no_grad()
        def step(self, closure=None):
            self.its.step(closure)
            for group in self.param_groups:
                group["steps"] += 1
                for p in group["params"] if group["steps"] % 2 == 0 else ():
                    p.lerp_(self.its.state[p].setdefault("slow", p.detach().clone()), 0.5)

    return Around()


_schedulers = []


def scheduled(optimizer):
    _schedulers.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    return optimizer


goes_on(lambda p: around(AdamW(p, 1e-3)), **FP32)("around_another_without_a_constructor")
goes_on(lambda p: scheduled(around(AdamW(p, 1e-3))), **FP32)("around_another_with_a_scheduler")


class Switched(torch.optim.Optimizer):
    """Free of schedules: train() and eval() move the weights, where they have not done so before."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3, "train_mode": False})

    @torch.no_grad()
    def switch(self, is_training):
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != is_training else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 0.1 if is_training else 1 - 1 / 0.9)
            group["train_mode"] = is_training

    @torch.no_grad()
    def step(self, closure=None):
        for p in parameters_of(self):
            self.state[p].setdefault("z", p.detach().clone()).sub_(p.grad, alpha=0.1)
            p.lerp_(self.state[p]["z"], 0.2)


@case(**FP32)
def options_that_its_other_methods_switch(run):
    told, held = [], []
    for first in (0, 3):
        if run.offloaded or first == 0:
            run.end()
            model = run.model()
            held[:] = [Switched(model.parameters())]
            run.attach(model, held[0], job="switched")
        held[0].switch(True)
        told += run.train(model, held[0], first=first)
    held[0].switch(False)
    return told


class Counter:
    def __init__(self, seen=0):
        self.seen, self.say = seen, print


class Side(enum.Enum):
    LEFT = "left"
    RIGHT = "right"


class Projector:
    def __init__(self, parameter, function=None):
        self.rank, self.of, self.side = 2, torch.ones_like(parameter), Side.RIGHT
        if function is not None:
            self.function = function


class Everything(torch.optim.Optimizer):
    """Keeps things of every kind, in its state, its groups and its attributes, some of which share memory or are shared."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})
        mine = list(parameters_of(self))
        self.flat = torch.zeros(sum(p.numel() for p in mine))
        self.views = [each.view(p.shape) for each, p in zip(self.flat.split([p.numel() for p in mine]), mine)]
        self.first, self.log, self.counter, self.pair = mine[0], collections.deque(maxlen=2), Counter(), (1, 2.5)
        self.generator, self.random = torch.Generator().manual_seed(3), random.Random(4)
        self.times, self.numbers, self.empty = numpy.arange(3.0), collections.defaultdict(int), torch.empty(0)
        self.average = torch.nn.Linear(2, 2)
        self.by_id = {}
        self.inner = torch.optim.Adamax(mine, 1e-3)
        self.strange = {"nan": float("nan"), 3: {1, 2}, (4, None): b"bytes", "type": torch.bfloat16, "complex": 1 - 2j, "size": torch.Size([2])}

    @torch.no_grad()
    def step(self, closure=None):
        self.counter.seen += 1
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for view, p in zip(self.views, group["params"]):
                state = self.state[p]
                state.setdefault("transposed", torch.zeros_like(p).t() if p.dim() == 2 else torch.zeros_like(p)).add_(p.grad.t() if p.dim() == 2 else p.grad)
                state["log"] = self.log
                state.setdefault("projector", Projector(p)).of.mul_(0.9)
                self.by_id.setdefault(id(p), {"sum": torch.zeros(())})["sum"] += p.grad.sum()
                assert state["projector"].side is Side.RIGHT
                p.add_(state["projector"].of * self.by_id[id(p)]["sum"], alpha=1e-5)
                view.add_(p.grad)
                noise = torch.randn(p.shape, generator=self.generator) + self.random.random() + self.times[0] + self.numbers["steps"]
                mean = state["transposed"].t() if p.dim() == 2 else state["transposed"]
                p.add_(mean + view + 1e-3 * noise, alpha=-group["lr"] / group["seen"])
        self.flat.mul_(0.5)
        self.first.mul_(1 - 1e-3 * self.counter.seen)
        self.average.weight.add_(self.flat.sum())
        self.first.add_(self.average.weight.sum(), alpha=1e-6)
        self.inner.step()
        self.times *= 2
        self.numbers["steps"] += 1
        self.log.append(float(self.flat.sum()))
        self.first.add_(sum(self.state[self.first]["log"]), alpha=1e-6)


@case(**FP32)
def things_of_every_kind(run):
    held = []

    def make(model):
        held[:] = [Everything(model.parameters())]
        return held[0]

    told, states = run.resumed(make)
    told = told, [{key: value.of if key == "projector" else value for key, value in state.items()} for state in states]
    optimizer = held[0]
    assert optimizer.flat.untyped_storage().data_ptr() == optimizer.views[-1].untyped_storage().data_ptr()
    assert optimizer.state[optimizer.first]["log"] is optimizer.log and optimizer.counter.say is print
    strange = {key: value for key, value in optimizer.strange.items() if key != "nan"}
    return told, repr(strange), optimizer.pair, optimizer.log, optimizer.numbers, optimizer.times.tolist(), optimizer.param_groups[0]["seen"]


class Lookahead(torch.optim.Optimizer):
    """Around another one, whose groups it has."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.slow, self.steps = inner, inner.param_groups, None, 0

    @torch.no_grad()
    def step(self, closure=None):
        mine = list(parameters_of(self))
        self.slow = self.slow or [p.detach().clone() for p in mine]
        self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, p in zip(self.slow, mine):
                p.copy_(slow.lerp_(p, 0.5))


goes_on(lambda p: Lookahead(torch.optim.Adamax(p, 1e-3)))("around_another_one")
goes_on(lambda p: Lookahead(AdamW(p, 1e-3)), **FP32)("around_one_that_the_daemon_has")


class Several(torch.optim.Optimizer):
    """Of others, for a part of the parameters each."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})
        mine = list(parameters_of(self))
        self.optimizers = [torch.optim.NAdam(mine[:3], 1e-3), OwnStep(mine[3:], 1e-3)]

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


@case(**FP32)
def several_in_one(run):
    held = []

    def make(model):
        held[:] = [Several(model.parameters())]
        return held[0]

    return run.resumed(make), [[states_of(each), each.param_groups[0]["lr"]] for each in held[0].optimizers]


@case(memory=("double",))
def history_of_lbfgs(run):
    """Which grows with every step: the least memory that trains the model is too little for it."""
    told = []
    for first in (0, 3, 6):
        if run.offloaded or not told:
            run.end()
            model = run.model()
            optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe")
            run.attach(model, optimizer, job="history")
        told += run.train_with_closures(model, optimizer, first=first)
    state = optimizer.state_dict()["state"][0]
    return told, state["n_iter"], state["old_dirs"], state["prev_flat_grad"]


def over_two_pools(name, make, train):
    """A store there cannot be laid out anew: it has the room from the beginning."""
    def function(run):
        pools = [os.path.join(run.folder, each) for each in ("one", "two")]
        told = []
        for first in (0, 3):
            if run.offloaded or not told:
                run.end()
                model = run.model()
                optimizer = make(model.parameters())
                if run.offloaded:
                    for pool in pools:
                        os.makedirs(pool, exist_ok=True)
                handle = run.attach(model, optimizer, job="over-two", nvme_path=pools)
                assert handle.step == (first if run.offloaded else 0)
            told += train(run)(model, optimizer, first=first)
        return told, states_of(optimizer)

    function.__name__ = name
    case(function, memory=("double",))


over_two_pools("nadam_over_two_pools", lambda p: torch.optim.NAdam(p, 1e-3), lambda run: run.train)
over_two_pools("lbfgs_over_two_pools", lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3, history_size=4), lambda run: run.train_with_closures)


@case
def beside_one_of_the_daemon(run):
    def make():
        model = run.model()
        optimizers = muon_beside_adamw(model)
        return model, optimizers, run.attach(model, optimizers, job="both")

    told = []
    for first in (0, 3):
        if run.offloaded or first == 0:
            run.end()
            model, optimizers, handle = make()
            assert not run.offloaded or handle.step == 2 * first
        for step in range(first, first + 3):
            loss = run.loss(model, step)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            told.append(loss.item())
    return told, [states_of(optimizer) for optimizer in optimizers]


@case(**FP32)
def changed_before_a_step_of_another(run):
    """That step commits it."""
    model = run.model()
    optimizers = [torch.optim.NAdam(model.blocks.parameters(), 1e-3), AdamW(model.head.parameters(), 1e-3)]

    def attach():
        return run.attach(model, optimizers, job="changed")

    attach()

    def step(number, *chosen):
        loss = run.loss(model, number)
        loss.backward()
        for optimizer in chosen:
            optimizer.step()
        model.zero_grad()
        return loss.item()

    told = [step(0, *optimizers)]
    state = optimizers[0].state_dict()
    for each in state["state"].values():
        each["exp_avg"] = each["exp_avg"] * 2
        each["step"] = each["step"] + 3
    optimizers[0].load_state_dict(state)
    told.append(step(1, optimizers[1]))
    if run.offloaded:
        run.end()
        model = run.model()
        optimizers = [torch.optim.NAdam(model.blocks.parameters(), 1e-3), AdamW(model.head.parameters(), 1e-3)]
        attach()
    return told, step(2, *optimizers), step(3, *optimizers), [states_of(optimizer) for optimizer in optimizers]


@case(**FP32)
def with_several_micro_batches_and_spilled_gradients(run):
    return run.resumed(lambda model: torch.optim.NAdam(model.parameters(), 1e-3), micro=2, clip=0.1)


def paged_bytes(folder):
    """Memory of this process that lies in a file without a name there."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        ranges = [line.split()[0].split("-") for line in maps if folder in line and "(deleted)" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def in_three_runs(run, make, train, width, then=lambda optimizer: None):
    """Of one job, two steps each, that make everything anew."""
    told = []
    for first in (0, 2, 4):
        if run.offloaded or not told:
            run.end()
            model = run.model(width=width)
            optimizer = make(list(model.parameters()))
            handle = run.attach(model, optimizer, job="three")
            assert not run.offloaded or handle.step == first
        told += getattr(run, train)(model, optimizer, steps=2, first=first)
        then(optimizer)
    return told, states_of(optimizer)


def beside_ram(size):
    """Of jobs that are opened within."""
    return unittest.mock.patch.dict(os.environ, OFFLOADD_BESIDE_RAM=size)


def paged(make, train, **options):
    """A case: what it keeps is more than may be in memory beside ram."""

    def declare(name):
        def function(run):
            def check(optimizer):
                kept = sum(value.nbytes for state in states_of(optimizer) for value in state.values() if torch.is_tensor(value))
                assert not run.offloaded or kept > 1 << 20 and paged_bytes(run.folder) > kept / 2, (kept, paged_bytes(run.folder))

            with beside_ram("256KiB"):
                return in_three_runs(run, make, train, 256, check)

        function.__name__ = name
        case(function, **options)

    return declare


paged(lambda p: torch.optim.NAdam(p, 1e-3), "train")("more_than_memory")
paged(lambda p: torch.optim.NAdam(p, 1e-3, foreach=True), "train", **FP32)("more_than_memory_all_at_once")
paged(lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3, history_size=3), "train_with_closures", memory=("double",))("more_than_memory_with_closures")


def paged_from_the_first_byte(run, kind):
    with beside_ram("1KiB"):
        model = run.model(width=256)
        optimizer = kind(model.parameters(), 1e-3)
        run.attach(model, optimizer)
    return model, optimizer


class Raises(torch.optim.NAdam):
    fails = False

    def step(self, closure=None):
        loss = super().step(closure)
        if Raises.fails:
            raise ArithmeticError("on the way")
        return loss


@case(types=("fp32",), memory=("double",))
def a_step_that_raises_an_error(run):
    """Tensors that are made after the job are ordinary ones."""
    model, optimizer = paged_from_the_first_byte(run, Raises)
    told = run.train(model, optimizer, steps=1)
    Raises.fails = True
    try:
        run.train(model, optimizer, steps=1, first=1)
        raise AssertionError("it did not raise")
    except ArithmeticError:
        pass
    finally:
        Raises.fails = False
    assert not run.offloaded or paged_bytes(run.folder) > 0
    run.end()
    before = paged_bytes(run.folder)
    ordinary = torch.ones(1 << 20)
    assert paged_bytes(run.folder) == before, ordinary
    return told


@case(types=("fp32",), memory=("double",))
def a_forked_child(run):
    """It has what is in memory, as in memory, and is told where it reads what is in pages of the pool."""
    model, optimizer = paged_from_the_first_byte(run, torch.optim.NAdam)
    told = run.train(model, optimizer, steps=1)
    kept = [value for state in states_of(optimizer) for value in state.values() if torch.is_tensor(value)]
    for value, is_paged in ((min(kept, key=torch.numel), False), (max(kept, key=torch.numel), run.offloaded)):
        with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
            child = os.fork()
            if child == 0:
                os.dup2(errors.fileno(), 2)
                value.sum()
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            errors.seek(0)
            said = errors.read()
        assert os.waitstatus_to_exitcode(status) == (-signal.SIGABRT if is_paged else 0), (status, said)
        assert not is_paged or ("OFD-1802" in said and "paged in its parent" in said), said
    return told + run.train(model, optimizer, steps=1, first=1)


class LongNames(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        for i in range(1500):
            self.register_parameter(f"{i}".rjust(700, "x"), torch.nn.Parameter(torch.randn(64)))


@case(types=("fp32",), memory=("1GiB",))
def names_that_are_more_than_a_step_takes(run):
    """It trains, and cannot be resumed."""
    model = LongNames()
    optimizer = torch.optim.NAdam(model.parameters(), 1e-2, foreach=True)
    run.attach(model, optimizer)
    told = []
    for _ in range(2):
        loss = sum(parameter.pow(2).sum() for parameter in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


def at_the_least(make, train):
    """A case: with the least `ram` that the plan says, of which what it keeps is part."""

    def declare(name):
        def function(run):
            if run.offloaded:
                model = run.model(width=128)
                run.attach(model, make(list(model.parameters())), job="probe")
                run.memory = str(run.handles[-1].plan()["floor_bytes"])
            return in_three_runs(run, make, train, 128)

        function.__name__ = name
        case(function, types=("fp32",), memory=("1GiB",))

    return declare


class FourTimes(torch.optim.Optimizer):
    """Keeps more than two moments of each parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for p in parameters_of(self):
            for number in range(4):
                mean = self.state[p].setdefault(f"mean{number}", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1 * (number + 1))
                p.sub_(mean, alpha=1e-2)


at_the_least(lambda p: torch.optim.NAdam(p, 1e-3), "train")("with_the_least_memory")
at_the_least(FourTimes, "train")("with_the_least_memory_and_four_moments")
at_the_least(lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3, history_size=3), "train_with_closures")("with_the_least_memory_and_closures")


@case(**FP32)
def attached_again_with_the_same_objects(run):
    model = run.model()
    optimizer = torch.optim.NAdam(model.parameters(), 1e-3)
    handle = run.attach(model, optimizer, job="again")
    told = run.train(model, optimizer)
    if run.offloaded:
        run.end()
        run.attach(model, optimizer, job="again")
    return told + run.train(model, optimizer, first=3), states_of(optimizer), handle.job == "again" or not run.offloaded


@case(**FP32)
def a_run_that_ended_before_its_first_step(run):
    if run.offloaded:
        model = run.model()
        run.attach(model, torch.optim.NAdam(model.parameters(), 1e-3), job="resumed")
        run.end()
    return run.resumed(lambda model: torch.optim.NAdam(model.parameters(), 1e-3))


@case(**FP32)
def a_snapshot_has_it(run):
    def make(job):
        model = run.model()
        optimizer = torch.optim.NAdam(model.parameters(), 1e-3)
        return model, optimizer, run.attach(model, optimizer, job=job)

    model, optimizer, handle = make("original")
    told = run.train(model, optimizer)
    if run.offloaded:
        handle.snapshot("three")
        run.train(model, optimizer, first=9)
        run.end()
        control.run("snapshot", "fork", run.folder, "original", "three", "--as", "forked", "--yes")
        model, optimizer, handle = make("forked")
        assert handle.step == 3
    return told + run.train(model, optimizer, first=3), states_of(optimizer)


def names_in(folder):
    return sorted(name for file in os.listdir(folder) if file.endswith(".safetensors")
                  for name in safe_open(os.path.join(folder, file), "pt").keys())


@case(types=("fp32",), memory=("floor",))
def files_have_none_of_it(run):
    if not run.offloaded:
        return
    model = run.model()
    optimizer = torch.optim.NAdam(model.parameters(), 1e-3)
    handle = run.attach(model, optimizer, job="saved")
    run.train(model, optimizer)
    saved, exported = os.path.join(run.folder, "saved files"), os.path.join(run.folder, "exported files")
    handle.save_weights(saved)
    handle.wait_durable()
    names = sorted(name for name, _ in model.named_parameters())
    run.end()
    control.run("export", run.folder, "saved", exported)
    assert names_in(saved) == names_in(exported) == names, names_in(exported)


# ---- Refused -----------------------------------------------------------------------------------


@case(types=("fp32",), memory=("double",))
def a_thousand_parameters_leave_little_to_collect(run):
    parameters = run.make(lambda: torch.nn.ParameterList(torch.nn.Parameter(torch.randn(8)) for _ in range(1000)))
    optimizer = torch.optim.NAdam(parameters.parameters(), 1e-2)
    run.attach(parameters, optimizer)
    begun = []

    def note(phase, _):
        if phase == "start":
            begun.append(phase)

    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones(8)
        begun.clear()
        gc.callbacks.append(note)
        optimizer.step()
        gc.callbacks.remove(note)
    assert len(begun) < 20, len(begun)


def text_of_the_next_run(run, make, then=None):
    """Of the error that a second run of the job ends with."""
    for again in (make, then or make):
        model = run.model()
        optimizer = again(model)
        handle = run.attach(model, optimizer, job="refused")
        run.train(model, optimizer)
        handle.close()
    raise AssertionError("it went on")


class Locked(torch.optim.NAdam):
    def __init__(self, params):
        super().__init__(params, 1e-3)
        self.lock = threading.Lock()


class Projects(torch.optim.NAdam):
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["projector"] = Projector(p, function=torch.square)


class Recording(torch.optim.NAdam):
    def step(self, closure=None):
        self.record = list(range(300_000))
        return super().step(closure)


class Views(Lookahead):
    @property
    def state(self):
        return {p: {**each} for p, each in self.__dict__.get("state", {}).items()}

    @state.setter
    def state(self, value):
        self.__dict__["state"] = value


class KnowsGroups(torch.optim.NAdam):
    def step(self, closure=None):
        self.by_group = {id(group): 1 for group in self.param_groups}
        return super().step(closure)


class HoldsTheWeights(torch.optim.NAdam):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["former"] = p.data


def refused(name, text, make, then=None):
    def function(run):
        if not run.offloaded:
            return
        try:
            text_of_the_next_run(run, make, then)
        except offloadd.Error as error:
            assert text in str(error), error
            raise

    function.__name__ = name
    case(function, **REFUSED)


refused("attribute_that_cannot_be_kept", "its attribute lock has a _thread.lock", lambda model: Locked(model.parameters()))
refused("state_over_the_weights_themselves", "its state has a tensor over a weight or a gradient", lambda model: HoldsTheWeights(model.parameters(), 1e-3))
refused("state_that_is_made_when_it_is_looked_at", "are made anew whenever they are looked at", lambda model: Views(torch.optim.NAdam(model.parameters(), 1e-3)))
refused("attribute_that_is_large", "is one of more than 200,000 things", lambda model: Recording(model.parameters(), 1e-3))
refused("state_with_a_function", "its state has a __main__:Projector with a function, function", lambda model: Projects(model.parameters(), 1e-3))
refused("keys_that_are_addresses", "has a number for a key that is an address", lambda model: KnowsGroups(model.parameters(), 1e-3))
refused("another_optimizer_than_before", "keeps what torch.optim.nadam.NAdam does", lambda model: torch.optim.NAdam(model.parameters(), 1e-3),
        lambda model: torch.optim.RAdam(model.parameters(), 1e-3))
refused("job_of_one_that_the_daemon_has", "was trained without it", lambda model: torch.optim.SGD(model.parameters(), 1e-3),
        lambda model: torch.optim.RAdam(model.parameters(), 1e-3))
refused("other_groups_than_before", "it had 1 groups, and has 2 now", lambda model: torch.optim.NAdam(model.parameters(), 1e-3),
        lambda model: torch.optim.NAdam([{"params": model.blocks.parameters()}, {"params": model.head.parameters()}], 1e-3))


# ---- Killed ------------------------------------------------------------------------------------

KILLED = """
import json, logging, os, signal, sys
import torch
import offloadd
sys.path.insert(0, sys.argv[1])
from battery import Transformer, states_of

folder, kill_at = sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
model = Transformer()
optimizer = torch.optim.NAdam(model.parameters(), 1e-3)
handle = offloadd.attach(model, optimizer, nvme_path=folder, ram="128MiB", job="killed") if folder else None
if handle is not None and kill_at >= 0:
    engine, commits = handle._engine, 0
    class Killing:
        def __getattr__(self, name):
            def call(*arguments):
                global commits
                commits += name in ("keep_foreign", "apply")
                if name in ("keep_foreign", "apply") and commits == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return getattr(engine, name)(*arguments)
            return call
    handle._engine = Killing()
for step in range(handle.step if handle else 0, 6):
    ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(step))
    torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    weights = [p.double().sum().item().hex() for p in model.parameters()]
print(json.dumps([weights, [value.double().sum().item().hex() for state in states_of(optimizer) for value in state.values() if torch.is_tensor(value)]]))
"""


@case(types=("fp32",), memory=("floor",))
def killed_between_what_it_keeps_and_the_step(run):
    """Before it is handed over, and after that, of the first steps (where the store is laid out anew) and of later ones."""
    here = os.path.dirname(os.path.abspath(__file__))
    if run.offloaded:
        for kill_at in (1, 2, 3, 4, 3):
            process = programs.start("-c", KILLED, here, run.folder, str(kill_at))
            process.communicate()
            assert process.returncode == -signal.SIGKILL, process.returncode
    return json.loads(programs.start("-c", KILLED, here, run.folder if run.offloaded else "", "-1").communicate()[0].splitlines()[-1])


SPARSE = """
import json, os, signal, sys
import torch
import offloadd

folder, kill_at = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(4000, 64, sparse=True), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
handle = offloadd.attach(model, optimizer, nvme_path=folder, ram="128MiB", job="killed") if folder else None
for step in range(handle.step if handle else 0, 8):
    ids = torch.randint(4000, (50 * (step + 1), 12), generator=torch.Generator().manual_seed(step))
    model(ids).pow(2).mean().backward()
    if step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    told = [p.double().sum().item().hex() for p in model.parameters()]
kept = [state["momentum_buffer"] for state in optimizer.state.values()]
print(json.dumps([told, [(value._values() if value.is_sparse else value).double().sum().item().hex() for value in kept], kept[0]._nnz()]))
"""


@case(types=("fp32",), memory=("floor",))
def killed_with_sparse_buffers_that_grow(run):
    if run.offloaded:
        for kill_at in (1, 2, 5, 7):
            process = programs.start("-c", SPARSE, run.folder, str(kill_at))
            process.communicate()
            assert process.returncode == -signal.SIGKILL, process.returncode
    return json.loads(programs.start("-c", SPARSE, run.folder if run.offloaded else "", "-1").communicate()[0].splitlines()[-1])


PLAIN = """
import sys, torch, offloadd
folder, kind = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
optimizer = getattr(torch.optim, kind)(model.parameters(), 1e-2)
if folder:
    handle = offloadd.attach(model, optimizer, nvme_path=folder, ram="128MiB", job=kind)
for _ in range(3):
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    print(*(p.double().sum().item().hex() for p in model.parameters()))
"""


@case(types=("fp32",), memory=("floor",))
def where_torch_computes_without_avx2(run):
    def told(kind):
        folder = run.folder if run.offloaded else ""
        return run_fresh("-c", PLAIN, folder, kind, ATEN_CPU_CAPABILITY="default")

    if run.offloaded:
        assert "OFD-1604 torch computes without AVX2" in told("AdamW").stderr  # and with it the daemon
        assert os.listdir(run.folder) == [], "there is no job yet"
    assert (done := told("NAdam")).returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    _ = Transformer
    programs = Programs()
    sys.exit(main())
