"""The page of a contest or an ablation: `foamlab report CONTEST`, and the end of `foamlab compare`.

Rows, verdicts and cautions are those of `results`; the markup is `templates/contest.html`. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..config import flat, shared
from ..report.html import render
from ..report.runs_page import RATIOS, Costs, cell, costs_of, curves_csv, moment, sheet, write
from ..runs.summary import perplexity, read_settings
from . import results
from .charts import Book, charts, open_book
from .search import joint

SHOWN = 3  # verdicts before the rest is folded
LOWEST = ("loss", "perplexity", "state")  # what is marked; speed and memory of a process are not told apart from noise


def compare_table(folders: Sequence[Path | str]) -> list[tuple[str, ...]]:
    """The standings as plain rows, a header first."""
    return results.table(open_book(Path(folders[0])).contest["results"])


def report(
    folders: Sequence[Path | str],
    out: Path | str,
    *,
    static: Sequence[str] = (),
    tables: bool = False,
    target: float | None = None,
) -> list[Path]:
    """Write the page of the contest in the one folder given; pictures, tables and errors as `report.report`.

    Tables are OUT-results.csv (a row an arm), OUT-runs.csv (a row a run) and OUT-curves.csv (a row a record of the
    runs at best points). `target`: the loss whose cost is reported; None means that of adamw, or of the middle arm.
    """
    book = open_book(Path(folders[0]))
    sheets = {}
    if tables:
        runs = [run for row in book.rows for run in row.runs]
        sheets = {"results": results_csv(book), "runs": runs_csv(book), "curves": curves_csv(runs)}
    return write(Path(out), page(book, target), sheets, charts(book), static)


# ---------------------------------------------------------------------------------------------- the page


def page(book: Book, target: float | None = None) -> str:
    """The HTML page."""
    contest, drawn = book.contest, charts(book)
    over = [run["status"] for run in contest["runs"]]
    settings = {"command": contest["command"], "started": contest["started"], "ended": contest.get("ended")}
    settings |= {"data hash": contest.get("data"), **flat(shared(contest["settings"]))}
    return render(
        "contest.html",
        said := _headline(book),
        drawn,
        title=said[0],
        made=f"foamlab {contest['kind']}, {contest['status']}; {len(book.rows)} contestants; report of {moment()}",
        contest=contest,
        head=["", "n (seeds)", *results.HEAD[2:]],
        standings=list(zip(book.rows, winners(book))),
        shown=SHOWN,
        cautions=[text for text in contest["cautions"] if text != contest["rule_in_words"]],
        labels=[row.arm for row in book.rows[: 1 + max((row.place for row in book.ranked), default=-1)]],
        notes=_notes(book),
        costs=costs(book, target),
        counts=", ".join(f"{over.count(status)} {status}" for status in dict.fromkeys(over)) or "none yet",
        contestants=contestants(book),
        settings=settings,
        circumstances=circumstances(book),
        runs=[(run["folder"], run["status"], _loss(run["loss"]), run["why"]) for run in contest["runs"]],
    )


def _headline(book: Book) -> list[str]:
    so_far = "" if book.contest["status"] == "done" else "So far: "
    if not book.ranked:
        return [f"{so_far}no contestant has finished with its best rates"]
    best = book.ranked[0]
    said = f"{so_far}{best.arm} ends with the lowest mean validation loss, {best.loss:.3f} (n = {best.result['n']})"
    return [said, *book.contest["verdicts"][:1]]


def _notes(book: Book) -> dict[str, str]:
    band = "The mean over seeds, in a band from the lowest to the highest."
    lost = (
        "Runs with the tuning seed, each contestant at its own values, on one scale unless noted. A star at the top is "
        "a run that did not finish (stopped by the rule, or diverged) or ended out of view."
    )
    return {
        "losses": f"Mean over seeds with its 95 % interval (none for one seed); ticks are single seeds.{book.unseen}",
        "curves": f"{band} The first tenth of training is out of view; a double click shows all.{book.unseen}",
        "curves-each": f"{band}{book.unseen}",
        "frontier": "Lower left is better; the dashed line is the frontier, which no other contestant beats in both. "
        f"Bars are 95 % intervals.{book.unseen}",
        "sensitivity-lr": f"Where scale is tuned too, the rate of matrices, lr * scale, is held. {lost}",
        "sensitivity-scale": f"Scale is the rate of matrices relative to lr, which is held. {lost}",
        "residual": f"{RATIOS} The best contestant that recorded it.",
        **{
            f"study-{name}": "* FOAM as in all studies: the paper's, at the rates given."
            for name in book.contest["studies"]
        },
    }


class Cell(NamedTuple):
    text: str
    best: bool = False
    edge: bool = False


def winners(book: Book) -> list[list[Cell]]:
    """Of each row of the standings its cells from the loss on: the lowest are marked, and rates at an edge."""
    keys = ("loss", "", "perplexity", "", "", "state", "peak", "tokens_per_second", "seconds")
    values = {key: [row.result[key] for row in book.ranked if row.result[key] is not None] for key in LOWEST}
    best = {key: min(found) for key, found in values.items() if len(set(found)) > 1}
    rows = []
    for row, (_, _, *texts) in zip(book.rows, results.table(book.contest["results"])[1:]):
        lowest = [key in best and row.result[key] == best[key] for key in keys]
        rows.append([Cell(text.rstrip("!"), top, text.endswith("!")) for text, top in zip(texts, lowest)])
    return rows


def costs(book: Book, target: float | None) -> Costs | None:
    """What each arm paid to reach the target loss."""
    if not book.ranked or (len(book.ranked) < 2 and target is None):
        return None
    named = {row.arm: row for row in book.ranked}
    base = named.get("adamw", book.ranked[len(book.ranked) // 2])
    goal = base.loss if target is None else target
    why = f"the mean final loss of {base.arm}" if target is None else "the loss asked for"
    return costs_of(goal, why, [(row.place, row.arm, row.runs) for row in book.ranked])


def contestants(book: Book) -> list[tuple[str, ...]]:
    """Of each arm: what it is, what was tried, and where that comes from."""
    by_name = {arm["label"]: arm for arm in book.contest["contestants"]}
    rows: list[tuple[str, ...]] = []
    for row in book.rows:
        arm, added = by_name[row.arm], book.contest["search"][row.arm]["extended"]
        options = ", ".join(f"{key} {value}" for key, value in arm["options"].items())
        tunes = "; ".join(
            f"{key} {', '.join(f'{x:g}' if isinstance(x, float) else str(x) for x in values)}"
            + (f", then {added[key]:g}" if key in added else "")
            + (f" (at lr {arm['start']['lr']:g}, moved as lr moves)" if key == "scale" and joint(arm["tune"]) else "")
            for key, values in arm["tune"].items()
        )
        rows.append((row.arm, arm["optimizer"], options or "–", tunes or "–", arm["note"] or "–"))
    return rows


def circumstances(book: Book) -> dict[str, str]:
    """Versions and hardware of all runs; what differs between them stands side by side."""
    infos = [flat({k: run.run.info.get(k) for k in ("versions", "hardware")}) for r in book.rows for run in r.runs]
    keys = dict.fromkeys(key for info in infos for key in info)
    return {key: " | ".join(dict.fromkeys(str(info.get(key)) for info in infos)) for key in keys}


def _loss(x: float | None) -> str:
    return "–" if x is None or not math.isfinite(x) else f"{x:.4f}"


# ---------------------------------------------------------------------------------------------- tables


def results_csv(book: Book) -> str:
    """A row an arm, unrounded; bytes in bytes."""
    names = ("loss", "low", "high", "perplexity", "state", "weights", "peak", "tokens_per_second", "seconds", "steps")
    points = list(dict.fromkeys(key for row in book.rows for key in row.result["point"]))
    rows: list[list[Any]] = [["arm", "status", "n", "seeds", *points, "edge", *names]]
    for row in book.rows:
        r = row.result
        values = ["" if r[name] is None else cell(r[name]) for name in names]
        said = [r["arm"], r["status"], r["n"], " ".join(map(str, r["seeds"]))]
        rows.append([*said, *(r["point"].get(key, "") for key in points), " ".join(r["edge"]), *values])
    return sheet(rows)


def runs_csv(book: Book) -> str:
    """A row a run: its rates, options and seed from its settings, and what became of it."""
    rows: list[list[Any]] = [["folder", "optimizer", "lr", "scale", "options", "seed", "status", "loss", "perplexity"]]
    for run in book.contest["runs"]:
        told = read_settings(book.folder / run["folder"])
        options = {k.removeprefix("optimizer.options."): v for k, v in told.items() if ".options." in k}
        said = [told.get(f"optimizer.{key}", "") for key in ("name", "lr", "scale")]
        loss = math.nan if run["loss"] is None else run["loss"]
        ends = [run["status"], *map(cell, (loss, perplexity(loss)))]
        rows.append([run["folder"], *said, options or "", told.get("train.seed", ""), *ends])
    return sheet(rows)
