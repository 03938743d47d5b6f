"""What lets a run take less memory: cross entropy in chunks, gradient release; and what they cannot be had with.

The third, activation checkpointing, is the model's own (`models.build`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from torchfoam import FOAM, GradientRelease

from ..config import TrainConfig
from ..data.corpus import IGNORED
from ..errors import UserError


def chunked_loss(model: nn.Module, ids: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Cross entropy in nats, summed over labels that are not -100, with logits of `chunk` tokens at a time: float32.

        sum over chunks c of  cross_entropy(head(x_c), y_c),   x what the model gives to its head, [tokens, width]

    Each chunk's logits are computed again in the backward pass, so logits of all tokens never exist, nor in float32 of
    more than a chunk. The same as the whole up to rounding, for models that `check_head` lets pass.
    """
    head = head_of(model)
    with passing(head):
        x = model(input_ids=ids).logits.flatten(0, 1)

    def part(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(x).float(), y, ignore_index=IGNORED, reduction="sum")

    parts = zip(x.split(chunk), labels.flatten().split(chunk))
    return torch.stack([checkpoint(part, *xy, use_reentrant=False, preserve_rng_state=False) for xy in parts]).sum()


def head_of(model: Any) -> nn.Module:
    """The model's output embeddings, also under DistributedDataParallel; UserError if it names none."""
    model = getattr(model, "module", model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise UserError(f"{type(model).__name__} names no output head: set --train.chunked_loss 0")
    return head


@contextmanager
def passing(head: nn.Module) -> Iterator[None]:
    """Let the head give back what it is given, so that the model, called as ever, returns its last hidden states."""
    before = vars(head).get("forward")
    head.forward = lambda x: x
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Raise UserError unless the model's logits are what its head gives, and nothing is done to them afterwards.

    Soft caps and scales are found whatever they are called: the head's output is made large, and must come through.
    """
    given: list[Tensor] = []

    def large(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        given.append(out * 1000 + 100)
        return given[-1]

    training, hook = model.training, head_of(model).register_forward_hook(large)
    try:
        ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
        logits = model.eval()(input_ids=ids).logits
    finally:
        hook.remove()
        model.train(training)
    if len(given) != 1 or not torch.equal(logits.float(), given[0].float()):
        raise UserError(
            f"{type(model).__name__} does more to its logits than its output head does (a scale, a soft cap): "
            "set --train.chunked_loss 0"
        )


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


def check(t: TrainConfig) -> None:
    """Raise UserError for switches that exclude each other."""
    if t.clip and t.clip_each:
        raise UserError("train.clip limits the norm of all gradients, train.clip_each each one's: set one of them to 0")
    if not t.release:
        return
    if t.clip:
        raise UserError(
            "train.release frees each gradient before the others are there, so their common norm cannot be clipped: "
            "set --train.clip 0, and --train.clip_each for a limit on each parameter's own norm"
        )
    if 0 < t.micro_batch < t.batch:
        raise UserError(
            "train.release frees each gradient, so several micro-batches cannot add theirs: "
            f"set --train.micro_batch 0, or --train.batch {t.micro_batch}"
        )
    if t.residual_every:
        raise UserError("train.release leaves no gradient to measure: set --train.residual_every 0")


def check_optimizer(t: TrainConfig, optimizer: Optimizer, processes: int) -> None:
    """Raise UserError for an optimizer other than FOAM where FOAM is needed, and for gradient release in several
    processes, whose gradients must be averaged first."""
    for name in ("release", "residual_every"):
        if getattr(t, name) and not isinstance(optimizer, FOAM):
            raise UserError(f"train.{name} needs FOAM, not {type(optimizer).__name__}: use --optimizer.name foam")
    if t.release and processes > 1:
        raise UserError(
            f"train.release cannot be had with {processes} data-parallel processes: each would step on its own "
            "gradient before they are averaged; leave out --train.release"
        )


def release(t: TrainConfig, optimizer: Optimizer, processes: int) -> GradientRelease | None:
    """Let each parameter step inside the backward pass, if `train.release` says so.

    A parameter whose gradient is not finite is left alone.

    Raises:
        UserError: what `check_optimizer` raises.
    """
    check_optimizer(t, optimizer, processes)
    if not t.release:
        return None
    assert isinstance(optimizer, FOAM)
    return GradientRelease(optimizer, clip=t.clip_each, skip_nonfinite=True)
