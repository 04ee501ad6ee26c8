"""Node uplink: synchronizes a node's folders with S3 while a job runs, and downloads requests to
the node.

If the nodes share no disk, TRAINFLEET_BUCKET is the S3 prefix of runs/<name> and data/<name>. The
supervisor then starts `python -m trainfleet.storage.s3_sync_agent ...` next to its command. The
uplink first downloads the files that the command needs, and then polls every EVERY seconds. When
the supervisor exits for any reason, the uplink's stdin closes and it polls a last time. The engine,
the data loader and the heartbeat therefore use only local folders. A node needs one listing and
about three small writes every EVERY seconds.

The uplink never kills the command. While S3 is unreachable, the node's log reports that, and files
are uploaded later. A killed uplink is restarted and continues where it stopped
(storage/folder_sync.py).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from ..process.node_log import say
from ..run.run_folder import RUNS
from ..trust.errors import BackendError, S3Error, TrainfleetError, telling
from . import s3
from .folder_sync import ASKED, FolderSync

# environment variables: s3://bucket/prefix, and the run whose config the command reads
BUCKET = "TRAINFLEET_BUCKET"
RUN = "TRAINFLEET_RUN"
EVERY = 2.0  # seconds between two polls
SIGN = 5.0  # seconds between two heartbeats
TO_BEGIN = 600.0  # timeout in seconds to download the command's files
TO_END = 120.0  # timeout in seconds for the last poll, after the command has exited
# files that rank 0 needs to resume on an empty node
RESTORED = re.compile(r"results\.json|search\.json|metrics\.jsonl")
# Files that nodes do not upload. A `stop` file written on SIGTERM is only for this node's ranks, so
# a later attempt must not see it.
OTHERS = re.compile(
    r"stop|head\.json|heartbeats/dump|(?:config|given)\.yaml|(?:handle|request)\.json"
)
AUTHOR = "uplink"  # author of the uplink's lines in the node's log
# <address>/nodes/<i>: heartbeat object, which node i writes every SIGN seconds and removes when its
# job has ended
NODES = "nodes"


class UplinkProcess:
    """Uplink process of a node, restarted whenever it dies. Leaving the context waits for its last
    poll.
    """

    def __init__(self, log: Path) -> None:
        folders = dict.fromkeys((RUNS / os.environ[RUN], Path(*log.parent.parent.parts[-2:])))
        self.log, self.words = log, [str(log), *map(str, folders)]
        self.closing = threading.Event()

    def __enter__(self) -> None:
        """Starts the uplink and waits until the command's files have arrived.

        Raises:
            BackendError: the uplink exited before they arrived.
        """
        self.process = self._start("restore")
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise BackendError(
                "can't download the files that this node needs from S3",
                where=os.environ[BUCKET],
                why=f"the S3 uplink ended with exit code {self.process.wait()}",
                next="read the messages of the uplink above",
            )
        self.keeping = threading.Thread(target=self._keep, name="uplink", daemon=True)
        self.keeping.start()

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._close()
        self.keeping.join(2 * TO_END)

    def _start(self, how: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "trainfleet.storage.s3_sync_agent", how, *self.words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def _keep(self) -> None:
        while (code := self.process.wait()) and not self.closing.wait(1.0):
            say(self.log, f"the S3 uplink ended with exit code {code}; restarting it", AUTHOR)
            self.process = self._start("go on")
            if self.closing.is_set():
                self._close()

    def _close(self) -> None:
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()


def uplink_for(log: Path) -> AbstractContextManager[None]:
    """Returns a node's uplink if its job keeps its folders in S3, otherwise a null context."""
    return UplinkProcess(log) if BUCKET in os.environ else nullcontext()


@telling
def main(arguments: list[str]) -> int:
    """Runs the uplink with the arguments HOW LOG FOLDER..., and returns after the last poll.

    HOW is `restore` at the start of a job, or `go on` after a restart of the uplink.
    """
    how, log, *folders = arguments
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Only the supervisor ends this process.
    uplink = Uplink(
        Path(log),
        [
            FolderSync(Path(folder), f"{os.environ[BUCKET].rstrip('/')}/{folder}")
            for folder in folders
        ],
    )
    uplink.fetch(restore=how == "restore")
    with suppress(BrokenPipeError):
        print("ready", flush=True)
    ended = threading.Event()
    threading.Thread(target=await_end, args=(ended,), daemon=True).start()
    while not ended.is_set():
        uplink.look()
        ended.wait(EVERY)
    return 0 if uplink.end() else 1


def await_end(ended: threading.Event) -> None:
    """Sets `ended` when stdin closes."""
    sys.stdin.buffer.read()
    ended.set()


class Uplink:
    """Synchronizer of a node's folders with S3. The first one is the run folder."""

    def __init__(self, log: Path, folders: list[FolderSync]) -> None:
        self.log, self.folders = log, folders
        self.node = int(log.stem.rpartition("-")[2])
        self.sign = f"{folders[0].address}/{NODES}/{self.node}"
        self.signed, self.trouble = 0.0, ""

    def fetch(self, restore: bool) -> None:
        """Downloads requests. With `restore`, rank 0 also downloads the records that it needs to
        resume.

        Raises:
            S3Error: downloads still fail after TO_BEGIN seconds.
        """
        until = time.monotonic() + TO_BEGIN
        while True:
            try:
                self.folders[0].pull(is_asked, "asked/")
                if restore and self.node == 0:
                    self.folders[0].pull(lambda name: bool(RESTORED.fullmatch(name)))
                return
            except S3Error:
                if time.monotonic() > until:
                    raise
            time.sleep(EVERY)

    def look(self) -> bool:
        """Uploads new content and downloads requests. Returns whether that succeeded.

        Reports in the node's log when synchronization starts to fail and when it recovers.
        """
        try:
            for folder in self.folders:
                folder.push(is_node_s, is_obeyed)
            self.folders[0].pull(is_asked, "asked/")
            if time.monotonic() - self.signed > SIGN:
                s3.write(self.sign, b"")
                self.signed = time.monotonic()
        except (TrainfleetError, OSError) as error:
            if not self.trouble:
                say(
                    self.log,
                    f"can't update S3: {' '.join(str(error).split())}",
                    AUTHOR,
                )
            self.trouble = str(error)
            return False
        if self.trouble:
            say(self.log, "S3 is up to date again", AUTHOR)
        self.trouble = ""
        return True

    def end(self) -> bool:
        """Polls until all content is uploaded, then removes the node's heartbeat.

        Returns False after TO_END seconds without success.
        """
        until = time.monotonic() + TO_END
        while not self.look() or any(folder.waits(is_node_s) for folder in self.folders):
            if time.monotonic() > until:
                return False
            time.sleep(EVERY)
        with suppress(S3Error):
            s3.remove(self.sign)
        return True


def is_asked(name: str) -> bool:
    return bool(ASKED.fullmatch(name))


def is_node_s(name: str) -> bool:
    """Returns whether nodes upload this file."""
    return not OTHERS.fullmatch(name)


def is_obeyed(name: str) -> bool:
    """Returns whether a node removes this request after acting on it."""
    return name == "stop"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
