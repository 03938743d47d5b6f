"""Plain text for people: numbers, bytes, and tables as wide as what they are shown on."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

LEAST = 24  # letters: a text in less than that is set below its row instead


def count(n: int) -> str:
    """How many, in three or more figures.

    >>> count(1_840_256), count(6_738_415_616)
    ('1.8 M', '6.74 B')
    """
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.1f} M"


def gb(size: float) -> str:
    """Bytes in decimal units.

    >>> gb(13.48e9), gb(7361024), gb(152)
    ('13.5 GB', '7.4 MB', '152 B')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Columns, each as wide as its widest cell; the last is broken where the terminal ends, or at `width`.

    In a pipe, where None is no limit, a row stays a line.
    """
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    lines = [header, *rows]
    *widths, last = [max(len(line[c]) for line in lines) for c in range(len(header))]
    lead = sum(w + 2 for w in widths)
    if lead + last <= width or not widths:
        return "\n".join("  ".join([f"{x:<{w}}" for x, w in zip(line, widths)] + [line[-1]]).rstrip() for line in lines)
    below = width - lead < LEAST
    indent = 4 if below else lead
    told = []
    for line in lines:
        start = "  ".join(f"{x:<{w}}" for x, w in zip(line, widths)).rstrip()
        text = textwrap.wrap(line[-1], max(width - indent, 1), break_on_hyphens=False)
        if text and not below:
            start = f"{start:<{lead}}{text.pop(0)}"
        told += [start, *(" " * indent + part for part in text)]
    return "\n".join(told)


def fitted(rows: Sequence[Sequence[str]], width: int = 0) -> str:
    """A table of figures, head first, as wide as the terminal (80 columns where there is none), or `width`.

    One row a line if that fits; else turned, a column a row; else as many of those columns as fit at a time.
    """
    width = width or shutil.get_terminal_size().columns
    if widest(whole := table(rows[0], rows[1:], sys.maxsize)) <= width:
        return whole
    turned = [list(row) for row in zip(*rows)]
    parts, first = [], 1
    while first < len(turned[0]):
        last = first + 1
        while last < len(turned[0]) and widest(_part(turned, first, last + 1)) <= width:
            last += 1
        parts.append(_part(turned, first, last))
        first = last
    return "\n\n".join(parts)


def widest(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


def _part(turned: Sequence[Sequence[str]], first: int, last: int) -> str:
    head, *rest = [[row[0], *row[first:last]] for row in turned]
    return table(head, rest, sys.maxsize)
