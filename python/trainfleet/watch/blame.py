"""Finds the node that the others blame: names and addresses of nodes, pids of ranks, and votes
against peers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_OWN = (  # lines in which a node reports its own name
    re.compile(r"^(?P<name>[\w.-]+):(?P<pid>\d+):\d+ \[\d+\] .*NCCL "),
    re.compile(r"NCCL INFO .*Using .*?:(?P<name>\d+\.\d+\.\d+\.\d+)<"),
    re.compile(r"SocketImpl\(fd=\d+, addr=\[(?P<name>[^\]]+)\]"),
    re.compile(r"My EFA addr: (?P<name>fi_addr_efa://\[[^\]]+\])"),
    re.compile(r"^\s+host\s+: (?P<name>\S+)"),
    re.compile(r"[Tt]he node '(?P<name>[^']+)' has joined round \d+"),
)
_OF_ALL = re.compile(r"localhost|127\.[\d.]+|::1")  # names that every node has
_HINTS = ("NCCL ", "SocketImpl(", "My EFA addr", " host ", "has joined round")
_PIDS = (re.compile(r"\(pid:? (\d+)\)"), re.compile(r"^\d{4}-\w{3}-\d\d [\d:.]+ +(\d+):\d+ "))


@dataclass
class Book:
    """The directory of a job: node by name or address, rank by node and pid."""

    nodes: dict[str, int] = field(default_factory=dict)
    pids: dict[tuple[int, int], int] = field(default_factory=dict)
    # the rank that torchrun saw fail first, by node
    failed: dict[int, int] = field(default_factory=dict)

    def note(self, node: int, rank: int | None, text: str) -> None:
        """Learns a node's name or a rank's pid from a line that it wrote."""
        if any(hint in text for hint in _HINTS):
            for pattern in _OWN:
                if match := pattern.search(text):
                    if not _OF_ALL.fullmatch(name := plain(match["name"])):
                        self.nodes.setdefault(name, node)
                    if rank is not None and match.groupdict().get("pid"):
                        self.pids.setdefault((node, int(match["pid"])), rank)
        if rank is not None and ("pid" in text or "NRT:" in text or "TDRV:" in text):
            for pattern in _PIDS:
                if match := pattern.search(text):
                    self.pids.setdefault((node, int(match[1])), rank)

    def node_of(self, peer: str | None) -> int | None:
        """Returns the node with this name or address, or None if it is unknown."""
        return None if peer is None else self.nodes.get(plain(peer))


def plain(name: str) -> str:
    """Returns a host's name in one form: without port, domain and process; EC2's `ip-10-0-0-1` as
    an address.
    """
    if name.startswith("fi_addr"):
        return name
    name = re.sub(r"_\d+_\d+$", "", name.strip("[]").removeprefix("::ffff:").lower())
    name = name.rpartition("@")[2]
    if match := re.match(r"ip-(\d+)-(\d+)-(\d+)-(\d+)\b", name):
        return ".".join(match.groups())
    return (
        name
        if re.fullmatch(r"[\d.:a-f]+", name)
        else re.sub(r"-ib$|-eth\d$", "", name.partition(".")[0])
    )


def votes(accusations: Iterable[tuple[int | None, int | None]]) -> Counter[int]:
    """Counts for each node how many other nodes blame it, from (accuser, accused) pairs."""
    accusers: Mapping[int, set[int]] = defaultdict(set)
    for accuser, accused in accusations:
        if accuser is not None and accused is not None and accuser != accused:
            accusers[accused].add(accuser)
    return Counter({node: len(others) for node, others in accusers.items()})


def most_blamed(counted: Counter[int]) -> int | None:
    """Returns the node that most others blame, or None after a tie or without votes."""
    ranking = counted.most_common(2)
    if not ranking or (len(ranking) > 1 and ranking[0][1] == ranking[1][1]):
        return None
    return ranking[0][0]
