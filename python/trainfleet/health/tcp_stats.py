"""Link quality between nodes, measured from the kernels' TCP connection statistics.

Sends no probes or other traffic.

heartbeats/links-<i>   node i's addresses, and for each peer the RTT in milliseconds and the
                       packets sent and retransmitted. The rank that does the node's round writes
                       the file every EVERY seconds (health/heartbeat.py)

The kernel reports the statistics over netlink (sock_diag(7)), in tcp_info (linux/tcp.h), to which
new fields are only ever appended. EFA and InfiniBand traffic bypasses the kernel, so it is not
counted. Nothing is recorded on systems other than Linux. Standard library only.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..process.file_systems import replace_file
from ..trust import untrusted_input
from ..trust.errors import InputError
from ..trust.validation import fit

FOLDER, EVERY = "heartbeats", 5.0  # seconds between records
PEERS = 64  # maximum number of peers to record per node, busiest first
# netlink's SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, NLMSG_DONE and NLMSG_ERROR
DIAG = 20
DUMP = 0x301
DONE = 3
ERROR = 2
# INET_DIAG_INFO, TCP_ESTABLISHED as a bit mask, NETLINK_SOCK_DIAG
INFO, ESTABLISHED, NETLINK = 2, 1 << 1, 4
# sizes of nlmsghdr, inet_diag_req_v2 and inet_diag_msg
HEAD = struct.Struct("<IHHII")
ASKED = struct.Struct("<BBBBI48x")
BODY = 72
RTT, RETRANSMITTED, SENT = 68, 100, 156  # offsets in tcp_info: µs, segments, data segments
MAPPED = "::ffff:"  # prefix of IPv4 addresses in IPv6 sockets
FEW = 20  # minimum number of packets needed to judge a link
# A link is slow if its RTT exceeds that of the other links by both this factor and this many
# milliseconds.
SLOW_TIMES = 5.0
SLOW_MS = 5.0
# Thresholds beyond which a link is bad on any network, even if the run is not slower.
CLEARLY_SLOW_MS = 100.0
CLEARLY_LOSSY = 0.02
# A link is lossy if its retransmission rate exceeds both this multiple of the other links' rate and
# this absolute rate.
LOSSY_TIMES = 5.0
LOSSY = 0.01


@dataclass(frozen=True)
class PeerLink:
    """One node's connections to one peer: median RTT in milliseconds, and packet counts."""

    ms: float
    sent: int
    again: int


@dataclass(frozen=True)
class NodeLinks:
    """A node's addresses, and its links by peer address."""

    node: int
    attempt: int
    addresses: tuple[str, ...]
    peers: dict[str, PeerLink]


Links = Mapping[int, NodeLinks]  # links of all nodes, by node


def write_links(folder: Path, node: int, attempt: int) -> None:
    """Records this node's TCP statistics.

    Writes no file if there are no connections to other nodes.
    """
    found = list(connections())
    peers: dict[str, list[tuple[float, int, int]]] = {}
    for _, peer, ms, sent, again in found:
        peers.setdefault(peer, []).append((ms, sent, again))
    links = {
        peer: [
            median(ms for ms, _, _ in all_),
            sum(s for _, s, _ in all_),
            sum(a for _, _, a in all_),
        ]
        for peer, all_ in peers.items()
    }
    most = sorted(links, key=lambda peer: -links[peer][1])[:PEERS]
    if most:
        record = {
            "node": node,
            "attempt": attempt,
            "addresses": sorted({own for own, *_ in found}),
            "peers": {
                peer: dict(zip(("ms", "sent", "again"), links[peer], strict=True)) for peer in most
            },
        }
        replace_file(folder / FOLDER / f"links-{node}", json.dumps(record).encode())


def read_links(folder: Path, attempt: int) -> dict[int, NodeLinks]:
    """Returns the recorded links of an attempt, by node."""
    found = {}
    for path in sorted((folder / FOLDER).glob("links-*")):
        with suppress(OSError, InputError):
            links = fit(NodeLinks, untrusted_input.read_json(path, untrusted_input.MEBIBYTE))
            if links.attempt == attempt:
                found[links.node] = links
    return found


def connections() -> Iterator[tuple[str, str, float, int, int]]:
    """Yields this machine's TCP connections to other machines.

    Each tuple contains the local address, peer address, RTT in ms, packets sent, and packets
    retransmitted.
    """
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
    """Returns the connection in a netlink message.

    Returns None for a local connection or a message without tcp_info.
    """
    size = 4 if family == socket.AF_INET else 16
    own, peer = (
        socket.inet_ntop(family, message[start : start + size]).removeprefix(MAPPED)
        for start in (8, 24)
    )
    if ipaddress.ip_address(peer).is_loopback or own == peer:
        return None
    offset = BODY
    while offset + 4 <= len(message):
        length, kind = struct.unpack_from("<HH", message, offset)
        if length < 4:
            return None
        if kind == INFO and length - 4 >= SENT + 4:
            rtt, again, sent = (
                struct.unpack_from("<I", message, offset + 4 + where)[0]
                for where in (RTT, RETRANSMITTED, SENT)
            )
            return own, peer, rtt / 1000, sent, again
        offset += (length + 3) & ~3
    return None


def slow_nodes(before: Links, now: Links, slower: bool = True) -> dict[int | None, str]:
    """Returns the nodes whose links are far worse than the others', with the reasons as text. Pure
    function.

    A bad link shows up in two nodes' statistics, so a node is blamed only if even its best link is
    bad. With only two nodes, a good link to another machine exonerates a node. Otherwise, the key
    None stands for the link between the two.

    `slower` is whether the run has become slower. If not, only links that would be bad on any
    network count.
    """
    ms: dict[int, float] = {}
    lost: dict[int, float] = {}
    pairs = _pairs(before, now)
    for a, b, way, share in pairs:
        for node in (a, b):
            ms[node] = min(ms.get(node, way), way)
            lost[node] = min(lost.get(node, share), share)
    if len(ms) < 3:
        return {
            _worse_of_two(a, b, now): words
            for a, b, way, share in pairs
            if (words := _words(way, share, 0.0, 0.0, False))
        }
    found: dict[int | None, str] = {}
    for node in sorted(ms):
        usual_ms, usual_lost = (
            median(known[other] for other in known if other != node) for known in (ms, lost)
        )
        if words := _words(ms[node], lost[node], usual_ms, usual_lost, slower):
            found[node] = f"{words}; other nodes lose {usual_lost:.1%} and have {usual_ms:.1f} ms"
    return found


def _words(ms: float, lost: float, usual_ms: float, usual_lost: float, slower: bool) -> str:
    """Describes the problem of links with this RTT and loss rate. Returns "" for good links."""
    least_ms, least_lost = (SLOW_MS, LOSSY) if slower else (CLEARLY_SLOW_MS, CLEARLY_LOSSY)
    if lost >= max(least_lost, LOSSY_TIMES * usual_lost):
        return f"its links lose {lost:.0%} of the packets"
    if ms >= max(usual_ms + least_ms, SLOW_TIMES * usual_ms):
        return f"its links have a round-trip time of {ms:.0f} ms"
    return ""


def _worse_of_two(a: int, b: int, now: Links) -> int | None:
    """Returns the one of two nodes that has no good link to any other machine, or None if both or
    neither have one.

    Launchers and file servers count as other machines.
    """
    both = {address for node in (a, b) for address in now[node].addresses}
    good = [
        node
        for node in (a, b)
        if any(_is_good(link) for peer, link in now[node].peers.items() if peer not in both)
    ]
    return {a: b, b: a}[good[0]] if len(good) == 1 else None


def _is_good(link: PeerLink) -> bool:
    return (
        link.sent >= FEW
        and link.ms < CLEARLY_SLOW_MS / 2
        and link.again < CLEARLY_LOSSY / 2 * link.sent
    )


def _pairs(before: Links, now: Links) -> list[tuple[int, int, float, float]]:
    """Returns the link quality of each node pair that exchanged traffic since `before`: RTT in
    milliseconds and retransmission rate, each taken from the worse direction.
    """
    nodes = {address: node for node, links in now.items() for address in links.addresses}
    pairs: dict[tuple[int, int], tuple[float, float]] = {}
    for node, links in now.items():
        earlier = before[node].peers if node in before else {}
        for peer, link in links.peers.items():
            old = earlier.get(peer, PeerLink(0.0, 0, 0))
            sent, again = link.sent - old.sent, link.again - old.again
            if (other := nodes.get(peer)) is None or other == node or sent < FEW:
                continue
            pair = min(node, other), max(node, other)
            way, share = pairs.get(pair, (0.0, 0.0))
            pairs[pair] = max(way, link.ms), max(share, max(0, again) / sent)
    return [(*pair, *worse) for pair, worse in pairs.items()]
