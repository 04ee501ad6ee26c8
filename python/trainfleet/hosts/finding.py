"""One thing that is wrong with a host or with the fleet as a whole, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from .host_results import Host


@dataclass(frozen=True)
class Finding:
    """A problem: its host (None: the whole fleet), a message, the next command, and whether the
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
