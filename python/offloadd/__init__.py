"""Trains a PyTorch model that is bigger than memory from NVMe, with the script as it is:

    import offloadd
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    handle = offloadd.attach(model, optimizer, nvme_path="/nvme0", ram="8GiB", job="run1")

and the loop stays. Every step is a checkpoint: the same script with the same job continues at handle.step. OFFLOADD_DISABLE=1 trains in
memory. Errors are offloadd.Error; their `id` is the number of the identifier.
"""

from .attaching import attach, init
from .errors import Error, error_id
from .handle import Gathered, Handle, gather
from .jobs import handles
from .library import is_disabled
from .vertical import vertical_backward

__version__ = "0.1.0"
__all__ = ["Error", "Gathered", "Handle", "attach", "error_id", "gather", "handles", "init", "is_disabled", "vertical_backward"]


def metrics():
    """The figures of all open jobs in one flat dictionary; those of a second job begin with its name."""
    made = {}
    for n, handle in enumerate(handles()):
        for key, value in handle.metrics().items():
            made[key if n == 0 else f"{handle.job}/{key}"] = value
    return made


def __getattr__(name):
    if name == "TrainerCallback":
        from .trainer import TrainerCallback

        return TrainerCallback
    raise AttributeError(f"module 'offloadd' has no attribute '{name}'")
