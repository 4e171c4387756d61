"""Tells of long work on stderr: by a bar of tqdm where that is installed and somebody looks, else by a line every ten seconds."""

import sys
import time

_BAR_AFTER, _LINE_EVERY = 2.0, 10.0  # seconds


def _bar(items, work):
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm(items, desc=f"offloadd: {work}", delay=_BAR_AFTER, leave=False) if sys.stderr.isatty() else None


def _lines(items, work, clock=time.monotonic):
    told = clock()
    for done, item in enumerate(items):
        if clock() - told >= _LINE_EVERY:
            told = clock()
            print(f"offloadd: {work}: {done} of {len(items)}", file=sys.stderr, flush=True)
        yield item


def over(items, work):
    """The items of a list, while `work` is done with each."""
    return _bar(items, work) or _lines(items, work)
