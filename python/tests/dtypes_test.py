"""Models of float64 and float16, whole and in part: what is trained with other types, and what is their own."""

import copy
import os
import sys

import torch
from torch.optim import SGD, AdamW

import modules_test  # noqa: its cases are declared
import training_test  # noqa
from battery import VOCABULARY, WIDTH, case, main, retype, states_of

# The ordinary loop with every optimizer, and what reads and writes gradients and weights.
retype(("fp64", "fp16"), {
    "adamw_fused", "adamw_fused_options", "adamw_fused_amsgrad", "adamw_fused_maximize", "adamw_fused_lr_tensor", "adamw_default", "adamw_lr_tensor",
    "adam_lr_tensor", "adagrad_lr_tensor", "adamw_foreach", "adamw_loop", "adamw_amsgrad", "adam_fused", "adam_fused_l2", "adam_l2",
    "adagrad_fused_options", "adagrad_default", "rmsprop", "rmsprop_options", "sgd", "sgd_momentum", "sgd_nesterov", "sgd_dampening",
    "step_of_a_subclass", "nadam", "lbfgs", "tied",
})
BOTH = {"types": ("fp64", "fp16")}


@case(**BOTH)
def resumed(run):
    return run.resumed(lambda model: AdamW(model.parameters(), 1e-3, amsgrad=True, fused=True), clip=0.1)


@case(**BOTH)
def gathered(run):
    """A weight, its master and its moments, with their types."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    handle = run.attach(model, optimizer)
    told = run.train(model, optimizer)
    parameters = [model.embed.weight, model.blocks[0].up.weight, model.norm.bias]
    return told, [[handle.gather(p, plane) for plane in ("weight", "master", "exp_avg", "exp_avg_sq")] for p in parameters]


@case(**BOTH)
def weights_that_are_written(run):
    """The master becomes what was written."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    handle = run.attach(model, optimizer)
    told = run.train(model, optimizer)
    with torch.no_grad():
        model.head.weight.mul_(0.9)
        model.blocks[0].first.bias.add_(0.25)
    model.embed.weight.data[3] = 0.125
    told.append([handle.gather(p, "master") for p in (model.head.weight, model.blocks[0].first.bias, model.embed.weight)])
    return told + run.train(model, optimizer, first=3)


@case(**BOTH)
def state_dict_goes_both_ways(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    told = run.train(model, optimizer)
    kept = {"model": {name: value.clone() for name, value in model.state_dict().items()}, "optimizer": copy.deepcopy(optimizer.state_dict())}
    told += run.train(model, optimizer, first=3)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    return told + run.train(model, optimizer, first=3), states_of(optimizer)


@case(**BOTH)
def weights_in_files(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    handle = run.attach(model, optimizer)
    told = run.train(model, optimizer)
    folder = os.path.join(run.folder, "weights")
    handle.save_weights(folder)
    told += run.train(model, optimizer, first=3)
    handle.load_weights(folder)
    return told + run.train(model, optimizer, first=3)


@case(types=("fp64", "fp32"))
def lr_tensor_of_float64(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), torch.tensor(0.0123, dtype=torch.float64), weight_decay=0.3)
    run.attach(model, optimizer)
    return run.train(model, optimizer)


@case(types=("fp64",))
def grad_scaler(run):
    """Overflow skips the step, the scale follows; in one form the gradients are unscaled first."""
    told = []
    for fused in (True, False):
        model = run.model()
        optimizer = AdamW(model.parameters(), 1e-3, fused=fused)
        run.attach(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        for step in range(4):
            loss = run.loss(model, step) * (float("inf") if step == 1 else 1)
            scaler.scale(loss).backward()
            if not fused:
                scaler.unscale_(optimizer)
                told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            told += [scaler.get_scale(), run.loss(model, step).item()]
    return told


@case(types=("fp16",))
def grad_scaler_of_float16(run):
    """Refused by torch itself; the next step is as if it had not been tried."""
    told = []
    for fused in (True, False):
        model = run.model()
        optimizer = AdamW(model.parameters(), 1e-3, fused=fused)
        run.attach(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        scaler.scale(run.loss(model, 9)).backward()
        try:
            scaler.step(optimizer)
        except ValueError as error:
            told.append(str(error))
        assert told and "FP16" in told[-1], told
        optimizer.zero_grad()
        told += run.train(model, optimizer)
    return told


@case(types=("fp32",))
def grad_scaler_under_autocast(run):
    """What mixed precision of float16 usually is: the weights are float32."""
    told = []
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)
    for step in range(6):
        with torch.autocast("cpu", torch.float16):
            loss = run.loss(model, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told += [loss.item(), scaler.get_scale()]
    assert min(told[1::2]) < 2.0**22, told  # steps were skipped
    return told


@case(types=("fp64",))
def sparse_embedding(run):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH, sparse=True), torch.nn.Linear(WIDTH, VOCABULARY)).to(run.dtype)
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    return run.train(model, optimizer)


class Mixed(torch.nn.Module):
    """A part of each type."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH).double()
        self.narrow, self.brain = torch.nn.Linear(WIDTH, 4 * WIDTH).half(), torch.nn.Linear(4 * WIDTH, WIDTH).bfloat16()
        self.norm, self.head = torch.nn.LayerNorm(WIDTH).double(), torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head((x + self.brain(self.narrow(x.half()).tanh().bfloat16())).double().add(self.norm(x)).float())


@case(types=("fp32",), memory=("floor", "double"))
def mixed(run):
    """Once with each memory, resumed."""
    told = []
    for make in (lambda p: AdamW(p, 1e-3, fused=True), lambda p: AdamW(p, 1e-3), lambda p: SGD(p, 0.1, momentum=0.9)):
        torch.manual_seed(0)
        model = Mixed()
        optimizer = make(model.parameters())
        handle = run.attach(model, optimizer)
        told += run.train(model, optimizer, clip=0.5), states_of(optimizer)
        told += [handle.gather(p, "master") for p in model.parameters()]
    return told


if __name__ == "__main__":
    sys.exit(main())
