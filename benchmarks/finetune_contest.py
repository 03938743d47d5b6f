"""Fine-tune real pre-trained models where nothing changes but the optimizer: runs that pair by seed, and their table.

minilm: a 22.7 M encoder on the polarity of sentences from film reviews, 120 steps of 16. smollm2: a 135 M decoder on
the same sentences as prompts, 50 steps of 4. Both come in packages (finetune_tasks.py), kept in --cache.
Head, order of batches, dropout and garbage are functions of the seed alone. A run appends one line to --results when it
ends and is not repeated; one that another process is at is passed over, so the same command can be given twice.

An arm is `adamw`, `paper` (the paper's rule) or `kappaK` (bias correction of the moments alone, r^2 in V weighted K),
with level and state after dashes: kappa0.1, kappa0.1-row, paper-8-int8. MODULE:CLASS:key=value, with numbers as values,
is an optimizer of your own, given FOAM's groups.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import importlib
import json
import math
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

from finetune_tasks import TASKS, sentences

KEY = ("model", "arm", "lr", "beta2", "clip", "spike", "steps", "seed")  # what makes two runs the same
PLACE = ("model", "beta2", "clip", "spike", "steps")  # what arms must share, and the rate, to be compared
Seeds = dict[int, dict[str, Any]]  # seed -> its run


def build(arm: str, model: Any, lr: float, beta2: float) -> Any:
    """The arm's optimizer; decay 0.01 on everything, as for AdamW."""
    import torch

    from torchfoam import FOAM, param_groups

    common: dict[str, Any] = {"lr": lr, "betas": (0.9, beta2), "weight_decay": 0.01}
    if arm == "adamw":
        return torch.optim.AdamW(model.parameters(), fused=True, **common)
    if ":" in arm:
        module, name, *given = arm.split(":")
        own = {key: float(value) for key, value in (x.split("=") for x in given)}
        return getattr(importlib.import_module(module), name)(param_groups(model), **common, **own)
    rule, *rest = arm.split("-")
    numbers = [x for x in rest if x == "row" or x.isdigit()]
    states = [x for x in rest if x not in numbers]
    level: int | str = next((x if x == "row" else int(x) for x in numbers), 2)
    if rule == "paper":
        options: dict[str, Any] = {"bias_correction": "whole", "residual_in_v": 1.0}
    elif rule.startswith("kappa"):
        options = {"bias_correction": "moments", "residual_in_v": float(rule.removeprefix("kappa"))}
    else:
        raise SystemExit(f"unknown arm {arm!r}; see --help")
    return FOAM(param_groups(model, level=level), **common, state=states[0] if states else "float32", **options)


@dataclass
class Bench:
    """A task with its model as it came and its sentences tokenized, for one run after another."""

    task: Any
    train: list[tuple[list[int], int]]
    held_out: list[tuple[list[int], int]]
    weights: dict[str, Any]

    @classmethod
    def of(cls, name: str, cache: Path) -> Bench:
        task = TASKS[name](cache)
        pairs = [[(task.encode(*pair), pair[1]) for pair in part] for part in sentences(cache)]
        # long ones beside long ones: held-out figures do not depend on the order, only the padding does
        held_out = sorted(pairs[1][: task.held_out], key=lambda pair: len(pair[0]))
        return cls(task, pairs[0], held_out, {k: x.clone() for k, x in task.model.state_dict().items()})

    def loss(self, rows: list[tuple[list[int], int]]) -> tuple[Any, int, int]:
        import torch

        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
        return self.task.loss(ids, mask, torch.tensor([label for _, label in rows]))

    def backward(self, rows: list[tuple[list[int], int]]) -> float:
        """Gradients of the mean loss of the rows; taken in pieces of like length, which saves padding."""
        rows = sorted(rows, key=lambda pair: len(pair[0]))
        total, count = 0.0, self.task.count(rows)
        for i in range(0, len(rows), 4):
            loss = self.loss(rows[i : i + 4])[0] / count
            loss.backward()
            total += float(loss.detach())
        return total

    def run(self, arm: str, lr: float, beta2: float, clip: float, spike: int, steps: int, seed: int) -> dict[str, Any]:
        """One fine-tuning from the weights as they came; the figures of its line."""
        import torch

        from foamlab.optimizers.registry import state_bytes

        task, model = self.task, self.task.model
        model.load_state_dict(self.weights)
        model.train()
        generator = torch.Generator().manual_seed(seed)
        task.begin(generator)
        order = torch.randperm(len(self.train), generator=generator).tolist()
        garbage = torch.randint(model.config.vocab_size, (task.rows, 32), generator=generator).tolist()
        optimizer = build(arm, model, lr, beta2)
        warmup = task.warmup
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup))
        )
        torch.manual_seed(seed)  # dropout
        began, curve = time.perf_counter(), []
        for step in range(steps):
            rows = [self.train[i] for i in order[step * task.rows : (step + 1) * task.rows]]
            if step + 1 == spike:
                rows = [(ids, ids[0] % 2) for ids in garbage]
            curve.append(self.backward(rows))
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - began
        last = curve[-task.last :]
        found = {"train_loss": math.fsum(last) / len(last), **self.evaluate(), "seconds": round(seconds, 1)}
        return {**found, "state_bytes": state_bytes(optimizer), "curve": [round(x, 4) for x in curve]}

    def evaluate(self) -> dict[str, float]:
        import torch

        self.task.model.eval()
        size = 100 if self.task.held_out > 400 else 20
        with torch.no_grad():
            parts = [self.loss(self.held_out[i : i + size]) for i in range(0, len(self.held_out), size)]
        loss, count, hits = (math.fsum(float(part[i]) for part in parts) for i in range(3))
        return {"loss": loss / count, "accuracy": hits / len(self.held_out)}


def read(results: Path) -> list[dict[str, Any]]:
    """All runs; a line that a killed process left unfinished is passed over."""
    runs = []
    for line in results.read_text().splitlines() if results.exists() else []:
        try:
            runs.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"an unreadable line in {results} is left out: {line[:60]}", file=sys.stderr)
    return runs


def origin() -> dict[str, str]:
    """What ran where."""
    import torch
    import transformers

    import torchfoam

    source = Path(torchfoam.__file__).parent
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=source, capture_output=True, text=True)
    cpu = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "torchfoam": told.stdout.strip()}
    return {**versions, "python": platform.python_version(), "cpu": cpu[0] if cpu else platform.processor()}


def sweep(args: argparse.Namespace) -> None:
    """All runs asked for that are not there yet, seed by seed, so that what is finished first is complete in itself."""
    import torch

    torch.set_num_threads(1)
    args.cache.mkdir(parents=True, exist_ok=True)
    steps = args.steps or TASKS[args.model].steps
    bench: Bench | None = None
    for seed, lr, arm in product(args.seeds, args.lrs, args.arms):
        what = dict(zip(KEY, (args.model, arm, lr, args.beta2, args.clip, args.spike, steps, seed)))
        name = "_".join(str(x).replace("/", "-") for x in what.values())
        with open(args.cache / f"{name}.lock", "w") as lock:
            try:  # the system gives the lock back when a process dies
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if any(all(run[key] == x for key, x in what.items()) for run in read(args.results)):
                continue
            bench = bench or Bench.of(args.model, args.cache)
            line = {**what, **bench.run(arm, lr, args.beta2, args.clip, args.spike, steps, seed), **origin()}
            with open(args.results, "a") as file:
                file.write(json.dumps(line) + "\n")
        figures = f"loss {line['loss']:.4f}, accuracy {line['accuracy']:.3f}, {line['seconds']:.0f} s"
        print(f"{args.model} {arm} lr {lr:g} seed {seed}: {figures}", flush=True)


def table(runs: list[dict[str, Any]], margin: float) -> None:
    """Means over seeds beside AdamW's at the same rate, and what the rates do to each arm."""
    for place, group in groupby(sorted(runs, key=place_of), key=place_of):
        arms: dict[str, dict[float, Seeds]] = {}
        for run in group:
            arms.setdefault(run["arm"], {}).setdefault(run["lr"], {})[run["seed"]] = run
        print("\n" + ", ".join(f"{name} {value:g}" if name != "model" else value for name, value in zip(PLACE, place)))
        print(f"\n| lr | arm | n | training | held out | accuracy | minus AdamW (95 %) | p of {margin:g} | state, MB |")
        print("| --- " * 9 + "|")
        for lr in sorted({lr for found in arms.values() for lr in found}):
            adamw = arms.get("adamw", {}).get(lr, {})
            for arm in sorted(arms):
                if lr in arms[arm]:
                    print("| " + " | ".join([f"{lr:g}", arm, *row(arms[arm][lr], adamw, margin)]) + " |")
        several = {arm: found for arm, found in sorted(arms.items()) if len(found) > 1}
        if several:
            print("\n| arm | seeds | held out, by rate | within 1 % of the least |\n" + "| --- " * 4 + "|")
        for arm, found in several.items():
            seeds = set.intersection(*({*x} for x in found.values()))  # no rate may have the easier seeds
            losses = {lr: average({s: found[lr][s] for s in seeds}, "loss") for lr in sorted(found)} if seeds else {}
            near = [f"{lr:g}" for lr, loss in losses.items() if loss <= 1.01 * min(losses.values())]
            told = ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in losses.items())
            print(f"| {arm} | {len(seeds)} | {told} | {', '.join(near)} |")


def place_of(run: Any) -> tuple[Any, ...]:
    return tuple(run[key] for key in PLACE)


def average(runs: Seeds, what: str) -> float:
    return math.fsum(run[what] for run in runs.values()) / len(runs)


def row(mine: Seeds, adamw: Seeds, margin: float) -> list[str]:
    """The cells after the arm's name."""
    from foamlab.runs.stats import equivalence, mean

    figures = [
        f"{average(mine, what):.{digits}f}" for what, digits in (("train_loss", 4), ("loss", 4), ("accuracy", 3))
    ]
    seeds = sorted(mine.keys() & adamw.keys())
    difference = level = ""
    if seeds and mine is not adamw:
        differences = [mine[s]["loss"] - adamw[s]["loss"] for s in seeds]
        d = mean(differences)
        difference = f"{d.mean:+.4f}" + (f" ({d.low:+.4f} to {d.high:+.4f}, n = {d.n})" if d.n > 1 else "")
        level = f"{equivalence(differences, margin).p:.2g}" if d.n > 1 else ""
    return [str(len(mine)), *figures, difference, level, f"{mine[min(mine)]['state_bytes'] / 1e6:.1f}"]


def export(runs: list[dict[str, Any]], path: Path) -> None:
    """The runs as CSV, without their curves."""
    names = [name for name in runs[0] if name != "curve"]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(runs, key=lambda run: [*place_of(run), run["lr"], run["arm"], run["seed"]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TASKS, default="minilm")
    parser.add_argument("--arms", type=lambda x: x.split(","), default=["adamw", "paper", "kappa0.1"])
    parser.add_argument("--lrs", type=lambda x: [float(y) for y in x.split(",")], default=[1e-4])
    parser.add_argument("--seeds", type=lambda x: [int(y) for y in x.split(",")], default=[0])
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--clip", type=float, default=1.0, help="0: none")
    parser.add_argument("--spike", type=int, default=0, help="the step, from 1, that is given a batch of garbage")
    parser.add_argument("--steps", type=int, default=0, help="0: the task's own number")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    cache = Path.home() / ".cache" / "torchfoam-contest"
    parser.add_argument("--cache", type=Path, default=cache, help="where packages are kept")
    parser.add_argument("--results", type=Path, default=cache / "finetune-runs.jsonl")
    parser.add_argument("--table", action="store_true", help="print the table of --results instead")
    parser.add_argument(
        "--margin", type=float, default=0.01, help="nats within which an arm counts as level with AdamW"
    )
    parser.add_argument("--csv", type=Path, help="write the runs of --results there instead")
    args = parser.parse_args()
    if args.table or args.csv:
        runs = read(args.results)
        if not runs:
            raise SystemExit(f"no runs in {args.results}")
        if args.table:
            table(runs, args.margin)
        if args.csv:
            export(runs, args.csv)
        return
    if args.jobs > 1:
        again = [sys.executable, *sys.argv, "--jobs", "1"]
        raise SystemExit(max(job.wait() for job in [subprocess.Popen(again) for _ in range(args.jobs)]))
    sweep(args)


if __name__ == "__main__":
    main()
