"""The commands that list what there is: models, optimizers, data sets, recipes. Each gives its text back.

Imported by `cli` for its signatures, so heavy imports stay inside the functions.
"""

from __future__ import annotations

import inspect

from ..errors import known_name
from ..text import table
from .arguments import presets as recipes
from .arguments import recipe


def models(name: str = "", /) -> str:
    """List the models that `--model.name` takes, or show one's configuration. A local Hugging Face folder works too.

    Args:
        name: show this one's transformers configuration.
    """
    from ..models.presets import MODELS

    if name:
        preset = MODELS[known_name(name, MODELS, "model")]
        return preset.config(preset.vocab, 1024).to_json_string()
    rows = [(n, count(p.parameters), f"{p.vocab:,}", p.help) for n, p in MODELS.items()]
    return table(("model", "parameters", "vocabulary", ""), rows)


def optimizers(name: str = "", /) -> str:
    """List the optimizers that `--optimizer.name` takes with their default rates, or show one's options.

    Args:
        name: show this one's options and where its defaults come from.
    """
    from ..optimizers.registry import OPTIMIZERS, options

    if not name:
        rows = [
            (n, f"{e.lr:g}", f"{e.scale:g}", f"{e.betas[0]:g} {e.betas[1]:g}", e.help) for n, e in OPTIMIZERS.items()
        ]
        return table(("optimizer", "lr", "scale", "betas", ""), rows)
    entry = OPTIMIZERS[known_name(name, OPTIMIZERS, "optimizer")]
    tried = "; ".join(f"{key} {', '.join(f'{x:.4g}' for x in values)}" for key, values in entry.tune.items())
    about = [
        f"{name}: {entry.help}",
        f"  lr {entry.lr:g}, scale {entry.scale:g}, betas {entry.betas}; source: {entry.source}",
        f"  `foamlab compare` tries {tried}",
        *([f"  limits: {entry.limits}"] if entry.limits else []),
        "",
    ]
    settable = [
        (f"--optimizer.options.{key}", "" if v is inspect.Parameter.empty else repr(v))
        for key, v in options(name).items()
    ]
    return "\n".join([*about, table(("option", "default"), settable)])


def datasets() -> str:
    """List the data that `--data.name` takes."""
    from ..data.sources import DATASETS

    rows = [(f"{name}:{entry.argument}" if entry.argument else name, entry.help) for name, entry in DATASETS.items()]
    return table(("data", ""), rows)


def presets(name: str = "", /) -> str:
    """List the recipes that `foamlab train` takes by name, or print one: a start for a YAML file of your own.

    Args:
        name: print this one.
    """
    if name:
        return recipe(name).read_text(encoding="utf-8")
    heads = [(path.stem, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")) for path in recipes().values()]
    return table(("preset", ""), heads)


def count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.1f} M"
