"""`foamlab train`: train a model, or resume a run."""

from __future__ import annotations

import os
from pathlib import Path

from ...config import RunConfig
from ..command import INTERRUPTED, Command


def train(config: RunConfig, resume: str = "", dry_run: bool = False) -> int:
    """Train a language model from a preset or a YAML file, changed by flags, and write a run folder.

    Args:
        resume: run folder to resume from its last checkpoint, with its own settings.
        dry_run: resolve the settings, build the model without memory and show what would be trained; write nothing.
    """
    return begin(config, resume, dry_run)


def begin(config: RunConfig, resume: str, dry_run: bool) -> int:
    """Start or resume a run and show it, or preview it; the exit code. `finetune` starts its runs here too."""
    if dry_run:
        from ...training.preview import preview

        print(preview(config))
        return 0
    if os.environ.get("RANK", "0") == "0":
        print(f"{config.model.name} with {config.optimizer.name}: loading torch", flush=True)  # which takes seconds
    from ...training.run import train as run
    from ..run_display import display

    with display() as on_event:
        result = run(config, resume=Path(resume) if resume else None, on_event=on_event)
    return INTERRUPTED if result.status == "interrupted" else 0


COMMAND = Command(
    train,
    group="run",
    help="train a model, or resume a run",
    examples=(
        "foamlab train demo",
        "foamlab train llama-60m-paper --dry_run",
        "foamlab train demo --optimizer.name adamw --optimizer.lr 3e-3",
        "foamlab train my.yaml --train.steps 100 --optimizer.options.level 3",
        "foamlab train demo --print_config > my.yaml",
        "foamlab train --resume runs/llama-1m-foam-1",
    ),
)
