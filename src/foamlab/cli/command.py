"""What a subcommand is. Each is one file of `commands`, which ends with `COMMAND = Command(...)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

INTERRUPTED = 130  # the exit code of a run that was asked to stop: it has saved, and can be resumed


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Args:
        function: gives an exit code, a text to print, or nothing. Its signature is the flags, its docstring their help.
            Imports of torch and the like stay inside, so that `foamlab --help` is instant.
        group: where `foamlab --help` lists it.
        help: one line for that list.
        examples: command lines for its own help.
        renamed: an old name of a flag -> the name it has now.
        first_word: where the function takes a `config`: what the first word may name.
        defaults: settings by their full names, where those of this command are other than a run's.
    """

    function: Callable[..., int | str | None]
    group: Literal["run", "measure", "list"]
    help: str
    examples: tuple[str, ...]
    first_word: tuple[str, ...] = ("PRESET", "FILE.yaml")
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.__name__
