"""The memory ladder: from AdamW in float32 down, one saving more on each rung, and a real step of each is counted.

Nothing here is predicted: the model and optimizer are built, steps are taken on random tokens, and every storage alive
is counted (`simulate.Tracker`); buffers inside kernels are not seen. What the planner says of the same is `plan`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import machine, models, optimizers
from ..config import OptimizerConfig, RunConfig
from ..memory import simulate
from ..models.language import vocabulary_of
from ..settled import language_only
from ..training.step import Step


@dataclass(frozen=True)
class Rung:
    """Bytes at the peak of a step, by what they are. `temporaries` are activations and whatever else lives
    for a while, the casts and buffers of the optimizer's step included; `logits` has a column for every token."""

    name: str
    weights: int
    state: int
    gradients: int
    temporaries: int
    logits: int

    @property
    def peak(self) -> int:
        return self.weights + self.state + self.gradients + self.temporaries + self.logits


def rungs(base: RunConfig, chunk: int) -> Iterator[tuple[str, RunConfig]]:
    """(name, settings) of each rung, over the model, rows and sequence of `base`. Gradients are not clipped.

    The order matters to what each saving shows: freeing gradients early lowers no peak that logits or activations make.
    """
    c = replace(base, model=replace(base.model, checkpointing=False), optimizer=OptimizerConfig("adamw"))
    c = replace(c, train=replace(c.train, precision="float32", clip=0.0, release=False, chunked_loss=0))
    yield "AdamW, float32", c
    for name, options in (
        ("FOAM level 2", {"level": 2}),
        ("FOAM level 3, 8-bit state", {"level": 3, "state": "int8"}),
        ("FOAM row, 8-bit state", {"level": "row", "state": "int8"}),
    ):
        c = replace(c, optimizer=OptimizerConfig("foam", options=options))
        yield name, c
    c = replace(c, train=replace(c.train, chunked_loss=chunk))
    yield f"+ loss in chunks of {chunk} tokens", c
    c = replace(c, model=replace(c.model, checkpointing=True))
    yield "+ activation checkpointing", c
    c = replace(c, train=replace(c.train, release=True))
    yield "+ gradient release", c
    c = replace(c, train=replace(c.train, precision="bfloat16"))
    yield "+ bfloat16 weights", c


def climb(base: RunConfig, chunk: int = 128, vocabulary: int | None = None) -> Iterator[Rung]:
    """Measure each rung on the device of `base.train`; `vocabulary` None takes the model's own."""
    language_only(base, "the memory ladder")
    device = machine.choose_device(base.train.device)
    with machine.threads(base.train.threads):
        for name, config in rungs(base, chunk):
            yield measure(name, config, device, vocabulary)


def measure(name: str, config: RunConfig, device: torch.device, vocabulary: int | None) -> Rung:
    """The peak of a step that finds its state there: a first one, on few tokens, makes it where it must."""
    t, length = config.train, config.data.sequence
    dtype = torch.bfloat16 if t.precision == "bfloat16" else torch.float32
    model = models.build(config.model, vocabulary, length, device, dtype, t.seed)
    optimizer = optimizers.build(config.optimizer, model)
    tracker = simulate.Tracker(vocabulary_of(model))

    def accumulated(p: torch.Tensor) -> None:
        if p.grad is not None:
            tracker.rename(p.grad, "gradients")

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(accumulated)
    step = Step(t, model, optimizer, machine.World(device))
    generator = torch.Generator().manual_seed(t.seed)
    ids = torch.randint(tracker.vocabulary, (t.batch, length), generator=generator).to(device)
    if not optimizers.state_bytes(optimizer):  # most make their state in the first step
        step(step.batch(ids[:1, :8], ids[:1, :8]))
    batch = step.batch(ids, ids)
    with tracker:
        step(batch)
    tracker.mark("end")
    top = tracker.segments[-1].top
    buffers = sum(b.nbytes for b in model.buffers())
    return Rung(
        name,
        sum(p.nbytes for p in model.parameters()),
        optimizers.state_bytes(optimizer),
        top["gradients"],
        top["activations"] + buffers,
        top["logits"],
    )


def table(found: Sequence[Rung]) -> list[list[str]]:
    """Rows for people, in MB (10^6 bytes), the header first; the last column is relative to the first rung."""
    names = ("weights", "state", "gradients", "temporaries", "logits", "peak")
    rows = [["", *names, "of the first"]]
    for rung in found:
        sizes: list[Any] = [getattr(rung, name) for name in names]
        rows.append([rung.name, *(f"{x / 1e6:.1f}" for x in sizes), f"{rung.peak / found[0].peak:.0%}"])
    return rows
