"""From a corpus to batches: `prepare` gives a `Corpus`, whose batch is a pure function of seed, split and step.

Which text, and how it becomes documents, is in `sources.py` and `formats.py`; tokens and their cache in `cache.py`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import DataConfig, RunConfig
from ..errors import UserError
from .cache import cached
from .documents import SPLITS, Split
from .sources import Progress
from .tokenizer import DEFAULT, Tokenizer, choose

VERSION = 2  # of how text is read and split (`DataConfig.version`)

IGNORED = -100  # the label that cross entropy leaves out (torch's own default)
ROUNDS = 8


def prepare(config: DataConfig, seed: int, progress: Progress | None = None) -> Corpus:
    """Open the token cache of `config`, building it if need be, and return its corpus.

    `progress` is called with dicts that differ by "stage": hash, tokenizer and tokens (with "share" from 0 to 1, or
    None if unknown; tokens also has "documents", "bytes" and "tokens"), check (of an old cache), wait (another process
    builds the same cache) and warning (with "message").

    Raises UserError for unknown names, missing or unreadable text, an empty corpus, a corpus too small for one row of
    `config.sequence` tokens in either split, a cache that cannot be written, and data of which too much gives no text.
    """
    _check(config)
    config = replace(config, tokenizer=config.tokenizer or DEFAULT, version=config.version or VERSION)
    return Corpus(*cached(config, progress or (lambda fact: None)), config, seed)


def settle(config: RunConfig, version: int = VERSION) -> tuple[RunConfig, str]:
    """The settings with tokenizer and data version filled in, and a warning about the tokenizer or "".

    Args:
        version: data version if the settings leave it open; for an old run, its own.

    Raises:
        UserError: a model without the tokenizer that it needs; a tokenizer or hub model that does not exist.
    """
    tokenizer, remark = choose(config.data.tokenizer, config.model.name)
    data = replace(config.data, tokenizer=tokenizer, version=config.data.version or version)
    return replace(config, data=data), remark


def _check(config: DataConfig) -> None:
    if config.sequence < 1:
        raise UserError(f"data.sequence must be at least 1, got {config.sequence}")
    if not 0 <= config.validation < 1:
        raise UserError(f"data.validation is a share of the documents, from 0 to below 1; got {config.validation}")
    if config.limit < 0 or config.workers < 0:
        raise UserError(f"data.limit and data.workers must not be negative, got {config.limit} and {config.workers}")
    if not 0 <= config.lost <= 1:
        raise UserError(f"data.lost is a share of the text, from 0 to 1; got {config.lost}")
    if config.version not in range(VERSION + 1):
        raise UserError(f"data.version is 0 (the newest) to {VERSION}, got {config.version}")
    if config.mode not in ("packed", "paper"):
        raise UserError(f"data.mode is packed or paper, got {config.mode!r}")


class Corpus:
    """Tokens on disk, seen as rows of `config.sequence` inputs and as many labels.

    packed: documents joined, each ended by eos, and cut into rows of S + 1 tokens that overlap by one, so that every
    token but the first is a label once. Rows may span documents. A remainder shorter than a row is not used.
    paper: one document per row, truncated to S + 1 tokens, padded with `pad_id`; labels of padding are -100.

    Attributes:
        tokenizer: encode, decode, eos_id, pad_id, save(folder).
        vocab_size: ids lie below it.
        warnings: warnings from building the cache, one line each.
        key, digest: a hash of all that determines the tokens, and one of the tokens themselves (empty for the cache of
            a stream that was written before there were such).
    """

    def __init__(self, folder: Path, about: dict[str, Any], config: DataConfig, seed: int) -> None:
        self.folder = folder
        self.about = about
        self.config = config
        self.seed = seed
        self.tokenizer = Tokenizer.load(folder)
        self.vocab_size: int = about["vocab_size"]
        self.warnings: list[str] = about["warnings"]
        self.key: str = about["key"]
        self.digest = "".join(about.get("sha256", {}).get(f"{split}.bin", "") for split in SPLITS)
        self._tokens = {split: _map(folder / f"{split}.bin", about["dtype"]) for split in SPLITS}
        self._offsets = {split: _map(folder / f"{split}.offsets", "int64") for split in SPLITS}
        for split in SPLITS if config.validation else SPLITS[:1]:
            if not self.rows(split):
                more = "bring more text" + (" or raise data.validation" if split == "validation" else "")
                raise UserError(
                    f"the {split} split of {config.name} has {len(self.tokens(split))} tokens, less than one row of "
                    f"{config.sequence} and a label: lower data.sequence or {more}"
                )

    def tokens(self, split: Split) -> np.ndarray:
        """All token ids of a split, [tokens], uint16 or uint32, mapped from disk and read only."""
        return self._tokens[split]

    def offsets(self, split: Split) -> np.ndarray:
        """Where each document of a split begins among its tokens, and the end: [documents + 1], int64."""
        return self._offsets[split]

    def rows(self, split: Split) -> int:
        """Rows of a split: one epoch."""
        if self.config.mode == "paper":
            return len(self._offsets[split]) - 1
        return max(0, (len(self._tokens[split]) - 1) // self.config.sequence)

    @property
    def tokens_per_row(self) -> float:
        """Length of a row."""
        return self.config.sequence

    def batch(self, split: Split, step: int, rows: int, rank: int = 0, world: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """This rank's part of a step's `rows` rows: (input ids, labels), both int64 [rows / world, S].

        Labels are already shifted: labels[i, j] is the token that follows input_ids[i, j], or -100 for padding.

        Row i of step s is number g = s * rows + i of the run: training reads it at place g mod n of a permutation of
        the n rows that is drawn anew for each epoch g // n, so an epoch sees each row once. Validation has one
        permutation for all seeds, so its batches are the same in every run; after n rows it starts over. Ranks
        hold consecutive parts: joined, they are the batch of world = 1.

        Raises ValueError if `rows` does not divide by `world`, UserError if the training split has fewer rows than
        a step wants or validation has none.
        """
        n = self.rows(split)
        if n == 0 or (split == "train" and rows > n):
            raise UserError(
                f"a batch of {rows} rows is more than the {n} rows of {self.config.sequence} tokens in the {split} "
                "split: lower train.batch or data.sequence, or bring more text"
            )
        numbers = share(step, rows, rank, world)
        if split == "validation":
            return self._gather(split, permuted(numbers % n, n, "validation"))
        return self._gather(split, drawn(numbers, n, self.seed))

    def _gather(self, split: Split, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = self._tokens[split]
        offsets = self._offsets[split]
        length = self.config.sequence
        inputs = np.full((len(chosen), length), self.tokenizer.pad_id, np.int64)
        labels = np.full((len(chosen), length), IGNORED, np.int64)
        for i, row in enumerate(chosen.tolist()):
            if self.config.mode == "paper":
                start = int(offsets[row])
                end = min(int(offsets[row + 1]), start + length + 1)
            else:
                start = row * length
                end = start + length + 1
            inputs[i, : min(length, end - start)] = tokens[start : min(end, start + length)]
            labels[i, : end - start - 1] = tokens[start + 1 : end]
        return inputs, labels

    def describe(self) -> dict[str, Any]:
        """What the corpus is, as JSON. Its "hash" names all that determines the tokens (it is the key of the cache)."""
        kept = ("bytes", "duplicates", "blank", "not_unicode", "warnings", "versions")
        return {
            "name": self.config.name,
            "hash": self.key,
            "documents": {split: len(self.offsets(split)) - 1 for split in SPLITS},
            "tokens": {split: len(self.tokens(split)) for split in SPLITS},
            "rows": {split: self.rows(split) for split in SPLITS},
            "sequence": self.config.sequence,
            "mode": self.config.mode,
            "tokenizer": self.config.tokenizer,
            "vocab_size": self.vocab_size,
            "version": self.config.version,
            "lost": self.about.get("lost", 0.0),
            **{name: self.about[name] for name in kept},
            "source": {**self.about["source"], **self.about["about"]},
            "cache": str(self.folder),
        }


def _map(path: Path, dtype: str) -> np.ndarray:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r").view(np.ndarray)


def share(step: int, rows: int, rank: int, world: int) -> np.ndarray:
    """The numbers of a rank's part of a step's `rows` rows, counted over the run: int64 [rows / world]."""
    if rows % world or not 0 <= rank < world:
        raise ValueError(f"{rows} rows do not divide among {world} ranks (rank {rank}): choose a multiple")
    part = rows // world
    return np.arange(step * rows + rank * part, step * rows + (rank + 1) * part, dtype=np.int64)


def drawn(numbers: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Which of n rows the run reads as its rows `numbers` (in order): each once in every epoch, in an order of its
    own."""
    chosen = np.empty_like(numbers)
    for epoch in range(int(numbers[0]) // n, int(numbers[-1]) // n + 1) if len(numbers) else ():
        here = numbers // n == epoch
        chosen[here] = permuted(numbers[here] % n, n, f"train {seed} {epoch}")
    return chosen


def permuted(places: np.ndarray, n: int, key: str) -> np.ndarray:
    """Where a pseudo-random permutation of 0 ... n - 1, named by `key`, sends `places`: int64, the same shape.

    A Feistel network on pairs (x, y) of a grid of a by b >= n points: x <- x + f(y) mod a, y <- y + f(x) mod b, and so
    on, walked on from the few points beyond n. So it needs no memory that grows with n.
    """
    a = math.isqrt(n - 1) + 1
    sides = np.uint64(a), np.uint64(-(-n // a))
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest(), "<u8")
    out = places.astype(np.uint64)
    todo = np.ones(out.shape, bool)
    while todo.any():
        pair = list(np.divmod(out[todo], sides[1]))
        for turn, round_key in enumerate(keys):
            one, other = turn % 2, 1 - turn % 2
            mixed = (pair[other] ^ round_key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
            pair[one] = (pair[one] + (mixed >> np.uint64(32))) % sides[one]
        out[todo] = pair[0] * sides[1] + pair[1]
        todo = out >= n
    return out.astype(np.int64)
