"""Defines the errors that users may see, as one class hierarchy.

    TrainfleetError         a message with what, where, why and the next command; its exit code is
                            `exit_code`
    ├── ConfigError         all problems of config.yaml, SET and make variables (exit code 2)
    ├── InputError          invalid external text, with its line and key (trust/untrusted_input.py)
    ├── DataError           a problem with a source, a tokenizer or a dataset
    │   ├── NoSource        an entry of data.sources names no readable file
    │   ├── BadText         a source has an invalid record (data/bad_records.py)
    │   └── OtherField      a record has no text in the field data.text_field
    ├── RunError            a problem with a run folder or a checkpoint
    │   ├── Broken          an incomplete or damaged checkpoint (checkpoints/marker.py)
    │   ├── CheckpointError another rank could not save or load its part (engine/checkpoint/checkpoint_group.py)
    │   ├── Fenced          another attempt has begun (health/fence.py)
    │   └── LauncherGone    the run no longer has a launcher (launch/remote_launch.py)
    ├── BackendError        a problem with a backend, a node or its processes
    │   ├── JobFailed       a job failed; the message is its verdict
    │   ├── CloudError      AWS refused a control request, or did not answer (cloud/calls.py)
    │   │   └── NotAsked    AWS could not be contacted: no credentials, or no connection
    │   ├── S3Error         S3 refused a request, or did not answer in time; also an OSError
    │   ├── CutOff          this head lost its network; another host must lead (watch/monitor.py)
    │   └── Missing         not all nodes of a job arrived in time (node/barrier.py)
    └── ImageError          an image can't be built, pushed or used

Any other exception is a bug in trainfleet, and its traceback is printed.
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

MOST = 25  # maximum problems of a config to print


class TrainfleetError(Exception):
    """An error with a message for the user: `what` happened, `where` (file:line, host, rank) and
    `why`.

    `next` is the command to type next.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", next: str = "") -> None:
        # A newline in a file name must not start a new line of the message.
        where = where.replace("\n", "\\n")
        self.what, self.where, self.why, self.next = what, where, why, next
        super().__init__(what)

    @property
    def head(self) -> str:
        """Returns the place and the problem in one line."""
        return f"{self.where}: {self.what}" if self.where else self.what

    def __str__(self) -> str:
        why = f"\n  why: {self.why}" if self.why else ""
        return self.head + why + (f"\n  next: {self.next}" if self.next else "")


def tell(error: TrainfleetError) -> int:
    """Prints the error to stderr. Returns the exit code for the process."""
    sys.stdout.flush()  # keeps the order of output if both streams go to one pipe
    error.next = completed(error.next)
    print(f"error: {hide(visible(error))}", file=sys.stderr, flush=True)
    return error.exit_code


def telling(main: Callable[P, int]) -> Callable[P, int]:
    """Wraps a program's `main`, so that a TrainfleetError is printed and becomes its exit code."""

    @functools.wraps(main)
    def wrapped(*arguments: P.args, **words: P.kwargs) -> int:
        try:
            return main(*arguments, **words)
        except TrainfleetError as error:
            return tell(error)

    return wrapped


@dataclass(frozen=True, order=True)
class Problem:
    """A problem of the config, with its key and the correct form.

    `where` is its place, such as `config.yaml:12`, `SET` or `NODES`.
    """

    line: int
    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class ConfigError(TrainfleetError):
    """All problems of a config, ordered by line."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], *, next: str = "") -> None:
        self.problems = sorted(set(problems))
        more = [f"and {len(self.problems) - MOST:,} more"] if len(self.problems) > MOST else []
        super().__init__("\n".join([*map(str, self.problems[:MOST]), *more]), next=next)

    @classmethod
    def of(cls, name: str, message: str, *, next: str = "") -> ConfigError:
        """Returns the error about one key or variable that is not on a line of the config file."""
        return cls([Problem(0, name, "", message)], next=next)


class InputError(TrainfleetError, ValueError):
    """Invalid external text. `where` is its file and line, and `key` is the invalid key.

    It is also a ValueError, so readers can convert it to an error about the purpose of the file.
    """

    def __init__(
        self, what: str, *, where: str = "", key: str = "", why: str = "", next: str = ""
    ) -> None:
        self.key = key
        super().__init__(what, where=where, why=why, next=next)

    @property
    def head(self) -> str:
        """Returns the place, the key and the problem in one line."""
        return ": ".join(filter(None, (self.where, self.key, self.what)))


class DataError(TrainfleetError):
    """A source, a tokenizer or a dataset is missing, broken, or does not match the config."""


class NoSource(DataError):
    """An entry of data.sources names no readable file. `entry` is its index, from 0."""

    def __init__(self, error: DataError, entry: int) -> None:
        self.entry = entry
        super().__init__(error.what, where=error.where, why=error.why, next=error.next)

    def __reduce__(self) -> tuple[type[NoSource], tuple[DataError, int]]:
        return NoSource, (
            DataError(self.what, where=self.where, why=self.why, next=self.next),
            self.entry,
        )


class RunError(TrainfleetError):
    """A run folder or a checkpoint can't be read, written or resumed."""


class BackendError(TrainfleetError):
    """A backend refused a job, or a node or process of the backend failed."""


class JobFailed(BackendError):
    """A job failed. The message is its verdict."""


class CloudError(BackendError):
    """AWS refused a control request or did not answer.

    `code` is AWS's error code, or the name of botocore's exception.
    """

    def __init__(
        self, what: str, *, where: str = "", why: str = "", next: str = "", code: str = ""
    ) -> None:
        super().__init__(what, where=where, why=why, next=next)
        self.code = code


class NotAsked(CloudError):
    """AWS could not be contacted, because credentials or the connection are missing.

    Plans continue without AWS.
    """


class ImageError(TrainfleetError):
    """A container image can't be built, pushed or used."""


class S3Error(BackendError, OSError):
    """S3 refused a request, or did not answer in time.

    It is also an OSError, so writers handle buckets and disks in the same way.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", next: str = "") -> None:
        super().__init__(what, where=where, why=why, next=next)
        self.errno, self.strerror, self.filename = errno.EIO, f"{what}: {why}", where
