"""Sends a verb as one line of JSON to a machine with access to the run folder.

`python -m trainfleet -` runs the verb there. Values that must not appear on a command line, such as
prompts and configs, are sent through stdin. Stdin stays open while the user waits. When it closes,
the process and its children exit.
"""

from __future__ import annotations

import atexit
import json
import os
import shlex
import shutil
import tempfile
import threading
from pathlib import Path

from ..config import Config, dump_resolved
from ..process import file_systems
from ..trust import untrusted_input
from ..trust.errors import InputError

ALONE = 130  # exit code of a verb whose user disconnected
WORD = "-"  # placeholder argument; the verb is read from stdin instead
PREFIX = "trainfleet-errand-"
# environment variables that the sent config already reflects
OURS = ("CONFIG", "RUN", "SET", "NODES")


def encode(verb: str, config: Config, variables: dict[str, str]) -> bytes:
    """Returns the line that `received` parses."""
    kept = {name: value for name, value in variables.items() if name not in OURS}
    return (
        json.dumps({"verb": verb, "config": dump_resolved(config), "variables": kept}).encode()
        + b"\n"
    )


def command(python: str, code: str, folder: str) -> str:
    """Returns the command that runs a verb from stdin on a host, in the shared folder."""
    words = [
        "env",
        "TRAINFLEET_HEAD=1",
        f"PYTHONPATH={code}/python",
        "PYTHONSAFEPATH=1",
        "NO_COLOR=1",
        python,
        "-m",
        "trainfleet",
        WORD,
    ]
    return f"cd {shlex.quote(folder)} && exec {shlex.join(words)}"


def received(descriptor: int) -> list[str]:
    """Reads a verb from the first line of stdin and returns its command line.

    Also makes the process exit as soon as stdin closes.

    Raises:
        InputError: the line is malformed.
    """
    line = b""
    while not line.endswith(b"\n") and (more := os.read(descriptor, 1 << 16)):
        line += more
    record = untrusted_input.parse_json(line.decode(errors="replace"), "stdin")
    match record:
        case {"verb": str(verb), "config": str(config), "variables": dict(variables)} if all(
            isinstance(value, str) for value in variables.values()
        ):
            file_systems.sweep(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
        case _:
            raise InputError(
                "is not a valid request", where="stdin", next="run make VERB, which sends one"
            )
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    file_systems.hold(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    threading.Thread(
        target=_leave_with, args=(descriptor, folder), name="asker", daemon=True
    ).start()
    return [
        verb,
        f"CONFIG={folder / 'config.yaml'}",
        *(f"{name}={value}" for name, value in variables.items()),
    ]


def _leave_with(descriptor: int, folder: Path) -> None:
    """Exits the process and its children when stdin closes."""
    while os.read(descriptor, 1 << 10):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(ALONE)
