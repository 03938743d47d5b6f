"""Documents before tokenizing: duplicates and blanks dropped, each document or passage assigned to its split.

The split is the first 64 bits of a text's hash, as a fraction, against the validation share: it does not change when
other documents are added or removed.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Literal

from ..config import DataConfig

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")
PIECE = 1 << 19  # characters tokenized at once; longer documents are cut at a line end
PASSAGE = 1 << 13  # characters that are held out together


@dataclass(frozen=True)
class Piece:
    """A document, or part of a long one: its text, its split, and whether the document ends here."""

    text: str
    split: Split
    ends: bool = True


class Distinct:
    """The documents of a source without blanks and duplicates, at most `limit`, each with its split.

    Documents differ in length and kind, so a few long ones held out whole do not represent the others. Those of
    over 1.5 PASSAGE characters are therefore split by passages, at line ends; consecutive passages of the same
    split stay one document. (Version 1 held out whole documents.) Documents whose second 64 bits of hash are above
    `bound` are left out. Memory: about 100 bytes per document.
    """

    def __init__(self, texts: Iterator[str], config: DataConfig, bound: bytes = b"\xff" * 8) -> None:
        self.texts = texts
        self.bound = bound
        self.limit = config.limit
        self.share = config.validation
        self.whole = config.version == 1
        self.counts = {"documents": 0, "bytes": 0, "duplicates": 0, "blank": 0, "not_unicode": 0}

    def __iter__(self) -> Iterator[Piece]:
        counts = self.counts
        for text, size, digest in self.distinct():
            if digest[8:] > self.bound:
                continue
            counts["documents"] += 1
            counts["bytes"] += size
            if self.whole or not self.share:
                yield Piece(text, self.split(digest))
            else:
                yield from self.passages(text)
            if counts["documents"] == self.limit:
                return

    def split(self, digest: bytes) -> Split:
        return SPLITS[int.from_bytes(digest[:8], "big") < self.share * 2**64]

    def passages(self, text: str) -> Iterator[Piece]:
        """The document in as few parts as its passages' splits allow."""
        passages = cut(text, PASSAGE, PASSAGE // 2)
        for split, parts in groupby(passages, lambda part: self.split(_digest(part.encode()))):
            yield Piece("".join(parts), split)

    def distinct(self) -> Iterator[tuple[str, int, bytes]]:
        """(text, its bytes, its hash) of every document, without duplicates."""
        counts = self.counts
        seen = set()
        for text in self.texts:
            if not text.strip():
                counts["blank"] += 1
                continue
            try:
                data = text.encode()
            except UnicodeEncodeError:  # half a surrogate pair, from a JSON escape
                counts["not_unicode"] += 1
                continue
            digest = _digest(data)
            if digest in seen:
                counts["duplicates"] += 1
                continue
            seen.add(digest)
            yield text, len(data), digest


def lowest(texts: Iterator[str], config: DataConfig) -> bytes:
    """The highest hash among the `limit` documents with the lowest hashes: a sample of all, in their order.

    Files may be sorted (reviews by their verdict), so their first documents would not represent the others. A higher
    limit includes what a lower one takes.
    """
    hashes = heapq.nsmallest(config.limit, (digest[8:] for _, _, digest in Distinct(texts, config).distinct()))
    return hashes[-1] if hashes else b""


def cut(text: str, size: int, slack: int = 0) -> Iterator[str]:
    """Parts of `size` characters or, where there is a line end to cut at, fewer.

    Args:
        text: what to cut.
        size: characters per part.
        slack: by how much the last part may be longer.
    """
    start = 0
    while len(text) - start > size + slack:
        end = text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def pieces(document: Piece) -> Iterator[Piece]:
    """A document in pieces that can be tokenized one by one."""
    *most, last = cut(document.text, PIECE)
    yield from (Piece(text, document.split, ends=False) for text in most)
    yield Piece(last, document.split) if most else document


def chunks(documents: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups of about PIECE characters: enough work for a thread, small enough to hold in memory."""
    chunk, size = [], 0
    for piece in chain.from_iterable(map(pieces, documents)):
        chunk.append(piece)
        size += len(piece.text)
        if size >= PIECE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
