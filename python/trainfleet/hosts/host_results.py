"""The answers of hosts: a result or a failure for each, and findings against a host."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ..config.host_list import Host as Host
from ..trust import untrusted_input
from ..trust.errors import BackendError, InputError

MANY = 4  # hosts from which on equal messages share one line


@dataclass(frozen=True)
class Result:
    """A command that ended: exit code (128 + n for signal n), output, and its duration in
    seconds.
    """

    exit_code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class HostFailure:
    """The reason for a host's failure, and the command to type next.

    kind: name (does not resolve), down (no answer), host-key (another key than the known one),
    unknown-key (first contact), auth (user or key refused), lost (the link died during the
    command). Or: timeout (no end in time), slow (the others did not wait for it), exit (the command
    failed), implausible (its answer can't be true).
    """

    kind: str
    message: str
    next: str

    def __str__(self) -> str:
        return f"{self.message}; next: {self.next}" if self.next else self.message


class Answers(dict[Host, Result | HostFailure]):
    """Every host's answer, in the order of the hosts."""

    @property
    def ok(self) -> dict[Host, Result]:
        """Returns the hosts with a command that ended with 0."""
        return {
            host: answer
            for host, answer in self.items()
            if isinstance(answer, Result) and answer.exit_code == 0
        }

    @property
    def failed(self) -> dict[Host, HostFailure]:
        """Returns all other hosts: unreachable ones, and those with a command that failed."""
        return {host: failure for host, answer in self.items() if (failure := reason(answer))}

    def require(self, what: str, then: str = "make doctor") -> Self:
        """Returns the answers if all are good; else raises BackendError with `what` and the failure
        of each host.
        """
        if failed := self.failed:
            raise BackendError(by_host(what, failed), next=then)
        return self


def settled(answer: Result | HostFailure) -> Result | HostFailure:
    """Returns a good answer unchanged, and the failure for any other."""
    return reason(answer) or answer


def reason(answer: Result | HostFailure) -> HostFailure | None:
    """Returns the failure of an answer; None for a good one."""
    if isinstance(answer, HostFailure):
        return answer
    if answer.exit_code == 0:
        return None
    words = [line for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
    return HostFailure(
        "exit", f"exit code {answer.exit_code}: {words[-1] if words else 'no output'}", ""
    )


def by_host(what: str, said: Mapping[Host, object]) -> str:
    """Returns `what`, followed by one line per host with its message. Hosts with the same message
    share a line.
    """
    return "\n".join([what, *(f"  {names(hosts)}: {words}" for hosts, words in grouped(said))])


def grouped(said: Mapping[Host, object]) -> list[tuple[list[Host], str]]:
    """Groups hosts by message. MANY or more hosts share a row if their messages differ only in
    names and addresses.
    """
    alike: dict[str, list[Host]] = {}
    for host, words in said.items():
        alike.setdefault(_nameless(host, str(words)), []).append(host)
    rows = [
        [hosts] if len(hosts) >= MANY else [[host] for host in hosts] for hosts in alike.values()
    ]
    return [(hosts, str(said[hosts[0]])) for row in rows for hosts in row]


def names(hosts: Sequence[Host]) -> str:
    """Returns `node0`, or `64 hosts (node0, node1, node2, ... node63)`."""
    if len(hosts) == 1:
        return hosts[0].name
    first = ", ".join(host.name for host in hosts[:3])
    return f"{len(hosts)} hosts ({first}{', ...' if len(hosts) > 4 else ','} {hosts[-1].name})"


def _nameless(host: Host, words: str) -> str:
    """Returns the message without the host's name and address."""
    for own in sorted({host.address, host.name}, key=len, reverse=True):
        words = re.sub(rf"(?<![\w.]){re.escape(own)}(?![\w.]\w|\w)", "HOST", words)
    return words


class Implausible(ValueError):
    """A host's answer is implausible: not the format, or an impossible value."""


def implausible(error: Implausible, asked: str) -> HostFailure:
    """Returns the failure of a host with an implausible answer."""
    then = "check that host: another user or program may answer in its place"
    return HostFailure("untrue", f"its answer is not {asked}: it has {error}", then)


def parse_json(text: str) -> Any:
    """Returns the one JSON value in a host's answer.

    Raises:
        Implausible: it is not JSON, or has what our programs never print: NaN, a duplicate key,
            many levels, endless digits.
    """
    try:
        return untrusted_input.parse_json(text, "")
    except InputError as error:
        raise Implausible(f"text that {error.what}") from None


def is_whole_number(value: object) -> bool:
    """Tells whether a JSON value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def number(value: object, least: float, most: float) -> float:
    """Returns a finite JSON number within these bounds; Implausible for anything else."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not least <= value <= most
        or not math.isfinite(value)
    ):
        raise Implausible("an impossible number")
    return float(value)


@dataclass(frozen=True)
class Finding:
    """A problem: its host (None: the entire fleet), a message, the next command, and whether the
    host itself is to blame.

    A host that is to blame (broken hardware, a slow link) goes into quarantine. A problem that
    `make setup` fixes does not blame the host.
    """

    host: Host | None
    check: str
    message: str
    next: str = ""
    blames_host: bool = False

    def __str__(self) -> str:
        return f"{self.message}; next: {self.next}" if self.next else self.message
