"""Plain text for people: numbers, bytes, and tables as wide as what they are shown on."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

LEAST = 24  # characters: with less room than that, the last column is put below its row


def count(n: int) -> str:
    """A number of parameters.

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
    """Columns, each as wide as its widest cell; the last one is wrapped.

    Args:
        header: one cell per column.
        rows: as many cells each.
        width: characters per line; None means the width of the terminal, without a limit in a pipe.
    """
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    lines = [header, *rows]
    *widths, last = [max(len(line[c]) for line in lines) for c in range(len(header))]
    lead = sum(w + 2 for w in widths)
    if lead + last <= width or not widths:
        cells = [[f"{x:<{w}}" for x, w in zip(line, widths)] + [line[-1]] for line in lines]
        return "\n".join("  ".join(row).rstrip() for row in cells)
    below = width - lead < LEAST
    indent = 4 if below else lead
    wrapped = []
    for line in lines:
        start = "  ".join(f"{x:<{w}}" for x, w in zip(line, widths)).rstrip()
        text = textwrap.wrap(line[-1], max(width - indent, 1), break_on_hyphens=False)
        if text and not below:
            start = f"{start:<{lead}}{text.pop(0)}"
        wrapped += [start, *(" " * indent + part for part in text)]
    return "\n".join(wrapped)


def fitted(rows: Sequence[Sequence[str]], width: int = 0) -> str:
    """A table of numbers, header first, that fits `width` or the terminal (80 characters without one).

    One line per row if that fits; else transposed; else transposed in parts, as many columns as fit at a time.
    """
    width = width or shutil.get_terminal_size().columns
    if widest(whole := table(rows[0], rows[1:], sys.maxsize)) <= width:
        return whole
    turned = [list(row) for row in zip(*rows)]
    parts = []
    first = 1
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
