"""Programs for DeepSpeed over offloadd, beside the same loop of plain torch in memory: losses, norms and weights are equal, bit for bit."""

import argparse
import gc
import importlib.util
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
import types
import unittest
import unittest.mock

import torch
from deepspeed_case import DeepSpeedCase, Masters, Net, batch, engine_loop, make, plain

import offloadd
import offloadd.deepspeed


class DeepSpeedTest(DeepSpeedCase):

    # ---- The loop ----

    def test_the_plain_configuration(self):
        self.check(self.config(), self.adamw)

    def test_tied_weights(self):
        self.check(self.config(), self.adamw, tied=True)

    def test_accumulation_and_clipping(self):
        self.check(self.config(gradient_accumulation_steps=3, gradient_clipping=0.25), self.adamw, micro=3, clip=0.25)

    def test_accumulation_follows_from_the_batch(self):
        engine = self.check(self.config(train_batch_size=8), self.adamw, micro=2)
        self.assertEqual(engine.get_batch_info(), (8, 4, 2))

    def test_clipping_is_on_where_nothing_is_said(self):
        with self.assertLogs("offloadd", logging.WARNING) as logs:
            self.check(self.config(gradient_clipping=None), self.adamw, clip=1.0)
        self.assertIn("clipped at 1.0", "".join(logs.output))

    def test_bf16(self):
        self.check(self.config(bf16={"enabled": True}, gradient_clipping=0.5), self.adamw, clip=0.5, dtype=torch.bfloat16)

    def test_forward_passes_under_torch_autocast(self):
        section = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
        for dtype in (torch.float32, torch.bfloat16):
            here, there, exact = make(), make(dtype), make(dtype)
            there.forward = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)(there.forward)
            told = []
            for model in (there, exact):
                optimizer = self.adamw(model.parameters()) if dtype == torch.float32 else Masters(model, self.adamw)
                told.append(plain(model, optimizer, 4, micro=2, clip=0.5))
            self.assertEqual(told[0] == told[1], dtype == torch.bfloat16)
            engine = self.initialize(here, self.config(torch_autocast=section, bf16={"enabled": dtype == torch.bfloat16}, gradient_accumulation_steps=2,
                                                       gradient_clipping=0.5))[0]
            self.assertEqual(engine_loop(engine, 4, micro=2, clip=0.5), told[0])
            del there.forward
            self.check_equal(here, there)
            self.assertEqual({p.dtype for p in here.parameters()}, {dtype})
            self.assertEqual((engine.torch_autocast_enabled(), engine.torch_autocast_dtype()), (True, torch.bfloat16))
            self.assertEqual(engine.torch_autocast_lower_precision_safe_modules(), ["torch.nn.Linear"])

    def test_of_torch_autocast_to_fp16_the_way_out_is_told(self):
        with self.assertRaisesRegex(offloadd.Error, "OFD-1104 torch_autocast .*set \"dtype\" to that"):
            self.initialize(make(), self.config(torch_autocast={"enabled": True, "dtype": "float16"}))
        engine = self.initialize(make(), self.config(torch_autocast={"dtype": "float16"}))[0]  # as there, it has to be switched on
        self.assertEqual((engine.torch_autocast_enabled(), engine.torch_autocast_dtype()), (False, None))
        self.assertIn("torch.nn.modules.conv.Conv2d", engine.torch_autocast_lower_precision_safe_modules())

    def test_adam_with_weight_decay_in_the_gradient(self):
        optimizer = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}}
        self.check(self.config(optimizer=optimizer), lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True))

    def test_adam_is_adamw_as_with_deepspeed(self):
        self.check(self.config(optimizer={"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}}), self.adamw)

    def test_sgd(self):
        optimizer = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
        self.check(self.config(optimizer=optimizer), lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9))

    def test_warm_up(self):
        params = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 3, "total_num_steps": 10}
        self.check(self.config(scheduler={"type": "WarmupDecayLR", "params": params}), self.adamw,
                   lambda o: offloadd.deepspeed.schedules.WarmupDecayLR(o, 10, 0, 1e-2, 3), steps=6)

    def test_one_cycle_changes_betas_too(self):
        params = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}
        self.check(self.config(scheduler={"type": "OneCycle", "params": params}), self.adamw,
                   lambda o: offloadd.deepspeed.schedules.OneCycle(o, 1e-3, 1e-2, cycle_first_step_size=3), steps=6)

    def test_a_schedule_of_torch_by_its_name(self):
        self.check(self.config(scheduler={"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}), self.adamw,
                   lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5))

    def test_an_optimizer_and_a_schedule_of_the_programs_own(self):
        here, there = make(), make()
        optimizer = self.adamw(here.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        engine, same, loader, kept = self.initialize(here, self.config(optimizer=None), optimizer=optimizer, lr_scheduler=scheduler)
        self.assertIs(same, optimizer)
        self.assertIs(kept, scheduler)
        self.assertIsNone(loader)
        mine = self.adamw(there.parameters())
        theirs = torch.optim.lr_scheduler.CosineAnnealingLR(mine, 10)
        self.assertEqual(engine_loop(engine, 4), plain(there, mine, 4, scheduler=theirs))
        self.check_equal(here, there)

    def test_callables_make_optimizer_and_schedule(self):
        here, there = make(), make()
        engine, optimizer, _, scheduler = self.initialize(
            here, self.config(optimizer=None), optimizer=lambda p: offloadd.deepspeed.adam.DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1),
            lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)))
        self.assertIsInstance(optimizer, offloadd.deepspeed.adam.DeepSpeedCPUAdam)
        self.assertIs(engine.lr_scheduler, scheduler)
        mine = self.adamw(there.parameters())
        self.assertEqual(engine_loop(engine, 3), plain(there, mine, 3, scheduler=torch.optim.lr_scheduler.LambdaLR(mine, lambda t: 1 / (t + 1))))

    def test_adam_in_the_place_of_another_optimizer_is_refused(self):
        for kind in (torch.optim.SGD, torch.optim.RAdam, torch.optim.NAdam, torch.optim.Adamax, torch.optim.Adafactor, torch.optim.RMSprop):
            groups = kind(make().parameters(), lr=0.1).param_groups
            with self.subTest(kind.__name__), self.assertRaisesRegex(offloadd.Error, "OFD-1104.*zero_force_ds_cpu_optimizer"):
                offloadd.deepspeed.adam.DeepSpeedCPUAdam(groups, lr=0.1)

    @unittest.skipUnless(importlib.util.find_spec("accelerate"), "accelerate is not installed")
    def test_adam_in_the_place_of_an_optimizer_that_looks_like_it(self):
        from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

        class Lion(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0})

        class OwnAdam(torch.optim.AdamW):
            def step(self, closure=None):
                pass

        offloadd.deepspeed.install()
        for kind in (Lion, OwnAdam):
            with self.assertRaisesRegex(offloadd.Error, f"OFD-1104.*in the place of {kind.__name__}.*zero_force_ds_cpu_optimizer"):
                map_pytorch_optim_to_deepspeed(kind(make().parameters()))
        mapped = map_pytorch_optim_to_deepspeed(torch.optim.Adam(make().parameters(), weight_decay=0.1))
        self.assertEqual(mapped.param_groups[0]["decoupled_weight_decay"], False)

    def test_a_schedule_of_the_optimizer_that_adam_replaces_goes_on(self):
        replaced = torch.optim.AdamW(make().parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(replaced, lambda t: 1 / (t + 1))
        adam = offloadd.deepspeed.adam.DeepSpeedCPUAdam(replaced.param_groups, lr=1.0)
        replaced.step(), scheduler.step()
        self.assertEqual([adam.param_groups[0]["lr"], adam.param_groups[0]["fused"]], [0.5, True])

    def test_schedules_have_the_numbers_of_deepspeed(self):
        for (name, params), rates in EXPECTED_RATES.items():
            optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
            schedule = offloadd.deepspeed.schedules.BY_NAME[name](optimizer, **dict(params))
            told = []
            for _ in range(len(rates)):
                told.append((round(optimizer.param_groups[0]["lr"], 12), round(optimizer.param_groups[0]["betas"][0], 12)))
                schedule.step()
            self.assertEqual(told, rates, name)

    def test_groups_with_their_own_decay(self):
        here, there = make(), make()

        def groups(model):
            named = list(model.named_parameters())
            return [{"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.2},
                    {"params": [p for n, p in named if p.dim() < 2], "weight_decay": 0.0}]

        engine, *_ = self.initialize(here, self.config(), model_parameters=groups(here))
        self.assertEqual(engine_loop(engine, 3), plain(there, torch.optim.AdamW(groups(there), lr=1e-2, fused=True), 3))
        self.check_equal(here, there)

    def test_a_frozen_part_stays(self):
        here, there = make(), make()
        for model in (here, there):
            model.embed.requires_grad_(False)
        engine, *_ = self.initialize(here, self.config())
        trained = [p for p in there.parameters() if p.requires_grad]
        self.assertEqual(engine_loop(engine, 3), plain(there, self.adamw(trained), 3))
        self.check_equal(here, there)

    def test_the_boundary_that_a_program_sets(self):
        here, there = make(), make()
        engine, *_ = self.initialize(here, self.config(gradient_accumulation_steps=2))
        optimizer = self.adamw(there.parameters())
        for step in range(3):
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(engine(batch(2 * step)))
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(batch(2 * step + 1)))
            engine.step()
            self.assertTrue(engine.was_step_applied())
        plain(there, optimizer, 3, micro=2)
        self.check_equal(here, there)

    def test_a_program_may_own_the_boundary(self):
        """"managed_gradient_accumulation": false: each step() is one, after as many backward passes as the program likes."""
        here, there = make(), make()
        engine, *_ = self.initialize(here, self.config(gradient_accumulation_steps=4, managed_gradient_accumulation=False))
        optimizer, seen = self.adamw(there.parameters()), 0
        for count in (4, 1, 3):
            for seen in range(seen + 1, seen + count + 1):
                engine.backward(engine(batch(seen)))
                (there(batch(seen)) / 4).backward()
                self.assertFalse(engine.is_gradient_accumulation_boundary())
            engine.step(), optimizer.step(), optimizer.zero_grad()
            self.assertTrue(engine.was_step_applied())
            self.check_equal(here, there)
        self.assertEqual([engine.global_steps, engine.global_samples], [3, 32])
        with self.assertRaisesRegex(offloadd.Error, "OFD-1104.*managed_gradient_accumulation"):
            engine.set_gradient_accumulation_boundary(True)

    def test_zero_grad_between_micro_batches_loses_nothing(self):
        here, there = make(), make()
        engine, *_ = self.initialize(here, self.config(gradient_accumulation_steps=2))
        for i in range(4):
            engine.zero_grad()
            engine.backward(engine(batch(i)))
            engine.step()
        plain(there, self.adamw(there.parameters()), 2, micro=2)
        self.check_equal(here, there)

    def test_backward_of_a_loss_deep_in_the_output_is_scaled(self):
        class Deep(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = make()

            def forward(self, ids):
                return ids, ({"losses": [self.inner(ids)]}, None)

        here, there = Deep(), make()
        engine, *_ = self.initialize(here, self.config(gradient_accumulation_steps=2))
        optimizer = self.adamw(there.parameters())
        for i in range(4):
            engine(batch(i))[1][0]["losses"][0].backward()
            engine.step()
            (there(batch(i)) / 2).backward()
            if i % 2:
                optimizer.step(), optimizer.zero_grad()
        self.check_equal(here.inner, there)

    def test_backward_of_the_loss_itself_is_scaled(self):
        here, there = make(), make()
        engine, *_ = self.initialize(here, self.config(gradient_accumulation_steps=2))
        for i in range(4):
            engine(batch(i)).backward()
            engine.step()
        plain(there, self.adamw(there.parameters()), 2, micro=2)
        self.check_equal(here, there)

    def test_evaluation_between_steps(self):
        here, there = make(), make()
        engine, *_ = self.initialize(here, self.config())
        optimizer = self.adamw(there.parameters())
        for step in range(2):
            self.assertEqual(engine_loop(engine, 1, first=step), plain(there, optimizer, 1, first=step))
            engine.eval(), there.eval()
            with torch.no_grad():
                self.assertEqual(engine(batch(50)).item(), there(batch(50)).item())
            engine.train(), there.train()

    def test_training_data_becomes_a_loader(self):
        data = [batch(i)[0] for i in range(16)]
        engine, _, loader, _ = self.initialize(make(), self.config(), training_data=data)
        seen = [ids for ids in loader]
        self.assertEqual([len(seen), list(seen[0].shape)], [4, [4, 8]])
        for ids in offloadd.deepspeed.RepeatingLoader(loader):
            engine.backward(engine(ids))
            engine.step()
            if engine.global_steps == 6:
                break

    def test_without_an_optimizer_the_model_can_be_evaluated(self):
        here = make()
        engine, optimizer, _, _ = self.initialize(here, self.config(optimizer=None))
        self.assertIsNone(optimizer)
        with torch.no_grad():
            self.assertEqual(engine(batch(0)).item(), make()(batch(0)).item())
        with self.assertRaises(offloadd.Error) as caught:
            engine.backward(engine(batch(0)))
        self.assertEqual(caught.exception.id, 1105)

    def test_lion_is_the_program_of_its_paper(self):
        lion = {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.95, 0.98], "weight_decay": 0.1}}
        for dtype, changes in ((torch.float32, {}), (torch.bfloat16, {"bf16": {"enabled": True}})):
            here, there = make(), make(dtype)
            engine, *_ = self.initialize(here, self.config(optimizer=lion, **changes))
            self.assertIsInstance(engine.optimizer, offloadd.deepspeed.ops.lion.DeepSpeedCPULion)
            self.assertFalse(engine.handle.optimizer.state)

            def plain_lion(parameters):
                return offloadd.deepspeed.ops.lion.FusedLion(parameters, lr=1e-3, betas=(0.95, 0.98), weight_decay=0.1)

            optimizer = plain_lion(there.parameters()) if dtype == torch.float32 else Masters(there, plain_lion)
            for step in range(4):
                losses = [model(batch(step)) for model in (engine, there)]
                self.assertEqual(losses[0].item(), losses[1].item())
                engine.backward(losses[0]), losses[1].backward()
                engine.step(), optimizer.step(), optimizer.zero_grad()
            self.check_equal(here, there)
            state = getattr(optimizer, "optimizer", optimizer).state
            kept = next(iter(state.values()))["exp_avg"]
            first = next(iter(here.parameters()))
            self.assertTrue(torch.equal(engine.optimizer.state[first]["exp_avg"], kept))

    def test_parts_of_parameters_are_rows_of_elements(self):
        here = make()
        engine, *_ = self.initialize(here, self.config())
        engine_loop(engine, 1)
        utils, weight = offloadd.deepspeed.utils, here.up.weight
        self.assertTrue(torch.equal(utils.safe_get_local_fp32_param(weight), weight.detach().reshape(-1)))
        moment = utils.safe_get_local_optimizer_state(weight, "exp_avg")
        utils.safe_set_local_optimizer_state(weight, moment * 2, "exp_avg")
        utils.safe_set_local_fp32_param(weight, torch.arange(float(weight.numel())))
        self.assertTrue(torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), (moment * 2).reshape(weight.shape)))
        self.assertTrue(torch.equal(weight, torch.arange(float(weight.numel())).reshape(weight.shape)))
        engine.backward(engine(batch(1)))
        before = utils.safe_get_local_grad(weight)
        utils.safe_update_full_grad_vectorized(list(here.parameters()), lambda grad, _: grad * 2)
        self.assertTrue(torch.equal(utils.safe_get_local_grad(weight), before * 2))
        with self.assertRaisesRegex(offloadd.Error, "OFD-1002.*a part of 3 elements"):
            utils.safe_set_local_fp32_param(weight, torch.zeros(3))

    def test_what_programs_ask_of_the_optimizer(self):
        here, there = make(), make()
        engine, optimizer, *_ = self.initialize(here, self.config(gradient_clipping=0.5))
        expected = self.adamw(there.parameters())
        optimizer.set_lr(5e-3)
        expected.param_groups[0]["lr"] = 5e-3
        for step in range(2):
            optimizer.backward(engine(batch(step)))
            engine.step()
        self.assertEqual([optimizer.get_lr(), optimizer.clip_grad, optimizer.gradient_accumulation_steps, optimizer.has_overflow()], [5e-3, 0.5, 1, False])
        plain(there, expected, 2, clip=0.5)
        self.check_equal(here, there)
        self.assertEqual(list(map(id, optimizer.bit16_groups[0])), list(map(id, here.parameters())))
        optimizer.offload_states(), optimizer.reload_states(), optimizer.refresh_fp32_params(), optimizer.empty_partition_cache()
        for name, way in {"fp32_partitioned_groups_flat": "safe_get_full_fp32_param", "averaged_gradients": "safe_get_full_grad",
                          "optimizer": "the optimizer itself", "ipg_buckets": "from_deepspeed.md"}.items():
            self.assertFalse(hasattr(optimizer, name))
            with self.assertRaisesRegex(AttributeError, f"OFD-1108 optimizer.{name} is not there.*{way}"):
                getattr(optimizer, name)
        copied = pickle.loads(pickle.dumps(optimizer))
        with self.assertRaisesRegex(AttributeError, "no attribute 'get_lr'"):  # torch's own
            copied.get_lr()

    def test_programs_ask_an_optimizer_of_this_process_too(self):
        model = make()
        engine, optimizer, *_ = self.initialize(model, self.config(optimizer=None), optimizer=torch.optim.NAdam(model.parameters(), 1e-2))
        optimizer.set_lr(5e-3)
        optimizer.backward(engine(batch(0)))
        engine.step()
        self.assertEqual((optimizer.get_lr(), optimizer.has_overflow()), (5e-3, False))

    # ---- Configurations ----

    def test_a_configuration_is_a_file_or_arguments_too(self):
        path = os.path.join(self.folder.name, "ds_config.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.config(), file)
        parser = offloadd.deepspeed.add_config_arguments(argparse.ArgumentParser())
        args = parser.parse_args(["--deepspeed", "--deepspeed_config", path])
        self.assertTrue(args.deepspeed)
        model = make()
        engine, *_ = offloadd.deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
        self.engines.append(engine)
        self.assertEqual(engine.config["optimizer"]["type"], "AdamW")

    def test_what_would_train_something_else_is_refused(self):
        zero = self.config()["zero_optimization"]
        refused = [(1103, {"fp16": {"enabled": True}, "bf16": {"enabled": True}}), (1107, {"zero_optimization": {**zero, "zenflow": {"topk_ratio": 0.1}}}),
                   (1104, {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1}}}), (1104, {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}, "fp16": {"enabled": True}}),
                   (1105, {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}), (1103, {"train_batch_size": 6}),
                   (1102, {"optimizer": {"type": "AdamW", "params": {"weight_deacy": 0.1}}}),
                   (1102, {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}}),
                   (1104, {"scheduler": {"type": "Warmup"}}), (1104, {"tensor_parallel": {"autotp_size": 2}}),
                   (1104, {"scheduler": {"type": "Optimizer"}}), (1104, {"scheduler": {"type": "LRScheduler"}}),
                   (1105, {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}),
                   (1105, {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3}}}),
                   (1102, {"scheduler": {"type": "LambdaLR", "params": {"lr_lambda": "lambda t: 1"}}})]
        for number, changes in refused:
            with self.subTest(changes), self.assertRaises(offloadd.Error) as caught:
                self.initialize(make(), self.config(**changes))
            self.assertEqual(caught.exception.id, number, str(caught.exception))

    def test_a_configuration_that_is_none_is_refused(self):
        with self.assertRaisesRegex(offloadd.Error, "OFD-1101 the configuration is a list"):
            self.initialize(make(), [self.config()])
        with self.assertRaisesRegex(offloadd.Error, "OFD-1101 the configuration is an int"):
            self.initialize(make(), 7)

    def test_what_is_auto_is_the_default(self):
        """As if it were not there: nobody else is there to decide it."""
        for kind, keys in (("RMSprop", ("alpha", "eps", "momentum")), ("Adagrad", ("eps", "weight_decay")), ("Lion", ("betas",)),
                           ("SGD", ("momentum", "nesterov")), ("AdamW", ("betas", "eps", "weight_decay"))):
            groups = []
            for params in ({}, dict.fromkeys(keys, "auto")):
                engine, optimizer, _, _ = self.initialize(make(), self.config(optimizer={"type": kind, "params": {"lr": 1e-3, **params}}))
                groups.append({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})
                engine.destroy()
            self.assertEqual(*groups)

    def test_a_run_without_a_drive_or_a_budget_says_how_to_name_them(self):
        del os.environ["OFFLOADD_RAM"]
        with self.assertRaisesRegex(offloadd.Error, "OFD-1105.*OFFLOADD_RAM"):
            self.initialize(make(), self.config())
        with self.assertRaisesRegex(offloadd.Error, "OFD-1105.*OFFLOADD_POOL"):
            self.initialize(make(), self.config(zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}}))

    def test_variables_win_over_the_file_and_install_over_variables(self):
        other = os.path.join(self.folder.name, "other")
        os.mkdir(other)
        os.environ["OFFLOADD_POOL"] = other
        engine, *_ = self.initialize(make(), self.config())
        self.assertEqual(engine.handle.nvme_path, other)
        engine.destroy()
        offloadd.deepspeed.setup.set_installed({"nvme_path": self.pool})
        engine, *_ = self.initialize(make(), self.config())
        self.assertEqual(engine.handle.nvme_path, self.pool)

    def test_attach_takes_configurations_too(self):
        model = make()
        with offloadd.attach(model, self.adamw(model.parameters()), config=self.config(), job="attached") as handle:
            self.assertEqual(handle.nvme_path, self.pool)
        for clipping, count in ((None, 0), (0.5, 1)):  # nothing of DeepSpeed's default
            model = make()
            with self.assertLogs("offloadd", "WARNING") as said:
                logging.getLogger("offloadd").warning("there is a line")
                offloadd.attach(model, self.adamw(model.parameters()), config=self.config(gradient_clipping=clipping), job="attached").close()
            self.assertEqual(sum("gradient_clipping is left to the program's loop" in line for line in said.output), count)
            self.assertEqual(sum("clip" in line for line in said.output), count)
        model = make()
        config = self.config(gradient_accumulation_steps=2, scheduler={"type": "WarmupLR"}, torch_autocast={"enabled": True, "dtype": "bf16"})
        with self.assertLogs("offloadd", "WARNING") as said:
            offloadd.attach(model, self.adamw(model.parameters()), config=config, job="attached").close()
        self.assertIn("says of optimizer, scheduler, torch_autocast, gradient_accumulation_steps is left to the program", "\n".join(said.output))
        path = os.path.join(self.folder.name, "offloadd.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'job = "toml"\nmemory.ram = "64MiB"\npool = "{self.pool}"\n')
        model = make()
        with offloadd.attach(model, self.adamw(model.parameters()), config=path) as handle:
            self.assertEqual(handle.job, "toml")
        with open(path, "a", encoding="utf-8") as file:
            file.write("memroy = 1\n")
        with self.assertRaisesRegex(offloadd.Error, "OFD-1003.*:4:1: unknown key"):
            offloadd.attach(model, self.adamw(model.parameters()), config=path)
        with self.assertRaisesRegex(offloadd.Error, "OFD-1405.* is a directory"):
            offloadd.attach(model, self.adamw(model.parameters()), config=self.folder.name)

    # ---- Jobs ----

    def test_a_run_begins_anew_and_leaves_nothing(self):
        for _ in range(2):
            self.check(self.config(), self.adamw, steps=2).destroy()
            self.assertEqual(len(self.jobs()), 1, "of the model that was trained last, which may be used")
        self.engines.clear()
        gc.collect()
        self.assertEqual(self.jobs(), [])

    def test_a_job_ends_with_its_model(self):
        model = make()
        engine, optimizer, *_ = offloadd.deepspeed.initialize(model=model, config=self.config())
        engine.backward(engine(batch(0)))
        engine.step()
        del engine, optimizer
        gc.collect()
        self.assertEqual(len(self.jobs()), 1, "the model still uses it")
        model.head.weight.sum().item()
        del model
        gc.collect()
        self.assertEqual(self.jobs(), [])

    def test_a_run_with_a_name_continues(self):
        offloadd.deepspeed.setup.set_installed({"job": "named"})
        here, there = make(), make()
        engine, *_ = self.initialize(here, self.config())
        told = engine_loop(engine, 2)
        engine.destroy()
        engine, *_ = self.initialize(make(), self.config())
        self.assertEqual(engine.global_steps, 2)
        told += engine_loop(engine, 2, first=2)
        self.assertEqual(told, plain(there, self.adamw(there.parameters()), 4))
        self.assertEqual(self.jobs(), ["named.offload"])

    def test_engines_of_a_run_with_a_name_continue_each_in_its_job(self):
        """Also where one is built in the pool."""
        offloadd.deepspeed.setup.set_installed({"job": "named", "nvme_path": self.pool})
        there = [make(), make(tied=True)]
        optimizers = [self.adamw(each.parameters()) for each in there]
        told = []
        for run in range(2):
            with offloadd.deepspeed.zero.Init():
                first = make()
            engines = [self.initialize(first, self.config())[0]]
            with offloadd.deepspeed.zero.Init(enabled=run == 0):
                second = make(tied=True)
            engines.append(self.initialize(second, self.config())[0])
            self.assertEqual([engine.global_steps for engine in engines], [2 * run, 2 * run])
            for engine, model, optimizer in zip(engines, there, optimizers):
                told.append((engine_loop(engine, 2, first=2 * run), plain(model, optimizer, 2, first=2 * run)))
                self.check_equal(engine.module, model)
            for engine in engines:
                engine.destroy()
            self.engines.clear()
            self.assertEqual(self.jobs(), ["named-2.offload", "named.offload"])
        for here, expected in told:
            self.assertEqual(here, expected)

    def test_a_run_with_a_name_continues_with_the_schedule_of_its_configuration(self):
        for kind, params in (("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_max_lr": 1e-2}),
                             ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}),
                             ("ExponentialLR", {"gamma": 0.8})):
            config = self.config(scheduler={"type": kind, "params": params}, gradient_accumulation_steps=2)
            engine, *_ = self.initialize(make(), config)
            told = engine_loop(engine, 6, micro=2)
            offloadd.deepspeed.setup.set_installed({"job": f"named-{kind}"})
            engine, *_ = self.initialize(make(), config)
            self.assertEqual(engine_loop(engine, 2, micro=2), told[:6], kind)
            engine.destroy()
            engine, *_ = self.initialize(make(), config)
            self.assertEqual((engine.global_steps, engine.micro_steps, engine.global_samples), (2, 4, 16))
            self.assertEqual(engine_loop(engine, 4, micro=2, first=2), told[6:], kind)
            engine.destroy()
            offloadd.deepspeed.setup.set_installed({})

    # ---- Construction and access ----

    def test_a_model_that_is_built_in_the_pool(self):
        with offloadd.deepspeed.zero.Init(config_dict_or_path=self.config()):
            here = make()
        there = make()
        with offloadd.deepspeed.zero.GatheredParameters(here.head.weight, modifier_rank=0), torch.no_grad():
            here.head.weight.mul_(0.5)
            there.head.weight.mul_(0.5)
        engine, *_ = self.initialize(here, self.config())
        self.assertEqual(engine_loop(engine, 3), plain(there, self.adamw(there.parameters()), 3))
        self.check_equal(here, there)
        engine.destroy()
        self.check_equal(here, there)
        self.engines.clear()
        del engine, here
        gc.collect()
        self.assertEqual(self.jobs(), [])

    def test_what_was_built_in_the_pool_is_written_gathered_or_not(self):
        def build():
            torch.manual_seed(0)
            return torch.nn.ParameterDict({"made": torch.nn.Parameter(torch.empty(256, 256)), "drawn": torch.nn.Parameter(torch.randn(256, 256))})

        with offloadd.deepspeed.zero.Init(config_dict_or_path=self.config()):
            here = build()
        there = build()
        for model in (here, there):
            with torch.no_grad():
                model["drawn"].add_(0.25)
            with offloadd.deepspeed.zero.GatheredParameters(list(model.values()), modifier_rank=0), torch.no_grad():
                with offloadd.deepspeed.zero.GatheredParameters(model["drawn"], modifier_rank=0):
                    model["drawn"].mul_(0.5)
                model["made"].copy_(torch.full((256, 256), 2.0))
        optimizer = self.adamw(there.parameters())
        self.initialize(here, self.config())
        engine = self.engines[-1]
        for _ in range(2):
            losses = []
            for model in (here, there):
                losses.append((model["made"] @ model["drawn"]).pow(2).mean())
            self.assertEqual(losses[0].item(), losses[1].item())
            engine.backward(losses[0]), losses[1].backward()
            engine.step(), optimizer.step(), optimizer.zero_grad()
        self.check_equal(here, there)

    def test_masters_and_moments_can_be_looked_at(self):
        here, there = make(), make()
        engine, *_ = self.initialize(here, self.config())
        optimizer = self.adamw(there.parameters())
        engine_loop(engine, 2), plain(there, optimizer, 2)
        utils = offloadd.deepspeed.utils
        self.assertTrue(torch.equal(utils.safe_get_full_fp32_param(here.up.weight), there.up.weight))
        self.assertTrue(torch.equal(utils.safe_get_full_optimizer_state(here.up.weight, "exp_avg"), optimizer.state[there.up.weight]["exp_avg"]))
        for values, name in ((torch.zeros(1), "exp_avg"), (torch.zeros_like(here.up.weight), "momentum_buffer")):
            with self.assertRaisesRegex(offloadd.Error, "OFD-1002"):
                utils.safe_set_full_optimizer_state(here.up.weight, values, name)

    def with_masters_and_moments_that_are_written(self, engine, dtype):
        """The loop against one that writes the same into torch's own optimizer."""
        utils, here = offloadd.deepspeed.utils, engine.module
        there = make(dtype)
        optimizer = self.adamw(there.parameters()) if dtype == torch.float32 else Masters(there, self.adamw)
        masters = list(there.parameters()) if dtype == torch.float32 else [master for _, master in optimizer.pairs]
        state = getattr(optimizer, "optimizer", optimizer).state
        for first in (0, 2):
            self.assertEqual(engine_loop(engine, 2, first=first), plain(there, optimizer, 2, first=first))
            for p, q, master in zip(here.parameters(), there.parameters(), masters):
                utils.safe_set_full_fp32_param(p, utils.safe_get_full_fp32_param(p) * 1.0009)
                utils.safe_set_full_optimizer_state(p, utils.safe_get_full_optimizer_state(p, "exp_avg") / 3, "exp_avg")
                with torch.no_grad():
                    master.mul_(1.0009)
                    q.copy_(master)
                    state[master]["exp_avg"].div_(3)
                self.assertTrue(torch.equal(utils.safe_get_full_fp32_param(p), master))
                self.assertTrue(torch.equal(utils.safe_get_full_optimizer_state(p, "exp_avg"), state[master]["exp_avg"]))
        self.assertEqual(engine_loop(engine, 2, first=4), plain(there, optimizer, 2, first=4))
        self.check_equal(here, there)

    def test_masters_and_moments_can_be_written(self):
        for dtype in (torch.float32, torch.bfloat16):
            for disabled in ("", "1"):
                with self.subTest(dtype=dtype, disabled=disabled), unittest.mock.patch.dict(os.environ, {"OFFLOADD_DISABLE": disabled}):
                    engine, *_ = self.initialize(make(), self.config(bf16={"enabled": dtype == torch.bfloat16}))
                    self.with_masters_and_moments_that_are_written(engine, dtype)

    def test_questions_about_a_configuration_in_its_old_form(self):
        os.environ["OFFLOADD_POOL"] = self.pool
        engine, *_ = self.initialize(make(), self.config(zero_optimization=True))
        self.assertEqual(engine.zero_reduce_bucket_size(), 500_000_000)

    def test_questions_about_the_configuration(self):
        engine, *_ = self.initialize(make(), self.config(steps_per_print=7))
        self.assertEqual((engine.steps_per_print(), engine.dump_state(), engine.zero_reduce_bucket_size()), (7, False, 500_000_000))
        self.assertEqual(engine.optimizer_params(), {"lr": 1e-2, "weight_decay": 0.1})
        self.assertIsNone(engine.scheduler_params())
        self.assertEqual((engine.communication_data_type, engine.load_universal_checkpoint()), (torch.float32, False))
        self.assertFalse(engine.monitor.enabled or engine.flops_profiler_enabled())
        engine.monitor.write_events([("loss", 1.0, 1)])

    def test_questions_about_offloading_and_ranks(self):
        engine, *_ = self.initialize(make(torch.bfloat16), self.config(bf16={"enabled": True}))
        self.assertEqual((engine.zero_offload_optimizer()["device"], engine.zero_cpu_offload(), engine.zero_has_nvme_offload()), ("nvme", False, True))
        self.assertEqual((engine.zero_prefetch_bucket_size(), engine.zero_max_live_parameters(), engine.zero_hpz_partition_size()),
                         (50_000_000, 1_000_000_000, 1))
        self.assertEqual(engine.get_data_types(), (torch.bfloat16, torch.bfloat16))
        self.assertEqual(torch.distributed.get_world_size(engine.data_parallel_group), 1)
        self.assertFalse(engine.has_moe_layers or engine.pipeline_parallelism or engine.mpu or engine.inside_no_sync_ctxt)
        with engine.no_sync():
            self.assertTrue(engine.inside_no_sync_ctxt)
        engine.enable_backward_allreduce = False  # as Megatron-DeepSpeed writes it
        engine.destroy()
        os.environ["OFFLOADD_POOL"] = self.pool
        engine, *_ = self.initialize(make(), self.config(zero_optimization={"stage": 2, "cpu_offload": True}))
        self.assertEqual((engine.zero_cpu_offload(), engine.zero_has_nvme_offload()), (True, False))

    def test_what_programs_ask_the_accelerator(self):
        accelerator = offloadd.deepspeed.get_accelerator()
        self.assertTrue(accelerator.is_fp16_supported() and accelerator.is_bf16_supported())
        self.assertEqual(accelerator.supported_dtypes(), [torch.float32, torch.bfloat16, torch.float16])
        self.assertEqual(accelerator.FloatTensor([1.0]).dtype, torch.float32)
        self.assertGreater(accelerator.total_memory(), accelerator.available_memory())
        with accelerator.stream(accelerator.current_stream()):
            self.assertEqual((accelerator.memory_stats(), accelerator.memory_cached(), accelerator.lazy_call(lambda: 3)), ({}, 0, 3))

    def test_words_of_communication(self):
        comm, ones = offloadd.deepspeed.comm, torch.ones(4)
        offloadd.deepspeed.init_distributed()
        comm.configure(enabled=True, prof_all=True)
        comm.inference_all_reduce(ones)
        whole = torch.zeros(4)
        comm.allgather_fn(whole, ones)
        self.assertTrue(torch.equal(whole, ones))
        self.assertEqual((comm.log_summary(return_dict=True), comm.get_all_ranks_from_group()), ({}, [0]))

    def test_tied_tensors_stay_one_when_they_are_cloned(self):
        engine, *_ = self.initialize(make(tied=True), self.config())
        whole = offloadd.deepspeed.utils.clone_tensors_for_torch_save({"module": engine.module.state_dict(), "steps": [1, (2, None)]})
        self.assertIs(whole["module"]["head.weight"], whole["module"]["embed.weight"])
        self.assertTrue(torch.equal(whole["module"]["up.weight"], engine.module.up.weight))
        self.assertNotEqual(whole["module"]["up.weight"].data_ptr(), whole["module"]["down.weight"].data_ptr())
        self.assertEqual(whole["steps"], [1, (2, None)])

    def test_timers_are_there(self):
        timer = offloadd.deepspeed.utils.timer
        timers = timer.SynchronizedWallClockTimer()
        for _ in range(2):
            timers("forward").start()
            time.sleep(0.002)
            timers("forward").stop()
        self.assertTrue(timers.has_timer("forward") and not timers.has_timer("step"))
        self.assertGreaterEqual(timers.get_mean(["forward", "step"], reset=False)["forward"], 2.0)
        with self.assertLogs("DeepSpeed", "INFO") as told:
            timers.log(["forward", "step"], memory_breakdown=True)
        self.assertRegex(told.output[0], r"time \(ms\) \| forward: \d+\.\d\d$")
        self.assertEqual(timers("forward").elapsed(), 0.0, "log() has reset it")
        self.assertEqual(timer.NoopTimer()("forward").elapsed(reset=False), 0)
        self.assertIn("mem_allocated", timers.memory_usage())
        self.assertEqual(timer.trim_mean([1.0, 2.0, 3.0, 100.0], 0.25), 2.5)

    def test_samples_are_counted(self):
        told = []
        samples = offloadd.deepspeed.utils.timer.ThroughputTimer(types.SimpleNamespace(enabled=True), batch_size=4, start_step=1,
                                                                 steps_per_output=3, logging_fn=told.append)
        self.assertEqual(samples.avg_samples_per_sec(), float("-inf"))
        samples.update_epoch_count()
        for step in range(6):
            samples.start()
            time.sleep(0.002)
            samples.stop(global_step=step % 2 == 1)
        self.assertEqual((samples.epoch_count, samples.global_step_count, samples.micro_step_count), (1, 3, 6))
        self.assertTrue(0 < samples.avg_samples_per_sec() <= 4 * 2 / 0.008)
        self.assertEqual(len(told), 1)
        self.assertIn("RunningAvgSamplesPerSec", told[0])

    def test_groups_are_all_ranks_or_one(self):
        groups = offloadd.deepspeed.utils.groups
        self.initialize(make(), self.config())
        for kind in ("data_parallel", "_sequence_data_parallel", "model_parallel", "tensor_model_parallel", "_sequence_parallel"):
            name = f"_get{kind}" if kind.startswith("_") else f"get_{kind}"
            self.assertEqual((getattr(groups, f"{name}_world_size")(), getattr(groups, f"{name}_rank")()), (1, 0), kind)
            value = torch.ones(2)
            torch.distributed.all_reduce(value, group=getattr(groups, f"{name}_group")())
            self.assertEqual(value.tolist(), [1.0, 1.0], kind)
        self.assertIs(groups._get_data_parallel_group(), torch.distributed.group.WORLD)

    def test_tensors_are_made_on_a_device_and_of_a_type(self):
        with offloadd.deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
            shapes, numbers = Net(), torch.arange(3)
        self.assertEqual({(p.device.type, p.dtype) for p in shapes.parameters()}, {("meta", torch.bfloat16)})
        self.assertEqual((numbers.device.type, numbers.dtype), ("meta", torch.int64))
        with offloadd.deepspeed.OnDevice(torch.bfloat16, "cpu"), offloadd.deepspeed.OnDevice(torch.float16, enabled=False):
            model = Net()
        self.assertEqual({(p.device.type, p.dtype) for p in model.parameters()}, {("cpu", torch.bfloat16)})
        self.assertEqual(torch.ones(1).dtype, torch.float32)
        with self.assertRaisesRegex(offloadd.Error, "OFD-1601.*meta"):
            self.initialize(shapes, self.config())

    def test_what_programs_ask_parameters(self):
        engine, *_ = self.initialize(make(), self.config())
        weight = engine.module.up.weight
        self.assertFalse(hasattr(weight, "ds_id"), "which parameters in parts have")
        self.assertEqual([weight.ds_numel, weight.partition_numel(), weight.ds_shape], [weight.numel(), weight.numel(), weight.shape])
        before = weight.detach().clone()
        weight.all_gather(), weight.partition(), weight.partition(has_been_updated=True)
        self.assertTrue(torch.equal(weight, before))

    def test_modules_are_found_below_modules(self):
        """As attributes, without install() too."""
        for path in ("utils.logging.logger", "utils.nvtx.instrument_w_nvtx", "utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
                     "runtime.zero.utils.is_zero_param", "runtime.zero.partition_parameters.ZeroParamStatus", "runtime.zero.config.ZeroStageEnum",
                     "runtime.fp16.loss_scaler.LossScaler", "ops.adam.cpu_adam.DeepSpeedCPUAdam", "ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
                     "comm.comm.init_distributed", "utils.init_on_device.OnDevice", "runtime.utils.set_random_seed"):
            found = offloadd.deepspeed
            for name in path.split("."):
                found = getattr(found, name)
            self.assertEqual(getattr(found, "__name__", "DeepSpeed").rpartition(".")[-1], "DeepSpeed" if name == "logger" else name)

    def test_modules_that_are_leaves(self):
        model, utils = make(), offloadd.deepspeed.utils
        self.assertEqual(utils.set_z3_leaf_modules_by_name(model, ["up", "down"]), ([model.up, model.down], []))
        self.assertEqual(utils.set_z3_leaf_modules_by_suffix(model, ["p", "x"], raise_if_not_found=False), ([model.up], ["x"]))
        with self.assertRaisesRegex(ValueError, "nothing"):
            utils.set_z3_leaf_modules_by_name(model, ["nothing"])

    def test_attributes_that_are_not_there_are_named(self):
        engine, *_ = self.initialize(make(), self.config())
        for owner, name in ((offloadd.deepspeed, "PipelineModule"), (offloadd.deepspeed, "init_inference"), (engine, "curriculum_params_legacy"),
                            (offloadd.deepspeed.zero, "TiledLinear"), (offloadd.deepspeed.comm, "all_to_all_quantized"),
                            (offloadd.deepspeed.utils.groups, "_get_expert_parallel_group"), (offloadd.deepspeed.checkpointing, "get_cuda_rng_tracker"),
                            (offloadd.deepspeed.get_accelerator(), "op_builder_dir"), (offloadd.deepspeed.schedules, "SuperConvergence")):
            self.assertFalse(hasattr(owner, name), name)
            with self.assertRaisesRegex(offloadd.Error, f"OFD-1108.*{name}"):
                getattr(owner, name)
        self.assertEqual(engine.embed.num_embeddings, 64, "the model's attributes are the engine's")


# (learning rate, first beta) before each step, of groups that begin at 0.1; counted with DeepSpeed 0.19.6.
EXPECTED_RATES = {
    ("LRRangeTest", (
        ("lr_range_test_min_lr", 0.01), ("lr_range_test_step_size", 2), ("lr_range_test_step_rate", 0.5),
    )): [
        (0.01, 0.9), (0.0125, 0.9), (0.015, 0.9), (0.0175, 0.9), (0.02, 0.9), (0.0225, 0.9), (0.025, 0.9), (0.0275, 0.9),
    ],
    ("LRRangeTest", (
        ("lr_range_test_min_lr", 0.01), ("lr_range_test_step_size", 2), ("lr_range_test_staircase", True),
    )): [
        (0.01, 0.9), (0.01, 0.9), (0.02, 0.9), (0.02, 0.9), (0.03, 0.9), (0.03, 0.9), (0.04, 0.9), (0.04, 0.9),
    ],
    ("WarmupLR", (
        ("warmup_max_lr", 0.02), ("warmup_num_steps", 4),
    )): [
        (0.0, 0.9), (0.0, 0.9), (0.01, 0.9), (0.015849625007, 0.9), (0.02, 0.9), (0.02, 0.9), (0.02, 0.9), (0.02, 0.9),
    ],
    ("WarmupLR", (
        ("warmup_min_lr", 0.005), ("warmup_max_lr", 0.02), ("warmup_num_steps", 3), ("warmup_type", "linear"),
    )): [
        (0.005, 0.9), (0.005, 0.9), (0.01, 0.9), (0.015, 0.9), (0.02, 0.9), (0.02, 0.9), (0.02, 0.9), (0.02, 0.9),
    ],
    ("WarmupDecayLR", (
        ("total_num_steps", 6), ("warmup_max_lr", 0.02), ("warmup_num_steps", 2),
    )): [
        (0.0, 0.9), (0.0, 0.9), (0.02, 0.9), (0.02, 0.9), (0.015, 0.9), (0.01, 0.9), (0.005, 0.9), (0.0, 0.9),
    ],
    ("WarmupCosineLR", (
        ("total_num_steps", 6), ("warmup_min_ratio", 0.1), ("warmup_num_steps", 2), ("cos_min_ratio", 0.01),
    )): [
        (0.0, 0.9), (0.01, 0.9), (0.1, 0.9), (0.085501785669, 0.9), (0.0505, 0.9), (0.015498214331, 0.9), (0.001, 0.9),
        (0.001, 0.9),
    ],
    ("OneCycle", (
        ("cycle_min_lr", 0.01), ("cycle_max_lr", 0.05), ("cycle_first_step_size", 2), ("cycle_second_step_size", 3),
        ("decay_step_size", 1), ("decay_lr_rate", 0.5),
    )): [
        (0.01, 0.8), (0.03, 0.85), (0.05, 0.8), (0.036666666667, 0.833333333333), (0.023333333333, 0.866666666667), (0.01, 0.9),
        (0.006666666667, 0.9), (0.005, 0.9),
    ],
}

INSTALLED = """
import importlib.metadata, importlib.util, sys
import offloadd.deepspeed
offloadd.deepspeed.install(ram="64MiB", nvme_path=sys.argv[1])
import deepspeed, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.lr_schedules import WarmupLR, VALID_LR_SCHEDULES
from deepspeed.runtime.zero.partition_parameters import zero_wrapper_for_fp_tensor_constructor
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.utils import groups, logger, safe_get_full_grad
from deepspeed.utils.groups import _get_data_parallel_group, get_data_parallel_world_size
from deepspeed.utils.logging import log_dist_once, set_log_level_from_string
from deepspeed.utils.init_on_device import OnDevice
from deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer
from deepspeed.utils.nvtx import instrument_w_nvtx
from deepspeed.utils.tensor_fragment import safe_get_full_fp32_param
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
import deepspeed.comm as dist
assert importlib.util.find_spec("deepspeed") and importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
assert importlib.metadata.version("deepspeed") == deepspeed.__version__
for name in ("deepspeed.inference", "deepspeed.utils.bwc", "deepspeed.runtime.zero.stage3"):
    try:
        importlib.import_module(name)
        raise SystemExit(f"{name} is there")
    except ImportError as error:
        assert "OFD-1108" in str(error), error
dist.init_distributed("nccl")
assert (dist.get_rank(), dist.get_world_size(), get_accelerator().current_device_name()) == (0, 1, "cpu")
model = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(model=model, optimizer=DeepSpeedCPUAdam(model.parameters()), config={"train_batch_size": 1})
for _ in range(2):
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
print("trained", engine.global_steps)
"""


class InstalledTest(unittest.TestCase):
    def test_programs_that_import_deepspeed_run(self):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR") or None) as pool:
            done = subprocess.run([sys.executable, "-c", INSTALLED, pool], capture_output=True, text=True, timeout=120, check=False)
            self.assertEqual(done.stdout, "trained 2\n", done.stderr)
            self.assertEqual(os.listdir(pool), [], "the run's own job is deleted at its end")


if __name__ == "__main__":
    unittest.main()
