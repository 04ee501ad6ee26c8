"""Checkpoint collectives on a separate gloo group.

The separate group allows a background save to communicate independently of training's collectives.
If one rank fails, all ranks raise the same error, so that no rank blocks in a collective forever.
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

# Timeout, long enough for slow disks. A dead rank is detected immediately because its connections
# close.
PATIENCE = timedelta(hours=1)
T = TypeVar("T")


@dataclass(frozen=True)
class RankFailure:
    """A rank's failure in a checkpoint operation."""

    rank: int
    what: str
    why: str
    full: bool  # whether the disk is full
    next: str = ""  # advice for the user; defaults to advice about the disk


class CheckpointError(RunError):
    """Raised on every rank if a checkpoint operation fails on any of them."""

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
    """All ranks of the job, coordinated by rank 0."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Gathers all ranks' values on rank 0, in rank order. Other ranks get an empty list."""
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def scatter(self, values: list[T]) -> T:
        """Scatters rank 0's list and returns this rank's element."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values or None, src=0, group=self.group)
        return mine[0]  # type: ignore[no-any-return]

    def tell(self, value: T) -> T:
        """Broadcasts rank 0's value and returns it on every rank."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]  # type: ignore[no-any-return]

    def all(self, what: str, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank and returns once all ranks are done.

        Rank 0 gets all results in rank order, and other ranks get an empty list.

        Raises:
            CheckpointError: `work` failed on a rank. Raised on every rank.
        """
        result, failure = attempt(self.rank, what, work)
        gathered = self.gather((result, failure))
        if failures := self.tell([failure for _, failure in gathered if failure]):
            raise CheckpointError(failures)
        return [result for result, _ in gathered]  # type: ignore[misc]

    def one(self, what: str, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0.

        Every rank returns the result or raises the CheckpointError.
        """
        result, failure = self.tell(attempt(0, what, work) if self.first else (None, None))
        if failure:
            raise CheckpointError([failure])
        return result  # type: ignore[return-value]


def attempt(rank: int, what: str, work: Callable[[], T]) -> tuple[T | None, RankFailure | None]:
    """Runs `work` and returns its result or its failure."""
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
    except Exception as error:  # catch everything, because other ranks wait for the outcome
        return None, RankFailure(rank, what, f"{type(error).__name__}: {error}", False)
