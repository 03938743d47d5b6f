"""What every optimizer of the lab is built from: its entry in the table, its settings, and which weights go where.

Matrices and the rest are told apart by torchfoam's own routing, for rivals too, so that all have the same split.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfoam import param_groups

Named = list[tuple[str, Tensor]]

BETAS = (0.9, 0.999)
# half-decade steps; contests follow a best value at an end one further
ADAM_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
HIGH_RATES = (3e-3, 1e-2, 3e-2)
SCALES = (0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Entry:
    """An optimizer that can be chosen by name.

    Args:
        help: one line.
        kind: "module:Class" of the optimizer. The keywords of its constructor are the options a user may give.
        builder: (model, class, settings, **options) -> optimizer; its keyword-only arguments are options too.
        lr, betas, scale: taken where the settings leave them empty.
        source: where these defaults, and the values in `tune`, come from.
        options: options taken where the settings leave them empty.
        tune: what a contest tries, in turns, each with the best of the others so far: lr, scale or an option ->
            values, rising. A best value at an end is followed one further.
        install: what to install where the class cannot be imported.
        limits: what this implementation cannot do, in words.
        resumable: whether a checkpoint can bring its state back.
        adapts: whether it trains adapters of its own, which become part of the model, and freezes the rest.
        finetune: rate for fine-tuning where the settings leave it empty; None: no rate is known, it must be given.
    """

    help: str
    kind: str
    builder: Callable[..., Optimizer]
    lr: float
    betas: tuple[float, float]
    scale: float
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tune: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    install: str = ""
    limits: str = ""
    resumable: bool = True
    adapts: bool = False
    finetune: float | None = None

    @property
    def ours(self) -> bool:
        """Whether it is torchfoam's own optimizer."""
        return self.kind.startswith("torchfoam:")


@dataclass(frozen=True)
class Settings:
    """OptimizerConfig with nothing left empty."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    scale: float

    @property
    def adam(self) -> dict[str, Any]:
        """What all of Adam's kind take."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}


def trainable(model: nn.Module) -> Named:
    """(name, parameter) of all that is trained; tied ones once."""
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def split(model: nn.Module, s: Settings, always: bool = False) -> list[dict[str, Any]]:
    """The routing of FOAM for any optimizer: matrices at scale * lr, all else at lr; one group where scale is 1."""
    if s.scale == 1 and not always:
        return [{"name": "all", "params": trainable(model)}]
    names = {"folded": ("matrices", s.lr * s.scale), "unfolded": ("rest", s.lr)}
    return [
        {"name": names[g["name"]][0], "params": g["params"], "lr": names[g["name"]][1]} for g in param_groups(model)
    ]


def matrices(model: nn.Module) -> tuple[Named, Named]:
    """(attention and MLP matrices of two dimensions, all else): what takes 2-D weights alone leaves stacked experts."""
    flat = {n: p for n, p in param_groups(model)[0]["params"] if p.ndim == 2}
    return list(flat.items()), [(n, p) for n, p in trainable(model) if n not in flat]


def plain_adamw(params: Named, s: Settings, name: str = "rest") -> Optimizer:
    """torch's AdamW, fused where it can be."""
    fused = all(p.device.type in ("cpu", "cuda") for _, p in params)
    return torch.optim.AdamW([{"name": name, "params": params}], **s.adam, fused=fused)


class Routed(Optimizer):
    """Several optimizers, each for its own parameters, behind one face: one list of groups, one state dict.

    Args:
        parts: optimizers over disjoint parameters. Their groups are shared, so a schedule set here reaches them.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._link(self.param_groups)

    def _link(self, groups: list[dict[str, Any]]) -> None:
        """Share groups and state with the parts, by reference."""
        self.param_groups = groups
        for part in self.parts:
            part.state = self.state
            part.param_groups, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` gave: each part loads its share in its own way (8-bit state must not be cast)."""
        saved, groups, state = state_dict["param_groups"], self.param_groups, self.state
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
            raise ValueError("the saved state has other groups or numbers of parameters than this optimizer")
        loaded: dict[Any, Any] = {}
        try:
            for part in self.parts:
                own, saved = saved[: len(part.param_groups)], saved[len(part.param_groups) :]
                numbers = {i for g in own for i in g["params"]}
                share = {i: x for i, x in state_dict["state"].items() if i in numbers}
                part.load_state_dict({"state": share, "param_groups": own})
                loaded |= part.state
        except Exception:  # a part that has loaded holds new dicts: all go back to the old ones
            self._link(groups)
            raise
        state.clear()
        state.update(loaded)
        self._link([g for part in self.parts for g in part.param_groups])


@contextmanager
def hushed() -> Iterator[None]:
    """Let imports in the block pass over one line of bitsandbytes: it misses a package for inference in 4 bits."""
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")

    def relevant(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")

    log.addFilter(relevant)
    try:
        yield
    finally:
        log.removeFilter(relevant)
