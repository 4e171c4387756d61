"""The snapshots that an engine's checkpoints lead to: how long each lasts, and more of them than a job has room for."""

import glob
import json
import os
import shutil
import subprocess
import sys
import unittest
import unittest.mock

import torch
from deepspeed_engine_test import DeepSpeedCase, copies, engine_loop, make
from safetensors.torch import load_file

from offloadd import control
from offloadd.deepspeed import setup, snapshots, utils


class CheckpointsTest(DeepSpeedCase):
    def setUp(self):
        super().setUp()
        self.saved = os.path.join(self.folder.name, "saved")
        self.model = make()
        self.engine, *_ = self.initialize(self.model, self.config(bf16={"enabled": True}))

    def kept(self):
        return sorted(each["step"] for each in snapshots._listed(self.pool, self.job()))

    def job(self):
        return self.engine.handle.job

    def moved(self):
        return sorted(name.removeprefix(self.job() + "-").partition("-")[0] for name in os.listdir(self.pool) if name.startswith(self.job() + "-step"))

    def masters(self):
        return {name: self.engine.handle.gather(p, "master") for name, p in self.model.named_parameters()}

    def save_after_each_of(self, steps, first=0, tag=None):
        """What follows after each of the checkpoints, had it been loaded: weights, masters, and losses of the step after it."""
        left, told = [], []
        for step in range(first, first + steps):
            told.append(engine_loop(self.engine, 1, first=step))
            self.engine.save_checkpoint(self.saved, tag=tag, client_state={"step": step})
            left.append((copies(self.model), self.masters()))
        told.append(engine_loop(self.engine, 1, first=first + steps))
        return left, told[1:]

    def check_goes_on(self, folder, tag, step, left, told):
        _, state = self.engine.load_checkpoint(folder, tag)
        self.assertEqual(state, {"step": step})
        for here, there in zip((copies(self.model), self.masters()), left):
            self.assertTrue(all(torch.equal(here[name], value) for name, value in there.items()))
        self.assertEqual(engine_loop(self.engine, 1, first=step + 1), told)

    def test_a_tag_that_is_written_again_has_one_snapshot(self):
        left, told = self.save_after_each_of(16, tag="last")
        self.assertEqual((self.kept(), self.moved()), ([16], []))
        self.check_goes_on(self.saved, "last", 15, left[-1], told[-1])

    def test_a_folder_that_is_moved_keeps_its_checkpoint(self):
        left, told = self.save_after_each_of(2)
        elsewhere = os.path.join(self.folder.name, "elsewhere")
        os.makedirs(elsewhere)
        os.rename(os.path.join(self.saved, "global_step1"), os.path.join(elsewhere, "best"))
        shutil.rmtree(os.path.join(self.saved, "global_step2"))
        engine_loop(self.engine, 1, first=3)
        self.engine.save_checkpoint(self.saved)
        self.assertEqual(self.kept(), [1, 4])
        self.check_goes_on(elsewhere, "best", 0, left[0], told[0])

    def test_there_are_more_checkpoints_than_a_job_has_room_for(self):
        left, told = self.save_after_each_of(16)
        self.assertEqual((self.kept(), self.moved()), (list(range(3, 17)), ["step1", "step2"]))
        found = utils.get_fp32_state_dict_from_zero_checkpoint(self.saved, "global_step2")
        self.assertTrue(all(torch.equal(found[name], value) for name, value in left[1][1].items()))
        shutil.rmtree(os.path.join(self.saved, "global_step1"))
        shutil.rmtree(os.path.join(self.saved, "global_step3"))
        self.engine.save_checkpoint(self.saved, tag="after")
        self.assertEqual((self.kept(), self.moved()), ([*range(4, 17), 17], ["step2"]))
        for step in (1, 15):
            self.check_goes_on(self.saved, f"global_step{step + 1}", step, left[step], told[step])

    def test_a_job_that_goes_on_in_another_run_is_full(self):
        self.save_after_each_of(14)
        snapshots.kept = snapshots.Snapshots()  # of a process that has ended
        self.engine.save_checkpoint(self.saved, tag="after")
        self.assertEqual((self.kept(), self.moved()), ([*range(2, 15), 15], ["step1"]))

    def jobs(self):
        return [each["job"] for each in json.loads(control.run("ls", self.pool, "--json"))["jobs"]]

    def begin_another_run(self):
        """As another process does when this one was killed."""
        self.engine.handle.close()
        snapshots.kept = snapshots.Snapshots()
        setup.jobs._own.clear()
        setup.jobs._kept.clear()
        self.model = make()
        self.engine, *_ = self.initialize(self.model, self.config(bf16={"enabled": True}))

    def test_runs_that_go_on_from_each_other_leave_what_checkpoints_need(self):
        left, told = self.save_after_each_of(6)
        for run in range(3):
            self.begin_another_run()
            if run:
                self.engine.load_checkpoint(self.saved)
            for step in (2 * run, 2 * run + 1):
                engine_loop(self.engine, 1, first=step)
                self.engine.save_checkpoint(self.saved, tag=f"mine{step}", client_state={"step": step})
                shutil.rmtree(os.path.join(self.saved, f"mine{step - 1}"), ignore_errors=True)
            engine_loop(self.engine, 1, first=9)  # the one that sees it
        self.check_goes_on(self.saved, "mine5", 5, left[5], told[5])
        self.engine.save_checkpoint(self.saved, tag="mine6")
        shutil.rmtree(os.path.join(self.saved, "mine5"))
        self.engine.save_checkpoint(self.saved, tag="mine7")
        self.assertEqual(self.kept(), [7, 7])
        with open(os.path.join(self.saved, "global_step1", "offloadd.json"), encoding="utf-8") as file:
            self.assertEqual(set(self.jobs()), {json.load(file)["job"], self.job()})

    def test_a_folder_that_was_moved_between_runs_keeps_its_checkpoint(self):
        left, told = self.save_after_each_of(2)
        self.begin_another_run()
        elsewhere = os.path.join(self.folder.name, "elsewhere")
        os.makedirs(elsewhere)
        os.rename(os.path.join(self.saved, "global_step1"), os.path.join(elsewhere, "best"))
        with self.assertLogs("offloadd", "WARNING") as said:
            self.check_goes_on(self.saved, "global_step2", 1, left[1], told[1])
        self.assertRegex("".join(said.output), "global_step1 is gone.* offloadctl snapshot rm")
        self.engine.save_checkpoint(self.saved, tag="after")
        self.check_goes_on(elsewhere, "best", 0, left[0], told[0])

    def test_a_run_whose_checkpoints_were_deleted_leaves_nothing(self):
        self.save_after_each_of(2)
        shutil.rmtree(self.saved)
        self.engine.destroy()
        setup.jobs.make_room(but=None)
        self.assertEqual(self.jobs(), [])

    def test_a_copy_that_was_loaded_and_deleted_takes_nothing_with_it(self):
        left, told = self.save_after_each_of(2)
        self.begin_another_run()
        copy = os.path.join(self.folder.name, "copy")
        os.mkdir(copy)
        shutil.copytree(os.path.join(self.saved, "global_step2"), os.path.join(copy, "global_step2"))
        self.check_goes_on(copy, "global_step2", 1, left[1], told[1])
        shutil.rmtree(copy)
        self.engine.save_checkpoint(self.saved, tag="after")
        for step in (0, 1):
            self.check_goes_on(self.saved, f"global_step{step + 1}", step, left[step], told[step])

    def test_a_pool_over_two_drives(self):
        """Where a job has room for as many as it was made with."""
        drives = [self.pool, os.path.join(self.folder.name, "second")]
        os.mkdir(drives[1])
        self.model = make()
        pools = {"device": "nvme", "nvme_path": drives}
        setup.set_installed({"generations": 2})
        self.engine, *_ = self.initialize(self.model, self.config(bf16={"enabled": True}) | {"zero_optimization": {"stage": 3, "offload_param": pools}})
        left, _ = self.save_after_each_of(2)
        self.assertEqual(self.kept(), [1, 2])
        self.engine.handle.close()
        found = utils.get_fp32_state_dict_from_zero_checkpoint(self.saved, "global_step1")
        self.assertTrue(all(torch.equal(found[name], value) for name, value in left[0][1].items()))
        shutil.rmtree(self.saved)
        self.engine.destroy()
        setup.jobs.make_room(but=None)
        self.assertEqual(os.listdir(drives[1]), [])

    def test_folders_that_keep_open_files_have_none(self):
        """NFS."""
        with unittest.mock.patch.object(snapshots, "_is_deleted_at_once", lambda folder: False):
            left, told = self.save_after_each_of(3)
            self.assertFalse([path for path in map(os.path.realpath, glob.glob("/proc/self/fd/*")) if path.startswith(self.saved)])
            os.rename(os.path.join(self.saved, "global_step1"), os.path.join(self.saved, "best"))
            shutil.rmtree(os.path.join(self.saved, "global_step2"))
            engine_loop(self.engine, 1, first=4)
            self.engine.save_checkpoint(self.saved)
            self.assertEqual(self.kept(), [1, 3, 5])
            self.check_goes_on(self.saved, "best", 0, left[0], told[0])

    def test_snapshots_of_others_stay(self):
        engine_loop(self.engine, 1)
        for k in range(14):
            control.snapshot(self.pool, self.job(), f"mine{k}")
        with self.assertRaisesRegex(RuntimeError, "OFD-1216"):
            self.engine.save_checkpoint(self.saved)

    def test_a_model_takes_what_is_made_of_a_checkpoint(self):
        """As strictly as programs do: tied weights by all of their names, and no buffers that a state_dict() leaves out."""
        for disabled in ("0", "1"):
            with self.subTest(disabled=disabled), unittest.mock.patch.dict(os.environ, {"OFFLOADD_DISABLE": disabled}):
                here, there = (make(tied=True) for _ in range(2))
                for model in (here, there):
                    model.register_buffer("angles", torch.ones(4), persistent=False)
                    model.up.register_buffer("angles", torch.ones(4), persistent=False)
                engine, *_ = self.initialize(here, self.config())
                engine_loop(engine, 2)
                saved, made = (os.path.join(self.folder.name, name + disabled) for name in ("saved", "made"))
                engine.save_checkpoint(saved)
                state = utils.get_fp32_state_dict_from_zero_checkpoint(saved)
                self.assertIs(state["embed.weight"], state["head.weight"])
                there.load_state_dict(state)
                self.check_equal(here, there)
                there = make(tied=True)
                subprocess.run([sys.executable, "zero_to_fp32.py", ".", made], cwd=saved, check=True)
                there.load_state_dict(torch.load(os.path.join(made, "pytorch_model.bin")))
                self.check_equal(there, here)
                utils.convert_zero_checkpoint_to_fp32_state_dict(saved, made, safe_serialization=True)
                self.assertEqual(set(load_file(os.path.join(made, "model.safetensors"))), set(state) - {"head.weight"})
                engine.destroy()


if __name__ == "__main__":
    unittest.main()
