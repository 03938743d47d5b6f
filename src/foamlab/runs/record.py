"""What is kept of a run: `run.json` (who, what, where, how it ended) and `metrics.jsonl` (one object a line).

`Recorder` writes them, `read_run` reads them back; the format is in docs/formats.md. No torch here, so that reports and
statistics need none.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import lock, parse_json, read_json, write_atomically, writing
from .provenance import now

ENDED = ("step", "loss", "perplexity", "tokens", "seconds", "skipped")  # of a Result, kept in run.json
FATE = ("ended", "result", "resume", "error", "reason")  # of run.json: how a run ended, which one that goes on has not


@dataclass(frozen=True)
class Run:
    """A run as read from its folder.

    Attributes:
        folder: where it lies.
        info: `run.json`.
        metrics: the lines of `metrics.jsonl`, in order.
    """

    folder: Path
    info: dict[str, Any]
    metrics: list[dict[str, Any]]

    @property
    def status(self) -> str:
        """ "running", "done", "interrupted" or "failed"; a killed run still says "running"."""
        return str(self.info.get("status", "running"))

    @property
    def diverged(self) -> bool:
        """Whether it failed as too many steps in a row were not finite."""
        # runs before 0.3 give no reason, but one sentence alone began so
        old = "diverged" if str(self.info.get("error")).startswith("stopped: ") else ""
        return self.status == "failed" and self.info.get("reason", old) == "diverged"

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The metrics lines of one kind: "train", "eval", "skip" or "residual"."""
        return [line for line in self.metrics if line.get("kind") == kind]


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Args:
        status: "done", or "interrupted" (by Ctrl-C or SIGTERM, after saving).
        folder: the run folder.
        step: steps taken, skipped ones included.
        loss, perplexity: of the last evaluation, in nats per token and its exponential; None if there was none.
        tokens, seconds: trained on, and the time of it without evaluation and saving; resumed parts are included.
        skipped: steps left out because loss or gradient was not finite.
        bytes: of weights, gradients, optimizer state and peak memory (`peak_of` says of what, `before` how much of it
            was held before the first step).
        sample: generated text.
        tested: of a task: "best" (its checkpoint, step, loss and metrics) and, by split, the metrics and predictions of
            that checkpoint on what is told once.
    """

    status: str
    folder: Path
    step: int
    loss: float | None
    perplexity: float | None
    tokens: int
    seconds: float
    skipped: int
    bytes: dict[str, Any]
    sample: str
    tested: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def summary(self) -> dict[str, Any]:
        """`result` of `run.json`."""
        told = {name: getattr(self, name) for name in (*ENDED, "tokens_per_second")}
        return told | ({"tested": self.tested} if self.tested else {})

    @classmethod
    def of(cls, folder: Path, step: int) -> Result | None:
        """How the finished run in `folder` ended; None if it is not done, or not at this step."""
        run = read_run(folder)
        told, size = run.info.get("result"), run.info.get("bytes")
        if run.status != "done" or not isinstance(told, dict) or told.get("step") != step:
            return None
        if not {*ENDED} <= told.keys() or not isinstance(size, dict):
            return None  # an older record, or a damaged one: the run is ended anew
        text = folder / "sample.txt"
        said = text.read_text(encoding="utf-8", errors="replace")[:-1] if text.is_file() else ""
        return cls("done", folder, **{name: told[name] for name in ENDED}, bytes=size, sample=said,
                   tested=told.get("tested", {}))  # fmt: skip


class Recorder:
    """Writes a run's folder; the only writer of `run.json` and `metrics.jsonl`.

    Args:
        folder: the run folder, which exists.
        resume: the step a run goes on from: later lines are dropped, so that the record becomes that of a run which
            was never stopped. None starts a new record.

    Raises:
        UserError: the folder cannot be written, or there is no run to resume.
    """

    def __init__(self, folder: Path, *, resume: int | None = None) -> None:
        self.folder = folder
        self.info: dict[str, Any] = {}
        self._lock = lock(folder)
        lines: list[dict[str, Any]] = []
        if resume is not None:
            run = read_run(folder)
            self.info = {key: x for key, x in run.info.items() if key not in FATE}
            lines = [line for line in run.metrics if line["step"] <= resume]
        with writing(folder):
            text = "".join(map(encode, lines))
            write_atomically(folder / "metrics.jsonl", text)
            self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8", newline="\n")  # until `close`

    @property
    def peak(self) -> dict[str, Any]:
        """What `run.json` says of the peak memory of the run so far."""
        size = self.info.get("bytes")
        known = {k: size[k] for k in ("peak", "peak_of", "before") if k in size} if isinstance(size, dict) else {}
        return known if isinstance(known.get("peak"), int) and isinstance(known.get("peak_of"), str) else {}

    def describe(self, **fields: Any) -> None:
        """Set keys of `run.json` and write it, whole, at once."""
        self.info.update(fields)
        with writing(self.folder):
            write_atomically(self.folder / "run.json", json.dumps(self.info, indent=1, default=str) + "\n")

    def settings(self, text: str) -> None:
        """Write `config.yaml`."""
        with writing(self.folder):
            write_atomically(self.folder / "config.yaml", text)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl` and flush it: a kill loses at most the line being written."""
        with writing(self.folder):
            self._metrics.write(encode(line))
            self._metrics.flush()

    def sync(self) -> None:
        """Force the lines to the disk, before a checkpoint of the same step relies on them."""
        with writing(self.folder):
            os.fsync(self._metrics.fileno())

    def close(self, status: str, **fields: Any) -> None:
        """Write the final status and fields; nothing can be written afterwards."""
        try:
            self.describe(status=status, ended=now(), **fields)
        finally:
            self._metrics.close()
            self._lock.release()


def read_run(folder: Path | str) -> Run:
    """Read a run folder. A last line torn by a kill is left out.

    Raises:
        UserError: no run there, or files that are not what `Recorder` writes.
    """
    folder = Path(folder)
    path = folder / "run.json"
    try:
        info = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no run in {folder}: {path.name} is missing; give a folder made by `foamlab train`") from None
    return Run(folder, info, read_metrics(folder / "metrics.jsonl"))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; a torn last one is left out, any other is an error."""
    try:
        raw = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    lines = []
    for number, text in enumerate(raw[:-1], 1):  # what follows the last newline is torn, or nothing
        try:
            line = parse_json(text, f"{path}, line {number}")
            if not isinstance(line["step"], int) or not isinstance(line["kind"], str):
                raise ValueError("no step or kind")
        except UserError as e:
            raise UserError(f"{e}; remove the line by hand") from None
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f"{path}, line {number} is not a line of metrics ({e}): remove it by hand") from None
        lines.append(line)
    return lines


def encode(line: Mapping[str, Any]) -> str:
    """One line of JSON; numbers that JSON does not know (nan, inf) become null."""
    safe = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(safe, allow_nan=False) + "\n"
