"""Modules and optimizers of other libraries, whose classes have methods of their own in place of torch's."""

import sys

import torch

from battery import Transformer, case, main

FP32 = {"types": ("fp32",)}


class HidesItsTargets(Transformer):
    """As torchrl's losses do."""

    def named_parameters(self, prefix="", recurse=True):
        for name, parameter in super().named_parameters(prefix=prefix, recurse=recurse):
            if not name.startswith("norm"):
                yield name, parameter


@case(**FP32)
def module_whose_named_parameters_knows_of_no_duplicates(run):
    model = run.make(lambda: HidesItsTargets(tied=True))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    handle = run.attach(model, optimizer)
    told = run.train(model, optimizer)
    return told, model.state_dict(), handle.gather("head.weight"), handle.gather("norm.weight")


class Around(torch.optim.Optimizer):
    """As opacus' is around the script's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, optimizer.state

    def step(self, closure=None):
        return self.optimizer.step(closure)


@case(refused=1604, memory=("floor",), **FP32)
def optimizer_around_another_is_refused(run):
    model = run.model()
    optimizer = Around(torch.optim.AdamW(model.parameters(), 1e-3))
    if not run.offloaded:
        return None
    run.attach(model, optimizer)


if __name__ == "__main__":
    sys.exit(main())
