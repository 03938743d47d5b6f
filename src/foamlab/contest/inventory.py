"""What lies in folders: runs, at any sensible depth; contests, each as one thing; and what is neither, with the reason.

So that `foamlab report runs/*` reads whatever `foamlab train`, `foamlab compare` and `make demo` left there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..runs.summary import number, summarize
from .folder import read
from .model import FILE

DEPTH = 4  # folders below a named one: runs/DAY/CONTEST/ARM/TRIAL
RUN = "run.json"


@dataclass
class Inventory:
    """What was found, in the order given.

    Attributes:
        runs: run folders that can be read.
        contests: contest folder -> what it says of itself, in a line.
        skipped: path -> why it is left out.
    """

    runs: list[Path] = field(default_factory=list)
    contests: dict[Path, str] = field(default_factory=dict)
    skipped: dict[Path, str] = field(default_factory=dict)

    @property
    def contest(self) -> Path | None:
        """The one contest, if there is nothing else to report."""
        return next(iter(self.contests)) if len(self.contests) == 1 and not self.runs else None


def take(paths: Iterable[Path | str]) -> Inventory:
    """Look at each path and below it. A run in several of them counts once.

    Raises:
        UserError: neither a run nor a contest is there, or several contests and no run, which have no page in common.
    """
    found = Inventory()
    for path in map(Path, paths):
        for place in [*_below(path)] or [path]:
            _sort(place, found)
    if not found.runs and len(found.contests) > 1:
        alone = ", ".join(f"`foamlab report {folder}`" for folder in found.contests)
        raise UserError(f"{len(found.contests)} contests and no other run: report each alone, with {alone}")
    if not found.runs and not found.contests:
        why = "; ".join(f"{path}: {reason}" for path, reason in found.skipped.items())
        raise UserError(f"no run to report ({why}); give folders made by `foamlab train`" if why else
                        "no run to report; give at least one run folder")  # fmt: skip
    return found


def _below(path: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Runs and contests in a folder, itself included; what is inside of one belongs to it."""
    if (path / RUN).exists() or (path / FILE).exists():
        yield path
    elif depth and path.is_dir():
        try:
            inside = sorted(e.name for e in os.scandir(path) if e.is_dir(follow_symlinks=False) and e.name[0] != ".")
        except OSError:
            inside = []
        for name in inside:
            yield from _below(path / name, depth - 1)


def _sort(path: Path, found: Inventory) -> None:
    known = {os.path.abspath(p) for p in (*found.runs, *found.contests, *found.skipped)}
    if os.path.abspath(path) in known:
        return
    try:
        if (path / RUN).exists():
            summarize([path])
            found.runs.append(path)
        elif (path / FILE).exists():
            found.contests[path] = _line(path, read(path))
        elif path.is_dir():
            found.skipped[path] = f"no run in it, nor {DEPTH} folders down"
        else:
            found.skipped[path] = "a file, not a run folder" if path.exists() else "does not exist"
    except UserError as e:
        found.skipped[path] = str(e)


def _line(folder: Path, told: dict[str, Any]) -> str:
    """A contest in one line, from its `contest.json`."""
    rows = told.get("results")
    best = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    loss, n = number(best.get("loss")), number(best.get("n"))
    lead = f"; lowest mean loss {loss:.4f}, of {best.get('arm')} (n = {n:.0f})" if loss == loss and n == n else ""
    return f"{folder}: {told['kind']}, {told['status']}{lead}. Its page: foamlab report {folder}"
