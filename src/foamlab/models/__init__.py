"""Models of transformers by preset, folder or hub name, and what a language model is trained for."""

from .classifiers import Head, head_labels
from .presets import FAMILIES, MODELS, Preset, build, described, switch_checkpointing

__all__ = ["FAMILIES", "MODELS", "Head", "Preset", "build", "described", "head_labels", "switch_checkpointing"]
