"""schema/config.schema.json: the one truth about keys. Defaults, checks and the reference page all come from it."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import Problem
from .positions import Document, Key

PATH = Path(__file__).parents[3] / "schema" / "config.schema.json"
NAME = "^[a-z0-9][a-z0-9._-]{0,62}$"  # the pattern of names of runs and datasets
Schema = dict[str, Any]


@cache
def load_schema() -> Schema:
    return json.loads(PATH.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def is_group(part: Schema) -> bool:
    """Whether a key holds other keys (one word may stand for them: `train.layout: auto`)."""
    return "object" in part.get("type", ())


def walk(schema: Schema, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Every key with its part of the schema, parents first, in the order of the file."""
    for name, part in schema.get("properties", {}).items():
        yield (*prefix, name), part
        if is_group(part):
            yield from walk(part, (*prefix, name))


def fill(value: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """The same mapping with every missing key at its default."""
    filled = {}
    for name, part in schema["properties"].items():
        given = value.get(name, copy.deepcopy(part.get("default")))
        filled[name] = fill(given, part) if is_group(part) and isinstance(given, dict) else given
    return filled


def check(document: Document) -> Iterator[tuple[Key, Problem]]:
    """Each thing in the document that the schema does not allow, with the key it is about."""
    from jsonschema import Draft202012Validator  # costs 0.1 s: only when there is something to check

    for error in Draft202012Validator(load_schema()).iter_errors(document.value):
        key: Key = tuple(error.absolute_path)
        for extra, message in _explain(error, document):
            line, where = document.where((*key, *extra))
            yield (*key, *extra), Problem(line, where, dotted((*key, *extra)), message)


def dotted(key: Key) -> str:
    """`data.sources[0]` for ("data", "sources", 0)."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _explain(error: Any, document: Document) -> Iterator[tuple[Key, str]]:
    got, rule = error.instance, error.validator_value
    unit = f" {error.schema['unit']}" if error.schema.get("unit") else ""
    match error.validator:
        case "additionalProperties":
            parent = tuple(part for part in error.absolute_path if isinstance(part, str))
            for name in sorted(set(got) - set(error.schema.get("properties", {}))):
                yield (name,), f"unknown key{suggest_key((*parent, name), error.schema)}"
        case "required":
            yield (), f"needs the key {error.message.split(chr(39))[1]!r}"
        case "type":
            yield (), f"must be {_types(rule)}, not {_show(got)}"
        case "enum":
            allowed = [str(value) for value in rule if value is not None]
            yield (), f"{_show(got)} is not one of {', '.join(allowed)}{suggest(str(got), allowed)}"
        case "anyOf":
            allowed = [str(value) for value in rule[0]["enum"] if value is not None]
            yield (), f"{_show(got)} is not one of {', '.join(allowed)}, nor a path{suggest(str(got), allowed)}"
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum":
            yield (), f"must be {_range(error.schema)}{unit}, not {_show(got)}"
        case "pattern" if rule != NAME:
            examples = ", ".join(map(_show, error.schema.get("examples", ())))
            yield (), f"{_show(got)} is not {f'written as in {examples}' if examples else f'of the form {rule}'}"
        case "pattern":
            yield (
                (),
                f"{_show(got)} must be lower-case letters, digits, '.', '_' and '-', starting with a letter or digit, at most 63",
            )
        case "minItems" | "minLength":
            yield (), "must not be empty"
        case _:
            yield (), error.message


def _types(rule: str | list[str]) -> str:
    names = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false",
             "object": "a group of keys", "array": "a list", "null": "null"}  # fmt: skip
    return " or ".join(names[name] for name in ([rule] if isinstance(rule, str) else rule))


def _range(schema: Schema) -> str:
    bounds = (
        ("minimum", "at least"),
        ("exclusiveMinimum", "greater than"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "less than"),
    )
    return " and ".join(f"{word} {schema[name]}" for name, word in bounds if name in schema)


def _show(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def suggest(word: str, known: list[str]) -> str:
    """`; did you mean X?` for the closest known word, or nothing."""
    close = nearest(word, known)
    return f"; did you mean {close}?" if close else ""


def nearest(word: str, known: list[str], cutoff: float = 0.6) -> str | None:
    """The word that was probably meant: a slip of the finger, one that it abbreviates (`lr`, `seqlen`), or the most alike.

    Where none is alike, one that has a word in common with it: `batch_size` is a global_batch.
    """
    alike = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    if alike and difflib.SequenceMatcher(None, word, alike[0]).ratio() > 0.85:
        return alike[0]
    initials = [name for name in known if "".join(part[0] for part in name.split("_")) == word]
    abbreviated = initials or [name for name in known if name[0] == word[:1] and _is_within(word, name)]
    parts = {part for part in word.split("_") if len(part) > 3}
    common = [name for name in known if parts & set(name.split("_"))]
    return min(abbreviated, key=len) if abbreviated else next(iter(alike or common), None)


def _is_within(word: str, name: str) -> bool:
    """Whether the letters of `word` come in `name` in this order."""
    letters = iter(name)
    return all(letter in letters for letter in word)


def suggest_key(key: tuple[str, ...], schema: Schema) -> str:
    """The nearest key here; else one of that name elsewhere; else all that may stand here."""
    siblings = list(schema.get("properties", {}))
    near = nearest(key[-1], siblings)
    if near:
        return f"; did you mean {near}?"
    every = [path for path, part in walk(load_schema())]
    leaf = nearest(key[-1], [path[-1] for path in every], cutoff=0.75)
    if leaf:
        return f"; did you mean {dotted(next(path for path in every if path[-1] == leaf))}?"
    return f"; known here: {', '.join(siblings)}"
