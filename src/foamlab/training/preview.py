"""A run before it is run: settings resolved, where each parameter goes, bytes. All on the meta device.

For `foamlab train --dry_run`. It looks whether the text is there, reads none of it and writes nothing; of a model on
the hub it fetches all but the weights. What memory the activations take is the planner's to say.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import yaml
from torch.optim import Optimizer

from torchfoam import FOAM, routing_table

from .. import data, machine, models, optimizers, settled
from ..config import RunConfig, to_dict
from ..data import sources
from ..data.tokenizer import vocabulary
from ..memory import simulate
from .run import check


def preview(config: RunConfig) -> str:
    """What `train` would do, as text.

    Raises:
        UserError: settings that `train` would refuse, as far as can be told without reading the data.
    """
    config = check(config)
    config, warning = data.settle(config)
    sources.find(config.data)
    t, d = config.train, config.data
    vocab = vocabulary(d.tokenizer)[1]  # a small corpus may give fewer than bpe:SIZE asks
    device = machine.choose_device(t.device)
    precision, remark = machine.choose_precision(t.precision, device)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    settings = replace(config, optimizer=optimizers.resolve(config.optimizer))
    model = models.build(config.model, vocab, d.sequence, "meta", dtype)
    optimizer = optimizers.rehearse(config.optimizer, model, device)
    settled.check_optimizer(t, optimizer, 1)
    if not optimizers.state_bytes(optimizer):  # most optimizers make their state in the first step
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        with simulate.Tracker(hypothetical=True):  # some ask for values, which there are none
            optimizer.step()
    weights = sum(p.numel() for p in model.parameters())
    size, state = weights * dtype.itemsize, optimizers.state_bytes(optimizer)
    lines = [
        yaml.safe_dump(to_dict(settings), sort_keys=False),
        routing_table(optimizer) if isinstance(optimizer, FOAM) else groups(optimizer),
        "",
        f"model   {config.model.name}: {weights:,} parameters with a vocabulary of {vocab:,}; precision {precision}",
        f"bytes   {size:,} of weights, {size:,} of gradients, {state:,} of optimizer state; activations come on top",
        f"data    {t.steps:,} steps of {t.batch} x {d.sequence} tokens: {t.steps * t.batch * d.sequence:,} tokens",
        *(f"note    {line}" for line in (remark, warning) if line),
        "nothing was trained or written, and no weights were downloaded (--dry_run)",
    ]
    return "\n".join(lines)


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
