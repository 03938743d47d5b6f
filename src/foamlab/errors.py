"""Errors that the user can correct, in one line; and the name that was meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from difflib import SequenceMatcher


class UserError(Exception):
    """An error that the user can correct. One line says what is wrong and what to do; the command exits with code 2."""


class Diverged(UserError):
    """A run that was given up: too many steps in a row had a loss or a gradient that was not finite."""


def known_name(name: str, known: Iterable[str], what: str) -> str:
    """The name itself if it is known; else a UserError that suggests the nearest and lists the rest."""
    known = list(known)
    if name in known:
        return name
    near = nearest(name, known)
    raise UserError(
        f"unknown {what} {name!r}: " + (f"did you mean {near}? " if near else "") + f"known: {', '.join(known)}"
    )


def nearest(name: str, known: Iterable[str], least: float = 0.4) -> str:
    """The known name most similar to this one, ignoring case; "" if none has a similarity of `least` (0 to 1).

    A name that starts with this one comes first. A word without a dash is also compared with the family that several
    names share (lama: llama-1m, llama-10m, ...). If several are equally similar, the first is taken, so a table begins
    with the most likely.

    >>> nearest("lama", ["gpt2", "llama-1m", "llama-8b"]), nearest("llama-60m", ["llama-10m", "llama-60m-paper"])
    ('llama-1m', 'llama-60m-paper')
    """
    known, word = list(known), name.lower()
    families = Counter(x.partition("-")[0] for x in known)

    def alike(x: str) -> float:
        if word and x.lower().startswith(word):
            return 1.0
        family = x.partition("-")[0]
        sought = (x, family) if "-" not in word and families[family] > 1 else (x,)
        return max(SequenceMatcher(None, word, y.lower()).ratio() for y in sought)

    best = max(known, key=alike, default="")
    return best if best and alike(best) >= least else ""
