"""`foamlab report`: run folders in, one self-contained HTML page out; also pictures, CSV and plain rows for a terminal.

What the page states in words comes from `summary`; its markup is `templates/runs.html`. No torch here.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from ..config import flat
from ..errors import UserError
from ..files import write_atomically
from ..runs.provenance import now
from ..runs.stats import reach
from ..runs.summary import (
    KEYS,
    Summary,
    arms,
    cautions,
    comparable,
    differing,
    equal_models,
    fair_points,
    headline,
    part,
    same,
    summarize,
)
from . import matplotlib_charts
from .charts import AXES, Bars, Chart, Curves, Heat, Line, empty, shorten, smooth, window
from .html import render
from .residuals import heat

FORMATS = ("png", "svg", "pdf")
SIDE_BY_SIDE = 4  # with more runs than this the tables have one row a run instead of one column a run
MB = 1e6
RATIOS = (
    "Share of each matrix's gradient norm that folding leaves to the residual; sqrt(1 - 1/B) where gradients have no "
    "structure within a block of B. Layers from top to bottom."
)


@dataclass(frozen=True)
class Metric:
    """One line of the summary. `ranked`: whether the lowest value among finished runs may be marked; None is never.

    Speed, time and a process' memory are single figures with the machine's noise in them, so that no one is marked.
    """

    name: str
    value: Callable[[Summary], float]
    form: str
    ranked: Callable[[Sequence[Summary]], bool] | None = None


def ranked_losses(runs: Sequence[Summary]) -> bool:
    return comparable(runs) and equal_models(runs)


def ranked_peaks(runs: Sequence[Summary]) -> bool:
    """The CUDA allocator's peak is the same in each repetition of a run on the same card."""
    exact = all(part(run.run.info, "bytes", "peak_of") == "CUDA allocator" for run in runs)
    alike = len({repr(part(run.run.info, "hardware", "gpu")) for run in runs}) == 1
    return exact and alike and equal_models(runs) and same(runs, keys=("train.batch", "train.precision"))


METRICS = (
    Metric("validation loss", lambda run: run.loss, ".4f", ranked_losses),
    Metric("perplexity", lambda run: run.perplexity, ",.2f", ranked_losses),
    Metric("optimizer state (MB)", lambda run: run.bytes("state") / MB, ",.2f", equal_models),
    Metric("peak memory (MB)", lambda run: run.bytes("peak") / MB, ",.0f", ranked_peaks),
    Metric("of it before training (MB)", lambda run: run.bytes("before") / MB, ",.0f"),
    Metric("tokens/s", lambda run: run.tokens_per_second, ",.0f"),
    Metric("seconds", lambda run: run.seconds, ",.1f"),
    Metric("steps", lambda run: run.steps, ",.0f"),
    Metric("learning rate", lambda run: run.lr, ".4g"),
    Metric("skipped steps", lambda run: len(run.skips), ",.0f"),
)
MARKED = (
    "lowest of the finished runs, where models and data are equal; speed, time and a process' memory are single "
    "figures, in which the machine's other work shows, and are not ranked"
)


class Cell(NamedTuple):
    text: str
    lowest: bool = False


def summary_cells(runs: Sequence[Summary]) -> list[list[Cell]]:
    """One row a run, one cell a metric. The lowest is marked where `Metric.ranked` allows it and the digits tell."""
    done = [run for run in runs if run.done]
    columns = []
    for metric in METRICS:
        values = [v for run in done if math.isfinite(v := metric.value(run))]
        texts = {show(v, metric.form) for v in values}
        marked = show(min(values), metric.form) if len(texts) > 1 and metric.ranked and metric.ranked(done) else ""
        columns.append([Cell(text := show(metric.value(r), metric.form), r.done and text == marked) for r in runs])
    return [list(row) for row in zip(*columns)]


def compare_table(folders: Sequence[Path | str]) -> list[list[str]]:
    """The summary as plain rows for a terminal: a header, then a row a run; what is MARKED ends in " *".

    Raises:
        UserError: as `summarize`.
    """
    runs = summarize(folders)
    rows = [
        [run.label, run.run.status, *(cell.text + " *" * cell.lowest for cell in cells)]
        for run, cells in zip(runs, summary_cells(runs))
    ]
    return [["run", "status", *(metric.name for metric in METRICS)], *rows]


def legend(rows: Sequence[Sequence[str]]) -> list[str]:
    """What the marks of `compare_table` mean, if there are any."""
    return [f"* {MARKED}"] if any(cell.endswith(" *") for row in rows for cell in row) else []


def show(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "∞" if value == math.inf else "–"


def charts(runs: Sequence[Summary]) -> list[Chart]:
    """Loss, memory, learning rate, gradient norm, residual ratios. A chart may be empty: see charts.empty."""
    losses = [*(line(i, run, "train", "loss") for i, run in enumerate(runs))]
    losses += [line(i, run, "evals", "loss") for i, run in enumerate(runs)]
    losses = [line for line in losses if any(map(math.isfinite, line.y))]
    parts = {"weights": "weights", "gradients": "gradients", "optimizer state": "state"}
    memory = {name: [run.bytes(key) / MB for run in runs] for name, key in parts.items()}
    memory = {name: values for name, values in memory.items() if any(map(math.isfinite, values))}
    found: list[Chart] = [
        Curves("loss", "Loss", "loss", losses, window=window(losses)),
        Bars("memory", "Memory held", "MB", [shorten(run.label) for run in runs], memory),
    ]
    for key, title, log in (("lr", "Learning rate", False), ("grad_norm", "Gradient norm", True)):
        lines = [line(i, run, "train", key) for i, run in enumerate(runs)]
        lines = [line for line in lines if any(map(math.isfinite, line.y))]
        found.append(Curves(key.replace("_", "-"), title, title.lower(), lines, log=log))
    for i, run in enumerate(runs):
        name = f"Residual ratio: {shorten(run.label)}" if len(runs) > 1 else "Residual ratio"
        if residuals := heat(run.run.lines("residual"), f"residual-{i}", name):
            found.append(residuals)
    return found


def line(index: int, run: Summary, kind: str, key: str) -> Line:
    table = run.train if kind == "train" else run.evals
    x = {"steps": table["step"], "tokens": table["tokens"], "seconds": table["seconds"]}
    y = table[key] if key == "lr" or kind == "evals" else smooth(table[key], len(table[key]) // 40)
    return Line(index, run.label, x, y, "points" if kind == "evals" else "faint" if key == "loss" else "plain")


def report(
    folders: Sequence[Path | str],
    out: Path | str,
    *,
    static: Sequence[str] = (),
    tables: bool = False,
    target: float | None = None,
    contests: Sequence[str] = (),
) -> list[Path]:
    """Write the page, and beside it what else is asked for; return the files written, the page first.

    Args:
        folders: run folders, in the order to be shown.
        out: the page; a name without suffix gets .html.
        static: picture formats among FORMATS: OUT-loss.png and so on.
        tables: also OUT-summary.csv (a row a run, bytes and seconds unrounded) and OUT-curves.csv (a row a record).
        target: loss whose cost is reported; None means the highest final loss of the finished runs.
        contests: a line for each contest that lies beside the runs.

    Raises:
        UserError: no runs, a folder that is no run, an unknown format, or `out` cannot be written.
    """
    runs = summarize(folders)
    sheets = {"summary": summary_csv(runs), "curves": curves_csv(runs)} if tables else {}
    return write(Path(out), page(runs, target, contests), sheets, charts(runs), static)


def write(out: Path, text: str, sheets: Mapping[str, str], drawn: Iterable[Chart], static: Sequence[str]) -> list[Path]:
    """Write the page, then OUT-NAME.csv of each sheet and OUT-NAME.FORMAT of each chart that is not empty."""
    unknown = [name for name in static if name not in FORMATS]
    if unknown:
        raise UserError(f"unknown picture format {unknown[0]!r}; known: {', '.join(FORMATS)}")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder: name the page, such as {out / 'report.html'}")
    out = out if out.suffix else out.with_suffix(".html")
    written = [out]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, text)
        for name, sheet in sheets.items():
            written.append(out.with_name(f"{out.stem}-{name}.csv"))
            write_atomically(written[-1], sheet)
        for chart in drawn if static else ():
            for suffix in () if empty(chart) else static:
                written.append(out.with_name(f"{out.stem}-{chart.name}.{suffix}"))
                matplotlib_charts.save(chart, written[-1])
    except OSError as e:
        raise UserError(f"cannot write {written[-1]}: {e.strerror}; choose another --out") from None
    return written


def summary_csv(runs: Sequence[Summary]) -> str:
    """A row a run: full precision, bytes in bytes."""
    sizes = ("weights", "gradients", "state", "peak", "before")
    head = ["run", "status", "optimizer", "seed", "loss", "perplexity", "tokens", "seconds", "tokens_per_second"]
    rows: list[list[Any]] = [[*head, "steps", "lr", "skipped", *(f"{name}_bytes" for name in sizes)]]
    for run in runs:
        values = [run.loss, run.perplexity, run.tokens, run.seconds, run.tokens_per_second, run.steps, run.lr]
        values += [len(run.skips), *(run.bytes(name) for name in sizes)]
        rows.append([run.label, run.run.status, run.optimizer, run.seed, *map(cell, values)])
    return sheet(rows)


def curves_csv(runs: Sequence[Summary]) -> str:
    """A row a record of every run, unsmoothed."""
    rows: list[list[Any]] = [["run", "kind", *KEYS]]
    for run in runs:
        for kind, columns in (("train", run.train), ("eval", run.evals)):
            rows += [[run.label, kind, *map(cell, values)] for values in zip(*(columns[key] for key in KEYS))]
    return sheet(rows)


def cell(value: float) -> float | int | str:
    return "" if math.isnan(value) else int(value) if math.isfinite(value) and value == int(value) else value


def sheet(rows: list[list[Any]]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def page(runs: Sequence[Summary], target: float | None = None, contests: Sequence[str] = ()) -> str:
    """The HTML page."""
    drawn = [chart for chart in charts(runs) if not empty(chart)]
    cells = summary_cells(runs)
    record = [flat(run.run.info) for run in runs]
    settings = [run.settings for run in runs]
    return render(
        "runs.html",
        headline(runs),
        drawn,
        title=", ".join(shorten(run.label) for run in runs[:4]) + (", …" if len(runs) > 4 else ""),
        made=f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, report of {moment()}",
        runs=runs,
        side_by_side=SIDE_BY_SIDE,
        metrics=METRICS,
        cells_of=cells,
        marked=f"Marked: {MARKED}." if any(cell.lowest for row in cells for cell in row) else "",
        cautions=cautions(runs),
        fair=fair_points(runs),
        known=[axis for axis in AXES if any(math.isfinite(v) for run in runs for v in _axis(run, axis))],
        curves=[chart for chart in drawn if isinstance(chart, Curves)],
        heats=[chart for chart in drawn if isinstance(chart, Heat)],
        memory=[chart for chart in drawn if isinstance(chart, Bars)],
        notes={chart.name: _note(chart, runs) for chart in drawn},
        costs=_costs_of(runs, target),
        differing=matrix(differing(runs), settings),
        contests=contests,
        settings=matrix(_keys(settings), settings),
        record=matrix([key for key in _keys(record) if key != "who"], record),
    )


def moment() -> str:
    return f"{now()[:16].replace('T', ' ')} UTC"


def _axis(run: Summary, axis: str) -> list[float]:
    key = "step" if axis == "steps" else axis
    return run.train[key] + run.evals[key]


def _keys(trees: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for tree in trees for key in tree))


def matrix(keys: Iterable[str], trees: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """A row a key: its value in each tree, or one value that is the same in all."""
    rows = []
    for key in keys:
        said = ["–" if (value := tree.get(key)) is None else str(value) for tree in trees]
        rows.append((key, said[:1] if len(set(said)) == 1 else said))
    return rows


@dataclass(frozen=True)
class Costs:
    """What was paid to reach a loss.

    Attributes:
        goal, why: the loss, and why this one.
        rows: (place among the runs, label, for steps, tokens and seconds: (mean cost in words, of how few runs)).
    """

    goal: float
    why: str
    rows: list[tuple[int, str, list[tuple[str, str]]]]


def costs_of(goal: float, why: str, named: Iterable[tuple[int, str, Sequence[Summary]]]) -> Costs:
    """Steps, tokens and seconds until the loss is `goal`, the mean over each label's runs."""
    rows = []
    for place, label, runs in named:
        cells = []
        for key in ("step", "tokens", "seconds"):
            costs = [reach(run.evals[key], run.evals["loss"], goal) for run in runs]
            known = [cost for cost in costs if cost is not None]
            told = f"{math.fsum(known) / len(known):,.0f}" if known else "never"
            cells.append((told, f"{len(known)} of {len(runs)} runs" if 0 < len(known) < len(runs) else ""))
        rows.append((place, label, cells))
    return Costs(goal, why, rows)


def _costs_of(runs: Sequence[Summary], target: float | None) -> Costs | None:
    """What each finished run paid to reach the target loss."""
    ran = [run for arm in arms(runs) for run in arm.runs if math.isfinite(run.loss)]
    if not ran or not comparable(ran) or (target is None and len(ran) < 2):
        return None
    goal = target if target is not None else max(run.loss for run in ran)
    why = "the highest final loss of the finished runs" if target is None else "the loss asked for"
    return costs_of(goal, why, [(place, run.label, [run]) for place, run in enumerate(runs) if run in ran])


def _note(chart: Chart, runs: Sequence[Summary]) -> str:
    peaks = dict.fromkeys(str(of) for run in runs if (of := part(run.run.info, "bytes", "peak_of")))
    windowed = isinstance(chart, Curves) and chart.window is not None
    notes = {
        "loss": "Thin: training, a centred mean over a fortieth of the records. With markers: validation."
        + (" The first tenth of training is out of view; a double click shows all." if windowed else ""),
        "memory": "What training must hold. Peak memory, in the table, is measured otherwise"
        + (f" ({', '.join(peaks)})." if peaks else "."),
        "grad-norm": "Before clipping, smoothed as the loss; logarithmic.",
    }
    return RATIOS if isinstance(chart, Heat) else notes.get(chart.name, "")
