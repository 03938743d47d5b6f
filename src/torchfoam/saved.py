"""Loading state dicts: whether one fits an optimizer is found out, to the last value, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .memory import held
from .names import places
from .options import IDENTITY, check
from .quant import decode
from .shard import cut_as, is_sharded, local, locals_of, same_ranks
from .state import check_kept, new_state

FORMAT = 2  # version of the state dict; rises when an older one needs translating
# format 1 had the paper's rule alone, and a float32 `step`
FORMAT_1 = {"bias_correction": "whole", "residual_in_v": 1.0}


def upgraded(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group in today's format, with the rule it was trained with."""
    return {**group, **(FORMAT_1 if group.get("format") == 1 else {}), "format": FORMAT}


class Pair(NamedTuple):
    """A parameter, its group, and what was saved of it: {} where it had no state."""

    p: Tensor
    group: dict[str, Any]
    saved: Mapping[str, Tensor]


def load(opt: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Write a state dict into the tensors that `opt` holds, or raise ValueError with nothing changed."""
    loads = []
    ours = {_address(x) for mine in opt.state.values() for x in mine.values()}
    for p, group, saved in match(opt, state_dict):
        if mine := opt.state.get(p):
            check_kept(p, mine, group)
        elif saved:
            mine = new_state(p, group)
        if mine:  # what another of our parameters holds would be overwritten before it is read
            others = [k for k, x in saved.items() if x is not mine[k] and _address(x) in ours]
            loads.append((p, mine, {**saved, **{k: saved[k].clone() for k in others}}))
    changes = [
        {k: deepcopy(x) for k, x in upgraded(saved).items() if k not in ("params", "param_names")}
        for saved in state_dict["param_groups"]
    ]
    # nothing is refused from here on
    for group, new in zip(opt.param_groups, changes):
        if isinstance(lr := group["lr"], Tensor):  # CUDA graphs and compiled steps read this very tensor
            new["lr"] = lr.copy_(torch.as_tensor(new.get("lr", lr)).reshape(lr.shape))
        group.update(new)
    for p, mine, saved in loads:
        opt.state[p] = mine
        for name, x in mine.items():
            local(x).copy_(cut_as(x, saved[name])) if saved else local(x).zero_()


def _address(x: Tensor) -> int:
    return local(x).untyped_storage().data_ptr()


def match(opt: Optimizer, state_dict: Mapping[str, Any]) -> list[Pair]:
    """Pair every parameter with its saved state: within a group by name if both sides have names, else by position.

    Raises:
        ValueError: naming both sides of the first difference, and where it is.
    """
    groups, states = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, (list, tuple)) or not isinstance(states, Mapping):
        raise ValueError(f"not an optimizer state dict: keys are {sorted(map(str, state_dict))}")
    for k, saved in enumerate(groups):
        _is_ours(f"group {k}", saved)
    if len(groups) != len(opt.param_groups):
        raise ValueError(
            f"the state dict has {len(groups)} parameter groups, this optimizer has {len(opt.param_groups)}"
        )
    numbers = [i for saved in groups for i in saved["params"]]
    check_numbers(numbers)
    pairs = []
    for k, (group, saved) in enumerate(zip(opt.param_groups, groups)):
        where = f"group {k} ({group['name']})" if "name" in group else f"group {k}"
        _match_group(where, group, saved)
        order = _order(where, group, saved)
        names = group.get("param_names") or [""] * len(order)
        for p, name, i in zip(group["params"], names, [saved["params"][j] for j in order]):
            label = f"{where}, parameter {i}" + f" ({name})" * bool(name)
            _match_state(label, new_state(p, group, device="meta"), states.get(i, {}), p)
            pairs.append(Pair(p, group, states.get(i, {})))
    if strange := set(states) - set(numbers):
        raise ValueError(f"the state dict has the state of a parameter {strange.pop()!r} that none of its groups has")
    return pairs


def _is_ours(where: str, saved: Any) -> None:
    if not isinstance(saved, Mapping) or not isinstance(saved.get("params"), (list, tuple)):
        raise ValueError(f"{where}: not a parameter group of a state dict: {saved!r:.80}")
    if not saved["params"] and "format" not in saved:
        return  # torch's distributed checkpoints lose what a group without parameters says
    version = saved.get("format")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(
            f"{where}: this is not a FOAM state dict (no `format`); "
            "to continue from torch.optim.AdamW use torchfoam.from_adamw"
        )
    if version > FORMAT:
        raise ValueError(f"{where}: written by a newer torchfoam (format {version}, this one reads {FORMAT})")


def check_numbers(numbers: list[Any]) -> None:
    """Parameters are numbered, or named (in torch's distributed checkpoints), each once."""
    if wrong := [i for i in numbers if isinstance(i, bool) or not isinstance(i, (int, str))]:
        raise ValueError(f"not an optimizer state dict: a parameter's number is {wrong[0]!r:.80}")
    if len(set(numbers)) < len(numbers):
        twice = next(i for i in numbers if numbers.count(i) > 1)
        raise ValueError(f"the state dict has parameter {twice!r} twice")


def _match_group(where: str, group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    if len(saved["params"]) != len(group["params"]):
        raise ValueError(f"{where}: saved with {len(saved['params'])} parameters, this one has {len(group['params'])}")
    if not saved["params"]:
        saved = {**group, **saved}
    for key in IDENTITY:
        if key not in saved:
            raise ValueError(f"{where}: the state dict does not say its {key}, this optimizer has {group[key]!r}")
        if type(saved[key]) is not type(group[key]) or saved[key] != group[key]:
            raise ValueError(f"{where}: saved with {key}={saved[key]!r:.80}, this optimizer has {group[key]!r}")
    lr = saved.get("lr")
    if isinstance(lr, Tensor) and lr.is_meta and not all(p.is_meta for p in group["params"]):
        raise ValueError(f"{where}: lr is on the meta device: it holds no value")
    try:
        check({**group, **upgraded(saved)})
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None


def names_of(where: str, saved: Mapping[str, Any]) -> list[str]:
    """The names that a saved group gives its parameters; none, if it gives none."""
    names, count = saved.get("param_names"), len(saved["params"])
    if names is None:
        return []
    if not isinstance(names, (list, tuple)) or len(names) != count or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: param_names are not a name for each of {count} parameters: {names!r:.80}")
    return list(names)


def _order(where: str, group: dict[str, Any], saved: Mapping[str, Any]) -> list[int]:
    """Which of the saved parameters each of the group's is."""
    mine, params = group.get("param_names"), saved["params"]
    # In torch's distributed checkpoints names stand for numbers; `param_names` may then be in another order
    by_torch = bool(params) and all(isinstance(i, str) for i in params)
    names = params if by_torch else names_of(where, saved)
    if not mine or not names:
        return list(range(len(params)))
    order = places(mine, names)
    if None in order:
        if by_torch:  # names in a larger model, say: torch has matched them, and put them in this optimizer's order
            return list(range(len(params)))
        i = order.index(None)
        raise ValueError(
            f"{where}, parameter {i}: this optimizer has {mine[i]!r} there, the state dict {names[i]!r}, and names do "
            "not match one to one; if the order is right, delete `param_names` from the state dict's groups"
        )
    return [i for i in order if i is not None]


def _match_state(where: str, want: dict[str, Tensor], saved: Any, p: Tensor) -> None:
    if not isinstance(saved, Mapping):
        raise ValueError(f"{where}: the saved state is a {type(saved).__name__}")
    if saved and set(saved) != set(want):
        raise ValueError(f"{where}: saved state {sorted(map(str, saved))}, expected {sorted(want)}")
    for name, x in saved.items():
        check_plain(where, name, x, p)
        counts = name == "step" and not x.is_complex()  # float32 in format 1, and other programs' choice
        if x.shape != want[name].shape or (x.dtype != want[name].dtype and not counts):
            raise ValueError(
                f"{where}: {name} was saved as {x.dtype} {tuple(x.shape)}, "
                f"this one has {want[name].dtype} {tuple(want[name].shape)}"
            )
    if not local(p).is_meta:  # else there is nowhere to put values
        for name in saved:
            check_values(where, name, saved)


def check_plain(where: str, name: str, x: Any, p: Tensor | None = None) -> None:
    """Raise ValueError unless `x` is a dense tensor of torch's own kind, or sharded over the ranks of `p`."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{where}: {name} is a {type(x).__name__}, not a tensor")
    if is_sharded(x) and (p is None or not same_ranks(x, p)):
        raise ValueError(
            f"{where}: {name} is sharded over ranks (a DTensor), the parameter is not over the same ones: get the "
            "state dict by get_optimizer_state_dict with full_state_dict=True, or load it by "
            "torch.distributed.checkpoint"
        )
    x = local(x)
    if type(x) not in (Tensor, nn.Parameter, nn.Buffer) or x.layout != torch.strided:
        raise ValueError(f"{where}: {name} is a {type(x).__name__} ({x.layout}), not a plain dense tensor")
    if x.numel() and not x.is_meta and not held(x):
        raise ValueError(f"{where}: {name} has no memory (freed, or never there)")


def check_values(where: str, name: str, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError for what no sound run leaves behind: NaN, an infinite first moment, a negative second one, a
    fraction of a step. (The square of a huge gradient may have been infinite.)"""
    state = locals_of(state)
    x = state[name].detach()
    if x.is_meta:
        raise ValueError(f"{where}: {name} is on the meta device: it holds no values")
    if x.dtype == torch.uint8:
        exponents = state.get(f"{name}_exponent")
        if exponents is None or exponents.is_meta or not exponents.numel() or exponents.max() < 255:
            return  # all codes stand for numbers
        x = decode(x, exponents, signed=name == "m")
    if not x.numel():
        return
    least, most = (float(end) for end in torch.aminmax(x if x.is_floating_point() else x.double()))  # NaN if one is
    sound = -inf < least and most < inf if name == "m" else least >= 0
    if not sound or (name == "step" and not (most < 2**31 and most.is_integer())):
        raise ValueError(
            f"{where}: {name} has values from {least:g} to {most:g}, which no sound run leaves: the file is damaged, "
            "or its run had diverged; load an earlier one"
        )
