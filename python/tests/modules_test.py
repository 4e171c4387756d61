"""What people's modules are and do: tied and frozen weights, buffers, casts, views, edits, lifetimes."""

import copy
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile

import safetensors.torch
import torch
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedulers

import offloadd
from offloadd import control
from offloadd.attachable import to_unfreeze
from battery import VOCABULARY, Lines, Transformer, case, copied_states_of, main, states_of


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
    def loss_of(step):
        return model(torch.randn(3, 16, generator=torch.Generator().manual_seed(step)).to(run.dtype)).float().pow(2).mean()

    return run.steps(optimizer, loss_of, steps=2, first=first)


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


@case(types=("fp32",), memory=("floor",))
def unfrozen_as_a_generator(run):
    model = run.model()
    model.blocks.requires_grad_(False)
    named = list(model.named_parameters())
    given, each = to_unfreeze(named, model.blocks[1].parameters()), to_unfreeze(named, ["blocks.1.*"])
    assert given and list(map(id, given)) == list(map(id, each))
    return [p.shape[0] for p in given]


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
    def loss_of(step):
        torch.manual_seed(step)
        return torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 12, 12)), torch.arange(4))

    told = run.steps(optimizer, loss_of)
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


class FrozenStatistics(torch.nn.Module):
    """As MAML's programs have them, for weights that are given: running statistics are frozen parameters, which torch's norms write, unsaid."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.first, self.last = norm, torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.weight, self.bias = torch.nn.Parameter(torch.ones(32)), torch.nn.Parameter(torch.zeros(32))
        self.mean = torch.nn.Parameter(torch.zeros(32), requires_grad=False)
        self.variance = torch.nn.Parameter(torch.ones(32), requires_grad=False)

    def forward(self, x):
        y = self.first(x).transpose(1, 2)
        given = (self.mean, self.variance, self.weight, self.bias)
        y = self.norm(y, *given, self.training) if self.training else torch.nn.functional.batch_norm(y, *given, False)
        return self.last(y.transpose(1, 2))


def statistics_in_frozen_parameters(norm):
    def function(run):
        model = run.make(lambda: FrozenStatistics(getattr(torch.nn.functional, norm)))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        run.attach(model, optimizer)
        told = []
        for step in range(4):
            x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(step)).to(run.dtype)
            model.train()
            loss = model(x).square().mean()
            loss.backward()
            with torch.no_grad():
                model(x + 1)
                model.eval()
                told += [loss.detach(), model(x)]
            optimizer.step()
            optimizer.zero_grad()
        return told, model.mean, model.variance

    function.__name__ = f"statistics_in_frozen_parameters_{norm}"
    case(function)


statistics_in_frozen_parameters("batch_norm")
statistics_in_frozen_parameters("instance_norm")


@case(types=("fp32",))
def recurrent(run):
    model = run.make(lambda: torch.nn.GRU(16, 24, batch_first=True))
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    def loss_of(step):
        torch.manual_seed(step)
        return model(torch.randn(2, 5, 16))[0].pow(2).mean()

    return run.steps(optimizer, loss_of)


@case(types=("fp32",))
def recurrent_of_long_memory(run):
    """All weights of its layers are operands of one operator."""
    model = run.make(lambda: torch.nn.LSTM(16, 24, num_layers=2, bidirectional=True, proj_size=8))
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)

    def loss_of(step):
        torch.manual_seed(step)
        return model(torch.nn.utils.rnn.pack_sequence([torch.randn(n, 16) for n in (5, 3, 3)]))[0].data.pow(2).mean()

    return run.steps(optimizer, loss_of)


@case(types=("fp32",))
def encoder_whose_evaluation_is_one_operator(run):
    model = run.make(lambda: torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 2))
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)

    def loss_of(step):
        torch.manual_seed(step)
        return model(torch.randn(2, 5, 16)).pow(2).mean()

    told = run.steps(optimizer, loss_of)
    model.eval()
    with torch.no_grad():
        return told, model(torch.ones(2, 5, 16), src_key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))


@case(types=("fp32",))
def embedding_bag_and_dropout(run):
    model = run.make(lambda: torch.nn.Sequential(torch.nn.EmbeddingBag(100, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 2)))
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    def loss_of(step):
        torch.manual_seed(step)
        return torch.nn.functional.cross_entropy(model(torch.randint(100, (4, 6))), torch.tensor([0, 1, 0, 1]))

    return run.steps(optimizer, loss_of)


def train_sparse(run, make):
    model = run.make(lambda: torch.nn.Sequential(torch.nn.Embedding(400, 96, sparse=True), torch.nn.Linear(96, 8)))
    optimizer = make(model.parameters())
    run.attach(model, optimizer)
    def loss_of(step):  # indices come several times
        ids = torch.randint(30, (4, 9), generator=torch.Generator().manual_seed(step))
        return model(ids).float().pow(2).mean() * (1e4 if step == 2 else 1)

    return run.steps(optimizer, loss_of, steps=4)


@case(types=("fp32",))
def sparse_gradients(run):
    return train_sparse(run, lambda p: SGD(p, 0.7))


@case(types=("fp32",))
def sparse_gradients_maximized(run):
    return train_sparse(run, lambda p: SGD(p, 0.001, maximize=True))


@case(types=("fp32", "fp64"))
def sparse_adagrad(run):
    """torch falls back to its loop for all parameters of a step where one gradient is sparse."""
    return train_sparse(run, lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1, initial_accumulator_value=0.1))


@case(types=("fp32",))
def sparse_adagrad_maximized_and_continued(run):
    def make():
        model = run.make(lambda: torch.nn.Sequential(torch.nn.Embedding(400, 96, sparse=True), torch.nn.Linear(96, 8)))
        optimizer = torch.optim.Adagrad(model.parameters(), 0.01, maximize=True, eps=1e-6)
        if run.offloaded or not run.handles:
            run.attach(model, optimizer, job="sparse")
        return model, optimizer

    def loss_of(step):
        return model(torch.randint(30, (4, 9), generator=torch.Generator().manual_seed(step))).pow(2).mean()

    model, optimizer = make()
    told = run.steps(optimizer, loss_of)
    if run.offloaded:
        run.end()
        model, optimizer = make()
    return told + run.steps(optimizer, loss_of, first=3), copied_states_of(optimizer)


@case(refused=1601, types=("fp32",), memory=("floor",))
def sparse_gradients_with_decay_of_adagrad_are_refused(run):
    train_sparse(run, lambda p: torch.optim.Adagrad(p, 0.1, weight_decay=0.1))


@case(types=("fp32",))
def sparse_adam(run):
    model = run.make(lambda: torch.nn.Embedding(400, 96, sparse=True))
    optimizer = torch.optim.SparseAdam(list(model.parameters()), 0.01)
    run.attach(model, optimizer)
    for step in range(3):
        model(torch.arange(3 * step, 3 * step + 7)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def continue_sparse(run, make, build=None):
    """Steps, the end of the job, and more steps of it; weights, losses and what the optimizer keeps."""
    def begin():
        model = run.make(build or (lambda: torch.nn.Sequential(torch.nn.Embedding(400, 96, sparse=True), torch.nn.Linear(96, 8))))
        optimizer = make(model)
        if run.offloaded or not run.handles:
            run.attach(model, optimizer, job="sparse")
        return model, optimizer

    def loss_of(step):
        ids = torch.randint(30 + step, (4, 9), generator=torch.Generator().manual_seed(step))
        return model(ids).float().pow(2).mean()

    model, optimizer = begin()
    told = run.steps(optimizer, loss_of, steps=3)
    if run.offloaded:
        run.end()
        model, optimizer = begin()
        assert run.handles[-1].step == 3
    kept = [[value.to_dense() if value.is_sparse else value for value in state.values()] for state in optimizer.state_dict()["state"].values()]
    return told + run.steps(optimizer, loss_of, first=3), kept


@case(types=("fp32", "fp64"))
def sparse_gradients_with_momentum(run):
    """torch keeps a sparse buffer, whose elements it adds one by one."""
    return continue_sparse(run, lambda model: SGD(model.parameters(), 0.1, momentum=0.9))


@case(types=("fp32",))
def sparse_gradients_with_momentum_of_nesterov_in_one_group(run):
    def make(model):
        return SGD([{"params": model[0].parameters(), "momentum": 0.9, "nesterov": True, "maximize": True}, {"params": model[1].parameters()}], 0.001)

    return continue_sparse(run, make)


@case(types=("fp32",))
def sparse_bag_with_dampening_beside_adamw(run):
    model = run.make(lambda: torch.nn.Sequential(torch.nn.EmbeddingBag(400, 96, sparse=True), torch.nn.Linear(96, 8)))
    sparse = SGD(model[0].parameters(), 0.1, momentum=0.9, dampening=0.5)
    dense = torch.optim.AdamW(model[1].parameters(), 0.01, fused=True)
    run.attach(model, [sparse, dense])
    told = []
    for step in range(4):
        loss = model(torch.randint(30, (4, 9), generator=torch.Generator().manual_seed(step))).pow(2).mean()
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
        told.append(loss.item())
    return told


@case(types=("bf16",))
def sparse_gradients_with_momentum_of_narrow_types(run):
    """bfloat16 takes their dense sum, whose buffers are the job's."""
    return train_sparse(run, lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.1))


@case(types=("bf16",))
def sparse_adagrad_of_narrow_types(run):
    return train_sparse(run, lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1))


@case(types=("bf16",))
def sparse_gradients_of_narrow_types(run):
    return train_sparse(run, lambda p: SGD(p, 0.1))


class Unannounced(torch.nn.Module):
    """Sparse gradients of an operator, of which no module says so; dense ones before `begins`."""

    def __init__(self, begins=0):
        super().__init__()
        self.table, self.out = torch.nn.Parameter(torch.randn(400, 96)), torch.nn.Linear(96, 8)
        self.begins = begins
        self.count = 0

    def forward(self, ids):
        self.count += 1
        return self.out(torch.nn.functional.embedding(ids, self.table, sparse=self.count > self.begins))


@case(types=("fp32", "fp64"))
def sparse_gradients_that_nothing_announces(run):
    return continue_sparse(run, lambda model: SGD(model.parameters(), 0.1, momentum=0.9), Unannounced)


@case(types=("fp32",), memory=("1GiB",))
def sparse_gradients_after_dense_ones(run):
    """What was kept until then comes to this process."""
    model = run.make(lambda: Unannounced(begins=2))
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run.attach(model, optimizer)
    former_step = optimizer.step
    told = []
    for step in range(5):
        loss = model(torch.randint(30, (4, 9), generator=torch.Generator().manual_seed(step))).pow(2).mean()
        loss.backward()
        (former_step if step == 4 else optimizer.step)()
        optimizer.zero_grad()
        scheduler.step()
        told += [loss.item(), scheduler.get_last_lr()]
    return told, states_of(optimizer)


@case(refused=1601, types=("fp32",), memory=("floor",))
def sparse_gradients_with_decay_are_refused(run):
    train_sparse(run, lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.1))


@case(refused=1601, types=("fp32",), memory=("floor",))
def sparse_gradients_of_adamw_are_refused(run):
    train_sparse(run, lambda p: torch.optim.AdamW(p, 0.1))


@case(refused=1601, types=("bf16",), memory=("floor",))
def sparse_gradients_that_nothing_announces_beside_masters_are_refused(run):
    model = run.make(lambda: torch.nn.ModuleList([Unannounced(), torch.nn.Linear(8, 8)]))
    model[0].float()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    run.attach(model, optimizer)
    run.steps(optimizer, lambda step: model[1](model[0](torch.arange(4)).to(run.dtype)).float().pow(2).mean())


@case(types=("fp32",))
def parametrizations(run):
    model = run.make(lambda: torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 16)),
                                                 torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(16, 16))))
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    def loss_of(step):
        torch.manual_seed(step)
        return model(torch.randn(4, 16)).pow(2).mean()

    return run.steps(optimizer, loss_of)


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
        told += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
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
def gathered_where_storages_were_given(run):
    """`p.data = x` before handle.gather(p): what the program has, also before a step takes it."""
    model = run.model(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    handle = run.attach(model, optimizer)
    told = run.train(model, optimizer, steps=2)
    weight, bias = model.head.weight, model.norm.bias
    backup = weight.data
    weight.data = weight.detach() * 0.5
    bias.data = bias.detach().clone()
    told += [handle.gather(p, plane) for p in (weight, bias) for plane in ("weight", "master")]
    weight.data = backup
    del backup
    return told, [handle.gather(p, plane) for p in (weight, bias) for plane in ("weight", "master")], run.train(model, optimizer, first=2)


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
    def loss_of(step):
        ids = run.batch(step) % 64
        return torch.nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())

    return run.steps(optimizer, loss_of)


@case(refused=1601, types=("fp32",), memory=("floor",))
def parameter_that_is_a_part_of_somebodys_tensor_is_refused(run):
    model = torch.nn.Linear(8, 8)
    whole = torch.zeros(16, 8)
    model.weight = torch.nn.Parameter(whole[:8])
    run.attach(model, SGD(model.parameters(), 0.1))


@case
def parts_of_wider_memory_that_parameters_were_given(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    wide = [torch.zeros(2 * p.numel(), dtype=p.dtype) for p in model.parameters()]
    for p, value in zip(model.parameters(), wide):
        p.data = value[:p.numel()].view_as(p)
    told = run.train(model, optimizer)
    for value in wide:
        value.add_(0.01)
    return told, run.train(model, optimizer, first=3), wide


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


@case
def values_of_a_module_that_lives_on(run):
    """`p.data = q.data`, as callbacks put back the weights of a copy that they keep: both are one from then on."""
    model = run.model(layers=1)
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    kept = copy.deepcopy(model)
    told = run.train(model, optimizer, 2)
    for p, q in zip(model.parameters(), kept.parameters()):
        p.data = q.data
    for step in range(2, 4):
        told += run.train(model, optimizer, 1, first=step)
        told += [q.detach().clone() for q in kept.parameters()] + [run.loss(kept, step).item()]
    run.loss(kept, 4).backward()
    for q in kept.parameters():
        q.data.sub_(q.grad, alpha=0.1)
    for p, q in zip(model.parameters(), kept.parameters()):
        p.data = q.data  # as it is
    return told + run.train(model, optimizer, 1, first=4) + [q.detach().clone() for q in kept.parameters()]


@case(refused=1601)
def values_of_a_parameter_of_the_job_are_refused(run):
    model = run.model(layers=2)
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    model.blocks[0].up.weight.data = model.blocks[0].up.weight.data * 0.5
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data
    return run.train(model, optimizer, 1)


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


class Spectral(torch.nn.Module):
    def __init__(self, is_real):
        super().__init__()
        weight = torch.view_as_complex(torch.randn(8, 8, 2))
        self.weight = torch.nn.Parameter(torch.view_as_real(weight).clone() if is_real else weight)

    def forward(self, x):
        return (x + 1j * x) @ (self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight))


@case(types=("fp32",), memory=("floor",))
def normed_behind_its_optimizer_is_told_of(run):
    """The optimizer has the weight that the layer had, over the memory of the one that it has now."""
    if not run.offloaded:
        return
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1)
    torch.nn.utils.parametrizations.weight_norm(model.head)
    try:
        run.attach(model, optimizer)
    except offloadd.Error as error:
        assert error.id == 1601 and "make the optimizer after that" in str(error), error
        run.models.clear()
    else:
        raise AssertionError("attached")


@case(refused=1601, types=("fp32",), memory=("floor",))
def complex_weights_are_refused(run):
    model = Spectral(is_real=False)
    try:
        run.attach(model, AdamW(model.parameters()))
    except offloadd.Error as error:
        assert "torch.view_as_real()" in str(error) and "model.float()" not in str(error), error
        raise


@case(types=("fp32",))
def complex_weights_as_real_ones(run):
    """The way out that the refusal names."""
    model = run.make(lambda: Spectral(is_real=True))
    optimizer = AdamW(model.parameters(), 1e-2)
    run.attach(model, optimizer)
    return run.steps(optimizer, lambda step: model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).abs().sum())


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


def _trained(run):
    model = run.model()
    run.attach(model, optimizer := AdamW(model.parameters()))
    return model, optimizer, run.train(model, optimizer)


@case(types=("fp32",))
def moved_to_meta_when_it_is_trained(run):
    model, _, told = _trained(run)
    told.append([parameter.detach().clone() for parameter in model.parameters()])
    model.to("meta")
    run.models.clear()
    return told, [parameter.is_meta for parameter in model.parameters()]


@case(refused=1601, types=("fp32",), memory=("floor",))
def step_of_a_model_that_was_moved_to_meta_is_refused(run):
    model, optimizer, _ = _trained(run)
    run.loss(model, 3).backward()
    model.blocks[0].to("meta")
    optimizer.step()


@case
def emptied_and_made_anew(run):
    """What is there in between is anything."""
    model, optimizer, told = _trained(run)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    return told + run.train(model, optimizer, first=3)


@case(refused=1205, types=("fp32",), memory=("floor",))
def one_job_twice_is_refused(run):
    model, other = run.model(), run.model()
    run.attach(model, AdamW(model.parameters()), job="same")
    run.attach(other, AdamW(other.parameters()), job="same")


def in_phases(run, ends=()):
    """A model with statistics and a part that is frozen at first is attached for each phase, to the same job, with an optimizer that is new; gradients
    that no optimizer has taken stay. After each phase in `ends` everything is closed, as if the run was killed, and begins again."""
    made = [lambda ps: AdamW(ps, lr=1e-2), lambda ps: SGD(ps[:2], 0.1, momentum=0.9), lambda ps: AdamW(ps, lr=1e-2)]
    model = run.make(lambda: torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU(), torch.nn.Linear(64, 4)))
    model[3].weight.requires_grad_(False)
    for phase, make in enumerate(made):
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        handle = run.attach(model, optimizer, job="phases")
        for step in range(handle.step, 3):
            model(torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * phase + step)).to(run.dtype)).float().pow(2).mean().backward()
            optimizer.step()
            (model if ends else optimizer).zero_grad()
        if phase in ends and run.offloaded:
            del handle, optimizer, model
            run.end()
            gc.collect()
            return in_phases(run, [each for each in ends if each != phase] or [len(made)])
        model[3].weight.requires_grad_(True)
    assert not run.offloaded or handle.job == "phases-3", handle.job
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    run.end()
    return values


@case(types=("fp32", "bf16", "fp64"))
def attached_again_with_another_optimizer(run):
    return in_phases(run)


@case(types=("fp32", "bf16"), memory=("floor",))
def attached_again_with_another_optimizer_in_runs_that_are_ended(run):
    return in_phases(run, [0, 1])


@case(types=("fp32",), memory=("floor",))
def attached_again_behind_a_job_that_had_no_step(run):
    """The second job was made by a run before, which had other weights then."""
    model = run.model()
    for weight in (0.5, 0.25):
        torch.nn.init.constant_(next(model.parameters()), weight)
        run.attach(model, AdamW(model.parameters()), job="first")
        optimizer = AdamW(model.parameters())
        run.attach(model, optimizer, job="first")
        if weight == 0.5:
            for handle in run.handles:
                handle.close()
            run.handles.clear()
            if run.offloaded:
                control.run("rm", run.folder, "first", "--yes")
            model = run.model()
    told = run.train(model, optimizer)
    weights = [p.detach().clone() for p in model.parameters()]
    run.end()
    return told, weights


@case(refused=1802, types=("fp32",), memory=("floor",))
def step_of_an_optimizer_that_another_has_followed_is_refused(run):
    model = run.model()
    before = AdamW(model.parameters())
    run.attach(model, before, job="first")
    run.attach(model, AdamW(model.parameters()), job="first")
    run.loss(model, 0).backward()
    try:
        before.step()
    except offloadd.Error as error:
        assert "to job first-2" in str(error), error
        raise


@case(refused=1205, types=("fp32",), memory=("floor",))
def optimizer_of_other_parameters_beside_one_is_refused(run):
    model = run.model()
    for parameters in (list(model.parameters())[:3], list(model.parameters())[3:]):
        run.attach(model, AdamW(parameters), job="same")


@case(refused=1205, types=("fp32",), memory=("floor",))
def attached_again_with_many_gradients_is_refused(run):
    model = run.make(lambda: torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(10))))
    run.attach(model, AdamW(model.parameters()), job="large")
    model(torch.ones(2, 1024)).mean().backward()
    run.attach(model, AdamW(model.parameters()), job="large")


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


@case(types=("fp32",), memory=("floor",))
def closed_when_its_pool_is_gone(run):
    if not run.offloaded:
        return
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    pool = os.path.join(run.folder, "gone")
    os.mkdir(pool)
    handle = run.attach(model, optimizer, nvme_path=pool)
    run.train(model, optimizer, 2)
    handle.wait_durable()
    shutil.rmtree(pool)
    try:
        handle.close()
    except offloadd.Error as error:
        assert error.id == 1207 and f"{pool}/" in str(error) and "what the job has trained is gone" in str(error), error
        assert "durable" not in str(error), error
    else:
        raise AssertionError("nothing was said")
    assert not os.path.exists(pool)


def daemon_that_is_gone(ends):
    """A case: it is killed before the job is closed, which says what is durable; `ends` closes the handle it is given, with an error of its own."""

    def function(run):
        if not run.offloaded:
            return
        model = run.model()
        optimizer = AdamW(model.parameters(), 1e-3, fused=True)
        handle = run.attach(model, optimizer, weights_at_close="memory" if ends == "memory" else "released")
        run.train(model, optimizer, 2)
        handle.wait_durable()
        run.train(model, optimizer, 1, first=2)
        os.kill(handle._engine.daemon_pid(), signal.SIGKILL)
        with Lines() as lines:
            try:
                if ends in ("close", "memory"):
                    handle.close()
                else:
                    with handle:
                        if ends == "with_another_error":
                            raise ValueError("its own")
            except offloadd.Error as error:
                assert ends != "with_another_error" and error.id == 1801, error
                said = str(error)
            except ValueError:
                said, = [line for line in lines if "OFD-1801" in line]
        assert "of its 3 steps the first 2 are durable for sure" in said or "all its 3 steps are durable" in said, said
        assert said.endswith("it continues at the last step that is durable.") and ("not all in memory" in said) == (ends == "memory"), said
        assert not handle.is_open
        handle.close()  # there is nothing more to it
        model = run.model()
        handle = run.attach(model, AdamW(model.parameters(), 1e-3, fused=True), job=handle.job)
        assert handle.step in (2, 3), handle.step

    function.__name__ = f"closed_when_its_daemon_is_gone_{ends}"
    case(function, types=("fp32",), memory=("floor",))


for ends in ("close", "memory", "with", "with_another_error"):
    daemon_that_is_gone(ends)


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
        def loss_of(step):
            torch.manual_seed(step)
            return torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.arange(4))

        return run.steps(optimizer, loss_of, steps=2, first=first)

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
        told.extend(run.steps(optimizer, lambda step: model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).pow(2).mean(), first=first))
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


class Queue(torch.nn.Linear):
    """What it was called with before is in no state_dict(); a table that its first pass fills is not either."""

    def __init__(self, is_assigned):
        super().__init__(8, 8)
        self.register_buffer("queue", torch.zeros(8), persistent=False)
        self.register_buffer("table", torch.empty(0), persistent=False)
        self.is_assigned = is_assigned

    def forward(self, x):
        if self.table.numel() == 0:
            self.table = torch.arange(8.0)
        y = super().forward(x) - self.queue + self.table
        if self.is_assigned:  # twice: a step finds another tensor where the one of the step before was
            self.queue = self.queue.clone()
            self.queue = self.queue.lerp(y.detach().mean(0), 0.1)
        else:
            self.queue.lerp_(y.detach().mean(0), 0.1)
        return y


def one_buffer_is_told_of(run, model, name, why):
    """In one line of its training."""
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    with Lines() as lines:
        told = run.steps(optimizer, lambda step: model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).pow(2).mean(), steps=4)
    if run.offloaded:
        assert [line.split()[2] for line in lines if why in line] == [name], lines
    return told


def buffers_that_are_not_persistent_and_change_are_told_of(run, is_assigned):
    model = run.make(lambda: Queue(is_assigned))
    told = one_buffer_is_told_of(run, model, "queue", "persistent=False")
    return told, model.queue


@case(types=("fp32",), memory=("floor",))
def buffers_that_are_not_persistent_and_change_are_told_of_once(run):
    return buffers_that_are_not_persistent_and_change_are_told_of(run, is_assigned=False)


@case(types=("fp32",), memory=("floor",))
def buffers_that_are_not_persistent_and_assigned_anew_are_told_of_once(run):
    return buffers_that_are_not_persistent_and_change_are_told_of(run, is_assigned=True)


class Spectrum(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("table", torch.ones(8, dtype=torch.complex64))
        self.register_buffer("spectrum", torch.zeros(5, dtype=torch.complex64))

    def forward(self, x):
        y = super().forward(x)
        self.spectrum.mul_(0.9).add_(torch.fft.rfft(y.detach()).mean(0), alpha=0.1)
        return y + torch.fft.irfft(self.spectrum, 8) * self.table.real


@case(types=("fp32",), memory=("floor",))
def buffers_of_types_that_the_job_does_not_have_are_told_of(run):
    torch.manual_seed(0)
    model = Spectrum()  # casts would make it real
    told = one_buffer_is_told_of(run, model, "spectrum", "and is torch.complex64")
    return told, torch.view_as_real(model.spectrum)


@case(types=("fp32",), memory=("floor",))
def masks_of_pruning_are_told_of_in_one_line(run):
    """A module has one each."""
    from torch.nn.utils import prune

    model = run.make(lambda: torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)], torch.nn.Bilinear(8, 8, 4)))
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    told = []
    with Lines() as lines:
        for step in range(3):
            if step == 1:
                for layer in model:
                    prune.l1_unstructured(layer, "weight", 0.3)
            x = model[:4](torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
            loss = model[4](x, x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
    if run.offloaded:
        assert [("of a Linear, and of 3 more," in line, "of a Bilinear was" in line) for line in lines if "was not there" in line] == [
            (True, False), (False, True)], lines
    return told


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


class Questioned(Transformer):
    """Has a length, which is 0."""

    def __len__(self):
        return 0


@case(types=("fp32",))
def models_whose_truth_is_not_asked_for(run):
    """Of a compiled one there is none; both are models of a job that ends."""
    models = [run.model(layers=1), run.make(lambda: Questioned(1))]
    if run.offloaded:
        models[0] = torch.compile(models[0])
    told = []
    for model in models:
        optimizer = AdamW(model.parameters(), 1e-3, fused=True)
        told.append(run.train(model, optimizer) if not run.offloaded else _train_and_close(run, model, optimizer))
    return told


def _train_and_close(run, model, optimizer):
    handle = run.attach(model, optimizer, weights_at_close="memory")
    told = run.train(model, optimizer)
    handle.close()
    again = handle.last_step, offloadd.attach(model, optimizer, nvme_path=run.folder, ram="128MiB", job=handle.job)
    assert (again[0], again[1].step) == (3, 3), again
    again[1].close()
    return told


@case(types=("fp32",), memory=("double",))
def operators_over_functions_are_refused(run):
    """torch.cond() and its like, whose functions' weights would get no gradients."""
    from torch._higher_order_ops.scan import scan
    model = run.model(layers=1)
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    weight = next(model.parameters())
    if run.offloaded:
        x = torch.ones(3, weight.shape[-1])
        calls = {"cond": lambda: torch.cond(x.sum() > 0, lambda x: x @ weight.t(), lambda x: -x @ weight.t(), (x,)),
                 "scan": lambda: scan(lambda carry, row: (carry + row, (row * weight[0]).clone()), x[0], x)}
        for name, call in calls.items():
            try:
                call()
                raise AssertionError(name)
            except offloadd.Error as error:
                assert error.id == 1601 and f"torch's {name}()" in str(error) and "ordinary if" in str(error), error
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
