"""What fleet.options tells a backend of another package, as a frozen dataclass of that
package's.
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
    """The options as `kind`, whose annotations and defaults say which there are.

    Raises:
        InputError: one is not known, is missing, is given twice, or its value is of another type.
    """
    given: dict[str, object] = {}
    for option in config.fleet.options:
        name, _, text = option.partition("=")
        if name in given:
            raise InputError("is given twice", key=name)
        try:
            given[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError("is not a value as YAML has it", key=name) from error
    return fit(kind, given)


def refuse(config: Config, kind: type[object]) -> Iterator[tuple[str, str]]:
    """What is wrong with the options, for `Backend.refuse`."""
    try:
        told(config, kind)
    except InputError as error:
        yield KEY, f"{error.key}: {error.what}"
