"""Rehearsal stage on a fleet's hosts: a short separate run in a new folder inside the shared
folder.

The stage only touches its folder, processes marked as belonging to its runs, and, for a limited
time, one host's network link. It restores everything at the end, even after Ctrl-C. After kill -9,
the hosts clean up on their own because each host's guard watches for this process's heartbeat.
After SILENT seconds without a heartbeat, the guard kills the runs, removes their mounts, and
removes the folder. Each host restores its link after a fixed time, without this process.

Limitations: links can't be changed on hosts where sudo requires a password. Instances that only
Session Manager can reach are not supported.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from ..backends import backend_of
from ..backends.base import Can
from ..backends.head import PLAIN, Head
from ..config import Config
from ..hosts import host_commands
from ..hosts.fleet import open_fleet, wanted_of
from ..hosts.host_results import by_host
from ..hosts.ssh_config import expanded
from ..hosts.transport import Transport
from ..trust.errors import BackendError, ConfigError, RunError
from . import rehearsal
from .rehearsal import (
    APART,
    KERNEL,
    LONGER,
    MAJORITY,
    PYTHON_OF_NODES,
    REMOVE,
    SPARE,
    STRUCK,
    RehearsalStage,
    config_of_run,
    furnish,
    rehearse_unbroken,
)

PREFIX = "rehearsal-"
TIMEOUT = 60.0
UNDONE = "the rehearsal failed on these hosts"
SIGN, SILENT = 10.0, 60  # heartbeat interval, and seconds of silence until guards act
# Keys that the rehearsal's config copies from the user's fleet.
KEPT = (
    "hosts",
    "ssh",
    "platform",
    "install_docker",
    "instance_type",
    "accelerator",
    "container",
    "container_base",
)
RANK = """p=$(grep -FsxzlZ -e {mark} /proc/[0-9]*/environ | xargs -0r grep -Fsxzl -e RANK=1 | cut -d / -f 3 | sort -n | head -n 1)
[ -n "$p" ] || exit 0"""  # noqa: E501
SHAPING = """s=; [ "$(id -u)" = 0 ] || s='sudo -n'
$s true || {{ echo "sudo requires a password"; exit; }}
command -v tc > /dev/null || {{ echo "tc is not installed (iproute2)"; exit; }}
d=$(ip -o route get "$(getent ahostsv4 {peer} | sed -n '1s/ .*//p')" | sed -n 's/.* dev \\([^ ]*\\).*/\\1/p')
[ -n "$d" ] || {{ echo "no route to {peer}"; exit; }}
setsid env {link} sh -c "trap '$s tc qdisc del dev $d root; exit' TERM
sleep 0.5; $s tc qdisc replace dev $d root tbf {rate}; sleep {seconds} & wait
$s tc qdisc del dev $d root" > /dev/null 2>&1 < /dev/null &
echo struck"""  # noqa: E501
# Environment markers of the process that slows a link, and of a host's guard.
LINK, WATCH = ("TRAINFLEET_LINK", "TRAINFLEET_GUARD")
END = """for _ in $(seq 50); do
p=$(grep -Fsxzl -e {mark} /proc/[0-9]*/environ | cut -d / -f 3)
[ -n "$p" ] || break
kill $p 2> /dev/null; sleep 0.1
done"""
UNMOUNT = """cut -d ' ' -f 2 /proc/mounts | sort -r | while read -r m; do case "$m" in {folder}/*) umount -l "$m";; esac; done"""  # noqa: E501
GUARD = """while age=$(( $(date +%s) - $(stat -c %Y {folder}/sign || echo 0) )) && [ -e {folder}/sign ] && [ $age -lt {silent} ]
do sleep 5; done
[ -e {folder}/sign ] || exit 0
{end}
{remove}
"""  # noqa: E501


@dataclass
class HostStage(RehearsalStage):
    """Rehearsal stage that runs on the fleet's hosts. Faults are injected on node 1's host."""

    transport: Transport = field(kw_only=True)
    shared: str = field(kw_only=True)  # the stage folder's path on the hosts
    # Names of the runs: the baseline and one per fault.
    names: tuple[str, ...] = field(kw_only=True)

    steps, apart, outlives, things = LONGER, APART, True, "hosts with processes"

    @property
    def place(self) -> str:
        return self.shared

    def called(self, name: str) -> str:
        return PREFIX + name

    def mark(self, name: str) -> str:
        return host_commands.mark_of(self.shared, self.called(name))

    def at_rank(self, name: str, command: str) -> str:
        rank = RANK.format(mark=quote(f"{host_commands.MARK}={self.mark(name)}"))
        words = f"{rank}\nc={self.checkpoints(name)}\n( {command}\n) || true"
        said = [
            answer.stdout.strip()
            for answer in self.transport.run(words, timeout=TIMEOUT).ok.values()
        ]
        if not any(said):
            raise RunError(
                f"no host has rank 1 of {self.called(name)}",
                where=self.shared,
                next="run make rehearse YES=1 again",
            )
        return next(filter(None, said))

    def on_head(self, command: str) -> str:
        answers = self.transport.run(
            command, timeout=TIMEOUT, hosts=self.transport.hosts[:1]
        ).require(UNDONE)
        return next(iter(answers.ok.values())).stdout.strip()

    def on_all(self, command: str) -> None:
        """Runs a shell command on every host. Raises a BackendError listing the hosts where it
        failed.
        """
        self.transport.run(command, timeout=TIMEOUT).require(UNDONE)

    def let_write(self, name: str) -> None:
        self.on_all(self.unmount)
        super().let_write(name)

    @property
    def unmount(self) -> str:
        """Returns a shell command that removes all mounts in the stage's folder."""
        return UNMOUNT.format(folder=quote(self.shared))

    def shape(self, name: str, rate: str, seconds: int) -> str:
        peer = quote(self.transport.hosts[0].address)
        said = self.at_rank(
            name, SHAPING.format(peer=peer, rate=rate, seconds=seconds, link=self.link)
        )
        return "" if said == STRUCK else " ".join(said.split())

    def free(self) -> None:
        self.on_all(END.format(mark=self.link))

    @property
    def link(self) -> str:
        return quote(f"{LINK}={self.shared}")

    @property
    def guard(self) -> str:
        return quote(f"{WATCH}={self.shared}")

    def lose_head(self, name: str) -> str:
        self.on_head(host_commands.fence(self.mark(name), launchers=True))
        return self.transport.hosts[0].name

    def at_work(self) -> Sequence[object]:
        look = "; ".join(f"{{ {host_commands.look_for(self.mark(name))}; }}" for name in self.names)
        return [
            host
            for host, said in self.transport.run(look, timeout=TIMEOUT).ok.items()
            if "running" in said.stdout
        ]

    def end_all(self) -> str:
        """Returns a shell command that kills the stage's runs on a host, launchers first, and
        removes their job files from the host.
        """
        ends = [
            f"( {host_commands.fence(self.mark(name), launchers=True)} )" for name in self.names
        ]
        return "\n".join(
            [
                *ends,
                END.format(mark=self.link),
                self.unmount,
                f"rm -f {host_commands.JOBS}/$(uname -n)/{PREFIX}*",
            ]
        )

    def put_back(self) -> None:
        """Restores the hosts. Raises a BackendError listing the hosts that could not be
        restored.
        """
        folder = quote(self.shared)
        self.transport.run(self.end_all(), timeout=TIMEOUT)
        # Repeated because a launcher may have started a process on another host just before it
        # ended.
        failed = self.transport.run(self.end_all(), timeout=TIMEOUT).failed
        failed |= self.transport.run(
            REMOVE.format(folder=folder), timeout=TIMEOUT, hosts=self.transport.hosts[:1]
        ).failed
        failed |= self.transport.run(
            END.format(mark=self.guard), timeout=TIMEOUT
        ).failed  # Guards are stopped last, because they must watch until the folder is removed.
        if failed:
            raise BackendError(
                by_host("these hosts were not fully restored", failed),
                next=f"run rm -rf {folder} on these hosts, then make doctor",
            )


def require_hosts(head: Head) -> Config:
    """Returns the config with the existing hosts, using the addresses that this machine can reach.

    Raises:
        ConfigError: the hosts are unsuitable for a rehearsal.
        BackendError: AWS does not list the hosts.
    """
    makes = Can.MACHINES in backend_of(head.config).can
    located, then, problem = head.located, "make rehearse SET='fleet.backend=local'", ""
    if head.by_agent:
        problem = (
            "a rehearsal needs SSH, but only Session Manager reaches these hosts; "
            "set fleet.aws.allow_ssh_from"
        )
    elif (count := len(located.fleet.hosts)) < 2:
        problem = f"a rehearsal needs two hosts, or three to cut one off; the fleet has {count}"
        then = "make setup NODES=4" if makes else then
    if problem:
        raise ConfigError.of("fleet.hosts", problem, next=then)
    return located


def lacking(config: Config) -> dict[str, str]:
    """Returns the fault requirements that the config's hosts do not meet, with reasons."""
    nodes, row = nodes_of(config), config.fleet.node_type
    found = (
        {SPARE: "a run on two hosts can't continue on one"} if len(config.fleet.hosts) < 3 else {}
    )
    if nodes < 3:
        found[MAJORITY] = "with two nodes, the slow one can't be identified; use four hosts"
    elif row and row.efa:
        found[KERNEL] = "EFA traffic bypasses the kernel, so tc can't slow it"
    if config.fleet.container != "none":
        found[PYTHON_OF_NODES] = "the nodes' Python is in a container image"
    return found


@contextmanager
def stage_on(config: Config, names: Sequence[str]) -> Iterator[RehearsalStage]:
    """Yields a stage on the hosts of a config from `require_hosts`, for the given faults. Removes
    the stage's files and processes afterwards.

    Raises:
        BackendError: another rehearsal is running on the hosts, or a host can't be reached or
            restored.
        RunError: the baseline run failed.
    """
    shared = f"{config.fleet.shared_folder}/rehearsal"
    with rehearsal.own_folder() as folder, open_fleet(config) as transport:
        made = HostStage(
            folder,
            transport=transport,
            shared=shared,
            names=("whole", *names),
            lacking=lacking(config),
        )
        rehearsal.empty(made)
        _refuse_another(made)
        over = threading.Event()
        try:
            _furnish(made, config)
            threading.Thread(target=_live, args=(made, over), daemon=True).start()
            rehearse_unbroken(made)
            yield made
        finally:
            over.set()
            rehearsal.empty(made)
            made.put_back()


def _refuse_another(made: HostStage) -> None:
    sign = f"find {quote(made.shared)}/sign -newermt '-{SILENT} seconds' 2> /dev/null || true"
    answers = made.transport.run(sign, timeout=TIMEOUT).require("these hosts can't be reached")
    if any(answer.stdout.strip() for answer in answers.ok.values()):
        then = f"wait until it ends; it counts as dead after {SILENT} s of silence"
        raise BackendError("another rehearsal is running", where=made.shared, next=then)


def _furnish(made: HostStage, config: Config) -> None:
    """Sets up the stage: the folder and training text on the hosts, a cleanup guard process on
    every host, and config.yaml on this machine.
    """
    folder = quote(made.shared)
    made.on_all(made.end_all())
    guard = GUARD.format(
        folder=folder, silent=SILENT, end=made.end_all(), remove=REMOVE.format(folder=folder)
    )
    python = rehearsal.python_of(made.shared, wanted_of(config).interpreter)
    files = rehearsal.documents() | {"guard.sh": guard.encode(), "sign": b"", "python": python}
    made.on_head(f"rm -rf {folder}")
    made.transport.put(files, made.shared, hosts=made.transport.hosts[:1]).require(UNDONE)
    # The public keys that authorize the head on every node.
    keys = f"{quote(config.fleet.shared_folder or '')}/ssh"
    made.on_head(f"[ ! -d {keys} ] || cp -r {keys} {folder}/")
    made.on_all(
        f"touch {folder}/sign; setsid env {made.guard} sh {folder}/guard.sh > /dev/null 2>&1 < "
        "/dev/null &"
    )
    text = config_of_run(
        fleet_of(config, made.shared),
        f"{made.shared}/text",
        batch=4 * nodes_of(config),
        steps=LONGER,
    )
    furnish(made.folder, {"config.yaml": text.encode()})


def nodes_of(config: Config) -> int:
    """Returns the number of nodes in the rehearsal's run. Leaves one host as a spare if there are
    at least three.
    """
    return max(2, len(config.fleet.hosts) - 1)


def fleet_of(config: Config, shared: str) -> dict[str, object]:
    """Returns the short run's fleet: the user's hosts and software, one rank per node, and a
    separate folder.
    """
    given: dict[str, Any] = {
        key: value for key, value in dataclasses.asdict(config.fleet).items() if key in KEPT
    }
    fleet: dict[str, Any] = rehearsal.plain(given)
    # Relative paths refer to the current directory, not to the run's folder.
    for path in ("key", "known_hosts", "config"):
        if path in fleet["ssh"]:
            fleet["ssh"][path] = str(expanded(fleet["ssh"][path], f"fleet.ssh.{path}").absolute())
    own = {
        "backend": PLAIN,
        "nodes": nodes_of(config),
        "ranks_per_node": 1,
        "shared_folder": shared,
    }
    own["python"] = f"{shared}/python"
    return fleet | own


def _live(made: HostStage, over: threading.Event) -> None:
    """Renews this process's heartbeat until `over` is set."""
    while not over.wait(SIGN):
        made.transport.run(
            f"touch -c {quote(made.shared)}/sign",
            timeout=SIGN,
            hosts=made.transport.hosts[:1],
        )
