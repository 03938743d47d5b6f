"""Residual ratios over layers and steps, as a heat map: what training recorded, put in rows. Draws nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .charts import Heat

COLUMNS = 200  # records shown


def heat(lines: Sequence[Mapping[str, Any]], name: str, title: str) -> Heat | None:
    """The map of a run's lines {"kind": "residual", "step", "values": {parameter: ratio}}; None without any.

    A row is a matrix. Those of one kind (every `mlp.up_proj`) stand together, the first layer on top.
    """
    if not lines:
        return None
    keep = sorted({round(i * (len(lines) - 1) / max(COLUMNS - 1, 1)) for i in range(COLUMNS)})
    if len(lines) > COLUMNS:
        lines = [lines[i] for i in keep]
    names = list(dict.fromkeys(key for line in lines for key in line.get("values", {})))
    kinds = list(dict.fromkeys(kind(n)[0] for n in names))
    rows = sorted(names, key=lambda n: (kinds.index(kind(n)[0]), kind(n)[1]))
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(kind(row)[0], []).append(i)
    z = [[number(line["values"].get(row)) for line in lines] for row in rows]
    return Heat(name, title, "residual ratio", [float(line["step"]) for line in lines], rows, groups, z)


def kind(name: str) -> tuple[str, int]:
    """("mlp.up_proj", 3) of "model.layers.3.mlp.up_proj.weight"; 0 where no layer is named.

    >>> kind("model.layers.3.mlp.up_proj.weight"), kind("router.weight")
    (('mlp.up_proj', 3), ('router', 0))
    """
    name = re.sub(r"\.weight$", "", name)
    match = re.search(r"(?:^|\.)(\d+)\.(.+)$", name)
    return (match[2], int(match[1])) if match else (name, 0)


def number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
