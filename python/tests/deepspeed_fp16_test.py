"""fp16 with DeepSpeed's scale of losses, beside a loop of plain torch over fp32 masters, whose gradients are `p.grad.float() / scale`."""

import os
import tempfile
import unittest
import unittest.mock

import torch
from deepspeed_case import DeepSpeedCase, batch, make

import offloadd
import offloadd.deepspeed
from offloadd.deepspeed.loss_scale import LossScaler


class Plain:
    """The loop in memory. The rule of the scale is not what is tested here: it takes the engine's scales."""

    def __init__(self, model, make_optimizer, clip=0.0, micro=1, scheduler=None):
        self.model, self.clip, self.micro = model, clip, micro
        self.pairs = [(p, torch.nn.Parameter(p.detach().float())) for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer([master for _, master in self.pairs])
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)

    def step(self, step, scale):
        """(losses, norm or None where it has overflowed)."""
        losses = []
        for k in range(self.micro):
            loss = self.model(batch(step * self.micro + k))
            losses.append(loss.item())
            (loss / self.micro * scale).backward()
        overflows = any(not p.grad.isfinite().all() for p, _ in self.pairs if p.grad is not None)
        norm = None
        if not overflows:
            for p, master in self.pairs:
                master.grad = None if p.grad is None else p.grad.float() / scale
            gradients = [master.grad for _, master in self.pairs if master.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).item()
            if self.clip:
                torch.nn.utils.clip_grad_norm_([master for _, master in self.pairs], self.clip)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            with torch.no_grad():
                for p, master in self.pairs:
                    p.copy_(master)
        self.model.zero_grad()
        return losses, norm


def engine_step(engine, step, micro=1):
    losses = []
    for k in range(micro):
        loss = engine(batch(step * micro + k))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.get_global_grad_norm() if engine.was_step_applied() else None


class Fp16Test(DeepSpeedCase):
    def fp16(self, clip=0.0, micro=1, **scaling):
        whole = {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 3, "hysteresis": 1, **scaling}
        return self.config(fp16=whole, gradient_clipping=clip, gradient_accumulation_steps=micro)

    def follow(self, engine, plain, steps, first=0):
        """Both loops; the scales that the engine had."""
        scales = []
        for step in range(first, first + steps):
            scales.append(engine.optimizer.cur_scale)
            told = engine_step(engine, step, plain.micro)
            self.assertEqual(told, plain.step(step, scales[-1]), step)
            self.assertEqual(engine.optimizer.overflow, told[1] is None)
        self.check_equal(engine.module, plain.model)
        return scales

    def test_steps_that_overflow_are_skipped_and_all_others_are_exact(self):
        for disabled in ("", "1"):
            with self.subTest(disabled=disabled), unittest.mock.patch.dict(os.environ, {"OFFLOADD_DISABLE": disabled}):
                engine, optimizer, *_ = self.initialize(make(), self.fp16(clip=0.05, micro=2))
                plain = Plain(make(torch.float16), self.adamw, clip=0.05, micro=2)
                scales = self.follow(engine, plain, 12)
                self.assertEqual(engine.module.up.weight.dtype, torch.float16)
                self.assertEqual(scales[0], 2.0 ** 19)
                self.assertGreater(engine.skipped_steps, 1)
                self.assertTrue(any(b == 2 * a for a, b in zip(scales, scales[1:])), "it has grown, too")
                self.assertEqual([engine.global_steps, engine.micro_steps, engine.handle.step], [12, 24, 12 - engine.skipped_steps])
                for p, master in plain.pairs:
                    name = next(name for name, q in plain.model.named_parameters() if q is p)
                    here = dict(engine.module.named_parameters())[name]
                    self.assertTrue(torch.equal(engine.handle.gather(here, "master"), master), name)
                    self.assertTrue(torch.equal(engine.handle.gather(here, "exp_avg_sq"), plain.optimizer.state[master]["exp_avg_sq"]), name)
                self.assertEqual([optimizer.loss_scale, engine.cur_scale], [optimizer.cur_scale] * 2)

    def test_optimizers(self):
        kinds = {"SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}), "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
                 "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}),
                 "Adam": (lambda p, lr, weight_decay, **_: torch.optim.Adam(p, lr=lr, weight_decay=weight_decay, fused=True),
                          {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False})}
        for kind, (make_optimizer, params) in kinds.items():
            with self.subTest(kind):
                config = {**self.fp16(initial_scale_power=10), "optimizer": {"type": kind, "params": params}}
                engine, *_ = self.initialize(make(tied=True), config)
                self.follow(engine, Plain(make(torch.float16, tied=True), lambda p: make_optimizer(p, **params)), 3)
                engine.destroy()

    def test_a_scale_that_stays(self):
        engine, *_ = self.initialize(make(), self.fp16(loss_scale=1024))
        self.assertEqual(self.follow(engine, Plain(make(torch.float16), self.adamw), 3), [1024] * 3)
        self.assertEqual([engine.dynamic_loss_scale(), engine.loss_scale()], [False, 1024])

    def test_the_schedule_waits_where_a_step_is_skipped(self):
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-2, "warmup_type": "linear"}}
        engine, *_ = self.initialize(make(), {**self.fp16(initial_scale_power=30), "scheduler": schedule})
        plain = Plain(make(torch.float16), self.adamw,
                      scheduler=lambda o: offloadd.deepspeed.schedules.WarmupLR(o, warmup_max_lr=1e-2, warmup_num_steps=8, warmup_type="linear"))
        self.follow(engine, plain, 18)
        self.assertGreater(engine.skipped_steps, 2)
        self.assertEqual(engine.get_lr()[0], plain.optimizer.param_groups[0]["lr"])

    def test_gradients_that_fp16_has_not_are_trained_on(self):
        """Of 2^-30, which unscaling in fp16 would have made 0."""
        model = torch.nn.Linear(4, 1, bias=False)
        engine, *_ = self.initialize(model, self.config(fp16={"enabled": True, "initial_scale_power": 16},
                                                        optimizer={"type": "SGD", "params": {"lr": 2.0 ** 26}}))
        before = model.weight.detach().float().clone()
        engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).float().sum() * 2.0 ** -30)
        engine.step()
        self.assertTrue(torch.equal(engine.handle.gather(model.weight, "master"), before - 2.0 ** -4))

    def test_backward_without_the_scale_is_refused(self):
        engine, *_ = self.initialize(make(), self.fp16(initial_scale_power=8))
        plain = Plain(make(torch.float16), self.adamw)
        with self.assertRaisesRegex(offloadd.Error, "OFD-1002.*engine.scale"):
            engine(batch(0)).backward()
        engine.zero_grad()
        plain.model(batch(0))
        engine.scale(engine(batch(0))).backward()
        engine.step()
        plain.step(0, 256.0)
        self.check_equal(engine.module, plain.model)

    def test_what_has_no_masters_is_refused(self):
        model = make()
        with self.assertRaisesRegex(offloadd.Error, "OFD-1104.*NAdam"):
            self.initialize(model, {**self.fp16(), "optimizer": None}, optimizer=torch.optim.NAdam(model.parameters()))
        stranger = torch.nn.Parameter(torch.ones(3))
        model = make()
        with self.assertRaisesRegex(offloadd.Error, "OFD-1104.*float32, shape .3"):
            self.initialize(model, self.fp16(), model_parameters=[*model.parameters(), stranger])
        with self.assertRaisesRegex(offloadd.Error, "OFD-1104.*attach"):
            offloadd.attach(model, torch.optim.SGD(model.parameters(), 0.1), config=self.fp16())

    def test_the_least_scale_ends_the_run(self):
        engine, *_ = self.initialize(make(), self.fp16(initial_scale_power=60, min_loss_scale=2.0 ** 59, hysteresis=2))
        for step in range(2):
            engine_step(engine, step)
        with self.assertRaisesRegex(offloadd.Error, "OFD-1701.*min_loss_scale"):
            engine_step(engine, 2)
        self.assertEqual(engine.handle.step, 0)

    def test_floating_point_inputs_become_fp16(self):
        engine, *_ = self.initialize(torch.nn.Linear(4, 4), self.fp16(auto_cast=True, initial_scale_power=4))
        self.assertEqual(engine(torch.ones(2, 4)).dtype, torch.float16)

    def test_a_checkpoint_has_the_scale(self):
        saved = os.path.join(self.folder.name, "saved")
        engine, *_ = self.initialize(make(), self.fp16(clip=0.5))
        plain = Plain(make(torch.float16), self.adamw, clip=0.5)
        self.follow(engine, plain, 5)
        engine.save_checkpoint(saved)
        at = [engine.optimizer.cur_scale, engine.skipped_steps, *engine.optimizer.loss_scaler.state().values()]
        for step in range(5, 9):
            engine_step(engine, step)  # lost
        engine.load_checkpoint(saved)
        self.assertEqual([engine.optimizer.cur_scale, engine.skipped_steps, *engine.optimizer.loss_scaler.state().values()], at)
        self.follow(engine, plain, 4, first=5)
        engine.destroy()
        engine, *_ = self.initialize(make(), self.fp16(clip=0.5))
        engine.load_checkpoint(saved)
        self.assertEqual([engine.optimizer.cur_scale, engine.skipped_steps, *engine.optimizer.loss_scaler.state().values()], at)
        found = offloadd.deepspeed.utils.get_fp32_state_dict_from_zero_checkpoint(saved)
        self.assertTrue(torch.equal(found["up.weight"], engine.handle.gather(engine.module.up.weight, "master")), "masters")

    def test_a_run_with_a_name_has_the_scale_of_its_last_step(self):
        offloadd.deepspeed.setup.set_installed({"job": "named"})
        engine, *_ = self.initialize(make(), self.fp16())
        plain = Plain(make(torch.float16), self.adamw)
        for step in range(6):
            self.follow(engine, plain, 1, first=step)
            if engine.was_step_applied():  # those that were skipped behind it are done again
                at = [engine.global_steps, engine.skipped_steps, engine.optimizer.cur_scale]
        engine.destroy()
        engine, *_ = self.initialize(make(), self.fp16())
        self.assertEqual([engine.global_steps, engine.skipped_steps, engine.optimizer.cur_scale], at)
        self.assertGreater(at[1], 0)
        plain.model.calls.copy_(engine.module.calls)  # without those of the steps that are done again
        self.follow(engine, plain, 4, first=at[0])

    def test_a_program_may_set_the_scale(self):
        engine, optimizer, *_ = self.initialize(make(), self.fp16())
        optimizer.cur_scale = 64.0
        self.assertEqual(self.follow(engine, Plain(make(torch.float16), self.adamw), 2), [64.0] * 2)

    def test_a_frozen_part_and_a_part_without_a_gradient(self):
        here, there = make(), make(torch.float16)
        for model in (here, there):
            model.embed.requires_grad_(False)
            model.unused = torch.nn.Parameter(torch.ones(5, dtype=model.head.weight.dtype))
        engine, *_ = self.initialize(here, self.fp16(clip=0.1, initial_scale_power=8))
        self.follow(engine, Plain(there, self.adamw, clip=0.1), 3)

    def test_a_model_that_is_built_in_the_pool(self):
        config = self.fp16(initial_scale_power=8)
        with offloadd.deepspeed.zero.Init(config_dict_or_path=config):
            here = make()
        engine, *_ = self.initialize(here, config)
        self.follow(engine, Plain(make(torch.float16), self.adamw), 2)

    def test_weights_that_lie_in_the_pool_are_read_and_cast(self):
        for config in (self.fp16(initial_scale_power=8), self.config(bf16={"enabled": True})):
            with offloadd.deepspeed.zero.Init(config_dict_or_path=config):
                model = torch.nn.Linear(256, 300)
            with tempfile.TemporaryDirectory() as folder, offloadd.deepspeed.zero.GatheredParameters(list(model.parameters())):
                torch.save({"weight": torch.full((300, 256), 0.5), "bias": torch.zeros(300)}, os.path.join(folder, "w.pt"))
                model.load_state_dict(torch.load(os.path.join(folder, "w.pt")))
            engine, *_ = self.initialize(model, config)
            x = torch.ones(2, 256, dtype=model.weight.dtype)
            self.assertEqual(engine(x).float().mean().item(), 128)
            engine.backward(engine(x).float().mean())
            engine.step()
            self.assertTrue(engine.was_step_applied())
            engine.destroy()

    def test_a_scale_that_is_missing_is_told(self):
        engine, optimizer, *_ = self.initialize(make(), self.fp16(initial_scale_power=8))
        engine.eval()
        engine(batch(0)).backward()
        with self.assertRaisesRegex(offloadd.Error, "OFD-1002 engine.step.. after backward"):
            engine.step()
        with self.assertRaisesRegex(offloadd.Error, "OFD-1002 optimizer.step.. of gradients"):
            optimizer.step()
        engine.module.zero_grad()
        engine.train()
        engine.backward(engine(batch(0)))
        engine.step()

    def test_only_what_is_evaluated_has_no_scale(self):
        with offloadd.deepspeed.zero.Init(config_dict_or_path=self.fp16()):
            model = make()
        config = {key: value for key, value in self.fp16().items() if key != "optimizer"}
        engine, *_ = offloadd.deepspeed.initialize(model=model, config=config)
        with torch.no_grad():
            self.assertTrue(engine(batch(0)).isfinite())
        engine.destroy()


class ScaleTest(unittest.TestCase):
    def test_the_scale_has_the_numbers_of_deepspeed(self):
        """(options, where it overflows): the powers of the scale before each step."""
        for (scaling, overflows), powers in EXPECTED_POWERS.items():
            scaler = LossScaler({"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 3, "hysteresis": 2, "consecutive_hysteresis": False,
                                 "min_loss_scale": 1.0, **dict(scaling)})
            told = []
            for step in range(len(powers)):
                told.append(scaler.cur_scale.hex())
                scaler.load(scaler.next_state(step in overflows))
            self.assertEqual(told, [(2.0 ** power).hex() for power in powers], (scaling, overflows))


# Counted with DeepSpeed 0.19.6.
EXPECTED_POWERS = {
    ((), ()): [16, 16, 16, 16, 17, 17, 17, 18, 18, 18, 19, 19, 19, 20],
    ((), (0, 1, 2, 3)): [16, 16, 15, 14, 13, 13, 13, 13, 14, 14, 14, 15, 15, 15],
    ((), (2, 5, 6, 9)): [16, 16, 16, 16, 16, 16, 15, 14, 14, 14, 13, 13, 13, 13],
    ((("hysteresis", 1),), (0, 1, 4, 8)): [16, 15, 14, 14, 14, 13, 13, 13, 13, 12, 12, 12, 12, 13],
    ((("hysteresis", 3), ("consecutive_hysteresis", True),), (0, 1, 3, 4, 5, 6)): [16, 16, 16, 16, 16, 16, 15, 14, 14, 14, 14, 15, 15, 15],
    ((("hysteresis", 3),), (0, 1, 3, 4, 5, 6)): [16, 16, 16, 16, 15, 14, 13, 12, 12, 12, 12, 13, 13, 13],
    ((("loss_scale_window", 1),), (3, 4)): [16, 16, 17, 18, 18, 17, 17, 18, 19, 20, 21, 22, 23, 24],
    ((("loss_scale_window", 2), ("min_loss_scale", 32768.0), ("hysteresis", 1),), (0, 4, 9)): [16, 15, 15, 15, 16, 15, 15, 15, 16, 16, 15, 15, 15, 16],
    ((("loss_scale_window", 2), ("consecutive_hysteresis", True),), (1, 2, 8, 9, 10)): [16, 16, 16, 15, 15, 15, 16, 16, 17, 17, 16, 15, 15, 15],
}


if __name__ == "__main__":
    unittest.main()
