"""The display of a run: live on a terminal, one plain line per interval when piped.

`display()` gives the `on_event` of `train`, which calls it on rank 0 only. Everything shown comes from the events
(docs/formats.md); nothing is computed here but the time left.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..signals import steady
from ..text import gb

Event = Mapping[str, Any]
INTERVAL = 10.0  # seconds between plain lines
STAGES = {
    "hash": "reading files",
    "tokenizer": "training the tokenizer",
    "check": "checking the token cache",
    "tokens": "tokenizing",
    "wait": "waiting: another process is building this token cache",
}


@contextmanager
def display(stream: TextIO | None = None, interval: float = INTERVAL) -> Iterator[Callable[[Event], None]]:
    """The `on_event` that shows a run on `stream` (stdout): rich on a terminal, plain lines elsewhere."""
    if os.environ.get("RANK", "0") != "0":  # torchrun: `train` sends events on rank 0 only, and one bar is enough
        yield lambda event: None
        return
    stream = steady(stream or sys.stdout)
    console = Console(file=stream, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield Plain(stream, interval)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, TextColumn("{task.fields[left]}"), console=console) as bars:
        yield Live(bars)


class Bars(Progress):
    """Progress bars with a line of figures below."""

    figures = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.figures:
            yield Text(self.figures, no_wrap=True, overflow="ellipsis")  # a number that is cut off must show it


class Watch:
    """The last events, and the line to print for the next."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.skipped = 0

    def __call__(self, event: Event) -> None:
        getattr(self, event["kind"], self.other)(event)

    def say(self, text: str, style: str = "") -> None:
        """One line, to stay."""
        raise NotImplementedError

    def progress(self, what: str, share: float | None) -> None:
        """Progress of data preparation; None means unknown."""
        raise NotImplementedError

    def other(self, event: Event) -> None:
        """An unknown event is not an error."""

    def note(self, event: Event) -> None:
        self.say(f"note: {event['message']}", "dim")

    def prepare(self, event: Event) -> None:
        if event["stage"] == "warning":
            self.say(f"warning: {event['message']}", "yellow")
        else:
            self.progress(STAGES.get(event["stage"], str(event["stage"])), event.get("share"))

    def start(self, event: Event) -> None:
        self.facts.update(event)
        model, optimizer, size = event["model"], event["optimizer"], event["bytes"]
        self.say(f"{event['folder']}: {model['name']}, {model['parameters']:,} parameters, with {optimizer['name']}")
        self.say(f"weights {gb(size['weights'])}" + (f", optimizer state {gb(n)}" if (n := size["state"]) else ""))

    def bytes(self, event: Event) -> None:
        self.facts["bytes"] = event["bytes"]

    def train(self, event: Event) -> None:
        self.last.update(event)

    def eval(self, event: Event) -> None:
        told = figures(event["values"]) if "values" in event else f"perplexity {event['perplexity']:.2f}"
        self.say(f"step {event['step']}: validation loss {event['loss']:.4f}, {told}", "bold")

    def skip(self, event: Event) -> None:
        self.skipped += 1
        self.say(f"step {event['step']} skipped: {event['why']}", "yellow")

    def save(self, event: Event) -> None:
        self.say(f"saved {event['path']}", "dim")

    def end(self, event: Event) -> None:
        if event.get("sample"):
            self.say("sample:")
            self.say(event["sample"], "italic")
        for split, found in (event.get("tested") or {}).items():
            self.say(told_once(split, found), "bold")
        if event["status"] == "interrupted":
            again = f"to resume: {event['resume']}" if event["resume"] else "this run cannot be resumed"
            self.say(f"interrupted and saved; {again}", "bold yellow")
        else:
            self.say(f"done: {event['folder']}", "bold green")

    def line(self) -> str:
        """Step, loss, perplexity, learning rate, speed and memory, as far as known."""
        e = self.last
        steps = self.facts.get("steps", 0)
        size = self.facts["bytes"]
        parts = [
            f"loss {e['loss']:.4f}",
            "" if self.facts.get("corpus", {}).get("task") else f"perplexity {math.exp(min(e['loss'], 50)):.2f}",
            f"lr {e['lr']:.2e}",
            f"{e['tokens_per_second']:,.0f} tokens/s",
            f"state {gb(size['state'])}" if size["state"] else "",
            f"peak {gb(size['peak'])}" if size.get("peak") else "",
            f"{self.skipped} skipped" if self.skipped else "",
        ]
        return f"step {e['step']}/{steps}  " + "  ".join(filter(None, parts))

    def left(self) -> str:
        """Time left at the current speed."""
        speed = self.last.get("tokens_per_second")
        tokens = self.facts.get("tokens_per_step")
        if not speed or not tokens:
            return ""
        return f"{_clock((self.facts['steps'] - self.last['step']) * tokens / speed)} left"


def figures(values: Mapping[str, Any]) -> str:
    """Metrics in a line."""
    return ", ".join(f"{name} {'unknown' if x is None else f'{x:.4f}'}" for name, x in values.items())


def told_once(split: str, found: Mapping[str, Any]) -> str:
    """What the best checkpoint comes to on a split, or where it is."""
    metrics = {name: x for name, x in found.items() if name not in ("checkpoint", "step", "predictions")}
    where = f" at step {found['step']}: {found['checkpoint']}" if "checkpoint" in found else ""
    written = f"predictions in {found['predictions']}" if "predictions" in found else ""
    return f"{split}{where}: {', '.join(filter(None, [figures(metrics), written]))}"


class Plain(Watch):
    """One line per interval, for logs and pipes."""

    def __init__(self, stream: TextIO, interval: float) -> None:
        super().__init__()
        self.stream = stream
        self.interval = interval
        self.spoke = -math.inf

    def say(self, text: str, style: str = "") -> None:
        print(text, file=self.stream, flush=True)

    def progress(self, what: str, share: float | None) -> None:
        if self._due():
            self.say(what if share is None else f"{what}: {share:.0%}")

    def train(self, event: Event) -> None:
        super().train(event)
        if self._due() or event["step"] == self.facts.get("steps"):
            self.say("  ".join(filter(None, (self.line(), self.left()))))

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self.spoke < self.interval:
            return False
        self.spoke = now
        return True


class Live(Watch):
    """A progress bar with the newest figures under it; what happens scrolls by above."""

    def __init__(self, bars: Bars) -> None:
        super().__init__()
        self.bars = bars
        self.tasks: dict[str, TaskID] = {}

    def say(self, text: str, style: str = "") -> None:
        self.bars.console.print(Text(text, style=style))

    def progress(self, what: str, share: float | None) -> None:
        self._bar(what, round(100 * (share or 0)), 100 if share is not None else None)

    def start(self, event: Event) -> None:
        for task in self.tasks.values():
            self.bars.remove_task(task)
        super().start(event)
        self._bar("training", event["step"], event["steps"])

    def train(self, event: Event) -> None:
        super().train(event)
        self.bars.figures = self.line()
        self._bar("training", event["step"], self.facts["steps"], self.left())

    def end(self, event: Event) -> None:
        self.bars.stop()
        super().end(event)

    def _bar(self, name: str, done: int, total: int | None, left: str = "") -> None:
        if name not in self.tasks:
            self.tasks[name] = self.bars.add_task(name, left="")
        self.bars.update(self.tasks[name], completed=done, total=total, left=left)


def _clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
