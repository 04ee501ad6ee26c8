"""make explain LOG=file: names the cause that ended a job, from the log of torchrun, Slurm, kubectl
or any other launcher.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from ..trust.errors import ConfigError, RunError
from ..watch.diagnosis import diagnose
from ..watch.lines import LogLine, read_lines
from ..watch.verdict import last_words, of_finding
from .variables import Variables

TYPED = (
    "make explain LOG=train.log; for several nodes, LOG=FOLDER with a log of each; for stdin, LOG=-"
)


def main(variables: Variables, started: float) -> int:
    lines, nodes = _read(variables.get("LOG", ""))
    if finding := diagnose(lines, nodes=nodes):
        print(of_finding(finding, lines, host=""))
        return 0
    print(
        "no line explains why it ended. The last ones:",
        *(f"  | {words}" for words in last_words(lines)),
        sep="\n",
    )
    return 1


def _read(name: str) -> tuple[list[LogLine], int]:
    """Reads the lines of the logs, and the number of nodes that wrote them; 0 for one log, which
    may be of any number.
    """
    if not name:
        raise ConfigError.of("LOG", "must name a log", next=TYPED)
    if name == "-":
        with tempfile.NamedTemporaryFile() as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.flush()
            logs, lines = [Path(file.name)], read_lines(Path(file.name), None)
    else:
        logs = (
            sorted(filter(Path.is_file, Path(name).iterdir()))
            if Path(name).is_dir()
            else [Path(name)]
        )
        several = len(logs) > 1
        lines = [
            line
            for node, log in enumerate(logs)
            for line in read_lines(log, node if several else None, logs=len(logs))
        ]
    if not lines or any("\0" in line.text for line in lines[:100]):
        raise RunError("is not a log: no file with lines of text", where=name, next=TYPED)
    return lines, len(logs) if len(logs) > 1 else 0
