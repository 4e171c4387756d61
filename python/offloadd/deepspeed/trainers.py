"""What a Trainer of transformers has to be told: it keeps an engine that its accelerator has destroyed."""

import functools
import sys


@functools.lru_cache(maxsize=None)
def _patch(trainer, engine):
    original = trainer._wrap_model

    @functools.wraps(original)
    def wrap(self, model, *args, **kwargs):
        return original(self, model.module if isinstance(model, engine) and model._is_destroyed else model, *args, **kwargs)

    trainer._wrap_model = wrap


def begin_anew(engine):
    """From now on the next train() of a Trainer whose engine, an object of this class, was destroyed gives its model another one."""
    transformers = sys.modules.get("transformers.trainer")
    if transformers is not None:
        _patch(transformers.Trainer, engine)
