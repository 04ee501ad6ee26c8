"""config.yaml, SET and the make variables → one checked, complete Config, or every problem at once."""

from __future__ import annotations

import dataclasses
import shlex
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ..errors import ConfigError, DataError, Problem
from . import layouts, rules, schema
from .derive import Derived, derive, shape_of
from .positions import Document, Key, read, scalar
from .types import Config, Data

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What a command was given: the file, `SET` and the variables that are short for one key."""

    path: Path
    set: str = ""
    short: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)  # variable → (dotted key, text)


def load(settings: Settings) -> tuple[Config, list[Derived]]:
    """The config with everything derived, and what was.

    Raises:
        ConfigError: with all that is wrong, in file order.
    """
    document, values, broken, problems = _checked(settings)

    def report(key: str, message: str) -> None:
        line, where = document.where(tuple(key.split(".")))
        problems.append(Problem(line, where, key, message))

    data = build(Data, values["data"])
    tokens = _tokenizer_size(data, report)
    try:
        shape_of(values["model"]["preset"])
    except ValueError as error:
        report("model.preset", str(error))
        values["model"]["preset"] = schema.load_schema()["properties"]["model"]["properties"]["preset"]["default"]
    derived = derive(values, tokens)
    missing = [name for name, value in values["model"].items() if value is None and name != "preset"]
    for name in missing:
        report(f"model.{name}", "must be given, as model.preset is null")
    asked = layouts.provide(values["train"])
    config = build(Config, values)
    if not missing:
        config, chosen = layouts.settle(config, asked)
        derived += chosen
        if not broken and (what := layouts.lack(config, asked)):
            report("train.layout", what)
    for key, message in () if missing else rules.check(config, broken, tokens):
        report(key, message)
    if not missing and (lack := _lacks(config, problems)):
        report("data.tokenizer", lack)
    if problems:
        raise ConfigError(problems, next="all keys: schema/README.md; what follows from them: make plan")
    return config, derived


def _tokenizer_size(data: Data, report: Callable[[str, str], None]) -> int:
    """How many tokens the tokenizer has or will have; a broken one is reported, and its size taken to be as asked for."""
    from ..data.tokenizer import vocabulary_size_of

    try:
        return vocabulary_size_of(data)
    except DataError as error:
        report("data.tokenizer", f"{error.head}: {error.why}" if error.why else error.head)
        return data.vocabulary_size


def _lacks(config: Config, problems: list[Problem]) -> str | None:
    """What the tokenizer lacks for the model's family, unless it can't be read anyway."""
    from ..data.tokenizer import lack_for

    broken = any(problem.key == "data.tokenizer" for problem in problems)
    return None if broken else lack_for(config.data, config.model.family)


def load_name(settings: Settings) -> str:
    """Only the run's name: for the verbs that look at a run and need no working config for it."""
    _, values, broken, problems = _checked(settings)
    if "name" in broken or not isinstance(values.get("name"), str):
        raise ConfigError(problems, next="all keys: schema/README.md")
    return str(values["name"])


def load_resolved(path: Path) -> Config:
    """The config of a run folder, as `dump_resolved` left it: complete, so nothing is derived again.

    Keys that came into the schema after it was written have their defaults, so that an older run's model stays of use.
    """
    try:
        return build(Config, schema.fill(yaml.safe_load(path.read_text(encoding="utf-8")), schema.load_schema()))
    except (OSError, yaml.YAMLError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(
            [Problem(1, str(path), "", f"is not a resolved config: {error}")], next="make train writes it anew"
        ) from error


def dump_resolved(config: Config) -> str:
    """The whole config as YAML, with every derived value in it."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True)


def dump_given(config: Config, derived: list[Derived]) -> str:
    """The config as YAML without what was derived, so that all of it is derived again when the run goes on otherwise."""
    values = _plain(dataclasses.asdict(config))
    for row in derived:
        _drop(values, tuple(row.key.split(".")))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _checked(settings: Settings) -> tuple[Document, dict[str, Any], set[str], list[Problem]]:
    """The document, its values with defaults in, the keys that are wrong (these are back at their defaults), and why."""
    document = _read(settings.path)
    problems = list(document.problems)
    if document.value is None and not problems:
        problems.append(Problem(1, str(settings.path), "", "is empty; the least that it needs is `name: my-run`"))
    elif not isinstance(document.value, dict) and not problems:
        problems.append(Problem(1, str(settings.path), "", "must be keys with values, such as `name: my-run`"))
    if not isinstance(document.value, dict):
        raise ConfigError(problems, next="all keys: schema/README.md")
    _open_layout(document)
    problems += _override(document, settings)
    _open_layout(document)
    found = list(schema.check(document))
    problems += [problem for _, problem in found]
    for key, _ in found:
        _drop(document.value, key)
    broken = {problem.key for problem in problems}
    return document, schema.fill(document.value, schema.load_schema()), broken, problems


def _open_layout(document: Document) -> None:
    """`train.layout: auto` says of every degree what null says of one."""
    train = document.value.get("train")
    if isinstance(train, dict) and train.get("layout") == "auto":
        train["layout"] = {}


def _read(path: Path) -> Document:
    try:
        return read(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        problem, next = "there is no such file", "CONFIG=path names another; config.yaml is the default"
    except IsADirectoryError:
        problem, next = "is a folder, not a file", "CONFIG=path/to/config.yaml"
    except PermissionError:
        problem, next = "you may not read it", f"ls -l {path}"
    except UnicodeDecodeError as error:
        problem, next = f"is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}", f"file {path}"
    raise ConfigError([Problem(1, str(path), "", problem)], next=next)


def _override(document: Document, settings: Settings) -> Iterator[Problem]:
    try:
        words = shlex.split(settings.set)
    except ValueError as error:
        yield Problem(0, "SET", "", f"{settings.set!r} can't be read: {error}")
        words = []
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            yield Problem(0, "SET", "", f"{word!r} is not key=value, as in SET='train.steps=50 train.seed=2'")
            continue
        yield from _assign(document, "SET", name, text)
    for variable, (name, text) in settings.short.items():
        yield from _assign(document, variable, name, text)


def _assign(document: Document, source: str, name: str, text: str) -> Iterator[Problem]:
    key: Key = tuple(name.split("."))
    try:
        value = scalar(text)
    except yaml.YAMLError:
        yield Problem(0, source, name, f"{text!r} is not a value")
        return
    target = document.value
    for part in key[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            yield Problem(0, source, name, f"{part} is not a group of keys")
            return
    target[key[-1]] = value
    document.overridden[key] = source


def _drop(value: Any, key: Key) -> None:
    """Takes a wrong value out, so that its default stands in while the other keys are checked."""
    for part in key[:-1]:
        if not isinstance(value, dict) or part not in value:
            return  # what holds it is out already
        if isinstance(value[part], list):
            key = key[: key.index(part) + 1]  # a list with one bad item is out as a whole
            break
        value = value[part]
    if key and isinstance(value, dict):
        value.pop(key[-1], None)


def build(cls: type[T], values: Any) -> T:
    """A (nested) frozen dataclass from plain values; lists become tuples. Every field without a default must be there."""
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name in values or field.default is dataclasses.MISSING]  # type: ignore[arg-type]
    return cls(**{field.name: _convert(hints[field.name], values[field.name]) for field in fields})


def _convert(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(hint, value)  # type: ignore[arg-type]
    if typing.get_origin(hint) is tuple:
        return tuple(_convert(typing.get_args(hint)[0], item) for item in value)
    if isinstance(hint, types.UnionType):
        arms = [arm for arm in typing.get_args(hint) if dataclasses.is_dataclass(arm) == isinstance(value, dict)]
        return None if value is None else _convert(next(arm for arm in arms if arm is not type(None)), value)
    return float(value) if hint is float else value


def _plain(value: Any) -> Any:
    """Tuples as lists, all the way down: YAML's safe dumper knows no tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
