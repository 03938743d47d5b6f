"""`compare` and `ablate`: many runs over the same model, tokens and batches, each in a process of its own.

What is to be run `design` says, which runs come next `search`; this room starts and stops them. It prints nothing: see
`on_event`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from .. import data, machine, optimizers
from ..config import RunConfig, differences, flat, to_dict
from ..errors import UserError
from ..files import LOCK, await_release, lock, make_folder
from ..runs.provenance import cores, now
from ..runs.stats import MARGIN
from ..settled import settle
from ..signals import STOPS, stop_requests
from .folder import Outcomes, newest, outcome, read, same_library, write
from .model import Contest, Trial
from .results import standings
from .search import wanted

OnEvent = Callable[[dict[str, Any]], None]
FLAGS = {
    "--margin": "margin", "--seeds": "seeds", "--finalists": "finalists", "--stop_factor or --stop_at": "rule",
    "--studies": "studies", "--optimizers, --studies, --lr or --scale": "contestants",
}  # fmt: skip
POLL = 0.3  # seconds between looks at the processes


def start(contest: Contest, folder: Path, jobs: int = 0, on_event: OnEvent = lambda event: None) -> dict[str, Any]:
    """Begin a contest in a new folder and run it; returns what `contest.json` holds in the end.

    Raises:
        UserError: the folder exists and holds more than a contest killed at its beginning, or what `resume` raises.
    """
    _check_free(folder)
    _try_all(contest)
    make_folder(folder)
    held = lock(folder)
    try:
        _check_free(folder)  # again: another process may have begun, and even ended, a contest there meanwhile
        # so that --resume finds the settings where it finds those of a run
        (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(contest.config), sort_keys=False), encoding="utf-8")
        # nothing runs yet: should the text not be there, --resume goes on from here
        write(folder, {**contest.as_dict(), "status": "interrupted", "command": shlex.join(sys.argv), "started": now()})
        return _finish(folder, jobs, on_event)
    finally:
        held.release()


def _check_free(folder: Path) -> None:
    """Raise UserError for a folder that holds more than what a contest killed at its beginning leaves."""
    if folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= {"config.yaml", LOCK}):
        raise UserError(f"{folder} exists already: choose another --out, or resume it with --resume {folder}")


def go_on(
    config: RunConfig,
    folder: Path,
    jobs: int = 0,
    on_event: OnEvent = lambda event: None,
    asked: Contest | None = None,
) -> dict[str, Any]:
    """`resume` if the settings given are still those of the contest; UserError names one that is not.

    `asked`: what the flags ask for, where any is given beside --resume: a contest keeps its own.
    """
    kept = {"margin": MARGIN, **read(folder)}
    wish = json.loads(json.dumps(asked.as_dict())) if asked else kept
    for flags, key in FLAGS.items():
        if _bare(kept[key]) != _bare(wish[key]):
            raise UserError(
                f"{folder} was begun with another {flags}: beside --resume give its flags all as they were, or none"
            )
    for key, (given, was) in differences(flat(to_dict(config), 2), flat(kept["settings"], 2)).items():
        raise UserError(f"{folder} was begun with {key} {was!r}, not {given!r}: start a new contest for it")
    return resume(folder, jobs, on_event)


def _bare(value: Any) -> Any:
    """Contestants without their notes, which another version may word in another way."""
    return [{**x, "note": ""} if isinstance(x, dict) else x for x in value] if isinstance(value, list) else value


def resume(folder: Path, jobs: int = 0, on_event: OnEvent = lambda event: None) -> dict[str, Any]:
    """Run what is left of a contest: finished runs are kept, interrupted ones go on from their checkpoint.

    Raises:
        UserError: no contest there, another process runs it, or a run failed for a reason that a user can fix.
    """
    _resolve(Contest.from_dict(read(folder)))  # what is no contest is refused before a lock is left there
    held = lock(folder)
    try:
        return _finish(folder, jobs, on_event)
    finally:
        held.release()


def _finish(folder: Path, jobs: int, on_event: OnEvent) -> dict[str, Any]:
    """`resume`, by the process that holds the folder's lock: nobody else writes what is read here."""
    kept = read(folder)
    contest = Contest.from_dict(kept)
    _resolve(contest)
    if kept["status"] != "done":
        same_library(folder, [arm.label for arm in contest.arms if optimizers.ours(arm.optimizer)])
    _, warning = data.settle(contest.config)
    if warning:
        on_event({"kind": "prepare", "stage": "warning", "message": warning})
    corpus = data.prepare(contest.config.data, contest.seeds[0], lambda e: on_event({**e, "kind": "prepare"}))
    text = corpus.key
    if kept.get("data", text) != text:
        raise UserError(f"{contest.config.data.name} has other text than when {folder} was begun: start anew")
    kept = {**kept, "status": "running", "data": text}
    write(folder, kept)
    for path in folder.glob("*/*/run.json"):
        if not outcome(path.parent).over:
            await_release(path.parent)
        if outcome(path.parent).over:  # a kill may have come before this was done
            tidy(path.parent)
    runner = Runner(contest, folder, text, jobs, on_event)
    try:
        finished = runner.run()
    finally:
        kept = {**kept, "status": "interrupted", "ended": now(), **standings(folder, kept)}
        write(folder, kept)
    if finished:
        kept["status"] = "done"
        write(folder, kept)
    return kept


def _resolve(contest: Contest) -> None:
    """Raise UserError for an optimizer, an option or a rate that cannot be."""
    for arm in contest.arms:
        for key, values in {"lr": [arm.start["lr"]], **arm.tune}.items():
            for x in values:
                optimizers.resolve(arm.at({**arm.start, key: x}, contest.config.optimizer))


def _try_all(contest: Contest) -> None:
    """Rehearse every arm, so that what is missing or makes no sense is refused before any text is read."""
    _resolve(contest)
    c = contest.config
    device = machine.choose_device(c.train.device)
    for arm in contest.arms:
        settle(replace(c, optimizer=arm.at(arm.start, c.optimizer)), device)


class Runner:
    """Where trials run: a number of slots, each with a process at most, and with a GPU of its own if there are any."""

    def __init__(self, contest: Contest, folder: Path, text: str, jobs: int, on_event: OnEvent) -> None:
        self.contest, self.folder, self.text, self.emit = contest, folder, text, on_event
        self.outcomes = Outcomes(folder)
        self.gpus = _gpus(contest.config.train.device)
        threads = contest.config.train.threads
        jobs = jobs or len(self.gpus) or max(cores() // threads, 1)
        self.free = list(range(jobs))
        self.running: dict[str, tuple[subprocess.Popen[bytes], Trial, int]] = {}
        self.told = 0.0

    def run(self) -> bool:
        """Run all that is wanted (True), or until asked to stop (False)."""
        with stop_requests() as asked:
            try:
                while True:
                    if asked():
                        self.stop()
                        return False
                    ended = [name for name, (process, _, _) in self.running.items() if process.poll() is not None]
                    over = [self.reap(name) for name in ended]
                    if not all(over):
                        self.stop()
                        return False
                    todo, found = wanted(self.contest.arms, self.contest.seeds, self.contest.finalists, self.outcomes)
                    todo = [trial for trial in todo if trial.name not in self.running]
                    while todo and self.free:
                        self.launch(todo.pop(0))
                    self.tell(len(todo), {label: f.point for label, f in found.items() if not f.todo}, bool(ended))
                    if not self.running:
                        return True
                    time.sleep(POLL)
            except BaseException:
                self.stop(kill=True)
                raise

    def launch(self, trial: Trial) -> None:
        """Start a trial, or go on with one that was interrupted and can be resumed."""
        folder, slot = self.folder / trial.name, self.free.pop(0)
        again = folder.exists() and optimizers.OPTIMIZERS[trial.arm.optimizer].resumable
        again = again and any((folder / "checkpoints").glob("step-*"))
        if folder.exists() and not again:
            shutil.rmtree(folder)
        folder.parent.mkdir(exist_ok=True)
        rule = asdict(self.contest.rule) if trial.stage != "seeds" and self.contest.rule.step else None
        orders = {"config": to_dict(self.config(trial)), "resume": again, "rule": rule, "data": self.text}
        self.running[trial.name] = (self.spawn(orders, slot, self.folder / f"{trial.name}.err"), trial, slot)
        self.emit({"kind": "launch", "trial": trial.name, "resumed": again, "slot": slot})

    def spawn(self, orders: dict[str, Any], slot: int, log: Path) -> subprocess.Popen[bytes]:
        """A process that does one trial; what it says of errors goes to `log`."""
        env = {**os.environ, "OMP_NUM_THREADS": str(self.contest.config.train.threads)}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "foamlab.contest.trial"],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, env=env,
                start_new_session=True,  # Ctrl-C is for this process alone, which lets the others save
            )  # fmt: skip
        assert process.stdin
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps({**orders, "parent": os.getpid()}).encode())
        return process

    def config(self, trial: Trial) -> RunConfig:
        """The settings of a trial: the contest's, with its own optimizer, point and seed."""
        c = self.contest.config
        optimizer = trial.arm.at(trial.point, c.optimizer)
        seeded = replace(c.train, seed=trial.seed, device="cuda" if self.gpus else c.train.device)
        return replace(c, optimizer=optimizer, train=seeded, out=str(self.folder / trial.name))

    def reap(self, name: str) -> bool:
        """Take account of a trial whose process has ended; False if it was asked to stop by someone else.

        Raises:
            UserError: it failed, but did not diverge.
        """
        process, trial, slot = self.running.pop(name)
        self.free.append(slot)
        self.outcomes.forget(name)
        fate = self.outcomes[name]
        log = self.folder / f"{name}.err"
        said = log.read_text(encoding="utf-8", errors="replace").strip()
        if not fate.over and process.returncode not in (0, 130, *(-number for number in STOPS)):
            raise UserError(
                f"{name} failed: {said.splitlines()[-1] if said else f'exit code {process.returncode}'}; "
                f"its output is in {log}; correct it and resume with --resume {self.folder}"
            )
        log.unlink()
        if fate.over:
            tidy(self.folder / name)
            self.emit({"kind": "ended", "trial": name, "arm": trial.arm.label, **asdict(fate)})
        return fate.over

    def stop(self, kill: bool = False) -> None:
        """Let all trials save and end; after `kill` they get ten seconds."""
        for process, _, _ in self.running.values():
            process.terminate()
        for name in list(self.running):
            process = self.running[name][0]
            try:
                process.wait(10 if kill else None)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            del self.running[name]  # not before: a second Ctrl-C may end the wait
            self.outcomes.forget(name)
            (self.folder / f"{name}.err").unlink(missing_ok=True)

    def tell(self, waiting: int, settled: dict[str, Any], at_once: bool) -> None:
        """What runs and how it stands, about once a second; contest.json too whenever a trial has ended."""
        if at_once:
            kept = read(self.folder)
            write(self.folder, {**kept, "status": "running", **standings(self.folder, kept)})
        if at_once or time.monotonic() - self.told > 1:
            self.told = time.monotonic()
            running = [{"trial": name, **newest(self.folder / name)} for name in self.running]
            state = {"running": running, "waiting": waiting, "over": sum(o.over for o in self.outcomes.values())}
            self.emit({"kind": "state", **state, "settled": settled, "steps": self.contest.config.train.steps})


def tidy(run: Path) -> None:
    """Of a trial that is over, what is left to read is its record."""
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    run.with_name(f"{run.name}.err").unlink(missing_ok=True)


def _gpus(device: str) -> list[str]:
    """Names of the GPUs to share out, as CUDA_VISIBLE_DEVICES has them; none on a CPU, one for a named device."""
    if machine.choose_device(device).type != "cuda":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = visible.split(",") if visible else [str(k) for k in range(torch.cuda.device_count())]
    return [every[int(device.partition(":")[2])]] if ":" in device else every
