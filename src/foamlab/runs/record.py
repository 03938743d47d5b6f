"""What is kept of a run: `run.json` (who, what, where, how it ended) and `metrics.jsonl` (one object a line).

`Recorder` writes them, `read_run` reads them back; the format is in docs/house.md. No torch here, so that reports and
statistics need none.
"""

from __future__ import annotations

import getpass
import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import parse_json, read_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PACKAGES = ("torchfoam", "torch", "transformers", "tokenizers", "safetensors", "numpy")
ENDED = ("step", "loss", "perplexity", "tokens", "seconds", "skipped")  # of a Result, kept in run.json
TRAIN_SCALARS = ("loss", "lr", "grad_norm", "tokens_per_second")


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

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def summary(self) -> dict[str, Any]:
        """`result` of `run.json`."""
        return {name: getattr(self, name) for name in (*ENDED, "tokens_per_second")}

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
        return cls("done", folder, **{name: told[name] for name in ENDED}, bytes=size, sample=said)


class Recorder:
    """Writes a run's folder; the only writer of `run.json` and `metrics.jsonl`.

    Args:
        folder: the run folder, which exists.
        resume: the step a run goes on from: later lines are dropped, so that the record becomes that of a run which
            was never stopped. None starts a new record.
        tensorboard: also write `tensorboard/`.

    Raises:
        UserError: the folder cannot be written, there is no run to resume, or tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, resume: int | None = None, tensorboard: bool = False) -> None:
        self.folder = folder
        self.info: dict[str, Any] = {}
        self._lock = lock(folder)
        lines: list[dict[str, Any]] = []
        if resume is not None:
            run = read_run(folder)
            self.info, lines = run.info, [line for line in run.metrics if line["step"] <= resume]
        with writing(folder):
            text = "".join(map(encode, lines))
            write_atomically(folder / "metrics.jsonl", text)
            self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8", newline="\n")  # until `close`
        self._board = Board(folder / "tensorboard", lines) if tensorboard else None

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
        if self._board:
            self._board.add(line)

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
            if self._board:
                self._board.close()
            if self._lock is not None:
                os.close(self._lock)


class Board:
    """TensorBoard events, rebuilt from the kept lines when a run resumes."""

    def __init__(self, folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError:
            raise UserError(
                "tensorboard is not installed: pip install 'torchfoam[tensorboard]', or leave out --train.tensorboard"
            ) from None
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = Writer(str(folder))
        self.close = self._writer.close
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        for name, value in line.get("values", {}).items():
            self._writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])
        names = {"train": TRAIN_SCALARS, "eval": ("loss", "perplexity")}.get(line["kind"], ())
        for name in names:
            if (value := line.get(name)) is not None:
                self._writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])


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


def lock(folder: Path) -> int | None:
    """Keep other processes from writing the same run, until the returned descriptor is closed or the process ends."""
    if fcntl is None:
        return None
    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"another process is writing {folder}: wait for it, or stop it, then resume") from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def await_release(folder: Path, patience: float = 60.0) -> None:
    """Wait until no process writes a run folder: one of a contest that was killed takes its step, saves and ends.

    Raises:
        UserError: it takes longer than `patience` seconds.
    """
    end = time.monotonic() + patience
    while True:
        try:
            held = lock(folder)
        except UserError:
            if time.monotonic() > end:
                raise
            time.sleep(0.3)
            continue
        if held is not None:
            os.close(held)
        return


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # a file name or JSON escape may hold what is no Unicode: it is written as such an escape
        with open(part, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError into one line for the user."""
    try:
        yield
    except OSError as e:
        raise UserError(
            f"cannot write in {folder}: {e.strerror}; make room or choose another --out, then resume"
        ) from e


def circumstances(before: Mapping[str, Any], step: int, hardware: Mapping[str, Any]) -> dict[str, Any]:
    """Who runs what, where and with which versions: the first keys of `run.json`.

    Args:
        before: `run.json` of the run that goes on at `step`, whose beginning is kept; empty for a new one.
        hardware: what else is known of it, such as the GPU.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a user name
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    begun = {"who": f"{user}@{platform.node()}", "command": shlex.join(sys.argv), "started": now()}
    parts = before.get("resumed")
    again = [*(parts if isinstance(parts, list) else []), {**begun, "step": step}]
    return {
        **({"resumed": again} if before else begun),
        "versions": {"python": platform.python_version(), **{n: v for n in PACKAGES if (v := installed(n))}},
        "hardware": {"system": platform.platform(), "processor": processor(), "cores": cores(), **hardware},
    }


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name, as well as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
