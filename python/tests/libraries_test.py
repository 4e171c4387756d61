"""Modules and optimizers of other libraries, whose classes have methods of their own in place of torch's."""

import collections
import copy
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


class StudentAndTeacher(torch.nn.Module):
    """As the BYOL and DINO of public repositories do it."""

    def __init__(self):
        super().__init__()
        self.student = Transformer()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, ids):
        return self.student(ids) + self.teacher(ids)

    def update_teacher(self):
        for current, average in zip(self.student.parameters(), self.teacher.parameters()):
            old, new = average.data, current.data
            average.data = old * 0.9 + new * 0.1
        return old


@case(types=("fp32", "bf16"))
def teacher_that_is_given_data_while_its_former_data_are_held(run):
    model = run.make(StudentAndTeacher)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    told = []
    for step in range(4):
        told += run.train(model, optimizer, steps=1, first=step)
        model.update_teacher()
        told += [p.detach().clone() for p in model.teacher.parameters()]
    return told


@case(**FP32)
def former_data_that_are_held_over_a_step(run):
    model = run.make(StudentAndTeacher)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    held = model.update_teacher()
    return run.train(model, optimizer), held


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


class AroundWithHooks(Around):
    """As timm's lookahead: it has by itself what torch's constructor would have made for hooks."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = collections.OrderedDict(), collections.OrderedDict()


@case(**FP32)
def steps_of_an_optimizer_that_torch_has_not_constructed_are_counted(run):
    model = run.model()
    optimizer = AroundWithHooks(torch.optim.AdamW(model.parameters(), 1e-3))
    handle = run.attach(model, optimizer)
    return run.train(model, optimizer), handle.step


if __name__ == "__main__":
    sys.exit(main())
