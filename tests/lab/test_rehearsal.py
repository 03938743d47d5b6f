"""What an optimizer refuses is told before any text is read: by train, compare, ablate and bench alike."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import config as small_config

from foamlab import data
from foamlab.config import ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from foamlab.contest import design, runner
from foamlab.errors import UserError
from foamlab.optimizers.registry import OPTIMIZERS, dry_build, resolve
from foamlab.studies import bench
from foamlab.training.preview import preview
from foamlab.training.run import train

VALUES: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, r"optimizer\.lr must be at least 0, got -1"),
    ({"lr": math.nan}, r"optimizer\.lr .*nan"),
    ({"lr": math.inf}, r"optimizer\.lr .*inf"),
    ({"betas": (0.9, 1.0)}, r"optimizer\.betas .*1\.0"),
    ({"betas": (-0.1, 0.9)}, r"optimizer\.betas "),
    ({"eps": -1e-8}, r"optimizer\.eps "),
    ({"weight_decay": math.nan}, r"optimizer\.weight_decay "),
    ({"scale": -0.5}, r"optimizer\.scale "),
]
OPTIONS = [
    ("foam", {"level": -1}, "level must be"),
    ("foam", {"state": "int7"}, "int8"),
    ("foam", {"state_budget": "few"}, "300MB"),
    ("foam", {"state_budget": 10}, "cannot fit"),
    ("foam", {"no_decay": "embedings"}, "did you mean 'embeddings'"),
    ("foam", {"overrides": {"*.nowhere": {"level": 3}}}, "matches no"),
    ("foam", {"backend": "abacus"}, "known: eager"),
    ("foam-mini", {"backend": "cpu"}, "only the adam rule"),
    ("adamw", {"fused": True, "foreach": True}, "optimizer adamw: "),
    ("muon", {"adjust_lr_fn": "none"}, "optimizer muon: "),
    ("apollo", {"scaling": "row"}, "known: channel, tensor"),
    ("foam-ablation", {"direction": "all"}, "known: rows, columns"),
    ("foam", {"bias_correction": "all"}, "known: moments, whole"),
    ("foam", {"residual_in_v": -1.0}, "residual_in_v must be a number"),
]
RIVALS = [
    ("galore", {"projection_type": "stdd"}, "did you mean std"),
    ("galore", {"update_proj_gap": 0}, "at least 1"),
    ("galore", {"rank": -2}, "rank"),
    ("adamw8bit", {"embedding_bits": 16}, "8 or 32"),
]


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunConfig:
    """A run whose text must not be read."""

    def touched(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the text was read")

    monkeypatch.setattr(data, "prepare", touched)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("It is there, that is all.")
    return replace(small_config(tmp_path, tmp_path / "run"), model=ModelConfig("llama-1m"))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("values, message", VALUES)
def test_rates_that_make_no_sense_are_refused_for_every_optimizer(
    name: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve(OptimizerConfig(name, **values))


@pytest.mark.parametrize("name, options, message", [*OPTIONS, *RIVALS])
def test_train_and_its_dry_run_refuse_options(
    sealed: RunConfig, name: str, options: dict[str, Any], message: str
) -> None:
    if (name, options, message) in RIVALS:
        pytest.importorskip("pytorch_optimizer" if name == "galore" else "bitsandbytes")
    run = replace(sealed, optimizer=OptimizerConfig(name, options=options))
    for begin in (train, preview):
        with pytest.raises(UserError, match=message):
            begin(run)


@pytest.mark.parametrize("values, message", VALUES)
def test_train_refuses_values(sealed: RunConfig, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(replace(sealed, optimizer=OptimizerConfig("sgd", **values)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_a_dry_run(sealed: RunConfig, name: str) -> None:
    if OPTIMIZERS[name].install:
        pytest.importorskip("bitsandbytes")
        pytest.importorskip("pytorch_optimizer")
    options = {"from_scratch": True} if name == "lora" else {}
    said = preview(replace(sealed, optimizer=OptimizerConfig(name, options=options)))
    assert re.search(r" [1-9][0-9,]* of optimizer state", said)


def test_switches_that_need_foam(sealed: RunConfig) -> None:
    for switch in ({"release": True, "clip": 0.0}, {"residual_every": 5}):
        run = replace(sealed, optimizer=OptimizerConfig("adamw"), train=replace(sealed.train, **switch))
        for begin in (train, preview):
            with pytest.raises(UserError, match="needs FOAM"):
                begin(run)


@pytest.mark.parametrize("values, message", [v for v in VALUES if not {"lr", "scale"} & set(v[0])])
def test_contests_refuse_what_all_share(
    sealed: RunConfig, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    run = replace(sealed, optimizer=OptimizerConfig(**values))
    with pytest.raises(UserError, match=message):
        runner.start(design.comparison(run, ["adamw", "sgd"], [0]), tmp_path / "contest")
    with pytest.raises(UserError, match=message):
        runner.start(design.ablation(run, ["residual"], [0]), tmp_path / "contest")
    assert not (tmp_path / "contest").exists()


def test_contests_refuse_rates(sealed: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"optimizer\.lr .*inf"):
        runner.start(design.comparison(sealed, ["adamw", "sgd"], [0], {"sgd": [0.1, math.inf]}), tmp_path / "contest")
    with pytest.raises(UserError, match=r"optimizer\.scale .*-0.5"):
        design.ablation(replace(sealed, optimizer=OptimizerConfig(scale=-0.5)), ["residual"], [0])


def test_bench_refuses_before_anything_is_timed(sealed: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "paired", lambda *_, **__: pytest.fail("something was timed"))
    run = RunConfig(model=ModelConfig("llama-1m"), data=sealed.data, train=TrainConfig(batch=2))
    for names, message in ((["foam", "adamwx"], "did you mean adamw"), (["foam", "lora"], "lora adapts a trained")):
        with pytest.raises(UserError, match=message):
            list(bench.bench_train(run, names, 1))
        with pytest.raises(UserError, match=message):
            list(bench.bench_step("llama-1m", names, pairs=1))
    with pytest.raises(UserError, match=r"unknown dtype 'float33': did you mean float32\?"):
        list(bench.bench_step("llama-1m", ["foam"], ["float32", "float33"], pairs=1))


def test_a_rehearsal_refuses_nothing_that_can_be_had(tmp_path: Path, sealed: RunConfig) -> None:
    """A budget too small for the vocabulary of a preset but not for this text's; what the meta device cannot fuse."""
    for name, options in (
        ("foam", {"state_budget": 2_000_000}),
        ("adamw", {"fused": True}),
        ("foam", {"backend": "cpu"}),
    ):
        run = replace(sealed, optimizer=OptimizerConfig(name, options=options))
        with pytest.raises(AssertionError, match="the text was read"):
            train(run)


def test_a_rehearsal_leaves_random_state_alone() -> None:
    from foamlab.models.presets import build

    for name in ("foam", "adamw", "sgd", "apollo"):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        dry_build(OptimizerConfig(name, options={"fused": True} if name == "adamw" else {}),
                 build(ModelConfig("llama-1m"), device="meta"), torch.device("cpu"))  # fmt: skip
        assert torch.equal(before, torch.get_rng_state())
