"""Every error a user can meet, in one tree.

    TrainfleetError         one message: what, where, why and the command to type next; the exit code is
                            `exit_code`
    ├── ConfigError         config.yaml, SET or a make variable: all problems at once (exit 2)
    ├── InputError          a file or text that was written elsewhere, with its line and key (trust/untrusted_input.py)
    ├── DataError           a source, a tokenizer or a dataset
    │   ├── NoSource        an entry of data.sources names no readable file
    │   ├── BadText         a record of a source (data/bad_records.py)
    │   └── OtherField      a record of a source without text in the field of data.text_field
    ├── RunError            a run folder or a checkpoint
    │   ├── Broken          an incomplete or damaged checkpoint (checkpoints/marker.py)
    │   ├── CheckpointError another rank could not save or load its part (engine/checkpoint/checkpoint_group.py)
    │   ├── Fenced          another attempt has begun (health/fence.py)
    │   └── LauncherGone    no launcher leads the run any more (launch/remote_launch.py)
    ├── BackendError        a backend, a node or a process on it
    │   ├── JobFailed       a job ended badly: the verdict
    │   ├── CloudError      AWS refuses a control request, or does not answer (cloud/calls.py)
    │   │   └── NotAsked    it could not be asked at all: no credentials, or no connection
    │   ├── CutOff          this machine reaches no other host, and another must lead (watch/monitor.py)
    │   └── Missing         not all nodes of a job arrived in time (node/barrier.py)
    ├── ImageError          an image can't be built, pushed or used
    └── S3Error             S3 refuses a request, or does not answer for too long; an OSError too, like a disk's

Any other exception is a defect of trainfleet and keeps its traceback.
"""  # noqa: E501

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

from .redaction import hide
from .safe_output import completed, visible

P = ParamSpec("P")

MOST = 25  # problems of a config that are printed


class TrainfleetError(Exception):
    """One message to a user: `what` happened, `where` (file:line, host, rank), `why`, and the
    `next` command to type.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", next: str = "") -> None:
        # a file's name may contain a newline, and so begin a separate line
        where = where.replace("\n", "\\n")
        self.what, self.where, self.why, self.next = what, where, why, next
        super().__init__(what)

    @property
    def head(self) -> str:
        """The place and the problem, in one line."""
        return f"{self.where}: {self.what}" if self.where else self.what

    def __str__(self) -> str:
        why = f"\n  why: {self.why}" if self.why else ""
        return self.head + why + (f"\n  next: {self.next}" if self.next else "")


def tell(error: TrainfleetError) -> int:
    """Prints the error to stderr. Returns the exit code of a process that ends with it."""
    sys.stdout.flush()  # in a pipe, earlier output must come first
    error.next = completed(error.next)
    print(f"error: {hide(visible(error))}", file=sys.stderr, flush=True)
    return error.exit_code


def telling(main: Callable[P, int]) -> Callable[P, int]:
    """Wraps a program's `main` so that it prints a TrainfleetError and returns its exit code."""

    @functools.wraps(main)
    def wrapped(*arguments: P.args, **words: P.kwargs) -> int:
        try:
            return main(*arguments, **words)
        except TrainfleetError as error:
            return tell(error)

    return wrapped


@dataclass(frozen=True, order=True)
class Problem:
    """One problem of the config: its place (`config.yaml:12`, `SET`, `NODES`), its key, and the
    correct form.
    """

    line: int
    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class ConfigError(TrainfleetError):
    """All problems of a config, in the order of its lines."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], *, next: str = "") -> None:
        self.problems = sorted(set(problems))
        more = [f"and {len(self.problems) - MOST:,} more"] if len(self.problems) > MOST else []
        super().__init__("\n".join([*map(str, self.problems[:MOST]), *more]), next=next)

    @classmethod
    def of(cls, name: str, message: str, *, next: str = "") -> ConfigError:
        """Makes the error about one key or variable. The name is the place too: no line of the file
        is to blame.
        """
        return cls([Problem(0, name, "", message)], next=next)


class InputError(TrainfleetError, ValueError):
    """Reports invalid text that was written elsewhere: `where` is its file and line, `key` the key
    in it.

    It is a ValueError too, so that readers can turn it into an error about the file's purpose.
    """

    def __init__(
        self, what: str, *, where: str = "", key: str = "", why: str = "", next: str = ""
    ) -> None:
        self.key = key
        super().__init__(what, where=where, why=why, next=next)

    @property
    def head(self) -> str:
        """The place, the key and the problem, in one line."""
        return ": ".join(filter(None, (self.where, self.key, self.what)))


class DataError(TrainfleetError):
    """A source, a tokenizer or a dataset is missing, broken or not the one that this config asks
    for.
    """


class NoSource(DataError):
    """An entry of data.sources, by its number from 0, names no readable file."""

    def __init__(self, error: DataError, entry: int) -> None:
        self.entry = entry
        super().__init__(error.what, where=error.where, why=error.why, next=error.next)

    def __reduce__(self) -> tuple[type[NoSource], tuple[DataError, int]]:
        return NoSource, (
            DataError(self.what, where=self.where, why=self.why, next=self.next),
            self.entry,
        )


class RunError(TrainfleetError):
    """A run folder or a checkpoint can't be read, written or continued."""


class BackendError(TrainfleetError):
    """A backend refused a job, or a node or process of it failed."""


class JobFailed(BackendError):
    """A job ended badly; its verdict is the message."""


class CloudError(BackendError):
    """AWS refuses a control request, or does not answer; `code` is AWS's, or the name of botocore's
    error.
    """

    def __init__(
        self, what: str, *, where: str = "", why: str = "", next: str = "", code: str = ""
    ) -> None:
        super().__init__(what, where=where, why=why, next=next)
        self.code = code


class NotAsked(CloudError):
    """AWS could not be asked at all: there are no credentials, or no connection. A plan continues
    without an account.
    """


class ImageError(TrainfleetError):
    """A container image can't be built, pushed or used."""


class S3Error(TrainfleetError, OSError):
    """S3 refuses a request, or does not answer for too long. Writers to a bucket or a disk catch
    both as OSError.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", next: str = "") -> None:
        super().__init__(what, where=where, why=why, next=next)
        self.errno, self.strerror, self.filename = errno.EIO, f"{what}: {why}", where
