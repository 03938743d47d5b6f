"""What a step minimizes: language modelling, and the classification or regression of whole texts.

An objective turns a batch into a loss summed over its terms (tokens, or examples), so that micro-batches and processes
add up to the mean over all, and says what the model predicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import TaskConfig, TrainConfig
from ..data import IGNORED
from ..models.language import loss_fn

Inputs = Tensor | dict[str, Tensor]  # input ids, or what the model takes by name; [rows, ...] each


class Objective(Protocol):
    def loss(self, model: nn.Module, inputs: Inputs, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """(the loss summed over the terms, what is predicted for each row or None)."""

    def terms(self, labels: Tensor) -> Tensor:
        """How many terms the loss sums over."""

    def tokens(self, inputs: Inputs, labels: Tensor) -> Tensor:
        """How many tokens are learnt from."""

    def of(self, ids: Tensor) -> tuple[Inputs, Tensor]:
        """(inputs, labels) of rows without padding, [rows, length], for what looks at shapes alone."""


class LanguageModelling:
    """The next token, from those before it: cross entropy over the labels that are not -100.

    Args:
        chunk: tokens whose logits exist at a time; 0 means all.
    """

    def __init__(self, chunk: int = 0) -> None:
        self.chunk = chunk

    def loss(self, model: nn.Module, inputs: Inputs, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        assert isinstance(inputs, Tensor)
        return loss_fn(model, inputs, labels, self.chunk), None

    def terms(self, labels: Tensor) -> Tensor:
        return (labels != IGNORED).sum()

    def tokens(self, inputs: Inputs, labels: Tensor) -> Tensor:
        return self.terms(labels)

    def of(self, ids: Tensor) -> tuple[Inputs, Tensor]:
        return ids, ids


class SequenceLabels:
    """One label a row, or one number.

        classes   -log softmax(logits)[label],     predicted: argmax of the logits
        number    (logit - label)^2,               predicted: the logit

    Args:
        regress: the labels are numbers.
    """

    def __init__(self, regress: bool) -> None:
        self.regress = regress

    def loss(self, model: nn.Module, inputs: Inputs, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        assert isinstance(inputs, dict)
        logits = model(**inputs).logits.float()
        if self.regress:
            return F.mse_loss(logits.squeeze(-1), labels, reduction="sum"), logits.detach().squeeze(-1)
        return F.cross_entropy(logits, labels, reduction="sum"), logits.detach().argmax(-1)

    def terms(self, labels: Tensor) -> Tensor:
        return torch.tensor(len(labels), device=labels.device)

    def tokens(self, inputs: Inputs, labels: Tensor) -> Tensor:
        assert isinstance(inputs, dict)
        return inputs["attention_mask"].sum()

    def of(self, ids: Tensor) -> tuple[Inputs, Tensor]:
        labels = torch.zeros_like(ids[:, 0])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return inputs, labels.float() if self.regress else labels


def objective(task: TaskConfig, train: TrainConfig) -> Objective:
    """What a run minimizes."""
    return SequenceLabels(task.name in ("regress", "stsb")) if task.name else LanguageModelling(train.chunked_loss)


def mapped(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The inputs with each tensor changed."""
    return {name: change(x) for name, x in inputs.items()} if isinstance(inputs, dict) else change(inputs)
