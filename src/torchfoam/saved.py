"""Whether a saved state dict fits an optimizer: everything is compared before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .options import check
from .state import new_state

FORMAT = 2  # version of the state dict; rises when an older one needs translating
# format 1 had the paper's rule alone, and a float32 `step`
FORMAT_1 = {"bias_correction": "whole", "residual_in_v": 1.0}
# a state dict that differs in one of these belongs to another algorithm: loading it is refused
IDENTITY = ("rule", "level", "second_moment", "state")


def upgraded(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group in today's format, with the rule it was trained with."""
    return {**group, **(FORMAT_1 if group["format"] == 1 else {}), "format": FORMAT}


def match(opt: Optimizer, state_dict: Mapping[str, Any]) -> list[tuple[Tensor, dict[str, Any], Mapping[str, Any]]]:
    """Pair every parameter and its group with its saved state ({} where it had none).

    Raises:
        ValueError: naming both sides of the first difference, and where it is.
    """
    groups, states = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, (list, tuple)) or not isinstance(states, Mapping):
        raise ValueError(f"not an optimizer state dict: keys are {sorted(map(str, state_dict))}")
    for k, saved in enumerate(groups):
        _is_ours(f"group {k}", saved)
    if len(groups) != len(opt.param_groups):
        raise ValueError(
            f"the state dict has {len(groups)} parameter groups, this optimizer has {len(opt.param_groups)}"
        )
    pairs = []
    for k, (group, saved) in enumerate(zip(opt.param_groups, groups)):
        where = f"group {k} ({group['name']})" if "name" in group else f"group {k}"
        _match_group(where, group, saved, opt.defaults)
        for p, i in zip(group["params"], saved["params"]):
            _match_state(f"{where}, parameter {i}", new_state(p, group, device="meta"), states.get(i, {}))
            pairs.append((p, group, states.get(i, {})))
    return pairs


def _is_ours(where: str, saved: Any) -> None:
    if not isinstance(saved, Mapping) or not isinstance(saved.get("params"), (list, tuple)):
        raise ValueError(f"{where}: not a parameter group of a state dict: {saved!r:.80}")
    if not isinstance(saved.get("format"), int):
        raise ValueError(
            f"{where}: this is not a FOAM state dict (no `format`); "
            "to continue from torch.optim.AdamW use torchfoam.from_adamw"
        )
    if saved["format"] > FORMAT:
        raise ValueError(f"{where}: written by a newer torchfoam (format {saved['format']}, this one reads {FORMAT})")


def _match_group(where: str, group: dict[str, Any], saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    for key in IDENTITY:
        if saved.get(key, defaults[key]) != group[key]:
            raise ValueError(f"{where}: saved with {key}={saved[key]!r}, this optimizer has {group[key]!r}")
    if len(saved["params"]) != len(group["params"]):
        raise ValueError(f"{where}: saved with {len(saved['params'])} parameters, this one has {len(group['params'])}")
    check({**group, **saved})
    mine, names = group.get("param_names"), saved.get("param_names")
    if mine and names and mine != names and sorted(mine) == sorted(names):
        i = [a == b for a, b in zip(mine, names)].index(False)
        raise ValueError(f"{where}, parameter {i}: saved as {names[i]!r}, this optimizer has {mine[i]!r} there")


def _match_state(where: str, want: dict[str, Tensor], saved: Any) -> None:
    if not isinstance(saved, Mapping):
        raise ValueError(f"{where}: the saved state is a {type(saved).__name__}")
    if saved and set(saved) != set(want):
        raise ValueError(f"{where}: saved state {sorted(saved)}, expected {sorted(want)}")
    for name, x in saved.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{where}: {name} is a {type(x).__name__}, not a tensor")
        counts = name == "step" and not x.is_complex()  # float32 in format 1, and other programs' choice
        if x.shape != want[name].shape or (x.dtype != want[name].dtype and not counts):
            raise ValueError(
                f"{where}: {name} was saved as {x.dtype} {tuple(x.shape)}, "
                f"this one has {want[name].dtype} {tuple(want[name].shape)}"
            )
