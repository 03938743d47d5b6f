"""What an option may hold: kinds of values, each with its check and its words.

A table of options is a dataclass whose fields are made by `option`; it stands beside what reads it (`rules.Hyper`,
`options.Options`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from math import inf
from numbers import Real
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kind:
    """A kind of values: `check(name, value)` raises ValueError, `settle(value)` gives it as a step takes it."""

    check: Callable[[str, Any], object]
    settle: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Option:
    """What is known of an option besides its name and type.

    kind: what it may hold. rules: the rules that read it; () is all. kept: whether what is kept between steps depends
    on it, so that it cannot be changed later. plain: what a parameter that does not fold has instead of it, if it is
    for folded ones alone.
    """

    default: Any
    kind: Kind
    rules: tuple[str, ...] = ()
    kept: bool = False
    plain: Any = None


def option(default: Any, kind: Kind, **more: Any) -> Any:
    """A field of a table of options."""
    return field(default=default, metadata={"option": Option(default, kind, **more)})


def table(options: Any) -> dict[str, Option]:
    """name -> option, of a dataclass made of them."""
    return {f.name: f.metadata["option"] for f in fields(options)}


# ---------------------------------------------------------------------- kinds


def number(below: float = inf) -> Kind:
    """A number of any type, >= 0 and below this; a step takes it as a float."""
    return Kind(partial(_check_number, below=below), float)


def choice(known: Iterable[str]) -> Kind:
    """One of these words."""
    words = tuple(known)
    return Kind(lambda name, value: known_value(name, value, words))


def _check_number(name: str, value: Any, below: float = inf) -> None:
    if type(value) is float and 0 <= value < below:  # as it nearly always is, at every step
        return
    try:
        sound = isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < below
    except OverflowError:  # an integer beyond all floats
        sound = False
    if not sound:
        wanted = "in [0, 1)" if below == 1 else "finite and >= 0"
        raise ValueError(f"{name} must be a number {wanted}, got {value!r:.80}")


def _check_rate(name: str, lr: Any) -> None:
    if not isinstance(lr, Tensor):
        return _check_number(name, lr)
    if lr.numel() != 1:
        raise ValueError(f"lr must be a float or a tensor of one element, got shape {tuple(lr.shape)}")
    if not lr.is_floating_point() or lr.layout != torch.strided:
        raise ValueError(f"lr must be a float or a dense tensor of floating point, got {lr.dtype} ({lr.layout})")
    return None


def check_rate_value(lr: Any) -> None:
    """Read a learning rate that is a tensor, unless the host would have to wait for it."""
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        _check_number("lr", float(lr.detach()))


def _check_pair(name: str, pair: Any) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"{name} must be two numbers, got {pair!r}")
    for i, value in enumerate(pair, 1):
        _check_number(f"{name.removesuffix('s')}{i}", value, below=1)


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _check_integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")


# a float, or a tensor of one element, whose value is another question (`check_rate_value`)
RATE = Kind(_check_rate, lambda lr: lr.reshape(()) if isinstance(lr, Tensor) else float(lr))
# two numbers in [0, 1)
PAIR = Kind(_check_pair, lambda pair: tuple(map(float, pair)))
SWITCH = Kind(_check_switch)
INTEGER = Kind(_check_integer)


def known_value(what: str, value: Any, known: Iterable[str]) -> Any:
    """The value if it is known; else a ValueError that offers the nearest and lists the rest."""
    known = tuple(known)
    if value in known:
        return value
    near = get_close_matches(str(value), known, n=1, cutoff=0.7)
    raise ValueError(
        f"unknown {what} {value!r}; " + (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(known)}"
    )
