"""deepspeed.checkpointing: torch's recomputation of activations, with equal results. The options that place activations elsewhere have
nothing to place."""

import torch.utils.checkpoint

from .missing import refusing

_configured = False


def configure(mpu_=None, deepspeed_config=None, partition_activations=None, contiguous_checkpointing=None, num_checkpoints=None,
              checkpoint_in_cpu=None, synchronize=None, profile=None):
    global _configured
    _configured = True


def is_configured():
    return _configured


def reset():
    pass


def checkpoint(function, *args, **kwargs):
    kwargs.setdefault("use_reentrant", False)
    return torch.utils.checkpoint.checkpoint(function, *args, **kwargs)


non_reentrant_checkpoint = checkpoint

__getattr__ = refusing("deepspeed.checkpointing")
