"""The per-group options of FOAM: one table, from which names, defaults, checks and what a step takes follow.

An option is written once: here, or in `rules.Hyper` if an equation reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from .rules import RULES, Hyper
from .state import STATES
from .values import INTEGER, SWITCH, check_rate_value, choice, option, table


@dataclass(frozen=True)
class Options(Hyper):
    """All options of a group: those of the equations, and which rule, and how it is stored."""

    rule: str = option("adam", choice(RULES), kept=True, plain="adam")
    state: str = option("float32", choice(STATES), kept=True)
    stochastic: bool = option(True, SWITCH)  # rounding of bfloat16 and 8-bit storage; see quant.py
    seed: int = option(0, INTEGER)
    capturable: bool = option(False, SWITCH)


TABLE = table(Options)
OPTIONS = tuple(TABLE)
DEFAULTS = {name: known.default for name, known in TABLE.items()}
# for folded parameters alone: what the others have instead, which makes them AdamW
PLAIN = {name: known.plain for name, known in TABLE.items() if known.plain is not None}
# a state made under other values of these is that of another algorithm
IDENTITY = tuple(name for name, known in TABLE.items() if known.kept)

_ARGUMENT = "it is an argument of param_groups(model, ...), whose groups FOAM takes"
_FUSED = "not needed: the fastest code that works steps by itself; backend= names one"
# names that other optimizers have for an option, or that belong elsewhere, and what to write instead
FOREIGN = {
    "fused": _FUSED,
    "foreach": _FUSED,
    "amsgrad": "FOAM keeps no running maximum of v; leave it out",
    "differentiable": "a step cannot be differentiated; leave it out",
    "decoupled_weight_decay": "not needed: weight decay is decoupled, as in AdamW",
    "correct_bias": "not needed: averages are corrected; bias_correction= says how",
    "beta1": "write betas=(beta1, beta2)",
    "beta2": "write betas=(beta1, beta2)",
    "learning_rate": "write lr=",
    "adjust_lr_fn": "write adjust_lr=",
    "alpha": "write scale=",
    "rho": "write residual=",
    "kappa": "write residual_in_v=",
    **dict.fromkeys(("overrides", "no_decay", "names", "state_budget", "residual_ratios"), _ARGUMENT),
}


def unknown(name: str, known: Iterable[str] = OPTIONS) -> str:
    """What to say of a name that is no option: what to write instead, the nearest, or all there are."""
    if name in FOREIGN:
        return f"unknown option {name!r}: {FOREIGN[name]}"
    known = tuple(known)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown option {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")


def check_names(given: Iterable[str], misspelt_only: bool = False) -> None:
    """Raise ValueError for the first name that is not an option of FOAM, saying what to write instead.

    `misspelt_only` lets through what resembles none: schedulers, trainers and other optimizers keep keys of their own
    in groups.
    """
    for name in given:
        if name not in TABLE and (not misspelt_only or get_close_matches(name, OPTIONS, n=1, cutoff=0.8)):
            raise ValueError(unknown(name))


def check(group: Mapping[str, Any], read: bool = True) -> None:
    """Raise ValueError for an option that is missing, of a wrong type or makes no sense, naming the value.

    `read` a learning rate that is a tensor too, unless it is on a GPU: the host would have to wait for it.
    """
    for name in OPTIONS:
        if name not in group:
            raise ValueError(f"the group has no {name!r}; options of FOAM: {', '.join(OPTIONS)}")
    for name, known in TABLE.items():
        known.kind.check(name, group[name])
    if read:
        check_rate_value(group["lr"])
    if group["rule"] == "mini" and group["second_moment"] != "mean_square":
        raise ValueError("cannot use second_moment='square_mean' with rule 'mini': it keeps the row's mean square")


def unread(given: Mapping[str, Any], rules: Iterable[str]) -> list[str]:
    """Names of options that differ from their defaults though none of these rules reads them."""
    used = set(rules)
    return [
        name for name, known in TABLE.items()
        if known.rules and not used & set(known.rules) and given[name] != known.default
    ]  # fmt: skip


def hyper(group: Mapping[str, Any]) -> Options:
    """The group's options, frozen for one step; numbers of any kind (numpy's, fractions) as floats."""
    return Options(**{name: known.kind.settle(group[name]) for name, known in TABLE.items()})
