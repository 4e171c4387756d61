"""Loops of programs for DeepSpeed that do more than forward, backward and step, beside the same loop of plain torch in memory: what they have
seen, and the weights, are equal bit for bit."""

import contextlib
import copy
import itertools
import os
import types
import unittest
import unittest.mock

import torch
from deepspeed_case import DeepSpeedCase, Masters, Net, batch, copies, make

import offloadd
import offloadd.deepspeed as deepspeed

LR = 1e-2


class PlainEngine:
    """The engine's words over plain torch, so that one loop runs with both."""

    def __init__(self, model, optimizer, accumulation=1, clip=0.0, scheduler=None):
        self.module, self.optimizer, self.accumulation, self.clip, self.lr_scheduler = model, optimizer, accumulation, clip, scheduler
        self.micro_steps = self.global_steps = 0

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.__dict__["module"], name)

    def backward(self, loss, retain_graph=False):
        (loss / self.accumulation if self.accumulation > 1 else loss).backward(retain_graph=retain_graph)

    def step(self):
        self.micro_steps += 1
        if self.micro_steps % self.accumulation:
            return
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        for p in self.module.parameters():
            p.grad = None
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.global_steps += 1

    def train_steps(self, steps, first=0):
        return train(self, steps, first)


def train(engine, steps, first=0):
    told = []
    for step in range(first, first + steps):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        told.append(loss.item())
    return told


class Normed(torch.nn.Module):
    """With running statistics, and several outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(12, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 3)

    def forward(self, x):
        h = self.norm(self.first(x)).tanh()
        return types.SimpleNamespace(hidden=h, logits=self.second(h))


class Routed(torch.nn.Module):
    """One expert a step: the others have no gradient."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x, chosen):
        return self.head(self.experts[chosen](x).relu()).square().mean()


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class LoopsTest(DeepSpeedCase):
    def engine(self, model, changes=None, **others):
        return self.initialize(model, self.config(**(changes or {})), **others)[0]

    def both(self, loop, build=make, changes=None, there=None):
        """The loop with the engine and with plain torch; `loop` gives what it has seen."""
        torch.manual_seed(0)
        here = build()
        engine = self.engine(here, changes)
        seen = loop(engine)
        torch.manual_seed(0)
        model = build()
        plain = PlainEngine(model, self.adamw(model.parameters())) if there is None else there(model)
        self.assertEqual(seen, loop(plain))
        self.check_equal(here, model)
        return engine

    def test_two_engines_train_against_each_other(self):
        def build():
            torch.manual_seed(0)
            return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)), \
                torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.LeakyReLU(0.2), torch.nn.Linear(32, 1))

        def loop(generator, critic):
            told, bce = [], torch.nn.functional.binary_cross_entropy_with_logits
            for step in range(4):
                real, z = noise(step, 4, 8), noise(100 + step, 4, 8)
                fake = generator(z)
                loss = bce(critic(real), torch.ones(4, 1)) + bce(critic(fake.detach()), torch.zeros(4, 1))
                critic.backward(loss)
                critic.step()
                loss_g = bce(critic(fake), torch.ones(4, 1))
                generator.backward(loss_g)
                generator.step()
                critic.zero_grad()
                told += [loss.item(), loss_g.item()]
            return told

        here, there = build(), build()
        told = loop(*[self.engine(model) for model in here])
        self.assertEqual(told, loop(*[PlainEngine(model, self.adamw(model.parameters())) for model in there]))
        for one, other in zip(here, there):
            self.check_equal(one, other)

    def test_a_policy_with_a_reference_and_a_moving_average(self):
        """As DeepSpeed-Chat does it: four engines, two of them without an optimizer."""
        def loop(policy, reference, average, gather):
            told = []
            for step in range(3):
                ids = batch(step)
                with torch.no_grad():
                    base = reference(ids)
                loss = policy(ids)
                policy.backward(loss + 0.1 * (loss - base).square())
                policy.step()
                with torch.no_grad():
                    for p, q in zip(policy.parameters(), average.parameters()):
                        with gather([p, q]):
                            q.data.copy_(torch.lerp(p.data, q.data, 0.9))
                    told += [loss.item(), base.item(), average(ids).item()]
            return told

        without = {"optimizer": None}
        here, there = make(), make()
        average, average_there = make(), make()
        told = loop(self.engine(here), self.engine(make(), without, model_parameters=None), self.engine(average, without, model_parameters=None),
                    lambda each: deepspeed.zero.GatheredParameters(each, modifier_rank=0))
        self.assertEqual(told, loop(PlainEngine(there, self.adamw(there.parameters())), make(), average_there, lambda each: contextlib.nullcontext()))
        self.check_equal(here, there)
        self.check_equal(average, average_there)

    def test_two_losses_over_one_graph(self):
        def loop(engine):
            told = []
            for step in range(3):
                output = engine(noise(step, 5, 12))
                one, other = output.logits.square().mean(), output.hidden.abs().mean()
                engine.backward(one, retain_graph=True)
                engine.backward(other)
                engine.step()
                told += [one.item(), other.item()]
            return told

        self.both(loop, Normed)

    def test_a_penalty_of_gradients(self):
        def loop(engine):
            told = []
            for step in range(3):
                x = noise(step, 5, 12).requires_grad_()
                output = engine(x).logits
                slope, = torch.autograd.grad(output.sum(), x, create_graph=True)
                loss = output.square().mean() + (slope.norm(dim=1) - 1).square().mean()
                engine.backward(loss)
                engine.step()
                told.append(loss.item())
            return told

        self.both(loop, Normed)

    def test_inputs_that_are_made_against_the_model(self):
        """The gradient of the input alone, twice a step; weights' gradients of the attack are dropped."""
        def loop(engine):
            told = []
            for step in range(3):
                x = noise(step, 5, 12)
                for _ in range(2):
                    x = x.detach().requires_grad_()
                    engine.module(x).logits.square().sum().backward()
                    x = x + 0.01 * x.grad.sign()
                for p in engine.module.parameters():
                    p.grad = None
                loss = engine(x.detach()).logits.square().mean()
                engine.backward(loss)
                engine.step()
                told.append(loss.item())
            return told

        self.both(loop, Normed)

    def test_parts_without_a_gradient(self):
        def loop(engine):
            told = []
            for step in range(5):
                loss = engine(noise(step, 4, 16), step % 2)
                engine.backward(loss)
                engine.step()
                told.append(loss.item())
            return told

        self.both(loop, Routed)

    def test_gradients_that_the_program_changes(self):
        def change(engine, get, put):
            told = []
            for step in range(3):
                loss = engine(batch(step))
                engine.backward(loss)
                for name, p in engine.module.named_parameters():
                    if name.startswith("up"):
                        put(p, get(p) * 0.5)
                    if name == "embed.weight":
                        p.grad[:4].zero_()
                told += [loss.item(), engine.module.head.weight.grad.abs().sum().item()]
                engine.step()
            return told

        here, there = make(), make()
        told = change(self.engine(here), deepspeed.utils.safe_get_full_grad, deepspeed.utils.safe_set_full_grad)
        self.assertEqual(told, change(PlainEngine(there, self.adamw(there.parameters())), lambda p: p.grad, lambda p, g: p.grad.copy_(g)))
        self.check_equal(here, there)

    def test_rates_and_decays_that_the_program_sets(self):
        def loop(engine):
            told = []
            for step in range(4):
                for group in engine.optimizer.param_groups:
                    group["lr"], group["weight_decay"] = LR / (step + 1), 0.1 * step
                told += train(engine, 1, step)
            return told

        self.both(loop)

    def test_a_schedule_that_the_engine_does_not_know(self):
        def loop(engine):
            schedule = torch.optim.lr_scheduler.SequentialLR(
                engine.optimizer, [torch.optim.lr_scheduler.LinearLR(engine.optimizer, 0.1, total_iters=2),
                                   torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, 4)], [2])
            told = []
            for step in range(5):
                told += train(engine, 1, step)
                schedule.step()
                told.append(schedule.get_last_lr())
            return told

        self.both(loop)

    def test_layers_that_are_thawed_on_the_way(self):
        def build():
            model = make()
            model.embed.requires_grad_(False)
            return model

        def loop(engine):
            told = train(engine, 2)
            engine.module.embed.requires_grad_(True)
            engine.optimizer.add_param_group({"params": [engine.module.embed.weight], "lr": 1e-3})
            return told + train(engine, 2, 2)

        self.both(loop, build, there=lambda model: PlainEngine(model, self.adamw([p for p in model.parameters() if p.requires_grad])))

    def test_other_batch_sizes_on_the_way(self):
        def loop(engine):
            told = train(engine, 4)
            if isinstance(engine, PlainEngine):
                engine.accumulation = 3
            else:
                engine.set_train_batch_size(12)
            engine.micro_steps = 0
            return told + train(engine, 6, 4)

        self.both(loop, changes={"gradient_accumulation_steps": 2},
                  there=lambda model: PlainEngine(model, self.adamw(model.parameters()), accumulation=2))

    def test_weights_that_are_loaded_on_the_way(self):
        def loop(engine):
            kept = {name: value.clone() for name, value in engine.module.state_dict().items()}
            told = train(engine, 2)
            engine.module.load_state_dict({name: value * 0.9 for name, value in kept.items()})
            return told + train(engine, 2, 2)

        self.both(loop)

    def test_hooks_of_the_program(self):
        def loop(engine):
            told, hooks = [], []
            hooks.append(engine.module.up.register_forward_hook(lambda module, args, output: output * 1.5))
            hooks.append(engine.module.down.register_full_backward_hook(lambda module, given, taken: told.append(taken[0].sum().item())))
            hooks.append(engine.module.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01)))
            told += train(engine, 2)
            for hook in hooks:
                hook.remove()
            return told + train(engine, 1, 2)

        self.both(loop)

    def test_blocks_that_are_computed_again(self):
        class Again(Net):
            def forward(self, ids):
                x = self.embed(ids)
                block = lambda h: self.down(torch.nn.functional.dropout(torch.nn.functional.gelu(self.up(self.norm(h))), 0.1))
                x = x + deepspeed.checkpointing.checkpoint(block, x)
                return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())

        def loop(engine):
            torch.manual_seed(3)
            return train(engine, 3)

        self.both(loop, Again)

    def test_statistics_come_back_with_a_checkpoint(self):
        saved = os.path.join(self.folder.name, "saved")

        def loop(engine, save, load):
            def go(steps, first):
                told = []
                for step in range(first, first + steps):
                    loss = engine(noise(step, 5, 12)).logits.square().mean()
                    engine.backward(loss)
                    engine.step()
                    told.append(loss.item())
                return told

            told = go(2, 0)
            save()
            told += go(2, 2)
            load()
            engine.module.eval()
            told.append(engine(noise(9, 5, 12)).logits.sum().item())
            engine.module.train()
            return told + go(2, 2)

        torch.manual_seed(0)
        here = Normed()
        torch.manual_seed(0)
        there = Normed()
        engine, plain = self.engine(here), PlainEngine(there, self.adamw(there.parameters()))
        kept = []

        def save():
            kept.append((copy.deepcopy(there.state_dict()), copy.deepcopy(plain.optimizer.state_dict())))

        def load():
            there.load_state_dict(kept[0][0])
            plain.optimizer.load_state_dict(kept[0][1])

        self.assertEqual(loop(engine, lambda: engine.save_checkpoint(saved, "at"), lambda: engine.load_checkpoint(saved, "at")), loop(plain, save, load))
        self.check_equal(here, there)

    def test_a_second_phase_with_another_engine(self):
        """Pretraining, then another optimizer over the same model."""
        here, there = make(), make()
        engine = self.engine(here)
        told = train(engine, 2)
        weights = copies(here)
        engine.destroy()
        again = make()
        again.load_state_dict(weights)
        engine = self.engine(again, {"optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}}})
        told += train(engine, 2, 2)
        expected = train(PlainEngine(there, self.adamw(there.parameters())), 2)
        expected += train(PlainEngine(there, torch.optim.SGD(there.parameters(), lr=LR, momentum=0.9)), 2, 2)
        self.assertEqual(told, expected)
        self.check_equal(again, there)

    def test_a_model_goes_on_in_another_engine(self):
        """Whether the first was destroyed or not: a new optimizer begins with the weights as they are, the same one keeps its moments."""
        makers = {"new": torch.optim.SGD, "same": None, "in process": torch.optim.NAdam}
        for kind, dtype, is_destroyed in itertools.product(makers, (torch.float32, torch.bfloat16), (True, False)):
            if (kind, dtype) == ("in process", torch.bfloat16):
                continue  # it has no masters, there or here
            here, there = make(), make(dtype)
            bf16 = {"bf16": {"enabled": dtype == torch.bfloat16}, "optimizer": None}
            first = (lambda p: torch.optim.NAdam(p, lr=LR)) if kind == "in process" else self.adamw
            second = (lambda p: torch.optim.SGD(p, lr=LR)) if kind == "new" else None

            def plainly(make_optimizer):
                return make_optimizer(there.parameters()) if dtype == torch.float32 else Masters(there, make_optimizer)

            optimizer, plain = first(here.parameters()), plainly(first)
            engine, *_ = self.initialize(here, self.config(**bf16), optimizer=optimizer)
            told, expected = train(engine, 2), train(PlainEngine(there, plain), 2)
            if is_destroyed:
                engine.destroy()
                self.check_equal(here, there)
            for model in (here, there) if kind != "same" else ():
                with torch.no_grad():
                    model.head.weight.mul_(0.5)
            again, *_ = self.initialize(here, self.config(**bf16), optimizer=second(here.parameters()) if second else optimizer)
            told += train(again, 2, 2)
            expected += train(PlainEngine(there, plainly(second) if second else plain), 2, 2)
            self.assertEqual(told, expected, (kind, dtype, is_destroyed))
            self.check_equal(here, there)
            with self.assertRaisesRegex(offloadd.Error, "OFD-1802 engine.step.. of an engine that was destroyed"):
                engine.step()
            again.destroy()

    def test_a_part_of_another_model_goes_on_in_another_engine(self):
        whole = [torch.nn.ModuleDict({"inner": make(), "more": torch.nn.Linear(2, 2)}) for _ in range(2)]
        here, there = make(), make()
        told, expected = train(self.engine(here), 2), train(PlainEngine(there, self.adamw(there.parameters())), 2)
        for wrapper, inner in zip(whole, (here, there)):
            wrapper["more"].load_state_dict(whole[0]["more"].state_dict())
            wrapper["inner"] = inner
            wrapper.forward = inner.forward
        told += train(self.engine(whole[0]), 2, 2)
        expected += train(PlainEngine(whole[1], self.adamw(whole[1].parameters())), 2, 2)
        self.assertEqual(told, expected)
        self.check_equal(*whole)

    def test_a_job_with_a_name_is_not_continued_with_a_new_optimizer(self):
        deepspeed.setup.set_installed({"job": "named"})
        here = make()
        engine = self.engine(here)
        train(engine, 1)
        engine.destroy()
        with self.assertRaisesRegex(offloadd.Error, "OFD-1205 job named has trained this model in this process with another optimizer"):
            self.engine(here)
        again, *_ = self.initialize(here, self.config(optimizer=None), optimizer=engine.optimizer)
        self.assertEqual(again.handle.step, 1)

    def test_configurations_with_comments_and_in_base64_are_read_whole(self):
        import base64
        import json

        whole = {**self.config(), "dataloader_drop_last": True, "steps_per_print": 3, "gradient_clipping": 0.25, "train_batch_size": 4}
        path = os.path.join(self.folder.name, "ds.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write("// ours\n" + json.dumps(whole)[:-1] + ", /* the end */ }")
        data = [batch(i)[0] for i in range(10)]
        for given in (path, base64.urlsafe_b64encode(json.dumps(whole).encode()).decode()):
            model = make()
            engine, _, loader, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=given, training_data=data)
            self.engines.append(engine)
            self.assertEqual([len(loader), engine.steps_per_print(), engine.gradient_clipping(), engine.train_batch_size()], [2, 3, 0.25, 4])
            self.assertEqual([engine.zero_optimization_stage(), engine.config["optimizer"]["type"]], [3, "AdamW"])

    def test_what_programs_ask_a_module(self):
        here, there = make(tied=True), make(tied=True)
        engine = self.engine(here)
        self.assertEqual([name for name, _ in engine.named_parameters()], ["module." + name for name, _ in there.named_parameters()])
        self.assertEqual(sum(p.numel() for p in engine.parameters() if p.requires_grad), sum(p.numel() for p in there.parameters()))
        self.assertEqual(list(engine.module_state_dict()), list(there.state_dict()))
        self.assertIsInstance(engine, deepspeed.DeepSpeedEngine)
        self.assertTrue(engine.training and not engine.eval().training)
        train(engine.train(), 1)
        train(PlainEngine(there, self.adamw(there.parameters())), 1)
        self.assertEqual(torch.nn.utils.parameters_to_vector(engine.parameters()).sum().item(), torch.nn.utils.parameters_to_vector(there.parameters()).sum().item())
        copied = copy.deepcopy(engine.module)
        self.check_equal(copied, there)
        self.assertTrue(all(p.ds_status == deepspeed.zero.ZeroParamStatus.AVAILABLE and not vars(p) for p in engine.parameters()))

    def test_states_that_a_program_moves_stay_where_they_are(self):
        offloadd.deepspeed.install()
        from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

        def loop(engine):
            told = train(engine, 1)
            if isinstance(engine, deepspeed.DeepSpeedEngine):
                engine.offload_states(include=[OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.lp_params], device=OffloadDeviceEnum.cpu)
                engine.reload_states(non_blocking=True)
                self.check_equal(engine.module, types.SimpleNamespace(state_dict=engine._consolidated_16bit_state_dict))
            return told + train(engine, 1, 1)

        self.both(loop)

    def test_hooks_are_taken_away_while_a_model_generates(self):
        """As trl does it at stage 3: remove_hooks() and add_hooks() of its models/utils.py."""
        def loop(engine):
            told = train(engine, 1)
            if isinstance(engine, deepspeed.DeepSpeedEngine):
                with deepspeed.zero.GatheredParameters(engine.parameters()):
                    offload = engine.optimizer.parameter_offload
                    for _, parameter in [*offload.module.named_parameters(recurse=True), *offload.module.ds_external_parameters()]:
                        parameter.ds_active_sub_modules.clear()
                    for hook in offload.forward_hooks + offload.backward_hooks:
                        hook.remove()
                    offload.forward_hooks, offload.backward_hooks = [], []
                    self.assertFalse(hasattr(offload, "param_coordinator"))
                    told.append(engine.module(batch(7)).item())
                    offload._register_deepspeed_module(offload.module)
            else:
                told.append(engine.module(batch(7)).item())
            return told + train(engine, 1, 1)

        self.both(loop)

    def test_bf16_with_several_backward_passes(self):
        here, there = make(), make(torch.bfloat16)
        engine = self.engine(here, {"bf16": {"enabled": True}})
        optimizer = Masters(there, self.adamw)
        for step in range(3):
            for k in range(3):
                here_loss, there_loss = engine(batch(3 * step + k)), there(batch(3 * step + k))
                self.assertEqual(here_loss.item(), there_loss.item())
                engine.set_gradient_accumulation_boundary(k == 2)
                engine.backward(here_loss / 3), (there_loss / 3).backward()
                engine.step()
            optimizer.step()
            optimizer.zero_grad()
        self.check_equal(here, there)
        self.assertEqual(engine.global_steps, 3)

    def test_a_step_before_anything_was_trained(self):
        def loop(engine):
            engine.step()
            told = train(engine, 2)
            engine.zero_grad()
            engine.step()
            return told + train(engine, 1, 2)

        self.both(loop)


if __name__ == "__main__":
    unittest.main()
