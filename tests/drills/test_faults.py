"""What can happen to a run on hosts, done to a real one: sshd nodes, torchrun, gloo; only the model is small.

For each: who is named, how soon it is noticed, how soon the ranks train again, how many steps that cost, and that the losses are
those of a run to which nothing happened, with no process left anywhere. A table of all is printed at the end.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cockpit import STEPS, Cockpit, pin, told

from fleet.lab import Lab
from trainfleet.health.faults import FAULTS, PREFIX, VARIABLE

NOTICED, AGAIN = 20.0, 60.0  # seconds; the longest was 12 on two quiet cores
FAULT_AT = 100  # the step


@dataclass(frozen=True)
class Drill:
    """A fault of the table (health/faults.py), which its rank plays, or `strike`: the lab can do worse.

    `causes`: those of the fault that may be named, where the way in which it is done leaves fewer. `is_rank`: the verdict must
    name the rank as well as the node.
    """

    fault: str
    strike: Callable[[Cockpit], object] | None = None
    mend: Callable[[Cockpit], object] = lambda cockpit: None
    causes: tuple[str, ...] = ()
    is_rank: bool = False
    how: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.fault, self.how)))

    @property
    def verdicts(self) -> tuple[str, ...]:
        assert {*self.causes} <= {*FAULTS[self.fault].verdicts}
        return self.causes or FAULTS[self.fault].verdicts

    @property
    def node(self) -> int | None:
        return FAULTS[self.fault].rank


def reboot(cockpit: Cockpit) -> None:
    """Power off, and two seconds later on again."""
    cockpit.nodes.destroy(1)
    threading.Timer(2.0, back, (cockpit, 1)).start()


def back(cockpit: Cockpit, node: int) -> None:
    cockpit.nodes.recreate(node)
    pin(cockpit.nodes, node)


def cut_off(cockpit: Cockpit) -> None:
    """The link by which a node reaches the others, and the disk that they share: what needs either waits."""
    cockpit.nodes.cut(1)
    cockpit.nodes.signal_all(1, signal.SIGSTOP)


def join(cockpit: Cockpit) -> None:
    cockpit.nodes.signal_all(1, signal.SIGCONT)
    cockpit.nodes.join(1)


DRILLS = [
    Drill("rank-killed", is_rank=True),
    Drill("agent-killed", causes=("killed",)),
    Drill("agent-killed", reboot, causes=("lost-node",), how="by a reboot of its node"),
    Drill("rank-stopped", is_rank=True),
    Drill("link-cut", cut_off, join, ("lost-node",), how="and the disk too"),
    Drill(
        "link-cut",
        lambda cockpit: cockpit.nodes.cut(1),
        lambda cockpit: cockpit.nodes.join(1),
        ("slow",),
        how="the disk not",
    ),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", DRILLS, ids=lambda drill: drill.name)
def test_the_run_goes_on(nodes: Lab, whole: dict[int, float], tmp_path: Path, fault: Drill) -> None:
    strike = fault.strike
    cockpit = Cockpit(nodes, tmp_path, f"{'' if strike else PREFIX}{fault.name.replace(' ', '-')}")
    played = {} if strike else {VARIABLE: f"{fault.fault}@{FAULT_AT}:1"}
    looker = cockpit.start("train", variables=played)
    if strike:
        cockpit.until("training", lambda: cockpit.step() >= FAULT_AT)
        step, struck = cockpit.step(), time.time()
        strike(cockpit)
    else:
        cockpit.until("the fault", lambda: cockpit.events("struck"))
        step, struck = FAULT_AT, cockpit.events("struck")[0]["time"]
    cockpit.until("the verdict", lambda: cockpit.events("verdict"), 60)
    cockpit.until("the restart", lambda: cockpit.events("restarted"), 90)
    again = cockpit.until("training again", lambda: cockpit.step() > 0, 90)
    fault.mend(cockpit)
    output = looker.communicate(timeout=200)[0]
    assert looker.returncode == 0, output + cockpit.words()
    finish(cockpit, whole, fault, step, struck, again)


def finish(
    cockpit: Cockpit, whole: dict[int, float], fault: Drill, step: int, struck: float, again: float
) -> None:
    """What must hold at the end of every drill, and its line in the table."""
    verdict, resumed = cockpit.events("verdict")[0], cockpit.events("resumed")[0]
    lost = step - resumed["step"]
    noticed = verdict["time"] - struck
    assert verdict["cause"] in fault.verdicts and verdict["node"] == fault.node, verdict
    assert not fault.is_rank or verdict["rank"] == fault.node, verdict  # each node has one rank
    assert noticed <= NOTICED and again - struck <= AGAIN, (noticed, again - struck)
    assert 0 <= lost <= 40
    results = cockpit.results()
    assert (results["status"], results["steps"], results["restarts"]) == ("finished", STEPS, 1)
    assert cockpit.losses() == whole
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 30)
    told(
        fault.name, noticed, again - struck, lost, "equal", f"{verdict['who']}: {verdict['cause']}"
    )


@pytest.mark.timeout(300)
def test_the_head_loses_its_power(nodes: Lab, whole: dict[int, float], tmp_path: Path) -> None:
    """The rendezvous host and the launcher are gone at once; the host that stands by types the same command."""
    cockpit = Cockpit(nodes, tmp_path, "head-lost")
    looker = cockpit.start("train")
    cockpit.until("training", lambda: cockpit.step() >= FAULT_AT)
    step, struck = cockpit.step(), time.time()
    nodes.destroy(0)
    noticed = cockpit.until("the takeover", lambda: "this host takes over" in cockpit.words(), 30)
    cockpit.until("the restart", lambda: cockpit.events("restarted"), 60)
    again = cockpit.until("training again", lambda: cockpit.step() > 0, 90)
    output = looker.communicate(timeout=200)[0]
    back(cockpit, 0)
    assert looker.returncode == 0, output + cockpit.words()
    assert "this host takes over" in output and f"step {STEPS}" in output, (
        output
    )  # the terminal is not blind afterwards
    lost = step - cockpit.events("resumed")[0]["step"]
    assert cockpit.losses() == whole and cockpit.results()["restarts"] == 1
    assert "node0" in cockpit.events("restarted")[0]["who"]
    assert noticed - struck <= NOTICED and again - struck <= AGAIN, (
        noticed - struck,
        again - struck,
    )
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 30)
    told(
        "the head loses its power",
        noticed - struck,
        again - struck,
        lost,
        "equal",
        "the host that stands by takes over",
    )


@pytest.mark.timeout(300)
def test_a_closed_laptop_changes_nothing(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    cockpit = Cockpit(nodes, tmp_path, "laptop")
    looker = cockpit.start("train")
    cockpit.until("training", lambda: cockpit.step() >= 40)
    looker.kill()
    looker.communicate()
    step = cockpit.step()
    cockpit.until("it goes on", lambda: cockpit.step() > step + 10)
    assert "running" in cockpit.type("status")
    assert "rank 0" in cockpit.type("logs")
    output = cockpit.type("train")
    assert "is running on node0" in output and cockpit.results()["status"] == "finished", output
    assert cockpit.losses() == whole and not cockpit.events("restarted")
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 30)
    told("the laptop closed", None, 0, 0, "equal", "`make train` follows it again")


@pytest.mark.timeout(300)
def test_stop_from_another_terminal_saves_and_nothing_is_left(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    cockpit = Cockpit(nodes, tmp_path, "stop")
    looker = cockpit.start("train")
    cockpit.until("training", lambda: cockpit.step() >= 30)
    assert "stopped" in cockpit.type("stop")
    assert looker.wait(60) == 130
    results = cockpit.results()
    assert results["status"] == "stopped" and 30 <= results["steps"] < STEPS
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 30)
    assert "not running" in cockpit.type("stop")


@pytest.mark.timeout(300)
def test_a_spare_less_fleet_goes_on_with_fewer_nodes(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    cockpit = Cockpit(nodes, tmp_path, "elastic", hosts=nodes.hosts()[:3], min_nodes=2)
    looker = cockpit.start("train")
    cockpit.until("training", lambda: cockpit.step() >= FAULT_AT)
    struck = time.time()
    nodes.destroy(2)
    again = cockpit.until(
        "training again", lambda: cockpit.events("restarted") and cockpit.step() > 0
    )
    output = looker.communicate(timeout=200)[0]
    back(cockpit, 2)
    assert looker.returncode == 0, output + cockpit.words()
    assert cockpit.results()["world_size"] == 2 and cockpit.results()["status"] == "finished"
    assert cockpit.losses() == pytest.approx(whole, rel=1e-4)
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 30)
    cause = cockpit.events("verdict")[0]["cause"]
    told(
        "no spare left, `fleet.min_nodes: 2`",
        None,
        again - struck,
        None,
        "to 1e-4",
        f"{cause}; goes on with two",
    )
