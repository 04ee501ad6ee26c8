"""Fencing: only the newest attempt of a run may continue.

On any host, ranks of earlier attempts detect the newer one and exit.

heartbeats/attempts/<n>         record of attempt n, with its order: the number of the launcher's
                                attempt that n belongs to. Written by the process that claims n
                                (run/claims.py)
heartbeats/attempts/<n>.taken   exists once ranks have started as attempt n
heartbeats/newest               order and number of the newest attempt, for hosts that cache
                                directory listings (run/claims.py)

The launcher begins an attempt and passes its number to the ranks as TRAINFLEET_ATTEMPT. This
number is their order. If a scheduler restarts the ranks, as in a Slurm requeue or an AWS
Batch retry, they get the same order again. Rank 0 therefore checks whether its order was already
taken. If so, it claims the next number, and the ranks of the previous start exit.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..run.claims import claim, rewrite
from ..run.run_folder import make_folder
from ..trust import untrusted_input
from ..trust.errors import InputError, RunError
from ..trust.validation import Range, fit

BEATS = "heartbeats"
FOLDER = "attempts"
NEWEST = "newest"
# seconds for ranks to exit; one rank per node polls once a second (health/heartbeat.py)
TO_LEAVE = 3.0
VARIABLE = "TRAINFLEET_ATTEMPT"  # environment variable with the order
MOST = 4 * untrusted_input.KIBIBYTE  # maximum size of an attempt's file in bytes
NUMBER = re.compile("[0-9]{1,9}")
Order = Annotated[int, Range(0, 10**9)]
# environment variable with the scheduler's restart count, if available
AGAIN = "TRAINFLEET_AGAIN"


@dataclass(frozen=True, order=True)
class Attempt:
    """Attempt of a run: the launcher's order that it belongs to, and its own number.

    Sorts by order, then by number.
    """

    order: int
    number: int


class Fenced(RunError):
    """Raised in an attempt that a newer one has replaced."""

    exit_code = 75


def begin(folder: Path) -> int:
    """Begins a new attempt on behalf of the launcher and returns its number.

    Older ranks exit within two heartbeats (heartbeat.EVERY).
    """
    before = current(folder)
    number = _claim(folder, before.number + 1, None)
    # Ranks can no longer enter orders older than the previous attempt's, so remove their files.
    for path in _folder(folder).iterdir():
        if NUMBER.fullmatch(path.stem) and int(path.stem) < before.order:
            path.unlink(missing_ok=True)
    for path in (folder / BEATS).glob("[!.]*-*"):
        path.unlink(missing_ok=True)
    return number


def enter(folder: Path, order: int, least: int = 0) -> int:
    """Starts an attempt under this order and returns its number.

    Rank 0 calls this before the process group exists. If the order was started before, waits until
    the ranks of that start have had time to exit.

    `least` is the number of restarts of this order that the scheduler reports. It is the only way
    to tell the starts apart if each one finds an empty folder, for example on a node's local disk.

    Raises:
        Fenced: the launcher has begun a newer attempt.
    """
    newest = current(folder)
    if newest.order > order:
        raise Fenced(
            "a newer attempt replaced this one before it started",
            where=platform.node(),
            why=f"attempt {newest.number} has already started; this attempt had order {order}",
            next="make logs",
        )
    if newest.number == order and not least and claim(_folder(folder) / f"{order}.taken", ""):
        return order
    number = _claim(folder, max(newest.number + 1, order + least), order)
    time.sleep(TO_LEAVE)
    return number


def current(folder: Path) -> Attempt:
    """Returns the newest attempt, or Attempt(0, 0) before the first one.

    Costs one directory listing and reads of a few small files.
    """
    newest = _newest(folder)
    with suppress(OSError):
        names = os.listdir(folder / BEATS / FOLDER)  # noqa: PTH208 - only names are needed
        if found := [_read(folder, int(name)) for name in names if NUMBER.fullmatch(name)]:
            return max(newest, *found)
    return newest


def _newest(folder: Path) -> Attempt:
    """Returns the attempt recorded in heartbeats/newest, or Attempt(0, 0) before the
    first claim.
    """
    with suppress(OSError, InputError):
        words = untrusted_input.read_text(folder / BEATS / NEWEST, MOST).split()
        if len(words) == 2 and all(map(NUMBER.fullmatch, words)):
            return Attempt(int(words[0]), int(words[1]))
    return Attempt(0, 0)


def _read(folder: Path, number: int) -> Attempt:
    try:
        record = untrusted_input.read_json(folder / BEATS / FOLDER / str(number), MOST)
        return Attempt(fit(dict[str, Order], record)["order"], number)
    except (
        OSError,
        InputError,
        KeyError,
    ):  # A later attempt removed the file, or it is not an attempt's file.
        return Attempt(0, number)


def _claim(folder: Path, number: int, order: int | None) -> int:
    """Claims and returns the first free number, starting at `number`.

    Without an `order`, the number is also the order.
    """
    while not claim(
        _folder(folder) / str(number), json.dumps({"order": number if order is None else order})
    ):
        number += 1
    with suppress(OSError):  # the claim is valid without this file
        rewrite(folder / BEATS / NEWEST, f"{number if order is None else order} {number}")
    return number


def _folder(folder: Path) -> Path:
    make_folder(path := folder / BEATS / FOLDER)
    return path
