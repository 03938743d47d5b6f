"""How fast a step is, and the whole loop: pairs of runs, interleaved, and medians of their ratios.

Two things are timed one right after the other, in alternating order, many times; a ratio is taken in each pair and the
median over the pairs is reported. So what else the machine does falls on both sides alike. Nothing is printed here.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from .. import data, machine, models, optimizers
from ..config import ModelConfig, OptimizerConfig, RunConfig
from ..errors import UserError, known_name
from ..models.language import loss_fn
from ..settled import language_only, settle
from ..training.run import train
from ..training.step import schedule

REFERENCE = "adamw"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _foam(level: Any, **options: Any) -> OptimizerConfig:
    return OptimizerConfig(name="foam", lr=1e-3, options={"level": level, **options})


# what a step is compared of, besides every name of `foamlab optimizers`
CONTENDERS: dict[str, OptimizerConfig] = {
    "adamw": OptimizerConfig(name="adamw", lr=1e-3, options={"fused": True}),
    "adamw-foreach": OptimizerConfig(name="adamw", lr=1e-3, options={"foreach": True}),
    "foam-0": _foam(0),
    "foam-1": _foam(1),
    "foam-2": _foam(2),
    "foam-3": _foam(3),
    "foam-4": _foam(4),
    "foam-5": _foam(5),
    "foam-8": _foam(8),
    "foam-row": _foam("row"),
    "foam-2-paper": _foam(2, bias_correction="whole", residual_in_v=1.0),
    "foam-2-bf16": _foam(2, state="bfloat16"),
    "foam-0-int8": _foam(0, state="int8"),
    "foam-2-int8": _foam(2, state="int8"),
    "foam-2-eager": _foam(2, backend="eager"),
}
STEPS = ("adamw-foreach", "foam-0", "foam-2", "foam-3", "foam-5", "foam-row", "foam-2-bf16", "foam-2-eager")

LOOPS = ("foam", "adamw")


@dataclass(frozen=True)
class StepRow:
    """One optimizer's step beside that of torch's fused AdamW on the same tensors.

    Args:
        dtype: of parameters and gradients.
        optimizer: name in CONTENDERS or OPTIMIZERS.
        milliseconds, reference: median time of its step, and of fused AdamW's in the same pairs.
        ratio, low, high: of the two times: median over the pairs, and its quartiles.
        bandwidth: bytes a second that a step must move (p and state read and written, g read) over its time.
        share: of the copy bandwidth measured in the same pairs.
        state: bytes of optimizer state.
        extra: bytes by which the peak memory of a step stands above that before it (0 if it cannot be told).
    """

    dtype: str
    optimizer: str
    milliseconds: float
    reference: float
    ratio: float
    low: float
    high: float
    bandwidth: float
    share: float
    state: int
    extra: int

    HEADER = ("dtype", "step of", "ms", "AdamW ms", "ratio", "quartiles", "GB/s", "of copy", "state MB", "extra MB")

    def cells(self) -> tuple[str, ...]:
        """The row as text, under HEADER; MB and GB are decimal."""
        ratios = f"{self.ratio:.3f}", f"{self.low:.3f} {self.high:.3f}"
        speed = f"{self.bandwidth / 1e9:.1f}", f"{self.share:.2f}"
        times = f"{self.milliseconds:.2f}", f"{self.reference:.2f}"
        return self.dtype, self.optimizer, *times, *ratios, *speed, f"{self.state / 1e6:.2f}", f"{self.extra / 1e6:.2f}"


@dataclass(frozen=True)
class TrainRow:
    """The lab's loop beside a bare loop with fused AdamW, on the same batches: tokens a second, median over steps."""

    optimizer: str
    tokens_per_second: float
    bare: float
    ratio: float
    low: float
    high: float

    HEADER = ("loop with", "tokens/s", "bare, AdamW", "ratio", "quartiles")

    def cells(self) -> tuple[str, ...]:
        """The row as text, under HEADER."""
        speeds = f"{self.tokens_per_second:,.0f}", f"{self.bare:,.0f}"
        return self.optimizer, *speeds, f"{self.ratio:.3f}", f"{self.low:.3f} {self.high:.3f}"


class Matrices(nn.Module):
    """The folded matrices of a model, with weights and gradients drawn anew and nothing else."""

    def __init__(self, shapes: list[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(c, r, bias=False, device=device, dtype=dtype) for r, c in shapes)


def matrices(name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The attention and MLP matrices of the preset `name`, with gradients."""
    model = models.build(ModelConfig(name), device="meta")
    opt = optimizers.build(_foam(2, backend="eager"), model)
    shapes = [(p.shape[0], p.shape[1]) for g in opt.param_groups if g["level"] != 0 for p in g["params"]]
    return _with_gradients(Matrices(shapes, device, dtype))


def whole(name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The preset `name` with all its weights, with gradients."""
    return _with_gradients(models.build(ModelConfig(name), device=device, dtype=dtype))


def _with_gradients(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def bench_step(
    model: str = "llama-60m",
    names: Sequence[str] = STEPS,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    pairs: int = 30,
    device: str = "cpu",
    everything: bool = False,
) -> Iterator[StepRow]:
    """Time the steps of several optimizers on a model preset's real shapes, each paired with torch's fused AdamW.

    Args:
        model: a preset; its attention and MLP matrices are stepped, or with `everything` all weights.
        names: of CONTENDERS or OPTIMIZERS.
        dtypes: of parameters and gradients.
        pairs: timed pairs for each.

    Raises:
        UserError: an unknown model, optimizer or dtype, or an optimizer that is not installed; no pairs.
    """
    _at_least_one(pairs)
    place = machine.choose_device(device)
    for name in (*names, REFERENCE):
        if name not in CONTENDERS:
            known_name(name, {**CONTENDERS, **optimizers.OPTIMIZERS}, "optimizer")
    for dtype in dtypes:
        known_name(dtype, DTYPES, "dtype")
    draw = whole if everything else matrices
    for name in names:  # refused before the first is timed
        optimizers.dry_build(_settings(name), draw(model, torch.device("meta"), torch.float32), place)
    for dtype in dtypes:
        tensors = draw(model, place, DTYPES[dtype])
        reference = _step(REFERENCE, tensors)
        for name in names:
            yield _compare(name, reference, tensors, pairs, dtype)
        del reference, tensors
        gc.collect()


def _at_least_one(pairs: int) -> None:
    if pairs < 1:
        raise UserError(f"--pairs must be at least 1, got {pairs}")


def _settings(name: str) -> OptimizerConfig:
    return CONTENDERS.get(name) or OptimizerConfig(name=name, lr=1e-3)


def _step(name: str, model: nn.Module) -> torch.optim.Optimizer:
    opt = optimizers.build(_settings(name), model)
    opt.step()  # most optimizers make their state in the first step; pages are touched
    return opt


def _compare(name: str, reference: torch.optim.Optimizer, model: nn.Module, pairs: int, dtype: str) -> StepRow:
    opt = _step(name, model)
    weights = [p for p in model.parameters() if p.requires_grad]
    device, size = weights[0].device, sum(p.nbytes for p in weights)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    extra = extra_memory(opt.step, device)
    mine, theirs, copies = paired([opt.step, reference.step, lambda: target.copy_(source)], pairs, device, warm=2)
    state = optimizers.state_bytes(opt)
    moved = 3 * size + 2 * state
    ratios = [a / b for a, b in zip(mine, theirs)]
    share = median(c / a for a, c in zip(mine, copies)) * moved / (2 * size)
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return StepRow(
        dtype=dtype, optimizer=name, milliseconds=1e3 * median(mine), reference=1e3 * median(theirs),
        ratio=median(ratios), low=low, high=high, bandwidth=moved / median(mine), share=share, state=state, extra=extra,
    )  # fmt: skip


def paired(things: list[Callable[[], Any]], pairs: int, device: torch.device, warm: int = 0) -> list[list[float]]:
    """Seconds of each thing, `pairs` times, one right after the other and every other time in reverse order."""
    seconds: list[list[float]] = [[] for _ in things]
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for k in range(-warm, pairs):
        for i in range(len(things)) if k % 2 else reversed(range(len(things))):
            wait()
            begin = time.perf_counter()
            things[i]()
            wait()
            if k >= 0:
                seconds[i].append(time.perf_counter() - begin)
    return seconds


def extra_memory(thing: Callable[[], Any], device: torch.device) -> int:
    """Bytes by which the peak memory during `thing` stands above the memory before it; 0 where that is unknown."""
    memory = machine.Memory(device)
    thing()
    return memory.added()


# ---------------------------------------------------------------------- the loop


@dataclass
class Bare:
    """The shortest loop one would write by hand: fused AdamW, clipping and the schedule, and nothing else."""

    config: RunConfig
    corpus: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    done: int = 0
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        t, begin = self.config.train, time.perf_counter()
        ids, labels = (torch.from_numpy(x) for x in self.corpus.batch("train", self.done, t.batch))
        loss = loss_fn(self.model, ids, labels) / labels.numel()
        loss.backward()
        if t.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), t.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 * schedule(self.done, t)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - begin)
        self.done += 1


def bench_train(config: RunConfig, names: Sequence[str] = LOOPS, steps: int = 40) -> Iterator[TrainRow]:
    """Time the whole loop of `foamlab train` against a bare loop, step by step in turns, on the CPU in float32.

    Args:
        config: the run; its optimizer is replaced by each of `names`, and nothing is evaluated or saved on the way.
        steps: timed pairs of steps, after three that are not counted.

    Raises:
        UserError: as `foamlab train` does; no steps.
    """
    _at_least_one(steps)
    language_only(config, "bench")
    for name in names:  # refused before any text is read
        settle(replace(config, optimizer=OptimizerConfig(name)), torch.device("cpu"))
    off: dict[str, Any] = {"eval_every": 0, "eval_tokens": config.data.sequence, "checkpoint_every": 0, "sample": ""}
    for name in names:
        with TemporaryDirectory() as folder:
            run = replace(
                config, optimizer=OptimizerConfig(name=name), out=str(Path(folder) / "run"),
                train=replace(config.train, steps=steps + 3, device="cpu", precision="float32", **off),
            )  # fmt: skip
            yield _in_turns(run, name)


def _in_turns(run: RunConfig, name: str) -> TrainRow:
    corpus = data.prepare(run.data, run.train.seed)
    model = models.build(run.model, corpus.vocab_size, run.data.sequence, seed=run.train.seed)
    bare = Bare(run, corpus, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    clock = [0.0]

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "train":  # the loop's own clock stands still meanwhile
            clock.append(event["seconds"])
            bare.step()

    train(run, on_event=on_event)
    mine = [b - a for a, b in pairwise(clock)][3:]
    ratios = [b / a for a, b in zip(mine, bare.seconds[3:])]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    tokens = run.train.batch * run.data.sequence
    return TrainRow(name, tokens / median(mine), tokens / median(bare.seconds[3:]), median(ratios), low, high)
