"""The token cache: documents cleaned, split, tokenized and written once, in a folder that is whole or absent.

    CACHE/stdlib-0123456789abcdef/
        train.bin, validation.bin           token ids, uint16 or uint32, document after document, each ended by eos
        train.offsets, validation.offsets   int64, where each document begins, and the end
        tokenizer.json, tokenizer_config.json
        corpus.json                         written last: sizes of the other files, counts, and where all came from

The folder's name is a hash of everything that determines its tokens. It is built under another name and renamed when
complete, one process at a time; a folder without corpus.json, or with a file of another size, is built again.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import json
import os
import platform
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

import filelock
import numpy as np

from .config import DataConfig, UserError
from .corpora import Progress, Source, open_source
from .tokenizer import Tokenizer, identify, make

Split = Literal["train", "validation"]
FORMAT = 1
SPLITS: tuple[Split, Split] = ("train", "validation")
SAMPLE = 64 << 20  # a BPE is trained on the first so many characters: more of it changes little and costs memory
PIECE = 1 << 19  # characters tokenized at once; longer documents are cut at a line end


def cached(config: DataConfig, progress: Progress) -> tuple[Path, dict[str, Any]]:
    """The cache folder of `config` and its corpus.json; built if it is not there. Raises UserError."""
    source = open_source(config, progress)
    what = {
        "format": FORMAT,
        "source": source.facts,
        "tokenizer": identify(config.tokenizer),
        "validation": config.validation,
        "limit": config.limit,
        **({"limited": "by hash"} if config.limit and not source.stream else {}),
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    root = Path(config.cache or "~/.cache/foamlab").expanduser()
    folder = root / f"{config.name.partition(':')[0]}-{key[:16]}"
    if about := read_about(folder):
        return folder, about
    building = root / f".building-{folder.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f".{folder.name}.lock", progress):
            if about := read_about(folder):  # another process was first
                return folder, about
            for remains in (folder, building):
                if remains.exists():
                    shutil.rmtree(remains)
            try:
                building.mkdir()
                about = {"key": key, "name": config.name, **what, "about": source.about}
                _build(building, about, source, config, progress)
                building.rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise UserError(_disk_trouble(error, root)) from error
    about = read_about(folder)
    if about is None:
        raise UserError(f"the token cache {folder} vanished while it was built; try again")
    return folder, about


def read_about(folder: Path) -> dict[str, Any] | None:
    """corpus.json, or None if the folder is missing, half built or cut short."""
    try:
        about: dict[str, Any] = json.loads((folder / "corpus.json").read_text("utf-8"))
        whole = all((folder / name).stat().st_size == size for name, size in about["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return about if whole else None


def _disk_trouble(error: OSError, root: Path) -> str:
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return f"disk full while building the token cache in {root}: free some space or set data.cache to another disk"
    return f"cannot write the token cache in {root} ({error.strerror or error}): set data.cache to a writable folder"


@contextmanager
def _alone(path: Path, progress: Progress) -> Iterator[None]:
    """One builder at a time; the lock goes with the process, however it ends."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress({"stage": "wait"})
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


# Documents


@dataclass(frozen=True)
class _Piece:
    """A document, or part of a long one: its text, its split, and whether the document ends here."""

    text: str
    split: Split
    ends: bool = True


class _Distinct:
    """The documents of a source without blanks and copies, at most `limit`, each with its split.

    The split is the first 64 bits of a document's hash, as a fraction, against the validation share: it does not
    change when other documents come or go. Those whose second 64 bits are above `bound` are left out.
    Memory: some 100 bytes a document.
    """

    def __init__(self, texts: Iterator[str], config: DataConfig, bound: bytes = b"\xff" * 8) -> None:
        self.texts, self.limit, self.share, self.bound = texts, config.limit, config.validation, bound
        self.counts = {"documents": 0, "bytes": 0, "duplicates": 0, "blank": 0, "not_unicode": 0}

    def __iter__(self) -> Iterator[_Piece]:
        counts = self.counts
        for text, size, digest in self.distinct():
            if digest[8:] > self.bound:
                continue
            counts["documents"] += 1
            counts["bytes"] += size
            held_out = int.from_bytes(digest[:8], "big") < self.share * 2**64
            yield _Piece(text, SPLITS[held_out])
            if counts["documents"] == self.limit:
                return

    def distinct(self) -> Iterator[tuple[str, int, bytes]]:
        """(text, its bytes, its hash) of every document that is none of the others."""
        counts, seen = self.counts, set()
        for text in self.texts:
            if not text.strip():
                counts["blank"] += 1
                continue
            try:
                data = text.encode()
            except UnicodeEncodeError:  # half a surrogate pair, from a JSON escape
                counts["not_unicode"] += 1
                continue
            digest = hashlib.blake2b(data, digest_size=16).digest()
            if digest in seen:
                counts["duplicates"] += 1
                continue
            seen.add(digest)
            yield text, len(data), digest


def _bound(source: Source, config: DataConfig, progress: Progress) -> bytes:
    """The hash up to which the `limit` documents with the lowest ones are taken: a sample of all, in their order.

    Files may be sorted (reviews by their verdict), so their first documents would stand for few of the others. What a
    lower limit takes, a higher one takes too.
    """
    progress({"stage": "hash", "share": None})
    everything = _Distinct(source.read(lambda warning: None), config).distinct()
    lowest = heapq.nsmallest(config.limit, (digest[8:] for _, _, digest in everything))
    return lowest[-1] if lowest else b""


def _pieces(document: _Piece) -> Iterator[_Piece]:
    text, start = document.text, 0
    while len(text) - start > PIECE:
        end = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        yield _Piece(text[start:end], document.split, ends=False)
        start = end
    yield _Piece(text[start:], document.split) if start else document


def _chunks(documents: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in groups of about PIECE characters: enough for a thread to work on, little enough to hold."""
    chunk, size = [], 0
    for piece in chain.from_iterable(map(_pieces, documents)):
        chunk.append(piece)
        size += len(piece.text)
        if size >= PIECE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


# Tokens


class _Writer:
    """Appends one split's documents to its two files."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, eos: int, stack: ExitStack) -> None:
        self.tokens: BinaryIO = stack.enter_context((folder / f"{split}.bin").open("wb"))
        self.offsets: BinaryIO = stack.enter_context((folder / f"{split}.offsets").open("wb"))
        self.dtype, self.eos = dtype, np.array([eos], dtype)
        self.end = 0
        self.offsets.write(np.int64(0).tobytes())

    def add(self, ids: np.ndarray, ends: bool) -> None:
        self.tokens.write(ids.astype(self.dtype).tobytes())
        self.end += len(ids)
        if ends:
            self.tokens.write(self.eos.tobytes())
            self.end += 1
            self.offsets.write(np.int64(self.end).tobytes())


def _build(folder: Path, about: dict[str, Any], source: Source, config: DataConfig, progress: Progress) -> None:
    warnings: list[str] = []
    chosen = (_bound(source, config, progress),) if config.limit and not source.stream else ()
    distinct = _Distinct(source.read(warnings.append), config, *chosen)
    tokenizer, documents = _tokenizer(config, iter(distinct), progress)
    tokenizer.save(folder)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    with ExitStack() as stack:
        writers = {split: _Writer(folder, split, dtype, tokenizer.eos_id, stack) for split in SPLITS}
        for chunk in _encode(tokenizer, documents, config.workers or os.cpu_count() or 1):
            for piece, ids in chunk:
                writers[piece.split].add(ids, piece.ends)
            _report(progress, distinct, source, sum(writer.end for writer in writers.values()))
    counts = distinct.counts
    if not counts["documents"]:
        aside = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        why = "; ".join([aside or "no documents", *warnings])
        raise UserError(f"the corpus {config.name} is empty ({why}): give --data.name files that hold text")
    if counts["not_unicode"]:
        warnings.append(f"skipped {counts['not_unicode']} documents that are not valid Unicode")
    if config.validation and not all(writer.end for writer in writers.values()):
        _hold_out_tail(folder, dtype, config.validation)
        warnings.append(
            f"too few documents ({counts['documents']}) to hold out whole ones: validation is the last "
            f"{config.validation:.0%} of the tokens"
        )
    for warning in warnings:
        progress({"stage": "warning", "message": warning})
    about |= {"dtype": dtype.name, "vocab_size": tokenizer.vocab_size, "warnings": warnings, **counts}
    about["versions"] = {"python": platform.python_version(), "tokenizers": version("tokenizers")}
    about["files"] = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / "corpus.json").write_text(json.dumps(about, indent=1), "utf-8")
    for file in folder.iterdir():  # on disk before the folder gets its name, so a power cut leaves no hollow cache
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())


def _report(progress: Progress, distinct: _Distinct, source: Source, tokens: int) -> None:
    """How far we are: of the documents asked for, of the bytes on disk, or unknown."""
    documents, size = distinct.counts["documents"], distinct.counts["bytes"]
    share = documents / distinct.limit if distinct.limit else size / source.size if source.size else None
    share = share and min(share, 1.0)
    progress({"stage": "tokens", "share": share, "documents": documents, "bytes": size, "tokens": tokens})


def _tokenizer(
    config: DataConfig, documents: Iterator[_Piece], progress: Progress
) -> tuple[Tokenizer, Iterator[_Piece]]:
    """The tokenizer, and all documents. A BPE learns from the training documents among the first SAMPLE characters."""
    if identify(config.tokenizer)["kind"] != "bpe":
        return make(config.tokenizer, iter(())), documents
    progress({"stage": "tokenizer", "share": None})
    head, size = [], 0
    for document in documents:
        head.append(document)
        size += len(document.text)
        if size >= SAMPLE:
            break
    train = [piece.text for document in head if document.split == "train" for piece in _pieces(document)]
    with _parallel(config.workers != 1):
        tokenizer = make(config.tokenizer, iter(train or [document.text for document in head]))
    return tokenizer, chain(head, documents)


def _encode(
    tokenizer: Tokenizer, documents: Iterable[_Piece], workers: int
) -> Iterator[Iterable[tuple[_Piece, np.ndarray]]]:
    """Pieces in order with their ids, tokenized by `workers` threads (the tokenizers library lets Python's lock go)."""
    running: deque[tuple[list[_Piece], Future[list[np.ndarray]]]] = deque()
    with _parallel(False), ThreadPoolExecutor(workers) as pool:
        for chunk in _chunks(documents):
            running.append((chunk, pool.submit(tokenizer.encode_many, [piece.text for piece in chunk])))
            if len(running) > 2 * workers:
                done, ids = running.popleft()
                yield zip(done, ids.result())
        for done, ids in running:
            yield zip(done, ids.result())


@contextmanager
def _parallel(wanted: bool) -> Iterator[None]:
    """Let the tokenizers library use threads of its own, or not: it listens to this variable only."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = str(wanted).lower()
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _hold_out_tail(folder: Path, dtype: np.dtype, share: float) -> None:
    """Cut the one split that has documents in two: the last `share` of its tokens become the validation split."""
    if not (folder / "train.bin").stat().st_size:
        for kind in ("bin", "offsets"):
            (folder / f"validation.{kind}").replace(folder / f"train.{kind}")
    tokens = np.memmap(folder / "train.bin", dtype, "r")
    offsets = np.fromfile(folder / "train.offsets", np.int64)
    cut = len(tokens) - max(1, round(len(tokens) * share))
    (folder / "validation.bin").write_bytes(tokens[cut:].tobytes())
    np.append(offsets[offsets < cut], cut).tofile(folder / "train.offsets")
    np.insert(offsets[offsets > cut] - cut, 0, 0).tofile(folder / "validation.offsets")
    del tokens
    os.truncate(folder / "train.bin", cut * dtype.itemsize)
