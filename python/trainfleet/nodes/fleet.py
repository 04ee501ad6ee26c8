"""The fleet that a config describes, opened: its hosts, the transport to them, and what they are to be."""

from __future__ import annotations

from ..config import Config
from ..config.hosts import Host, parse_hosts
from .operations import Wanted
from .stack import load_stack
from .transport import Transport


def hosts_of(config: Config) -> tuple[Host, ...]:
    """The hosts of fleet.hosts, the head first."""
    return parse_hosts(config.fleet.hosts)


def open_fleet(config: Config) -> Transport:
    """A transport to all hosts; it connects when it is first used."""
    return Transport(hosts_of(config), config.fleet.ssh)


def wanted_of(config: Config) -> Wanted:
    """What the hosts are to be."""
    return Wanted(config, load_stack(config.fleet.stack))
