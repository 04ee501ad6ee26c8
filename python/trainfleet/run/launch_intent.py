"""The intent of a launch: who launches a run, where, since when and by which command, in
intent.json of the run folder.

It is there from the command until the run's launcher takes its lease (health/lease.py), so that a
stop, a clean and a second launch see a run that is about to begin. Who left it touches it every
PACE seconds and looks for a request to stop (launch/intent_watch.py).
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from ..process import file_systems, host_marker
from ..process.processes import identity
from ..trust import untrusted_input
from ..trust.errors import InputError
from ..trust.validation import Moment, Name, fit
from . import contents
from .run_folder import Run, unwritable

FILE = contents.INTENT.name
PACE = 2.0  # seconds
# seconds of looking at a launch on another machine without a touch, after which it counts as gone
QUIET = 30.0
LARGEST = 1 << 14  # bytes
MOST = 1 << 22  # the highest pid (/proc/sys/kernel/pid_max)


@dataclass(frozen=True)
class Intent:
    """`process` is the identity of the command's process, which tells a pid that is used again, and
    a reboot.
    """

    user: Name
    host: Name
    terminal: Name
    process: Name
    command: Name
    since: Moment
    token: Name

    def __str__(self) -> str:
        where = f"in {self.terminal} on {self.host}" if self.terminal else f"on {self.host}"
        return f"{self.command}, typed by {self.user} {where} (process {self.pid})"

    @property
    def pid(self) -> int:
        """Of the command's process; 0 where the text is none."""
        return untrusted_input.whole(self.process.partition(" ")[0], MOST) or 0

    @property
    def text(self) -> str:
        """As it is written."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True)
class DeclaredIntent:
    """An intent in a run folder, when it was touched last, by some clock, and whether the run was
    asked to stop meanwhile.
    """

    intent: Intent
    touched: float
    asked: bool = False

    @property
    def goes_on(self) -> bool | None:
        """Whether the command's process lives; None where this machine can't tell: touches show
        it.
        """
        if self.intent.host != platform.node() or _boot(self.intent.process) != _boot(
            identity(os.getpid())
        ):
            return None
        return identity(self.intent.pid) == self.intent.process


def _boot(process: str) -> str:
    return process.rpartition(" ")[2]


def mine(command: str) -> Intent:
    """The intent of this process."""
    terminal = os.ttyname(0).removeprefix("/dev/") if os.isatty(0) else ""
    process = identity(os.getpid())
    return Intent(
        host_marker.user(),
        platform.node(),
        terminal,
        process,
        command,
        time.time(),
        secrets.token_hex(8),
    )


def parse(text: str) -> Intent | None:
    """The intent that a text is; None where it is none, which a command that was killed as it wrote
    can leave.
    """
    try:
        intent = fit(Intent, untrusted_input.parse_line(text.encode(), ""))
    except InputError:
        return None
    return intent if intent.pid else None


def read(run: Run) -> DeclaredIntent | None:
    """The intent in a run folder that this machine sees; None where there is none."""
    path = contents.INTENT.at(run.folder)
    try:
        intent, touched = parse(untrusted_input.read_text(path, LARGEST)), path.stat().st_mtime
    except (FileNotFoundError, InputError):
        return None
    return DeclaredIntent(intent, touched, run.is_asked_to_stop()) if intent else None


def leave(run: Run, intent: Intent, stale: str = "") -> DeclaredIntent | None:
    """Leaves an intent in a run folder that this machine sees, and withdraws what requests to stop
    are older.

    It takes the place of the intent with the token `stale`. Where there is another nothing is done,
    and that is returned.
    """
    found = read(run)
    if found and found.intent.token != stale:
        return found
    path, part = contents.INTENT.at(run.folder), run.folder / f".{FILE}.{intent.token}"
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        run.stop.unlink(missing_ok=True)
        with open(part, "x", encoding="utf-8", opener=untrusted_input.opener) as file:
            file.write(intent.text)
        if found:
            path.unlink(missing_ok=True)
        file_systems.name_once(part, path)
    except FileExistsError:
        return read(run)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):
            part.unlink()
    return None


def touch(run: Run) -> None:
    """Says that who left the intent is still at it."""
    with suppress(OSError):
        os.utime(contents.INTENT.at(run.folder))


def withdraw(run: Run, intent: Intent, begun: bool) -> None:
    """Removes this intent; where the run has not begun also the request to stop, and a run folder
    that has nothing else in it.
    """
    found = read(run)
    with suppress(OSError):
        if found and found.intent.token == intent.token:
            contents.INTENT.at(run.folder).unlink()
            if not begun:
                run.stop.unlink(missing_ok=True)
        run.folder.rmdir()
