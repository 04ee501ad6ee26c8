"""schema/config.schema.json: the one truth about keys. Defaults, checks and the reference page all come from it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .. import spelling
from ..door import show
from ..errors import Problem
from ..origin import ROOT
from ..spelling import suggest
from .positions import Document, Key, dotted

PATH = ROOT / "schema" / "config.schema.json"
NAME = "^[a-z0-9][a-z0-9._-]{0,62}$"  # the pattern of names of runs and datasets
SYNONYMS = Path(__file__).with_name("synonyms.yaml")
GUESSES = 20  # keys of one group that are guessed at: each guess takes a millisecond
WORDS: dict[str, dict[str, tuple[str, ...]]] = {  # of other languages, and of YAML 1.1, for what YAML 1.2 calls so
    "null": {"null": ("none", "nil")},
    "boolean": {"true": ("yes", "on", "y"), "false": ("no", "off", "n")},
}
AROUND = r"[_$']+|[\s,](?=\d{3}\b)|(?<=\d)(?![kmbgt]$)[a-z]+$"  # a number: what others write there, but for a factor
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


def check(document: Document, strict: bool = True) -> Iterator[tuple[Key, Problem]]:
    """Each thing in the document that the schema does not allow, with the key it is about; keys it does not know if `strict`."""
    known = {problem.key for problem in document.problems}
    for error in validator().iter_errors(document.value):
        key: Key = tuple(error.absolute_path)
        for extra, message in explain(error):
            line, where = document.where((*key, *extra))
            if error.validator == "additionalProperties" and not strict:
                continue
            if error.validator != "required" or dotted((*key, *extra)) not in known:
                yield (*key, *extra), Problem(line, where, dotted((*key, *extra)), message)


@cache
def whole_pattern(rule: str) -> str:
    """A pattern of JSON Schema as Python has it: `$`, but for one among letters, is the end and not the end of a last line."""
    return re.sub(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|\$", lambda match: match[1] or r"\Z", rule)


@cache
def validator(name: str = "") -> Any:
    """What checks values by the schema, or by the part of it for the key `model.<name>`."""
    from jsonschema import Draft202012Validator, ValidationError, validators  # costs 0.1 s: only when there is something to check

    def pattern(_: Any, rule: str, value: Any, __: Any) -> Iterator[ValidationError]:
        if isinstance(value, str) and not re.search(whole_pattern(rule), value):
            yield ValidationError(f"{value!r} does not match {rule!r}")

    whole = load_schema()
    part = whole["properties"]["model"]["properties"][name] if name else whole
    return validators.extend(Draft202012Validator, {"pattern": pattern})(part)  # type: ignore[no-untyped-call]


def explain(error: Any) -> Iterator[tuple[Key, str]]:
    """What is wrong in words, each with the rest of its key."""
    got, rule = error.instance, error.validator_value
    unit = f" {error.schema['unit']}" if error.schema.get("unit") else ""
    match error.validator:
        case "additionalProperties":
            parent = tuple(part for part in error.absolute_path if isinstance(part, str))
            for count, name in enumerate(sorted(set(got) - set(error.schema.get("properties", {})))):
                guess = suggest_key((*parent, name), error.schema) if count < GUESSES else ""
                yield (name,), f"unknown key{guess}"
        case "required":
            for name in sorted(set(rule) - set(got)):
                yield (name,), f"is missing; a config needs the key {name!r}"
        case "type" | "pattern" if error.schema.get("writeOnly"):  # what stands there by mistake may be the secret itself
            yield (), f"is not written as in {show(error.schema['examples'][0])}; it is not shown here, as it may be a secret"
        case "type":
            yield (), f"must be {_types(rule)}, not {show(got)}{_nearly(rule, got, dotted(tuple(error.absolute_path)))}"
        case "enum":
            allowed = [str(value) for value in rule if value is not None]
            yield (), f"{show(got)} is not one of {', '.join(allowed)}{suggest(str(got), allowed)}"
        case "anyOf":
            allowed = [str(value) for value in rule[0]["enum"] if value is not None]
            yield (), f"{show(got)} is not one of {', '.join(allowed)}, nor a path{suggest(str(got), allowed)}"
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum":
            yield (), f"must be {_range(error.schema)}{unit}, not {show(got)}"
        case "pattern" if rule != NAME:
            yield (), f"{show(got)} is not {_written(error.schema)}"
        case "pattern":
            letters = "lower-case letters, digits, '.', '_' and '-', starting with a letter or digit, at most 63"
            yield (), f"{show(got)} must be {letters}"
        case "minItems" | "minLength":
            yield (), "must not be empty"
        case "maxItems" | "maxLength":
            parts = "entries" if error.validator == "maxItems" else "characters"
            yield (), f"has {len(got):,} {parts}; at most {rule:,} are taken"
        case "uniqueItems":
            twice = next(entry for count, entry in enumerate(got) if entry in got[:count])
            yield (), f"names {show(twice)} twice"
        case _:
            yield (), error.message


def _written(schema: Schema) -> str:
    """How a text is written: by the schema's examples, or its pattern."""
    examples = ", ".join(map(show, schema.get("examples", ())))
    return f"written as in {examples}" if examples else f"of the form {schema['pattern']}"


def _nearly(rule: str | list[str], got: Any, key: str = "") -> str:
    """The value that was meant by one of another type, as far as that can be told."""
    word, types = got.strip().lower() if isinstance(got, str) else "", {rule} if isinstance(rule, str) else set(rule)
    if "object" in types and (parted := re.fullmatch(r"([a-z_]+):(\S.*)", word)):
        return f": a blank is missing in {parted[1]}: {parted[2]}"
    if "object" in types and got is None:
        return "; nothing stands below it: indent its keys, or leave the line out"
    if "array" in types and word:
        return f"; did you mean [{show(got)}]?"
    if "integer" in types and (parted := re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?([kmb])", word)):
        return f"; did you mean {_multiplied(parted[1], parted[2], key)}?"
    number = re.sub(AROUND, "", re.sub("[\u2212\u2013]", "-", word))
    if types & {"integer", "number"} and re.fullmatch(r"-?[0-9]{1,15}(\.[0-9]{1,15})?(e-?[0-9]{1,2})?", number):
        return f"; did you mean {number}, without anything around it?"
    meant = next((value for kind, words in WORDS.items() if kind in types for value in words if word in words[value]), "")
    return f"; did you mean {meant}?" if meant else ""


def _multiplied(number: str, factor: str, key: str) -> int:
    """10k in full; of lengths and vocabularies, which are powers of two, 4k is 4096."""
    thousand = 1024 if key.endswith(("length", "vocabulary_size")) and "." not in number else 1000
    exponent = "kmb".index(factor) + 1
    return round(float(number) * float(thousand**exponent))


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


def suggest_key(key: tuple[str, ...], schema: Schema) -> str:
    """The key that was meant: a slip here, what others call it, one of that name elsewhere; else all that may stand here."""
    if key[-1] == "<<":
        return "; YAML's merge keys are not taken: write the keys out"
    siblings = list(schema.get("properties", {}))
    if foreign := sorted({f"U+{ord(letter):04X}" for letter in key[-1] if letter > "~"}):
        return f", as it holds {', '.join(foreign[:3])}{_suggestion(key, siblings)}"
    return _suggestion(key, siblings)


def _suggestion(key: tuple[str, ...], siblings: list[str]) -> str:
    if meant := _meant(key, siblings):
        if "." in key[-1] and dotted(meant) == dotted(key):
            return f"; {meant[-1]} stands on a line of its own below {dotted(meant[:-1])}:"
        here = meant[:-1] == key[:-1]
        return f"; did you mean {meant[-1] if here else dotted(meant)}?"
    return f"; known here: {', '.join(siblings)}"


def _meant(key: tuple[str, ...], siblings: list[str]) -> tuple[str, ...] | None:
    """The path of the key that was meant. A word that is known somewhere counts before one that is only like it."""
    paths = [path for path, _ in walk(load_schema())]
    form, here = spelling.plain(key[-1]), key[:-1]
    if same := next((name for name in siblings if name.replace("_", "") == form.replace("_", "")), None):
        return (*here, same)
    if len(form) > 3 and (near := next((name for name in siblings if spelling.distance(form, name) <= 1), None)):
        return (*here, near)  # queues, where queue may stand
    named = [path for path in paths if form in (path[-1], dotted(path))]
    if exact := [*named, *synonyms().get(form, ())]:
        return max(exact, key=lambda path: (path[:-1][: len(here)] == here, path in named, -len(path)))  # type: ignore[no-any-return]
    if near := spelling.slip(key[-1], siblings):
        return (*here, near)
    every = {path[-1]: path for path in reversed(paths)} | {name: found[0] for name, found in synonyms().items()}
    if near := spelling.slip(key[-1], every):
        return every[near]
    if part := _part(form, sorted(paths, key=lambda path: (path[:-1] != here, -len(path[-1])))):
        return part
    near = spelling.nearest(key[-1], siblings)
    return (*here, near) if near else None


def key_named(word: str) -> str:
    """The one key of that name, by its last part or in full; of several that of train, then of model; "" for none."""
    found = [dotted(path) for path, part in walk(load_schema()) if not is_group(part) and word in (path[-1], dotted(path))]
    return min(found, key=lambda key: (not key.startswith("train."), not key.startswith("model."), key.count(".")), default="")


def _part(form: str, paths: list[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The first key whose name stands whole in the words of `form`, as seed in seed_value; else the first that has it so."""
    within = (path for path in paths if len(path[-1]) > 3 and f"_{path[-1]}_" in f"_{form}_")
    around = (path for path in paths if len(form) > 3 and f"_{form}_" in f"_{path[-1]}_")
    return next(within, None) or next(around, None)


@cache
def synonyms() -> dict[str, list[tuple[str, ...]]]:
    """What other trainers call a key → our keys that it may be."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for key, words in yaml.load(SYNONYMS.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)).items():
        for word in words:
            found.setdefault(spelling.plain(word), []).append(tuple(key.split(".")))
    return found
