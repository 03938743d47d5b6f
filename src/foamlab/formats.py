"""How a file becomes documents: txt, md and py are one document each, jsonl, csv and parquet one a row; also packed.

All text is UTF-8. What cannot be read raises `Unreadable`; the caller decides whether that is an error or a skip.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from .config import UserError

GUESSES = ("text", "content", "review", "document", "article", "body", "story", "sentence", "abstract", "code")


class Unreadable(Exception):
    """A file whose content is not what its name says."""


def read_file(path: Path, column: str = "") -> Iterator[str]:
    """The documents of one file. Raises Unreadable at the broken place, UserError for a column that is not there."""
    kind, packing = kind_of(path)
    try:
        with PACKINGS[packing](path) as stream:
            yield from FORMATS[kind](stream, column, str(path))
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 (byte {error.start})") from None
    except (ValueError, EOFError, OSError, csv.Error, zlib.error, zstandard.ZstdError) as error:
        raise Unreadable(" ".join(str(error).split()) or type(error).__name__) from None


def kind_of(path: Path) -> tuple[str, str]:
    """(".jsonl", ".gz") for data.jsonl.gz; ("", "") for a kind of file that holds no documents."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packing = suffixes.pop() if suffixes and suffixes[-1] in PACKINGS else ""
    return (suffixes[-1], packing) if suffixes and suffixes[-1] in FORMATS else ("", "")


def pick_column(row: Mapping[str, Any], column: str, where: str) -> str:
    """The text column: `column` if given, else a usual name, else the only one that holds text. Raises UserError."""
    if column in row:
        return column
    texts = [name for name, value in row.items() if isinstance(value, str)]
    listed = ", ".join(map(str, row)) or "none"
    if column:
        raise UserError(f"no column {column!r} in {where}; its columns are: {listed}")
    guesses = [name for name in GUESSES if name in texts] or (texts if len(texts) == 1 else [])
    if not guesses:
        raise UserError(f"cannot tell which column of {where} is the text: set data.column to one of: {listed}")
    return guesses[0]


def _plain(stream: BinaryIO, column: str, where: str) -> Iterator[str]:
    data = stream.read()
    if b"\0" in data:
        raise ValueError("binary, not text")
    yield data.decode("utf-8-sig")


def _jsonl(stream: BinaryIO, column: str, where: str) -> Iterator[str]:
    name = ""
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON: {error.msg}") from None
        if isinstance(row, str):
            yield row
            continue
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is neither an object nor a string")
        name = name or pick_column(row, column, where)
        yield from text_value(row.get(name), name, f"line {number}")


def _csv(stream: BinaryIO, column: str, where: str) -> Iterator[str]:
    limit = csv.field_size_limit(sys.maxsize)  # the default, 128 KiB, is less than many a document
    try:
        reader = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", newline=""), strict=True)
        header = dict.fromkeys(reader.fieldnames or [], "")
        name = pick_column(header, column, where)
        for row in reader:
            yield row[name] or ""
    finally:
        csv.field_size_limit(limit)


def _parquet(stream: BinaryIO, column: str, where: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"reading {where} needs the package pyarrow: pip install 'torchfoam[hub]'") from None
    whole = where.lower().endswith(".parquet")  # parquet is read from its end: unpack what is packed
    file = pyarrow.parquet.ParquetFile(stream if whole else io.BytesIO(stream.read()))
    text = (pyarrow.types.is_string, pyarrow.types.is_large_string)
    header = {field.name: "" if any(is_text(field.type) for is_text in text) else None for field in file.schema_arrow}
    name = pick_column(header, column, where)
    for batch in file.iter_batches(batch_size=1024, columns=[name]):
        for value in batch.column(0).to_pylist():
            yield from text_value(value, name, where)


def text_value(value: Any, name: str, where: str) -> Iterator[str]:
    """The document in one cell: none for a null. Raises UserError if the column holds something else than text."""
    if isinstance(value, str):
        yield value
    elif value is not None:
        raise UserError(f"column {name!r} holds {type(value).__name__}, not text ({where}); set data.column to another")


class _Zstd(io.RawIOBase):
    """Zstandard frames as one stream. zstandard's own reader takes a file that was cut short for a whole one."""

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
        part, self.ready = self.ready[: len(buffer)], self.ready[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def _unpack(self, packed: bytes) -> bytes:
        parts = []
        while packed:
            parts.append(self.frame.decompress(packed))
            packed, self.begun = self.frame.unused_data, not self.frame.eof
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

FORMATS: dict[str, Callable[[BinaryIO, str, str], Iterator[str]]] = {
    ".txt": _plain,
    ".md": _plain,
    ".py": _plain,
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
}
