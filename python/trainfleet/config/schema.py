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
VALUE_SYNONYMS = Path(__file__).with_name("value_synonyms.yaml")
GUESSES = 20  # maximum suggestions per group of keys; each takes a millisecond
# YAML 1.2 values, and their spellings in YAML 1.1 and other languages.
WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "null": {"null": ("none", "nil")},
    "boolean": {"true": ("yes", "on", "y"), "false": ("no", "off", "n")},
}
# schema keywords for numeric bounds, and their wording in messages
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "greater than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}
BACKEND = ("fleet", "backend")  # installed packages can add values
# Schema violation: the key, the violated rule, the value, and the subschema that contains the rule.
Fault = tuple[Key, str, Any, Schema]
Names = tuple[str, ...]  # path of a known key
# characters to strip from a number, except a multiplier such as k
AROUND = r"[_$']+|[\s,](?=\d{3}\b)|(?<=\d)\s*(?![kmbgt]$)[a-z]+$"


@cache
def load_schema() -> Schema:
    """Returns the schema without descriptions."""
    return schema_of(Config)


def is_group(part: Schema) -> bool:
    """Returns whether a key is a group, even if a word can replace it (`parallelism: auto`)."""
    return "object" in part.get("type", ())


def walk(schema: Schema, prefix: Names = ()) -> Iterator[tuple[Names, Schema]]:
    """Yields every key with its subschema, in schema order, parents first."""
    for name, part in schema.get("properties", {}).items():
        yield (*prefix, name), part
        if is_group(part):
            yield from walk(part, (*prefix, name))


def fill(value: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """Returns the config with missing keys set to their defaults."""
    filled = {}
    for name, part in schema["properties"].items():
        given = value.get(name, copy.deepcopy(part.get("default")))
        filled[name] = fill(given, part) if is_group(part) and isinstance(given, dict) else given
    return filled


def check(document: YamlDocument) -> Iterator[tuple[Key, Problem]]:
    """Yields each schema violation in the document, with its key."""
    known = {problem.key for problem in document.problems}
    properties = load_schema()["properties"]
    unread = {key[0]: None for key in document.lines if key and key[0] not in properties}
    for fault in faults(unread | document.value, load_schema()):
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
    """Yields every rule that a value violates, at any depth, with JSON Schema semantics.

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
    """Restricts a rule to values of one type, as in all JSON Schema rules except `type`, `enum` and
    `anyOf`.
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
    if rule == "additionalProperties":
        parent = tuple(name for name in key if isinstance(name, str))
        for count, name in enumerate(sorted(set(got) - set(part.get("properties", {})))):
            guess = suggest_key((*parent, name), part) if count < GUESSES else ""
            yield (name,), f"unknown key{guess}{_ratio(guess, got[name], got)}"
            if guess and not key and isinstance(got[name], dict):
                yield from _inside(name, got[name])
    elif rule == "required":
        for name in sorted(set(part[rule]) - set(got)):
            yield (name,), f"is missing; a config needs the key {name!r}"
    elif part.get("writeOnly") and rule in ("type", "pattern"):
        # a writeOnly value may be a secret, so messages don't show it
        form = show(part["examples"][0])
        yield (
            (),
            f"does not have the form of {form}; it is hidden because it may be a secret",
        )
    else:
        yield (), MESSAGES[rule](key, got, part)


def _inside(name: str, group: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """Yields the violations in a misspelled top-level group, as if its name were correct."""
    meant = next(_candidates((name,), list(load_schema()["properties"])), ())
    part = dict(walk(load_schema())).get(meant, {})
    for place, *fault in faults(group, part, meant) if is_group(part) else ():
        for extra, message in explain(place, *fault):
            yield (name, *place[len(meant) :], *extra), message


def _outside_enum(key: Key, got: Any, part: Schema) -> str:
    added = install_paths.names_offered(install_paths.OF_BACKENDS) if key == BACKEND else ()
    allowed = [*(str(value) for value in part["enum"] if value is not None), *added]
    words = read_table(VALUE_SYNONYMS).get(dotted(key), {})
    meant = next((name for name, others in words.items() if spelling.plain(str(got)) in others), "")
    guess = f"; did you mean {meant}?" if meant else suggest(str(got), allowed)
    return f"{show(got)} is not one of {', '.join(allowed)}{guess}"


def _no_path(key: Key, got: Any, part: Schema) -> str:
    allowed = [str(value) for value in part["anyOf"][0]["enum"] if value is not None]
    meant = suggest(str(got), allowed)
    known = "the known names" if meant else ", ".join(allowed)
    return f"{show(got)} is neither one of {known} nor a path{meant}"


def _out_of_range(key: Key, got: Any, part: Schema) -> str:
    unit = f" {part['unit']}" if part.get("unit") else ""
    bounds = " and ".join(f"{word} {part[name]}" for name, word in BOUNDS.items() if name in part)
    return f"must be {bounds}{unit}, not {show(got)}"


def _malformed(key: Key, got: Any, part: Schema) -> str:
    if part["pattern"] == NAME:
        near = re.sub("[^a-z0-9]+", "-", got.lower()).strip("-")[:63]
        return (
            f"{show(got)} must be at most 63 lower-case letters, digits, '.', '_' and '-', "
            f"starting with a letter or digit{f'; did you mean {near}?' if near else ''}"
        )
    return f"{show(got)} is not valid; {_written(part)}"


MESSAGES: dict[str, Callable[[Key, Any, Schema], str]] = {
    "type": lambda key, got, part: (
        _outside_enum(key, got, part)
        if isinstance(got, (bool, int, float)) and "enum" in part
        else f"must be {_types(part['type'])}, not {show(got)}{nearly(part, got, dotted(key))}"
    ),
    "enum": _outside_enum,
    "anyOf": _no_path,
    **dict.fromkeys(BOUNDS, _out_of_range),
    "pattern": _malformed,
    **dict.fromkeys(("minItems", "minLength"), lambda *_: "must not be empty"),
    "maxItems": lambda key, got, part: (
        f"has {len(got):,} entries; at most {part['maxItems']:,} are allowed"
    ),
    "maxLength": lambda key, got, part: (
        f"has {len(got):,} characters; at most {part['maxLength']:,} are allowed"
    ),
    "uniqueItems": lambda key, got, part: (
        f"lists {show(next(one for count, one in enumerate(got) if one in got[:count]))} twice"
    ),
}


def _written(schema: Schema) -> str:
    """Describes a string's format by the schema's examples, or else by its pattern."""
    examples = ", ".join(map(show, schema.get("examples", ())))
    if ending := re.search(r"(\w+)\\(\.py)\$$", schema["pattern"]):  # such as _model\.py$
        examples += f"; its name must end in {ending[1]}{ending[2]}"
    return f"write it like {examples}" if examples else f"it must match {schema['pattern']}"


def nearly(part: Schema, got: Any, key: str) -> str:
    """Suggests a fix for a value of the wrong type, or returns ""."""
    word = got.strip().lower() if isinstance(got, str) else ""
    types = {part["type"]} if isinstance(part["type"], str) else set(part["type"])
    if got is None:
        keys = "it has no keys; indent them below it, or remove the line"
        return f"; {keys if 'object' in types else 'write a value, or remove the key'}"
    if types <= {"string", "null"} and type(got) in (int, float):
        return "; put it in quotes"
    if "object" in types and (form := _group_meant(part, word, got)):
        return form
    if "array" in types and not any(faults([got], part)):
        return f"; did you mean [{show(got)}]?"
    meant = next(_values_meant(types, word, got, key), "")
    return f"; did you mean {meant}?" if meant else ""


def _group_meant(part: Schema, word: str, got: Any) -> str:
    """Suggests how to write a group of keys that has another value, or returns ""."""
    if parted := re.fullmatch(r"([a-z_]+):(\S.*)", word):
        return f"; add a space: {parted[1]}: {parted[2]}"
    if part["type"] != "object":
        return ""
    if isinstance(got, list):
        return "; remove the dash before each key"
    return f"; indent its keys below it, such as {next(iter(part['properties']))}: ..."


def _values_meant(types: set[str], word: str, got: Any, key: str) -> Iterator[str]:
    times = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?([kmbt])", word)
    if "integer" in types and times:
        yield str(_multiplied(times[1], times[2], key))
    number = re.sub(AROUND, "", re.sub("[\u2212\u2013]", "-", word))
    is_number = re.fullmatch(r"-?[0-9]{1,15}(\.[0-9]{1,15})?(e-?[0-9]{1,2})?", number)
    if types & {"integer", "number"} and is_number:
        yield f"{number}, without other characters"
    for kind in filter(types.__contains__, WORDS):
        yield from (value for value, words in WORDS[kind].items() if word in words)


def _multiplied(number: str, factor: str, key: str) -> int:
    """Expands a number such as 10k. For lengths and vocabularies, k means 1024, so 4k is 4096."""
    thousand = 1024 if key.endswith(("length", "vocab_size")) and "." not in number else 1000
    exponent = "kmbt".index(factor) + 1
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


def suggest_key(key: Names, schema: Schema) -> str:
    """Suggests a known key for an unknown one.

    Considers typos, other programs' names and keys in other groups. Otherwise, lists the group's
    known keys.
    """
    if key[-1] == "<<":
        return "; YAML merge keys are not supported; write out the keys"
    siblings = list(schema.get("properties", {}))
    if foreign := sorted({f"U+{ord(letter):04X}" for letter in key[-1] if letter > "~"}):
        return f" that contains {', '.join(foreign[:3])}{_suggestion(key, siblings)}"
    return _suggestion(key, siblings)


def _suggestion(key: Names, siblings: list[str]) -> str:
    if meant := next(_candidates(key, siblings), None):
        if "." in key[-1] and dotted(meant) == dotted(key):
            return f"; write {meant[-1]} on a separate line below {dotted(meant[:-1])}:"
        here = meant[:-1] == key[:-1]
        told = f" {_meanings()[meant]}" if meant in synonyms().get(_form(key), ()) else ""
        return f"; did you mean {meant[-1] if here else dotted(meant)}?{told}"
    return f"; known keys: {', '.join(siblings)}"


def _ratio(guess: str, rate: Any, siblings: dict[str, Any]) -> str:
    """Converts a rate to a fraction of the peak, if min_lr_ratio was suggested, or returns ""."""
    peak = siblings.get("learning_rate")
    if "min_lr_ratio?" in guess and isinstance(rate, float) and isinstance(peak, float):
        return f"; {rate:g} / {peak:g} is {rate / peak:.3g}" if 0 < rate < peak else ""
    return ""


@cache
def _meanings() -> dict[Names, str]:
    """Returns the first sentence of each key's description.

    Suggestions quote it, because another program's key may use a different unit.
    """
    return {
        path: part["description"].partition(". ")[0].rstrip(".")
        for path, part in walk(schema_of(Config, described=True))
    }


def _exact(form: str, here: Names) -> Iterator[Names]:
    """Yields the keys with this name, here or in other programs, starting with the same group."""
    named = [path for path, _ in walk(load_schema()) if form in (path[-1], dotted(path))]
    yield from sorted(
        [*named, *synonyms().get(form, ())],
        key=lambda path: (path[:-1][: len(here)] == here, path in named, -len(path)),
        reverse=True,
    )


def _alike(form: str, names: list[str]) -> Iterator[str]:
    bare = form.replace("_", "")
    yield from (name for name in names if name.replace("_", "") == bare)
    if len(form) > 3:  # such as queues for queue
        yield from (name for name in names if spelling.distance(form, name) <= 1)


def _candidates(key: Names, siblings: list[str]) -> Iterator[Names]:
    """Yields the paths of known keys that may have been meant, likeliest first.

    An exact name in any group takes precedence over a typo.
    """
    form, here = _form(key), key[:-1]
    yield from ((*here, name) for name in _alike(form, siblings))
    yield from _exact(form, here)
    if near := spelling.slip(key[-1], siblings):
        yield *here, near
    paths = [path for path, _ in walk(load_schema())]
    every = {path[-1]: path for path in reversed(paths)}
    every |= {name: found[0] for name, found in synonyms().items()}
    if len(form) > 2 and (near := spelling.slip(key[-1], every)):
        yield every[near]
    yield from _parts(form, sorted(paths, key=lambda path: (path[:-1] != here, -len(path[-1]))))
    if near := spelling.nearest(key[-1], siblings):
        yield *here, near


def key_named(word: str) -> str:
    """Returns the full path of the key with this name, or "".

    If several match, prefers keys in train, then in model.
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


def _parts(form: str, paths: list[Names]) -> Iterator[Names]:
    """Yields keys whose name is a whole word in `form`, such as seed for seed_value, then those
    with `form` as a whole word in their name.
    """
    yield from (path for path in paths if len(path[-1]) > 3 and f"_{path[-1]}_" in f"_{form}_")
    if len(form) > 3:
        yield from (path for path in paths if f"_{form}_" in f"_{path[-1]}_")


def _form(key: Names) -> str:
    # synonyms.yaml lists some names with their group
    own = dotted(key[-2:])
    return own if own in synonyms() else spelling.plain(key[-1])


@cache
def synonyms() -> dict[str, list[Names]]:
    """Maps other trainers' key names to our keys."""
    found: dict[str, list[Names]] = {}
    for key, words in read_table(SYNONYMS).items():
        for word in words:
            found.setdefault(spelling.plain(word), []).append(tuple(key.split(".")))
    return found
