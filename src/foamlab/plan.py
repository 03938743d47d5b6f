"""How much memory a run needs, before it runs. `plan(...)` is the door; it allocates nothing but a few megabytes.

Exact: weights, gradients and optimizer state, counted on the real model and optimizer on the meta device. Simulated:
what the passes and the step need besides (`simulate.py`). Assumed: the CUDA context and the allocator's slack.
What fits a card is `fit.py`'s to find; predictions are held against real steps by `calibrate.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from torchfoam import FOAM, backends

from . import models, optimizers, simulate
from .cards import memory
from .config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig, UserError
from .objective import loss_fn

# Assumed, not measured: what a CUDA context with torch's kernels and cuBLAS takes, and the share of everything else
# that the caching allocator loses to rounding and fragments.
CONTEXT = 600 * 10**6
SLACK = 0.03
# the backend of FOAM that performs a step on each kind of device without tensors of its own
FUSED = {"cpu": "cpu", "cuda": "triton"}


@dataclass(frozen=True)
class Plan:
    """What one process of a run needs; all sizes in bytes.

    Args:
        config: the settings planned for, nothing left open.
        device: "cpu" or "cuda".
        vocabulary, parameters, trainable: of the model; tied weights count once.
        exact: "weights", "gradients", "state": all of them, exactly. (State counts torch's step counters, which
            non-fused optimizers keep in the host's memory, 4 bytes a tensor.)
        peak: what is there at the fullest moment of a step: "weights", "buffers", "state", "gradients",
            "activations", "logits", "temporaries"; on several GPUs "buckets" of DistributedDataParallel; on CUDA
            "context" and "slack", which are assumed.
        where: which moment that is.
        capacity, card: what there is, and what it was called; None where nothing was asked.
    """

    config: RunConfig
    device: str
    vocabulary: int
    parameters: int
    trainable: int
    exact: dict[str, int]
    peak: dict[str, int]
    where: str
    capacity: int | None = None
    card: str = ""

    @property
    def total(self) -> int:
        """Bytes at the fullest moment."""
        return sum(self.peak.values())

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.total <= self.capacity

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "total": self.total, "fits": self.fits}


def plan(
    model: str | ModelConfig | RunConfig | nn.Module | Any,
    optimizer: str | OptimizerConfig = "foam",
    *,
    card: str | int | None = None,
    device: str | None = None,
    batch: int = 1,
    micro_batch: int = 0,
    sequence: int = 1024,
    precision: str = "auto",
    checkpointing: bool = False,
    gpus: int = 1,
    lora: int = 0,
    **options: Any,
) -> Plan:
    """What a training run needs, component by component.

        peak = max over a step of  weights + state + gradients(t) + activations(t) + logits(t) + temporaries(t)

    Args:
        model: a preset or a Hugging Face folder; a transformers configuration; a module (it is copied without its
            weights); or a whole `RunConfig`, and then all settings but card, device, gpus and lora are taken from it.
        optimizer: an entry of OPTIMIZERS, or its settings; `options` are its further keywords (level, state, ...).
        card: a card's name or a size ("24GB"), to compare with.
        device: "cuda" (default) or "cpu", whose kernels and overheads are meant.
        batch: rows a step; micro_batch: rows a pass, 0 means all; sequence: tokens a row.
        precision: float32, bfloat16, mixed; auto is mixed on CUDA and float32 on CPUs.
        checkpointing: activations are computed again in the backward pass.
        gpus: data-parallel processes that share the batch.
        lora: rank of adapters on all linear layers; 0 trains all weights.

    Raises:
        UserError: an unknown model, optimizer, option, card or size; a model that cannot be simulated.
    """
    if isinstance(model, RunConfig):
        config = model
    else:
        settings = optimizer if isinstance(optimizer, OptimizerConfig) else OptimizerConfig(name=optimizer)
        named = model if isinstance(model, ModelConfig) else ModelConfig(name=model if isinstance(model, str) else "")
        config = RunConfig(
            model=replace(named, checkpointing=named.checkpointing or checkpointing),
            data=DataConfig(sequence=sequence),
            optimizer=replace(settings, options={**settings.options, **options}),
            train=TrainConfig(batch=batch, micro_batch=micro_batch, precision=precision),  # type: ignore[arg-type]
        )
    source = None if isinstance(model, (str, ModelConfig, RunConfig)) else model
    return Planner(config, source, device or "cuda", gpus=gpus, lora=lora, card=card).plan(config)


@dataclass
class Planner:
    """Plans variants of one run, and remembers what they share.

    Args:
        base: settings that say which model.
        source: a module or transformers configuration in its place.
        device, gpus, lora, card: as in `plan`.
        vocabulary: tokens of the model; None takes its own.
    """

    base: RunConfig
    source: Any = None
    device: str = "cuda"
    gpus: int = 1
    lora: int = 0
    card: str | int | None = None
    vocabulary: int | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.device.partition(":")[0] not in FUSED:
            raise UserError(f"cannot plan for device {self.device!r}: use cpu or cuda")
        self.device = self.device.partition(":")[0]
        for name in ("gpus", "lora"):
            if getattr(self, name) < (name == "gpus"):
                raise UserError(f"{name} must be at least {int(name == 'gpus')}, got {getattr(self, name)}")
        self.capacity = memory(self.card) if isinstance(self.card, str) and self.card else self.card or None

    def plan(self, config: RunConfig) -> Plan:
        """What `config` needs."""
        config = self.settle(config)
        model = self.model(config)
        params = list(model.parameters())
        trainable = [p for p in params if p.requires_grad]
        gradients = sum(p.nbytes for p in trainable)
        optimizer = self.optimizer(config)
        state = optimizer.state
        exact = {"weights": sum(p.nbytes for p in params), "gradients": gradients, "state": state}
        fixed = {"weights": exact["weights"], "buffers": sum(b.nbytes for b in model.buffers()), "state": state}
        passes = self.passes(config)
        step = {
            "gradients": 0 if released(config) else gradients,
            "activations": 0,
            "logits": 0,
            "temporaries": optimizer.scratch,
        }
        where, moving = max(
            (passes.where, passes.bytes), ("optimizer step", step), key=lambda item: sum(item[1].values())
        )
        peak = {**fixed, **moving}
        if self.gpus > 1:
            peak["buckets"] = gradients  # DistributedDataParallel keeps a second copy to exchange
        if self.device == "cuda":
            peak |= {"slack": int(SLACK * sum(peak.values())), "context": CONTEXT}
        return Plan(
            config, self.device, simulate.vocabulary_of(model), sum(p.numel() for p in params),
            sum(p.numel() for p in trainable), exact, peak, where, self.capacity, str(self.card or ""),
        )  # fmt: skip

    def settle(self, config: RunConfig) -> RunConfig:
        """The settings with precision, optimizer and micro-batch resolved; UserError for impossible ones."""
        t, rows = config.train, config.train.batch // self.gpus
        if config.data.sequence < 1 or t.batch < 1 or t.micro_batch < 0:
            raise UserError(
                f"cannot plan for batch {t.batch}, micro-batch {t.micro_batch}, sequence {config.data.sequence}: "
                "they must be positive"
            )
        if t.batch % self.gpus:
            raise UserError(f"train.batch must be a multiple of the {self.gpus} GPUs, got {t.batch}")
        precision = t.precision if t.precision != "auto" else "mixed" if self.device == "cuda" else "float32"
        if precision not in ("float32", "bfloat16", "mixed"):
            raise UserError(f"unknown precision {precision!r}: use auto, float32, bfloat16 or mixed")
        micro = min(t.micro_batch or rows, rows)
        train = replace(t, precision=precision, micro_batch=micro)
        return replace(config, optimizer=optimizers.resolve(config.optimizer), train=train)

    def model(self, config: RunConfig) -> nn.Module:
        """The model on the meta device."""
        key = ("model", config.train.precision == "bfloat16", config.data.sequence)
        if key not in self._cache:
            dtype = torch.bfloat16 if config.train.precision == "bfloat16" else torch.float32
            self._cache[key] = self.adapted(self.bare(config, dtype))
            self._cache[key].train()
        model: Any = self._cache[key]
        if self._cache.get((key, "checkpointing"), False) != config.model.checkpointing:
            if not hasattr(model, "gradient_checkpointing_enable"):
                raise UserError(f"{type(model).__name__} has no switch for checkpointing: plan without it")
            if config.model.checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()
            self._cache[key, "checkpointing"] = config.model.checkpointing
        return model

    def positions(self, config: RunConfig) -> int:
        """Longest sequence that the model's own configuration allows; 0 if nothing limits it."""
        if self.source is None and config.model.name in models.MODELS:
            return 0
        text = getattr(self.model(config), "config", None)
        return getattr(text.get_text_config(), "max_position_embeddings", 0) or 0 if text is not None else 0

    def bare(self, config: RunConfig, dtype: torch.dtype) -> nn.Module:
        """The model before adapters and switches."""
        if isinstance(self.source, nn.Module):
            memo = {id(x): hollow(x, dtype) for x in [*self.source.parameters(), *self.source.buffers()]}
            return copy.deepcopy(self.source, memo)
        if self.source is not None:
            return models._random(copy.deepcopy(self.source), "meta", dtype, 0)
        plain = replace(config.model, checkpointing=False)
        return models.build(plain, self.vocabulary, config.data.sequence, "meta", dtype)

    def adapted(self, model: nn.Module) -> nn.Module:
        """The model with LoRA adapters of rank `lora`, if any."""
        if not self.lora:
            return model
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError:
            raise UserError("planning for LoRA needs peft: pip install 'torchfoam[lora]'") from None
        settings = LoraConfig(r=self.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model, settings, low_cpu_mem_usage=True)

    def optimizer(self, config: RunConfig) -> OptimizerBytes:
        """What the optimizer keeps and needs."""
        key = ("optimizer", config.train.precision == "bfloat16", config.data.sequence, repr(config.optimizer))
        if key not in self._cache:
            self._cache[key] = OptimizerBytes(config.optimizer, self.model(config), self.device)
        return self._cache[key]

    def passes(self, config: RunConfig) -> simulate.Peak:
        """The fullest moment of the forward and backward passes."""
        t = config.train
        rows = t.batch // self.gpus
        many = rows > t.micro_batch
        key = ("passes", t.precision, config.model.checkpointing, t.micro_batch, config.data.sequence, many,
               released(config))  # fmt: skip
        if key not in self._cache:
            try:
                self._cache[key] = simulate.passes(
                    self.model(config), loss_fn, t.micro_batch, config.data.sequence, mixed=t.precision == "mixed",
                    accumulate=many, release=released(config), device=self.device,
                )  # fmt: skip
            except (RuntimeError, NotImplementedError, TypeError) as e:
                raise UserError(
                    f"cannot simulate a step of {config.model.name or type(self.source).__name__}: "
                    f"{' '.join(str(e).split())[:200]}"
                ) from e
        return self._cache[key]


def released(config: RunConfig) -> bool:
    """Whether the run frees each gradient as soon as its weight has moved."""
    return bool(getattr(config.train, "release", False))


def hollow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor like x without bytes; parameters take the dtype that the run will hold them in."""
    if isinstance(x, nn.Parameter):
        kind = dtype if x.is_floating_point() else x.dtype
        return nn.Parameter(torch.empty(x.shape, dtype=kind, device="meta"), x.requires_grad)
    return torch.empty_like(x, device="meta")


class OptimizerBytes:
    """What an optimizer keeps, exactly, and what a step needs for a while.

    The real optimizer is built over the model, without the blocks that are like the others, and takes its steps on the
    meta device. Parameters of one group, shape and dtype have the same state, so one of each stands for all.

    Args:
        config: which optimizer.
        model: on the meta device.
        device: "cpu" or "cuda", whose kernels are meant.

    Raises:
        UserError: an optimizer that cannot be built, or cannot step on the meta device.
    """

    def __init__(self, config: OptimizerConfig, model: nn.Module, device: str) -> None:
        self.config, self.device = config, device
        # kernels cannot step without bytes
        options = {k: x for k, x in config.options.items() if k != "backend"}
        with simulate.fewer_blocks(model, by_name=bool(options.get("overrides"))) as (middle, extra):
            self.optimizer = optimizers.build(replace(config, options=options), model)
        often = {id(p) for p in middle}
        alike: dict[Any, list[nn.Parameter]] = {}
        for k, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                alike.setdefault((k, p.shape, p.dtype), []).append(p)
        self.stand_ins = [same[0] for same in alike.values()]
        if not isinstance(self.optimizer, FOAM):  # whose state is there from the beginning
            self.step()
        counts = [sum(1 + extra * (id(p) in often) for p in same) for same in alike.values()]
        self.state = sum(
            optimizers.state_bytes(self.optimizer, {"params": [p]}) * n for p, n in zip(self.stand_ins, counts)
        )

    def step(self, leave: Iterable[int] = ()) -> int:
        """One step, without the groups `leave`; returns the most bytes that were alive for a while."""
        left = {id(p) for k in leave for p in self.optimizer.param_groups[k]["params"]}
        gradients = [torch.empty_like(p) for p in self.stand_ins]
        for p, g in zip(self.stand_ins, gradients):
            p.grad = None if id(p) in left else g
        tracker = simulate.Tracker()
        try:
            with tracker:
                get_total_norm(gradients)
                self.optimizer.step()
        except (RuntimeError, NotImplementedError) as e:
            raise UserError(f"cannot plan optimizer {self.config.name}: {' '.join(str(e).split())[:200]}") from e
        finally:
            for p in self.stand_ins:
                p.grad = None
        tracker.mark("end")
        return sum(tracker.segments[-1].top.values())

    @cached_property
    def scratch(self) -> int:
        """Bytes that a step needs besides weights, gradients and state."""
        return self.step(leave=fused_groups(self.optimizer, self.config.options, self.device))


def fused_groups(optimizer: Optimizer, options: Mapping[str, Any], device: str) -> list[int]:
    """Indices of the groups whose step needs no tensors of its own on `device`."""
    if isinstance(optimizer, FOAM):
        return [
            k for k, group in enumerate(optimizer.param_groups) if foam_fused(group, options.get("backend"), device)
        ]
    out, k = [], 0
    for part in getattr(optimizer, "parts", [optimizer]):
        plain = type(part) in (torch.optim.Adam, torch.optim.AdamW)
        if plain and options.get("fused", True) and not options.get("foreach"):
            out += list(range(k, k + len(part.param_groups)))
        k += len(part.param_groups)
    return out


def foam_fused(group: Mapping[str, Any], backend: str | None, device: str) -> bool:
    """Whether a kernel, not plain torch, steps this group: it is asked for, or there, and takes rule and state."""
    name = FUSED[device]
    known = backends().get(name)
    there = known == "ok" or (device == "cuda" and known is not None)  # planned here for a machine with a GPU
    takes = group["rule"] == "adam" and (device == "cpu" or group["state"] != "int8")
    return there and takes and backend in (None, name)
