"""Whatever a JSON or YAML file holds: a value that can be walked over, or one line that names the file."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from foamlab.errors import UserError
from foamlab.files import DEEPEST, parse_json, read_json, read_yaml
from foamlab.runs import provenance, record, summary
from foamlab.training import checkpoint


def nested(depth: int, bracket: str = "[]") -> str:
    return bracket[0] * depth + bracket[1] * depth


BAD = {
    "cut": (b'{"a": ', "line 1|column 7"),
    "second line": (b'{"a": 1,\n"b": oops}', "line 2, column 6"),
    "empty": (b"", "column 1"),
    "latin-1": (b'{"a": "caf\xe9"}', "not in UTF-8 .byte 10 is 0xe9"),
    "binary": (bytes(range(256)), "not"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not in UTF-8"),
    "a long number": (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
    "deep lists": (b'{"a": ' + nested(100_000).encode() + b"}", "nested over 50 levels"),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested over 50 levels"),
    "deep, yet parsed": (b'{"a": ' + nested(DEEPEST).encode() + b"}", "nested over 50 levels"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_json_is_one_line_with_the_file_and_the_place(tmp_path: Path, name: str) -> None:
    raw, words = BAD[name]
    file = tmp_path / "x.json"
    file.write_bytes(raw)
    for act in (lambda: read_json(file), lambda: parse_json(raw, file)):
        with pytest.raises(UserError, match=f"^cannot read {re.escape(str(file))}: .*{words}"):
            act()


def test_good_json(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": [1, {"b": "\xc3\xa9"}], "n": NaN}')  # Windows' editors write the mark
    assert read_json(file)["a"] == [1, {"b": "é"}]
    assert parse_json(nested(DEEPEST), "x") == json.loads(nested(DEEPEST))
    assert parse_json(json.dumps(list(range(10**5))), "x")[-1] == 10**5 - 1
    file.write_text("[1]")
    with pytest.raises(UserError, match=r"expected an object .*, found a list"):
        read_json(file)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")
    with pytest.raises(NotADirectoryError):
        read_json(file / "none")
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        read_json(tmp_path)


YAML = {
    "a: [1": "not YAML .*line 1",
    nested(20_000): "nested over 50 levels",
    nested(20_000, "{}"): "nested over 50 levels",
    "a: 2001-02-30": "not YAML",
    "a: &a [*a]": "nested over 50 levels",
    "\n".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in zip("abcdefghi", "bcdefghij")).replace(
        "*a", "1"
    ): "aliases make it too large",
    "- 1": "expected an object",
    "x: \0": "not YAML",
}


@pytest.mark.parametrize("text", YAML, ids=range(len(YAML)))
def test_bad_yaml_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=f"^cannot read .*config.yaml: .*{YAML[text]}"):
        read_yaml(tmp_path / "config.yaml")
    with pytest.raises(UserError, match=YAML[text]):
        summary.read_settings(tmp_path)


def test_good_yaml(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("base: &b {lr: 1e-3}\nother: {<<: *b, x: [1, 2]}\n")
    assert read_yaml(file) == {"base": {"lr": "1e-3"}, "other": {"lr": "1e-3", "x": [1, 2]}}
    file.write_text("# nothing\n")
    assert read_yaml(file) == {}


def mutants(raw: bytes, count: int) -> list[bytes]:
    """The same bytes with something put in, cut out, or in another's place."""
    draw, found = random.Random(7), [b"", b"null", b"[" * 10**5, b'"x"', b"\xff" * 9]
    values = [b"null", b"[]", b"{}", b'"x"', b"-1", b"1e999", b"9" * 400, b"true", b'"\\ud800"', b"\xff", b"{" * 1000]
    for _ in range(count):
        place, other = sorted(draw.sample(range(len(raw) + 1), 2))
        found += [raw[:place], raw[:place] + raw[other:], raw[:place] + draw.choice(values) + raw[other:]]
        words = [m.span() for m in re.finditer(rb'(?<=[:\[,])\s*("[^"]*"|[\w.+-]+)', raw)]
        a, b = draw.choice(words)  # a value for a value: still JSON, of another type
        found.append(raw[:a] + draw.choice(values) + raw[b:])
    return found


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "config.yaml"])
def test_a_record_of_any_bytes_is_a_summary_or_one_line(tmp_path: Path, name: str) -> None:
    from foamlab.report import runs_page

    recorder = record.Recorder(tmp_path)
    recorder.settings("optimizer: {name: foam, lr: 0.01}\ntrain: {steps: 2, seed: 0}\n")
    about = {"model": {"name": "m", "parameters": 10}, "optimizer": {"name": "foam", "lr": 0.01}}
    size = {"weights": 40, "gradients": 40, "state": 20, "peak": 1000, "peak_of": "process, resident"}
    recorder.describe(**provenance.circumstances({}, 0, {"device": "cpu"}), **about, bytes=size)
    for step in (1, 2):
        line = {"step": step, "tokens": step * 64, "seconds": step * 0.1, "loss": 5.0 - step, "lr": 0.01}
        recorder.write({"kind": "train", **line, "grad_norm": 1.0, "tokens_per_second": 640.0})
        recorder.write({"kind": "eval", **line, "perplexity": 9.0})
        recorder.write({"kind": "residual", "step": step, "values": {"layers.0.q": 0.5}})
    recorder.write({"kind": "skip", "step": 2, "why": "the loss is nan"})
    recorder.close("done", result={"step": 2, "loss": 3.0}, bytes=size)
    file, told = tmp_path / name, 0
    for raw in mutants(file.read_bytes(), 25):
        file.write_bytes(raw)
        try:
            assert runs_page.page(summary.summarize([tmp_path])).startswith("<!doctype html>")
            assert len(runs_page.compare_table([tmp_path])) == 2
        except UserError as e:
            told += 1
            assert name in str(e)
    assert told > 10


@pytest.mark.parametrize("raw", [raw for raw, _ in BAD.values()], ids=BAD)
def test_a_manifest_of_any_bytes_is_damage(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(raw)
    assert re.search(r"manifest.json is damaged \(.+\)", checkpoint.damage(tmp_path))
