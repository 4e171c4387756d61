"""The files of a checkpoint that the engine saves."""

import json
import logging
import os
import tempfile

import torch

from ..errors import Error
from . import snapshots

_log = logging.getLogger("offloadd")

STATE, WEIGHTS, LATEST = "offloadd.json", "weights", "latest"
TRAINER, CLIENT = "trainer.pt", "client_state.pt"


def tag_in(folder, tag):
    """The tag, or the one that the folder calls its latest; None when it has none."""
    if tag is not None:
        return str(tag)
    path = os.path.join(folder, LATEST)
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


_TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "I32": torch.int32,
          "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


def _tensors_of(path):
    """(name, tensor) of a safetensors file that was written here; the tensors are views of the file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)[8 + length:]
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, data[begin:end].view(_TYPES[entry["dtype"]]).view(entry["shape"])


def _tensors_in(folder):
    files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    return {name: tensor for file in files for name, tensor in _tensors_of(os.path.join(folder, file))}


def weights_in(folder):
    """The weights of a checkpoint; tied ones under their first name."""
    if os.path.exists(os.path.join(folder, "model.pt")):
        return torch.load(os.path.join(folder, "model.pt"), weights_only=True, mmap=True)
    return _tensors_in(os.path.join(folder, WEIGHTS))


def masters_in(folder):
    """The fp32 masters of a checkpoint, by name: out of the snapshot that it leads to. Nothing where that is gone, with a warning."""
    mark = mark_in(folder)
    if "snapshot" not in mark:
        stored = torch.load(os.path.join(folder, "optimizer.pt"), weights_only=True)
        return dict(zip(stored.get("names", ()), stored["masters"]))
    with tempfile.TemporaryDirectory(dir=folder) as made:
        try:
            snapshots.export(mark, os.path.join(made, WEIGHTS))
        except Error as error:
            _log.warning("offloadd: %s: its weights are those of 16 bits, widened, since the masters in the pool cannot be read: %s", folder, error)
            return {}
        return _tensors_in(os.path.join(made, WEIGHTS))  # mapped, also when the folder is gone


def mark_in(folder):
    with open(os.path.join(folder, STATE), encoding="utf-8") as file:
        return json.load(file)


def kept_in(folder):
    """What the engine has kept beside the weights."""
    return torch.load(os.path.join(folder, TRAINER), map_location="cpu", weights_only=False)


def client_state_in(folder):
    """What the program has; of earlier checkpoints it lies beside the engine's."""
    path = os.path.join(folder, CLIENT)
    return torch.load(path, map_location="cpu", weights_only=False) if os.path.exists(path) else kept_in(folder).get("client_state", {})


def write_text(path, text):
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
