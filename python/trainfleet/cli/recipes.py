"""make recipes: complete configs that come with the package, a line each."""

from __future__ import annotations

from ..recipes import all_recipes
from .variables import Variables

WIDTH = 22  # columns of a name, and more for a longer one: a line has 80


def main(variables: Variables, started: float) -> int:
    for recipe in all_recipes():
        print(f"{recipe.name:{WIDTH}}  {recipe.line}")
    print("next: make config RECIPE=name writes one to config.yaml (CONFIG=path: elsewhere)")
    return 0
