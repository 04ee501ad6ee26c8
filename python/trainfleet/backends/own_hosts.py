"""The hosts of a fleet that are yours, as machines: setup mends them, and nothing takes them down."""

from __future__ import annotations

from ..config import Config
from ..nodes import leftovers
from ..nodes.fleet import open_fleet
from ..nodes.host_results import Host, HostFailure, Implausible, Result, grouped, implausible, names, settled
from ..plan.request import Artifact
from .base import Machines

REMOVAL = 600.0  # seconds: a folder of files may be large


class OwnHosts(Machines):
    """Machines (backends/base.py) that are yours: setup mends them, and nothing takes them down."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def changes(self) -> tuple[Artifact, ...]:
        """By host, the script of what is missing on it."""
        from ..nodes.host_setup import commands

        return tuple(Artifact(name, text) for name, text in commands(self.config).items()) if self.config.fleet.hosts else ()

    def apply(self) -> int:
        """Looks again, as hosts change; does what is missing then."""
        from ..nodes import host_setup

        return host_setup.main(self.config)

    def left(self) -> list[str]:
        """What setup and runs have left on the hosts beside runs and datasets, by host."""
        if not self.config.fleet.hosts:
            return []
        with open_fleet(self.config) as transport:
            shared = {transport.hosts[0]: self.config.fleet.shared_folder or ""}
            answers = transport.run(lambda host: leftovers.find(shared.get(host, "")), timeout=REMOVAL)
        traces: dict[str, dict[Host, str]] = {}
        for host, answer in answers.items():
            for what in _traces(settled(answer)):
                traces.setdefault(what, {})[host] = what
        return [f"{names(hosts)}: {what}" for said in traces.values() for hosts, what in grouped(said)]

    def remove(self, purge: bool) -> None:
        if not purge or not self.config.fleet.hosts:
            return
        with open_fleet(self.config) as transport:
            user = self.config.fleet.ssh.user
            command = leftovers.remove(self.config.fleet.shared_folder or "", is_root=user == "root")
            answers = transport.run(command, timeout=REMOVAL)
        answers.require("not all could be removed", then="make clean PURGE=all again")


def _traces(answer: Result | HostFailure) -> list[str]:
    """What a host says that is left on it, or why it does not say that."""
    if isinstance(answer, HostFailure):
        return [f"it is not known, as {answer}"]
    try:
        return leftovers.read(answer.stdout)
    except Implausible as error:
        return [f"it is not known: {implausible(error, 'a list of what is left')}"]
