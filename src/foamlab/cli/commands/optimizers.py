"""`foamlab optimizers`: the optimizers there are, and their options."""

from __future__ import annotations

import inspect

from ...errors import known_name
from ...text import table
from ..command import Command


def optimizers(name: str = "", /) -> str:
    """List the optimizers for `--optimizer.name` with their default learning rates, or show one's options.

    Args:
        name: show the options of this optimizer and where its defaults come from.
    """
    from ...optimizers.registry import OPTIMIZERS, options

    if not name:
        rows = [
            (known, f"{e.lr:g}", f"{e.scale:g}", f"{e.betas[0]:g} {e.betas[1]:g}", e.help)
            for known, e in OPTIMIZERS.items()
        ]
        return table(("optimizer", "lr", "scale", "betas", ""), rows)
    entry = OPTIMIZERS[known_name(name, OPTIMIZERS, "optimizer")]
    tried = "; ".join(f"{key} {', '.join(f'{x:.4g}' for x in values)}" for key, values in entry.tune.items())
    about = [
        f"{name}: {entry.help}",
        f"  lr {entry.lr:g}, scale {entry.scale:g}, betas {entry.betas}; source: {entry.source}",
        f"  `foamlab compare` tries {tried}",
        *([f"  limits: {entry.limits}"] if entry.limits else []),
        "",
    ]
    settable = [
        (f"--optimizer.options.{key}", "" if v is inspect.Parameter.empty else repr(v))
        for key, v in options(name).items()
    ]
    return "\n".join([*about, table(("option", "default"), settable)])


COMMAND = Command(
    optimizers,
    group="list",
    help="list the optimizers, or show one's options",
    examples=(
        "foamlab optimizers",
        "foamlab optimizers foam",
    ),
)
