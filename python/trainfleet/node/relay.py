"""Lets only the nodes of a run reach its ranks' store, which has no password: by a key that they alone were given.

The store listens on node 0's loopback. In front of it a gate listens where the nodes meet; on every other node a way listens on
the loopback, which that node's ranks take for the store. For each connection of a rank the way calls at the gate; both show that
they know the key (HMAC-SHA256 of two random numbers, each side with a name of its own, so that no proof can be sent back), and
from then on bytes pass through. They are neither encrypted nor signed: who can change packets on the fabric is not kept out.

Whoever has not shown the key within GREETING seconds is sent away. VISITORS more than there are ranks may be at it at once: the
longest there goes for the next to come, so that those who say nothing keep no node out. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

KEY = "TRAINFLEET_MEETING"  # the variable of the key; the ranks do not get it
LOOPBACK = "127.0.0.1"
HELLO = b"trainfleet 1\n"
NONCE, PROOF = 32, hashlib.sha256().digest_size  # bytes
GATE, WAY = b"gate", b"way"
GREETING = 10.0  # seconds
VISITORS = 256
WAITING = 4096  # connections that wait to be taken: all ranks of a fleet come at once
AGAIN = 0.5  # seconds between two tries to reach the gate
PATIENCE = 30.0  # seconds of tries for one connection: torch waits for its answer without a limit, and tries again when it closes
QUIET = 10.0  # seconds of them that are not worth a word
LOST_AFTER = 120  # seconds without an acknowledgement after which a connection is dead
CHUNK = 1 << 16
NAMED = 64  # strangers whose addresses are remembered, so that each is told once
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Say = Callable[[str], None]


def say(words: str) -> None:
    """A line of the node's log."""
    print(f"trainfleet: {words}", file=sys.stderr, flush=True)


def listening(address: str, port: int) -> socket.socket:
    """A socket that listens at one address and port, 0 for a free one. Raises OSError: the port is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    waiting = socket.socket(family, socket.SOCK_STREAM)
    try:
        waiting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        waiting.bind((address, port))
        waiting.listen(WAITING)
    except OSError:
        waiting.close()
        raise
    return waiting


def gate(key: str, place: socket.socket, store: int, expected: int, told: Say = say) -> None:
    """From now on, whoever knows the key gets through from `place` to the store's port on this machine's loopback.

    `expected`: how many connections of ranks may come at once.
    """
    _allow_files(4 * expected + VISITORS)
    _serve(place, Gate(key, store, expected, told).greet)


def way(key: str, meet: str, port: int, told: Say = say) -> int:
    """The port on this machine's loopback that leads to the store of the gate at `meet`:`port`."""
    place = listening(LOOPBACK, 0)
    _serve(place, RelayClient(key, meet, port, told).lead)
    return int(place.getsockname()[1])


class Gate:
    """Node 0's side."""

    def __init__(self, key: str, store: int, expected: int, told: Say) -> None:
        self.key, self.store, self.say, self.room = key.encode(), store, told, VISITORS + expected
        self.visitors = dict[asyncio.Task[Any], None]()  # who has not shown the key yet; the longest there is first
        self.named = set[str]()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until it closes."""
        task = asyncio.current_task()
        assert task
        if len(self.visitors) >= self.room:
            self.visitors.pop(longest := next(iter(self.visitors)))
            longest.cancel()
        self.visitors[task] = None
        try:
            known = await asyncio.wait_for(self._admit(reader, writer), GREETING)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            known = None  # it has said nothing that could be wrong
        finally:
            self.visitors.pop(task, None)
        if known is False:
            self._refuse(str(writer.get_extra_info("peername", ("?",))[0]))
        if known:
            await _join((reader, writer), await asyncio.open_connection(LOOPBACK, self.store, limit=CHUNK))

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether a visitor knows the key; it learns in turn that this gate does."""
        own = os.urandom(NONCE)
        writer.write(HELLO + own)
        said = await reader.readexactly(NONCE + PROOF)
        theirs, proof = said[:NONCE], said[NONCE:]
        if not hmac.compare_digest(proof, _prove(self.key, WAY, own, theirs)):
            return False
        writer.write(_prove(self.key, GATE, own, theirs))
        return True

    def _refuse(self, address: str) -> None:
        if address not in self.named and len(self.named) < NAMED:
            self.named.add(address)
            self.say(f"turned away {address}, which does not know the run's key")


class RelayClient:
    """The side of every other node."""

    def __init__(self, key: str, meet: str, port: int, told: Say) -> None:
        self.key, self.meet, self.port, self.say = key.encode(), meet, port, told
        self.said = set[str]()

    async def lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one rank's connection until it closes."""
        if there := await self._reach():
            await _join((reader, writer), there)

    async def _reach(self) -> Streams | None:
        """A connection to the store, once its gate is there and knows the key; None where it is not in PATIENCE seconds."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < PATIENCE:
            try:
                return await asyncio.wait_for(self._call(), GREETING)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                why = "it sends us away" if isinstance(error, asyncio.IncompleteReadError) else str(error) or "no answer"
            if waited > QUIET and why not in self.said and len(self.said) < NAMED:
                self.said.add(why)
                self.say(f"node 0 does not let us in at {self.meet}:{self.port} yet: {why}")
            await asyncio.sleep(AGAIN)
        return None

    async def _call(self) -> Streams:
        """Raises OSError: whoever listens there does not know the key."""
        reader, writer = await asyncio.open_connection(self.meet, self.port, limit=CHUNK)
        try:
            said, own = await reader.readexactly(len(HELLO) + NONCE), os.urandom(NONCE)
            theirs = said.removeprefix(HELLO)
            if len(theirs) != NONCE:
                raise OSError("another program listens there")
            writer.write(own + _prove(self.key, WAY, theirs, own))
            if not hmac.compare_digest(await reader.readexactly(PROOF), _prove(self.key, GATE, theirs, own)):
                raise OSError("who listens there does not know the run's key")
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer


def _prove(key: bytes, who: bytes, gates: bytes, ways: bytes) -> bytes:
    return hmac.digest(key, HELLO + who + gates + ways, "sha256")


async def _join(one: Streams, other: Streams) -> None:
    """Passes bytes on between two connections until either closes; then both do."""
    for _, writer in (one, other):
        _keep_alive(writer)
    pumps = [asyncio.create_task(_pump(one[0], other[1])), asyncio.create_task(_pump(other[0], one[1]))]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        for _, writer in (one, other):
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while said := await reader.read(CHUNK):
            writer.write(said)
            await writer.drain()


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Lets a connection whose other end is gone end too (tcp(7)); asyncio itself sends small messages at once."""
    own = writer.get_extra_info("socket")
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, LOST_AFTER // 2), (socket.TCP_KEEPINTVL, LOST_AFTER // 8),
                              (socket.TCP_USER_TIMEOUT, LOST_AFTER * 1000)):  # fmt: skip
            own.setsockopt(socket.IPPROTO_TCP, option, value)


def _allow_files(wanted: int) -> None:
    """Raises the limit of open files by so many, as far as this user may: containers often start with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        more = soft + wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (more if hard == resource.RLIM_INFINITY else min(hard, more), hard))


def _serve(place: socket.socket, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
    """Serves connections in a thread of its own, which ends with this process."""

    async def each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # its other end has gone, or it made room for the next
        finally:
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(each, sock=place, limit=CHUNK, backlog=WAITING)
        await server.serve_forever()

    threading.Thread(target=_run, args=(run(),), name="relay", daemon=True).start()


def _run(serving: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(RuntimeError):  # the interpreter ends
        asyncio.run(serving)
