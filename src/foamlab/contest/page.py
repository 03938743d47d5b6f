"""The page of a contest or an ablation: `foamlab report CONTEST`, and the end of `foamlab compare`.

Rows, verdicts and cautions are those of `standings`, charts of `gallery`; the page stands in `frame`. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..config import flat, shared
from ..report import charts as plots
from ..report.html import bars, bullets, figure, frame, heads, mark, note, plain, row_head, texts
from ..report.html import table as html_table
from ..report.runs_page import RATIOS, cell, cost_table, curves_csv, moment, sheet, write
from ..runs.summary import perplexity, read_settings
from . import results
from .charts import Book, charts, open_book
from .search import joint

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
    runs at best points). `target`: the loss whose cost is told; None means that of adamw, or of the arm in the middle.
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
    notes = _notes(book)

    def draw(*names: str) -> str:
        return "".join(figure(c, notes.get(c.name, "")) for c in drawn if c.name.startswith(names))

    def part(title: str, *content: str) -> str:
        return f"<h2>{title}</h2>{''.join(content)}" if any(content) else ""

    over = [run["status"] for run in contest["runs"]]
    first, *others = _headline(book)
    cautions = [text for text in contest["cautions"] if text != contest["rule_in_words"]]
    reserved = bullets(cautions) or "<p>No reservation found in the records.</p>"
    labels = [row.arm for row in book.rows[: 1 + max((row.place for row in book.ranked), default=-1)]]
    curves = draw("curves")
    counts = ", ".join(f"{over.count(status)} {status}" for status in dict.fromkeys(over)) or "none yet"
    settings = {"command": contest["command"], "started": contest["started"], "ended": contest.get("ended")}
    settings |= {"data hash": contest.get("data"), **flat(shared(contest["settings"]))}
    details = [("What each contestant is, and what was tried", contestants(book))]
    details += [("Settings that all share", plain(settings)), ("Versions and hardware", plain(circumstances(book)))]
    details.append((f"All {len(over)} runs", runs_table(book)))
    main = [
        part("Standings", winners(book), draw("losses")),
        part("What can be said", folded(contest["verdicts"])),
        part("Caveats", reserved),
        part("The paper's ablations", draw("study-")),
        part("Memory", draw("frontier")),
        part("Learning curves", bars(labels, plots.AXES, "optimizer") + curves if curves else ""),
        part("Cost of reaching a loss", costs(book, target)),
        part("How much the rates matter", draw("sensitivity-")),
        part("What folding leaves out", draw("residual")),
        part("How it was done", f"<p>{escape(contest['rule_in_words'])} Runs: {counts}.</p>"),
        *(f"<details><summary>{title}</summary>{content}</details>" for title, content in details if content),
    ]
    made = f"foamlab {contest['kind']}, {contest['status']}; {len(book.rows)} contestants; report of {moment()}"
    return frame(first, made, first, others, "\n".join(main), drawn)


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


def folded(sentences: Sequence[str], shown: int = 3) -> str:
    """The first few, and the rest behind a click."""
    rest = f"<details><summary>{len(sentences) - shown} more</summary>{bullets(sentences[shown:])}</details>"
    return bullets(sentences[:shown]) + rest * (len(sentences) > shown)


def winners(book: Book) -> str:
    """The standings, lowest values marked; a flag at rates that are at the edge of what was tried."""
    head, *rows = results.table(book.contest["results"])
    keys = ("", "n", "loss", "", "perplexity", "", "", "state", "peak", "tokens_per_second", "seconds")
    values = {key: [row.result[key] for row in book.ranked if row.result[key] is not None] for key in LOWEST}
    best = {key: min(found) for key, found in values.items() if len(set(found)) > 1}
    lines = []
    for row, row_texts in zip(book.rows, rows):
        cells = [f'<th scope="row">{mark(row.place)} {escape(row.arm)}</th>']
        seeds = ", ".join(map(str, row.result["seeds"]))
        cells.append(f"<td>{row.result['n']}{f' <small>({escape(seeds)})</small>' if seeds else ''}</td>")
        for key, text in zip(keys[2:], row_texts[2:]):
            top = key in best and row.result[key] == best[key]
            text = escape(text.rstrip("!")) + ' <span class="flag">edge</span>' * text.endswith("!")
            cells.append(f'<td class="best"><b>{text}</b></td>' if top else f"<td>{text}</td>")
        lines.append(cells)
    legend = (
        "Means over the n finished runs at the best rates (seeds in brackets); lowest loss and state in bold. "
        "Edge: the best rate is at an end of all that was tried, a better one may lie beyond."
    )
    return html_table(heads(["", "n (seeds)", *head[2:]]), lines, tight=True) + note(legend)


def costs(book: Book, target: float | None) -> str:
    """What each arm paid to reach the target loss."""
    if len(book.ranked) < 2 and target is None:
        return ""
    named = {row.arm: row for row in book.ranked}
    base = named.get("adamw", book.ranked[len(book.ranked) // 2])
    goal = base.loss if target is None else target
    why = f"the mean final loss of {base.arm}" if target is None else "the loss asked for"
    rows = [(f'<th scope="row">{mark(row.place)} {escape(row.arm)}</th>', row.runs) for row in book.ranked]
    return cost_table(rows, goal, why)


def contestants(book: Book) -> str:
    """Of each arm: what it is, what was tried, and where that comes from."""
    by_name = {arm["label"]: arm for arm in book.contest["contestants"]}
    rows = []
    for row in book.rows:
        arm, added = by_name[row.arm], book.contest["search"][row.arm]["extended"]
        options = ", ".join(f"{key} {value}" for key, value in arm["options"].items())
        tunes = "; ".join(
            f"{key} {', '.join(f'{x:g}' if isinstance(x, float) else str(x) for x in values)}"
            + (f", then {added[key]:g}" if key in added else "")
            + (f" (at lr {arm['start']['lr']:g}, moved as lr moves)" if key == "scale" and joint(arm["tune"]) else "")
            for key, values in arm["tune"].items()
        )
        rows.append([row_head(row.arm), *texts([arm["optimizer"], options or "–", tunes or "–", arm["note"] or "–"])])
    return html_table(heads(["", "optimizer", "options", "values tried", "notes"]), rows)


def circumstances(book: Book) -> dict[str, str]:
    """Versions and hardware of all runs; what differs between them stands side by side."""
    infos = [flat({k: run.run.info.get(k) for k in ("versions", "hardware")}) for r in book.rows for run in r.runs]
    keys = dict.fromkeys(key for info in infos for key in info)
    return {key: " | ".join(dict.fromkeys(str(info.get(key)) for info in infos)) for key in keys}


def runs_table(book: Book) -> str:
    """Every run, with its fate."""
    rows = []
    for run in book.contest["runs"]:
        loss = f"{run['loss']:.4f}" if run["loss"] is not None and math.isfinite(run["loss"]) else "–"
        rows.append([row_head(run["folder"]), *texts([run["status"], loss, run["why"]])])
    return html_table(heads(["run", "status", "loss", ""]), rows) if rows else ""


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
