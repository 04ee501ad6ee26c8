"""Parses fleet.options for a third-party backend into a frozen dataclass that the backend
defines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import yaml

from ..config import Config
from ..trust.errors import InputError
from ..trust.validation import fit

KEY = "fleet.options"
T = TypeVar("T")


def told(config: Config, kind: type[T]) -> T:
    """Returns the options as an instance of the dataclass `kind`, which defines them.

    Raises:
        InputError: an option is unknown, missing, duplicated, or has a value of the wrong type.
    """
    given: dict[str, object] = {}
    for option in config.fleet.options:
        name, _, text = option.partition("=")
        if name in given:
            raise InputError("is given twice", key=name)
        try:
            given[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError("is not valid YAML", key=name) from error
    return fit(kind, given)


def refuse(config: Config, kind: type[object]) -> Iterator[tuple[str, str]]:
    """Yields an error if the options are invalid. For use in `Backend.refuse`."""
    try:
        told(config, kind)
    except InputError as error:
        yield KEY, f"{error.key}: {error.what}"
