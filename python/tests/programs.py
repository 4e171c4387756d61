"""Programs that a test runs in processes of their own, without importing torch anew for each.

A fresh interpreter takes seconds of a processor to import what the test has imported already. Programs() leaves a process behind that
has done so, has computed nothing, and forks one for each program; that begins and ends as `python script.py` does, with an interpreter
that is torn down. What is said of imports must be tested with fresh ones (untouched_test.py).
"""

import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import types

_MOST_BYTES = 1 << 17  # of a request, which is one packet


class Program:
    """As a subprocess.Popen whose stdout is a pipe of text, and whose stderr is kept."""

    def __init__(self, server, arguments, environment, is_loud):
        status, its_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, writing = os.pipe()
        self._errors = None if is_loud else tempfile.TemporaryFile("w+", encoding="utf-8")
        errors = 2 if is_loud else self._errors.fileno()
        request = json.dumps({"arguments": arguments, "environment": environment, "folder": os.getcwd()}).encode()
        socket.send_fds(server, [request], [its_status.fileno(), writing, errors])
        os.close(writing)
        its_status.close()
        self.stdout = os.fdopen(reading, encoding="utf-8")
        self._status = status
        self.pid = int(status.recv(64))
        self.returncode = None

    def wait(self):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(int(self._status.recv(64)))
            self._status.close()
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def communicate(self):
        with self.stdout:
            said = self.stdout.read()
        self.wait()
        if self._errors is None:
            return said, ""
        self._errors.seek(0)
        with self._errors:
            return said, self._errors.read()


class Programs:
    """Made before anything has been computed: a fork has one thread."""

    def __init__(self):
        assert threading.active_count() == 1, "threads do not survive a fork"
        self._server, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._server.close()
            sys.exit(_run(*_serve(its)))
        its.close()

    def start(self, *arguments, is_loud=False, **environment):
        """`python ARGUMENTS`: a file, or -m and a module, and what they are given."""
        return Program(self._server, arguments, {**os.environ, **environment}, is_loud)


def _serve(server):
    """Returns in the process of a program only, with what it is asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        packet, files, _, _ = socket.recv_fds(server, _MOST_BYTES, 3)
        if not packet:
            os._exit(0)  # the test has ended
        if os.fork() == 0:
            server.close()
            return _keep(*files, json.loads(packet))
        for file in files:
            os.close(file)


def _keep(status, output, errors, request):
    """Is the program's parent, and tells the test of it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status = socket.socket(fileno=status)
    program = os.fork()
    if program == 0:
        status.close()
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.close(output)
        os.close(errors)
        return request["arguments"], request["environment"], request["folder"]
    os.close(output)
    os.close(errors)
    status.send(str(program).encode())
    status.send(str(os.waitpid(program, 0)[1]).encode())
    os._exit(0)


def _run(arguments, environment, folder):
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # asked anew
    os.chdir(folder)
    sys.stdout, sys.stderr = open(1, "w", encoding="utf-8", closefd=False), open(2, "w", buffering=1, encoding="utf-8", closefd=False)
    if "torch" in sys.modules and "OMP_NUM_THREADS" in environment:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    path = arguments[0]
    sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(path))
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), module.__dict__)
