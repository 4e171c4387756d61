"""Accumulation of gradients that reads each weight twice a step, however many micro-batches there are.

Micro-batches one after the other carry every weight from the drive for every one of them. A model that is a sequence of blocks can go
through them the other way: all micro-batches through a block before the next block. What is kept between blocks are their outputs; each
block is computed again in the backward, as with checkpointed activations.
"""

import torch

from .errors import Error

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def vertical_backward(model, blocks, inputs, loss, *, exact=True):
    """Forward and backward of the micro-batches `inputs` through `blocks` of `model`; gradients are added to `.grad`.

        losses = offloadd.vertical_backward(model, [model.embed, *model.layers, model.head], micro_batches,
                                            lambda output, m: criterion(output, targets[m]) / len(targets))
        optimizer.step()

    stands for `for m, x in enumerate(micro_batches): loss(model(x), m).backward()`, bit for bit. A block is a module, or a function, of
    the tensor that the block before gave; `loss` makes a scalar of the last one's output. Returns the losses, detached. Works offloaded and
    in memory.

    Random numbers that a block draws (dropout) would be drawn in another order, and the gradients of a parameter of two blocks (tied
    embeddings) be added in another order: with more than one micro-batch both are refused, unless `exact` is False. offloadd.Error
    (OFD-1002) for these, and for a block that computes something else the second time; gradients are then those of a backward that was
    broken off: zero_grad().
    """
    blocks, inputs = list(blocks), list(inputs)
    if not blocks:
        _refuse("there are no blocks", "Give at least one")
    for number, block in enumerate(blocks):
        if not callable(block):
            _refuse(f"block {number} is {type(block).__name__}, no function", "Give modules, or functions of one tensor")
    for number, micro_batch in enumerate(inputs):
        if not isinstance(micro_batch, torch.Tensor):
            _refuse(f"micro-batch {number} is {type(micro_batch).__name__}, no tensor",
                    "Give the tensor that the first block takes; what else it needs, a function as block may close over")
    return _Pass(model, blocks, inputs, loss, exact).run() if inputs else []


def _refuse(what, way_out):
    raise Error(f"OFD-1002 vertical_backward: {what}. {way_out}.")


def _same_bits(a, b):
    """Also where both are the same NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point and a.element_size() in _BITS:
        a, b = a.view(_BITS[a.element_size()]), b.view(_BITS[b.element_size()])
    return torch.equal(a, b)


class _RandomNumbers:
    """torch's generators that blocks on the CPU, and on the device of their inputs, draw from."""

    def __init__(self, inputs):
        self.device = next((each.device for each in inputs if each.device.type not in ("cpu", "meta")), None)
        self.module = torch.get_device_module(self.device) if self.device is not None else None

    def save(self):
        return [torch.get_rng_state()] + ([self.module.get_rng_state(self.device)] if self.module else [])

    def restore(self, states):
        torch.set_rng_state(states[0])
        if self.module:
            self.module.set_rng_state(states[1], self.device)

    def drawn_since(self, states):
        return not all(torch.equal(a, b) for a, b in zip(states, self.save()))


class _Buffers:
    """Those that a block may change."""

    def __init__(self, module):
        self.buffers = list(module.buffers())
        self.known = [buffer.detach().clone() for buffer in self.buffers]

    def take_changes(self):
        """What has changed since the last call, by number, as it was before."""
        before = {}
        for number, buffer in enumerate(self.buffers):
            if not _same_bits(buffer, self.known[number]):
                before[number], self.known[number] = self.known[number], buffer.detach().clone()
        return before

    @torch.no_grad()
    def set(self, values):
        for number, value in values:
            if not _same_bits(self.buffers[number], value):
                self.buffers[number].copy_(value)


def _parameters_behind(output):
    """Those whose gradients a backward from `output` adds to."""
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [each for each, _ in node.next_functions]


class _Pass:
    def __init__(self, model, blocks, inputs, loss, exact):
        self.model, self.blocks, self.inputs, self.loss, self.exact = model, blocks, inputs, loss, exact
        self.random = _RandomNumbers(inputs)
        self.kept = [list(inputs)] + [[None] * len(inputs) for _ in blocks[1:]]  # inputs, by block and micro-batch
        self.found = [[] for _ in blocks]  # random numbers and changed buffers, likewise
        self.needs_gradient = [False] * len(blocks)  # of a block's input
        self.gradients, self.outputs = [None] * len(inputs), [None] * len(inputs)  # of the block at hand
        self.owners = {}
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}

    def run(self):
        last = len(self.blocks) - 1
        for block in range(last):
            self.forward(block)
        losses = self.backward_from_losses(last)
        end = self.random.save()
        for block in reversed(range(last)):
            if not self.backward(block):
                break
        self.random.restore(end)
        return losses

    def module_of(self, block):
        return self.blocks[block] if isinstance(self.blocks[block], torch.nn.Module) else self.model

    def input_of(self, block, m):
        """A leaf, where a gradient has to come to it."""
        return self.kept[block][m] if block == 0 else self.kept[block][m].detach().requires_grad_(self.needs_gradient[block])

    def compute(self, block, value):
        output = self.blocks[block](value.clone())  # blocks may write into what they are given
        if not isinstance(output, torch.Tensor):
            _refuse(f"block {block} gives {type(output).__name__}, no tensor",
                    "Give a function that picks the tensor for the next block: lambda x: layer(x)[0]")
        return output

    def forward(self, block):
        """The graphs are dropped: they are made again when the backward comes here."""
        buffers = _Buffers(self.module_of(block))
        for m in range(len(self.inputs)):
            states, value = self.random.save(), self.input_of(block, m)
            output = self.compute(block, value)
            self.found[block].append((states, buffers.take_changes()))
            self.check(block, m, states, value, output)
            self.needs_gradient[block + 1] = output.requires_grad
            self.kept[block + 1][m] = output.detach()

    def backward_from_losses(self, block):
        losses = []
        for m in range(len(self.inputs)):
            states, value = self.random.save(), self.input_of(block, m)
            loss = self.loss(self.compute(block, value), m)
            self.check(block, m, states, value, loss)
            losses.append(loss.detach())
            loss.backward()
            self.keep(block, m, value)
        return losses

    def backward(self, block):
        """False when nothing before this block has a gradient."""
        if not any(gradient is not None for gradient in self.gradients):
            return False
        buffers = _Buffers(self.module_of(block))
        for m in range(len(self.inputs)):
            gradient, expected = self.gradients[m], self.outputs[m]
            self.gradients[m] = self.outputs[m] = None
            if gradient is None:
                continue
            self.random.restore(self.found[block][m][0])
            as_found = {}  # of the buffers that this or a later micro-batch changed
            for _, before in reversed(self.found[block][m:]):
                as_found.update(before)
            buffers.set(as_found.items())
            value = self.input_of(block, m)
            output = self.compute(block, value)
            if not _same_bits(output, expected):
                _refuse(f"block {block} computed something else the second time for micro-batch {m}",
                        "A block's output must depend on its input, on weights, on buffers of its module and on torch's default generator only; "
                        "leave a model with other state to micro-batches one after the other")
            torch.autograd.backward([output], [gradient])
            self.keep(block, m, value)
        buffers.set(enumerate(buffers.known))
        return True

    def keep(self, block, m, value):
        """The gradient that the backward has left at a block's input, for the block before."""
        if block > 0:
            self.kept[block][m] = None
            if self.needs_gradient[block]:
                self.gradients[m], self.outputs[m] = value.grad, value.detach()

    def check(self, block, m, states, value, output):
        if not self.exact:
            return
        if len(self.inputs) > 1 and self.random.drawn_since(states):
            _refuse(f"block {block} draws random numbers (dropout?), which micro-batches one after the other would draw in another order",
                    "Pass exact=False to train with these numbers, or take the micro-batches one after the other")
        if m > 0:
            return
        for parameter in _parameters_behind(output):
            _, owner = self.owners.setdefault(id(parameter), (parameter, block))  # kept, so that nothing else gets its id
            if parameter is value or owner == block or len(self.inputs) == 1 and parameter.grad is None:
                continue
            _refuse(f"parameter '{self.names.get(id(parameter), '(no name)')}' is of blocks {owner} and {block} (tied?): its gradients would be "
                    "added in another order than those of micro-batches one after the other, and rounded otherwise",
                    "Pass exact=False to accept these sums, or take the micro-batches one after the other")
