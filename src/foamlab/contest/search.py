"""Which trials of a contest are to be run next: the search for each arm's best point, then the seeds.

What has been run `folder` reads from the run folders alone, so a contest that was killed goes on where it was. Knows
no files, runs nothing, needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .model import Arm, Outcome, Point, Trial


@dataclass
class Found:
    """How far the search for an arm's best point is: `point` so far, `todo` trials, and what happened at the ends."""

    point: Point
    todo: list[Trial]
    extended: dict[str, Any] = field(default_factory=dict)  # key -> the value added
    edge: list[str] = field(default_factory=list)  # keys whose best value is at an end even so


def search(arm: Arm, seed: int, outcomes: Mapping[str, Outcome]) -> Found:
    """The next trials of an arm's search, or its best point when there are none.

    Each key is tried at all its values, the others at the best so far, and all again until none moves. If the best is
    at an end, one value more is tried beyond it, at the same ratio, once a key; a key that is at an end even so is
    reported in `edge`. A point is left only for one that is not worse: what follows from two values in turns is
    rounded, so that it may miss the point that it came from by a digit, and the search would go in circles.
    """
    grids = {key: list(values) for key, values in arm.tune.items()}
    found = Found({**arm.start, **{key: values[0] for key, values in grids.items() if len(values) == 1}}, [])
    while True:
        before, found.edge = found.point, []
        for key in [key for key in grids if len(grids[key]) > 1] or list(grids)[:1]:
            best = _tune(arm, seed, key, grids, found, outcomes)
            if best is None:
                return found
            now, then = (outcomes[t.name] for t in (replace(best, point=found.point), best))
            if not now.over or then.rank < now.rank or (then.rank == now.rank and now.status != "done"):
                found.point = best.point
        if found.point == before:
            return found


def _tune(
    arm: Arm, seed: int, key: str, grids: dict[str, list[Any]], found: Found, outcomes: Mapping[str, Outcome]
) -> Trial | None:
    """The best trial over one key, or None and what is `todo` for it; extends its grid, notes its edge."""
    while True:
        values = grids[key]
        trials = {value: Trial(arm, moved(arm, found.point, key, value), seed, key) for value in values}
        found.todo = [t for t in trials.values() if not outcomes[t.name].over]
        if found.todo:
            return None
        best = min(values, key=lambda value: outcomes[trials[value].name].rank)
        end = best in (values[0], values[-1]) and len(values) > 1
        further = beyond(values, best) if end and key not in found.extended else None
        if further is None:
            found.edge += [key] if end else []
            return trials[best]
        found.extended[key] = further
        grids[key] = sorted([*values, further])


def moved(arm: Arm, point: Point, key: str, value: Any) -> Point:
    """A point with another value of one key.

    Where lr and scale are both tuned they move as two rates that depend little on each other: lr with lr * scale, the
    matrices' rate, held; and scale to where the matrices' rate is what this value gives at the lr that the arm starts
    from. Else each would be tried at a rate of the matrices that is no longer the best.
    """
    to = {**point, key: value}
    if joint(arm.tune) and key in ("lr", "scale"):
        rate = point["lr"] * point["scale"] if key == "lr" else arm.start["lr"] * value
        to["scale"] = float(f"{rate / to['lr']:.4g}")
    return to


def joint(tune: Mapping[str, Sequence[Any]]) -> bool:
    """Whether lr and scale are both searched, as `moved` says."""
    return all(len(tune.get(key, ())) > 1 for key in ("lr", "scale"))


def beyond(values: Sequence[Any], end: Any) -> float | None:
    """The next value after an end of a rising grid, at the ratio of its last two; None if there is none.

    >>> beyond([1e-3, 3e-3, 1e-2], 1e-2), beyond([1e-3, 3e-3], 1e-3)
    (0.033, 0.00033)
    """
    near = values[1] if end == values[0] else values[-2]
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0 for x in (end, near)):
        return None
    further = float(f"{end * (end / near):.2g}")
    return further if 0 < further < math.inf else None


def wanted(
    arms: Sequence[Arm], seeds: Sequence[int], finalists: int, outcomes: Mapping[str, Outcome]
) -> tuple[list[Trial], dict[str, Found]]:
    """(trials that can be run now, label -> how far its search is).

    An arm is tuned with the first seed; then its best point is run with the others: of all arms, or of the `finalists`
    best when all are tuned. Nearest to an arm's own defaults come first, so that the rule soon has something to go by.
    """
    found = {arm.label: search(arm, seeds[0], outcomes) for arm in arms}
    todo = [trial for f in found.values() for trial in f.todo]
    tuned = [arm for arm in arms if not found[arm.label].todo]

    def trials(arm: Arm) -> list[Trial]:
        return [Trial(arm, found[arm.label].point, seed, "seeds") for seed in seeds]

    if finalists and len(tuned) == len(arms):
        tuned = sorted(tuned, key=lambda arm: outcomes[trials(arm)[0].name].rank)[:finalists]
    if not finalists or len(todo) == 0:
        for arm in tuned:
            first = outcomes[trials(arm)[0].name]
            if first.status == "done" or not first.over:  # what was given up is not repeated
                todo += [t for t in trials(arm) if not outcomes[t.name].over]
    return sorted({trial.name: trial for trial in todo}.values(), key=_distance), found


def _distance(trial: Trial) -> float:
    steps = [abs(math.log(x / y)) for k, y in trial.arm.start.items() if (x := trial.point.get(k)) and y and x > 0 < y]
    return sum(steps)
