"""Extracts the result of ahead-of-time compilation from node logs: the number of programs, and the
errors of failed programs.

The patterns match messages of neuron_parallel_compile and neuronx-cc
(awsdocs-neuron.readthedocs-hosted.com/en/v2.31.0: pytorch-neuron-parallel-compile,
compiler/error-codes; aws-neuron-sdk issue 1081). Because programs are compiled in parallel, an
error is blamed on the last program named before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..run.run_folder import Run
from ..trust import untrusted_input
from ..trust.safe_output import visible
from .history import duration, number

GRAPH = re.compile(r"(MODULE_\d{1,24}\+[0-9a-f]{1,16})/")
STATUS = re.compile(r'"status": (true|false)')
SECONDS = re.compile(r'"compile_time": (\d{1,7}(?:\.\d{1,12})?)')
NAME = r"['\"`]?([\w.:-]{1,80})['\"`]?"
OPERATOR = re.compile(rf"[Uu]nsupported operator:? *{NAME}|[Oo]perator {NAME} is not supported")
CODE = re.compile(r"\bNCC_[A-Z]{1,8}\d{1,5}\b")
LETTERS = 200  # maximum characters of an error to show


@dataclass
class Compilation:
    """Per-program results: whether compilation succeeded (true for cached programs), how many
    seconds it took, and the errors.
    """

    compiled: dict[str, bool] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        return sorted(name for name, done in self.compiled.items() if not done)

    def explained(self) -> Iterator[str]:
        """Yields one line per failed program with the unsupported operator or the compiler's
        message. Errors that can't be attributed to a program come last.
        """
        for name in self.failed:
            yield (
                f"{name}: {'; '.join(self.errors.get(name, ())) or 'the compiler printed no error'}"
            )
        for words in self.errors.get("", ()):
            yield f"unknown program: {words}"


def read(logs: Iterable[Iterable[str]]) -> Compilation:
    """Parses the compilation result from the lines of the node logs."""
    found = Compilation()
    for lines in logs:
        name = ""
        for line in lines:
            text = line.partition(" | ")[2] or line
            if named := GRAPH.findall(text):
                name = named[-1]
            if said := STATUS.search(text):
                found.compiled[name] = found.compiled.get(name, False) or said[1] == "true"
            elif took := SECONDS.search(text):
                found.seconds[name] = float(took[1])
            elif words := error_in(text):
                found.errors.setdefault(name, [])
                found.errors[name] += [words] if words not in found.errors[name] else []
    return found


def error_in(line: str) -> str:
    """Returns the compiler error in a log line, or "" if the line does not contain one."""
    operator, code = OPERATOR.search(line), CODE.search(line)
    words = visible(line[code.start() :].strip())[:LETTERS] if code else ""
    if not operator:
        return words
    return (
        f"operator {operator[1] or operator[2]} is not supported{f' ({code[0]})' if code else ''}"
    )


def read_run(run: Run) -> Compilation:
    """Parses the compilation result from a run's node logs."""
    return read(map(_lines, sorted(run.logs.glob("node-*.log"))))


def _lines(path: Path) -> Iterator[str]:
    with untrusted_input.open_regular(path) as stream:
        for line in untrusted_input.lines_of(stream):
            yield line.decode(errors="replace")


def describe(run: Run) -> Iterator[str]:
    """Yields a summary of a finished compilation and the next command."""
    found, seconds = read_run(run), number((run.read_results().get("seconds") or {}).get("compile"))
    programs = (
        f"{len(found.compiled)} programs" if found.compiled else "the step and validation programs"
    )
    longest = (
        f"; the longest took {duration(int(max(found.seconds.values())))}" if found.seconds else ""
    )
    yield (
        "compiled "
        f"{programs}{f' in {duration(int(seconds))}' if seconds is not None else ''}{longest}"
    )
    yield "next: make train"
