"""A backend for tests alone: jobs of an engine (cluster.py) whose nodes share no disk, wait in a queue, and are retried by the engine.

`python queueing.py VERB WORDS...` is a verb typed on a machine that has this backend; CLUSTER names the engine's folder. It takes the
name of a backend that a config may have and that is not built yet.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from trainfleet import backends
from trainfleet.backends.base import Can, Handle, Machines, Phase, Status
from trainfleet.backends.machine import Machine
from trainfleet.backends.node import entrypoint_words, values_of
from trainfleet.backends.place import Place
from trainfleet.backends.remote import bucket_of, unshared
from trainfleet.config import Config
from trainfleet.errors import BackendError
from trainfleet.plan.job import Job
from trainfleet.plan.request import Artifact, Request, script
from trainfleet.runs import Run
from trainfleet.uplink import BUCKET, RUN

NODES = 2
GONE = 10.0  # seconds until nothing of a job runs that is ended at once


class Queue:
    """The engine, as a backend (backends/base.py)."""

    name = "batch"
    can = frozenset({Can.RETRIES, Can.OUTLIVES})
    is_here, hands_over = False, False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.jobs = Path(os.environ["CLUSTER"]) / "jobs"

    @staticmethod
    def refuse(config: Config) -> Iterator[tuple[str, str]]:
        yield from unshared(config)

    def plan(self, job: Job, without: Mapping[str, str]) -> Request:
        """A script a node. Which machines run them is the engine's to choose, so `without` changes nothing."""
        if job.nodes > NODES:
            raise BackendError(f"{job.nodes} nodes are wanted, the queue has {NODES}", where=self.name, next=f"NODES={NODES}")
        return Request(job, tuple(self._script(job, node) for node in range(job.nodes)))

    def _script(self, job: Job, node: int) -> Artifact:
        words = [sys.executable, "-m", *entrypoint_words(job, "batch")]
        environment = {"WORKERS": "1", BUCKET: self.config.fleet.shared_folder or "", RUN: self.config.name, **job.environment}
        return Artifact(
            f"node-{node}.sh", script([f"{job.kind} {job.name}: node {node} of {job.nodes}"], ".", environment, words)
        )

    def submit(self, request: Request) -> Handle:
        """The engine takes a job of one name once. Secrets go to its own store, which the job only names."""
        folder, secrets = self.jobs / f"job-{request.token}", values_of(request.job.secrets)
        with suppress(FileExistsError):
            folder.mkdir()
            if secrets:
                (self.jobs.parent / "secrets" / folder.name).write_text(json.dumps(secrets))
            body = {"name": self.config.name, "scripts": [artifact.text for artifact in request.artifacts]}
            (folder / ".body").write_text(json.dumps(body | {"environment": dict(request.environment)}))
            (folder / ".body").rename(folder / "body.json")
        return Handle(self.name, folder.name, request.token, request.job.nodes)

    def status(self, handle: Handle) -> Status:
        if handle.id != f"job-{handle.token}":
            return Status(Phase.ENDED)
        try:
            record = json.loads((self.jobs / handle.id / "status.json").read_text())
        except FileNotFoundError:
            return Status(Phase.QUEUED, "SUBMITTED")
        exits = {int(node): code for node, code in record["exits"].items()}
        phase = Phase(record["phase"])
        if phase is Phase.RUNNING and (self.jobs / handle.id / "stop").exists():
            phase = Phase.STOPPING
        return Status(phase, record["reason"], record["attempt"], exits, {}, tuple(record["hosts"]))

    def stop(self, handle: Handle, at_once: bool) -> None:
        folder, deadline = self.jobs / handle.id, time.monotonic() + GONE
        if self.status(handle).ended:
            return
        (folder / ".stop").write_text("at once" if at_once else "kindly")
        (folder / ".stop").replace(folder / "stop")
        while at_once and not self.status(handle).ended and time.monotonic() < deadline:
            time.sleep(0.05)

    def find(self, run: Run) -> Handle:
        """The newest of the run's jobs."""
        mine = [body for body in self.jobs.glob("*/body.json") if json.loads(body.read_text())["name"] == run.name]
        newest = max(mine, key=lambda body: body.stat().st_mtime, default=None)
        folder = newest.parent.name if newest else ""
        return Handle(self.name, folder, folder.removeprefix("job-"), NODES)

    def place(self, run: Run) -> Place:
        return bucket_of(self.config, run, lambda: not self.status(self.find(run)).ended)

    def price(self) -> float | None:
        return None

    def machines(self) -> Machines:
        return Machine(1)


def register() -> None:
    backends.BACKENDS[Queue.name] = Queue  # type: ignore[assignment]


if __name__ == "__main__":
    register()
    from trainfleet.cli import main

    sys.exit(main(sys.argv[1:]))
