"""Programs that a test runs in processes of their own, without importing torch anew for each.

A fresh interpreter takes seconds of a processor to import what the test has imported already. Programs() leaves a process behind that
has done so, has computed nothing, and forks one for each program; that begins and ends as `python script.py` does, with an interpreter
that is torn down. What such a program starts with sys.executable, as launchers start their ranks, is a fork of the same process. What is
said of imports must be tested with fresh ones (untouched_test.py).
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types

_MOST_BYTES = 1 << 17  # of a request, which is one packet
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# sys.executable of a program: another one of the same process.
_INTERPRETER = """#!{python} -IS
import sys
sys.path.insert(0, {folder!r})
import programs
programs.interpret({address!r}, sys.argv[1:])
"""


class Program:
    """As a subprocess.Popen whose stdout is a pipe of text, and whose stderr is kept."""

    def __init__(self, address, arguments, environment, is_loud):
        reading, writing = os.pipe()
        self._errors = None if is_loud else tempfile.TemporaryFile("w+", encoding="utf-8")
        self._status, self.pid = _ask(address, arguments, environment, (0, writing, 2 if is_loud else self._errors.fileno()))
        os.close(writing)
        self.stdout = os.fdopen(reading, encoding="utf-8")
        self.returncode = None

    def wait(self):
        if self.returncode is None:
            self.returncode = _end(self._status)
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def communicate(self, timeout=None):
        """After `timeout` seconds it is killed."""
        timer = threading.Timer(timeout, self.send_signal, [signal.SIGKILL]) if timeout else None
        if timer is not None:
            timer.start()
        try:
            with self.stdout:
                said = self.stdout.read()
            self.wait()
        finally:
            if timer is not None:
                timer.cancel()
        if self._errors is None:
            return said, ""
        self._errors.seek(0)
        with self._errors:
            return said, self._errors.read()


def write_script(folder, text):
    """Its path."""
    path = os.path.join(folder, "script.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def run_fresh(*arguments, **environment):
    """An interpreter that has imported nothing."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment})


class Programs:
    """Made before anything has been computed: a fork has one thread. `prepare` imports what the test has not, where the programs are forked
    and when the first is asked for."""

    def __init__(self, prepare=lambda: None):
        assert threading.active_count() == 1, "threads do not survive a fork"
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.bind("")
        server.listen()
        self._address = server.getsockname()
        self._lifeline, its = os.pipe()[::-1]
        if os.fork() == 0:
            os.close(self._lifeline)
            sys.exit(_run(*_serve(server, its, prepare)))
        os.close(its)
        server.close()

    def start(self, *arguments, is_loud=False, **environment):
        """`python ARGUMENTS`: a file, -m and a module, or -c and a text, and what they are given."""
        return Program(self._address, arguments, {**os.environ, **environment}, is_loud)

    def start_script(self, folder, text, *arguments, launcher=()):
        """`python LAUNCHER script.py ARGUMENTS` of a script in the folder; TESTS says where those are."""
        path = write_script(folder, text)
        tests = os.path.dirname(os.path.abspath(__file__))
        return self.start(*launcher, path, *arguments, is_loud="--loud" in sys.argv, TESTS=tests, OMP_NUM_THREADS="1")

    def run(self, *arguments, timeout=None, **environment):
        """As subprocess.run(), which captures what it says."""
        program = self.start(*arguments, **environment)
        said, errors = program.communicate(timeout)
        return subprocess.CompletedProcess(arguments, program.returncode, said, errors)


def interpret(address, arguments):
    """Is sys.executable of a program, with these arguments."""
    connection, program = _ask(address, arguments, dict(os.environ), (0, 1, 2))
    for number in _FORWARDED:
        signal.signal(number, lambda its, _: os.kill(program, its))
    code = _end(connection)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _ask(address, arguments, environment, files):
    """(The connection, which tells of the end and kills with its own, the pid)."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    request = json.dumps({"arguments": arguments, "environment": environment, "folder": os.getcwd()}).encode()
    socket.send_fds(connection, [request], files)
    return connection, int(connection.recv(64))


def _end(connection):
    with connection:
        return os.waitstatus_to_exitcode(int(connection.recv(64)))


def _serve(server, lifeline, prepare):
    """Returns in the process of a program only, with what it is asked for."""
    folder = tempfile.mkdtemp(prefix="programs-", dir=os.environ.get("TEST_TMPDIR"))
    interpreter = os.path.join(folder, "python")
    with open(interpreter, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o700)) as file:
        file.write(_INTERPRETER.format(python=os.path.realpath(sys.executable), folder=os.path.dirname(os.path.abspath(__file__)),
                                       address=server.getsockname()))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    is_prepared = False
    while True:
        if lifeline in select.select([server, lifeline], [], [])[0]:  # the test has ended
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        connection, _ = server.accept()
        if not is_prepared:
            is_prepared = True
            prepare()
            importlib.import_module("torch._dynamo")  # which torch imports for the first optimizer
            gc.freeze()  # a collection would copy every page of what was imported
        if os.fork() == 0:
            server.close()
            os.close(lifeline)
            return *_keep(connection), interpreter
        connection.close()


def _keep(connection):
    """Is the program's parent, and tells the test of it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    packet, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
    program = os.fork()
    if program == 0:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        request = json.loads(packet)
        return request["arguments"], request["environment"], request["folder"]
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):
        connection.send(str(program).encode())
    process = os.pidfd_open(program)
    if process not in select.select([process, connection], [], [])[0]:  # who has started it has ended
        os.kill(program, signal.SIGKILL)
    status = os.waitpid(program, 0)[1]
    with contextlib.suppress(OSError):
        connection.send(str(status).encode())
    os._exit(0)


def _run(arguments, environment, folder, interpreter):
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # asked anew
    os.chdir(folder)
    is_unbuffered = arguments[0] == "-u"
    arguments = arguments[1:] if is_unbuffered else arguments
    sys.stdout = open(1, "w", buffering=1 if is_unbuffered else -1, encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.executable = interpreter
    if "torch" in sys.modules and "OMP_NUM_THREADS" in environment:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy._run_module_as_main(arguments[1])
        return
    if arguments[0] == "-c":
        sys.argv, sys.path[0], path, text = ["-c", *arguments[2:]], "", "<string>", arguments[1]
    else:
        path = arguments[0]
        sys.argv, sys.path[0], module.__file__ = arguments, os.path.dirname(os.path.abspath(path)), path
        with open(path, encoding="utf-8") as file:
            text = file.read()
    exec(compile(text, path, "exec"), module.__dict__)
