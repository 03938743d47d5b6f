"""The display of a contest: a live table on a terminal, one plain line per event when piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..contest.results import table
from ..signals import steady
from ..text import fitted

Event = Mapping[str, Any]


@contextmanager
def board(stream: TextIO | None = None) -> Iterator[Callable[[Event], None]]:
    """The `on_event` of a contest that shows a contest on `stream` (stdout)."""
    console = Console(file=steady(stream or sys.stdout), highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield Lines(console)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield Picture(console, live)


def tell(contest: Mapping[str, Any], written: Sequence[Path], again: str = "", stream: TextIO | None = None) -> None:
    """The end of a contest, on `stream` (stdout): its table, verdicts and caveats, and how to resume."""
    console = Console(file=steady(stream or sys.stdout), highlight=False, soft_wrap=True)
    lines = fitted(table(contest["results"])).splitlines()
    rule = contest.get("rule_in_words", "")
    parts = {
        "What can be said": ["So far: not all runs are finished."] * bool(again) + contest["verdicts"],
        "Caveats": [text for text in contest["cautions"] if text != rule],
        "When runs were stopped early": [rule] * bool(rule),
    }
    for title, said in parts.items():
        lines += ["", f"{title}:", *(f"  {sentence}" for sentence in said)] if said else []
    console.print(Text("\n".join(["", *lines, "", *(f"wrote {path}" for path in written)])))
    if again:
        console.print(Text(f"interrupted; to resume: {again}", style="bold yellow"))


class Lines:
    """What happens, one line each."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.stage = ""
        self.counted = False
        self.over = 0

    def __call__(self, event: Event) -> None:
        getattr(self, event["kind"], lambda event: None)(event)

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style))

    def prepare(self, event: Event) -> None:
        if event["stage"] != self.stage:
            self.stage = event["stage"]
            self.say(f"preparing data: {event.get('message', self.stage)}")

    def state(self, event: Event) -> None:
        """Once, what is still to do: more is found as the search goes on."""
        if not self.counted:
            self.counted = True
            ahead = len(event["running"]) + event["waiting"]
            self.say(f"{event['over']} runs over, {ahead} to do; the search and the seeds will add more")

    def launch(self, event: Event) -> None:
        self.say(f"{'resume' if event['resumed'] else 'start '}  {event['trial']}")

    def ended(self, event: Event) -> None:
        self.over += 1
        told = f"loss {event['loss']:.4f}" if event["status"] == "done" else event["why"]
        self.say(f"{event['status']:7}  {event['trial']}  {told}", "" if event["status"] == "done" else "yellow")


class Picture(Lines):
    """The same lines, and a table of what runs below them."""

    def __init__(self, console: Console, live: Live) -> None:
        super().__init__(console)
        self.live = live

    def launch(self, event: Event) -> None:
        """The table shows it."""

    def state(self, event: Event) -> None:
        table = Table("run", "", "step", "loss", "validation", box=None)
        for run in event["running"]:
            bar = ProgressBar(total=event["steps"], completed=run["step"], width=20)
            table.add_row(run["trial"], bar, str(run["step"]), _loss(run["loss"]), _loss(run["evaluated"]))
        settled = len(event["settled"])
        head = f"{event['over']} runs over, {len(event['running'])} running, {event['waiting']} waiting"
        self.live.update(Group(Text(f"{head}; rates found for {settled} optimizers" if settled else head), table))


def _loss(x: float | None) -> str:
    return "" if x is None else f"{x:.4f}"
