"""The subcommands, one file each: a file put here is a new one."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from ..command import Command


@cache
def commands() -> dict[str, Command]:
    """Every subcommand by its name."""
    files = sorted(file.name for file in pkgutil.iter_modules(__path__))
    return {name: import_module(f"{__name__}.{name}").COMMAND for name in files}
