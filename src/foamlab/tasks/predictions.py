"""The predictions of a task's test rows as a file: GLUE's own form for its tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..files import write_atomically, writing
from .examples import Examples


def name(examples: Examples, split: str) -> str:
    """The file's name."""
    return examples.task.glue.submission[split] if examples.task.glue else "predictions.tsv"


def write(folder: Path, examples: Examples, split: str, said: np.ndarray) -> Path:
    """Write `index<TAB>prediction` for each row of a test split, in the order of its file; returns the path.

    Args:
        folder: the run folder.
        examples: whose split it is.
        split: its name.
        said: predictions in the order of `Examples.batch`.
    """
    glue = examples.task.glue
    values = np.empty_like(said)
    values[examples.order[split]] = said
    if examples.task.regress:  # STS-B's scores lie between 0 and 5
        words = [f"{x:.3f}" for x in (values.clip(0, 5) if glue else values)]
    else:
        words = [examples.labels[int(x)] for x in values]
    lines = ["index\tprediction", *(f"{i}\t{word}" for i, word in enumerate(words))]
    path = folder / name(examples, split)
    with writing(folder):
        write_atomically(path, "\n".join(lines) + "\n")
    return path
