"""The five learning rate schedules of DeepSpeed, with its numbers. `last_batch_iteration` counts steps that were taken, from -1."""

import logging
import math
import warnings

import torch

from ..errors import Error
from .missing import refusing

_log = logging.getLogger("DeepSpeed")

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"


def _bad(what):
    return Error.of(1002, what, "Correct the parameter of the schedule")


def _per_group(optimizer, value, name):
    groups = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return [value] * groups
    if len(value) != groups:
        raise _bad(f"{name} has {len(value)} values for {groups} groups")
    return list(value)


def _positive_integer(value, name):
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise _bad(f"{name} is {value!r}, not a positive integer")
    return value


class _Schedule:
    """What the five have in common; get_lr() is each one's own."""

    def __init__(self, optimizer, last_batch_iteration):
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self.last_batch_iteration = last_batch_iteration

    def _write(self, rates):
        for group, rate in zip(self.optimizer.param_groups, rates):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _begin(self, rates):
        if self.last_batch_iteration == -1:
            self._write(rates)

    def step(self, last_batch_iteration=None):
        self.last_batch_iteration = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self._write(self.get_lr())

    def get_last_lr(self):
        if not hasattr(self, "_last_lr"):
            raise Error.of(1002, "the schedule has not begun", "Call step() first")
        return self._last_lr

    def state_dict(self):
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict):
        self.last_batch_iteration = state_dict["last_batch_iteration"]


class LRRangeTest(_Schedule):
    def __init__(self, optimizer, lr_range_test_min_lr=1e-3, lr_range_test_step_size=2000, lr_range_test_step_rate=1.0,
                 lr_range_test_staircase=False, last_batch_iteration=-1):
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = _per_group(self.optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _positive_integer(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        self._begin(self.min_lr)

    def get_lr(self):
        interval = float(self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * increase for rate in self.min_lr]


class _WithWarmup(_Schedule):
    def __init__(self, optimizer, warmup_num_steps, warmup_type, last_batch_iteration):
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps = max(2, _positive_integer(warmup_num_steps, "warmup_num_steps"))
        if warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            _log.warning("warmup_type %r is unknown, log is taken", warmup_type)
            warmup_type = WARMUP_LOG_RATE
        self.warmup_type = warmup_type
        self._inverse_log = 1.0 / math.log(self.warmup_num_steps)

    def _warmed(self):
        """The share of the warm-up that is over; None behind it."""
        if self.last_batch_iteration >= self.warmup_num_steps:
            return None
        if self.warmup_type == WARMUP_LOG_RATE:
            return self._inverse_log * math.log(self.last_batch_iteration + 1)
        return self.last_batch_iteration / self.warmup_num_steps


class WarmupLR(_WithWarmup):
    def __init__(self, optimizer, warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000, warmup_type=WARMUP_LOG_RATE,
                 last_batch_iteration=-1):
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = _per_group(self.optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = _per_group(self.optimizer, warmup_max_lr, "warmup_max_lr")
        self.delta_lrs = [most - least for most, least in zip(self.max_lrs, self.min_lrs)]
        self._begin(self.min_lrs)

    def _gamma(self):
        warmed = self._warmed()
        return 1.0 if warmed is None else warmed

    def get_lr(self):
        if self.last_batch_iteration < 0:
            return self.min_lrs
        gamma = self._gamma()
        return [least + delta * gamma for least, delta in zip(self.min_lrs, self.delta_lrs)]


class WarmupDecayLR(WarmupLR):
    def __init__(self, optimizer, total_num_steps, warmup_min_lr=0.0, warmup_max_lr=0.001, warmup_num_steps=1000,
                 warmup_type=WARMUP_LOG_RATE, last_batch_iteration=-1):
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        if total_num_steps < self.warmup_num_steps:
            _log.warning("total_num_steps %s is less than warmup_num_steps %s", total_num_steps, self.warmup_num_steps)

    def _gamma(self):
        warmed = self._warmed()
        if warmed is not None:
            return warmed
        remaining = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, remaining / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(_WithWarmup):
    def __init__(self, optimizer, total_num_steps, warmup_min_ratio=0.0, warmup_num_steps=1000, cos_min_ratio=0.0001,
                 warmup_type=WARMUP_LOG_RATE, last_batch_iteration=-1):
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps, self.warmup_min_ratio, self.cos_min_ratio = total_num_steps, warmup_min_ratio, cos_min_ratio
        self.org_lrs = [group["lr"].clone() if hasattr(group["lr"], "clone") else group["lr"] for group in self.optimizer.param_groups]
        self._begin([0.0 for _ in self.org_lrs])

    def get_lr_ratio(self):
        if self.last_batch_iteration < 0:
            return 0.0
        warmed = self._warmed()
        if warmed is not None:
            return self.warmup_min_ratio + warmed * (1.0 - self.warmup_min_ratio)
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ((1 + math.cos(math.pi * progress)) / 2))

    def get_lr(self):
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


class OneCycle(_Schedule):
    """Up and down once, then a decay; momentum (the first beta) the other way round."""

    def __init__(self, optimizer, cycle_min_lr, cycle_max_lr, decay_lr_rate=0.0, cycle_first_step_size=2000, cycle_second_step_size=None,
                 cycle_first_stair_count=0, cycle_second_stair_count=None, decay_step_size=0, cycle_momentum=True, cycle_min_mom=0.8,
                 cycle_max_mom=0.9, decay_mom_rate=0.0, last_batch_iteration=-1):
        super().__init__(optimizer, last_batch_iteration)
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        if first <= 0 or second < 0:
            raise _bad(f"cycle_first_step_size is {first:g} and cycle_second_step_size {second:g}")
        self.first_step_size, self.second_step_size, self.total_size = first, second, first + second
        self.step_ratio = first / self.total_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = _per_group(self.optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _per_group(self.optimizer, cycle_max_lr, "cycle_max_lr")
        self._begin(self.min_lrs)
        self.cycle_momentum = cycle_momentum
        if cycle_momentum:
            self._begin_momentum(cycle_min_mom, cycle_max_mom)

    def _begin_momentum(self, least, most):
        if "betas" not in self.optimizer.defaults:
            _log.warning("cycle_momentum is off: %s has no betas", type(self.optimizer).__name__)
            self.cycle_momentum = False
            return
        self.min_moms = [(momentum, 0.99) for momentum in _per_group(self.optimizer, least, "cycle_min_mom")]
        self.max_moms = [(momentum, 0.99) for momentum in _per_group(self.optimizer, most, "cycle_max_mom")]
        if self.last_batch_iteration == -1:
            self._write_momentum(self.min_moms)

    def _write_momentum(self, betas):
        for group, pair in zip(self.optimizer.param_groups, betas):
            group["betas"] = pair

    def _scale(self):
        """How far up the cycle is: 0 at its ends, 1 at its peak."""
        taken = self.last_batch_iteration + 1
        within = 1.0 + taken / self.total_size - math.floor(1 + taken / self.total_size)
        rising = within <= self.step_ratio
        stairs = self.first_stair_count if rising else self.second_stair_count
        if stairs <= 0:
            return within / self.step_ratio if rising else (within - 1) / (self.step_ratio - 1)
        at = taken % self.total_size
        if at <= self.first_step_size:
            position = at * stairs / self.first_step_size
        else:
            position = (self.total_size - at) * stairs / self.second_step_size
        return math.floor(position) / stairs

    def _decays(self, rate):
        return not math.isclose(self.decay_step_size, 0) and not math.isclose(rate, 0)

    def _decay(self, rate):
        return 1 + rate * ((self.last_batch_iteration - self.total_size + 1) / self.decay_step_size)

    def get_lr(self):
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [least + (most - least) * scale for least, most in zip(self.min_lrs, self.max_lrs)]
        if not self._decays(self.decay_lr_rate):
            return self.min_lrs
        return [least / self._decay(self.decay_lr_rate) for least in self.min_lrs]

    def get_mom(self):
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [(most[0] - (most[0] - least[0]) * scale, least[1]) for least, most in zip(self.min_moms, self.max_moms)]
        if not self._decays(self.decay_mom_rate):
            return self.max_moms
        return [(most[0] * self._decay(self.decay_mom_rate), most[1]) for most in self.max_moms]

    def step(self, batch_iteration=None):
        super().step(batch_iteration)
        if self.cycle_momentum:
            self._write_momentum(self.get_mom())


def take_steps(schedule, count):
    """Brings a new schedule to where another one was after so many steps of the optimizer, in a run before."""
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) and count:
        _log.warning("ReduceLROnPlateau is at its beginning: what it was told in the run before is not there")
    elif isinstance(schedule, _Schedule):
        if count:
            schedule.step(count - 1)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch: no step of the optimizer was seen before
            for _ in range(count):
                schedule.step()


def write_rates(schedule):
    """Gives the groups the rates of a schedule whose state was loaded without theirs."""
    if isinstance(schedule, _Schedule):
        schedule.step(schedule.last_batch_iteration)
    else:
        for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr()):
            group["lr"] = rate


BY_NAME = {each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}


__getattr__ = refusing("deepspeed.runtime.lr_schedules")
