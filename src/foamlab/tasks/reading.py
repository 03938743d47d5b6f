"""From files to rows of texts and labels. Whatever is wrong with a row is told by its file and number (from 1, the
header not counted)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..data.formats import FORMATS, PACKINGS, Records, Unreadable, kind_of, read_file
from ..errors import UserError
from .table import LABELS, PAIRS, TASKS, TEXTS, Task

SPLITS = {"train": ("train", "training"), "validation": ("validation", "valid", "dev", "val"), "test": ("test",)}
TABLES = [kind for kind in FORMATS if kind not in (".txt", ".md", ".py")]


@dataclass(frozen=True)
class Row:
    """Where a row stands, its texts, and its label ("" if it has none)."""

    where: str
    texts: tuple[str, ...]
    label: str


@dataclass
class Read:
    """The rows of one split.

    Attributes:
        rows: in the order of the files.
        left: a line for each row that gives nothing.
    """

    rows: list[Row]
    left: list[str]


def read(config: RunConfig) -> dict[str, Read]:
    """All splits of a task's data: "train", "validation" and those beyond, the tests, whose names begin so.

    Raises:
        UserError: a file that is missing or no table; a column that is not there or cannot be told; a label that is
            missing where it is needed; more rows left out than `data.lost` allows; a split without rows.
    """
    task, found = TASKS[config.task.name], files(config)
    splits: dict[str, Read] = {}
    for split, paths in found.items():
        columns: Columns | None = None
        held = splits.setdefault(split, Read([], []))
        for path in paths:
            rows = list(table(path, task, split))
            columns = columns if columns and columns.fit(rows) else Columns.of(config, task, rows, path)
            for number, row in enumerate(rows, 1):
                columns.take(row, f"{path} row {number}", split, held)
        few = len(held.left) / max(len(held.rows) + len(held.left), 1)
        if few > config.data.lost or not held.rows:
            more = f", as {len(held.left) - 1:,} more rows of the {split} rows" if len(held.left) > 1 else ""
            why = held.left[0] + more if held.left else f"{paths[0]} has no rows"
            raise UserError(f"{why}: mend the file, or allow a share of lost rows with --data.lost")
    if "validation" not in splits:
        splits |= divided(splits["train"], config)
    return splits


def divided(all_: Read, config: RunConfig) -> dict[str, Read]:
    """Training rows and, by a hash of their texts, the share of them that validates."""
    share = config.data.validation
    parts: dict[bool, list[Row]] = {False: [], True: []}
    for row in all_.rows:
        digest = hashlib.blake2b("\0".join(row.texts).encode(), digest_size=8).digest()
        parts[int.from_bytes(digest, "big") < share * 2**64].append(row)
    if not parts[True] or not parts[False]:
        raise UserError(
            f"a share of {share:g} of {len(all_.rows):,} rows leaves no rows to train on, or none to validate: give a "
            "file with --task.validation, or another --data.validation"
        )
    return {"train": Read(parts[False], all_.left), "validation": Read(parts[True], [])}


# ---------------------------------------------------------------------------------------------- which files


def files(config: RunConfig) -> dict[str, list[Path]]:
    """The files of each split. Raises UserError where there are none."""
    task, name = TASKS[config.task.name], config.data.name.removeprefix("text:")
    if name.startswith("hub:"):
        raise UserError(f"a task reads files, not {name}: give jsonl, json, csv, tsv or parquet files, or a folder")
    folder = Path(name).expanduser()
    found: dict[str, list[Path]] = {}
    if task.glue:
        if not folder.is_dir():
            raise UserError(f"{config.task.name} reads GLUE's own files: give their folder with --data, not {name!r}")
        found = {split: [folder / file] for split, file in task.glue.files.items()}
        found = {s: p for s, p in found.items() if s in ("train", "validation") or p[0].is_file()}
    elif folder.is_dir():
        for path in sorted(folder.iterdir()):
            stem = path.name.split(".")[0].lower()
            for split, words in SPLITS.items():
                if stem in words and kind_of(path)[0] in TABLES:
                    found.setdefault(split, []).append(path)
        if "train" not in found:
            raise UserError(f"no train{'/'.join(TABLES)} in the folder {folder}: name the files with --data")
    else:
        found["train"] = [Path(part).expanduser() for part in name.split(",") if part]
    for split in ("validation", "test"):
        if given := getattr(config.task, split):
            found[split] = [Path(part).expanduser() for part in given.split(",") if part]
    for paths in found.values():
        for path in paths:
            if not path.is_file():
                raise UserError(f"no such file: {path}")
    return found


def table(path: Path, task: Task, split: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a file."""
    if task.glue and path.suffix == ".tsv":
        yield from _glue(path, task.glue.bare if split in ("train", "validation") else ())
        return
    if kind_of(path)[0] not in TABLES:
        raise UserError(f"{path} is no table: give one of {', '.join(TABLES)} (or packed: {', '.join(PACKINGS)[2:]})")
    records = Records(str(path))
    try:
        for row in read_file(path, records):
            if not isinstance(row, Mapping):
                raise UserError(f"{path} row {records.seen} is no object with columns: {_short(row)}")
            if records.lost:
                raise UserError(f"{path} row {records.seen}: {next(iter(records.lost))}")
            yield row
    except Unreadable as e:
        raise UserError(f"cannot read {path} after row {records.seen}: {e}") from None


def _glue(path: Path, bare: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
    """GLUE's tables: nothing is quoted; a row with too few cells (QQP has some) lacks the last columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            header = bare or tuple(next(file, "").rstrip("\r\n").split("\t"))
            for line in file:
                yield dict(zip(header, line.rstrip("\r\n").split("\t")))
    except UnicodeDecodeError as e:
        raise UserError(f"cannot read {path}: not UTF-8 (byte {e.start})") from None
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None


# ---------------------------------------------------------------------------------------------- which columns


@dataclass(frozen=True)
class Columns:
    """Where a file's rows have their texts and label ("" if they have none)."""

    texts: tuple[str, ...]
    label: str
    regress: bool

    @classmethod
    def of(cls, config: RunConfig, task: Task, rows: list[Mapping[str, Any]], path: Path) -> Columns:
        """Find them in the rows of a file; UserError names what there is."""
        names = list(dict.fromkeys(name for row in rows[:1000] for name in row))
        if not names:
            raise UserError(f"{path} has no rows")
        asked = tuple(part.strip() for part in config.task.columns.split(",") if part.strip())
        if asked and task.texts and len(asked) != task.texts:
            raise UserError(f"{config.task.name} takes {task.texts} text column(s), task.columns names {len(asked)}")
        groups = (task.glue.texts,) if task.glue else (asked,) if asked else cls.usual(task)
        texts = next((group for group in groups if set(group) <= set(names)), ())
        listed = ", ".join(map(str, names[:20]))
        if not texts:
            wanted = " and ".join(asked or (task.glue.texts if task.glue else groups[0]))
            raise UserError(f"no columns {wanted} in {path}; it has: {listed}: name the texts with --task.columns")
        label = config.task.label or (task.glue.label if task.glue else "")
        if config.task.label and label not in names and any(name in LABELS for name in names):
            raise UserError(f"no column {label!r} in {path}; it has: {listed}")
        usual = [name for name in ((label,) if label else LABELS) if name in names and name not in texts]
        return cls(texts, usual[0] if usual else "", task.regress)

    @staticmethod
    def usual(task: Task) -> tuple[tuple[str, ...], ...]:
        """Groups of usual names, likeliest first."""
        one = tuple((name,) for name in TEXTS)
        return {1: one, 2: PAIRS, 0: PAIRS + one}[task.texts]

    def fit(self, rows: list[Mapping[str, Any]]) -> bool:
        """Whether the rows of another file have these columns too."""
        return bool(rows) and {*self.texts, *filter(None, [self.label])} <= set(rows[0])

    def take(self, row: Mapping[str, Any], where: str, split: str, held: Read) -> None:
        """Add a row, or a line on why it is left out. Of a test none is: each needs its prediction.

        Raises:
            UserError: a training or validation row without label, a label that cannot be, an empty text in a test.
        """
        test, texts = split.startswith("test"), []
        for name in self.texts:
            value = row.get(name)
            value = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
            if not isinstance(value, str) or not value.strip():
                why = "is missing" if name not in row else "is empty" if value in (None, "") or value == value else ""
                why = why if value is None or isinstance(value, str) or name not in row else f"is {_short(value)}"
                if not test:
                    held.left.append(f"{where}: the text {name!r} {why}")
                    return
                value = ""
            texts.append(_clean(value))
        label = _label(row.get(self.label)) if self.label else ""
        if not test and not self.label:
            raise UserError(f"{where} has no label: name its column with --task.label; it has: {', '.join(row)}")
        if not test and not label:
            if len(row) <= len(self.texts):
                held.left.append(f"{where}: the label {self.label!r} is missing")
                return
            raise UserError(f"{where}: the label {self.label!r} is missing")
        if self.regress and label and not _number(label):
            raise UserError(f"{where}: the label {self.label!r} is {_short(label)}, not a number")
        held.rows.append(Row(where, tuple(texts), label))


def _label(value: Any) -> str:
    """A label as text: 1, 1.0 and "1" are the same one."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _clean(text: str) -> str:
    """Without halves of surrogate pairs, which JSON can hold and a tokenizer cannot read."""
    return text.encode("utf-8", "replace").decode()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
