"""One training step: forward, backward, norm, clip, step, zero. Whatever trains or measures a step takes this one.

Micro-batches, mixed precision, the loss in chunks, gradient release, data-parallel processes and gradients that are not
finite are dealt with here; what comes before and after a step (schedule, data, records) is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from torchfoam import FOAM, GradientRelease

from ..config import TrainConfig
from ..machine import World, parallel
from ..tasks.objective import Inputs, LanguageModelling, Objective, mapped

DECAY = 0.2  # share of the steps, after the warm-up, in which the rate of `wsd` falls


class Batch(NamedTuple):
    """This process' share of a batch: (inputs, labels) of each micro-batch, and of all shares together what the mean
    loss is taken over (`terms`: tokens or examples) and the tokens."""

    pieces: list[tuple[Inputs, Tensor]]
    terms: Tensor
    tokens: Tensor


class Taken(NamedTuple):
    """What came of a step, alike on all processes: mean loss a term, norm of all gradients before clipping, tokens,
    whether a process was asked to stop, and why the step was skipped ("": it was not)."""

    loss: float
    norm: float
    tokens: int
    stop: bool
    skipped: str


class Step:
    """Takes steps of one model and optimizer.

    Args:
        train: the settings, precision resolved.
        model, optimizer: on the device of this process.
        world: the processes that share each batch.
        objective: what is minimized; language modelling if it is not given.
    """

    def __init__(
        self,
        train: TrainConfig,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        objective: Objective | None = None,
    ) -> None:
        self.train, self.optimizer, self.world = train, optimizer, world
        self.objective: Objective = objective or LanguageModelling(train.chunked_loss)
        self.release = release(train, optimizer)
        self.parallel: nn.Module = parallel(model) if world.size > 1 else model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.base = [float(group["lr"]) for group in optimizer.param_groups]

    def __call__(
        self,
        batch: Batch,
        asked: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
        look: Callable[[], None] = lambda: None,
    ) -> Taken:
        """Take one step, or skip it on all processes alike if the loss or a gradient is not finite.

        Args:
            batch: what `batch` made.
            asked: whether to stop after this step.
            meanwhile: host work, done while the device is still busy with the backward pass.
            look: called when the gradients are clipped and about to be used; not where the step is skipped.
        """
        mine = self.backward(batch)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = self.release.grad_norm() if self.release else get_total_norm(gradients)
        del gradients
        facts = torch.stack([mine, (~norm.isfinite()).double(), torch.full_like(mine, float(asked()))])
        meanwhile()
        # the only wait of a step: whether it may be taken must be known first, and alike on all processes
        facts = torch.cat([self.world.sum(facts), torch.stack([norm.double(), batch.terms, batch.tokens])])
        loss, bad, stop, size, terms, tokens = facts.tolist()
        loss /= max(terms, 1)
        why = f"the loss is {loss}" if not math.isfinite(loss) else "the gradient is not finite" if bad else ""
        if not why:
            clip(self.train, self.parameters, norm, size)
            look()
        if not why or self.release:  # which has stepped already, and only waits to be told that the step is over
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Taken(loss, size, int(tokens), stop > 0, why)

    def batch(self, inputs: Inputs, labels: Tensor) -> Batch:
        """This process' share of a batch, cut into micro-batches; terms and tokens are summed over all processes."""
        counts = torch.stack([self.objective.terms(labels).double(), self.objective.tokens(inputs, labels).double()])
        return Batch(cut(inputs, labels, self.train.micro_batch), *self.world.sum(counts).unbind())

    def backward(self, batch: Batch) -> Tensor:
        """Gradients of the mean loss over all processes' terms; returns the loss summed over this one's (float64)."""
        total = batch.terms.new_zeros(())
        scale = self.world.size / batch.terms.clamp(min=1)  # DistributedDataParallel takes the mean over processes
        for k, (inputs, labels) in enumerate(batch.pieces, 1):
            more: Any = self.parallel.no_sync if self.world.size > 1 and k < len(batch.pieces) else nullcontext
            with more():
                loss, _ = self.loss(self.parallel, inputs, labels)
                if not self.release or loss.isfinite():  # what is not finite must not reach the weights
                    (loss * scale).backward()
            total += loss.detach()
        return total

    def loss(self, model: nn.Module, inputs: Inputs, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """The objective's loss, summed over the terms, and its predictions, in the run's precision."""
        mixed = self.train.precision == "mixed"
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=mixed):
            return self.objective.loss(model, inputs, labels)

    def rate(self, factor: float) -> None:
        """Set each group's learning rate to `factor` of its own."""
        for group, lr in zip(self.optimizer.param_groups, self.base):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * factor)
            else:
                group["lr"] = lr * factor


def cut(inputs: Inputs, labels: Tensor, rows: int) -> list[tuple[Inputs, Tensor]]:
    """(inputs, labels) in pieces of `rows` rows; 0 is all at once."""
    rows = rows or max(len(labels), 1)
    parts = [slice(i, i + rows) for i in range(0, len(labels), rows)]
    return [(mapped(itemgetter(part), inputs), labels[part]) for part in parts]


def schedule(step: int, t: TrainConfig) -> float:
    """Learning rate of step 0, 1, ... relative to its peak: a rising line, then `train.schedule` down to `final`.

    w = round(warmup * steps),  x = (step - w + 1) / (steps - w),  d = DECAY
    (step + 1) / w                                       step < w, so step w - 1 is the peak
    final + (1 - final) / 2 * (1 + cos(pi x))            then, cosine: the last step is `final`
    final + (1 - final) * (1 - x)                        linear
    1                                                    constant
    final + (1 - final) * min(1, (1 - x) / d)            wsd
    """
    w = round(t.warmup * t.steps)
    if step < w:
        return (step + 1) / w
    k, n = step - w + 1, t.steps - w
    falls = {
        "cosine": (1 + math.cos(math.pi * k / n)) / 2,
        "linear": 1 - k / n,
        "constant": 1.0,
        "wsd": min(1.0, (1 - k / n) / DECAY),
    }
    return t.final + (1 - t.final) * falls[t.schedule]


def clip(t: TrainConfig, parameters: list[nn.Parameter], norm: Tensor, size: float) -> None:
    """Scale gradients down to a common norm of `train.clip`, or each to a norm of `train.clip_each`.

    `norm` is that of all of them, and `size` the same as a number.
    """
    if 0 < t.clip < size:
        clip_grads_with_norm_(parameters, t.clip, norm)
    if t.clip_each:
        for p in parameters:
            if p.grad is not None:
                clip_grads_with_norm_(p, t.clip_each, torch.linalg.vector_norm(p.grad, dtype=torch.float32))


def release(t: TrainConfig, optimizer: Optimizer) -> GradientRelease | None:
    """Let each parameter step inside the backward pass, if `train.release` says so (`settled.check_optimizer` has found
    that it can). A parameter whose gradient is not finite is left alone."""
    if not t.release:
        return None
    assert isinstance(optimizer, FOAM)
    return GradientRelease(optimizer, clip=t.clip_each, skip_nonfinite=True)
