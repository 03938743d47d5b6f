"""A contest as it stands on disk, read with distrust: `contest.json`, and what became of each trial.

A contest folder holds `contest.json`, `config.yaml`, and for each arm a folder with one ordinary run folder a trial.
Names from `contest.json` become folders and files, so what is no plain name is refused before anything is made.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import foam_of_old
from ..errors import UserError
from ..files import finite, parse_json, plain_name, read_json, write_atomically, writing
from ..runs.provenance import installed
from ..runs.record import read_metrics, read_run
from ..runs.stats import MARGIN
from .model import FILE, FORMAT, Arm, Outcome, Rule

STOPPED = "stopped.json"
NEEDED: dict[str, type] = {
    "kind": str, "status": str, "command": str, "started": str, "settings": dict, "contestants": list, "seeds": list,
    "finalists": int, "rule": dict, "rule_in_words": str, "studies": dict,
}  # fmt: skip


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
            told = read_json(folder / STOPPED)
            return Outcome("stopped", float(told["loss"]), str(told["why"]))
        run = read_run(folder)
    except (UserError, OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{folder} is damaged ({e}): remove it, and --resume runs it again") from None
    error = str(run.info.get("error", ""))
    if run.diverged:
        return Outcome("diverged", why=error)
    evals = run.lines("eval")
    last = evals[-1] if evals else {"step": -1, "loss": None}
    if run.status == "done" and last["step"] < (run.info.get("result") or {}).get("step", 0):
        return Outcome("failed", why="its record has lost the last evaluation")
    if run.status == "done" and last["loss"] is None:
        return Outcome("diverged", why="its last validation loss is not finite")
    return Outcome(run.status, math.inf if last["loss"] is None else last["loss"], error)


def why_stop(folder: Path, rule: Rule) -> str:
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
            with suppress(UserError, KeyError, TypeError):  # the first may be cut
                line = parse_json(text, folder)
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


def read(folder: Path) -> dict[str, Any]:
    """`contest.json` of a folder.

    Raises:
        UserError: there is none, it is of another format, or not as foamlab writes it.
    """
    path = folder / FILE
    try:
        contest = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"no contest in {folder}: give a folder made by `foamlab compare` or `foamlab ablate`"
        ) from None
    if contest.get("format") != FORMAT:
        raise UserError(f"{path} has format {contest.get('format')!r}, this foamlab reads {FORMAT}")
    if lacking := [key for key in NEEDED if key not in contest]:
        raise UserError(f"{path} lacks {', '.join(lacking)}: it was not written by foamlab, or is damaged")
    try:
        # contests before 0.3 do not say which arms are torchfoam's own
        contest["contestants"] = [{"ours": foam_of_old(str(x["optimizer"])), **x} for x in contest["contestants"]]
        _check(contest)
    except (TypeError, KeyError, ValueError) as e:
        told = f"{e} is missing" if isinstance(e, KeyError) else str(e)
        raise UserError(f"{path} was not written by foamlab, or is damaged: {told}") from None
    return contest


def _check(contest: dict[str, Any]) -> None:
    """Raise TypeError, KeyError or ValueError where the contest does not have the shape given in docs/formats.md."""
    for key, kind in NEEDED.items():
        _want(isinstance(contest[key], kind), key, contest[key])
    _want(contest["kind"] in ("compare", "ablate"), "kind", contest["kind"])
    for part in ("optimizer", "train"):
        _want(isinstance(contest["settings"][part], dict), f"settings of {part}", contest["settings"][part])
    for key in ("betas", "eps", "weight_decay"):
        _ = contest["settings"]["optimizer"][key]
    for told in contest["contestants"]:
        _want(isinstance(told, dict) and told.keys() == {f.name for f in fields(Arm)}, "contestant", told)
    arms = [Arm(**told) for told in contest["contestants"]]
    _want(len({arm.label for arm in arms}) == len(arms) > 0, "contestants", [arm.label for arm in arms])
    for arm in arms:
        _check_arm(arm)
    seeds = contest["seeds"]
    _want(all(_number(x, whole=True) and x >= 0 for x in seeds) and len(set(seeds)) == len(seeds) > 0, "seeds", seeds)
    _want(contest["finalists"] >= 0, "finalists", contest["finalists"])
    rule, margin = Rule(**contest["rule"]), contest.get("margin", MARGIN)
    _want(_number(rule.step, whole=True) and _number(rule.factor), "rule", contest["rule"])
    _want(_number(margin) and margin >= 0, "margin", margin)
    for name, study in contest["studies"].items():
        _want(plain_name(name), "study", name)
        for text in (
            study["about"],
            study["base"],
            *(case[key] for case in study["cases"] for key in ("value", "arm")),
        ):
            _want(isinstance(text, str), f"study {name}", text)


def _check_arm(arm: Arm) -> None:
    for key, value in {"label": arm.label, "optimizer": arm.optimizer}.items():
        _want(plain_name(value), key, value)
    for part, kind in ((arm.options, dict), (arm.start, dict), (arm.tune, dict), (arm.note, str), (arm.ours, bool)):
        _want(isinstance(part, kind), f"contestant {arm.label} with", part)
    for key in ("lr", "scale"):
        _want(_number(arm.start[key]) and arm.start[key] >= 0, key, arm.start[key])
        _want(all(_number(x) and x > 0 for x in arm.tune.get(key, ())), f"{key} to try", arm.tune.get(key))
    for key, values in [*arm.tune.items(), *((key, [value]) for key, value in arm.start.items())]:
        words = [isinstance(x, str) for x in values]
        _want(plain_name(key) and isinstance(values, list) and len(set(words)) == 1, "values to try", {key: values})
        _want(all(plain_name(x) if isinstance(x, str) else _number(x) for x in values), f"{key} to try", values)


def _want(fits: bool, what: str, value: Any) -> None:
    if not fits:
        raise ValueError(f"{what} {str(value)[:60]!r} cannot be")


def _number(x: Any, whole: bool = False) -> bool:
    return isinstance(x, int if whole else (int, float)) and abs(x) < (2**53 if whole else 1e300)
