"""Converts parsed JSON or YAML to typed Python values.

Every level is checked against a type hint, and a mismatch raises InputError with the key. Supported
hints: dataclasses, TypedDicts (may contain extra keys), tuples, lists, dicts, unions, Literal,
plain types, Path, and Annotated with a Range or Pattern. A bool is not accepted as an integer, and
floats must be finite.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from .errors import InputError
from .untrusted_input import MEBIBYTE, read_text, show

T = TypeVar("T")
LARGEST = 2**63  # integers must fit in 64 bits


@dataclasses.dataclass(frozen=True)
class Range:
    """Inclusive lower and upper bounds of a number."""

    least: float
    most: float


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Regular expression that must match the whole text."""

    text: str


Count = Annotated[int, Range(0, LARGEST)]
# seconds since 1970, up to the year 6325
Moment = Annotated[float, Range(0, 2**37)]
Name = Annotated[str, Pattern(r"[^\x00-\x1f\x7f-\x9f]{0,4096}")]  # text on a single line


def fit(kind: type[T], value: Any, where: str = "", then: str = "") -> T:
    """Converts `value` to the type `kind`.

    Raises:
        InputError: the value does not match the type; the error contains the invalid key.
    """
    try:
        return cast(T, _fit(kind, value, ""))
    except InputError as error:
        raise InputError(error.what, where=where, key=error.key, next=then) from error


FIGURES = (int, float, int | None, float | None)


def fit_row(kind: type[T], row: Mapping[str, Any], table: Path, mark: str) -> T:
    """Creates a row of a data table. Errors refer to the first line of the file that contains
    `mark`.

    Raises:
        InputError: a number is missing, negative or invalid, or a key is unknown.
    """
    try:
        for key, hint in kinds_of(cast(type, kind)).items():
            if hint in FIGURES and key in row:
                figure = _fit(hint, row[key], key)
                _plain("0 or more", figure, not figure or figure > 0, key)
        return kind(**row)
    except (InputError, TypeError) as error:
        lines = read_text(table, 4 * MEBIBYTE).splitlines()
        line = next((line for line, text in enumerate(lines, 1) if mark in text), 0)
        raise InputError(str(error), where=f"{table}:{line}: {mark}") from error


def _fit(hint: Any, value: Any, key: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if hint is None or hint is type(None):
        return _plain("null", value, value is None, key)
    if origin in (types.UnionType, typing.Union):
        return _any_of(typing.get_args(hint), value, key)
    if origin is Annotated:
        inner, *rules = typing.get_args(hint)
        return _ruled(rules, _fit(inner, value, key), key)
    if origin is typing.Required:
        return _fit(typing.get_args(hint)[0], value, key)
    if origin is Literal:
        choices = typing.get_args(hint)
        return _plain(
            f"one of {', '.join(map(str, choices))}",
            value,
            isinstance(value, str | int) and value in choices,
            key,
        )
    if dataclasses.is_dataclass(hint):
        return _built(cast(type, hint), value, key)
    if typing.is_typeddict(hint):
        return _record(hint, value, key)
    return _PLAIN[origin or hint](typing.get_args(hint), value, key)


def _whole(_: Any, value: Any, key: str) -> int:
    return cast(
        int,
        _plain("a whole number", value, type(value) is int and -LARGEST <= value < LARGEST, key),
    )


def _number(_: Any, value: Any, key: str) -> float:
    good = (
        type(value) in (int, float) and math.isfinite(value)
        if type(value) is not int
        else abs(value) < LARGEST
    )
    return float(_plain("a finite number", value, good, key))


def _sequence(hints: Any, value: Any, key: str) -> tuple[Any, ...]:
    _plain("a list", value, isinstance(value, list | tuple), key)
    if len(hints) == 2 and hints[1] is ...:
        if hints[0] is int and all(
            type(item) is int and -LARGEST <= item < LARGEST for item in value
        ):
            return tuple(value)  # fast path for checksums, which are long lists of integers
        return tuple(_fit(hints[0], item, f"{key}[{index}]") for index, item in enumerate(value))
    _plain(f"a list of {len(hints)}", value, len(value) == len(hints), key)
    return tuple(
        _fit(hint, item, f"{key}[{index}]")
        for index, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def _list(hints: Any, value: Any, key: str) -> list[Any]:
    return list(_sequence((*hints, ...), value, key))


def _mapping(hints: Any, value: Any, key: str) -> dict[str, Any]:
    _plain("an object", value, isinstance(value, dict), key)
    names = (
        (value if hints[0] is str else (_fit(hints[0], name, key) for name in value))
        if hints
        else value
    )
    return {
        name: _fit(hints[1], item, _joined(key, name))
        for name, item in zip(names, value.values(), strict=True)
    }


_PLAIN: dict[Any, Callable[[Any, Any, str], Any]] = {
    int: _whole,
    float: _number,
    str: lambda _, value, key: _plain("text", value, isinstance(value, str), key),
    Path: lambda _, value, key: Path(_fit(Name, value, key)),
    bool: lambda _, value, key: _plain("true or false", value, isinstance(value, bool), key),
    tuple: _sequence,
    list: _list,
    dict: _mapping,
    Mapping: _mapping,
}


def _any_of(hints: tuple[Any, ...], value: Any, key: str) -> Any:
    """Converts a value to the first type in the union that matches.

    Tries a mapping only against mapping types, so that errors refer to the mapping's keys.
    """
    if value is None and type(None) in hints:
        return None
    rest = [hint for hint in hints if hint is not type(None)]
    fitting = [hint for hint in rest if _is_group(hint) == isinstance(value, dict)] or rest
    for hint in fitting[:-1]:
        try:
            return _fit(hint, value, key)
        except InputError:
            continue
    return _fit(fitting[-1], value, key)


def _is_group(hint: Any) -> bool:
    return (
        dataclasses.is_dataclass(hint)
        or typing.is_typeddict(hint)
        or typing.get_origin(hint) in (dict, Mapping)
    )


def _ruled(rules: list[Any], value: Any, key: str) -> Any:
    for rule in rules:
        if isinstance(rule, Range):
            _plain(
                f"from {rule.least:g} to {rule.most:g}",
                value,
                rule.least <= value <= rule.most,
                key,
            )
        elif isinstance(rule, Pattern):
            _plain(
                f"of the form {rule.text}", value, re.fullmatch(rule.text, value) is not None, key
            )
    return value


def _built(kind: type, value: Any, key: str) -> Any:
    _plain("an object", value, isinstance(value, dict), key)
    kinds = kinds_of(kind)
    if unknown := sorted(value.keys() - kinds.keys()):
        raise InputError("is an unknown key", key=_joined(key, unknown[0]))
    found = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            found[field.name] = _fit(kinds[field.name], value[field.name], _joined(key, field.name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError("is missing", key=_joined(key, field.name))
    return kind(**found)


def _record(kind: Any, value: Any, key: str) -> Any:
    _plain("an object", value, isinstance(value, dict), key)
    kinds = kinds_of(kind)
    if missing := sorted(_required(kind) - value.keys()):
        raise InputError("is missing", key=_joined(key, missing[0]))
    return {
        name: _fit(kinds.get(name, Any), item, _joined(key, name)) for name, item in value.items()
    }


@cache
def _required(kind: Any) -> frozenset[str]:
    """Returns the keys that a TypedDict requires.

    Checks the hints too, because Python ignores Required[...] in string annotations.
    """
    marked = {
        name for name, hint in kinds_of(kind).items() if typing.get_origin(hint) is typing.Required
    }
    return frozenset(kind.__required_keys__ | marked)


@cache
def kinds_of(kind: type) -> dict[str, Any]:
    """Returns a class's resolved field types, including Annotated metadata."""
    return typing.get_type_hints(kind, include_extras=True)


def _plain(wanted: str, value: Any, good: bool, key: str) -> Any:
    if not good:
        raise InputError(f"must be {wanted}, not {show(value)}", key=key)
    return value


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
