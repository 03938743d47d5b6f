"""A run small enough for a test: model folders, a text and settings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from foamlab.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig

TIMES = ("seconds", "tokens_per_second")  # what may differ between runs that are otherwise the same


def prepare(home: Path) -> Path:
    """Make two tiny models (one with tied weights and dropout) and documents of uneven length in `home`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(1)
    shape: dict[str, Any] = {"vocab_size": 258, "hidden_size": 12, "intermediate_size": 19, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).save_pretrained(home / "llama")
    gpt = GPT2Config(vocab_size=258, n_embd=12, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0.2, embd_pdrop=0.2)
    GPT2LMHeadModel(gpt).save_pretrained(home / "gpt2")
    draw = random.Random(0)
    (home / "text").mkdir()
    for i in range(120):
        words = (draw.choice(["foam", "folds", "the", "moments", "of", "a", "row"]) for _ in range(draw.randint(2, 20)))
        (home / "text" / f"{i}.txt").write_text(f"{i} " + " ".join(words))
    return home


def config(home: Path, out: Path, optimizer: str = "foam", model: str = "llama", **changes: Any) -> RunConfig:
    """Settings of a run in `out`; `changes` go to the part that has such a field."""
    run = RunConfig(
        model=ModelConfig(name=str(home / model)),
        data=DataConfig(
            name=f"text:{home / 'text'}", tokenizer="bytes", sequence=16, validation=0.2, cache=str(home / "cache")
        ),
        optimizer=OptimizerConfig(name=optimizer),
        train=TrainConfig(steps=6, batch=4, eval_every=3, eval_tokens=200, checkpoint_every=3, threads=1, sample=""),
        out=str(out),
    )
    for key, value in changes.items():
        part = next(p for p in (run.train, run.data, run.optimizer) if hasattr(p, key))
        setattr(part, key, value)
    return run


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The record of a run without times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def to_plan(
    model: str = "llama-1m",
    optimizer: str = "foam",
    sequence: int = 64,
    checkpointing: bool = False,
    options: dict[str, Any] | None = None,
    **train: Any,
) -> RunConfig:
    """A run as the planner is asked about it: a model of the table, no text."""
    return RunConfig(
        model=ModelConfig(model, checkpointing),
        data=DataConfig(sequence=sequence),
        optimizer=OptimizerConfig(optimizer, options=options or {}),
        train=TrainConfig(**{"batch": 2, "precision": "float32", **train}),
    )
