"""Damaged state dicts, at random: each loads exactly as it reads, or raises ValueError with nothing changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from problems import everything, numbers, same
from torchfoam import FOAM, from_adamw

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8, named": {"state": "int8", "named": True},
    "mini, bfloat16": {"rule": "mini", "state": "bfloat16", "named": True},
    "a tensor for a rate": {"lr": torch.tensor(0.01)},
}
JUNK: list[Any] = [
    None, True, -1, 0, 3, 2**40, 1.5, float("nan"), "no", "adam", "row", b"x", [], [1, [2]], {}, {"m": 1}, (0.5, 0.9),
    torch.tensor(0.1), torch.tensor(float("nan")), torch.tensor([True]), torch.zeros(3, 4), torch.zeros(2, 3, 4),
    torch.zeros(3, 4, device="meta"), torch.zeros(3, 4).to_sparse(), torch.ones(3, 4, dtype=torch.int64),
    torch.zeros(3, 4, dtype=torch.complex64), torch.tensor(-1), torch.zeros(0),
]  # fmt: skip


def made(seed: int, named: bool = False, **options: Any) -> tuple[list[nn.Parameter], FOAM]:
    """Two matrices of one shape, another, and a vector, two steps on."""
    params = [nn.Parameter(numbers(*s, seed=seed).float()) for s in ((3, 16), (3, 16), (2, 5), (5,))]
    opt = FOAM([(f"layers.{i}", p) for i, p in enumerate(params)] if named else params, **copy.deepcopy(options))
    for t in range(2):
        for k, p in enumerate(params):
            p.grad = numbers(*p.shape, seed=10 * t + k + seed).float()
        opt.step()
    opt.zero_grad()
    return params, opt


def places(x: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a nest of dicts and lists."""
    found = []
    for key, value in list(x.items()) if isinstance(x, dict) else list(enumerate(x)):
        found.append((x, key))
        if isinstance(value, (dict, list)):
            found += places(value)
    return found


def put_junk(saved: Any, r: random.Random) -> None:
    box, key = r.choice(places(saved))
    box[key] = copy.deepcopy(r.choice(JUNK))


def drop(saved: Any, r: random.Random) -> None:
    box, key = r.choice(places(saved))
    del box[key]


def add(saved: Any, r: random.Random) -> None:
    box, _ = r.choice(places(saved))
    if isinstance(box, dict):
        box[r.choice(["extra", 7, "exp_avg", "lr", "m_exponent"])] = copy.deepcopy(r.choice(JUNK))
    else:
        box.append(copy.deepcopy(r.choice([*JUNK, *box])))


def exchange(saved: Any, r: random.Random) -> None:
    box, key = r.choice(places(saved))
    other = r.choice(list(box) if isinstance(box, dict) else range(len(box)))
    box[key], box[other] = box[other], box[key]


def damage(saved: Any, r: random.Random) -> None:
    tensors = [(box, key) for box, key in places(saved) if isinstance(box[key], Tensor) and box[key].numel()]
    if not tensors:
        return
    box, key = r.choice(tensors)
    x = box[key]
    box[key] = r.choice(
        [
            lambda: x.double(), lambda: x.half(), lambda: x.reshape(-1)[:1], lambda: x.unsqueeze(0), lambda: -x,
            lambda: x * 0, lambda: x.to("meta"), lambda: x.to_sparse(), lambda: x.tolist(), lambda: x + 255,
            lambda: x * float("inf"), lambda: nn.Parameter(x.float()), lambda: x.expand(2, *x.shape)[1],
            lambda: x.cfloat(),
        ]
    )()  # fmt: skip


def shuffle(saved: Any, r: random.Random) -> None:
    boxes = [box[key] for box, key in places(saved) if isinstance(box[key], list)]
    if boxes:
        r.shuffle(r.choice(boxes))


MUTATIONS: list[Callable[[Any, random.Random], None]] = [put_junk, put_junk, drop, add, exchange, damage, shuffle]


def reads_as(opt: FOAM, saved: Any) -> bool:
    """Whether `opt` now is what `saved` says."""
    for group, theirs in zip(opt.param_groups, saved["param_groups"], strict=True):
        for key, x in theirs.items():
            if key == "lr" and isinstance(group[key], Tensor):
                alike = torch.equal(group[key].reshape(()), torch.as_tensor(x, dtype=group[key].dtype).reshape(()))
            else:
                alike = key in ("params", "param_names", "format") or repr(group[key]) == repr(x)
            if not alike:
                return False
        order = theirs["params"]
        if "param_names" in group and theirs.get("param_names") is not None:
            order = [order[theirs["param_names"].index(name)] for name in group["param_names"]]
        for p, i in zip(group["params"], order, strict=True):
            kept, want = opt.state[p], saved["state"].get(i) or {}
            for name, x in kept.items():
                y = want.get(name, torch.zeros_like(x))
                if not torch.equal(x.double(), y.double()) or (name != "step" and x.dtype != y.dtype):
                    return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_it_loads_exactly_or_not_at_all(kind: str) -> None:
    _, opt = made(0, **KINDS[kind])
    _, source = made(100, **KINDS[kind])
    first, sound = copy.deepcopy(opt.state_dict()), source.state_dict()
    before, told = everything(opt), {"loaded": 0, "refused": 0}
    for seed in range(250):
        r = random.Random(seed)
        saved = copy.deepcopy(sound)
        for _ in range(r.choice([1, 1, 2])):
            r.choice(MUTATIONS)(saved, r)
        try:
            opt.load_state_dict(saved)
        except ValueError as e:
            told["refused"] += 1
            assert str(e) and same(everything(opt), before), f"seed {seed}: {e}"
            continue
        told["loaded"] += 1
        assert reads_as(opt, saved), f"seed {seed}"
        for group, sane in zip(opt.param_groups, first["param_groups"], strict=True):  # what a stranger wrote into it
            for key in set(group) - set(sane) - {"params"}:
                del group[key]
            if isinstance(sane["lr"], float):
                group["lr"] = 0.0  # a tensor may have come in its place
        opt.load_state_dict(copy.deepcopy(first))
        assert same(everything(opt), before)
    assert min(told.values()) > 20, told


def test_adamws_too() -> None:
    params, opt = made(0, named=True)
    adamw = torch.optim.AdamW([(f"layers.{i}", p) for i, p in enumerate(params)])
    for k, p in enumerate(params):
        p.grad = numbers(*p.shape, seed=k).float()
    adamw.step()
    sound, first, told = copy.deepcopy(adamw.state_dict()), copy.deepcopy(opt.state_dict()), [0, 0]
    for seed in range(250):
        r = random.Random(seed)
        saved = copy.deepcopy(sound)
        r.choice(MUTATIONS)(saved, r)
        try:
            from_adamw(opt, saved)
        except ValueError:
            told[0] += 1
            assert same(opt.state_dict(), first), f"seed {seed}"
            continue
        told[1] += 1
        assert not any(x.isnan().any() for s in opt.state.values() for x in s.values()), f"seed {seed}"
        opt.load_state_dict(copy.deepcopy(first))
    assert min(told) > 20, told
