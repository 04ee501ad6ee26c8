"""A node's uplink: while a job runs, what the node writes in its folders goes to S3, and what is asked of it comes from there.

Where nodes share no disk, TRAINFLEET_BUCKET names the place in S3 below which runs/<name> and data/<name> are for all machines.
The supervisor then has a `python -m trainfleet.uplink ...` beside its command. It first brings what the command needs, then looks
every EVERY seconds, and once more when its stdin ends: when the supervisor ends, however it does. So engine, data and heartbeat
know of their local folder alone. A node costs S3 a listing and about three small writes every EVERY seconds.

Nothing here ends the command: when S3 is away, the node's log says so, and what waits goes when it is back. An uplink that is
killed is started again, and goes on where it was (link.py).
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

from . import s3
from .errors import BackendError, S3Error, TrainfleetError, telling
from .link import ASKED, Link
from .runs import RUNS

BUCKET, RUN = "TRAINFLEET_BUCKET", "TRAINFLEET_RUN"  # s3://bucket/prefix, and whose config the command reads
EVERY = 2.0  # seconds between two looks
SIGN = 5.0  # seconds between two signs that this node is there
TO_BEGIN = 600.0  # seconds that S3 gets to give what the command needs
TO_END = 120.0  # seconds that the last look gets, when nothing of the command is left
RESTORED = re.compile(r"results\.json|search\.json|metrics\.jsonl")  # what rank 0 goes on with on a node that has nothing
# Not a node's to write. So is `stop`: what SIGTERM leaves is for this node's ranks, and no attempt that follows must see it.
OTHERS = re.compile(r"stop|head\.json|heartbeats/dump|(?:config|given)\.yaml|(?:handle|request)\.json")
NODES = "nodes"  # <address>/nodes/<i>: put again every SIGN seconds while node i is at work, gone when it has ended


class Carrier:
    """The uplink's process of one node, started again whenever it dies; a context, which is left when the last look is done."""

    def __init__(self, log: Path) -> None:
        folders = dict.fromkeys((RUNS / os.environ[RUN], Path(*log.parent.parent.parts[-2:])))
        self.log, self.words = log, [str(log), *map(str, folders)]
        self.closing = threading.Event()

    def __enter__(self) -> None:
        """Returns when what the command needs is here.

        Raises:
            BackendError: it is not, and will not come.
        """
        self.process = self._start("restore")
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise BackendError("what this node's command needs did not come from S3", where=os.environ[BUCKET],
                               why=f"its uplink ended with {self.process.wait()}", next="its own words stand above")  # fmt: skip
        self.keeping = threading.Thread(target=self._keep, name="uplink", daemon=True)
        self.keeping.start()

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._close()
        self.keeping.join(2 * TO_END)

    def _start(self, how: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "trainfleet.uplink", how, *self.words], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip

    def _keep(self) -> None:
        while (code := self.process.wait()) and not self.closing.wait(1.0):
            say(self.log, f"the uplink ended with {code} and is started again")
            self.process = self._start("go on")
            if self.closing.is_set():
                self._close()

    def _close(self) -> None:
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()


def carrier(log: Path) -> AbstractContextManager[None]:
    """What keeps a node's folders the same as those in S3, where that is how its job's machines meet; else nothing."""
    return Carrier(log) if BUCKET in os.environ else nullcontext()


@telling
def main(arguments: list[str]) -> int:
    """`restore|go on LOG FOLDER...`: returns after the last look."""
    how, log, *folders = arguments
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor decides when this ends
    uplink = Uplink(Path(log), [Link(Path(folder), f"{os.environ[BUCKET].rstrip('/')}/{folder}") for folder in folders])
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
    """Sets `ended` when stdin ends."""
    sys.stdin.buffer.read()
    ended.set()


class Uplink:
    """The folders of one node and theirs in S3; the first is the run's."""

    def __init__(self, log: Path, links: list[Link]) -> None:
        self.log, self.links = log, links
        self.node = int(log.stem.rpartition("-")[2])
        self.sign = f"{links[0].address}/{NODES}/{self.node}"
        self.signed, self.trouble = 0.0, ""

    def fetch(self, restore: bool) -> None:
        """Brings what is asked, and to a rank 0 that begins on a node with nothing, the record that it goes on with.

        Raises:
            S3Error: S3 has not given it in TO_BEGIN seconds.
        """
        until = time.monotonic() + TO_BEGIN
        while True:
            try:
                self.links[0].pull(is_asked, "asked/")
                if restore and self.node == 0:
                    self.links[0].pull(lambda name: bool(RESTORED.fullmatch(name)))
                return
            except S3Error:
                if time.monotonic() > until:
                    raise
            time.sleep(EVERY)

    def look(self) -> bool:
        """Sends what is new and brings what is asked; whether that went well. A change of that is said in the node's log."""
        try:
            for link in self.links:
                link.push(is_node_s, is_obeyed)
            self.links[0].pull(is_asked, "asked/")
            if time.monotonic() - self.signed > SIGN:
                s3.write(self.sign, b"")
                self.signed = time.monotonic()
        except (TrainfleetError, OSError) as error:
            if not self.trouble:
                say(self.log, f"S3 is not brought up to date: {' '.join(str(error).split())}")
            self.trouble = str(error)
            return False
        if self.trouble:
            say(self.log, "S3 is brought up to date again")
        self.trouble = ""
        return True

    def end(self) -> bool:
        """The last look, repeated while S3 is away, and the sign taken back; False when that lasts for TO_END seconds."""
        until = time.monotonic() + TO_END
        while not self.look() or any(link.waits(is_node_s) for link in self.links):
            if time.monotonic() > until:
                return False
            time.sleep(EVERY)
        with suppress(S3Error):
            s3.remove(self.sign)
        return True


def is_asked(name: str) -> bool:
    return bool(ASKED.fullmatch(name))


def is_node_s(name: str) -> bool:
    """Whether a file is a node's to write."""
    return not OTHERS.fullmatch(name)


def is_obeyed(name: str) -> bool:
    """Whether a request is taken back by the node that has done what it asks."""
    return name == "stop"


def say(log: Path, words: str, who: str = "uplink") -> None:
    """A line in the node's log, as the supervisor writes its own."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError), open(log, "ab", buffering=0) as file:
        file.write(f"{who:7} {time.strftime('%H:%M:%S')}.000 | {words}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
