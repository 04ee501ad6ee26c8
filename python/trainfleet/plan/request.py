"""A request: exactly what will run. A backend makes it from a job, `make plan` prints it, the
launcher executes it.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from ..run import run_folder
from ..trust.errors import InputError, RunError
from ..trust.validation import Name, fit
from .job import Job, Variable

WIDTH = 120  # columns of a script's lines, unless a word is longer
INDENT = "  "


@dataclass(frozen=True)
class Artifact:
    """A named text that a backend passes to its engine unchanged: a node's script, a template, the
    body of a request.
    """

    name: str
    text: str


class RequestRecord(TypedDict):
    """A request as a JSON record."""

    job: dict[str, Any]
    artifacts: list[Artifact]
    hosts: list[Name]
    environment: dict[Variable, str]


@dataclass(frozen=True)
class Request:
    """All that a backend will do for a job. `hosts` are the machines by node, if the backend
    chooses them.

    `environment` applies only to this attempt and is in no artifact. Secrets are in neither: the
    job has their names.
    """

    job: Job
    artifacts: tuple[Artifact, ...]
    hosts: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def token(self) -> str:
        """Returns 16 hex digits, which identify the attempt and its launch."""
        text = json.dumps(
            [self.job.record(), [asdict(artifact) for artifact in self.artifacts], self.hosts]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def logs(self) -> tuple[Path, ...]:
        """Returns the log of each node, by node."""
        return tuple(run_folder.node_log(self.job.folder, node) for node in range(self.job.nodes))

    @property
    def engine_logs(self) -> tuple[Path, ...]:
        """Returns the file with the engine's own log of each node, by node."""
        return tuple(run_folder.engine_log(self.job.folder, node) for node in range(self.job.nodes))

    @property
    def job_log(self) -> Path:
        """Returns the file with the engine's log of the job as a whole."""
        return run_folder.job_log(self.job.folder)

    def host(self, node: int | None) -> str:
        """Returns the machine of a node; "" if the plan names no machine."""
        return self.hosts[node] if node is not None and node < len(self.hosts) else ""

    def placed(self, hosts: Sequence[str]) -> Request:
        """Returns the request with the machines that its engine chose, unless the plan has chosen
        them.
        """
        return self if self.hosts else replace(self, hosts=tuple(hosts))

    def with_environment(self, environment: Mapping[str, str]) -> Request:
        """Returns the same request with more variables for every node."""
        return replace(self, environment={**self.environment, **environment})

    def record(self) -> dict[str, Any]:
        """Returns the request as a JSON record, which `of` reads."""
        return {
            "job": self.job.record(),
            "artifacts": [asdict(artifact) for artifact in self.artifacts],
            "hosts": list(self.hosts),
            "environment": dict(self.environment),
        }

    @classmethod
    def of(cls, record: Mapping[str, Any], where: str) -> Request:
        """Returns the request of a record that was read from `where`.

        Raises:
            RunError: the record is not a request.
        """
        try:
            fields = fit(RequestRecord, record)
            return cls(
                Job.of(fields["job"]),
                tuple(fields["artifacts"]),
                tuple(fields["hosts"]),
                fields["environment"],
            )
        except InputError as error:
            why, then = f"{error.key}: {error.what}", f"rm {where}; make train"
            raise RunError("is not a request for a job", where=where, why=why, next=then) from error


def script(
    heading: Iterable[str], folder: Path | str, environment: Mapping[str, str], words: Sequence[str]
) -> str:
    """Returns a shell script that replaces itself with the command `words` in `folder`; a user can
    read it and run it.
    """
    comments = [f"# {' '.join(line.split())}" for line in heading]
    settings = [
        f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())
    ]
    command = fold(["exec", *map(shlex.quote, words)], WIDTH)
    return "\n".join(
        ["#!/bin/sh", *comments, f"cd {shlex.quote(str(folder))} || exit", *settings, *command, ""]
    )


def fold(words: Sequence[str], width: int) -> Iterator[str]:
    """Yields the lines of a command that is split for a shell."""
    line = words[0]
    for word in words[1:]:
        if len(line) + len(word) + 3 > width:
            yield line + " \\"
            line = INDENT + word
        else:
            line += f" {word}"
    yield line
