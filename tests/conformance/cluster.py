"""An engine as AWS Batch is one, in this process: a queue, nodes that come and go, retries by itself; the nodes' processes are real.

    with Cluster(folder) as cluster:
        cluster.queue = 2.0         seconds that a job waits, with a reason
        cluster.kill_node(job, 1)   the machine goes, with all that runs on it
        cluster.disk(job, 1, 1)     the disk of node 1 in attempt 1

A node is a folder and a network namespace (without root: an address of the loopback) from which only the other nodes and a local S3
server are seen. Whoever submits, asks and stops does so by files in `folder`: that is the engine's API, for any process of this
machine. The values of secrets are in the engine's own store, from which it takes them when the job starts: a job only names them.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from s3server import Application, serve
from trainfleet.processes import die_with_parent

ROOT = Path(__file__).parents[2]
GATE = "10.79.0.1"  # where S3 listens for the nodes
CLONE_NEWNET = 0x40000000
MARK = "TRAINFLEET_TEST_NODE"
LIBC = ctypes.CDLL(None, use_errno=True)
GRACE = 5.0  # seconds from SIGTERM to SIGKILL, and what the others get when one node has failed


def write(path: Path, record: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{threading.get_ident()}")
    temporary.write_text(json.dumps(record))
    temporary.replace(path)


class Cluster:
    """The engine; `jobs` are its folders of jobs, by id."""

    def __init__(self, folder: Path, most: int = 2) -> None:
        self.folder, self.most = folder, most
        self.jobs = folder / "jobs"
        self.jobs.mkdir(parents=True)
        self.queue, self.retries = 1.0, 1
        self.environment = dict[str, str]()  # of every node, as an instance's role and network give it
        (folder / "secrets").mkdir(mode=0o700)
        self.isolated = os.geteuid() == 0 and shutil.which("ip") is not None
        self.holders: list[subprocess.Popen[bytes]] = []
        self.closing = threading.Event()
        self.threads: dict[str, threading.Thread] = {}

    def __enter__(self) -> Cluster:
        if self.isolated:
            self._make_networks()
        self.environment["GLOO_SOCKET_IFNAME"] = "eth0" if self.isolated else "lo"
        self.keeper = threading.Thread(target=self._keep, daemon=True)
        self.keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.keeper.join()
        for thread in self.threads.values():
            thread.join()
        for holder in self.holders:
            holder.kill()
            holder.wait()

    # What a test does to it

    def kill_node(self, job: str, node: int) -> None:
        """Its machine goes, with all that runs on it."""
        for pid in self.processes(job, node):
            os.kill(pid, signal.SIGKILL)

    def processes(self, job: str = "", node: int | None = None) -> list[int]:
        """What runs on the nodes of a job, or of all."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            mark = next((word.decode().partition("=")[2] for word in words if word.startswith(MARK.encode())), "")
            if (
                mark
                and mark.split("/")[0] in ((job,) if job else tuple(self.threads))
                and node in (None, int(mark.split("/")[2]))
            ):
                found.append(int(path.name))
        return found

    def words(self, pid: int) -> str:
        """A process's command line; nothing when it has ended."""
        with suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return ""

    def disk(self, job: str, attempt: int, node: int) -> Path:
        return self.jobs / job / f"attempt-{attempt}" / f"node-{node}"

    def inside(self, do: Any) -> Any:
        """Does something in the network where the nodes see this machine as GATE; without namespaces, here."""
        if not self.isolated:
            return do()
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(Path(f"/proc/{self.holders[0].pid}/ns/net"))
            return do()
        finally:
            LIBC.setns(before, CLONE_NEWNET)
            os.close(before)

    def start(
        self, mark: str, nodes: int, script: str, more: Mapping[str, str] | None = None, bare: bool = False
    ) -> subprocess.Popen[bytes]:
        """A script on the node `job/attempt/node`, as the engine starts it: on an empty disk, with what the engine tells.

        `bare`: the engine's own variables are all in `more`.
        """
        job, attempt, node = mark.split("/")
        disk = self.disk(job, int(attempt), int(node))
        disk.mkdir(parents=True)
        (disk / "node.sh").write_text(script)
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(disk), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/python:{self.folder}",
            MARK: mark, **({} if bare else self.as_batch(nodes, node, attempt)), **(more or {}), **self.environment,
        }  # fmt: skip
        enter = ["nsenter", f"--net=/proc/{self.holders[int(node) + 1].pid}/ns/net"] if self.isolated else []
        with open(disk / "console", "wb") as console:
            return subprocess.Popen([*enter, "sh", "node.sh"], cwd=disk, env=environment, stdout=console, stderr=console,
                                    preexec_fn=die_with_parent)  # fmt: skip

    def as_batch(self, nodes: int, node: str, attempt: str) -> dict[str, str]:
        """What AWS Batch tells a node of a job."""
        own = {
            "AWS_BATCH_JOB_NUM_NODES": str(nodes), "AWS_BATCH_JOB_NODE_INDEX": node, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "AWS_BATCH_JOB_ATTEMPT": attempt,
        }  # fmt: skip
        return own | ({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": self.address(0)} if node != "0" else {})

    # How it works

    def _make_networks(self) -> None:
        for _ in range(self.most + 1):  # the first is the switch
            words = ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"]
            self.holders.append(subprocess.Popen(words, stdout=subprocess.PIPE, preexec_fn=die_with_parent))
            assert self.holders[-1].stdout is not None
            if not self.holders[-1].stdout.readline():
                self.isolated = False
                return
        self._ip(0, "link set lo up", "link add lab type bridge", f"addr add {GATE}/16 dev lab", "link set lab up")
        for node in range(self.most):
            peer = self.holders[node + 1].pid
            self._ip(
                0,
                f"link add v{node} type veth peer name eth0 netns {peer}",
                f"link set v{node} master lab",
                f"link set v{node} up",
            )
            self._ip(
                node + 1,
                "link set lo up",
                "link set eth0 up",
                f"addr add 10.79.0.{node + 2}/16 dev eth0",
                f"route add default via {GATE}",
            )

    def _ip(self, holder: int, *commands: str) -> None:
        enter = ["nsenter", f"--net=/proc/{self.holders[holder].pid}/ns/net", "ip"]
        for command in commands:
            subprocess.run([*enter, *command.split()], check=True)

    def address(self, node: int) -> str:
        return f"10.79.0.{node + 2}" if self.isolated else "127.0.0.1"

    def _keep(self) -> None:
        while not self.closing.wait(0.05):
            for body in self.jobs.glob("*/body.json"):
                if body.parent.name not in self.threads:
                    job = Job(self, body.parent)
                    self.threads[job.id] = threading.Thread(target=job.run, daemon=True)
                    self.threads[job.id].start()


class Job:
    """One job of the engine's, from its queue to its end."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.id = cluster, folder, folder.name
        self.body = json.loads((folder / "body.json").read_text())
        self.nodes = len(self.body["scripts"])
        store = cluster.folder / "secrets" / self.id
        self.secrets = json.loads(store.read_text()) if store.exists() else {}
        store.unlink(missing_ok=True)

    def run(self) -> None:
        cluster, since = self.cluster, time.monotonic()
        while time.monotonic() - since < cluster.queue or cluster.queue < 0:
            self._tell("queued", 1, reason=f"RUNNABLE: {self.nodes} nodes are wanted, none is free")
            if self._stopped() or cluster.closing.wait(0.05):
                self._tell("ended", 1)
                return
        for attempt in range(1, cluster.retries + 2):
            self._tell("starting", attempt, reason="the image is pulled")
            exits, lost = self._attempt(attempt)
            if self._stopped() or cluster.closing.is_set() or attempt > cluster.retries or not lost:
                break
        self._tell("ended", attempt, exits)

    def _attempt(self, attempt: int) -> tuple[dict[int, int], bool]:
        """The exit codes of an attempt, whose nodes all have ended, and whether one was lost by itself."""
        processes = [self._start(attempt, node) for node in range(self.nodes)]
        failed, asked = 0.0, 0.0
        while any(process.poll() is None for process in processes):
            codes = {node: _code(process) for node, process in enumerate(processes) if process.poll() is not None}
            self._tell("stopping" if asked or self._stopped() else "running", attempt)
            if any(codes.values()) and not failed:
                failed = time.monotonic()
            if self._stopped() == "kindly" and not asked:
                asked = time.monotonic()
                for process in processes:
                    process.terminate()
            if self._stopped() == "at once" or self.cluster.closing.is_set() or (failed and time.monotonic() - failed > GRACE):
                break
            time.sleep(0.05)
        lost = any(_code(process) == 137 for process in processes if process.poll() is not None)
        while left := self.cluster.processes(self.id):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for process in processes:
            process.wait()
        return {node: _code(process) for node, process in enumerate(processes)}, lost

    def _start(self, attempt: int, node: int) -> subprocess.Popen[bytes]:
        more = self.body["environment"] | self.secrets
        return self.cluster.start(f"{self.id}/{attempt}/{node}", self.nodes, self.body["scripts"][node], more)

    def _stopped(self) -> str:
        try:
            return (self.folder / "stop").read_text()
        except FileNotFoundError:
            return ""

    def _tell(self, phase: str, attempt: int, exits: Mapping[int, int] | None = None, reason: str = "") -> None:
        hosts = [f"i-{self.id[-8:]}{attempt}{node}" for node in range(self.nodes)] if phase != "queued" else []
        record = {"phase": phase, "attempt": attempt, "exits": exits or {}, "reason": reason, "hosts": hosts}
        if record != getattr(self, "told", None):
            self.told = record
            write(self.folder / "status.json", record)


@contextmanager
def site(folder: Path) -> Iterator[Cluster]:
    """An engine and a local S3 server with a bucket, which the nodes reach by a door of their own."""
    from werkzeug.serving import make_server

    applications: list[Application] = []

    def keep(application: Application) -> Application:
        applications.append(application)
        return application

    with serve(keep) as address, Cluster(folder) as cluster:
        if cluster.isolated:
            door = cluster.inside(lambda: make_server(GATE, 0, applications[0], threaded=True))
            threading.Thread(target=door.serve_forever, daemon=True).start()
            address = f"http://{GATE}:{door.port}"
        aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        cluster.environment |= aws | {"AWS_ENDPOINT_URL": address}
        yield cluster


def _code(process: subprocess.Popen[bytes]) -> int:
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _enter(network: Path) -> None:
    descriptor = os.open(network, os.O_RDONLY)
    try:
        if LIBC.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)
