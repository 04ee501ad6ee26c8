"""The hosts of fleet.hosts: `address`, `name=address`, `address:port`, and `gpu-[01-08]` for many at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_RANGE = re.compile(r"\[(\d+)-(\d+)\]")
_HOST = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?:(?P<user>[\w.-]+)@)?(?P<address>[\w.-]+|\[[0-9a-fA-F:]+\])(?::(?P<port>\d+))?")


@dataclass(frozen=True)
class Host:
    """One machine of the fleet: the name that tables show, and where SSH finds it."""

    name: str
    address: str
    port: int = 22
    user: str | None = None  # None: fleet.ssh.user

    def __str__(self) -> str:
        return self.name


def parse_hosts(words: Iterable[str]) -> tuple[Host, ...]:
    """The hosts in their order.

    Raises:
        ValueError: a word is no host.
    """
    return tuple(_parse(word) for written in words for word in expand(written))


def expand(word: str) -> Iterator[str]:
    """`gpu-[08-10]` → gpu-08, gpu-09, gpu-10; what holds no range is itself."""
    match = _RANGE.search(word)
    if match is None:
        yield word
        return
    first, last = match.groups()
    for number in range(int(first), int(last) + 1):
        yield from expand(f"{word[: match.start()]}{number:0{len(first)}d}{word[match.end() :]}")


def _parse(word: str) -> Host:
    match = _HOST.fullmatch(word)
    if match is None:
        raise ValueError(f"{word!r} is not a host: address, name=address, user@address or address:port")
    address = match["address"].strip("[]")
    return Host(match["name"] or address, address, int(match["port"] or 22), match["user"])
