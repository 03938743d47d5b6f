"""The command `foamlab`: the only package that prints."""

from .main import main

__all__ = ["main"]
