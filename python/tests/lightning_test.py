"""Lightning: its checkpoints, and runs that go on without one."""

import json
import os
import random
import signal
import sys
import threading
import types

import torch

from battery import Lines, case, main
from programs import Programs
from trainers_test import FP32, Data
from families_test import llama


def lightning_of(run, rates=None, **options):
    """A module whose job is attached with these options; `rates` makes the scheduler of an optimizer."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = run.make(llama)
            self.told = []

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.told.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 1e-3, fused=True)
            run.attach(self, optimizer, **options)
            return ([optimizer], [rates(optimizer)]) if rates else optimizer

    return Module()


@case(**FP32)
def lightning_resumes_an_older_checkpoint_of_averages(run):
    """It has averages where others have weights, and a callback has put the weights in their place."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging

    def fit(steps, checkpoint=None):
        module = lightning_of(run, job="averaged")
        trainer = lightning.Trainer(accelerator="cpu", max_steps=steps, logger=False, enable_progress_bar=False, enable_model_summary=False,
                                    callbacks=[WeightAveraging(avg_fn=lambda old, new, _: old + (new - old) * 0.1),
                                               ModelCheckpoint(run.folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)])
        trainer.fit(module, torch.utils.data.DataLoader(Data(), batch_size=2), ckpt_path=checkpoint, weights_only=False)
        return module.told

    told = fit(4)
    run.handles.pop().close()
    run.models.clear()
    return told, fit(6, os.path.join(run.folder, "step=2.ckpt"))


@case(**FP32)
def lightning_module(run):
    import lightning

    module = lightning_of(run, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    trainer = lightning.Trainer(accelerator="cpu", max_steps=4, gradient_clip_val=0.5, accumulate_grad_batches=2, logger=False,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, torch.utils.data.DataLoader(Data(), batch_size=2))
    trainer.save_checkpoint(file := os.path.join(run.folder, "lightning.ckpt"))
    return module.told, torch.load(file, weights_only=False)["state_dict"]


@case(types=("fp32",), memory=("floor",))
def lightning_resumes_an_older_checkpoint(run):
    """Lightning loads weights before it asks for optimizers, the job is two steps further than the checkpoint."""
    import lightning

    def fit(steps, checkpoint=None):
        module = lightning_of(run, job="lightning")
        kept = lightning.pytorch.callbacks.ModelCheckpoint(run.folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = lightning.Trainer(accelerator="cpu", max_steps=steps, logger=False, enable_progress_bar=False, enable_model_summary=False,
                                    callbacks=[kept], default_root_dir=run.folder)
        trainer.fit(module, torch.utils.data.DataLoader(Data(), batch_size=2), ckpt_path=checkpoint)
        return module.told

    told = fit(4)
    run.handles.pop().close()
    run.models.clear()
    return told, fit(5, os.path.join(run.folder, "step=2.ckpt"))


class _Stopped(Exception):
    pass


def _fits(run, job, callbacks=()):
    """A function that fits a module of this job, with checkpoints at every second step, to a number of steps; what it tells."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    def fit(steps, checkpoint=None, more=()):
        module = lightning_of(run, job=job)
        trainer = lightning.Trainer(accelerator="cpu", max_steps=steps, logger=False, enable_progress_bar=False, enable_model_summary=False,
                                    callbacks=[*callbacks, *more, ModelCheckpoint(run.folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)])
        try:
            trainer.fit(module, torch.utils.data.DataLoader(Data(), batch_size=2), ckpt_path=checkpoint and os.path.join(run.folder, checkpoint))
        except _Stopped:
            pass
        return module.told

    return fit


@case(types=("fp32",), memory=("floor",))
def lightning_resumes_a_checkpoint_that_was_written_before_the_next_step(run):
    """A run that has gone on at an older checkpoint than the job writes one before its first step: it has the number of steps that the job has."""
    import lightning

    class Saves(lightning.Callback):
        def on_train_start(self, trainer, _):
            trainer.save_checkpoint(os.path.join(run.folder, "before.ckpt"))
            raise _Stopped

    fit, told = _fits(run, "waits"), []
    for steps, checkpoint, more in ((4, None, ()), (4, "step=2.ckpt", (Saves(),))):
        told.append(fit(steps, checkpoint, more))
        run.handles.pop().close()
        run.models.clear()
    return told, fit(5, "before.ckpt")


@case(types=("fp32",), memory=("floor",))
def lightning_that_cannot_go_on_in_a_job_with_steps_says_so(run):
    """The script has a state of its own in the job, which stays."""
    import lightning

    class Keeps(lightning.Callback):
        def on_train_batch_start(self, *_):
            run.handles[-1].trainer_state = b"its own"

    fit = _fits(run, "anew", (Keeps(),))
    with Lines() as lines:
        told = fit(3)
        assert not any("Lightning begins" in line for line in lines), lines
        run.handles.pop().close()
        run.models.clear()
        if run.offloaded:
            fit(2)
            assert sum("job anew is at step 3, and Lightning begins at its first one" in line for line in lines) == 1, lines
            assert run.handles[0].step == 5 and run.handles[0].trainer_state == b"its own"
            run.handles.pop().close()
            run.models.clear()
        return told


@case(types=("fp32",), memory=("floor",))
def what_lightning_callbacks_keep_that_cannot_be_kept_is_told_of(run):
    import lightning

    class Keeps(lightning.Callback):
        def state_dict(self):
            return {"lock": threading.Lock()}

    module = lightning_of(run, job="lock")
    with Lines() as lines:
        lightning.Trainer(accelerator="cpu", max_steps=3, logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
                          callbacks=[Keeps()]).fit(module, torch.utils.data.DataLoader(Data(), batch_size=2))
        assert not run.offloaded or sum("Lightning's callbacks, schedulers and data keep is not to be kept" in line for line in lines) == 1, lines
    return module.told


class _Counts(torch.utils.data.DataLoader):
    """Has a state."""

    def state_dict(self):
        return {"at": 0}

    def load_state_dict(self, state):
        pass


@case(types=("fp32",), memory=("floor",))
def loaders_of_which_some_have_a_state_are_told_of(run):
    import lightning

    class Both(type(lightning_of(run))):
        def training_step(self, batch, index):
            return super().training_step(batch["here"], index)

    module = Both()
    trainer = lightning.Trainer(accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                enable_model_summary=False)
    with Lines() as lines:
        trainer.fit(module, {"here": torch.utils.data.DataLoader(Data(), batch_size=2), "there": _Counts(Data(), batch_size=2)})
    if run.offloaded:
        assert sum("only some of the data's loaders have a state_dict()" in line for line in lines) == 1, lines
    return module.told


@case(types=("fp32",), memory=("floor",))
def lightning_that_is_started_again_has_no_steps_left(run):
    """And with more of them it takes those."""
    fit = _fits(run, "whole")
    told = fit(3)
    if not run.offloaded:
        run.end()
        return told, fit(5)[3:]
    for steps in (3, 5):
        run.handles.pop().close()
        run.models.clear()
        told = [told, fit(steps)]
        assert run.handles[-1].step == steps
    assert told[0][1] == [], told
    return told[0][0], told[1]


@case(types=("fp32",), memory=("floor",))
def lightning_resumes_a_checkpoint_with_what_was_written_after_its_step(run):
    """The job, which is at that step, does not have it."""
    import lightning

    class Clamps(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.clamp_(-0.03, 0.03)

    fit = _fits(run, "clamps", (Clamps(),))
    told = fit(2)
    run.handles.pop().close()
    run.models.clear()
    return told, fit(4, "step=2.ckpt")


def fitted_again(run, first, second):
    """fit() with one Trainer, and again with another: configure_optimizers() attaches the same job once more, with an optimizer that is new."""
    import lightning

    module = lightning_of(run, job="again")
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    for steps in (first, second):
        lightning.Trainer(max_steps=steps, **quiet).fit(module, torch.utils.data.DataLoader(Data(), batch_size=2))
    return module


@case(types=("fp32", "bf16"))
def lightning_fits_a_module_twice(run):
    module = fitted_again(run, 3, 4)
    assert not run.offloaded or [handle.job for handle in run.handles] == ["again", "again-2"] and run.handles[1].step == 4
    return trained_in_turn(run, module)


def trained_in_turn(run, module):
    """What it is after its last job, the ones before are closed."""
    weights = [p.detach().clone() for p in module.parameters()]
    run.end()
    return module.told, weights


QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def lightning_of_before(run, job):
    """A module that is attached before fit(), and has a small model in `part`."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.part, self.told = run.make(lambda: torch.nn.Linear(16, 8)), []
            self.optimizer = torch.optim.AdamW(self.part.parameters(), 1e-2, fused=True)

        def training_step(self, batch, index):
            loss = self.part(batch).square().mean()
            self.told.append(loss.item())
            return loss

        def configure_optimizers(self):
            return self.optimizer

    module = Module()
    run.attach(module, module.optimizer, job=job)
    return module


def rows_of(seed):
    return torch.utils.data.DataLoader(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)), batch_size=2)


@case(types=("fp32",), memory=("floor",))
def lightning_fits_more_than_once_in_one_job(run):
    """As in memory, on what it has: with one Trainer, which goes on, and with another; started again it says that it begins at its first step."""
    import lightning

    with Lines() as lines:
        module, trainer = lightning_of_before(run, "phases"), lightning.Trainer(max_epochs=2, **QUIET)
        trainer.fit(module, rows_of(0))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, rows_of(1))
        lightning.Trainer(max_epochs=2, **QUIET).fit(module, rows_of(2))
        assert not any("Lightning begins" in line or "continuing at step" in line for line in lines), lines
        told = trained_in_turn(run, module)
        if run.offloaded:
            again = lightning_of_before(run, "phases")
            lightning.Trainer(max_epochs=2, **QUIET).fit(again, rows_of(0))
            assert run.handles[-1].step == 28, run.handles
            run.end()
            assert sum("job phases is at step 20, and Lightning begins" in line for line in lines) == 1, lines
    return told


@case(types=("fp32",), memory=("floor",))
def lightning_beside_a_job_that_another_has_trained(run):
    """A teacher, whose job says where its own fit() was."""
    import lightning

    def train(steps):
        teacher = lightning_of_before(run, "teacher")
        lightning.Trainer(max_steps=steps, **QUIET).fit(teacher, rows_of(0))
        return teacher

    teacher = train(3)
    if run.offloaded:
        run.end()
        teacher = train(3)

    class Student(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.teacher, self.layer, self.told = teacher, torch.nn.Linear(16, 8), []
            torch.nn.init.ones_(self.layer.weight)
            torch.nn.init.zeros_(self.layer.bias)

        def training_step(self, batch, index):
            with torch.no_grad():
                wanted = self.teacher.part(batch)
            loss = (self.layer(batch) - wanted).square().mean()
            self.told.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.layer.parameters(), 0.1)

    student = Student()
    with Lines() as lines:
        lightning.Trainer(max_epochs=1, **QUIET).fit(student, rows_of(1))
        assert not lines, lines
    return student.told, trained_in_turn(run, teacher)[1]


@case(types=("fp32",), memory=("floor",))
def lightning_with_two_jobs_says_where_it_begins(run):
    import lightning

    class Both(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.told = lightning_of_before(run, "one"), lightning_of_before(run, "two"), []
            self.automatic_optimization = False

        def training_step(self, batch, index):
            for each, optimizer in zip((self.one, self.two), self.optimizers()):
                optimizer.zero_grad()
                self.manual_backward(each.training_step(batch, index))
                optimizer.step()

        def configure_optimizers(self):
            return self.one.optimizer, self.two.optimizer

    with Lines() as lines:
        lightning.Trainer(max_epochs=1, **QUIET).fit(both := Both(), rows_of(0))
        assert not any("Lightning begins" in line for line in lines), lines
        told = trained_in_turn(run, both)[1]
        if run.offloaded:
            lightning.Trainer(max_epochs=1, **QUIET).fit(Both(), rows_of(0))
            run.end()
            assert sum(f"job {name} is at step 4, and Lightning begins" in line for line in lines for name in ("one", "two")) == 2, lines
    return both.one.told, both.two.told, told


@case(types=("fp32",), memory=("floor",))
def what_a_lightning_callback_writes_in_front_of_a_step_is_told_of(run):
    """A run that goes on calls it once more for the batch of the last step."""
    import lightning

    class Shrinks(lightning.Callback):
        def on_train_batch_start(self, trainer, module, *_):
            with torch.no_grad():
                module.part.bias.mul_(0.5)

    module = lightning_of_before(run, "shrinks")
    with Lines() as lines:
        lightning.Trainer(max_steps=3, callbacks=[Shrinks()], **QUIET).fit(module, rows_of(0))
        told = trained_in_turn(run, module)
        if run.offloaded:
            lightning.Trainer(max_steps=3, callbacks=[Shrinks()], **QUIET).fit(lightning_of_before(run, "shrinks"), rows_of(0))
            run.end()
            assert sum("was written once more in front of step 3 of job shrinks, which has it: part.bias." in line for line in lines) == 1, lines
    return told


@case(types=("fp32",), memory=("floor",))
def lightning_of_an_older_release_is_left_as_it_is(_):
    """It has no name that goes on with a run."""
    import lightning.pytorch as current
    from offloadd import lightning_position

    def older(name, **classes):
        made = sys.modules[f"older.{name}"] = types.ModuleType(f"older.{name}")
        vars(made).update(classes)
        return made

    loops = current.loops
    kept = {name: vars(loops.fit_loop._FitLoop)[name] for name in ("setup_data", "on_advance_start", "_should_reload_train_dl", "restarted_mid_epoch")}
    names = ("older.trainer", "older.loops", "older.loops.optimization", "older")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    older("trainer.call", **vars(current.trainer.call))
    fit = older("loops.fit_loop", _FitLoop=type("_FitLoop", (), kept))
    older("loops.training_epoch_loop", _TrainingEpochLoop=loops.training_epoch_loop._TrainingEpochLoop)
    older("loops.optimization.automatic", **vars(loops.optimization.automatic))
    try:
        lightning_position._serve("older")
        raise AssertionError("it was served")
    except AttributeError as error:
        assert "is_resuming" in str(error), error
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "older"]:
            del sys.modules[name]
    assert fit._FitLoop.setup_data is kept["setup_data"]


@case(**FP32)
def lightning_looks_for_a_rate_first(run):
    import lightning.pytorch.tuner

    module = lightning_of(run, job="rate")
    module.lr = 1e-3
    trainer = lightning.Trainer(accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                enable_model_summary=False, default_root_dir=run.folder)
    loader = torch.utils.data.DataLoader(Data(), batch_size=2)
    found = lightning.pytorch.tuner.Tuner(trainer).lr_find(module, loader, num_training=5, min_lr=1e-4, max_lr=1e-2)
    trainer.fit(module, loader)
    return found.results["loss"], trained_in_turn(run, module)


LIGHTNING = """
import json, sys, torch, lightning
torch.manual_seed(0)
told = []

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))

    def training_step(self, batch, index):
        loss = self.layers(batch).pow(2).mean()
        told.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

module = Module()
trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
                            enable_checkpointing=False, gradient_clip_val=0.1)
trainer.fit(module, torch.utils.data.DataLoader(torch.randn(12, 16), 4))
told.append([p.tolist() for p in module.parameters()])
print(json.dumps([told, hasattr(trainer.optimizers[0], "_offload_part")]))
"""

# Killed at the event of a number: before and after batches, in them, after each step.
LIGHTNING_KILLED = """
import json, os, random, signal, sys, time, warnings
import lightning, torch, torchmetrics
import offloadd

folder, kind, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
warnings.simplefilter("ignore")
torch.manual_seed(0)
random.seed(0)
events = 0

def event():
    global events
    events += 1
    if events == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        return torch.randn(16, generator=torch.Generator().manual_seed(index)) + torch.randn(16) * 0.1

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for index in torch.randperm(22).tolist():
            yield Data()[index]

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4))
        self.other = torch.nn.Linear(4, 4)
        self.automatic_optimization = kind in ("automatic", "plateau", "part")
        if kind == "part":
            self.measures = torchmetrics.MetricCollection({"squared": torchmetrics.MeanSquaredError(), "root": torchmetrics.MeanSquaredError(squared=False)})
            self.register_buffer("average", torch.zeros(4))

    def train_dataloader(self):
        return [torch.utils.data.DataLoader(data, 4, shuffle=True) for data in (Data(), torch.utils.data.Subset(Data(), range(8)))]

    def on_train_epoch_start(self):
        self.seen = []

    def training_step(self, batch, index):
        event()
        self.seen.append(index)
        batch = sum(each[:2] for each in batch) if kind == "part" else batch
        out = self.layers(batch)
        loss = out.pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        if kind == "part":
            self.measures.update(out, torch.zeros_like(out))
            self.average.lerp_(out.detach().mean(0), 0.1)
        if self.automatic_optimization:
            loss = loss + self.other(out).mean()
        elif kind == "manual":
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            self.manual_backward(loss + self.other(out).mean())
            if index % 2:
                optimizer.step()
                event()
                optimizer.zero_grad()
                schedule.step()
        else:
            losses = (lambda: loss, lambda: self.other(self.layers(batch).detach() + torch.randn(4)).pow(2).mean())
            for optimizer, its, schedule in zip(self.optimizers(), losses, self.lr_schedulers()):
                optimizer.zero_grad()
                self.manual_backward(its())
                optimizer.step()
                event()
                schedule.step()
        event()
        return {"loss": loss, "more": loss.detach() * 2}

    def validation_step(self, batch, index):
        event()
        self.log("val", self.layers(batch).pow(2).mean())

    def configure_optimizers(self):
        parts = [self.layers.parameters(), self.other.parameters()] if kind == "several" else [self.parameters()]
        optimizers = [torch.optim.AdamW(each, torch.tensor(1e-2) if kind == "part" else 1e-2, fused=True) for each in parts]
        if folder:
            offloadd.attach([self.layers, self.other] if kind == "part" else self, optimizers, nvme_path=folder, ram="128MiB", job="lightning")
        if kind == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], factor=0.5, patience=0, threshold=0.5)
            return {"optimizer": optimizers[0], "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 20) for each in optimizers]
        return optimizers, [{"scheduler": each, "interval": "step"} for each in schedules]

class Notes(lightning.Callback):
    def __init__(self):
        self.notes = []

    def state_dict(self):
        return {"notes": list(self.notes)}

    def load_state_dict(self, state):
        self.notes = list(state["notes"])

    def on_train_batch_start(self, trainer, module, batch, index):
        event()
        self.notes.append(index)
        self.began = time.monotonic()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        event()
        assert time.monotonic() >= self.began
        module.log("more", outputs["more"] if module.automatic_optimization else 0.0, on_step=False, on_epoch=True)
        self.notes += [index, trainer.global_step] + [outputs["more"].item()] * module.automatic_optimization

    def on_train_epoch_end(self, trainer, module):
        self.notes += [trainer.current_epoch] + [trainer.callback_metrics[name].item() for name in ("loss", "more")] * module.automatic_optimization
        if kind == "part":
            self.notes += [value.item() for value in module.measures.compute().values()]
            module.measures.reset()

    def on_validation_end(self, trainer, module):
        event()
        self.notes.append(trainer.callback_metrics["val"].item())

notes, module = Notes(), Module()
trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, callbacks=[notes],
                            max_epochs=7 if kind == "part" else 3, num_sanity_val_steps=0, val_check_interval=3 if kind != "plateau" else None,
                            reload_dataloaders_every_n_epochs=2 * (kind == "part"),
                            **{"accumulate_grad_batches": 2, "gradient_clip_val": 0.5} if kind == "automatic" else {})
loader = torch.utils.data.DataLoader(Stream() if kind == "plateau" else Data(), 4, shuffle=kind != "plateau")
trainer.fit(module, None if kind == "part" else loader, torch.utils.data.DataLoader(Data(), 11))
told = [[value.double().sum().item() for value in module.state_dict().values()], notes.notes, trainer.global_step, trainer.current_epoch, torch.rand(2).tolist(),
        random.random(), float(trainer.optimizers[0].param_groups[0]["lr"])]
print(json.dumps([told, events]))
"""

@case(types=("fp32",), memory=("floor",))
def untouched_script_with_lightning(run):
    """Which runs the first forward pass inside of the first step(). Started again it says that it begins at its first one."""
    launcher = ("-m", "offloadd", "--pool", run.folder, "--ram", "128MiB") if run.offloaded else ()
    text, lines = programs.start_script(run.folder, LIGHTNING, launcher=launcher).communicate()
    told, attached = json.loads(text.splitlines()[-1])
    assert "Lightning begins" not in lines, lines
    if run.offloaded:
        lines = programs.start_script(run.folder, LIGHTNING, launcher=launcher).communicate()[1]
        assert lines.count("is at step 6, and Lightning begins at its first one") == 1, lines
    return told, attached == run.offloaded


def lightning_killed(kind):
    """At an event of each third of the run, and started again."""
    def function(run):
        if not run.offloaded:
            return json.loads(programs.start_script(run.folder, LIGHTNING_KILLED, "", kind, "-1").communicate()[0].splitlines()[-1])[0]
        count = json.loads(programs.start_script(run.folder, LIGHTNING_KILLED, "", kind, "-1").communicate()[0].splitlines()[-1])[1]
        chosen = random.Random(kind)
        for kill_at in [chosen.randrange(3, count // 3) for _ in range(3)]:
            process = programs.start_script(run.folder, LIGHTNING_KILLED, run.folder, kind, str(kill_at))
            process.communicate()
            assert process.returncode == -signal.SIGKILL, (kill_at, process.returncode)
        text = programs.start_script(run.folder, LIGHTNING_KILLED, run.folder, kind, "-1").communicate()[0]
        return json.loads(text.splitlines()[-1])[0]

    function.__name__ = f"lightning_killed_with_{kind}"
    case(types=("fp32",), memory=("floor",))(function)


for each in ("automatic", "plateau", "manual", "several", "part"):
    lightning_killed(each)


if __name__ == "__main__":
    programs = Programs()
    import battery

    battery._cases[:] = [each for each in battery._cases if each[0].__module__ == "__main__"]
    sys.exit(main())
