"""Configurations: offloadd.toml and DeepSpeed's, read by the same code as everywhere (config/ of the sources), over ctypes."""

import ctypes
import json
import logging
import os

from .errors import Error, class_of
from .library import PATH

_log = logging.getLogger("offloadd")
_functions = ctypes.CDLL(PATH)
_functions.offloadd_config_import.restype = ctypes.c_void_p
_functions.offloadd_config_import.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
_functions.offloadd_config_read.restype = ctypes.c_void_p
_functions.offloadd_config_read.argtypes = [ctypes.c_char_p]
_functions.offloadd_config_free.restype = None
_functions.offloadd_config_free.argtypes = [ctypes.c_void_p]

# Options of attach() that a variable sets, too, and which it sets more strongly than a file.
_VARIABLES = {"nvme_path": "OFFLOADD_POOL", "ram": "OFFLOADD_RAM", "job": "OFFLOADD_JOB", "io": "OFFLOADD_IO", "device": "OFFLOADD_DEVICE",
              "gpu_ram": "OFFLOADD_GPU_RAM"}


def _answer(pointer):
    """The JSON that a function gave, after which it is freed."""
    try:
        answer = json.loads(ctypes.string_at(pointer))
    finally:
        _functions.offloadd_config_free(pointer)
    if "error" in answer:
        raise Error(answer["error"])
    return answer


class Import(dict):
    """What became of a DeepSpeed configuration: `options` (of attach()), `training` (of the loop), `keys` (one line for each), `rejected`
    (texts), `warnings`; `raw` is the configuration itself."""

    raw = None

    @property
    def training(self):
        return self["training"]

    @property
    def options(self):
        return self["options"]


def _text_of(config):
    """(text, name) of a dictionary, a path, JSON, or JSON in base64."""
    if isinstance(config, dict):
        try:
            return json.dumps(config), "the configuration"
        except (TypeError, ValueError) as error:
            raise Error.of(1101, f"the configuration is no JSON: {error}", "Write numbers, texts, lists and dictionaries") from None
    if not isinstance(config, (str, bytes, os.PathLike)):
        raise Error.of(1101, f"the configuration is {class_of(config)}", "Give a dictionary, the path of a file, or its text")
    text = os.fspath(config)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if os.path.exists(text):
        try:
            with open(text, encoding="utf-8", errors="replace") as file:
                return file.read(), text
        except OSError as error:
            raise Error.of(1405, f"{text} cannot be read: {error.strerror.lower()}", "Name a readable file") from None
    if text.lstrip().startswith("{") or ("." not in text and "/" not in text):
        return text, "the configuration"
    raise Error.of(1405, f"{text} cannot be read", "Name a readable file or folder")


def import_deepspeed(config, world_size=1, has_pool=None, tell=True):
    """Reads any DeepSpeed configuration: a dictionary, the path of a file, or its text. What would train something else than it says is
    an error; `tell` logs what a user should see all the same."""
    text, name = _text_of(config)
    if has_pool is None:
        has_pool = bool(os.environ.get("OFFLOADD_POOL"))
    if "\0" in text:
        raise Error.of(1101, f"{name} is no JSON", "Correct the text")
    made = Import(_answer(_functions.offloadd_config_import(text.encode(), name.encode(), world_size, int(has_pool))))
    document = made.pop("document")
    made.raw = config if isinstance(config, dict) else document
    if made["rejected"]:
        more = len(made["rejected"]) - 1
        raise Error(made["rejected"][0] + (f" (and {more} more: offloadctl config import lists them)" if more else ""))
    if tell:
        for warning in made["warnings"]:
            _log.warning("offloadd: %s", warning)
    return made


def read_toml(path=""):
    """Options of attach() from an offloadd.toml under the environment; without a path, from the machine's and the user's."""
    return _answer(_functions.offloadd_config_read(os.fsencode(path)))["options"]


def options_of(config):
    """What attach(config=…) means: the path of an offloadd.toml, or a DeepSpeed configuration, whose place in the order of sources is that
    of a file: variables win."""
    if isinstance(config, (str, os.PathLike)) and os.fspath(config).endswith(".toml"):
        return read_toml(os.fspath(config))
    made = import_deepspeed(config, tell=False)
    for warning in made["warnings"]:
        if not warning.startswith("gradient_clipping is absent"):
            _log.warning("offloadd: %s", warning)
    if made.raw.get("gradient_clipping"):
        _log.warning("offloadd: gradient_clipping is left to the program's loop (torch.nn.utils.clip_grad_norm_()): attach() clips nothing")
    training = made.training
    left = [key for key, is_set in {"optimizer": training["optimizer"], "scheduler": training["scheduler"], "bf16": training["bf16"],
                                    "torch_autocast": training["autocast"],
                                    "gradient_accumulation_steps": (training["accumulation"] or 1) > 1}.items() if is_set]
    if left:
        _log.warning("offloadd: what the configuration says of %s is left to the program: attach() takes its optimizer, its loop and the model's "
                     "types as they are", ", ".join(left))
    if training["fp16"]:
        raise Error.of(1104, "fp16.enabled = true in attach(config=…): the loop is the program's own, which attach() neither casts nor scales",
                       "Use offloadd.deepspeed.initialize(), or bf16; or remove the section and cast the model yourself")
    options = made.options
    return {key: value for key, value in options.items() if not os.environ.get(_VARIABLES.get(key, ""))}
