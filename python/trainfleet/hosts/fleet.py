"""Opens a config's fleet: its hosts, the SSH transport to them, and their desired state.

Also defines how often a head polls its hosts over SSH, and when a silent host counts as lost. A
head with two cores can process about 64 responses per second (tests/bench/LOG.md), so larger fleets
are polled less often. The timeout grows with the polling interval, so a host counts as lost only
after several missed polls.
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
    """Returns the hosts in fleet.hosts. The first host is the head."""
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
    """Returns whether a host is this machine.

    Checks that a socket can be bound to the host's address, which works only for local addresses.
    """
    with suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.address, 0, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as own:
            own.bind(address)
            return True
    return False


def wanted_of(config: Config) -> Wanted:
    """Returns the hosts' desired state."""
    return Wanted(config, load_platform(config.fleet.platform))


ANSWERS = 64  # responses per second that a head can process
LOOK_EVERY = 1.0  # polling interval per host in seconds, for fleets of at most ANSWERS hosts
LOST_AFTER = 9.0  # seconds of silence after which a host is lost; a dead link is detected after 8 s
# maximum nodes per SSH job; at this size, nodes are polled every 8 s and count as lost after 30 s
MOST_NODES = 512


def look_every(hosts: int) -> float:
    """Returns the polling interval per host in seconds."""
    return max(LOOK_EVERY, hosts / ANSWERS)


def lost_after(hosts: int) -> float:
    """Returns the seconds of silence after which a host counts as lost.

    Allows for three polls, including the timeout of the last one.
    """
    return max(LOST_AFTER, 3 * look_every(hosts) + LOST_AFTER - 3 * LOOK_EVERY)


def spread(hosts: int) -> float:
    """Returns the minimum duration of a polling round in seconds, if all hosts respond
    immediately.
    """
    return hosts / ANSWERS
