"""What saves memory changes nothing else: loss in chunks, checkpointing, gradient release; and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import small
import torch
import transformers
from torch import Tensor, nn
from trained import child, poison, weights

from foamlab.config import ModelConfig
from foamlab.errors import UserError
from foamlab.memory import simulate
from foamlab.models.language import check_head, loss_fn
from foamlab.models.presets import FAMILIES, MODELS, build
from foamlab.training.run import train
from tolerances import exact

TINY = {"llama": "llama-1m", "qwen": "qwen-10m", "gpt2": "gpt2-10m"}


def tiny(family: str, checkpointing: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    return build(ModelConfig(TINY[family], checkpointing), vocab_size=301, sequence=16, dtype=dtype)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(301, (3, 16), generator=torch.Generator().manual_seed(2))
    labels = ids.roll(-1, 1)
    labels[0, 5:] = -100
    labels[2] = -100
    return ids, labels


def gradients(model: nn.Module, chunk: int) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = loss_fn(model, *batch(), chunk)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_every_family_is_here() -> None:
    assert set(TINY) == set(FAMILIES) == {MODELS[name].family for name in TINY.values()}


# ---------------------------------------------------------------------------------------------- loss in chunks


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("chunk", [7, 48, 1000])
def test_loss_in_chunks_is_the_loss(family: str, chunk: int) -> None:
    model = tiny(family)
    check_head(model)
    (whole, a), (parts, b) = gradients(model, 0), gradients(model, chunk)
    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)
    for x, y in zip(a, b, strict=True):  # float64 weights, but a loss in float32
        torch.testing.assert_close(y, x, rtol=0, atol=3e-6 * x.abs().max().item())
    with torch.no_grad():  # as in evaluation
        torch.testing.assert_close(loss_fn(model, *batch(), chunk), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_in_chunks_rounds_as_the_loss_does(dtype: torch.dtype) -> None:
    model, truth = tiny("llama", dtype=dtype), tiny("llama")
    truth.load_state_dict(model.state_dict())
    _, right = gradients(truth, 0)
    errors = []
    for chunk in (0, 16):
        _, g = gradients(model, chunk)
        errors.append(max(((x - y).norm() / y.norm()).item() for x, y in zip(g, right, strict=True)))
    assert errors[1] <= 2 * errors[0], errors


def test_loss_in_chunks_under_autocast() -> None:
    model = tiny("llama", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        (whole, a), (parts, b) = gradients(model, 0), gradients(model, 16)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=0)
    for x, y in zip(a, b, strict=True):
        assert (x - y).norm() <= 2.0**-6 * x.norm()


class MostLogits(simulate.Tracker):
    """Remembers the most bytes of logits and their gradients that were alive at once."""

    bytes = 0

    def add(self, x: Tensor, kind: str | None) -> None:
        super().add(x, kind)
        self.bytes = max(self.bytes, self.live["logits"])


def test_logits_of_all_tokens_never_exist() -> None:
    model, most = tiny("llama", dtype=torch.float32), []
    for chunk in (0, 8):
        with MostLogits(vocabulary=301) as tracker:
            gradients(model, chunk)
        most.append(tracker.bytes // (301 * 4))
    assert most[0] >= 2 * 48 and most[1] <= 4 * 8, most  # in tokens


def odd(kind: str, **more: Any) -> nn.Module:
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**shape, **heads, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize("kind", ["Gemma2", "Cohere", "Granite"])
def test_what_caps_or_scales_its_logits_is_refused(kind: str) -> None:
    model = odd(kind, **({"logits_scaling": 4.0} if kind == "Granite" else {}))
    with pytest.raises(UserError, match=rf"{kind}ForCausalLM does more to its logits .*--train.chunked_loss 0"):
        check_head(model)
    assert model.training is False or model.train() is model
    check_head(odd("Llama"))


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UserError, match="Linear names no output head"):
        check_head(nn.Linear(2, 2))


def test_training_in_chunks_ends_where_training_ends(home: Path, tmp_path: Path) -> None:
    for name, chunk in (("whole", 0), ("parts", 10)):
        train(small.config(home, tmp_path / name, chunked_loss=chunk))
    a, b = small.metrics(tmp_path / "whole"), small.metrics(tmp_path / "parts")
    assert [x["loss"] for x in a] == pytest.approx([x["loss"] for x in b], rel=1e-5)


@pytest.mark.heavy
def test_two_processes_in_chunks_give_the_result_of_one(home: Path, tmp_path: Path) -> None:
    kind: dict[str, Any] = {"steps": 3, "batch": 8, "chunked_loss": 10, "checkpoint_every": 0}
    run = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    process = child(home, tmp_path / "two", f"train(small.config(home, out, 'sgd', **{kind!r}))", *run)
    assert process.wait(90) == 0, process.stderr and process.stderr.read()
    train(small.config(home, tmp_path / "one", "sgd", **kind))
    for name, x in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], x, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------- checkpointing


@pytest.mark.parametrize("family", TINY)
def test_checkpointing_gives_the_same_gradients(family: str) -> None:
    (one, a), (two, b) = (gradients(tiny(family, on, torch.float32), 0) for on in (False, True))
    exact(one, two)
    for x, y in zip(a, b, strict=True):
        exact(x, y)


@pytest.mark.parametrize("family", TINY)
def test_checkpointing_keeps_less(family: str) -> None:
    most = []
    for on in (False, True):
        model = tiny(family, on, torch.float32)
        with simulate.Tracker(vocabulary=301) as tracker:
            loss = loss_fn(model, *batch())
            most.append(tracker.live["activations"])
            del loss
    assert most[1] < 0.5 * most[0], most


@pytest.mark.parametrize("changes", [{}, {"clip_each": 0.05}, {"precision": "bfloat16"}], ids=str)
def test_released_training_is_the_same_to_the_bit(home: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    for name, release in (("plain", False), ("released", True)):
        train(small.config(home, tmp_path / name, clip=0.0, release=release, **changes))
    for name, x in weights(tmp_path / "plain").items():
        exact(x, weights(tmp_path / "released")[name], name)
    a, b = small.metrics(tmp_path / "plain"), small.metrics(tmp_path / "released")
    assert [x["loss"] for x in a] == [x["loss"] for x in b]
    norms = [[x["grad_norm"] for x in run if x["kind"] == "train"] for run in (a, b)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2 if changes.get("precision") else 1e-5)


def test_a_released_run_resumes(home: Path, tmp_path: Path) -> None:
    kind: dict[str, Any] = {"clip": 0.0, "release": True, "precision": "bfloat16", "options": {"state": "int8"}}
    train(small.config(home, tmp_path / "whole", **kind))
    train(small.config(home, tmp_path / "parts", **kind))
    older = tmp_path / "parts" / "checkpoints" / "step-00000003"
    train(small.config(home, tmp_path / "parts", **kind), resume=older)
    for name, x in weights(tmp_path / "whole").items():
        exact(x, weights(tmp_path / "parts")[name], name)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_never_reaches_a_weight(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    poison(monkeypatch, where, {2})
    result = train(small.config(home, tmp_path / "run", clip=0.0, release=True))
    assert result.skipped == 1 and result.step == 6 and math.isfinite(result.loss or math.nan)
    skips = [line for line in small.metrics(tmp_path / "run") if line["kind"] == "skip"]
    assert len(skips) == 1 and skips[0]["step"] == 3 and where in skips[0]["why"]
    assert all(x.isfinite().all() for x in weights(tmp_path / "run").values())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"release": True}, "set --train.clip 0, and --train.clip_each"),
        ({"clip_each": 1.0}, "set one of them to 0"),
        ({"release": True, "clip": 0.0, "micro_batch": 2}, "set --train.micro_batch 0, or --train.batch 2"),
        ({"release": True, "clip": 0.0, "residual_every": 1}, "set --train.residual_every 0"),
        ({"release": True, "clip": 0.0, "optimizer": "adamw"}, "train.release needs FOAM, not AdamW"),
        ({"residual_every": 1, "optimizer": "sgd"}, "train.residual_every needs FOAM, not SGD"),
        ({"chunked_loss": -1}, "train.chunked_loss must be at least 0, got -1"),
    ],
    ids=str,
)
def test_what_excludes_each_other_is_told_before_anything_is_written(
    home: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        train(small.config(home, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------- residuals, budgets


def test_residual_ratios_are_recorded(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(small.config(home, tmp_path / "run", residual_every=2, tensorboard=True))
    lines = [line for line in small.metrics(tmp_path / "run") if line["kind"] == "residual"]
    assert [line["step"] for line in lines] == [2, 4, 6]
    for line in lines:
        assert len(line["values"]) == 7 and all(0 < x < 1 for x in line["values"].values()), line
        assert "model.layers.0.mlp.up_proj.weight" in line["values"]
    events = b"".join(p.read_bytes() for p in (tmp_path / "run" / "tensorboard").iterdir())
    assert b"residual/model.layers.0.mlp.up_proj.weight" in events


def test_residual_ratios_change_nothing(home: Path, tmp_path: Path) -> None:
    for name, every in (("without", 0), ("with", 1)):
        train(small.config(home, tmp_path / name, residual_every=every))
    for name, x in weights(tmp_path / "without").items():
        exact(x, weights(tmp_path / "with")[name], name)


def test_a_budget_is_an_option_of_foam(home: Path, tmp_path: Path) -> None:
    free = train(small.config(home, tmp_path / "free", steps=1)).bytes["state"]
    budget = free - 1000
    train(small.config(home, tmp_path / "run", steps=1, options={"state_budget": f"{budget}B"}))
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert 0.8 * budget < info["bytes"]["state"] <= budget
