"""All nodes of a job are there, or it is known which is not: before torchrun, which would wait for ten minutes and name nobody.

An engine starts nodes minutes apart, and sometimes never. Node 0 listens where the ranks will meet; every other node connects,
says which it is and stays until node 0 answers. So this also tries the very address and port that the ranks need. Standard
library only.

What goes over a connection, in lines: the node's `JOB NODE`; then node 0's `wait N` (how many are there) every PACE seconds, and
at last `go`, or `missing 3 5`. A node that hears nothing for long connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from .errors import BackendError
from .seat import Seat

PACE = 5.0  # seconds
SILENCE = 4 * PACE  # without a word of node 0: the connection is dead
AGAIN = 1.0  # seconds between two tries to reach node 0
LINE = 512  # bytes of a line at most
NAMED = 16  # of the nodes that did not come
Say = Callable[[str], None]


class Missing(BackendError):
    """Not all nodes of a job came in time."""

    exit_code = 69  # sysexits.h: a service is unavailable. The program is not at fault, so that another attempt may do


def muster(seat: Seat, job: str, seconds: float, say: Say) -> None:
    """Returns when all nodes of `job` are there. `say` is told how it stands.

    Raises:
        Missing: after `seconds` node 0 has not come, or others have not; every node that came is told which.
    """
    if seat.nodes > 1:
        asyncio.run(_gather(seat, job, seconds, say) if seat.node == 0 else _report(seat, job, seconds, say))


async def _gather(seat: Seat, job: str, seconds: float, say: Say) -> None:
    _allow_connections(seat.nodes)
    door, began, told = Door(job, seat.nodes), time.monotonic(), 0.0
    async with await _listen(door.greet, seat) as server:
        while (count := len(door.here) + 1) < seat.nodes and time.monotonic() - began < seconds:
            if time.monotonic() - told > PACE:
                told = time.monotonic()
                say(f"{count} of {seat.nodes} nodes are here after {told - began:.0f} s")
                await door.tell(f"wait {count}")
            await asyncio.sleep(0.05)
        server.close()
        missing = [node for node in range(1, seat.nodes) if node not in door.here]
        await door.tell(f"missing {' '.join(map(str, missing))}" if missing else "go")
        await door.close()
    if missing:
        _raise_missing(missing, seat, time.monotonic() - began)
    say(f"all {seat.nodes} nodes are here after {time.monotonic() - began:.1f} s")


class Door:
    """Node 0's: who stands at it. `here`: the nodes of this job; `visits`: all connections, also those of others."""

    def __init__(self, job: str, nodes: int) -> None:
        self.job, self.nodes = job, nodes
        self.here = dict[int, asyncio.StreamWriter]()
        self.visits = dict[asyncio.Task[None], asyncio.StreamWriter]()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its beginning to its end."""
        task = asyncio.current_task()
        assert task
        self.visits[task], node = writer, 0
        try:
            node = self._node(await asyncio.wait_for(reader.readline(), SILENCE))
            self.here[node] = writer
            await reader.read()  # it says no more: this returns when it has left
        except (OSError, ValueError, TimeoutError):
            pass  # it left otherwise, or is none of us
        finally:
            if self.here.get(node) is writer:
                del self.here[node]
            del self.visits[task]
            writer.close()

    def _node(self, line: bytes) -> int:
        """Which node says this. ValueError: none of this job that has to come."""
        job, _, node = line.decode().strip().rpartition(" ")
        if job != self.job or not 0 < int(node) < self.nodes:
            raise ValueError(line)
        return int(node)

    async def tell(self, words: str) -> None:
        """Sends every node a line; who has left does not get it."""
        writers = list(self.here.values())
        for writer in writers:
            writer.write(f"{words}\n".encode())
        for writer in writers:
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(writer.drain(), 1.0)

    async def close(self) -> None:
        """Returns when all is sent and every connection is closed."""
        for writer in self.visits.values():
            writer.close()
        if self.visits:
            await asyncio.wait(self.visits, timeout=SILENCE)


async def _listen(greet: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], seat: Seat) -> asyncio.Server:
    try:
        return await asyncio.start_server(greet, "", seat.port, limit=LINE, backlog=4096, reuse_address=True)
    except OSError as error:
        why, next = f"{error.strerror or error}: the nodes must meet there", f"on it: ss -ltnp 'sport = :{seat.port}'"
        raise BackendError(f"port {seat.port} can't be used", where=f"node {seat.node}", why=why, next=next) from error


async def _report(seat: Seat, job: str, seconds: float, say: Say) -> None:
    heard, why = time.monotonic(), ""
    while time.monotonic() - heard < seconds:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(seat.meet, seat.port, limit=LINE), SILENCE)
        except (OSError, TimeoutError) as error:
            if str(error) != why:
                why = str(error)
                say(f"waiting for node 0 at {seat.meet}:{seat.port}: {why or 'no answer'}")
            await asyncio.sleep(AGAIN)
            continue
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            why = "another program listens there"
            writer.write(f"{job} {seat.node}\n".encode())
            while line := (await asyncio.wait_for(reader.readline(), SILENCE)).decode().split():
                if _is_over(line, seat, say):
                    writer.close()
                    return
                heard, why = time.monotonic(), ""
        writer.close()
        await asyncio.sleep(AGAIN)
    remedy = "look at the log of node 0: has it started? make doctor looks at the links"
    raise Missing(f"node 0 of {seat.nodes} has not come in {seconds:.0f} s", where=f"node {seat.node}",
                  why=f"no answer at {seat.meet}:{seat.port}: {why or 'it says nothing'}", next=remedy)  # fmt: skip


def _is_over(line: list[str], seat: Seat, say: Say) -> bool:
    """Whether node 0 has said that all are there.

    Raises:
        Missing: it has said who is not.
        ValueError: this is not what node 0 says, so that somebody else listens there.
    """
    match line:
        case ["go"]:
            return True
        case ["wait", count]:
            say(f"{int(count)} of {seat.nodes} nodes are here")
            return False
        case ["missing", *nodes] if nodes:
            _raise_missing([int(node) for node in nodes], seat, None)
    raise ValueError(line)


def _raise_missing(missing: list[int], seat: Seat, seconds: float | None) -> NoReturn:
    who = f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(map(str, missing[:NAMED]))}"
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    within = f" in {seconds:.0f} s" if seconds is not None else ", says node 0"
    what = f"{who}{more} of {seat.nodes} {'has' if len(missing) == 1 else 'have'} not come{within}"
    remedy = "look at the log of the node that is missing, or at what its engine says of it; then make train"
    raise Missing(what, where=f"node {seat.node}", why=f"{seat.nodes - len(missing)} nodes are here", next=remedy)


def _allow_connections(nodes: int) -> None:
    """A connection is an open file, and a container is often given 1024 of them at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = nodes + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(hard, wanted), hard))
