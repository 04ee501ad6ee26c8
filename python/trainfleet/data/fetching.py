"""Brings objects of S3 to a reader that has no network: a process beside it fetches bytes, and looks into none of them.

The reader (data_sandbox.py) asks it over a pair of sockets for a listing, for the size of an object, or for a range of its bytes,
of what is below the sources of the config and nothing else: a reader that a crafted file takes over can send nothing away. Where
no such process was started, the same functions ask S3 themselves. Messages are JSON and bytes, and neither side unpickles any.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from ..host import sandbox
from ..host.processes import die_with_parent
from ..storage import s3, s3_streams
from ..trust.errors import S3Error, TrainfleetError
from ..trust.untrusted_input import MEBIBYTE

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LONGEST = MEBIBYTE  # bytes of a question
LIST, STAT, RANGE, CONNECT = "list", "stat", "range", "connect"


class Fetcher:
    """This process's connection to the one that fetches."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.turn = connection, threading.Lock()

    def ask(self, *words: Any, content: bool = False) -> Any:
        """The answer to a question; the bytes that follow it, if it is about `content`. Raises what was raised there."""
        try:
            with self.turn:
                self.connection.send_bytes(json.dumps(words).encode())
                said = json.loads(self.connection.recv_bytes())
                found = self.connection.recv_bytes() if content and "answer" in said else said.get("answer")
        except (EOFError, OSError) as error:
            raise S3Error("is not fetched", where=words[1], why="the process that fetches has ended", next="try again") from error
        if "error" in said:
            raise S3Error(**said["error"])
        return found

    def another(self) -> Connection:
        """A connection for another process, which can be given to it when it is spawned."""
        from multiprocessing.connection import Pipe
        from multiprocessing.reduction import send_handle

        ours, theirs = Pipe()
        with self.turn:
            self.connection.send_bytes(json.dumps([CONNECT]).encode())
            send_handle(self.connection, theirs.fileno(), 0)
            self.connection.recv_bytes()  # it has it
        theirs.close()
        return ours


_fetcher: Fetcher | None = None


def start(sources: Iterable[str]) -> None:
    """Starts the process that fetches what is below these addresses; it ends with this one."""
    from multiprocessing.connection import Pipe

    ours, theirs = Pipe()
    if os.fork() == 0:
        try:
            die_with_parent()
            ours.close()
            sandbox.confine([], [], network=True)
            _serve(theirs, tuple(sources))
        finally:
            os._exit(0)
    theirs.close()
    use(ours)


def use(connection: Connection | None) -> None:
    """From now on this process asks by a connection that `another` gave; None: as before."""
    global _fetcher
    _fetcher = Fetcher(connection) if connection else _fetcher


def another() -> Connection | None:
    """A connection for a process that this one spawns; None where S3 is asked directly."""
    return _fetcher.another() if _fetcher else None


def list_objects(source: str) -> list[s3.Object]:
    """As s3.list_objects."""
    if _fetcher is None:
        return s3.list_objects(source)
    return [s3.Object(*entry) for entry in _fetcher.ask(LIST, source)]


def stat(address: str) -> s3.Object | None:
    """As s3.stat."""
    if _fetcher is None:
        return s3.stat(address)
    found = _fetcher.ask(STAT, address)
    return found and s3.Object(*found)


def open_object(found: s3.Object, start: int) -> BinaryIO:
    """As streams.open_object."""
    if _fetcher is None:
        return s3_streams.open_object(found, start)
    return s3_streams.open_object(found, start, cast(s3_streams.Read, partial(_fetcher.ask, RANGE, content=True)))


def _serve(connection: Connection, sources: tuple[str, ...]) -> None:
    """Answers until the other side is gone; other connections in threads of their own."""
    from multiprocessing.connection import Connection
    from multiprocessing.reduction import recv_handle

    try:
        while True:
            verb, *words = json.loads(connection.recv_bytes(LONGEST))
            if verb == CONNECT:
                other = Connection(recv_handle(connection))
                threading.Thread(target=_serve, args=(other, sources), daemon=True).start()
                connection.send_bytes(b"{}")
                continue
            try:
                answer, content = _answer(sources, verb, *words)
            except TrainfleetError as error:
                fields = {"what": error.what, "where": error.where, "why": error.why, "next": error.next}
                connection.send_bytes(json.dumps({"error": fields}).encode())
                continue
            connection.send_bytes(json.dumps({"answer": answer}).encode())
            if content is not None:
                connection.send_bytes(content)
    except (EOFError, OSError, TypeError, ValueError):  # the reader has ended, or asks for what no reader of ours asks for
        connection.close()


def _answer(sources: tuple[str, ...], verb: str, address: str, *words: Any) -> tuple[Any, bytes | None]:
    """What to answer, and the bytes that follow."""
    if not isinstance(address, str):
        raise TypeError(address)
    if not any(address == source or address.startswith(f"{source.rstrip('/')}/") for source in sources):
        raise S3Error("is not asked for", where=address, why="it is below no source of the config", next="correct data.sources")
    match verb, words:
        case "list", []:
            return [list(asdict(found).values()) for found in s3.list_objects(address)], None
        case "stat", []:
            return (found := s3.stat(address)) and list(asdict(found).values()), None
        case "range", [int(first), int(end), str(version)]:
            return "", s3.read_range(address, first, min(end, first + s3_streams.RANGE), version)
    raise ValueError(verb)
