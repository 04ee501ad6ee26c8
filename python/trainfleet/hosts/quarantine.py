"""Quarantine: hosts excluded from launches, with evidence and time.

`make doctor LIFT=host` releases a host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..run import run_folder
from ..run.run_folder import Record
from ..trust.errors import BackendError, InputError
from ..trust.validation import Moment, fit
from .host_results import Finding, Host
from .ssh_config import STATE


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
            why = f"{error.key}: {error.what}"
            raise BackendError(
                "is not a quarantine list", where=str(self.path), why=why, next=f"cat {self.path}"
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
