"""Tests tools/bench --against deepspeed with a program that behaves like its trainer."""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest

TOOLS = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, TOOLS)
sys.dont_write_bytecode = True
import against_deepspeed  # noqa: E402

# Two seconds a step in memory, six with DeepSpeed, three with offloadd; the first two steps are slower.
TRAINER = r"""
import json, os, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
side = flags["--with"]
ballast = bytes(range(256)) * (1 << 17) if side == "deepspeed" else b""  # 32 MiB
print("a library says something", flush=True)
print(json.dumps({"event": "start", "parameters": 5}), flush=True)
for step in range(int(flags["--steps"])):
    time.sleep(0.1)
    slow = 10 if step < 2 else 0
    part = {"memory": 2, "deepspeed": 6, "offloadd": 3}[side]
    loss = 1 / (step + 1) + (1 if side == "offloadd" and os.environ.get("WRONG") and step == 3 else 0)
    print(json.dumps({"event": "step", "step": step, "loss": loss,
                      "seconds": {"forward": part / 4 + slow, "backward": part / 2, "step": part / 4}}), flush=True)
time.sleep(0.3)
"""


class AgainstDeepSpeedTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        trainer = os.path.join(self.folder, "trainer.py")
        with open(trainer, "w", encoding="utf-8") as file:
            file.write(TRAINER)
        pythons = dict.fromkeys(("memory", "offloadd", "deepspeed"), sys.executable)
        for name, value in (("TRAINER", trainer), ("find_pythons", lambda: pythons), ("build", lambda *_: None)):
            self.addCleanup(setattr, against_deepspeed, name, getattr(against_deepspeed, name))
            setattr(against_deepspeed, name, value)

    def run_bench(self, *flags):
        """Returns (exit code, what it printed)."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            code = against_deepspeed.main(["--nvme-path", self.folder, "--rounds", "2", "--steps", "4", *flags])
        return code, out.getvalue()

    def test_counts_the_parameters_of_the_model(self):
        options = against_deepspeed.parse_arguments([])
        self.assertEqual(against_deepspeed.count_parameters(options), 272_746_496)

    def test_rows_take_turns_and_settled_steps_count(self):
        code, text = self.run_bench("--json")
        result = json.loads(text)
        self.assertEqual(code, 0)
        self.assertTrue(result["losses_equal_memory"])
        rows = {(row["side"], row["name"]): row for row in result["rows"]}
        self.assertEqual(len(rows), 15)
        for (side, _), row in rows.items():
            self.assertEqual(row["steps"], 4)  # two of each round
            self.assertEqual(row["seconds"], {"memory": 2, "deepspeed": 6, "offloadd": 3}[side])
            self.assertEqual(row["ratio_to_memory"], {"memory": 1, "deepspeed": 3, "offloadd": 1.5}[side])
            self.assertGreater(row["peak_bytes"], 1 << 20)
        self.assertEqual(os.listdir(self.folder), ["trainer.py"])

    def test_budgets_are_parts_of_state_and_gradients(self):
        _, text = self.run_bench("--ram", "50%", "--ram", "1GiB", "--json")
        names = [row["name"] for row in json.loads(text)["rows"] if row["side"] == "offloadd"]
        self.assertEqual(names, ["ram 1820 MiB", "ram 1024 MiB", "ram 1820 MiB, checkpoint:100", "ram 1024 MiB, checkpoint:100"])
        _, text = self.run_bench("--ram", "50%", "--durability", "checkpoint:7", "--rounds", "1", "--json")
        self.assertEqual([row["name"] for row in json.loads(text)["rows"] if row["side"] == "offloadd"], ["ram 1820 MiB, checkpoint:7"])

    def test_the_fastest_row_within_a_part_of_a_rivals_memory_is_compared(self):
        def row(side, name, seconds, peak, durability=""):
            return {"side": side, "name": name, "durability": durability, "seconds": seconds, "rounds": [seconds, seconds * 2, seconds],
                    "peak_bytes": peak}

        rival = row("deepspeed", "on the drive", 10, 100)
        figures = [row("memory", "in memory", 1, 300), row(*against_deepspeed.CPU_ONLY, 5, 200), rival, row("deepspeed", "slower", 11, 90),
                   row("offloadd", "large", 2, 101, "step"), row("offloadd", "fits", 3, 100, "step"), row("offloadd", "small", 4, 50, "step"),
                   row("offloadd", "slower than small", 5, 40, "checkpoint:100")]
        self.assertIs(against_deepspeed.fastest_on_the_drive(figures), rival)
        found = list(against_deepspeed.compare(figures, rival, (1, 0.5, 0.3)))
        self.assertEqual([(each["part"], each["name"], each["ratio"], each["memory"]) for each in found],
                         [(1, "fits", 0.3, 1), (1, "slower than small", 0.5, 0.4), (0.5, "small", 0.4, 0.5), (0.5, "slower than small", 0.5, 0.4)])

    def test_comparisons_are_said(self):
        _, text = self.run_bench("--ram", "50%", "--durability", "step", "--rounds", "1")
        self.assertRegex(text, r"0\.50 x the time of deepspeed, parameters and state in memory, at \d\.\d\d of its memory")

    def test_losses_that_differ_are_said_and_fail(self):
        os.environ["WRONG"] = "1"
        self.addCleanup(os.environ.pop, "WRONG")
        code, text = self.run_bench()
        self.assertEqual(code, 1)
        self.assertIn("DIFFER from those in memory", text)

    def test_a_trainer_that_fails_is_quoted(self):
        with open(against_deepspeed.TRAINER, "w", encoding="utf-8") as file:
            file.write("import sys; sys.exit('OFD-1301 memory budget is too small')")
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            self.assertEqual(against_deepspeed.main(["--nvme-path", self.folder]), 1)
        self.assertIn("OFD-1301 memory budget is too small", errors.getvalue())


if __name__ == "__main__":
    unittest.main()
