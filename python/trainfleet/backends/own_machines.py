"""Existing machines: this machine, and the user's hosts.

Setup installs missing components on the hosts, but no command ever shuts them down. `make clean
PURGE=1` lists the files that setup and runs left on the hosts, except for runs and datasets.
PURGE=all deletes these files. Drivers, EFA, Lustre and packages are neither listed nor removed,
because other programs may depend on them by now.
"""

from __future__ import annotations

import platform
import re
import shlex
import shutil
from importlib.metadata import version
from pathlib import Path

from ..config import Config
from ..hardware import node_types
from ..hosts.fleet import open_fleet
from ..hosts.head import KEY
from ..hosts.host_results import (
    Host,
    HostFailure,
    Implausible,
    Result,
    grouped,
    implausible,
    names,
    settled,
)
from ..hosts.install_steps import HARDENING, LIMITS
from ..node.placement import LINK, unlinked
from ..plan.job import Artifact
from ..process import file_systems
from ..run import contents
from ..trust.errors import BackendError
from .base import Changes, Machines


class Standing(Machines):
    """Existing machines (base.py), which setup only lists and `make clean` leaves alone."""

    def changes(self) -> Changes:
        return ()

    def left(self) -> list[str]:
        return []

    def remove(self, purge: bool) -> None: ...


class ThisMachine(Standing):
    """This machine, which simulates `nodes` nodes."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def apply(self) -> int:
        """Prints the devices available for training.

        Raises BackendError if the simulated nodes could not connect to each other.
        """
        if fault := unlinked():
            raise BackendError(fault, next=LINK)
        accelerators = node_types.local_accelerators()
        rows = {
            "python": platform.python_version(),
            "torch": version("torch"),
            "cores": str(node_types.local_cores()),
            "accelerators": str(accelerators) if accelerators else "none: training runs on CPUs",
            "disk free": f"{shutil.disk_usage('.').free / 1e9:.0f} GB",
        }
        for name, value in rows.items():
            print(f"{name:13} {value}")
        if self.nodes > node_types.local_cores():
            print(
                f"note: {self.nodes} nodes share {node_types.local_cores()} cores, so each node "
                "is slower"
            )
        file_systems.look(Path())
        print("ready; the local backend needs no other setup\nnext: make train")
        return 0


REMOVAL = 600.0  # timeout in seconds; the folders can be large
IN_SHARED = tuple(kind.name.rstrip("/") for kind in contents.kinds(contents.SHARED))
HOME = "~/.trainfleet"
KEYS = "~/.ssh/authorized_keys"
OURS = " trainfleet head "  # part of the comment in a head's public SSH key
WORDS = {
    "shared": "{what} in the shared folder",
    "key": f"{KEY}, the SSH key of a head",
    "admitted": f"{{what}} SSH keys of heads in {KEYS}",
    "home": f"{HOME}, job scripts and logs",
    "file": "{what}",
}


class OwnHosts(Machines):
    """Machines (base.py) that the user owns.

    Setup installs missing components, but no command ever shuts the hosts down.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def changes(self) -> Changes:
        """Returns one script per host, with the setup steps that it is missing."""
        from ..hosts.host_setup import commands

        if self.config.fleet.hosts:
            return tuple(Artifact(name, text) for name, text in commands(self.config).items())
        return ()

    def apply(self) -> int:
        """Rereads the hosts, because they may have changed since the plan, and runs the missing
        setup steps.
        """
        from ..hosts import host_setup

        return host_setup.main(self.config)

    def left(self) -> list[str]:
        """Returns the files that setup and runs left on the hosts, except for runs and datasets."""
        if not self.config.fleet.hosts:
            return []
        with open_fleet(self.config) as transport:
            shared = {transport.hosts[0]: self.config.fleet.shared_folder or ""}
            answers = transport.run(lambda host: find(shared.get(host, "")), timeout=REMOVAL)
        traces: dict[str, dict[Host, str]] = {}
        for host, answer in answers.items():
            for what in _traces(settled(answer)):
                traces.setdefault(what, {})[host] = what
        return [
            f"{names(hosts)}: {what}" for said in traces.values() for hosts, what in grouped(said)
        ]

    def remove(self, purge: bool) -> None:
        if not purge or not self.config.fleet.hosts:
            return
        with open_fleet(self.config) as transport:
            user = self.config.fleet.ssh.user
            command = remove(self.config.fleet.shared_folder or "", is_root=user == "root")
            answers = transport.run(command, timeout=REMOVAL)
        answers.require("could not remove some files", then="run make clean PURGE=all again")


def _traces(answer: Result | HostFailure) -> list[str]:
    """Returns a host's leftover files, or a line stating why they are unknown."""
    if isinstance(answer, HostFailure):
        return [f"unknown: {answer}"]
    try:
        return read(answer.stdout)
    except Implausible as error:
        return [f"unknown: {implausible(error, 'a list of leftover files')}"]


def find(shared: str = "") -> str:
    """Returns a command that prints one `kind name` line per leftover file or folder.

    `shared` is set on only one host, because all hosts see the same folder.
    """
    names = " ".join(IN_SHARED)
    look = f"""cd {shlex.quote(shared)} 2> /dev/null && for name in {names}; do
[ ! -d "$name" ] || [ -L "$name" ] || echo "shared $(du -sh -- "$name" | cut -f 1) $name"
done
"""
    return f"""{look if shared else ""}[ ! -e {KEY} ] || echo key
count=$(grep -cs -e '{OURS}' {KEYS})
[ "${{count:-0}}" = 0 ] || echo "admitted $count"
[ ! -d {HOME} ] || echo home
for path in {HARDENING} {LIMITS}; do [ ! -e "$path" ] || echo "file $path"; done"""


def read(text: str) -> list[str]:
    """Parses the output of the `find` command into readable lines. Raises Implausible if it is
    malformed.
    """
    found = []
    for line in filter(None, text.split("\n")):
        kind, _, what = line.partition(" ")
        if kind not in WORDS or not re.fullmatch(r"[A-Za-z0-9 ./_-]{0,80}", what):
            raise Implausible(f"the line {line[:80]!a}")
        found.append(WORDS[kind].format(what=what))
    return found


def remove(shared: str, is_root: bool) -> str:
    """Returns a command that deletes all leftover files.

    Keeps the user's SSH key, because this connection uses it.
    """
    sudo = "" if is_root else "sudo -n "
    removal = "rm -rf --one-file-system --"
    return f"""cd {shlex.quote(shared)} 2> /dev/null && {removal} {" ".join(IN_SHARED)}
rm -rf -- {KEY} {KEY}.pub {HOME}
[ ! -e {KEYS} ] || sed -i -e '/{OURS}/d' {KEYS}
[ ! -e {HARDENING} ] || {sudo}rm -f -- {HARDENING}
[ ! -e {LIMITS} ] || {sudo}rm -f -- {LIMITS}"""
