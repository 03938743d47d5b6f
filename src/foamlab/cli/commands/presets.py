"""`foamlab presets`: the recipes there are."""

from __future__ import annotations

from ...text import table
from ..arguments import presets as recipes
from ..arguments import recipe
from ..command import Command


def presets(name: str = "", /) -> str:
    """List the recipes that `foamlab train` knows by name, or print one as a start for your own YAML file.

    Args:
        name: print this recipe.
    """
    if name:
        return recipe(name).read_text(encoding="utf-8")
    texts = {known: path.read_text(encoding="utf-8") for known, path in recipes().items()}
    return table(("preset", ""), [(known, text.splitlines()[0].lstrip("# ")) for known, text in texts.items()])


COMMAND = Command(
    presets,
    group="list",
    help="list the recipes, or print one",
    examples=(
        "foamlab presets",
        "foamlab presets demo > my.yaml",
    ),
)
