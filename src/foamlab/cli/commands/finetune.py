"""`foamlab finetune`: fine-tune a model that is there on rows with labels."""

from __future__ import annotations

from ...config import RunConfig
from ...errors import UserError
from ..command import Command
from .train import begin


def finetune(config: RunConfig, resume: str = "", dry_run: bool = False) -> int:
    """Fine-tune all weights of a model on rows with labels, and write a run folder.

    Args:
        resume: run folder to resume from its last checkpoint, with its own settings.
        dry_run: resolve the settings, read the rows, build the model without memory and show what would be trained;
            write nothing.
    """
    if not config.task.name:
        raise UserError("finetune takes a task first, such as classify: see `foamlab finetune --help`")
    if config.model.name == RunConfig().model.name:
        raise UserError("finetune takes a model: give its folder or its name on the hub with --model")
    return begin(config, resume, dry_run)


COMMAND = Command(
    finetune,
    group="run",
    help="fine-tune a model on rows with labels (GLUE's tasks or your own)",
    examples=(
        "foamlab finetune classify --model FOLDER --data reviews.jsonl",
        "foamlab finetune pairs --model OWNER/NAME --data train.tsv --task.columns premise,hypothesis --train.epochs 5",
        "foamlab finetune regress --model FOLDER --data train.csv --task.validation dev.csv --task.test test.csv",
        "foamlab finetune rte --model FOLDER --data GLUE/RTE --optimizer.lr 2e-5",
        "foamlab finetune classify --model FOLDER --data FOLDER --dry_run",
        "foamlab finetune --resume runs/FOLDER-foam-1",
    ),
    first_word=("TASK", "FILE.yaml"),
    # as transformers' examples have them
    defaults={
        "optimizer.weight_decay": 0.01,
        "train.epochs": 3.0,
        "train.schedule": "linear",
        "train.final": 0.0,
        "train.sample": "",
        "train.eval_every": 200,
        "train.checkpoint_every": 1000,
        "train.keep": 1,
    },
)
