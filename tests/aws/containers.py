"""Containers for the pretended schedulers: each a process of the image's entrypoint on a node of conformance/cluster.py.

    containers.start(job, attempt, node, nodes, words, environment)   → Container, whose output is a stream of CloudWatch's
    containers.lose(job, node)                                        its machine goes, with all that runs on it
    containers.broken = "exec /usr/bin/python3: ..."                  what a container says and ends with, in place of the entrypoint

A node sees its own disk, the other nodes and the local S3 server (moto, which keeps SSM's parameters too). The image is this tree:
its entrypoint is `python -m`. As SageMaker starts it, it has an /opt/ml and host names of its own, in a mount namespace.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from conformance.cluster import Cluster

GRACE = 8.0  # seconds from SIGTERM to SIGKILL; Batch gives 30, SageMaker 120
ML = Path("/opt/ml")


@dataclass
class Container:
    """One node's container in one attempt. `lost`: its machine went away. `group`, `stream`: where CloudWatch keeps its lines."""

    mark: str
    process: subprocess.Popen[bytes]
    disk: Path
    began: float = field(default_factory=time.time)
    asked: float | None = None
    lost: bool = False
    group: str = ""
    stream: str = ""

    @property
    def code(self) -> int | None:
        """The exit code as Docker gives it; None while it runs."""
        code = self.process.poll()
        return None if code is None else code if code >= 0 else 128 - code

    def lines(self) -> list[str]:
        """What it has printed."""
        with suppress(FileNotFoundError):
            return (self.disk / "console").read_text(errors="replace").splitlines()
        return []


class Containers:
    """All that run, by job/attempt/node."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.all = cluster, dict[str, Container]()
        self.broken = ""

    def start(
        self,
        job: str,
        attempt: int,
        node: int,
        nodes: int,
        words: Sequence[str],
        environment: Mapping[str, str],
        ml: Path | None = None,
    ) -> Container:
        mark, cluster = f"{job}/{attempt}/{node}", self.cluster
        line = shlex.join([sys.executable, "-m", *words])
        script = f"exec {line}" if ml is None else _with_mounts(line, ml)
        if self.broken:
            script = f"echo {shlex.quote(self.broken)}; exit 1"
        process = cluster.start(mark, script, environment)
        container = self.all[mark] = Container(mark, process, cluster.disk(job, attempt, node))
        return container

    def terminate(self, container: Container) -> None:
        """SIGTERM to its first process; SIGKILL to all of it when it was asked GRACE ago."""
        if container.code is not None:
            return
        if container.asked is None:
            container.asked = time.monotonic()
            container.process.terminate()
        elif time.monotonic() - container.asked > GRACE:
            self.kill(container)

    def kill(self, container: Container) -> None:
        """What a runtime does when a container ends, or is ended: nothing of it is left."""
        job, _, node = container.mark.split("/")
        while left := self.cluster.processes(job, int(node)):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        container.process.wait()

    def lose(self, job: str, node: int) -> None:
        """The newest container of that node goes with its machine."""
        container = [
            one
            for mark, one in self.all.items()
            if mark.startswith(f"{job}/") and mark.endswith(f"/{node}")
        ][-1]
        container.lost = True
        self.kill(container)


def _with_mounts(line: str, ml: Path) -> str:
    """A script that becomes `line` where /opt/ml and /etc/hosts are those of the folder `ml`."""
    inside = f"mount --bind {shlex.quote(str(ml))} {ML} && mount --bind {shlex.quote(str(ml / 'hosts'))} /etc/hosts && exec {line}"
    return f"exec unshare --mount sh -c {shlex.quote(inside)}"
