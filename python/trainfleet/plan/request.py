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

WIDTH = 120  # columns that a script's lines keep to where they can
INDENT = "  "


@dataclass(frozen=True)
class Artifact:
    """A named text that a backend hands to its engine as it is: a node's script, a template, the
    body of a request.
    """

    name: str
    text: str


class RequestRecord(TypedDict):
    """A request as JSON takes it."""

    job: dict[str, Any]
    artifacts: list[Artifact]
    hosts: list[Name]
    environment: dict[Variable, str]


@dataclass(frozen=True)
class Request:
    """All that a backend will do for a job. `hosts`: the machines by node, where it chooses them.

    `environment` is of this attempt alone and in no artifact. Secrets are in neither: the job has
    their names.
    """

    job: Job
    artifacts: tuple[Artifact, ...]
    hosts: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def token(self) -> str:
        """16 hex digits: the same for the same attempt of the same launch, and for nothing else."""
        text = json.dumps(
            [self.job.record(), [asdict(artifact) for artifact in self.artifacts], self.hosts]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def logs(self) -> tuple[Path, ...]:
        """Where each node's output goes, by node."""
        return tuple(run_folder.node_log(self.job.folder, node) for node in range(self.job.nodes))

    @property
    def engine_logs(self) -> tuple[Path, ...]:
        """What the engine has kept of each node, by node, where it is needed."""
        return tuple(run_folder.engine_log(self.job.folder, node) for node in range(self.job.nodes))

    @property
    def job_log(self) -> Path:
        """What the engine wrote of the job as a whole, where it did."""
        return run_folder.job_log(self.job.folder)

    def host(self, node: int | None) -> str:
        """The machine of a node; "" where the plan names none."""
        return self.hosts[node] if node is not None and node < len(self.hosts) else ""

    def placed(self, hosts: Sequence[str]) -> Request:
        """The request with the machines that its engine chose, where the plan has left that to
        it.
        """
        return self if self.hosts else replace(self, hosts=tuple(hosts))

    def with_environment(self, environment: Mapping[str, str]) -> Request:
        """The same request with more in the environment of every node."""
        return replace(self, environment={**self.environment, **environment})

    def record(self) -> dict[str, Any]:
        """As JSON takes it; `of` makes the same request of it."""
        return {
            "job": self.job.record(),
            "artifacts": [asdict(artifact) for artifact in self.artifacts],
            "hosts": list(self.hosts),
            "environment": dict(self.environment),
        }

    @classmethod
    def of(cls, record: Mapping[str, Any], where: str) -> Request:
        """The request of a record that stood at `where`.

        Raises:
            RunError: it is none.
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
    """A shell script that becomes the command `words` in `folder`; it can be read, and run by
    hand.
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
    """A command over as many lines as it needs, so that a shell still takes it."""
    line = words[0]
    for word in words[1:]:
        if len(line) + len(word) + 3 > width:
            yield line + " \\"
            line = INDENT + word
        else:
            line += f" {word}"
    yield line
