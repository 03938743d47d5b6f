"""What parameters are called: two lists of names of the same weights, one of them perhaps of a wrapped model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

# what torch's wrappers put into the names of a model's parameters (DDP and AveragedModel, compile, FSDP, activation
# checkpointing), before them or, where only a part is wrapped, in their midst: no part of the model
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def bare(name: str) -> str:
    """The name without wrappers.

    >>> bare("_orig_mod.module.layers.0._checkpoint_wrapped_module.up.weight")
    'layers.0.up.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or name


def places(mine: Sequence[str], theirs: Sequence[str]) -> list[int | None]:
    """Where each of my names stands among theirs, wrappers seen through; None for one that is not once on both sides.

    A model may call a part of its own `module`: where seeing through would make two names one, names are as they are.

    >>> places(["_orig_mod.b", "_orig_mod.a", "_orig_mod.c"], ["a", "b"])
    [1, 0, None]
    """
    sides = [list(map(bare, names)) for names in (mine, theirs)]
    if any(len(set(sides[k])) < len(set(names)) for k, names in enumerate((mine, theirs))):
        sides = [list(mine), list(theirs)]
    if sides[0] == sides[1]:  # perhaps not unique, as of two models in one optimizer: then the order says which
        return list(range(len(mine)))
    counts = [Counter(names) for names in sides]
    place = {name: i for i, name in enumerate(sides[1])}
    return [place[name] if counts[0][name] == counts[1][name] == 1 else None for name in sides[0]]
