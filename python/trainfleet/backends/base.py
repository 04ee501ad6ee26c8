"""The contract of a backend: it plans a job into a request that can be printed, and carries out that very request.

plan(job)        → request   pure but for reading the machine; refuses what the backend can't do
submit(request)  → handle    the only call that starts anything
status(handle)   → Status    cheap; called a few times a second
ask_to_stop(handle)          SIGTERM: the nodes finish what must not be half done, then leave
stop(handle)                 idempotent; when it returns, nothing of the job runs
again(jobs, broken) → request   for another attempt, of the first of `jobs` (alike but for how many nodes) for which there are
                             sound nodes; `broken` are hosts that must not be used, with the reason
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..plan.job import Job
from ..plan.request import Request


@dataclass(frozen=True)
class Status:
    """Whether the job still runs, and by node the exit codes of those that ended and why others can't be reached."""

    running: bool
    exit_codes: dict[int, int]
    lost: dict[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(self.exit_codes.values()) or bool(self.lost)


class Backend(Protocol):
    """What the launcher needs of the place where a job runs; the module's docstring says what each call guarantees."""

    name: str
    shares_disk: bool  # whether its nodes see the files of this machine

    def plan(self, job: Job) -> Request: ...
    def submit(self, request: Request) -> Any: ...
    def status(self, handle: Any) -> Status: ...
    def ask_to_stop(self, handle: Any) -> None: ...
    def stop(self, handle: Any) -> None: ...
    def again(self, jobs: Sequence[Job], broken: Mapping[str, str]) -> Request: ...
