"""All micro-batches of a block before the next: offloaded like that, in memory one after the other, and the same bits."""

import sys

import torch
from torch.nn.functional import cross_entropy

import offloadd
from battery import VOCABULARY, Transformer, case, main

MICRO_BATCHES = 4


def batches(step, count=MICRO_BATCHES):
    torch.manual_seed(50 + step)
    return [torch.randint(0, VOCABULARY, (2, 5 + m)) for m in range(count)]


def loss_of(logits, ids, count):
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()) / count


def both_orders(run, model, blocks, optimizer, steps=3, count=MICRO_BATCHES, **options):
    told = []
    for step in range(steps):
        ids = batches(step, count)
        if run.offloaded:
            losses = offloadd.vertical_backward(model, blocks, ids, lambda output, m: loss_of(output, ids[m], count), **options)
        else:
            losses = []
            for each in ids:
                loss = loss_of(model(each), each, count)
                loss.backward()
                losses.append(loss.detach())
        told += [losses, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    return told


def blocks_of(model):
    return [model.embed, *model.blocks, lambda x: model.head(model.norm(x))]


@case
def transformer(run):
    model = run.model(layers=3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return both_orders(run, model, blocks_of(model), optimizer)


@case
def one_micro_batch_with_tied_weights(run):
    model = run.model(tied=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run.attach(model, optimizer)
    return both_orders(run, model, blocks_of(model), optimizer, count=1)


@case
def frozen_below(run):
    model = run.model(layers=3)
    for part in (model.embed, model.blocks[0]):
        part.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, fused=True)
    run.attach(model, optimizer)
    return both_orders(run, model, blocks_of(model), optimizer)


class Normalized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), torch.nn.Flatten(0, 1), torch.nn.BatchNorm1d(32), torch.nn.ReLU(inplace=True),
                                          torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32, momentum=None), torch.nn.Unflatten(0, (2, -1)),
                                          torch.nn.Linear(32, VOCABULARY))

    def forward(self, ids):
        return self.layers(ids)


@case(types=("fp32",))
def batch_norm_in_a_sequence(run):
    model = run.make(Normalized)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    return both_orders(run, model, model.layers, optimizer), [each.clone() for each in model.buffers()]


def refused(text, make_blocks, **options):
    """A case whose blocks are refused in memory, too."""
    def declare(name):
        def function(run):
            model = run.model(**options)
            run.attach(model, torch.optim.SGD(model.parameters(), 0.1))
            ids = batches(0)
            try:
                offloadd.vertical_backward(model, make_blocks(model), ids, lambda output, m: loss_of(output, ids[m], MICRO_BATCHES))
            except offloadd.Error as error:
                assert error.id == 1002 and text in str(error), error
                return True
            raise AssertionError("not refused")

        function.__name__ = name
        case(function, types=("fp32",), memory=("floor",))

    return declare


def with_dropout(model):
    return [model.embed, torch.nn.Dropout(0.1), *model.blocks, lambda x: model.head(model.norm(x))]


def with_a_count(model):
    calls = []
    return [model.embed, lambda x: (calls.append(1), x * len(calls))[1], *model.blocks, lambda x: model.head(model.norm(x))]


refused("block 1 draws random numbers", with_dropout)("dropout_is_refused")
refused("parameter 'embed.weight' is of blocks 0 and 3", blocks_of, tied=True)("tied_weights_are_refused")
refused("block 1 computed something else the second time", with_a_count)("state_is_refused")
refused("there are no blocks", lambda model: [])("no_blocks_are_refused")
refused("block 0 gives tuple, no tensor", lambda model: [lambda x: (model.embed(x),), *blocks_of(model)[1:]])("tuples_are_refused")


@case(types=("fp32",))
def dropout_drops_the_same_twice(run):
    """With its own order of random numbers: that of a forward of every block over all micro-batches."""
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    ids, blocks = batches(0), with_dropout(model)
    torch.manual_seed(3)
    if run.offloaded:
        losses = offloadd.vertical_backward(model, blocks, ids, lambda output, m: loss_of(output, ids[m], MICRO_BATCHES), exact=False)
    else:
        values = ids
        for block in blocks:
            values = [block(value) for value in values]
        losses = [loss_of(value, each, MICRO_BATCHES) for value, each in zip(values, ids)]
        for loss in losses:
            loss.backward()
    optimizer.step()
    return losses, torch.randn(2)


if __name__ == "__main__":
    sys.exit(main())
