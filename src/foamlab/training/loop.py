"""The loop itself: steps, evaluations, checkpoints and records of one run, up to its end.

Everything random is a pure function of (seed, step): initial weights, batch order, schedule, and the generators, which
are seeded anew in each step. So a checkpoint needs no random state, and a resumed run ends with the bits of one that
was never stopped (on CPUs; some of torch's CUDA kernels are not repeatable). Nothing is printed here.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from .. import machine, optimizers
from ..config import RunConfig, to_dict
from ..errors import Diverged, UserError
from ..files import write_atomically, writing
from ..models.language import sample
from ..runs.provenance import circumstances
from ..runs.record import Recorder, Result
from ..runs.summary import perplexity
from ..tasks.examples import Examples
from ..tasks.objective import Inputs, mapped, objective
from . import checkpoint, evaluation, restoring
from .step import Batch, Step, schedule

OnEvent = Callable[[dict[str, Any]], None]

# a run's place, as a checkpoint keeps it beside weights and optimizer
PLACE = ("step", "tokens", "seconds", "skipped", "in_row", "loss")


class Training:
    """A run in progress: model, optimizer, place in the data, record. `train` makes one and lets it `go`."""

    def __init__(
        self,
        config: RunConfig,
        world: machine.World,
        corpus: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        emit: OnEvent,
    ) -> None:
        self.config, self.world, self.corpus, self.emit = config, world, corpus, emit
        self.model, self.optimizer = model, optimizer
        self.take = Step(config.train, model, optimizer, world, objective(config.task, config.train))
        self.batch: Batch | None = None  # of the next step; None after the last
        self.step = self.tokens = self.skipped = self.in_row = 0
        self.seconds = 0.0
        self.good = (0, 0, 0.0, 0)  # step, tokens, seconds, skipped after the last step that was not skipped
        self.source: Path | None = None  # the checkpoint it goes on from
        self.kept: int | None = None  # step of the newest checkpoint
        self.resumable = True  # whether its checkpoints hold the optimizer's state
        self.loss: float | None = None  # of the newest evaluation
        self.best: dict[str, Any] | None = None  # of a task's evaluations: step, merit, loss and metrics
        self.recorder: Recorder | None = None
        self.memory: machine.Memory | None = None  # from the first step on

    # ------------------------------------------------------------------ beginning

    def restore(self, source: Path, saved: dict[str, Any]) -> None:
        """Become the run that wrote the checkpoint `source`."""
        if saved["optimizer"] is None:
            raise UserError(f"{source} cannot be resumed: {saved['remark']}")
        if saved["step"] > self.config.train.steps:
            raise UserError(f"{source} is past train.steps {self.config.train.steps}: give at least {saved['step']}")
        restoring.check_state(saved["optimizer"], self.optimizer, source / checkpoint.TRAINING)
        checkpoint.load_weights(source, self.model)
        own = [{k: g[k] for k in restoring.TUNABLE if k in g} for g in self.optimizer.param_groups]
        try:
            self.optimizer.load_state_dict(saved["optimizer"])
        except Exception as e:  # optimizers fail in any way on a state that they did not save
            raise UserError(f"{source} does not fit optimizer {self.config.optimizer.name}: {e!r}") from e
        for group, settings in zip(self.optimizer.param_groups, own):
            group.update(settings)
        for name in PLACE:
            setattr(self, name, saved[name])
        self.best = saved.get("best")
        self.kept, self.source = self.step, source
        self.good = (self.step, self.tokens, self.seconds, self.skipped)

    def open(self, folder: Path, make: Callable[[], Path]) -> None:
        """Begin the record in the folder that `make` gives; that of a resumed run is first cut back to its checkpoint.

        Raises UserError before anything is written if checkpoints would not fit.
        """
        t = self.config.train
        if self.world.rank == 0:
            size, left = self.bytes(), t.steps - self.step
            best = isinstance(self.corpus, Examples)  # of which one more stays, and an evaluation may save
            often = [n for n in (t.checkpoint_every, t.eval_every * best) if n]
            saves = (left > 0) + sum(left // n for n in often)
            need = size["weights"] + (size["state"] or 2 * size["weights"])  # most make their state in the first step
            have = len(checkpoint.found(folder)) if self.source else 0
            checkpoint.check_room(folder, need * max(min(t.keep + 1 + best, saves + have) - have, saves > 0))
            folder, resume = make(), self.step if self.source else None
            self.recorder = Recorder(folder, resume=resume)
            if self.source:
                checkpoint.set_aside(self.source)
            self.describe(self.recorder)
        self.folder = self.world.share(folder)

    def describe(self, recorder: Recorder) -> None:
        """Write `config.yaml` and the first `run.json`, and tell of the start."""
        c, device = self.config, self.world.device
        recorder.settings(yaml.safe_dump(to_dict(c), sort_keys=False))
        hardware: dict[str, Any] = {"device": str(device), "processes": self.world.size}
        if device.type == "cuda":
            hardware["gpu"] = torch.cuda.get_device_name(device)
        about = {
            "model": {"name": c.model.name, "parameters": sum(p.numel() for p in self.model.parameters())},
            "optimizer": to_dict(c)["optimizer"],
            "bytes": self.bytes(),
            "data": self.corpus.key,
            "corpus": self.corpus.describe(),
        }
        recorder.describe(status="running", **circumstances(recorder.info, self.step, hardware), **about)
        place: dict[str, Any] = {"folder": str(recorder.folder), "step": self.step, "steps": c.train.steps}
        rate = {"tokens_per_step": c.train.batch * self.corpus.tokens_per_row, "hardware": recorder.info["hardware"]}
        self.emit({"kind": "start", **place, **rate, **about})

    # ------------------------------------------------------------------ the loop

    def go(self, asked: Callable[[], bool]) -> Result:
        """Take the remaining steps, until `asked` to stop, and close the record however that ends."""
        status = "failed"
        fields: dict[str, Any] = {}
        try:
            self.memory = machine.Memory(self.world.device)
            finished = self.loop(asked)
            result = self.result(finished)
            status, fields = result.status, {"result": result.summary(), "bytes": result.bytes}
            fields["resume"] = "" if finished else self.again
        except KeyboardInterrupt:
            status, fields = "interrupted", {"resume": self.again}
            raise
        except Exception as e:
            fields = {"error": str(e), "reason": "diverged" if isinstance(e, Diverged) else "error"}
            raise
        finally:
            if self.recorder:
                self.recorder.close(status, **fields)
        place = {"folder": str(self.folder), "sample": result.sample, "tested": result.tested}
        self.emit({"kind": "end", "status": status, **place, **fields})
        return result

    @property
    def again(self) -> str:
        """The command that goes on from the newest checkpoint; empty if there is none, or none that would."""
        return shlex.join(["foamlab", "train", "--resume", str(self.folder)]) if self.kept and self.resumable else ""

    def loop(self, asked: Callable[[], bool]) -> bool:
        """Steps, evaluations and checkpoints to the last step (True), or until asked to stop (False)."""
        t, stop, first = self.config.train, False, self.step + 1
        if t.steps == 0:
            self.evaluate()
        self.fetch(self.step)
        while self.batch and not stop:
            stop = self.advance(self.batch, asked)
            if self.step == first:
                self.measured()
            last = self.step == t.steps
            if last or (t.eval_every and self.step % t.eval_every == 0):
                self.evaluate()
            if last or stop or (t.checkpoint_every and self.step % t.checkpoint_every == 0):
                self.save()
        return self.step >= t.steps

    def advance(self, batch: Batch, asked: Callable[[], bool]) -> bool:
        """Take one step, or skip it, while the next batch is fetched; returns whether to stop."""
        begin = time.perf_counter()
        self.seed(self.step)
        factor = schedule(self.step, self.config.train)
        self.take.rate(factor)  # with gradient release, weights move in the backward pass
        taken = self.take(batch, asked, lambda: self.fetch(self.step + 1), self.residuals)
        took = time.perf_counter() - begin
        self.step, self.tokens, self.seconds = self.step + 1, self.tokens + taken.tokens, self.seconds + took
        if taken.skipped:
            self.skip(taken.skipped)
        else:
            self.in_row, self.good = 0, (self.step, self.tokens, self.seconds, self.skipped)
            line = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 4), "loss": taken.loss}
            line |= {"lr": factor * (self.config.optimizer.lr or 0.0), "grad_norm": taken.norm}
            self.log("train", {**line, "tokens_per_second": round(taken.tokens / took, 1)})
        return taken.stop

    def residuals(self) -> None:
        """Record what the gradients at hand leave out, if it is time."""
        every = self.config.train.residual_every
        if every and (self.step + 1) % every == 0:
            values = self.optimizer.residual_ratio()  # type: ignore[attr-defined]
            self.log("residual", {"step": self.step + 1, "values": values})

    def skip(self, why: str) -> None:
        """Count a step that was left out; give up after `patience` in a row, with the last good state saved."""
        self.skipped, self.in_row = self.skipped + 1, self.in_row + 1
        self.log("skip", {"step": self.step, "why": why})
        if self.in_row < self.config.train.patience:
            return
        count, self.in_row = self.in_row, 0
        self.step, self.tokens, self.seconds, self.skipped = self.good
        if self.step > (self.kept or 0) and all(bool(p.isfinite().all()) for p in self.take.parameters):
            self.save()
        how = f", then resume from step {self.kept} with --resume {self.folder}" if self.again else ""
        raise Diverged(
            f"stopped: {count} steps in a row after step {self.step} could not be taken ({why}); "
            f"lower --optimizer.lr or --train.clip, raise --train.warmup, or use --train.precision float32{how}"
        )

    def evaluate(self) -> None:
        """Mean loss, and the metrics of a task, over the validation split: the same rows each time."""
        if (found := evaluation.validate(self)) is None:
            return
        self.loss, metrics = found
        line: dict[str, Any] = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 4)}
        if isinstance(self.corpus, Examples):
            self.log("eval", {**line, "loss": self.loss, "values": metrics})
            merit = self.corpus.merit(self.loss, metrics)
            if self.best is None or merit > self.best["merit"]:
                self.best = {"step": self.step, "merit": merit, "loss": self.loss, **metrics}
                self.save()
        else:
            self.log("eval", {**line, "loss": self.loss, "perplexity": perplexity(self.loss)})

    # ------------------------------------------------------------------ data

    def fetch(self, step: int) -> None:
        """Make this process' share of a step's batch the next one; None after the last step."""
        last = step >= self.config.train.steps
        self.batch = None if last else self.take.batch(*self.rows("train", step))

    def rows(self, split: str, step: int, most: int | None = None) -> tuple[Inputs, Tensor]:
        """(inputs, labels) of this process' share of a batch (at most `most` rows), on the device."""
        device, cut = self.world.device, slice(None if most is None else max(most, 0))

        def placed(x: Any) -> Tensor:
            here = torch.from_numpy(x)[cut]
            return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here

        inputs, labels = self.corpus.batch(split, step, self.config.train.batch, self.world.rank, self.world.size)
        return mapped(placed, inputs), placed(labels)

    def seed(self, step: int) -> None:
        """Dropout and the like depend on seed, step and process alone."""
        value = (self.config.train.seed * 1_000_003 + step * self.world.size + self.world.rank) % 2**63
        torch.default_generator.manual_seed(value)
        if self.world.device.type == "cuda":
            torch.cuda.default_generators[self.world.device.index].manual_seed(value)

    # ------------------------------------------------------------------ keeping

    def log(self, kind: str, line: dict[str, Any]) -> None:
        line = {"kind": kind, **line}
        if self.recorder:
            self.recorder.write(line)
        self.emit(line)

    def bytes(self) -> dict[str, Any]:
        """Bytes of weights, gradients and optimizer state; the peak from the first step on, and what was held before.

        Of a run in parts the peak is the highest of them.
        """
        size: dict[str, Any] = {
            "weights": checkpoint.nbytes(list(self.model.parameters())),
            "gradients": checkpoint.nbytes(self.take.parameters),
            "state": optimizers.state_bytes(self.optimizer),
        }
        was = self.recorder.peak if self.recorder else {}
        if not self.memory:
            return size | was
        now = {"peak": self.memory.peak(), "peak_of": self.memory.of, "before": self.memory.before}
        return size | (was if was.get("peak", 0) > now["peak"] and was["peak_of"] == now["peak_of"] else now)

    def measured(self) -> None:
        """Tell the bytes again: most optimizers make their state in the first step."""
        if self.recorder:
            self.recorder.describe(bytes=self.bytes())
            self.emit({"kind": "bytes", "bytes": self.recorder.info["bytes"]})

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self.kept == self.step:
            return
        self.kept = self.step
        if self.recorder is None:
            return
        begin, remark = time.perf_counter(), ""
        state: dict[str, Any] | None = self.optimizer.state_dict()
        if not checkpoint.storable(state):
            state, remark = (
                None,
                f"{self.config.optimizer.name} keeps its state as objects that cannot be stored safely",
            )
            self.resumable = False
            self.emit({"kind": "note", "message": f"the checkpoint will not resume: {remark}"})
        training = {name: getattr(self, name) for name in PLACE} | {"optimizer": state, "remark": remark}
        training |= {"best": self.best} if self.best else {}
        training |= {"config": json.dumps(to_dict(self.config)), "data": self.corpus.key, "digest": self.corpus.digest}
        self.recorder.sync()
        keep, tokenizer = self.config.train.keep, self.corpus.tokenizer
        spare = self.best["step"] if self.best else None
        path = checkpoint.save(self.folder, self.step, self.model, tokenizer, training, keep, spare)
        self.emit({"kind": "save", "step": self.step, "path": str(path), "seconds": time.perf_counter() - begin})

    def result(self, finished: bool) -> Result:
        """The end of the run; a finished one writes a sample, or tests its best checkpoint."""
        size, text, prompt = self.bytes(), "", self.config.train.sample
        tested: dict[str, Any] = {}
        if isinstance(self.corpus, Examples):
            tested = evaluation.conclude(self) if finished else {}
        elif finished and prompt and self.recorder:
            text = sample(self.model, self.corpus.tokenizer, prompt, self.config)
            with writing(self.folder):
                write_atomically(self.folder / "sample.txt", text + "\n")
        return Result(
            status="done" if finished else "interrupted",
            folder=self.folder,
            step=self.step,
            loss=self.loss,
            perplexity=None if self.loss is None or self.config.task.name else perplexity(self.loss),
            tokens=self.tokens,
            seconds=self.seconds,
            skipped=self.skipped,
            bytes=size,
            sample=text,
            tested=tested,
        )
