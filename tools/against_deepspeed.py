"""tools/bench --against deepspeed: the same model, numbers and threads in memory, with DeepSpeed ZeRO-Infinity and with offloadd.

  tools/bench --against deepspeed                            five rounds, about half an hour
  tools/bench --against deepspeed --rounds 1 --steps 4 --nvme-path /nvme0
  tools/bench --against deepspeed --chart docs/against_deepspeed.svg

The rows take turns in every round, so that a change in the machine's speed meets them all; seconds are medians over all steps of a
row, the first two of every run left out, and ratios are medians over rounds. Memory is the proportional set size of all processes
and memfd blocks that nobody has touched, the peak after those steps. DeepSpeed is installed into build/deepspeed, beside the torch
of .venv; its first run compiles its operators. python/benchmarks/mlp.py is the trainer and says the settings of each."""

import argparse
import contextlib
import dataclasses
import glob
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

from trainer_run import (MIB, ROOT, SETTLING_STEPS, MemoryWatch, Run, RunFailed, build, leave_nothing_behind, parse_size,
                         scratch_folder, total_seconds, trainer_environment)

DEEPSPEED = ("deepspeed==0.19.6", "ninja==1.13.0", "matplotlib==3.11.2")
ENVIRONMENT = os.path.join(ROOT, "build/deepspeed")
OPERATORS = os.path.join(ENVIRONMENT, "operators")  # what DeepSpeed compiles
TRAINER = os.path.join(ROOT, "python/benchmarks/mlp.py")
TARGETS = ["//python:package"]
CPU_ONLY = ("deepspeed", "parameters and state in memory")
BYTES_PER_PARAMETER = 14  # bf16 weight and gradient, two halves of the master and two moments: 2 + 2 + 2 + 4 + 4


def ratio(rounds, others):
    """The median over rounds, each against its neighbour in the same one."""
    return statistics.median(here / there for here, there in zip(rounds, others))


@dataclasses.dataclass
class Row:
    side: str  # memory | deepspeed | offloadd
    name: str
    flags: list
    durability: str = ""  # of offloadd's rows
    lines: list = dataclasses.field(default_factory=list)  # settled steps of all rounds
    rounds: list = dataclasses.field(default_factory=list)  # median seconds of each
    peaks: list = dataclasses.field(default_factory=list)
    losses: list = dataclasses.field(default_factory=list)  # of the first round
    bytes_per_step: list = dataclasses.field(default_factory=list)

    def seconds(self):
        return statistics.median(map(total_seconds, self.lines))

    def figures(self, memory):
        middle = lambda part: statistics.median(line["seconds"][part] for line in self.lines)
        return {"side": self.side, "name": self.name, "durability": self.durability, "seconds": self.seconds(), "forward": middle("forward"),
                "backward": middle("backward"), "step": middle("step"), "peak_bytes": max(self.peaks),
                "bytes_per_step": statistics.median(self.bytes_per_step), "steps": len(self.lines), "losses": self.losses,
                "rounds": self.rounds,
                "ratio_to_memory": ratio(self.rounds, memory.rounds)}


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(prog="tools/bench --against deepspeed", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of one run (default 6)")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ram", action="append", help="of offloadd: 2GiB, or a part of state + gradients; may be given more than once "
                                                       "(default 18%%, 26%%, 37%%, 60%%, 100%%)")
    parser.add_argument("--durability", action="append", help="of offloadd; may be given more than once (default step, checkpoint:100)")
    parser.add_argument("--nvme-path", help="a folder on the drive; build/ of this tree when left out")
    parser.add_argument("--chart", help="an SVG of step time against memory")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; messages on stderr")
    options = parser.parse_args(arguments)
    if options.steps <= SETTLING_STEPS or options.rounds < 1:
        parser.error(f"--steps must be more than {SETTLING_STEPS}, --rounds at least 1")
    options.bin = os.path.join(ROOT, "bazel-bin")
    return options


def say(text):
    print(text, file=sys.stderr, flush=True)


def install_deepspeed():
    """Returns its Python: an environment of its own that sees the torch of .venv."""
    python = os.path.join(ENVIRONMENT, "bin/python")
    ready = os.path.join(ENVIRONMENT, "installed")
    wanted = " ".join(DEEPSPEED)
    if os.path.exists(ready) and open(ready, encoding="utf-8").read() == wanted:
        return python
    say("installing " + wanted)
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    beside = os.path.join(ROOT, ".venv/bin/python")
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    try:
        subprocess.run([beside, "-m", "venv", ENVIRONMENT], check=True)
        folders = [subprocess.run([each, "-c", site], check=True, capture_output=True, text=True).stdout.strip() for each in (python, beside)]
        with open(os.path.join(folders[0], "torch_of_the_tree.pth"), "w", encoding="utf-8") as file:
            file.write(folders[1] + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *DEEPSPEED], check=True,
                       env={**os.environ, "DS_BUILD_OPS": "0"}, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RunFailed(f"DeepSpeed could not be installed into {ENVIRONMENT}: {error}") from None
    with open(ready, "w", encoding="utf-8") as file:
        file.write(wanted)
    return python


def forget_broken_operators():
    """One whose compilation was broken off keeps a lock that the next run would wait for without end."""
    for lock in glob.glob(os.path.join(OPERATORS, "*/lock")):
        shutil.rmtree(os.path.dirname(lock))


def find_pythons():
    """Returns the Python of each side."""
    python = os.path.join(ROOT, ".venv/bin/python")
    return {"memory": python, "offloadd": python, "deepspeed": install_deepspeed()}


def rows_of(options, parameters):
    whole = parameters * BYTES_PER_PARAMETER
    deepspeed = [(CPU_ONLY[1], "cpu", "cpu", []), ("state on the drive, pipelined", "cpu", "nvme", ["--pipelined"]),
                 ("all on the drive", "nvme", "nvme", []), ("all on the drive, pipelined", "nvme", "nvme", ["--pipelined"])]
    rows = [Row("memory", "in memory", [])]
    rows += [Row("deepspeed", name, ["--parameters", where, "--optimizer", state, *more]) for name, where, state, more in deepspeed]
    budgets = [parse_size(text, whole) for text in options.ram or ("18%", "26%", "37%", "60%", "100%")]
    for durability in options.durability or ("step", "checkpoint:100"):
        rows += [Row("offloadd", f"ram {ram // MIB} MiB" + (f", {durability}" if durability != "step" else ""),
                     ["--ram", str(ram), "--durability", durability], durability) for ram in budgets]
    return rows


def count_drive_bytes(run, counts):
    """Sets counts[pid] to what the kernel counted on drives for each process of a run, reads and writes together; one that has ended
    keeps its last count. Returns the sum."""
    for pid in run.processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/io", encoding="utf-8") as file:
            counters = dict(line.split(": ") for line in file)
            counts[pid] = int(counters["read_bytes"]) + int(counters["write_bytes"])
    return sum(counts.values())


def run_row(options, row, python, folder):
    command = [python, TRAINER, "--with", row.side, "--pool", folder, "--blocks", str(options.blocks), "--width", str(options.width),
               "--steps", str(options.steps), "--threads", str(options.threads), *row.flags]
    environment = {**trainer_environment(), "PYTHONPATH": os.path.join(ROOT, "python"), "DS_ACCELERATOR": "cpu",
                   "TORCH_EXTENSIONS_DIR": OPERATORS, "PATH": os.path.join(ENVIRONMENT, "bin") + os.pathsep + os.environ["PATH"]}
    lines, counts, marks, peaks = [], {}, [], []
    with Run([(command, environment)]) as run, MemoryWatch(run) as watch:
        for line in run.steps():
            marks.append(count_drive_bytes(run, counts))
            peaks.append(watch.mark())
            lines.append(line)
    settled = lines[SETTLING_STEPS:]
    row.lines += settled
    row.rounds.append(statistics.median(map(total_seconds, settled)))
    row.peaks.append(max(peaks[SETTLING_STEPS:]))
    row.bytes_per_step.append((marks[-1] - marks[SETTLING_STEPS - 1]) / len(settled))
    row.losses = row.losses or [line["loss"] for line in lines]


def count_parameters(options):
    width = options.width
    return options.blocks * (2 * width + 8 * width * width + 5 * width) + width * width + width


def find(figures, side, name):
    return next(row for row in figures if (row["side"], row["name"]) == (side, name))


def fastest_on_the_drive(figures):
    """Of DeepSpeed's rows."""
    return min((row for row in figures if row["side"] == "deepspeed" and (row["side"], row["name"]) != CPU_ONLY), key=lambda row: row["seconds"])


def compare(figures, rival, parts):
    """Yields for each part of the rival's memory, and each durability, the fastest row of offloadd in no more than that."""
    for part in parts:
        for durability in dict.fromkeys(row["durability"] for row in figures if row["side"] == "offloadd"):
            rows = [row for row in figures if row["side"] == "offloadd" and row["durability"] == durability
                    and row["peak_bytes"] <= part * rival["peak_bytes"]]
            if rows:
                best = min(rows, key=lambda row: row["seconds"])
                yield {"rival": rival["name"], "side": rival["side"], "part": part, "durability": durability, "name": best["name"],
                       "ratio": ratio(best["rounds"], rival["rounds"]), "memory": best["peak_bytes"] / rival["peak_bytes"]}


def measure(options, folder):
    parameters = count_parameters(options)
    pythons = find_pythons()
    forget_broken_operators()
    rows = rows_of(options, parameters)
    for number in range(1, options.rounds + 1):
        for row in rows:
            say(f"round {number} of {options.rounds}: {row.side}, {row.name}")
            with scratch_folder(argparse.Namespace(nvme_path=folder)) as pool:
                run_row(options, row, pythons[row.side], pool)
    figures = [row.figures(rows[0]) for row in rows]
    comparisons = [*compare(figures, fastest_on_the_drive(figures), (1, 1 / 2, 1 / 3)), *compare(figures, find(figures, *CPU_ONLY), (1,)),
                   *compare(figures, figures[0], (1, 0.5, 0.3))]
    exact = all(row["losses"] == figures[0]["losses"] for row in figures if row["side"] == "offloadd")
    return {"schema_version": 1, "command": "bench --against deepspeed", "parameters": parameters, "rounds": options.rounds,
            "versions": list(DEEPSPEED), "losses_equal_memory": exact, "rows": figures, "comparisons": comparisons}


def table(result):
    lines = [f"{result['parameters'] / 1e6:.1f} M parameters in bf16, AdamW, clipping, {result['versions'][0]}; {result['rounds']} rounds",
             f"{'':46}{'forward':>9}{'backward':>9}{'step':>7}{'= s':>7}{'x memory':>10}{'GiB':>7}{'B/param':>9}"]
    for row in result["rows"]:
        name = row["name"] if row["side"] == "memory" else f"{row['side']}: {row['name']}"
        lines.append(f"{name:46}{row['forward']:9.2f}{row['backward']:9.2f}{row['step']:7.2f}{row['seconds']:7.2f}"
                     f"{row['ratio_to_memory']:10.2f}{row['peak_bytes'] / 2**30:7.2f}{row['bytes_per_step'] / result['parameters']:9.1f}")
    for each in result["comparisons"]:
        rival = each["rival"] if each["side"] == "memory" else f"{each['side']}, {each['rival']}"
        lines.append(f"{each['ratio']:.2f} x the time of {rival}, at {each['memory']:.2f} of its memory (limit {each['part']:.2f}): {each['name']}")
    lines.append("losses of offloadd " + ("equal those in memory, bit for bit" if result["losses_equal_memory"] else "DIFFER from those in memory"))
    return "\n".join(lines)


DRAW = """
import json, sys
import matplotlib
matplotlib.use("svg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "chart", "font.size": 10})
from matplotlib import pyplot
result = json.load(sys.stdin)
figure, axes = pyplot.subplots(figsize=(7, 4.2))
for side, durability in dict.fromkeys((row["side"], row["durability"]) for row in result["rows"]):
    rows = sorted((row for row in result["rows"] if (row["side"], row["durability"]) == (side, durability)), key=lambda row: row["peak_bytes"])
    label = {"memory": "in memory", "deepspeed": "DeepSpeed"}.get(side) or f"offloadd, durability = {durability}"
    style = {"memory": "k*", "deepspeed": "s"}.get(side, "o-")
    axes.plot([row["peak_bytes"] / 2**30 for row in rows], [row["seconds"] for row in rows], style, label=label)
axes.set(xlabel="memory of all processes, GiB", ylabel="seconds per step", ylim=(0, None), xlim=(0, None))
axes.legend(frameon=False)
axes.grid(alpha=0.3)
figure.tight_layout()
figure.savefig(sys.argv[1], metadata={"Date": None})
"""


def draw(result, path):
    """Writes the chart, with the matplotlib of DeepSpeed's environment."""
    python = os.path.join(ENVIRONMENT, "bin/python")
    subprocess.run([python, "-c", DRAW, path], input=json.dumps(result), text=True, check=True)


def main(arguments):
    options = parse_arguments(arguments)
    begin = time.monotonic()
    leave_nothing_behind()
    try:
        build(options, TARGETS)
        with scratch_folder(options) as folder:
            result = measure(options, folder)
        result["seconds"] = time.monotonic() - begin
        if options.chart:
            draw(result, options.chart)
    except RunFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0 if result["losses_equal_memory"] else 1
