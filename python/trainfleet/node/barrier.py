"""Barrier that waits for all nodes of a job before torchrun starts, or reports which nodes are
missing. Without it, torchrun would time out after ten minutes without naming any node.

A scheduler may start nodes minutes apart, or never start some of them. Node 0 listens at the
address where the ranks will rendezvous. Every other node connects, sends its number and waits for
node 0's response, which also tests the exact address and port that the ranks need. Uses only the
standard library.

The protocol is line-based. A node sends `JOB NODE`. Every PACE seconds, node 0 sends `wait N` with
the number of nodes that have arrived. Finally, it sends `go` or `missing 3 5`. A node that receives
no data for SILENCE seconds reconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from ..trust.errors import BackendError
from .placement import Placement

PACE = 5.0  # seconds between progress reports
SILENCE = 4 * PACE  # seconds without a line from node 0 before the node reconnects
AGAIN = 1.0  # seconds between attempts to reach node 0
LINE = 512  # maximum bytes per line
NAMED = 16  # maximum missing nodes to list in a message
Say = Callable[[str], None]


class Missing(BackendError):
    """Raised if nodes of a job do not arrive in time."""

    # EX_UNAVAILABLE in sysexits.h: not the program's fault, so a retry may succeed.
    exit_code = 69


def wait_for_all(placement: Placement, job: str, seconds: float, say: Say) -> None:
    """Waits until all nodes of `job` have arrived, and reports progress through `say`.

    Raises:
        Missing: nodes are missing after `seconds`. Every node that has arrived raises it, with the
            numbers of the missing nodes.
    """
    if placement.nodes > 1:
        asyncio.run(
            _gather(placement, job, seconds, say)
            if placement.node == 0
            else _report(placement, job, seconds, say)
        )


async def _gather(placement: Placement, job: str, seconds: float, say: Say) -> None:
    _allow_connections(placement.nodes)
    roll, began, said = RollCall(job, placement.nodes), time.monotonic(), 0.0
    async with await _listen(roll.greet, placement) as server:
        while (
            count := len(roll.here) + 1
        ) < placement.nodes and time.monotonic() - began < seconds:
            if time.monotonic() - said > PACE:
                said = time.monotonic()
                say(f"{count} of {placement.nodes} nodes have arrived after {said - began:.0f} s")
                await roll.tell(f"wait {count}")
            await asyncio.sleep(0.05)
        server.close()
        missing = [node for node in range(1, placement.nodes) if node not in roll.here]
        await roll.tell(f"missing {' '.join(map(str, missing))}" if missing else "go")
        await roll.close()
    if missing:
        _raise_missing(missing, placement, time.monotonic() - began)
    say(f"all {placement.nodes} nodes have arrived after {time.monotonic() - began:.1f} s")


class RollCall:
    """Node 0's connections. `here` maps the nodes of this job that have arrived to their
    connections. `visits` contains every connection, including those from other programs.
    """

    def __init__(self, job: str, nodes: int) -> None:
        self.job = job
        self.nodes = nodes
        self.here = dict[int, asyncio.StreamWriter]()
        self.visits = dict[asyncio.Task[None], asyncio.StreamWriter]()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until it closes."""
        task = asyncio.current_task()
        assert task
        self.visits[task], node = writer, 0
        try:
            node = self._node(await asyncio.wait_for(reader.readline(), SILENCE))
            self.here[node] = writer
            # A node sends only one line, so this returns when the node disconnects.
            await reader.read()
        except (OSError, ValueError, TimeoutError):
            pass  # the connection broke or belongs to another job
        finally:
            if self.here.get(node) is writer:
                del self.here[node]
            del self.visits[task]
            writer.close()

    def _node(self, line: bytes) -> int:
        """Parses a node's line and returns the node's number. Raises ValueError if the line is not
        from a node of this job.
        """
        job, _, node = line.decode().strip().rpartition(" ")
        if job != self.job or not 0 < int(node) < self.nodes:
            raise ValueError(line)
        return int(node)

    async def tell(self, words: str) -> None:
        """Sends a line to every node that is still connected."""
        writers = list(self.here.values())
        for writer in writers:
            writer.write(f"{words}\n".encode())
        for writer in writers:
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(writer.drain(), 1.0)

    async def close(self) -> None:
        """Closes all connections after their pending data has been sent."""
        for writer in self.visits.values():
            writer.close()
        if self.visits:
            await asyncio.wait(self.visits, timeout=SILENCE)


async def _listen(
    greet: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    placement: Placement,
) -> asyncio.Server:
    try:
        return await asyncio.start_server(
            greet, "", placement.port, limit=LINE, backlog=4096, reuse_address=True
        )
    except OSError as error:
        why = f"{error.strerror or error}; the nodes rendezvous on this port"
        then = f"run ss -ltnp 'sport = :{placement.port}' on that host"
        raise BackendError(
            f"can't listen on port {placement.port}",
            where=f"node {placement.node}",
            why=why,
            next=then,
        ) from error


async def _report(placement: Placement, job: str, seconds: float, say: Say) -> None:
    heard, why = time.monotonic(), ""
    while time.monotonic() - heard < seconds:
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(placement.meet, placement.port, limit=LINE), SILENCE
            )
        except (OSError, TimeoutError) as error:
            if str(error) != why:
                why = str(error)
                say(f"waiting for node 0 at {placement.meet}:{placement.port}: {why or 'no reply'}")
            await asyncio.sleep(AGAIN)
            continue
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            why = "another program listens on that port"
            writer.write(f"{job} {placement.node}\n".encode())
            while line := (await asyncio.wait_for(reader.readline(), SILENCE)).decode().split():
                if _is_over(line, placement, say):
                    writer.close()
                    return
                heard, why = time.monotonic(), ""
        writer.close()
        await asyncio.sleep(AGAIN)
    remedy = "check in node 0's log that it has started, or run make doctor to check the links"
    raise Missing(
        f"node 0 of {placement.nodes} did not arrive in {seconds:.0f} s",
        where=f"node {placement.node}",
        why=f"no reply at {placement.meet}:{placement.port}: {why or 'it sent no data'}",
        next=remedy,
    )


def _is_over(line: list[str], placement: Placement, say: Say) -> bool:
    """Returns whether node 0 reports that all nodes have arrived.

    Raises:
        Missing: node 0 reports missing nodes.
        ValueError: the line is not part of the protocol, so another program is listening on the
            port.
    """
    match line:
        case ["go"]:
            return True
        case ["wait", count]:
            say(f"{int(count)} of {placement.nodes} nodes have arrived")
            return False
        case ["missing", *nodes] if nodes:
            _raise_missing([int(node) for node in nodes], placement, None)
    raise ValueError(line)


def _raise_missing(missing: list[int], placement: Placement, seconds: float | None) -> NoReturn:
    who = (
        f"node {missing[0]}"
        if len(missing) == 1
        else f"nodes {', '.join(map(str, missing[:NAMED]))}"
    )
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    within = f" in {seconds:.0f} s" if seconds is not None else ", node 0 reports"
    what = f"{who}{more} of {placement.nodes} did not arrive{within}"
    raise Missing(
        what,
        where=f"node {placement.node}",
        why=f"{placement.nodes - len(missing)} nodes arrived",
        next="check the missing node's log or the scheduler's message, then run make train",
    )


def _allow_connections(nodes: int) -> None:
    """Raises the open file limit to at least one file per node, because containers often start with
    a limit of 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = nodes + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (wanted if hard == resource.RLIM_INFINITY else min(hard, wanted), hard),
        )
