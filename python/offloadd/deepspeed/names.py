"""The name `deepspeed`: modules under DeepSpeed's names, and what importlib.metadata says of it."""

import importlib.metadata
import importlib.util
import logging
import sys
import types

from ..errors import Error
from . import lightning_on_cpu, setup
from .missing import refusing

_log = logging.getLogger("offloadd")

VERSION = "0.19.6"  # what programs compare with

# DeepSpeed's module -> ours; None: a package that only leads to others.
_MODULES = {
    "accelerator": "accelerator",
    "checkpoint": None,
    "checkpoint.utils": "utils",
    "checkpointing": "checkpointing",
    "comm": "comm",
    "comm.comm": "comm",
    "compression": None,
    "compression.helper": "compression",
    "launcher": None,
    "launcher.runner": "launcher",
    "moe": None,
    "moe.utils": "experts",
    "ops": None,
    "ops.adam": "adam",
    "ops.adagrad": "adam",
    "ops.adagrad.cpu_adagrad": "adam",
    "ops.adam.cpu_adam": "adam",
    "ops.adam.fused_adam": "adam",
    "ops.lion": "lion",
    "ops.lion.cpu_lion": "lion",
    "ops.lion.fused_lion": "lion",
    "runtime": None,
    "runtime.activation_checkpointing": None,
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "runtime.base_optimizer": "",
    "runtime.config": "",
    "runtime.data_pipeline": None,
    "runtime.data_pipeline.data_routing": None,
    "runtime.data_pipeline.data_routing.helper": "data_routing",
    "runtime.dataloader": "utils",
    "runtime.engine": "engine",
    "runtime.fp16": None,
    "runtime.fp16.loss_scaler": "loss_scale",
    "runtime.lr_schedules": "schedules",
    "runtime.utils": "utils",
    "runtime.zero": "zero",
    "runtime.zero.config": "offload_config",
    "runtime.zero.offload_config": "offload_config",
    "runtime.zero.partition_parameters": "zero",
    "runtime.zero.utils": "zero",
    "utils": "utils",
    "utils.groups": "groups",
    "utils.init_on_device": "on_device",
    "utils.logging": "utils",
    "utils.nvtx": "utils",
    "utils.tensor_fragment": "utils",
    "utils.timer": "timer",
    "utils.z3_leaf_module": "utils",
    "utils.zero_to_fp32": "utils",
    "zero": "zero",
}
PACKAGES = [name for name, ours in _MODULES.items() if ours is None and "." not in name]
_packages = {}


def _ours(name):
    return importlib.import_module("offloadd.deepspeed" + (f".{name}" if name else ""))


def module_below(module, name):
    """What DeepSpeed calls `module.name`, `module` being the name of one of our files (of all of its names, where it has several); or None."""
    ours = _MODULES.get(module)
    names = [f"{each}.{name}" for each, file in _MODULES.items() if file == ours is not None]
    return next((_ours(_MODULES[each]) for each in names if each in _MODULES), None)


def package(name):
    """A module that holds those below it."""
    if name not in _packages:
        made = types.ModuleType(f"deepspeed.{name}")
        made.__path__ = []
        made.__spec__ = importlib.util.spec_from_loader(made.__name__, None, is_package=True)
        made.__getattr__ = refusing(f"deepspeed.{name}")
        _packages[name] = made
        for below, ours in _MODULES.items():
            head, _, last = below.rpartition(".")
            if head == name:
                setattr(made, last, package(below) if ours is None else _ours(ours))
    return _packages[name]


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename):
        return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\nSummary: offloadd under this name\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return path


class _Finder:
    """Refuses the modules that there are not, by name; tells of the distribution where the wheel for the name is not installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("deepspeed."):
            raise ModuleNotFoundError(f"OFD-1108 there is no module {name}: offloadd provides a part of DeepSpeed. "
                                      "See docs/from_deepspeed.md for what there is.", name=name)
        return None

    @staticmethod
    def find_distributions(context=importlib.metadata.DistributionFinder.Context()):
        return [_Distribution()] if context.name == "deepspeed" else []

    @staticmethod
    def invalidate_caches():
        pass


def _admit_bf16():
    """transformers lets bf16 pass with a GPU or with use_cpu=True only, and with the latter it ignores deepspeed=."""
    if importlib.util.find_spec("transformers") is None:
        return
    import transformers.utils
    import transformers.utils.import_utils

    def is_torch_bf16_gpu_available():
        return True

    for module in (transformers.utils.import_utils, transformers.utils, sys.modules.get("transformers.training_args")):
        if hasattr(module, "is_torch_bf16_gpu_available"):
            module.is_torch_bf16_gpu_available = is_torch_bf16_gpu_available


def _tell_of_early_transformers():
    """It looks for deepspeed once; without it `deepspeed=` of its Trainer ends in a TypeError about object.__init__()."""
    module = sys.modules.get("transformers.integrations.deepspeed")
    if module is not None and getattr(module, "DeepSpeedConfig", None) is object:
        _log.warning("offloadd: transformers was imported before install() and found no deepspeed: its Trainer takes no deepspeed=… in this "
                     "process. Call install() first")


def install(*, nvme_path=None, ram=None, job=None, **options):
    """Makes `import deepspeed` mean this. The options are attach()'s, and count more than variables and configurations."""
    whole = _ours("")
    present = sys.modules.get("deepspeed")
    if present is not None and present is not whole and not getattr(present, "_is_offloadd", False):
        raise Error.of(1002, "deepspeed is imported already, and is another one", "Call install() before anything imports deepspeed")
    setup.set_installed({"nvme_path": nvme_path, "ram": ram, "job": job, **options})
    sys.modules["deepspeed"] = whole
    for name, ours in _MODULES.items():
        sys.modules[f"deepspeed.{name}"] = module = package(name) if ours is None else _ours(ours)
        if not hasattr(module, "__path__"):
            module.__path__ = []  # else Python says of what is missing below it that this is no package
    for name in PACKAGES:
        setattr(whole, name, package(name))
    if not any(finder is _Finder for finder in sys.meta_path):
        # Behind the others for distributions, before them for modules: a folder `deepspeed` elsewhere is not ours.
        sys.meta_path.insert(0, _Finder)
        _tell_of_early_transformers()
        _admit_bf16()
        lightning_on_cpu.begin()
