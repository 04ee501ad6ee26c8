"""Validates a config against the schema, and suggests fixes for invalid keys and values."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ..process import install_paths
from ..trust import spelling
from ..trust.errors import Problem
from ..trust.spelling import suggest
from ..trust.untrusted_input import show
from .key import NAME, Schema, schema_of
from .tables import read_table
from .types import Config
from .yaml_lines import Key, YamlDocument, dotted

SYNONYMS = Path(__file__).with_name("synonyms.yaml")
GUESSES = 20  # maximum suggestions per group of keys; each takes a millisecond
# YAML 1.2 values, and the words for them in other languages and YAML 1.1.
WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "null": {"null": ("none", "nil")},
    "boolean": {"true": ("yes", "on", "y"), "false": ("no", "off", "n")},
}
BACKEND = ("fleet", "backend")  # installed packages can add values
# Schema violation: the key, the violated rule, the value, and the part of the schema with the rule.
Fault = tuple[Key, str, Any, Schema]
# Characters to strip around a number, except a multiplier such as k.
AROUND = r"[_$']+|[\s,](?=\d{3}\b)|(?<=\d)(?![kmbgt]$)[a-z]+$"


@cache
def load_schema() -> Schema:
    """Returns the schema without descriptions."""
    return schema_of(Config)


def is_group(part: Schema) -> bool:
    """Returns whether a key is a group of keys.

    Some groups can be replaced by a word, as in `train.parallelism: auto`.
    """
    return "object" in part.get("type", ())


def walk(schema: Schema, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Yields every key with its part of the schema, in schema order, parents first."""
    for name, part in schema.get("properties", {}).items():
        yield (*prefix, name), part
        if is_group(part):
            yield from walk(part, (*prefix, name))


def fill(value: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """Returns the config with defaults for all missing keys."""
    filled = {}
    for name, part in schema["properties"].items():
        given = value.get(name, copy.deepcopy(part.get("default")))
        filled[name] = fill(given, part) if is_group(part) and isinstance(given, dict) else given
    return filled


def check(document: YamlDocument) -> Iterator[tuple[Key, Problem]]:
    """Yields each schema violation in the document, with its key."""
    known = {problem.key for problem in document.problems}
    for fault in faults(document.value, load_schema()):
        place, rule, got, _ = fault
        if (place, rule) == (BACKEND, "enum") and got in install_paths.names_offered(
            install_paths.OF_BACKENDS
        ):
            continue
        for extra, message in explain(*fault):
            key = (*place, *extra)
            line, where = document.where(key)
            if rule != "required" or dotted(key) not in known:
                yield key, Problem(line, where, dotted(key), message)


def faults(value: Any, part: Schema, key: Key = ()) -> Iterator[Fault]:
    """Yields every rule that a value violates, at all levels, with JSON Schema semantics.

    A test compares the results with the jsonschema package.
    """
    for rule, wanted in part.items():
        if rule in RULES and not RULES[rule](value, wanted):
            yield key, rule, value, part
    if isinstance(value, dict):
        properties = part.get("properties", {})
        if "additionalProperties" in part and value.keys() - properties.keys():
            yield key, "additionalProperties", value, part
        for name in filter(properties.__contains__, value):
            yield from faults(value[name], properties[name], (*key, name))
    if isinstance(value, list) and "items" in part:
        for index, item in enumerate(value):
            yield from faults(item, part["items"], (*key, index))


@cache
def whole_pattern(rule: str) -> str:
    """Translates a JSON Schema pattern for Python, where `$` also matches before a trailing
    newline.
    """
    return re.sub(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|\$", lambda match: match[1] or r"\Z", rule)


def _is(value: Any, name: str) -> bool:
    """Returns whether a value has a JSON type. A boolean is not a number, and 1.0 is an integer."""
    if name == "integer":
        return type(value) is int or (isinstance(value, float) and value.is_integer())
    return isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _when(
    kind: type | tuple[type, ...], holds: Callable[[Any, Any], bool]
) -> Callable[[Any, Any], bool]:
    """Wraps a rule so that it applies only to values of one type.

    All JSON Schema rules work that way, except `type`, `enum` and `anyOf`.
    """
    return lambda value, wanted: (
        not isinstance(value, kind) or isinstance(value, bool) or holds(value, wanted)
    )


TYPES: dict[str, Any] = {
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
RULES: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda value, names: any(
        _is(value, name) for name in ([names] if isinstance(names, str) else names)
    ),
    "enum": lambda value, values: any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in values
    ),
    "anyOf": lambda value, parts: any(not any(faults(value, part)) for part in parts),
    "minimum": _when((int, float), operator.ge),
    "exclusiveMinimum": _when((int, float), operator.gt),
    "maximum": _when((int, float), operator.le),
    "exclusiveMaximum": _when((int, float), operator.lt),
    "pattern": _when(str, lambda value, pattern: bool(re.search(whole_pattern(pattern), value))),
    "minLength": _when(str, lambda value, least: len(value) >= least),
    "maxLength": _when(str, lambda value, most: len(value) <= most),
    "minItems": _when(list, lambda value, least: len(value) >= least),
    "maxItems": _when(list, lambda value, most: len(value) <= most),
    "uniqueItems": _when(
        list, lambda value, _: all(item not in value[:count] for count, item in enumerate(value))
    ),
    "required": _when(dict, lambda value, names: set(names) <= value.keys()),
}


def explain(key: Key, rule: str, got: Any, part: Schema) -> Iterator[tuple[Key, str]]:
    """Yields an error message for each part of a violation, with its key relative to `key`."""
    wanted, unit = part[rule], f" {part['unit']}" if part.get("unit") else ""
    # The value of a writeOnly key may be a secret, so its messages do not show it.
    match rule:
        case "additionalProperties":
            parent = tuple(name for name in key if isinstance(name, str))
            for count, name in enumerate(sorted(set(got) - set(part.get("properties", {})))):
                guess = suggest_key((*parent, name), part) if count < GUESSES else ""
                yield (name,), f"unknown key{guess}{_ratio(guess, got[name], got)}"
        case "required":
            for name in sorted(set(wanted) - set(got)):
                yield (name,), f"is missing; a config needs the key {name!r}"
        case "type" | "pattern" if part.get("writeOnly"):
            yield (
                (),
                f"does not have the form of {show(part['examples'][0])}; it is hidden "
                "because it may be a secret",
            )
        case "type":
            yield (
                (),
                f"must be {_types(wanted)}, not {show(got)}{_nearly(wanted, got, dotted(key))}",
            )
        case "enum":
            added = install_paths.names_offered(install_paths.OF_BACKENDS) if key == BACKEND else ()
            allowed = [*(str(value) for value in wanted if value is not None), *added]
            yield (), f"{show(got)} is not one of {', '.join(allowed)}{suggest(str(got), allowed)}"
        case "anyOf":
            allowed = [str(value) for value in wanted[0]["enum"] if value is not None]
            yield (
                (),
                f"{show(got)} is neither one of {', '.join(allowed)} nor a "
                f"path{suggest(str(got), allowed)}",
            )
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum":
            yield (), f"must be {_range(part)}{unit}, not {show(got)}"
        case "pattern" if wanted != NAME:
            yield (), f"{show(got)} is not valid; {_written(part)}"
        case "pattern":
            letters = (
                "at most 63 lower-case letters, digits, '.', '_' and '-', starting with a "
                "letter or digit"
            )
            yield (), f"{show(got)} must be {letters}"
        case "minItems" | "minLength":
            yield (), "must not be empty"
        case "maxItems" | "maxLength":
            parts = "entries" if rule == "maxItems" else "characters"
            yield (), f"has {len(got):,} {parts}; at most {wanted:,} are allowed"
        case "uniqueItems":
            twice = next(entry for count, entry in enumerate(got) if entry in got[:count])
            yield (), f"lists {show(twice)} twice"


def _written(schema: Schema) -> str:
    """Describes the format of a text value by the schema's examples, or by its pattern."""
    examples = ", ".join(map(show, schema.get("examples", ())))
    return f"write it like {examples}" if examples else f"it must match {schema['pattern']}"


def _nearly(rule: str | list[str], got: Any, key: str = "") -> str:
    """Suggests what a value of the wrong type was probably meant to be, or returns ""."""
    word, types = (
        got.strip().lower() if isinstance(got, str) else "",
        {rule} if isinstance(rule, str) else set(rule),
    )
    if "object" in types and (parted := re.fullmatch(r"([a-z_]+):(\S.*)", word)):
        return f"; add a space: {parted[1]}: {parted[2]}"
    if "object" in types and got is None:
        return "; it has no keys; indent them below it, or remove the line"
    if "array" in types and word:
        return f"; did you mean [{show(got)}]?"
    if "integer" in types and (
        parted := re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?([kmb])", word)
    ):
        return f"; did you mean {_multiplied(parted[1], parted[2], key)}?"
    number = re.sub(AROUND, "", re.sub("[\u2212\u2013]", "-", word))
    if types & {"integer", "number"} and re.fullmatch(
        r"-?[0-9]{1,15}(\.[0-9]{1,15})?(e-?[0-9]{1,2})?", number
    ):
        return f"; did you mean {number}, without other characters?"
    meant = next(
        (
            value
            for kind, words in WORDS.items()
            if kind in types
            for value in words
            if word in words[value]
        ),
        "",
    )
    return f"; did you mean {meant}?" if meant else ""


def _multiplied(number: str, factor: str, key: str) -> int:
    """Expands a number such as 10k. For lengths and vocabularies, k means 1024, so 4k is 4096."""
    thousand = 1024 if key.endswith(("length", "vocab_size")) and "." not in number else 1000
    exponent = "kmb".index(factor) + 1
    return round(float(number) * float(thousand**exponent))


def _types(rule: str | list[str]) -> str:
    names = {
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "boolean": "true or false",
        "object": "a group of keys",
        "array": "a list",
        "null": "null",
    }
    return " or ".join(names[name] for name in ([rule] if isinstance(rule, str) else rule))


def _range(schema: Schema) -> str:
    bounds = (
        ("minimum", "at least"),
        ("exclusiveMinimum", "greater than"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "less than"),
    )
    return " and ".join(f"{word} {schema[name]}" for name, word in bounds if name in schema)


def suggest_key(key: tuple[str, ...], schema: Schema) -> str:
    """Suggests the key that was probably meant by an unknown key.

    Considers typos, names in other programs, and keys of other groups. Otherwise lists the known
    keys of the group.
    """
    if key[-1] == "<<":
        return "; YAML merge keys are not supported; write out the keys"
    siblings = list(schema.get("properties", {}))
    if foreign := sorted({f"U+{ord(letter):04X}" for letter in key[-1] if letter > "~"}):
        return f" that contains {', '.join(foreign[:3])}{_suggestion(key, siblings)}"
    return _suggestion(key, siblings)


def _suggestion(key: tuple[str, ...], siblings: list[str]) -> str:
    if meant := _meant(key, siblings):
        if "." in key[-1] and dotted(meant) == dotted(key):
            return f"; write {meant[-1]} on a separate line below {dotted(meant[:-1])}:"
        here = meant[:-1] == key[:-1]
        told = (
            f" {_meanings()[meant]}" if meant in synonyms().get(spelling.plain(key[-1]), ()) else ""
        )
        return f"; did you mean {meant[-1] if here else dotted(meant)}?{told}"
    return f"; known keys: {', '.join(siblings)}"


def _ratio(guess: str, rate: Any, siblings: dict[str, Any]) -> str:
    """Returns a rate as a fraction of the peak rate, for a suggestion of min_lr_ratio, or ""."""
    peak = siblings.get("learning_rate")
    if "min_lr_ratio?" in guess and isinstance(rate, float) and isinstance(peak, float):
        return f"; {rate:g} / {peak:g} is {rate / peak:.3g}" if 0 < rate < peak else ""
    return ""


@cache
def _meanings() -> dict[tuple[str, ...], str]:
    """Returns the first sentence of each key's description.

    Suggestions quote it, because a similar key in another program may have a different unit.
    """
    return {
        path: part["description"].partition(". ")[0].rstrip(".")
        for path, part in walk(schema_of(Config, described=True))
    }


def _meant(key: tuple[str, ...], siblings: list[str]) -> tuple[str, ...] | None:
    """Returns the path of the key that was probably meant, or None.

    An exact name in any group takes precedence over a similar name.
    """
    paths = [path for path, _ in walk(load_schema())]
    form, here = spelling.plain(key[-1]), key[:-1]
    if same := next(
        (name for name in siblings if name.replace("_", "") == form.replace("_", "")), None
    ):
        return (*here, same)
    if len(form) > 3 and (
        near := next((name for name in siblings if spelling.distance(form, name) <= 1), None)
    ):
        return (*here, near)  # for example, queues for queue
    named = [path for path in paths if form in (path[-1], dotted(path))]
    if exact := [*named, *synonyms().get(form, ())]:
        return max(  # type: ignore[no-any-return]
            exact, key=lambda path: (path[:-1][: len(here)] == here, path in named, -len(path))
        )
    if near := spelling.slip(key[-1], siblings):
        return (*here, near)
    every = {path[-1]: path for path in reversed(paths)} | {
        name: found[0] for name, found in synonyms().items()
    }
    if near := spelling.slip(key[-1], every):
        return every[near]
    if part := _part(form, sorted(paths, key=lambda path: (path[:-1] != here, -len(path[-1])))):
        return part
    near = spelling.nearest(key[-1], siblings)
    return (*here, near) if near else None


def key_named(word: str) -> str:
    """Returns the full path of the key with this name, or "".

    If several keys match, keys of train come first, then keys of model.
    """
    found = [
        dotted(path)
        for path, part in walk(load_schema())
        if not is_group(part) and word in (path[-1], dotted(path))
    ]
    return min(
        found,
        key=lambda key: (
            not key.startswith("train."),
            not key.startswith("model."),
            key.count("."),
        ),
        default="",
    )


def _part(form: str, paths: list[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Returns the first key whose name is a whole word in `form`, such as seed in seed_value.

    Otherwise returns the first key whose name contains `form`.
    """
    within = (path for path in paths if len(path[-1]) > 3 and f"_{path[-1]}_" in f"_{form}_")
    around = (path for path in paths if len(form) > 3 and f"_{form}_" in f"_{path[-1]}_")
    return next(within, None) or next(around, None)


@cache
def synonyms() -> dict[str, list[tuple[str, ...]]]:
    """Maps key names of other trainers to our keys."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for key, words in read_table(SYNONYMS).items():
        for word in words:
            found.setdefault(spelling.plain(word), []).append(tuple(key.split(".")))
    return found
