"""The convergence study: its problem meets the conditions it claims, its slopes are right, its findings are there."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import CHROMIUM, FRAMES, PROBE, browse

from foamlab.cli import main
from foamlab.errors import UserError
from foamlab.studies import convergence
from foamlab.studies.convergence import Arm, Problem

LENGTHS = (16, 64, 256)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_slopes_on_known_data() -> None:
    x = [2.0**k for k in range(6, 14)]
    assert convergence.slope(x, [3 / math.sqrt(T) for T in x]) == pytest.approx(-0.5)
    assert convergence.slope(x, [7.0 for _ in x]) == pytest.approx(0)
    # the log makes the bound's slope over these T shallower than -1/2, by its mean of 1 / ln T or so
    assert convergence.slope(x, [math.log(T) / math.sqrt(T) for T in x]) == pytest.approx(-0.3425, abs=1e-4)


def test_the_gradient_is_the_gradient() -> None:
    problem = Problem(2, seed=1)
    problem.X, problem.Y = problem.X.double(), problem.Y.double()
    W = torch.randn(2, convergence.ROWS, convergence.COLUMNS, dtype=torch.float64, requires_grad=True)
    (truth,) = torch.autograd.grad(problem.loss(W).sum(), W)
    assert (problem.gradient(W.detach()) - truth).abs().max() < 1e-14


def test_the_problem_is_smooth_bounded_and_not_convex() -> None:
    problem = Problem(3, seed=0)
    L = torch.linalg.matrix_norm(problem.X, 2).square() / convergence.SAMPLES
    largest = problem.X.norm(dim=2).mean(1) / 2 * convergence.ROWS**0.5  # |e / (1 + e^2)| <= 1/2 in each of R outputs
    for _ in range(20):
        a, b = torch.randn_like(problem.W), 0.3 * torch.randn_like(problem.W)
        change = (problem.gradient(a) - problem.gradient(a + b)).flatten(1).norm(dim=1)
        assert (change <= L * b.flatten(1).norm(dim=1) * 1.001).all()
        assert (problem.gradient(10 * a).flatten(1).norm(dim=1) <= largest).all()
    middle = [problem.loss((a + b) / 2) - (problem.loss(a) + problem.loss(b)) / 2 for a, b in [(2 * a, 6 * a)]]
    assert (middle[0] > 0).all()  # above its chord


@pytest.mark.parametrize("skewed", [False, True])
def test_noise_is_bounded_with_mean_zero(skewed: bool) -> None:
    problem = Problem(8, seed=0)
    z = torch.stack([problem.noise(skewed) for _ in range(200)]) / convergence.NOISE
    assert z.abs().max() <= (3.001 if skewed else 3**0.5 + 1e-3)
    assert abs(z.mean()) < 5 / z.numel() ** 0.5 and abs(z.std() - 1) < 0.01
    assert (abs((z**3).mean()) > 1) == skewed


def test_level_0_is_adam() -> None:
    ours, theirs = (convergence.run(Arm("rate", level), 64, seeds=2, rate=0.1)[0] for level in (0, None))
    for a, b in zip(ours, theirs):
        assert a.mean_square == pytest.approx(b.mean_square, rel=1e-4)


def test_without_residual_folding_stalls_on_what_block_means_cannot_see() -> None:
    with_it, without = (convergence.run(Arm("rate", 2, rho), 1024, seeds=2, rate=0.1)[0] for rho in (1.0, 0.0))
    for a, b in zip(with_it, without):
        assert b.last_quarter > 5 * a.last_quarter and b.hidden > 0.95


def test_a_residual_weighed_by_itself_covers_at_most_t_to_three_halves() -> None:
    """docs/theory.md: with beta2 = 1 - 1/T a weight's residual part moves by at most lr sqrt(t / T) / (1 - beta1^t)."""
    T, lr = 4096, 0.01
    W = torch.nn.Parameter(torch.zeros(1, 1, 2, dtype=torch.float64))
    stepper = convergence.optimizer(Arm("horizon", 1), W, lr, 1 - 1 / T)
    W.grad = torch.tensor([[[1.0, -1.0]]], dtype=torch.float64)  # all residual
    for t in range(1, 200):
        before = W.detach().clone()
        stepper.step()
        assert (W - before).abs().max() <= lr * math.sqrt(t / T) / (1 - convergence.BETA1**t) * (1 + 1e-9)


def test_a_study_has_a_row_a_run_and_a_slope_an_arm() -> None:
    shares: list[float] = []
    found = convergence.convergence((0, 2, "row"), LENGTHS, seeds=2, progress=shares.append)
    todo = convergence.arms((0, 2, "row"))
    assert [(fit.part, fit.arm) for fit in found.fits] == [(arm.part, arm.name) for arm in todo]
    assert len(found.rows) == len(todo) * len(LENGTHS) * 2
    assert shares == sorted(shares) and shares[-1] == 1
    assert all(fit.whole.n == 2 and fit.whole.low <= fit.whole.mean <= fit.whole.high for fit in found.fits)
    again = convergence.convergence((0, 2, "row"), LENGTHS, seeds=2)
    assert [r.mean_square for r in again.rows] == [r.mean_square for r in found.rows]
    for name, (_, noisy, true) in found.deltas.items():
        assert name in ("foam-2", "foam-row") and all(0 < d <= 1 for d in noisy + true)


@pytest.mark.parametrize(
    "changed", [{"lengths": (64,)}, {"lengths": (2, 64)}, {"seeds": 0}, {"rate": 0.0}, {"levels": (0,)}]
)
def test_a_study_of_nothing_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"a (study|slope) needs"):
        convergence.convergence(**changed)


def test_the_command_writes_table_page_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "study"
    assert main(["study", "convergence", "--longest=7", "--seeds=2", "--levels=2,row", f"--out={out}"]) == 0
    shown = capsys.readouterr().out
    assert "foam-row" in shown and "log T/sqrt T" in shown
    kept = json.loads((out / "study.json").read_text())
    assert kept["settings"]["lengths"] == [64, 128] and kept["versions"]["torch"] and "who" not in kept
    assert len(list(csv.DictReader((out / "study.csv").open()))) == len(kept["rows"]) == len(kept["fits"]) * 2 * 2
    for chart in (*convergence.PARTS, "delta"):
        assert (out / f"{chart}.png").stat().st_size > 5000
        assert f'<figure data-chart="{chart}"' in (out / "study.html").read_text()


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence, "convergence", lambda *_: pytest.fail("the study was begun"))
    (tmp_path / "file").write_text("mine")
    assert main(["study", f"--out={tmp_path / 'file'}"]) == 2
    assert "cannot write in the folder" in capsys.readouterr().err and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "words, says", [(["divergence"], "convergence"), (["--levels", "rov"], "row"), (["--longest", "6"], "two lengths")]
)
def test_mistakes_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: the page is not opened in a browser")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    found = convergence.convergence((2, "row"), LENGTHS, seeds=2)
    (tmp_path / "page.html").write_text(convergence.page(found, {}).replace("</body>", PROBE), encoding="utf-8")
    (tmp_path / "frames.html").write_text(FRAMES, encoding="utf-8")
    for frame in browse(tmp_path / "frames.html", tmp_path / "profile"):
        assert frame["problems"] == [] and frame["outside"] == [] and frame["scroll"] <= frame["wide"], frame
        assert [chart["name"] for chart in frame["charts"]] == [*convergence.PARTS, "delta"]
        assert all(chart["traces"] > 1 and chart["overlaps"] == [] for chart in frame["charts"]), frame
