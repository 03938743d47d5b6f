"""A run before it is run: settings resolved, where each parameter goes, bytes. All on the meta device.

For `foamlab train --dry_run`. It looks whether the text is there, reads none of it (but the rows of a task)
and writes nothing; of a model on
the hub it fetches all but the weights. What memory the activations take is the planner's to say.
"""

from __future__ import annotations

import torch
import yaml
from torch.optim import Optimizer

from torchfoam import FOAM, routing_table

from .. import machine, optimizers
from ..config import RunConfig, to_dict
from ..data import sources
from ..memory import simulate
from ..settled import check, settle
from ..tasks import examples
from ..tasks.examples import Examples
from .run import known


def preview(config: RunConfig) -> str:
    """What `train` would do, as text.

    Raises:
        UserError: settings that `train` would refuse, as far as can be told without reading the data.
    """
    config = check(config)
    if not config.task.name:
        sources.find(config.data)
    # a small corpus may give fewer tokens than bpe:SIZE asks
    run = settle(config, machine.choose_device(config.train.device), most=True)
    rows = ""
    if run.config.task.name:  # its rows are few enough to be read
        found = examples.prepare(run.config)
        run, rows = known(run, found), described(found)
    c, model, optimizer = run.config, run.model, run.optimizer
    t, d = c.train, c.data
    if not optimizers.state_bytes(optimizer):  # most optimizers make their state in the first step
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        with simulate.Tracker(hypothetical=True):  # some ask for values, which there are none
            optimizer.step()
    weights = sum(p.numel() for p in model.parameters())
    size, state = weights * run.dtype.itemsize, optimizers.state_bytes(optimizer)
    lines = [
        yaml.safe_dump(to_dict(c), sort_keys=False),
        routing_table(optimizer) if isinstance(optimizer, FOAM) else groups(optimizer),
        "",
        f"model   {c.model.name}: {weights:,} parameters with a vocabulary of {run.vocabulary:,}; "
        f"precision {t.precision}",
        f"bytes   {size:,} of weights, {size:,} of gradients, {state:,} of optimizer state; activations come on top",
        f"data    {t.steps:,} steps of {t.batch} x "
        + (rows or f"{d.sequence} tokens: {t.steps * t.batch * d.sequence:,} tokens")
        + (f", or what {t.epochs:g} epochs come to" if t.epochs and not rows else ""),
        *(f"note    {line}" for line in (run.note, run.warning) if line),
        "nothing was trained or written, and no weights were downloaded (--dry_run)",
    ]
    return "\n".join(lines)


def described(rows: Examples) -> str:
    """A task's rows in words."""
    counts = ", ".join(f"{rows.rows(split):,} {split}" for split in rows.splits)
    lines = [f"rows, padded to the longest of a batch (at most {rows.longest} tokens): {counts}"]
    lines += [f"labels  {', '.join(rows.labels)}"] if rows.labels else []
    return "\n".join([*lines, *(f"note    {line}" for line in rows.warnings)])


def groups(optimizer: Optimizer) -> str:
    """The groups of any optimizer: one line each."""
    lines = []
    for group in optimizer.param_groups:
        count = sum(p.numel() for p in group["params"])
        size = optimizers.state_bytes(optimizer, group)
        lines.append(
            f"{group['name']}: {len(group['params'])} tensors, {count:,} weights, lr {float(group['lr']):g}, "
            f"{size:,} bytes of state ({size / count:.3f} a weight)"
        )
    return "\n".join(lines)
