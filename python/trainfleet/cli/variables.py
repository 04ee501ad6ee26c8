"""Reads a command's variables from its arguments, make or the environment, as literal text without
shell expansion.

make passes the command-line variables to its recipes in MAKEFLAGS, after ` -- `, with spaces
escaped by a backslash and `$` doubled. The variables are read from MAKEFLAGS, never from recipe
text, so `make train 'NODES=4; touch x'` does not create x.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from ..run.run_folder import run_of
from ..trust.errors import ConfigError, Problem
from ..trust.spelling import suggest
from ..trust.untrusted_input import printable, show, unprintable, whole

VARIABLES = {
    "NODES": "the number of nodes (fleet.nodes)",
    "CONFIG": "the config file (config.yaml)",
    "SET": "config keys to set: SET='train.steps=50 train.seed=2'",
    "PROMPT": "the text to continue, or the question to answer",
    "SAMPLE": "the number of a sample in the training order, from 0",
    "VERIFY": "1: check every file of the dataset",
    "LOG": "the log of a failed job, a folder with one log per node, or - for stdin",
    "FOLLOW": "1: keep printing new lines",
    "WEAK": "1: the batch grows with the nodes, so the work per rank is constant",
    "STEPS": "the number of timed steps for each number of nodes",
    "STEP": "the step of a checkpoint (the newest)",
    "PURGE": "1: also delete this config's run and dataset; all: also the files of make setup on "
    "hosts",
    "YES": "1: do not ask for confirmation",
    "TASKS": "lm-eval tasks, separated by commas: TASKS=hellaswag,arc_easy",
    "OUT": "a folder for the plan's files, or for the exported model",
    "FORMAT": "the export format: huggingface (the default), or NxD Core's with its degrees: nxd, "
    "nxd-tp8, nxd-tp8-pp2",
    "LIFT": "a host to release from quarantine",
    "GRID": "the values to combine: GRID='train.learning_rate=1e-4,3e-4 model.layers=4,8'",
    "SAMPLES": "the number of combinations to draw from GRID (all of them)",
    "STOP": "half: repeatedly continue only the better half of the runs, for twice the steps",
    "FAULTS": "the faults to inject: FAULTS='rank-killed disk-full' (all of them)",
    "DAYS": "the maximum training time in days",
    "USD": "the maximum cost of the training in dollars",
    "ANY": "1: compare all machines for TOKENS (and DAYS, USD), cheapest first",
    "TOKENS": "the number of tokens to train on: TOKENS=1e12",
    "PORT": "the port of the page on this machine (8642, or any free one)",
    "RUN": "the name of a run (make runs lists them)",
    "RUNS": "runs to compare: RUNS='one another'",
    "TEMPERATURE": "sampling temperature: 0 always picks the most likely token (0.7)",
    "TOP_P": "nucleus sampling: the most likely tokens with this total probability (1)",
    "LENGTH": "the number of tokens to write (200)",
    "SEED": "the random seed; the same seed gives the same text",
    "OFFLINE": "1: do not query package indexes for the pinned versions",
    "JSON": "1: print one JSON object (schema/output.schema.json)",
    "VERBOSE": "1: also show the jobs' scripts and requests",
    "RECIPE": "a complete config that comes with the package",
    "ONLY": "the groups of drills to run: ONLY='heads slurm', or all",
    "CHANGED": "1: run the groups of drills for files that differ from the origin",
    "NAME": "the name of a new backend: lower-case letters, digits and _",
}
# options that take no value, such as `--yes`
SWITCHES = (
    "ANY",
    "VERIFY",
    "FOLLOW",
    "WEAK",
    "YES",
    "VERBOSE",
    "CHANGED",
    "PURGE",
    "OFFLINE",
    "JSON",
)
Variables = dict[str, str]
TEXTS = ("PROMPT", "SET")  # variables of unlimited length
PATHS, ADDRESS = ("CONFIG", "OUT"), re.compile("[A-Za-z][A-Za-z0-9+]*://")
LEAST, MOST = 1e-9, 1e18  # bounds of numeric variables
LARGEST = 10**18 - 1  # maximum value of integer variables
# Maximum length of a value, as for a path. A longer value is probably a file's contents.
LONGEST = 4096
# variable → the variable, or key in SET, that it can't be combined with
CLASHES = {"RUN": "CONFIG", "NODES": "fleet.nodes="}
# Variables that may be empty, because the verbs validate them.
MAY_BE_EMPTY = ("PROMPT", "SET", "VERIFY", "FOLLOW", "WEAK", "PURGE", "YES", "RUN", "RUNS")


def read_variables(
    verb: str,
    allowed: Sequence[str],
    words: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> Variables:
    """Returns a verb's variables. Arguments override make's command line, which overrides the
    environment.

    Raises:
        ConfigError: a variable is unknown, not accepted by this verb, or has conflicting values.
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
    found = {
        name: environment[name]
        for name in allowed
        if environment.get(name) and not {name, *given} >= {"RUN", "CONFIG"}
    } | given
    if problems := [*problems, *_clashes(found)]:
        raise ConfigError(
            problems,
            next=f"{verb} takes: {', '.join(allowed) or 'no variables'}; make shows all verbs",
        )
    return {name: _at_home(value) if name in PATHS else value for name, value in found.items()}


def _clashes(found: Variables) -> Iterator[Problem]:
    for name, other in CLASHES.items():
        if name in found and (other in found or other in found.get("SET", "")):
            yield Problem(0, name, "", f"can't be combined with {other}, which sets the same thing")


def _read_words(
    verb: str, words: Sequence[str], allowed: Sequence[str]
) -> tuple[Variables, list[Problem]]:
    """Returns the variables that the arguments set, and a problem for every argument that sets
    none.
    """
    told, problems = dict[str, str](), list[Problem]()
    for before, word, following in zip(["", *words], words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if not equals:
            # A word after an option is its value, such as the 5 in `--steps 5`.
            if "=" in before or word[:1] == "-" or before[:2] != "--":
                fault = f"{show(word)} {_stranger(word, allowed, following)}"
                problems.append(Problem(0, f"make {verb}", "", fault))
        elif name == "SET" and name in told:
            told[name] += f" {value}"
        elif told.setdefault(name, value) != value:
            fault = f"has two values, {show(told[name])} and {show(value)}; set one"
            problems.append(Problem(0, name, "", fault))
    return told, problems


def _faults(name: str, value: str, allowed: Sequence[str]) -> Iterator[str]:
    """Yields the problems with a variable's value that do not depend on the verb."""
    if name in allowed and name not in MAY_BE_EMPTY and not value.strip():
        yield f"is empty; set it to {VARIABLES[name]}, or omit it"
    if name in allowed and name in PATHS:
        if ADDRESS.match(value):
            yield f"{show(value)} is an address; {name} must be {VARIABLES[name]} on this machine"
        if fault := _no_path(value):
            yield fault
    if name in VARIABLES and name not in TEXTS and len(value) > LONGEST:
        yield f"has {len(value):,} characters; at most {LONGEST:,} are allowed"
    if not _is_text(value):
        yield "is not UTF-8 text"


def _without_options(words: Sequence[str], allowed: Sequence[str]) -> Iterator[str]:
    """Yields the arguments, with options converted to variables: `--nodes 4` and `--nodes=4` become
    NODES=4, and `--yes` becomes YES=1.
    """
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
    """Explains what is wrong with an argument that sets no variable, such as an option without a
    value, or a config key followed by its value.
    """
    if (name := _variable_of(word)) in allowed:
        return f"has no value; set it to {VARIABLES[name]}"
    meant = _as_set(word, allowed, following if following and "=" not in following else "...")
    if not word.startswith("--"):
        return f"is not VARIABLE=value{meant or suggest(word, allowed)}"
    return f"is not an option{meant or suggest(word.partition('=')[0], map(option_of, allowed))}"


def option_of(variable: str) -> str:
    return f"--{variable.lower().replace('_', '-')}"


def _variable_of(option: str) -> str:
    return option.partition("=")[0].lstrip("-").upper().replace("-", "_")


def _no_path(value: str) -> str:
    """Returns why a value is probably not a path that the user meant, or "" if it could be."""
    if character := unprintable(value):
        return f"{show(value)} contains {character}, which is not allowed in a path"
    if value.startswith("-"):
        return f"{show(value)} begins like an option; write ./{printable(value[:20])}"
    if value.startswith("$") or (value.startswith("~") and _at_home(value) == value):
        return (
            f"{show(value)} begins with a shell variable that was not expanded; write the full path"
        )
    return ""


def _at_home(path: str) -> str:
    """Expands `~` to the user's home directory, because some shells do not expand it after `=`."""
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else path  # noqa: PTH111  it may end with a slash


def typed(variables: Variables) -> str:
    """Returns shell-quoted arguments that make a suggested command use the same config or run and
    the same values.
    """
    words = {name: variables[name] for name in ("CONFIG", "SET", "NODES") if name in variables}
    if "RUN" in variables:
        # pass CONFIG, because more verbs accept it than RUN
        words["CONFIG"] = str(run_of(variables["RUN"]).document)
    if whole(words.get("NODES", "")) is None:  # only make scaling accepts several node counts
        words.pop("NODES", None)
    return "".join(f" {name}={shlex.quote(value)}" for name, value in words.items())


def _from_make(flags: str) -> Variables:
    r"""Parses the command-line variables in MAKEFLAGS: `n -- NODES=4 SET=a=1\ b=2`."""
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
    """Returns whether a value is valid UTF-8. Python decodes invalid bytes as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _refusal(verb: str, name: str, value: str, allowed: Sequence[str]) -> Problem:
    upper = f"; did you mean {name.upper()}?" if name.upper() in allowed else ""
    meant = upper or _as_set(name, allowed, value)
    if name in VARIABLES:
        return Problem(0, name, "", f"make {verb} does not take {name} ({VARIABLES[name]}){meant}")
    return Problem(
        0,
        printable(name) or f"make {verb}",
        "",
        f"unknown variable{meant or suggest(name, allowed)}",
    )


def _as_set(word: str, allowed: Sequence[str], value: str) -> str:
    """Suggests a SET= argument if a word such as STEPS, --steps or train.steps matches a config
    key. Returns "" otherwise.
    """
    from ..config.schema import key_named  # deferred, because it loads YAML

    key = key_named(word.lstrip("-").lower().replace("-", "_")) if "SET" in allowed else ""
    plain = re.fullmatch(r"[\w.,:/+-]+", value)
    return f"; use SET='{key}={value if plain else '...'}' to set this config key" if key else ""


def flag(variables: Variables, name: str, other: str = "", default: bool = False) -> bool:
    """Parses a boolean variable.

    1, true, yes and `other` mean true; 0, false and no mean false. Raises ConfigError for any other
    value.
    """
    value = variables.get(name, "").lower()
    if value in ("", "0", "false", "no"):
        return default if not value else False
    if value not in ("1", "true", "yes", other):
        either = f"1, 0 or {other}" if other else "1 or 0"
        raise ConfigError.of(
            name, f"must be {either}, not {variables[name]!r}", next=f"set {name}=1, or omit it"
        )
    return True


def amount(
    variables: Variables, name: str, least: float = LEAST, most: float = MOST
) -> float | None:
    """Parses a number such as 7, 0.5 or 1e12. Returns None if the variable is not set.

    Raises ConfigError if the value is malformed or out of range.
    """
    text = variables.get(name)
    if text is None:
        return None
    if (
        not re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,9})?([eE]\+?[0-9]{1,2})?", text)
        or not least <= float(text) <= most
    ):
        from ..config.schema import nearly  # deferred, because it loads YAML

        meant = nearly({"type": "integer"}, text, name) if re.search("[^-.0-9]", text) else ""
        message = (
            f"must be a number {'above 0, up' if least == LEAST else f'from {least:g}'} "
            f"to {most:g}, not {show(text)}{meant}"
        )
        raise ConfigError.of(name, message, next=f"set it to {VARIABLES[name]}, or omit it")
    return float(text)


def amounts(variables: Variables, *names: str) -> list[float | None]:
    """Returns the `amount` of each variable. Raises a single ConfigError listing all problems."""
    found, wrong = [], list[Problem]()
    for name in names:
        try:
            found.append(amount(variables, name))
        except ConfigError as error:
            wrong += error.problems
    if wrong:
        raise ConfigError(wrong, next=f"set it to {VARIABLES[wrong[0].where]}, or omit it")
    return found


def number(
    variables: Variables, name: str, default: int, least: int = 0, most: int = LARGEST
) -> int:
    """Parses an integer from `least` to `most`. Raises ConfigError if the value is malformed or out
    of range.
    """
    text = variables.get(name, str(default))
    if not re.fullmatch("[0-9]{1,18}", text) or not least <= int(text) <= most:
        bounds = (
            f"from {least} to {most}"
            if most < LARGEST
            else f"of at least {least}, with up to 18 digits"
        )
        message = f"must be a whole number {bounds}, not {show(text)}"
        raise ConfigError.of(name, message, next=f"set {name}={default}, or omit it")
    return int(text)
