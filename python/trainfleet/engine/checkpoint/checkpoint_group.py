"""Runs the collectives of a checkpoint on a separate gloo group.

A save can communicate in the background, independently of training's collectives. A failure on one
rank is raised on all ranks with the same message, so no rank waits in a collective forever.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ...run.run_folder import unwritable
from ...trust.errors import RunError, TrainfleetError

# Timeout for slow disks; a dead rank is detected at once because its connections close.
PATIENCE = timedelta(hours=1)
T = TypeVar("T")


@dataclass(frozen=True)
class RankFailure:
    """The reason why a checkpoint operation failed on a rank."""

    rank: int
    what: str
    why: str
    full: bool  # whether the disk is full
    next: str = ""  # command that the user should type, if the disk is not the cause


class CheckpointError(RunError):
    """A failed checkpoint operation; every rank raises it."""

    def __init__(self, failures: list[RankFailure]) -> None:
        first = failures[0]
        others = f" (and on {len(failures) - 1} more)" if len(failures) > 1 else ""
        self.full = any(failure.full for failure in failures)
        remedy = "free some space (df -h)" if self.full else "check the disk (dmesg)"
        super().__init__(
            f"{first.what} on rank {first.rank}{others}",
            why=first.why,
            next=first.next or f"{remedy}; the next save or make train tries again",
        )


class Peers:
    """All ranks of the job; rank 0 coordinates them."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Gathers the values of all ranks on rank 0, in rank order. Returns an empty list on other
        ranks.
        """
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def scatter(self, values: list[T]) -> T:
        """Returns this rank's value from the list on rank 0."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values or None, src=0, group=self.group)
        return mine[0]  # type: ignore[no-any-return]

    def tell(self, value: T) -> T:
        """Broadcasts rank 0's value."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]  # type: ignore[no-any-return]

    def all(self, what: str, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank. Returns the results in rank order on rank 0. When it returns,
        all ranks are done.

        Raises:
            CheckpointError: `work` failed on any rank; raised on every rank.
        """
        result, failure = attempt(self.rank, what, work)
        gathered = self.gather((result, failure))
        if failures := self.tell([failure for _, failure in gathered if failure]):
            raise CheckpointError(failures)
        return [result for result, _ in gathered]  # type: ignore[misc]

    def one(self, what: str, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0. Every rank returns its result or raises CheckpointError."""
        result, failure = self.tell(attempt(0, what, work) if self.first else (None, None))
        if failure:
            raise CheckpointError([failure])
        return result  # type: ignore[return-value]


def attempt(rank: int, what: str, work: Callable[[], T]) -> tuple[T | None, RankFailure | None]:
    """Runs `work`. Returns its result, or the reason why it failed."""
    try:
        return work(), None
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        then = unwritable(Path(), error).next if error.errno == errno.EFBIG else ""
        return None, RankFailure(
            rank,
            what,
            f"{error.strerror or error}{where}",
            error.errno in (errno.ENOSPC, errno.EDQUOT),
            then,
        )
    except TrainfleetError as error:
        return None, RankFailure(
            rank, what, f"{error.head}: {error.why}" if error.why else error.head, False, error.next
        )
    except Exception as error:  # report any other error too, so that no rank waits for this one
        return None, RankFailure(rank, what, f"{type(error).__name__}: {error}", False)
