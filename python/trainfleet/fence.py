"""Which attempt of a run may run now: the ranks of all earlier ones, wherever they still are, see that they are over and leave.

heartbeats/attempts/<n>         attempt n, made by whoever claimed it: {order}, the number of the launcher's attempt that it is
                                part of. It is linked into place, which is atomic, also over NFS, and fails where it is there
heartbeats/attempts/<n>.taken   ranks have started as attempt n

The launcher begins an attempt, and its number reaches the ranks as TRAINFLEET_ATTEMPT: their order. An engine that starts them
again by itself (a Slurm requeue, the next attempt of an AWS Batch job) gives them the same order once more. So rank 0 enters an
attempt: where its order was taken before, it claims the next number, and the ranks that were there before it leave.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from . import door
from .errors import InputError, RunError
from .runs import make_folder, unwritable
from .shapes import Range, fit

BEATS = "heartbeats"
FOLDER = "attempts"
BEFORE = "attempt"  # of format 1: the number alone
TO_LEAVE = 3.0  # seconds: ranks look once a second, and one of them for all of their node (heartbeat.py)
VARIABLE = "TRAINFLEET_ATTEMPT"  # the order
MOST = 4 * door.KIBIBYTE  # of the file of an attempt
NUMBER = re.compile("[0-9]{1,9}")
Order = Annotated[int, Range(0, 10**9)]
AGAIN = "TRAINFLEET_AGAIN"  # how often an engine has started it before, where it says so


@dataclass(frozen=True, order=True)
class Attempt:
    """An attempt: that of the launcher's which it carries out, and its own number. The later order is newer, then the number."""

    order: int
    number: int


class Fenced(RunError):
    """Another attempt has begun since this one was ordered."""

    exit_code = 75


def begin(folder: Path) -> int:
    """The number of a new attempt of the launcher's. Older ranks end themselves within two beats (heartbeat.EVERY)."""
    before = current(folder)
    number = _claim(folder, before.number + 1, None)
    for path in _folder(folder).iterdir():  # of the order before the last: nobody can be about to enter it
        if NUMBER.fullmatch(path.stem) and int(path.stem) < before.order:
            path.unlink(missing_ok=True)
    for path in (folder / BEATS).glob("*-*"):  # beats of nodes; of ranks, in format 1
        path.unlink(missing_ok=True)
    return number


def enter(folder: Path, order: int, least: int = 0) -> int:
    """The number of the attempt that starts now by this order; called by rank 0, before the ranks meet.

    Where the order was started before, this returns once the ranks of then have had the time to leave.

    `least`: how often the engine says that it has started this order before. On a folder that every start finds empty, as a node
    of its own disk has it, that alone tells the starts apart.

    Raises:
        Fenced: the launcher has begun another attempt since.
    """
    newest = current(folder)
    if newest.order > order:
        why = f"attempt {newest.number} has begun, this one was ordered as {order}"
        raise Fenced("this attempt is over before it began", where=platform.node(), why=why, next="make logs")
    if newest.number == order and not least and _made(_folder(folder) / f"{order}.taken", ""):
        return order
    number = _claim(folder, max(newest.number + 1, order + least), order)
    time.sleep(TO_LEAVE)
    return number


def current(folder: Path) -> Attempt:
    """The newest attempt; 0 before the first. Costs the listing of a folder of a few small files, and their reading."""
    with suppress(OSError):
        names = os.listdir(folder / BEATS / FOLDER)  # noqa: PTH208 - names alone
        if found := [_read(folder, int(name)) for name in names if NUMBER.fullmatch(name)]:
            return max(found)
    with suppress(OSError, InputError):
        if NUMBER.fullmatch(text := door.read_text(folder / BEATS / BEFORE, MOST).strip()):
            return Attempt(int(text), int(text))
    return Attempt(0, 0)


def _read(folder: Path, number: int) -> Attempt:
    try:
        record = door.read_json(folder / BEATS / FOLDER / str(number), MOST)
        return Attempt(fit(dict[str, Order], record)["order"], number)
    except (OSError, InputError, KeyError):  # others have followed it, and it was removed; or it is none
        return Attempt(0, number)


def _claim(folder: Path, number: int, order: int | None) -> int:
    """The first number from `number` on that nobody has claimed; `order` None: an order of its own."""
    while not _made(_folder(folder) / str(number), json.dumps({"order": number if order is None else order})):
        number += 1
    return number


def _folder(folder: Path) -> Path:
    make_folder(path := folder / BEATS / FOLDER)
    return path


def _made(path: Path, text: str) -> bool:
    """Whether this call has made the file, whole; False where it was there."""
    part = path.with_name(f".{secrets.token_hex(8)}")
    try:
        part.write_text(text, encoding="utf-8")
        os.link(part, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        part.unlink(missing_ok=True)
    return True
