"""TensorBoard's files of a run, by a listener to its events: another tracker would be another such listener."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UserError
from .record import read_metrics

SCALARS = {"train": ("loss", "lr", "grad_norm", "tokens_per_second"), "eval": ("loss", "perplexity")}
OnEvent = Callable[[dict[str, Any]], None]


@contextmanager
def listening(on_event: OnEvent) -> Iterator[OnEvent]:
    """An `on_event` that also writes `tensorboard/` in the run folder, until the block ends.

    When a run begins or goes on the files are made anew, from its record as it is then.

    Raises:
        UserError: tensorboard is not installed.
    """
    try:
        from tensorboard.summary import Writer
    except ImportError:
        raise UserError(
            "tensorboard is not installed: pip install 'torchfoam[tensorboard]', or leave out --train.tensorboard"
        ) from None
    writer: Any = None

    def listen(event: dict[str, Any]) -> None:
        nonlocal writer
        on_event(event)
        if event["kind"] == "start":
            folder = Path(event["folder"])
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
            writer = Writer(str(folder / "tensorboard"))
            for line in read_metrics(folder / "metrics.jsonl"):
                _add(writer, line)
        elif event["kind"] in (*SCALARS, "residual"):
            _add(writer, event)

    try:
        yield listen
    finally:
        if writer is not None:
            writer.close()


def _add(writer: Any, line: Mapping[str, Any]) -> None:
    values = {**{name: line.get(name) for name in SCALARS.get(line["kind"], ())}, **line.get("values", {})}
    for name, value in values.items():
        if value is not None:
            writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])
