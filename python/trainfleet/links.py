"""The state of the links between nodes, from the kernels' figures on the connections that train over them: no probe, no traffic.

heartbeats/links-<i>   node i's addresses and, by peer, the round trip in milliseconds and the packets sent and retransmitted;
                       written every EVERY seconds by the rank that does the node's round (heartbeat.py)

The kernel reports them over netlink (sock_diag(7), tcp_info in linux/tcp.h, which only ever grows at its end). Traffic by EFA or
InfiniBand bypasses the kernel, and is not counted. Linux only; elsewhere nothing is recorded. Standard library only.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from . import door
from .errors import InputError
from .shapes import fit

FOLDER, EVERY = "heartbeats", 5.0  # seconds
PEERS = 64  # of a node, at most: those that it sends most to
DIAG, DUMP, DONE, ERROR = 20, 0x301, 3, 2  # of netlink: SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, the end, a refusal
INFO, ESTABLISHED, NETLINK = 2, 1 << 1, 4  # INET_DIAG_INFO, a state of TCP, NETLINK_SOCK_DIAG
HEAD, ASKED, BODY = struct.Struct("<IHHII"), struct.Struct("<BBBBI48x"), 72  # nlmsghdr, inet_diag_req_v2, bytes of inet_diag_msg
RTT, RETRANSMITTED, SENT = 68, 100, 156  # where tcp_info has them: µs, segments, data segments
MAPPED = "::ffff:"  # begins an IPv4 address as a socket of IPv6 has it
FEW = 20  # packets, below which nothing is concluded
SLOW_TIMES, SLOW_MS = 5.0, 5.0  # slow: this many times the others' round trip, and at least that much more
LOSSY_TIMES, LOSSY = 5.0, 0.01  # lossy: this many times the others' share of retransmitted packets, and at least that share


@dataclass(frozen=True)
class PeerLink:
    """One node's connections to one peer: the milliseconds of their median, and their packets so far."""

    ms: float
    sent: int
    again: int


@dataclass(frozen=True)
class NodeLinks:
    """What one node knows of its links: its own addresses, and the links by the peers' addresses."""

    node: int
    attempt: int
    addresses: tuple[str, ...]
    peers: dict[str, PeerLink]


def write_links(folder: Path, node: int, attempt: int) -> None:
    """Records what this node's kernel knows now; nothing if it has no connection to another node."""
    found = list(connections())
    peers: dict[str, list[tuple[float, int, int]]] = {}
    for _, peer, ms, sent, again in found:
        peers.setdefault(peer, []).append((ms, sent, again))
    links = {peer: [median(ms for ms, _, _ in all), sum(s for _, s, _ in all), sum(a for _, _, a in all)]
             for peer, all in peers.items()}  # fmt: skip
    most = sorted(links, key=lambda peer: -links[peer][1])[:PEERS]
    if most:
        from .beats import replace_file

        record = {"node": node, "attempt": attempt, "addresses": sorted({own for own, *_ in found}),
                  "peers": {peer: dict(zip(("ms", "sent", "again"), links[peer], strict=True)) for peer in most}}  # fmt: skip
        replace_file(folder / FOLDER / f"links-{node}", json.dumps(record).encode())


def read_links(folder: Path, attempt: int) -> dict[int, NodeLinks]:
    """The records of an attempt, by node."""
    found = {}
    for path in sorted((folder / FOLDER).glob("links-*")):
        with suppress(OSError, InputError):
            links = fit(NodeLinks, door.read_json(path, door.MEBIBYTE))
            if links.attempt == attempt:
                found[links.node] = links
    return found


def connections() -> Iterator[tuple[str, str, float, int, int]]:
    """This machine's TCP connections to others: own address, the peer's, ms, packets sent, packets retransmitted."""
    if sys.platform != "linux":
        return
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK) as asked:
            asked.settimeout(1.0)
            request = ASKED.pack(family, socket.IPPROTO_TCP, 1 << (INFO - 1), 0, ESTABLISHED)
            asked.send(HEAD.pack(HEAD.size + len(request), DIAG, DUMP, 1, 0) + request)
            yield from _receive(asked, family)


def _receive(asked: socket.socket, family: int) -> Iterator[tuple[str, str, float, int, int]]:
    while data := asked.recv(1 << 18):
        offset = 0
        while offset + HEAD.size <= len(data):
            length, kind, *_ = HEAD.unpack_from(data, offset)
            if kind in (DONE, ERROR) or length < HEAD.size:
                return
            if connection := _parse(data[offset + HEAD.size : offset + length], family):
                yield connection
            offset += (length + 3) & ~3


def _parse(message: bytes, family: int) -> tuple[str, str, float, int, int] | None:
    """The connection in a netlink message; None for one within this machine, or without tcp_info."""
    size = 4 if family == socket.AF_INET else 16
    own, peer = (socket.inet_ntop(family, message[start : start + size]).removeprefix(MAPPED) for start in (8, 24))
    if ipaddress.ip_address(peer).is_loopback or own == peer:
        return None
    offset = BODY
    while offset + 4 <= len(message):
        length, kind = struct.unpack_from("<HH", message, offset)
        if length < 4:
            return None
        if kind == INFO and length - 4 >= SENT + 4:
            rtt, again, sent = (struct.unpack_from("<I", message, offset + 4 + where)[0] for where in (RTT, RETRANSMITTED, SENT))
            return own, peer, rtt / 1000, sent, again
        offset += (length + 3) & ~3
    return None


def slow_nodes(before: Mapping[int, NodeLinks], now: Mapping[int, NodeLinks]) -> dict[int, str]:
    """The nodes whose links are far worse than the others', in words. Pure.

    A bad link spoils two nodes' figures for each other; a node is to blame when even its best pair is bad.
    """
    ms: dict[int, float] = {}
    lost: dict[int, float] = {}
    for a, b, way, share in _pairs(before, now):
        for node in (a, b):
            ms[node] = min(ms.get(node, way), way)
            lost[node] = min(lost.get(node, share), share)
    if len(ms) < 3:  # of two nodes none can be called the bad one
        return {}
    found = {}
    for node in sorted(ms):
        usual_ms, usual_lost = (median(known[other] for other in known if other != node) for known in (ms, lost))
        if lost[node] >= max(LOSSY, LOSSY_TIMES * usual_lost):
            found[node] = f"{100 * lost[node]:.0f} % of the packets on its links are lost, the others' {100 * usual_lost:.1f} %"
        elif ms[node] >= max(usual_ms + SLOW_MS, SLOW_TIMES * usual_ms):
            found[node] = f"a packet takes {ms[node]:.0f} ms there and back on its links, the others' {usual_ms:.1f} ms"
    return found


def _pairs(before: Mapping[int, NodeLinks], now: Mapping[int, NodeLinks]) -> Iterable[tuple[int, int, float, float]]:
    """Each pair of nodes with traffic since `before`, by its worse direction: milliseconds, share of packets retransmitted."""
    nodes = {address: node for node, links in now.items() for address in links.addresses}
    pairs: dict[tuple[int, int], tuple[float, float]] = {}
    for node, links in now.items():
        for peer, link in links.peers.items():
            old = before[node].peers.get(peer, PeerLink(0.0, 0, 0)) if node in before else PeerLink(0.0, 0, 0)
            sent, again = link.sent - old.sent, link.again - old.again
            if (other := nodes.get(peer)) is None or other == node or sent < FEW:
                continue
            pair = min(node, other), max(node, other)
            way, share = pairs.get(pair, (0.0, 0.0))
            pairs[pair] = max(way, link.ms), max(share, max(0, again) / sent)
    return [(a, b, way, share) for (a, b), (way, share) in pairs.items()]
