"""`foamlab study convergence`: does the mean squared gradient norm fall with T as the theory says (docs/theory.md)?

The problem meets the textbook conditions by construction: smooth, not convex, bounded gradients, bounded noise of mean
zero. All seeds are stepped at once, as one stack of matrices: folding, and Adam, treat each row by itself.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchfoam import FOAM, residual

from ..errors import UserError, known_name
from ..files import finite, make_folder, write_atomically
from ..optimizers.registry import RULE
from ..report import matplotlib_charts
from ..report.charts import Curves, Line
from ..report.html import render
from ..runs import stats
from ..runs.provenance import circumstances

ROWS, COLUMNS, SAMPLES = 4, 64, 128
NOISE = 0.05  # standard deviation of each entry's noise
BETA1, BETA2 = 0.9, 0.95
KAPPA = 0.1  # torchfoam's default
PARTS = {
    "rate": "Symmetric noise, beta2 = 0.95",
    "horizon": "Symmetric noise, beta2 = 1 - 1/T",
    "skewed": "Skewed noise, beta2 = 1 - 1/T",
}
LENGTHS = tuple(2**power for power in range(6, 14))
POINTS = 100  # of a curve of delta


@dataclass(frozen=True)
class Arm:
    """An optimizer in one part of the study. `level` None is torch.optim.AdamW without decay; `kappa` None is the
    paper's rule, a number the bias correction of m and v alone with so much of the residual's square in V."""

    part: str
    level: int | str | None
    rho: float = 1.0
    kappa: float | None = None

    @property
    def name(self) -> str:
        if self.level is None:
            return "adam"
        kappa = "" if self.kappa is None else f", kappa {self.kappa:g}"
        return f"foam-{self.level}{kappa}" + ("" if self.rho else ", no residual")


@dataclass(frozen=True)
class Row:
    """One run: an arm, a length T and a seed. Gradients are the true ones, squares are summed over the matrix.

    `mean_square`: mean over the run of |grad f|^2; `last_quarter`: over its last quarter; `hidden`: the share of the
    latter that lies in the residual, which block means cannot see (NaN for Adam).
    """

    part: str
    arm: str
    T: int
    seed: int
    lr: float
    beta2: float
    mean_square: float
    last_quarter: float
    hidden: float


@dataclass(frozen=True)
class Fit:
    """Slope of log(mean square) and log(last quarter) against log T, over seeds; `expected`: that of log T / sqrt T."""

    part: str
    arm: str
    whole: stats.Mean
    last: stats.Mean
    expected: float


@dataclass(frozen=True)
class Study:
    """What `convergence` found. `deltas`: arm -> (steps, delta of the noisy gradient, delta of the true one)."""

    settings: dict[str, Any]
    rows: list[Row]
    fits: list[Fit]
    deltas: dict[str, tuple[list[float], list[float], list[float]]]


class Problem:
    """Robust regression: f(W) = 1/n sum_ij log(1 + e_ij^2) / 2, e = X W^T - Y, for each seed its own X and Y.

    Not convex (the loss bends down where |e| > 1), L-smooth with L <= |X^T X / n|, and its gradient is bounded, since
    |e / (1 + e^2)| <= 1/2.
    W [seeds, R, C], X [seeds, n, C], Y [seeds, n, R], float32; Y = X W*^T with W* normal of deviation 1/4, and every
    tenth row of it nonsense.
    """

    def __init__(self, seeds: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.X = self._normal(seeds, SAMPLES, COLUMNS)
        Y = self.X @ (self._normal(seeds, ROWS, COLUMNS) / 4).mT
        Y[:, ::10] = 2 * self._normal(*Y[:, ::10].shape)
        self.Y = Y.mT.contiguous()
        self.W = torch.zeros(seeds, ROWS, COLUMNS)

    def loss(self, W: Tensor) -> Tensor:
        """f of each seed, [seeds]; W [seeds, R, C]."""
        return (W @ self.X.mT - self.Y).square().log1p().sum((1, 2)) / (2 * SAMPLES)

    def gradient(self, W: Tensor) -> Tensor:
        """The gradient of f in closed form, [seeds, R, C]: 1/n (e / (1 + e^2))^T X."""
        e = torch.baddbmm(self.Y, W, self.X.mT, beta=-1)
        return torch.bmm(e.div_(e.square().add_(1)), self.X).div_(SAMPLES)

    def noise(self, skewed: bool) -> Tensor:
        """Bounded, mean 0, deviation NOISE, entry by entry: uniform, or 3 NOISE one time in ten, else -NOISE / 3."""
        u = torch.rand(self.W.shape, generator=self.generator)
        return torch.where(u < 0.1, 3 * NOISE, -NOISE / 3) if skewed else u.sub_(0.5).mul_(NOISE * math.sqrt(12))

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def optimizer(arm: Arm, W: nn.Parameter, lr: float, beta2: float) -> torch.optim.Optimizer:
    """The arm's optimizer, with alpha 1 and without decay."""
    if arm.level is None:
        return torch.optim.AdamW([W], lr=lr, betas=(BETA1, beta2), weight_decay=0.0, foreach=False)
    group = {"params": [W], "level": arm.level}
    rule = RULE if arm.kappa is None else {"bias_correction": "moments", "residual_in_v": arm.kappa}
    return FOAM([group], lr=lr, betas=(BETA1, beta2), weight_decay=0.0, residual=arm.rho, **rule)


def run(arm: Arm, T: int, seeds: int, rate: float, seed: int = 0) -> tuple[list[Row], list[tuple[float, float, float]]]:
    """T steps of lr = rate / sqrt(T) for all seeds: a row each, and (step, delta noisy, delta true) along the way.

    Noise and problems depend on `seed` and T alone, so all arms of a part meet the same.
    """
    problem = Problem(seeds, seed)
    problem.generator.manual_seed(seed + T)
    lr, beta2 = rate / math.sqrt(T), BETA2 if arm.part == "rate" else 1 - 1 / T
    W = nn.Parameter(problem.W)
    stepper = optimizer(arm, W, lr, beta2)
    whole, last, hidden = (torch.zeros(seeds, dtype=torch.float64) for _ in range(3))
    deltas = []
    for t in range(T):
        g = problem.gradient(W.detach())
        W.grad = g + problem.noise(arm.part == "skewed")
        size = _square(g)
        whole += size
        if t >= T - T // 4:
            last += size
            hidden += _square(residual(g, arm.level)) if arm.level is not None else math.nan  # type: ignore[arg-type]
        if arm.level is not None and t % max(1, T // POINTS) == 0:
            deltas.append((t + 1.0, _delta(W.grad, arm.level), _delta(g, arm.level)))
        stepper.step()
    last /= T // 4
    hidden /= last * (T // 4)
    means = zip((whole / T).tolist(), last.tolist(), hidden.tolist())
    rows = [Row(arm.part, arm.name, T, s, lr, beta2, *mean) for s, mean in enumerate(means)]
    return rows, deltas


def _square(g: Tensor) -> Tensor:
    return g.square().sum((1, 2)).double()


def _delta(g: Tensor, level: Any) -> float:
    """|residual(g)| / |g|, mean over seeds."""
    return float((_square(residual(g, level)) / _square(g)).sqrt().mean())


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y against log x.

    >>> round(slope([1, 2, 4], [5, 5 / 2**0.5, 5 / 2]), 6)
    -0.5
    """
    a, b = [math.log(v) for v in x], [math.log(v) for v in y]
    centre = math.fsum(a) / len(a)
    return math.fsum((u - centre) * w for u, w in zip(a, b)) / math.fsum((u - centre) ** 2 for u in a)


def arms(levels: Sequence[int | str]) -> list[Arm]:
    """Adam and FOAM at each level in the part "rate", the first folding level without residual there too, and Adam, the
    first and the last folding level in the other parts. These two by the library's default rule as well, and where
    noise is skewed with none of the residual's square in V."""
    folding = [level for level in levels if level != 0]
    ends = list(dict.fromkeys([folding[0], folding[-1]]))
    blind = Arm("rate", folding[0], rho=0.0)
    found = [Arm("rate", None), *(Arm("rate", level) for level in levels), blind]
    for part, kappas in (("rate", [KAPPA]), ("horizon", [KAPPA]), ("skewed", [KAPPA, 0.0])):
        found += [Arm(part, level) for level in (None, *ends)] if part != "rate" else []
        found += [Arm(part, level, kappa=kappa) for kappa in kappas for level in ends]
    return found


def convergence(
    levels: Sequence[int | str] = (0, 2, 4, "row"),
    lengths: Sequence[int] = LENGTHS,
    seeds: int = 8,
    rate: float = 0.1,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> Study:
    """Run every arm at every length T, and fit the slopes.

    Args:
        levels: fold levels; at least one that folds.
        lengths: values of T, at least two.
        seeds: problems and noises, each with a slope of its own.
        rate: lr = rate / sqrt(T).
        progress: called with the share of all steps that are done.

    Raises:
        UserError: arguments out of range.
    """
    if len(set(lengths)) < 2 or min(lengths) < 4:
        raise UserError(f"a slope needs two lengths T of at least 4, got {', '.join(map(str, lengths)) or 'none'}")
    if seeds < 1 or rate <= 0 or not [v for v in levels if v != 0]:
        raise UserError(f"a study needs a seed, a rate above 0 and a level above 0; got {seeds}, {rate:g}, {levels}")
    rows: list[Row] = []
    fits, deltas, done = [], {}, 0
    todo = arms(levels)
    expected = slope(lengths, [math.log(T) / math.sqrt(T) for T in lengths])
    for arm in todo:
        mine: list[Row] = []
        for T in lengths:
            more, delta = run(arm, T, seeds, rate, seed)
            mine += more
            done += T
            progress(done / (len(todo) * sum(lengths)))
            if (
                max(lengths) == T
                and arm.part == "rate"
                and arm.rho
                and arm.kappa is None
                and arm.level not in (None, 0)
            ):
                steps, noisy, true = (list(values) for values in zip(*delta))
                deltas[arm.name] = (steps, noisy, true)
        whole, last = (
            stats.mean([slope(lengths, [getattr(r, key) for r in mine if r.seed == s]) for s in range(seeds)])
            for key in ("mean_square", "last_quarter")
        )
        fits.append(Fit(arm.part, arm.name, whole, last, expected))
        rows += mine
    settings = {
        "levels": list(levels),
        "lengths": list(lengths),
        "seeds": seeds,
        "rate": rate,
        "seed": seed,
        "betas": [BETA1, BETA2],
        "noise": NOISE,
        "shape": [ROWS, COLUMNS],
        "samples": SAMPLES,
        "threads": torch.get_num_threads(),
    }
    return Study(settings, rows, fits, deltas)


def table(study: Study) -> list[list[str]]:
    """A header, then a row an arm: slopes with their intervals, and what is left at the longest T."""
    longest = max(study.settings["lengths"])
    found = [
        [
            "part",
            "optimizer",
            "slope, whole run",
            "log T/sqrt T",
            "slope, last quarter",
            f"|grad|^2, T={longest}",
            "hidden",
        ]
    ]
    for fit in study.fits:
        ends = [r for r in study.rows if (r.part, r.arm, r.T) == (fit.part, fit.arm, longest)]
        left, hidden = (math.fsum(getattr(r, key) for r in ends) / len(ends) for key in ("last_quarter", "hidden"))
        share = "" if math.isnan(hidden) else f"{hidden:.0%}"
        found.append(
            [fit.part, fit.arm, _said(fit.whole), f"{fit.expected:.3f}", _said(fit.last), f"{left:.2e}", share]
        )
    return found


def _said(mean: stats.Mean) -> str:
    return f"{mean.mean:.3f}" + ("" if mean.n < 2 else f" [{mean.low:.3f}, {mean.high:.3f}]")


def charts(study: Study) -> list[Curves]:
    """Mean squared gradient norm against T for each part, beside c log T / sqrt T; and delta along the longest run."""
    lengths = [float(T) for T in study.settings["lengths"]]
    found = []
    for part, title in PARTS.items():
        names = [fit.arm for fit in study.fits if fit.part == part]
        lines = []
        for index, name in enumerate(names):
            at = [[r.mean_square for r in study.rows if (r.part, r.arm, r.T) == (part, name, T)] for T in lengths]
            lines.append(Line(index, name, {"steps": lengths}, [math.fsum(y) / len(y) for y in at]))
        scale = lines[0].y[0] * math.sqrt(lengths[0]) / math.log(lengths[0])
        guide = [scale * math.log(T) / math.sqrt(T) for T in lengths]
        lines.append(Line(len(names), "c log T / sqrt T", {"steps": lengths}, guide, "plain"))
        found.append(Curves(part, title, "mean of |grad f|² over the run", lines, log=True, log_x=True))
    lines = []
    for index, (name, (steps, noisy, true)) in enumerate(study.deltas.items()):
        lines.append(Line(2 * index, f"{name}, gradient used", {"steps": steps}, noisy, "plain"))
        lines.append(Line(2 * index + 1, f"{name}, true gradient", {"steps": steps}, true, "plain"))
    found.append(Curves("delta", "delta = |residual| / |gradient|", "delta", lines, window=(0, 1.02)))
    return found


def write(study: Study, out: Path) -> list[Path]:
    """Write study.html, study.json, study.csv and a PNG for each chart into the folder `out`; return their paths.

    Raises:
        UserError: the folder cannot be written.
    """
    facts = circumstances({}, 0, {})
    facts.pop("who")
    rows = [asdict(row) for row in study.rows]
    whole = {"settings": study.settings, **facts, "deltas": study.deltas}
    whole |= {"fits": [asdict(fit) for fit in study.fits], "rows": rows}
    text = StringIO()
    sheet = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    sheet.writeheader()
    sheet.writerows(rows)
    names = {
        "study.html": page(study, facts),
        "study.json": json.dumps(finite(whole), indent=1),
        "study.csv": text.getvalue(),
    }
    make_folder(out)
    try:
        for name, content in names.items():
            write_atomically(out / name, content)
        for chart in charts(study):
            matplotlib_charts.save(chart, out / f"{chart.name}.png")
    except OSError as e:
        raise UserError(f"cannot write in {out}: {e.strerror}; choose another --out") from None
    return [*(out / name for name in names), *(out / f"{chart.name}.png" for chart in charts(study))]


def page(study: Study, facts: dict[str, Any]) -> str:
    """A self-contained page that asks the network for nothing."""
    head, *rows = table(study)
    settings = study.settings
    headline = (
        "Squared gradient norm against the length of the run",
        f"lr = {settings['rate']} / sqrt(T); {settings['seeds']} seeds, 95 % intervals over them.",
        "Hidden: the share of the last quarter's squared gradient that block means cannot see.",
    )
    return render(
        "study.html",
        headline,
        charts(study),
        title="Convergence",
        made="foamlab study convergence",
        head=head,
        rows=rows,
        facts=json.dumps({**facts, "settings": settings}, indent=1),
    )


def levels_of(text: str) -> list[int | str]:
    """Levels from words: "0,2,row" -> [0, 2, "row"].

    Raises:
        UserError: a word that is neither a number nor "row".
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    return [int(word) if word.isdecimal() else known_name(word, ("row", "0", "1", "2"), "level") for word in words]
