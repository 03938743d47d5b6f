"""`foamlab compare`: a fair contest between optimizers."""

from __future__ import annotations

from ..command import Command
from ..contest_commands import compare

COMMAND = Command(
    compare,
    group="measure",
    help="compare optimizers fairly, each with rates of its own",
    examples=(
        "foamlab compare demo --optimizers foam-split,adamw,adamw-split,muon --out runs/contest",
        "foamlab compare demo --optimizers foam,adamw --lr 1e-3,3e-3 --seeds 0,1,2,3,4",
        "foamlab compare --resume runs/contest",
    ),
    renamed={"hopeless": "stop_factor", "hopeless_at": "stop_at"},
)
