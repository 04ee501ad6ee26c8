"""Runs a command on a host and streams its output as text or as a file's bytes."""

from __future__ import annotations

import codecs
import select
from collections.abc import Callable
from typing import Any, TextIO

Sink = Callable[[bytes], object]
# marks the start of the output, because a login shell may print a greeting first
OUTPUT_BEGINS = b"== trainfleet\n"
GREETING = 1 << 20  # maximum size of a greeting before the mark, in bytes


def stream(channel: Any, command: str, stdin: bytes, out: Sink, err: Sink) -> int:
    """Runs a command and returns its exit code, or -1 if the connection was lost.

    The command's stdin stays open until the command exits.
    """
    channel.exec_command(command)
    channel.sendall(stdin)
    out, err, poll = _after_mark(out), _after_mark(err), select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        ended = channel.eof_received or channel.closed
        while channel.recv_ready():
            out(channel.recv(1 << 16))
        while channel.recv_stderr_ready():
            err(channel.recv_stderr(1 << 16))
        if ended:
            channel.status_event.wait(5.0)
            return int(channel.exit_status)
        poll.poll(1000)


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


def said(output: bytes) -> bytes:
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
