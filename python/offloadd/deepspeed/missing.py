"""What DeepSpeed has and offloadd has not: refused by name."""

from ..errors import Error


class MissingAttribute(Error, AttributeError):
    """Also an AttributeError, so that hasattr() and getattr() with a default work as they should."""


def missing(owner, name):
    return MissingAttribute.of(1108, f"{owner}.{name} is not there: offloadd provides a part of DeepSpeed",
                               "See docs/from_deepspeed.md for what there is, and for another way to the same")


def refuse(what, fix="Remove it; see docs/from_deepspeed.md for what there is"):
    raise Error.of(1104, what, fix)


def refusing(module):
    """A module's __getattr__ that names what is asked for."""

    def __getattr__(name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        raise missing(module, name)

    return __getattr__
