"""Standby host: `python -m trainfleet.watch.standby RUN_FOLDER COMMAND...` replaces a launcher that
dies.

The launcher is a command that can resume a run (`make train`), so a takeover reruns that command.
Until then, the standby writes heartbeats (standby.json in health/lease.py). If its heartbeats stop,
the launcher appoints another one. If there are two standbys, the one appointed later remains.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ..health.lease import (
    APPOINTED,
    FILE,
    PATIENCE,
    SUCCEEDS,
    TO_BEGIN,
    VACATED,
    Holder,
    Lease,
    Standby,
    newest_holder,
    newest_standby,
    write_standby,
)
from ..process.processes import die_with_parent
from ..run.run_folder import Run, make_folder
from ..trust import untrusted_input
from ..trust.errors import TrainfleetError
from ..trust.safe_output import install

LOOK_EVERY = 1.0
TYPE_AGAIN = (5.0, 10.0, 30.0)  # seconds before the second, third and later takeover attempts
HOSTS_MAY_RETURN = 900.0  # seconds for which a takeover is retried
UNHEARD = f"the launcher has been silent for {PATIENCE:.0f} s"
TRIES = 20  # maximum number of takeover attempts by all hosts together
STOPPED = 130  # exit code of a stopped command


def main(arguments: list[str]) -> int:
    die_with_parent()
    folder, *command = arguments
    make_folder(Path(folder))
    return StandbyWatch(Path(folder), command).keep()


class StandbyWatch:
    """Standby that replaces one run's launcher if the launcher dies."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        self.command = command
        before, standby = newest_holder(folder), newest_standby(folder)
        number, term = os.environ.get(APPOINTED, "").split() or ("", "")
        self.number = int(number or (standby.number + 1 if standby else 1))
        self.term = int(term or (before.term if before else 0))  # the previous launcher's term
        self.begun = term == "" and before is not None and before.code is None

    def keep(self) -> int:
        """Stands by, and takes over whenever the launcher fails. Returns the exit code of the
        launcher that ended the run, or 0.
        """
        while silent := self.await_vacancy():
            gone = f"{silent.host} no longer leads the run" if silent.time == VACATED else UNHEARD
            print(f"{gone}; this host takes over")
            if (code := self.take_over(silent)) is not None:
                return code
        return 0

    def await_vacancy(self) -> Holder | None:
        """Waits until the run's launcher releases its lease or stops renewing it. Returns the last
        renewal, or None if the run no longer needs this standby.

        Counts polls instead of comparing clocks. If the file system stalls for a minute, only one
        poll passes, so the launcher does not count as dead.
        """
        silent, last = 0.0, newest_holder(self.folder)
        self.begun |= last is not None and last.term > self.term
        while self.beat():
            if not self.begun:
                if silent >= TO_BEGIN:
                    words = f"no launcher started within {TO_BEGIN:.0f} s; this standby exits"
                    print(words)
                    return None
            elif last and last.code is not None:
                return None
            elif last and (last.time == VACATED or silent >= PATIENCE):
                return last
            time.sleep(LOOK_EVERY)
            newest, before = self._look() or last, last
            silent = 0.0 if newest != before else silent + LOOK_EVERY
            self.begun |= silent == 0.0
            last = newest
        print("another host is the standby now")
        return None

    def _look(self) -> Holder | None:
        """Reads the launcher's lease from the file server. Opens the file first, because this
        client may have cached that the file does not exist.
        """
        with suppress(OSError):
            os.close(
                untrusted_input.opener(
                    str(self.folder / FILE), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
                )
            )
        return newest_holder(self.folder)

    def beat(self) -> bool:
        """Writes this standby's heartbeat. Returns False if another standby was appointed later."""
        mine = Standby(platform.node(), os.getpid(), self.number, time.time())
        newest = newest_standby(self.folder)
        if (
            newest
            and newest.number >= self.number
            and (newest.host, newest.pid) != (mine.host, mine.pid)
        ):
            return False
        with suppress(OSError):  # The file system may be temporarily unavailable.
            write_standby(self.folder, mine)
        return True

    def take_over(self, silent: Holder) -> int | None:
        """Starts a launcher that takes over. Returns its exit code if the run has concluded, or
        None if another launcher now leads the run.

        If the launcher fails to start, for example because hosts are missing, retries for
        HOSTS_MAY_RETURN seconds.
        """
        deadline, tries = time.monotonic() + HOSTS_MAY_RETURN, 0
        while True:
            code = self.launch(silent)
            newest = newest_holder(self.folder) or silent
            if newest.code is not None and newest.term > silent.term:
                return code
            if newest.renewal != silent.renewal and newest.time != VACATED:
                self.begun = True
                return None
            # The ranks finished without a launcher, so the new launcher did not take the lease.
            found_finished = code == 0
            if found_finished or time.monotonic() > deadline or newest.tries >= TRIES:
                return self.conclude(code)
            pause = TYPE_AGAIN[min(tries, len(TYPE_AGAIN) - 1)]
            print(f"this host could not take over (exit code {code}); retrying in {pause:.0f} s")
            if not self.pause(pause):
                return None
            # Honor a stop request only after the first attempt, which checks for running ranks.
            if Run(self.folder).is_asked_to_stop():
                return self.conclude(STOPPED)
            silent, tries = newest, tries + 1

    def launch(self, silent: Holder) -> int:
        """Runs a launcher that replaces the silent one, and returns its exit code. This host
        remains the standby until the new launcher holds the lease.
        """
        environment = os.environ | {SUCCEEDS: silent.renewal}
        with subprocess.Popen(self.command, env=environment, preexec_fn=die_with_parent) as process:
            while (code := process.poll()) is None:
                newest = newest_holder(self.folder)
                if newest is None or newest.renewal == silent.renewal:
                    self.beat()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_EVERY)
        return code if code >= 0 else 128 - code

    def pause(self, seconds: float) -> bool:
        """Waits until the time has passed or a stop is requested. Returns False if another standby
        was appointed in the meantime.
        """
        until = time.monotonic() + seconds
        while (
            (mine := self.beat())
            and time.monotonic() < until
            and not Run(self.folder).is_asked_to_stop()
        ):
            time.sleep(min(LOOK_EVERY, seconds))
        return mine

    def conclude(self, code: int) -> int:
        """Writes the exit code to the lease, where all followers of the run read it. Returns the
        exit code.
        """
        with suppress(TrainfleetError), Lease(self.folder) as lease:
            lease.code = code
        return code


if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
