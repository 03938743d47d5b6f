"""A contest as it stands on disk: its arms, and what is still to be run.

A contest folder holds `contest.json`, `config.yaml`, and for each arm a folder with one ordinary run folder a trial.
What has been run is read from the run folders alone, so a contest that was killed goes on where it was. Runs nothing,
needs no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .config import OptimizerConfig, UserError
from .record import installed, read_metrics, read_run, write_atomically, writing

FILE, STOPPED = "contest.json", "stopped.json"
FORMAT = 1
MARGIN = 0.01  # nat: what is asked of "level with" unless a contest says otherwise
NEEDED = (
    "kind", "status", "command", "started", "settings", "contestants", "seeds", "finalists", "rule", "rule_in_words",
    "studies",
)  # fmt: skip
Point = dict[str, Any]  # what is tuned: {"lr": 0.01, "scale": 0.25, ...}


@dataclass(frozen=True)
class Arm:
    """One contestant: an optimizer with fixed settings, and what is tuned.

    Args:
        label: its name in tables and in the names of run folders.
        optimizer: an entry of OPTIMIZERS.
        options: fixed options.
        start: the values that tuning starts from: lr, scale.
        tune: lr, scale or an option -> values, rising; tried in turns, each with the best of the others so far.
        note: what this implementation cannot do, and where its values come from.
    """

    label: str
    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)
    start: Point = field(default_factory=dict)
    tune: dict[str, list[Any]] = field(default_factory=dict)
    note: str = ""

    def at(self, point: Point, shared: OptimizerConfig) -> OptimizerConfig:
        """The optimizer's settings at a point; betas, eps and weight decay are shared by all arms."""
        values = dict(point)
        return OptimizerConfig(
            self.optimizer, values.pop("lr"), shared.betas, shared.eps, shared.weight_decay, values.pop("scale"),
            {**self.options, **values},
        )  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One run of a contest: an arm at one point, with one seed. `stage` is "lr", "scale", ... or "seeds"."""

    arm: Arm
    point: Point
    seed: int
    stage: str

    @property
    def name(self) -> str:
        """Its folder in that of the contest: ARM/lr0.01-scale0.25-seed0."""
        values = "-".join(f"{key}{_short(value)}" for key, value in self.point.items())
        return f"{self.arm.label}/{values}-seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    `status`: none, running, interrupted, failed (all to be run or resumed); done; stopped (by the contest's rule);
    diverged (too many steps that were not finite). `loss`: the last evaluation's, or the one it was stopped for.
    """

    status: str
    loss: float = math.inf
    why: str = ""

    @property
    def over(self) -> bool:
        return self.status in ("done", "stopped", "diverged")

    @property
    def rank(self) -> tuple[int, float]:
        """Lower is better; a stopped run is behind all that finished, a diverged one behind all."""
        return ("done", "stopped").index(self.status) if self.status in ("done", "stopped") else 2, self.loss


@dataclass(frozen=True)
class Rule:
    """When a trial is given up: at `step`, with a loss above `factor` times the lowest of its arm at that step.

    Only its own arm counts: else the runs of a weak arm that come early would end, the better ones later not.
    """

    step: int
    factor: float

    def __str__(self) -> str:
        if not self.step:
            return "No run was stopped early."
        return (
            f"While rates are tuned, a run is stopped at step {self.step} if its validation loss there is above "
            f"{self.factor:g} times the lowest that a run of the same optimizer has had at that step by then."
        )


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


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------------- the state on disk


class Outcomes(dict[str, Outcome]):
    """Trial name -> outcome, read from its run folder when first asked for; `forget` what may have changed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Outcome:
        self[name] = outcome(self.folder / name)
        return self[name]

    def forget(self, name: str) -> None:
        self.pop(name, None)


def outcome(folder: Path) -> Outcome:
    """What became of the trial in `folder`.

    Raises:
        UserError: its files are damaged.
    """
    if not (folder / "run.json").exists():
        return Outcome("none")
    try:
        if (folder / STOPPED).exists():
            told = json.loads((folder / STOPPED).read_text(encoding="utf-8"))
            return Outcome("stopped", float(told["loss"]), str(told["why"]))
        run = read_run(folder)
    except (UserError, OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{folder} is damaged ({e}): remove it, and --resume runs it again") from None
    error = str(run.info.get("error", ""))
    if run.status == "failed" and error.startswith("stopped: "):
        return Outcome("diverged", why=error)
    evals = run.lines("eval")
    last = evals[-1] if evals else {"step": -1, "loss": None}
    if run.status == "done" and last["step"] < (run.info.get("result") or {}).get("step", 0):
        return Outcome("failed", why="its record has lost the last evaluation")
    if run.status == "done" and last["loss"] is None:
        return Outcome("diverged", why="its last validation loss is not finite")
    return Outcome(run.status, math.inf if last["loss"] is None else last["loss"], error)


def hopeless(folder: Path, rule: Rule) -> str:
    """Why the rule stops the run in `folder` (whose siblings are the other runs of its arm); empty if it does not."""
    own = loss_at(folder, rule.step)
    siblings = [f for f in folder.parent.iterdir() if f.is_dir() and f != folder]
    others = {f.name: x for f in siblings if (x := loss_at(f, rule.step)) is not None}
    if own is None or not others:
        return ""
    best = min(others, key=lambda name: others[name])
    if own <= rule.factor * others[best]:
        return ""
    return f"loss {own:.4g} at step {rule.step} is above {rule.factor:g} times the {others[best]:.4g} of {best}"


def loss_at(folder: Path, step: int) -> float | None:
    """Validation loss of a run at a step; None if it has none, infinity if it was not finite."""
    for line in read_metrics(folder / "metrics.jsonl"):
        if line["kind"] == "eval" and line["step"] == step:
            return math.inf if line["loss"] is None else float(line["loss"])
    return None


def newest(folder: Path, tail: int = 8192) -> dict[str, Any]:
    """Step, loss and evaluation of a run under way, as far as the end of its record tells."""
    known: dict[str, Any] = {"step": 0, "loss": None, "evaluated": None}
    with suppress(OSError), open(folder / "metrics.jsonl", "rb") as f:
        f.seek(max(os.fstat(f.fileno()).st_size - tail, 0))
        for text in f.read().split(b"\n")[:-1]:
            with suppress(ValueError):  # the first may be cut
                line = json.loads(text)
                known["step"] = line["step"]
                known["evaluated" if line["kind"] == "eval" else "loss"] = line.get("loss")
    return known


def same_library(folder: Path, labels: Sequence[str]) -> None:
    """Raise UserError if a run of these arms was made by another torchfoam: its defaults may be other ones."""
    now = installed("torchfoam")
    for path in (path for label in labels for path in (folder / label).glob("*/run.json")):
        was = read_run(path.parent).info.get("versions", {}).get("torchfoam")
        if was != now:
            raise UserError(
                f"{path.parent} was made by torchfoam {was}, this is {now}, and defaults may differ: "
                f"start a new contest, or finish this one with torchfoam {was}"
            )


def write(folder: Path, contest: Mapping[str, Any]) -> None:
    """Write `contest.json`, whole, at once."""
    with writing(folder):
        write_atomically(folder / FILE, json.dumps(finite(contest), indent=1, allow_nan=False) + "\n")


def finite(x: Any) -> Any:
    """JSON knows no nan and inf: they become null."""
    if isinstance(x, Mapping):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def read(folder: Path) -> dict[str, Any]:
    """`contest.json` of a folder.

    Raises:
        UserError: there is none, or it is of another format.
    """
    try:
        contest: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"no contest in {folder}: give a folder made by `foamlab compare` or `foamlab ablate`"
        ) from None
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {folder / FILE}: {e}") from None
    if not isinstance(contest, dict) or contest.get("format") != FORMAT:
        found = contest.get("format") if isinstance(contest, dict) else type(contest).__name__
        raise UserError(f"{folder / FILE} has format {found!r}, this foamlab reads {FORMAT}")
    if lacking := [key for key in NEEDED if key not in contest]:
        raise UserError(f"{folder / FILE} lacks {', '.join(lacking)}: it was not written by foamlab, or is damaged")
    return contest


# ---------------------------------------------------------------------------------------------- from words


def grids(text: str, flag: str) -> dict[str, list[float]]:
    """Values for all arms, or for some by name.

    >>> grids("1e-3,3e-3", "lr"), grids("adamw=1e-3,3e-3;sgd=0.1", "lr")
    ({'': [0.001, 0.003]}, {'adamw': [0.001, 0.003], 'sgd': [0.1]})
    """
    found = {}
    for part in filter(None, text.replace(" ", "").split(";")):
        name, sign, values = part.rpartition("=")
        found[name if sign else ""] = numbers(values, flag)
    return found


def numbers(text: str, flag: str) -> list[float]:
    """ "1,2" -> [1.0, 2.0]."""
    try:
        return [float(x) for x in text.split(",") if x]
    except ValueError:
        raise UserError(f"--{flag} takes numbers separated by commas, or NAME=NUMBERS;NAME=...; got {text!r}") from None
