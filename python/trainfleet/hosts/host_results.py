"""The answers of hosts: a result or failure per host, and findings about hosts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ..config.host_list import Host as Host
from ..trust import untrusted_input
from ..trust.errors import BackendError, InputError

MANY = 4  # minimum number of hosts that share one line for equal messages


@dataclass(frozen=True)
class Result:
    """The outcome of a command that ended: exit code (128 + n for signal n), output, and seconds
    taken.
    """

    exit_code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class HostFailure:
    """A host's failure, with the next command to type.

    Values of `kind`: name (does not resolve), down (no answer), host-key (differs from the known
    key), unknown-key (first contact), auth (user or key refused). Or: lost (the connection died),
    timeout, slow (much slower than most hosts), exit (the command failed), untrue (an implausible
    answer).
    """

    kind: str
    message: str
    next: str

    def __str__(self) -> str:
        return f"{self.message}; next: {self.next}" if self.next else self.message


class Answers(dict[Host, Result | HostFailure]):
    """The answers of all hosts, in the order of the hosts."""

    @property
    def ok(self) -> dict[Host, Result]:
        """Returns the results of commands that exited with 0."""
        return {
            host: answer
            for host, answer in self.items()
            if isinstance(answer, Result) and answer.exit_code == 0
        }

    @property
    def failed(self) -> dict[Host, HostFailure]:
        """Returns the failures: unreachable hosts, and hosts on which the command failed."""
        return {host: failure for host, answer in self.items() if (failure := reason(answer))}

    def require(self, what: str, then: str = "make doctor") -> Self:
        """Returns the answers if all succeeded. Otherwise raises BackendError with `what` and each
        host's failure.
        """
        if failed := self.failed:
            raise BackendError(by_host(what, failed), next=then)
        return self


def settled(answer: Result | HostFailure) -> Result | HostFailure:
    """Returns a successful answer unchanged, and any other as a failure."""
    return reason(answer) or answer


def reason(answer: Result | HostFailure) -> HostFailure | None:
    """Returns the failure of an answer, or None if it succeeded."""
    if isinstance(answer, HostFailure):
        return answer
    if answer.exit_code == 0:
        return None
    words = [line for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
    return HostFailure(
        "exit", f"exit code {answer.exit_code}: {words[-1] if words else 'no output'}", ""
    )


def by_host(what: str, said: Mapping[Host, object]) -> str:
    """Returns `what`, followed by one line per message with its hosts."""
    return "\n".join([what, *(f"  {names(hosts)}: {words}" for hosts, words in grouped(said))])


def grouped(said: Mapping[Host, object]) -> list[tuple[list[Host], str]]:
    """Groups hosts by message, ignoring their names and addresses. Groups smaller than MANY are
    split.
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
    """Replaces the host's name and address in a message with HOST."""
    for own in sorted({host.address, host.name}, key=len, reverse=True):
        words = re.sub(rf"(?<![\w.]){re.escape(own)}(?![\w.]\w|\w)", "HOST", words)
    return words


class Implausible(ValueError):
    """Raised if a host's answer has the wrong format or an impossible value."""


def implausible(error: Implausible, asked: str) -> HostFailure:
    """Returns the failure of a host with an implausible answer."""
    then = "check that host; another program may be answering in its place"
    return HostFailure("untrue", f"its answer is not {asked}: {error}", then)


def parse_json(text: str) -> Any:
    """Returns the one JSON value in a host's answer.

    Raises:
        Implausible: it is not JSON, or has content that our programs never print: NaN, duplicate
            keys, deep nesting, or very long numbers.
    """
    try:
        return untrusted_input.parse_json(text, "")
    except InputError as error:
        raise Implausible(f"the text {error.what}") from None


def is_whole_number(value: object) -> bool:
    """Tells whether a JSON value is an integer. Booleans do not count."""
    return isinstance(value, int) and not isinstance(value, bool)


def number(value: object, least: float, most: float) -> float:
    """Returns a finite JSON number within these bounds. Raises Implausible for any other value."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not least <= value <= most
        or not math.isfinite(value)
    ):
        raise Implausible("a number is out of range")
    return float(value)


@dataclass(frozen=True)
class Finding:
    """A problem with a host. A finding without a host is about the entire fleet.

    `blames_host` puts the host in quarantine; it is set for broken hardware or a slow link.
    Problems that `make setup` fixes do not set it.
    """

    host: Host | None
    check: str
    message: str
    next: str = ""
    blames_host: bool = False

    def __str__(self) -> str:
        return f"{self.message}; next: {self.next}" if self.next else self.message
