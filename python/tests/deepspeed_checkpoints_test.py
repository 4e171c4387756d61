"""What engines save and load: checkpoints of every kind, and the snapshots that they lead to, how long each lasts, and more of them than a
job has room for."""

import argparse
import glob
import json
import os
import shutil
import subprocess
import sys
import unittest
import unittest.mock

import torch
from deepspeed_case import DeepSpeedCase, Masters, copies, engine_loop, make, plain
from safetensors.torch import load_file

import offloadd
import offloadd.deepspeed
from offloadd import control
from offloadd.deepspeed import setup, snapshots, utils


class SavedTest(DeepSpeedCase):
    """What a run saves another one loads."""

    def scheduled(self, **changes):
        return self.config(gradient_clipping=0.5, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-2}}, **changes)

    def test_a_checkpoint_is_loaded_by_another_run(self):
        saved, there = os.path.join(self.folder.name, "saved"), make()
        optimizer = self.adamw(there.parameters())
        expected = plain(there, optimizer, 6, clip=0.5, scheduler=offloadd.deepspeed.schedules.WarmupLR(optimizer, 0, 1e-2, 8))
        engine, *_ = self.initialize(make(), self.scheduled())
        told = engine_loop(engine, 3, clip=0.5)
        engine.save_checkpoint(saved, client_state={"position": 3})
        engine_loop(engine, 1, clip=0.5, first=3)  # lost
        engine.destroy()
        here = make()
        engine, *_ = self.initialize(here, self.scheduled())
        path, state = engine.load_checkpoint(saved)
        self.assertEqual([path, state], [os.path.join(saved, "global_step3"), {"position": 3}])
        self.assertEqual(engine.global_steps, 3)
        told += engine_loop(engine, 3, clip=0.5, first=3)
        self.assertEqual(told, expected)
        self.check_equal(here, there)

    def test_a_run_goes_back_to_its_own_checkpoints(self):
        saved = os.path.join(self.folder.name, "saved")
        here = make()
        engine, *_ = self.initialize(here, self.scheduled())
        engine_loop(engine, 1)
        engine.save_checkpoint(saved, tag="first")
        engine_loop(engine, 1, first=1)
        engine.save_checkpoint(saved, tag="second")
        after = engine_loop(engine, 2, first=2)
        weights = copies(here)
        for tag, first in (("second", 2), ("first", 1), (None, 2)):
            path, _ = engine.load_checkpoint(saved, tag)
            self.assertTrue(path.endswith(tag or "second"))
            self.assertEqual(engine_loop(engine, 4 - first, first=first)[-len(after):], after)
            self.assertTrue(all(torch.equal(value, weights[name]) for name, value in here.state_dict().items()))

    def back_to_a_checkpoint(self, folder):
        """Losses of a bf16 model that goes back from its fifth step to its third, and its weights."""
        here = make()
        engine, *_ = self.initialize(here, self.config(bf16={"enabled": True}, gradient_clipping=0.5))
        told = engine_loop(engine, 3, clip=0.5)
        engine.save_checkpoint(os.path.join(self.folder.name, folder), client_state={"position": 3})
        told += engine_loop(engine, 2, clip=0.5, first=3)
        _, state = engine.load_checkpoint(os.path.join(self.folder.name, folder))
        told += engine_loop(engine, 3, clip=0.5, first=state["position"])
        return told, copies(here)

    def test_checkpoints_in_memory_are_as_those_of_the_job(self):
        told, weights = self.back_to_a_checkpoint("offloaded")
        with unittest.mock.patch.dict(os.environ, {"OFFLOADD_DISABLE": "1"}):
            told_in_memory, in_memory = self.back_to_a_checkpoint("in_memory")
        self.assertEqual(told, told_in_memory)
        self.assertTrue(all(torch.equal(value, weights[name]) for name, value in in_memory.items()))

    def test_a_schedule_of_a_replaced_optimizer_goes_on_behind_a_checkpoint(self):
        for disabled in ("0", "1"):
            with self.subTest(disabled=disabled), unittest.mock.patch.dict(os.environ, {"OFFLOADD_DISABLE": disabled}):
                model, rates = make(), []
                replaced = torch.optim.AdamW(model.parameters(), lr=1.0)
                scheduler = torch.optim.lr_scheduler.LambdaLR(replaced, lambda t: 1 / (t + 1))
                adam = offloadd.deepspeed.adam.DeepSpeedCPUAdam(replaced.param_groups, lr=1.0)
                engine, *_ = self.initialize(model, self.config(optimizer=None), optimizer=adam)
                for step in range(3):
                    rates += engine_loop(engine, 1, first=step)[1:]
                    scheduler.step()
                    if step == 1:
                        engine.save_checkpoint(folder := os.path.join(self.folder.name, disabled))
                        engine.load_checkpoint(folder)
                self.assertEqual(rates, [1, 1 / 2, 1 / 3])
                self.assertEqual(engine.get_lr(), [1 / 4])

    def test_a_checkpoint_of_a_model_with_other_parts(self):
        """Is refused while the engine still trains; its weights alone are loaded as far as they fit."""
        engine, *_ = self.initialize(make(), self.config())
        engine_loop(engine, 2)
        engine.save_checkpoint(self.folder.name)
        stored = copies(engine.module)
        engine.destroy()
        other = make()
        other.more = torch.nn.Linear(4, 4)
        engine, *_ = self.initialize(other, self.config())
        for how in ({}, {"load_module_only": True}):
            with self.assertRaisesRegex(offloadd.Error, "OFD-1402.*more.weight"):
                engine.load_checkpoint(self.folder.name, **how)
        engine_loop(engine, 1)
        engine.load_checkpoint(self.folder.name, load_module_only=True, load_module_strict=False)
        for name, value in stored.items():
            self.assertTrue(torch.equal(other.state_dict()[name], value), name)
        engine_loop(engine, 1)
        engine.destroy()
        smaller = make()
        del smaller.head.weight, smaller.head
        engine, *_ = self.initialize(smaller, self.config())
        with self.assertRaisesRegex(offloadd.Error, "OFD-1402.*head.weight"):
            engine.load_checkpoint(self.folder.name)

    def test_a_checkpoint_of_another_optimizer(self):
        """Is refused while the engine still trains, in words of the program's; its weights alone are loaded."""
        adamw, sgd = ({"type": kind, "params": {"lr": 1e-2}} for kind in ("AdamW", "SGD"))
        momentum = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
        for there, here, text in ((adamw, sgd, "with adamw .it keeps exp_avg, exp_avg_sq., and this program has sgd .it keeps nothing"),
                                  (sgd, momentum, "with sgd .it keeps nothing., and this program has sgd .it keeps momentum_buffer")):
            engine, *_ = self.initialize(make(), self.config(optimizer=there))
            engine_loop(engine, 2)
            engine.save_checkpoint(self.folder.name)
            stored = copies(engine.module)
            engine.destroy()
            model = make()
            engine, *_ = self.initialize(model, self.config(optimizer=here))
            with self.assertRaisesRegex(offloadd.Error, f"OFD-1602.*global_step2 was trained {text}.*load_optimizer_states=False"):
                engine.load_checkpoint(self.folder.name)
            engine_loop(engine, 1)
            engine.load_checkpoint(self.folder.name, load_optimizer_states=False)
            self.assertTrue(torch.equal(model.state_dict()["head.weight"], stored["head.weight"]))
            engine_loop(engine, 1)
            engine.destroy()

    def test_the_weights_of_a_checkpoint_are_for_everybody(self):
        saved = os.path.join(self.folder.name, "saved")
        here = make(tied=True)
        engine, *_ = self.initialize(here, self.config())
        engine_loop(engine, 2)
        engine.save_checkpoint(saved)
        expected = copies(here)
        loaded = make(tied=True)
        offloadd.deepspeed.utils.load_state_dict_from_zero_checkpoint(loaded, saved)
        self.check_equal(loaded, here)
        engine.save_16bit_model(saved, "model.bin")
        self.assertEqual(set(torch.load(os.path.join(saved, "model.bin"), weights_only=True)), set(expected))
        engine_loop(engine, 1, first=2)
        engine.load_checkpoint(saved, load_module_only=True)
        self.check_equal(loaded, here)

    def test_masters_of_a_checkpoint_become_fp32_weights(self):
        saved, made = os.path.join(self.folder.name, "saved"), os.path.join(self.folder.name, "made")
        here = make()
        here.embed.requires_grad_(False)
        engine, *_ = self.initialize(here, self.config(bf16={"enabled": True}))
        engine_loop(engine, 2)
        engine.save_checkpoint(saved)
        masters = {name: engine.handle.gather(p, "master") for name, p in here.named_parameters()}
        engine_loop(engine, 1)
        offloadd.deepspeed.utils.convert_zero_checkpoint_to_fp32_state_dict(saved, made)
        found = torch.load(os.path.join(made, "pytorch_model.bin"), weights_only=True)
        self.assertEqual(set(found), {*masters, "calls"})
        for name, value in masters.items():
            self.assertTrue(torch.equal(found[name], value), name)
        self.assertFalse(torch.equal(found["up.weight"], found["up.weight"].bfloat16().float()), "masters, not their casts")
        trained = offloadd.deepspeed.utils.get_fp32_state_dict_from_zero_checkpoint(saved, exclude_frozen_parameters=True)
        self.assertEqual(set(found) - set(trained), {"embed.weight"})

    def test_frozen_weights_are_left_out_of_a_checkpoint(self):
        names = {"up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias", "calls"}
        for disabled in ("0", "1"):
            saved = os.path.join(self.folder.name, "saved" + disabled)
            with self.subTest(disabled=disabled), unittest.mock.patch.dict(os.environ, {"OFFLOADD_DISABLE": disabled}):
                here = make(tied=True)
                here.embed.requires_grad_(False)
                engine, *_ = self.initialize(here, self.config(bf16={"enabled": True}))
                engine_loop(engine, 2)
                engine.save_checkpoint(saved, exclude_frozen_parameters=True)
                kept = copies(here)
                told = engine_loop(engine, 2, first=2)
                self.assertEqual(set(offloadd.deepspeed.files.weights_in(os.path.join(saved, "global_step2"))), names)
                self.assertEqual(set(offloadd.deepspeed.utils.get_fp32_state_dict_from_zero_checkpoint(saved)), names)
                engine.load_checkpoint(saved)
                self.assertEqual(engine_loop(engine, 2, first=2), told)
                engine.load_checkpoint(saved, load_module_only=True)
                for name, value in kept.items():
                    self.assertTrue(torch.equal(here.state_dict()[name], value), name)
                engine.destroy()

    def test_weights_that_were_written_after_the_last_step_are_in_a_checkpoint(self):
        saved = os.path.join(self.folder.name, "saved")
        here, there = make(), make()
        engine, *_ = self.initialize(here, self.config())
        optimizer = self.adamw(there.parameters())
        engine_loop(engine, 1), plain(there, optimizer, 1)
        with torch.no_grad():
            here.head.weight.mul_(0.5), there.head.weight.mul_(0.5)
        engine.save_checkpoint(saved)
        engine_loop(engine, 1, first=1)  # lost
        engine.load_checkpoint(saved)
        self.assertEqual(engine_loop(engine, 2, first=1), plain(there, optimizer, 2, first=1))
        self.check_equal(here, there)

    def test_checkpoints_of_an_optimizer_that_runs_in_this_process(self):
        saved = os.path.join(self.folder.name, "saved")
        here, there = make(), make()
        engine, optimizer, *_ = self.initialize(here, self.config(optimizer=None), optimizer=torch.optim.NAdam(here.parameters(), 1e-2))
        mine = torch.optim.NAdam(there.parameters(), 1e-2)
        engine_loop(engine, 2), plain(there, mine, 2)
        engine.save_checkpoint(saved)
        engine_loop(engine, 1, first=2)  # lost
        engine.load_checkpoint(saved)
        self.assertEqual(engine_loop(engine, 2, first=2), plain(there, mine, 2, first=2))
        self.check_equal(here, there)
        self.assertEqual([optimizer.overflow, optimizer.loss_scale], [False, 1.0])
        engine, *_ = self.initialize(make(), self.config())
        with self.assertRaisesRegex(offloadd.Error, "OFD-1602.*in this process"):
            engine.load_checkpoint(saved)

    def test_a_universal_checkpoint_is_loaded(self):
        saved, there = os.path.join(self.folder.name, "saved"), make(torch.bfloat16)
        optimizer = Masters(there, self.adamw)
        schedule = offloadd.deepspeed.schedules.WarmupLR(optimizer.optimizer, 0, 1e-2, 8)
        expected = plain(there, optimizer, 6, clip=0.5, scheduler=schedule)
        engine, *_ = self.initialize(make(), self.scheduled(bf16={"enabled": True}))
        told = engine_loop(engine, 3, clip=0.5)
        engine.handle.save_universal(saved)
        scheduler = engine.lr_scheduler.state_dict()
        engine.destroy()
        universal = self.scheduled(bf16={"enabled": True}, checkpoint={"load_universal": True})
        engine, *_ = self.initialize(make(), universal)
        engine_loop(engine, 1, clip=0.5, first=9)
        with self.assertRaisesRegex(offloadd.Error, "OFD-1402.*load_lr_scheduler_states"):
            engine.load_checkpoint(saved)
        # As DeepSpeed's own file has it: the schedule, what the program gave, and objects of classes that nobody may make.
        path = os.path.join(saved, "global_step3_universal", "mp_rank_00_model_states.pt")
        torch.save({**torch.load(path), "lr_scheduler": scheduler, "position": 3, "args": argparse.Namespace(lr=1)}, path)
        here = engine.module
        found, state = engine.load_checkpoint(saved)
        self.assertEqual([found, state], [os.path.dirname(path), {"position": 3}])
        self.assertEqual([engine.global_steps, engine.micro_steps], [3, 3])
        with self.assertRaisesRegex(offloadd.Error, "OFD-1602.*next step"):
            engine.save_checkpoint(saved, "without_a_step")
        told += engine_loop(engine, 3, clip=0.5, first=3)
        self.assertEqual(told, expected)
        engine.save_checkpoint(saved, "with_a_step", save_latest=False)
        here.calls.copy_(there.calls)  # buffers are not in it
        self.check_equal(here, there)
        engine.load_checkpoint(saved, "global_step3_universal", load_module_only=True)
        self.assertEqual(engine.global_steps, 6)
        self.assertTrue(engine.load_universal_checkpoint())
        self.assertEqual(engine_loop(engine, 1, first=3)[0], expected[len(expected) // 2])
        with self.assertRaisesRegex(offloadd.Error, "OFD-1405"):
            engine.load_checkpoint(saved, "other")

    def test_there_is_no_checkpoint(self):
        engine, *_ = self.initialize(make(), self.config())
        self.assertEqual(engine.load_checkpoint(self.folder.name), (None, None))
        foreign = os.path.join(self.folder.name, "theirs", "global_step1")
        os.makedirs(foreign)
        open(os.path.join(foreign, "mp_rank_00_model_states.pt"), "wb").close()
        with self.assertRaisesRegex(offloadd.Error, "OFD-1104.*zero_to_fp32"):
            engine.load_checkpoint(os.path.dirname(foreign), "global_step1")


class CheckpointsTest(DeepSpeedCase):
    """How long snapshots last."""

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
