"""Models of transformers by preset, folder or hub name, and what a language model is trained for."""

from .presets import FAMILIES, MODELS, Preset, build, described, switch_checkpointing

__all__ = ["FAMILIES", "MODELS", "Preset", "build", "described", "switch_checkpointing"]
