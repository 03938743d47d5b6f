"""Formats of files: which documents each gives, and what is lost."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from foamlab.config import DataConfig
from foamlab.data.corpus import prepare
from foamlab.data.formats import FORMATS, Foreign, Rows, Unreadable, read_file
from foamlab.errors import UserError

TEXTS = [
    'Plain.\nTwo lines, a "quote"; and, a comma.',
    "été 数 🙂\ttab",
    "long " * 40_000,
]  # longer than csv's own limit


def table(kind: str, texts: list[str], column: str = "text") -> bytes:
    """A file of the given kind with one row a text, and a column of numbers besides."""
    if kind in (".csv", ".tsv"):
        buffer = io.StringIO()
        writer = csv.writer(buffer, delimiter="\t" if kind == ".tsv" else ",")
        writer.writerow(["id", column])
        writer.writerows(enumerate(texts))
        return buffer.getvalue().encode()
    return rows_of(kind, [{"id": i, column: text} for i, text in enumerate(texts)])


def rows_of(kind: str, records: list[dict]) -> bytes:
    """A file of the given kind that holds these rows."""
    if kind == ".jsonl":
        return "\n".join(map(json.dumps, records)).encode()
    if kind == ".json":
        return json.dumps(records).encode()
    if kind == ".parquet":
        pyarrow, parquet, sink = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet"), io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(records), sink)
        return sink.getvalue()
    mark = "\t" if kind == ".tsv" else ","
    return "\n".join(mark.join(map(str, line)) for line in [records[0], *(r.values() for r in records)]).encode()


def pack(data: bytes, packing: str) -> bytes:
    halves = data[: len(data) // 2], data[len(data) // 2 :]
    if packing == ".gz":
        return b"".join(gzip.compress(half) for half in halves)
    if packing == ".zst":  # two frames, as parallel compressors write them
        return b"".join(zstandard.compress(half) for half in halves)
    return data


def texts_of(path: Path, column: str = "", rows: Rows | None = None, **options: Any) -> list[str]:
    return list(read_file(path, rows or Rows(str(path), column, **options)))


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_round_trip(tmp_path: Path, kind: str, packing: str) -> None:
    path = tmp_path / f"file{kind}{packing}"
    if kind in (".txt", ".md", ".py"):
        path.write_bytes(pack(TEXTS[1].encode(), packing))
        assert texts_of(path) == [TEXTS[1]]
    else:
        path.write_bytes(pack(table(kind, TEXTS), packing))
        assert texts_of(path) == TEXTS
        path.write_bytes(pack(table(kind, TEXTS, "odd name"), packing))
        assert texts_of(path, "odd name") == TEXTS
        with pytest.raises(UserError, match="its columns are: id, odd name"):
            texts_of(path, "body")


TABLES = [kind for kind in FORMATS if kind not in (".txt", ".md", ".py")]
NULLS = [kind for kind in TABLES if kind not in (".csv", ".tsv")]  # these have empty cells instead


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", NULLS)
@pytest.mark.parametrize("column", ["text", "Content", "review"])
def test_a_first_row_without_text_does_not_make_the_ids_the_text(
    tmp_path: Path, kind: str, packing: str, column: str
) -> None:
    path = tmp_path / f"file{kind}{packing}"
    records: list[dict[Any, Any]] = [
        {"id": "a1", column: None},
        *({"id": f"a{i}", column: f"text {i}"} for i in range(2, 400)),
    ]
    path.write_bytes(pack(rows_of(kind, records), packing))
    rows = Rows("file" + kind)
    assert texts_of(path, rows=Rows(str(path))) == [f"text {i}" for i in range(2, 400)]
    rows = Rows(str(path))
    texts_of(path, rows=rows)
    assert (rows.column, rows.seen, dict(rows.lost)) == (column, 399, {f"with null in {column!r}": 1})


@pytest.mark.parametrize("kind", [".jsonl", ".json"])
def test_a_usual_name_counts_if_its_key_comes_later(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"file{kind}"
    path.write_bytes(rows_of(kind, [{"id": "a1"}, {"id": "a2", "text": "two"}, {"id": "a3", "content": "three"}]))
    rows = Rows(str(path))
    assert texts_of(path, rows=rows) == ["two"]
    assert (rows.seen, dict(rows.lost)) == (3, {"without 'text'": 2})
    assert rows.remarks == [f"a row without 'text' in {path} has: id"]


@pytest.mark.parametrize("kind", TABLES)
def test_a_text_column_of_no_usual_name_is_told(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"file{kind}"
    path.write_bytes(rows_of(kind, [{"words": "one"}, {"words": "two"}]))
    rows = Rows(str(path))
    assert texts_of(path, rows=rows) == ["one", "two"]
    assert rows.remarks == [f"{path}: the text is taken from 'words', the only column with text"]
    path.write_bytes(rows_of(kind, [{"title": "a", "summary": "b"}]))
    with pytest.raises(UserError, match=r"set data\.column to one of: title, summary"):
        texts_of(path)


@pytest.mark.parametrize(("kind", "data"), [(".jsonl", b"["), (".json", b'[{"text": ' + b"["), (".jsonl", b'{"a":')])
def test_json_nested_deep_is_told(tmp_path: Path, kind: str, data: bytes) -> None:
    (tmp_path / f"deep{kind}").write_bytes(data * 1 + b"[" * 100_000)
    with pytest.raises(Unreadable, match="nested too deeply"):
        texts_of(tmp_path / f"deep{kind}")


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_csv_with_other_marks_short_and_long_rows(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "a.csv"
    lines = ["id,text", "1,one", "2", "3,three, and more", '4,"four, and more"', "", "5,"]
    path.write_text("\n".join(line.replace(",", mark) for line in lines))
    rows = Rows(str(path))
    assert texts_of(path, rows=rows) == ["one", "three", f"four{mark} and more", ""]
    assert rows.seen == 5 and sorted(rows.lost.values()) == [1, 1]
    assert any(reason.startswith("with more cells than the 2 columns") for reason in rows.lost)


def test_json_is_an_array_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for data in (b'["one", {"text": "two"}, 3]', b'"one"\n{"text": "two"}\n'):
        path.write_bytes(data)
        assert texts_of(path) == ["one", "two"]
    path.write_bytes(b'{"name": "settings", "version": 1}')
    with pytest.raises(Foreign, match="no array of objects"):
        texts_of(path)


def test_jsonl_of_strings_nulls_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('"one"\n\n{"content": "two"}\n{"content": null}\n{"other": 1}\n')
    assert texts_of(path) == ["one", "two"]
    path.write_text('{"messages": ["a"]}\n')
    with pytest.raises(UserError, match="holds list, not text"):
        texts_of(path, "messages")


# What does not reach the model: counted, told, and above a small share refused

PAIR = [{"text": "one, which is long enough"}, {"content": "two, which is long enough"}]
LOST = {  # file -> (content, share lost, what is told)
    "two-names.jsonl": (rows_of(".jsonl", PAIR), 0.5, "1 of 2 rows gave no text, or only part of it: 1 without 'text'"),
    "two-names.json": (rows_of(".json", PAIR), 0.5, "has: content"),
    "nulls.json": (rows_of(".json", [PAIR[0], {"text": None}, {"text": None}]), 2 / 3, "2 with null in 'text'"),
    "kinds.jsonl": (
        rows_of(".jsonl", [PAIR[0], {"text": 3}, {"text": ["a"]}]),
        2 / 3,
        "1 with int in 'text', 1 with list",
    ),
    "short.csv": (b"id,text\n1,long enough to be a row\n2\n", 0.5, "1 without 'text'"),
    "commas.csv": (b"id,text\n1,one, which is long enough\n", 1.0, "with more cells than the 2 columns"),
    "tabs.tsv": (b"id\ttext\n1\tone\twhich is long enough\n2\tlong enough\n", 0.5, "with more cells"),
    "half.jsonl.gz": (gzip.compress(rows_of(".jsonl", PAIR)), 0.5, "1 without 'text'"),
    "half.jsonl.zst": (zstandard.compress(rows_of(".jsonl", PAIR)), 0.5, "1 without 'text'"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n{"text": "good and long enough"}\n', 0.5, "not valid Unicode"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_lost_is_counted_and_refused(tmp_path: Path, name: str) -> None:
    content, share, told = LOST[name]
    (tmp_path / name).write_bytes(content)
    config = DataConfig(f"text:{tmp_path / name}", "bytes", 2, validation=0.0, cache=str(tmp_path / "cache"))
    for _ in range(2):  # also from the cache
        with pytest.raises(UserError, match=f"{100 * share:.1f}% of .* gives no text: .*{told}.*--data.lost "):
            prepare(config, 0)
    config.lost = math.ceil(100 * share) / 100
    for _ in range(2):
        events: list[dict] = []
        data = prepare(config, 0, events.append)
        assert any(told in warning for warning in data.warnings)
        assert [e["message"] for e in events if e["stage"] == "warning"] == data.warnings == data.describe()["warnings"]
    assert data.describe()["lost"] == pytest.approx(share)


def test_parquet_losses(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(
        rows_of(".parquet", [{"text": None, "id": 1}, {"text": "long enough", "id": 2}])
    )
    config = DataConfig(f"text:{tmp_path / 'a.parquet'}", "bytes", 2, validation=0.0, cache=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"50\.0% of .* 1 of 2 rows .* 1 with null in 'text'"):
        prepare(config, 0)


def test_a_little_lost_is_only_told(tmp_path: Path) -> None:
    lines = rows_of(".jsonl", [{"text": f"row number {i}"} for i in range(199)] + [{"title": "no text"}])
    (tmp_path / "a.jsonl").write_bytes(lines)
    config = DataConfig(f"text:{tmp_path / 'a.jsonl'}", "bytes", 4, validation=0.0, cache=str(tmp_path / "cache"))
    data = prepare(config, 0)
    assert data.warnings[0] == "1 of 200 rows gave no text, or only part of it: 1 without 'text'"
    assert data.describe()["lost"] == pytest.approx(0.005)


def test_in_a_folder_what_is_lost_counts_by_its_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "large.txt").write_text("good text, and much of it. " * 1000)
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "package.json").write_text('{"name": "settings"}')
    (folder / "scan.pdf").write_bytes(b"%PDF" * 9000)
    config = DataConfig(f"text:{folder}", "bytes", 4, validation=0.0, cache=str(tmp_path / "cache"))
    data = prepare(config, 0)
    assert data.warnings == [
        "skipped 1 of 3 files that cannot be read (the first: latin.txt: not UTF-8 (byte 3))",
        "skipped 1 of 3 files that hold no rows of text (the first: package.json: no array of objects or strings)",
        "skipped files of other kinds: 1 .pdf",
    ]
    (folder / "latin.txt").write_bytes("café ".encode("latin-1") * 1000)
    with pytest.raises(UserError, match=r"15\.\d% of .* gives no text: skipped 1 of 3 .* --data\.lost 0\.16"):
        prepare(config, 0)


BROKEN = {
    "latin.txt": "é".encode("latin-1"),
    "utf16.txt": "text".encode("utf-16"),
    "binary.txt": b"ab\0cd",
    "line.jsonl": b'{"text": "good"}\n{"text": ',
    "number.jsonl": b"12\n",
    "short.txt.gz": gzip.compress(np.random.default_rng(0).bytes(5000).hex().encode())[:-100],
    "not.txt.gz": b"plain",
    "short.txt.zst": zstandard.compress(np.random.default_rng(0).bytes(300_000).hex().encode())[:-1000],
    "not.txt.zst": b"plain text",
    "quote.csv": b'text\n"never closed',
    "latin.csv": "text\né".encode("latin-1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_an_error_alone_and_a_warning_in_a_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_bytes(BROKEN[name])
    with pytest.raises(Unreadable):
        texts_of(folder / name)
    config = DataConfig(f"text:{folder / name}", "bytes", 4, validation=0.0, cache=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=f"cannot read .*{name}"):
        prepare(config, 0)
    (folder / "z.txt").write_text("good text that is long enough for rows")
    config.name, config.lost = f"text:{folder}", 1.0
    assert f"skipped 1 of 2 files that cannot be read (the first: {name}: " in prepare(config, 0).warnings[0]
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.name.startswith(".building")]
