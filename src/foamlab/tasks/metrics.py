"""How good predictions are: the figures by which GLUE's tasks are judged. Needs numpy alone.

gold, said: the right labels and the predicted ones, [rows]: numbers of classes, or numbers to be met.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np


def accuracy(gold: np.ndarray, said: np.ndarray) -> float:
    """Share that is right."""
    return float((gold == said).mean())


def f1(gold: np.ndarray, said: np.ndarray, label: int = 1) -> float:
    """2 TP / (2 TP + FP + FN) of one label; 0 where it is neither right nor predicted."""
    hits = int(((gold == label) & (said == label)).sum())
    return 2 * hits / max(int((gold == label).sum()) + int((said == label).sum()), 1)


def macro_f1(gold: np.ndarray, said: np.ndarray) -> float:
    """Mean of F1 over the labels that are right or predicted somewhere."""
    found = np.union1d(gold, said)
    return math.fsum(f1(gold, said, int(label)) for label in found) / len(found)


def matthews(gold: np.ndarray, said: np.ndarray) -> float:
    """Matthews' correlation, for any number of labels:

    (s c - sum_k t_k p_k) / sqrt((s^2 - sum p_k^2)(s^2 - sum t_k^2)),  s rows, c right, t_k of label k, p_k predicted

    0 where one side has a single label.
    """
    found = np.union1d(gold, said)
    t = np.array([(gold == label).sum() for label in found], float)
    p = np.array([(said == label).sum() for label in found], float)
    s, c = float(len(gold)), float((gold == said).sum())
    below = math.sqrt(max((s * s - float(p @ p)) * (s * s - float(t @ t)), 0.0))
    return (s * c - float(t @ p)) / below if below else 0.0


def pearson(gold: np.ndarray, said: np.ndarray) -> float:
    """Linear correlation; NaN where one side is constant."""
    x, y = gold - gold.mean(), said - said.mean()
    below = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / below if below else math.nan


def spearman(gold: np.ndarray, said: np.ndarray) -> float:
    """Correlation of the ranks; those that are equal share the mean of their ranks."""
    return pearson(ranks(gold), ranks(said))


def ranks(x: np.ndarray) -> np.ndarray:
    """Each value's rank, from 1; equal ones have the mean of theirs."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse].astype(float)


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
