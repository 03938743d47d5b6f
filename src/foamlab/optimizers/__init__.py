"""The table of optimizers that a run may use: torchfoam's, and the rivals of other packages."""

from .registry import OPTIMIZERS, build, dry_build, options, ours, resolve, state_bytes

__all__ = ["OPTIMIZERS", "build", "dry_build", "options", "ours", "resolve", "state_bytes"]
