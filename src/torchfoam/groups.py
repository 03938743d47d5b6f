"""Which parameters fold: a model becomes parameter groups, and groups become a table one can read.

Attention and MLP matrices fold. Embeddings, output heads, norms, biases and vectors do not: they stay plain Adam
(level 0, scale 1) at the full learning rate. What a parameter is, is read off the module that owns it; patterns
override. This room builds groups; it holds no state and performs no steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import dropwhile, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .budget import fit_levels, parse_bytes
from .fold import Level, check_level
from .names import bare
from .options import check_options
from .shard import sharded
from .state import state_bytes

# Last resort, where a module tells nothing (a bare parameter, or (name, tensor) pairs): what the parts of a dotted path
# are called when they lead to a table of embeddings, and what such a parameter itself is called ...
EMBEDDING_WORDS = ("*embed*", "wte", "wpe", "tok", "shared", "relative_attention_bias")
TABLE_WORDS = ("*bias*", "*token", "*tokens", "pos", "pos_*", "*position*", "a_log")
# ... and when they lead to an output head; a head stands outside the numbered stack of layers
HEAD_WORDS = ("head", "*_head", "score", "classifier", "qa_outputs", "embed_out", "output_layer")

# what is said of folded parameters alone, and what the others are instead: AdamW
FOLDED_ONLY = ("level", "scale", "rule")
PLAIN: dict[str, Any] = {"level": 0, "scale": 1.0, "rule": "adam"}


def param_groups(
    model: nn.Module,
    *,
    level: int | str = 2,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
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
        check_options(given)
    ours = {"level": level, **{key: options.pop(key) for key in FOLDED_ONLY if key in options}}
    for p in model.parameters():
        if p.requires_grad:
            check_there(p)
    folding = foldable(model)
    wanted = {True: {**options, **ours}, False: {**options, **PLAIN}}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ValueError(f"FOAM cannot use the sparse gradients of {path!r}: build it with sparse=False")
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    _check_patterns(overrides, trainable)
    chosen: dict[str, dict[str, Any]] = {}
    for name, p in trainable:
        pattern = next((pattern for pattern in overrides if fnmatchcase(name, pattern)), "")
        changes = {k: x for k, x in overrides.get(pattern, {}).items() if p.ndim >= 2 or k not in FOLDED_ONLY}
        settings = {**wanted[folding[name]], **changes}
        label = "unfolded" if settings["level"] == 0 and settings.get("rule", "adam") == "adam" else "folded"
        chosen[name] = {"name": f"{label} {pattern}".rstrip(), **settings}
        if state_budget is not None and folding[name] and "level" not in changes:
            chosen[name]["level"] = None  # for the budget to decide
    if state_budget is not None:
        _fit(dict(trainable), chosen, parse_bytes(state_budget), residual_ratios or {}, check_level(level))
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, p in trainable:
        new = {"params": [], **chosen[name]}
        groups.setdefault((new["name"], folding[name]), new)["params"].append((name, p))
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
    fixed = sum(state_bytes(p, chosen[name]) for name, p in params.items() if name not in left)
    if unknown := sorted(set(ratios) - set(params)):
        raise ValueError(f"residual ratio of {unknown[0]!r}, which is no trainable parameter of the model")
    if fixed > budget:
        raise ValueError(
            f"the state cannot fit in {budget:,} bytes: what does not fold needs {fixed:,} alone; "
            "state='int8' makes it about a quarter"
        )
    settings = {id(p): chosen[name] for name, p in left.items()}
    fitted = fit_levels(
        left, budget - fixed, lambda p, level: state_bytes(p, {**settings[id(p)], "level": level}), ratios, measured_at
    )
    for name, level in fitted.items():
        chosen[name].update(level=level, name=f"{chosen[name]['name']} level {level}")


def _check_patterns(overrides: Mapping[str, Mapping[str, Any]], params: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ValueError for a pattern that would have no effect."""
    for pattern, changes in overrides.items():
        matched = [p for name, p in params if fnmatchcase(name, pattern)]
        if not matched:
            near = get_close_matches(pattern.replace("*", ""), [name for name, _ in params], n=3, cutoff=0.0)
            raise ValueError(f"override pattern {pattern!r} matches no trainable parameter; nearest: {', '.join(near)}")
        if all(p.ndim < 2 for p in matched) and (vain := [k for k in FOLDED_ONLY if k in changes]):
            raise ValueError(
                f"override pattern {pattern!r} sets {vain[0]}, but matches only vectors, which do not fold"
            )


def check_there(p: Tensor) -> None:
    """Raise ValueError for a parameter that is not there yet, or not the whole of it."""
    if is_lazy(p):
        raise ValueError("a lazy module's parameter has no shape yet: run the model once, then make the optimizer")
    if reason := sharded(p):
        raise ValueError(f"FOAM cannot be used on a parameter of shape {tuple(p.shape)}: {reason}")


def foldable(model: nn.Module) -> dict[str, bool]:
    """Name of each trainable parameter (tied ones once) -> whether it is an attention or MLP matrix."""
    heads = _heads(model)
    # every place a parameter sits in: a head tied to an embedding is found under both owners
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules():
        for leaf, p in module.named_parameters(recurse=False):
            owners.setdefault(id(p), []).append((f"{prefix}.{leaf}".lstrip("."), module))
    return {
        name: all(_folds(path, p, module, heads) for path, module in owners[id(p)])
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def _folds(path: str, p: Tensor, owner: nn.Module, heads: set[int]) -> bool:
    kind = type(owner).__name__
    if p.ndim < 2 or id(owner) in heads or "bias" in path.rpartition(".")[2]:
        return False
    if isinstance(owner, (nn.Linear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)) or kind == "Conv1D":
        return True
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)) or "Embed" in kind or "Norm" in kind:
        return False
    # a bare parameter of a module of the model's own: stacked experts, routers, position tables, class tokens
    return _is_matrix(p) and not _is_table(path)


def _heads(model: nn.Module) -> set[int]:
    """Ids of output-head modules: what a model names as its output embeddings and, outside the stack of layers, linear
    maps named like a head or shaped like the vocabulary's embedding."""
    heads = set()
    for module in model.modules():  # of every module: the model may be wrapped, or made of several
        with suppress(NotImplementedError):
            output = getattr(module, "get_output_embeddings", lambda: None)()
            if isinstance(output, nn.Module):
                heads.add(id(output))
    vocabulary = _largest([m.weight for m in model.modules() if isinstance(m, nn.Embedding)])
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and _is_head(f"{path}.weight", module.weight, vocabulary):
            heads.add(id(module))
    return heads


def _is_matrix(p: Tensor) -> bool:
    """A matrix or a stack of them; not a kernel of a convolution, nor a table with a batch dimension of 1."""
    return p.ndim == 2 or (p.ndim == 3 and p.shape[0] > 1)


def _is_table(path: str) -> bool:
    parts = path.lower().split(".")
    # what stands before the last numbered stack names a part of the model, not the parameter
    last = max((i for i, x in enumerate(parts) if x.isdigit()), default=0)
    return _like(parts[max(last - 1, 0) :], EMBEDDING_WORDS) or _like(parts[-1:], TABLE_WORDS)


def _is_head(path: str, p: Tensor, vocabulary: torch.Size | None) -> bool:
    parts = list(
        dropwhile(str.isdigit, bare(path.lower()).split("."))
    )  # the first number may be a place in nn.Sequential
    outside = list(takewhile(lambda x: not x.isdigit(), parts))
    return _like(outside, HEAD_WORDS) or (outside == parts and p.shape == vocabulary)


def _largest(tables: list[Tensor]) -> torch.Size | None:
    """Shape of the embedding with the most rows: the vocabulary, not positions or token types."""
    return max((p.shape for p in tables), key=lambda shape: shape[0], default=None)


def _like(parts: Iterable[str], words: Iterable[str]) -> bool:
    return any(fnmatchcase(part, word) for part in parts for word in words)


def split_by_shape(group: dict[str, Any], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a group that states no `level`: matrices fold at `level`, the rest is plain Adam.

    `group["params"]` is a list. Of (name, tensor) pairs, those named like an embedding or a head do not fold. Nothing
    is split where it would change nothing (level 0, scale 1, rule "adam") or where one side is empty.
    """
    ours = {key: group.get(key, defaults[key]) for key in FOLDED_ONLY}
    if "level" in group or ours == PLAIN:
        return [group]
    named = [item if isinstance(item, tuple) else ("", item) for item in group["params"]]
    vocabulary = _largest([p for name, p in named if isinstance(p, Tensor) and p.ndim == 2 and _is_table(name)])
    sides: dict[bool, list[Any]] = {True: [], False: []}
    for item, (name, p) in zip(group["params"], named):
        folds = isinstance(p, Tensor) and _is_matrix(p)
        sides[folds and not (name and (_is_table(name) or _is_head(name, p, vocabulary)))].append(item)
    rest = {**group, "params": sides[False], **PLAIN}
    folded = {**group, "params": sides[True], **ours}
    return [g for g in (folded, rest) if g["params"]] or [folded]


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
