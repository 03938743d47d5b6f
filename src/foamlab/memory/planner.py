"""How much memory a run needs, before it runs. `plan(...)` is the door; it allocates nothing but a few megabytes.

Exact: weights, gradients and optimizer state, counted on the real model and optimizer on the meta device. Simulated:
what the passes and the step need besides (`simulate.py`). Assumed: the CUDA context and the allocator's slack.
What fits a card is `advise.py`'s to find; predictions are held against real steps by `studies/plan_check.py`.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .. import machine, models, optimizers
from ..config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from ..errors import UserError
from ..models import architectures
from ..models.language import vocabulary_of
from ..settled import Settled, check_optimizer, micro_batch, open_head, resolve
from ..tasks.objective import objective
from . import gpus as cards
from . import simulate
from .optimizer_memory import Footprint

# Assumed, not measured: what a CUDA context with torch's kernels and cuBLAS takes, and the share of everything else
# that the caching allocator loses to rounding and fragments.
CONTEXT = 600 * 10**6
SLACK = 0.03


@dataclass(frozen=True)
class Plan:
    """What one process of a run needs; all sizes in bytes.

    Args:
        config: the settings planned for, nothing left open.
        device: "cpu" or "cuda".
        vocabulary, parameters, trainable: of the model; tied weights count once.
        exact: "weights", "gradients", "state": all of them, exactly. (State counts torch's step counters, which
            non-fused optimizers keep in the host's memory, 4 bytes a tensor.)
        peak: what is there at the peak of a step: "weights", "buffers", "state", "gradients",
            "activations", "logits", "temporaries"; on several GPUs "buckets" of DistributedDataParallel; on CUDA
            "context" and "slack", which are assumed.
        where: which moment the peak is.
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
        """Bytes at the peak."""
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
    **options: Any,
) -> Plan:
    """What a training run needs, component by component.

        peak = max over a step of  weights + state + gradients(t) + activations(t) + logits(t) + temporaries(t)

    Args:
        model: a preset or a Hugging Face folder; a transformers configuration; a module (it is copied without its
            weights); or a whole `RunConfig`, and then all settings but card, device and gpus are taken from it.
        optimizer: an entry of OPTIMIZERS, or its settings; `options` are its further keywords (level, state, ...).
        card: a card's name or a size ("24GB"), to compare with.
        device: "cuda" (default) or "cpu", whose kernels and overheads are meant.
        batch: rows a step; micro_batch: rows a pass, 0 means all; sequence: tokens a row.
        precision: float32, bfloat16, mixed; auto is mixed on GPUs that have bfloat16, else float32.
        checkpointing: activations are computed again in the backward pass.
        gpus: data-parallel processes that share the batch.

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
            optimizer=with_options(settings, **options),
            train=TrainConfig(batch=batch, micro_batch=micro_batch, precision=precision),  # type: ignore[arg-type]
        )
    source = None if isinstance(model, (str, ModelConfig, RunConfig)) else model
    return Planner(config, source, device or "cuda", gpus=gpus, card=card).plan(config)


@dataclass
class Planner:
    """Plans variants of one run, and remembers what they share.

    Args:
        base: settings that say which model.
        source: a module or transformers configuration in its place.
        device, gpus, card: as in `plan`.
        vocabulary: tokens of the model; None takes its own.
        head: of a task's model, once its labels are known.
    """

    base: RunConfig
    source: Any = None
    device: str = "cuda"
    gpus: int = 1
    card: str | int | None = None
    vocabulary: int | None = None
    head: models.Head | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise UserError(f"cannot plan for device {self.device!r}: use cpu or cuda")
        self.device = self.device.partition(":")[0]
        if self.gpus < 1:
            raise UserError(f"gpus must be at least 1, got {self.gpus}")
        card = cards.card(self.card) if isinstance(self.card, str) and self.card else cards.Card(int(self.card or 0))
        self.capacity, self.bfloat16 = card.memory or None, card.bfloat16

    @classmethod
    def of(cls, run: Settled, capacity: int) -> Planner:
        """The planner of a settled run, whose model is not built anew, and its variants, in so many bytes."""
        c = run.config
        planner = cls(c, None, run.device.type, run.processes, capacity, run.vocabulary, run.head)
        planner._cache[planner._key(c)] = run.model
        return planner

    def plan(self, config: RunConfig, step: bool = True) -> Plan:
        """What `config` needs. Without `step`, what the optimizer's step needs for a while is left out: faster."""
        config = self.settle(config)
        model = self.model(config)
        size, optimizer, passes = self.sizes(config), self.optimizer(config), self.passes(config)
        exact = {"weights": size["weights"], "gradients": size["gradients"], "state": optimizer.state}
        fixed = {"weights": size["weights"], "buffers": size["buffers"], "state": optimizer.state}
        where, moving = passes.where, passes.bytes
        if not config.train.release and size["gradients"] + (step and optimizer.scratch) > sum(moving.values()):
            where, moving = "optimizer step", {"gradients": size["gradients"], "activations": 0, "logits": 0}
            moving["temporaries"] = optimizer.scratch if step else 0
        peak = {**fixed, **moving}
        if self.gpus > 1:
            peak["buckets"] = size["gradients"]  # DistributedDataParallel keeps a second copy to exchange
        peak |= self.overheads(sum(peak.values()))
        return Plan(
            config, self.device, vocabulary_of(model), size["parameters"], size["trainable"],
            exact, peak, where, self.capacity, self.card if isinstance(self.card, str) else "",
        )  # fmt: skip

    def overheads(self, size: int) -> dict[str, int]:
        """What a device takes besides `size` bytes."""
        return {"slack": int(SLACK * size), "context": CONTEXT} if self.device == "cuda" else {}

    def sizes(self, config: RunConfig) -> dict[str, int]:
        """Bytes of "weights", "gradients" and "buffers"; numbers of "parameters" and "trainable" ones."""
        model = self.model(config)
        key = ("sizes", id(model))
        if key not in self._cache:
            params = list(model.parameters())
            trained = [p for p in params if p.requires_grad]
            self._cache[key] = {
                "weights": sum(p.nbytes for p in params),
                "gradients": sum(p.nbytes for p in trained),
                "buffers": sum(b.nbytes for b in model.buffers()),
                "parameters": sum(p.numel() for p in params),
                "trainable": sum(p.numel() for p in trained),
            }
        return self._cache[key]

    def settle(self, config: RunConfig) -> RunConfig:
        """The settings with precision, optimizer and micro-batch resolved; UserError for impossible ones."""
        t = config.train
        if config.data.sequence < 1 or t.batch < 1 or t.micro_batch < 0:
            raise UserError(
                f"cannot plan for batch {t.batch}, micro-batch {t.micro_batch}, sequence {config.data.sequence}: "
                "they must be positive"
            )
        precision = machine.resolve_precision(t.precision, self.device, self.bfloat16)
        if precision not in ("float32", "bfloat16", "mixed"):
            raise UserError(f"unknown precision {precision!r}: use auto, float32, bfloat16 or mixed")
        config = resolve(config, precision, self.gpus)
        return replace(config, train=replace(config.train, micro_batch=micro_batch(t, self.gpus)))

    def model(self, config: RunConfig) -> Any:
        """The model on the meta device, with adapters where the optimizer adds them; checkpointing as last set."""
        adapters = repr(config.optimizer.options) if optimizers.OPTIMIZERS[config.optimizer.name].adapts else ""
        key = ("model", config.train.precision == "bfloat16", config.data.sequence, adapters)
        if key not in self._cache:
            model = self.bare(config, torch.bfloat16 if config.train.precision == "bfloat16" else torch.float32)
            if adapters:
                optimizers.build(with_options(config.optimizer, from_scratch=True), model)
            self._cache[key] = model.train()
        return self._cache[key]

    def _key(self, config: RunConfig) -> Any:
        """What a model of this planner is known by."""
        adapters = repr(config.optimizer.options) if config.optimizer.name == "lora" else ""
        return ("model", config.train.precision == "bfloat16", config.data.sequence, adapters)

    def positions(self, config: RunConfig) -> int:
        """Longest sequence that the model's own configuration allows; 0 if nothing limits it."""
        if self.source is None and config.model.name in models.MODELS:
            return 0
        described = getattr(self.model(config), "config", None)
        return architectures.positions(described) if described is not None else 0

    def bare(self, config: RunConfig, dtype: torch.dtype) -> nn.Module:
        """The model before adapters and switches."""
        if isinstance(self.source, nn.Module):
            memo = {id(x): hollow(x, dtype) for x in [*self.source.parameters(), *self.source.buffers()]}
            return copy.deepcopy(self.source, memo)
        if self.source is None and models.described(config.model.name):
            self.source = architectures.configuration(config.model.name)  # asked of the hub once
        plain, source = replace(config.model, checkpointing=False), copy.deepcopy(self.source)
        head = self.head or open_head(config)
        return models.build(plain, self.vocabulary, config.data.sequence, "meta", dtype, source=source, head=head)

    def optimizer(self, config: RunConfig) -> Footprint:
        """What the optimizer keeps and needs."""
        key = ("optimizer", config.train.precision == "bfloat16", config.data.sequence, repr(config.optimizer))
        if key not in self._cache:
            model = self.model(config)
            # adapters are in the model already, and AdamW's to train
            adapters = optimizers.OPTIMIZERS[config.optimizer.name].adapts
            kind = replace(config.optimizer, name="adamw", options={}) if adapters else config.optimizer
            self._cache[key] = Footprint(kind, model, self.device)
        return self._cache[key]

    def passes(self, config: RunConfig, shards: int = 1) -> simulate.Peak:
        """The peak of the forward and backward passes, with gradients in `shards`."""
        t = config.train
        rows, model = t.batch // self.gpus, self.model(config)
        many = rows > t.micro_batch
        own = repr(config.optimizer) if t.release else ""
        key = ("passes", id(model), t.precision, config.model.checkpointing, t.micro_batch,
               config.data.sequence, many, t.chunked_loss, own, shards)  # fmt: skip
        if key not in self._cache:
            aim = objective(config.task, t)
            check_optimizer(t, self.optimizer(config).optimizer, self.gpus)
            release = self.optimizer(config).each if t.release else None
            if self._cache.get(("checkpointing", id(model))) != config.model.checkpointing:
                models.switch_checkpointing(model, config.model.checkpointing)
                self._cache["checkpointing", id(model)] = config.model.checkpointing
            try:
                self._cache[key] = simulate.passes(
                    model, lambda model, ids, _: aim.loss(model, *aim.of(ids))[0],
                    t.micro_batch, config.data.sequence, mixed=t.precision == "mixed",
                    accumulate=many, release=release, device=self.device, shards=shards,
                )  # fmt: skip
            except Exception as e:  # of any kind: it is code of others that runs, where tensors have no values
                name = config.model.name or type(self.source).__name__
                raise UserError(f"cannot simulate a step of {name}: {architectures.line(e)}") from e
        return self._cache[key]


def with_options(config: OptimizerConfig, **options: Any) -> OptimizerConfig:
    return replace(config, options={**config.options, **options})


def hollow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor like x without bytes; parameters take the dtype that the run will hold them in."""
    if isinstance(x, nn.Parameter):
        kind = dtype if x.is_floating_point() else x.dtype
        return nn.Parameter(torch.empty(x.shape, dtype=kind, device="meta"), x.requires_grad)
    return torch.empty_like(x, device="meta")
