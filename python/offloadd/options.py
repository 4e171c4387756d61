"""The arguments of attach() and init(), and where they come from: the call, the environment, a configuration in a file."""

import difflib
import os

from .errors import Error, class_of

OPTIONS = ("nvme_path", "ram", "gpu_ram", "device", "job", "io", "durability", "generations", "update_threads", "update_in_backward", "spill_gradients", "rank",
           "world_size", "local_rank", "local_world_size", "run_id", "gradients", "gradient_average", "raw_access", "weights_at_close",
           "average", "zero_stage", "weights_home", "state_home", "persistence", "prefetch", "max_live")


def listed(given):
    return list(given) if isinstance(given, (list, tuple)) else [given]


def own_state_of(data):
    """What a trainer gives as its own state, as bytes."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise Error.of(1002, f"trainer_state was given {class_of(data)}", "Give it bytes, such as json.dumps(state).encode()")
    return bytes(data)


def strings(options):
    pairs = []
    for key, value in options.items():
        if value is None:
            continue
        if key not in OPTIONS:
            meant = difflib.get_close_matches(str(key), OPTIONS, n=1)
            raise Error.of(1002, f"there is no option {key}", f"Did you mean {meant[0]}?" if meant else f"The options are {', '.join(OPTIONS)}")
        is_flag = isinstance(value, bool) and key not in ("ram", "gpu_ram")
        text = str(int(value)) if is_flag else os.fspath(value) if isinstance(value, os.PathLike) else str(value)
        if text != text.encode(errors="replace").decode():
            raise Error.of(1201 if key == "nvme_path" else 1002, f"{key} is {text!r}, which is not UTF-8", "Give it a name in UTF-8")
        pairs += [key, text]
    return pairs


def of_arguments(nvme_path, ram, job, config, others):
    """Arguments count more than the environment, which counts more than a configuration in a file; one in a dictionary counts as arguments do."""
    options = {}
    if config is not None:
        if isinstance(config, dict) and (not config or any(key in OPTIONS for key in config)):
            options.update(config)  # what else it has is refused by name
        elif not isinstance(config, (dict, str, os.PathLike)):
            raise Error.of(1002, f"config is {config!r}", "Give it a dictionary, or the path of a file (offloadd.toml, ds_config.json)")
        else:
            from .config import options_of  # files, and dictionaries in the manner of DeepSpeed

            options.update(options_of(config))
    options.update({key: value for key, value in {"nvme_path": nvme_path, "ram": ram, "job": job, **others}.items() if value is not None})
    if options.get("nvme_path"):
        options["nvme_path"] = absolute_paths(options["nvme_path"])
    elif isinstance(options.get("nvme_path"), (list, tuple)):
        options["nvme_path"] = ""  # a list of none: it is not set
    return options


def absolute_paths(pools):
    """`pools` (a path, several in a list or separated by commas) for a script that goes to another directory later, separated by commas."""
    several = list(pools) if isinstance(pools, (list, tuple)) else [pools]
    if not all(isinstance(each, (str, os.PathLike)) for each in several):
        raise Error.of(1002, f"nvme_path is {pools!r}, which is no path", "Give it a directory, or a list of several")
    given = [os.fspath(each) for each in pools] if isinstance(pools, (list, tuple)) else map(str.strip, os.fspath(pools).split(","))
    # The ~ of shells is refused, and no folder of that name.
    return ",".join(each if not each or each.startswith("~") or os.path.isabs(each) else os.path.join(os.getcwd(), each) for each in given)


def reduces_gradients(options):
    """Whether the trainer makes the ranks' gradients one by itself, with these arguments of attach()."""
    known = {key: value for key, value in options.items() if key in OPTIONS}
    return of_arguments(None, None, None, options.get("config"), known).get("gradients") == "reduced_by_trainer"


def job_of(options):
    return str(options.get("job") or os.environ.get("OFFLOADD_JOB") or "default")


def pool_of(options):
    given = options.get("nvme_path") or os.environ.get("OFFLOADD_POOL")
    return absolute_paths(given) if given else str(given)
