"""Updates that begin during the backward: whatever the loop does between backward and step, its losses and weights are those in memory,
bit for bit, and where the step can be foreseen the updates are of use.

    update_in_backward_test.py [NAME...]
"""

import os
import sys
import tempfile

import torch

import offloadd
from offloadd import in_memory

WIDTH, LAYERS, STEPS = 256, 4, 6  # every weight is of its own in the store, none fits into `ram` for good
RAM = "48MiB"
_cases = {}


def case(useful):
    """`useful`: whether updates of the case can be foreseen; None: some can, and results say nothing of how many."""

    def add(function):
        _cases[function.__name__] = (function, useful)
        return function

    return add


def make_model(dtype):
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))
              for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers).to(dtype)


class Loop:
    """What a case is made of: a model, its optimizer, and a backward."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.told = model, optimizer, []

    def backward(self, batch, share=1.0):
        generator = torch.Generator().manual_seed(batch)
        data = torch.randn(8, WIDTH, generator=generator).to(next(self.model.parameters()).dtype)
        loss = (self.model(data) - data).square().mean() * share
        loss.backward()
        self.told.append(loss.item())

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


@case(useful=True)
def plain(loop):
    for step in range(STEPS):
        loop.backward(step)
        loop.step()


@case(useful=True)
def clipping_that_changes_nothing(loop):
    for step in range(STEPS):
        loop.backward(step)
        loop.told.append(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e6).item())
        loop.step()


@case(useful=None)
def clipping_that_is_active(loop):
    for step in range(STEPS):
        loop.backward(step)
        loop.told.append(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3).item())
        loop.step()


@case(useful=True)
def micro_batches(loop):
    for step in range(STEPS):
        for batch in range(3):
            loop.backward(3 * step + batch, share=1 / 3)
        loop.step()


@case(useful=True)
def scheduler(loop):
    schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
    for step in range(STEPS):
        loop.backward(step)
        loop.optimizer.step()
        schedule.step()
        loop.optimizer.zero_grad()


@case(useful=True)
def one_gradient_that_is_edited(loop):
    edited = loop.model[1][0].weight
    for step in range(STEPS):
        loop.backward(step)
        edited.grad[3].mul_(0.5)
        loop.step()


@case(useful=True)
def evaluation_and_state_between_backward_and_step(loop):
    for step in range(STEPS):
        loop.backward(step)
        with torch.no_grad():
            loop.told.append(loop.model(torch.ones(1, WIDTH, dtype=next(loop.model.parameters()).dtype)).double().sum().item())
            weights = loop.model[0][0].weight.clone()
            loop.told.append(weights.double().abs().sum().item())
        if step == 3:
            moments = loop.optimizer.state[loop.model[0][0].weight]
            loop.told.append(float(sum(moments[name].double().abs().sum() for name in ("exp_avg", "exp_avg_sq"))))
        loop.step()


@case(useful=None)
def steps_that_are_left_out(loop):
    for step in range(2 * STEPS):
        loop.backward(step)
        if step % 4 == 2:
            loop.optimizer.zero_grad()
        else:
            loop.step()


@case(useful=True)
def weight_that_is_written_before_the_step(loop):
    for step in range(STEPS):
        loop.backward(step)
        if step == 3:
            with torch.no_grad():
                loop.model[2][0].weight.mul_(0.5)
        loop.step()


@case(useful=False)
def rate_that_is_set_before_the_step(loop):
    for step in range(STEPS):
        loop.backward(step)
        loop.optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
        loop.step()


# ---- Running them ------------------------------------------------------------------------------


def run(function, dtype, attach):
    model = make_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    handle = attach(model, optimizer)
    loop = Loop(model, optimizer)
    function(loop)
    with torch.no_grad():
        weights = [parameter.detach().clone() for parameter in model.parameters()]
    ahead = None
    if attach is not in_memory_handle:
        status = handle.status()
        ahead = status["updates_ahead"]
        assert status["step"] == handle.step and status["plan"]["step"]["written_bytes"] > 0, status
    handle.close()
    return loop.told, weights, ahead


def in_memory_handle(model, optimizer):
    return in_memory.Handle([model], [optimizer], {"job": "memory"})


def check(name, dtype, folder):
    function, useful = _cases[name]
    expected, weights, _ = run(function, dtype, in_memory_handle)
    for mode in ("auto", "never"):
        def attach(model, optimizer):
            return offloadd.attach(model, optimizer, nvme_path=folder, ram=RAM, job=f"{name}-{dtype}-{mode}".replace("torch.", ""),
                                   update_in_backward=mode)
        told, got, ahead = run(function, dtype, attach)
        assert told == expected, f"{mode}: {told} instead of {expected}"
        assert all(torch.equal(a, b) for a, b in zip(got, weights)), f"{mode}: other weights"
        if mode == "never":
            assert ahead["used"] == ahead["lost"] == 0, ahead
        elif useful:
            assert ahead["used"] >= ahead["lost"], ahead  # both are 0 where the daemon has no time before the step
        elif useful is False:
            assert ahead["used"] == 0, ahead


def main():
    torch.set_num_threads(1)  # the other core is the daemon's
    names = sys.argv[1:] or list(_cases)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder:
        for name in names:
            for dtype in (torch.float32, torch.bfloat16):
                check(name, dtype, folder)
                print(f"{name} {dtype}: equal", flush=True)


if __name__ == "__main__":
    main()
