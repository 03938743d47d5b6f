"""Toy models and helpers for the library's tests.

A toy always has a dead layer (never a gradient), odd sizes, a scalar and a tied weight.
"""

from __future__ import annotations

import copy
import io
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchfoam import FOAM

# the kinds of state that go through checkpoints
SAVED: dict[str, dict[str, Any]] = {
    "level 2": {"level": 2},
    "row, int8": {"level": "row", "state": "int8"},
    "bfloat16": {"level": 3, "state": "bfloat16", "seed": 5},
    "mini": {"rule": "mini"},
    "muon": {"rule": "muon"},
}


class Toy(nn.Module):
    """A tied embedding and head, odd matrices that leave ragged blocks, a norm, a scalar, and a layer never used."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 10)
        self.up = nn.Linear(10, 7)
        self.down = nn.Linear(7, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.dead = nn.Linear(5, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.lm_head = nn.Linear(10, 11, bias=False)
        self.lm_head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        return self.lm_head(self.norm(x)) * self.temperature

    def loss(self, seed: int) -> Tensor:
        tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(seed))
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def toy(dtype: torch.dtype = torch.float32, seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    return Toy(dtype)


def train(model: Toy, opt: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for k in range(start, start + steps):
        opt.zero_grad()
        model.loss(k).backward()
        opt.step()


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def everything(opt: torch.optim.Optimizer) -> Any:
    """A deep copy of weights, state and groups: to compare before and after."""
    weights = [p.detach().clone() for g in opt.param_groups for p in g["params"]]
    return weights, copy.deepcopy(opt.state_dict())


def same(a: Any, b: Any) -> bool:
    """Equal through and through, tensors bit for bit and of one dtype."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def through_a_file(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def split(groups: list[dict[str, Any]]) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The folded and the unfolded parameters of groups, by name."""
    folded = {n: p for g in groups for n, p in g["params"] if g["level"] != 0}
    return folded, {n: p for g in groups for n, p in g["params"] if g["level"] == 0}


def allocated(opt: torch.optim.Optimizer) -> int:
    """Bytes of all storages that the state holds, each once."""
    storages = {s.data_ptr(): s for d in opt.state.values() for x in d.values() if (s := x.untyped_storage()).nbytes()}
    return sum(s.nbytes() for s in storages.values())


class Bytes(nn.Module):
    """A language model over bytes: the last eight, embedded, through a residual MLP."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, 16)
        self.mix = nn.Linear(8 * 16, 64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.lm_head = nn.Linear(64, 256, bias=False)
        self.to(dtype)

    def loss(self, text: Tensor) -> Tensor:
        x = self.mix(self.embed(text.unfold(0, 9, 1)[:, :-1]).flatten(1))
        x = x + self.down(nn.functional.gelu(self.up(nn.functional.rms_norm(x, (64,)))))
        return nn.functional.cross_entropy(self.lm_head(x).float(), text[8:])


def learn(opt_class: Any, dtype: torch.dtype = torch.float32, **options: Any) -> float:
    """Validation loss after 300 steps on Python's own source text, the weights held in `dtype`."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    held_out, model = text[:4096], Bytes(dtype)
    opt = opt_class(model if opt_class is FOAM else model.parameters(), **options)
    places = torch.randint(4096, len(text) - 520, (300,), generator=torch.Generator().manual_seed(1))
    for k, place in enumerate(places.tolist()):
        for group in opt.param_groups:
            group["lr"] = options["lr"] * min((k + 1) / 30, 1.1 - k / 300)
        opt.zero_grad()
        model.loss(text[place : place + 520]).backward()
        opt.step()
    with torch.no_grad():
        return model.loss(held_out).item()
