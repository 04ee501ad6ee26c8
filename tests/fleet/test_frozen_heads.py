"""A launcher on real sshd nodes that is lost or frozen while it tokenizes: another host leads, and one more stands by for that."""

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
        logs = "".join(
            f"== {log.name}\n{log.read_text()}" for log in sorted((run / "logs").glob("*.log"))
        )
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
                if (
                    b"TRAINFLEET_JOB=" in (entry / "environ").read_bytes()
                    and b"--detach" not in (entry / "cmdline").read_bytes()
                ):
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
            "data": {"name": "text", "sources": ["/fsx/text"], "vocab_size": 340},
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
        until(
            run,
            lambda: not [pid for node in range(4) for pid in nodes.processes(node, "trainfleet")],
            30,
        )
        assert (nodes.shared / "trainfleet/data/text/manifest.json").exists()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("fault", ["killed", "power", "frozen"])
def test_a_dataset_is_finished_by_whoever_takes_over(fault: str, tmp_path: Path) -> None:
    """Without the launcher its job goes on; without its host, whose lock lives on, the dataset is taken over too."""
    with lab(3) as nodes:
        write_text(nodes.shared / "text")
        (nodes.shared / "text/long.txt").write_text(
            "\n".join(f"{n} has the square {n * n}" for n in range(300_000))
        )
        record = {
            "name": "heads",
            "fleet": nodes.fleet(nodes=2),
            "data": {"name": "text", "sources": ["/fsx/text"], "vocab_size": 340},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(record))
        enter(tmp_path, "setup")
        run, dataset, work = (
            nodes.shared / "trainfleet/runs/heads",
            nodes.shared / "trainfleet/data/text",
            set[int](),
        )
        looker = begin(tmp_path, "tokenize")
        until(run, (dataset / "head.json").exists)
        until(
            run,
            lambda: (
                0 in freeze_workers(nodes, work)
                and (holder := newest_holder(run))
                and holder.standby
            ),
        )
        assert not (dataset / "manifest.json").exists(), "it is frozen at its work"
        if fault == "killed":
            (launcher,) = launchers(nodes.processes(0, "trainfleet tokenize"))
            os.kill(launcher, signal.SIGKILL)
            until(run, lambda: (holder := newest_holder(run)) and holder.term == 2)
        elif fault == "power":
            nodes.destroy(0)
        else:
            nodes.signal_all(0, signal.SIGSTOP)
            nodes.shut(0)
        for pid in work - {*nodes.pids(0)} if fault == "frozen" else work:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        lost = time.monotonic()
        until(run, (dataset / "manifest.json").exists, 90)
        print(f"{fault}: whole after {time.monotonic() - lost:.0f} s")
        if fault == "frozen":
            nodes.open(0)
            nodes.signal_all(0, signal.SIGCONT)
        said = finish(looker, timeout=120)
        assert "this host takes over" in said and "another" not in said, said
        assert ("is still running from the previous launch" in said) == (fault == "killed"), said
