"""How a file becomes documents: txt, md and py are one document each, the others one per row; all also compressed.

All text is UTF-8. What cannot be read raises `Unreadable`; the caller decides whether that is an error or a skip.
Rows that give no text are counted (`Rows`).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from ..errors import UserError

GUESSES = ("text", "content", "review", "document", "article", "body", "story", "sentence", "abstract", "code")
LOOK = 1000  # rows seen before the text column is chosen, unless the first guess is there


class Unreadable(Exception):
    """A file whose content does not match its name."""


class Foreign(Unreadable):
    """A valid file without rows of text, such as a JSON file of settings."""


@dataclass
class Rows:
    """Takes the text out of the rows of a file or stream, and counts the rows that give none.

    Attributes:
        where: the file or stream, for messages.
        column: the text column; empty until it is chosen.
        first: choose by the first row alone, as version 1 did (`DataConfig.version`).
        seen: rows so far; a file that is one document counts as one.
        lost: why rows gave no text, or only part of it, and how many.
        remarks: further lines for the user.
    """

    where: str
    column: str = ""
    first: bool = False
    seen: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)

    def texts(self, rows: Iterable[Any]) -> Iterator[Any]:
        """The texts of rows that are objects or plain strings. The column is chosen by the first of them.

        Raises:
            UserError: the column is in no row, holds no text, or cannot be determined.
        """
        rows = iter(rows)
        held = []
        for row in rows:
            held.append(row)
            if len(held) == LOOK or (isinstance(row, Mapping) and self._settles(row)):
                break
        objects = [row for row in held if isinstance(row, Mapping)]
        if objects:
            self.choose(objects)
        yield from self.taken(chain(held, rows))

    def taken(self, rows: Iterable[Any]) -> Iterator[Any]:
        """The texts in the column that was chosen."""
        for row in rows:
            self.seen += 1
            value = row.get(self.column) if isinstance(row, Mapping) else row
            if isinstance(value, str):
                yield value
            elif not isinstance(row, Mapping):
                self.lost["that are neither objects nor strings"] += 1
            elif self.column not in row:
                if not any(reason.startswith("without") for reason in self.lost):
                    self.remarks.append(f"a row without {self.column!r} in {self.where} has: {_few(row) or 'nothing'}")
                self.lost[f"without {self.column!r}"] += 1
            else:
                self.lost[f"with {'null' if value is None else type(value).__name__} in {self.column!r}"] += 1

    def wanted(self, header: Mapping[str, Any]) -> list[str]:
        """Which of a table's columns are read."""
        self.choose([header])
        return [self.column]

    def _settles(self, row: Mapping[str, Any]) -> bool:
        """Whether no later row can change the choice."""
        return self.first or isinstance(row.get(self.column or GUESSES[0]), str)

    def choose(self, rows: list[Mapping[str, Any]]) -> None:
        """Set the text column: the one named in the settings, else a usual name, else the only one that holds text."""
        if self.first:
            self.column = _first_column(rows[0], self.column, self.where)
            return
        names = dict.fromkeys(name for row in rows for name in row)
        texts = [name for name in names if any(isinstance(row.get(name), str) for row in rows)]
        lower = {str(name).lower(): name for name in reversed(names)}
        usual = [lower[name] for name in GUESSES if name in lower]
        if self.column and self.column not in names:
            raise UserError(f"no column {self.column!r} in {self.where}; its columns are: {_few(names, 99) or 'none'}")
        if not self.column and not usual and len(texts) != 1:
            listed = _few(names, 99) or "none"
            raise UserError(
                f"cannot tell which column of {self.where} is the text: set data.column to one of: {listed}"
            )
        if not self.column and not usual:
            self.remarks.append(f"{self.where}: the text is taken from {texts[0]!r}, the only column with text")
        self.column = self.column or next((name for name in usual if name in texts), (usual or texts)[0])
        kinds = {type(row[self.column]).__name__ for row in rows if row.get(self.column) is not None}
        if self.column not in texts and (kinds or len(rows) == LOOK):
            raise UserError(
                f"column {self.column!r} holds {' and '.join(sorted(kinds)) or 'nulls'}, not text ({self.where}); "
                f"set data.column to another of: {_few(names, 99)}"
            )


def _first_column(row: Mapping[str, Any], column: str, where: str) -> str:
    """The choice of version 1: a usual name that holds text in the first row, else the only one that does."""
    texts = [name for name, value in row.items() if isinstance(value, str)]
    guesses = [name for name in GUESSES if name in texts] or (texts if len(texts) == 1 else [])
    if column in row or (not column and guesses):
        return column or guesses[0]
    raise UserError(f"no text column in {where}: set data.column to one of: {_few(row, 99) or 'none'}")


def _few(names: Iterable[Any], most: int = 4) -> str:
    names = list(map(str, names))
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def read_file(path: Path, rows: Rows) -> Iterator[Any]:
    """The documents of one file, or its rows (`Records`).

    Raises Unreadable at the damaged place, UserError for a missing column.
    """
    kind, packing = kind_of(path)
    try:
        if packing and not path.stat().st_size:
            raise EOFError("empty, not a compressed file")
        with PACKINGS[packing](path) as stream:
            yield from FORMATS[kind](stream, rows)
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise Unreadable("JSON nested too deeply") from None
    except (ValueError, EOFError, OSError, csv.Error, zlib.error, zstandard.ZstdError) as error:
        raise Unreadable(" ".join(str(error).split()) or type(error).__name__) from None


def kind_of(path: Path) -> tuple[str, str]:
    """(".jsonl", ".gz") for data.jsonl.gz; ("", "") for a kind of file that holds no documents."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packing = suffixes.pop() if suffixes and suffixes[-1] in PACKINGS else ""
    return (suffixes[-1], packing) if suffixes and suffixes[-1] in FORMATS else ("", "")


def _plain(stream: BinaryIO, rows: Rows) -> Iterator[str]:
    data = stream.read()
    if b"\0" in data:
        raise ValueError("binary, not text")
    rows.seen += 1
    yield data.decode("utf-8-sig")


def _jsonl(stream: Iterable[bytes], rows: Rows) -> Iterator[str]:
    def parsed() -> Iterator[Any]:
        for number, line in enumerate(stream, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is not JSON: {error.msg}") from None
            if not isinstance(row, (str, dict)):
                raise ValueError(f"line {number} is neither an object nor a string")
            yield row

    return rows.texts(parsed())


def _json(stream: BinaryIO, rows: Rows) -> Iterator[str]:
    """An array of objects or strings; or jsonl under another name, as many downloads are."""
    data = stream.read()
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Extra data"):
            raise ValueError(f"not JSON: {error}") from None
        return _jsonl(io.BytesIO(data), rows)
    if not isinstance(content, list) or not any(isinstance(row, (str, dict)) for row in content):
        raise Foreign("no array of objects or strings")
    return rows.texts(content)


def _table(stream: BinaryIO, rows: Rows, delimiter: str = "") -> Iterator[str]:
    limit = csv.field_size_limit(sys.maxsize)  # the default, 128 KiB, is less than many documents
    try:
        lines = iter(io.TextIOWrapper(stream, "utf-8-sig", newline=""))
        head = next(lines, "")
        if not delimiter:
            delimiter = "," if rows.first else next((mark for mark in ",;\t|" if mark in head), ",")
        reader = csv.reader(chain([head], lines), delimiter=delimiter, strict=True)
        header = next(reader, [])
        if header:
            rows.choose([dict.fromkeys(header, "")])
        yield from rows.taken(_cells(reader, header, rows))
    finally:
        csv.field_size_limit(limit)


def _cells(reader: Iterable[list[str]], header: list[str], rows: Rows) -> Iterator[dict[str, str]]:
    for cells in reader:
        if len(cells) > len(header):
            rows.lost[f"with more cells than the {len(header)} columns (text with a comma and no quotes?)"] += 1
        if cells:
            yield dict(zip(header, cells))


def _parquet(stream: BinaryIO, rows: Rows) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"reading {rows.where} needs the package pyarrow: pip install 'torchfoam[hub]'") from None
    whole = rows.where.lower().endswith(".parquet")  # parquet is read from its end: unpack what is packed
    file = pyarrow.parquet.ParquetFile(stream if whole else io.BytesIO(stream.read()))
    types = pyarrow.types
    header = {}
    for column in file.schema_arrow:
        kind = column.type.value_type if types.is_dictionary(column.type) else column.type
        header[column.name] = "" if types.is_string(kind) or types.is_large_string(kind) else kind
    for batch in file.iter_batches(batch_size=1024, columns=rows.wanted(header)):
        yield from rows.taken(batch.to_pylist())


class Records(Rows):
    """Takes rows as they are, whatever their columns."""

    def texts(self, rows: Iterable[Any]) -> Iterator[Any]:
        return self.taken(rows)

    def taken(self, rows: Iterable[Any]) -> Iterator[Any]:
        for row in rows:
            self.seen += 1
            yield row

    def choose(self, rows: list[Mapping[str, Any]]) -> None:
        """Every column is taken."""

    def wanted(self, header: Mapping[str, Any]) -> list[str]:
        return list(header)


class _Zstd(io.RawIOBase):
    """Zstandard frames as one stream; zstandard's own reader does not notice a truncated file."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        self.frame = zstandard.ZstdDecompressor().decompressobj()
        self.begun = False
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            packed = self.file.read(1 << 17)
            if not packed:
                if self.begun:
                    raise EOFError("compressed file ended before the end of its stream")
                return 0
            self.ready = memoryview(self._unpack(packed))
        part = self.ready[: len(buffer)]
        self.ready = self.ready[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def _unpack(self, packed: bytes) -> bytes:
        parts = []
        while packed:
            parts.append(self.frame.decompress(packed))
            packed = self.frame.unused_data
            self.begun = not self.frame.eof
            if self.frame.eof:
                self.frame = zstandard.ZstdDecompressor().decompressobj()
        return b"".join(parts)

    def close(self) -> None:
        self.file.close()
        super().close()


PACKINGS: dict[str, Callable[[Path], Any]] = {
    "": lambda path: path.open("rb"),
    ".gz": gzip.open,
    ".zst": lambda path: io.BufferedReader(_Zstd(path), 1 << 17),
}

FORMATS: dict[str, Callable[[BinaryIO, Rows], Iterator[str]]] = {
    ".txt": _plain,
    ".md": _plain,
    ".py": _plain,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _table,
    ".tsv": partial(_table, delimiter="\t"),
    ".parquet": _parquet,
}
