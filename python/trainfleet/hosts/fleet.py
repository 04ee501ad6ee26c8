"""The fleet that a config describes, opened: its hosts, the transport to them, and what they are to
be.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from ..config import Config
from ..config.host_list import Host, parse_hosts
from ..trust.errors import ConfigError
from .install_steps import Wanted
from .stack import load_stack
from .transport import Transport


def hosts_of(config: Config) -> tuple[Host, ...]:
    """The hosts of fleet.hosts, the head first."""
    return parse_hosts(config.fleet.hosts)


def open_fleet(config: Config) -> Transport:
    """A transport to all hosts, which connects when it is first used; ConfigError where the config
    names none.
    """
    if not config.fleet.hosts:
        message = "the ssh backend needs the machines that you have, e.g. [gpu-01, gpu-02]"
        raise ConfigError.of(
            "fleet.hosts", message, next="write them into config.yaml; make plan needs none"
        )
    return Transport(hosts_of(config), config.fleet.ssh)


def is_here(host: Host) -> bool:
    """Whether a host is this machine: an address of its own can be bound."""
    with suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.address, 0, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as own:
            own.bind(address)
            return True
    return False


def wanted_of(config: Config) -> Wanted:
    """What the hosts are to be."""
    return Wanted(config, load_stack(config.fleet.stack))
