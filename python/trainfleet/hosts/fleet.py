"""Opens a config's fleet: its hosts, the SSH transport to them, and their desired state.

Also defines how often a head polls its hosts over SSH, and when a silent host counts as lost. A
head with two cores can process about 64 responses per second (tests/bench/LOG.md), so larger fleets
are polled less often. The timeout grows with the polling interval, so a host counts as lost only
after several missed polls.

`run_together` runs interdependent commands, such as a bandwidth test, on many hosts.

Quarantined hosts are excluded from launches. Each entry records its evidence and time. `make doctor
LIFT=host` releases a host.
"""

from __future__ import annotations

import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config import Config
from ..config.host_list import Host, parse_hosts
from ..run import run_folder
from ..run.run_folder import Record
from ..trust.errors import BackendError, ConfigError, InputError
from ..trust.validation import Moment, fit
from .host_results import Answers, Finding
from .install_steps import Wanted
from .platform import load_platform
from .ssh_config import STATE
from .transport import GRACE, Transport


def hosts_of(config: Config) -> tuple[Host, ...]:
    """Returns the hosts in fleet.hosts. The first host is the head."""
    return parse_hosts(config.fleet.hosts)


def open_fleet(config: Config) -> Transport:
    """Returns a transport to all hosts, which connects on first use. Raises ConfigError if
    fleet.hosts is empty.
    """
    if not config.fleet.hosts:
        raise ConfigError.of(
            "fleet.hosts",
            "the ssh backend needs a list of your machines, e.g. [gpu-01, gpu-02]",
            next="list them in config.yaml; only make plan works without them",
        )
    return Transport(hosts_of(config), config.fleet.ssh)


def is_here(host: Host) -> bool:
    """Returns whether a host is this machine.

    Checks that a socket can be bound to the host's address, which works only for local addresses.
    """
    with suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.address, 0, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as own:
            own.bind(address)
            return True
    return False


def wanted_of(config: Config) -> Wanted:
    """Returns the hosts' desired state."""
    return Wanted(config, load_platform(config.fleet.platform))


ANSWERS = 64  # responses per second that a head can process
LOOK_EVERY = 1.0  # polling interval per host in seconds, for fleets of at most ANSWERS hosts
LOST_AFTER = 9.0  # seconds of silence after which a host is lost; a dead link is detected after 8 s
# maximum nodes per SSH job; at this size, nodes are polled every 8 s and count as lost after 30 s
MOST_NODES = 512


def look_every(hosts: int) -> float:
    """Returns the polling interval per host in seconds."""
    return max(LOOK_EVERY, hosts / ANSWERS)


def lost_after(hosts: int) -> float:
    """Returns the seconds of silence after which a host counts as lost.

    Allows for three polls, including the timeout of the last one.
    """
    return max(LOST_AFTER, 3 * look_every(hosts) + LOST_AFTER - 3 * LOOK_EVERY)


def spread(hosts: int) -> float:
    """Returns the minimum duration of a polling round in seconds, if all hosts respond
    immediately.
    """
    return hosts / ANSWERS


@dataclass(frozen=True)
class QuarantineEntry:
    """Quarantined host, with its address, the evidence, and the Unix time of the entry.

    `by` is the component that added it: doctor or watchdog.
    """

    host: str
    address: str
    evidence: str
    time: Moment
    by: str

    def __str__(self) -> str:
        return (
            f"{self.host}: {self.evidence} ({self.by}, "
            f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(self.time))})"
        )


class Quarantine:
    """A checkout's quarantine, stored in a file that is replaced atomically.

    Hosts are matched by identity, so renaming a host does not release it.
    """

    def __init__(self, path: Path = STATE / "quarantine.json") -> None:
        self.path = path

    def entries(self) -> dict[str, QuarantineEntry]:
        """Returns host identity → entry (config/host_list.py)."""
        record = run_folder.read_json(self.path) or {}
        try:
            return fit(dict[str, QuarantineEntry], record)
        except InputError as error:
            raise BackendError(
                "is not a quarantine list",
                where=str(self.path),
                why=f"{error.key}: {error.what}",
                next=f"cat {self.path}",
            ) from error

    def held(self, hosts: Iterable[Host]) -> dict[Host, QuarantineEntry]:
        """Returns host → entry for those of the given hosts that are quarantined."""
        entries = self.entries()
        return {host: entries[host.identity] for host in hosts if host.identity in entries}

    def add(self, host: Host, evidence: str, by: str = "doctor") -> None:
        """Quarantines a host, or adds evidence to its existing entry."""
        entries = self.entries()
        before = entries.get(host.identity)
        known = before.evidence if before else ""
        against = known if evidence in known else "; ".join(filter(None, (known, evidence)))
        self._write(
            entries
            | {host.identity: QuarantineEntry(host.name, host.address, against, time.time(), by)}
        )

    def add_blamed(self, findings: Iterable[Finding]) -> None:
        """Quarantines all hosts that the findings blame."""
        for finding in findings:
            if finding.host and finding.blames_host:
                self.add(finding.host, finding.message)

    def learn(self, events: Sequence[Record], known: Callable[[str], Host | None]) -> None:
        """Quarantines the hosts that a run's latest launch found faulty.

        `known` maps a name to a host of the fleet, or to None.
        """
        launch = max(
            (index for index, event in enumerate(events) if event["event"] == "launched"), default=0
        )
        # findings from earlier launches were already recorded, and may have been lifted since
        for event in events[launch:]:
            if event["event"] == "quarantined" and (host := known(event.get("host", ""))):
                self.add(host, event.get("evidence", ""), "watchdog")

    def lift(self, name: str) -> QuarantineEntry:
        """Releases a host, specified by name, address or identity.

        Raises BackendError if it is not quarantined.
        """
        entries = self.entries()
        found = next(
            (
                (key, entry)
                for key, entry in entries.items()
                if name in (key, entry.host, entry.address)
            ),
            None,
        )
        if found is None:
            inside = ", ".join(entry.host for entry in entries.values()) or "none"
            raise BackendError(
                f"{name} is not in quarantine; quarantined hosts: {inside}",
                where=str(self.path),
                next="make doctor",
            )
        self._write({key: other for key, other in entries.items() if key != found[0]})
        return found[1]

    def forget(self, identities: Iterable[str]) -> None:
        """Deletes the entries of terminated machines."""
        gone, entries = set(identities), self.entries()
        if gone & entries.keys():
            self._write({key: entry for key, entry in entries.items() if key not in gone})

    def _write(self, entries: dict[str, QuarantineEntry]) -> None:
        run_folder.write_json(
            self.path, {address: asdict(entry) for address, entry in entries.items()}
        )


START_SECONDS = 20.0
END_SECONDS = 10  # seconds allowed for the other nodes to finish after the first


def run_together(
    transport: Transport, command: Callable[[Host], str], *, timeout: float, hosts: Sequence[Host]
) -> Answers:
    """Runs interdependent commands in parallel on all hosts, and returns their results.

    Each command runs in the background on its host, in a separate session, for at most `timeout`
    seconds. The output is collected once the first host's command has finished. Until that point,
    the commands occupy no transport threads, because there may be more hosts than threads.
    """
    token, numbers = secrets.token_hex(8), {host: number for number, host in enumerate(hosts)}

    def folder(host: Host) -> str:
        return f"/tmp/trainfleet-{token}-{numbers[host]}"

    limit = timeout + spread(len(hosts))
    began = transport.run(
        lambda host: begin(folder(host), command(host), limit), timeout=START_SECONDS, hosts=hosts
    )
    started = list(began.ok)
    if len(started) == len(hosts):
        transport.ask(hosts[0], wait(folder(hosts[0]), limit), timeout=limit + GRACE)
    # if a command failed to start, the others would wait for it until their timeout
    seconds = END_SECONDS if len(started) == len(hosts) else 0
    ended = transport.run(
        lambda host: collect(folder(host), seconds), timeout=START_SECONDS + seconds, hosts=started
    )
    return Answers({host: ended.get(host, answer) for host, answer in began.items()})


def begin(folder: str, command: str, timeout: float) -> str:
    """Returns the shell command that starts `command` in the background.

    The output goes to `folder`/out, and the exit code to `folder`/code.
    """
    inner = (
        f"timeout -k {GRACE} {round(timeout)} sh -c {shlex.quote(command)}; echo $? > "
        "code.part; mv code.part code"
    )
    return (
        f"umask 077; mkdir {folder} && cd {folder} && "
        f"{{ setsid sh -c {shlex.quote(inner)} < /dev/null > out 2>&1 & echo $! > pid; }}"
    )


def wait(folder: str, timeout: float) -> str:
    """Returns the shell command that waits up to `timeout` seconds for the command in `folder` to
    finish.
    """
    return (
        f"for _ in $(seq {round(timeout) * 5}); do [ -e {folder}/code ] && break; sleep 0.2; done"
    )


def collect(folder: str, seconds: int) -> str:
    """Returns the shell command that prints the output of the command in `folder`, with its exit
    code.

    If the command is still running after `seconds`, kills it and exits with 124.
    """
    return f"""cd {folder} || exit 125
for _ in $(seq {seconds * 5}); do [ -e code ] && break; sleep 0.2; done
[ -e code ] || {{ kill -KILL -- "-$(cat pid)"; echo 124 > code; }}
cat out; read -r code < code; cd /; rm -rf {folder}; exit "$code\""""
