"""offloadctl run over trainers that know nothing of offload: the bits that they print and save without it, also within the least
memory, and after a SIGKILL.

usage: untouched_torch_test.py OFFLOADCTL OFFLOADD LIBRARY PRELOADED TRAINER...
"""

import filecmp
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

OFFLOADCTL, OFFLOADD = (os.path.abspath(path) for path in sys.argv[1:3])
TRAINERS = {re.search(r"plain_(\w+)_torch$", path).group(1): os.path.abspath(path) for path in sys.argv[5:]}
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("OFFLOADD_")} | {"OFFLOADD_BINARY": OFFLOADD}
PLENTY = "1GiB"


class Result:
    def __init__(self, process):
        self.code, self.out, self.error = process.returncode, process.stdout, process.stderr

    def steps(self):
        return [line for line in self.out.splitlines() if line.startswith("step ")]

    def evaluations(self):
        return [line for line in self.out.splitlines() if line.startswith("evaluation ")]


def call(*words, input_text=""):
    return Result(subprocess.run(words, capture_output=True, text=True, check=False, env=ENVIRONMENT, input=input_text))


class UntouchedTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
        self.pool = os.path.join(self.folder, "pool")
        os.mkdir(self.pool)

    def tearDown(self):
        shutil.rmtree(self.folder)

    def file(self, name):
        """A file that every run calls the same in a folder of its own: its name is part of what torch::save writes."""
        folder = os.path.join(self.folder, name)
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, "weights.pt")

    def command(self, *words, ram=PLENTY, options=()):
        return [OFFLOADCTL, "run", "--nvme-path", self.pool, "--ram", ram, *options, "--", *words]

    def run_offloaded(self, *words, **options):
        return call(*self.command(*words, **options))

    def expect_run(self, *words, **options):
        result = self.run_offloaded(*words, **options)
        self.assertEqual(result.code, 0, result.error)
        return result

    def plain(self, trainer, *words):
        result = call(TRAINERS[trainer], *words)
        self.assertEqual(result.code, 0, result.error)
        return result

    def floor(self, trainer):
        refused = self.run_offloaded(TRAINERS[trainer], "1", self.file("floor"), ram="8500KiB", options=["--job", "none"])
        self.assertEqual(refused.code, 1, refused.error)
        self.assertEqual(refused.steps(), [])
        self.assertIn("OFD-1301", refused.error)
        return re.search(r"at least (\d+) bytes", refused.error).group(1)

    def step_of(self, job):
        jobs = json.loads(call(OFFLOADCTL, "ls", self.pool, "--json").out)["jobs"]
        return next((each["step"] for each in jobs if each["job"] == job), None)

    def check_same_bits(self, trainer):
        weights = self.file("weights")
        self.plain(trainer, "2", weights)
        plain = self.plain(trainer, "6", self.file("plain"), weights)
        self.assertEqual(len(plain.steps()), 6)
        for name, ram in (("floor", self.floor(trainer)), ("plenty", PLENTY)):
            offloaded = self.expect_run(TRAINERS[trainer], "6", self.file(name), weights, ram=ram, options=["--job", name])
            self.assertEqual(offloaded.out, plain.out, name)
            self.assertTrue(filecmp.cmp(self.file(name), self.file("plain"), shallow=False), name)
            self.assertEqual(self.step_of(name), 6)

    def test_regression_has_the_same_bits(self):
        self.check_same_bits("regression")

    def test_convolution_has_the_same_bits(self):
        self.check_same_bits("convolution")

    def test_language_has_the_same_bits(self):
        self.check_same_bits("language")

    def check_goes_on_after_kill(self, trainer):
        arguments = self.command(TRAINERS[trainer], "100000", self.file("killed"), options=["--resume"])
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
        while not process.stdout.readline().startswith("step 4 "):
            self.assertIsNone(process.poll())
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        job = os.path.basename(TRAINERS[trainer])
        refused = self.run_offloaded(TRAINERS[trainer], "5", self.file("refused"))
        self.assertEqual((refused.code, refused.out), (125, ""))
        self.assertRegex(refused.error, rf"OFD-1002 pool \S+ holds a job {job}, at step \d+\. Add --resume")

        resumed = self.expect_run(TRAINERS[trainer], "5", self.file("resumed"), options=["--resume"])
        done = int(re.search(r"goes on after (\d+) steps", resumed.error).group(1))
        self.assertGreaterEqual(done, 4)
        plain = self.plain(trainer, f"{done},5", self.file("plain"))
        self.assertEqual(resumed.steps(), plain.steps()[done:])
        self.assertEqual(resumed.evaluations()[-1], plain.evaluations()[-1])
        self.assertTrue(filecmp.cmp(self.file("resumed"), self.file("plain"), shallow=False))
        self.assertEqual(self.step_of(job), done + 5)

    def test_regression_goes_on_after_a_kill(self):
        self.check_goes_on_after_kill("regression")

    def test_convolution_with_its_running_statistics_goes_on_after_a_kill(self):
        self.check_goes_on_after_kill("convolution")

    def test_language_goes_on_after_a_kill(self):
        self.check_goes_on_after_kill("language")

    # ---- Fewer trainers do this ----

    def oddity(self, name, **options):
        return self.run_offloaded(TRAINERS["oddities"], "4", self.file(name), name, **options)

    def check_oddity(self, name, steps=4):
        plain = self.plain("oddities", "4", self.file("plain"), name)
        offloaded = self.oddity(name)
        self.assertEqual((offloaded.code, offloaded.out), (0, plain.out), offloaded.error)
        self.assertEqual(len(plain.steps()), steps)
        return offloaded

    def names_of(self, job):
        """The names of a job's weights."""
        folder = os.path.join(self.folder, "exported")
        exported = call(OFFLOADCTL, "export", self.pool, job, folder)
        self.assertEqual(exported.code, 0, exported.error)
        with open(os.path.join(folder, "model.safetensors"), "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return sorted(set(header) - {"__metadata__"})

    def test_weights_have_the_names_of_the_modules_that_were_asked_for_them(self):
        self.expect_run(TRAINERS["language"], "1", self.file("named"), options=["--job", "named"])
        self.assertEqual(self.names_of("named"), ["decoder.bias", "decoder.weight", "lstm.bias_hh_l0", "lstm.bias_ih_l0",
                                                  "lstm.weight_hh_l0", "lstm.weight_ih_l0", "words.weight"])

    def test_two_models_whose_optimizers_move_are_one_job(self):
        self.check_oddity("adversaries")
        self.assertEqual(self.step_of("plain_oddities_torch"), 8)
        self.assertEqual(self.names_of("plain_oddities_torch"), ["1/bias", "1/weight", "bias", "weight"])

    def test_a_tensor_without_a_module_is_trained_and_that_is_said(self):
        self.assertIn("1 tensors of the optimizer belong to no torch::nn::Module", self.check_oddity("free_tensor").error)

    def test_an_optimizer_made_anew_before_training_counts(self):
        self.check_oddity("replaced")

    def test_large_parameters_are_born_outside_of_memory_when_asked(self):
        def made_kib(result):
            begun, made = (int(re.search(rf"{when} RssAnon:\s+(\d+) kB", result.error).group(1)) for when in ("begun", "made"))
            return made - begun

        plain = self.plain("oddities", "4", self.file("plain"), "large")
        kept, born = (self.oddity("large", options=["--job", f"large{n}", *more])
                      for n, more in enumerate(([], ["--born-above", "16MiB"])))
        for result in (kept, born):
            self.assertEqual((result.code, result.out), (0, plain.out), result.error)
        self.assertGreater(made_kib(plain), 32 << 10)
        self.assertGreater(made_kib(kept), 32 << 10)
        self.assertLess(made_kib(born), 12 << 10)

    def check_refused(self, result, text, code=1):
        self.assertEqual((result.code, result.steps()), (code, []), result.out + result.error)
        self.assertIn(text, result.error)

    def check_not_started(self, result, text):
        self.check_refused(result, text, code=125)

    def test_lbfgs_runs_in_the_program_and_goes_on(self):
        self.check_oddity("lbfgs")
        resumed = self.oddity("lbfgs", options=["--resume"])
        self.assertEqual(resumed.code, 0, resumed.error)
        plain = call(TRAINERS["oddities"], "4,4", self.file("plain"), "lbfgs")
        self.assertEqual(resumed.steps(), plain.steps()[4:])

    def test_files_of_an_optimizer_go_both_ways(self):
        self.plain("oddities", "4", self.file("plain"), "saved_optimizer")
        saved = self.run_offloaded(TRAINERS["oddities"], "4", self.file("offloaded"), "saved_optimizer", options=["--job", "saved"])
        self.assertEqual((saved.code, len(saved.steps())), (0, 4), saved.error)
        plain = self.plain("oddities", "4", self.file("plain"), "loaded_optimizer")
        there = self.plain("oddities", "4", self.file("offloaded"), "loaded_optimizer")
        self.assertEqual(there.out, plain.out)
        here = self.run_offloaded(TRAINERS["oddities"], "4", self.file("plain"), "loaded_optimizer", options=["--job", "loaded"])
        self.assertEqual((here.code, here.out), (0, plain.out), here.error)

    def test_files_of_16_bits_have_their_masters(self):
        runs = {"whole": "0,40", "first": "0,20", "last": "20,40"}
        told = {name: self.expect_run(TRAINERS["oddities"], steps, self.file("whole" if name == "whole" else "parts"), "sixteen_bits_of_files",
                                      options=["--job", name]) for name, steps in runs.items()}
        self.assertEqual(told["first"].steps() + told["last"].steps(), told["whole"].steps())
        with open(self.file("parts") + ".model", "rb") as parts, open(self.file("whole") + ".model", "rb") as whole:
            self.assertEqual(parts.read(), whole.read())

    def test_an_optimizer_that_follows_another_of_a_resumed_run_has_its_file(self):
        self.check_oddity("one_after_another", steps=8)
        resumed = self.oddity("one_after_another", options=["--resume"])
        self.assertEqual(resumed.code, 0, resumed.error)
        plain = self.plain("oddities", "4,4", self.file("plain"), "one_after_another")
        self.assertEqual(resumed.steps(), plain.steps()[8:])

    def test_an_optimizer_for_each_step_leaves_nothing(self):
        result = self.expect_run(TRAINERS["oddities"], "1500", self.file("anew"), "anew_for_each_step")
        self.assertLess(int(re.search(r"grown (-?\d+) KiB", result.out).group(1)), 300)

    def test_the_state_of_an_optimizer_is_seen_and_edits_of_it_count(self):
        self.check_oddity("own_state")

    def test_an_optimizer_of_the_programs_own_is_refused(self):
        plain, result = self.plain("oddities", "4", self.file("plain"), "own_optimizer"), self.oddity("own_optimizer")
        self.assertEqual((result.code, result.steps()), (1, plain.steps()[:1]))
        self.assertIn("OFD-1604 the program trains with (anonymous namespace)::OwnSgd, whose step cannot be followed", result.error)

    def test_a_class_that_derives_from_torchs_and_calls_its_step(self):
        plain = self.plain("oddities", "8", self.file("plain"), "derived").steps()
        self.check_oddity("derived")
        resumed = self.oddity("derived", options=["--resume"])
        self.assertEqual((resumed.code, len(plain)), (0, 8), resumed.error)

    def test_a_closure_changes_options_and_adds_a_group(self):
        self.check_oddity("closures")

    def test_a_program_whose_steps_are_not_seen_is_told_so(self):
        result = self.check_oddity("own_step")
        self.assertIn("is still at step 0: no step of an optimizer of torch::optim was seen", result.error)

    def test_a_program_whose_steps_are_refused_is_not_told_that_none_was_seen(self):
        result = self.oddity("refused_steps")
        self.assertEqual(result.out.count("OFD-1604 the gradient of parameter"), 4, result.out)
        self.assertIn("is still at step 0: no step of the program's optimizer was taken", result.error)

    def test_momentum_of_sparse_embeddings_is_kept_as_torch_keeps_it(self):
        self.check_oddity("sparse_tables")
        self.assertEqual(self.step_of("plain_oddities_torch"), 4)

    def test_phases_have_optimizers_of_their_own(self):
        plain, offloaded = self.plain("oddities", "4", self.file("plain"), "phases"), self.oddity("phases")
        self.assertEqual((offloaded.code, offloaded.out), (0, plain.out), offloaded.error)
        self.assertEqual(len(plain.steps()), 20)

    def test_lbfgs_goes_on_where_adam_has_trained(self):
        self.check_oddity("adam_then_lbfgs")

    def test_destructors_of_globals_use_the_model(self):
        self.assertEqual(len(self.check_oddity("used_at_the_end").evaluations()), 2)

    def check_alternating(self, mode):
        plain = self.plain("oddities", "8", self.file("plain"), mode).steps()
        for at, options in ((0, []), (8, ["--resume"])):
            result = self.oddity(mode, options=options)
            self.assertEqual((result.code, result.steps()), (0, plain[at:at + 8]), result.error)

    def test_optimizers_in_turn_over_the_same_parameters(self):
        self.check_alternating("alternating")

    def test_optimizers_of_two_kinds_in_turn_over_the_same_parameters(self):
        self.check_alternating("alternating_kinds")

    def test_one_whose_state_was_looked_at_is_taken_for_dead(self):
        mode = "alternating_looked"
        plain, result = self.plain("oddities", "4", self.file("plain"), mode), self.oddity(mode)
        self.assertEqual((result.code, result.steps()), (1, plain.steps()[:2]))
        self.assertIn("OFD-1604 the program goes back to an optimizer after another one has trained the same parameters", result.error)

    def test_a_model_of_double_precision(self):
        self.check_oddity("double_precision")

    def test_masters_of_16_bits_are_said_once(self):
        result = self.oddity("sixteen_bits")
        self.assertEqual((result.code, len(result.steps())), (0, 8), result.error)
        self.assertEqual(result.error.count("are trained on fp32 masters"), 1, result.error)
        self.assertIn("offloadctl run: 4160 parameters of 16 bits are trained on fp32 masters, as in every job", result.error)
        resumed = self.oddity("sixteen_bits", options=["--resume"])
        self.assertIn("offloadctl run: 4160 parameters of 16 bits are trained on fp32 masters", resumed.error)

    def test_nothing_is_said_of_16_bits_that_are_only_read(self):
        self.assertNotIn("masters", self.check_oddity("sixteen_bits_read").error)

    def test_nothing_is_said_of_16_bits_that_lbfgs_trains_as_they_are(self):
        self.assertNotIn("masters", self.check_oddity("sixteen_bits_searched").error)

    def test_buffers_that_a_resumed_run_has_written_before_the_attach_are_told(self):
        text = "buffers were written without gradients before the job's took their place"
        self.assertNotIn(text, self.check_oddity("power_iteration").error)
        resumed = self.oddity("power_iteration", options=["--resume"])
        self.assertEqual((resumed.code, len(resumed.steps())), (0, 4), resumed.error)
        self.assertEqual(resumed.error.count(text), 1, resumed.error)

    def test_weights_that_a_resumed_run_has_edited_before_the_attach_are_told(self):
        text = "weights were read or changed without gradients before the job's took their place"
        for name in ("masked_first", "limited_first"):
            self.assertNotIn(text, self.check_oddity(name).error)
            self.assertEqual(self.oddity(name, options=["--resume"]).error.count(text), 1, name)
            shutil.rmtree(self.pool)
            os.mkdir(self.pool)

    def test_the_job_is_there_from_the_first_use_on_when_asked(self):
        for name in ("rollout", "rollout_of_inference", "power_iteration", "masked_first", "limited_first"):
            plain = call(TRAINERS["oddities"], "4,4", self.file("plain"), name).steps()
            self.assertEqual(len(plain), 8, name)
            for at in (0, 4):
                result = self.oddity(name, options=["--job", name, "--resume", "--from-first-use"])
                self.assertEqual((result.code, result.steps()), (0, plain[at:at + 4]), name + result.error)
                self.assertNotIn("before the job's took their place", result.error, name)
        self.assertEqual(self.oddity("rollout", options=["--from-first-use"]).code, 125)

    def test_nothing_is_said_of_weights_where_a_pass_begins_with_gradients(self):
        self.check_oddity("own_function")
        self.assertNotIn("weights were read or changed", self.oddity("own_function", options=["--resume"]).error)

    def test_models_that_cannot_be_attached_are_refused(self):
        self.check_refused(self.oddity("complex_weights"), "OFD-1601 ")

    def check_first_pass_of_a_run_that_goes_on(self, name):
        self.check_oddity(name)
        resumed = self.oddity(name, options=["--resume"])
        self.assertEqual(resumed.code, 0, resumed.error)
        plain = call(TRAINERS["oddities"], "4,4", self.file("plain"), name)
        self.assertEqual(resumed.steps(), plain.steps()[4:])

    def test_a_function_of_the_programs_own_is_all_of_the_model(self):
        self.check_first_pass_of_a_run_that_goes_on("own_function")

    def test_a_function_of_the_programs_own_computes_its_pieces_anew(self):
        self.check_first_pass_of_a_run_that_goes_on("pieces_computed_anew")

    def test_a_pass_begins_with_rows_that_are_shortened_without_gradients(self):
        self.check_first_pass_of_a_run_that_goes_on("embedding_of_largest_norm")

    def test_gradients_of_other_weights_than_the_jobs_are_refused(self):
        self.check_oddity("assigned_gradients")
        self.check_refused(self.oddity("assigned_gradients", options=["--resume"]), "OFD-1601 parameters have gradients before a forward pass over them was seen")

    def test_threads_train_a_model_each(self):
        self.assertEqual(len(self.check_oddity("threads", steps=0).evaluations()), 2)

    def test_models_are_made_and_moved_each_before_its_optimizer(self):
        self.check_oddity("in_turn", steps=12)

    def test_a_model_of_inference_mode_stays_in_memory(self):
        self.check_oddity("inference")

    def test_a_model_that_is_made_later_joins_the_job_which_cannot_be_resumed(self):
        said = self.check_oddity("late", steps=8).error
        self.assertIn("parameters that were made after the first forward pass: they are offloaded, too, and the job cannot be resumed", said)
        self.check_refused(self.oddity("late", options=["--resume"]), "has parameter 'later/0', the model has not")

    def test_a_program_that_does_not_train_says_so(self):
        result = self.oddity("no_optimizer")
        self.assertEqual((result.code, len(result.evaluations())), (1, 1))
        self.assertIn("OFD-1601 nothing was offloaded", result.error)
        # One that goes on with a job, and is through already, has nothing to train.
        options = ["--job", "through"]
        self.assertEqual(self.oddity("in_turn", options=options).code, 0)
        through = self.oddity("no_optimizer", options=[*options, "--resume"])
        self.assertEqual((through.code, through.out), (0, result.out), through.error)
        self.assertIn("the job stays at step ", through.error)

    def test_a_forked_child_trains(self):
        self.check_oddity("in_a_child")
        # The output ends with the child, the exit status is the program's.
        plain = self.plain("oddities", "4", self.file("plain"), "in_a_child_that_stays")
        stays = self.oddity("in_a_child_that_stays", options=["--job", "stays"])
        self.assertEqual((stays.code, stays.out), (0, plain.out), stays.error)
        self.assertEqual(len(plain.steps()), 4)

    def test_pointers_are_taken_before_the_first_forward_pass(self):
        self.check_oddity("pointers")

    def test_a_limit_of_address_space_is_room_enough(self):
        words = self.command(TRAINERS["oddities"], "4", self.file("limited"), "pointers")
        limited = call("bash", "-c", 'ulimit -v 16777216 && exec "$@"', "bash", *words)
        self.assertEqual((limited.code, len(limited.steps())), (0, 4), limited.error)

    def test_a_program_clears_its_environment(self):
        self.check_oddity("cleared_environment")

    # ---- Programs that are not started at all ----

    def build(self, name, source, *flags):
        path = os.path.join(self.folder, name)
        made = call("gcc", "-x", "c", "-", *flags, "-o", path, input_text=source)
        self.assertEqual(made.code, 0, made.error)
        return path

    def test_what_nothing_can_be_put_in_front_of_is_refused(self):
        static = self.build("static", "int main() { return 0; }", "-static")
        self.check_not_started(self.run_offloaded(static), "is linked statically")
        self.check_not_started(self.run_offloaded("ls"), "/ls does not load libtorch_cpu.so")
        self.check_not_started(self.run_offloaded("no-such-trainer"), "OFD-1002 no program no-such-trainer is on PATH")

    def test_python_is_sent_to_its_own_way(self):
        self.check_not_started(self.run_offloaded(sys.executable, "script.py"), "Use python -m offloadd script.py")
        script = os.path.join(self.folder, "script.py")
        with open(script, "w", encoding="utf-8") as file:
            file.write("#!/usr/bin/env python3\n")
        os.chmod(script, 0o755)
        self.check_not_started(self.run_offloaded(script), "Use python -m offloadd script.py")

    def test_another_libtorch_is_refused_by_release(self):
        os.makedirs(os.path.join(self.folder, "other", "include", "torch"))
        with open(os.path.join(self.folder, "other", "include", "torch", "version.h"), "w", encoding="utf-8") as file:
            file.write("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 4\n")
        os.mkdir(os.path.join(self.folder, "other", "lib"))
        library = self.build("other/lib/libtorch_cpu.so", "int torch(void) { return 0; }", "-shared", "-fPIC", "-Wl,-soname,libtorch_cpu.so")
        program = self.build("program", "int torch(void); int main() { return torch(); }", "-x", "none", library,
                             f"-Wl,-rpath,{os.path.dirname(library)}")
        self.check_not_started(self.run_offloaded(program), "runs with libtorch 2.4, offload was built with 2.11")

    def test_programs_and_children_it_starts_are_their_own(self):
        shown = self.oddity("environment")
        self.assertEqual((shown.code, shown.out), (1, "LD_PRELOAD is\nchild 0\n"), shown.error)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
