"""Which parameters fold: a model becomes parameter groups, and groups become a table one can read.

Attention and MLP matrices fold. Embeddings, output heads, norms, biases and vectors do not: they stay plain Adam
(level 0, scale 1) at the full learning rate. What a parameter is, is read off the module that owns it; patterns
override (`roles.py`). This room builds groups; it holds no state and performs no steps.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .budget import fit_levels, parse_bytes
from .fold import Level, check_level
from .options import DEFAULTS, PLAIN, check_names
from .roles import KINDS, foldable, is_head, is_matrix, is_table, largest, undecayed
from .shard import sharded
from .state import state_bytes

UNNAMED = "unnamed."  # before the number that stands for a name where others have one


def param_groups(
    model: nn.Module,
    *,
    level: int | str = 2,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    no_decay: bool | str | Iterable[str] = False,
    names: bool = True,
    state_budget: int | str | None = None,
    residual_ratios: Mapping[str, float] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into groups for `FOAM`; each is in exactly one, tied weights once.

    Args:
        model: any module. `nn.Linear`, transformers' `Conv1D`, `nn.MultiheadAttention` and stacked expert weights
            (3-D parameters) fold; embeddings, the head (tied or not), convolutions, norms and vectors do not.
        level: fold level of the group "folded".
        overrides: pattern -> options, matched against parameter names as a shell would (`"*.mlp.*": {"level": 3}`);
            the first match wins and makes a group of its own, starting from what the parameter would have had.
            Their `level`, `scale` and `rule` are for matrices: a vector that matches takes only the rest.
        no_decay: what gets `weight_decay` 0, in groups of its own: kinds ("vectors", "norms", "biases", "embeddings")
            or patterns as in `overrides`, one or several; True means all four kinds. "vectors" is nanoGPT's habit,
            ("norms", "biases") that of transformers' Trainer. An override that states a `weight_decay` keeps it.
        names: False gives bare parameters, for what takes no names: `ZeroRedundancyOptimizer`.
        state_budget: bytes ("300MB", "286MiB", a number) that the state of all parameters may take. Then levels are
            chosen per matrix (`budget.py`): as low as fits, lower where `residual_ratios` are larger. Give `state`
            here too, if it is not the default. Matrices whose override states a level keep it.
        residual_ratios: `opt.residual_ratio()` of a run at `level`; without it bytes are spent evenly.
        options: any other per-group option of FOAM. `scale` and `rule` go to the folded group alone, the rest to all.

    Returns:
        Groups of (name, parameter) pairs with the keys `name`, `level` and the options given; unfolded ones state
        level 0, scale 1 and rule "adam".

    Raises:
        ValueError: an unknown option, a pattern that matches nothing (the nearest names are offered), or nothing folds.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    >>> [(g["name"], [n for n, _ in g["params"]]) for g in param_groups(model)]
    [('folded', ['1.weight']), ('unfolded', ['0.weight', '1.bias'])]
    """
    overrides = overrides or {}
    for given in (options, *overrides.values()):
        check_names(given)
    ours = {"level": level, **{key: options.pop(key) for key in PLAIN if key in options}}
    for p in model.parameters():
        if p.requires_grad:
            check_there(p)
    folding = foldable(model)
    wanted = {True: {**options, **ours}, False: {**options, **PLAIN}}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ValueError(f"FOAM cannot use the sparse gradients of {path!r}: build it with sparse=False")
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    _check_patterns("override", overrides, trainable)
    exempt = _exempt(model, no_decay, trainable)
    chosen: dict[str, dict[str, Any]] = {}
    for name, p in trainable:
        pattern = next((pattern for pattern in overrides if fnmatchcase(name, pattern)), "")
        changes = {k: x for k, x in overrides.get(pattern, {}).items() if p.ndim >= 2 or k not in PLAIN}
        settings = {**wanted[folding[name]], **changes}
        full = {**DEFAULTS, **settings}
        label = "unfolded" if all(full[key] == PLAIN[key] for key in ("level", "rule")) else "folded"
        if name in exempt and "weight_decay" not in changes:
            label, settings = f"{label} no decay", {**settings, "weight_decay": 0.0}
        chosen[name] = {"name": f"{label} {pattern}".rstrip(), **settings}
        if state_budget is not None and folding[name] and "level" not in changes:
            chosen[name]["level"] = None  # for the budget to decide
    if state_budget is not None:
        _fit(dict(trainable), chosen, parse_bytes(state_budget), residual_ratios or {}, check_level(level))
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, p in trainable:
        new = {"params": [], **chosen[name]}
        groups.setdefault((new["name"], folding[name]), new)["params"].append((name, p) if names else p)
    if level != 0 and state_budget is None and all(g["level"] == 0 for g in groups.values()):
        raise ValueError(
            f"nothing folds in {type(model).__name__}: it has no trainable attention or MLP matrix; "
            "use level=0 for plain AdamW, or name matrices with overrides"
        )
    return sorted(groups.values(), key=lambda g: not g["name"].startswith("folded"))


def _fit(
    params: Mapping[str, Tensor],
    chosen: Mapping[str, dict[str, Any]],
    budget: int,
    ratios: Mapping[str, float],
    measured_at: Level,
) -> None:
    """Decide the levels left open in `chosen`, so that the whole state fits the budget."""
    left = {name: p for name, p in params.items() if chosen[name]["level"] is None}
    fixed = sum(state_bytes(p, {**DEFAULTS, **chosen[name]}) for name, p in params.items() if name not in left)
    if unknown := sorted(set(ratios) - set(params)):
        raise ValueError(f"residual ratio of {unknown[0]!r}, which is no trainable parameter of the model")
    if fixed > budget:
        raise ValueError(
            f"the state cannot fit in {budget:,} bytes: what does not fold needs {fixed:,} alone; "
            "state='int8' makes it about a quarter"
        )
    settings = {id(p): {**DEFAULTS, **chosen[name]} for name, p in left.items()}
    fitted = fit_levels(
        left, budget - fixed, lambda p, level: state_bytes(p, {**settings[id(p)], "level": level}), ratios, measured_at
    )
    for name, level in fitted.items():
        chosen[name].update(level=level, name=f"{chosen[name]['name']} level {level}")


def _exempt(model: nn.Module, no_decay: bool | str | Iterable[str], params: Sequence[tuple[str, Tensor]]) -> set[str]:
    """Names of the parameters that `no_decay` of `param_groups` means."""
    if isinstance(no_decay, bool):
        return undecayed(model, KINDS if no_decay else ())
    several = isinstance(no_decay, Iterable) and not isinstance(no_decay, str)
    words: list[Any] = list(no_decay) if several else [no_decay]
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"no_decay must be True, False, kinds ({', '.join(KINDS)}) or patterns, got {no_decay!r}")
    patterns: dict[str, dict[str, Any]] = {word: {} for word in words if word not in KINDS}
    if near := [(word, kind) for word in patterns for kind in get_close_matches(word, KINDS, n=1, cutoff=0.75)]:
        raise ValueError("unknown kind {!r} in no_decay; did you mean {!r}?".format(*near[0]))
    _check_patterns("no_decay", patterns, params)
    matched = {name for name, _ in params for pattern in patterns if fnmatchcase(name, pattern)}
    return matched | undecayed(model, set(words) - set(patterns))


def _check_patterns(
    what: str, overrides: Mapping[str, Mapping[str, Any]], params: Sequence[tuple[str, Tensor]]
) -> None:
    """Raise ValueError for a pattern that would have no effect."""
    for pattern, changes in overrides.items():
        matched = [p for name, p in params if fnmatchcase(name, pattern)]
        if not matched:
            near = get_close_matches(pattern.replace("*", ""), [name for name, _ in params], n=3, cutoff=0.0)
            raise ValueError(f"{what} pattern {pattern!r} matches no trainable parameter; nearest: {', '.join(near)}")
        if all(p.ndim < 2 for p in matched) and (vain := [k for k in PLAIN if k in changes]):
            raise ValueError(f"{what} pattern {pattern!r} sets {vain[0]}, but matches only vectors, which do not fold")


def check_there(p: Tensor) -> None:
    """Raise ValueError for a parameter that is not there yet, or not the whole of it."""
    if is_lazy(p):
        raise ValueError("a lazy module's parameter has no shape yet: run the model once, then make the optimizer")
    if reason := sharded(p):
        raise ValueError(f"FOAM cannot be used on a parameter of shape {tuple(p.shape)}: {reason}")


def check_kind(p: Tensor, rule: str) -> None:
    """Raise ValueError for a parameter that is not there, or of a kind that FOAM, or this rule, cannot step."""
    check_there(p)
    if p.is_complex() or not p.is_floating_point() or p.layout != torch.strided:
        raise ValueError(
            f"FOAM needs dense, real, floating-point parameters, got {p.dtype} ({p.layout}) of shape {tuple(p.shape)}"
        )
    if rule == "muon" and p.ndim < 2:
        raise ValueError(f"cannot use rule 'muon' on shape {tuple(p.shape)}: only matrices can be orthogonalised")


def split_by_shape(group: dict[str, Any], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a group that states no `level`: matrices fold at `level`, the rest is plain Adam.

    `group["params"]` is a list. Of (name, tensor) pairs, those named like an embedding or a head do not fold. Nothing
    is split where it would change nothing (level 0, scale 1, rule "adam") or where one side is empty.
    """
    ours = {key: group.get(key, defaults[key]) for key in PLAIN}
    named = [item if isinstance(item, tuple) else ("", item) for item in group["params"]]
    named = [(name, p) for name, p in named if isinstance(p, Tensor)]
    if "level" in group:
        vectors = [p for _, p in named if p.ndim < 2 and p.requires_grad]
        if group["level"] != 0 and 0 < len(vectors) < len(named):
            warn_once(
                f"a group states level={group['level']!r} itself, so its {len(vectors)} vectors (norms, biases) fold "
                "as its matrices do. If a wrapper has put the level there (ZeroRedundancyOptimizer does), write "
                "ZeroRedundancyOptimizer(param_groups(model, level=..., names=False), FOAM, ...) instead"
            )
        return [group]
    if ours == PLAIN:
        return [group]
    vocabulary = largest([p for name, p in named if p.ndim == 2 and is_table(name)])
    sides: dict[bool, list[Any]] = {True: [], False: []}
    for item in group["params"]:
        name, p = item if isinstance(item, tuple) else ("", item)
        folds = isinstance(p, Tensor) and is_matrix(p)
        sides[folds and not (name and (is_table(name) or is_head(name, p, vocabulary)))].append(item)
    if any(is_matrix(p) and p.requires_grad and (not name or name.startswith(UNNAMED)) for name, p in named):
        warn_once(
            "FOAM was given parameters without names, so every matrix folds, embeddings and the head too. Write "
            "FOAM(model, ...), or FOAM(model.named_parameters(), ...); with groups for weight decay "
            "FOAM(param_groups(model, weight_decay=0.1, no_decay=True), ...), and with transformers' Trainer "
            "Trainer(..., optimizers=(FOAM(model, ...), None))"
        )
    rest = {**group, "params": sides[False], **PLAIN}
    folded = {**group, "params": sides[True], **ours}
    return [g for g in (folded, rest) if g["params"]] or [folded]


_said: set[str] = set()


def warn_once(message: str) -> None:
    """Warn once a process, at the line outside of torch and torchfoam that led here."""
    if message in _said:
        return
    _said.add(message)
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "torchfoam"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def routing_table(opt: Any) -> str:
    """Which group every parameter went to and what it costs, as text: one line a group, with examples.

    Columns: group, rule, level, state kind, tensors, weights, bytes of state, state bytes a weight, parameter names.
    """
    rows = [("group", "rule", "level", "state", "tensors", "weights", "state bytes", "B/weight", "parameters")]
    total = [0, 0, 0]
    for k, group in enumerate(opt.param_groups):
        size = sum(x.numel() * x.element_size() for p in group["params"] for x in opt.state.get(p, {}).values())
        count = [len(group["params"]), sum(p.numel() for p in group["params"]), size]
        total = [a + b for a, b in zip(total, count)]
        names = group.get("param_names", ["x".join(map(str, p.shape)) for p in group["params"]])
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        label = group.get("name", f"{k}: {'unfolded' if group['level'] == 0 else 'folded'}")
        rows.append((label, group["rule"], str(group["level"]), group["state"], *_counts(count), shown))
    rows.append(("total", "", "", "", *_counts(total), ""))
    widths = [max(len(r[c]) for r in rows) for c in range(len(rows[0]))]
    align = ["<"] * 4 + [">"] * 4 + ["<"]
    return "\n".join("  ".join(f"{x:{a}{w}}" for x, a, w in zip(r, align, widths)).rstrip() for r in rows)


def _counts(count: list[int]) -> tuple[str, str, str, str]:
    return (*(f"{n:,}" for n in count), f"{count[2] / max(count[1], 1):.3f}")  # type: ignore[return-value]
