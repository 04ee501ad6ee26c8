"""Exceptions with user-facing messages.

    TrainfleetError         what failed, where, why, and the next command; exits with `exit_code`
    ├── ConfigError         all problems in config.yaml, SET and make variables (exit code 2)
    ├── InputError          invalid external input, with line and key (trust/untrusted_input.py)
    ├── DataError           a source, tokenizer or dataset can't be used
    │   ├── NoSource        a data.sources entry matches no readable file
    │   ├── BadTemplate     a chat template breaks a limit (data/chat.py)
    │   ├── BadText         a source contains an invalid record (data/bad_records.py)
    │   └── OtherField      a record lacks the field in data.text_field
    ├── RunError            a run folder or checkpoint can't be used
    │   ├── Broken          an incomplete or damaged checkpoint (checkpoints/marker.py)
    │   ├── CheckpointError another rank could not save or load its part (engine/checkpoint/checkpoint_group.py)
    │   ├── Fenced          another attempt has started (health/fence.py)
    │   └── LauncherGone    the run no longer has a launcher (launch/remote_launch.py)
    ├── BackendError        a backend, a node or one of its processes failed
    │   ├── JobFailed       a job failed; the message is its verdict
    │   ├── CloudError      AWS rejected a control request or did not respond (cloud/calls.py)
    │   │   └── NotAsked    AWS could not be reached: no credentials or no connection
    │   ├── S3Error         S3 rejected a request or did not respond in time; also an OSError
    │   ├── CutOff          this head lost its network, so another host must lead (watch/monitor.py)
    │   └── Missing         not all nodes of a job arrived in time (node/barrier.py)
    └── ImageError          a container image can't be built, pushed or used

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

MOST = 25  # maximum number of config problems to print


class TrainfleetError(Exception):
    """Base class of all user-facing errors. The message states what failed (`what`), where
    (`where`: file and line, host or rank), the cause (`why`), and the command to run next (`next`).
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", next: str = "") -> None:
        # A newline in a file name must not start a new line in the message.
        where = where.replace("\n", "\\n")
        self.what, self.where, self.why, self.next = what, where, why, next
        super().__init__(what)

    @property
    def head(self) -> str:
        """Returns the location and the problem on one line."""
        return f"{self.where}: {self.what}" if self.where else self.what

    @property
    def line(self) -> str:
        """Returns the location, the problem, its cause and the remedy on one line."""
        why = f": {self.why.rstrip('.')}" if self.why else ""
        return f"{self.head}{why}{f'; {self.next}' if self.next else ''}"

    def __str__(self) -> str:
        why = f"\n  why: {self.why}" if self.why else ""
        return self.head + why + (f"\n  next: {self.next}" if self.next else "")


def tell(error: TrainfleetError) -> int:
    """Prints an error to stderr, and returns the process's exit code."""
    sys.stdout.flush()  # keeps stdout and stderr in order when both go to the same pipe
    error.next = completed(error.next)
    print(f"error: {hide(visible(error))}", file=sys.stderr, flush=True)
    return error.exit_code


def telling(main: Callable[P, int]) -> Callable[P, int]:
    """Decorates a program's `main` to print any TrainfleetError and return its exit code."""

    @functools.wraps(main)
    def wrapped(*arguments: P.args, **words: P.kwargs) -> int:
        try:
            return main(*arguments, **words)
        except TrainfleetError as error:
            return tell(error)

    return wrapped


@dataclass(frozen=True, order=True)
class Problem:
    """Problem in the config, with its key and the accepted form.

    `where` is the location, such as `config.yaml:12`, `SET` or `NODES`.
    """

    line: int
    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class ConfigError(TrainfleetError):
    """All problems found in a config, sorted by line."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], *, next: str = "") -> None:
        self.problems = sorted(set(problems))
        more = [f"and {len(self.problems) - MOST:,} more"] if len(self.problems) > MOST else []
        super().__init__("\n".join([*map(str, self.problems[:MOST]), *more]), next=next)

    @classmethod
    def of(cls, name: str, message: str, *, next: str = "") -> ConfigError:
        """Returns an error for a single key or variable that is not set in the config file."""
        return cls([Problem(0, name, "", message)], next=next)


class InputError(TrainfleetError, ValueError):
    """Invalid external input. `where` is its file and line, `key` the invalid key.

    Also a ValueError, so that a reader can catch it and raise an error specific to its file format.
    """

    def __init__(
        self, what: str, *, where: str = "", key: str = "", why: str = "", next: str = ""
    ) -> None:
        self.key = key
        super().__init__(what, where=where, why=why, next=next)

    @property
    def head(self) -> str:
        """Returns the location, the key and the problem on one line."""
        return ": ".join(filter(None, (self.where, self.key, self.what)))


class DataError(TrainfleetError):
    """A source, tokenizer or dataset is missing, broken, or inconsistent with the config."""


class NoSource(DataError):
    """A data.sources entry matches no readable file. `entry` is its zero-based index."""

    def __init__(self, error: DataError, entry: int) -> None:
        self.entry = entry
        super().__init__(error.what, where=error.where, why=error.why, next=error.next)

    def __reduce__(self) -> tuple[type[NoSource], tuple[DataError, int]]:
        return NoSource, (
            DataError(self.what, where=self.where, why=self.why, next=self.next),
            self.entry,
        )


class RunError(TrainfleetError):
    """A run folder or checkpoint can't be read, written or resumed."""


class BackendError(TrainfleetError):
    """A backend rejected a job, or one of its nodes or processes failed."""


class JobFailed(BackendError):
    """A job failed. The message is the job's verdict."""


class CloudError(BackendError):
    """AWS rejected a control request or did not respond.

    `code` is the AWS error code, or the name of the botocore exception.
    """

    def __init__(
        self, what: str, *, where: str = "", why: str = "", next: str = "", code: str = ""
    ) -> None:
        super().__init__(what, where=where, why=why, next=next)
        self.code = code


class NotAsked(CloudError):
    """AWS could not be reached, because there are no credentials or no connection.

    Planning continues without AWS.
    """


class ImageError(TrainfleetError):
    """A container image can't be built, pushed or used."""


class S3Error(BackendError, OSError):
    """S3 rejected a request or did not respond in time.

    Also an OSError, so that callers can treat buckets and disks alike.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", next: str = "") -> None:
        super().__init__(what, where=where, why=why, next=next)
        self.errno, self.strerror, self.filename = errno.EIO, f"{what}: {why}", where
