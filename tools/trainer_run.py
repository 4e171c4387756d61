"""Runs a trainer, examples/train above all, and looks at it from outside: its lines, its daemon's bytes, the memory of both.

Used by tools/demo, tools/bench, tools/budget_check and tools/rank_costs. Nothing is left behind: a run is ended with its daemon when the
`with` block ends, however that happens.
"""

import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from private_daemon import private_daemon_of

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
# A folder of tools/gpu_pack has its programs where a checkout has their sources.
BUILT = os.path.join(ROOT, "bazel-bin") if os.path.exists(os.path.join(ROOT, "WORKSPACE")) else ROOT
MIB = 1 << 20
COMPUTE_SLOWDOWN = 1.3  # of arithmetic beside streaming: a step cannot beat max(io, 1.3 x compute)
SETTLING_STEPS = 2  # the first steps record the order and fill memory
BYTES_IN_MEMORY = 16  # per parameter: weights, gradients, masters and moments of a run in memory
END_TIMEOUT_SECONDS = 30  # for a daemon that drains


class RunFailed(Exception):
    """The trainer did not do what was asked; the text says what it said."""


def leave_nothing_behind():
    """Makes a SIGTERM end the program as an exception does: through every `finally`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def add_model_arguments(parser, params, steps):
    """Adds the flags that describe a model and its run to an argument parser."""
    parser.add_argument("--model", default="llama", choices=["llama", "gpt2"])
    parser.add_argument("--params", default=params, help=f"parameters of the model (default {params})")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], help="of the weights (default bf16, fp32 where the processor has no AVX-512)")
    parser.add_argument("--seq", type=int, default=128, help="tokens of one row (default 128)")
    parser.add_argument("--batch", type=int, default=2, help="rows of a micro-batch (default 2)")
    parser.add_argument("--micro-batches", type=int, help="per optimizer step, of all ranks together (default: one for each rank)")
    parser.add_argument("--steps", type=int, default=steps, help=f"of one run (default {steps})")
    parser.add_argument("--threads", type=int, default=0, help="of torch, of all ranks together; 0: what it chooses")
    parser.add_argument("--ranks", type=int, default=1,
                        help="processes that train the offloaded model together and share the step's micro-batches (default 1)")
    parser.add_argument("--nvme-path", help="a folder on the drive; build/ of this tree when left out")
    parser.add_argument("--bin", default=BUILT,
                        help="where the built programs are; they are built first when this is left out")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; messages on stderr")


def usual_dtype(cpuinfo):
    """bf16, but on processors (as /proc/cpuinfo has them) on which torch multiplies it many times slower than fp32."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return "fp32" if flags and "avx512bw" not in flags[1].split() else "bf16"


def usual_dtype_here():
    """usual_dtype() of this machine."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return usual_dtype(file.read())


def choose_dtype(options):
    """Sets --dtype when it was left out, and says so where it is not bf16."""
    if options.dtype is not None:
        return
    options.dtype = "bf16"
    if getattr(options, "device", "cpu") == "cpu":
        options.dtype = usual_dtype_here()
    if options.dtype != "bf16":
        print("in fp32: this processor has no AVX-512, and without it torch multiplies bf16 some thirty times slower (--dtype bf16 does it)", file=sys.stderr)


def add_device_arguments(parser):
    """Adds the flags that say where the model is trained."""
    parser.add_argument("--device", default="cpu", help="where the model is trained, by torch's name: cuda, cuda:1 (default cpu)")
    parser.add_argument("--gpu-ram", help="with --device: the budget of the device's memory for weights and gradients")


def device_flags(options, offloaded):
    """Returns the trainer's flags for that."""
    if options.device == "cpu":
        return []
    return ["--device", options.device, *(["--gpu-ram", options.gpu_ram] if offloaded and options.gpu_ram else [])]


def share_micro_batches(parser, options):
    """Sets --micro-batches when it was left out; ends with a usage error when the ranks cannot share them."""
    if options.micro_batches is None:
        options.micro_batches = max(options.ranks, 1)
    if options.ranks < 1 or options.micro_batches % options.ranks != 0:
        parser.error(f"--micro-batches {options.micro_batches} are those of the step: a multiple of --ranks {options.ranks}")


def trainer_flags(options, steps, params=None, ranks=1, same_bits=False):
    """Returns the flags of a run of `steps` steps without its offloading, for each of its ranks. With same_bits they are those
    of one process that computes what options.ranks do: torch's kernels depend on the number of threads."""
    sharing = options.ranks if same_bits else ranks
    threads = options.threads or (os.cpu_count() if sharing > 1 else 0)
    return ["--model", options.model, "--params", str(params or options.params), "--dtype", options.dtype,
            "--seq", str(options.seq), "--batch", str(options.batch),
            "--micro-batches", str(options.micro_batches // ranks), "--threads", str(max(threads // sharing, 1) if threads else 0),
            "--as-ranks", str(sharing // ranks), "--steps", str(steps), "--sample", "0", "--clip", "1.0"]


def rank_environments(ranks):
    """Returns what a launcher of so many ranks on this node sets for each of them; nothing for one."""
    if ranks == 1:
        return [{}]
    run_id = f"tools-{os.getpid()}-{time.monotonic_ns()}"
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
             "TORCHELASTIC_RUN_ID": run_id} for rank in range(ranks)]


def program(options, path):
    """Returns the path of a built program, or None when it is not there."""
    found = os.path.join(options.bin, path)
    return found if os.access(found, os.X_OK) else None


def build(options, targets):
    """Installs what the build needs and builds the targets, unless --bin names a folder of programs."""
    if options.bin != os.path.join(ROOT, "bazel-bin"):
        return
    if subprocess.run([os.path.join(ROOT, "tools/setup")], check=False).returncode != 0:
        raise RunFailed("tools/setup did not succeed")
    command = ["bazel", "build", "-c", "opt", *targets]
    if subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode != 0:
        raise RunFailed("the build failed: " + " ".join(command))


@contextlib.contextmanager
def scratch_folder(options):
    """A new folder on the drive, removed with all that is in it at the end."""
    parent = options.nvme_path or os.path.join(ROOT, "build")
    if options.nvme_path is None:
        os.makedirs(parent, exist_ok=True)
    if not os.path.isdir(parent):
        raise RunFailed(f"--nvme-path {parent} is not a directory")
    folder = tempfile.mkdtemp(prefix="offloadd-scratch-", dir=parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_drive(options, folder, seconds=1.5):
    """Returns GB/s of reads, writes and a step's mix through our own I/O path; `seconds` for each of the three."""
    io_bench = program(options, "tools/io_bench")
    if io_bench is None:
        raise RunFailed(f"{options.bin}/tools/io_bench is not built")
    result = subprocess.run([io_bench, "--path", folder, "--seconds", str(seconds)],
                            capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RunFailed("io_bench: " + result.stderr.strip())
    return json.loads(result.stdout)


def total_seconds(line):
    """Of one step: forward, backward and step; `wait` is contained in them."""
    return sum(line["seconds"][part] for part in ("forward", "backward", "step"))


def model_facts(options, params=None):
    """Asks the trainer, with no step, for the sizes of a model: its line of the start."""
    with TrainerRun(options, trainer_flags(options, 0, params)) as run:
        for _ in run.steps():
            pass
        return run.start


def trainer_environment():
    """Torch's threads spin while they wait, by default, on the cores that daemon and neighbours need."""
    return {"OMP_WAIT_POLICY": "passive", **os.environ}


class Run:
    """One run of a trainer, as a context manager: one process, or several ranks, of which the first one speaks: lines of
    JSON, each an `event`. `start` is its first one. `ranks`: [(command, environment)] of each."""

    def __init__(self, ranks):
        self.start = {}
        self._messages = collections.deque(maxlen=20 * len(ranks))
        self._ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
                       for command, environment in ranks]
        self._process = self._ranks[0]
        self._readers = [threading.Thread(target=self._keep_messages, args=(rank,), daemon=True) for rank in self._ranks]
        for reader in self._readers:
            reader.start()
        self._daemon = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        daemon = self.daemon()
        for rank in self._ranks:
            if rank.poll() is None:
                rank.terminate()
        for rank in self._ranks:
            try:
                rank.wait(timeout=5)
            except subprocess.TimeoutExpired:
                rank.kill()
            rank.wait()
            rank.stdout.close()
        end = time.monotonic() + END_TIMEOUT_SECONDS
        while daemon is not None and os.path.exists(f"/proc/{daemon}") and time.monotonic() < end:
            time.sleep(0.05)  # it drains, commits, and holds the store until then

    def _keep_messages(self, rank):
        for line in rank.stderr:
            self._messages.append(line.rstrip())

    def steps(self):
        """Yields the line of every step; raises RunFailed when the run does not end well."""
        for text in self._process.stdout:
            if not text.startswith("{"):
                continue  # a library that speaks there
            line = json.loads(text)
            if line["event"] == "start":
                self.start = line
                self.daemon()
            elif line["event"] == "step":
                yield line
        codes = [rank.wait() for rank in self._ranks]
        for reader in self._readers:
            reader.join(timeout=5)
        if any(codes) or not self.start:
            raise RunFailed(f"the trainer ended with code {', '.join(map(str, codes))}:\n" + "\n".join(self._messages))

    def kill(self):
        """Kills trainer and daemon with SIGKILL; returns the lines of steps that were still on their way."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        lines = []
        for text in self._process.stdout:
            with contextlib.suppress(ValueError):  # the line it was writing
                lines.append(json.loads(text))
        for rank in self._ranks:
            rank.wait()
        return [line for line in lines if line["event"] == "step"]

    def trainer(self):
        return self._process.pid

    def trainers(self):
        return [rank.pid for rank in self._ranks]

    def daemon(self):
        """Returns the process id of the run's private daemon, or None while there is none."""
        if self._daemon is None:
            # Any of the ranks may have started it.
            self._daemon = next((pid for pid in (private_daemon_of(rank.pid) for rank in self._ranks) if pid is not None), None)
        return self._daemon

    def processes(self):
        daemon = self.daemon()
        return self.trainers() + ([] if daemon is None else [daemon])

    def daemon_bytes(self):
        """Returns (read, written) that the kernel counted for the daemon, on drives; None without one."""
        try:
            with open(f"/proc/{self.daemon()}/io", encoding="utf-8") as file:
                counters = dict(line.split(": ") for line in file)
            return int(counters["read_bytes"]), int(counters["write_bytes"])
        except (OSError, KeyError, ValueError):
            return None


class TrainerRun(Run):
    """A run of examples/train."""

    def __init__(self, options, flags, ranks=1, environment=None):
        train, daemon = program(options, "examples/train"), program(options, "offloadd/offloadd")
        if train is None:
            raise RunFailed(f"{options.bin}/examples/train is not built")
        environment = {**trainer_environment(), **(environment or {})}
        if daemon is not None:
            environment.setdefault("OFFLOADD_BINARY", daemon)
        super().__init__([([train, "--json", *flags], {**environment, **of_rank}) for of_rank in rank_environments(ranks)])


def step_log_lines(path):
    """Returns the objects of a step log (OFFLOADD_STEP_LOG); none when there is no file."""
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []


def measure_link(options):
    """Returns GB/s of copies to the device and back, alone and together, by `offloadctl doctor`; None where it does not say."""
    offloadctl = program(options, "tools/offloadctl")
    if options.device == "cpu" or offloadctl is None:
        return None
    result = subprocess.run([offloadctl, "doctor", "--json"], capture_output=True, text=True, check=False)
    name = options.device if ":" in options.device else options.device + ":0"
    try:
        figures = [check["figures"] for check in json.loads(result.stdout)["checks"] if check["name"] == name + " copies"]
    except (ValueError, KeyError):
        return None
    return figures[0] if figures else None


# ---- memory ------------------------------------------------------------------------------------------


def kernel_bytes(pid, name):
    """Returns {key: bytes} of the lines of /proc/PID/NAME that count kB; nothing of a process that has ended. Raises RunFailed when it
    may not be read."""
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8") as file:
            words = [line.split() for line in file]
    except (FileNotFoundError, ProcessLookupError):
        return {}
    except OSError as error:
        raise RunFailed(f"the memory of process {pid} cannot be read: {error}") from None
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in words if len(line) == 3 and line[2] == "kB"}


def proportional_bytes(pid):
    """Returns the proportional set size of a process; 0 when it is gone."""
    try:
        return kernel_bytes(pid, "smaps_rollup").get("Pss", 0)
    except RunFailed:
        return 0


def memfd_blocks(pids):
    """Returns {(device, inode): bytes of its blocks} of every memfd that one of the processes has open."""
    blocks = {}
    for pid in pids:
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for number in numbers:
            path = f"/proc/{pid}/fd/{number}"
            try:
                if os.readlink(path).startswith("/memfd:"):
                    info = os.stat(path)
                    blocks[(info.st_dev, info.st_ino)] = info.st_blocks * 512
            except OSError:
                continue
    return blocks


MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)\s+(.*)$")


def memfd_mapped_bytes(pids):
    """Returns {(device, inode): proportional bytes of its mappings}, of all the processes together."""
    mapped = collections.Counter()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps", encoding="utf-8") as file:
                lines = file.readlines()
        except OSError:
            continue
        key = None
        for line in lines:
            if line.startswith("Pss:"):
                if key is not None:
                    mapped[key] += int(line.split()[1]) * 1024
                continue
            match = MAPPING.match(line) if line[0] in "0123456789abcdef" else None
            if match is not None:
                is_memfd = match[4].startswith("/memfd:")
                key = (os.makedev(int(match[1], 16), int(match[2], 16)), int(match[3])) if is_memfd else None
    return mapped


def untouched_bytes(pids):
    """Returns the bytes of memfd blocks that no process has in its page tables: allocated, yet in no PSS."""
    mapped = memfd_mapped_bytes(pids)
    return sum(max(0, bytes_ - mapped[key]) for key, bytes_ in memfd_blocks(pids).items())


class MemoryWatch:
    """Samples the memory of a run in a thread and keeps the peak, and the least, since the last mark().

    A sample is the proportional set size of trainer and daemon plus untouched memfd blocks. The latter only
    shrink as pages are touched, and are looked at less often: what is stale counts too much, never too little.
    Sampling walks page tables: of large processes less often, so that it takes a twentieth of a core at most.
    """

    SAMPLE_SECONDS = 0.05
    UNTOUCHED_SECONDS = 0.5
    PAUSE_FACTOR = 19

    def __init__(self, run, sample_seconds=SAMPLE_SECONDS):
        self._run = run
        self._sample_seconds = sample_seconds
        self._sampling = threading.Lock()  # one sample at a time: no old one ends after a mark
        self._untouched, self._untouched_at = 0, -1e9
        self._peak, self._least = 0, float("inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def mark(self):
        """Returns the peak since the last mark, with one more sample of now, and begins anew."""
        return self.mark_range()[1]

    def mark_range(self):
        """The same, of the least and the peak."""
        with self._sampling:
            self._sample(stale_seconds=0)
            least, peak = self._least, self._peak
            self._peak, self._least = 0, float("inf")
        return least, peak

    def _sample(self, stale_seconds):
        processes = self._run.processes()
        if time.monotonic() - self._untouched_at >= stale_seconds:
            self._untouched, self._untouched_at = untouched_bytes(processes), time.monotonic()
        sample = self._untouched + sum(map(proportional_bytes, processes))
        self._peak, self._least = max(self._peak, sample), min(self._least, sample)

    def _watch(self):
        pause = self._sample_seconds
        while not self._stop.wait(pause):
            begin = time.monotonic()
            with self._sampling:
                self._sample(self.UNTOUCHED_SECONDS)
            pause = max(self._sample_seconds, self.PAUSE_FACTOR * (time.monotonic() - begin))


def parse_size(text, whole_bytes):
    """Reads "512MiB", "2G", or "25%" of `whole_bytes`, in whole MiB; raises RunFailed for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(%|[kmgt]?i?b?)\s*", text.lower())
    try:
        number = float(match[1])
    except (TypeError, ValueError):
        raise RunFailed(f'"{text}" is not a size: write 512MiB, 2GiB or 25%') from None
    if match[2] == "%":
        return int(whole_bytes * number / 100) // MIB * MIB
    power = " kmgt".index(match[2][0]) if match[2] and match[2][0] in "kmgt" else 0
    return int(number * (1024 if "i" in match[2] else 1000) ** power)
