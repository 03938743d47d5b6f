"""The authors' released optimizer, step by step: tests/data/README.md says how its numbers were made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from torchfoam import FOAM, PAPER

GOLDEN = sorted((Path(__file__).parent / "data").glob("*.npz"))


def worst(file: Path, correct_eps: bool = True, **changes: object) -> tuple[float, float, float]:
    """Largest difference of the weights, over all steps, as a part of the distance moved; then of m and of v at the
    end, as parts of their norms."""
    with np.load(file) as archive:
        d = {k: torch.tensor(archive[k]) for k in archive.files}
    level, beta1, beta2 = int(d["level"]), float(d["betas"][0]), float(d["betas"][1])
    w = torch.nn.Parameter(d["w0"].clone())
    options = {
        **PAPER,
        "level": max(level, 0),
        "lr": float(d["lr"]),
        "scale": float(d["alpha"]),
        "betas": (beta1, beta2),
        "residual": float(d["residual_scale"]),
        "weight_decay": float(d["weight_decay"]),
        **changes,
    }
    opt = FOAM([{"params": [w], **options}])
    apart = 0.0
    for t, (g, theirs) in enumerate(zip(d["grads"], d["weights"]), 1):
        # they add eps before the bias correction
        opt.param_groups[0]["eps"] = float(d["eps"]) / ((1 - beta2**t) ** 0.5 if correct_eps else 1)
        w.grad = g
        opt.step()
        apart = max(apart, float((w.detach() - theirs).norm() / (theirs - d["w0"]).norm()))
    m, v = opt.state[w]["m"], opt.state[w]["v"]
    assert m.shape == d["exp_avg"].shape and w.dtype == torch.float32
    return (
        apart,
        float((m - d["exp_avg"]).norm() / d["exp_avg"].norm()),
        float((v - d["exp_avg_sq"]).norm() / d["exp_avg_sq"].norm()),
    )


@pytest.mark.parametrize("file", GOLDEN, ids=lambda f: f.stem)
def test_every_step_as_the_authors_release(file: Path) -> None:
    weights, m, v = worst(file)
    assert max(weights, m, v) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"second_moment": "square_mean"},
        {"residual": 0.9},
        {"scale": 0.2501},
        {"bias_correction": "moments"},
        {"residual_in_v": 0.99},
    ],
    ids=str,
)
def test_it_would_notice(changes: dict) -> None:
    assert worst(GOLDEN[0], **changes)[0] > 1e-5


def test_the_data_is_there() -> None:
    assert [f.stem for f in GOLDEN] == [
        "level2", "level2_no_residual", "level3_beta95", "level8_whole_row", "unfolded_adam",
    ]  # fmt: skip
