"""offloadd-run: the command line of `deepspeed`, for programs of one machine.

    offloadd-run [--num_gpus N] train.py --deepspeed_config ds_config.json …

starts N ranks (1 unless said), with `import deepspeed` meaning offloadd in each. Drive, budget and job: OFFLOADD_POOL, OFFLOADD_RAM,
OFFLOADD_JOB, or --pool, --ram, --job.
"""

import argparse
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time

from ..errors import Error, error_id
from .missing import refuse, refusing

# What accelerate's launcher asks for, and writes for launches on several machines only.
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")

# Flags of deepspeed's launcher that place ranks on several machines or in several ways; here there is one.
_ELSEWHERE = ("min_elastic_nodes", "max_elastic_nodes", "elastic_training", "autotuning", "force_multi", "venv_script")
_TERMINATE_SECONDS = 30
# The exit status of a rank that only went down with another one, and how long that other one may take to end after it.
_ENDED_BY_ANOTHER = 75
_CAUSE_SECONDS = 5


def parser():
    made = argparse.ArgumentParser(prog="offloadd-run", description="Runs a program that was written for DeepSpeed, offloaded.")
    ours = made.add_argument_group("offloadd")
    ours.add_argument("--pool", help="a directory on a drive with direct I/O (OFFLOADD_POOL)")
    ours.add_argument("--ram", help="the memory budget, 8GiB (OFFLOADD_RAM)")
    ours.add_argument("--job", help="names the run; the same name continues it (OFFLOADD_JOB)")
    made.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="how many ranks; 1 unless said")
    made.add_argument("--num_nodes", type=int, default=-1, help="1")
    made.add_argument("-i", "--include", default="", help="localhost:0,1,… counts ranks, too")
    made.add_argument("-e", "--exclude", default="", help=argparse.SUPPRESS)
    made.add_argument("-H", "--hostfile", default="", help="its slots= count ranks, too, where it names one machine")
    made.add_argument("--master_addr", default="", help="127.0.0.1 unless said")
    made.add_argument("--master_port", type=int, default=0, help="a free one unless said")
    made.add_argument("--node_rank", type=int, default=-1, help=argparse.SUPPRESS)
    made.add_argument("--launcher", default="", help="ignored: ranks are processes of this machine")
    made.add_argument("--launcher_args", default="", help=argparse.SUPPRESS)
    made.add_argument("-m", "--module", action="store_true", help="the program is a module")
    made.add_argument("--no_python", action="store_true", help="the program is no Python script; it imports deepspeed from the wheel")
    made.add_argument("--no_local_rank", action="store_true", help="do not give --local_rank to the program")
    for flag in ("--no_ssh", "--no_ssh_check", "--save_pid", "--bind_cores_to_rank"):
        made.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    for flag in ("--bind_core_list", "--enable_each_rank_log", "--ssh_port"):
        made.add_argument(flag, default=None, help=argparse.SUPPRESS)
    for flag in _ELSEWHERE:
        made.add_argument(f"--{flag}", nargs="?", const="on", default=None, help=argparse.SUPPRESS)
    made.add_argument("program")
    made.add_argument("arguments", nargs=argparse.REMAINDER)
    return made


def _slots_in(path):
    """How many ranks each line of a hostfile (`localhost slots=2`) has room for. One that is not there names nobody, as with deepspeed."""
    if not path or not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        lines = [line.partition("#")[0].strip() for line in file]
    found = [(line, re.search(r"\bslots\s*=\s*(\S+)", line)) for line in lines if line]
    for line, slots in found:
        if slots and not re.fullmatch("[1-9][0-9]*", slots[1]):
            raise Error.of(1002, f"'{line}' in the hostfile {path}", "Write localhost slots=2, or --num_gpus 2")
    return [int(slots[1]) if slots else 1 for _, slots in found]


def rank_count(flags):
    """How many ranks the flags ask for, on this machine."""
    for flag in _ELSEWHERE:
        if getattr(flags, flag) is not None:
            refuse(f"--{flag}")
    slots_of_hosts = _slots_in(flags.hostfile)
    if flags.num_nodes > 1 or flags.node_rank > 0 or len(slots_of_hosts) > 1 or "@" in flags.include:
        refuse("a launch on several machines", "Start all ranks on this one: --num_gpus N")
    if flags.exclude:
        refuse("--exclude", "Say how many ranks: --num_gpus N")
    if flags.include:
        host, _, slots = flags.include.partition(":")
        if not slots or not all(slot.strip().isdigit() for slot in slots.split(",")):
            refuse(f"--include {flags.include}", "Write --include localhost:0,1 or --num_gpus N")
        return len(slots.split(","))
    if flags.num_gpus == 0 or flags.num_gpus < -1:
        raise Error.of(1002, f"--num_gpus {flags.num_gpus}", "Write how many ranks there shall be, from 1")
    return flags.num_gpus if flags.num_gpus > 0 else sum(slots_of_hosts) or 1


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment_of(flags, ranks, rank, port):
    made = dict(os.environ)
    made.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks),
                MASTER_ADDR=flags.master_addr or "127.0.0.1", MASTER_PORT=str(port), CROSS_RANK="0", CROSS_SIZE="1")
    if flags.include and "CUDA_VISIBLE_DEVICES" not in made:  # the ranks' devices, where there are some
        made["CUDA_VISIBLE_DEVICES"] = flags.include.partition(":")[2].replace(" ", "")
    for name, value in (("OFFLOADD_POOL", flags.pool), ("OFFLOADD_RAM", flags.ram), ("OFFLOADD_JOB", flags.job)):
        if value:
            made[name] = value
    return made


def _command(flags, rank):
    arguments = ([] if flags.no_local_rank else [f"--local_rank={rank}"]) + flags.arguments
    if flags.no_python:
        program = shutil.which(flags.program) or flags.program
        return [program, *arguments]
    kind = ["-m"] if flags.module else []
    return [sys.executable, "-u", "-m", "offloadd.deepspeed.rank", *kind, flags.program, *arguments]


def _wait(processes):
    """The exit status: of the first rank that failed by itself, after which the others are ended."""
    running, status = list(processes), 0
    followed_until = deadline = None

    def end_with(code):
        nonlocal status, deadline
        status, deadline = code, time.monotonic() + _TERMINATE_SECONDS
        for other in running:
            other.terminate()

    while running:
        for process in list(running):
            code = process.poll()
            if code is None:
                continue
            running.remove(process)
            if code == 0 or status != 0:
                continue
            if code != _ENDED_BY_ANOTHER:
                end_with(code if code > 0 else 128 - code)
            elif followed_until is None:
                followed_until = time.monotonic() + _CAUSE_SECONDS
        now = time.monotonic()
        if status == 0 and followed_until is not None and now > followed_until:
            end_with(1)
        if deadline is not None and now > deadline:
            for other in running:
                other.kill()
        time.sleep(0.05)
    return status or (0 if followed_until is None else 1)


def main(arguments=None):
    try:
        flags = parser().parse_args(arguments)
        ranks = rank_count(flags)
    except Error as error:
        print(f"offloadd-run: {error}", file=sys.stderr)
        return 2
    port = flags.master_port or _free_port()
    processes = [subprocess.Popen(_command(flags, rank), env=environment_of(flags, ranks, rank, port)) for rank in range(ranks)]

    def end(signal_number, _):
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal_number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells the ranks, too
    return _wait(processes)


def run_program(arguments):
    """One rank: `import deepspeed` is ours, then the program runs as if it had been started."""
    from . import install

    install()
    is_module = bool(arguments) and arguments[0] == "-m"
    if is_module:
        arguments = arguments[1:]
    if not arguments:
        print("offloadd.deepspeed.rank is started by offloadd-run", file=sys.stderr)
        return 2
    sys.argv = arguments
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            runpy.run_path(arguments[0], run_name="__main__")
    except Exception as failure:
        if error_id(failure) != 1803:
            raise
        sys.excepthook(type(failure), failure, failure.__traceback__)
        return _ENDED_BY_ANOTHER
    return 0


__getattr__ = refusing("deepspeed.launcher.runner")
