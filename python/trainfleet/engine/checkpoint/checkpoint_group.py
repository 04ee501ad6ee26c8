"""Runs the collective steps of a checkpoint on a separate gloo group, apart from training's
collectives.

So a save can communicate in the background while training does in the foreground. A failure on one
rank fails on all of them with the same message: no rank waits in a collective forever.
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

# a dead rank is noticed at once, by its closed connections; this is for slow disks
PATIENCE = timedelta(hours=1)
T = TypeVar("T")


@dataclass(frozen=True)
class RankFailure:
    """The reason why a rank could not do its part."""

    rank: int
    what: str
    why: str
    full: bool  # the disk is full
    next: str = ""  # command to type, if the disk is not at fault


class CheckpointError(RunError):
    """Raised by all ranks together."""

    def __init__(self, failures: list[RankFailure]) -> None:
        first = failures[0]
        others = f" (and on {len(failures) - 1} more)" if len(failures) > 1 else ""
        self.full = any(failure.full for failure in failures)
        remedy = "free some space (df -h)" if self.full else "check the disk (dmesg)"
        super().__init__(
            f"{first.what} on rank {first.rank}{others}",
            why=first.why,
            next=first.next or f"{remedy}: the next save tries again, and so does make train",
        )


class Peers:
    """All ranks of the job; rank 0 speaks for them."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Gathers every rank's value, in rank order, at rank 0; returns an empty list elsewhere."""
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def scatter(self, values: list[T]) -> T:
        """Returns this rank's value from rank 0's list."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values or None, src=0, group=self.group)
        return mine[0]  # type: ignore[no-any-return]

    def tell(self, value: T) -> T:
        """Broadcasts rank 0's value."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]  # type: ignore[no-any-return]

    def all(self, what: str, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank; returns the results, in rank order, at rank 0.

        Raises:
            CheckpointError: on every rank, if any rank's part failed. When this returns, all ranks
                are done.
        """
        result, failure = attempt(self.rank, what, work)
        gathered = self.gather((result, failure))
        if failures := self.tell([failure for _, failure in gathered if failure]):
            raise CheckpointError(failures)
        return [result for result, _ in gathered]  # type: ignore[misc]

    def one(self, what: str, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0; every rank returns its result, or raises CheckpointError."""
        result, failure = self.tell(attempt(0, what, work) if self.first else (None, None))
        if failure:
            raise CheckpointError([failure])
        return result  # type: ignore[return-value]


def attempt(rank: int, what: str, work: Callable[[], T]) -> tuple[T | None, RankFailure | None]:
    """Returns the result, or the reason why it failed."""
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
    except Exception as error:  # any other error: the other ranks must get it instead of waiting
        return None, RankFailure(rank, what, f"{type(error).__name__}: {error}", False)
