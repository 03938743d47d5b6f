"""What came of a contest: one row an arm, verdicts with their n, and what cannot be concluded. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from ..runs.stats import MARGIN, mean, paired, percent, verdict
from ..runs.summary import Summary, cautions, perplexity, summarize
from .folder import Outcomes
from .model import Arm, Outcome, Rule, Trial
from .search import Found, wanted

HEAD = ("", "n", "loss", "95% interval", "perplexity", "lr", "scale", "state MB", "peak MB", "tokens/s", "seconds")


def standings(folder: Path, contest: Mapping[str, Any]) -> dict[str, Any]:
    """`search`, `runs`, `results`, `verdicts` and `cautions` of contest.json, from the run folders as they are now."""
    arms = [Arm(**a) for a in contest["contestants"]]
    seeds, outcomes = contest["seeds"], Outcomes(folder)
    _, found = wanted(arms, seeds, contest["finalists"], outcomes)
    told, rows, final, lost = {}, [], {}, {}
    for arm in arms:
        f = found[arm.label]
        told[arm.label] = {"best": None if f.todo else f.point, "extended": f.extended, "edge": f.edge}
        trials = [Trial(arm, f.point, seed, "seeds") for seed in seeds]
        done = [] if f.todo else [t.name for t in trials if outcomes[t.name].status == "done"]
        final[arm.label] = summarize([folder / name for name in done]) if done else []
        if done and (gone := [t.seed for t in trials if outcomes[t.name].over and t.name not in done]):
            lost[arm.label] = gone
        rows.append(_row(arm, f, final[arm.label], outcomes[trials[0].name]))
    runs = [{"folder": n, **asdict(o)} for n, o in outcomes.items() if o.status != "none"]
    rows.sort(key=lambda row: (row["loss"] is None, row["loss"] or 0.0))
    margin = contest.get("margin", MARGIN)  # contests of old have none
    said, k = verdicts(contest["kind"], rows, final, contest.get("studies", {}), lost, margin)
    return {
        "search": told,
        "runs": sorted(runs, key=lambda run: str(run["folder"])),
        "results": rows,
        "verdicts": said,
        "cautions": _cautions(contest, rows, final, lost, k, margin),
    }


def _row(arm: Arm, found: Found, runs: list[Summary], first: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {
        "arm": arm.label,
        "ours": arm.ours,
        "n": len(runs),
        "status": "done" if runs else "tuning" if found.todo else first.status,
        "why": first.why,
    }
    row |= {"point": found.point, "edge": found.edge, "seeds": [run.seed for run in runs]}
    row |= {"folders": [f"{arm.label}/{run.run.folder.name}" for run in runs]}
    names = ("loss", "low", "high", "perplexity", "state", "weights", "peak", "tokens_per_second", "seconds", "steps")
    if not runs:
        return row | dict.fromkeys(names)
    loss = mean([run.loss for run in runs])
    row |= {"loss": loss.mean, "low": loss.low, "high": loss.high, "perplexity": perplexity(loss.mean)}
    row |= {name: mean([run.bytes(name) for run in runs]).mean for name in ("state", "weights", "peak")}
    row |= {name: mean([getattr(run, name) for run in runs]).mean for name in ("tokens_per_second", "seconds", "steps")}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def verdicts(
    kind: str,
    rows: Sequence[Mapping[str, Any]],
    runs: Mapping[str, list[Summary]],
    studies: Mapping[str, Any],
    lost: Mapping[str, list[int]] | None = None,
    margin: float = 0.0,
) -> tuple[list[str], int]:
    """(sentences, how many comparisons the level is divided by, so that the chance of one false claim is 0.05).

    A claim is that one beats another, or is level with it within `margin`: `stats.verdict`, where the level is proved.
    In a contest: the best against all others, and the best form of FOAM against all that is not FOAM. Which these are
    only the losses tell, so that every pair of arms could have been compared: all count. In an ablation: within each
    study, the paper's setting against the others; these alone count. Pairs with fewer than two common seeds do not.
    `lost`: seeds of an arm that diverged. What is left of such an arm is no ground for a claim in its favour.
    """
    ranked = [str(row["arm"]) for row in rows if row["n"] and row["loss"] is not None]
    if kind == "ablate":
        cases = [(study["base"], case["arm"]) for study in studies.values() for case in study["cases"]]
        told = [pair for pair in dict.fromkeys(cases) if pair[0] != pair[1] and set(pair) <= set(ranked)]
        possible = told
    else:
        ours = [row["arm"] for row in rows if row["arm"] in ranked and row["ours"]]
        told = [(ranked[0], other) for other in ranked[1:]]
        told += [(ours[0], other) for other in ranked if ours and other not in ours]
        told = [pair for k, pair in enumerate(told) if set(pair) not in map(set, told[:k])]
        possible = list(combinations(ranked, 2))
    count = sum(len(_common(a, b, runs)) > 1 for a, b in possible)
    alpha = 0.05 / max(count, 1)
    return [f"{_verdict(a, b, _common(a, b, runs), alpha, margin, lost or {})}." for a, b in told], count


def _common(a: str, b: str, runs: Mapping[str, list[Summary]]) -> list[tuple[float, float]]:
    """Losses of two arms with the same seed."""
    other = {run.seed: run.loss for run in runs[b]}
    return [(run.loss, other[run.seed]) for run in runs[a] if run.seed in other]


def _verdict(
    a: str, b: str, pairs: Sequence[tuple[float, float]], alpha: float, margin: float, lost: Collection[str]
) -> str:
    if not pairs:
        return f"{a} and {b} share no seed (n = 0): nothing can be said"
    return verdict(a, b, paired([x for x, _ in pairs], [y for _, y in pairs]), alpha, margin, lost)


def _cautions(
    contest: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    final: Mapping[str, list[Summary]],
    lost: Mapping[str, list[int]],
    comparisons: int,
    margin: float,
) -> list[str]:
    runs = [run for arm in final.values() for run in arm]
    said = [str(Rule(**contest["rule"]))]
    if comparisons:
        said.append(
            _level(
                comparisons, "planned" if contest["kind"] == "ablate" else "any pair could have been reported", margin
            )
        )
    said += [
        f"{arm} did not finish with seed {', '.join(map(str, seeds))}: its figures are of the runs that did, and no "
        "claim is made in its favour."
        for arm, seeds in lost.items()
    ]
    said += _betas(final)
    tuned = [arm["label"] for arm in contest["contestants"] if any(len(v) > 1 for v in arm["tune"].values())]
    if tuned:
        said.append(
            f"Rates were chosen with seed {contest['seeds'][0]}, which counts among the seeds: an arm that tried more "
            "values has a slight selection advantage."
        )
    ends = [f"{row['arm']} ({key} {row['point'][key]:.4g})" for row in rows for key in row["edge"]]
    if ends:
        said.append(f"A better value may lie beyond what was tried, the best is at its edge: {', '.join(ends)}.")
    for row in rows:
        if row["status"] in ("stopped", "diverged"):
            said.append(f"{row['arm']}: no run finished ({row['status']}: {row['why']}).")
    names = [run.optimizer for run in runs if tuned]
    return said + (cautions(runs, tuned=names) if runs else [])


def _level(comparisons: int, why: str, margin: float) -> str:
    """What a claim asks for, and what its interval is."""
    alpha = 0.05 / comparisons
    many = f"{comparisons} pairs ({why}): " if comparisons > 1 else ""
    asked = f"p < {alpha:.2g}" + f" (0.05 / {comparisons})" * (comparisons > 1)
    level = (
        f'"level with" the same in two one-sided tests that the difference is within {margin:g} nat, reported with the '
        f"{percent(1 - 2 * alpha)} interval"
        if margin
        else 'nothing is said to be "level with" another, since the margin is 0'
    )
    return (
        f'{many}"beats" needs {asked} in the paired t test, reported with the {percent(1 - alpha)} interval; {level}. '
        f"So the chance of any false claim {'among all ' * (comparisons > 1)}is at most 5 %."
    )


def _betas(final: Mapping[str, list[Summary]]) -> list[str]:
    """Whose betas differ: they are not tuned."""
    found: dict[str, list[str]] = {}
    for arm, runs in final.items():
        for betas in {str(run.settings.get("optimizer.betas")): None for run in runs}:
            found.setdefault(betas, []).append(arm)
    if len(found) < 2:
        return []
    each = "; ".join(f"{betas} for {', '.join(arms)}" for betas, arms in found.items())
    return [f"Betas are each optimizer's own and were not tuned: {each}. --optimizer.betas gives all the same."]


def table(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """`results` as text, its head first."""
    return [HEAD, *(_cells(row) for row in rows)]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    def cell(name: str, form: str, unit: float = 1.0) -> str:
        return "-" if row[name] is None else format(row[name] / unit, form)

    interval = "-" if row["low"] is None else f"{row['low']:.4f} to {row['high']:.4f}"
    rates = [f"{row['point'].get(k, math.nan):.4g}" + ("!" if k in row["edge"] else "") for k in ("lr", "scale")]
    loss = cell("loss", ".4f") if row["n"] else str(row["status"])
    return (
        str(row["arm"]), str(row["n"]), loss, interval, cell("perplexity", ".2f"), *rates, cell("state", ".2f", 1e6),
        cell("peak", ",.0f", 1e6), cell("tokens_per_second", ",.0f"), cell("seconds", ",.1f"),
    )  # fmt: skip
