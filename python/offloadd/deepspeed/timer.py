"""deepspeed.utils.timer: wall-clock times by name, and samples a second."""

import logging
import time

from . import comm, utils
from .accelerator import get_accelerator
from .missing import refusing

# The names of the engine's own timers. Nothing is measured by them here: handle.metrics() has figures.
FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"
TIME_EPSILON = 1e-6


def _now():
    """When what the device was given is done."""
    get_accelerator().synchronize()
    return time.perf_counter()


class _Timer:
    """Milliseconds between start() and stop(), of all such pairs since reset()."""

    def __init__(self, name):
        self.name_ = name
        self.started_ = False
        self._begin, self._spans = 0.0, []

    def start(self):
        assert not self.started_, f"timer {self.name_} has been started already"
        self._begin, self.started_ = _now(), True

    def stop(self, reset=False, record=False):
        assert self.started_, f"timer {self.name_} was not started"
        span = 1000 * (_now() - self._begin)
        self._spans = [span] if reset else [*self._spans, span]
        self.started_ = False

    def reset(self):
        self.started_, self._spans = False, []

    def elapsed(self, reset=True):
        """The sum. A timer that runs goes on, from now."""
        is_running = self.started_
        if is_running:
            self.stop()
        told = sum(self._spans)
        if reset:
            self.reset()
        if is_running:
            self.start()
        return told

    def mean(self):
        """Without the tenth that was shortest and the tenth that was longest."""
        spans = sorted(self._spans)
        cut = len(spans) // 10
        spans = spans[cut:len(spans) - cut]
        return sum(spans) / len(spans) if spans else 0.0


class SynchronizedWallClockTimer:
    """Timers by name: `timers("forward").start()`."""

    Timer = _Timer

    def __init__(self):
        self.timers = {}

    def __call__(self, name):
        return self.timers.setdefault(name, self.Timer(name))

    def get_timers(self):
        return self.timers

    def has_timer(self, name):
        return name in self.timers

    @staticmethod
    def memory_usage():
        accelerator = get_accelerator()
        told = {"mem_allocated": accelerator.memory_allocated(), "max_mem_allocated": accelerator.max_memory_allocated(),
                "cache_allocated": accelerator.memory_reserved(), "max_cache_allocated": accelerator.max_memory_reserved()}
        return "".join(f" | {name}: {size / 2**30:.4f} GB" for name, size in told.items())

    def log(self, names, normalizer=1.0, reset=True, memory_breakdown=False, ranks=None):
        assert normalizer > 0.0
        told = "".join(f" | {name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in names if name in self.timers)
        utils.log_dist(f"time (ms){told}", ranks=ranks or [0])
        if memory_breakdown:
            utils.see_memory_usage("after the timers", force=True)

    def get_mean(self, names, normalizer=1.0, reset=True):
        """Milliseconds by name."""
        assert normalizer > 0.0
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means


class NoopTimer:
    """Such timers that measure nothing."""

    class Timer:
        def start(self):
            pass

        reset = start

        def stop(self, **options):
            pass

        def elapsed(self, **options):
            return 0

        mean = elapsed

    def __init__(self):
        self.timer = self.Timer()

    def __call__(self, name):
        return self.timer

    def get_timers(self):
        return {}

    def has_timer(self, name):
        return True

    def log(self, names, normalizer=1.0, reset=True, memory_breakdown=False, ranks=None):
        pass

    def get_mean(self, names, normalizer=1.0, reset=True):
        return {}


class ThroughputTimer:
    """Samples a second, without the first `start_step` steps; tells them every `steps_per_output` steps. The first argument is an object with
    `enabled` and `synchronized`, or None; programs for an early DeepSpeed have the size of the batch there."""

    def __init__(self, config=None, batch_size=None, start_step=2, steps_per_output=None, monitor_memory=False, logging_fn=None):
        if isinstance(config, int):
            config, batch_size = None, config
        self.config, self.enabled = config, getattr(config, "enabled", True)
        self.batch_size = max(1, batch_size or 1)
        self.start_step, self.steps_per_output = start_step, steps_per_output
        self.logging = logging.getLogger("DeepSpeed").info if logging_fn is None else logging_fn
        self.monitor_memory = monitor_memory
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time, self.step_elapsed_time = 0.0, 0.0
        self.started = False
        self._begin = 0.0

    def update_epoch_count(self):
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self):
        if self.enabled:
            self.started = True
            self._begin = _now() if self.global_step_count >= self.start_step else 0.0

    def stop(self, global_step=False, report_speed=True):
        if not self.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += bool(global_step)
        if self._begin > 0.0:
            span = _now() - self._begin
            self.total_elapsed_time += span
            self.step_elapsed_time += span
        if global_step:
            every = self.steps_per_output
            if report_speed and every and self.global_step_count % every == 0 and self.step_elapsed_time > 0.0:
                self.logging(f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                             f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.4f}, "
                             f"CurrSamplesPerSec={self._samples() / self.step_elapsed_time:.4f}")
                if self.monitor_memory:
                    utils.see_memory_usage("after the step", force=True)
            self.step_elapsed_time = 0.0

    def _samples(self):
        """Of a step, of all ranks."""
        return self.batch_size * comm.get_world_size()

    def avg_samples_per_sec(self):
        steps = self.global_step_count - self.start_step
        return self._samples() * steps / self.total_elapsed_time if steps > 0 and self.total_elapsed_time > 0.0 else float("-inf")


def trim_mean(data, trim_percent):
    """The mean without the smallest and the largest part, each `trim_percent` (0.1: a tenth) of them."""
    assert 0.0 <= trim_percent <= 1.0
    data = sorted(data)
    cut = int(len(data) * trim_percent)
    data = data[cut:max(cut + 1, len(data) - cut)]
    return sum(data) / len(data) if data else 0.0


__getattr__ = refusing("deepspeed.utils.timer")
