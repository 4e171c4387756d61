"""deepspeed.compression.helper: modules by their names. Nothing is compressed here."""

import functools

from .missing import refusing


def recursive_getattr(model, module_name):
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model, module_name, module):
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


__getattr__ = refusing("deepspeed.compression.helper")
