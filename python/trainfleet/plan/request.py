"""What will run, exactly: a backend makes it from a job, `make plan` prints it, and apply carries out that very thing."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from .job import Job


@dataclass(frozen=True)
class Command:
    """One node's command exactly as it will run, and where its output goes."""

    node: int
    argv: tuple[str, ...]
    environment: dict[str, str]
    log: Path
    host: str = ""  # the machine, where it has a name of its own

    def shell(self) -> str:
        """The command as a shell would take it."""
        return " ".join(self.words())

    def words(self) -> list[str]:
        """The same, a word of the shell each."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return [*settings, *map(shlex.quote, self.argv)]


@dataclass(frozen=True)
class Request:
    """All that a backend will do for a job."""

    job: Job
    commands: tuple[Command, ...]

    def with_environment(self, environment: dict[str, str]) -> Request:
        """The same request with more in the environment of every node."""
        commands = tuple(replace(command, environment=command.environment | environment) for command in self.commands)
        return replace(self, commands=commands)
