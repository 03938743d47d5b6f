"""What a run may be: settings that exclude each other, and what the optimizer cannot do."""

from __future__ import annotations

from torch.optim import Optimizer

from torchfoam import FOAM

from .config import TrainConfig
from .errors import UserError


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
