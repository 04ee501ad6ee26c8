"""Verbs for recipes: complete configs to start from."""

from __future__ import annotations

import os
from pathlib import Path

from ..process.install_paths import ROOT
from ..recipes import all_recipes, recipe_named
from ..run.run_folder import write_atomic
from ..trust import untrusted_input
from ..trust.errors import ConfigError, InputError, Problem, TrainfleetError
from .variables import Variables, flag


def recipes(variables: Variables, started: float) -> int:
    """Lists the recipes that come with the package."""
    found = all_recipes()
    if flag(variables, "JSON"):
        from ..report.json_output import RecipeLine, RecipesOutput, emit

        emit(RecipesOutput(tuple(RecipeLine(recipe.name, recipe.line) for recipe in found)))
        return 0
    width = max(len(recipe.name) for recipe in found)
    for recipe in found:
        print(f"{recipe.name:{width}}  {recipe.line}")
    print("next: make config RECIPE=name writes one to config.yaml, or to CONFIG=path")
    return 0


def config(variables: Variables, started: float) -> int:
    """Writes a recipe to config.yaml, or to CONFIG=path. Overwrites user changes only with
    YES=1.
    """
    if "RECIPE" not in variables:
        raise ConfigError.of("RECIPE", "must name a recipe", next="run make recipes to list them")
    recipe = recipe_named(variables["RECIPE"])
    path = Path(variables.get("CONFIG", "config.yaml"))
    before, text = _content(path), linked(recipe.text, path)
    if before == text:
        print(f"{path} is already the recipe {recipe.name}")
        return 0
    if (
        before is not None
        and before not in [linked(other.text, path) for other in all_recipes()]
        and not flag(variables, "YES")
    ):
        then = (
            f"run make config RECIPE={recipe.name} CONFIG=other.yaml, or add YES=1 to overwrite it"
        )
        raise TrainfleetError(f"{path} has changes that would be lost", next=then)
    write_atomic(path, text)
    print(f"wrote the recipe {recipe.name} to {path}: {recipe.line}")
    print(f"next: {recipe.next if path == Path('config.yaml') else f'make plan CONFIG={path}'}")
    return 0


def linked(text: str, path: Path) -> str:
    """Makes the schema path in a recipe's editor comment relative to the folder of `path`.

    Uses the schema in the current folder, or else the one that comes with trainfleet.
    """
    schema = Path("schema/config.schema.json")
    if not schema.exists():
        schema = ROOT / schema
    seen = os.path.relpath(schema.absolute(), path.parent.absolute())
    return text.replace("$schema=schema/config.schema.json", f"$schema={Path(seen).as_posix()}", 1)


def _content(path: Path) -> str | None:
    """Returns the file's text, or None if it does not exist.

    For a binary file, returns "", which differs from every recipe.
    """
    try:
        return untrusted_input.read_text(path, untrusted_input.MEBIBYTE)
    except FileNotFoundError:
        return None
    except InputError as error:
        if not path.is_file():
            raise ConfigError(
                [Problem(0, str(path), "CONFIG", error.what)], next="CONFIG=path/to/config.yaml"
            ) from error
        return ""
