"""What a model is worth on rows that it does not learn from, and the end of a task: its best checkpoint, told once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import UserError
from ..tasks import predictions
from ..tasks.examples import Examples
from . import checkpoint
from .step import cut

if TYPE_CHECKING:
    from .loop import Training


def validate(run: Training) -> tuple[float, dict[str, float | None]] | None:
    """(mean loss, metrics) over the validation split: for a language model its first `eval_tokens` and no metrics.

    None where nothing is to be evaluated.
    """
    t, corpus = run.config.train, run.corpus
    rows = corpus.rows("validation")
    if not isinstance(corpus, Examples):
        rows = min(max(t.eval_tokens // run.config.data.sequence, 1), rows)
    if not rows or not t.eval_tokens:
        return None
    loss, said = measure(run, "validation", rows)
    return loss, corpus.metrics("validation", said) if isinstance(corpus, Examples) else {}


@torch.no_grad()
def measure(run: Training, split: str, rows: int) -> tuple[float, np.ndarray]:
    """Mean loss a term over the first rows of a split, and what is predicted for each (zeros by a language model)."""
    t, world, take = run.config.train, run.world, run.take
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    said = torch.zeros(rows, dtype=torch.float64, device=world.device)
    run.model.eval()
    for k in range(-(-rows // t.batch)):
        first = k * t.batch + world.rank * (t.batch // world.size)
        for inputs, labels in cut(*run.rows(split, k, rows - first), t.micro_batch):
            loss, told = take.loss(run.model, inputs, labels)
            total[0] += loss
            total[1] += take.objective.terms(labels)
            if told is not None:
                said[first : first + len(told)] = told
            first += len(labels)
    run.model.train()
    loss, terms = world.sum(total).tolist()
    return loss / max(terms, 1), world.sum(said).cpu().numpy()  # each process fills its own places


def conclude(run: Training) -> dict[str, Any]:
    """Go back to the best checkpoint, and tell its metrics and predictions on the splits kept for the end.

    Returns:
        {"best": {"checkpoint", "step", "loss", metric: value}, SPLIT: {"loss", metric: value, "predictions": file}};
        of a split without labels no loss and no metrics.
    """
    corpus = run.corpus
    found: dict[str, Any] = {}
    if run.best:
        folder = run.folder / "checkpoints" / f"step-{run.best['step']:08d}"
        if run.best["step"] != run.step:
            if fault := checkpoint.damage(folder):
                raise UserError(f"the best checkpoint cannot be tested: {fault}")
            checkpoint.load_weights(folder, run.model)
        found["best"] = {"checkpoint": str(folder), **{k: x for k, x in run.best.items() if k != "merit"}}
    for split in corpus.splits[2:]:
        loss, said = measure(run, split, corpus.rows(split))
        found[split] = {"loss": loss, **corpus.metrics(split, said)} if corpus.labelled(split) else {}
        if split.startswith("test"):
            if run.recorder:
                predictions.write(run.folder, corpus, split, said)
            found[split]["predictions"] = predictions.name(corpus, split)
    return found
