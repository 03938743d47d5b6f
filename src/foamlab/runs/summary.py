"""One run in figures, and many runs in words: what the records show, and what they cannot show.

Reads run folders through `read_run`; draws nothing, writes nothing, needs no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from ..config import Role, flat, named, of_old, with_newer
from ..errors import UserError
from ..files import read_yaml
from .record import Run, read_run
from .stats import MARGIN, Mean, mean, paired, verdict

KEYS = ("step", "tokens", "seconds", "loss", "lr", "grad_norm")
NEUTRAL = named(Role.NEUTRAL)
NOT_AN_ARM = (*NEUTRAL, *named(Role.REPEATS))


@dataclass(frozen=True)
class Summary:
    """A run in figures. A number that the run does not give is NaN.

    Attributes:
        train, evals: columns by name (KEYS), in order.
        settings: config.yaml, flat: {"optimizer.lr": 0.01}; empty when there is none.
        weights, gradients, state, peak: bytes.
        skips: the records of skipped steps.
    """

    label: str
    run: Run
    settings: dict[str, Any]
    train: dict[str, list[float]]
    evals: dict[str, list[float]]
    skips: list[dict[str, Any]]

    @property
    def done(self) -> bool:
        return self.run.status == "done"

    @property
    def loss(self) -> float:
        """Validation loss at the last evaluation."""
        return self.evals["loss"][-1] if self.evals["loss"] else math.nan

    @property
    def metrics(self) -> dict[str, float]:
        """Those of a task at the last evaluation."""
        return {name: number(x) for line in self.run.lines("eval")[-1:] for name, x in line.get("values", {}).items()}

    @property
    def perplexity(self) -> float:
        """Of the last evaluation of a language model; a task has none."""
        return math.nan if self.settings.get("task.name") else perplexity(self.loss)

    @property
    def steps(self) -> float:
        return max([s for s in self.train["step"] + self.evals["step"] if math.isfinite(s)], default=math.nan)

    @property
    def planned(self) -> float:
        return number(self.settings.get("train.steps"))

    @property
    def seconds(self) -> float:
        return last(self.train["seconds"])

    @property
    def tokens(self) -> float:
        return last(self.train["tokens"])

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else math.nan

    @property
    def optimizer(self) -> str:
        return str(part(self.run.info, "optimizer", "name") or self.settings.get("optimizer.name") or "?")

    @property
    def lr(self) -> float:
        recorded = number(part(self.run.info, "optimizer", "lr"))
        return recorded if math.isfinite(recorded) else number(self.settings.get("optimizer.lr"))

    @property
    def parameters(self) -> float:
        return number(part(self.run.info, "model", "parameters"))

    @property
    def seed(self) -> Any:
        return self.settings.get("train.seed")

    def bytes(self, name: str) -> float:
        """weights, gradients, state or peak."""
        return number(part(self.run.info, "bytes", name))


def number(value: Any) -> float:
    """The value as a float; NaN for what is no number, infinity for an integer that no float holds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def last(values: Sequence[float]) -> float:
    """The last finite value."""
    return next((v for v in reversed(values) if math.isfinite(v)), math.nan)


def part(info: dict[str, Any], *path: str) -> Any:
    value: Any = info
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan


def summarize(folders: Sequence[Path | str]) -> list[Summary]:
    """Read the runs, in the order given. Labels are the folders' names, with as many parents as tell them apart.

    Raises:
        UserError: no folder given, one given twice, or one that holds no run.
    """
    paths = [Path(os.path.abspath(folder)) for folder in folders]
    if not paths:
        raise UserError("no run to report; give at least one run folder")
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f"{path} is given twice; name each run once")
    return [_summarize(path, label) for path, label in zip(paths, _labels(paths))]


def _labels(paths: Sequence[Path]) -> list[str]:
    depth = 1
    while True:
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
        depth += 1


def _summarize(path: Path, label: str) -> Summary:
    run = read_run(path)
    train, evals = run.lines("train"), run.lines("eval")
    return Summary(label, run, read_settings(path), _columns(train), _columns(evals), run.lines("skip"))


def _columns(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {key: [number(line.get(key)) for line in lines] for key in KEYS}


def read_settings(folder: Path) -> dict[str, Any]:
    """config.yaml with dotted keys, what a run of 0.1 did not name named; {} when the run has none."""
    try:
        found = read_yaml(folder / "config.yaml")
    except FileNotFoundError:
        return {}
    return flat(with_newer(of_old(flat(found, 2)))) if found else {}


def differing(runs: Sequence[Summary]) -> list[str]:
    """The settings that are not the same in all runs; places and worker counts (NEUTRAL) change no result."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    return [key for key in keys if key not in NEUTRAL and len({repr(run.settings.get(key)) for run in runs}) > 1]


def same(runs: Sequence[Summary], *, data: bool = True, keys: Sequence[str] = ()) -> bool:
    """Whether the runs share all of data.* and task.* (but cache and workers) and the keys; not known counts as no."""
    if not all(run.settings for run in runs):
        return len(runs) < 2
    parts = ("data.", "task.") if data else ()
    names = {k for run in runs for k in run.settings if k.startswith(parts) and k not in NEUTRAL} | {*keys}
    return not names & set(differing(runs))


def comparable(runs: Sequence[Summary]) -> bool:
    """Whether validation losses may be ranked: the same validation text, tokens and budget."""
    return same(runs, keys=("train.eval_tokens",))


def equal_models(runs: Sequence[Summary]) -> bool:
    """Whether all runs train the same model, to the number of its parameters; settings not known count as no."""
    keys = [key for run in runs for key in run.settings if key.startswith("model.")]
    return same(runs, data=False, keys=keys) and len({run.parameters for run in runs}) < 2


@dataclass(frozen=True)
class Arm:
    """Runs that differ in nothing but the seed: those that finished, and the seeds that diverged."""

    label: str
    runs: list[Summary]
    lost: list[Any]

    @property
    def loss(self) -> Mean:
        return mean([run.loss for run in self.runs])

    @property
    def by_seed(self) -> dict[Any, float]:
        return {run.seed: run.loss for run in self.runs}


def arms(runs: Sequence[Summary]) -> list[Arm]:
    """Finished runs with an evaluation, grouped by settings other than the seed; lowest mean loss first, NaN last."""
    groups: dict[Any, list[Summary]] = {}
    lost: dict[Any, list[Any]] = {}
    for run in runs:
        key = tuple(sorted((k, repr(v)) for k, v in run.settings.items() if k not in NOT_AN_ARM)) or run.label
        if run.done and run.evals["loss"]:
            groups.setdefault(key, []).append(run)
        elif run.run.diverged:
            lost.setdefault(key, []).append(run.seed)
    found = []
    firsts = [group[0] for group in groups.values()]
    for key, group in groups.items():
        name = group[0].optimizer
        alike = [run for run in firsts if run.optimizer == name]
        apart = [k for k in differing(alike) if k not in (*NOT_AN_ARM, "optimizer.name")]
        told = [f"{k.rpartition('.')[2]} {group[0].settings.get(k)}" for k in apart]
        label = group[0].label if len(group) == 1 else ", ".join([name, *told])
        found.append(Arm(label, group, lost.get(key, [])))
    return sorted(found, key=lambda arm: (math.isnan(arm.loss.mean), arm.loss.mean))


def headline(runs: Sequence[Summary]) -> list[str]:
    """What the runs show, in sentences; the first is the headline. Only finished runs are ranked."""
    ranked = arms(runs)
    said = []
    if not ranked:
        said.append(f"No finished run has a validation loss yet ({_statuses(runs)}).")
    elif len(ranked) == 1:
        said.append(_one(ranked[0]))
    elif not comparable([run for arm in ranked for run in arm.runs]):
        said.append("These runs were validated on different or unknown data: their losses cannot be ranked.")
    else:
        said += _contest(ranked)
    done = [run for run in runs if run.done]
    known = sorted((v, run.label) for run in done if math.isfinite(v := run.bytes("state") / 1e6))
    if len(known) > 1 and known[0][0] < known[-1][0] and equal_models(done):
        (low, a), (high, b) = known[0], known[-1]
        said.append(f"Optimizer state: from {low:,.2f} MB ({a}) to {high:,.2f} MB ({b}).")
    elif known and known[0][0] == known[-1][0]:
        said.append(f"Optimizer state: {known[0][0]:,.2f} MB{' in every run' if len(known) > 1 else ''}.")
    if len(done) == 1 and math.isfinite(speed := done[0].tokens_per_second):
        said.append(f"Speed: {speed:,.0f} tokens/s.")
    return said


def _one(arm: Arm) -> str:
    run = arm.runs[0]
    if len(arm.runs) > 1:
        return f"{arm.label}: mean validation loss {arm.loss}."
    if not math.isfinite(run.loss):
        return f"{run.label} ended with a validation loss that is not finite."
    first, at = run.evals["loss"][0], run.evals["step"]
    told = ", ".join(f"{name} {x:.3f}" for name, x in run.metrics.items()) or f"perplexity {run.perplexity:,.1f}"
    fell = f"from {first:.3f} at step {at[0]:,.0f} to {run.loss:.3f}" if len(at) > 1 else f"{run.loss:.3f}"
    return f"{run.label}: validation loss {fell} after {run.steps:,.0f} steps ({told})."


def _contest(ranked: list[Arm]) -> list[str]:
    a, b = ranked[:2]
    if not math.isfinite(a.loss.mean):
        return ["No finished run has a finite validation loss."]
    if not math.isfinite(b.loss.mean):
        return [f"Only {a.label} ends with a finite validation loss: {a.loss.mean:.3f}."]
    seeds = [seed for seed in a.by_seed if seed in b.by_seed]
    mean_of = "mean " if max(len(a.runs), len(b.runs)) > 1 else ""
    gap = b.loss.mean - a.loss.mean
    if gap < 0.0005:
        told = (
            f"{a.label} and {b.label} end with the same {mean_of}validation loss to three decimals: {a.loss.mean:.3f}"
        )
    else:
        told = f"{a.label} ends with the lowest {mean_of}validation loss: {a.loss.mean:.3f}, "
        told += f"{gap:.3f} below {b.label} ({b.loss.mean:.3f})"
    if a.runs[0].tokens != b.runs[0].tokens:
        told += f", after {a.runs[0].tokens:,.0f} tokens against {b.runs[0].tokens:,.0f}"
    said = [told + "."]
    if len(seeds) > 1:
        # which two are the best only the losses tell, so that every pair could have been compared: all count
        pairs = sum(len(x.by_seed.keys() & y.by_seed.keys()) > 1 for x, y in combinations(ranked, 2))
        result = paired([a.by_seed[s] for s in seeds], [b.by_seed[s] for s in seeds])
        lost = [arm.label for arm in (a, b) if arm.lost]
        said.append(verdict(a.label, b.label, result, 0.05 / pairs, MARGIN, lost) + ".")
    return said


def _statuses(runs: Sequence[Summary]) -> str:
    names = [run.run.status for run in runs]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def cautions(runs: Sequence[Summary], tuned: Sequence[str] = ()) -> list[str]:
    """What cannot be concluded from these runs, and why. `tuned`: optimizers whose rates were chosen in other runs."""
    said = [_status_note(run) for run in runs if not run.done]
    said += [f"{run.label}: the loss was not finite at some point." for run in runs if _broke(run)]
    said += [
        f"{run.label} skipped {len(run.skips):,} {'step' if len(run.skips) == 1 else 'steps'} ({_why(run)})."
        for run in runs
        if run.skips
    ]
    ranked = arms(runs)
    ran = [run for arm in ranked for run in arm.runs]
    if not ran:
        return said
    counts = sorted({len(arm.runs) for arm in ranked})
    if counts[0] < 2:
        who = "Each setting ran" if counts == [1] else "Some settings ran"
        said.append(f"{who} with one seed only: another seed ends elsewhere, and a difference may be chance.")
    elif len(ranked) > 1:
        said.append(
            f"Few seeds ({' or '.join(map(str, counts))} a setting): intervals are wide, small effects stay unseen."
        )
    if len(ranked) > 1:
        said += _fairness(ranked, ran, tuned)
    parameters = [run.parameters for run in ran if math.isfinite(run.parameters)]
    tokens = [run.tokens for run in ran if math.isfinite(run.tokens)]
    if parameters and tokens:
        said.append(
            f"Scale: models of at most {max(parameters):,.0f} parameters, at most {max(tokens):,.0f} tokens. "
            "Larger models or longer training may order the optimizers differently."
        )
    return said


def _status_note(run: Summary) -> str:
    of = f" of {run.planned:,.0f}" if math.isfinite(run.planned) else ""
    at = f" at step {run.steps:,.0f}{of}" if math.isfinite(run.steps) else " before its first record"
    state = {"running": "still running, or was killed,", "interrupted": "was interrupted", "failed": "failed"}
    words = "diverged" if run.run.diverged else state.get(run.run.status, f"has the status {run.run.status!r}")
    return f"{run.label} {words}{at}: it is shown, but not ranked."


def _broke(run: Summary) -> bool:
    return any(not math.isfinite(v) for v in run.train["loss"] + run.evals["loss"])


def _why(run: Summary) -> str:
    return ", ".join(dict.fromkeys(str(skip.get("why", "no reason recorded")) for skip in run.skips))


def _fairness(ranked: list[Arm], ran: list[Summary], tuned: Sequence[str]) -> list[str]:
    said = []
    if not all(run.settings for run in ran):
        return ["The settings of some runs are not known (no config.yaml): whether the contest is fair is unknown."]
    if not comparable(ran):
        said.append("Validation data or budget differ between runs: their losses measure different things.")
    tokens = {run.tokens for run in ran if math.isfinite(run.tokens)}
    if len(tokens) > 1:
        said.append(
            f"The runs saw different numbers of tokens ({min(tokens):,.0f} to {max(tokens):,.0f}): "
            "read the curves over tokens, not the end."
        )
    seeds = {tuple(sorted(map(repr, arm.by_seed))) for arm in ranked}
    if not same(ran, keys=("train.batch",)) or len(seeds) > 1:
        said.append("Data, batch size or seeds differ between settings: the batches were not the same.")
    if not equal_models(ran):
        said.append("The models differ between runs: a difference is not the optimizer's alone.")
    rates: dict[str, set[float]] = {}
    for run in ran:
        rates.setdefault(run.optimizer, set()).add(run.lr)
    single = [name for name, lrs in rates.items() if len(lrs) == 1 and name not in tuned]
    if single:
        names = ", ".join(single[:4]) + (f" and {len(single) - 4} more" if len(single) > 4 else "")
        said.append(f"One learning rate only for {names}: a better one may change the order.")
    if len({repr(run.run.info.get("hardware")) for run in ran}) > 1:
        said.append("The hardware differs between runs: seconds, tokens/s and peak memory do not compare.")
    else:
        said.append(
            "Seconds and tokens/s were taken once a run: other work on the machine shows in them. What an optimizer's "
            "step costs, `foamlab bench step` measures in interleaved pairs."
        )
    return said


def fair_points(runs: Sequence[Summary]) -> list[str]:
    """What is the same in all finished runs, said so that the reader need not guess."""
    ran = [run for arm in arms(runs) for run in arm.runs]
    said = []
    if len(ran) > 1 and len({run.tokens for run in ran}) == 1 and math.isfinite(ran[0].tokens):
        said.append(f"All finished runs saw {ran[0].tokens:,.0f} tokens.")
    if len(ran) > 1 and same(ran, keys=named(Role.ORDER)):
        said.append("Same data settings, seed and batch size: the same batches in the same order.")
    return said
