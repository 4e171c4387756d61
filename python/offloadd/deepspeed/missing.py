"""What DeepSpeed has and offloadd has not: refused by name."""

import dis
import sys

from ..errors import Error


class MissingImport(Error, ImportError):
    """`from deepspeed import …` of what is not there."""


class MissingAttribute(Error, AttributeError):
    """Also an AttributeError, so that hasattr() and getattr() with a default work as they should."""


def missing(owner, name):
    return MissingAttribute.of(1108, f"{owner}.{name} is not there: offloadd provides a part of DeepSpeed",
                               "See docs/from_deepspeed.md for what there is, and for another way to the same")


def refuse(what, fix="Remove it; see docs/from_deepspeed.md for what there is"):
    raise Error.of(1104, what, fix)


def refusing(module):
    """A module's __getattr__ that gives the modules below it, and names what else is asked for."""

    def __getattr__(name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        from .names import module_below

        below = module_below(module.removeprefix("deepspeed."), name)
        if below is not None:
            return below
        frame = sys._getframe(1)
        if frame.f_code.co_name == "__getattr__":
            frame = frame.f_back
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM":
            # Python would put a text of its own in place of an AttributeError's.
            raise MissingImport(str(missing(module, name)))
        raise missing(module, name)

    return __getattr__
