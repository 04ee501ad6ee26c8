"""Describes config keys in the type hints of dataclass fields (types*.py), and generates their JSON
Schema.

A field's type is its type in a resolved config. `Key` adds constraints on the value, as JSON Schema
2020-12 keywords. The docstring below a field is the key's description. If a key defaults to null
but its type does not allow null, derive.py derives the value.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, TypedDict, Unpack, cast, get_args, get_origin

from ..trust.validation import kinds_of

Schema = dict[str, Any]
Texts = tuple[str, ...]
NAME = "^[a-z0-9][a-z0-9._-]{0,62}$"  # run and dataset names
S3 = "^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?#]*)?$"
OWN_FILE = "^(?!runs/|data/)(?:[A-Za-z0-9_][A-Za-z0-9_-]*/){0,8}[A-Za-z0-9_][A-Za-z0-9_-]*"
HEAD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "trainfleet config",
    "description": "One fleet, its data, a model and a training run. A missing key has its default;"
    " null means that trainfleet derives the value, and `make plan` shows how.",
}
WORDS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


class Rules(TypedDict, total=False):
    """JSON Schema keywords, plus two extensions: `unit`, and `backends` (the backends that use the
    key).

    The `backends` of a group also apply to its keys, unless a key specifies its own list.
    """

    default: Any  # replaces the field's default
    type: Sequence[str]  # for a group of keys that a single word can replace
    backends: Sequence[str]
    unit: str
    writeOnly: bool
    enum: Iterable[Any]  # excludes null; for a dict, its keys are used
    minimum: float
    exclusiveMinimum: float
    maximum: float
    exclusiveMaximum: float
    pattern: str
    minLength: int
    maxLength: int
    minItems: int
    maxItems: int
    uniqueItems: bool
    items: Rules
    anyOf: Sequence[Schema]
    examples: Sequence[Any]


class Key:
    """Example values of a key and constraints on it, as metadata of an Annotated type."""

    def __init__(self, *shown: Any, **rules: Unpack[Rules]) -> None:
        self.rules = rules | {"examples": shown} if shown else rules


def span(unit: str, minimum: float, maximum: float) -> Key:
    """Returns a Key for a number with this unit and these bounds."""
    return Key(unit=unit, minimum=minimum, maximum=maximum)


def schema_of(kind: type, described: bool = False) -> Schema:
    """Returns the JSON Schema of a dataclass.

    `described` adds the description of each key, read from the source. It also omits keys without a
    description, which only verbs set.
    """
    told = _descriptions(kind) if described else {}
    keys = {
        field.name: ({"description": told[field.name]} if described else {})
        | _of_field(field, kinds_of(kind)[field.name], described)
        for field in dataclasses.fields(kind)
        if not described or field.name in told
    }
    required = [name for name, part in keys.items() if "default" not in part]
    group = {"type": "object", "additionalProperties": False, "properties": keys}
    return group | ({"required": required} if required else {})


def _of_field(field: dataclasses.Field[Any], hint: Any, described: bool) -> Schema:
    base, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    rules: Schema = {name: rule for key in metadata for name, rule in key.rules.items()}
    group = dataclasses.is_dataclass(base)
    default = rules.pop("default", {} if group else field.default)
    part = _part(base, rules, described, null=default is None)
    if default is not dataclasses.MISSING:
        part["default"] = list(default) if isinstance(default, tuple) else default
    return part


def _part(base: Any, rules: Schema, described: bool, null: bool = False) -> Schema:
    """Returns the schema of a type with these rules. `null` means that null is also allowed."""
    every = get_args(base) if get_origin(base) is UnionType else (base,)
    nulls = [None] * (null or NoneType in every)
    kinds = [kind for kind in every if kind is not NoneType]
    words = [*rules.pop("type", map(_word, kinds)), *("null" for _ in nulls)]
    part: Schema = {"type": words if len(words) > 1 else words[0]} | rules
    if "enum" in rules:
        part["enum"] = [*rules["enum"], *nulls]
    if "backends" in rules:
        part["backends"] = list(rules["backends"])
    for kind in kinds:
        if dataclasses.is_dataclass(kind):
            part = schema_of(cast(type, kind), described) | part
        elif get_origin(kind) is tuple:
            part["items"] = _part(get_args(kind)[0], dict(rules.get("items", {})), described)
    return part


def _word(kind: Any) -> str:
    return WORDS.get(kind) or ("object" if dataclasses.is_dataclass(kind) else "array")


def _descriptions(kind: type) -> dict[str, str]:
    (definition,) = ast.parse(inspect.getsource(kind)).body
    return {
        ast.unparse(field.target): " ".join(str(ast.literal_eval(text.value)).split())
        for field, text in pairwise(cast(ast.ClassDef, definition).body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
