"""Command-line entry point. Each verb is a function of the same name in one of this package's
modules. It parses its variables, calls the implementation and prints the result.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..node.placement import require_numbers
from ..process import install_paths
from ..run.run_folder import named_runs, unwritable
from ..trust.errors import ConfigError, NoSource, RunError, TrainfleetError, tell
from ..trust.safe_output import TYPED, guarded
from ..trust.spelling import suggest
from ..trust.untrusted_input import printable, shortened
from .variables import VARIABLES, Variables, flag, option_of, read_variables, typed

STARTED = "TRAINFLEET_STARTED"
# errno codes that indicate an environment problem rather than a bug
ENVIRONMENT = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)

# errno codes for unusable paths
NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV)

# verb → variables that it accepts
VERBS = {
    "setup": ("CONFIG", "SET", "NODES", "YES", "OFFLINE"),
    "build": ("CONFIG", "SET", "OFFLINE"),
    "push": ("CONFIG", "SET", "OFFLINE"),
    "image": ("CONFIG", "SET"),
    "doctor": ("CONFIG", "SET", "NODES", "LIFT", "OFFLINE", "JSON"),
    "recipes": ("JSON",),
    "config": ("RECIPE", "CONFIG", "YES"),
    "plan": (
        "CONFIG",
        "SET",
        "NODES",
        "OUT",
        "DAYS",
        "USD",
        "TOKENS",
        "ANY",
        "VERBOSE",
        "OFFLINE",
        "JSON",
    ),
    "tokenize": ("CONFIG", "SET", "NODES"),
    "compile": ("CONFIG", "SET", "NODES"),
    "train": ("CONFIG", "SET", "NODES"),
    "profile": ("CONFIG", "SET", "NODES"),
    "scaling": ("CONFIG", "SET", "NODES", "WEAK", "STEPS"),
    "sweep": ("CONFIG", "SET", "NODES", "GRID", "SAMPLES", "STOP"),
    "rehearse": ("CONFIG", "SET", "FAULTS", "YES"),
    "inspect": ("CONFIG", "RUN", "SET", "SAMPLE", "VERIFY", "JSON"),
    "sample": ("CONFIG", "RUN", "SET", "PROMPT", "TEMPERATURE", "TOP_P", "LENGTH", "SEED"),
    "chat": ("CONFIG", "RUN", "SET", "PROMPT", "TEMPERATURE", "TOP_P", "LENGTH", "SEED"),
    "runs": ("CONFIG", "RUN", "SET", "JSON"),
    "watch": ("CONFIG", "RUN", "SET", "PORT"),
    "compare": ("RUNS", "JSON"),
    "status": ("CONFIG", "RUN", "SET", "JSON"),
    "logs": ("CONFIG", "RUN", "SET", "FOLLOW"),
    "explain": ("LOG",),
    "stop": ("CONFIG", "RUN", "SET"),
    "checkpoints": ("CONFIG", "RUN", "SET", "JSON"),
    "verify": ("CONFIG", "RUN", "SET", "STEP", "JSON"),
    "eval": ("CONFIG", "RUN", "SET", "TASKS", "JSON"),
    "export": ("CONFIG", "RUN", "SET", "OUT", "FORMAT"),
    "report": ("CONFIG", "RUN", "SET"),
    "ls": ("CONFIG", "SET", "JSON"),
    "clean": ("CONFIG", "RUN", "SET", "PURGE", "YES"),
    "new-backend": ("NAME",),
    "test": (),
    "check": (),
    "release": (),
}

# module → verbs that it implements
FILES = {
    "fleet": "setup build push image doctor ls clean",
    "recipes": "recipes config",
    "plan": "plan",
    "jobs": "tokenize compile train profile scaling sweep rehearse inspect",
    "runs": "runs watch compare status logs explain stop report",
    "models": "sample chat checkpoints verify eval export",
    "checkout": "new_backend test check release",
}

OF_A_CHECKOUT = ("test", "check", "release")


def main(arguments: Sequence[str]) -> int:
    """Runs a command line. Returns the exit code of the verb or error, or 130 after Ctrl-C."""
    try:
        require_numbers(STARTED)
        # On a fleet's head, STARTED contains the time at which the user ran the command.
        started = float(os.environ.get(STARTED) or time.time())
        if list(arguments) == ["-"]:
            # This process runs on a fleet's host, and reads the verb that another machine sends.
            from ..hosts.head import received_verb

            arguments = received_verb(sys.stdin.fileno())
        goals = os.environ.get("MAKECMDGOALS", "").split()
        if help_ := described(arguments, goals):
            with guarded():
                print(help_)
            return 0
        verb = _verb(arguments, goals)
        variables = read_variables(verb, VERBS[verb], arguments[1:])
        return _carried_out(verb, variables, started)
    except TrainfleetError as error:
        return tell(error)
    except BrokenPipeError:  # the reader of stdout, such as `head`, has exited
        sys.stderr.close()
        return 0
    except OSError as error:
        if (known := explained(error)) is None:
            raise
        return tell(known)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    finally:
        os.environ.pop(TYPED, None)


def _carried_out(verb: str, variables: Variables, started: float) -> int:
    if "OFFLINE" in variables:
        os.environ["OFFLINE"] = "1" if flag(variables, "OFFLINE") else ""
    # The verb's child processes also read this variable.
    os.environ[TYPED] = "" if "TRAINFLEET_HEAD" in os.environ else typed(variables)
    name = verb.replace("-", "_")
    file = next(file for file, names in FILES.items() if name in names.split())
    run: Callable[[Variables, float], int] = getattr(
        importlib.import_module(f".{file}", __name__), name
    )
    try:
        with guarded():
            return run(variables, started)
    except NoSource as error:
        from ..launch.command import placed

        raise placed(error, variables) from error


def described(arguments: Sequence[str], goals: Sequence[str] = ()) -> str:
    """Returns the output of `--help`, `--version` and `--completion`, or "" for any other command
    line.

    `--help` also accepts a verb. `goals` are make's goals. `make help train` runs both, so `train`
    must print its help instead of training.

    Raises:
        TrainfleetError: the word after `help` is not a verb.
    """
    if "--completion" in arguments:
        return completion()
    if "--version" in arguments:
        return f"trainfleet {install_paths.version()}"
    if (
        arguments
        and not {"--help", "-h"} & set(arguments)
        and arguments[0] != "help"
        and "help" not in goals
    ):
        return ""
    verb = next((word for word in arguments if word in VERBS), "")
    lines = dict(
        re.findall(
            r"^([a-z-]+):.*?## (.*?)(?: +\[.*)?$",
            (install_paths.ROOT / "Makefile").read_text(),
            flags=re.MULTILINE,
        )
    )
    if verb:
        return _help_of(verb, lines[verb])
    words = " ".join(arguments).replace("help", "").split()
    if words and not words[0].startswith("-"):
        _verb(words)
    table = [f"  {name:12} {lines[name]}" for name in VERBS if name not in OF_A_CHECKOUT]
    return "\n".join(
        [
            "trainfleet VERB [--name value ...]: from bare nodes to a trained model. Begin with: "
            "make train",
            *table,
        ]
    )


def _help_of(verb: str, about: str) -> str:
    takes = VERBS[verb]
    width = max(map(len, takes), default=0)
    rows = [f"  {name:{width}}  {VARIABLES[name]}" for name in takes]
    if "SET" in takes:
        rows.append(f"with the installed command: trainfleet {verb} --set train.steps=50")
    return "\n".join([f"make {verb} [NAME=value ...]: {about}", *rows])


def completion() -> str:
    """Returns a bash script that completes verbs and their options."""
    options = {verb: " ".join(map(option_of, takes)) for verb, takes in VERBS.items()}
    cases = [f"1:{verb}) words='{words}' ;;" for verb, words in options.items()]
    words = " ".join(verb for verb in VERBS if verb not in OF_A_CHECKOUT)
    begins = "_trainfleet() {\nlocal words\ncase $((COMP_CWORD > 1)):${COMP_WORDS[1]} in"
    ends = (
        'esac\nCOMPREPLY=($(compgen -W "$words" -- "$2"))\n}\ncomplete -o default -F '
        "_trainfleet trainfleet"
    )
    return "\n".join([begins, *cases, f"*) words='{words}' ;;", ends])


def explained(error: OSError) -> TrainfleetError | None:
    """Returns a user-facing error if the environment caused `error`, or None if it is a bug."""
    if error.errno in NAMES and error.filename:
        where = shortened(printable(str(error.filename)), 255)
        return RunError(
            "can't be used as a path",
            where=where,
            why=error.strerror or "",
            next="run ls -ld on each of its folders",
        )
    if error.errno not in ENVIRONMENT:
        return None
    if error.filename:
        return unwritable(Path(str(error.filename)), error)
    return RunError(
        "can't write the full output",
        why=error.strerror or str(error),
        next="run df -h to check the output's disk",
    )


def _verb(arguments: Sequence[str], goals: Sequence[str] = ()) -> str:
    """Returns the verb. make runs its goals in order, so the first verb must reject a word among
    the later goals.

    Raises:
        TrainfleetError: the first argument or one of make's goals is not a verb.
    """
    verb = arguments[0] if arguments else ""
    word = next((goal for goal in goals if goal not in (*VERBS, "drills")), verb)
    if word in VERBS:
        return verb
    meant = f"; did you mean RUN={word}?" if word in named_runs() else suggest(word, VERBS)
    if word.endswith(".yaml"):
        meant = f"; did you mean CONFIG={word}?"
    error = TrainfleetError(f"{word!r} is not a verb{meant}", next="make shows all verbs")
    error.exit_code = ConfigError.exit_code
    raise error
