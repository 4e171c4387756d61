"""What of a run of Lightning is kept with a step beside weights and what optimizers keep, and how it is given to a run that goes on."""

import io
import itertools
import sys

import torch

_MAGIC = "offloadd.Lightning"
_OPTIONS = (bool, int, float, str, tuple, list, type(None))
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_LOGS = ("_first_loop_iter", "_current_fx")  # by which self.log() knows of the first batch of an epoch
_OF_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx", "metric_attribute")
_OF_LOGGED = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")
_OF_LOGGED_METRIC = ("_forward_cache", "has_reset")  # whose values are the module's


def bytes_of(data):
    file = io.BytesIO()
    torch.save(data, file)
    return file.getvalue()


def data_of(packed):
    return torch.load(io.BytesIO(packed), weights_only=False)  # our own, of this user's job


def marked(kept):
    """As it is in a job."""
    return bytes_of({"magic": _MAGIC, **kept})


def kept_in(state):
    """What was kept in a job; None for a state of the script's own."""
    try:
        kept = data_of(state)
    except Exception:
        return None
    return kept if isinstance(kept, dict) and kept.get("magic") == _MAGIC else None


def size_of(value):
    """Bytes of the tensors in it."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return getattr(value, "nbytes", 0)
    return sum(map(size_of, value))


def _copied(value):
    """Of its own: metrics of one collection have the same tensors and lists, and not for good."""
    if isinstance(value, list):
        return list(map(_copied, value))
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


# ---- Optimizers, and the scale of a loss ----

def options_of(optimizer):
    """Of each group, those that schedules change; a rate may be a tensor."""
    def is_option(key, value):
        return key != "params" and (isinstance(value, _OPTIONS) or (isinstance(value, torch.Tensor) and value.numel() == 1))

    return [{key: value for key, value in group.items() if is_option(key, value)} for group in optimizer.param_groups]


def give_options(optimizer, groups):
    for group, options in zip(optimizer.param_groups, groups):
        for key, value in options.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def count_step(scaler):
    """As its update() after a step that was taken."""
    state = scaler.state_dict()
    if state:
        state["_growth_tracker"] += 1
        if state["_growth_tracker"] == state["growth_interval"]:
            state["scale"], state["_growth_tracker"] = state["scale"] * state["growth_factor"], 0
        scaler.load_state_dict(state)


# ---- Logs and metrics ----

def metrics_of(trainer):
    """What loggers, callbacks and the progress bar were told, and what the module's metrics and logs of this epoch have come to."""
    connector = trainer._logger_connector
    return {"told": {name: dict(getattr(connector, name, {})) for name in _METRICS}, "logs": {name: getattr(connector, name) for name in _LOGS},
            "logged": _logged_in(trainer.fit_loop.epoch_loop._results), "measured": _measured_by(trainer.lightning_module)}


def give_metrics(trainer, kept):
    for name, values in kept["told"].items():
        getattr(trainer._logger_connector, name).update(values)
    vars(trainer._logger_connector).update(kept["logs"])
    _log_again(trainer, kept["logged"])
    _measure_again(trainer.lightning_module, kept["measured"])


def _logged_in(results):
    """What self.log() was given in this epoch: of each its options, and what it has come to."""
    rows = []
    for key, logged in results.items():
        meta, sync = logged.meta, logged.meta.sync
        if sync.group is None:
            names = _OF_LOGGED if logged.is_tensor else _OF_LOGGED_METRIC
            rows.append({"key": key, "meta": {name: getattr(meta, name) for name in _OF_META}, "reduce": meta.reduce_fx.__name__,
                         "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only, "_op": sync.op}, "is_tensor": logged.is_tensor,
                         "state": {name: _copied(vars(logged)[name]) for name in names if name in vars(logged)}})
    return rows


def _log_again(trainer, rows):
    results = trainer.fit_loop.epoch_loop._results
    made = sys.modules[type(results).__module__]
    metrics = {name: module for name, module in trainer.lightning_module.named_modules() if hasattr(module, "_update_count")}
    for row in rows:
        meta = made._Metadata(**row["meta"], reduce_fx=getattr(torch, row["reduce"]))
        meta.sync = made._Sync(fn=trainer.strategy.reduce, **row["sync"])
        logged = made._ResultMetric(meta, row["is_tensor"])
        vars(logged).update(row["state"])
        if not row["is_tensor"]:
            if meta.metric_attribute not in metrics:
                continue
            logged.value = metrics[meta.metric_attribute]
        results[row["key"]] = logged


def _measured_by(model):
    """What metrics of the module (of torchmetrics) have come to."""
    measured = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "_defaults", None), dict) and hasattr(module, "_update_count"):
            measured[name] = {"_update_count": module._update_count, **{key: _copied(getattr(module, key)) for key in module._defaults}}
    return measured


def _measure_again(model, measured):
    modules = dict(model.named_modules())
    for name, values in measured.items():
        for key, value in values.items() if name in modules else ():
            setattr(modules[name], key, value)


# ---- Beside the job ----

class Beside:
    """Parameters and buffers of a module that are not the job's, as where a part of it is attached. Kept are those that have changed since fit() began."""

    def __init__(self, module, handle):
        of_job = {id(each) for model in handle.models if model is not None for each in model.modules()}
        self._identities = handle.identities
        self._places = [(f"{name}.{key}", owner, key) for name, owner in module.named_modules() if id(owner) not in of_job
                        for key in itertools.chain(owner._parameters, owner._buffers)]
        self._at_first = {name: self._version_of(tensor) for name, tensor in self._tensors()}

    def _tensors(self):
        for name, owner, key in self._places:
            tensor = getattr(owner, key, None)
            if tensor is not None and id(tensor) not in self._identities():
                yield name, tensor

    @staticmethod
    def _version_of(tensor):
        return id(tensor), 0 if tensor.is_inference() else tensor._version

    def changed(self):
        return {name: tensor.detach() for name, tensor in self._tensors() if self._at_first.get(name) != self._version_of(tensor)}

    @torch.no_grad()
    def give(self, values):
        for name, tensor in self._tensors():
            if name in values:
                tensor.copy_(values[name])
