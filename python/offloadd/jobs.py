"""Which jobs are open in this process, those among them whose model is gone, and what becomes of them in a fork and at the end."""

import atexit
import ctypes
import gc
import mmap
import multiprocessing.process
import multiprocessing.util
import os
import sys
import weakref

from . import followers, in_memory, served

# A job is open while its model, its optimizer or its handle lives.
_open_handles = weakref.WeakSet()
_made = bytearray(1)  # whether there was a handle
_ends_otherwise_in = 0  # a process
by_model = weakref.WeakKeyDictionary()  # its handle, the last one, or what is left of that
constructed = None  # an engine that init() has opened and no attach() has taken


class OfProcess:
    """What is of the process that made it. A forked child has it, too, and leaves it alone."""

    def __init__(self):
        self._process = os.getpid()

    def is_of_this_process(self):
        return self._process == os.getpid()


def add(handle):
    """One that has been attached."""
    global _ends_otherwise_in
    _open_handles.add(handle)
    _made[0] = 1
    if _ends_otherwise_in != os.getpid() and multiprocessing.process.parent_process() is not None:  # one that does not run what atexit has
        _ends_otherwise_in = os.getpid()
        multiprocessing.util.Finalize(None, _close_all, exitpriority=0)
    for model in handle.models:
        by_model[model] = handle


def handle_of(parameter):
    """The handle of the job that a parameter is of, with OFFLOADD_DISABLE=1 the one in memory; None where there is none."""
    return next((each for each in [*handles(), *in_memory.handles()] if id(parameter) in each.identities()), None)


def handles():
    """The jobs that are open in this process."""
    return [handle for handle in list(_open_handles) if handle.is_open and handle.is_of_this_process()]


def note_those_of_forks():
    """From here on were_made() knows of what this process forks, too."""
    global _made
    shared = mmap.mmap(-1, 1)
    shared[:] = _made
    _made = shared


def were_made():
    """Whether this process has had a job, open or closed."""
    return _made[0] != 0 or constructed is not None


served.steps_taken = lambda: sum(handle.step for handle in handles())
followers.parameter_over = lambda tensor: next(
    (found for found in (handle.parameter_over(served.storage_of(tensor)) for handle in handles()) if found is not None), None)
served.is_attached = lambda parameter: any(id(parameter) in handle.identities() for handle in handles())


# ---- Those whose model is gone -----------------------------------------------------------------

def _is_held(reference):
    """Whether anybody has the parameter, or another tensor over its storage, beside the engine."""
    parameter = reference()
    # The engine's reference, ours, and that of the question.
    return parameter is not None and (sys.getrefcount(parameter) > 3 or served.is_shared(parameter))


class Outlived(OfProcess):
    """A job that stays open while somebody has one of its weights: a view, a module, a graph."""

    def __init__(self, handle, parameters):
        super().__init__()
        self.job, self.nvme_path, self._engine = handle.job, handle.nvme_path, handle._engine
        self._parameters = [weakref.ref(parameter) for parameter in parameters]

    def is_over(self):
        return not any(map(_is_held, self._parameters))

    def close(self):
        outlived.remove(self)
        engine, self._engine = self._engine, None
        if self.is_of_this_process():
            engine.close()


outlived = []


def _close_outlived(phase, _):
    """When the garbage collector is done, which is what ends handles: they and their optimizers refer to each other."""
    if phase == "stop":
        for each in [each for each in outlived if each.is_over()]:
            each.close()


gc.callbacks.append(_close_outlived)


# ---- In a fork, and at the end -----------------------------------------------------------------

def _leave_to_the_parent():
    """In a forked child, whose sessions are its parent's: engines are not destroyed here, whatever becomes of what refers to them."""
    opened = [constructed, *_open_handles]
    for engine in [each._engine for each in opened if each is not None and each._engine is not None]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))


os.register_at_fork(after_in_child=_leave_to_the_parent)


@atexit.register
def _close_all():
    for handle in handles():
        handle.end()
    for job in list(outlived):
        job.close()
