"""Hooks that somebody has registered around an optimizer's state_dict() and load_state_dict(). What is in a store, or of masters, is put into
torch's dictionary, and taken out of it, behind torch's own functions: the hooks are called around both, and see and change what they would in
plain torch."""

import contextlib

_BEFORE, _AFTER = "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"
_BEFORE_LOAD, _AFTER_LOAD = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"


def _hooks(optimizer, name):
    return list(getattr(optimizer, name, {}).values())


@contextlib.contextmanager
def _aside(optimizer):
    """torch's own functions call none of them in here."""
    kept = {name: optimizer.__dict__[name] for name in (_BEFORE, _AFTER, _BEFORE_LOAD, _AFTER_LOAD) if name in optimizer.__dict__}
    optimizer.__dict__.update({name: type(hooks)() for name, hooks in kept.items()})
    try:
        yield
    finally:
        optimizer.__dict__.update(kept)


def give(optimizer, make):
    """state_dict(): what make() gives, through the hooks."""
    for hook in _hooks(optimizer, _BEFORE):
        hook(optimizer)
    with _aside(optimizer):
        made = make()
    for hook in _hooks(optimizer, _AFTER):
        changed = hook(optimizer, made)
        made = made if changed is None else changed
    return made


def take(optimizer, state_dict, load):
    """load_state_dict(): load() is given what the hooks make of the dictionary."""
    state_dict = state_dict.copy()  # as torch does
    for hook in _hooks(optimizer, _BEFORE_LOAD):
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    with _aside(optimizer):
        load(state_dict)
    for hook in _hooks(optimizer, _AFTER_LOAD):
        hook(optimizer)
