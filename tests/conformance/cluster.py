"""The nodes of the pretended engines (tests/aws): a folder and a network namespace each, from which only the other nodes and a local
S3 server are seen (without root: an address of the loopback). What runs on them is real.

    with Cluster(folder) as cluster:
        cluster.start("job/1/0", script, {})   a script on node 0 in attempt 1 of a job
        cluster.disk(job, 1, 1)                the disk of node 1 in attempt 1
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from s3server import Application, serve
from trainfleet.process.processes import die_with_parent
from verbs import PACKAGES

ROOT = Path(__file__).parents[2]
GATE = "10.79.0.1"  # where S3 listens for the nodes
CLONE_NEWNET = 0x40000000
MARK = "TRAINFLEET_TEST_NODE"
LIBC = ctypes.CDLL(None, use_errno=True)


class Cluster:
    """The nodes; `jobs` are the folders of jobs, by id, and `threads` what carries them."""

    def __init__(self, folder: Path, most: int = 2) -> None:
        self.folder, self.most = folder, most
        self.jobs = folder / "jobs"
        self.jobs.mkdir(parents=True)
        self.environment = dict[
            str, str
        ]()  # of every node, as an instance's role and network give it
        self.isolated = os.geteuid() == 0 and shutil.which("ip") is not None
        self.holders: list[subprocess.Popen[bytes]] = []
        self.threads: dict[str, threading.Thread] = {}

    def __enter__(self) -> Cluster:
        if self.isolated:
            self._make_networks()
        self.environment["GLOO_SOCKET_IFNAME"] = "eth0" if self.isolated else "lo"
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self.threads.values():
            thread.join()
        for holder in self.holders:
            holder.kill()
            holder.wait()

    # What a test does to it

    def processes(self, job: str = "", node: int | None = None) -> list[int]:
        """What runs on the nodes of a job, or of all."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            mark = next(
                (
                    word.decode().partition("=")[2]
                    for word in words
                    if word.startswith(MARK.encode())
                ),
                "",
            )
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

    def start(self, mark: str, script: str, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A script on the node `job/attempt/node`, on an empty disk, with what the engine tells by `more`."""
        job, attempt, node = mark.split("/")
        disk = self.disk(job, int(attempt), int(node))
        disk.mkdir(parents=True)
        (disk / "node.sh").write_text(script)
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(disk), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PACKAGES}:{self.folder}",
            MARK: mark, **more, **self.environment,
        }  # fmt: skip
        enter = (
            ["nsenter", f"--net=/proc/{self.holders[int(node) + 1].pid}/ns/net"]
            if self.isolated
            else []
        )
        with open(disk / "console", "wb") as console:
            return subprocess.Popen([*enter, "sh", "node.sh"], cwd=disk, env=environment, stdout=console, stderr=console,
                                    preexec_fn=die_with_parent)  # fmt: skip

    def as_batch(self, nodes: int, node: str, attempt: str) -> dict[str, str]:
        """What AWS Batch tells a node of a job."""
        own = {
            "AWS_BATCH_JOB_NUM_NODES": str(nodes), "AWS_BATCH_JOB_NODE_INDEX": node, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "AWS_BATCH_JOB_ATTEMPT": attempt,
        }  # fmt: skip
        return own | (
            {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": self.address(0)} if node != "0" else {}
        )

    # How it works

    def _make_networks(self) -> None:
        for _ in range(self.most + 1):  # the first is the switch
            words = ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"]
            self.holders.append(
                subprocess.Popen(words, stdout=subprocess.PIPE, preexec_fn=die_with_parent)
            )
            assert self.holders[-1].stdout is not None
            if not self.holders[-1].stdout.readline():
                self.isolated = False
                return
        self._ip(
            0,
            "link set lo up",
            "link add lab type bridge",
            f"addr add {GATE}/16 dev lab",
            "link set lab up",
        )
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


@contextmanager
def site(folder: Path, most: int = 2) -> Iterator[Cluster]:
    """An engine and a local S3 server with a bucket, which the nodes reach by an address of their own."""
    from werkzeug.serving import make_server

    applications: list[Application] = []

    def keep(application: Application) -> Application:
        applications.append(application)
        return application

    with serve(keep) as address, Cluster(folder, most) as cluster:
        if cluster.isolated:
            server = cluster.inside(lambda: make_server(GATE, 0, applications[0], threaded=True))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://{GATE}:{server.port}"
        aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        cluster.environment |= aws | {"AWS_ENDPOINT_URL": address}
        yield cluster


def _enter(network: Path) -> None:
    descriptor = os.open(network, os.O_RDONLY)
    try:
        if LIBC.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)
