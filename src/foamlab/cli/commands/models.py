"""`foamlab models`: the models there are."""

from __future__ import annotations

from ...errors import known_name
from ...text import count, table
from ..command import Command


def models(name: str = "", /) -> str:
    """List the models for `--model.name`, or show one's configuration. A local Hugging Face folder works too.

    Args:
        name: show the transformers configuration of this model.
    """
    from ...models.presets import MODELS

    if name:
        preset = MODELS[known_name(name, MODELS, "model")]
        return preset.config(preset.vocab, 1024).to_json_string()
    rows = [(n, count(p.parameters), f"{p.vocab:,}", p.help) for n, p in MODELS.items()]
    return table(("model", "parameters", "vocabulary", ""), rows)


COMMAND = Command(
    models,
    group="list",
    help="list the models, or show one's configuration",
    examples=(
        "foamlab models",
        "foamlab models llama-60m",
    ),
)
