"""Which optimizers there are: a table of names, each with defaults of its own and where those come from.

A rival is one entry, and one function if its groups are unusual. This room chooses parameters and keywords; it
implements no update rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchfoam import PAPER, param_groups

from .config import OptimizerConfig, UserError, known_name

# what OptimizerConfig holds itself: not to be given again among its options
OWN = ("params", "lr", "betas", "eps", "weight_decay", "scale")


@dataclass(frozen=True)
class Entry:
    """An optimizer that can be chosen by name.

    Args:
        help: one line.
        kind: "module:Class" of the optimizer. The keywords of its constructor are the options a user may give.
        builder: (model, class, settings, **options) -> optimizer; its keyword-only arguments are options too.
        lr, betas, scale: taken where the settings leave them empty.
        source: where these defaults come from.
        options: options taken where the settings leave them empty.
        install: what to install where the class cannot be imported.
    """

    help: str
    kind: str
    builder: Callable[..., Optimizer]
    lr: float
    betas: tuple[float, float]
    scale: float
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    install: str = ""


@dataclass(frozen=True)
class Settings:
    """OptimizerConfig with nothing left empty."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    scale: float


def foam(
    model: nn.Module,
    kind: type,
    s: Settings,
    *,
    level: Any = 2,
    overrides: Any = None,
    state_budget: Any = None,
    backend: str | None = None,
    **options: Any,
) -> Optimizer:
    """FOAM over torchfoam's routing: attention and MLP matrices fold, the rest is plain Adam at the full rate."""
    groups = param_groups(model, level=level, scale=s.scale, overrides=overrides, state_budget=state_budget, **options)
    return kind(groups, lr=s.lr, betas=s.betas, eps=s.eps, weight_decay=s.weight_decay, backend=backend)


def adamw(model: nn.Module, kind: type, s: Settings, **options: Any) -> Optimizer:
    """AdamW: fused where it can be; matrices at scale * lr."""
    if not {"fused", "foreach"} & set(options):
        options["fused"] = all(p.device.type in ("cpu", "cuda") for p in model.parameters())
    return kind(split(model, s), lr=s.lr, betas=s.betas, eps=s.eps, weight_decay=s.weight_decay, **options)


def sgd(model: nn.Module, kind: type, s: Settings, **options: Any) -> Optimizer:
    """SGD whose momentum is the first beta."""
    options.setdefault("momentum", s.betas[0])
    return kind(split(model, s), lr=s.lr, weight_decay=s.weight_decay, **options)


def muon(
    model: nn.Module, kind: type, s: Settings, *, adjust_lr_fn: str = "match_rms_adamw", **options: Any
) -> Optimizer:
    """Muon for matrices at scale * lr, AdamW for the rest (and for stacked experts: Muon takes 2-D weights alone)."""
    groups = split(model, s, always=True)
    flat = {n: p for n, p in groups[0].pop("params") if p.ndim == 2}
    rest = [(n, p) for n, p in model.named_parameters() if p.requires_grad and n not in flat]
    fused = all(p.device.type in ("cpu", "cuda") for p in model.parameters())
    return Routed(
        kind(
            [{**groups[0], "params": list(flat.items())}],
            weight_decay=s.weight_decay,
            adjust_lr_fn=adjust_lr_fn,
            **options,
        ),
        torch.optim.AdamW(
            [{"name": "rest", "params": rest}],
            lr=s.lr,
            betas=s.betas,
            eps=s.eps,
            weight_decay=s.weight_decay,
            fused=fused,
        ),
    )


def split(model: nn.Module, s: Settings, always: bool = False) -> list[dict[str, Any]]:
    """The routing of FOAM for any optimizer: matrices at scale * lr, all else at lr; one group where scale is 1."""
    if s.scale == 1 and not always:
        return [{"name": "all", "params": [(n, p) for n, p in model.named_parameters() if p.requires_grad]}]
    names = {"folded": ("matrices", s.lr * s.scale), "unfolded": ("rest", s.lr)}
    return [
        {"name": names[g["name"]][0], "params": g["params"], "lr": names[g["name"]][1]} for g in param_groups(model)
    ]


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
        """Load what `state_dict()` gave, as torch does, and hand each part its share."""
        super().load_state_dict(state_dict)
        self._link(self.param_groups)


FIRST = "docs/algorithm.md: the rate one would use for AdamW"
PAPERS = "the FOAM paper's pre-training recipe"
EVIDENCE = "best of a small grid on a 1 M model"

OPTIMIZERS: dict[str, Entry] = {
    "foam": Entry(
        "FOAM, plain: level 2, matrices at AdamW's own rate", "torchfoam:FOAM", foam, 1e-3, (0.9, 0.999), 1.0, FIRST
    ),
    "foam-paper": Entry(
        "FOAM as in the paper: level 2, matrices at a quarter of a high rate",
        "torchfoam:FOAM", foam, PAPER["lr"], PAPER["betas"], PAPER["scale"], PAPERS, {"level": PAPER["level"]},
    ),
    "foam-row": Entry(
        "FOAM with one block a row: next to no state for matrices",
        "torchfoam:FOAM", foam, PAPER["lr"], PAPER["betas"], PAPER["scale"], PAPERS, {"level": "row"},
    ),
    "adamw": Entry(
        "torch's AdamW (fused), one rate for all", "torch.optim:AdamW", adamw, 1e-3, (0.9, 0.999), 1.0, "torch"
    ),
    "adamw-split": Entry(
        "torch's AdamW with FOAM's split of rates: matrices lower",
        "torch.optim:AdamW", adamw, 1e-2, (0.9, 0.95), 0.12, EVIDENCE,
    ),
    "muon": Entry(
        "torch's Muon for matrices, AdamW for the rest",
        "torch.optim:Muon", muon, 1e-2, (0.9, 0.95), 0.25, PAPERS + ", its rates taken over as they are",
    ),
    "sgd": Entry("SGD with momentum (the first beta)", "torch.optim:SGD", sgd, 1e-1, (0.9, 0.0), 1.0, "customary"),
}  # fmt: skip


def resolve(config: OptimizerConfig) -> OptimizerConfig:
    """The settings with every empty field filled by the optimizer's own defaults.

    Raises:
        UserError: an unknown name, or an option that the optimizer does not take; the nearest is offered.
    """
    entry = _entry(config.name)
    known = _options(entry)
    for option in config.options:
        if option in OWN:
            raise UserError(f"optimizer.options.{option}: use --optimizer.{option}")
        known_name(option, known, f"option of {config.name}")
    return OptimizerConfig(
        name=config.name,
        lr=entry.lr if config.lr is None else config.lr,
        betas=entry.betas if config.betas is None else (config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        scale=entry.scale if config.scale is None else config.scale,
        options={**entry.options, **config.options},
    )


def build(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """The optimizer over a model's trainable parameters, each in exactly one group.

    Groups carry a `name`, and a `lr` of their own that a schedule must multiply, not replace.

    Raises:
        UserError: an unknown name or option, or values that the optimizer refuses.
    """
    full = resolve(config)
    entry = _entry(full.name)
    assert full.lr is not None and full.betas is not None and full.scale is not None
    s = Settings(full.lr, full.betas, full.eps, full.weight_decay, full.scale)
    try:
        return entry.builder(model, _kind(entry), s, **full.options)
    except (ValueError, TypeError, RuntimeError) as e:
        raise UserError(f"optimizer {full.name}: {e}") from e


def options(name: str) -> dict[str, Any]:
    """The options of an optimizer and their defaults (`inspect.Parameter.empty` where there is none)."""
    entry = _entry(name)
    return {**_options(entry), **entry.options}


def state_bytes(optimizer: Optimizer, group: Mapping[str, Any] | None = None) -> int:
    """Bytes of all tensors in an optimizer's state (or one group's), wherever they hide: subclasses, lists, objects.

    Exact on the meta device too. Most optimizers create their state in the first step: before it they have none.
    """
    seen: dict[int, int] = {}
    states = optimizer.state.values() if group is None else [optimizer.state.get(p) for p in group["params"]]
    _collect(list(states), seen)
    return sum(seen.values())


def _collect(x: Any, seen: dict[int, int]) -> None:
    if id(x) in seen:
        return
    if isinstance(x, Tensor) and is_traceable_wrapper_subclass(x):
        seen[id(x)] = 0
        for name in x.__tensor_flatten__()[0]:
            _collect(getattr(x, name), seen)
    elif isinstance(x, Tensor):
        seen[id(x)] = x.numel() * x.element_size()
    elif isinstance(x, Mapping):
        for value in x.values():
            _collect(value, seen)
    elif isinstance(x, (list, tuple)):
        for value in x:
            _collect(value, seen)
    elif hasattr(x, "__dict__") and not isinstance(x, (type, nn.Module)):
        seen[id(x)] = 0
        _collect(vars(x), seen)


def _entry(name: str) -> Entry:
    return OPTIMIZERS[known_name(name, OPTIMIZERS, "optimizer")]


def _kind(entry: Entry) -> type:
    try:
        return resolve_name(entry.kind)
    except (ImportError, AttributeError) as e:
        raise UserError(f"{entry.kind} cannot be imported ({e}): pip install {entry.install or 'a newer torch'}") from e


def _options(entry: Entry) -> dict[str, Any]:
    keywords = {**inspect.signature(_kind(entry)).parameters}
    keywords |= {k: p for k, p in inspect.signature(entry.builder).parameters.items() if p.kind is p.KEYWORD_ONLY}
    return {k: p.default for k, p in keywords.items() if k not in OWN and p.kind is not p.VAR_KEYWORD}
