"""Opens the fleet that a config describes: its hosts, an SSH transport to them, and their wanted
state.

Also sets how often a head polls its hosts over SSH, and when a silent host is lost. A head with two
cores handles about 64 answers a second (tests/bench/LOG.md). More hosts therefore mean longer
intervals between two polls of each host. The timeout grows with that interval, so a host is lost
only after it has missed several polls.
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
    """Returns the hosts of fleet.hosts. The first one is the head."""
    return parse_hosts(config.fleet.hosts)


def open_fleet(config: Config) -> Transport:
    """Returns a transport to all hosts, which connects on first use. Raises ConfigError if
    fleet.hosts is empty.
    """
    if not config.fleet.hosts:
        message = "the ssh backend needs a list of your machines, e.g. [gpu-01, gpu-02]"
        raise ConfigError.of(
            "fleet.hosts",
            message,
            next="list them in config.yaml; only make plan works without them",
        )
    return Transport(hosts_of(config), config.fleet.ssh)


def is_here(host: Host) -> bool:
    """Tells whether a host is this machine, which is true if a socket can bind its address."""
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


ANSWERS = 64  # answers per second that one head handles
LOOK_EVERY = 1.0  # seconds between two polls of a host, for up to ANSWERS hosts
LOST_AFTER = 9.0  # seconds of silence before a host is lost; a dead link shows after 8 s
# maximum nodes of a job over SSH; each is polled every 8 s, and is lost after 30 s
MOST_NODES = 512


def look_every(hosts: int) -> float:
    """Returns the seconds between two polls of one host."""
    return max(LOOK_EVERY, hosts / ANSWERS)


def lost_after(hosts: int) -> float:
    """Returns the seconds of silence after which a host is lost.

    They suffice for three polls, including the timeout of the last one.
    """
    return max(LOST_AFTER, 3 * look_every(hosts) + LOST_AFTER - 3 * LOOK_EVERY)


def spread(hosts: int) -> float:
    """Returns the seconds that one round of polls takes if every host answers at once."""
    return hosts / ANSWERS
