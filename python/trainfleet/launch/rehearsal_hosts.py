"""Rehearsal stage on a fleet's hosts: short separate runs in a new folder inside the shared folder.

The stage only touches its folder, processes marked as belonging to its runs, and, for a limited
time, one host's network link. Each host restores its link after a fixed time, even if this machine
dies.

Limitations: links can't be changed on hosts where sudo requires a password. Instances that only
Session Manager can reach are not supported.

`stage_for` chooses the stage for a config: in jobs, on hosts, or on this machine.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from ..backends import backend_of, shared
from ..backends.base import Can, load_job
from ..backends.head import PLAIN, Head
from ..config import Config
from ..health.faults import DISK, KERNEL, MAJORITY, PREFIX, SPARE
from ..hosts import host_commands
from ..hosts.fleet import open_fleet, wanted_of
from ..hosts.host_results import Host, by_host
from ..hosts.ssh_config import expanded
from ..hosts.transport import Transport
from ..trust.errors import BackendError, ConfigError, RunError
from ..trust.safe_output import is_agreed
from . import rehearsal
from .rehearsal import LACKING, LONGER, OWN, RehearsalStage, own_folder, prepared

TIMEOUT = 60.0
UNDONE = "the rehearsal failed on these hosts"
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
SHAPING = """s=; [ "$(id -u)" = 0 ] || s='sudo -n'
$s true || {{ echo "sudo requires a password"; exit; }}
command -v tc > /dev/null || {{ echo "tc is not installed (iproute2)"; exit; }}
d=$(ip -o route get "$(getent ahostsv4 {peer} | sed -n '1s/ .*//p')" | sed -n 's/.* dev \\([^ ]*\\).*/\\1/p')
[ -n "$d" ] || {{ echo "no route to {peer}"; exit; }}
setsid env {link} sh -c "trap '$s tc qdisc del dev $d root; exit' TERM
sleep 0.5; $s tc qdisc replace dev $d root tbf {rate}; sleep {seconds} & wait
$s tc qdisc del dev $d root" > /dev/null 2>&1 < /dev/null &
echo struck"""  # noqa: E501
STRUCK = "struck"  # printed by a command once it has limited a link
# Environment marker of the process that slows a link.
LINK = "TRAINFLEET_LINK"
# Shell commands for the processes that have {mark} in an entry of their environment
LOOK = "grep -Fszl -e {mark} /proc/[0-9]*/environ | cut -d / -f 3"
END = f"""for _ in $(seq 100); do
p=$({LOOK})
[ -n "$p" ] || break
kill -{{signal}} $p 2> /dev/null; sleep 0.1
done
[ -z "$p" ]"""


class HostStage(RehearsalStage):
    """Rehearsal stage that runs on the fleet's hosts. Its config contains the existing hosts."""

    @functools.cached_property
    def transport(self) -> Transport:
        """Transport that connects on first use, separately in the guard process."""
        return open_fleet(self.config)

    @property
    def shared(self) -> str:
        """Returns the stage folder's path on the hosts."""
        return f"{self.config.fleet.shared_folder}/{OWN}"

    @property
    def mark(self) -> str:
        """Returns the text that marks processes of the stage's runs (host_commands.mark_of)."""
        return quote(f"={self.shared}:")

    def on(self, command: str, *hosts: Host) -> str:
        """Runs a shell command on the given hosts, or on all. Returns the first host's output.
        Raises a BackendError listing the hosts where it failed.
        """
        answers = self.transport.run(command, timeout=TIMEOUT, hosts=hosts or None).require(UNDONE)
        return next(iter(answers.ok.values())).stdout.strip()

    @property
    def head(self) -> Host:
        return self.transport.hosts[0]

    def furnish(self) -> None:
        folder = quote(self.shared)
        self.transport.put(rehearsal.documents(), self.shared, hosts=[self.head]).require(UNDONE)
        # The public keys that authorize the head on every node.
        keys = f"{quote(self.config.fleet.shared_folder or '')}/ssh"
        self.on(f"[ ! -d {keys} ] || cp -r {keys} {folder}/", self.head)
        fleet = fleet_of(self.config, self.shared)
        text = rehearsal.config_of_run(fleet, f"{self.shared}/text", LONGER)
        rehearsal.furnish(self.folder, {"config.yaml": text.encode()})

    def shape(self, name: str, rate: str, seconds: int) -> str:
        if not (job := load_job(self.run(name))):
            raise RunError(f"the run {name} has no job", where=self.shared, next="make rehearse")
        host = next(host for host in self.transport.hosts if host.name == job[0].hosts[1])
        peer = quote(self.head.address)
        words = SHAPING.format(peer=peer, rate=rate, seconds=seconds, link=self.link)
        said = self.on(words, host)
        return "" if said == STRUCK else " ".join(said.split())

    def free(self) -> None:
        self.on(self.unlink)

    @property
    def link(self) -> str:
        return quote(f"{LINK}={self.shared}")

    @property
    def unlink(self) -> str:
        return END.format(mark=self.link, signal="TERM")

    def lose_head(self, name: str) -> str:
        self.on(END.format(mark=self.mark, signal="KILL"), self.head)
        return self.head.name

    def at_work(self) -> Sequence[object]:
        answers = self.transport.run(LOOK.format(mark=self.mark), timeout=TIMEOUT).ok
        return [host for host, said in answers.items() if said.stdout.strip()]

    def end_all(self) -> None:
        """Kills the runs on every host, and removes their files. Raises a BackendError listing the
        hosts that could not be restored.
        """
        own, folder = f"rm -f {host_commands.JOBS}/$(uname -n)/{PREFIX}*", quote(self.shared)
        end = "\n".join([self.unlink, own, END.format(mark=self.mark, signal="KILL")])
        # Repeated because a launcher may have started a process on another host just before it
        # ended.
        self.transport.run(end, timeout=TIMEOUT)
        failed = self.transport.run(end, timeout=TIMEOUT).failed
        remove = f"rm -rf {folder}"
        failed |= self.transport.run(remove, timeout=TIMEOUT, hosts=[self.head]).failed
        self.transport.close()
        if failed:
            raise BackendError(
                by_host("these hosts were not fully restored", failed),
                next=f"run {remove} on these hosts, then make doctor",
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


def lacking(config: Config, head: Head | None) -> dict[str, str]:
    """Returns the fault requirements that the config's nodes do not meet, with reasons."""
    if not head:
        shares = Can.SHARED in backend_of(config).can
        return LACKING if shares else LACKING | {DISK: "checkpoints are in S3"}
    found, nodes, row = dict[str, str](), nodes_of(config), config.fleet.node_type
    if len(config.fleet.hosts) < 3:
        found[SPARE] = "a run on two hosts can't continue on one"
    if nodes < 3:
        found[MAJORITY] = "with two nodes, the slow one can't be identified; use four hosts"
    elif row and row.efa:
        found[KERNEL] = "EFA traffic bypasses the kernel, so tc can't slow it"
    return found


def nodes_of(config: Config) -> int:
    """Returns the number of nodes in the rehearsal's run. Leaves one host as a spare if there are
    at least three.
    """
    return max(2, len(config.fleet.hosts) - 1)


def fleet_of(config: Config, shared: str) -> dict[str, object]:
    """Returns the short run's fleet: the user's hosts and software, one rank per node, and a
    separate folder.
    """
    fleet = rehearsal.kept(config, KEPT)
    # Relative paths refer to the current directory, not to the run's folder.
    for path in ("key", "known_hosts", "config"):
        if path in fleet["ssh"]:
            fleet["ssh"][path] = str(expanded(fleet["ssh"][path], f"fleet.ssh.{path}").absolute())
    own = {
        "backend": PLAIN,
        "nodes": nodes_of(config),
        "ranks_per_node": 1,
        "shared_folder": shared,
        "python": wanted_of(config).interpreter,
    }
    return fleet | own


@contextmanager
def stage_for(config: Config, sure: bool) -> Iterator[RehearsalStage]:
    """Yields the stage on which to inject faults. Asks for consent before using real
    nodes, unless `sure` is set.

    Raises:
        ConfigError: the faults can't be injected on this fleet.
        RunError: the user did not consent, or the baseline run failed.
        BackendError: another rehearsal is running, or a host can't be reached or restored.
    """
    backend, parent = backend_of(config), Path(tempfile.gettempdir()).resolve()
    located = require_hosts(head) if (head := backend.harm()) else config
    if backend.hands_over and not head:
        host = next(iter(config.fleet.hosts), "the head node").partition("=")[0]
        problem = "a rehearsal must run on the machine that has sbatch"
        then = f"run ssh {host}, then make rehearse there"
        raise ConfigError.of("fleet.hosts", problem, next=then)
    if not backend.is_here:
        where = ", ".join(located.fleet.hosts) if head else f"{config.fleet.backend} nodes"
        agree("kill, stop and cut off processes of separate short runs", where, sure)
        if not head and Can.SHARED in backend.can:
            parent = Path(config.fleet.shared_folder or Path.cwd())
    print(
        "the rehearsal uses separate runs in a separate folder; first, an unbroken run", flush=True
    )
    with own_folder(parent) as folder:
        stage = HostStage if head else RehearsalStage
        with prepared(stage(folder, shared(located), lacking(located, head))) as made:
            yield made


def agree(what: str, where: str, sure: bool) -> None:
    """Asks the user for consent to do `what` on `where`. Raises RunError if the user declines."""
    if not sure and not is_agreed(f"{what} on {where}?"):
        raise RunError(
            "a rehearsal disrupts real hosts and needs your consent",
            where=where,
            next="make rehearse YES=1",
        )
