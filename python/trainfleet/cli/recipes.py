"""make recipes: the complete configs that come with the package, one line each."""

from __future__ import annotations

from ..recipes import all_recipes
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    recipes = all_recipes()
    width = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        print(f"{recipe.name:{width}}  {recipe.line}")
    print("next: make config RECIPE=name writes one to config.yaml, or to CONFIG=path")
    return 0
