"""Who leads a run when heads go, one after the other, or don't quite: each drill ends trained, bits equal, with no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cockpit import STEPS, Cockpit, pin, told

from fleet.lab import Lab
from trainfleet.health.lease import LEFT, newest_holder

FAULT_AT = 60  # the step


@pytest.fixture(autouse=True)
def powered(nodes: Lab) -> Iterator[None]:
    """A drill that failed leaves no host off to the next one."""
    yield
    back(nodes, *nodes.off)


def leads(cockpit: Cockpit) -> tuple[str, str]:
    """Who leads the run and who stands by, by the lease."""
    holder = newest_holder(cockpit.run.folder)
    return (holder.host, holder.standby) if holder else ("", "")


def begin(cockpit: Cockpit, *words: str) -> subprocess.Popen[str]:
    """`make train`, trained for a while, with a host that stands by."""
    looker = cockpit.start("train", *words)
    cockpit.until("training", lambda: cockpit.step() >= FAULT_AT)
    cockpit.until("somebody stands by", lambda: leads(cockpit)[1], 60)
    return looker


def back(nodes: Lab, *which: int) -> None:
    for node in which:
        nodes.recreate(node)
        pin(nodes, node)


def finish(
    cockpit: Cockpit, looker: subprocess.Popen[str], whole: dict[int, float], seconds: float = 240
) -> str:
    output = looker.communicate(timeout=seconds)[0]
    assert looker.returncode == 0, output + cockpit.words()
    assert f"step {STEPS}" in output, output  # the terminal is not blind afterwards
    assert cockpit.results()["status"] == "finished" and cockpit.losses() == whole
    return output


@pytest.mark.timeout(400)
def test_a_frozen_head_that_keeps_its_lock_is_succeeded(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    """All its processes are stopped, as in a hypervisor's pause; thawed, what it launched leaves and harms nobody."""
    cockpit = Cockpit(nodes, tmp_path, "head-frozen")
    looker = begin(cockpit)
    struck, step = time.time(), cockpit.step()
    nodes.signal_all(0, signal.SIGSTOP)
    noticed = cockpit.until("the takeover", lambda: "this host takes over" in cockpit.words(), 40)
    cockpit.until("the restart", lambda: cockpit.events("restarted"), 90)
    again = cockpit.until("training again", lambda: cockpit.step() > 0, 120)
    nodes.signal_all(0, signal.SIGCONT)
    finish(cockpit, looker, whole)
    assert newest_holder(cockpit.run.folder).host == "node1"  # type: ignore[union-attr]
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 60)
    lost = step - cockpit.events("resumed")[0]["step"]
    told(
        "the head frozen, its lock kept",
        noticed - struck,
        again - struck,
        lost,
        "equal",
        "the host that stands by takes over",
    )


@pytest.mark.timeout(500)
def test_after_the_loss_of_the_standby_s_host_another_takes_over(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    """The host that stands by loses its power, then the head: who was appointed in between leads."""
    cockpit = Cockpit(nodes, tmp_path, "standby-lost")
    looker = begin(cockpit)
    assert leads(cockpit) == ("node0", "node1"), cockpit.words()
    assert "node0; node1 is the standby" in cockpit.type("status")
    nodes.destroy(1)
    struck = time.time()
    cockpit.until("another stands by", lambda: leads(cockpit)[1] not in ("", "node1"), 90)
    appointed = time.time() - struck
    standby = leads(cockpit)[1]
    cockpit.until("training again", lambda: cockpit.events("restarted") and cockpit.step() > 0, 120)
    back(nodes, 1)  # of three hosts that are to train, the head is lost next
    nodes.destroy(0)
    struck = time.time()
    noticed = cockpit.until("the takeover", lambda: leads(cockpit)[0] == standby, 60)
    again = cockpit.until(
        "training again", lambda: len(cockpit.events("restarted")) > 1 and cockpit.step() > 0, 150
    )
    finish(cockpit, looker, whole)
    back(nodes, 0)
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 60)
    told("the standby's host lost, then the head", noticed - struck, again - struck, None, "equal",
         f"{standby}, appointed {appointed:.0f} s after the first loss, takes over")  # fmt: skip


@pytest.mark.timeout(600)
def test_two_takeovers_in_a_row(nodes: Lab, whole: dict[int, float], tmp_path: Path) -> None:
    cockpit = Cockpit(nodes, tmp_path, "two-takeovers")
    looker = begin(cockpit)
    struck = time.time()
    for count, lost in enumerate((0, 1), 1):
        nodes.destroy(lost)
        follow(cockpit, count)
        back(nodes, lost)
    again = time.time()
    finish(cockpit, looker, whole)
    assert cockpit.results()["restarts"] == 2
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 60)
    told(
        "two heads lost, one after the other",
        None,
        again - struck,
        None,
        "equal",
        "any host may come to lead",
    )


def follow(cockpit: Cockpit, takeovers: int) -> None:
    """Returns once another host leads, for the so-manieth time, another stands by for it, and ranks train again."""

    def term() -> int:
        holder = newest_holder(cockpit.run.folder)
        return holder.term if holder else 0

    cockpit.until("the takeover", lambda: term() == takeovers + 1, 90)
    cockpit.until("another stands by", lambda: leads(cockpit)[1], 90)
    cockpit.until(
        "training again",
        lambda: len(cockpit.events("restarted")) >= takeovers and cockpit.step() > 0,
        150,
    )


@pytest.mark.timeout(400)
def test_a_head_that_is_cut_off_blames_itself(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    """Its cable is pulled, its disk stays: it leaves the run to the host that stands by, and no healthy node is blamed."""
    cockpit = Cockpit(nodes, tmp_path, "head-cut-off")
    looker = begin(cockpit)
    struck, step = time.time(), cockpit.step()
    nodes.cut(0)
    try:
        noticed = cockpit.until("the verdict", lambda: cockpit.events("verdict"), 60)
        cockpit.until("the restart", lambda: cockpit.events("restarted"), 90)
        again = cockpit.until("training again", lambda: cockpit.step() > 0, 120)
    finally:
        nodes.join(0)
    finish(cockpit, looker, whole)
    verdicts = cockpit.events("verdict")
    assert [(verdict["cause"], verdict["host"]) for verdict in verdicts] == [
        ("lost-node", "node0")
    ], verdicts
    assert (
        "can't reach any other host" in verdicts[0]["words"]
        and verdicts[0]["done"] == "left the run to the standby node1"
    )
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 60)
    lost = step - cockpit.events("resumed")[0]["step"]
    told(
        "the head's link cut, but not its disk",
        noticed - struck,
        again - struck,
        lost,
        "equal",
        "node 0: lost node",
    )


@pytest.mark.timeout(300)
def test_a_thawed_launcher_leaves(nodes: Lab, whole: dict[int, float], tmp_path: Path) -> None:
    """Only the launcher is stopped; its ranks train on under the successor, which never stops them."""
    cockpit = Cockpit(nodes, tmp_path, "launcher-frozen")
    looker = begin(cockpit)
    (launcher,) = [
        pid
        for pid in nodes.processes(0, "-m trainfleet train")
        if "supervisor" not in command_of(pid)
    ]
    os.kill(launcher, signal.SIGSTOP)
    cockpit.until("the takeover", lambda: leads(cockpit)[0] == "node1", 60)
    os.kill(launcher, signal.SIGCONT)
    cockpit.until("it has left", lambda: not Path(f"/proc/{launcher}").exists(), 20)
    finish(cockpit, looker, whole)
    assert not cockpit.events("restarted") or cockpit.results()["restarts"] == 0
    assert LEFT == 76 and "this launcher exits" in (cockpit.run.logs / "launcher.log").read_text()
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 60)


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
