"""The folder that the lab's nodes share, served as a file server serves it: the program in fsx/, a FUSE mount a node.

A folder that one kernel shows everywhere agrees with itself: what one node writes all others see at once, a dead node's locks are
free at once, and nothing ever waits. NFS and Lustre keep none of that, and so doesn't this:

    names (absent ones too) and attributes              known to a client for `cache` seconds; fresh for whoever opens the file, or
                                                        lists the names' folder
    locks (flock, fcntl)                                the server's; those of a node without power live on for `lease` seconds
    hold(), hold(2)                                     every operation of all nodes, or of one, waits until `go`
    make_stale(2)                                       what node 2 has open is gone (ESTALE), as after a forced remount
    fail(2, errno.EIO)                                  every operation of node 2 fails, until `fail(2, 0)`
    delay_fsync(1.5), race_appends()                    fsync takes long; a client appends where it last knew the end

Data that a client has written reaches the server at once, and rename(2), link(2) and O_EXCL are atomic there, as on both.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from pathlib import Path

from requirement import missing, need_program
from trainfleet.process.processes import die_with_parent

SOURCES = sorted(Path(__file__).with_name("fsx").glob("*.[ch]"))
INSTALL = "apt-get install gcc libc6-dev libfuse3-dev"
CACHE = 5.0  # seconds
LEASE = 90.0  # seconds: what a Linux NFSv4 server grants (nfsdctl: nfsv4leasetime); Lustre's obd_timeout is 100
EVERYONE = -1


class Server:
    """The running server of `folder`."""

    def __init__(self, folder: Path, cache: float = CACHE, lease: float = LEASE) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [build(), str(folder)], stdin=theirs, preexec_fn=die_with_parent
        )
        theirs.close()
        self._tell("cache", number=cache)
        self._tell("lease", number=lease)

    def serve(self, node: int, device: int) -> None:
        """Answers what comes through this descriptor of /dev/fuse, whose mount is the node's."""
        self._tell("serve", node, device=device)

    def vanish(self, node: int) -> None:
        """The node has lost its power: what it waits for fails, and its locks live on."""
        self._tell("vanish", node)

    def hold(self, node: int = EVERYONE) -> None:
        self._tell("hold", node, 1)

    def go(self, node: int = EVERYONE) -> None:
        self._tell("hold", node, 0)

    def make_stale(self, node: int) -> None:
        self._tell("stale", node)

    def fail(self, node: int, error: int) -> None:
        self._tell("fail", node, error)

    def delay_fsync(self, seconds: float) -> None:
        self._tell("fsync", number=seconds)

    def race_appends(self, on: bool = True) -> None:
        self._tell("append", number=int(on))

    def close(self) -> None:
        self._ours.close()
        self._process.kill()
        self._process.wait()

    def _tell(
        self, word: str, node: int = EVERYONE, number: float = 0, device: int | None = None
    ) -> None:
        socket.send_fds(
            self._ours, [f"{word} {node} {number}".encode()], [] if device is None else [device]
        )
        answer = self._ours.recv(128).decode()
        if answer != "ok":
            raise OSError(
                f"the server of the shared folder: {word} {node}: {answer or 'it has ended'}"
            )


def new_device() -> int:
    """A descriptor of /dev/fuse, to be mounted by a node."""
    try:
        return os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        missing(f"the lab's shared folder needs /dev/fuse: {error}")


def build() -> str:
    """The program, compiled where it is not there yet."""
    need_program("cc", INSTALL)
    text = b"".join(source.read_bytes() for source in SOURCES)
    program = (
        Path(__file__).with_name("__pycache__") / f"fsx-{hashlib.sha256(text).hexdigest()[:16]}"
    )
    if not program.exists():
        program.parent.mkdir(exist_ok=True)
        part = program.with_suffix(f".{os.getpid()}")
        sources = [str(source) for source in SOURCES if source.suffix == ".c"]
        options = f"-O2 -Wall -Wextra -I/usr/include/fuse3 -o {part} -lfuse3 -lpthread".split()
        done = subprocess.run(
            ["cc", *sources, *options], capture_output=True, text=True, check=False
        )
        if done.returncode:
            missing(f"the lab's shared folder can't be compiled; {INSTALL}\n{done.stderr}")
        part.replace(program)
    return str(program)
