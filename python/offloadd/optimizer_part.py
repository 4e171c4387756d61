"""One optimizer of a job, whose step runs in the daemon: what it is told of groups, and the state that it shows and takes."""

import collections
import itertools
import logging
import sys
import weakref

import torch
from torch.optim.optimizer import _get_scalar_dtype

from . import served
from .errors import Error, class_of
from .optimizer import forget_former_steps, offloaded_class, refuse_unless_kept, swap_class, wrap_again
from .optimizer_state import STEP, ParameterState, StateOfAll, is_of_another, refuse_write
from .recipes import check_arithmetic, is_narrow, is_table, number, parameters_of, refuse


_log = logging.getLogger("offloadd")

UNKNOWN = float("nan")  # Part.unscale between two steps of the engine that scales the loss


def check_unscale(factor):
    """Before a step."""
    if factor is not None and factor != factor:
        raise Error.of(1002, "optimizer.step() of gradients that have the loss scale of fp16", "Call engine.step(), which takes it out of them")


def _check_lies_alike(parameter, gradient):
    """For a fused kernel of torch, which goes through both as they are in memory, and so would add elements to others than theirs."""
    if any(size > 1 and there != here for size, there, here in zip(parameter.shape, parameter.stride(), gradient.stride())):
        raise Error.of(1601, f"the gradient that a parameter of shape {list(parameter.shape)} was given lies in memory in another order (strides "
                             f"{gradient.stride()}, and the parameter's are {parameter.stride()}): torch's kernels with fused=True add its elements "
                             "to others than theirs", "Give .grad a copy in the parameter's order, torch.empty_like(p).copy_(g), or leave fused out")


def _is_elsewhere(state):
    """Whether a state is that of Part.state_dict() with texts: its tensors are in the store of a job."""
    return any(isinstance(value, str) for value in state.values())


def is_cast_of(weight, master):
    """Whether a narrow weight is that of an fp32 master."""
    return weight.shape == master.shape and torch.equal(weight, master.to(weight))


def numbered(state_dict, optimizer):
    """(its number in the dictionary, parameter) of each."""
    return zip(itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"]), parameters_of(optimizer))


def masters_in(state_dict, optimizer):
    """[(parameter, its master)] of narrow weights, as Part.state_dict() has put them there."""
    masters = (state_dict.get("offloadd") or {}).get("masters") or {}
    return [(parameter, masters[key]) for key, parameter in numbered(state_dict, optimizer) if key in masters and is_narrow(parameter)]


def _is_same(value, other):
    """Of two entries of a state; numbers may be tensors."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return number(value) == number(other)
    return value.dtype == other.dtype and torch.equal(value.cpu(), other.cpu())


def _references_to(states):
    """(parameter, key, tensor, its storage) of what an optimizer keeps, which nothing here keeps alive."""
    return [(parameter, key, weakref.ref(value), weakref.ref(value.untyped_storage())) for parameter, state in states.items() if isinstance(state, dict)
            for key, value in state.items() if isinstance(value, torch.Tensor) and value.layout == torch.strided]


def _goes_on_with(parameter, key, value):
    """Whether torch keeps a tensor as it is when it loads it."""
    kind = torch.float32 if is_narrow(parameter) else parameter.dtype
    return isinstance(value, torch.Tensor) and (key == STEP or (value.dtype, value.device) == (kind, parameter.device))


class Part:
    """One optimizer of a job: reads its groups, says them to the engine, shows its state."""

    is_foreign = False

    def __init__(self, handle, optimizer, recipe):
        self.handle, self.optimizer, self.recipe = handle, optimizer, recipe
        self._without_momentum = set()  # groups whose first step was one without
        self._checked = 0
        self._named_once = None  # how many parameters the groups had when each was found to be there once
        self._replaced_at, self._replacements = None, 0  # the job's step, how often
        self._moments_at = None  # the job's step when moments were given to it, which are part of the next one
        self._begun_at, self._versions = 0, []  # the job's step and the parameters' versions when it was attached
        self._moments_of = None  # another step of the job, whose moments were loaded beside its own weights
        self._given_masters = []  # (parameter, master) of a checkpoint whose state was loaded since the last step
        self.is_loading = False
        self._state = StateOfAll(self)
        self._begun = {}  # ids of parameters, in the order in which torch would have begun their states
        self._group_at = {}  # id of a parameter -> (it, the group that has it, or had it last)
        self._planes_at = {}  # id of a group -> (it, what its parameters keep by the options that it has had)
        self._counts_of_empty = {}  # id of a parameter without elements, which is no tensor of the job -> how often it was updated
        self.unscale = None  # with a scaled loss: a number that multiplies fp16 gradients in the update, in fp32
        # Of a copy of an attached optimizer, until it is attached itself.
        self._masters = dict(optimizer._masters.values()) if hasattr(optimizer, "_masters") else {}

    def swap(self):
        """From now on the instance is ours."""
        optimizer, had_masters = self.optimizer, bool(self._masters)
        self._count_empty(optimizer.state)
        self._note_begun(optimizer.state)
        former, dictionary = _references_to(optimizer.state), optimizer.__dict__.get("state")
        optimizer.__dict__.pop("_masters", None)
        self._masters = {}
        swap_class(optimizer, offloaded_class(getattr(type(optimizer), "_class_of_copies", type(optimizer))))
        optimizer._offload_part = self
        optimizer._step_supports_amp_scaling = False  # else GradScaler leaves infinities and the scale to a fused step
        optimizer.__dict__["state"] = self._state
        self._checked = len(optimizer.param_groups)
        self._begun_at = self.handle.step
        self._versions = [parameter._version for parameter in parameters_of(self.optimizer)]
        self._note_groups()
        for group in optimizer.param_groups:
            self._planes(group)
        self._adopt_former(former, had_masters)
        if dictionary is not None and sys.getrefcount(dictionary) > 2:  # this one, and that of the question
            _log.warning("offloadd: somebody has the dictionary that the optimizer's state was before attach() (a wrapper around it, made before): it is "
                         "not filled any more. Attach before wrapping, or look at optimizer.state")

    def release(self):
        optimizer = self.optimizer
        optimizer.__class__ = type(optimizer)._offload_class
        forget_former_steps(optimizer)
        optimizer.__dict__["state"] = collections.defaultdict(dict)
        del optimizer._offload_part

    def leave(self):
        """The instance is as it was before swap(), for another to have; returns its state."""
        self.settle()
        optimizer, wrapped = self.optimizer, self.optimizer.__dict__.pop("step", None)  # a scheduler's
        states = {parameter: {key: self.gather(parameter, key) for key in keys} for parameter, keys in self.keys_of_all()}
        self.end()
        self.release()
        if wrapped is not None:
            wrap_again(optimizer, type(optimizer))
        return states

    # ---- The step ----

    def group_values(self):
        rows = [self.recipe.values(group) for group in self.optimizer.param_groups]
        if self.unscale is not None:
            for row in rows:
                row[self.recipe.parameters.index("unscale")] = self.unscale
        return rows

    def foresee(self):
        """After a scheduler, before the backward: the hyper-parameters that updates may take which begin in the backward."""
        if not self.handle.is_open or self.unscale is not None:  # which is known when all of the backward is done
            return
        try:
            values = self.group_values()
        except Error:  # step() says it
            return
        self.handle.foresee(self.recipe.kind, values)

    def check_groups(self):
        """Of groups that were added since."""
        for group in self.optimizer.param_groups[self._checked:]:
            self.recipe.values(group)
            for parameter in group["params"]:
                if not self._is_known(parameter):
                    self.handle.check_grows(parameter)
        self._checked = len(self.optimizer.param_groups)
        self.check_named_once()
        self._note_groups()

    def _is_known(self, parameter):
        return id(parameter) in self.handle.identities() or is_table(parameter)

    def take_early(self):
        """Gradients on the drive would all be in memory while the store is laid out anew: better before there are any."""
        new = self._unknown()
        if new and self.handle.plan()["gradients_spilled"] and self.handle.names_all(new):
            self.take_what_came()

    def _unknown(self):
        """Every step asks."""
        identities = self.handle.identities()
        return [parameter for parameter in parameters_of(self.optimizer) if id(parameter) not in identities and not is_table(parameter)]

    def take_what_came(self):
        """Parameters that groups have got since, or that took the places of others there, become the job's."""
        new = self._unknown()
        if new:
            self.handle.check_grows(new[0])
            self.handle.grow()

    def check_named_once(self):
        """OFD-1002 for a parameter that torch would update twice."""
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if count == self._named_once:
            return
        seen = set()
        for parameter in parameters_of(self.optimizer):
            if id(parameter) in seen:
                raise Error.of(1002, f"a parameter of shape {list(parameter.shape)} is in two places of the optimizer's groups, and every step would "
                                     "update it twice (the parameters of two modules with tied weights have it twice)",
                               "Name it once, as parameters() of the whole model does")
            seen.add(id(parameter))
        self._named_once = count

    def _check_momentum(self, values):
        """torch begins a momentum buffer when momentum is first not 0; the daemon at a parameter's first update. One that has begun waits, here
        as there, through steps without."""
        if self.recipe.kind != "sgd":
            return
        at = self.recipe.parameters.index("momentum")
        for i, row in enumerate(values):
            if i in self._without_momentum:
                if row[at] != 0:
                    refuse("momentum that begins after steps without it", "Give SGD its momentum from the first step on")
                continue
            group = self.optimizer.param_groups[i]
            counts = list(map(self.handle.update_count, group["params"])) if row[at] == 0 else ()
            if not all(counts):
                self._without_momentum.add(i)
                if not any(counts):
                    self._planes_at.pop(id(group), None)

    def step(self, **others):
        given = {name: value for name, value in others.items() if value is not None}
        if given:
            refuse(f"step() with {', '.join(given)}", "Call step() without arguments, or with a closure")
        check_arithmetic()
        self.check_groups()
        self.take_what_came()
        self._check_weights_are_loaded()
        self._take_masters()
        check_unscale(self.unscale)
        values = self.group_values()
        self._check_momentum(values)
        groups = [[p for p in group["params"] if not is_table(p)] for group in self.optimizer.param_groups]
        if self._add_sparse(groups, values):
            self.handle.bring_here(self).step_at_once()
            return
        empty = [parameter for parameters in groups for parameter in parameters if not parameter.numel() and parameter.grad is not None]
        # torch's fused kernels write weights without counting it: a graph from before the step goes backward after it.
        self.handle.apply(self.recipe.kind, groups, values, [not group.get("fused") for group in self.optimizer.param_groups])
        for parameter in empty:
            self._counts_of_empty[id(parameter)] = self.count_of_empty(parameter) + 1

    def _count_empty(self, states):
        """Of `states` that a new job begins with; in one that goes on they were updated as the others of their groups."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.numel():
                    own = int(number((states.get(parameter) or {}).get(STEP, 0)))
                    self._counts_of_empty[id(parameter)] = max(map(self.handle.update_count, group["params"])) if self.handle.step else own

    def count_of_empty(self, parameter):
        return self._counts_of_empty.get(id(parameter), 0)

    def _add_sparse(self, groups, values):
        """torch adds the elements of a sparse gradient one by one, which rounds otherwise than their sums do. SGD that keeps nothing is such
        an addition to the weight: it is made here, and the parameters leave their groups for this step; Adagrad's is the engine's. Of
        narrow parameters, and with several ranks, which add them so, the dense sum is taken. Gradients that fused kernels would mix up are
        refused on the way. Returns whether it has to run in this process instead, as SGD that keeps sparse buffers."""
        sparse, comes_here = [], False
        for group, parameters, row in zip(self.optimizer.param_groups, groups, values):
            found, is_fused = [], group.get("fused")
            for p in parameters:
                grad = p.grad  # every step comes here: an access to a gradient costs, so there is one of each
                if grad is None:
                    continue
                self._begun.setdefault(id(p))
                if grad.layout != torch.strided:
                    found.append(p)
                elif is_fused and grad.stride() != p.stride():
                    _check_lies_alike(p, grad)
            if not found:
                continue
            options = dict(zip(self.recipe.parameters, row))
            self._check_takes_sparse(group, found[0])
            if self.handle.adds_gradients:
                continue
            found = [p for p in found if not is_narrow(p)]
            if self.recipe.kind == "adagrad" or not found:
                continue
            if options["momentum"] != 0:
                self._check_may_come_here(found[0])
                comes_here = True
                continue
            for parameter in found:
                if not parameter.grad._values().isfinite().all():
                    raise Error.of(1701, f"the gradient of a parameter of shape {list(parameter.shape)} holds NaN or infinity, the step was not taken",
                                   "Lower the learning rate or clip; the last epoch is intact")
                sparse.append((parameter, options["lr"] if options["maximize"] else -options["lr"]))
            parameters[:] = [p for p in parameters if not any(p is each for each, _ in sparse)]
        for parameter, alpha in sparse if not comes_here else ():
            parameter.add_(parameter.grad, alpha=alpha)
        return comes_here

    def _check_takes_sparse(self, group, parameter):
        """OFD-1601 where torch takes no sparse gradients."""
        if self.recipe.kind not in ("sgd", "adagrad"):
            why, way = f"{self.recipe.name} takes none", "train it with SparseAdam, Adagrad or SGD"
        elif group["weight_decay"] != 0:
            why, way = f"{self.recipe.name} with weight_decay takes none", "give it a group without weight_decay"
        elif group.get("fused"):
            why, way = f"{self.recipe.name} with fused=True takes none", "leave fused out"
        else:
            return
        raise Error.of(1601, f"the gradient of a parameter of shape {list(parameter.shape)} is sparse, and {why}, as in memory",
                       f"Make the embedding with sparse=False, or {way}")

    def _check_may_come_here(self, parameter):
        """OFD-1601 where an optimizer whose gradients have been dense until now cannot go on in this process."""
        if self.unscale is not None:
            why = "the gradients have the loss scale of fp16"
        elif self.handle.world_size > 1:
            why = "the job has several ranks"
        elif any(is_narrow(each) for each in parameters_of(self.optimizer)):
            why = "others of its parameters have fp32 masters in the job"
        elif self.handle.step > 0 and not self.handle.is_state_small():
            why = f"the job is at step {self.handle.step}, and what was kept until then does not fit into memory"
        else:
            return
        raise Error.of(1601, f"the gradient of a parameter of shape {list(parameter.shape)} is sparse, of which SGD with momentum keeps a sparse buffer in this "
                             f"process: nothing has said so before its steps, and {why}",
                       "Make it a torch.nn.Embedding or EmbeddingBag with sparse=True, which is seen when it is attached, by one rank; or train it with "
                       "sparse=False, or without momentum")

    # ---- State ----

    def age(self):
        """Changes whenever states() may."""
        return self.handle.step, sum(len(group["params"]) for group in self.optimizer.param_groups), self._replacements

    def _note_groups(self):
        """Before a step: a parameter that leaves its group keeps its state, as in torch."""
        self._group_at.update((id(parameter), (parameter, group)) for parameter, group in self._groups_of_parameters())

    def _groups_of_parameters(self):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, group

    def _groups_of_former(self):
        """Of parameters that no group has any more, and the job has a state of."""
        has = set(map(id, parameters_of(self.optimizer)))
        return [(parameter, group) for key, (parameter, group) in self._group_at.items() if key not in has and self.handle.update_count(parameter)]

    def _groups_of_all(self):
        return itertools.chain(self._groups_of_parameters(), self._groups_of_former())

    def _group_of(self, parameter):
        """None where there never was one."""
        now = next((group for each, group in self._groups_of_parameters() if each is parameter), None)
        return now if now is not None else self._group_at.get(id(parameter), (parameter, None))[1]

    def possible_keys_of(self, parameter):
        """What torch keeps of a parameter once it was updated; nothing of what was never in a group."""
        group = self._group_of(parameter)
        return self._all_keys(group) if group is not None else []

    def may_get(self, parameter):
        """Whether it is neither the job's nor in a group: a program may give it a state before it puts it there."""
        return not self._is_known(parameter) and not self.has(parameter)

    def keys_of(self, parameter):
        """What torch keeps of a parameter now; of one that was never updated nothing, but Adagrad's sums are there from the beginning."""
        return self._keys_of(parameter, self._group_of(parameter))

    def _keys_of(self, parameter, group):
        if self.handle.update_count(parameter) == 0 and (self.recipe.kind != "adagrad" or is_table(parameter)):
            return []
        return self._all_keys(group)

    def _all_keys(self, group):
        return [STEP] * self.recipe.counts + self._planes(group)

    def what_it_keeps(self):
        """Its rule's name, and names of planes: those of a job that goes on have to be the same."""
        return [self.recipe.kind, sorted({name for group in self.optimizer.param_groups for name in self._planes(group)})]

    def _planes(self, group):
        """What was begun stays in the state where an option (momentum) pauses."""
        _, planes = self._planes_at.setdefault(id(group), (group, {}))
        planes.update(dict.fromkeys(self.recipe.planes(self.recipe.values(group))))
        return list(planes)

    def keys_of_all(self):
        """(parameter, what torch keeps of it) for every one that has something, in torch's order."""
        keys = ((parameter, self._keys_of(parameter, group)) for parameter, group in self._groups_of_all())
        kept = [each for each in keys if each[1]]
        for parameter, _ in kept:
            self._begun.setdefault(id(parameter))
        places = {each: place for place, each in enumerate(self._begun)}
        return sorted(kept, key=lambda each: places[id(each[0])])

    def _keys_by_id(self):
        return {id(parameter): keys for parameter, keys in self.keys_of_all()}

    def _note_begun(self, states):
        """Of `states` that a new job begins with; in one that goes on those with most updates were first."""
        if self.handle.step == 0:
            self._begun = dict.fromkeys(map(id, states))
        elif self.recipe.kind != "adagrad":  # which has begun all of them when it was made
            self._begun = dict.fromkeys(map(id, sorted(parameters_of(self.optimizer), key=self.handle.update_count, reverse=True)))

    def forget(self, parameters):
        """They have no state any more; what they have later begins then."""
        for parameter in parameters:
            self._begun.pop(id(parameter), None)

    def states(self):
        """(parameter, its state) for every one that has one."""
        return [(parameter, ParameterState(self._state, parameter, keys)) for parameter, keys in self.keys_of_all()]

    def first_sum(self, parameter):
        """What Adagrad has before a parameter's first step."""
        kind = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        return torch.full_like(parameter, self._group_of(parameter)["initial_accumulator_value"], dtype=kind, requires_grad=False)

    def gather(self, parameter, key):
        """One tensor of a parameter's state, where torch keeps it: a copy of what the job has."""
        count = self.handle.update_count(parameter)
        if key == STEP:
            is_fused = bool(self._group_of(parameter).get("fused"))
            return torch.tensor(float(count), dtype=_get_scalar_dtype(is_fused), device=parameter.device if is_fused else None)
        return self.handle.gather_stored(parameter, key).to(parameter.device) if count else self.first_sum(parameter)

    def settle(self):
        """Before a step, and before anybody asks the job: gives it the state that the program has written, or put in the place of the state."""
        theirs = self.optimizer.__dict__.get("state")
        if theirs is not self._state:
            self.optimizer.__dict__["state"] = self._state
            self.adopt(theirs)
        self._state.flush()

    def end(self):
        """Before the job is closed."""
        self._state.end()

    def state_dict(self, whole):
        """torch's, and beside it what is the job's: which it is, and masters of narrow weights. Where the state is large, tensors are gathered when
        somebody asks for their values; or there is a text in the place of each, which no other optimizer can load (leads_from_checkpoints())."""
        mark = self.handle.mark()
        is_small = self.handle.is_state_small()
        if is_small or not self.handle.leads_from_checkpoints():
            # As in torch, what changes with steps.
            whole["state"] = {index: dict(state.items()) if is_small else state.late() for index, state in whole["state"].items()}
            masters = self._masters_by_index()
            mark = {**mark, "masters": masters} if masters else mark
        else:
            text = f"in the store of offloadd's job {mark['job']}, at step {mark['step']}"
            whole["state"] = {
                index: {name: state[name].clone() if name == STEP else text for name in state}
                for index, state in whole["state"].items()
            }
        whole["offloadd"] = mark
        return whole

    def _masters_by_index(self):
        """Numbered as in torch's dictionary: of those that a step has made others than the weights."""
        numbered = enumerate(dict.fromkeys(parameters_of(self.optimizer)))
        return {index: self._state.late(parameter, "master") for index, parameter in numbered
                if is_narrow(parameter) and self.handle.update_count(parameter)}

    def note_masters(self, masters):
        """Those of a checkpoint, masters_in(), for the next step."""
        self._given_masters = masters

    def _take_masters(self):
        """Where the weights are that checkpoint's, too: they may have been loaded before its state or after it."""
        given, self._given_masters = self._given_masters, []
        if given and all(is_cast_of(served.copy_of(parameter), master) for parameter, master in given):
            for parameter, master in given:
                if not torch.equal(self.handle.gather_stored(parameter, "master"), master.cpu()):
                    self.write(parameter, "master", master)

    # ---- State from memory ----

    def kept_in_memory(self):
        """What the optimizer has kept before it is attached, as the engine takes it: of the parameters that it has updated."""
        masters = self._masters

        def state_of(parameter):
            state = self.optimizer.state.get(parameter)
            return {**(state or {}), "master": masters[parameter]} if parameter in masters else state

        return self._as_columns(row for row in self._rows(state_of) if row[1] or row[2])

    def _adopt_former(self, former, had_masters):
        """What somebody still has of the state from before attach(), _references_to(), shows the job's. 16-bit weights have had none in fp32, but with
        masters."""
        keys, rows, others = self._keys_by_id(), [], []
        for parameter, key, value, storage in former:
            value, has_none = value(), is_narrow(parameter) and not had_masters
            if storage() is None or key not in keys.get(id(parameter), ()) or (has_none and (value is None or not is_narrow(value))):
                continue
            if value is None or has_none:
                others.append((parameter, key))
            else:
                rows.append((parameter, key, value))
        others += [each[:2] for each in self._state.adopt(rows, has_values=self.handle.step == 0)]
        if others:
            parameter, key = others[0]
            _log.warning("offloadd: what the program has of the optimizer's state from before attach() keeps the values of then: %s of a parameter of shape "
                         "%s%s. Look at optimizer.state anew", key, list(parameter.shape), f", and {len(others) - 1} more" if len(others) > 1 else "")

    def load(self, load_groups, state_dict):
        """load_state_dict(): groups and state are those of the dictionary. The state is durable with the next step()."""
        self.settle()
        states = dict(self._states_in(state_dict))
        if any(is_of_another(value, self._state) for state in states.values() for value in state.values()):
            refuse("load_state_dict() of tensors that another attached optimizer goes on with (its state_dict(), or what it has loaded): torch's would both do",
                   "Give it copies, optimizer.load_state_dict(copy.deepcopy(state_dict))")
        replaces = self._replaces(state_dict)
        had = list(map(self._planes, self.optimizer.param_groups))
        self.is_loading = True
        try:
            load_groups({**{key: value for key, value in state_dict.items() if key != "offloadd"}, "state": {}})
        finally:
            self.is_loading = False
        self._planes_at = {id(group): (group, dict.fromkeys(planes)) for group, planes in zip(self.optimizer.param_groups, had)}
        self.note_masters(masters_in(state_dict, self.optimizer))
        if replaces:
            self.replace(states)
        else:
            self._state.replaced(states)  # by equal ones: what somebody has of the former ones follows no more
        self._begun = dict.fromkeys(id(parameter) for parameter, state in states.items() if state)
        self._replacements += 1
        keys = self._keys_by_id()
        self._state.adopt((parameter, key, value) for parameter, state in states.items() for key, value in state.items()
                          if key in keys.get(id(parameter), ()) and _goes_on_with(parameter, key, value))

    def replace(self, states):
        """The state is torch's of `states`, by parameter; of others there is none. Durable with the next step()."""
        rows = list(self._rows(states.get))
        has_moments = any(count or self.handle.update_count(parameter) for parameter, count, _ in rows)
        self._state.replaced({parameter: states.get(parameter) or {} for parameter, _ in self._groups_of_all()})
        self._put(rows)
        if has_moments:
            self._moments_at = self.handle.step

    def adopt(self, states):
        """`optimizer.state` of the program's own takes the place of all that there is."""
        if not isinstance(states, collections.abc.Mapping):
            refuse_write(f"optimizer.state was replaced by {class_of(states)}")
        if states is not self._state:
            self.replace({parameter: dict(state.items()) for parameter, state in states.items()})
            self._begun = dict.fromkeys(map(id, states))

    def put_states(self, states):
        """Of some parameters."""
        rows = []
        for parameter, state in states.items():
            if not state and not self._is_known(parameter):  # the job has nothing of it
                continue
            if state and self.recipe.counts and STEP not in state:
                refuse(f"the state of a parameter of shape {list(parameter.shape)} was given {', '.join(state)} without the number of its steps",
                       f"Give all that {self.recipe.name} keeps")
            group = self._group_of(parameter)
            rows.append((parameter, *self._read(state, self._planes(group), group)))
        self._put(rows)
        self._moments_at = self.handle.step

    def waits_for_a_step(self):
        """Whether moments were given to the job that its last step does not have."""
        return self._moments_at == self.handle.step

    def _put(self, rows):
        self.handle.replace_state(*self._as_columns(rows))
        self._counts_of_empty.update((id(parameter), count) for parameter, count, _ in rows if not parameter.numel())
        self._replaced_at = self.handle.step
        self._replacements += 1

    def has(self, parameter):
        return any(parameter is each for each in parameters_of(self.optimizer))

    def had(self, parameter):
        """Or has it now."""
        return id(parameter) in self._group_at or self.has(parameter)

    def each_it_had(self):
        return dict.fromkeys([*parameters_of(self.optimizer), *(parameter for parameter, _ in self._group_at.values())])

    def write(self, parameter, plane, value):
        """Gives a moment of one parameter, or its "master", other values. Durable with the next step()."""
        self.settle()
        group = self._group_of(parameter)
        state = dict(self._state.get(parameter, {}))
        if plane != "master":
            refuse_unless_kept(state, plane)
        row = self._read({**state, plane: value}, self._planes(group), group)
        self._put([(parameter, *row)])
        if plane != "master":
            self._moments_at = self.handle.step

    def _states_in(self, state_dict):
        """(parameter, its state in the dictionary) of every parameter: first those that have one, in the dictionary's order."""
        parameters, states = dict(numbered(state_dict, self.optimizer)), state_dict["state"]
        return [(parameters[key], states.get(key) or {}) for key in dict.fromkeys([*(key for key in states if key in parameters), *parameters])]

    def _note_whose_moments(self, mark, here):
        is_of_another_step = mark is not None and mark.get("id") == here["id"] and mark["step"] != here["step"]
        self._moments_of = mark["step"] if is_of_another_step and 0 < self._begun_at == here["step"] else None

    def _check_weights_are_loaded(self):
        """OFD-1602 for moments of another step of the job beside the job's own weights: a script that loads a checkpoint, and attaches, and then
        loads the rest of it. It may load the weights last."""
        if self._moments_of is None:
            return
        self.handle.settle()
        if not self.handle.has_loaded_weights and self._versions == [parameter._version for parameter in parameters_of(self.optimizer)]:
            raise Error.of(1602, f"the moments are of step {self._moments_of}, and the weights of step {self.handle.step}, at which job "
                                 f"{self.handle.job} was attached",
                           "Load the weights after attach(), too (load_state_dict(), p.copy_()); or attach to a job of another name, which "
                           "begins with the checkpoint")
        self._moments_of = None

    def _is_edited(self, state_dict):
        """Whether it is not what state_dict() gives now. Texts in place of tensors cannot have been edited."""
        own = dict(self.states())
        for parameter, state in self._states_in(state_dict):
            here = own.get(parameter, {})
            if state.keys() != here.keys():
                return True
            for name, value in state.items():
                if isinstance(value, str) or self._state.is_shown(parameter, name, value):
                    continue
                if not _is_same(value, here[name]):
                    return True
        return False

    def _replaces(self, state_dict):
        """Whether the job has another state. OFD-1602 where the dictionary says only that it is in a store."""
        mark, here, states = state_dict.get("offloadd"), self.handle.mark(), state_dict.get("state", {})
        if not any(map(self._planes, self.optimizer.param_groups)):
            return any("master" in state for state in states.values())
        is_here = mark is not None and mark.get("id") == here["id"] and mark["step"] == here["step"] and not mark.get("is_loaded")
        if is_here and here["step"] != self._replaced_at and not self._is_edited(state_dict):
            return False
        if not any(map(_is_elsewhere, states.values())):
            self._note_whose_moments(mark, here)
            return bool(states) or any(True for _ in self.states())
        if mark is None or mark.get("id") != here["id"]:
            raise Error.of(1602, f"the checkpoint is of job {mark['job'] if mark else '(unknown)'}, this is another job {here['job']}",
                           "Open the job of the checkpoint: its moments are in its store")
        if mark.get("is_loaded"):
            raise Error.of(1602, f"the checkpoint was written behind step {mark['step']} of job {here['job']}, when other moments were loaded and no step "
                                 "had been taken with them, and it says only where they are", "Load what they were loaded from; a checkpoint is "
                           "written after a step")
        raise Error.of(1602, f"the checkpoint is of step {mark['step']}, the job {here['job']} is at step {here['step']}",
                       "A job continues at its last step by itself, without a checkpoint; for an older step make a new job of a "
                       "snapshot (handle.snapshot, offloadctl snapshot fork)")

    def _rows(self, state_of):
        """(parameter, how often it was updated, {plane: tensor}) of every parameter."""
        for parameter, group in self._groups_of_all():
            if not is_table(parameter):
                yield parameter, *self._read(state_of(parameter) or {}, self._planes(group), group)

    def _read(self, state, planes, group):
        """torch's state of one parameter. SGD counts nothing: a momentum buffer says that there was an update."""
        if _is_elsewhere(state):
            raise Error.of(1602, "the optimizer has loaded a checkpoint that says only where its moments are",
                           "Attach to the job of the checkpoint: its moments are in its store")
        kept = {name: state[name].detach().cpu() for name in planes if state.get(name) is not None}
        count = int(number(state.get("step", 0))) if self.recipe.counts else int(bool(kept))
        if count < 0:
            raise Error.of(1002, f"a state after {count} steps", "Load a state that an optimizer has saved")
        if state and count > 0 and len(kept) < len(planes):
            absent = ", ".join(name for name in planes if name not in kept)
            raise Error.of(1604, f"the state of a parameter after {count} steps has no {absent}",
                           f"Load a state of {self.recipe.name} with the same options")
        if self.recipe.kind == "adagrad" and count == 0:
            initial = group["initial_accumulator_value"]
            if any(bool((value != initial).any()) for value in kept.values()):
                refuse("Adagrad has sums of no step that are not its initial_accumulator_value",
                       "Give the group the initial_accumulator_value that its sums have")
            kept = {}
        if isinstance(state.get("master"), torch.Tensor):  # of universal.load(), and of copies
            kept["master"] = state["master"].detach().cpu()
        return count, kept

    def _as_columns(self, rows):
        """Parameters, counts, names of planes in the job, and for each parameter a tensor per name: empty where there is none."""
        rows, nothing = list(rows), torch.empty(0)
        names = list(dict.fromkeys(name for _, _, kept in rows for name in kept))
        planes = [[kept.get(name, nothing) for name in names] for _, _, kept in rows]
        stored = [name if name == "master" else self.handle.stored_name(self, name) for name in names]
        return [row[0] for row in rows], [row[1] for row in rows], stored, planes
