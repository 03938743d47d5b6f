"""The rivals that come from packages of others (extra `rivals`), each with the groups its paper uses.

Packages are imported when such an optimizer is built, not before. What stands where:

    adamw8bit    bitsandbytes, which has native CPU code; embeddings keep 32-bit state, as its paper advises
    galore       pytorch_optimizer; attention and MLP matrices are projected to a quarter of their smaller side
    apollo       our own (apollo.py says why); the same matrices
    adam-mini    the authors' own package: pytorch_optimizer's blocks are those of its first version (one second moment
                 a matrix), the paper's are one a row
    flash-adamw  pytorch_optimizer
    lora         peft
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import UserError, known_name
from .entry import (
    ADAM_RATES,
    BETAS,
    HIGH_RATES,
    SCALES,
    Entry,
    Named,
    Routed,
    Settings,
    hushed,
    matrices,
    plain_adamw,
    split,
    trainable,
)

INSTALL = "'torchfoam[rivals]'"
PROJECTIONS = ("std", "reverse_std", "right", "left", "full", "random")


def adamw8bit(model: nn.Module, kind: type, s: Settings, *, embedding_bits: int = 32, **options: Any) -> Optimizer:
    """bitsandbytes' 8-bit AdamW; embeddings with 32-bit state unless `embedding_bits` is 8."""
    if embedding_bits not in (8, 32):
        raise ValueError(f"embedding_bits must be 8 or 32, got {embedding_bits}")
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and embedding_bits == 32}
    groups = split(model, s)
    wide: Named = [(n, p) for g in groups for n, p in g["params"] if id(p) in tables]
    for group in groups:
        group["params"] = [(n, p) for n, p in group["params"] if id(p) not in tables]
    narrow = kind([g for g in groups if g["params"]], **s.adam, **options)
    return Routed(narrow, plain_adamw(wide, s, "embeddings")) if wide else narrow


def flash_adamw(model: nn.Module, kind: type, s: Settings, **options: Any) -> Optimizer:
    """FlashAdamW: 8-bit moments in groups of 32 with a float16 scale."""
    return kind(split(model, s), **s.adam, **options)


def galore(
    model: nn.Module,
    kind: type,
    s: Settings,
    *,
    rank: int = 0,
    update_proj_gap: int = 200,
    projection_type: str = "std",
    **options: Any,
) -> Optimizer:
    """GaLore on attention and MLP matrices, Adam on the rest. Its scale is ours; rank 0 is min(R, C) / 4."""
    # the package would find out in the first step
    known_name(projection_type, PROJECTIONS, "projection_type")
    if rank < 0 or update_proj_gap < 1:
        raise ValueError(f"rank must be at least 0, update_proj_gap at least 1; got {rank} and {update_proj_gap}")
    flat, rest = matrices(model)
    groups: dict[int, dict[str, Any]] = {}
    for n, p in flat:
        r = min(rank, *p.shape) if rank else quarter(p)
        projected = {
            "rank": r,
            "update_proj_gap": update_proj_gap,
            "scale": s.scale,
            "projection_type": projection_type,
        }
        groups.setdefault(r, {"name": f"rank {r}", "params": [], **projected})["params"].append((n, p))
    plain = [{"name": "rest", "params": rest}] if rest else []
    return kind([*groups.values(), *plain], **s.adam, **options)


def apollo(model: nn.Module, kind: type, s: Settings, *, rank: int = 0, **options: Any) -> Optimizer:
    """APOLLO on attention and MLP matrices, AdamW on the rest. Rank 0 is min(R, C) / 4."""
    flat, rest = matrices(model)
    groups: dict[int, dict[str, Any]] = {}
    for n, p in flat:
        r = min(rank, *p.shape) if rank else quarter(p)
        groups.setdefault(r, {"name": f"rank {r}", "params": [], "rank": r})["params"].append((n, p))
    low = kind(list(groups.values()), **s.adam, scale=s.scale, **options)
    return Routed(low, plain_adamw(rest, s)) if rest else low


def quarter(p: Any) -> int:
    """A quarter of the smaller side, the rank that the GaLore and APOLLO papers use."""
    return max(min(p.shape) // 4, 1)


def adam_mini(model: nn.Module, kind: type, s: Settings) -> Optimizer:
    """Adam-mini: one second moment a head of queries and keys, a row of other matrices, a vector; as Adam: biases."""
    text: Any = getattr(model, "config", None)
    heads = getattr(text, "num_attention_heads", 1)
    width = getattr(text, "hidden_size", heads)
    optimizer = kind(
        trainable(model), **s.adam, dim=width, n_heads=heads,
        n_kv_heads=getattr(text, "num_key_value_heads", heads), verbose=False,
    )  # fmt: skip
    # it takes a head to be width / heads wide, which models of other heads (Qwen3) refuse in the first step, or split
    optimizer.head_numel = (getattr(text, "head_dim", None) or width // heads) * width
    optimizer.check_block_name = False
    optimizer.named_parameters = []  # a list that nothing reads: it would be copied with the optimizer
    optimizer.world_size = 1  # it counts the GPUs that it sees as processes
    folding = {id(p) for g in split(model, s, always=True) if g["name"] == "matrices" for _, p in g["params"]}
    for group in optimizer.param_groups:
        if id(group["params"][0]) in folding:
            group["lr"] = s.lr * s.scale
    return optimizer


def lora(
    model: nn.Module, kind: type, s: Settings, *, rank: int = 16, alpha: int = 32, from_scratch: bool = False
) -> Optimizer:
    """AdamW on low-rank adapters of all attention and MLP matrices; the model's own weights are frozen.

    The adapters become part of `model`. Raises UserError on random weights unless `from_scratch`: adapters can only
    bend what a model already knows.
    """
    if not getattr(model, "name_or_path", "") and not from_scratch:
        raise UserError(
            "lora adapts a trained model: give its folder as --model.name (optimizer.options.from_scratch true trains "
            "adapters on random weights all the same)"
        )
    try:
        with hushed():
            from peft import LoraConfig, inject_adapter_in_model
    except ImportError as e:
        raise UserError(f"lora needs peft ({e}): pip install {INSTALL}") from None
    names = [n.removesuffix(".weight") for n, _ in matrices(model)[0]]
    with hushed():
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names), model)
    return plain_adamw(trainable(model), replace(s, lr=s.lr * s.scale), "adapters")


RIVALS: dict[str, Entry] = {
    "adamw8bit": Entry(
        "AdamW with 8-bit state", "bitsandbytes.optim:AdamW8bit", adamw8bit, 1e-3, BETAS, 1.0,
        "as AdamW; 32-bit state for embeddings as in its paper (Dettmers et al., arXiv 2110.02861)",
        tune={"lr": ADAM_RATES}, install=INSTALL, limits="tensors of fewer than 4,096 weights keep 32-bit state",
    ),
    "flash-adamw": Entry(
        "FlashAdamW: 8-bit state in small groups", "pytorch_optimizer:FlashAdamW", flash_adamw, 1e-3, BETAS, 1.0,
        "as AdamW, which it stands in for", tune={"lr": ADAM_RATES}, install=INSTALL,
        limits="a portable, slow implementation: its seconds are not those of the fused original",
    ),
    "adam-mini": Entry(
        "Adam-mini: one second moment a head or row", "adam_mini:Adam_mini", adam_mini, 1e-3, BETAS, 1.0,
        "as AdamW (Zhang et al., arXiv 2406.16793)", tune={"lr": ADAM_RATES}, install=INSTALL,
        limits="heads and rows are found by LLaMA's names; GPT-2's attention matrices have one second moment each",
    ),
    "galore": Entry(
        "GaLore: Adam in the leading quarter of singular directions", "pytorch_optimizer:GaLore", galore,
        1e-2, BETAS, 0.25, "Zhao et al., arXiv 2403.03507: lr 0.01, scale 0.25, rank 1/4, new every 200 steps",
        tune={"lr": HIGH_RATES, "scale": SCALES}, install=INSTALL, resumable=False,
        limits="its projections are objects that a safe checkpoint cannot hold; its SVD is slow on CPUs",
    ),
    "apollo": Entry(
        "APOLLO: Adam's channel-wise rates from a random quarter", "foamlab.optimizers.apollo:Apollo", apollo,
        1e-2, BETAS, 1.0, "Zhu et al., arXiv 2412.05270: lr 0.01, rank 1/4, alpha 1, new every 200 steps",
        tune={"lr": HIGH_RATES, "scale": (0.25, 0.5, 1.0, 2.0)}, limits="ours, not held against the authors' code",
    ),
    "apollo-mini": Entry(
        "APOLLO-Mini: one rate a matrix, from rank 1", "foamlab.optimizers.apollo:Apollo", apollo,
        1e-2, BETAS, sqrt(128), "Zhu et al., arXiv 2412.05270: lr 0.01, rank 1, alpha sqrt(128), new every 200 steps",
        {"rank": 1, "scaling": "tensor"}, {"lr": HIGH_RATES, "scale": tuple(sqrt(x) for x in (32, 64, 128, 256))},
        limits="ours, not held against the authors' code",
    ),
    "lora": Entry(
        "LoRA: AdamW on adapters of a pre-trained model", "torch.optim:AdamW", lora, 3e-4, BETAS, 1.0,
        "customary for adapters of rank 16 (Hu et al., arXiv 2106.09685: 2e-4)",
        tune={"lr": (1e-4, 3e-4, 1e-3, 3e-3)}, install=INSTALL, adapts=True,
        limits="only meaningful from a pre-trained folder; its checkpoints are of the model with adapters inside",
    ),
}  # fmt: skip
