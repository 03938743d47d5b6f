"""Which parameters fold: a model becomes parameter groups, and groups become a table one can read.

Attention and MLP matrices fold. Embeddings, output heads, norms, biases and vectors do not: they stay plain Adam
(level 0, scale 1) at the full learning rate. What a parameter is, is read off the module that owns it; patterns
override. This room builds groups; it holds no state and performs no steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

# Last resort, where a module tells nothing (a bare parameter, or (name, tensor) pairs): words of a parameter's path
# that mean a table of embeddings or an output head.
EMBEDDING_WORDS = (
    "embed",
    "embedding",
    "embeddings",
    "embed_tokens",
    "wte",
    "wpe",
    "tok",
    "pos_embed",
    "cls_token",
)
HEAD_WORDS = ("lm_head", "head", "score", "classifier", "qa_outputs", "embed_out", "output_layer")

# what is said of folded parameters alone, and what the others are instead: AdamW
FOLDED_ONLY = ("level", "scale", "rule")
PLAIN: dict[str, Any] = {"level": 0, "scale": 1.0, "rule": "adam"}


def param_groups(
    model: nn.Module,
    *,
    level: int | str = 2,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into groups for `FOAM`; each is in exactly one, tied weights once.

    Args:
        model: any module. `nn.Linear`, transformers' `Conv1D`, `nn.MultiheadAttention` and stacked expert weights
            (3-D parameters) fold; embeddings, the head (tied or not), convolutions, norms and vectors do not.
        level: fold level of the group "folded".
        overrides: pattern -> options, matched against parameter names as a shell would (`"*.mlp.*": {"level": 3}`);
            the first match wins and makes a group of its own, starting from what the parameter would have had.
        options: any other per-group option of FOAM. `scale` and `rule` go to the folded group alone, the rest to all.

    Returns:
        Groups of (name, parameter) pairs with the keys `name`, `level` and the options given; unfolded ones state
        level 0, scale 1 and rule "adam".

    Raises:
        ValueError: a pattern that matches nothing (the nearest names are offered), or nothing to fold.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    >>> [(g["name"], [n for n, _ in g["params"]]) for g in param_groups(model)]
    [('folded', ['1.weight']), ('unfolded', ['0.weight', '1.bias'])]
    """
    ours = {"level": level, **{key: options.pop(key) for key in FOLDED_ONLY if key in options}}
    folding = foldable(model)
    if not any(folding.values()) and level != 0:
        raise ValueError(
            f"nothing folds in {type(model).__name__}: it has no trainable attention or MLP matrix; "
            "use level=0 for plain AdamW, or name matrices with overrides"
        )
    wanted = {True: {**options, **ours}, False: {**options, **PLAIN}}
    groups: dict[str, dict[str, Any]] = {}
    unmatched = set(overrides or ())
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        matches = [pattern for pattern in overrides or () if fnmatchcase(name, pattern)]
        unmatched -= set(matches)
        label = "folded" if folding[name] else "unfolded"
        chosen = wanted[folding[name]]
        if matches:
            chosen = {**chosen, **(overrides or {})[matches[0]]}
            label = f"{label} {matches[0]}"
        groups.setdefault(label, {"params": [], "name": label, **chosen})["params"].append((name, p))
    if unmatched:
        pattern = sorted(unmatched)[0]
        near = get_close_matches(pattern.strip("*."), list(folding), n=3, cutoff=0.3)
        raise ValueError(f"override pattern {pattern!r} matches no trainable parameter; nearest: {', '.join(near)}")
    return sorted(groups.values(), key=lambda g: not g["name"].startswith("folded"))


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
    if p.ndim < 2 or id(owner) in heads:
        return False
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)) or "Norm" in type(owner).__name__:
        return False
    if isinstance(owner, (nn.Linear, nn.MultiheadAttention, nn.RNNBase)) or type(owner).__name__ == "Conv1D":
        return True
    # a bare parameter of a module of the model's own: stacked experts, routers, position tables, class tokens
    return not _named(path, EMBEDDING_WORDS)


def _heads(model: nn.Module) -> set[int]:
    """Ids of output-head modules: what the model names as its output embeddings, and linear maps named like a head
    outside the stack of layers."""
    heads = set()
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(output, nn.Module):
        heads.add(id(output))
    stacks = [prefix + "." for prefix, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    for path, module in model.named_modules():
        linear = isinstance(module, nn.Linear)
        if linear and _named(path, HEAD_WORDS) and not any(path.startswith(stack) for stack in stacks):
            heads.add(id(module))
    return heads


def _named(path: str, words: Iterable[str]) -> bool:
    return bool(set(path.lower().split(".")) & set(words))


def split_by_shape(group: dict[str, Any], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a group that states no `level`: matrices fold at `level`, the rest is plain Adam.

    Of (name, tensor) pairs, those named like an embedding or a head do not fold. Nothing is split where it would
    change nothing (level 0, scale 1, rule "adam") or where one side is empty.
    """
    ours = {key: group.get(key, defaults[key]) for key in FOLDED_ONLY}
    if "level" in group or ours == PLAIN:
        return [group]
    params = group["params"]
    items = [params] if isinstance(params, Tensor) else list(params)
    sides: dict[bool, list[Any]] = {True: [], False: []}
    for item in items:
        name, p = item if isinstance(item, tuple) else ("", item)
        folds = isinstance(p, Tensor) and p.ndim >= 2 and not _named(name, EMBEDDING_WORDS + HEAD_WORDS)
        sides[folds].append(item)
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
