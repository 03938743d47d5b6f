"""Changing optimizers mid-run: a running torch AdamW's moments folded into FOAM, and FOAM's unfolded back.

Folding is linear, so an AdamW moment folds into exactly the moment FOAM would hold had it seen the same gradients.
The way back cannot restore what folding dropped: every weight of a block gets the block's mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .fold import fold, unfold
from .kernels.eager import close, open_moment
from .optim import FOAM, new_state


def from_adamw(opt: FOAM, source: Any, params: Iterable[Tensor] | None = None) -> FOAM:
    """Fold AdamW's moments and step counts into `opt`, which is returned.

        m = fold(exp_avg),   v = fold(exp_avg_sq),   step = step

    Args:
        opt: a FOAM over the same parameters, in any grouping; its hyperparameters are left as they are.
        source: a torch.optim.AdamW or Adam (matched by parameter), or its state dict (matched by the names both hold,
            else by `params`).
        params: for a state dict without names: the parameters in the order AdamW was built with.

    Raises:
        ValueError: parameters that do not match, amsgrad, or second_moment="square_mean" (which cannot be recovered).
            Nothing has been changed then.
    """
    moments = _moments(opt, source, params)
    planned: list[tuple[Tensor, dict[str, Any], dict[str, Tensor]]] = []
    for group in opt.param_groups:
        if group["rule"] != "adam":
            raise ValueError(f"cannot fold AdamW's moments into rule {group['rule']!r}: it keeps other ones")
        if group["second_moment"] != "mean_square" and group["level"] != 0:
            raise ValueError("cannot recover second_moment='square_mean' from AdamW: it kept the mean of squares")
        for p in group["params"]:
            theirs = moments.get(id(p))
            if theirs is None:
                raise ValueError(f"AdamW does not hold a parameter of this optimizer (shape {tuple(p.shape)})")
            if not theirs:  # never had a gradient
                continue
            if "exp_avg" not in theirs or "exp_avg_sq" not in theirs or "max_exp_avg_sq" in theirs:
                raise ValueError(f"not the state of an Adam without amsgrad: {sorted(theirs)}")
            if theirs["exp_avg"].shape != p.shape:
                raise ValueError(
                    f"AdamW's moment has shape {tuple(theirs['exp_avg'].shape)}, its parameter {tuple(p.shape)}"
                )
            planned.append((p, group, theirs))
    if not planned:
        raise ValueError("AdamW has no state for any parameter of this optimizer: it has not stepped yet")
    for p, group, theirs in planned:
        mine = opt.state[p] = opt.state.get(p) or new_state(p, group)
        mine["step"].copy_(torch.as_tensor(theirs["step"]))
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        for name, key in (("m", "exp_avg"), ("v", "exp_avg_sq")):
            close(mine, name, fold(theirs[key].to(p.device, wide), group["level"]), key=None)
    return opt


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
                C, wide = p.shape[-1] if p.ndim else 1, torch.float64 if p.dtype == torch.float64 else torch.float32
                adamw.state[p] = {"step": mine["step"].float()}
                for name, key in (("m", "exp_avg"), ("v", "exp_avg_sq")):
                    full = unfold(open_moment(mine, name, wide), group["level"], C)
                    adamw.state[p][key] = torch.empty_like(p, requires_grad=False).copy_(full)  # with p's own strides
    return adamw


def _moments(opt: FOAM, source: Any, params: Iterable[Tensor] | None) -> dict[int, dict[str, Tensor]]:
    """id(parameter) -> AdamW's state of it."""
    if isinstance(source, torch.optim.Optimizer):
        return {id(p): source.state.get(p, {}) for g in source.param_groups for p in g["params"]}
    if not isinstance(source, dict) or not {"state", "param_groups"} <= set(source):
        raise ValueError(f"expected a torch AdamW or its state dict, got {type(source).__name__}")
    order = [i for g in source["param_groups"] for i in g["params"]]
    if params is not None:
        known = list(params)
        if len(known) != len(order):
            raise ValueError(f"AdamW's state dict has {len(order)} parameters, `params` has {len(known)}")
        return {id(p): source["state"].get(i, {}) for p, i in zip(known, order)}
    theirs = {n: i for g in source["param_groups"] for n, i in zip(g.get("param_names", ()), g["params"])}
    mine = {n: p for g in opt.param_groups for n, p in zip(g.get("param_names", ()), g["params"])}
    if not theirs or not mine:
        raise ValueError(
            "cannot match a state dict without parameter names: pass params=model.parameters(), "
            "the parameters in the order AdamW was built with"
        )
    if missing := sorted(set(mine) - set(theirs)):
        raise ValueError(
            f"AdamW's state dict does not hold {missing[0]!r}" + f" and {len(missing) - 1} more" * (len(missing) > 1)
        )
    return {id(p): source["state"].get(theirs[n], {}) for n, p in mine.items()}
