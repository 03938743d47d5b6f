"""Changing optimizers mid-run: a running torch AdamW's moments folded into FOAM, and FOAM's unfolded back.

Folding is linear, so an AdamW moment folds into exactly the moment FOAM would hold had it seen the same gradients.
The way back cannot restore what folding dropped: every weight of a block gets the block's mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .fold import fold, row_length, unfold
from .memory import check_held
from .names import places
from .optim import FOAM
from .saved import check_numbers, check_plain, check_values, names_of
from .shard import cut_as, local, locals_of
from .state import close, new_state, open_moment, part_of

MOMENTS = (("m", "exp_avg"), ("v", "exp_avg_sq"))  # ours, AdamW's


def from_adamw(opt: FOAM, source: Any, params: Iterable[Tensor] | None = None) -> FOAM:
    """Fold AdamW's moments and step counts into `opt`, which is returned.

        m = fold(exp_avg),   v = fold(exp_avg_sq),   step = step

    Args:
        opt: a FOAM over the same parameters, in any grouping; its hyperparameters are left as they are.
        source: a torch.optim.AdamW or Adam (matched by parameter), or its state dict (matched by the names both hold,
            through torch's wrappers, else by `params`).
        params: for a state dict without names: the parameters in the order AdamW was built with.

    Raises:
        ValueError: an optimizer that keeps no such moments (SGD), parameters that do not match, damaged moments,
            amsgrad, or second_moment="square_mean" (which cannot be recovered). Nothing has been changed then.
    """
    moments = _moments(opt, source, params)
    planned: list[tuple[Tensor, dict[str, Any], Any]] = []
    for group in opt.param_groups:
        if group["rule"] != "adam":
            raise ValueError(f"cannot fold AdamW's moments into rule {group['rule']!r}: it keeps other ones")
        if group["second_moment"] != "mean_square" and group["level"] != 0:
            raise ValueError("cannot recover second_moment='square_mean' from AdamW: it kept the mean of squares")
        names = group.get("param_names") or [f"a parameter of shape {tuple(p.shape)}" for p in group["params"]]
        for name, p in zip(names, group["params"]):
            theirs = moments.get(id(p))
            if theirs is None:
                raise ValueError(f"AdamW does not hold a parameter of this optimizer (shape {tuple(p.shape)})")
            if not isinstance(theirs, Mapping) or theirs:  # else it never had a gradient
                _check_state(name, p, theirs)
                planned.append((p, group, theirs))
    if not planned:
        raise ValueError("AdamW has no state for any parameter of this optimizer: it has not stepped yet")
    opt.state_dict()  # every parameter has its state, where and as it is itself
    for p, group, theirs in planned:
        mine = opt.state[p] = opt.state.get(p) or new_state(p, group)
        mine["step"].copy_(torch.as_tensor(theirs["step"]).reshape(()))
        part, mine = part_of(p, group), locals_of(mine)
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        for name, key in MOMENTS:
            x = cut_as(p, theirs[key])
            x = (part.with_rows(x) if part else x).to(p.device, wide)
            close(mine, name, fold(x, group["level"]), key=None)
    return opt


def _check_state(where: str, p: Tensor, theirs: Any) -> None:
    """Raise ValueError for what is not the state that AdamW keeps of p, or that no sound run leaves."""
    if not isinstance(theirs, Mapping) or not {"step", "exp_avg", "exp_avg_sq"} <= set(theirs):
        kind = sorted(map(str, theirs)) if isinstance(theirs, Mapping) else type(theirs).__name__
        raise ValueError(f"{where}: not the state of an Adam but {kind}")
    if "max_exp_avg_sq" in theirs:
        raise ValueError(f"{where}: not the state of an Adam without amsgrad: {sorted(map(str, theirs))}")
    for name, key in MOMENTS:
        x = theirs[key]
        check_plain(where, key, x, p)
        if x.shape != p.shape or not x.is_floating_point():
            raise ValueError(f"{where}: AdamW's moment has shape {tuple(x.shape)} ({x.dtype}), not {tuple(p.shape)}")
        if not local(p).is_meta:
            check_values(where, name, {name: x})
    step = theirs["step"]
    count = torch.as_tensor(step) if isinstance(step, (int, float)) else step
    check_plain(where, "step", count)
    if count.numel() != 1 or count.is_complex():
        raise ValueError(f"{where}: not a count of steps: {step!r:.80}")
    check_values(where, "step", {"step": count})


def to_adamw(opt: FOAM, **options: Any) -> torch.optim.AdamW:
    """A torch.optim.AdamW that goes on where `opt` stands, in the same groups.

        exp_avg = unfold(m),   exp_avg_sq = unfold(v),   step = step,   lr = lr * scale

    Moments have the parameter's dtype, as AdamW's do. `options` go to AdamW (`fused=True`).

    Raises:
        ValueError: a rule or second moment that AdamW has no counterpart for.
    """
    groups = []
    for group in opt.param_groups:
        if group["rule"] != "adam" or (group["second_moment"] != "mean_square" and group["level"] != 0):
            raise ValueError(f"AdamW has no counterpart for rule={group['rule']!r}, {group['second_moment']}")
        pairs = list(zip(group["param_names"], group["params"])) if "param_names" in group else group["params"]
        keys = ("betas", "eps", "weight_decay", "maximize", "capturable")
        groups.append({"params": pairs, "lr": group["lr"] * group["scale"], **{k: group[k] for k in keys}})
    adamw = torch.optim.AdamW(groups, **options)
    for group in opt.param_groups:
        for p in group["params"]:
            if mine := opt.state.get(p):
                C, wide = row_length(p), torch.float64 if p.dtype == torch.float64 else torch.float32
                part, mine = part_of(p, group), locals_of(mine)
                C = C if not part or part.whole_rows else local(p).shape[-1]
                check_held(local(p), local(p), mine if local(p).numel() else {})
                adamw.state[p] = {"step": mine["step"].float()}
                for name, key in MOMENTS:
                    full = unfold(open_moment(mine, name, wide), group["level"], C)
                    x = adamw.state[p][key] = torch.empty_like(p, requires_grad=False)  # with p's own strides
                    local(x).copy_(part.own_columns(full) if part else full)
    return adamw


def _moments(opt: FOAM, source: Any, params: Iterable[Tensor] | None) -> dict[int, Any]:
    """id(parameter) -> AdamW's state of it."""
    if isinstance(source, torch.optim.Optimizer):
        _is_adam(type(source).__name__, source.param_groups)
        return {id(p): source.state.get(p, {}) for g in source.param_groups for p in g["params"]}
    if not isinstance(source, Mapping) or not {"state", "param_groups"} <= set(source):
        raise ValueError(f"expected a torch AdamW or its state dict, got {type(source).__name__}")
    groups, states = source["param_groups"], source["state"]
    _is_adam("a state dict", groups)
    if not isinstance(states, Mapping):
        raise ValueError(f"expected AdamW's state dict, but its `state` is a {type(states).__name__}")
    order = [i for g in groups for i in g["params"]]
    check_numbers(order)
    known = None if params is None else list(params)
    if known is not None and len(known) != len(order):
        raise ValueError(f"AdamW's state dict has {len(order)} parameters, `params` has {len(known)}")
    theirs = [name for k, g in enumerate(groups) for name in names_of(f"group {k}", g)]
    mine = {name: p for g in opt.param_groups for name, p in zip(g.get("param_names", ()), g["params"])}
    if len(theirs) != len(order) or not mine:
        if known is None:
            raise ValueError(
                "cannot match a state dict without parameter names: pass params=model.parameters(), "
                "the parameters in the order AdamW was built with"
            )
        return {id(p): states.get(i, {}) for p, i in zip(known, order)}
    found = dict(zip(mine, places(list(mine), theirs)))
    if missing := sorted(name for name, i in found.items() if i is None):
        raise ValueError(
            f"AdamW's state dict does not hold {missing[0]!r}" + f" and {len(missing) - 1} more" * (len(missing) > 1)
        )
    if known is not None and (moved := [n for n, i in found.items() if i is not None and known[i] is not mine[n]]):
        raise ValueError(
            f"`params` are in another order than the state dict's names, by which {moved[0]!r} is elsewhere"
        )
    return {id(mine[name]): states.get(order[i], {}) for name, i in found.items() if i is not None}


def _is_adam(what: str, groups: Any) -> None:
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(g, Mapping) and isinstance(g.get("params"), (list, tuple)) for g in groups
    ):
        raise ValueError(f"expected a torch AdamW or its state dict, but `param_groups` are no groups: {groups!r:.80}")
    if not all("betas" in g for g in groups):
        raise ValueError(
            f"expected a torch AdamW or its state dict, got {what}, whose groups have no `betas`: "
            "it keeps no moments to fold; begin with a new FOAM"
        )
    if any("second_moment" in g for g in groups):
        raise ValueError("expected a torch AdamW or its state dict, got FOAM's own state: use opt.load_state_dict")
