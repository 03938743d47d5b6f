"""Runs: their arithmetic, folders and events, and what is refused before they begin."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import small
import torch
import yaml
from trained import child, poison, weights

from foamlab import data, machine, models, optimizers
from foamlab.config import TrainConfig, to_dict
from foamlab.errors import UserError
from foamlab.training import checkpoint
from foamlab.training.run import train
from foamlab.training.step import schedule
from tolerances import rounding

# ---------------------------------------------------------------------------------------------- the arithmetic


def truth(home: Path, skipped: tuple[int, ...] = (), **changes: Any) -> dict[str, torch.Tensor]:
    """The weights of the same run by a plain loop in float64: a gradient of the mean loss per batch, clipping, SGD."""
    c = small.config(home, home, "sgd", **changes)
    corpus = data.prepare(c.data, c.train.seed)
    model = models.build(c.model, corpus.vocab_size, c.data.sequence).double()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for step in range(c.train.steps):
        ids, labels = map(torch.from_numpy, corpus.batch("train", step, c.train.batch))
        logits = model(input_ids=ids).logits.flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c.train.clip or math.inf)
        optimizer.param_groups[0]["lr"] = 0.1 * schedule(step, c.train)
        if step not in skipped:
            optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_micro_batches_change_rounding_only(home: Path, tmp_path: Path, clip: float) -> None:
    kind: dict[str, Any] = {
        "mode": "paper",
        "sequence": 24,
        "steps": 3,
        "batch": 8,
        "clip": clip,
    }  # rows of uneven length
    whole = train(small.config(home, tmp_path / "whole", "sgd", **kind))
    cut = train(small.config(home, tmp_path / "cut", "sgd", micro_batch=3, **kind))
    expected = truth(home, **kind)
    for name, x in weights(tmp_path / "cut").items():
        rounding(x, weights(tmp_path / "whole")[name], expected[name], name)
    assert cut.tokens == whole.tokens < 3 * 8 * 24  # padding is no token


@pytest.mark.heavy
def test_two_processes_give_the_result_of_one(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: a loss that is not finite on one process alone keeps both from stepping."""
    kind: dict[str, Any] = {"mode": "paper", "sequence": 24, "steps": 4, "batch": 8, "clip": 0.0, "checkpoint_every": 0}
    body = f"""
real, calls = objective.loss_fn, 0
def bad(model, ids, labels, chunk):
    global calls
    calls += model.training and not ids.is_meta  # which is the planner's
    return real(model, ids, labels) * (float("nan") if os.environ["RANK"] == "1" and calls == 2 else 1)
objective.loss_fn = bad
train(small.config(home, out, "sgd", **{kind!r}))
"""
    run = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d",
           "--rdzv-endpoint=localhost:0")  # fmt: skip
    process = child(home, tmp_path / "two", body, *run)
    said = process.communicate(timeout=90)[1]
    assert process.returncode == 0 and "FutureWarning" not in said, said
    poison(monkeypatch, "loss", {1})
    train(small.config(home, tmp_path / "one", "sgd", **kind))
    expected = truth(home, skipped=(1,), **kind)
    for name, x in weights(tmp_path / "two").items():
        rounding(x, weights(tmp_path / "one")[name], expected[name], name)
    one, two = small.metrics(tmp_path / "one"), small.metrics(tmp_path / "two")
    assert [(a["kind"], a["step"]) for a in one] == [(b["kind"], b["step"]) for b in two]
    assert [line["step"] for line in two if line["kind"] == "skip"] == [2]
    for a, b in zip(one, two):
        assert a.get("tokens") == b.get("tokens")
        if a["kind"] == "eval":
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_schedule() -> None:
    t = TrainConfig(steps=20, warmup=0.2, final=0.1)
    rates = [schedule(step, t) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[-1] == pytest.approx(0.1)
    assert rates[11] == pytest.approx(0.55) and rates[3:] == sorted(rates[3:], reverse=True)  # half way down
    assert schedule(0, TrainConfig(steps=1, warmup=0.0, final=0.3)) == pytest.approx(0.3)
    assert [schedule(k, TrainConfig(steps=2, warmup=1.0)) for k in (0, 1)] == [0.5, 1.0]


def test_groups_keep_their_ratio_and_tensor_rates_their_tensor(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lr = torch.tensor(0.5)

    def build(config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return torch.optim.AdamW([{"params": [first], "lr": lr}, {"params": rest, "lr": 0.01}], foreach=False)

    monkeypatch.setattr(optimizers, "build", build)
    train(small.config(home, tmp_path / "run", "adamw", steps=3, final=0.2))
    groups = checkpoint.load(checkpoint.found(tmp_path / "run")[-1])["optimizer"]["param_groups"]
    assert lr.item() == pytest.approx(0.1) and [float(g["lr"]) for g in groups] == pytest.approx([0.1, 0.002])


def test_evaluation_is_the_mean_over_tokens(home: Path, tmp_path: Path) -> None:
    c = small.config(home, tmp_path / "run", steps=0, mode="paper", sequence=24, eval_tokens=7 * 24)
    result = train(c)
    corpus = data.prepare(c.data, 0)
    model = models.build(c.model, corpus.vocab_size, 24).double()
    ids, labels = map(torch.from_numpy, corpus.batch("validation", 0, 7))
    with torch.no_grad():
        mean = torch.nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())
    assert result.loss == pytest.approx(mean.item(), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(mean.item()), rel=1e-5)
    assert checkpoint.found(tmp_path / "run") == [] and result.status == "done" and result.tokens == 0


# ---------------------------------------------------------------------------------------------- folders and events


def test_record_settings_and_events(home: Path, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    c = small.config(home, tmp_path / "run", sample="the foam")
    result = train(c, on_event=events.append)
    kinds = [e["kind"] for e in events if e["kind"] != "prepare"]
    assert " ".join(kinds) == "start train bytes train train eval save train train train eval save end"
    lines = [{k: v for k, v in e.items() if k not in small.TIMES} for e in events if e["kind"] in ("train", "eval")]
    assert lines == small.metrics(tmp_path / "run")
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["result"]["loss"] == result.loss and info["model"]["parameters"] == 7488
    assert info["bytes"]["weights"] == 4 * 7488 and info["bytes"]["peak"] > 50e6
    assert info["bytes"]["state"] == result.bytes["state"] < 8 * 7488
    assert (
        result.sample.startswith("the foam") and (tmp_path / "run" / "sample.txt").read_text() == result.sample + "\n"
    )
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert settings["optimizer"]["lr"] == 1e-3 and settings["train"]["precision"] == "float32"
    assert {**settings["train"], "precision": "auto"} == to_dict(c)["train"]
    assert result.tokens == 6 * 4 * 16 and result.seconds > 0


def test_an_existing_folder_is_never_written(home: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="exists already"):
        train(small.config(home, tmp_path / "run"))
    assert small.tree(tmp_path / "run") == {"thesis.txt": b"years of work"}


def test_runs_without_a_name_are_numbered(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        c = small.config(home, tmp_path, steps=0)
        c.out = ""
        assert train(c).folder == Path("runs") / f"llama-foam-{number}"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"batch": 0}, "train.batch must be at least 1, got 0"),
        ({"steps": -1}, "train.steps must be at least 0"),
        ({"warmup": 1.5}, "train.warmup must be at most 1, got 1.5"),
        ({"clip": math.nan}, "train.clip"),
        ({"device": "abacus"}, "unknown train.device 'abacus'"),
        ({"device": "cuda:99"}, "CUDA devices here"),
        ({"batch": 4096}, "lower train.batch"),
        ({"optimizer": "faom"}, "did you mean foam"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_written(
    home: Path, tmp_path: Path, changes: dict, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        train(small.config(home, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_an_unknown_model_is_refused_before_the_text_is_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "prepare", lambda *_: pytest.fail("read the text"))
    c = small.config(home, tmp_path / "run")
    c.model.name = "lama-1m"
    with pytest.raises(UserError, match="did you mean llama-1m"):
        train(c)


def test_too_little_room_is_told_at_once(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = checkpoint.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda p: usage._replace(free=50_000))
    with pytest.raises(UserError, match="not enough room"):
        train(small.config(home, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_precision_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for name in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: False, raising=False)
    assert machine.choose_precision("auto", cpu) == ("float32", "")
    name, remark = machine.choose_precision("bfloat16", cpu)
    assert name == "bfloat16" and "no fast bfloat16" in remark


def test_processes_share_gradients_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        model = machine.parallel(torch.nn.BatchNorm1d(3))
        assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]
        assert not (getattr(model, "forward_sync_buffers", False) or getattr(model, "broadcast_buffers", False))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("left", [[], [".lock"]])
def test_an_empty_folder_may_be_the_runs(home: Path, tmp_path: Path, left: list[str]) -> None:
    """As may one in which a run was killed before it wrote anything."""
    (tmp_path / "run").mkdir()
    for name in left:
        (tmp_path / "run" / name).touch()
    assert train(small.config(home, tmp_path / "run", steps=1)).folder == tmp_path / "run"
    with pytest.raises(UserError, match="exists already"):
        train(small.config(home, tmp_path / "run", steps=1))


def test_what_cannot_fit_reads_no_text(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "prepare", lambda *args: pytest.fail("the text was read"))
    monkeypatch.setattr("foamlab.memory.advise.available", lambda device: 10_000)
    for tokenizer in ("bytes", "bpe:4096"):
        with pytest.raises(UserError, match="this run needs about"):
            train(small.config(home, tmp_path / "run", tokenizer=tokenizer))
