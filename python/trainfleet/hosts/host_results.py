"""Results of host commands: output, failures, and findings about hosts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ..config.host_list import Host as Host
from ..trust import untrusted_input
from ..trust.errors import BackendError, InputError

MANY = 4  # hosts with the same message are grouped from this number on


@dataclass(frozen=True)
class Result:
    """Result of a finished command: exit code (128 + n for signal n), output, and seconds taken."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class HostFailure:
    """Failure on a host, with a suggested next command.

    Values of `kind`:
        name: the hostname does not resolve
        down: no response
        host-key: the host key differs from the known one
        unknown-key: first contact
        auth: the user or key was rejected
        lost: the connection died
        timeout: the command timed out
        slow: the host is much slower than most
        exit: the command failed
        untrue: the response is implausible
    """

    kind: str
    message: str
    next: str

    def __str__(self) -> str:
        return f"{self.message}; next: {self.next}" if self.next else self.message


class Answers(dict[Host, Result | HostFailure]):
    """Responses from several hosts, in host order."""

    @property
    def ok(self) -> dict[Host, Result]:
        """Results of the commands that succeeded."""
        return {
            host: answer
            for host, answer in self.items()
            if isinstance(answer, Result) and answer.exit_code == 0
        }

    @property
    def failed(self) -> dict[Host, HostFailure]:
        """Failures: unreachable hosts, and hosts where the command failed."""
        return {host: failure for host, answer in self.items() if (failure := reason(answer))}

    def require(self, what: str, then: str = "make doctor") -> Self:
        """Returns the responses if all succeeded.

        Otherwise, raises a BackendError listing each host's failure under the heading `what`.
        """
        if failed := self.failed:
            raise BackendError(by_host(what, failed), next=then)
        return self


def settled(answer: Result | HostFailure) -> Result | HostFailure:
    """Returns the response if the command succeeded, otherwise its failure."""
    return reason(answer) or answer


def reason(answer: Result | HostFailure) -> HostFailure | None:
    """Returns the failure that a response represents, or None if the command succeeded."""
    if isinstance(answer, HostFailure):
        return answer
    if answer.exit_code == 0:
        return None
    words = [line for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
    return HostFailure(
        "exit", f"exit code {answer.exit_code}: {words[-1] if words else 'no output'}", ""
    )


def by_host(what: str, said: Mapping[Host, object]) -> str:
    """Formats `what`, followed by one line per distinct message with its hosts."""
    return "\n".join([what, *(f"  {names(hosts)}: {words}" for hosts, words in grouped(said))])


def grouped(said: Mapping[Host, object]) -> list[tuple[list[Host], str]]:
    """Groups hosts whose messages differ only in the host's name and address. Groups smaller than
    MANY are split.
    """
    alike: dict[str, list[Host]] = {}
    for host, words in said.items():
        alike.setdefault(_nameless(host, str(words)), []).append(host)
    rows = [
        [hosts] if len(hosts) >= MANY else [[host] for host in hosts] for hosts in alike.values()
    ]
    return [(hosts, str(said[hosts[0]])) for row in rows for hosts in row]


def names(hosts: Sequence[Host]) -> str:
    """Formats host names as `node0`, or `64 hosts (node0, node1, node2, ... node63)`."""
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
    """Raised if a host's response is malformed or contains an impossible value."""


def implausible(error: Implausible, asked: str) -> HostFailure:
    """Converts the error to a host failure. `asked` describes the response that was expected."""
    then = "check that host; another program may be answering in its place"
    return HostFailure("untrue", f"its answer is not {asked}: {error}", then)


def parse_json(text: str) -> Any:
    """Parses a host's response, which must be a single JSON value.

    Raises:
        Implausible: the response is not JSON, or contains NaN, duplicate keys, deep nesting or very
            long numbers, none of which trainfleet prints.
    """
    try:
        return untrusted_input.parse_json(text, "")
    except InputError as error:
        raise Implausible(f"the text {error.what}") from None


def is_whole_number(value: object) -> bool:
    """Returns whether a JSON value is an integer, which excludes booleans."""
    return isinstance(value, int) and not isinstance(value, bool)


def number(value: object, least: float, most: float) -> float:
    """Returns a finite JSON number within the bounds. Raises Implausible for any other value."""
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
    """Problem with a host, or with the entire fleet if `host` is not set.

    `blames_host` puts the host in quarantine. It is set for hardware failures and slow links, but
    not for problems that `make setup` can fix.
    """

    host: Host | None
    check: str
    message: str
    next: str = ""
    blames_host: bool = False

    def __str__(self) -> str:
        return f"{self.message}; next: {self.next}" if self.next else self.message
