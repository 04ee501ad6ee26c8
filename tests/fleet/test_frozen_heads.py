"""A launcher on real sshd nodes that is frozen at its work: another host leads, and one more stands by for that."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from fleet.lab import Lab, lab
from trainfleet.health.lease import Holder, newest_holder
from verbs import begin, enter, finish, write_text


def until(run: Path, holds: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        logs = "".join(f"== {log.name}\n{log.read_text()}" for log in sorted((run / "logs").glob("*.log")))
        assert time.monotonic() < deadline, f"{newest_holder(run)}\n{logs}"
        time.sleep(0.05)


def launchers(pids: list[int]) -> list[int]:
    """Those of the processes that are a launcher, and not what supervises it or stands by."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in pids}
    return [pid for pid, line in words.items() if line[1:4] == ["-m", "trainfleet", "tokenize"]]


def freeze_workers(nodes: Lab, frozen: set[int]) -> set[int]:
    """Stops the processes of the job as they come, so that it takes as long as a test needs; the nodes that have some."""
    found = set()
    for node in range(nodes.count):
        for pid in nodes.pids(node):
            with suppress(OSError):
                entry = Path(f"/proc/{pid}")
                if b"TRAINFLEET_JOB=" in (entry / "environ").read_bytes() and b"--detach" not in (entry / "cmdline").read_bytes():
                    os.kill(pid, signal.SIGSTOP)
                    frozen.add(pid)
                    found.add(node)
    return found


@pytest.mark.timeout(280)
def test_a_frozen_launcher_is_succeeded_and_its_successor_too(tmp_path: Path) -> None:
    """Both keep their locks. Thawed, they leave, and the dataset is whole."""
    with lab(4) as nodes:
        write_text(nodes.shared / "text")
        record = {
            "name": "heads",
            "fleet": nodes.fleet(nodes=2),
            "data": {"name": "text", "sources": ["/fsx/text"], "vocabulary_size": 340},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(record))
        enter(tmp_path, "setup")
        run = nodes.shared / "trainfleet/runs/heads"

        def leads() -> Holder:
            return newest_holder(run) or Holder("", 0, 0, 0)

        looker, frozen = begin(tmp_path, "tokenize"), list[int]()
        work = set[int]()
        until(run, lambda: len(freeze_workers(nodes, work)) == 2 and (run / "handle.json").exists())
        for term in (1, 2):
            until(run, lambda term=term: leads().term == term)  # type: ignore[misc]
            node = int(leads().host.removeprefix("node"))
            if term == 2:  # else the first one's choice, or the terminal's, is at work alone
                until(run, lambda: leads().standby in ("node2", "node3"))
            (launcher,) = launchers(nodes.processes(node, "trainfleet tokenize"))
            os.kill(launcher, signal.SIGSTOP)
            frozen.append(launcher)
        until(run, lambda: leads().term == 3 and leads().standby)
        for pid in [*frozen, *work]:
            os.kill(pid, signal.SIGCONT)
        said = finish(looker, timeout=120)
        assert said.count("this host takes over") == 2, said
        assert leads().code == 0 and leads().host in ("node2", "node3")
        until(run, lambda: not [pid for node in range(4) for pid in nodes.processes(node, "trainfleet")], 30)
        assert (nodes.shared / "trainfleet/data/text/manifest.json").exists()
