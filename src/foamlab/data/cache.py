"""The token cache: documents cleaned, split, tokenized and written once, in a folder that is complete or absent.

    CACHE/stdlib-0123456789abcdef/
        train.bin, validation.bin           token ids, uint16 or uint32, document after document, each ended by eos
        train.offsets, validation.offsets   int64, where each document begins, and the end
        tokenizer.json, tokenizer_config.json, ...
        corpus.json                         written last: sha256 of the other files, counts, and the source

The folder's name is a hash of everything that determines its tokens. It is built under another name and renamed when
complete, by one process at a time; a folder without corpus.json, or with a changed file, is rebuilt.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import filelock
import numpy as np

from ..config import DataConfig
from ..errors import UserError
from .documents import SPLITS, Distinct, Piece, chunks, lowest, pieces
from .sources import Losses, Progress, Source, open_source
from .tokenizer import Tokenizer, identify, make

SAMPLE = 64 << 20  # characters that a BPE is trained on: more changes little and costs memory


def cached(config: DataConfig, progress: Progress) -> tuple[Path, dict[str, Any]]:
    """The cache folder of `config` and its corpus.json; built if it does not exist. Raises UserError."""
    source = open_source(config, progress)
    what = {
        "format": config.version,
        "source": source.facts,
        "tokenizer": identify(config.tokenizer, config.version),
        "validation": config.validation,
        "limit": config.limit,
        **({"limited": "by hash"} if config.limit and not source.stream else {}),
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    root = Path(config.cache or "~/.cache/foamlab").expanduser()
    folder = root / f"{config.name.partition(':')[0]}-{key[:16]}"
    about = read_about(folder, progress, old=source.stream)
    if about is None:
        about = {"key": key, "name": config.name, **what, "about": source.about}
        about = _built(folder, about, source, config, progress)
    if config.version > 1 and (share := about.get("lost", 0.0)) > config.lost:
        raise UserError(
            f"{share:.1%} of {config.name} gives no text: {'; '.join(about['warnings'])}; correct it, name the text "
            f"column with --data.column, or allow this with --data.lost {math.ceil(share * 100) / 100:g}"
        )
    if kinds := source.about.get("other_kinds"):
        about["warnings"] = [*about["warnings"], f"skipped files of other kinds: {kinds}"]
    for warning in about["warnings"]:
        progress({"stage": "warning", "message": warning})
    return folder, about


def read_about(folder: Path, progress: Progress, old: bool = False) -> dict[str, Any] | None:
    """corpus.json, or None if the folder is missing, half built or damaged.

    Folders from before there were hashes cannot be checked; they count as damaged unless `old` allows them, since a
    stream may not be available again.
    """
    try:
        about: dict[str, Any] = json.loads((folder / "corpus.json").read_text("utf-8"))
        if "sha256" not in about:
            return about if old and _sizes(folder, about["files"]) == about["files"] else None
        wrong = [name for name, size in _sizes(folder, about["files"]).items() if size != about["files"][name]]
        wrong = wrong or [
            n for n, digest in hashes(folder, about["files"], progress).items() if digest != about["sha256"][n]
        ]
        if about.pop("seal") != _seal(about):
            wrong.append("corpus.json")
    except FileNotFoundError as error:
        wrong = [Path(error.filename).name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        wrong = ["corpus.json"]
    if wrong and folder.exists():
        message = f"the token cache {folder} is damaged ({wrong[0]} has changed or is missing): it is rebuilt"
        progress({"stage": "warning", "message": message})
    return None if wrong else about


def _sizes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    return {name: (folder / name).stat().st_size for name in names}


def hashes(folder: Path, names: Iterable[str], progress: Progress) -> dict[str, str]:
    """sha256 of each file; `progress` is called if that takes more than two seconds."""
    names = list(names)
    whole = sum(_sizes(folder, names).values())
    found = {}
    done, began = 0, time.monotonic()
    for name in names:
        digest = hashlib.sha256()
        with (folder / name).open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
                done += len(block)
                if time.monotonic() - began > 2:
                    progress({"stage": "check", "share": done / whole})
        found[name] = digest.hexdigest()
    return found


def _seal(about: dict[str, Any]) -> str:
    """A hash of corpus.json's own content."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _built(
    folder: Path, about: dict[str, Any], source: Source, config: DataConfig, progress: Progress
) -> dict[str, Any]:
    """Build the cache, unless another process does."""
    root = folder.parent
    building = folder.with_name(f".building-{folder.name}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f".{folder.name}.lock", progress):
            if found := read_about(folder, lambda fact: None):  # another process was first
                return found
            for remains in (folder, building):
                if remains.exists():
                    shutil.rmtree(remains)
            try:
                building.mkdir()
                _build(building, about, source, config, progress)
                building.rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise UserError(_disk_trouble(error, root)) from error
    return about


def _disk_trouble(error: OSError, root: Path) -> str:
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return f"disk full while building the token cache in {root}: free some space or set data.cache to another disk"
    return f"cannot write the token cache in {root} ({error.strerror or error}): set data.cache to a writable folder"


@contextmanager
def _alone(path: Path, progress: Progress) -> Iterator[None]:
    """One builder at a time; the lock ends with the process, however it ends."""
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


# Tokens


class _Writer:
    """Appends one split's documents to its two files."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, eos: int, stack: ExitStack) -> None:
        self.tokens: BinaryIO = stack.enter_context((folder / f"{split}.bin").open("wb"))
        self.offsets: BinaryIO = stack.enter_context((folder / f"{split}.offsets").open("wb"))
        self.dtype = dtype
        self.eos = np.array([eos], dtype)
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
    losses = Losses()
    chosen = []
    if config.limit and not source.stream:
        progress({"stage": "hash", "share": None})
        chosen = [lowest(source.read(losses), config)]
    texts = source.read(Losses() if chosen else losses)
    distinct = Distinct(texts, config, *chosen)
    tokenizer, documents = _tokenizer(config, iter(distinct), progress)
    tokenizer.save(folder)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    with ExitStack() as stack:
        writers = {split: _Writer(folder, split, dtype, tokenizer.eos_id, stack) for split in SPLITS}
        for chunk in _encode(tokenizer, documents, config.workers or os.cpu_count() or 1):
            for piece, ids in chunk:
                writers[piece.split].add(ids, piece.ends)
            _report(progress, distinct, source, sum(writer.end for writer in writers.values()))
    texts.close()  # only then is all of a stream counted
    counts = distinct.counts
    warnings = losses.warnings()
    if not counts["documents"]:
        aside = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        why = "; ".join([aside or "no documents", *warnings])
        raise UserError(f"the corpus {config.name} is empty ({why}): give --data.name files that hold text")
    if counts["not_unicode"]:
        warnings.append(f"skipped {counts['not_unicode']} documents that are not valid Unicode")
    if config.validation and not all(writer.end for writer in writers.values()):
        _hold_out_tail(folder, dtype, config.validation)
        warnings.append(
            f"too few documents ({counts['documents']}) to hold out whole ones: the validation split is the last "
            f"{config.validation:.0%} of the tokens"
        )
    lost = max(losses.share, counts["not_unicode"] / (counts["documents"] + counts["not_unicode"]))
    about |= {"dtype": dtype.name, "vocab_size": tokenizer.vocab_size, "warnings": warnings, "lost": lost, **counts}
    about["versions"] = {"python": platform.python_version(), "tokenizers": version("tokenizers")}
    about["files"] = _sizes(folder, sorted(file.name for file in folder.iterdir()))
    about["sha256"] = hashes(folder, about["files"], progress)
    (folder / "corpus.json").write_text(json.dumps({**about, "seal": _seal(about)}, indent=1), "utf-8")
    for file in folder.iterdir():  # on disk before the folder gets its name, so a power failure leaves no empty cache
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())


def _report(progress: Progress, distinct: Distinct, source: Source, tokens: int) -> None:
    """Progress: share of the requested documents, of the bytes on disk, or unknown."""
    documents = distinct.counts["documents"]
    size = distinct.counts["bytes"]
    share = None
    if distinct.limit:
        share = min(documents / distinct.limit, 1.0)
    elif source.size:
        share = min(size / source.size, 1.0)
    progress({"stage": "tokens", "share": share, "documents": documents, "bytes": size, "tokens": tokens})


def _tokenizer(config: DataConfig, documents: Iterator[Piece], progress: Progress) -> tuple[Tokenizer, Iterator[Piece]]:
    """The tokenizer, and all documents. A BPE learns from the training documents among the first SAMPLE characters."""
    if identify(config.tokenizer)["kind"] != "bpe":
        return make(config.tokenizer, iter(())), documents
    progress({"stage": "tokenizer", "share": None})
    head = []
    size = 0
    for document in documents:
        head.append(document)
        size += len(document.text)
        if size >= SAMPLE:
            break
    train = [piece.text for document in head if document.split == "train" for piece in pieces(document)]
    with _parallel(config.workers != 1):
        texts = iter(train or [document.text for document in head])
        waiting = partial(progress, {"stage": "tokenizer", "share": None})
        tokenizer = make(config.tokenizer, texts, config.version, waiting)
    return tokenizer, chain(head, documents)


def _encode(
    tokenizer: Tokenizer, documents: Iterable[Piece], workers: int
) -> Iterator[Iterable[tuple[Piece, np.ndarray]]]:
    """Pieces in order with their ids, tokenized by `workers` threads (the tokenizers library releases the GIL)."""
    running: deque[tuple[list[Piece], Future[list[np.ndarray]]]] = deque()
    with _parallel(False), ThreadPoolExecutor(workers) as pool:
        for chunk in chunks(documents):
            running.append((chunk, pool.submit(tokenizer.encode_many, [piece.text for piece in chunk])))
            if len(running) > 2 * workers:
                done, ids = running.popleft()
                yield zip(done, ids.result())
        for done, ids in running:
            yield zip(done, ids.result())


@contextmanager
def _parallel(wanted: bool) -> Iterator[None]:
    """Let the tokenizers library use its own threads, or not: it reads only this variable."""
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
    """Cut the only split with documents in two: the last `share` of its tokens becomes the validation split."""
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
