"""Runs torchrun with a store that listens only on the job's rendezvous address.

Usage: `python -m trainfleet.devices.meeting torch.distributed.run OPTIONS...`.

torch's TCPStore has no authentication: any client that can connect to it can list, write and delete
its keys. By default, it listens on all interfaces, regardless of --master-addr. Node 0 therefore
passes it a socket bound to the rendezvous address, which is the loopback address for single-machine
jobs. torchrun finds and reuses that store, because it runs in the same process (multi_tenant).
"""

from __future__ import annotations

import ipaddress
import runpy
import socket
import sys
import time
from contextlib import suppress

from torch.distributed import TCPStore  # type: ignore[attr-defined]

WAITING = 4096  # maximum pending connections; all ranks of a fleet connect at once
ESTABLISHED = "01"  # state code in /proc/net/tcp (proc(5))
LINGER = 5.0  # maximum wait in seconds


def listen(meet: str, port: int, nodes: int) -> TCPStore | None:
    """Creates the store of a job whose nodes rendezvous at `meet`:`port`.

    Returns None if torch must listen on all interfaces because no interface here has a usable
    address. Behind NAT, none of this machine's interfaces has the rendezvous address. On Debian,
    /etc/hosts resolves the machine's own name to a loopback address, which other nodes can't reach.
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
        # not an address of this machine, or the port is in use, which torch reports
        except OSError:
            waiting.close()
            continue
        # the store now owns the file descriptor
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
    except OSError:  # torch retries, then reports this error more clearly
        return []


def linger(port: int) -> None:
    """Waits up to LINGER seconds for all other nodes to disconnect from a local port.

    The store exits with this process. If torchrun finished here before the other nodes had received
    the store's last response, their logs would end with a traceback.
    """
    until = time.monotonic() + LINGER
    while time.monotonic() < until and _is_visited(port):
        time.sleep(0.05)


def _is_visited(port: int) -> bool:
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/self/net/{table}", encoding="ascii") as rows:
            next(rows)  # skip the header
            for _, here, there, state, *_ in map(str.split, rows):
                (own, at), other = here.rsplit(":", 1), there.rsplit(":", 1)[0]
                if state == ESTABLISHED and int(at, 16) == port and other != own:
                    return True
    return False


def main(words: list[str]) -> None:
    """Runs the module named by the first argument, as `python -m` does, with the remaining
    arguments.

    Creates the store first if this is node 0.
    """
    given = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    meet = given["master-addr"]
    port = int(given["master-port"])
    nodes = int(given["nnodes"])
    store = listen(meet, port, nodes) if given["node-rank"] == "0" and port else None
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    if store:
        linger(port)
    del store  # keep the store alive for torchrun until here


if __name__ == "__main__":
    main(sys.argv[1:])
