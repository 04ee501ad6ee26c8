"""What hosts said: each one's own answer is kept, beside those that failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config.hosts import Host

__all__ = ["Answers", "Failure", "Host", "Result", "by_host", "reason"]


@dataclass(frozen=True)
class Result:
    """A command that ran to its end: exit code (128 + n for signal n), what it printed, seconds it took."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class Failure:
    """Why a host gave no good answer, and what to type.

    kind: name (does not resolve), down (nothing answers), host-key (another key than known), unknown-key (first contact), auth
    (user or key refused), lost (the link died meanwhile), timeout (no end in time), slow (left behind by the others), exit (the
    command ended badly).
    """

    kind: str
    message: str
    next: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.message}; next: {self.next}" if self.next else self.message


class Answers(dict[Host, Result | Failure]):
    """Every host's answer, in the order of the hosts."""

    @property
    def ok(self) -> dict[Host, Result]:
        """The hosts whose command ended with 0."""
        return {host: answer for host, answer in self.items() if isinstance(answer, Result) and answer.exit_code == 0}

    @property
    def failed(self) -> dict[Host, Failure]:
        """All others: those that could not be asked, and those whose command ended badly."""
        reasons = {host: reason(host, answer) for host, answer in self.items()}
        return {host: failure for host, failure in reasons.items() if failure is not None}


def reason(host: Host, answer: Result | Failure) -> Failure | None:
    """Why an answer is not good; None when it is."""
    if isinstance(answer, Failure):
        return answer
    if answer.exit_code == 0:
        return None
    words = [line for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
    return Failure("exit", f"exit code {answer.exit_code}: {words[-1] if words else 'it said nothing'}", "", answer.seconds)


def by_host(what: str, said: Mapping[Host, object]) -> str:
    """`what`, and under it a line a host with what is said of it."""
    return "\n".join([what, *(f"  {host.name}: {words}" for host, words in said.items())])
