"""Fencing: only the newest attempt of a run may continue; ranks of earlier attempts, on any host,
notice that and exit.

heartbeats/attempts/<n>         attempt n: {order}, the number of the launcher's attempt that it
                                belongs to. The process that claims the
                                number creates the file (run/claims.py)
heartbeats/attempts/<n>.taken   ranks have started as attempt n
heartbeats/newest               order and number of the newest attempt, for hosts that cache a
                                listing (run/claims.py)

The launcher begins an attempt and passes its number to the ranks as TRAINFLEET_ATTEMPT: their
order. A scheduler that restarts them (a Slurm requeue, the next attempt of an AWS Batch job) passes
the same order again. So rank 0 enters an attempt: if its order was taken before, it claims the next
number, and the ranks of the previous start exit.
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
BEFORE = "attempt"  # file of format 1, with only the number
TO_LEAVE = 3.0  # seconds: ranks check once a second, one for its entire node (health/heartbeat.py)
VARIABLE = "TRAINFLEET_ATTEMPT"  # variable with the order
MOST = 4 * untrusted_input.KIBIBYTE  # bytes of an attempt's file
NUMBER = re.compile("[0-9]{1,9}")
Order = Annotated[int, Range(0, 10**9)]
AGAIN = "TRAINFLEET_AGAIN"  # variable with the scheduler's count of restarts, if it has one


@dataclass(frozen=True, order=True)
class Attempt:
    """An attempt: the launcher's order that it belongs to, and its own number. The later order is
    newer, then the number.
    """

    order: int
    number: int


class Fenced(RunError):
    """A newer attempt has begun since the launcher ordered this one."""

    exit_code = 75


def begin(folder: Path) -> int:
    """Begins a new attempt of the launcher and returns its number. Older ranks exit within two
    heartbeats (heartbeat.EVERY).
    """
    before = current(folder)
    number = _claim(folder, before.number + 1, None)
    for path in _folder(
        folder
    ).iterdir():  # files of the order before the last: a rank can't enter it any more
        if NUMBER.fullmatch(path.stem) and int(path.stem) < before.order:
            path.unlink(missing_ok=True)
    for path in (folder / BEATS).glob("*-*"):  # beats of nodes; of ranks, in format 1
        path.unlink(missing_ok=True)
    return number


def enter(folder: Path, order: int, least: int = 0) -> int:
    """Returns the number of the attempt that starts now under this order. Rank 0 calls it before
    the ranks meet.

    If the order was started before, it returns once the ranks of that start have had time to exit.

    `least`: how often the scheduler reports that it restarted this order. If each start finds an
    empty folder, like on a node's own disk, only this tells the starts apart.

    Raises:
        Fenced: the launcher has begun another attempt since.
    """
    newest = current(folder)
    if newest.order > order:
        why = f"attempt {newest.number} has begun; this one had order {order}"
        raise Fenced(
            "this attempt ended before it began", where=platform.node(), why=why, next="make logs"
        )
    if newest.number == order and not least and claim(_folder(folder) / f"{order}.taken", ""):
        return order
    number = _claim(folder, max(newest.number + 1, order + least), order)
    time.sleep(TO_LEAVE)
    return number


def current(folder: Path) -> Attempt:
    """Returns the newest attempt; 0 before the first. Costs one listing and reads a few small
    files.
    """
    newest = _newest(folder)
    with suppress(OSError):
        names = os.listdir(folder / BEATS / FOLDER)  # noqa: PTH208 - names alone
        if found := [_read(folder, int(name)) for name in names if NUMBER.fullmatch(name)]:
            return max(newest, *found)
    with suppress(OSError, InputError):
        if NUMBER.fullmatch(
            text := untrusted_input.read_text(folder / BEATS / BEFORE, MOST).strip()
        ):
            return max(newest, Attempt(int(text), int(text)))
    return newest


def _newest(folder: Path) -> Attempt:
    """Returns the attempt that was claimed last, according to its claimer; 0 if no attempt was
    claimed.
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
    ):  # later attempts removed it, or it is not an attempt's file
        return Attempt(0, number)


def _claim(folder: Path, number: int, order: int | None) -> int:
    """Claims the first free number from `number` on and returns it. With `order` None, the number
    is also the order.
    """
    while not claim(
        _folder(folder) / str(number), json.dumps({"order": number if order is None else order})
    ):
        number += 1
    with suppress(OSError):  # the claim counts
        rewrite(folder / BEATS / NEWEST, f"{number if order is None else order} {number}")
    return number


def _folder(folder: Path) -> Path:
    make_folder(path := folder / BEATS / FOLDER)
    return path
