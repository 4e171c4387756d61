"""DeepSpeed's interface over offloadd, for programs that were written for it:

    import offloadd.deepspeed as deepspeed            # or, for programs and libraries that are not to be changed:
    import offloadd; offloadd.deepspeed.install()     # from here `import deepspeed` is this

    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config="ds_config.json", model_parameters=model.parameters())

What there is: docs/from_deepspeed.md. Everything else is refused by name (OFD-1108), and in configurations what would train something
else (OFD-11xx). Results are those of the same loop in plain torch, bit for bit.
"""

from . import accelerator, adam, arguments, checkpointing, comm, engine, schedules, setup, utils, zero
from .accelerator import get_accelerator
from .arguments import add_config_arguments
from .comm import init_distributed
from .engine import DeepSpeedEngine, initialize
from .missing import MissingAttribute, refusing
from .names import VERSION, install
from .utils import OnDevice, RepeatingLoader, log_dist, logger

__version__ = VERSION
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in VERSION.split("."))
__git_hash__ = __git_branch__ = "offloadd"
dist = comm


class DeepSpeedOptimizer:
    """What nothing here is an instance of: the optimizer that initialize() gives is torch's."""


ZeROOptimizer = DeepSpeedOptimizer


class DeepSpeedConfigError(Exception):
    """Never raised: errors are offloadd.Error."""


def default_inference_config():
    return {}


def is_compile_supported():
    return False


_refuse = refusing("deepspeed")


def __getattr__(name):
    from . import names

    if name in names.PACKAGES:
        return names.package(name)
    return _refuse(name)
