"""Loads config.yaml, SET and make variables as a validated, complete Config.

If anything is invalid, all problems are reported at once.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from ..hardware import node_types
from ..process.install_paths import page
from ..trust import spelling, untrusted_input
from ..trust.errors import ConfigError, DataError, InputError, Problem
from ..trust.redaction import keep_secret, looks_secret
from ..trust.validation import fit
from . import cross_checks, goodput, layouts, owned_machines, schema
from .derive import Derivation, Derived, OfKind, derive, other_family
from .types import Config, Data, Refusals, Values
from .vocabulary import lack_for, vocabulary_size_of
from .yaml_lines import DEEPEST, Key, YamlDocument, dotted, read, read_value

# Size limits. A config with 4,096 hosts has 160 KiB.
LARGEST, LONGEST_SET = (256 * untrusted_input.KIBIBYTE, 32 * untrusted_input.KIBIBYTE)
KEYS = f"see all keys in {page('schema/README.md')}"
COMPARE = "run make config RECIPE=first-run CONFIG=new.yaml and compare with new.yaml"


@dataclass(frozen=True)
class Settings:
    """Settings of a command: the file, `SET`, and the make variables that each set one key."""

    path: Path
    set: str = ""
    # variable → (dotted key, text)
    short: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class BackendTerms:
    """A backend's requirements for a config.

    Attributes:
        node: Builds a node from its type and the node count.
        refuse: Yields unsupported settings.
        here: Whether this machine is the whole fleet.
    """

    node: OfKind
    refuse: Callable[[Config], Refusals]  # yields (key, message)
    here: bool = False


def no_terms(backend: str) -> BackendTerms:
    """Returns backend terms that accept any config, for configs that are only read."""
    return BackendTerms(node_types.node, lambda config: iter(()))


def load(
    settings: Settings, terms_of: Callable[[str], BackendTerms] = no_terms
) -> tuple[Config, Derivation]:
    """Loads the complete config and its derived values. `terms_of` returns a backend's terms by
    name.

    Raises:
        ConfigError: the config is invalid; lists every problem in file order.
    """
    document, config, derived = _loaded(settings, terms_of)
    if document.problems:
        blamed = _blamed(document.problems, settings, terms_of)
        raise ConfigError(blamed, next=KEYS)
    assert config is not None
    keep_secret(config.fleet.secrets)
    return config, Derivation(derived, document.value, config)


OPTIONAL = {"preset", "head_dim", "module"}  # keys that may be null in a resolved model


def _loaded(
    settings: Settings, terms_of: Callable[[str], BackendTerms]
) -> tuple[YamlDocument, Config | None, list[Derived]]:
    document, values, broken = _checked(settings)
    report, terms = document.report, terms_of(values["fleet"]["backend"])
    values["name"] = values["name"] or ""  # a missing name is already reported
    tokens = _tokenizer_size(fit(Data, values["data"]), report)
    if against := _against_preset(values["model"]):
        report(*against)
        broken.add(against[0])
    derived = derive(values, tokens, terms.node, terms.here)
    open_keys = [key for key, value in values["model"].items() if value is None]
    if missing := [key for key in open_keys if key not in OPTIONAL]:
        for key in missing:
            report(f"model.{key}", "is required because model.preset is null")
        return document, None, []
    config, chosen = _settled(document, values, broken, tokens, terms)
    return document, config, [*derived, *chosen]


def _settled(
    document: YamlDocument,
    values: Values,
    broken: set[str],
    tokens: int,
    terms: BackendTerms,
) -> tuple[Config, list[Derived]]:
    """Builds the config, chooses its layout and intervals, and reports conflicting keys."""
    asked = layouts.provide(values["train"])
    config, chosen = layouts.settle(fit(Config, values), asked)
    config, interval = goodput.with_interval(config)
    if not broken and (what := layouts.lack(config, asked)):
        document.report("train.parallelism", what)
    for key, message in (*cross_checks.check(config, broken, tokens), *terms.refuse(config)):
        if key not in broken:
            document.report(key, message)
    if lack := _lacks(config, document.problems):
        document.report("data.tokenizer", lack)
    return config, [*chosen, *interval]


def _against_preset(model: Values) -> tuple[str, str] | None:
    """Returns the key and message if the preset can't be read or the family contradicts it.

    An unreadable preset is reset to its default.
    """
    try:
        against = other_family(model)
    except InputError as error:
        keys = schema.load_schema()["properties"]["model"]["properties"]
        model["preset"] = keys["preset"]["default"]
        return "model.preset", error.line
    return ("model.family", against) if against else None


def _blamed(
    problems: list[Problem], settings: Settings, terms_of: Callable[[str], BackendTerms]
) -> list[Problem]:
    """Attributes problems to SET and the make variables, unless the file alone also has them."""
    named = [name for name in ("SET" if settings.set else "", *settings.short) if name]
    if not named or all(problem.where in named for problem in problems):
        return problems
    try:
        before = _loaded(Settings(settings.path), terms_of)[0].problems
    except ConfigError as error:
        before = error.problems
    in_file = {(problem.key, problem.message) for problem in before}
    source = ", ".join(named)
    return [
        problem
        if problem.where in named or (problem.key, problem.message) in in_file
        else replace(problem, line=0, where=source)
        for problem in problems
    ]


def _tokenizer_size(data: Data, report: Callable[[str, str], None]) -> int:
    """Returns the tokenizer's vocabulary size.

    If the tokenizer is broken, reports that and returns the configured size.
    """
    try:
        return vocabulary_size_of(data)
    except DataError as error:
        report("data.tokenizer", error.line)
        return data.vocab_size


def _lacks(config: Config, problems: list[Problem]) -> str | None:
    """Returns what the tokenizer lacks for the model's family, unless it already has a problem."""
    return (
        None
        if any(problem.key == "data.tokenizer" for problem in problems)
        else lack_for(config.data, config.model.family)
    )


def load_name(settings: Settings) -> str:
    """Returns only the run's name, for verbs that inspect a run and don't need a valid config.

    Raises:
        ConfigError: the name is missing or invalid, or SET or a variable is invalid and may have
            set another name.
    """
    document, values, broken = _checked(settings)
    mine = [problem for problem in document.problems if problem.line == 0]
    if mine or "name" in broken or not isinstance(values.get("name"), str):
        raise ConfigError(mine or document.problems, next=KEYS)
    return str(values["name"])


def place_of(settings: Settings, key: Key) -> tuple[int, str]:
    """Returns a key's line number and location, or 0 and the variable that set it."""
    return _checked(settings)[0].where(key)


def load_resolved(path: Path) -> Config:
    """Loads the resolved config in a run folder, as written by `dump_resolved`.

    The config is validated but nothing is derived. Keys that are newer than the file get their
    defaults.

    Raises:
        ConfigError: the file is not a resolved config; lists every problem.
    """
    document = _read(path)
    if not isinstance(document.value, dict):
        document.problems.append(Problem(1, f"{path}:1", "", "is not a resolved config"))
        raise ConfigError(document.problems, next="run make train to write it again")
    document.problems += [problem for _, problem in schema.check(document)]
    if not document.problems:
        try:
            config = fit(Config, schema.fill(document.value, schema.load_schema()))
            wrong = cross_checks.check_shape(config)
        except InputError as error:
            wrong = iter([(error.key, f"is not a resolved config: {error.what}")])
        for fault in wrong:
            document.report(*fault)
    if document.problems:
        raise ConfigError(document.problems, next="run make train to write it again")
    keep_secret(config.fleet.secrets)
    return config


def load_steps(path: Path) -> int:
    """Returns train.steps from the config.yaml in a run folder, or 0 if it is missing."""
    try:
        value = _read(path).value
        return fit(int, value["train"]["steps"])
    except (ConfigError, InputError, KeyError, TypeError):
        return 0


def dump_known(path: Path) -> str:
    """Returns a run folder's config as YAML, without unknown keys and invalid values.

    Raises:
        ConfigError: the file can't be read or contains no keys.
    """
    document = _read(path)
    if document.problems or not isinstance(document.value, dict):
        raise ConfigError(
            document.problems or [Problem(1, f"{path}:1", "", "is not a resolved config")]
        )
    for key, _ in list(schema.check(document)):
        _drop(document.value, key)
    return yaml.safe_dump(document.value, sort_keys=False, allow_unicode=True)


def _keys_in(path: Path) -> YamlDocument:
    """Reads a config. Rejects other file types, empty files, and files without keys."""
    document = _read(path)
    has_keys, forms = isinstance(document.value, dict), [untrusted_input.OTHER]
    if not has_keys or any("is not a key" in problem.message for problem in document.problems):
        forms += (*untrusted_input.MISTAKEN, untrusted_input.TEMPLATE)
    if other := untrusted_input.mistaken(document.text, str(path), forms):
        raise ConfigError([Problem(1, other.where, "", other.what)], next=COMPARE)
    if has_keys:
        return document
    what = "is empty; it needs at least `name: my-run`"
    if document.value is not None:
        what = "must contain keys with values, such as `name: my-run`"
    missing = Problem(1, f"{path}:1", "", what)
    raise ConfigError(document.problems or [missing], next=COMPARE)


def _checked(settings: Settings) -> tuple[YamlDocument, Values, set[str]]:
    """Returns the document with its problems, the values with defaults, and the invalid keys.

    Invalid keys are reset to their defaults.
    """
    document = _keys_in(settings.path)
    _open_short(document)
    document.problems += _override(document, settings)
    _open_short(document)
    found = list(schema.check(document))
    for key, _ in found:
        _drop(document.value, key)
    document.problems += [problem for _, problem in found]
    document.problems += _secrets_in(document, document.value)
    broken = {problem.key for problem in document.problems}
    return document, schema.fill(document.value, schema.load_schema()), broken


def _secrets_in(document: YamlDocument, value: Any, key: Key = ()) -> Iterator[Problem]:
    """Yields a problem for each value that looks like a secret.

    Secrets must not be in a config, because it is printed, stored with the run and copied to nodes.
    """
    if isinstance(value, str) and looks_secret(value):
        what = "looks like a secret; export it as a variable and list the variable in fleet.secrets"
        yield Problem(*document.where(key), dotted(key), what)
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, inner in items:
        yield from _secrets_in(document, inner, key if isinstance(value, list) else (*key, name))


def _open_short(document: YamlDocument) -> None:
    """Expands the short forms `train.parallelism: auto` and `fleet.accelerator: <text>` to groups.

    `auto` leaves all keys of the group null.
    """
    train, fleet = document.value.get("train"), document.value.get("fleet")
    if isinstance(train, dict) and train.get("parallelism") == "auto":
        train["parallelism"] = {}
    if isinstance(fleet, dict) and type(word := fleet.get("accelerator")) in (str, int):
        fleet["accelerator"] = owned_machines.expand(str(word))


def _read(path: Path) -> YamlDocument:
    try:
        return read(untrusted_input.read_text(path, LARGEST), str(path))
    except FileNotFoundError:
        problem, where, then = "there is no such file", str(path), _instead(path)
    except InputError as error:
        problem, where = error.what, error.where
        then = error.next if error.next and not error.next.startswith("ls -ld") else _instead(path)
    raise ConfigError([Problem(1, where if ":" in where else f"{where}:1", "", problem)], next=then)


def _instead(path: Path) -> str:
    """Suggests a command for a missing config, with the file that was probably meant."""
    with contextlib.suppress(OSError):
        folder = path if path.is_dir() else path.parent
        there = {
            found.name: found
            for found in islice(folder.iterdir(), 1000)
            if found.suffix in (".yaml", ".yml") and found.is_file()
        }
        meant = spelling.nearest(path.name, there) or next(iter(sorted(there)), None)
        if meant and not path.is_file():
            return f"make plan CONFIG={shlex.quote(str(there[meant]))}"
    return "run make config RECIPE=first-run to write a config.yaml, or set CONFIG=path"


def _override(document: YamlDocument, settings: Settings) -> Iterator[Problem]:
    try:
        if len(settings.set) > LONGEST_SET:
            raise ValueError(
                f"it has {len(settings.set):,} characters; at most {LONGEST_SET:,} are allowed"
            )
        words = _words(settings.set)
    except ValueError as error:
        yield Problem(0, "SET", "", f"{untrusted_input.show(settings.set)} can't be read: {error}")
        words = []
    if (meant := _retyped(words)) != words:
        yield Problem(
            0,
            "SET",
            "",
            f"needs spaces between its keys only; did you mean SET={quoted(' '.join(meant))}?",
        )
        words = []
    names = set[str]()
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            shown = untrusted_input.shortened(repr(word))
            yield Problem(
                0, "SET", "", f"{shown} is not key=value, such as SET='train.steps=50 train.seed=2'"
            )
        elif name in names:
            yield Problem(0, "SET", name, "is set twice")
        else:
            names.add(name)
            yield from _assign(document, "SET", name, text)
    for variable, (name, text) in settings.short.items():
        yield from _assign(document, variable, name, text)


def _retyped(words: list[str]) -> list[str]:
    """Returns the key=value pairs without spaces around = or commas between pairs."""
    joined = re.sub(r"\0?=\0?", "=", "\0".join(words))
    return re.sub(r",\0?(?=[a-z_]+\.[a-z_.]+=)", "\0", joined).split("\0") if words else words


def quoted(text: str) -> str:
    """Quotes text for a shell, and shortens it if it is long."""
    return (
        f"'{short}'"
        if "'" not in (short := untrusted_input.shortened(text))
        else shlex.quote(short)
    )


def _words(text: str) -> list[str]:
    """Splits SET into words as a shell does.

    Brackets keep words together, and quotes within brackets are left to YAML.
    """
    depth, quote, parts = 0, "", list[str]()
    for letter in text:
        if letter in "\"'" and not depth and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth = max(depth + (letter in "[{") - (letter in "]}"), 0)
        parts.append(f"\\{letter}" if depth and (letter in "\"'\\" or letter.isspace()) else letter)
    return shlex.split("".join(parts))


def _assign(document: YamlDocument, source: str, name: str, text: str) -> Iterator[Problem]:
    key: Key = tuple(name.split("."))
    if not all(key) or len(key) > DEEPEST or untrusted_input.unprintable(name):
        yield Problem(
            0, source, untrusted_input.show(name)[1:-1], "is not a valid key, such as train.steps"
        )
        return
    if character := untrusted_input.unprintable(text):
        yield Problem(0, source, name, f"contains {character}, which is not allowed")
        return
    given = read_value(text, source, key)
    target = document.value
    for part in key[:-1]:
        target = target.get(part, {}) if isinstance(target, dict) else None
    if given.problems:
        yield from given.problems
    elif not isinstance(target, dict):
        yield Problem(0, source, name, f"{dotted(key[:-1])} is not a group of keys")
    else:
        document.set(key, given.value, source)
        _open_short(document)


def _drop(value: Any, key: Key) -> None:
    """Removes an invalid value, so that the other keys are checked with its default."""
    for part in key[:-1]:
        if not isinstance(value, dict) or part not in value:
            return  # its group has already been removed
        if isinstance(value[part], list):
            key = key[: key.index(part) + 1]  # one invalid item removes the whole list
            break
        value = value[part]
    if key and isinstance(value, dict):
        value.pop(key[-1], None)
