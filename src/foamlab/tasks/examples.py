"""The corpus of a task: rows of token ids with a label each, padded to the longest of their batch.

As `data.Corpus`, a batch is a pure function of seed, split and step. All but training reads its rows from the shortest
to the longest, so that little is padding.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tokenizers

from ..config import RunConfig
from ..data.corpus import drawn, share
from ..data.tokenizer import Tokenizer, choose, make
from ..errors import UserError
from ..models import Head, head_labels
from ..models.architectures import configuration
from ..models.classifiers import padding
from .metrics import METRICS
from .reading import Read, Row, read
from .table import TASKS

TOGETHER = 1000  # rows tokenized at once


def prepare(config: RunConfig, progress: Callable[[dict[str, Any]], None] = lambda fact: None) -> Examples:
    """Read and tokenize a task's rows.

    Args:
        config: with the tokenizer resolved.
        progress: is called with dicts that differ by "stage", as `data.prepare` does.

    Raises:
        UserError: what `reading.read` raises; an unknown label; a head that has other labels; an unknown metric.
    """
    task = TASKS[config.task.name]
    best = config.task.metric
    if best and best != "loss" and best not in task.metrics:
        known = ", ".join(("loss", *task.metrics))
        raise UserError(f"task.metric is {best!r}, {config.task.name} is judged by: {known}")
    splits = read(config)
    labels = () if task.regress else order(config, splits["train"].rows)
    return Examples(config, splits, labels, progress)


def order(config: RunConfig, rows: Sequence[Row]) -> tuple[str, ...]:
    """The labels in the order of the head: as the settings name them, as the task does, as the model's own head does,
    or sorted. Raises UserError where the model's head has others."""
    given = tuple(part.strip() for part in config.task.labels.split(",") if part.strip())
    seen = {row.label for row in rows}
    number = all(label.removeprefix("-").isdigit() for label in seen)
    labels = given or TASKS[config.task.name].labels or tuple(sorted(seen, key=int if number else str))
    if len(set(labels)) < 2:
        raise UserError(f"a classifier tells at least two labels apart; these rows have {' and '.join(sorted(seen))}")
    theirs = head_labels(config.model.name)
    if not theirs:
        return labels
    if set(labels) <= set(theirs):
        return theirs
    if len(theirs) == len(labels) and all(name == f"LABEL_{i}" for i, name in enumerate(theirs)):
        return labels
    raise UserError(
        f"{config.model.name} has a head of {len(theirs)} labels ({', '.join(theirs[:8])}), the rows have "
        f"{len(labels)} ({', '.join(labels[:8])}): give the model without its head, or name the labels as the head does"
    )


class Examples:
    """A task's rows, tokenized.

    Attributes:
        tokenizer, vocab_size, key, digest, warnings: as of `data.Corpus`.
        head: the model's head.
        pad_id: fills short rows: the model's own, which may read its ends off it, else the tokenizer's.
        splits: their names: "train", "validation" and then those kept for the end.
        order: of each split, which row of the files each of its rows is.
        longest: tokens of the longest row of all splits.
    """

    def __init__(
        self,
        config: RunConfig,
        splits: dict[str, Read],
        labels: tuple[str, ...],
        progress: Callable[[dict[str, Any]], None],
    ) -> None:
        self.config, self.labels, self.task = config, labels, TASKS[config.task.name]
        self.tokenizer: Tokenizer = make(choose(config.data.tokenizer, config.model.name)[0], iter(()))
        self.vocab_size = self.tokenizer.vocab_size
        model = configuration(config.model.name)
        self.pad_id = padding(model, self.tokenizer.pad_id)
        self.head = Head(labels, self.task.regress, self.pad_id)
        self.two_kinds = (getattr(model, "type_vocab_size", 0) or 0) > 1
        self.splits = ("train", "validation", *(name for name in splits if name not in ("train", "validation")))
        self.warnings: list[str] = []
        self.ids: dict[str, list[np.ndarray]] = {}
        self.kinds: dict[str, list[np.ndarray]] = {}
        self.gold: dict[str, np.ndarray] = {}
        self.order: dict[str, np.ndarray] = {}
        encode = self.encoder()
        for split, held in splits.items():
            self.add(split, held.rows, encode, lambda part: progress({"stage": "tokens", "share": part}))
            if held.left:
                more = f" and {len(held.left) - 1:,} more" if len(held.left) > 1 else ""
                self.warnings.append(f"left out of the {split} rows: {held.left[0]}{more}")
        for message in self.warnings:
            progress({"stage": "warning", "message": message})
        self.longest = max(len(ids) for rows in self.ids.values() for ids in rows)
        digest = hashlib.blake2b(json.dumps([labels, self.splits]).encode(), digest_size=16)
        for split in self.splits:
            for x in (*self.ids[split], *self.kinds[split], self.gold[split]):
                digest.update(len(x).to_bytes(8, "little") + x.tobytes())
        self.key = self.digest = digest.hexdigest()

    def encoder(self) -> tokenizers.Tokenizer:
        """The tokenizer as its model was trained with it: special tokens around and between texts, and a limit."""
        backend = tokenizers.Tokenizer.from_str(self.tokenizer.backend.to_str())
        backend.encode_special_tokens = True  # in the text they are text
        try:
            backend.enable_truncation(self.config.data.sequence)
            backend.encode("a", "b")
        except Exception as e:  # the library raises a bare Exception
            raise UserError(f"data.sequence {self.config.data.sequence} leaves no room for a text: {e}") from None
        return backend

    def add(self, split: str, rows: list[Row], encode: tokenizers.Tokenizer, progress: Callable[[float], None]) -> None:
        """Tokenize the rows of a split."""
        ids: list[np.ndarray] = []
        kinds: list[np.ndarray] = []
        cut = 0
        for start in range(0, len(rows), TOGETHER):
            progress(start / len(rows))
            texts = [row.texts if len(row.texts) > 1 else row.texts[0] for row in rows[start : start + TOGETHER]]
            for found in encode.encode_batch(texts):
                cut += bool(found.overflowing)
                own = found.ids or [self.pad_id]
                ids.append(np.array(own, np.uint32))
                kinds.append(np.array(found.type_ids or [0], np.uint8))
        if cut:
            limit = self.config.data.sequence
            self.warnings.append(
                f"{cut:,} of {len(rows):,} {split} rows are longer than data.sequence {limit} tokens and are cut there"
            )
        places = np.arange(len(rows))
        if split != "train":
            places = np.array(sorted(places, key=lambda i: len(ids[i])))
        self.order[split] = places
        self.ids[split], self.kinds[split] = [ids[i] for i in places], [kinds[i] for i in places]
        self.gold[split] = self.numbers(split, rows)[places]

    def numbers(self, split: str, rows: list[Row]) -> np.ndarray:
        """The labels as numbers: float32 of a regression, else int64; NaN and -1 where there are none.

        Raises:
            UserError: an unknown label.
        """
        if self.task.regress:
            return np.array([float(row.label) if row.label else math.nan for row in rows], np.float32)
        place = {label: i for i, label in enumerate(self.labels)}
        for row in rows:
            if row.label and row.label not in place and not (split.startswith("test") and row.label == "-1"):
                known = ", ".join(self.labels[:8]) + (", ..." if len(self.labels) > 8 else "")
                raise UserError(f"{row.where}: unknown label {row.label!r}; the labels are: {known}")
        return np.array([place.get(row.label, -1) for row in rows], np.int64)

    # ------------------------------------------------------------------ what the loop asks

    def labelled(self, split: str) -> bool:
        """Whether every row of a split has its label."""
        gold = self.gold[split]
        return bool(np.isfinite(gold).all()) if self.task.regress else bool((gold >= 0).all())

    def rows(self, split: str) -> int:
        """Rows of a split: one epoch."""
        return len(self.ids[split])

    @property
    def tokens_per_row(self) -> float:
        """Mean length of a training row."""
        return sum(map(len, self.ids["train"])) / len(self.ids["train"])

    def batch(
        self, split: str, step: int, rows: int, rank: int = 0, world: int = 1
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """This rank's part of a step's `rows` rows: ({"input_ids", "attention_mask", and where the
        model tells a pair's texts apart "token_type_ids"}, labels).

        Inputs are int64 [rows / world, longest], labels [rows / world]. Rows come in the order of `data.Corpus`.

        Raises ValueError if `rows` does not divide by `world`, UserError if a step wants more rows than there are.
        """
        n = self.rows(split)
        if split == "train" and rows > n:
            raise UserError(f"a batch of {rows} rows is more than the {n} training rows: lower train.batch")
        numbers = share(step, rows, rank, world)
        chosen = (drawn(numbers, n, self.config.train.seed) if split == "train" else numbers % n).tolist()
        width = max(len(self.ids[split][i]) for i in chosen)
        names = ("input_ids", "attention_mask", "token_type_ids")[: 3 if self.two_kinds else 2]
        inputs = {name: np.zeros((len(chosen), width), np.int64) for name in names}
        inputs["input_ids"].fill(self.pad_id)
        for k, i in enumerate(chosen):
            ids = self.ids[split][i]
            inputs["input_ids"][k, : len(ids)] = ids
            inputs["attention_mask"][k, : len(ids)] = 1
            if self.two_kinds:
                inputs["token_type_ids"][k, : len(ids)] = self.kinds[split][i]
        gold = self.gold[split][chosen]
        return inputs, np.nan_to_num(gold) if self.task.regress else gold.clip(min=0)

    def metrics(self, split: str, said: np.ndarray) -> dict[str, float | None]:
        """The task's figures for predictions in the order of `batch`; None where one cannot be told."""
        values = {name: METRICS[name](self.gold[split], said) for name in self.task.metrics}
        return {name: x if math.isfinite(x) else None for name, x in values.items()}

    def merit(self, loss: float, metrics: dict[str, float | None]) -> float:
        """By which the best checkpoint is chosen: larger is better."""
        names = (self.config.task.metric,) if self.config.task.metric else self.task.best
        values = [-loss if name == "loss" else metrics[name] for name in names]
        return math.fsum(-1.0 if x is None else x for x in values) / len(values)

    def describe(self) -> dict[str, Any]:
        """What the rows are, as JSON."""
        return {
            "name": self.config.data.name,
            "task": self.config.task.name,
            "hash": self.key,
            "rows": {split: self.rows(split) for split in self.splits},
            "tokens": {split: sum(map(len, self.ids[split])) for split in self.splits},
            "longest": self.longest,
            "labels": list(self.labels),
            "sequence": self.config.data.sequence,
            "tokenizer": self.config.data.tokenizer,
            "vocab_size": self.vocab_size,
            "warnings": self.warnings,
        }
