"""What safetensors writes of tensors that are offloaded: one after the other, where it makes copies of all of them first.

Its functions check what they are given, as ever, and are asked for the header of tensors of the same names and types without elements:
order, names of types and form are its own. Where that is not understood, as of a later version, it writes itself, from copies.
"""

import contextlib
import functools
import io
import json
import os
import struct
import sys
import tempfile
import threading

import torch

from . import served

_COPIED_BYTES = 16 << 20  # of a tensor, at a time
_asks_for_no_bytes = threading.local()  # .now


class _Unwritten(dict):
    """What serialize() and serialize_file() are given: descriptions of tensors, and here the tensors, too."""

    def __init__(self, described, of_empty, tensors, bytes_of):
        super().__init__(described)
        self._of_empty, self._tensors, self._bytes_of = of_empty, tensors, bytes_of

    def header(self, serialize, metadata):
        """None where the form is another one than here."""
        if any(isinstance(each, dict) and each["dtype"].startswith("float4") for each in self.values()):  # of another shape there
            return None
        told = bytes(serialize(self._of_empty, metadata=metadata))
        with contextlib.suppress(ValueError, TypeError):
            entries = [(name, dict(value)) for name, value in json.loads(told[8:], object_pairs_hook=list)]
            self._names = [name for name, _ in entries[-len(self):]]
            if _header_of(entries) == told and set(self._names) == set(self):
                end = 0
                for name, value in entries[-len(self):]:
                    begin, end = end, end + self._tensors[name].nbytes
                    value.update(shape=list(_shape_of(self[name])), data_offsets=[begin, end])
                return _header_of(entries)
        return None

    def write(self, file, header):
        file.write(header)
        for name in self._names:
            for part in self._parts(self._tensors[name], name):
                file.write(part)

    def _parts(self, tensor, name):
        if not served.managed(tensor):
            yield from self._bytes_of(tensor, name)
            return
        flat, size = tensor.detach().view(-1), max(1, _COPIED_BYTES // tensor.element_size())
        for begin in range(0, len(flat), size):
            yield from self._bytes_of(served.copy_of(flat[begin:begin + size]), name)


def _header_of(entries):
    text = functools.partial(json.dumps, ensure_ascii=False, separators=(",", ":"))
    header = ("{" + ",".join(f"{text(name)}:{text(value)}" for name, value in entries) + "}").encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def _shape_of(description):
    return description["shape"] if isinstance(description, dict) else description.shape


def _empty_like(tensor):
    with served.ordinary_memory():
        return torch.empty(0, dtype=tensor.dtype)


def _without_bytes(original):
    """The function for the bytes of a tensor: where they are not asked for, those of an empty one."""
    of_a_copy = served.of_a_copy(original)

    @functools.wraps(original)
    def call(tensor, *name):
        if getattr(_asks_for_no_bytes, "now", False):
            return original(_empty_like(tensor) if tensor.is_contiguous() else tensor, *name)
        return of_a_copy(tensor, *name)

    return call


def _described(module, bytes_of):
    """The function that describes tensors to the writers of the module."""

    def make(original):
        @functools.wraps(original)
        def call(tensors, *kept):
            caller = sys._getframe(1)
            writes = caller.f_globals is vars(module) and caller.f_code.co_name in ("save", "save_file")
            if not writes or not isinstance(tensors, dict) or not any(isinstance(each, torch.Tensor) and served.managed(each)
                                                                       for each in tensors.values()):
                return original(tensors, *kept)
            _asks_for_no_bytes.now = True
            try:
                described = original(tensors, *kept)
                of_empty = original({name: _empty_like(each) for name, each in tensors.items()}, *kept)
            finally:
                _asks_for_no_bytes.now = False
            unwritten = _Unwritten(described, of_empty, tensors, bytes_of)
            unwritten.copied = functools.partial(original, tensors, *kept)
            return unwritten

        return call

    return make


def _to_bytes(serialize):
    @functools.wraps(serialize)
    def call(tensors, metadata=None):
        if not isinstance(tensors, _Unwritten):
            return serialize(tensors, metadata=metadata)
        header = tensors.header(serialize, metadata)
        if header is None:
            return serialize(tensors.copied(), metadata=metadata)
        file = io.BytesIO()
        tensors.write(file, header)
        return file.getvalue()

    return call


def _to_file(serialize, replaces):
    def make(serialize_file):
        @functools.wraps(serialize_file)
        def call(tensors, filename, metadata=None):
            if not isinstance(tensors, _Unwritten):
                return serialize_file(tensors, filename, metadata=metadata)
            header = tensors.header(serialize, metadata) if isinstance(filename, (str, os.PathLike)) else None
            if header is None:
                return serialize_file(tensors.copied(), filename, metadata=metadata)
            try:
                with (_replaced if replaces else functools.partial(open, mode="wb"))(os.fsdecode(filename)) as file:
                    tensors.write(file, header)
            except OSError as error:
                from safetensors import SafetensorError

                place = f' at path "{error.filename}"' if error.filename and not error.filename2 else ""
                raise SafetensorError(f"Error while serializing: I/O error: {error.strerror} (os error {error.errno}){place}") from error

        return call

    return make


@contextlib.contextmanager
def _replaced(path):
    """A file that takes the place of what is there when it is whole."""
    number, made = tempfile.mkstemp(prefix=".tmp", dir=os.path.dirname(os.path.abspath(path)))
    try:
        with open(number, "wb") as file:
            yield file
        os.rename(made, path)
    except BaseException:
        os.unlink(made)
        raise


def install():
    """When safetensors is there; looked for at every attach(), since it may be installed late."""
    try:
        import safetensors.torch as module
    except ImportError:
        return
    _install(module)


@functools.lru_cache(maxsize=None)
def _install(module):
    by_pointer = hasattr(module, "_flatten_as_ptr")  # before version 0.8 it was given bytes, and wrote in place
    describes, gives = ("_flatten_as_ptr", "_to_ndarray") if by_pointer else ("_flatten", "_tobytes")
    if not all(hasattr(module, name) for name in (describes, gives, "serialize", "serialize_file")):
        return
    original, serialize = getattr(module, gives), module.serialize

    def bytes_of(tensor, name):
        if by_pointer:
            array, kept = original(tensor)  # who has the memory
            yield array
        else:
            yield original(tensor, name)

    served.wrap(module, gives, _without_bytes)
    served.wrap(module, describes, _described(module, bytes_of))
    served.wrap(module, "serialize", _to_bytes)
    served.wrap(module, "serialize_file", _to_file(serialize, replaces=by_pointer))
