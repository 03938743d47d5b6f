"""The loop: exact resume, interruption, the guard, accumulation and processes, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import small
import torch
import yaml

from foamlab import data, machine, models, optimizers
from foamlab.cli.arguments import parse
from foamlab.cli.commands import commands
from foamlab.config import RULE_OF_OLD, OptimizerConfig, TrainConfig, to_dict
from foamlab.errors import Diverged, UserError
from foamlab.models.language import loss_fn
from foamlab.training import checkpoint
from foamlab.training import step as training_step
from foamlab.training.run import train
from foamlab.training.step import schedule
from tolerances import exact, rounding
from torchfoam import PAPER

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.prepare(tmp_path_factory.mktemp("home"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(checkpoint.found(folder)[-1] / "model.safetensors")


def same(a: Path, b: Path) -> None:
    """The last checkpoints and the records of two runs are equal, bit for bit."""
    for name, x in weights(a).items():
        exact(x, weights(b)[name], name)
    one, two = (checkpoint.load(checkpoint.found(run)[-1]) for run in (a, b))
    assert one["step"] == two["step"]
    for number, state in one["optimizer"]["state"].items():
        for name, x in state.items():
            exact(x, two["optimizer"]["state"][number][name], f"{number} {name}")
    assert small.metrics(a) == small.metrics(b)


def stop_at(step: int, *signals: int) -> Any:
    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "train" and event["step"] == step:
            for number in signals or (signal.SIGINT,):
                os.kill(os.getpid(), number)

    return on_event


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
    block = bytearray(50 << 20)
    assert 50e6 < memory.added() < 80e6 and memory.peak() - memory.before == memory.added()
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


# ---------------------------------------------------------------------------------------------- signals


def test_second_ctrl_c_aborts(home: Path, tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(small.config(home, tmp_path / "run"), on_event=stop_at(2, signal.SIGINT, signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is handler
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
    assert checkpoint.found(tmp_path / "run") == []


def test_ctrl_c_before_the_first_step_saves_too(home: Path, tmp_path: Path) -> None:
    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "start":
            os.kill(os.getpid(), signal.SIGINT)

    assert train(small.config(home, tmp_path / "run"), on_event=on_event).status == "interrupted"
    assert checkpoint.load(checkpoint.found(tmp_path / "run")[-1])["step"] == 1


def child(home: Path, out: Path, body: str, *before: str, **environment: str) -> subprocess.Popen:
    """A process of its own that runs `body` with `config`, `train` and the modules at hand."""
    script = (
        "import os, signal, sys, torch\nfrom pathlib import Path\nimport small\n"
        "from foamlab.training import checkpoint, step as training_step\nfrom foamlab.training.run import train\n"
        f"home, out = Path({str(home)!r}), Path({str(out)!r})\n" + body
    )
    file = out.with_suffix(".py")
    file.write_text(script)
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, *before, str(file)], env=environ, stderr=subprocess.PIPE, text=True)


def test_sigterm_saves_and_does_not_abort_after_ctrl_c(home: Path, tmp_path: Path) -> None:
    """torchrun sends both for one Ctrl-C."""
    both = stop_at(2, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    assert train(small.config(home, tmp_path / "run"), on_event=both).status == "interrupted"
    assert checkpoint.load(checkpoint.found(tmp_path / "run")[-1])["step"] == 3


def test_ctrl_c_from_outside_saves_and_ends(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = child(home, out, "r = train(small.config(home, out, steps=10**6))\nsys.exit(r.status != 'interrupted')")
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_bytes()) < 500:
        assert process.poll() is None and time.monotonic() < deadline, process.stderr and process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0, process.stderr and process.stderr.read()
    steps = [line["step"] for line in small.metrics(out) if line["kind"] == "train"]
    assert checkpoint.load(checkpoint.found(out)[-1])["step"] == steps[-1] == len(steps)


def test_killed_in_the_middle_of_a_save(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    body = """
whole = torch.save
def half(obj, path):
    whole(obj, path)
    if "step-00000004" in str(path) or "-00000004-" in str(path):
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = half
train(small.config(home, out, checkpoint_every=2))
"""
    process = child(home, out, body)
    assert process.wait(60) == -signal.SIGKILL, process.stderr and process.stderr.read()
    names = sorted(os.listdir(out / "checkpoints"))
    assert names[0].startswith(".part-00000004") and names[1:] == ["step-00000002"]
    train(small.config(home, out, checkpoint_every=2), resume=out)
    train(small.config(home, tmp_path / "whole", checkpoint_every=2))
    same(tmp_path / "whole", out)
    assert not [name for name in os.listdir(out / "checkpoints") if name.startswith(".")]


# ---------------------------------------------------------------------------------------------- the guard


def poison(monkeypatch: pytest.MonkeyPatch, where: str, calls: set[int]) -> None:
    """Make the loss, or the gradient alone, of some calls in training not finite."""
    count = 0

    def bad(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor, chunk: int = 0) -> torch.Tensor:
        nonlocal count
        loss = loss_fn(model, ids, labels)
        if not model.training:
            return loss
        count += 1
        if count - 1 in calls and where == "loss":
            return loss * math.nan
        if count - 1 in calls:
            loss.register_hook(lambda g: g * math.inf)
        return loss

    monkeypatch.setattr(training_step, "loss_fn", bad)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["foam", "adamw"])
def test_a_step_that_is_not_finite_changes_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, optimizer: str
) -> None:
    poison(monkeypatch, where, {2})
    built: list[torch.optim.Optimizer] = []
    real = optimizers.build

    def build(config: OptimizerConfig, model: Any) -> Any:
        built.append(real(config, model))
        return built[-1]

    monkeypatch.setattr(optimizers, "build", build)
    before: list[torch.Tensor] = []

    def tensors() -> list[torch.Tensor]:
        params = [p for g in built[-1].param_groups for p in g["params"]]
        return [x.detach().clone() for p in params for x in (p, *built[-1].state[p].values())]

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "train" and event["step"] == 2:
            before.extend(tensors())
        if event["kind"] == "skip":
            for a, b in zip(before, tensors(), strict=True):
                exact(a, b)

    result = train(small.config(home, tmp_path / "run", optimizer, checkpoint_every=0), on_event=on_event)
    assert before and result.skipped == 1 and result.step == 6
    skips = [line for line in small.metrics(tmp_path / "run") if line["kind"] == "skip"]
    assert skips == [{"kind": "skip", "step": 3, "why": skips[0]["why"]}] and where in skips[0]["why"]
    assert checkpoint.load(checkpoint.found(tmp_path / "run")[-1])["skipped"] == 1


def test_patience_ends_with_the_last_good_state(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"checkpoint_every": 0, "patience": 3}
    with monkeypatch.context() as patch:
        poison(patch, "loss", set(range(2, 99)))
        with pytest.raises(Diverged, match=r"3 steps in a row after step 2 .*optimizer.lr.*resume from step 2"):
            train(small.config(home, tmp_path / "run", **settings))
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["status"] == "failed" and info["reason"] == "diverged" and "in a row" in info["error"]
    assert [p.name for p in checkpoint.found(tmp_path / "run")] == ["step-00000002"]
    train(small.config(home, tmp_path / "run", **settings), resume=tmp_path / "run")  # the cause has been mended
    assert not {"error", "reason"} & json.loads((tmp_path / "run" / "run.json").read_text()).keys()
    train(small.config(home, tmp_path / "whole", **settings))
    same(tmp_path / "whole", tmp_path / "run")


def test_a_run_that_cannot_resume_offers_no_command(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an optimizer whose state is objects, such as galore."""
    monkeypatch.setattr(checkpoint, "storable", lambda state: False)
    ends: list[dict[str, Any]] = []

    def stop(event: dict[str, Any]) -> None:
        stop_at(3)(event)
        ends.extend([event] * (event["kind"] == "end"))

    train(small.config(home, tmp_path / "run"), on_event=stop)
    assert [(end["status"], end["resume"]) for end in ends] == [("interrupted", "")]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["resume"] == ""
    poison(monkeypatch, "loss", set(range(4, 99)))
    with pytest.raises(Diverged) as e:
        train(small.config(home, tmp_path / "lost", patience=2))
    assert checkpoint.found(tmp_path / "lost") and "--resume" not in str(e.value)


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
real, calls = training_step.loss_fn, 0
def bad(model, ids, labels, chunk):
    global calls
    calls += model.training
    return real(model, ids, labels) * (float("nan") if os.environ["RANK"] == "1" and calls == 2 else 1)
training_step.loss_fn = bad
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


def test_too_little_room_is_told_at_once(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = checkpoint.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda p: usage._replace(free=50_000))
    with pytest.raises(UserError, match="not enough room"):
        train(small.config(home, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_state_that_cannot_be_stored_is_told_and_not_resumed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p]["odd"] = Path()

    monkeypatch.setattr(optimizers, "build", lambda c, m: Odd(m.parameters(), lr=0.1))
    events: list[dict[str, Any]] = []
    train(small.config(home, tmp_path / "run", "sgd", steps=1), on_event=events.append)
    assert any("will not resume" in e.get("message", "") for e in events)
    with pytest.raises(UserError, match="cannot be resumed"):
        train(small.config(home, tmp_path / "run", "sgd", steps=2), resume=tmp_path / "run")


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


def test_what_cannot_fit_reads_no_text(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "prepare", lambda *args: pytest.fail("the text was read"))
    monkeypatch.setattr("foamlab.memory.advise.available", lambda device: 10_000)
    for tokenizer in ("bytes", "bpe:4096"):
        with pytest.raises(UserError, match="this run needs about"):
            train(small.config(home, tmp_path / "run", tokenizer=tokenizer))
