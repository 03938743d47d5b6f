"""Whether what a checkpoint holds can be gone on with: every field is looked at before anything takes it over.

`checkpoint` has found the files whole. This room knows what a run writes into them, and what none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..config import OptimizerConfig, Role, named
from ..errors import UserError
from ..files import parse_json

# what of an optimizer's groups follows the settings on resume, not the saved state; SGD has its momentum for a beta
TUNABLE = (*(f.name for f in fields(OptimizerConfig) if f"optimizer.{f.name}" not in named(Role.FIXED)), "momentum")
# moments that torch's and most other optimizers keep in the shape of their parameter
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def _count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**63


# what `loop.Training.save` keeps
FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": _count,
    "tokens": _count,
    "seconds": lambda x: type(x) in (int, float) and 0 <= x < math.inf,
    "skipped": _count,
    "in_row": _count,
    "loss": lambda x: x is None or type(x) is float,
    "optimizer": lambda x: x is None or isinstance(x, dict),
    "remark": lambda x: type(x) is str,
    "config": lambda x: type(x) is str,
    "data": lambda x: type(x) is str,
}


def check(saved: Any, file: Path) -> dict[str, Any]:
    """The settings that a `training.pt` was saved with, if all its fields are what a run writes.

    Raises:
        UserError: one is missing or is something else; it is named.
    """
    if not isinstance(saved, dict):
        raise UserError(f"{file} holds a {type(saved).__name__}: it was not written by foamlab train")
    if missing := [name for name in FIELDS if name not in saved]:
        raise UserError(f"{file} lacks {', '.join(missing)}: it was not written by foamlab train")
    for name, fits in FIELDS.items():
        if not fits(saved[name]):
            raise _wrong(file, f"{name} is {_short(saved[name])}")
    best = saved.get("best")
    known = isinstance(best, dict) and _count(best.get("step")) and type(best.get("merit")) is float
    if best is not None and not known:
        raise _wrong(file, f"best is {_short(best)}")
    if not saved["in_row"] <= saved["skipped"] <= saved["step"]:
        raise _wrong(file, f"{saved['skipped']} of {saved['step']} steps are skipped, {saved['in_row']} in a row")
    settings = parse_json(saved["config"], f"the settings in {file}")
    if not isinstance(settings, dict):
        raise _wrong(file, f"config is {_short(settings)}")
    return settings


def check_state(state: Mapping[str, Any], optimizer: Optimizer, file: Path) -> None:
    """Refuse a saved optimizer state that this optimizer could load and not go on with.

    Optimizers look at little themselves: torch's take over moments of any shape and type, and fail in the next step.

    Raises:
        UserError: a part that is no tensor or number, NaN, sparse or without data; moments in another shape than their
            parameter; settings of torch's own optimizers that are not those of this run.
    """
    groups, entries = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(entries, dict) or not all(isinstance(g, dict) for g in groups):
        raise _wrong(file, "the optimizer has no state and groups")
    for path, x in _leaves(entries, "state"):
        if isinstance(x, Tensor):
            if x.layout != torch.strided or x.is_meta:
                raise _wrong(file, f"{path} is a tensor without plain data")
            if x.is_floating_point() and bool(x.isnan().any()):
                raise _wrong(file, f"{path} is not a number")
        elif (x is not None and type(x) not in (bool, int, float)) or x != x:
            raise _wrong(file, f"{path} is {_short(x)}")
    own = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in enumerate(own):
        entry = entries.get(index, {})
        if not isinstance(entry, dict):
            raise _wrong(file, f"state {index} is {_short(entry)}")
        for name in MOMENTS:
            if name in entry and not (isinstance(entry[name], Tensor) and entry[name].shape == p.shape):
                raise _wrong(file, f"state {index} {name} is {_short(entry[name])}, its parameter is {_short(p)}")
    if type(optimizer).__module__.startswith("torch.optim"):
        _check_groups(groups, optimizer, file)
        if entries and {*entries} != {*range(len(own))}:
            raise _wrong(file, f"the optimizer has state of {len(entries)} parameters, the model {len(own)}")
        kinds: dict[str, set[str]] = {}
        for key, x in ((key, x) for entry in entries.values() for key, x in entry.items()):
            kinds.setdefault(key, set()).add(type(x).__name__)
        if mixed := [key for key, types in kinds.items() if len(types) > 1]:
            raise _wrong(file, f"{mixed[0]} is {' or '.join(sorted(kinds[mixed[0]]))} from parameter to parameter")


def _check_groups(groups: list[dict[str, Any]], optimizer: Optimizer, file: Path) -> None:
    """Settings that do not follow the run's own on resume must be the same."""
    own = optimizer.state_dict()["param_groups"]
    if len(groups) != len(own):
        raise _wrong(file, f"the optimizer has {len(groups)} groups, this run {len(own)}")
    follow = (*TUNABLE, "initial_lr", "param_names")
    for k, (was, now) in enumerate(zip(groups, own)):
        for name in now:
            if name not in follow and _short(was.get(name)) != _short(now[name]):
                raise _wrong(file, f"{name} of group {k} is {_short(was.get(name))}, here {_short(now[name])}")


def _leaves(x: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(where, what) of all that is no container; as deep as a state dict goes."""
    todo = [(path, x)]
    while todo:
        path, x = todo.pop()
        if isinstance(x, (dict, list, tuple)):
            todo += [(f"{path} {k}", v) for k, v in (x.items() if isinstance(x, dict) else enumerate(x))]
        else:
            yield path, x


def _wrong(file: Path, what: str) -> UserError:
    return UserError(f"{file}: {what}, as no run writes it; resume from another checkpoint, or start anew")


def _short(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a {str(x.dtype).removeprefix('torch.')} tensor of {list(x.shape)}"
    text = repr(x)
    return text if len(text) <= 60 else f"{text[:57]}..."
