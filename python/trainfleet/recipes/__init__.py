"""Complete example configs, one per file. The first comment line describes the recipe, and the line
`# Next: ...` contains the command to run next.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..trust.errors import ConfigError
from ..trust.spelling import suggest

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """Example config: its name, one-line description, next command and text."""

    name: str
    line: str
    next: str
    text: str


def all_recipes() -> list[Recipe]:
    """Returns all recipes, with the default first."""
    paths = sorted(FOLDER.glob("*.yaml"), key=lambda path: (path.stem != "first-run", path.stem))
    return [_read(path) for path in paths]


def recipe_named(name: str) -> Recipe:
    """Returns the recipe with this name.

    Raises:
        ConfigError: there is no recipe with this name.
    """
    recipes = {recipe.name: recipe for recipe in all_recipes()}
    if name in recipes:
        return recipes[name]
    known = suggest(name, recipes) or f"; there are: {', '.join(recipes)}"
    raise ConfigError.of("RECIPE", f"no recipe is called {name!r}{known}", next="make recipes")


def _read(path: Path) -> Recipe:
    text = path.read_text(encoding="utf-8")
    comments = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    said = next(line for line in comments if not line.startswith("yaml-language-server"))
    following = next(
        (line.removeprefix("Next: ") for line in comments if line.startswith("Next: ")), "make plan"
    )
    return Recipe(path.stem, said, following, text)
