"""An option of FOAM is written once: everything else that names it is held against the table."""

from __future__ import annotations

import inspect
import re
import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from problems import numbers, toy
from torchfoam import FOAM, param_groups
from torchfoam.groups import _said
from torchfoam.options import DEFAULTS, FOREIGN, IDENTITY, PLAIN, TABLE, Options
from torchfoam.rules import RULES, Hyper

# another value of each option that changes a step
OTHER: dict[str, Any] = {
    "lr": 0.5, "betas": (0.5, 0.6), "eps": 50.0, "weight_decay": 0.5, "level": 1, "scale": 0.5, "residual": 0.5,
    "second_moment": "square_mean", "bias_correction": "whole", "residual_in_v": 0.7, "momentum": 0.5,
    "nesterov": False, "adjust_lr": "match_rms_adamw", "maximize": True, "rule": "mini", "state": "int8",
    "stochastic": False, "seed": 3, "capturable": True,
}  # fmt: skip


def test_the_signature_is_the_table() -> None:
    """Defaults and types, as an editor shows them."""
    signature = {
        name: (p.default, p.annotation)
        for name, p in inspect.signature(FOAM.__init__).parameters.items()
        if name not in ("self", "params", "backend", "foreign")
    }
    assert signature == {f.name: (f.default, f.type) for f in fields(Options)}
    assert [name for name in signature if name in ("lr", "betas", "eps", "weight_decay")] == list(signature)[:4]
    level = inspect.signature(param_groups).parameters["level"]
    assert level.default == DEFAULTS["level"]


def test_each_option_is_documented_where_users_look() -> None:
    entries = re.findall(r"^        ([a-z_, ]+): ", FOAM.__doc__ or "", re.M)
    named = {name.strip() for entry in entries for name in entry.split(",")}
    assert named == {"params", "backend", *TABLE}


def test_groups_hold_the_table() -> None:
    opt = FOAM(toy())
    for group in opt.param_groups:
        assert {k: x for k, x in group.items() if k in TABLE and k not in PLAIN} == {
            k: x for k, x in DEFAULTS.items() if k not in PLAIN
        }
    assert {k: opt.param_groups[1][k] for k in PLAIN} == PLAIN == {"level": 0, "scale": 1.0, "rule": "adam"}
    assert set(IDENTITY) == {"rule", "level", "second_moment", "state"}


def moved(rule: str, **options: Any) -> list[torch.Tensor]:
    w = nn.Parameter(numbers(6, 16).bfloat16())
    opt = FOAM([{"params": [w], "level": 2, "rule": rule, **options}], lr=0.1)
    for t in range(2):
        w.grad = numbers(6, 16, seed=t + 1).bfloat16()
        opt.step()
    return [w.detach().float()]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", sorted({f.name for f in fields(Hyper)} | {"stochastic", "seed"}))
def test_a_rule_reads_what_the_table_says(rule: str, name: str) -> None:
    if (rule, name) == ("mini", "second_moment"):  # refused: it keeps the row's mean square
        return
    changes = not all(map(torch.equal, moved(rule), moved(rule, **{name: OTHER[name]})))
    assert changes == (not TABLE[name].rules or rule in TABLE[name].rules)


def test_an_option_that_no_rule_reads_is_said_once() -> None:
    assert set(OTHER) == set(TABLE)
    w = nn.Parameter(torch.ones(4, 8))
    _said.clear()
    with pytest.warns(UserWarning, match=r"momentum=0.9 has no effect: rule 'adam' does not read it"):
        FOAM([w], momentum=0.9)
    _said.clear()
    with pytest.warns(UserWarning, match=r"nesterov=False has no effect: rule 'adam' does not read it"):
        FOAM(param_groups(toy(), nesterov=False))
    _said.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FOAM(toy(), rule="muon", momentum=0.9, residual_in_v=0.5)  # the rest is Adam, and reads the second


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lrr", "did you mean 'lr'"), ("maximise", "did you mean 'maximize'"), ("wieght_decay", "'weight_decay'"),
        ("backnd", "did you mean 'backend'"), ("xyzxyz", "known: lr, betas, .*backend"), *FOREIGN.items(),
    ],
)  # fmt: skip
def test_a_foreign_or_misspelt_keyword_is_answered(name: str, words: str) -> None:
    options: dict[str, Any] = {name: True}
    words = words if name not in FOREIGN else re.escape(words)
    with pytest.raises(TypeError, match=f"unknown option '{name}'.*{words}"):
        FOAM([nn.Parameter(torch.ones(4, 8))], **options)
    if name in inspect.signature(param_groups).parameters or name == "backnd" or name == "xyzxyz":
        return
    with pytest.raises(ValueError, match=f"unknown option '{name}'.*{words}"):
        param_groups(toy(), **options)


def test_every_name_that_torch_takes_is_an_option_or_answered() -> None:
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam):
        theirs = set(inspect.signature(kind).parameters) - {"params"}
        assert theirs <= set(TABLE) | set(FOREIGN) | {"momentum_decay"}, kind
