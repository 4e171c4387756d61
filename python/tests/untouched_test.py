"""Scripts that know nothing of offloadd, as they are started with `python -m offloadd`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from battery import case, main
from programs import Programs, run_fresh, write_script

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
from private_daemon import private_daemon_of  # noqa: E402

ONE = {"types": ("fp32",), "memory": ("floor",)}


def run_script(run, text, *arguments, how=None):
    """(What its last line says, its messages)."""
    launcher = ("-m", "offloadd", "--pool", run.folder, "--ram", "128MiB") if run.offloaded else ()
    done = (how or programs.run)(*launcher, write_script(run.folder, text), *arguments, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


TRANSFORMED = """
import json, sys, torch
from torch.func import hessian, jacrev, vmap
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
told = []
if sys.argv[1] == "fake":
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(allow_non_fake_inputs=True):
        told.append(list(model(torch.ones(3, 2)).shape))
for step in range(4):
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(step))
    curvature = vmap({"jacrev": jacrev, "hessian": hessian, "fake": jacrev}[sys.argv[1]](lambda each: model(each).squeeze()))(x)
    loss = curvature.square().mean() + (model(x) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    told.append(loss.item())
print(json.dumps([told, [p.tolist() for p in model.parameters()], hasattr(optimizer, "_offload_part")]))
"""


def first_called_in_a_transform(how):
    """A case: the first forward pass is one of torch.func's, or one with tensors that have no values."""

    def function(run):
        (*told, is_attached), _ = run_script(run, TRANSFORMED, how)
        assert is_attached == run.offloaded
        return told

    function.__name__ = f"first_called_in_a_transform_{how}"
    case(function, **ONE)


for how in ("jacrev", "hessian", "fake"):
    first_called_in_a_transform(how)


SAME_PARAMETERS = """
import json, sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
first = torch.optim.Adam(model.parameters(), 1e-2)
if sys.argv[1] == "LBFGS":
    second = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4, line_search_fn="strong_wolfe")
else:
    second = torch.optim.Adam(model[2].parameters(), 1e-3)
told = []

def compute():
    model.zero_grad()
    x = torch.randn(16, 2, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    u = model(x)
    slope, = torch.autograd.grad(u.sum(), x, create_graph=True)
    loss = (slope[:, 1:] + u * slope[:, :1]).square().mean() + (u - 1).square().mean()
    loss.backward()
    return loss

for optimizer in [first] * 3 + [second] * 3 + [first]:
    told.append(optimizer.step(compute).item())
print(json.dumps([told, [p.tolist() for p in model.parameters()], hasattr(first, "_offload_part"), hasattr(second, "_offload_part")]))
"""


def second_optimizer_of_the_same_parameters(kind):
    """A case: both are made before the first step, as physics-informed networks have Adam and then LBFGS."""

    def function(run):
        (*told, first, second), messages = run_script(run, SAME_PARAMETERS, kind)
        assert (first, second) == (run.offloaded, False)
        assert (f"{kind} goes on beside" in messages) == run.offloaded, messages
        return told

    function.__name__ = f"second_optimizer_of_the_same_parameters_{kind}"
    case(function, **ONE)


second_optimizer_of_the_same_parameters("LBFGS")
second_optimizer_of_the_same_parameters("Adam")


TWIN = """
import copy, json, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
told = []
for step in range(6):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        twin = copy.deepcopy(model)
        other = torch.optim.AdamW(twin.parameters(), 1e-3)
        other.load_state_dict(optimizer.state_dict())
    if step > 2:
        twin(x).square().mean().backward()
        other.step()
        other.zero_grad()
print(json.dumps([[p.tolist() for p in [*model.parameters(), *twin.parameters()]], hasattr(optimizer, "_offload_part"), hasattr(other, "_offload_part")]))
"""


@case(**ONE)
def another_optimizer_that_goes_on_with_the_same_tensors(run):
    (told, first, second), messages = run_script(run, TWIN)
    assert (first, second) == (run.offloaded, False)
    assert ("goes on with the same tensors" in messages) == run.offloaded, messages
    return told


LAZY = """
import json, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LazyLinear(16), torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
model(torch.randn(4, 8))
told = []
for step in range(4):
    loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    told.append(loss.item())
print(json.dumps([told, [value.tolist() for value in model.state_dict().values()], hasattr(optimizer, "_offload_part")]))
"""


@case(**ONE)
def modules_that_get_their_shapes_in_the_first_forward_pass(run):
    """Which is not one that attaches."""
    (*told, attached), _ = run_script(run, LAZY)
    assert attached == run.offloaded
    return told


AT_EXIT = """
import atexit, io, json, torch

class Net(torch.nn.Linear):
    pass

def end():
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    kept = torch.load(file, weights_only=False)
    print(json.dumps([__package__, __spec__, type(kept) is Net, [p.tolist() for p in kept.parameters()]]))

torch.manual_seed(0)
atexit.register(end)
model = Net(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(3):
    model(torch.ones(1, 8)).square().mean().backward()
    optimizer.step()
"""


COMPILED = """
import json, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
compiled, told = torch.compile(model, backend="eager"), []
for step in range(3):
    loss = compiled(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    told.append(loss.item())
print(json.dumps(told))
"""


@case(**ONE)
def what_is_compiled_is_told_of_in_one_line(run):
    """torch warns of the hook that waits for the first forward pass."""
    told, says = run_script(run, COMPILED)
    if run.offloaded:
        assert says.count("torch.compile") == says.count("torch.compile runs eagerly") == 1, says
    return told


BARE = """
import json, torch
class Deep(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layer, self.rest = torch.nn.Linear(4, 4), Deep(depth - 1) if depth else None

    def forward(self, x):
        x = self.layer(x)
        return x if self.rest is None else self.rest(x)

looked_through = 0
def parameters(module, recurse=True, _parameters=torch.nn.Module.parameters):
    for each in _parameters(module, recurse):
        global looked_through
        looked_through += 1
        yield each

torch.manual_seed(0)
frozen, prompt, head = Deep(60), torch.nn.Parameter(torch.zeros(4)), torch.nn.Linear(4, 1)
optimizer, told = torch.optim.AdamW([prompt], 1e-2, fused=True), []
torch.nn.Module.parameters = parameters
for step in range(4):
    if step == 2:
        later = torch.optim.AdamW(head.parameters(), 1e-2, fused=True)
    loss = head(frozen(prompt)).square().mean()
    loss.backward()
    for each in (optimizer, later) if step >= 2 else (optimizer,):
        each.step()
        each.zero_grad()
    told.append(loss.item())
assert looked_through < 1500, looked_through
print(json.dumps(told))
"""


@case(**ONE)
def modules_inside_of_one_without_the_parameters_are_not_looked_through(run):
    return run_script(run, BARE)[0]


@case(**ONE)
def script_that_pickles_its_classes_at_its_exit(run):
    """And whose globals say how it was started, as PEP 366 has it."""
    return run_script(run, AT_EXIT, how=run_fresh)[0]


@case(**ONE)
def pool_with_a_job_that_is_damaged(run):
    """It is nothing to the others."""
    if run.offloaded:
        with open(os.path.join(run.folder, "damaged.offload"), "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.truncate(1 << 20)
    return run_script(run, AT_EXIT)[0]


NAMES_ITS_JOB = """
import json, offloadd, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
model(torch.ones(1, 8)).square().mean().backward()
optimizer.step()
print(json.dumps([[each.job, each.nvme_path, each.statistics()["budget_bytes"] >> 20] for each in offloadd.handles()]))
"""


@case(**ONE)
def what_a_configuration_says_counts_less_than_what_is_given(run):
    """Its job, too, which is otherwise named after the script."""
    if not run.offloaded:
        return
    path, config, other = (os.path.join(run.folder, name) for name in ("script.py", "offloadd.toml", "other"))
    os.mkdir(other)
    with open(path, "w", encoding="utf-8") as file:
        file.write(NAMES_ITS_JOB)
    with open(config, "w", encoding="utf-8") as file:
        file.write(f'pool = "{run.folder}"\njob = "of-file"\nmemory = {{ ram = "128MiB" }}\n')
    for arguments, variables, told in (((), {}, ["of-file", run.folder, 128]),
                                       ((), {"OFFLOADD_JOB": "of-variable", "OFFLOADD_RAM": "96MiB"}, ["of-variable", run.folder, 96]),
                                       (("--job", "given", "--pool", other), {"OFFLOADD_JOB": "of-variable"}, ["given", other, 128])):
        done = programs.run("-m", "offloadd", "--config", config, *arguments, path, OMP_NUM_THREADS="1", **variables)
        assert json.loads(done.stdout.splitlines()[-1]) == [told], done
    done = programs.run("-m", "offloadd", path, OMP_NUM_THREADS="1", OFFLOADD_CONFIG=config)  # that of the user, or of the machine
    assert json.loads(done.stdout.splitlines()[-1]) == [["of-file", run.folder, 128]], done
    with open(config, "a", encoding="utf-8") as file:
        file.write("jbo = 1")
    done = programs.run("-m", "offloadd", "--config", config, path)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("OFD-1003 "), done


IN_A_CLOSURE = """
import json, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.LBFGS(model.parameters(), float(sys.argv[1]), max_iter=2)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(1, 8)).square().mean()
    loss.backward()
    return loss
optimizer.step(closure)
print(json.dumps([optimizer.param_groups[0]["lr"], hasattr(optimizer, "_offload_part")]))
"""


@case(**ONE)
def rate_of_an_optimizer_whose_first_forward_pass_is_in_its_step(run):
    """It stays the script's in a run that goes on, as that of others does: no step has changed it."""
    for rate in (0.3, 0.05):
        assert run_script(run, IN_A_CLOSURE, str(rate))[0] == [rate, run.offloaded]


HOW_STARTED = """
import json, sys
from {neighbour} import there
its = globals()
print(json.dumps([sys.argv, sys.path[0], __name__, its.get("__file__"), its.get("__package__"), __spec__ and __spec__.name, its.get("__cached__", "none"),
                  type(__loader__).__name__, sys.modules["__main__"].__dict__ is its, sys._getframe().f_code.co_filename, sorted(its), there]))
"""
TRAINS = """
import json, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
for step in range(3):
    model(torch.ones(1, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps([[p.tolist() for p in model.parameters()], sys.argv, hasattr(optimizer, "_offload_part")]))
"""


@case(**ONE)
def started_in_each_way_that_python_knows(run):
    """A file, a module, a package, a folder, a text, the standard input: as Python itself starts them, to what is behind them and where modules are."""
    launcher = ("-m", "offloadd", "--pool", run.folder, "--ram=64MiB") if run.offloaded else ()
    folder = os.path.join(tempfile.gettempdir(), "offloadd-started")
    shutil.rmtree(folder, ignore_errors=True)  # the same one in both runs
    for path, neighbour in (("", "neighbour"), ("package", ".neighbour"), ("package/inner", "..neighbour"), ("folder", "neighbour")):
        os.makedirs(os.path.join(folder, path), exist_ok=True)
        for name, text in (("__init__.py", ""), ("neighbour.py", f"there = {path!r}"), ("__main__.py", HOW_STARTED.format(neighbour=neighbour)),
                           ("tell.py", HOW_STARTED.format(neighbour=neighbour))):
            with open(os.path.join(folder, path, name), "w", encoding="utf-8") as file:
                file.write(text)
    text, told = HOW_STARTED.format(neighbour="neighbour"), []
    try:
        for arguments in (("tell.py", "-x"), ("-m", "package.tell", "--ram", "1"), ("-mpackage", "-m"), ("-m", "package.inner"), ("folder", "-c"),
                          ("-c", text, "--pool", "x"), ("-", "a"), ()):
            done = subprocess.run([sys.executable, *launcher, *arguments], input=text, capture_output=True, text=True, check=False, cwd=folder,
                                  env={**os.environ, "OFFLOADD_DISABLE": "1"})
            assert done.returncode == 0, done.stderr
            told.append(json.loads(done.stdout))
    finally:
        shutil.rmtree(folder)
    return told


@case(**ONE)
def texts_are_trained(run):
    """Each is a job of its own."""
    launcher, told = ("-m", "offloadd", "--pool", run.folder, "--ram", "128MiB") if run.offloaded else (), []
    for text in (TRAINS, f"# another\n{TRAINS}"):
        *said, is_attached = json.loads(run_fresh(*launcher, "-c", text, "-m", OMP_NUM_THREADS="1").stdout)
        assert is_attached == run.offloaded
        told.append(said)
    return told


KEPT = """
import json, torch
told = []

def make():
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU(), torch.nn.Linear(64, 4))

def train(model, optimizer, loss_of):
    for step in range(3):
        loss = loss_of(model(x := torch.randn(8, 16, generator=torch.Generator().manual_seed(step))), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return hasattr(optimizer, "_offload_part")

def small(y, _):
    return y.square().mean()

def as_the_teacher(y, x):
    return (y - teacher(x).detach()).square().mean()

class Headed(torch.nn.Module):
    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body.requires_grad_(False).eval(), head

    def forward(self, x):
        return self.head(self.body(x)) if isinstance(self.head, torch.nn.Module) else self.body(x) * self.head

torch.manual_seed(0)
teacher, student = make(), make()
adamw = torch.optim.AdamW(teacher.parameters(), 1e-2)
attached = [train(teacher, adamw, small)]
teacher.eval()
attached.append(train(student, torch.optim.AdamW(student.parameters(), 1e-2), as_the_teacher))
for head in torch.nn.Linear(4, 2), torch.nn.Parameter(torch.ones(4)):
    headed = Headed(student, head)
    parameters = list(head.parameters()) if isinstance(head, torch.nn.Module) else [head]
    attached.append(train(headed, torch.optim.SGD(parameters, 0.1, momentum=0.9), small))
attached.append(train(teacher, adamw, small))
print(json.dumps([told, [value.tolist() for each in (teacher, headed) for value in each.state_dict().values()], attached]))
"""


@case(**ONE)
def models_that_are_kept_while_others_are_trained(run):
    """A teacher, a student, a new head of that; what no module has alone is told of."""
    (*told, attached), messages = run_script(run, KEPT)
    assert attached == [run.offloaded] * 3 + [False, run.offloaded], attached
    assert not run.offloaded or {f"script{end}.offload" for end in ("", "-2", "-3")} == {
        name for name in os.listdir(run.folder) if name.endswith(".offload")}
    assert ("what an SGD has trained stayed in memory" in messages) == run.offloaded, messages
    assert messages.count("with as much ram again") == 2 * run.offloaded, messages
    return told


HOLDS_ANOTHER = """
import json, torch
torch.manual_seed(0)

class Sharp(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"rho": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        loss = torch.enable_grad()(closure)()
        moved = [(p, 0.1 * p.grad) for group in self.param_groups for p in group["params"]]
        for p, by in moved:
            p.add_(by)
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p, by in moved:
            p.sub_(by)
        self.base.step()
        return loss

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
optimizer, told = Sharp(model.parameters()), []
for step in range(4):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        return loss
    told.append(optimizer.step(closure).item())
print(json.dumps([told, [p.tolist() for p in model.parameters()], hasattr(optimizer, "_offload_part")]))
"""


@case(**ONE)
def optimizer_that_another_holds_is_not_told_of(run):
    """What it keeps is part of the job, with the other's."""
    (*told, is_attached), messages = run_script(run, HOLDS_ANOTHER)
    assert is_attached == run.offloaded
    assert "goes on beside" not in messages, messages
    return told


# Moments of 48 MiB: more than a quarter of ram, and a file that is mapped when it is loaded.
ITS_OWN_CHECKPOINT = """
import json, os, signal, sys, torch
path, kill_at, dtype = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2048, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 2048)).to(dtype)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
begin = 0
if os.path.exists(path):
    kept = torch.load(path)
    optimizer.load_state_dict(kept["optimizer"])
    model.load_state_dict(kept["model"])
    begin = kept["step"]
losses = []
for step in range(begin, 8):
    x = torch.randn(4, 2048, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step + 1 in (2, 5):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, path)
    if step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps([losses[-2:], [p.double().sum().item() for p in model.parameters()], model[0].weight[0].tolist()]))
"""


def wait_until_no_daemon(trainer):
    """That of a process that was killed drains, and holds the store until it has."""
    while private_daemon_of(trainer) is not None:
        time.sleep(0.05)


def goes_on_at_its_own_checkpoint(name, dtype, kills, begins_anew=False):
    """A case: the script is killed behind its checkpoint, and goes on there as if it had not been; also with masters and moments of 16-bit
    weights, and in a job that knows nothing of it."""

    def function(run):
        path = os.path.join(run.folder, "kept.pt")
        launcher = ("-m", "offloadd", "--pool", run.folder, "--ram", "128MiB")
        environment = {} if run.offloaded else {"OFFLOADD_DISABLE": "1"}
        for kill_at in kills if run.offloaded else ():
            killed = programs.start_script(run.folder, ITS_OWN_CHECKPOINT, path, str(kill_at), dtype, launcher=launcher)
            assert killed.wait() == -signal.SIGKILL
            wait_until_no_daemon(killed.pid)
            launcher += ("--job", f"behind-{kill_at}") if begins_anew else ()
        script = write_script(run.folder, ITS_OWN_CHECKPOINT)
        done = programs.start(*launcher, script, path, "-1", dtype, **environment, OMP_NUM_THREADS="1")
        text, errors = done.communicate()
        assert done.returncode == 0, errors
        assert "rounded" not in errors, errors
        return json.loads(text.splitlines()[-1])

    function.__name__ = name
    case(function, **ONE)


goes_on_at_its_own_checkpoint("its_own_checkpoint_with_many_moments", "float32", [3, 6])
goes_on_at_its_own_checkpoint("its_own_checkpoint_with_many_moments_bf16", "bfloat16", [3, 4, 6])
goes_on_at_its_own_checkpoint("its_own_checkpoint_in_a_new_job_bf16", "bfloat16", [3, 6], begins_anew=True)


if __name__ == "__main__":
    programs = Programs()
    sys.exit(main())
