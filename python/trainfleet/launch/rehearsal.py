"""Rehearsal stages: environments in which faults are injected into short separate runs.

A rehearsal works in one temporary folder outside the user's runs, and starts its runs with the
ordinary `make train`. Their ranks inject the faults (health/faults.py). At the end, the runs are
stopped and all files are removed, even after Ctrl-C. After kill -9, a guard process does that. If
this machine dies, the runs continue to their end, and the next rehearsal removes the files.

On a fleet's hosts, the runs use a new folder inside the shared folder. The stage only touches that
folder, processes marked as belonging to its runs, and, for a limited time, one host's network link.
Each host restores its link after a fixed time, even if this machine dies.

Limitations: links and heads are only disrupted on hosts that are reached by SSH, and links only if
sudo requires no password. Instances that only Session Manager can reach are not supported.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from ..backends import backend_of
from ..backends.base import Backend, Can, Handle, load_job
from ..backends.head import PLAIN
from ..config import Config
from ..config.tables import read_table
from ..health.faults import BREAK_AT, LINKS, LONGEST, OWN_HEAD, PREFIX, RANK, VARIABLE
from ..hosts import host_commands
from ..hosts.fleet import open_fleet, wanted_of
from ..hosts.host_results import Host, by_host
from ..hosts.ssh_config import expanded
from ..hosts.transport import Transport
from ..process.install_paths import CODE
from ..process.processes import die_with_parent
from ..run.run_folder import Record, Run, run_of
from ..storage import s3
from ..trust.errors import BackendError, RunError

WHOLE = "whole"  # name of the fault-free run
# Steps of a run on this machine, steps elsewhere (where progress becomes visible only seconds
# later), and steps between checkpoints.
STEPS, LONGER, EVERY = 120, 240, 20
PATIENCE = 1800.0  # timeout in seconds for a command, including its queue time
LEFT_WITHIN = 60.0  # timeout in seconds for all processes to end, including a scheduler's cleanup
APART = 5.0  # maximum lag of a host's clock behind this machine's, in seconds
SEEN = 30.0  # seconds until a node's record or a launcher's death is visible to all machines
# Name of the folder in a shared folder or bucket, unique per user and machine.
OWN = f"rehearsal-{platform.node()}-{os.getuid()}"
LACKING = {
    LINKS: "only the links of hosts reached by SSH can be cut",
    OWN_HEAD: "only a head reached by SSH can be lost; launcher-killed tests a similar fault",
}
# Keys of the user's fleet that the rehearsal's config keeps, and those it keeps for a fleet of
# hosts.
KEPT = (
    "backend", "platform", "python", "slurm", "aws", "batch", "sagemaker", "options",
    "instance_type", "accelerator", "container", "container_base",
)  # fmt: skip
KEPT_OF_HOSTS = ("hosts", "ssh", "install_docker", "platform", *KEPT[-4:])
TIMEOUT = 60.0
UNDONE = "the rehearsal failed on these hosts"
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
# Environment variable that marks the process limiting a link.
LINK = "TRAINFLEET_LINK"
# Shell command that prints the PIDs of processes with {mark} in their environment.
LOOK = "grep -Fszl -e {mark} /proc/[0-9]*/environ | cut -d / -f 3"
END = f"""for _ in $(seq 100); do
p=$({LOOK})
[ -n "$p" ] || break
kill -{{signal}} $p 2> /dev/null; sleep 0.1
done
[ -z "$p" ]"""


def config_of_run(
    fleet: Mapping[str, object],
    text: str,
    steps: int = STEPS,
    tokenized: str | None = None,
    checkpoints: str | None = None,
) -> str:
    """Returns a short run's config.yaml for this fleet, with training text from the folder `text`.
    `tokenized` and `checkpoints` are addresses in S3.
    """
    made = read_table(Path(__file__).with_suffix(".yaml"))
    made["data"] |= {"sources": [text], "tokenized_path": tokenized}
    made["train"] |= {"steps": steps, "schedule_steps": LONGEST}
    made["train"]["global_batch_size"] = 4 * int(str(fleet["nodes"]))
    more = {"name": f"{PREFIX}{WHOLE}", "checkpoint": {"every": EVERY, "path": checkpoints}}
    return yaml.safe_dump(plain(made | more | {"fleet": dict(fleet)}))


def documents() -> dict[str, bytes]:
    """Returns the training text as 40 small files, keyed by path relative to the stage's folder."""
    found = {}
    for number in range(40):
        words = " ".join(f"word{number * step % 97} is {step}." for step in range(60))
        found[f"text/{number}.txt"] = f"Document {number}. {words}\n".encode()
    return found


def furnish(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files to a folder, keyed by relative path."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def plain(value: Any) -> Any:
    """Removes None and empty tuples from nested mappings."""
    if not isinstance(value, dict):
        return value
    return {key: plain(inner) for key, inner in value.items() if inner is not None and inner != ()}


def kept(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """Returns those of the given fleet keys that are set."""
    return plain({key: value for key, value in asdict(config.fleet).items() if key in keys})  # type: ignore[no-any-return]


@dataclass
class RehearsalStage:
    """Environment for injecting faults into runs: a folder in which `type` runs commands as a user
    would, and the nodes of the user's config.
    """

    folder: Path
    config: Config  # the user's config
    # features that this stage lacks, with reasons
    lacking: Mapping[str, str]
    # losses of the fault-free baseline run, by step
    whole: Mapping[int, float] = field(default_factory=dict)
    said: str = ""  # output of the last finished command

    @property
    def backend(self) -> Backend:
        return backend_of(self.config)

    @property
    def prefixes(self) -> list[str]:
        """Returns the stage's folders for the run, the dataset and the checkpoints in S3, or an
        empty list if the nodes share a folder.
        """
        if Can.SHARED in self.backend.can:
            return []
        fleet, data, checkpoint = self.config.fleet, self.config.data, self.config.checkpoint
        roots = fleet.shared_folder, data.tokenized_path, checkpoint.path
        return [f"{str(root).rstrip('/')}/{OWN}" for root in roots]

    def furnish(self) -> None:
        """Writes the config and the training text."""
        fleet = kept(self.config, KEPT) | {"nodes": 2, "ranks_per_node": 1}
        root, *paths = self.prefixes or [""]
        if root:
            fleet["shared_folder"] = root
            for name, content in documents().items():
                s3.write(f"{root}/{name}", content)
        else:
            furnish(self.folder, documents())
        self.configure(fleet, f"{root}/text".lstrip("/"), *paths)

    def configure(self, fleet: Mapping[str, object], text: str, *paths: str) -> None:
        """Writes the config, with the arguments of `config_of_run`."""
        steps = STEPS if self.backend.is_here else LONGER
        words = config_of_run(fleet, text, steps, *paths)
        furnish(self.folder, {"config.yaml": words.encode()})

    def run(self, name: str) -> Run:
        """Returns the run for the fault `name`."""
        return Run(run_of(PREFIX + name, self.folder / "runs").folder)

    def begin(self, name: str, words: str = "", plays: bool = False) -> subprocess.Popen[str]:
        """Starts `make train` for the run `name`. `words` contains additional config overrides. If
        `plays` is set, the run's ranks inject the fault.
        """
        told = {VARIABLE: f"{name}@{BREAK_AT}:{RANK}"} if plays else {}
        return self.type("train", name, words, **told)

    def type(self, verb: str, name: str, words: str = "", **more: str) -> subprocess.Popen[str]:
        """Starts the command `verb` for the run `name`. Returns its process."""
        ours = ("MAKE", "TRAINFLEET")
        inherited = {key: os.environ[key] for key in os.environ if not key.startswith(ours)}
        path = (str(CODE), *filter(None, [os.environ.get("PYTHONPATH")]))
        environment = {"PYTHONPATH": os.pathsep.join(path), "NO_COLOR": "1", **more}
        return subprocess.Popen(
            [sys.executable, "-m", "trainfleet", verb, f"SET=name={PREFIX}{name} {words}"],
            cwd=self.folder,
            env=inherited | environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )

    def end(self, process: subprocess.Popen[str]) -> int:
        """Waits for a command to end and returns its exit code. After a timeout, kills the command
        and returns 124.
        """
        try:
            self.said = process.communicate(timeout=PATIENCE)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            self.said = process.communicate()[0]
            return 124
        return process.returncode

    def stop(self, name: str, process: subprocess.Popen[str]) -> None:
        """Stops a run with `make stop`, which writes a checkpoint."""
        self.end(self.type("stop", name))
        self.end(process)

    def losses(self, name: str) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.run(name).read_metrics()}

    def events(self, name: str, since: float = 0.0) -> list[Record]:
        return [event for event in self.run(name).read_events() if event["time"] >= since - APART]

    def await_step(self, name: str, process: subprocess.Popen[str]) -> None:
        """Waits until the run has logged the fault's step. Raises RunError if the run ends earlier
        or times out.
        """
        until = time.monotonic() + PATIENCE
        while max(self.losses(name), default=0) < BREAK_AT:
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                said = process.communicate()[0]
                what = f"the run {name} never reached step {BREAK_AT}"
                raise RunError(what, where=str(self.folder), why=said[-400:], next="make logs")
            time.sleep(0.05)

    def struck(self, name: str) -> float:
        """Returns when a rank injected the fault, according to that rank's clock. Raises RunError
        if no rank did.
        """
        until = time.monotonic() + SEEN
        while time.monotonic() < until:
            for event in self.events(name):
                if event["event"] == "struck":
                    return float(event["time"])
            time.sleep(0.2)
        what, then = f"no rank injected the fault {name}", "run make rehearse again"
        raise RunError(what, where=str(self.folder), why=self.said[-800:], next=then)

    def processes(self) -> list[int]:
        """Returns the PIDs of the other processes on this machine whose working directory is the
        stage's folder.
        """
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "cwd").readlink() == self.folder and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found

    def jobs(self) -> list[Handle]:
        """Returns the jobs of the stage's runs that have not ended."""
        found = [load_job(Run(folder)) for folder in self.folder.glob("runs/*")]
        return [job[0] for job in found if job and not self.backend.status(job[0]).ended]

    def at_work(self) -> Sequence[object]:
        """Returns the stage's remaining processes and jobs, or the hosts that still run them."""
        return [*self.processes(), *self.jobs()]

    def left_over(self) -> Sequence[object]:
        """Waits up to LEFT_WITHIN seconds for the stage's runs to end. Returns the leftovers."""
        until = time.monotonic() + LEFT_WITHIN
        while (found := self.at_work()) and time.monotonic() < until:
            time.sleep(0.2)
        return found

    def end_all(self) -> None:
        """Ends the runs, including those of a killed rehearsal, and removes the nodes' files."""
        for job in self.jobs():
            self.backend.stop(job, at_once=True)
        for prefix in self.prefixes:
            s3.remove_all(found.address for found in s3.list_objects(f"{prefix}/"))

    def clear(self) -> None:
        """Ends all runs and processes, and removes everything but the lock."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.end_all()
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "lock":
                path.unlink(missing_ok=True)


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
        self.transport.put(documents(), self.shared, hosts=[self.head]).require(UNDONE)
        # The public keys that authorize the head on every node.
        keys = f"{quote(self.config.fleet.shared_folder or '')}/ssh"
        self.on(f"[ ! -d {keys} ] || cp -r {keys} {folder}/", self.head)
        self.configure(fleet_of(self.config, self.shared), f"{self.shared}/text")

    def shape(self, name: str, rate: str, seconds: int) -> str:
        """Limits the traffic from node 1's host to `rate` for `seconds` seconds, using tc. Returns
        "" on success, or the reason if that fails.
        """
        job = load_job(self.run(name))
        assert job, "a run that trains has a job"
        host = next(host for host in self.transport.hosts if host.name == job[0].hosts[1])
        peer = quote(self.head.address)
        words = SHAPING.format(peer=peer, rate=rate, seconds=seconds, link=self.link)
        said = self.on(words, host)
        return "" if said == STRUCK else " ".join(said.split())

    def free(self) -> None:
        """Removes the traffic limit that `shape` has set."""
        self.on(self.unlink)

    @property
    def link(self) -> str:
        return quote(f"{LINK}={self.shared}")

    @property
    def unlink(self) -> str:
        return END.format(mark=self.link, signal="TERM")

    def lose_head(self) -> str:
        """Kills the run's processes on its head, including the launcher. Returns the head's
        name.
        """
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


def nodes_of(config: Config) -> int:
    """Returns the number of nodes in the rehearsal's run. Leaves one host as a spare if there are
    at least three.
    """
    return max(2, len(config.fleet.hosts) - 1)


def fleet_of(config: Config, shared: str) -> dict[str, object]:
    """Returns the short run's fleet: the user's hosts and software, one rank per node, and a
    separate folder.
    """
    fleet = kept(config, KEPT_OF_HOSTS)
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
