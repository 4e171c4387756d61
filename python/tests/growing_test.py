"""Models that grow while they are trained: parameters that an optimizer gets after attach() become the job's."""

import os
import resource
import signal
import sys

import torch
from torch.optim import SGD, AdamW

import offloadd
from battery import Lines, case, copied_states_of, main
from programs import Programs

ROOM = {"types": ("fp32",), "memory": ("64MiB",)}  # the floor is of the model as it was
WIDTH = 48


class Tower(torch.nn.Module):
    """Of layers that may become more."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, 6000), torch.nn.Linear(6000, WIDTH)])
        self.register_buffer("sums", torch.zeros(70000))  # in the store
        self.head = torch.nn.Linear(WIDTH, 8)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randint(8, (8,), generator=generator)


def take_step(model, optimizer, step, clip=True):
    x, y = batch(step)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    with torch.no_grad():
        model.sums += loss.item()
    loss.backward()
    told = [loss.item()]
    if clip:
        told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    optimizer.step()
    optimizer.zero_grad()
    return told


def states_of_living(model, optimizer):
    return [{key: value.clone() for key, value in optimizer.state[p].items()} for p in model.parameters()]


def seeded(seed, make):
    torch.manual_seed(seed)
    return make()


# ---- What comes ---------------------------------------------------------------------------------

def appended(model):
    """A layer behind the others, with buffers, one of them in the store."""
    layer = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
    layer.register_buffer("more", torch.ones(80000))
    model.layers.append(layer)
    return layer


def inserted(model):
    """In front of the others, whose names it changes."""
    layer = torch.nn.Linear(WIDTH, WIDTH)
    model.layers.insert(0, layer)
    return layer


def widened(model):
    """A head that takes the place and the name of another."""
    former = model.head
    model.head = torch.nn.Linear(WIDTH, 12)
    with torch.no_grad():
        model.head.weight[:8] = former.weight
        model.head.bias[:8] = former.bias
    return model.head


def renewed(model):
    """One like the other."""
    model.head = torch.nn.Linear(WIDTH, 8)
    return model.head


GROWTHS = {2: appended, 4: widened, 6: inserted, 8: renewed}
STEPS = 10


def grow(model, step):
    return seeded(100 + step, lambda: GROWTHS[step](model))


def built(step):
    """The model, and its optimizer, that a run of so many steps has."""
    model = seeded(0, Tower)
    groups = [{"params": list(model.parameters()), "lr": 1e-2}]
    for at in (each for each in GROWTHS if each < step):
        groups.append({"params": list(grow(model, at).parameters())})
    living = {id(parameter) for parameter in model.parameters()}
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in living]
    return model, AdamW(groups, 1e-3)


def train(model, optimizer, first, end):
    told = []
    for step in range(first, end):
        if step in GROWTHS:
            optimizer.add_param_group({"params": list(grow(model, step).parameters())})
        told += take_step(model, optimizer, step)
    return told


@case(**ROOM)
def grows_again_and_again(run):
    model, optimizer = built(0)
    handle = run.attach(model, optimizer)
    told = train(model, optimizer, 0, STEPS)
    if run.offloaded:
        folder = os.path.join(run.folder, "saved")
        handle.save_weights(folder)
        fresh = seeded(1, lambda: built(STEPS)[0])
        import safetensors.torch

        saved = safetensors.torch.load_file(os.path.join(folder, "model.safetensors"))
        fresh.load_state_dict(saved)
        assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), model.state_dict().values()))
        with torch.no_grad():
            before = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.zero_()
        handle.load_weights(folder)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    return told, states_of_living(model, optimizer), list(model.state_dict().values())


def resumed_after(steps):
    """A run that ends after so many of them, and one that goes on with the model as it was then."""
    @case(**ROOM)
    def function(run):
        model, optimizer = built(0)
        run.attach(model, optimizer, job="grown")
        told = train(model, optimizer, 0, steps)
        if run.offloaded:
            run.end()
            model, optimizer = built(steps)
            assert run.attach(model, optimizer, job="grown").step == steps
        return told + train(model, optimizer, steps, STEPS), states_of_living(model, optimizer), list(model.state_dict().values())

    function.__name__ = f"resumed_after_{steps}_steps"


for each in (2, 3, 4, 5, 7, 9):
    resumed_after(each)


@case(**ROOM)
def a_store_over_two_pools_does_not_grow(run):
    """What comes later is refused before anything has changed, and the job trains on."""
    model, optimizer = built(0)
    pools = [os.path.join(run.folder, each) for each in ("one", "two")]
    if run.offloaded:
        for pool in pools:
            os.makedirs(pool)
    run.attach(model, optimizer, job="over-two", nvme_path=pools)
    told = take_step(model, optimizer, 0)
    if run.offloaded:
        try:
            optimizer.add_param_group({"params": list(torch.nn.Linear(8, 8).parameters())})
        except offloadd.Error as error:
            assert error.id == 1601 and "over several pools" in str(error), error
        else:
            raise AssertionError("a store over two pools has grown")
    return told + take_step(model, optimizer, 1)


@case(**ROOM)
def one_that_lacks_what_came_is_refused(run):
    model, optimizer = built(0)
    run.attach(model, optimizer, job="grown")
    told = train(model, optimizer, 0, 3)
    if run.offloaded:
        run.end()
        model, optimizer = built(0)
        try:
            run.attach(model, optimizer, job="grown")
        except offloadd.Error as error:
            assert error.id == 1602 and "added to the model" in str(error), error
        else:
            raise AssertionError("a model without its new layer")
        run.models.clear()
        model, optimizer = built(3)
        run.attach(model, optimizer, job="grown")
    return told + train(model, optimizer, 3, 4)


@case(**ROOM)
def parameters_of_no_module(run):
    model, optimizer = built(0)
    run.attach(model, optimizer)
    told = take_step(model, optimizer, 0)
    scales = [torch.nn.Parameter(torch.ones(WIDTH)), torch.nn.Parameter(torch.zeros(WIDTH))]
    optimizer.add_param_group({"params": scales})
    for step in (1, 2):
        x, y = batch(step)
        loss = torch.nn.functional.cross_entropy(model(x * scales[0] + scales[1]), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told, [scale.detach().clone() for scale in scales]


@case(**ROOM)
def another_list_of_as_many_parameters(run):
    model, optimizer = built(0)
    run.attach(model, optimizer)
    told = take_step(model, optimizer, 0)
    seeded(5, lambda: renewed(model))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return told + take_step(model, optimizer, 1) + take_step(model, optimizer, 2), states_of_living(model, optimizer)


@case(**ROOM)
def files_have_what_came_before_its_first_step(run):
    """Trained or not."""
    model, optimizer = built(0)
    handle = run.attach(model, optimizer)
    told = take_step(model, optimizer, 0)
    layer = seeded(106, lambda: appended(model))
    optimizer.add_param_group({"params": list(layer.parameters())})
    model.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    if run.offloaded:
        import safetensors.torch

        assert torch.equal(handle.gather(layer[0].weight), layer[0].weight)
        assert handle.parameter("layers.4.0.weight") is layer[0].weight
        handle.save_weights(os.path.join(run.folder, "saved"))
        assert safetensors.torch.load_file(os.path.join(run.folder, "saved", "model.safetensors")).keys() == model.state_dict().keys()
    return told + take_step(model, optimizer, 1)


@case(**ROOM)
def names_of_parameters_of_no_module(run):
    """Do not depend on what the groups have that the model has not any more."""
    def made(is_widened):
        model, scale = seeded(0, Tower), torch.nn.Parameter(torch.ones(WIDTH))
        if is_widened:
            seeded(104, lambda: widened(model))
        return model, scale, AdamW([{"params": list(model.parameters())}, {"params": [scale]}], 1e-2)

    def step(n):
        torch.nn.functional.cross_entropy(model(batch(n)[0] * scale), batch(n)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, scale, optimizer = made(is_widened=False)
    run.attach(model, optimizer, job="grown")
    step(0)
    optimizer.add_param_group({"params": list(grow(model, 4).parameters()), "lr": 1e-2})
    step(1)
    if run.offloaded:
        run.end()
        model, scale, optimizer = made(is_widened=True)
        run.attach(model, optimizer, job="grown")
    step(2)
    return list(model.state_dict().values()), scale.detach().clone()


class Points(torch.nn.Module):
    """As in Gaussian splatting: of as many rows as there are points, whose state is kept when there are more of them or fewer."""

    def __init__(self):
        super().__init__()
        self.places = torch.nn.Parameter(torch.randn(40, WIDTH))
        self.weights = torch.nn.Parameter(torch.randn(40, 8))

    def optimizer(self):
        return AdamW([{"params": [self.places], "name": "places"}, {"params": [self.weights], "lr": 1e-2, "name": "weights"}], 1e-3)

    def forward(self, x):
        return torch.tanh(x @ self.places.t()) @ self.weights

    def change(self, optimizer, values, moments):
        for group in optimizer.param_groups:
            former = group["params"][0]
            state = optimizer.state.get(former, None)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = moments(state[key])
            del optimizer.state[former]
            group["params"][0] = torch.nn.Parameter(values(former).requires_grad_(True))
            optimizer.state[group["params"][0]] = state
            setattr(self, group["name"], group["params"][0])


@case(types=("fp32", "bf16"), memory=ROOM["memory"])
def rows_that_come_and_go_with_their_moments(run):
    model = seeded(0, Points).to(run.dtype)
    optimizer = model.optimizer()
    run.attach(model, optimizer)
    told = []

    def train_points(first, end):
        for step in range(first, end):
            x, y = batch(step)
            loss = torch.nn.functional.cross_entropy(model(x.to(run.dtype)).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())

    train_points(0, 2)
    model.change(optimizer, lambda rows: torch.cat((rows, rows[:7] * 1.1)), lambda rows: torch.cat((rows, torch.zeros_like(rows[:7]))))
    model.change(optimizer, lambda rows: rows[torch.arange(47) % 5 != 0], lambda rows: rows[torch.arange(47) % 5 != 0])
    train_points(2, 4)
    model.change(optimizer, lambda rows: rows[torch.arange(37) % 2 == 0], lambda rows: rows[torch.arange(37) % 2 == 0])
    train_points(4, 6)
    return told, states_of_living(model, optimizer), list(model.state_dict().values())


@case(**ROOM)
def a_state_that_is_given_before_the_group_has_the_parameter(run):
    model, optimizer = built(0)
    run.attach(model, optimizer)
    told = take_step(model, optimizer, 0)
    former, group = model.head.bias, optimizer.param_groups[0]["params"]
    state = optimizer.state.pop(former)
    wider = torch.nn.Parameter(former.detach() * 2)
    optimizer.state[wider] = {key: value.clone() for key, value in state.items()}
    group[[each is former for each in group].index(True)] = model.head.bias = wider
    return told + take_step(model, optimizer, 1), states_of_living(model, optimizer)


@case(**ROOM)
def a_state_that_is_moved_behind_the_parameter(run):
    """To one that has taken its place in the group, and another width."""
    model, optimizer = built(0)
    run.attach(model, optimizer)
    told = take_step(model, optimizer, 0)
    former, group = model.head.weight, optimizer.param_groups[0]["params"]
    wider = torch.nn.Parameter(torch.cat((former.detach(), former.detach()[:3])))
    group[[each is former for each in group].index(True)] = model.head.weight = wider
    model.head.bias = None
    state = optimizer.state.pop(former)
    optimizer.state[wider] = {key: value if key == "step" else torch.cat((value, value[:3])) for key, value in state.items()}
    return told + [former in optimizer.state] + take_step(model, optimizer, 1), {k: v.clone() for k, v in optimizer.state[wider].items()}


@case(**ROOM)
def weight_norm_comes(run):
    """Whose direction is over the memory of the weight that it takes the place of; and goes."""
    model, optimizer = built(0)
    run.attach(model, optimizer)
    told = take_step(model, optimizer, 0)
    torch.nn.utils.parametrizations.weight_norm(model.head)
    torch.nn.utils.weight_norm(model.layers[0])
    optimizer.param_groups[0]["params"] = list(model.parameters())
    told += take_step(model, optimizer, 1) + take_step(model, optimizer, 2)
    torch.nn.utils.parametrize.remove_parametrizations(model.head, "weight")
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return told + take_step(model, optimizer, 3), states_of_living(model, optimizer), list(model.state_dict().values())


@case(**ROOM)
def a_weight_that_is_divided(run):
    """Into parameters that are slices of it."""
    model, optimizer = built(0)
    run.attach(model, optimizer)
    told = take_step(model, optimizer, 0)
    model.head.parts = torch.nn.ParameterList(torch.nn.Parameter(each) for each in model.head.weight.detach().split(4))
    model.head.weight = None
    model.head.forward = lambda x: torch.nn.functional.linear(x, torch.cat(list(model.head.parts)), model.head.bias)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return told + take_step(model, optimizer, 1) + take_step(model, optimizer, 2), list(model.state_dict().values())


@case(**ROOM, refused=1601)
def two_over_the_memory_of_one_are_refused(run):
    """In plain torch a step of each changes both."""
    model, optimizer = built(0)
    run.attach(model, optimizer)
    take_step(model, optimizer, 0)
    former = model.layers[0].weight
    model.layers[0].weight = torch.nn.Parameter(former.data)
    model.layers[0].other = torch.nn.Parameter(former.data)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    take_step(model, optimizer, 1)


def check_files(run, handle, model):
    """Offloaded they have what the model's state_dict() has."""
    if not run.offloaded:
        return
    import safetensors.torch

    folder = os.path.join(run.folder, f"saved{handle.step}")
    handle.save_weights(folder)
    stored, its = safetensors.torch.load_file(os.path.join(folder, "model.safetensors")), model.state_dict()
    assert stored.keys() == its.keys(), stored.keys() ^ its.keys()
    assert not [name for name, value in its.items() if not torch.equal(value, stored[name])]


@case(**ROOM)
def files_of_modules_that_have_changed_places(run):
    """Without growth, with normalisations; and heads that come back behind one."""
    model, optimizer = built(0)
    handle = run.attach(model, optimizer)
    told = take_step(model, optimizer, 0)
    model.layers.append(model.layers.pop(1))
    told += take_step(model, optimizer, 1)
    check_files(run, handle, model)
    former = model.head
    seeded(1, lambda: renewed(model))
    optimizer.add_param_group({"params": list(model.head.parameters())})
    told += take_step(model, optimizer, 2)
    model.head = former
    told += take_step(model, optimizer, 3) + [handle.gather("head.weight")]
    check_files(run, handle, model)
    if run.offloaded:
        whole = [value.clone() for value in model.state_dict().values()]
        with torch.no_grad():
            for value in model.state_dict().values():
                value.zero_()
        handle.load_weights(os.path.join(run.folder, f"saved{handle.step}"))
        assert all(map(torch.equal, whole, model.state_dict().values()))
    return told, list(model.state_dict().values())


@case(**ROOM, refused=1802)
def a_group_that_comes_when_the_job_is_closed(run):
    model, optimizer = built(0)
    handle = run.attach(model, optimizer, weights_at_close="memory")
    handle.close()
    model.layers.append(torch.nn.Linear(WIDTH, WIDTH))
    optimizer.add_param_group({"params": list(model.layers[-1].parameters())})


@case(**ROOM)
def buffers_that_are_assigned_anew(run):
    """Before the growth, and between it and the last step."""
    model, optimizer = built(0)
    handle = run.attach(model, optimizer)
    told = []
    for step in range(4):
        if step in (1, 3):
            seeded(step, lambda: appended(model))
            optimizer.add_param_group({"params": list(model.layers[-1].parameters())})
        if step == 1 and run.offloaded:
            handle.take_what_came()  # in one step with the group, and one without
        model.sums = model.sums + step
        told += take_step(model, optimizer, step)
    return told, list(model.state_dict().values())


@case(**ROOM)
def several_of_one_name_between_two_steps(run):
    model, optimizer = built(0)
    handle = run.attach(model, optimizer, job="grown")
    told = take_step(model, optimizer, 0)
    for seed in (1, 2, 3):
        seeded(seed, lambda: renewed(model))
        optimizer.add_param_group({"params": list(model.head.parameters())})
        if run.offloaded:
            handle.take_what_came()
    told += take_step(model, optimizer, 1)
    if run.offloaded:
        run.end()
        model = seeded(4, Tower)
        optimizer = AdamW([{"params": list(model.layers.parameters()), "lr": 1e-2}, {"params": list(model.head.parameters())}], 1e-3)
        run.attach(model, optimizer, job="grown")
    return told + take_step(model, optimizer, 2), states_of_living(model, optimizer), list(model.state_dict().values())


@case(**ROOM)
def a_model_with_other_names_before_the_first_step_is_refused(run):
    """The buffers of the last step have the names of before."""
    model, optimizer = built(0)
    handle = run.attach(model, optimizer, job="grown")
    told = take_step(model, optimizer, 0)
    if run.offloaded:
        inserted(model)
        handle.take_what_came()
        run.end()
        model = seeded(0, Tower)
        inserted(model)
        optimizer = AdamW(model.parameters(), 1e-3)
        try:
            run.attach(model, optimizer, job="grown")
        except offloadd.Error as error:
            assert error.id == 1602 and "no step with parameter" in str(error), error
        else:
            raise AssertionError("a model whose names are others")
        run.models.clear()
        model, optimizer = built(0)
        run.attach(model, optimizer, job="grown")
    return told + take_step(model, optimizer, 1)


@case(**ROOM)
def gradients_that_were_there_stay(run):
    """Of a backward before and one behind the new layer."""
    model, optimizer = built(0)
    run.attach(model, optimizer)
    told = take_step(model, optimizer, 0)
    x, y = batch(1)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.add_param_group({"params": list(grow(model, 2).parameters())})
    torch.nn.functional.cross_entropy(model(x), y).backward()
    told += [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return told


@case(**ROOM)
def momentum_that_was_loaded_stays(run):
    """Which no step has taken when the store is laid out anew."""
    model = seeded(0, Tower)
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9)
    run.attach(model, optimizer)
    told = take_step(model, optimizer, 0) + take_step(model, optimizer, 1)
    state = optimizer.state_dict()
    told += take_step(model, optimizer, 2)
    optimizer.load_state_dict(state)
    optimizer.add_param_group({"params": list(grow(model, 2).parameters())})
    return told + take_step(model, optimizer, 3), copied_states_of(optimizer)


@case(**ROOM)
def states_are_looked_at_and_loaded_before_the_first_step(run):
    model, optimizer = built(0)
    run.attach(model, optimizer)
    told = train(model, optimizer, 0, 2)
    layer = seeded(102, lambda: inserted(model))
    optimizer.add_param_group({"params": list(layer.parameters())})
    seen = [len(optimizer.state), layer.weight in optimizer.state, sorted(optimizer.state_dict()["state"])]
    state = optimizer.state_dict()
    at = len(list(model.parameters()))
    for index, parameter in ((at - 2, layer.weight), (at - 1, layer.bias)):
        state["state"][index] = {"step": torch.tensor(3.0), "exp_avg": torch.full_like(parameter, 0.5), "exp_avg_sq": torch.full_like(parameter, 0.25)}
    optimizer.load_state_dict(state)
    told += take_step(model, optimizer, 2)
    return told, seen, copied_states_of(optimizer)


@case(**ROOM)
def frozen_layers_come_too(run):
    model, optimizer = built(0)
    run.attach(model, optimizer)
    told = take_step(model, optimizer, 0)
    model.layers.append(torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    with torch.no_grad():
        model.layers[-1].weight.copy_(torch.eye(WIDTH))
        model.layers[-1].bias.zero_()
    optimizer.add_param_group({"params": list(seeded(102, lambda: inserted(model)).parameters())})
    told += take_step(model, optimizer, 1)
    model.layers[-1].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.layers[-1].parameters())})
    return told + take_step(model, optimizer, 2)


@case(**ROOM)
def gradients_on_the_drive_are_not_brought_to_memory(run):
    """The store is laid out anew when the group comes, and gradients stay where they are in between."""
    model, optimizer = built(0)
    handle = run.attach(model, optimizer, spill_gradients=True)
    told = take_step(model, optimizer, 0)
    optimizer.add_param_group({"params": list(grow(model, 2).parameters())})
    if run.offloaded:
        assert handle.plan()["gradients_spilled"] and id(model.layers[-1][0].weight) in handle.identities()
    return told + take_step(model, optimizer, 1) + take_step(model, optimizer, 2)


@case(types=("fp32",), memory=("floor",), refused=1301)
def more_than_fits_is_refused_with_what_it_needs(run):
    model, optimizer = built(0)
    run.attach(model, optimizer)
    take_step(model, optimizer, 0)
    wide = torch.nn.Linear(WIDTH, 60000)
    model.layers.append(wide)
    model.layers.append(torch.nn.Linear(60000, WIDTH))
    optimizer.add_param_group({"params": [*wide.parameters(), *model.layers[-1].parameters()]})
    take_step(model, optimizer, 1)


# ---- A daemon that is killed --------------------------------------------------------------------

def killed(pool, fault, fault_step):
    """This program, in a process of its own: prints what steps tell, behind their numbers. The daemon dies where the step lays its store out."""
    for at in (0, 3, 5, 7, 9):
        model, optimizer = built(at)
        try:
            handle = offloadd.attach(model, optimizer, nvme_path=pool, ram="64MiB", job="killed")
            break
        except offloadd.Error as error:
            if error.id != 1602:
                raise
    for step in range(handle.step, STEPS):
        if step == int(fault_step):
            os.environ["OFFLOADD_FAULT_POINT"] = fault
        if step in GROWTHS and step >= at:
            optimizer.add_param_group({"params": list(grow(model, step).parameters())})
        print(step, *take_step(model, optimizer, step), flush=True)
    print("end", *(value.double().sum().item() for value in model.state_dict().values()), flush=True)
    handle.close()


def run_killed(pool, fault="", fault_step=-1):
    done = programs.run(__file__, "killed", pool, fault, str(fault_step), OFFLOADD_SANDBOX="off", OMP_NUM_THREADS="1")
    assert fault or done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@case(**ROOM)
def a_daemon_that_dies_while_the_store_is_laid_out(run):
    if not run.offloaded:
        return
    pools = iter(range(10))

    def pool():
        path = os.path.join(run.folder, f"pool{next(pools)}")
        os.mkdir(path)
        return path

    whole = run_killed(pool())
    assert len(whole) == STEPS + 1, whole
    # Before it has its name, and after that: then no step has been taken with what came.
    for fault, step in (("job.laid_out_anew:1", 4), ("store.after_rename:1", 6), ("store.after_rename:1", 8)):
        its = pool()
        first = run_killed(its, fault, step)
        assert len(first) == step, (fault, first)
        rest = run_killed(its)
        assert first + rest == whole, (fault, step, whole, first, rest)


@case(**ROOM)
def modules_that_change_places_are_told_of(run):
    """Once, where others have their names then: not of those that are gone, or back."""
    model = seeded(0, lambda: torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]))
    optimizer = AdamW(model.parameters(), 1e-2)
    run.attach(model, optimizer)
    told = []

    def said():
        x, y = batch(0)
        with Lines() as lines:
            torch.nn.functional.cross_entropy(torch.nn.Sequential(*model)(x), y).backward()
            optimizer.step()
        told.append([line for line in lines if "changed places" in line])

    said()
    last = model.pop(2)
    said()
    model.append(last)
    said()
    assert not any(told), told
    model[0], model[2] = model[2], model[0]
    said()
    said()
    counts = [len(each) for each in told]
    assert counts == [0, 0, 0, int(run.offloaded), 0], told
    return list(model.state_dict().values())


# ---- What is written before, in a run that is killed ----------------------------------------------

def edited(pool, how, dtype, kill):
    """This program, in a process of its own, that writes weights before its model grows or thaws, and may be killed before its next step."""
    dtype, kill, (how, _, much) = getattr(torch, dtype), kill == "kill", how.partition(" ")
    model = seeded(0, lambda: torch.nn.ModuleDict({"body": torch.nn.Linear(WIDTH, WIDTH), "norm": torch.nn.BatchNorm1d(WIDTH)})).to(dtype)
    model.register_buffer("sums", torch.zeros(70000))
    tables = [torch.nn.Parameter(torch.ones(1024, 1024, dtype=dtype)) for _ in range(5 if much else 0)]  # more than a quarter of ram
    for number, table in enumerate(tables):
        model.register_parameter(f"table{number}", table)
    model["norm"].requires_grad_(how != "thaw")
    optimizer = AdamW(model.parameters(), 1e-2)
    handle = offloadd.attach(model, optimizer, nvme_path=pool, ram="64MiB", job="edited")
    print("begins", handle.step, handle.trainer_state.decode(), *(value.double().sum().item() for value in model.state_dict().values()), flush=True)
    for step in range(handle.step, 4):
        handle.trainer_state = str(step).encode()
        hidden = model["norm"](model["body"](torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)))
        model.sums += hidden.float().sum().item()
        if step == 2:
            with torch.no_grad():
                model["body"].weight.mul_(0.5)
                model["body"].bias.data += 0.25
                for table in tables:
                    table.mul_(0.5)
            hidden = model["norm"](model["body"](hidden.detach()))
            if how == "thaw":
                model["norm"].requires_grad_(True)
                hidden = model["norm"](hidden.detach()) + hidden
                if kill:
                    os.environ["OFFLOADD_FAULT_POINT"] = "store.after_rename:1"
            else:
                model["head"] = seeded(1, lambda: torch.nn.Linear(WIDTH, WIDTH)).to(dtype)
                optimizer.add_param_group({"params": list(model["head"].parameters())})
                handle.take_what_came()
                with torch.no_grad():
                    model["head"].weight.mul_(2)
                model["more"] = seeded(2, lambda: torch.nn.Linear(WIDTH, WIDTH)).to(dtype)
                optimizer.add_param_group({"params": list(model["more"].parameters())})
                handle.take_what_came()
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
        if "head" in model:
            hidden = model["more"](model["head"](hidden))
        loss = hidden.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item(), flush=True)
    print("end", *(value.double().sum().item() for value in model.state_dict().values()), flush=True)
    handle.close()


def refused(pool):
    """This program, in a process of its own: its model grows where the daemon may make no store."""
    model = seeded(0, lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)))
    optimizer = AdamW(model.parameters(), 1e-2)
    handle = offloadd.attach(model, optimizer, nvme_path=pool, ram="64MiB", job="refused")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    model.append(torch.nn.Linear(WIDTH, WIDTH))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    for use in (handle.take_what_came, lambda: model(torch.ones(2, WIDTH)), handle.statistics, lambda: str(model[0].weight.sum())):
        try:
            use()
            print("served")
        except offloadd.Error as error:
            print(error)


@case(**ROOM)
def what_is_refused_by_the_daemon_is_said_again(run):
    if not run.offloaded:
        return
    done = programs.run(__file__, "refused", run.folder, OFFLOADD_SANDBOX="off")
    first, *others = done.stdout.splitlines()
    assert first.startswith("OFD-") and "ulimit -f" in first, done
    assert len(others) == 3 and all(each.startswith("OFD-1802 ") and first.rstrip(".") in each and "Start the program again" in each for each in others), done


@case(**ROOM)
def what_was_written_before_it_is_of_the_next_step(run):
    """Neither edits nor the trainer's state are part of the epoch with which the store is laid out: a run that goes on writes them again."""
    if not run.offloaded:
        return
    for number, (how, dtype) in enumerate([("grow", "float32"), ("grow", "bfloat16"), ("thaw", "float32"), ("thaw", "bfloat16"),
                                           ("thaw much", "float32")]):

        def lines(pool, *kill):
            path = os.path.join(run.folder, f"{pool}{number}")
            os.makedirs(path, exist_ok=True)
            done = programs.run(__file__, "edited", path, how, dtype, *kill, OFFLOADD_SANDBOX="off", OMP_NUM_THREADS="1")
            assert (done.returncode == 0) == (kill == ("",)), (how, dtype, done.returncode, done.stderr)
            return done.stdout.splitlines()

        whole, first = lines("whole", ""), lines("cut", "kill")
        assert len(first) == 3, first
        rest = lines("cut", "")
        assert rest[0].startswith("begins 2 1 "), rest[0]
        assert first + rest[1:] == whole, (how, dtype, whole, first, rest)


if __name__ == "__main__":
    if sys.argv[1:2] == ["killed"]:
        killed(*sys.argv[2:])
    elif sys.argv[1:2] == ["edited"]:
        edited(*sys.argv[2:])
    elif sys.argv[1:2] == ["refused"]:
        refused(*sys.argv[2:])
    else:
        programs = Programs()
        sys.exit(main())
