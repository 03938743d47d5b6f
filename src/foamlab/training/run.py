"""`train`: from settings, or an old run's checkpoint, to a run that goes; all that can be refused is refused first.

The loop itself is `loop.py`. Nothing is printed here: see `on_event`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import data, machine, models, optimizers
from ..config import RULE_OF_OLD, Role, RunConfig, differences, flat, named, to_dict, with_newer
from ..errors import UserError
from ..files import LOCK, lock
from ..memory import advise
from ..models.language import check_head
from ..runs.tensorboard import listening
from ..settled import Settled, check, settle
from ..signals import stop_requests
from ..tasks import examples
from ..tasks.examples import Examples
from . import checkpoint, restoring
from .loop import OnEvent, Result, Training

__all__ = ["Result", "train"]


def train(config: RunConfig, *, resume: Path | None = None, on_event: OnEvent = lambda event: None) -> Result:
    """Train as `config` says in a new run folder, or go on with an old run.

    Args:
        config: the settings. On resume `out` is ignored, and what makes a run what it is must be as it was.
        resume: a run folder (its newest checkpoint) or one checkpoint folder.
        on_event: is called with what happens, on rank 0 (docs/formats.md lists the events).

    Raises:
        UserError: what a user can fix: settings, data, an existing or unwritable folder, a full disk, a checkpoint
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
        if t.tensorboard and not world.rank:
            emit = stack.enter_context(listening(emit))
        if resume is None:
            saved, source, folder = None, None, Path(config.out or "runs")
            if config.out and in_use(folder):
                raise UserError(f"{folder} exists already: choose another --out, or resume it with --resume {folder}")
            checkpoint.check_room(folder, 0)
            run = settle(config, world.device, world.size)
        else:
            folder, source = checkpoint.find(resume)
            saved, was = old(source, config)
            if t.epochs and flat(was, 2).get("train.epochs") == t.epochs:  # which came to these steps
                t = replace(t, steps=flat(was, 2)["train.steps"])
                config = replace(config, train=t)
            run = settle(config, world.device, world.size, flat(was, 2).get("data.version", 1))
        tell(run, emit)
        if saved is not None and source is not None:
            for message in changes(was, to_dict(run.config), source):
                emit({"kind": "note", "message": message})
            if saved["step"] == t.steps and (over := Result.of(folder, t.steps)):
                more = f"to train on, give --train.steps above {t.steps}"
                emit({"kind": "note", "message": f"{folder} is finished, nothing is changed; {more}"})
                return over
            if not world.rank:  # only looked at, before the text is read: the recorder takes it for good
                lock(folder).release()
        run, corpus = with_text(run, world, emit)
        if saved and (saved["data"], saved.get("digest", corpus.digest)) != (corpus.key, corpus.digest):
            raise UserError(f"{source} was trained on other text or tokens than {config.data.name} has now: start anew")
        try:
            training = Training(run.config, world, corpus, *real(run, t.seed), emit)
            if saved is not None and source is not None:
                training.restore(source, saved)
                saved.clear()  # it holds a second optimizer state
            with stop_requests() as asked:
                training.open(folder, (lambda: folder) if source is not None else (lambda: new_folder(run.config)))
                return training.go(asked)
        except (MemoryError, RuntimeError) as e:
            if not machine.out_of_memory(e):
                raise
            raise UserError(advise.after(run)) from e


def tell(run: Settled, emit: OnEvent) -> None:
    """What the user should know of how a run was settled."""
    if run.note:
        emit({"kind": "note", "message": run.note})
    if run.warning:
        emit({"kind": "prepare", "stage": "warning", "message": run.warning})


def with_text(run: Settled, world: machine.World, emit: OnEvent) -> tuple[Settled, data.Corpus | Examples]:
    """The run with its text, from which its vocabulary, head and steps are known.

    Raises:
        UserError: no text, too little of it, or a run that does not fit the memory. What cannot fit with the smallest
            vocabulary it may get need not read its text.
    """
    t, task = run.config.train, bool(run.config.task.name)
    trains = bool(t.steps or t.epochs)
    corpus: data.Corpus | Examples
    said = advise.preflight(run) if trains and not task else ""
    if task:
        corpus = examples.prepare(run.config, lambda event: emit({**event, "kind": "prepare"}))
    else:
        with world.first():  # one process builds the token cache, the others read it
            corpus = data.prepare(run.config.data, t.seed, lambda event: emit({**event, "kind": "prepare"}))
    now = known(run, corpus)
    if now.config.train.steps:
        corpus.batch("train", 0, t.batch)  # a corpus smaller than a batch is refused before anything is written
    if trains and (task or now is not run):
        said = advise.preflight(now.rows_of(corpus.longest) if isinstance(corpus, Examples) else now)
    if said:
        emit({"kind": "note", "message": said})
    return now, corpus


def known(run: Settled, corpus: data.Corpus | Examples) -> Settled:
    """The run with the vocabulary, head and steps that its text gives."""
    t = run.config.train
    run = run.knowing(corpus.vocab_size, corpus.head if isinstance(corpus, Examples) else None)
    if not t.epochs:
        return run
    t = replace(t, steps=math.ceil(t.epochs * corpus.rows("train") / t.batch))
    return replace(run, config=replace(run.config, train=t))


def real(run: Settled, seed: int) -> tuple[nn.Module, Optimizer]:
    """The run's model and optimizer on its device."""
    c = run.config
    model = models.build(c.model, run.vocabulary, c.data.sequence, run.device, run.dtype, seed, None, run.head)
    if c.train.chunked_loss:
        check_head(model)
    return model, optimizers.build(c.optimizer, model)


def old(source: Path, config: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint holds, and the settings it was saved with, those of 0.1 with what it left unnamed."""
    saved = checkpoint.load(source)
    was = restoring.check(saved, source / checkpoint.TRAINING)
    kept, options = was.setdefault("data", {}), flat(was, 2).get("optimizer.options")
    if isinstance(kept, dict) and "version" not in kept:  # of 0.1, which named neither this nor its rule
        kept["version"] = 1
        if isinstance(options, dict):
            now = config.optimizer.options
            options |= {key: x for key, x in RULE_OF_OLD.items() if key in now and key not in options}
    return saved, was


def changes(old: dict[str, Any], new: dict[str, Any], source: Path) -> Iterable[str]:
    """Remarks on settings that differ from those of the checkpoint `source`; UserError if it is another run's."""
    changed = differences(with_newer(flat(old, 2)), flat(new, 2))
    for key, (was, now) in changed.items():
        if key in named(Role.FIXED):
            raise UserError(f"{source} was made with {key} {was!r}, this run has {now!r}: "
                            "resume with the same, or start a new run")  # fmt: skip
    for key, (was, now) in changed.items():
        if key not in named(Role.FREE):
            yield f"{key} was {was!r}, is now {now!r}: the rest of the run differs from what it would be"


def in_use(folder: Path) -> bool:
    """Whether something is there already; an empty folder, which a job script may have made, is none."""
    empty = folder.is_dir() and os.access(folder, os.R_OK) and set(os.listdir(folder)) <= {LOCK}
    return folder.exists() and not empty


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
