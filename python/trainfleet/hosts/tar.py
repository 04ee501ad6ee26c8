"""Streams a command's output from a host, and packs files such as this checkout's code into a tar
archive for it.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import math
import select
import tarfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ..process import install_paths
from ..process.install_paths import PACKAGES, ROOT
from .ssh_errors import MOST_SAID, LinkLost, TooMuch

LOCKS = ("requirements.lock", "requirements-cuda.lock")
# files that a job needs on a node in addition to Python code
PARTS = ("schema", "scripts", "docker", "pyproject.toml", *LOCKS)


def pack(files: Mapping[str, bytes]) -> bytes:
    """Returns a compressed tar archive of the files.

    The archive is reproducible, because it contains no timestamps or owners.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if content.startswith(b"#!") else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def code_files(backend: str) -> dict[str, bytes]:
    """Returns this checkout's code and a third-party backend's package, as relative path → content.

    Excludes hidden files, caches and a wheel's `checkout` folder.
    """
    packages, metadata = install_paths.sources_of(install_paths.OF_BACKENDS, backend)
    beside = {
        path.relative_to(ROOT): path
        for name in PARTS
        for path in (ROOT / name, *(ROOT / name).rglob("*"))
    }
    own = {
        Path("python") / path.relative_to(package.parent): path
        for package in (*PACKAGES, *packages)
        for path in (package, *package.rglob("*"))
    }
    return metadata | {
        str(name): path.read_bytes()
        for name, path in sorted((beside | own).items())
        if path.is_file()
        and not {"__pycache__", "checkout"} & set(name.parts)
        and not path.name.startswith(".")
    }


def content_hash(files: Mapping[str, bytes]) -> str:
    """Returns a hash of all names and contents, as 16 hex digits."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


Sink = Callable[[bytes], object]
# marks the start of the output, because a login shell may print a greeting first
OUTPUT_BEGINS = b"== trainfleet\n"
GREETING = 1 << 20  # maximum size of a greeting before the mark, in bytes


def converse(channel: Any, command: str, stdin: bytes, timeout: float) -> tuple[int, str, str]:
    """Runs a command. Returns its exit code, and its output without a login shell's greeting.

    Raises:
        TimeoutError: the command is still running after `timeout` seconds.
        LinkLost: the connection was lost. The command may keep running until its timeout.
        TooMuch: the command printed more than MOST_SAID bytes.
    """
    out, err = bytearray(), bytearray()

    def keep(data: bytes, output: bytearray) -> None:
        output += data
        if len(out) + len(err) > MOST_SAID:
            raise TooMuch

    with closing(channel):
        channel.settimeout(timeout)
        channel.exec_command(command)
        channel.sendall(stdin)
        channel.shutdown_write()
        deadline = time.monotonic() + timeout + 1
        code = _forward(channel, partial(keep, output=out), partial(keep, output=err), deadline)
    if code < 0:
        raise LinkLost
    return code, said(out).decode(errors="replace"), said(err).decode(errors="replace")


def stream(channel: Any, command: str, stdin: bytes, out: Sink, err: Sink) -> int:
    """Runs a command and returns its exit code, or -1 if the connection was lost.

    The command's stdin stays open until the command exits.
    """
    channel.exec_command(command)
    channel.sendall(stdin)
    return _forward(channel, _after_mark(out), _after_mark(err), math.inf)


def _forward(channel: Any, out: Sink, err: Sink, deadline: float) -> int:
    """Forwards a command's output, and returns its exit code or -1. Raises TimeoutError."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        ended = channel.eof_received or channel.closed
        while channel.recv_ready():
            out(channel.recv(1 << 16))
        while channel.recv_stderr_ready():
            err(channel.recv_stderr(1 << 16))
        left = min(1.0, max(0.0, deadline - time.monotonic()))
        if ended and channel.status_event.wait(left):
            return int(channel.exit_status)
        if not left:
            raise TimeoutError
        if not ended:
            poll.poll(left * 1000)


def _after_mark(sink: Sink) -> Sink:
    """Returns a sink that forwards the output after the mark, or all output if there is no mark."""
    held: list[bytes] | None = []

    def take(data: bytes) -> None:
        nonlocal held
        if held is None:
            sink(data)
            return
        held.append(data)
        whole = b"".join(held)
        before, found, rest = whole.partition(OUTPUT_BEGINS)
        if found or len(before) > GREETING:
            held = None
            sink(rest if found else whole)

    return take


def said(output: bytes | bytearray) -> bytes | bytearray:
    """Strips a login shell's greeting from a command's output."""
    before, found, rest = output.partition(OUTPUT_BEGINS)
    return rest if found else before


def printer(stream: TextIO) -> Sink:
    """Returns a sink that prints bytes as UTF-8, even if a character is split across chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(data: bytes) -> None:
        stream.write(decoder.decode(data))
        stream.flush()

    return show
