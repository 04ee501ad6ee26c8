"""The answers of hosts: a result or a failure for each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ..config.host_list import Host as Host
from ..trust import untrusted_input
from ..trust.errors import BackendError, InputError

MANY = 4  # hosts of which the same is said in one line


@dataclass(frozen=True)
class Result:
    """A command that ran to its end: exit code (128 + n for signal n), what it printed, seconds it
    took.
    """

    exit_code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class HostFailure:
    """Why a host's answer is a failure, and what to type.

    kind: name (does not resolve), down (nothing answers), host-key (another key than known),
    unknown-key (first contact), auth (user or key refused), lost (the link died meanwhile), timeout
    (no end in time), slow (left behind by the others), exit (the command ended badly), implausible
    (what it says can't be so).
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
        """The hosts whose command ended with 0."""
        return {
            host: answer
            for host, answer in self.items()
            if isinstance(answer, Result) and answer.exit_code == 0
        }

    @property
    def failed(self) -> dict[Host, HostFailure]:
        """All others: unreachable hosts, and those whose command failed."""
        return {host: failure for host, answer in self.items() if (failure := reason(answer))}

    def require(self, what: str, then: str = "make doctor") -> Self:
        """The answers, where all are good; BackendError with `what` is wrong, by host, where one is
        not.
        """
        if failed := self.failed:
            raise BackendError(by_host(what, failed), next=then)
        return self


def settled(answer: Result | HostFailure) -> Result | HostFailure:
    """A good answer as it is, and of any other the failure that it is."""
    return reason(answer) or answer


def reason(answer: Result | HostFailure) -> HostFailure | None:
    """The failure that an answer is; None for a good one."""
    if isinstance(answer, HostFailure):
        return answer
    if answer.exit_code == 0:
        return None
    words = [line for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
    return HostFailure(
        "exit", f"exit code {answer.exit_code}: {words[-1] if words else 'it said nothing'}", ""
    )


def by_host(what: str, said: Mapping[Host, object]) -> str:
    """`what`, and under it a line a host with what is said of it; one line for all of whom the same
    is said.
    """
    return "\n".join([what, *(f"  {names(hosts)}: {words}" for hosts, words in grouped(said))])


def grouped(said: Mapping[Host, object]) -> list[tuple[list[Host], str]]:
    """The hosts with what is said of them: MANY of whom the same is said, but for their names and
    addresses, stand together.
    """
    alike: dict[str, list[Host]] = {}
    for host, words in said.items():
        alike.setdefault(_nameless(host, str(words)), []).append(host)
    rows = [
        [hosts] if len(hosts) >= MANY else [[host] for host in hosts] for hosts in alike.values()
    ]
    return [(hosts, str(said[hosts[0]])) for row in rows for hosts in row]


def names(hosts: Sequence[Host]) -> str:
    """`node0`, or `64 hosts (node0, node1, node2, ... node63)`."""
    if len(hosts) == 1:
        return hosts[0].name
    first = ", ".join(host.name for host in hosts[:3])
    return f"{len(hosts)} hosts ({first}{', ...' if len(hosts) > 4 else ','} {hosts[-1].name})"


def _nameless(host: Host, words: str) -> str:
    """What is said of a host as it would be of any other."""
    for own in sorted({host.address, host.name}, key=len, reverse=True):
        words = re.sub(rf"(?<![\w.]){re.escape(own)}(?![\w.]\w|\w)", "HOST", words)
    return words


class Implausible(ValueError):
    """A host's answer is implausible: not the format, or an impossible value."""


def implausible(error: Implausible, asked: str) -> HostFailure:
    """The failure of a host whose answer is implausible."""
    then = "look at that host: another user or program answers in its place"
    return HostFailure("untrue", f"its answer is not {asked}: it has {error}", then)


def parse_json(text: str) -> Any:
    """The one JSON value in a host's answer.

    Raises:
        Implausible: it is none, or has what our programs never print: NaN, a duplicate key, many
            levels, endless digits.
    """
    try:
        return untrusted_input.parse_json(text, "")
    except InputError as error:
        raise Implausible(f"text that {error.what}") from None


def is_whole_number(value: object) -> bool:
    """Whether a JSON value is an integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def number(value: object, least: float, most: float) -> float:
    """A finite JSON number within these bounds; Implausible for anything else."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not least <= value <= most
        or not math.isfinite(value)
    ):
        raise Implausible("a number that can't be")
    return float(value)
