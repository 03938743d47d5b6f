"""`train`: from settings, or an old run's checkpoint, to a run that goes; all that can be refused is refused first.

The loop itself is `loop.py`. Nothing is printed here: see `on_event`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import data, machine, models, optimizers, settled
from .. import settings as knobs
from ..config import RULE_OF_OLD, Role, RunConfig, differences, flat, named, to_dict
from ..data.tokenizer import vocabulary
from ..errors import UserError
from ..files import lock
from ..memory import advise
from ..models.language import check_head
from ..signals import stop_requests
from . import checkpoint, restoring
from .loop import OnEvent, Result, Training

__all__ = ["Result", "train"]


def train(config: RunConfig, *, resume: Path | None = None, on_event: OnEvent = lambda event: None) -> Result:
    """Train as `config` says in a new run folder, or go on with an old run.

    Args:
        config: the settings. On resume `out` is ignored, and what makes a run what it is must be as it was.
        resume: a run folder (its newest checkpoint) or one checkpoint folder.
        on_event: is told what happens, on rank 0 (docs/formats.md lists the events).

    Raises:
        UserError: what a user can mend: settings, data, an existing or unwritable folder, a full disk, a checkpoint
            that is damaged or of another run, too many steps in a row that were not finite.
        KeyboardInterrupt: on a second Ctrl-C.
    """
    config = check(config)
    t = config.train
    with ExitStack() as stack:
        world = stack.enter_context(machine.World.join(t.device))
        stack.enter_context(machine.threads(t.threads))
        stack.enter_context(torch.random.fork_rng([world.device] if world.device.type == "cuda" else []))
        emit: OnEvent = (lambda event: None) if world.rank else on_event
        if t.batch % world.size:
            raise UserError(f"train.batch must be a multiple of the {world.size} processes, got {t.batch}")
        name, remark = machine.choose_precision(t.precision, world.device)
        if remark:
            emit({"kind": "note", "message": remark})
        config = replace(config, optimizer=optimizers.resolve(config.optimizer), train=replace(t, precision=name))
        saved: dict[str, Any] = {}
        if resume is not None:
            config, folder, source, saved = old(config, resume, emit)
            if saved["step"] == t.steps and (over := Result.of(folder, t.steps)):
                more = f"to go on, give --train.steps above {t.steps}"
                emit({"kind": "note", "message": f"{folder} is finished, nothing is changed; {more}"})
                return over
            if not world.rank:  # only looked at, before the text is read: the recorder takes it for good
                lock(folder).release()
        else:
            folder = Path(config.out or "runs")
            if config.out and in_use(folder):
                raise UserError(f"{folder} exists already: choose another --out, or go on with --resume {folder}")
            checkpoint.check_room(folder, 0)
            config = settle(config, emit)
        rehearse(config, world.device, world.size)
        if t.steps:  # what cannot fit with the smallest vocabulary it may get need not read its text
            advise.preflight(config, world.device, vocabulary(config.data.tokenizer)[0], world.size)
        with world.first():  # one process builds the token cache, the others read it
            corpus = data.prepare(config.data, t.seed, lambda event: emit({**event, "kind": "prepare"}))
        if t.steps:
            corpus.batch("train", 0, t.batch)  # a corpus smaller than a batch is refused before anything is written
        if resume is not None and (saved["data"], saved.get("digest", corpus.digest)) != (corpus.key, corpus.digest):
            raise UserError(f"{source} was trained on other text or tokens than {config.data.name} has now: start anew")
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        place = (config, world.device, corpus.vocab_size, world.size)
        if remark := advise.preflight(*place) if t.steps else "":
            emit({"kind": "note", "message": remark})
        try:
            model = models.build(config.model, corpus.vocab_size, config.data.sequence, world.device, dtype, t.seed)
            if t.chunked_loss:
                check_head(model)
            run = Training(config, world, corpus, model, optimizers.build(config.optimizer, model), emit)
            if resume is not None:
                run.restore(source, saved)
                saved.clear()  # it holds a second optimizer state
            with stop_requests() as asked:
                run.open(folder, (lambda: folder) if resume is not None else (lambda: new_folder(config)))
                return run.go(asked)
        except (MemoryError, RuntimeError) as e:
            if not machine.out_of_memory(e):
                raise
            raise UserError(advise.after(*place)) from e


def settle(config: RunConfig, emit: OnEvent, version: int = data.VERSION) -> RunConfig:
    """The settings with nothing about the data left open (`data.settle`)."""
    config, remark = data.settle(config, version)
    if remark:
        emit({"kind": "prepare", "stage": "warning", "message": remark})
    return config


def old(config: RunConfig, resume: Path, emit: OnEvent) -> tuple[RunConfig, Path, Path, dict[str, Any]]:
    """Of a run to go on with: its settings, folder and checkpoint, and what that holds."""
    folder, source = checkpoint.find(resume)
    saved = checkpoint.load(source)
    was = restoring.check(saved, source / checkpoint.TRAINING)
    kept, options = was.setdefault("data", {}), flat(was, 2).get("optimizer.options")
    if isinstance(kept, dict) and "version" not in kept:  # of 0.1, which named neither this nor its rule
        kept["version"] = 1
        if isinstance(options, dict):
            now = config.optimizer.options
            options |= {key: x for key, x in RULE_OF_OLD.items() if key in now and key not in options}
    config = settle(config, emit, flat(was, 2).get("data.version", 1))
    for message in changes(was, to_dict(config), source):
        emit({"kind": "note", "message": message})
    return config, folder, source, saved


def rehearse(config: RunConfig, device: torch.device, processes: int = 1) -> None:
    """Build model and optimizer without memory: what they refuse is told before any text is read.

    The vocabulary is not known yet. It is taken to be the smallest, so that no budget of state is refused that may do.

    Raises:
        UserError: what the two raise.
    """
    model = models.build(config.model, 1, config.data.sequence, "meta")
    settled.check_optimizer(config.train, optimizers.rehearse(config.optimizer, model, device), processes)


def check(config: RunConfig) -> RunConfig:
    """The settings as their types have them. Raises UserError for what makes no sense, naming the value."""
    config = knobs.checked(config)
    settled.check(config.train)
    return config


def changes(old: dict[str, Any], new: dict[str, Any], source: Path) -> Iterable[str]:
    """Remarks on settings that differ from those of the checkpoint `source`; UserError if it is another run's."""
    changed = differences(flat(old, 2), flat(new, 2))
    for key, (was, now) in changed.items():
        if key in named(Role.FIXED):
            raise UserError(f"{source} was made with {key} {was!r}, this run has {now!r}: "
                            "resume with the same, or start a new run")  # fmt: skip
    for key, (was, now) in changed.items():
        if key not in named(Role.FREE):
            yield f"{key} was {was!r}, is now {now!r}: the rest of the run differs from what it would be"


def in_use(folder: Path) -> bool:
    """Whether something is there already; an empty folder, which a job script may have made, is none."""
    return folder.exists() and not (folder.is_dir() and os.access(folder, os.R_OK) and not os.listdir(folder))


def new_folder(config: RunConfig) -> Path:
    """Make the run folder: `out`, or runs/MODEL-OPTIMIZER-N with the next free N."""
    name = f"{Path(config.model.name).name}-{config.optimizer.name}"
    folder = Path(config.out)
    while True:
        if not config.out:
            taken = [
                int(m[1]) for p in Path("runs").glob("*") if (m := re.fullmatch(re.escape(name) + r"-(\d+)", p.name))
            ]
            folder = Path("runs") / f"{name}-{max(taken, default=0) + 1}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if config.out and not in_use(folder):
                return folder  # the recorder's lock keeps a second process out of it
            if config.out:
                raise UserError(f"{folder} exists already: choose another --out") from None
        except OSError as e:
            raise UserError(f"cannot make the run folder {folder}: {e.strerror}; choose another --out") from None
