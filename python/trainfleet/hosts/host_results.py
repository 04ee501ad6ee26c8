"""Results of host commands: output, failures, and findings with the checks that produce them. Also
a status board with one line per host.

On a terminal, the lines are updated in place. Otherwise, each line is printed once its host is
finished.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ..config.host_list import Host as Host
from ..trust import untrusted_input
from ..trust.errors import BackendError, InputError
from ..trust.safe_output import shown, unguarded
from ..trust.validation import fit

if TYPE_CHECKING:
    from rich.text import Text

T = TypeVar("T")
MANY = 4  # hosts with the same message are grouped only if there are at least this many


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
    return HostFailure(
        "untrue",
        f"its answer is not {asked}: {error}",
        "check that host; another program may be responding in its place",
    )


def fitted(kind: type[T], text: str) -> T:
    """Parses a host's response, which must be a single JSON value of this type.

    Raises:
        Implausible: the response is not JSON, does not match the type, or contains NaN, duplicate
            keys, deep nesting or very long numbers, none of which trainfleet prints.
    """
    try:
        return fit(kind, untrusted_input.parse_json(text, ""))
    except InputError as error:
        raise Implausible(f"{error.key or 'the text'} {error.what}") from None


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


# Bit flags for the occasions on which a check runs. SETUP finds hosts that `make setup` must not
# change. LAUNCH finds problems that would make a job fail, run slowly or produce wrong results.
# ALLOCATED does the same for nodes that a scheduler allocates and others administer.
SETUP, LAUNCH, ALLOCATED = 1, 2, 4

# Tuples that a check yields: host, message and, to override the check's defaults, the next step and
# whether the host is to blame. Checks of each host omit the host, and may yield just a message.
Problems = Iterator[Any]
Check = Callable[..., Iterator[Finding]]
CHECKS: list[tuple[int, Check]] = []


def check(
    then: str = "", when: int = LAUNCH | ALLOCATED, blames: bool = False
) -> Callable[[Callable[..., Problems]], Check]:
    """Returns a decorator that adds a check of the fleet's facts to CHECKS. Its findings have the
    check's name, and `then` as their next step.
    """
    row: tuple[Any, ...] = then, blames

    def add(made: Callable[..., Problems]) -> Check:
        def find(*about: Any) -> Iterator[Finding]:
            for host, *said in made(*about):
                yield Finding(host, made.__name__, *said, *row[len(said) - 1 :])

        CHECKS.append((when, find))
        return find

    return add


def each_host(*row: Any, **more: Any) -> Callable[[Callable[..., Problems]], Check]:
    """Returns a decorator that adds a check of each host's facts to CHECKS. Takes the arguments of
    `check`.
    """

    def add(made: Callable[..., Problems]) -> Check:
        @functools.wraps(made)
        def every(facts: Mapping[Host, object], wanted: object) -> Problems:
            for host, fact in facts.items():
                for said in made(fact, wanted):
                    yield host, *((said,) if isinstance(said, str) else said)

        return check(*row, **more)(every)

    return add


def heard(answers: Mapping[Host, T | HostFailure]) -> tuple[dict[Host, T], list[Finding]]:
    """Splits responses into the facts of the hosts that responded, and findings about the
    others.
    """
    failed = {host: answer for host, answer in answers.items() if isinstance(answer, HostFailure)}
    found = [Finding(host, why.kind, why.message, why.next) for host, why in failed.items()]
    return {host: it for host, it in answers.items() if not isinstance(it, HostFailure)}, found


def sound(facts: Mapping[Host, T], findings: Iterable[Finding]) -> dict[Host, T]:
    """Returns the facts of the hosts without findings."""
    bad = {finding.host for finding in findings}
    return {host: fact for host, fact in facts.items() if host not in bad}


FINAL = ("ok", "changed", "FAILED")
STYLES = {"ok": "green", "changed": "yellow", "FAILED": "red"}


class Board:
    """Status of every host, for use as a context manager. `show` is thread-safe."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.rows: dict[Host, tuple[str, str]] = dict.fromkeys(hosts, ("...", ""))
        self.width = max((len(host.name) for host in hosts), default=0)
        self.stream = sys.stdout
        self.fancy = (
            self.stream.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        )
        self._lock = threading.Lock()

    def __enter__(self) -> Board:
        if self.fancy:
            from rich.console import Console
            from rich.live import Live

            self.console = Console(file=unguarded(self.stream), highlight=False)
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.fancy:
            self.live.update(self._draw(whole=True), refresh=True)
            self.live.stop()

    def show(self, host: Host, state: str, text: str = "") -> None:
        """Sets a host's state. A host in one of the FINAL states is finished."""
        with self._lock:
            self.rows[host] = (state, text)
            if self.fancy:
                self.live.update(self._draw(whole=False), refresh=True)
            elif state in FINAL:
                print(self._line(host), file=self.stream, flush=True)

    def show_all(self, hosts: Sequence[Host], state: str, text: str) -> None:
        """Sets the state of several hosts.

        Prints a single line for all of them if there is no terminal.
        """
        if self.fancy or len(hosts) == 1:
            for host in hosts:
                self.show(host, state, text)
            return
        with self._lock:
            self.rows |= dict.fromkeys(hosts, (state, text))
            print(
                shown(f"{names(hosts)}  {state}  {' '.join(text.splitlines())}"),
                file=self.stream,
                flush=True,
            )

    def in_state(self, *states: str) -> list[Host]:
        """Returns the hosts that are currently in one of the given states."""
        return [host for host, (state, _) in self.rows.items() if state in states]

    def say(self, text: str) -> None:
        """Prints a line that does not belong to a host."""
        with self._lock:
            print(shown(text), file=self.stream, flush=True)

    def _line(self, host: Host) -> str:
        state, text = self.rows[host]
        return shown(f"{host.name:{self.width}}  {state:8}  {' '.join(text.splitlines())}".rstrip())

    def _draw(self, *, whole: bool) -> Text:
        """Returns the lines to display.

        While hosts are unfinished, returns only as many lines as fit on the screen, unfinished
        hosts first.
        """
        from rich.text import Text

        hosts = list(self.rows)
        room = self.console.height - 2
        hidden = len(hosts) - room if len(hosts) > room and not whole else 0
        if hidden:
            hosts = sorted(hosts, key=lambda host: self.rows[host][0] in FINAL)[:room]
        lines = [
            Text(
                self._line(host),
                style=STYLES.get(self.rows[host][0], ""),
                no_wrap=True,
                overflow="ellipsis",
            )
            for host in hosts
        ]
        return Text("\n").join(
            [*lines, *([Text(f"... and {hidden} more", style="dim")] if hidden else [])]
        )
