"""Optimizers of several kinds in one job.

The daemon updates each parameter by the rule of its own optimizer, and what all of them keep lies at the places that one of them has: a job of
several kinds is made for AdamW, beside which none keeps more. Of which kind each parameter is goes into every step, so that a run that goes on does not
take what one has kept for what another does.
"""

import functools
import json
import zlib

from .errors import Error
from .library import Engine
from .recipes import FUSED, parameters_of, refuse

_OF_SEVERAL = "adamw"
_SWEEPS_TWICE = "lamb"  # it needs norms of whole parameters, which the daemon then computes of all
# That have something kept, with values that make it so.
_KEPT_WITH = {"amsgrad": 1.0, "momentum": 0.5, "centered": 1.0}


@functools.cache
def _planes_at_most(kind):
    """All that an optimizer of that kind may keep, in the order of their places."""
    return Engine.planes_of(kind, [_KEPT_WITH.get(name, 0.0) for name in Engine.parameters_of(kind)])


def are_together(kinds):
    """Whether one job can have them."""
    return len(kinds) < 2 or _SWEEPS_TWICE not in kinds


def check_together(kinds):
    if not are_together(kinds):
        refuse(f"one job with optimizers of several kinds ({', '.join(sorted(kinds))}), of which {_SWEEPS_TWICE} needs norms of whole parameters",
               "Give each model a job of its own, or attach one of the optimizers: the other goes on in this process, with what it keeps in memory")


class Kinds:
    """Those of the optimizers that the daemon has. `kind` and `rows` (values of groups) say what the job keeps."""

    def __init__(self, parts):
        self._parts = [part for part in parts if not part.is_foreign]
        kinds = {part.recipe.kind for part in self._parts}
        rows = [(part.recipe.kind, row) for part in self._parts for row in part.group_values()]
        self.are_several = len(kinds) > 1
        if not self.are_several:
            self.kind = kinds.pop() if kinds else "sgd"  # which keeps nothing
            self.rows = [row for _, row in rows] or [[0.0] * len(Engine.parameters_of(self.kind))]
            return
        count = max(_planes_at_most(kind).index(name) + 1 for kind, row in rows for name in Engine.planes_of(kind, row)) if rows else 0
        self.kind = _OF_SEVERAL
        values = {"flavour": FUSED, "amsgrad": float(count == len(_planes_at_most(_OF_SEVERAL)))}
        self.rows = [[values.get(name, 0.0) for name in Engine.parameters_of(_OF_SEVERAL)]]

    def stored_name(self, part, plane):
        """What the job calls what an optimizer keeps."""
        if not self.are_several or part.is_foreign:
            return plane
        its = _planes_at_most(part.recipe.kind)
        if plane not in its:
            raise Error.of(1002, f"{part.recipe.name} keeps no {plane}: it keeps {', '.join(its)}", "Ask for one of these, or for the weight")
        return _planes_at_most(self.kind)[its.index(plane)]

    # ---- What steps say of it ----

    def described(self, names):
        """As bytes; none where the job has one kind. `names`: of parameters, by their ids."""
        by_kind = {}
        for part in self._parts if self.are_several else ():
            for parameter in part.each_it_had():
                if id(parameter) in names:
                    by_kind.setdefault(part.recipe.kind, []).append(names[id(parameter)])
        if not by_kind or list(by_kind) == [self.kind]:
            return b""
        most = max(by_kind, key=lambda kind: len(by_kind[kind]))
        others = {kind: sorted(its) for kind, its in by_kind.items() if kind != most}
        return zlib.compress(json.dumps({"most": most, "others": others}, separators=(",", ":")).encode())

    def check_as_before(self, described, names, update_count):
        """OFD-1602 where a parameter that was updated was so by another kind."""
        former = json.loads(zlib.decompress(described)) if described else {"most": self.kind, "others": {}}
        kinds = {name: kind for kind, its in former["others"].items() for name in its}
        for part in self._parts:
            for parameter in parameters_of(part.optimizer):
                name = names.get(id(parameter))
                before = kinds.get(name, former["most"])
                if name is not None and before != part.recipe.kind and update_count(parameter) > 0:
                    raise Error.of(1602, f"parameter '{name}' was trained with {before}, and is in the groups of {part.recipe.name} now",
                                   "Give each part of the model the optimizer that it had, or begin a new job with the saved weights")
