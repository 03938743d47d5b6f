"""Optimizers by name over a toy model, and a few steps of either."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from foamlab.config import OptimizerConfig
from foamlab.optimizers.registry import OPTIMIZERS, build

PACKAGES = {"adamw8bit": "bitsandbytes", "flash-adamw": "pytorch_optimizer", "galore": "pytorch_optimizer"}
PACKAGES |= {"adam-mini": "adam_mini", "lora": "peft"}
NAMES = [n for n in OPTIMIZERS if n not in PACKAGES or find_spec(PACKAGES[n])]  # `make test` installs them all
# what an optimizer needs to be built over random weights
NEEDS = {"lora": {"from_scratch": True, "rank": 2}}


def make(name: str, model: nn.Module, **settings: Any) -> Any:
    return build(OptimizerConfig(name, options=NEEDS.get(name, {}), **settings), model)


class Toy(nn.Module):
    """Odd sizes, a tied head, a scalar, a frozen weight, and a layer that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.body: Any = nn.ModuleList([nn.Linear(7, 9), nn.Linear(9, 7)])
        self.norm = nn.LayerNorm(7)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.dead = nn.Linear(7, 5)
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
        self.lm_head = nn.Linear(7, 13, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.lm_head(self.norm(x + self.body[1](self.body[0](x).tanh())) * self.gain)


def toy(device: str = "cpu") -> Toy:
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        return Toy()


def descend(opt: Any, loss_at: Callable[[int], Tensor], steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_at(step)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def learn(model: nn.Module, opt: Any, steps: int, first: int = 0) -> list[float]:
    """Steps of a toy over two batches in turn, whose tokens are to be told one on."""

    def loss_at(step: int) -> Tensor:
        ids = torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(step % 2))
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())

    return descend(opt, loss_at, range(first, first + steps))


def train_on(model: nn.Module, opt: Any, steps: int) -> list[float]:
    """Steps of a language model over one batch."""
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
    return descend(opt, lambda step: model(input_ids=ids, labels=ids).loss, range(steps))
