"""A settled run: settings with nothing left open, and model and optimizer on the meta device, made once.

`settle` runs every check that needs no text and allocates nothing. Training, the dry run, the planner's word before a
run and contests all take what it gives, so that none resolves again what another has resolved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from torchfoam import FOAM

from . import data, machine, models, optimizers, settings
from .config import RunConfig, TrainConfig
from .data.tokenizer import vocabulary
from .errors import UserError, known_name
from .tasks.table import TASKS


@dataclass(frozen=True)
class Settled:
    """A run with nothing left open.

    Args:
        config: the settings, with precision, optimizer, tokenizer and version of the data resolved. A micro-batch of 0
            stays, as the run may be resumed on another number of processes; `rows` is what it means here.
        device, processes: that it runs on.
        vocabulary: tokens of the model: the fewest (or most) that the tokenizer may come to have, until the text tells.
        model, optimizer: on the meta device; the optimizer has taken no step.
        head: of the model of a task: that of two labels, until the rows tell.
        note: what the user should know of the precision, or "".
        warning: what the user should know of the tokenizer, or "".
    """

    config: RunConfig
    device: torch.device
    processes: int
    vocabulary: int
    model: nn.Module
    optimizer: Optimizer
    note: str = ""
    warning: str = ""
    head: models.Head | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return dtype_of(self.config)

    @property
    def rows(self) -> int:
        """Rows a forward pass on each process."""
        return micro_batch(self.config.train, self.processes)

    def knowing(self, vocabulary: int, head: models.Head | None = None) -> Settled:
        """The same run, now that the size of its vocabulary and its head are known."""
        if vocabulary == self.vocabulary and head == self.head:
            return self
        model, optimizer = dry_build(self.config, self.device, vocabulary, head)
        return replace(self, vocabulary=vocabulary, model=model, optimizer=optimizer, head=head)

    def rows_of(self, longest: int) -> Settled:
        """The same run, as if it were cut to the longest of its rows: what its fullest batch takes."""
        data = replace(self.config.data, sequence=min(longest, self.config.data.sequence))
        return replace(self, config=replace(self.config, data=data))


def settle(
    config: RunConfig, device: torch.device, processes: int = 1, version: int = data.VERSION, most: bool = False
) -> Settled:
    """Leave nothing of a run open.

    Args:
        config: settings that `check` let pass.
        device, processes: that it is to run on.
        version: of the data, where the settings leave it open: an old run has its own.
        most: take the largest vocabulary that the tokenizer may come to have, not the smallest, with which no budget of
            state is refused that may do.

    Raises:
        UserError: a batch that does not divide among the processes; a tokenizer, model, optimizer or option that is not
            known or not there; switches that the optimizer cannot do.
    """
    precision, note = machine.choose_precision(config.train.precision, device)
    config = resolve(config, precision, processes)
    head = open_head(config)
    if models.described(config.model.name):  # what cannot be trained so needs no tokenizer, nor its own
        models.build(config.model, 0, config.data.sequence, "meta", head=head)
    config, warning = data.settle(config, version)
    tokens = vocabulary(config.data.tokenizer)[most]
    model, optimizer = dry_build(config, device, tokens, head)
    check_optimizer(config.train, optimizer, processes)
    return Settled(config, device, processes, tokens, model, optimizer, note, warning, head)


def resolve(config: RunConfig, precision: machine.Precision, processes: int) -> RunConfig:
    """The settings with the precision given and the optimizer's own defaults. Raises UserError as `settle` does."""
    if config.train.batch % processes:
        raise UserError(f"train.batch must be a multiple of the {processes} processes, got {config.train.batch}")
    optimizer = optimizers.resolve(config.optimizer, bool(config.task.name))
    return replace(config, optimizer=optimizer, train=replace(config.train, precision=precision))


def micro_batch(t: TrainConfig, processes: int) -> int:
    """Rows a forward pass on each of the processes."""
    share = t.batch // processes
    return min(t.micro_batch or share, share)


def dtype_of(config: RunConfig) -> torch.dtype:
    """Of the weights, once the precision is resolved."""
    return torch.bfloat16 if config.train.precision == "bfloat16" else torch.float32


def open_head(config: RunConfig) -> models.Head | None:
    """The head of a task's model while its labels are not known: of a regression, the model's own, or of two."""
    if not config.task.name:
        return None
    if not models.described(config.model.name):
        known_name(config.model.name, models.MODELS, "model preset or folder")
        raise UserError(f"{config.model.name} is a shape without weights: a task takes a model's folder or hub name")
    task = TASKS[config.task.name]
    labels = () if task.regress else task.labels or models.head_labels(config.model.name) or ("0", "1")
    return models.Head(labels, task.regress)


def dry_build(
    config: RunConfig, device: torch.device, vocabulary: int, head: models.Head | None = None
) -> tuple[nn.Module, Optimizer]:
    """Model and optimizer without memory. Raises UserError for what either would refuse on the device."""
    model = models.build(config.model, vocabulary, config.data.sequence, "meta", dtype_of(config), head=head)
    return model, optimizers.dry_build(config.optimizer, model, device)


# ---------------------------------------------------------------------------------------------- checks


def check(config: RunConfig) -> RunConfig:
    """The settings as their types have them. Raises UserError for what makes no sense, naming the value."""
    config = settings.checked(config)
    check_switches(config.train)
    if config.task.name and config.train.chunked_loss:
        raise UserError("train.chunked_loss is for language modelling: a task has no logits of tokens; set it to 0")
    if not config.task.name and (given := [key for key, x in vars(config.task).items() if x]):
        raise UserError(f"task.{given[0]} is set, but no task: name one with `foamlab finetune TASK`")
    return config


def language_only(config: RunConfig, what: str) -> None:
    """Raise UserError for a task, which `what` does not know."""
    if config.task.name:
        raise UserError(f"{what} takes language models only: leave out task.name ({config.task.name})")


def check_switches(t: TrainConfig) -> None:
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
            f"train.release does not support data-parallel training ({processes} processes): each would step on its "
            "own gradient before they are averaged; leave out --train.release"
        )
