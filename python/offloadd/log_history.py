"""The log of Hugging Face's Trainer (state.log_history) as a job keeps it with every step: compressed, whole up to some ten thousand entries,
of a longer one the last. An entry is packed once; only the last few hundred, which somebody may still add to, are packed with every step."""

import json
import zlib

_ENTRIES = 256  # of a chunk


def _packed(entries):
    return zlib.compress(json.dumps(entries, default=str).encode())


class LogHistory:
    """Packs one log again and again. `bytes_max`: of all chunks."""

    def __init__(self, bytes_max):
        self._bytes_max = bytes_max
        self._of, self._chunks, self._count = None, [], 0

    def pack(self, history):
        """Chunks of the entries, oldest first."""
        if self._of is not history or len(history) < self._count:
            self._of, self._chunks, self._count = history, [], 0
        while len(history) - self._count >= 2 * _ENTRIES:
            self._chunks.append(_packed(history[self._count:self._count + _ENTRIES]))
            self._count += _ENTRIES
        last = history[self._count:]
        tail = _packed(last)
        while len(tail) > self._bytes_max and len(last) > 1:
            last = last[len(last) // 2:]
            tail = _packed(last)
        while self._chunks and sum(map(len, self._chunks)) + len(tail) > self._bytes_max:
            del self._chunks[0]
        return [*self._chunks, tail]


def unpack(chunks):
    return [entry for chunk in chunks for entry in json.loads(zlib.decompress(chunk))]
