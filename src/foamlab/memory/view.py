"""The planner's answers as people read them: text for a terminal, a page, a picture, settings to train with."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..errors import UserError
from ..files import write_atomically
from ..report import matplotlib_charts
from ..report.charts import Bars
from ..report.html import render
from ..text import gb

if TYPE_CHECKING:
    from .advise import Fit
    from .planner import Plan

# components in the order they are shown, and what is said about them
PARTS = {
    "weights": "exact",
    "gradients": "exact",
    "state": "exact",
    "activations": "kept for the backward pass",
    "logits": "all that has a column for every token",
    "temporaries": "alive for a while",
    "buffers": "exact",
    "buckets": "of DistributedDataParallel",
    "slack": "of the CUDA allocator: assumed",
    "context": "CUDA and its libraries: assumed",
}


def text(fit: Fit, color: bool = False, width: int = 110) -> str:
    """Everything `foamlab plan` has to say."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    stream = StringIO()
    console = Console(file=stream, force_terminal=color, no_color=not color, width=width, highlight=False)
    console.print(Text(headline(fit.asked), "bold"))  # no markup: names of models are in it
    console.print(components(fit.asked))
    for line in answers(fit):
        console.print(Text(line))
    table = Table(title="the same run under each optimizer, at its defaults", title_justify="left", box=None)
    for name in ("optimizer", "state", "peak", ""):
        table.add_column(name, justify="right" if name in ("state", "peak") else "left")
    for row in fit.rivals:
        verdict = "" if fit.asked.capacity is None else "fits" if row["fits"] else "does not fit"
        state = row["options"].get("state")
        table.add_row(row["name"] + (f", {state} state" if state else ""), gb(row["state"]), gb(row["total"]), verdict)
    console.print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def headline(plan: Plan) -> str:
    """What was planned, in one line."""
    c = plan.config
    options = "".join(f" {key}={value}" for key, value in c.optimizer.options.items())
    rows = f"{c.train.batch} x {c.data.sequence} tokens a step, micro-batch {c.train.micro_batch}"
    extra = ", checkpointing" if c.model.checkpointing else ""
    lora = f", {plan.trainable:,} of them trainable" if plan.trainable < plan.parameters else ""
    return (
        f"{c.model.name or 'model'}: {plan.parameters:,} parameters{lora}, vocabulary {plan.vocabulary:,}; "
        f"{c.optimizer.name}{options}; {rows}; {c.train.precision}{extra}; {plan.device}"
    )


def components(plan: Plan) -> Any:
    """A rich table with a bar for each component."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("component")
    table.add_column("in all", justify="right")
    table.add_column("at peak", justify="right")
    table.add_column("")
    table.add_column("")
    for name, remark in PARTS.items():
        if name not in plan.peak:
            continue
        size, whole = plan.peak[name], plan.exact.get(name)
        bar = "█" * round(30 * size / max(plan.total, 1))
        table.add_row(name, gb(whole) if whole is not None else "", gb(size), bar, Text(remark, "dim"))
    verdict = "" if plan.capacity is None else f"of {gb(plan.capacity)}: {'fits' if plan.fits else 'does not fit'}"
    table.add_row("[bold]total[/bold]", "", f"[bold]{gb(plan.total)}[/bold]", verdict, Text(plan.where, "dim"))
    return table


def answers(fit: Fit) -> list[str]:
    """What fits, in sentences."""
    lines = []
    asked, smallest = fit.asked, fit.smallest
    if asked.capacity is not None:
        if smallest and fit.changes:
            lines.append(f"Fits with {' '.join(fit.changes)}: {gb(smallest.total)} of {gb(asked.capacity)}.")
        elif not smallest:
            lines.append(f"{fit.why[0].upper()}{fit.why[1:]}.")
    if smallest and fit.rows:
        c = smallest.config
        most = f"a micro-batch of {fit.rows} rows of {c.data.sequence} tokens"
        lines.append(f"Room, with these settings: up to {most}; or one row of up to {fit.sequence:,} tokens.")
    if fit.sharded and asked.device == "cuda":
        sizes = ", ".join(f"{gb(size)} on each of {n}" for n, size in fit.sharded.items())
        lines.append(f"Sharded by FSDP2 as set (modelled; cannot be trained so yet): {sizes}.")
    return lines


def bars(fit: Fit) -> list[Bars]:
    """The charts: the run's components, and the run under each optimizer."""
    scale = 1e9 if fit.asked.total >= 1e9 else 1e6
    unit = "GB" if scale == 1e9 else "MB"
    shown = {"as set": fit.asked.peak}
    if fit.smallest and fit.changes:
        shown["smallest change that fits"] = fit.smallest.peak
    others = {row["name"]: row["peak"] for row in fit.rivals}

    def chart(name: str, title: str, peaks: dict[str, dict[str, int]]) -> Bars:
        parts = {part: [peak.get(part, 0) / scale for peak in peaks.values()] for part in PARTS}
        parts = {part: sizes for part, sizes in parts.items() if any(sizes)}
        return Bars(name, title, f"{unit} at the peak of a step", list(peaks), parts)

    return [
        chart("plan", "What the run needs", shown),
        chart("optimizers", "The same run under each optimizer, at its defaults", others),
    ]


def page(fit: Fit) -> str:
    """A self-contained page that asks the network for nothing."""
    capacity = [f"Memory there is: {gb(fit.asked.capacity)}."] if fit.asked.capacity else []
    said = ["Memory plan", headline(fit.asked), *capacity, *answers(fit)]
    return render("plan.html", said, bars(fit), title="Memory plan", made="foamlab plan", text=text(fit))


def save(fit: Fit, path: Path, settings: dict[str, Any]) -> None:
    """Write the answer; the suffix chooses: .html, .json, .yaml (settings that fit), .png, .svg, .pdf.

    Raises:
        UserError: another suffix; settings asked for where nothing fits; a path that cannot be written.
    """
    suffix = path.suffix.lower()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".html":
            write_atomically(path, page(fit))
        elif suffix == ".json":
            write_atomically(path, json.dumps(fit.as_dict(), indent=1))
        elif suffix in (".yaml", ".yml"):
            if fit.smallest is None:
                raise UserError(fit.why)
            write_atomically(path, yaml.safe_dump(settings, sort_keys=False))
        elif suffix in (".png", ".svg", ".pdf"):
            for chart in bars(fit):
                matplotlib_charts.save(
                    chart, path if chart.name == "plan" else path.with_stem(f"{path.stem}-{chart.name}")
                )
        else:
            raise UserError(f"cannot write a plan to {path}: use .html, .json, .yaml, .png, .svg or .pdf")
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}") from None
