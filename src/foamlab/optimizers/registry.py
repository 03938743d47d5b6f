"""Which optimizers there are: a table of names, each with defaults of its own and where those come from.

A rival is one entry, and one function if its groups are unusual. This room chooses parameters and keywords; it
implements no update rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchfoam import PAPER, param_groups

from .. import settings
from ..config import OptimizerConfig
from ..errors import UserError, known_name
from .entry import ADAM_RATES, BETAS, HIGH_RATES, SCALES, Entry, Routed, Settings, hushed, matrices, plain_adamw, split
from .external import RIVALS

# options that the meta device cannot judge, and those that only the whole model can
ON_DEVICE, OF_MODEL = ("backend", "fused"), ("overrides", "no_decay", "state_budget")
# what OptimizerConfig holds itself: not to be given again among its options
OWN = ("params", "lr", "betas", "eps", "weight_decay", "scale")


def foam(
    model: nn.Module,
    kind: type,
    s: Settings,
    *,
    level: Any = 2,
    overrides: dict[str, dict[str, Any]] | None = None,
    no_decay: Any = False,
    state_budget: Any = None,
    backend: str | None = None,
    **options: Any,
) -> Optimizer:
    """FOAM over torchfoam's routing: attention and MLP matrices fold, the rest is plain Adam at the full rate."""
    groups = param_groups(
        model, level=level, scale=s.scale, overrides=overrides, no_decay=no_decay, state_budget=state_budget, **options
    )
    return kind(groups, lr=s.lr, betas=s.betas, eps=s.eps, weight_decay=s.weight_decay, backend=backend)


def adamw(model: nn.Module, kind: type, s: Settings, **options: Any) -> Optimizer:
    """AdamW: fused where it can be; matrices at scale * lr."""
    if not {"fused", "foreach"} & set(options):
        options["fused"] = all(p.device.type in ("cpu", "cuda") for p in model.parameters())
    return kind(split(model, s), **s.adam, **options)


def sgd(model: nn.Module, kind: type, s: Settings, **options: Any) -> Optimizer:
    """SGD whose momentum is the first beta."""
    options.setdefault("momentum", s.betas[0])
    return kind(split(model, s), lr=s.lr, weight_decay=s.weight_decay, **options)


def adafactor(model: nn.Module, kind: type, s: Settings, **options: Any) -> Optimizer:
    """torch's Adafactor: no first moment, a row and a column for the second; its two eps are its own."""
    return kind(split(model, s), lr=s.lr, weight_decay=s.weight_decay, **options)


def muon(
    model: nn.Module, kind: type, s: Settings, *, adjust_lr_fn: str = "match_rms_adamw", **options: Any
) -> Optimizer:
    """Muon for matrices at scale * lr, AdamW for the rest (and for stacked experts: Muon takes 2-D weights alone)."""
    flat, rest = matrices(model)
    group = {"name": "matrices", "params": flat, "lr": s.lr * s.scale}
    first = kind([group], weight_decay=s.weight_decay, adjust_lr_fn=adjust_lr_fn, **options)
    return Routed(first, plain_adamw(rest, s)) if rest else first


def ablation(model: nn.Module, kind: type, s: Settings, *, level: Any = 2, **options: Any) -> Optimizer:
    """FOAM's routing for `FoldAblation`."""
    return kind(param_groups(model, level=level, scale=s.scale), **s.adam, **options)


FIRST = "docs/algorithm.md: the rate one would use for AdamW"
PAPERS = "the FOAM paper's pre-training recipe"
HALF = "; contests try half-decade steps of lr around it"
BY_TWO = "; contests try half-decade steps of lr, then alpha by factors of 2"
EVIDENCE = "adamw-split's: best of a small grid on a 1 M model" + BY_TWO
BOTH = {"lr": HIGH_RATES, "scale": SCALES}


# the paper's update rule, which the library's defaults depart from (docs/algorithm.md)
RULE = {key: PAPER[key] for key in ("bias_correction", "residual_in_v")}


def _paper(help: str, **options: Any) -> Entry:
    """FOAM with the rule and the rates of its paper."""
    options = {**RULE, **options}
    source = PAPERS + BY_TWO
    return Entry(help, "torchfoam:FOAM", foam, PAPER["lr"], PAPER["betas"], PAPER["scale"], source, options, BOTH)


def _split(help: str, **options: Any) -> Entry:
    """FOAM with AdamW's two rates."""
    return Entry(help, "torchfoam:FOAM", foam, 1e-2, (0.9, 0.95), 0.12, EVIDENCE, options, BOTH)


OPTIMIZERS: dict[str, Entry] = {
    "foam": Entry(
        "FOAM, plain: level 2, matrices at AdamW's own rate",
        "torchfoam:FOAM", foam, 1e-3, BETAS, 1.0, FIRST + HALF, finetune=1e-4, tune={"lr": ADAM_RATES},
    ),
    "foam-split": _split("FOAM, level 2, matrices at a lower rate than the rest", level=2),
    "foam-l3": _split("FOAM with blocks of 8", level=3),
    "foam-row": _split("FOAM with one block a row: next to no state for matrices", level="row"),
    "foam-int8": _split("FOAM, level 2, all state in 8 bits", level=2, state="int8"),
    "foam-mini": _split("FOAM with Adam-mini: folded momentum, one second moment a row", level=2, rule="mini"),
    "foam-paper": _paper(
        "FOAM by the paper's rule: level 2, matrices at a quarter of a high rate", level=PAPER["level"]
    ),
    "foam-muon": _paper(
        "FOAM with Muon: folded momentum, orthogonalised", level=2, rule="muon", adjust_lr="match_rms_adamw"
    ),
    "foam-no-residual": _paper("ablation: FOAM without the residual", level=2, residual=0.0),
    "foam-square-mean": _paper("ablation: FOAM with the square of the mean", level=2, second_moment="square_mean"),
    "foam-ablation": Entry(
        "for `foamlab ablate`: the paper's FOAM in plain torch, folded along rows or columns",
        "foamlab.optimizers.fold_ablation:FoldAblation", ablation, PAPER["lr"], PAPER["betas"], PAPER["scale"], PAPERS,
        {"level": PAPER["level"]}, BOTH, limits="slow; for studies only",
    ),
    "adamw": Entry(
        "torch's AdamW (fused), one rate for all",
        "torch.optim:AdamW", adamw, 1e-3, BETAS, 1.0, "torch" + HALF, finetune=1e-4, tune={"lr": ADAM_RATES},
    ),
    "adamw-split": Entry(
        "torch's AdamW with FOAM's split of rates: matrices lower",
        "torch.optim:AdamW", adamw, 1e-2, (0.9, 0.95), 0.12, EVIDENCE, tune=BOTH,
    ),
    "muon": Entry(
        "torch's Muon for matrices, AdamW for the rest",
        "torch.optim:Muon", muon, 1e-2, (0.9, 0.95), 0.25,
        PAPERS + ", its rates taken over as they are; contests give it the same grid", tune=BOTH,
    ),
    "adafactor": Entry(
        "torch's Adafactor", "torch.optim:Adafactor", adafactor, 1e-2, BETAS, 1.0, "torch" + HALF,
        tune={"lr": (3e-3, 1e-2, 3e-2, 1e-1)},
    ),
    "sgd": Entry(
        "SGD with momentum (the first beta)", "torch.optim:SGD", sgd, 1e-1, (0.9, 0.0), 1.0, "customary" + HALF,
        tune={"lr": (3e-2, 1e-1, 3e-1, 1.0)},
    ),
    **RIVALS,
}  # fmt: skip


def ours(name: str) -> bool:
    """Whether an entry is torchfoam's own optimizer."""
    return _entry(name).ours


def resolve(config: OptimizerConfig, finetune: bool = False) -> OptimizerConfig:
    """The settings with every empty field filled by the optimizer's own defaults, for pre-training or for fine-tuning.

    Raises:
        UserError: an unknown name, or an option that the optimizer does not take, and the nearest is offered; a rate,
            beta, eps or decay that makes no sense, or no rate where none is known for fine-tuning; a switch that is
            neither true nor false.
    """
    entry = _entry(config.name)
    known = _options(entry)
    for option in config.options:
        if option in OWN:
            raise UserError(f"optimizer.options.{option}: use --optimizer.{option}")
        known_name(option, known, f"option of {config.name}")
    kinds = _kinds(entry)
    given = {key: settings.read(kinds[key], x, f"optimizer.options.{key}") for key, x in config.options.items()}
    if (lr := entry.finetune if finetune else entry.lr) is None and config.lr is None:
        raise UserError(f"no rate of {config.name} is known for fine-tuning: give one with --optimizer.lr")
    full = OptimizerConfig(
        name=config.name,
        lr=lr if config.lr is None else config.lr,
        betas=entry.betas if config.betas is None else config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        scale=entry.scale if config.scale is None else config.scale,
        options={**entry.options, **given},
    )
    return settings.section("optimizer", full)  # not all packages look at theirs


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
    known = full.options
    if any(p.is_meta for p in model.parameters()):  # what cannot be fused there takes the same state
        known = {key: value for key, value in known.items() if key != "fused"}
    try:
        return entry.builder(model, _kind(entry), s, **known)
    except (ValueError, TypeError, RuntimeError) as e:
        raise UserError(f"optimizer {full.name}: {e}") from e


def dry_build(config: OptimizerConfig, model: nn.Module, device: torch.device) -> Optimizer:
    """The optimizer over a model on the meta device, so that what `build` would refuse on `device` is told early.

    Options that only a device can judge are tried on one small matrix there. Random state is left alone.

    Raises:
        UserError: what `build` raises.
    """
    with torch.random.fork_rng(devices=[]):
        if any(config.options.get(key) is not None for key in ON_DEVICE):
            options = {key: value for key, value in config.options.items() if key not in OF_MODEL}
            build(replace(config, options=options), nn.Sequential(nn.Linear(8, 8, bias=False, device=device)))
        return build(config, model)


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
        with hushed():
            return resolve_name(entry.kind)
    except (ImportError, AttributeError) as e:
        raise UserError(f"{entry.kind} cannot be imported ({e}): pip install {entry.install or 'a newer torch'}") from e


def _options(entry: Entry) -> dict[str, Any]:
    """The options and their defaults."""
    return {key: p.default for key, p in _parameters(entry).items()}


def _kinds(entry: Entry) -> dict[str, Any]:
    """What each option may hold, as far as its builder's annotation or its default tells: packages seldom look whether
    a switch is one, and "no" is as true as "yes" to them."""
    hints, kinds = get_type_hints(entry.builder), {bool: bool, float: float}
    return {key: hints.get(key) or kinds.get(type(p.default), Any) for key, p in _parameters(entry).items()}


def _parameters(entry: Entry) -> dict[str, inspect.Parameter]:
    own = inspect.signature(entry.builder).parameters
    passed_on = any(p.kind is p.VAR_KEYWORD for p in own.values())
    keywords = {**inspect.signature(_kind(entry)).parameters} if passed_on else {}
    keywords |= {k: p for k, p in own.items() if p.kind is p.KEYWORD_ONLY}
    return {k: p for k, p in keywords.items() if k not in OWN and p.kind is not p.VAR_KEYWORD}
