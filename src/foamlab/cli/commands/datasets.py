"""`foamlab datasets`: the data sets there are."""

from __future__ import annotations

from ...text import table
from ..command import Command


def datasets() -> str:
    """List the data sets for `--data.name`."""
    from ...data.sources import DATASETS

    names = {name: f"{name}:{entry.argument}" if entry.argument else name for name, entry in DATASETS.items()}
    return table(("data", ""), [(names[name], entry.help) for name, entry in DATASETS.items()])


COMMAND = Command(
    datasets,
    group="list",
    help="list the data sets",
    examples=("foamlab datasets",),
)
