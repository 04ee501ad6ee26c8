"""Parses fleet.hosts entries: `address`, `name=address` or `address:port`.

As in Slurm, `gpu-[01,03-08]` expands to several hosts.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MOST = 10_000  # maximum number of hosts: more than any fleet has, but still quick to expand
_PIECE = "[0-9]{1,9}(?:-[0-9]{1,9})?"
_RANGES = re.compile(rf"\[({_PIECE}(?:,{_PIECE})*)\]")
_USER = r"[A-Za-z_][A-Za-z0-9._-]{0,62}"
_HOST = re.compile(
    rf"(?:(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)=)?(?:(?P<user>{_USER})@)?"
    r"(?P<address>[A-Za-z0-9_.-]+|\[[0-9a-fA-F:.]+\])(?::(?P<port>[0-9]+))?"
)
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_INSTANCE = re.compile(r"i-[0-9a-f]{8,17}")
_NUMBERS = re.compile(r"[0-9.]+")


@dataclass(frozen=True)
class Host:
    """Fleet machine, with its display name and SSH address."""

    name: str
    address: str
    port: int = 22
    user: str | None = None  # None means fleet.ssh.user

    def __str__(self) -> str:
        return self.name

    @property
    def identity(self) -> str:
        """Returns the instance ID on EC2, where addresses are reused, or else the address."""
        return self.name if _INSTANCE.fullmatch(self.name) else self.address


def parse_hosts(words: Iterable[str]) -> tuple[Host, ...]:
    """Parses and expands the entries of fleet.hosts, in order.

    Raises:
        ValueError: an entry is not a host, or there are too many hosts.
    """
    written = list(words)
    if (count := sum(map(count_of, written))) > MOST:
        raise ValueError(f"{count:,} hosts; at most {MOST:,} are allowed")
    return tuple(parse_host(word) for text in written for word in expand(text))


def count_of(word: str) -> int:
    """Returns the number of hosts that an entry expands to. Raises ValueError for a descending
    range.
    """
    return math.prod(
        sum(len(numbers) for _, numbers in _pieces(ranges)) for ranges in _RANGES.findall(word)
    )


def expand(word: str) -> Iterator[str]:
    """Expands `gpu-[01,08-10]` to gpu-01, gpu-08, gpu-09 and gpu-10.

    Yields an entry without ranges unchanged.
    """
    match = _RANGES.search(word)
    if match is None:
        yield word
        return
    for width, numbers in _pieces(match[1]):
        for number in numbers:
            yield from expand(f"{word[: match.start()]}{number:0{width}d}{word[match.end() :]}")


def _pieces(ranges: str) -> Iterator[tuple[int, range]]:
    """Yields the zero-padded width and the numbers of each bracketed range."""
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise ValueError(f"{piece!r} counts backwards; write the smaller number first")
        yield len(first), numbers


def parse_host(word: str) -> Host:
    """Parses an entry without ranges: name=user@address:port. Only the address is required.

    Raises:
        ValueError: the entry is not a host; the message names the invalid part.
    """
    match = _HOST.fullmatch(word)
    if match is None:
        forms = (
            "address, name=address, user@address or address:port; [::1] for IPv6; "
            "gpu-[01,03-08] for seven"
        )
        raise ValueError(f"{word!r} is not a host; use {forms}")
    address, port = match["address"].strip("[]"), int(match["port"] or 22)
    if not 1 <= port <= 65535:
        raise ValueError(f"{word!r} has the port {port}; use 1 to 65535")
    if not _is_address(address):
        raise ValueError(
            f"{word!r} is not a host: {address!r} is neither a host name nor an IP address"
        )
    return Host(match["name"] or address, address, port, match["user"])


def _is_address(text: str) -> bool:
    """Returns whether the text is an IP address or a valid DNS name.

    Text that consists only of digits and dots is never a DNS name.
    """
    if ":" in text or _NUMBERS.fullmatch(text):
        try:
            ipaddress.ip_address(text)
        except ValueError:
            return False
        return True
    labels = text.removesuffix(".").split(".")
    return len(text) <= 253 and all(_LABEL.fullmatch(label) for label in labels)
