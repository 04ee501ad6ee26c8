"""Opens the fleet that a config describes: its hosts, the transport to them, and their wanted
state. Sets the pace of one head over SSH: how often it polls hosts, and when a silent one is lost.

A head with two cores handles about 64 answers a second (tests/bench/LOG.md). So more hosts mean
longer pauses between two polls of each. A host is lost only when it has missed polls, not when many
hosts delay its turn.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from ..config import Config
from ..config.host_list import Host, parse_hosts
from ..trust.errors import ConfigError
from .install_steps import Wanted
from .platform import load_platform
from .transport import Transport


def hosts_of(config: Config) -> tuple[Host, ...]:
    """Returns the hosts of fleet.hosts, the head first."""
    return parse_hosts(config.fleet.hosts)


def open_fleet(config: Config) -> Transport:
    """Returns a transport to all hosts, which connects at its first use; ConfigError if the config
    names no host.
    """
    if not config.fleet.hosts:
        message = "the ssh backend needs a list of your machines, e.g. [gpu-01, gpu-02]"
        raise ConfigError.of(
            "fleet.hosts",
            message,
            next="list them in config.yaml; make plan runs without them",
        )
    return Transport(hosts_of(config), config.fleet.ssh)


def is_here(host: Host) -> bool:
    """Tells whether a host is this machine: a socket can bind its address."""
    with suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.address, 0, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as own:
            own.bind(address)
            return True
    return False


def wanted_of(config: Config) -> Wanted:
    """Returns the wanted state of the hosts."""
    return Wanted(config, load_platform(config.fleet.platform))


ANSWERS = 64  # a second
LOOK_EVERY = 1.0  # seconds, for up to ANSWERS hosts
LOST_AFTER = (
    9.0  # seconds without an answer, likewise; a dead link shows after 8 (hosts/transport.py)
)
MOST_NODES = 512  # of a job over SSH: each is polled every 8 s, and counts as lost after 30


def look_every(hosts: int) -> float:
    """Returns the seconds between two polls of one host."""
    return max(LOOK_EVERY, hosts / ANSWERS)


def lost_after(hosts: int) -> float:
    """Returns the seconds without an answer until a host is lost: time for three polls, including
    the last one's timeout.
    """
    return max(LOST_AFTER, 3 * look_every(hosts) + LOST_AFTER - 3 * LOOK_EVERY)


def spread(hosts: int) -> float:
    """Returns the seconds until all hosts have been polled, if each answers at once."""
    return hosts / ANSWERS
