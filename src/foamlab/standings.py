"""What came of a contest: one row an arm, verdicts with their n, and what cannot be concluded. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .contest import Arm, Found, Outcome, Outcomes, Rule, Trial, wanted
from .stats import mean, paired, verdict
from .summary import Summary, cautions, perplexity, summarize


def standings(folder: Path, contest: Mapping[str, Any]) -> dict[str, Any]:
    """`search`, `runs`, `results`, `verdicts` and `cautions` of contest.json, from the run folders as they are now."""
    arms = [Arm(**a) for a in contest["contestants"]]
    seeds, outcomes = contest["seeds"], Outcomes(folder)
    _, found = wanted(arms, seeds, contest["finalists"], outcomes)
    told, rows, final = {}, [], {}
    for arm in arms:
        f = found[arm.label]
        told[arm.label] = {"best": None if f.todo else f.point, "extended": f.extended, "edge": f.edge}
        trials = [Trial(arm, f.point, seed, "seeds") for seed in seeds]
        done = [] if f.todo else [t.name for t in trials if outcomes[t.name].status == "done"]
        final[arm.label] = summarize([folder / name for name in done]) if done else []
        rows.append(_row(arm, f, final[arm.label], outcomes[trials[0].name]))
    runs = [{"folder": n, **asdict(o)} for n, o in outcomes.items() if o.status != "none"]
    rows.sort(key=lambda row: (row["loss"] is None, row["loss"] or 0.0))
    said, k = verdicts(contest["kind"], rows, final, contest.get("studies", {}))
    return {
        "search": told,
        "runs": sorted(runs, key=lambda run: str(run["folder"])),
        "results": rows,
        "verdicts": said,
        "cautions": _cautions(contest, rows, [run for runs in final.values() for run in runs], k),
    }


def _row(arm: Arm, found: Found, runs: list[Summary], first: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {
        "arm": arm.label,
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
    kind: str, rows: Sequence[Mapping[str, Any]], runs: Mapping[str, list[Summary]], studies: Mapping[str, Any]
) -> tuple[list[str], int]:
    """(sentences, how many comparisons they are). Each is tested at 0.05 / comparisons, so that all are at 0.05.

    In a contest: the best against all others, and the best form of FOAM against all that is not FOAM. In an ablation:
    within each study, the paper's setting against the others.
    """
    ranked = [str(row["arm"]) for row in rows if row["n"] and row["loss"] is not None]
    pairs: list[tuple[str, str]] = []
    if kind == "ablate":
        for study in studies.values():
            here = [case["arm"] for case in study["cases"]]
            pairs += [(study["base"], other) for other in here if other != study["base"]]
        pairs = [pair for pair in dict.fromkeys(pairs) if set(pair) <= set(ranked)]
    elif ranked:
        ours = [arm for arm in ranked if arm.startswith("foam")]
        pairs = [(ranked[0], other) for other in ranked[1:]]
        pairs += [(ours[0], other) for other in ranked if ours and not other.startswith("foam")]
        pairs = [pair for k, pair in enumerate(pairs) if set(pair) not in map(set, pairs[:k])]
    said = [f"{_verdict(a, b, runs, len(pairs))}." for a, b in pairs]
    return said, len(pairs)


def _verdict(a: str, b: str, runs: Mapping[str, list[Summary]], comparisons: int) -> str:
    left, right = ({run.seed: run.loss for run in runs[x]} for x in (a, b))
    seeds = [seed for seed in left if seed in right]
    if not seeds:
        return f"{a} and {b} share no seed (n = 0): nothing can be said"
    return verdict(a, b, paired([left[s] for s in seeds], [right[s] for s in seeds]), 0.05 / comparisons)


def _cautions(
    contest: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], runs: list[Summary], comparisons: int
) -> list[str]:
    said = [str(Rule(**contest["rule"]))]
    if comparisons > 1:
        said.append(
            f'{comparisons} comparisons: "beats" needs p < {0.05 / comparisons:.2g} (0.05 / {comparisons}), so that '
            "the chance of one false claim among all is at most 5 %."
        )
    tuned = [arm["label"] for arm in contest["contestants"] if any(len(v) > 1 for v in arm["tune"].values())]
    if tuned:
        said.append(
            f"Rates were chosen with seed {contest['seeds'][0]}, which counts among the seeds: an arm that tried more "
            "values is a little favoured."
        )
    ends = [f"{row['arm']} ({key} {row['point'][key]:.4g})" for row in rows for key in row["edge"]]
    if ends:
        said.append(f"A better value may lie beyond what was tried, the best is at its edge: {', '.join(ends)}.")
    for row in rows:
        if row["status"] in ("stopped", "diverged"):
            said.append(f"{row['arm']}: no run finished ({row['status']}: {row['why']}).")
    names = [run.optimizer for run in runs if tuned]
    return said + (cautions(runs, tuned=names) if runs else [])


def table(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """`results` as text, its head first."""
    head = ("", "n", "loss", "95% interval", "perplexity", "lr", "scale", "state MB", "peak MB", "tokens/s", "seconds")
    return [head, *(_cells(row) for row in rows)]


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
