"""Tests tools/demo, tools/bench, tools/budget_check and tools/rank_costs with programs that behave like the trainer and its daemon."""

import json
import os
import stat
import subprocess
import sys
import tempfile
import unittest

TOOLS = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, TOOLS)
sys.dont_write_bytecode = True
import trainer_run  # noqa: E402

# Trains nothing: says the lines of a run whose every step takes a second in memory and 1.5 offloaded, or as long as it does
# take, STEP_SECONDS, where SAYS_THE_TRUTH. Step LOSES_LINE commits at once and never says its line. The
# offloaded one shares two memfds with its daemon, which is no child of it: MAPPED_MIB that it touches, and UNTOUCHED_MIB
# that are allocated only. FILE_MIB and WRITTEN_MIB of a mapped file it reads, and writes for itself; MOMENT_MIB it has
# for a moment of every step.
TRAINER = r'''#!PYTHON
import json, mmap, os, shutil, subprocess, sys, time
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
on = flags["--offload"] == "on" if "--offload" in flags else False
for flag, variable in (("--device", "DEVICE"), ("--gpu-ram", "GPU_RAM")):
    # Of the model, which costs nothing, there are only the sizes.
    asked = int(flags["--steps"]) > 0 and (on or flag == "--device")
    assert flags.get(flag) == (os.environ.get(variable) if asked else None), flags
if os.environ.get("MEMORY_FAILS") and not on and int(flags["--steps"]) > 0: sys.exit("no room")
parameters = int(float(flags["--params"].replace("M", "e6")))
step_seconds = float(os.environ.get("STEP_SECONDS", 0.01))
scale = step_seconds / 1.5 if os.environ.get("SAYS_THE_TRUTH") else 1
tiny = parameters < 1e6
def say(**line): print(json.dumps(line), flush=True)
def sizes(name): return 0 if tiny else int(os.environ.get(name, 0))
def meet(where):
    # Ranks begin and end together, however fast their interpreters start.
    ranks = int(os.environ.get("WORLD_SIZE", 1)) if on else 1
    name = os.path.join(flags.get("--nvme-path", ""), where)
    if ranks > 1: open(name + os.environ["RANK"], "w").close()
    end = time.monotonic() + 100
    while ranks > 1 and not all(os.path.exists(name + str(rank)) for rank in range(ranks)):
        if time.monotonic() > end: sys.exit("a rank is missing where it " + where)
        time.sleep(0.01)
def start_daemon():
    # Of a process that waits for it, which has nothing of what the trainer maps later.
    reading, writing = os.pipe()
    trainer, waits = os.getpid(), os.fork()
    if waits == 0:
        with open("/proc/self/comm", "w") as name: name.write("offloadd-waits")
        daemon = subprocess.Popen([os.environ["OFFLOADD_BINARY"], "--parent-pid", str(trainer)], close_fds=False)
        os.write(writing, str(daemon.pid).encode())
        daemon.wait()
        os._exit(0)
    return waits, int(os.read(reading, 20))
def touch(memory):
    for page in range(0, len(memory), 4096): memory[page] = 1
touched, untouched = sizes("MAPPED_MIB"), sizes("UNTOUCHED_MIB")
resumed, keep, read_only = 0, [], b""
if on:
    marker = os.path.join(flags["--nvme-path"], flags["--job"])
    if os.path.exists(marker): resumed = int(open(marker).read())
    files = [(os.memfd_create("offloadd-test", 0), mib << 20) for mib in (touched, untouched)]
    waits, daemon = start_daemon()
    for fd, length in files:
        if length:
            os.posix_fallocate(fd, 0, length)
            keep.append(mmap.mmap(fd, length))
    if touched: touch(keep[0])
    for mib, kind in ((sizes("FILE_MIB"), mmap.ACCESS_READ), (sizes("WRITTEN_MIB"), mmap.ACCESS_COPY)):
        if not mib: continue
        file = open(os.path.join(os.path.dirname(os.environ["OFFLOADD_BINARY"]), "library"), "rb")
        keep.append(mmap.mmap(file.fileno(), mib << 20, access=kind))
        if kind == mmap.ACCESS_READ: read_only = keep[-1]
        else: touch(keep[-1])
meet("begins")
say(event="start", model="fake", parameters=parameters, state_bytes=12 * parameters, gradient_bytes=2 * parameters,
    ram_bytes=0, resumed_step=resumed, steps=int(flags["--steps"]),
    planned={"read_bytes_per_step": 14 * parameters, "write_bytes_per_step": 12 * parameters, "memory_bytes": 0})
if os.environ.get("TRAINER_FAILS"):
    print("OFD-1301 memory budget is too small", file=sys.stderr)
    sys.exit(1)
grow = []
for step in range(resumed + 1, int(flags["--steps"]) + 1):
    loses_line = on and str(step) == os.environ.get("LOSES_LINE")
    if not loses_line: time.sleep(step_seconds)
    if on and sizes("MOMENT_MIB"): b"x" * (sizes("MOMENT_MIB") << 20)
    if os.environ.get("GROWS") and on: grow.append(bytearray(os.urandom(1 << 20)) * 16)
    if on:  # whole or not at all, whenever it is killed
        new = marker + ".new" + os.environ.get("RANK", "")  # of each rank its own: the other one may just be moving its
        with open(new, "w") as file: file.write(str(step))
        os.replace(new, marker)
    wrong = on and str(step) == os.environ.get("WRONG_STEP")
    if loses_line: time.sleep(100)
    read_only[::4096]  # as text that runs: else the kernel may take it away
    if on and "OFFLOADD_STEP_LOG" in os.environ:  # a second in memory, and a quarter of the step in vain
        with open(os.environ["OFFLOADD_STEP_LOG"], "a") as file:
            file.write(json.dumps({"step": step, "seconds": 1.5, "gpu": {"bytes_to_device": 36_000_000_000, "bytes_to_host": 2_000_000_000,
                                                                         "stall_seconds": 0.375 if step > 2 else 99}}) + "\n")
    say(event="step", step=step, loss=2.0 if wrong else 1.0 / step, grad_norm=1.0, learning_rate=1e-3,
        seconds={"forward": 0.25 * scale, "backward": 0.5 * scale, "step": (0.75 if on else 0.25) * scale, "wait": 0.25 * scale if on else 0},
        bytes_read=14 * parameters if on else 0, bytes_written=12 * parameters if on else 0,
        resident_bytes=0, peak_bytes=0, durable_epoch=step)
meet("ends")
if on:
    os.kill(daemon, 9)
    os.waitpid(waits, 0)
say(event="end", step=int(flags["--steps"]), durable_epoch=int(flags["--steps"]))
'''

DAEMON = r'''#!PYTHON
import time
time.sleep(60)
'''

IO_BENCH = r'''#!PYTHON
print('{"path":"x","engine":"uring","file_bytes":1,"read_gbps":2.0,"write_gbps":1.0,"mixed_gbps":2.6}')
'''

DOCTOR = r'''#!PYTHON
print('{"checks":[{"name":"standin:0 copies","figures":{"to_device_gbps":30.0,"to_host_gbps":20.0,"both_gbps":40.0}}]}')
'''

KERNEL = r'''#!/bin/sh
echo "read, modify, write        1 threads     500 M elements/s   14.0 GB/s"
echo "AdamW fp32                 1 threads     450 M elements/s   12.6 GB/s"
echo "1 threads: torch 400 M elements/s, kernels (avx512) 440 M elements/s, ratio 1.100"
'''


class ScriptTest(unittest.TestCase):
    def setUp(self):
        self._folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(self._folder.cleanup)
        self.bin = os.path.join(self._folder.name, "bin")
        self.pool = os.path.join(self._folder.name, "pool")
        os.mkdir(self.pool)
        for path, text in {"examples/train": TRAINER, "offloadd/offloadd": DAEMON, "tools/io_bench": IO_BENCH,
                           "kernels/update_benchmark": KERNEL}.items():
            self.write(path, text)

    def write(self, path, content):
        path = os.path.join(self.bin, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.replace("#!PYTHON", "#!" + sys.executable).encode())
        os.chmod(path, stat.S_IRWXU)

    def run_script(self, script, *arguments, **environment):
        command = [sys.executable, os.path.join(TOOLS, script), "--bin", self.bin, "--nvme-path", self.pool, *arguments]
        env = {key: value for key, value in os.environ.items() if key != "OFFLOADD_BINARY"}
        result = subprocess.run(command, capture_output=True, text=True, check=False,
                                env={**env, "PATH": "", **environment})
        self.assertEqual(os.listdir(self.pool), [], "something was left behind")
        return result

    def run_json(self, script, *arguments, **environment):
        result = self.run_script(script, "--json", *arguments, **environment)
        self.assertIn(result.returncode, (0, 1), result.stderr)
        return result.returncode, json.loads(result.stdout)


class BenchTest(ScriptTest):
    def test_compares_the_step_with_the_bound(self):
        _, result = self.run_json("bench", "--params", "100M", "--steps", "4")
        self.assertAlmostEqual(result["bound"]["io_seconds"], 26 * 100e6 / 2.6e9)
        self.assertAlmostEqual(result["bound"]["bound_seconds"], 1.3)
        self.assertAlmostEqual(result["bound"]["fraction"], 1.3 / 1.5)
        self.assertAlmostEqual(result["bytes_per_parameter"]["read"], 14)
        self.assertEqual(result["ram_bytes"], 333 << 20)
        self.assertEqual(result["kernel"]["ratio_to_torch"], {"1": 1.1})
        self.assertAlmostEqual(result["kernel"]["fraction_of_read_modify_write"]["AdamW fp32, 1 threads"], 0.9)

    def test_prints_a_table(self):
        result = self.run_script("bench", "--steps", "3", "--rounds", "1", "--no-kernels")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("reached   0.867 of max(io, 1.3 x compute) = 1.30 s", result.stdout)
        self.assertNotIn("link", result.stdout)

    def test_a_device_computes_beside_the_cores(self):
        _, result = self.run_json("bench", "--params", "100M", "--steps", "4", "--device", "standin", "--gpu-ram", "1GiB", "--no-kernels",
                                  DEVICE="standin", GPU_RAM="1GiB")
        self.assertAlmostEqual(result["bound"]["bound_seconds"], 1.0)  # both
        self.assertIsNone(result["bound"]["link_seconds"])  # there is no offloadctl
        self.assertAlmostEqual(result["offloaded"]["tokens_per_second"], 2 * 128 / 1.5)
        self.assertAlmostEqual(result["offloaded"]["tflops"], 6 * 100e6 * 2 * 128 / 1.5 * 1e-12)
        self.assertAlmostEqual(result["memory"]["tokens_per_second"], 2 * 128)

    def test_the_link_to_a_device_may_be_the_bound(self):
        self.write("tools/offloadctl", DOCTOR)
        _, result = self.run_json("bench", "--params", "100M", "--steps", "4", "--device", "standin", "--no-kernels", DEVICE="standin")
        self.assertAlmostEqual(result["bound"]["link_seconds"], 1.2)
        self.assertAlmostEqual(result["bound"]["fraction"], 1.2 / 1.5)
        self.assertAlmostEqual(result["gpu"]["stall_share"], 0.25)
        run = self.run_script("bench", "--params", "100M", "--steps", "4", "--device", "standin", "--no-kernels", DEVICE="standin")
        self.assertIn("0.800 of max(io, compute, link) = 1.20 s", run.stdout)
        self.assertIn("the GPU waits for copies 25.0 % of a step", run.stdout)
        self.assertIn("36.00 GB to the device and 2.00 GB back a step (30.0 in, 20.0 out, 40.0 both GB/s)", run.stdout)

    def test_a_device_may_have_no_room_for_the_run_in_memory(self):
        code, result = self.run_json("bench", "--steps", "4", "--device", "standin", "--no-kernels", DEVICE="standin", MEMORY_FAILS="1")
        self.assertEqual((code, result["memory"], result["bound"]["compute_seconds"]), (0, None, 0))
        run = self.run_script("bench", "--steps", "4", "--no-kernels", "--device", "standin", DEVICE="standin", MEMORY_FAILS="1")
        self.assertIn("not in the memory of standin: no room", run.stderr)
        self.assertIn("tokens/s", run.stdout)

    def test_repeats_what_the_trainer_said_when_it_fails(self):
        result = self.run_script("bench", TRAINER_FAILS="1")
        self.assertEqual(result.returncode, 1)
        self.assertIn("OFD-1301", result.stderr)

    def test_refuses_what_it_cannot_use(self):
        for arguments in (["--steps", "2"], ["--ram", "much"], ["--nvme-path", "/no/such/folder"], ["--unknown"]):
            self.assertNotEqual(self.run_script("bench", *arguments).returncode, 0, arguments)


class DemoTest(ScriptTest):
    def demo(self, **environment):
        return self.run_script("demo", "--json", "--params", "1M", "--steps", "8", **{"STEP_SECONDS": "0.5", "SAYS_THE_TRUTH": "1", **environment})

    def unseen(self, result):
        """How many steps were committed without their lines: the kill may have come between the two."""
        unseen = result["resumed_step"] - result["killed_after_step"]
        self.assertIn(unseen, (0, 1))
        return unseen

    def test_kills_in_the_middle_resumes_and_compares_every_loss(self):
        run = self.demo()
        self.assertEqual(run.returncode, 0, run.stderr)
        result = json.loads(run.stdout)
        self.assertGreaterEqual(result["killed_after_step"], 4)
        self.assertLess(result["killed_after_step"], 8)
        unseen = self.unseen(result)
        self.assertEqual((result["steps_compared"], result["losses_that_differ"]), (8 - unseen, 0))
        self.assertAlmostEqual(result["measured"]["bytes_read"], 14e6)
        self.assertIn("SIGKILL to the trainer", run.stderr)
        self.assertIn(f"All {8 - unseen} losses", run.stderr)
        self.assertIn("are, to the last digit, those of the run that was neither offloaded nor killed", run.stderr)

    def test_a_step_may_be_committed_before_its_line_is_there(self):
        run = self.demo(LOSES_LINE="5", SAYS_THE_TRUTH="", STEP_SECONDS="0.01")
        self.assertEqual(run.returncode, 0, run.stderr)
        result = json.loads(run.stdout)
        self.assertEqual((result["killed_after_step"], result["resumed_step"], result["steps_compared"]), (4, 5, 7))
        self.assertIn("All 7 losses (step 5 was committed when the kill came, and its loss not yet printed)", run.stderr)

    def test_on_a_device_the_losses_are_those_of_a_run_there(self):
        run = self.run_script("demo", "--json", "--params", "1M", "--steps", "8", "--device", "standin", STEP_SECONDS="0.5", DEVICE="standin",
                              SAYS_THE_TRUTH="1", MEMORY_FAILS="1")
        self.assertEqual(run.returncode, 0, run.stderr)
        result = json.loads(run.stdout)
        self.assertEqual((result["steps_compared"], result["losses_that_differ"], result["compute_seconds"]), (8 - self.unseen(result), 0, 0))
        self.assertIn("1. Offloaded, on standin, not interrupted", run.stderr)
        self.assertIn("those of the run that was not killed", run.stderr)

    def test_fails_when_one_loss_differs(self):
        run = self.demo(WRONG_STEP="7")
        self.assertEqual(run.returncode, 1)
        self.assertIn("NOT 0.14285714285714285", run.stderr)
        self.assertIn("the runs differ: 1 of 8 losses", run.stderr)


class BudgetCheckTest(ScriptTest):
    def check(self, *rams, **environment):
        flags = [word for ram in rams for word in ("--ram", ram)]
        code, result = self.run_json("budget_check", "--params", "1M", "--steps", "6", *flags,
                                     STEP_SECONDS="0.2", **environment)
        self.assertEqual(code, 0 if result["holds"] else 1)
        return result["budgets"]

    def test_counts_shared_pages_once_and_untouched_ones_too(self):
        enough, too_little = self.check("128MiB", "64MiB", MAPPED_MIB="48", UNTOUCHED_MIB="40")
        self.assertAlmostEqual(enough["beyond_tiny_bytes"] / trainer_run.MIB, 88, delta=6)
        self.assertTrue(enough["holds"])
        self.assertFalse(enough["grew"])
        self.assertFalse(too_little["holds"])

    def test_says_when_memory_grows(self):
        self.assertTrue(self.check("512MiB", GROWS="1")[0]["grew"])


class RankCostsTest(ScriptTest):
    def costs(self, **environment):
        code, result = self.run_json("rank_costs", "--params", "1M", "--steps", "5", "--count", "1", "--count", "3", STEP_SECONDS="0.2",
                                     **environment)
        self.assertEqual(code, 0 if result["holds"] else 1)
        self.assertEqual([(row["read_bytes_per_parameter"], row["written_bytes_per_parameter"]) for row in result["ranks"]],
                         [(14, 12)] * 2)
        self.assertEqual([row["sum_bytes"] for row in result["ranks"]], [0, 2e6])  # is the job's, and no rank's
        held = [row["anonymous_peak_bytes"] + row["shared_peak_bytes"] - row["sum_bytes"] for row in result["ranks"]]
        self.assertEqual(result["ranks"][1]["added_bytes"], (held[1] - held[0]) / 2)
        return result["ranks"][1]

    def test_says_what_a_further_rank_holds_beyond_a_process_in_memory(self):
        with open(os.path.join(self.bin, "offloadd/library"), "wb") as file:
            file.write(bytes(24 << 20))
        nothing = self.costs()
        much = self.costs(MAPPED_MIB="32", UNTOUCHED_MIB="16", FILE_MIB="24", WRITTEN_MIB="8", MOMENT_MIB="40")

        def more(key):
            return (much[key] - nothing[key]) / trainer_run.MIB
        self.assertAlmostEqual(more("own_bytes"), 32 + 16 + 8 + 40, delta=6)
        self.assertAlmostEqual(more("anonymous_peak_bytes"), 3 * (8 + 40), delta=12)
        self.assertAlmostEqual(more("shared_peak_bytes"), 3 * (32 + 16), delta=6)
        self.assertAlmostEqual(more("file_bytes"), 24, delta=6)  # one file, however many map it
        self.assertFalse(much["holds"])

    def test_refuses_counts_that_compare_nothing(self):
        for arguments in (["--count", "1"], ["--count", "2"], ["--steps", "3"], ["--ram", "50%"]):
            self.assertEqual(self.run_script("rank_costs", *arguments).returncode, 2, arguments)


class DtypeTest(unittest.TestCase):
    def test_is_bf16_unless_the_processor_is_slow_with_it(self):
        for cpuinfo, dtype in (("model name\t: x\nflags\t\t: fpu avx2 avx512f avx512bw\n", "bf16"), ("flags\t\t: fpu avx2\n", "fp32"),
                               ("Features\t: asimd bf16\n", "bf16")):
            self.assertEqual(trainer_run.usual_dtype(cpuinfo), dtype)


class SizeTest(unittest.TestCase):
    def test_reads_sizes_and_parts(self):
        self.assertEqual(trainer_run.parse_size("25%", 401 << 20), 100 << 20)
        self.assertEqual(trainer_run.parse_size("512MiB", 0), 512 << 20)
        self.assertEqual(trainer_run.parse_size("2G", 0), 2_000_000_000)
        self.assertEqual(trainer_run.parse_size("17", 0), 17)
        for wrong in ("", "much", "1.2.3GiB", "-5MiB"):
            with self.assertRaises(trainer_run.RunFailed):
                trainer_run.parse_size(wrong, 0)


if __name__ == "__main__":
    unittest.main()
