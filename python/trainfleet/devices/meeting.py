"""Runs torchrun at the place where a job's ranks meet: `python -m trainfleet.devices.meeting
torch.distributed.run OPTIONS...`.

torch's TCPStore has no password: everyone who reaches it can list, write and delete its keys. Its
default is to listen on every interface, regardless of --master-addr. So node 0 gives it a socket
from this module, which listens only at the address where the nodes meet: on the loopback, for a job
of one machine. torchrun then finds that store in its own process (multi_tenant), and uses it.
"""

from __future__ import annotations

import ipaddress
import runpy
import socket
import sys
import time
from contextlib import suppress

from torch.distributed import TCPStore  # type: ignore[attr-defined]

WAITING = 4096  # pending connections: all ranks of a fleet connect at once
ESTABLISHED = "01"  # code in /proc/net/tcp (proc(5))
LINGER = 5.0  # seconds at most


def listen(meet: str, port: int, nodes: int) -> TCPStore | None:
    """Returns the store of a job with nodes that meet at `meet`:`port`; None if torch must listen
    on all interfaces.

    That is necessary if no interface here has that address (behind NAT). It is also necessary if
    only this machine resolves the name to its loopback, like Debian's /etc/hosts does: the other
    nodes could not reach that.
    """
    for family, kind, protocol, _, place in _places(meet, port):
        if (
            nodes > 1
            and ipaddress.ip_address(place[0]).is_loopback
            and meet not in (place[0], "localhost")
        ):
            continue
        waiting = socket.socket(family, kind, protocol)
        try:
            waiting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            waiting.bind(place)
            waiting.listen(WAITING)
        except OSError:  # not an address of this machine; torch reports a port that is taken
            waiting.close()
            continue
        # The store owns the descriptor from here on.
        return TCPStore(
            meet,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=waiting.detach(),
        )
    return None


def _places(meet: str, port: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(meet, port, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:  # torch reports this better, once it has tried for long enough
        return []


def linger(port: int) -> None:
    """Waits until no other node is connected to a port of this one, LINGER seconds at most.

    The store ends with this process, and torchrun here may be done before the others have its last
    answer: each of them would end its log with a traceback.
    """
    until = time.monotonic() + LINGER
    while time.monotonic() < until and _is_visited(port):
        time.sleep(0.05)


def _is_visited(port: int) -> bool:
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/self/net/{table}", encoding="ascii") as rows:
            next(rows)  # names of the columns
            for _, here, there, state, *_ in map(str.split, rows):
                (own, at), other = here.rsplit(":", 1), there.rsplit(":", 1)[0]
                if state == ESTABLISHED and int(at, 16) == port and other != own:
                    return True
    return False


def main(words: list[str]) -> None:
    """Runs the first word's module, like `python -m`, with the other words; on node 0 its store
    exists before.
    """
    given = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    meet, port, nodes = given["master-addr"], int(given["master-port"]), int(given["nnodes"])
    store = listen(meet, port, nodes) if given["node-rank"] == "0" and port else None
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    if store:
        linger(port)
    del store  # only now: until here torchrun shares it


if __name__ == "__main__":
    main(sys.argv[1:])
