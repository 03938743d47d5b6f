"""`foamlab ablate`: the paper's ablations of FOAM."""

from __future__ import annotations

from ..command import Command
from ..contest_commands import ablate

COMMAND = Command(
    ablate,
    group="measure",
    help="repeat the paper's ablations of FOAM",
    examples=(
        "foamlab ablate demo --studies residual,level --out runs/ablation",
        "foamlab ablate --resume runs/ablation",
    ),
)
