"""The command `foamlab`: the only package that prints."""

from .commands import main

__all__ = ["main"]
