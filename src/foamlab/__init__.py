"""foamlab: the lab around torchfoam. Train, fine-tune, compare, plan and report from one command line.

`foamlab.plan(model, optimizer, ...)` estimates the memory a training run needs; all else is the command `foamlab`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .memory.planner import Plan, plan

__all__ = ["Plan", "plan"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # only now: torch takes two seconds to import
        from .memory import planner

        return getattr(planner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
