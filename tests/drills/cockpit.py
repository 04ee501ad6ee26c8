"""A desk beside a lab of hosts: a config, the commands typed there, and a clock for what happens to a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

import verbs
from fleet.lab import Lab
from trainfleet.health import fence
from trainfleet.health.heartbeat_format import Beat, read_beats
from trainfleet.run.run_folder import Run

ROOT = Path(__file__).parents[2]
NODES = 3  # of four hosts: one is spare
STEPS = 300
SHARED = "/fsx/trainfleet"
TABLE = [
    "| fault | noticed after | ranks train again after | steps done twice | losses | orphans | verdict |"
]  # of all drills


def pin(nodes: Lab, *which: int) -> None:
    """Gives each of the lab's nodes one core, so that its ranks run one thread: they share this machine's few."""
    cores = sorted(os.sched_getaffinity(0))
    for node in which or range(nodes.count):
        for pid in nodes.pids(node):
            os.sched_setaffinity(pid, {cores[node % len(cores)]})


def told(
    fault: str,
    noticed: float | None,
    again: float | None,
    twice: int | None,
    losses: str,
    verdict: str,
) -> None:
    """A row of the table, for a fault after which no process is left on any node: seconds, seconds, steps, and what was said."""
    seconds = ["" if value is None else f"{value:.1f} s" for value in (noticed, again)]
    TABLE.append(
        " | ".join(
            [
                f"| {fault}",
                *seconds,
                "" if twice is None else str(twice),
                losses,
                "0",
                f"{verdict} |",
            ]
        )
    )


class Cockpit:
    """The commands of a user whose fleet is the lab."""

    def __init__(self, nodes: Lab, folder: Path, name: str, /, **changes: Any) -> None:
        self.nodes, self.folder, self.name = nodes, folder, name
        fleet = nodes.fleet(nodes=NODES) | changes
        shared = nodes.shared / Path(str(fleet["shared_folder"])).relative_to("/fsx")
        self.run = Run(
            shared / "runs" / name
        )  # as the nodes see it; this machine has a mirror of it
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "name": name,
            "fleet": fleet,
            "data": {"name": "text", "sources": ["/fsx/text"], "vocab_size": 340, "validation_fraction": 0.1},
            "model": {"layers": 2, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
            "train": {"steps": STEPS, "precision": "fp32", "global_batch_size": 12, "sequence_length": 32, "log_every": 5, "validate_every": 0,
                      "validation_sequences": 6},
            "checkpoint": {"every": 20},
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def start(
        self, verb: str, *words: str, variables: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        return verbs.begin(self.folder, verb, *words, variables=variables, start_new_session=True)

    def type(self, verb: str, *words: str, code: int = 0, timeout: float = 240) -> str:
        process = self.start(verb, *words)
        output = process.communicate(timeout=timeout)[0]
        assert process.returncode == code, output + self.words()
        return output

    def losses(self) -> dict[int, float]:
        return verbs.losses(self.run.folder)

    def results(self) -> dict[str, Any]:
        return json.loads((self.folder / "runs" / self.name / "results.json").read_text())  # type: ignore[no-any-return]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.run.read_events() if event["event"] == kind]

    def beats(self) -> dict[int, Beat]:
        return read_beats(self.run.folder, fence.current(self.run.folder).number)

    def step(self) -> int:
        """The step that rank 0 is in."""
        beat = self.beats().get(0)
        return beat.step if beat and beat.phase == "step" else 0

    def words(self) -> str:
        """What the launchers and nodes have written and what is left, for a failed assertion."""
        logs = "".join(
            f"\n== {log.name}\n{log.read_text()[-3000:]}"
            for log in sorted(self.run.logs.glob("*.log"))
        )
        return f"{logs}\n== left\n" + "\n".join(self.leftovers())

    def until(self, what: str, holds: Callable[[], object], seconds: float = 90) -> float:
        """The moment (unix time) at which something holds."""
        deadline = time.time() + seconds
        while time.time() < deadline:
            if holds():
                return time.time()
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {seconds:.0f} s{self.words()}")

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """A signal to a rank's process, from its node."""
        beat = self.beats()[rank]
        host = beat.node
        self.nodes.run(host, "kill", f"-{number.value}", str(beat.pid))

    def kill_launchers(self) -> None:
        """The launcher and the host that stands by for it, at once."""
        for node in range(self.nodes.count):
            for log in ("launcher", "standby"):
                for pid in self.nodes.processes(node, f"runs/{self.name}/logs/{log}"):
                    os.kill(pid, signal.SIGKILL)

    def leftovers(self) -> list[str]:
        """Processes of ours on any node: by host, with their command lines."""
        return [
            f"node{node}: {command}"
            for node in range(self.nodes.count)
            for command in self._commands(node)
        ]

    def _commands(self, node: int) -> list[str]:
        found = []
        for pid in self.nodes.pids(node):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if "trainfleet" in command and state != "Z":
                found.append(f"{pid} {command}")
        return found
