"""The fleet that a config describes, opened: its hosts, the transport to them, and their wanted
state.
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
            "fleet.hosts", message, next="list them in config.yaml; make plan runs without them"
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
