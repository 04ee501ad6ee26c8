"""The variables of a command, as text that no shell has expanded: from its words, from make, or
from the environment.

make passes its command line to its recipes in MAKEFLAGS, after ` -- `, with blanks escaped by a
backslash and `$` doubled. Reading it there, and never in recipe text, keeps `make train 'NODES=4;
touch x'` from creating x.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from ..run.run_folder import run_of
from ..trust.errors import ConfigError, Problem
from ..trust.spelling import suggest
from ..trust.untrusted_input import printable, show, unprintable

VARIABLES = {
    "NODES": "how many nodes (fleet.nodes)",
    "CONFIG": "the config file (config.yaml)",
    "SET": "any keys: SET='train.steps=50 train.seed=2'",
    "PROMPT": "the text to continue",
    "SAMPLE": "which sample of the training order, from 0",
    "VERIFY": "1: check every file of the dataset",
    "LOG": "the log of a job that failed, a folder with a log of each node, or - for stdin",
    "FOLLOW": "1: stay and show new lines",
    "WEAK": "1: the batch grows with the nodes, so the work per rank is constant",
    "STEPS": "how many steps are timed at each number of nodes",
    "STEP": "the step of a checkpoint (the newest)",
    "PURGE": "1: also this config's run and dataset; all: also the files of setup on hosts",
    "YES": "1: do not ask",
    "TASKS": "lm-eval's tasks, with commas between: TASKS=hellaswag,arc_easy",
    "OUT": "a folder for the plan's files, or for the exported model",
    "FORMAT": "what to export: huggingface (the default), or nxd, nxd-tp8, nxd-tp8-pp2: NxD "
    "Core's, by its degrees",
    "LIFT": "a host to release from quarantine",
    "FAULTS": "which faults: FAULTS='rank-killed disk-full' (all of them)",
    "DAYS": "days that the training may take",
    "USD": "dollars that the training may cost",
    "TOKENS": "tokens to train on: TOKENS=1e12",
    "PORT": "the port of the page on this machine (8642, or any free one)",
    "RUN": "a run that is here, by its name (make runs)",
    "RUNS": "runs to compare: RUNS='one another'",
    "TEMPERATURE": "sampling temperature: 0 always picks the most likely token (0.7)",
    "TOP_P": "nucleus sampling: the most likely tokens with this total probability (1)",
    "LENGTH": "how many tokens to write (200)",
    "SEED": "the same seed writes the same text",
    "OFFLINE": "1: do not ask package indexes for the pinned versions",
    "VERBOSE": "1: also the scripts that this machine would run",
    "RECIPE": "a complete config that comes with the package",
    "ONLY": "which groups of drills: ONLY='heads slurm', or all",
    "CHANGED": "1: the groups of drills for the files that differ from the origin",
    "NAME": "the name of a new backend: lower-case letters, digits and _",
}
# an option that needs no value: `--yes`
SWITCHES = ("VERIFY", "FOLLOW", "WEAK", "YES", "VERBOSE", "CHANGED", "PURGE", "OFFLINE")
Variables = dict[str, str]
TEXTS = ("PROMPT", "SET")  # these may be long
PATHS, ADDRESS = ("CONFIG", "OUT"), re.compile("[A-Za-z][A-Za-z0-9+]*://")
LEAST, MOST = 1e-9, 1e18  # bounds of an amount
LARGEST = 10**18 - 1  # bound of a number
LONGEST = 4096  # characters of a value, like a path; a longer one is a file's content, or a mistake
# verbs check that these are not empty
MAY_BE_EMPTY = ("PROMPT", "SET", "VERIFY", "FOLLOW", "WEAK", "PURGE", "YES", "RUN", "RUNS")


def read_variables(
    verb: str,
    allowed: Sequence[str],
    words: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> Variables:
    """Returns the variables of a command. The verb's own words override make's command line, which
    overrides the environment.

    Raises:
        ConfigError: a variable is unknown, is not one of this verb's, or has two values.
    """
    told, problems = _read_words(verb, list(_without_options(words, allowed)), allowed)
    given = _from_make(environment.get("MAKEFLAGS", "")) | told
    problems += [
        _refusal(verb, name, value, allowed) for name, value in given.items() if name not in allowed
    ]
    problems += [
        Problem(0, name, "", fault)
        for name, value in given.items()
        for fault in _faults(name, value, allowed)
    ]
    if problems:
        raise ConfigError(
            problems,
            next=f"{verb} takes: {', '.join(allowed) or 'no variables'}; make shows all verbs",
        )
    found = {name: environment[name] for name in allowed if environment.get(name)} | given
    return {name: _at_home(value) if name in PATHS else value for name, value in found.items()}


def _read_words(
    verb: str, words: Sequence[str], allowed: Sequence[str]
) -> tuple[Variables, list[Problem]]:
    """Returns the variables that the verb's own words set, and the words that set none."""
    told, problems = dict[str, str](), list[Problem]()
    for before, word, following in zip(["", *words], words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if not equals:
            # otherwise it is the 5 of `--steps 5`
            if "=" in before or word[:1] == "-" or before[:2] != "--":
                fault = f"{show(word)} {_stranger(word, allowed, following)}"
                problems.append(Problem(0, f"make {verb}", "", fault))
        elif name == "SET" and name in told:
            told[name] += f" {value}"
        elif told.setdefault(name, value) != value:
            fault = f"has two values, {show(told[name])} and {show(value)}; give one"
            problems.append(Problem(0, name, "", fault))
    return told, problems


def _faults(name: str, value: str, allowed: Sequence[str]) -> Iterator[str]:
    """Yields errors in the text of a variable, regardless of its use by a verb."""
    if name in allowed and name not in MAY_BE_EMPTY and not value.strip():
        yield f"is empty; set it to {VARIABLES[name]}, or omit it"
    if name in allowed and name in PATHS:
        if ADDRESS.match(value):
            yield (f"{show(value)} is an address, and {name} is {VARIABLES[name]} on this machine")
        if fault := _no_path(value):
            yield fault
    if name in VARIABLES and name not in TEXTS and len(value) > LONGEST:
        yield f"has {len(value):,} characters; at most {LONGEST:,} are allowed"
    if not _is_text(value):
        yield "is not UTF-8 text"


def _without_options(words: Sequence[str], allowed: Sequence[str]) -> Iterator[str]:
    """Yields the words, with `--nodes 4` and `--nodes=4` as NODES=4, and `--yes` as YES=1."""
    left = list(reversed(words))
    while left:
        word = left.pop()
        name, (_, equals, value) = _variable_of(word), word.partition("=")
        if not word.startswith("--") or name not in allowed:
            yield word
        elif equals:
            yield f"{name}={value}"
        elif name in SWITCHES:
            yield f"{name}=1"
        else:
            yield f"{name}={left.pop()}" if left and left[-1][:2] != "--" else word


def _stranger(word: str, allowed: Sequence[str], following: str) -> str:
    """Explains a word that sets no variable: an option without a value, or the name of a config
    key, for whose SET the `following` word is the value.
    """
    if (name := _variable_of(word)) in allowed:
        return f"has no value; it is {VARIABLES[name]}"
    meant = _as_set(word, allowed, following if following and "=" not in following else "...")
    if not word.startswith("--"):
        return f"is not VARIABLE=value{meant or suggest(word, allowed)}"
    return f"is not an option{meant or suggest(word.partition('=')[0], map(option_of, allowed))}"


def option_of(variable: str) -> str:
    return f"--{variable.lower().replace('_', '-')}"


def _variable_of(option: str) -> str:
    return option.partition("=")[0].lstrip("-").upper().replace("-", "_")


def _no_path(value: str) -> str:
    """Explains why a value is probably not the intended path; "" if it may be."""
    if character := unprintable(value):
        return f"{show(value)} contains {character}, which no path here may have"
    if value.startswith("-"):
        return f"{show(value)} begins like an option: write ./{printable(value[:20])}"
    if value.startswith("$") or (value.startswith("~") and _at_home(value) == value):
        return (
            f"{show(value)} begins with a shell variable, which no shell has expanded: write "
            "the full path"
        )
    return ""


def _at_home(path: str) -> str:
    """Replaces `~` with the user's home, because not every shell expands it after `=`."""
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else path  # noqa: PTH111  it may end with a slash


def typed(variables: Variables) -> str:
    """Returns the words of a command, quoted for a shell, that the next command needs to be about
    the same config or run, with the same values.
    """
    words = {name: variables[name] for name in ("CONFIG", "SET", "NODES") if name in variables}
    if "RUN" in variables:
        words["CONFIG"] = str(run_of(variables["RUN"]).document)  # every verb has CONFIG
    if not words.get("NODES", "").isdigit():  # several numbers, of make scaling
        words.pop("NODES", None)
    return "".join(f" {name}={shlex.quote(value)}" for name, value in words.items())


def _from_make(flags: str) -> Variables:
    """Returns the command-line variables in MAKEFLAGS: `n -- NODES=4 SET=a=1\\ b=2`."""
    _, separator, overrides = f" {flags}".partition(" -- ")
    if not separator:
        return {}
    words = re.findall(r"(?:\\.|[^ \\])+", overrides, flags=re.DOTALL)
    plain = [re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL).replace("$$", "$") for word in words]
    return {
        name.rstrip(":+?"): value
        for name, equals, value in (word.partition("=") for word in plain)
        if equals
    }


def _is_text(value: str) -> bool:
    """Tells whether a value is text: Python decodes other bytes as halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _refusal(verb: str, name: str, value: str, allowed: Sequence[str]) -> Problem:
    meant = _as_set(name, allowed, value)
    if name in VARIABLES:
        return Problem(0, name, "", f"make {verb} does not take {name} ({VARIABLES[name]}){meant}")
    return Problem(
        0,
        printable(name) or f"make {verb}",
        "",
        f"unknown variable{meant or suggest(name, allowed)}",
    )


def _as_set(word: str, allowed: Sequence[str], value: str) -> str:
    """Suggests the SET for the config key that a word like STEPS, --steps or train.steps names; ""
    if it names no key.
    """
    from ..config.schema import key_named  # loads YAML

    key = key_named(word.lstrip("-").lower().replace("-", "_")) if "SET" in allowed else ""
    plain = re.fullmatch(r"[\w.,:/+-]+", value)
    return (
        f"; use SET='{key}={value if plain else '...'}' to set that key of the config"
        if key
        else ""
    )


def flag(variables: Variables, name: str, other: str = "", default: bool = False) -> bool:
    """Tells whether a yes/no variable is on: 1, true, yes or `other`; 0, false or no is off.
    ConfigError for anything else.
    """
    value = variables.get(name, "").lower()
    if value in ("", "0", "false", "no"):
        return default if not value else False
    if value not in ("1", "true", "yes", other):
        either = f"1, 0 or {other}" if other else "1 or 0"
        raise ConfigError.of(
            name, f"must be {either}, not {variables[name]!r}", next=f"{name}=1, or omit it"
        )
    return True


def amount(
    variables: Variables, name: str, least: float = LEAST, most: float = MOST
) -> float | None:
    """Returns a number like 7, 0.5 or 1e12, None if it is not given; ConfigError for anything
    else.
    """
    text = variables.get(name)
    if text is None:
        return None
    if (
        not re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,9})?([eE]\+?[0-9]{1,2})?", text)
        or not least <= float(text) <= most
    ):
        message = (
            f"must be a number {'above 0' if least == LEAST else f'from {least:g} on'}, up "
            f"to {most:g}, not {show(text)}"
        )
        raise ConfigError.of(name, message, next=f"{name}=1, or omit it")
    return float(text)


def amounts(variables: Variables, *names: str) -> list[float | None]:
    """Returns the `amount` of each name; ConfigError with all problems."""
    found, wrong = [], list[Problem]()
    for name in names:
        try:
            found.append(amount(variables, name))
        except ConfigError as error:
            wrong += error.problems
    if wrong:
        raise ConfigError(wrong, next=f"{wrong[0].where}=1, or omit it")
    return found


def number(
    variables: Variables, name: str, default: int, least: int = 0, most: int = LARGEST
) -> int:
    """Returns a whole number from `least` to `most`; ConfigError for anything else."""
    text = variables.get(name, str(default))
    if not re.fullmatch("[0-9]{1,18}", text) or not least <= int(text) <= most:
        bounds = (
            f"from {least} to {most}" if most < LARGEST else f"from {least} on, of up to 18 digits"
        )
        message = f"must be a whole number {bounds}, not {show(text)}"
        raise ConfigError.of(name, message, next=f"{name}={default}, or omit it")
    return int(text)
