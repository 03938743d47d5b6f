"""What a parameter is: a matrix, a table of embeddings, an output head, a norm, a bias. Read off the module that owns
it, where there is one, else off its name."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import dropwhile, takewhile

import torch
from torch import Tensor, nn

from .names import bare

# Last resort, where a module tells nothing (a bare parameter, or (name, tensor) pairs): what the parts of a dotted path
# are called when they lead to a table of embeddings, and what such a parameter itself is called ...
EMBEDDING_WORDS = ("*embed*", "wte", "wpe", "tok", "shared", "relative_attention_bias")
TABLE_WORDS = (
    "*bias*", "*token", "*tokens", "pos", "pos_*", "*_pos", "*_pos_*", "*position*", "a_log",
    "query", "queries", "*_queries", "latents", "latents_*",
)  # fmt: skip
# ... and when they lead to an output head; a head stands outside the numbered stack of layers. What lies below a list
# of heads may be layers of their own: heads are only its members themselves, and what is shaped like the vocabulary.
HEAD_WORDS = (
    "head", "*_head", "head_*", "score", "*classifier", "*classifiers", "qa_outputs", "embed_out", "output_layer",
    "*class_embed", "*bbox_embed", "dense_prediction", "seq_relationship", "predict_*", "*logits*",
)  # fmt: skip
HEAD_LISTS = ("heads", "*_heads")
# what a model calls its own last layer, and a block its projection
LAST_WORDS = ("fc", "fc_out", "out", "output", "output_projection")
BIAS_WORDS = ("*bias", "*biases", "bias_*")

# kinds of parameters that the field keeps out of weight decay
KINDS = ("vectors", "norms", "biases", "embeddings")

Owners = list[tuple[str, nn.Module]]


def foldable(model: nn.Module) -> dict[str, bool]:
    """Name of each trainable parameter (tied ones once) -> whether it is an attention or MLP matrix."""
    heads = _heads(model)
    vocabulary = largest([m.weight for m in model.modules() if isinstance(m, nn.Embedding)])
    # a head tied to an embedding is found under both owners
    return {
        name: all(_folds(path, p, module, heads, vocabulary) for path, module in owners)
        for name, p, owners in _owned(model)
    }


def undecayed(model: nn.Module, kinds: Iterable[str]) -> set[str]:
    """Names of the trainable parameters of these kinds.

    vectors: fewer than two dimensions. norms: of a module that is one, by its type or its name. biases: called so, in
    stacks of experts too. embeddings: tables of tokens and positions, whether or not a head is tied to them.
    """
    return {name for name, p, owners in _owned(model) for kind in kinds if _is_kind(kind, p, owners)}


def _owned(model: nn.Module) -> list[tuple[str, Tensor, Owners]]:
    """(name, parameter, every place it sits in) of each trainable parameter; tied ones once."""
    owners: dict[int, Owners] = {}
    for prefix, module in model.named_modules():
        for leaf, p in module.named_parameters(recurse=False):
            owners.setdefault(id(p), []).append((f"{prefix}.{leaf}".lstrip("."), module))
    return [(name, p, owners[id(p)]) for name, p in model.named_parameters() if p.requires_grad]


def _folds(path: str, p: Tensor, owner: nn.Module, heads: set[int], vocabulary: torch.Size | None) -> bool:
    if not is_matrix(p) or "bias" in path.rpartition(".")[2] or id(owner) in heads:
        return False
    if isinstance(owner, nn.modules.conv._ConvNd) or _is_table_or_norm(owner) or is_head(path, p, vocabulary):
        return False
    linear = (nn.Linear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
    # else a bare parameter of a module of the model's own: stacked experts, routers, position tables, class tokens
    return isinstance(owner, linear) or type(owner).__name__ == "Conv1D" or not is_table(path)


def _is_kind(kind: str, p: Tensor, owners: Owners) -> bool:
    if kind == "vectors":
        return p.ndim < 2
    for path, owner in owners:
        parts, norm = path.lower().split("."), "norm" in type(owner).__name__.lower()
        if kind == "biases" and _like(parts, BIAS_WORDS):
            return True
        if kind == "norms" and (norm or _like(parts[:-1], ("*norm",))):
            return True
        computes = norm or isinstance(owner, (nn.Linear, nn.MultiheadAttention, nn.modules.conv._ConvNd))
        if kind == "embeddings" and p.ndim >= 2 and not computes and (_is_table_or_norm(owner) or is_table(path)):
            return True
    return False


def _is_table_or_norm(owner: nn.Module) -> bool:
    kind = type(owner).__name__
    return isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) or "Embed" in kind or "Norm" in kind


def _heads(model: nn.Module) -> set[int]:
    """Ids of the modules that a model itself names as its output, as transformers' and timm's models do."""
    heads: set[int] = set()
    for module in model.modules():  # of every module: the model may be wrapped, or made of several
        for question in ("get_output_embeddings", "get_classifier"):
            with suppress(Exception):  # the user's method of that name may answer another question, or ask one itself
                output = getattr(module, question, lambda: None)()
                parts = output if isinstance(output, (tuple, list)) else (output,)
                heads.update(id(x) for x in parts if isinstance(x, nn.Module))
    return heads


def is_matrix(p: Tensor) -> bool:
    """A matrix or a stack of them; not a vector written with dimensions of 1, a table with a batch dimension of 1, nor
    a kernel of a convolution."""
    return (p.ndim == 2 and p.shape[0] > 1) or (p.ndim == 3 and min(p.shape) > 1)


def is_table(path: str) -> bool:
    """Whether the name is one of a table of embeddings."""
    parts = path.lower().split(".")
    # what stands before the last numbered stack names a part of the model, not the parameter
    last = max((i for i, x in enumerate(parts) if x.isdigit()), default=0)
    return _like(parts[max(last - 1, 0) :], EMBEDDING_WORDS) or _like(parts[-1:], TABLE_WORDS)


def is_head(path: str, p: Tensor, vocabulary: torch.Size | None) -> bool:
    """Whether the name, or the shape of the vocabulary's embedding, is one of an output head."""
    names = bare(path.lower()).split(".")
    parts = list(dropwhile(str.isdigit, names))  # the first number may be a place in nn.Sequential
    outside = list(takewhile(lambda x: not x.isdigit(), parts))
    if _like(outside, HEAD_WORDS) or (len(names) == 2 and names[0] in LAST_WORDS):
        return True
    shaped = p.shape == vocabulary
    if _like(outside, HEAD_LISTS):
        below = parts[next(i for i, x in enumerate(parts) if _like([x], HEAD_LISTS)) + 1 :]
        return shaped or all(x.isdigit() for x in below[:-1])
    return outside == parts and shaped


def largest(tables: list[Tensor]) -> torch.Size | None:
    """Shape of the embedding with the most rows: the vocabulary, not positions or token types."""
    return max((p.shape for p in tables), key=lambda shape: shape[0], default=None)


def _like(parts: Iterable[str], words: Iterable[str]) -> bool:
    return any(fnmatchcase(part, word) for part in parts for word in words)
