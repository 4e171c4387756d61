"""Trainers of others: Hugging Face's and Accelerate (Lightning: lightning_test.py), and scripts that know of nothing."""

import collections
import contextlib
import copy
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
import unittest

import torch

import offloadd
from battery import case, leave_out, main
from programs import Programs

try:
    import transformers
except ImportError:
    leave_out("transformers is not installed (tools/setup)")

from offloadd import unfinished  # noqa: E402
from offloadd.log_history import LogHistory, unpack  # noqa: E402
from families_test import IDS, gpt2, llama, tokens, with_adapters  # noqa: E402

FP32 = {"types": ("fp32",)}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        ids = tokens(i, size=1)[0]
        return {"input_ids": ids, "labels": ids}

    def __iter__(self):
        return (self[i] for i in range(len(self)))


class Stream(torch.utils.data.IterableDataset):
    """Without a length: it ends, and begins again with other elements."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return (Data()[i + self.epoch] for i in range(10))


def log_of(trainer):
    return [{key: value for key, value in entry.items() if "runtime" not in key and "per_second" not in key} for entry in trainer.state.log_history]


def fit(run, model, callbacks=True, optimizers=(None, None), trains=({},), more=(), data=Data, cls=transformers.Trainer, **options):
    """Trainer with its defaults; its log."""
    arguments = transformers.TrainingArguments(
        os.path.join(run.folder, "out"), use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=2,
        **{"logging_steps": 1, "max_steps": 4, "save_strategy": "no", **options})
    callback = None
    if run.offloaded and callbacks:
        callback = offloadd.TrainerCallback(nvme_path=run.folder, ram=run.ram([model], torch.optim.AdamW(model.parameters())), job="trainer",
                                            spill_gradients=run.memory == "floor")
    trainer = cls(model=model, args=arguments, train_dataset=data(), eval_dataset=Data(), optimizers=optimizers,
                  callbacks=[*([callback] if callback else []), *more])
    trainer.remove_callback(transformers.PrinterCallback)
    for each in trains:
        trainer.train(**each)
    run.models.append(model)
    if callback:
        run.handles.append(callback.handle)
    return trainer, log_of(trainer)


def by_callback(name, make=llama, **options):
    def function(run):
        return fit(run, run.make(make) if make is llama else make(run), **options)[1]

    function.__name__ = name
    case(function, **FP32)


by_callback("callback")
by_callback("callback_accumulation", gradient_accumulation_steps=2)
by_callback("callback_checkpointing", gradient_checkpointing=True)
by_callback("callback_workers", dataloader_num_workers=1)
by_callback("callback_without_clipping", max_grad_norm=0.0)
by_callback("callback_sgd", optim="sgd", learning_rate=0.1)
by_callback("callback_warmup_cosine", warmup_steps=2, lr_scheduler_type="cosine", weight_decay=0.1)
by_callback("callback_evaluation", eval_strategy="steps", eval_steps=2)
by_callback("callback_bf16", bf16=True)
by_callback("callback_saves", save_strategy="steps", save_steps=2)
by_callback("callback_best_model", save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
by_callback("callback_epochs", max_steps=-1, num_train_epochs=1)
by_callback("callback_eval_on_start", eval_on_start=True, eval_strategy="steps", eval_steps=3)
by_callback("callback_lora", make=with_adapters)
by_callback("callback_neftune", neftune_noise_alpha=5.0)


by_callback("callback_adafactor", optim="adafactor")


class TellsOfAnother(transformers.Trainer):
    """As SetFit's, whose callbacks are given what the model is in, which is no module."""

    def __init__(self, **options):
        super().__init__(**options)
        call_event = self.callback_handler.call_event
        self.callback_handler.call_event = lambda *args, **kwargs: self._of_another(call_event, *args, **kwargs)

    def _of_another(self, call_event, *args, **kwargs):
        own, self.callback_handler.model = self.callback_handler.model, types.SimpleNamespace(body=self.model)
        try:
            return call_event(*args, **kwargs)
        finally:
            self.callback_handler.model = own


by_callback("callback_that_is_given_another_model", cls=TellsOfAnother)


@case(types=("fp32",), memory=("floor",))
def begun_anew_in_another_job_where_the_first_attempt_failed(run):
    """In a notebook: what was wrong is mended, and the job has another name. The first one may be there or not."""
    if not run.offloaded:
        return None
    model = run.make(llama)
    for job in ("first", "first", "second"):
        callback = offloadd.TrainerCallback(nvme_path=run.folder, ram="64MiB", job=job)
        arguments = transformers.TrainingArguments(os.path.join(run.folder, "out"), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2,
                                                   logging_steps=1, save_strategy="no")
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Data() if job == "second" else [], callbacks=[callback])
        trainer.remove_callback(transformers.PrinterCallback)
        if job == "second":
            trainer.train()
            assert callback.handle.job == "second" and callback.handle.step == 2
            callback.close()
            continue
        try:
            trainer.train()
        except ValueError as error:
            assert "num_samples" in str(error), error
        else:
            raise AssertionError("no data")
        offloadd.attach(built := run.make(llama), torch.optim.SGD(built.parameters(), 0.1), nvme_path=run.folder, ram="64MiB", job="beside").close()
    return None


class InFrontOfAStep(transformers.TrainerCallback):
    """Once, behind the others: interrupts there, or has the step left out, as a scaler does whose gradients overflow."""

    def __init__(self, interrupts):
        self.interrupts, self.is_done = interrupts, False

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if self.is_done or state.global_step != 1:
            return
        self.is_done = True
        if self.interrupts:
            raise KeyboardInterrupt
        optimizer.step = lambda closure=None: None

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer.__dict__.pop("step", None)


@case(**FP32)
def a_step_that_is_left_out(run):
    return fit(run, run.make(llama), more=[InFrontOfAStep(interrupts=False)], lr_scheduler_type="constant")[1]


@case(**FP32)
def interrupted_in_front_of_a_step_and_trained_again(run):
    class Again(transformers.Trainer):
        def train(self, **options):
            try:
                return super().train(**options)
            except KeyboardInterrupt:
                return super().train(**options)

    return fit(run, run.make(llama), more=[InFrontOfAStep(interrupts=True)], cls=Again, lr_scheduler_type="constant")[1]


@case(**FP32)
def optimizers_argument(run):
    model = run.make(llama)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = fit(run, model, callbacks=False, optimizers=(optimizer, None))[1]
    run.models.pop()
    return told


@case(**FP32)
def resumed_from_the_last_checkpoint(run):
    _, first = fit(run, run.make(llama), save_strategy="steps", save_steps=2, max_steps=4)
    if run.offloaded:
        run.handles.pop().close()
    run.models.clear()
    return first, fit(run, run.make(llama), save_strategy="steps", save_steps=2, max_steps=6, trains=({"resume_from_checkpoint": True},))[1]


class Clamps(transformers.TrainerCallback):
    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.02, 0.02)


@case(**FP32)
def resumed_from_a_checkpoint_with_what_callbacks_wrote_after_its_step(run):
    """The job, which is at that step, does not have it."""
    told = []
    for steps, trains in ((4, ({},)), (6, ({"resume_from_checkpoint": True},))):
        run.models.clear()
        told.append(fit(run, run.make(llama), more=[Clamps()], save_strategy="steps", save_steps=2, max_steps=steps, trains=trains)[1])
        if run.offloaded and not told[1:]:
            run.handles.pop().close()
    return told


@case(**FP32)
def callback_takes_the_job_that_the_model_was_built_in(run):
    """Without options of its own, in a new job and in one that goes on."""

    def trained(*more):
        if not run.offloaded:
            return fit(run, run.make(llama))[1]
        torch.manual_seed(0)
        with offloadd.init(nvme_path=run.folder, ram="64MiB", job="built"):
            model = llama()
        run.models.append(model)
        run.handles.append(callback := offloadd.TrainerCallback())
        return fit(run, model, callbacks=False, more=[callback, *more])[1]

    if run.offloaded:
        try:
            trained(Stop(2))
        except KeyboardInterrupt:
            pass
        run.end()
    log = trained()
    if run.offloaded:
        run.handles[:] = [each.handle for each in run.handles]
        run.models.pop()
    return log[:-1]


class Stop(transformers.TrainerCallback):
    """Ends the process, as it were, when a step was taken and nothing was told of it."""

    def __init__(self, step=3):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interrupted():
    """What is done in it ends in the middle, as by Ctrl+C, and its jobs are closed."""
    try:
        yield
    except KeyboardInterrupt:
        pass
    for handle in offloadd.handles():
        handle.close()


@case(**FP32)
def interrupted_and_continued_without_a_checkpoint(run):
    if not run.offloaded:
        return fit(run, run.make(llama))[1][-2]
    with interrupted():
        fit(run, run.make(llama), more=[Stop()])
    return fit(run, run.make(llama))[1][-2]


class TooLarge(transformers.Trainer):
    """Batches of two do not fit in memory, so that auto_find_batch_size begins anew with smaller ones."""

    def training_step(self, model, inputs, *args, **kwargs):
        if len(inputs["input_ids"]) > 1:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, *args, **kwargs)


class TooLargeLater(TooLarge):
    """The first two steps were taken."""

    def training_step(self, model, inputs, *args, **kwargs):
        its = transformers.Trainer if self.state.global_step < 2 else TooLarge
        return its.training_step(self, model, inputs, *args, **kwargs)


def interrupted_with_smaller_batches(name, cls):
    def function(run):
        options = {"cls": cls, "auto_find_batch_size": True, "max_steps": 6}
        if run.offloaded:
            with interrupted():
                fit(run, run.make(llama), more=[Stop(4)], **options)
        return fit(run, run.make(llama), **options)[1]

    function.__name__ = name
    case(function, **FP32)


interrupted_with_smaller_batches("interrupted_with_smaller_batches", TooLarge)
interrupted_with_smaller_batches("interrupted_with_smaller_batches_after_steps", TooLargeLater)


class TrainsInTurn(transformers.Trainer):
    """train() again and again, with an optimizer that is new each time, or with the same."""

    times, is_new = 3, True

    def train(self, *args, **kwargs):
        self.logs = getattr(self, "logs", [])
        for number in range(self.times):
            if number and self.is_new:
                self.args.learning_rate /= 2
                self.optimizer = self.lr_scheduler = None
            super().train(*args, **kwargs)
            self.logs.append(log_of(self))


class StopInTurn(transformers.TrainerCallback):
    """Ends the process, as it were, in the second train()."""

    number = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.number += 1

    def on_step_end(self, args, state, control, **kwargs):
        if (self.number, state.global_step) == (2, 3):
            raise KeyboardInterrupt


@case(**FP32)
def trained_in_turn_with_new_optimizers(run):
    """Each train() has a job of its own, and goes on there."""
    options = {"cls": TrainsInTurn, "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 2}
    if not run.offloaded:
        return [log[-2:-1] for log in fit(run, run.make(gpt2), **options)[0].logs]
    with interrupted():
        fit(run, run.make(gpt2), more=[StopInTurn()], **options)
    logs = fit(run, run.make(gpt2), **options)[0].logs
    assert run.handles[-1].job == "trainer-3" and run.handles[-1].step == 4, (run.handles[-1].job, run.handles[-1].step)
    return [log[-2:-1] for log in logs]


class TrainsTwice(TrainsInTurn):
    times, is_new = 2, False


@case(**FP32)
def trained_twice_with_an_optimizer(run):
    return fit(run, run.make(llama), cls=TrainsTwice)[0].logs


@case(refused=1602, types=("fp32",), memory=("floor",))
def interrupted_in_a_second_training_of_an_optimizer(run):
    """Which train() the step was of, and what the one before has ended with, is in no job."""
    if not run.offloaded:
        return
    with interrupted():
        fit(run, run.make(llama), cls=TrainsTwice, more=[StopInTurn()])
    fit(run, run.make(llama), cls=TrainsTwice)


@case(**FP32)
def trained_in_turn_with_models_that_are_made_anew(run):
    """As a search for parameters does."""
    arguments = transformers.TrainingArguments(os.path.join(run.folder, "out"), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=3, logging_steps=1,
                                               save_strategy="no", per_device_train_batch_size=2)
    callback = offloadd.TrainerCallback(nvme_path=run.folder, ram="64MiB", job="made", weights_at_close="memory") if run.offloaded else None
    trainer = transformers.Trainer(model_init=lambda: run.make(llama), args=arguments, train_dataset=Data(), callbacks=[callback] if callback else [])
    logs = []
    for rate in (1e-3, 1e-4):
        trainer.args.learning_rate = rate
        trainer.train()
        logs.append(log_of(trainer))
    if run.offloaded:
        assert callback.handle.job == "made-2", callback.handle.job
        run.handles.append(callback.handle)
    run.models[:] = [trainer.model]
    return logs


class AddsUpForItsLog(transformers.Trainer):
    """As TRL's do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._metrics, self._total_train_tokens = {"train": collections.defaultdict(list), "eval": collections.defaultdict(list)}, 0
        self._stored_metrics = collections.defaultdict(lambda: collections.defaultdict(list))  # as CPO's and ORPO's

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            self._total_train_tokens += inputs["input_ids"].numel()
        of_mode = self._metrics["train" if model.training else "eval"]
        of_mode["its_loss"].append(loss.item())
        of_mode["num_tokens"] = [self._total_train_tokens]
        self._stored_metrics["train" if model.training else "eval"]["its_stored_loss"].append(loss.detach())
        return loss

    def log(self, logs, *args, **kwargs):
        of_mode = self._metrics["train" if self.model.training else "eval"]
        stored = self._stored_metrics.pop("train" if "loss" in logs else "eval", {})
        added = {**of_mode, **{name: torch.tensor(values).tolist() for name, values in stored.items()}}
        super().log({**logs, **{name: sum(values) / len(values) for name, values in added.items()}}, *args, **kwargs)
        of_mode.clear()


def loaded_llama():
    """As from_pretrained() gives it."""
    return llama().eval()


@case(types=("fp32",), memory=("floor",))
def what_a_trainer_adds_up_for_its_log_goes_on(run):
    options = {"cls": AddsUpForItsLog, "gradient_accumulation_steps": 2, "logging_steps": 2, "max_steps": 6}
    if not run.offloaded:
        return fit(run, run.make(loaded_llama), **options)[1][:-1]
    for step in (3, 4):
        with interrupted():
            fit(run, run.make(loaded_llama), more=[Stop(step)], **options)
    return fit(run, run.make(loaded_llama), **options)[1][:-1]


class Average(transformers.TrainerCallback):
    """As those of public repositories, and TRL's reference model that follows."""

    def __init__(self, model):
        self.trained, self.average = model, copy.deepcopy(model)

    def on_step_end(self, args, state, control, **kwargs):
        for its, average in zip(self.trained.parameters(), self.average.parameters()):
            average.data.lerp_(its.data, 0.5)


@case(types=("fp32",), memory=("floor",))
def model_that_a_callback_keeps_begins_anew_and_is_told_of(run):
    def fit_with_average(*more):
        model = run.make(llama)
        return fit(run, model, more=[Average(model), *more])

    if not run.offloaded:
        return fit_with_average()[1][-2]
    with interrupted():
        fit_with_average(Stop())
    with unittest.TestCase().assertLogs("offloadd", "WARNING") as said:
        told = fit_with_average()[1][-2]
    assert [line for line in said.output if "that Average has as 'average'" in line and "after step 3" in line], said.output
    assert not any("'trained'" in line for line in said.output), said.output
    return told


class GeneratesForTwoSteps(transformers.Trainer):
    """As TRL's trainers say it."""

    def __init__(self, args, **named):
        args.steps_per_generation, self.num_iterations, self._buffered_inputs = args.gradient_accumulation_steps, 2, None
        super().__init__(args=args, **named)


@case(types=("fp32",), memory=("floor",))
def what_was_generated_for_several_steps_is_told_of(run):
    def train_to(step):
        with interrupted():
            fit(run, run.make(llama), more=[Stop(step)], cls=GeneratesForTwoSteps, max_steps=6, gradient_accumulation_steps=2)

    if not run.offloaded:
        return
    train_to(3)
    for amid, end in ((True, 4), (False, 5)):
        with unittest.TestCase().assertLogs("offloadd", "WARNING") as said:
            train_to(end)
        assert any("step 3 is amid them" in line for line in said.output) == amid, said.output
        assert any("is amid them" in line for line in said.output) == amid, said.output


@case(types=("fp32",), memory=("floor",))
def log_is_kept_however_long_it_is(run):
    history, log = [], LogHistory(400_000)
    for step in range(5000):
        history.append({"loss": 1 / (step + 1), "grad_norm": step / 7, "learning_rate": 1e-5, "epoch": step / 100, "step": step})
        if step % 100 == 99 or step < 3:
            chunks = log.pack(history)
            assert unpack(chunks) == history and sum(map(len, chunks)) < 400_000
    history[-1]["added"] = 1  # by a callback, later
    assert unpack(log.pack(history)) == history
    assert unpack(log.pack(history[:10])) == history[:10], "another log"
    short = LogHistory(20_000)
    chunks = short.pack(history)
    kept = unpack(chunks)
    assert sum(map(len, chunks)) <= 20_000 and kept == history[-len(kept):] and len(kept) > 256
    entries = [{"text": str(n) * 1000} for n in range(50)]
    found = unpack(LogHistory(100).pack(entries))
    return 0 < len(found) < 50 and found == entries[-len(found):]


class Times(transformers.TrainerCallback):
    """Looks at the end of a step and of an epoch at what it noted at their beginnings."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.epoch_at = state.global_step

    def on_step_begin(self, args, state, control, **kwargs):
        self.step_at = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        assert self.step_at == state.global_step - 1

    def on_epoch_end(self, args, state, control, **kwargs):
        assert self.epoch_at <= state.global_step


def stopped_before_what_was_due(name, step, scheduler=None, others=(), build=gpt2, **options):
    """A step that is to be logged, evaluated and saved is the last one of a process: the next one does that first. Everything is equal, also
    what dropout draws behind it."""

    def function(run):
        def made():
            model = run.make(build)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True) if scheduler else None
            return model, (optimizer, scheduler and scheduler(optimizer)), [Times(), *(each() for each in others)]

        if run.offloaded:
            with interrupted():
                model, optimizers, more = made()
                fit(run, model, optimizers=optimizers, more=[*more, Stop(step)], **options)
        model, optimizers, more = made()
        trainer, log = fit(run, model, optimizers=optimizers, more=more, **options)
        kept = {key: getattr(trainer.state, key) for key in ("global_step", "best_metric", "best_model_checkpoint", "total_flos")}
        if kept["best_model_checkpoint"]:
            kept["best_model_checkpoint"] = os.path.basename(kept["best_model_checkpoint"])
        return log, kept

    function.__name__ = name
    case(function, **FP32)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 7, "logging_steps": 2, "learning_rate": 5e-3}
stopped_before_what_was_due("stopped_before_an_evaluation", 3, lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0},
                            **EVALUATED)
stopped_before_what_was_due("stopped_before_a_checkpoint_that_is_the_best", 3, save_strategy="steps", save_steps=3, load_best_model_at_end=True,
                            **EVALUATED)
stopped_before_what_was_due("stopped_with_a_scheduler_that_begins_with_the_last_rate", 3,
                            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), eval_on_start=True, **EVALUATED)
stopped_before_what_was_due("stopped_before_it_ends_early", 3, others=[lambda: transformers.EarlyStoppingCallback(2)],
                            **{**EVALUATED, "eval_steps": 1, "learning_rate": 0.3, "max_steps": 12}, save_strategy="steps", save_steps=1,
                            load_best_model_at_end=True, metric_for_best_model="loss")
class Shrinks(transformers.TrainerCallback):
    """Writes weights behind each step of the optimizer, with random numbers."""

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - 0.01 * torch.rand(()))


class ChangesAtBeginnings(transformers.TrainerCallback):
    """Writes weights and the optimizer's options before each step and epoch, in several ways."""

    def change(self, model, optimizer):
        with torch.no_grad():
            weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
            weights[0].copy_(weights[0] * (1 - 0.01 * torch.rand(())))
            torch._foreach_mul_(weights[1:], 0.99)
            torch.mul(weights[1], 0.99, out=weights[1])
            weights[2][1:3] += 0.01
            weights[3].data = weights[3].data * 0.99
        for group in optimizer.param_groups:
            group["weight_decay"] = 2 * group["weight_decay"] + 0.01

    def on_epoch_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.change(model, optimizer)

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.change(model, optimizer)


class ChangesLast(transformers.TrainerCallback):
    """Changes the optimizer's options when gradients are there; told after the job's own callback."""

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        for group in optimizer.param_groups:
            group["weight_decay"] = 2 * group["weight_decay"] + 0.01


class Scaled(torch.nn.Module):
    """Has a buffer that decides its losses."""

    def __init__(self):
        super().__init__()
        self.model = gpt2()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, input_ids, labels=None):
        return {"loss": self.model(input_ids=input_ids, labels=labels).loss * self.scale.mean()}


class ReplacesBuffers(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.scale = 1.1 * model.scale

    on_epoch_begin = on_step_begin


stopped_before_what_was_due("stopped_before_weights_are_written_behind_the_optimizer", 3, others=[Shrinks], **EVALUATED)
stopped_before_what_was_due("stopped_after_weights_and_options_were_changed_before_the_step", 3, others=[ChangesAtBeginnings], **EVALUATED)
stopped_before_what_was_due("stopped_after_options_were_changed_behind_the_gradients", 3, others=[ChangesLast], **EVALUATED)
stopped_before_what_was_due("stopped_after_buffers_were_replaced_before_the_step", 3, others=[ReplacesBuffers], build=Scaled, **EVALUATED)
stopped_before_what_was_due("stopped_after_the_last_step", 7, **EVALUATED)
stopped_before_what_was_due("stopped_at_the_end_of_an_epoch", 3, gradient_accumulation_steps=5, num_train_epochs=2, max_steps=-1,
                            eval_strategy="epoch", logging_strategy="epoch", logging_steps=500)


class Masks(torch.utils.data.Dataset):
    """Samples of which some tokens are others each time."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        ids = tokens(index, size=1)[0]
        ids[torch.randint(len(ids), (2,))] = random.randrange(3, IDS)
        return {"input_ids": ids, "labels": ids}


class EpochsOfThree(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 3 == 0


# Processes that stay: their loaders draw a number once, and none where a run goes on.
for stopped_at in (5, 12, 15):
    stopped_before_what_was_due(f"stopped_at_step_{stopped_at}_with_processes_that_stay", stopped_at, dataloader_num_workers=1, dataloader_persistent_workers=True,
                                max_steps=-1, num_train_epochs=3, eval_strategy="steps", eval_steps=4, logging_steps=3)
# Five batches in two steps, of which the last goes into the next epoch's first.
STREAMED = {"data": Stream, "gradient_accumulation_steps": 2, "max_steps": 7, "logging_steps": 1}
stopped_before_what_was_due("stopped_in_the_second_pass_of_data_without_a_length", 3, **STREAMED)
stopped_before_what_was_due("stopped_at_the_end_of_a_pass_of_data_without_a_length", 2, **STREAMED)
stopped_before_what_was_due("stopped_in_an_epoch_behind_one_that_ended_early", 4, others=[EpochsOfThree], max_steps=-1, num_train_epochs=3)
for stopped_at in (1, 4):
    stopped_before_what_was_due(f"stopped_at_step_{stopped_at}_with_data_that_draw_random_numbers", stopped_at, data=Masks, gradient_accumulation_steps=2,
                                max_steps=-1, num_train_epochs=2)
stopped_before_what_was_due("stopped_where_a_callback_ends_the_epoch", 3, others=[EpochsOfThree], max_steps=-1, num_train_epochs=3)
# The order of an epoch is drawn from the random numbers at its beginning.
stopped_before_what_was_due("stopped_in_an_epoch_of_samples_grouped_by_their_length", 3, train_sampling_strategy="group_by_length",
                            dataloader_num_workers=1, gradient_accumulation_steps=3, max_steps=6)


class MaskedStream(torch.utils.data.IterableDataset):
    """Several processes make it, each a part, and draw random numbers."""

    def __iter__(self):
        process = torch.utils.data.get_worker_info()
        return (Masks()[i] for i in range(process.id, 12, process.num_workers))


stopped_before_what_was_due("stopped_with_processes_that_draw_random_numbers", 4, data=MaskedStream, dataloader_num_workers=2, max_steps=8)


@case(types=("fp32",), memory=("floor",))
def random_numbers_of_processes_that_begin_anew_are_told_of(run):
    if not run.offloaded:
        return
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("offloadd").addHandler(handler)
    try:
        for more, workers, is_told in ([StopAt(3)], 1, False), ([StopAt(5)], 1, True), ([StopAt(9)], 0, False):
            lines.clear()
            fit(run, run.make(gpt2), more=more, data=Masks, dataloader_num_workers=workers, max_steps=-1, num_train_epochs=2)
            run.end()
            assert any("dataloader_num_workers" in line for line in lines) == is_told, (more[0].step, lines)
    finally:
        logging.getLogger("offloadd").removeHandler(handler)


@case(**FP32)
def checkpoint_in_the_second_pass_of_data_without_a_length(run):
    """Trainer looks for its step in the first pass."""
    options = {**STREAMED, "save_strategy": "steps", "save_steps": 3}
    if run.offloaded:
        fit(run, run.make(gpt2), more=[StopAt(3)], **options)
        run.handles.pop().close()
        run.models.clear()
        options["trains"] = ({"resume_from_checkpoint": os.path.join(run.folder, "out", "checkpoint-3")},)
    return [entry["loss"] for entry in fit(run, run.make(gpt2), **options)[1][-5:-1]]


@case(**FP32)
def stopped_behind_a_checkpoint_between_epochs(run):
    """The order of the epoch is made of the random numbers in the checkpoint, not of those of the process that resumes from it."""
    options = {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 3, "max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    if run.offloaded:
        fit(run, run.make(gpt2), more=[StopAt(4)], **options)
        run.handles.pop().close()
        run.models.clear()
        with interrupted():
            checkpoint = os.path.join(run.folder, "out", "checkpoint-4")
            fit(run, run.make(gpt2), more=[Stop(6)], trains=({"resume_from_checkpoint": checkpoint},), **options)
    return [entry["loss"] for entry in fit(run, run.make(gpt2), **options)[1][-5:-1]]


@case(**FP32)
def continued_with_more_micro_batches_in_a_step(run):
    """To them the last step is at another place in the data, as it is where Trainer goes on at a checkpoint."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    fit(run, run.make(gpt2), more=[StopAt(3)], **options)
    if run.offloaded:
        run.handles.pop().close()
    run.models.clear()
    if not run.offloaded:
        options["trains"] = ({"resume_from_checkpoint": os.path.join(run.folder, "out", "checkpoint-3")},)
    return [(entry["loss"], entry["epoch"]) for entry in fit(run, run.make(gpt2), gradient_accumulation_steps=3, **options)[1][-4:-1]]


@case(**FP32)
def the_last_checkpoint_is_named_and_the_job_is_further(run):
    """As scripts do that look for it; the job goes on, also where a kill has cut another checkpoint short."""
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 7}
    if not run.offloaded:
        return fit(run, run.make(llama), **options)[1][:-1]
    for cut in (False, True):
        out = os.path.join(run.folder, "out")
        named = transformers.trainer_utils.get_last_checkpoint(out) if os.path.isdir(out) else None
        try:
            fit(run, run.make(llama), more=[Stop(6 if cut else 3)], trains=({"resume_from_checkpoint": named},), **options)
        except KeyboardInterrupt:
            pass
        run.end()
    os.mkdir(os.path.join(out, "checkpoint-8"))
    named = transformers.trainer_utils.get_last_checkpoint(out)
    assert named.endswith("-8"), named
    return fit(run, run.make(llama), trains=({"resume_from_checkpoint": named},), **options)[1][:-1]


@case(refused=1602, types=("fp32",), memory=("floor",))
def checkpoint_of_an_older_step_is_refused(run):
    fit(run, run.make(llama), save_strategy="steps", save_steps=2, max_steps=4)
    run.handles.pop().close()
    fit(run, run.make(llama), trains=({"resume_from_checkpoint": os.path.join(run.folder, "out", "checkpoint-2")},))


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def from_plain_checkpoint(name, make=llama, **options):
    """A case: a run in memory stops at step 4 with a checkpoint, and a new job goes on from it; in memory the same run goes on."""

    def function(run):
        options_of_both = {"save_strategy": "steps", "save_steps": 2, "max_steps": 7, "lr_scheduler_type": "cosine", **options}
        plain = fit(run, run.make(make), callbacks=False, more=[StopAt(4)], **options_of_both)[1]
        run.models.clear()
        checkpoint = os.path.join(run.folder, "out", "checkpoint-4")
        trainer, log = fit(run, run.make(make), trains=({"resume_from_checkpoint": checkpoint},), **options_of_both)
        assert not run.offloaded or run.handles[-1].step == 3, run.handles[-1].step
        return plain, log, trainer.state.global_step

    function.__name__ = name
    case(function, **FP32)


from_plain_checkpoint("checkpoint_of_memory_in_a_new_job")
from_plain_checkpoint("checkpoint_of_memory_in_a_new_job_sgd", optim="sgd", optim_args="momentum=0.9")
from_plain_checkpoint("checkpoint_of_memory_in_a_new_job_dropout", make=gpt2)
from_plain_checkpoint("checkpoint_without_its_optimizer_in_a_new_job", save_only_model=True)


class StopBeforeTheFirst(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def ended_before_its_first_step(run, make, **options):
    """A job that is made, and has taken no step."""
    with interrupted():
        fit(run, run.make(make), more=[StopBeforeTheFirst()], **options)
    run.models.clear()


def checkpoint_in_a_job_without_steps(name, make=gpt2, first=None, resume=True, **options):
    """A case: a job was ended before its first step, with the weights of another beginning; a checkpoint of memory is resumed in it."""

    def function(run):
        options_of_both = {"save_strategy": "steps", "save_steps": 2, "max_steps": 7, **options}
        fit(run, run.make(make), callbacks=False, more=[StopAt(4)], **options_of_both)
        run.models.clear()
        folder = os.path.join(run.folder, "out", "checkpoint-")
        if run.offloaded:
            ended_before_its_first_step(run, make, trains=({"resume_from_checkpoint": first and folder + first},), **options_of_both)
        trainer, log = fit(run, run.make(make), trains=({"resume_from_checkpoint": resume and folder + "4" if resume == "4" else resume},),
                           **options_of_both)
        assert not run.offloaded or run.handles[-1].step == 3, run.handles[-1].step
        return log, trainer.state.global_step

    function.__name__ = name
    case(function, **FP32)


checkpoint_in_a_job_without_steps("checkpoint_in_a_job_that_was_ended_before_its_first_step")
checkpoint_in_a_job_without_steps("named_checkpoint_in_a_job_that_was_ended_before_its_first_step", make=llama, resume="4")
checkpoint_in_a_job_without_steps("later_checkpoint_in_a_job_that_was_begun_with_another", first="2", resume="4")
checkpoint_in_a_job_without_steps("same_checkpoint_in_a_job_that_was_ended_before_its_first_step", first="4", resume="4")
checkpoint_in_a_job_without_steps("checkpoint_of_weights_in_a_job_that_was_ended_before_its_first_step", save_only_model=True)


@case(refused=1602, types=("fp32",), memory=("floor",))
def job_that_was_made_with_a_checkpoint_does_not_begin_without(run):
    fit(run, run.make(llama), callbacks=False, save_strategy="steps", save_steps=2)
    run.models.clear()
    ended_before_its_first_step(run, llama, trains=({"resume_from_checkpoint": os.path.join(run.folder, "out", "checkpoint-2")},))
    fit(run, run.make(llama))


@case(types=("fp32",), memory=("floor",))
def job_that_was_ended_before_its_first_step_begins(run):
    if run.offloaded:
        ended_before_its_first_step(run, llama)
    return fit(run, run.make(llama))[1]


@case(**FP32)
def checkpoint_of_memory_in_a_new_job_that_is_stopped_too(run):
    """The job counts from its own beginning: it is continued at Trainer's step, with a checkpoint and without."""
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 10}
    fit(run, run.make(gpt2), callbacks=False, more=[StopAt(4)], **options)
    run.models.clear()
    checkpoint = os.path.join(run.folder, "out", "checkpoint-4")
    if run.offloaded:
        for stop_at, given in ((7, checkpoint), (8, None)):
            fit(run, run.make(gpt2), more=[StopAt(stop_at)], trains=({"resume_from_checkpoint": given},), **options)
            run.handles.pop().close()
            run.models.clear()
        checkpoint = os.path.join(run.folder, "out", "checkpoint-8")
    return fit(run, run.make(gpt2), trains=({"resume_from_checkpoint": checkpoint},), **options)[1][-3:-1]


@case(types=("bf16",))
def bf16_model_is_resumed_from_its_checkpoint(run):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    if run.offloaded:
        fit(run, run.make(llama), more=[StopAt(4)], **options)
        run.handles.pop().close()
        run.models.clear()
        _, log = fit(run, run.make(llama), trains=({"resume_from_checkpoint": os.path.join(run.folder, "out", "checkpoint-4")},), **options)
        return [sorted(entry.items()) for entry in log[:-1]]  # the last is of this process
    model = run.make(llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
    run.attach(model, optimizer)  # fp32 masters
    log = fit(run, model, callbacks=False, optimizers=(optimizer, None), **{**options, "save_strategy": "no"})[1]
    run.models.pop()
    return [sorted(entry.items()) for entry in log[:-1]]


@case(**FP32)
def two_jobs_of_one_model(run):
    """The second begins with what the first has left in memory. One beside it, of the part that the first does not train, is refused."""
    model, told = run.make(llama), []
    model.lm_head.requires_grad_(False)
    for job in ("first", "second"):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, fused=True)
        run.attach(model, optimizer, job=job, weights_at_close="memory")
        told.append(fit(run, model, callbacks=False, optimizers=(optimizer, None), max_steps=2)[1])
        if run.offloaded and job == "first":
            try:
                offloadd.attach(model, torch.optim.SGD(model.lm_head.parameters(), 0.1), nvme_path=run.folder, ram="64MiB", job="beside")
                told.append("attached twice")
            except offloadd.Error as error:
                assert error.id == 1601 and "all optimizers of the model at once" in str(error), error
            run.handles.pop().close()
        run.models.clear()
    run.models.append(model)
    return told


@case(types=("fp32", "bf16"))
def two_trainers_of_one_model(run):
    """As where preferences are learnt behind a fine-tuning: the second has a job of its own, and the first is not closed."""
    model, told = run.make(llama), []
    for job in ("first", "second"):
        options = {"nvme_path": run.folder, "ram": "256MiB", "job": job}
        more = [offloadd.TrainerCallback(**options)] if run.offloaded else []
        if not run.offloaded:  # bf16 weights have masters in a job
            optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
            run.attach(model, optimizer)
        given = (None, None) if run.offloaded else (optimizer, None)
        log = fit(run, model, callbacks=False, optimizers=given, more=more, max_steps=3)[1]
        told.append([sorted(entry.items()) for entry in log])
    weights = [p.detach().clone() for p in model.parameters()]
    for each in more:
        assert each.handle.job == "second" and each.handle.step == 3
        each.close()
    run.end()
    return told, weights


@case(**FP32)
def two_trainings_of_one_trainer(run):
    return fit(run, run.make(llama), trains=({}, {}), max_steps=2)[1]


# ---- Accelerate --------------------------------------------------------------------------------


def accelerated(run, micro=1, prepared_first=False, saved=False, wrapped_is_given=False):
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=micro)
    model = run.make(llama)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    if not prepared_first:
        run.attach(model, optimizer)
    loader = torch.utils.data.DataLoader(Data(), batch_size=2)
    model, wrapped, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if prepared_first:
        run.attach(model, wrapped if wrapped_is_given and run.offloaded else optimizer)
    told = []
    for n, batch in enumerate(loader):
        if n == 4:
            break
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                told.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            wrapped.step()
            scheduler.step()
            wrapped.zero_grad()
        told.append(loss.item())
    if saved:
        folder = os.path.join(run.folder, "state")
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        accelerator.save_model(model, os.path.join(run.folder, "model"))
        told.append(accelerator.get_state_dict(model))
    return told


def by_accelerate(name, **options):
    def function(run):
        return accelerated(run, **options)

    function.__name__ = name
    case(function, **FP32)


by_accelerate("accelerate")
by_accelerate("accelerate_accumulation", micro=2)
by_accelerate("accelerate_prepared_before", prepared_first=True)
by_accelerate("accelerate_prepared_optimizer_is_given", prepared_first=True, wrapped_is_given=True)
by_accelerate("accelerate_saves_and_loads", saved=True)


# ---- Scripts that know of nothing --------------------------------------------------------------

SCRIPT = """
import os, sys, json, torch
os.chdir("/")  # and what the launcher was given stays where it was
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
told = []
for step in range(4):
    loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    told.append(loss.item())
told.append([p.tolist() for p in model.parameters()])
print(json.dumps([told, sys.argv[1:], hasattr(optimizer, "_offload_part")]))
"""

ITS_OWN_CHECKPOINT = """
import os, sys, json, torch
file, kill_at, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0 if kill_at >= -1 else 1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU(), torch.nn.Linear(64, 4))
optimizer = {"sgd": lambda p: torch.optim.SGD(p, 0.1), "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
             "lbfgs": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=3)}.get(kind, lambda p: torch.optim.AdamW(p, 1e-2))(model.parameters())
first = 0
if os.path.exists(file):
    kept = torch.load(file)
    if kind != "empty":
        model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"] if kind != "empty" else optimizer.state_dict())
    first = kept["step"]
for step in range(first, 9):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).pow(2).mean()
        loss.backward()
        if kill_at == -2:
            os.kill(os.getpid(), 9)
        return loss
    if kind == "lbfgs":
        loss = optimizer.step(closure)
    else:
        loss = closure()
        optimizer.step()
    if step % 3 == 2:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, file)
    if step == kill_at:
        os.kill(os.getpid(), 9)
print(json.dumps([loss.item(), [value.tolist() for value in model.state_dict().values()]]))
"""

UNFREEZING = """
import sys, json, torch
kind = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
model[0].requires_grad_(False)
make = lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True)
optimizer = make(model.parameters() if kind == "all" else [p for p in model.parameters() if p.requires_grad])
optimizers, told = [optimizer], []
for step in range(6):
    if step == 3:
        model[0].requires_grad_(True)
        if kind == "group":
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})
        if kind == "second":
            optimizers.append(make(model[0].parameters()))
    loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).pow(2).mean()
    loss.backward()
    for each in optimizers:
        each.step()
        each.zero_grad()
    told.append(loss.item())
told += [p.tolist() for p in model.parameters()]
told += [optimizer.state[p]["exp_avg"].tolist() for p in model[0].parameters()] if kind != "second" else []
print(json.dumps([told, hasattr(optimizer, "_offload_part")]))
"""

ENDED = """
import json, os, sys, torch, offloadd
folder, ends = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
handle = offloadd.attach(model, optimizer, nvme_path=folder, ram="128MiB", job="ended")
if hasattr(handle, "_engine"):
    print(handle._engine.daemon_pid(), flush=True)
def interrupt(*_):
    raise KeyboardInterrupt
for step in range(handle.step, 5):
    if step == 2 and ends == "in forward":
        model[2].register_forward_hook(interrupt)
    if step == 2 and ends == "in backward":
        model[2].weight.register_hook(lambda gradient: os._exit(4))
    loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).pow(2).mean()
    loss.backward()
    if step == 2 and ends == "before step":
        sys.exit(3)
    optimizer.step()
    if step == 2 and ends == "after step":
        raise RuntimeError("after a step that nobody has waited for")
    optimizer.zero_grad()
print(json.dumps([loss.item(), [p.tolist() for p in model.parameters()], handle.step]))
"""

KILLED = """
import os, sys, time, json, torch, transformers, offloadd
sys.path.insert(0, os.environ["TESTS"])
from families_test import llama
from trainers_test import Data
folder, ram, *asked = sys.argv[1:]
class Tell(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(state.global_step, flush=True)
class NeedsGradients(transformers.TrainerCallback):
    def on_optimizer_step(self, args, state, control, model, **kwargs):
        self.largest = max((p * p.grad).abs().max().item() for p in model.parameters())
torch.manual_seed(0)
arguments = transformers.TrainingArguments(os.path.join(folder, "out"), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1,
                                           per_device_train_batch_size=2, max_steps=12, save_strategy="steps", save_steps=5)
class OwnStep(torch.optim.AdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"], group["weight_decay"] = group["lr"] * 0.9, group["weight_decay"] * 1.5 + 0.01
            group["steps"] = group.get("steps", 0) + torch.rand(()).item()
        return super().step(closure)
callbacks = [Tell(), *([NeedsGradients()] if asked == ["gradients"] else [])] + ([offloadd.TrainerCallback(nvme_path=folder, ram=ram, job="killed")] if ram else [])
model = llama()
own = OwnStep(model.parameters(), 1e-2) if asked == ["own"] else None
optimizers = (own, torch.optim.lr_scheduler.MultiplicativeLR(own, lambda _: 0.95) if own else None)
trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Data(), callbacks=callbacks, optimizers=optimizers)
trainer.remove_callback(transformers.PrinterCallback)
try:
    trainer.train(resume_from_checkpoint=True if not own and os.path.exists(os.path.join(folder, "out", "checkpoint-5")) else None)
except offloadd.Error as error:
    print(json.dumps([error.id, str(error)]))
    sys.exit()
print(json.dumps([[entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1], [p.tolist() for p in model.parameters()]]))
"""

ACCELERATED = """
import os, sys, json, accelerate, torch, offloadd
sys.path.insert(0, os.environ["TESTS"])
from families_test import llama
from trainers_test import Data
folder, ram, asked = sys.argv[1:]
accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = llama()
make = torch.optim.NAdam if asked == "nadam" else lambda p, rate: torch.optim.AdamW(p, rate, fused=True)
optimizer = make(model.parameters(), 1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8 ** step)
first = offloadd.attach(model, optimizer, nvme_path=folder, ram=ram, job="accelerated").step if ram else 0
batches = torch.utils.data.DataLoader(Data(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
for _ in range(first):
    scheduler.step()
step = 0
for epoch in range(2):
    for inputs in batches:
        if step // 2 < first:
            step += 1
            continue
        with accelerator.accumulate(model):
            loss = model(**inputs).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        step += 1
        print(step, flush=True)
        if step % 8 == 0:
            accelerator.save_state(os.path.join(folder, "state"))
print(json.dumps([loss.item(), scheduler.get_last_lr(), [p.tolist() for p in model.parameters()]]))
"""


# What forward passes leave in buffers, and an average of the weights.
NORMED = """
import json, os, sys, torch, offloadd
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
folder, ram = sys.argv[1:]
def make():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), spectral_norm(nn.Conv2d(8, 8, 3)), nn.BatchNorm2d(8), nn.Flatten(),
                         spectral_norm(nn.Linear(8 * 12 * 12, 10)))
def images(step):
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(step))
def evaluate(model):
    with torch.no_grad():
        return [model.eval()(images(1000 + i)).tolist() for i in range(3)]
torch.manual_seed(1)
model = make()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
handle = offloadd.attach(model, optimizer, nvme_path=folder, ram=ram, job="normed", average="ema:0.9")
for step in range(handle.step, 60):
    model(images(step)).logsumexp(1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, flush=True)
handle.save_weights(os.path.join(folder, "averages"), plane="average")
averaged = make()
averaged.load_state_dict(load_file(os.path.join(folder, "averages", "model.safetensors")))
print(json.dumps([evaluate(model), evaluate(averaged)]))
"""


@case(types=("fp32",), memory=("floor",))
def untouched_script(run):
    launcher = ("-m", "offloadd", "--pool", os.path.relpath(run.folder), "--ram", "128MiB") if run.offloaded else ()
    told, arguments, attached = json.loads(programs.start_script(run.folder, SCRIPT, "a", "-b", launcher=launcher).communicate()[0].splitlines()[-1])
    return told, arguments, attached == run.offloaded


def untouched_script_that_goes_on_at_its_own_checkpoint(kind, kills):
    """A case: it is killed behind its checkpoint, where that is, or (-2, with other weights) before its first step; what it does then is what
    it would have done in memory. Of an "empty" one the job has all but the number of the step."""

    def function(run):
        launcher = ("-m", "offloadd", "--pool", run.folder, "--ram", "128MiB") if run.offloaded else ()
        for kill_at in kills if run.offloaded else ():
            assert programs.start_script(run.folder, ITS_OWN_CHECKPOINT, os.path.join(run.folder, "kept.pt"), str(kill_at), kind, launcher=launcher).wait() == -signal.SIGKILL
            time.sleep(0.3)  # its daemon drains
        text, errors = programs.start_script(run.folder, ITS_OWN_CHECKPOINT, os.path.join(run.folder, "kept.pt"), "-1", kind, launcher=launcher).communicate()
        assert "is dropped" not in errors, errors  # it is what the job goes on with
        return json.loads(text.splitlines()[-1])

    function.__name__ = f"untouched_script_that_goes_on_at_its_own_checkpoint_{kind}"
    case(function, types=("fp32",), memory=("floor",))


untouched_script_that_goes_on_at_its_own_checkpoint("sgd", [4])
untouched_script_that_goes_on_at_its_own_checkpoint("adamw", [-2, 5, 7])
untouched_script_that_goes_on_at_its_own_checkpoint("empty", [-2, 5])
untouched_script_that_goes_on_at_its_own_checkpoint("nadam", [-2, 4, 5, 7])
untouched_script_that_goes_on_at_its_own_checkpoint("lbfgs", [-2, 4, 5, 7])  # whose first forward pass is inside of its step


SEVERAL = """
import json, torch
told = []

def train(model, *optimizers):
    for step in range(3):
        loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).pow(2).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        told.append(loss.item())
    return [hasattr(optimizer, "_offload_part") for optimizer in optimizers]

def fold(n):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).eval()
    adamw = torch.optim.AdamW(model.parameters() if n < 2 else model[0].parameters(), 1e-2, fused=True)
    return train(model, adamw, *([torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9)] if n == 2 else []))

print(json.dumps([told, [fold(n) for n in range(3)]]))
"""

FORKED = SEVERAL.split("print(")[0] + """
import multiprocessing
context, attached = multiprocessing.get_context("fork"), []

def child(n, queue):
    queue.put([fold(n), told])

for n in range(2):
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(n, queue))
    process.start()
    attached.append(queue.get())
    process.join()
print(json.dumps(attached))
"""

# The first module that is called is one inside of the model; another model is trained beside it; both have buffers.
BESIDE = """
import copy, json, os, sys, torch
begin, end, kept = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32))
        self.decoder = torch.nn.Sequential(torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 8))
        self.register_buffer("scale", torch.ones(1))

    def reconstruct(self, x):
        hidden = self.encoder(x)
        self.scale = 0.9 * self.scale + 0.1 * x.abs().max()
        return self.decoder(hidden) * self.scale

torch.manual_seed(0)
model, critic = Model(), torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
average, target = torch.optim.swa_utils.AveragedModel(critic), copy.deepcopy(model)
class EMAModel:
    def __init__(self, parameters):
        self.shadow_params = [parameter.detach().clone() for parameter in parameters]

class ByName:
    def __init__(self, model):
        self.shadow = {name: parameter.data.clone() for name, parameter in model.named_parameters()}

batches = [torch.zeros(16, 8), torch.zeros(16)]
follow = EMAModel(critic.parameters()), ByName(model)
optimizer = torch.optim.AdamW([*critic.parameters(), *model.parameters()], 1e-2, fused=True)
if os.path.exists(kept):
    model.load_state_dict(torch.load(kept))
for step in range(begin, end):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    made = model.reconstruct(x)
    loss = (made - x).square().mean() + critic(made).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if kept != "-":
    torch.save(model.state_dict(), kept)
print(json.dumps([loss.item(), [value.tolist() for each in (model, critic) for value in each.state_dict().values()]]))
"""

WITHOUT_A_MODULE = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(4))
weight.sum().backward()
if sys.argv[1] == "by hand":
    weight.data.add_(weight.grad, alpha=-0.1)
else:
    torch.optim.SGD([weight], 0.1).step()
sys.exit(0)
"""


@case(types=("fp32",), memory=("floor",))
def untouched_script_that_trains_several_models(run):
    """One after the other, in eval mode: each has a job of its own, and begins anew; the last has optimizers of two kinds."""
    launcher = ("-m", "offloadd", "--pool", run.folder, "--ram", "128MiB") if run.offloaded else ()
    told, attached = json.loads(programs.start_script(run.folder, SEVERAL, launcher=launcher).communicate()[0].splitlines()[-1])
    return told, attached == [[run.offloaded], [run.offloaded], [run.offloaded, run.offloaded]]


@case(types=("fp32",), memory=("floor",))
def jobs_are_named_after_scripts(run):
    """Scripts of one package do not share one."""
    from offloadd.__main__ import _job_after

    scripts = [("runs/train.py", False), ("my train (1).py", False), ("folder/", False), ("package.train", True), ("package.tune", True)]
    named = [_job_after(*each) for each in scripts]
    assert named[:1] + named[2:] == ["train", "folder", "package.train", "package.tune"], named
    similar = {_job_after(name, False) for name in ("my train (1).py", "my_train__1_.py", "my train [1].py", "\u8bad\u7ec3.py", "\u6d4b\u8bd5.py")}
    assert len(similar) == 5 and all(re.fullmatch(r"[A-Za-z0-9._#-]{1,100}", name) for name in similar | set(named)), (similar, named)


@case(types=("fp32",), memory=("floor",))
def untouched_script_that_trains_in_forked_processes(run):
    """Each has a job of its own, and begins anew."""
    launcher = ("-m", "offloadd", "--pool", run.folder, "--ram", "128MiB") if run.offloaded else ()
    said, messages = programs.start_script(run.folder, FORKED, launcher=launcher).communicate()
    (attached, told), (attached_then, told_then) = json.loads(said.splitlines()[-1])
    assert "nothing was offloaded" not in messages, messages
    return told, told_then, attached == attached_then == [run.offloaded]


@case(types=("fp32",), memory=("floor",))
def untouched_script_with_buffers_of_modules_that_are_not_called_first(run):
    if not run.offloaded:
        return json.loads(programs.start_script(run.folder, BESIDE, "0", "6", "-").communicate()[0])
    done, kept = [], os.path.join(run.folder, "kept.pt")
    for begin, end, folder in (("0", "3", "-"), ("3", "6", "-"), ("0", "1", kept), ("1", "2", kept)):
        job = "kept" if folder == kept else "beside"
        launcher = ("-m", "offloadd", "--pool", run.folder, "--ram", "128MiB", "--job", job)
        done.append(programs.start_script(run.folder, BESIDE, begin, end, folder, launcher=launcher).communicate())
    assert "continues after 3 steps" in done[1][1], done[1]
    assert re.findall("another ([A-Za-z]*), whose weights are not trained", done[0][1] + done[1][1]) == ["AveragedModel", "Model"], done[1][1]
    assert sorted(re.findall("what an? ([A-Za-z]*) keeps", done[0][1] + done[1][1])) == ["ByName", "EMAModel"], done[1][1]
    assert "came without its optimizer's state" in done[3][1], done[3]
    return json.loads(done[1][0])


@case(types=("fp32",), memory=("floor",))
def untouched_script_without_a_module_is_told_of(run):
    if run.offloaded:
        for how, text in (("by hand", "no torch.optim.Optimizer"), ("by an optimizer", "no forward pass")):
            process = programs.start_script(run.folder, WITHOUT_A_MODULE, how, launcher=("-m", "offloadd", "--pool", run.folder, "--ram", "128MiB"))
            said = process.communicate()[1]
            assert process.returncode == 0 and "nothing was offloaded: " in said and text in said, said


@case(types=("fp32",), memory=("floor",))
def mistakes_in_what_an_untouched_script_is_started_with_are_told_first(run):
    if not run.offloaded:
        return
    with open(path := os.path.join(run.folder, "script.py"), "w", encoding="utf-8") as file:
        file.write("print('begun')")
    for option, number in (("--pool", 1201), ("--config", 1405)):
        done = subprocess.run([sys.executable, "-m", "offloadd", "--pool", run.folder, option, os.path.join(run.folder, "nowhere"), path],
                              capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith(f"OFD-{number} ") and "nowhere" in done.stderr, done
    bare = {key: value for key, value in os.environ.items() if key not in ("OFFLOADD_POOL", "OFFLOADD_RAM")}
    for given, status, text in ((("--ram", "64MiB", path), 1, "OFD-1201 nvme_path is not set"), (("--pool", run.folder, path), 1, "OFD-1002 ram is not set"),
                                (("--pool", run.folder, "--ram", "64MiB", f"{path}.nowhere"), 2, f"there is no file {path}.nowhere"),
                                (("--pool", run.folder, "--ram", "64XB", path), 1, 'OFD-1002 "64XB" is not a size in bytes'),
                                (("--pool", run.folder, "--ram", "64MiB", "--job", "a/b", path), 1, 'OFD-1002 job name "a/b"'),
                                (("--pool", "~/pool", "--ram", "64MiB", path), 1, 'OFD-1002 nvme_path "~/pool" begins with the ~ of shells'),
                                (("--pool", run.folder, "--ram", "64MiB", "-m"), 2, "-m needs the name of a module")):
        done = subprocess.run([sys.executable, "-m", "offloadd", *given], capture_output=True, text=True, check=False, env=bare)
        assert (done.returncode, done.stdout) == (status, "") and text in done.stderr and "Traceback" not in done.stderr, done


def wait_for_the_end(process):
    """Of a daemon."""
    until = time.monotonic() + 60
    while os.path.exists(f"/proc/{process}"):
        assert time.monotonic() < until, "the daemon has outlived its trainer"
        time.sleep(0.05)


@case(types=("fp32",), memory=("floor",))
def ended_in_the_middle_of_a_step(run):
    """The interpreter ends wherever it is: with a clean status, without a daemon that stays, and the job goes on behind its last step."""
    if run.offloaded:
        for ends, status in (("in forward", (130, 1, -signal.SIGINT)), ("in backward", (4,)), ("before step", (3,)), ("after step", (1,))):
            process = programs.start_script(run.folder, ENDED, run.folder, ends)
            daemon = process.communicate()[0].split()[0]
            assert process.returncode in status, (ends, process.returncode)
            wait_for_the_end(daemon)
    else:
        os.environ["OFFLOADD_DISABLE"] = "1"
    try:
        return json.loads(programs.start_script(run.folder, ENDED, run.folder, "").communicate()[0].splitlines()[-1])
    finally:
        os.environ.pop("OFFLOADD_DISABLE", None)


def untouched_script_that_unfreezes(kind):
    """A case: parameters are thawed in the middle of the script, and nobody has said so before."""

    def function(run):
        launcher = ("-m", "offloadd", "--pool", run.folder, "--ram", "128MiB") if run.offloaded else ()
        told, attached = json.loads(programs.start_script(run.folder, UNFREEZING, kind, launcher=launcher).communicate()[0].splitlines()[-1])
        return told, attached == run.offloaded

    function.__name__ = f"untouched_script_that_unfreezes_{kind}"
    case(function, types=("fp32",), memory=("floor",))


untouched_script_that_unfreezes("all")
untouched_script_that_unfreezes("group")
untouched_script_that_unfreezes("second")


def kill(process, line_to_kill_at):
    for line in process.stdout:
        if line.strip() == line_to_kill_at:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    time.sleep(0.3)  # its daemon drains


@case(types=("fp32",), memory=("floor",))
def killed_with_a_callback_that_needs_gradients(run):
    """As AdaLoRA's does: they are in no job, and whoever starts it again is told so."""
    if not run.offloaded:
        return None
    kill(programs.start_script(run.folder, KILLED, run.folder, "256MiB", "gradients"), "3")
    number, text = json.loads(programs.start_script(run.folder, KILLED, run.folder, "256MiB", "gradients").communicate()[0].splitlines()[-1])
    assert number == 1604 and "on_optimizer_step" in text and "resume_from_checkpoint" in text, text
    return None


@case(types=("fp32",), memory=("floor",))
def killed_and_continued(run):
    """Trainer, killed twice, started again with the same arguments. What it has had in the folder for temporary files goes then."""
    if not run.offloaded:
        return json.loads(programs.start_script(run.folder, KILLED, run.folder, "").communicate()[0].splitlines()[-1])
    temporary = os.path.join(run.folder, "temporary")
    os.mkdir(temporary)
    os.environ["TMPDIR"], before = temporary, os.environ.get("TMPDIR")
    try:
        for kill_at in ("3", "8"):
            kill(programs.start_script(run.folder, KILLED, run.folder, "256MiB"), kill_at)
        left = [os.path.join(temporary, name) for name in os.listdir(temporary) if name.startswith("offloadd-trainer-")]
        assert len(left) == 1, left
        os.utime(left[0], (0, 0))
        text = programs.start_script(run.folder, KILLED, run.folder, "256MiB").communicate()[0]
        assert not os.listdir(temporary), os.listdir(temporary)
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    return json.loads(text.splitlines()[-1])


@case(types=("fp32",), memory=("floor",))
def killed_with_an_optimizer_of_ones_own(run):
    """Whose steps change options, as the schedule does behind them, and draw random numbers."""
    for kill_at in ("3", "8") if run.offloaded else ():
        kill(programs.start_script(run.folder, KILLED, run.folder, "256MiB", "own"), kill_at)
    return json.loads(programs.start_script(run.folder, KILLED, run.folder, "256MiB" if run.offloaded else "", "own").communicate()[0].splitlines()[-1])


@case(types=("fp32",), memory=("floor",))
def killed_with_norms_and_an_average(run):
    """Batch norm, spectral norm, and an average that the daemon keeps: evaluations are those of a run that nobody has killed."""
    for first in (0, 12, 24, 36) if run.offloaded else ():
        kill(programs.start_script(run.folder, NORMED, run.folder, "64MiB"), str(random.randrange(first, first + 12)))
    if not run.offloaded:
        os.environ["OFFLOADD_DISABLE"] = "1"
    try:
        text, errors = programs.start_script(run.folder, NORMED, run.folder, "64MiB").communicate()
    finally:
        os.environ.pop("OFFLOADD_DISABLE", None)
    assert text, errors
    return json.loads(text.splitlines()[-1])


def killed_under_accelerate(kind):
    """A case: between micro-batches, and while its state is saved; at any of them it goes on as if it had not been."""

    def function(run):
        for first in (1, 8, 15) if run.offloaded else ():
            kill(programs.start_script(run.folder, ACCELERATED, run.folder, "256MiB", kind), str(random.randrange(first, first + 6)))
        text, errors = programs.start_script(run.folder, ACCELERATED, run.folder, "256MiB" if run.offloaded else "", kind).communicate()
        assert text, errors
        return json.loads(text.splitlines()[-1])

    function.__name__ = f"killed_under_accelerate_with_{kind}"
    case(function, types=("fp32",), memory=("floor",))


killed_under_accelerate("adamw")
killed_under_accelerate("nadam")


@case(types=("fp32",), memory=("floor",))
def trainers_of_other_releases(run):
    """Of the names inside of Trainer a release may have none: what it does not need is left out, and without others nothing is kept."""
    names = {"_run_epoch": None, "_maybe_log_save_evaluate": None, "_load_rng_state": None, "_get_learning_rate": lambda: 0.25,
             "_tr_loss": torch.tensor(2.0), "_total_loss_scalar": 3.0, "_globalstep_last_logged": 4, "_initial_global_step": 5, "current_flos": 6}
    kept = {"loss": torch.tensor(2.0), "total_loss": 3.0, "last_logged": 4, "first": 5, "norm": 0.5, "learning_rate": 0.25, "flos": 6, "for_the_log": {}}
    assert unfinished.loop_of(types.SimpleNamespace(**names), torch.tensor(0.5)) == kept
    for name in names:
        without = types.SimpleNamespace(**{key: value for key, value in names.items() if key != name})
        expected = {**kept, "first": 0} if name == "_initial_global_step" else None
        assert unfinished.loop_of(without, 0.5) == expected, name
    for metrics in (None, [], {"train": [1.0]}, {"train": {"text": ["words"]}}, {"train": {"loss": [0.5] * 20_000}}):
        others = types.SimpleNamespace(**names, _metrics=metrics, _total_train_tokens=7)
        assert unfinished.loop_of(others, 0.5) == {**kept, "for_the_log": {"tokens": 7}}, metrics
    return None


if __name__ == "__main__":
    _ = transformers.Trainer, transformers.LlamaForCausalLM  # imports them
    programs = Programs()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    import battery

    battery._cases[:] = [each for each in battery._cases if each[0].__module__ == "__main__"]
    sys.exit(main())
