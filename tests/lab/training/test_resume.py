"""Resuming is bit for bit; what does not fit is refused."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import small
import torch
import yaml
from trained import same, stop_at

from foamlab import data, machine
from foamlab.cli.arguments import parse
from foamlab.cli.commands import commands
from foamlab.config import RULE_OF_OLD
from foamlab.errors import UserError
from foamlab.training import checkpoint
from foamlab.training.run import train
from torchfoam import PAPER

# ---------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    "optimizer, model, precision",
    [
        ("foam", "llama", "float32"),
        ("adamw", "gpt2", "float32"),
        ("foam", "gpt2", "bfloat16"),
        ("muon", "llama", "mixed"),
    ],
)
def test_stopped_and_resumed_is_bit_identical(
    home: Path, tmp_path: Path, optimizer: str, model: str, precision: str
) -> None:
    kind = {"optimizer": optimizer, "model": model, "precision": precision}
    train(small.config(home, tmp_path / "whole", **kind))
    stopped = train(small.config(home, tmp_path / "parts", **kind), on_event=stop_at(4))
    assert stopped.status == "interrupted" and stopped.step == 5  # the signal came after step 4's vote
    assert json.loads((tmp_path / "parts" / "run.json").read_text())["status"] == "interrupted"
    assert [p.name for p in checkpoint.found(tmp_path / "parts")] == ["step-00000003", "step-00000005"]
    result = train(small.config(home, tmp_path / "parts", **kind), resume=tmp_path / "parts")
    assert result.status == "done" and result.step == 6
    same(tmp_path / "whole", tmp_path / "parts")
    info = json.loads((tmp_path / "parts" / "run.json").read_text())
    assert info["status"] == "done" and info["resumed"][0]["step"] == 5


def test_resume_from_an_older_checkpoint_drops_what_came_later(home: Path, tmp_path: Path) -> None:
    train(small.config(home, tmp_path / "whole"))
    train(small.config(home, tmp_path / "again"))
    older = tmp_path / "again" / "checkpoints" / "step-00000003"
    assert train(small.config(home, tmp_path / "again"), resume=older, on_event=stop_at(4)).step == 5
    assert [p.name for p in checkpoint.found(tmp_path / "again")] == ["step-00000003", "step-00000005"]
    train(small.config(home, tmp_path / "again"), resume=tmp_path / "again")
    same(tmp_path / "whole", tmp_path / "again")
    assert sorted(os.listdir(tmp_path / "again" / "checkpoints")) == ["step-00000005", "step-00000006"]


def test_resuming_a_finished_run_changes_nothing(home: Path, tmp_path: Path) -> None:
    c = small.config(home, tmp_path / "run", sample="the foam")
    first = train(c)
    before = small.tree(tmp_path / "run")
    notes: list[dict[str, Any]] = []
    again = train(c, resume=tmp_path / "run", on_event=notes.append)
    assert again == first and small.tree(tmp_path / "run") == before
    assert [e["kind"] for e in notes] == ["note"] and "is finished" in notes[0]["message"]
    assert "--train.steps above 6" in notes[0]["message"]


def test_what_was_killed_after_its_last_step_is_ended_and_keeps_its_peak(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = train(small.config(home, out))
    info = json.loads((out / "run.json").read_text())
    info |= {"status": "running", "bytes": {**info["bytes"], "peak": 2**50, "before": 7}}
    del info["result"], info["ended"]
    (out / "run.json").write_text(json.dumps(info))
    again = train(small.config(home, out), resume=out)
    told = json.loads((out / "run.json").read_text())
    assert told["status"] == "done" and told["result"]["loss"] == first.loss == again.loss
    assert (told["bytes"]["peak"], told["bytes"]["before"]) == (2**50, 7)  # the first part's, which was higher
    assert told["bytes"]["peak_of"] == info["bytes"]["peak_of"]


def test_memory_counts_from_its_own_beginning() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("Linux only")
    held = [bytes(3000) for _ in range(40_000)]  # too small to go back to the system when they are freed
    full, pin = machine.Memory(torch.device("cpu")).before, held.pop()
    del held
    memory = machine.Memory(torch.device("cpu"))
    assert memory.of == "process, resident" and memory.before < full - 0.8 * 120e6
    assert memory.added() < 20e6
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    drift = pages * os.sysconf("SC_PAGESIZE") - memory.before  # the system may have taken back pages of libraries
    block = bytearray(50 << 20)
    assert drift + 50e6 < memory.added() < max(drift, 0) + 80e6
    assert memory.added() == max(0, memory.peak() - memory.before)
    del block, pin


def test_the_peak_is_that_of_the_steps(home: Path, tmp_path: Path) -> None:
    """What the process held before, and gave back, does not count; what a step holds does."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("Linux only")
    size = 160 << 20
    torch.ones(size // 2)  # given back, but the process' peak remembers
    plain_run = train(small.config(home, tmp_path / "a", steps=2)).bytes
    assert plain_run["before"] < plain_run["peak"] < plain_run["before"] + size / 3

    def heavy(event: dict[str, Any]) -> None:
        if event["kind"] == "train" and event["step"] == 2:
            torch.ones(size // 4)

    held = train(small.config(home, tmp_path / "b", steps=2), on_event=heavy).bytes
    assert held["before"] + 0.9 * size < held["peak"] < held["before"] + 1.4 * size


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model": "gpt2"}, ("model.name", "llama'", "gpt2'")),
        ({"optimizer": "adamw"}, ("optimizer.name", "'foam'", "'adamw'")),
        ({"options": {"level": 3}}, ("optimizer.options", "{}", "{'level': 3}")),
        ({"sequence": 8}, ("data.sequence", "16", "8")),
        ({"precision": "bfloat16"}, ("train.precision", "'float32'", "'bfloat16'")),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(home: Path, tmp_path: Path, change: dict, words: tuple) -> None:
    train(small.config(home, tmp_path / "run", steps=1))
    before = small.tree(tmp_path / "run")
    with pytest.raises(UserError) as error:
        train(small.config(home, tmp_path / "run", steps=2, **change), resume=tmp_path / "run")
    assert all(word in str(error.value) for word in words), error.value
    assert small.tree(tmp_path / "run") == before


def test_a_whole_checkpoint_of_another_program_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small.config(home, tmp_path / "run", steps=1))
    saved = checkpoint.load(checkpoint.found(tmp_path / "run")[-1])
    del saved["optimizer"], saved["config"]
    monkeypatch.setattr(checkpoint, "load", lambda path: saved)  # as if its manifest agreed
    with pytest.raises(UserError, match="lacks optimizer, config: it was not written by foamlab train"):
        train(small.config(home, tmp_path / "run", steps=2), resume=tmp_path / "run")


def test_other_text_under_the_same_name_is_refused(home: Path, tmp_path: Path) -> None:
    extra = home / "text" / "extra.txt"
    train(small.config(home, tmp_path / "run", steps=1))
    extra.write_text("one more document")
    try:
        with pytest.raises(UserError, match="other text"):
            train(small.config(home, tmp_path / "run", steps=2), resume=tmp_path / "run")
    finally:
        extra.unlink()


def test_a_new_learning_rate_on_resume_is_noted_and_used(home: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    train(small.config(home, tmp_path / "run", steps=2, warmup=0, lr=1e-3))
    train(
        small.config(home, tmp_path / "run", steps=3, warmup=0, lr=5e-4),
        resume=tmp_path / "run",
        on_event=lambda e: notes.append(e["message"]) if e["kind"] == "note" else None,
    )
    assert any("optimizer.lr was 0.001, is now 0.0005" in note for note in notes)
    group = checkpoint.load(checkpoint.found(tmp_path / "run")[-1])["optimizer"]["param_groups"][0]
    assert group["lr"] == pytest.approx(5e-4 * 0.1)  # the end of the cosine


def test_two_resumes_at_once_are_one_too_many(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c = small.config(home, tmp_path / "run")
    train(c, on_event=stop_at(3))
    again: list[str] = []

    def second(event: dict[str, Any]) -> None:
        if event["kind"] == "train" and not again:
            before = small.tree(tmp_path / "run")
            with monkeypatch.context() as m:
                m.setattr(data, "prepare", lambda *_: pytest.fail("the text was read"))
                with pytest.raises(UserError, match=r"another process is writing .*then resume") as e:
                    train(c, resume=tmp_path / "run")
            assert small.tree(tmp_path / "run") == before
            again.append(str(e.value))

    assert train(c, resume=tmp_path / "run", on_event=second).status == "done"
    assert len(again) == 1 and "\n" not in again[0]
    train(small.config(home, tmp_path / "whole"))
    same(tmp_path / "run", tmp_path / "whole")


def test_fewer_steps_than_were_taken_are_refused_and_a_resume_can_be_pasted(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "my run"
    stop, events = stop_at(2), []

    def on_event(event: dict[str, Any]) -> None:
        events.append(event)
        stop(event)

    train(small.config(home, out), on_event=on_event)
    assert events[-1]["resume"] == f"foamlab train --resume '{out}'"
    before = small.tree(out)
    with pytest.raises(UserError, match=r"past train.steps 2: give at least 3"):
        train(small.config(home, out, steps=2), resume=out)
    assert small.tree(out) == before


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "tokenizer.json"])
def test_a_damaged_cache_does_not_reach_a_resumed_run(home: Path, tmp_path: Path, name: str) -> None:
    cache = str(tmp_path / "cache")
    whole = train(small.config(home, tmp_path / "whole", cache=cache))
    train(small.config(home, tmp_path / "parts", cache=cache), on_event=stop_at(4))
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 4] + bytes(len(data) - len(data) // 4))
    told: list[dict] = []
    config = small.config(home, tmp_path / "parts", cache=cache)
    assert train(config, resume=tmp_path / "parts", on_event=told.append).loss == whole.loss
    assert any("is damaged" in event["message"] for event in told if event.get("stage") == "warning")


def test_tokens_that_differ_under_the_same_key_are_refused(home: Path, tmp_path: Path) -> None:
    """A cache made anew by another version of the tokenizers library, say."""
    config = small.config(home, tmp_path / "run")
    train(config, on_event=stop_at(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.Corpus, "digest", property(lambda self: "other", lambda self, value: None), raising=False)
        with pytest.raises(UserError, match="other text or tokens"):
            train(config, resume=tmp_path / "run")


def aged(run: Path) -> None:
    """Make a stopped run one of 0.1, which named neither the version of the data nor FOAM's rule."""
    (last,) = checkpoint.found(run)[-1:]
    saved = torch.load(last / "training.pt", weights_only=True)
    kept = json.loads(saved["config"])
    del kept["data"]["version"], kept["data"]["lost"], saved["digest"]
    for key in RULE_OF_OLD:
        kept["optimizer"]["options"].pop(key, None)
    torch.save({**saved, "config": json.dumps(kept)}, last / "training.pt")
    manifest = json.loads((last / "manifest.json").read_text())
    data = (last / "training.pt").read_bytes()
    manifest["files"]["training.pt"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (last / "manifest.json").write_text(json.dumps(manifest))
    (run / "config.yaml").write_text(yaml.safe_dump(kept))


@pytest.mark.parametrize("name", ["foam", "foam-paper", "foam-muon", "foam-no-residual", "adamw"])
def test_a_run_of_old_resumes_and_begins_again_by_its_own_rule_and_data(home: Path, tmp_path: Path, name: str) -> None:
    rule = RULE_OF_OLD if name == "foam" else {}
    config = small.config(home, tmp_path / "whole", name, version=1)
    config.optimizer.options |= rule
    train(config)
    config.out = str(tmp_path / "run")
    train(config, on_event=stop_at(4))
    aged(tmp_path / "run")
    (again,), _ = parse(commands()["train"], [str(tmp_path / "run" / "config.yaml")])
    assert again.data.version == 1
    again.out = str(tmp_path / "again")
    train(again)
    same(tmp_path / "whole", tmp_path / "again")
    (old,), _ = parse(commands()["train"], ["--resume", str(tmp_path / "run")])
    assert train(old, resume=tmp_path / "run").status == "done"
    same(tmp_path / "whole", tmp_path / "run")
    assert "version: 1" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_run_of_old_keeps_its_rule_also_from_python(home: Path, tmp_path: Path) -> None:
    config = small.config(home, tmp_path / "run", version=1)
    config.optimizer.options |= RULE_OF_OLD
    train(config, on_event=stop_at(4))
    aged(tmp_path / "run")
    config.optimizer.options, config.data.version = {"bias_correction": "moments"}, 0
    with pytest.raises(UserError, match="was made with optimizer"):
        train(config, resume=tmp_path / "run")
    config.optimizer.options = {}
    train(config, resume=tmp_path / "run")
    groups = checkpoint.load(checkpoint.found(tmp_path / "run")[-1])["optimizer"]["param_groups"]
    assert {g["bias_correction"] for g in groups} == {"whole"} and PAPER.items() >= RULE_OF_OLD.items()
