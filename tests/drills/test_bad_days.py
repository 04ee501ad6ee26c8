"""What is frozen, shut or gone, and must not keep a run from going on, nor anybody from ending it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cockpit import NODES, STEPS, Cockpit, pin, told

from fleet.lab import Lab
from trainfleet.backends.base import load_job
from trainfleet.health.lease import PATIENCE

FAULT_AT = 60  # the step


def freeze_agents(nodes: Lab, node: int) -> None:
    for pid in nodes.processes(node, "torch.distributed.run"):
        if "supervisor" not in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGSTOP)


def train_with_a_frozen_agent(cockpit: Cockpit, node: int) -> subprocess.Popen[str]:
    """`make train`, in whose middle a node's agent is stopped."""
    looker = cockpit.start("train")
    cockpit.until("training", lambda: cockpit.step() >= FAULT_AT)
    freeze_agents(cockpit.nodes, node)
    return looker


@pytest.mark.timeout(300)
def test_a_frozen_agent_keeps_no_run_from_its_end(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    cockpit = Cockpit(nodes, tmp_path, "agent-frozen")
    looker = train_with_a_frozen_agent(cockpit, 1)
    cockpit.until("the ranks finish", lambda: cockpit.events("finished"), 90)
    finished = time.time()
    output = looker.communicate(timeout=90)[0]
    noticed = time.time() - finished
    assert looker.returncode == 0, output + cockpit.words()
    assert cockpit.results()["status"] == "finished" and cockpit.results()["restarts"] == 0
    assert cockpit.losses() == whole
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 20)
    told(
        "a torchrun agent stopped (`SIGSTOP`)",
        noticed,
        0,
        0,
        "equal",
        "all ranks have ended: finished, and the agent is ended",
    )


@pytest.mark.timeout(300)
def test_what_is_frozen_on_a_node_that_does_not_answer_is_ended_once_it_does(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    cockpit = Cockpit(nodes, tmp_path, "agent-frozen-unseen")
    looker = train_with_a_frozen_agent(cockpit, 1)
    nodes.shut(1)
    try:
        log = cockpit.run.folder / "logs" / "launcher.log"
        cockpit.until(
            "it waits for the node", lambda: "no answer from node1" in log.read_text(), 120
        )
    finally:
        nodes.open(1)
    output = looker.communicate(timeout=90)[0]
    assert looker.returncode == 0 and "run make clean to end" not in output, (
        output + cockpit.words()
    )
    assert cockpit.losses() == whole
    assert not cockpit.leftovers()


@pytest.mark.timeout(300)
def test_of_a_finished_run_without_a_launcher_nothing_is_left_once_it_is_typed_again(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    cockpit = Cockpit(nodes, tmp_path, "frozen-alone")
    looker = train_with_a_frozen_agent(cockpit, 1)
    cockpit.kill_launchers()
    looker.kill()
    looker.communicate()
    cockpit.until("the ranks finish", lambda: cockpit.events("finished"), 90)
    assert cockpit.leftovers()
    time.sleep(PATIENCE)
    assert "nothing to do" in cockpit.type("train")
    assert not cockpit.leftovers() and cockpit.losses() == whole


@pytest.mark.timeout(300)
def test_stop_ends_also_what_is_frozen(nodes: Lab, whole: dict[int, float], tmp_path: Path) -> None:
    cockpit = Cockpit(nodes, tmp_path, "stop-frozen")
    looker = train_with_a_frozen_agent(cockpit, 2)
    began = time.time()
    assert "stopped; no process is running" in cockpit.type("stop", timeout=150)
    ended = time.time()
    assert looker.wait(60) == 130
    assert cockpit.results()["status"] == "stopped" and cockpit.results()["steps"] < STEPS
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 20)
    told(
        "`make stop`, with an agent stopped",
        ended - began,
        None,
        0,
        "",
        "stopped, with a checkpoint",
    )


@pytest.mark.timeout(300)
def test_clean_ends_a_run_of_which_everything_is_frozen(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    cockpit = Cockpit(nodes, tmp_path, "all-frozen")
    looker = cockpit.start("train")
    cockpit.until("training", lambda: cockpit.step() >= FAULT_AT)
    for node in range(3):
        looks = set(
            nodes.processes(node, "trainfleet.hosts.")
        )  # of the terminal: they are not of the run, and end by themselves
        for pid in set(nodes.processes(node, "trainfleet")) - looks:
            os.kill(pid, signal.SIGSTOP)
    began = time.time()
    assert "no process of all-frozen is running on the fleet's 4 hosts" in cockpit.type(
        "clean", timeout=200
    )
    ended = time.time()
    looker.kill()  # which has a look at the hosts as long as nobody says that the run has ended
    looker.communicate()
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 40)
    told(
        "`make clean`, with every process of the run stopped",
        ended - began,
        None,
        None,
        "",
        "ended at once, as no step came",
    )


@pytest.mark.timeout(300)
def test_a_node_whose_sshd_hangs_trains_on(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    cockpit = Cockpit(nodes, tmp_path, "sshd-hangs")
    looker = cockpit.start("train")
    cockpit.until("training", lambda: cockpit.step() >= FAULT_AT)
    struck = time.time()
    nodes.shut(2)
    try:
        cockpit.until("it is noticed", lambda: cockpit.events("unreachable"), 40)
        noticed = cockpit.events("unreachable")[0]
        output = looker.communicate(timeout=200)[0]
    finally:
        nodes.open(2)
    assert looker.returncode == 0, output + cockpit.words()
    assert (
        noticed["node"] == 2
        and noticed["host"] == "node2"
        and "node 2 (node2): no answer over SSH" in output
    )
    assert not cockpit.events("restarted") and cockpit.losses() == whole
    assert "Traceback" not in cockpit.words(), (
        cockpit.words()
    )  # of paramiko, on a link without an answer
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 30)
    told(
        "sshd hangs on a node",
        noticed["time"] - struck,
        0,
        0,
        "equal",
        "node 2 does not answer, its ranks still send heartbeats, so the run continues",
    )


@pytest.mark.timeout(300)
def test_ranks_without_a_launcher_are_told_of_and_stopped(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    cockpit = Cockpit(nodes, tmp_path, "alone")
    looker = cockpit.start("train")
    cockpit.until("training", lambda: cockpit.step() >= 30)
    refused = cockpit.type("train", "SET=train.learning_rate=0.5", code=1)
    assert (
        "alone: the run is running with another config" in refused
        and "train.learning_rate is" in refused
    )
    for rank in range(NODES):
        cockpit.signal_rank(rank, signal.SIGSTOP)  # it would be done before the lease is over
    cockpit.kill_launchers()
    looker.kill()
    looker.communicate()
    time.sleep(10)
    for rank in range(NODES):
        cockpit.signal_rank(rank, signal.SIGCONT)
    assert "node0, node1, node2 continue without it" in cockpit.type("status")
    began = time.time()
    said = cockpit.type("stop")
    assert "its launcher is gone" in said and "next: make train resumes it" in said, said
    ended = time.time()
    assert not cockpit.leftovers() and cockpit.events("stopped")
    assert "nothing to stop" in cockpit.type("stop")
    output = cockpit.type("train")
    assert cockpit.losses() == whole, output
    said = "ranks go on without a launcher: stopped, with a checkpoint"
    told("`make stop`, launcher and standby killed", ended - began, None, 0, "equal", said)


def test_a_finished_run_of_another_config_is_not_this_one(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    cockpit = Cockpit(nodes, tmp_path, "whole")
    refused = cockpit.type("train", "SET=model.layers=4", code=1)
    assert (
        "the run is finished with another config" in refused
        and "model.layers is 2 in the checkpoint, 4 in the config" in refused
    )
    assert "nothing to do" in cockpit.type("train", "SET=train.log_every=7")


@pytest.mark.timeout(400)
def test_ranks_that_nobody_launches_any_more_save_and_leave(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    cockpit = Cockpit(nodes, tmp_path, "orphans", nodes=2)
    looker = cockpit.start(
        "train",
        "SET=train.steps=1000000 train.compile=false train.log_every=1000 checkpoint.every=100000",
    )
    cockpit.until("training", lambda: cockpit.step() >= FAULT_AT)
    cockpit.kill_launchers()
    struck = time.time()
    looker.kill()
    looker.communicate()
    cockpit.until("they leave", lambda: not cockpit.leftovers(), 200)
    assert cockpit.events("orphaned"), cockpit.words()
    alone, stopped = cockpit.events("orphaned")[0], cockpit.events("stopped")[0]
    assert (
        110 <= alone["time"] - struck <= 150
        and cockpit.events("checkpointed")[-1]["step"] == stopped["step"]
    )
    told(
        "head and standby both killed",
        alone["time"] - struck,
        None,
        0,
        "",
        "no launcher for two minutes: the ranks save and leave",
    )


@pytest.mark.timeout(300)
def test_a_slow_link_is_named_while_it_trains_and_its_node_replaced(
    nodes: Lab, whole: dict[int, float], tmp_path: Path
) -> None:
    cockpit = Cockpit(nodes, tmp_path, "slow-link", on_slow_node="replace")
    looker = cockpit.start(
        "train",
        "SET=train.steps=1000000 train.compile=false train.log_every=1000 checkpoint.every=50",
    )
    cockpit.until("training", lambda: cockpit.step() >= FAULT_AT)
    time.sleep(30)  # until it is known how long steps take
    struck, steps = time.time(), list[int]()

    def named_now() -> bool:
        steps.append(cockpit.step())
        return bool(cockpit.events("slow-link"))

    nodes.slow(2, "2mbit")
    try:
        cockpit.until("it is named", named_now, 90)
        again = cockpit.until(
            "training again", lambda: cockpit.events("restarted") and cockpit.step() > 0, 90
        )
    finally:
        nodes.fast(2)
    named, restarted = cockpit.events("slow-link"), cockpit.events("restarted")[0]
    assert {(one["node"], one["host"]) for one in named} == {
        (2, "node2")
    } and "times as long as before" in named[-1]["why"], named
    assert restarted["hosts"] == ["node0", "node1", "node3"] and restarted["cause"] == "slow"
    lost = max(steps) - cockpit.events("resumed")[0]["step"]
    cockpit.type("stop")
    assert looker.wait(60) == 130
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 30)
    said = "node 2: slow link; a spare takes its place (`fleet.on_slow_node: replace`)"
    told("a node's link at 2 Mbit/s", named["time"] - struck, again - struck, lost, "", said)


@pytest.mark.timeout(300)
def test_two_lost_nodes_are_both_named(nodes: Lab, whole: dict[int, float], tmp_path: Path) -> None:
    cockpit = Cockpit(nodes, tmp_path, "two-lost", min_nodes=2)
    looker = cockpit.start("train")
    cockpit.until("training", lambda: cockpit.step() >= FAULT_AT)
    step, struck = cockpit.step(), time.time()
    for node in (1, 2):
        nodes.destroy(node)
    cockpit.until("the verdict", lambda: cockpit.events("verdict"), 60)
    again = cockpit.until(
        "training again", lambda: cockpit.events("restarted") and cockpit.step() > 0
    )
    output = looker.communicate(timeout=200)[0]
    for node in (1, 2):
        nodes.recreate(node)
    pin(nodes, 1, 2)
    assert looker.returncode == 0, output + cockpit.words()
    verdict = cockpit.events("verdict")[0]
    assert (
        verdict["cause"] == "lost-node"
        and "lost node 1" in verdict["words"]
        and "lost node 2 (node2)" in verdict["words"]
    )
    assert (
        "node1" in cockpit.events("restarted")[0]["who"]
        and "node2" in cockpit.events("restarted")[0]["who"]
    )
    assert cockpit.results()["world_size"] == 2 and cockpit.losses() == pytest.approx(
        whole, rel=2e-3
    )
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 30)
    lost = step - cockpit.events("resumed")[0]["step"]
    told(
        "two of three nodes lose their power",
        verdict["time"] - struck,
        again - struck,
        lost,
        "to 2e-3",
        "both named: lost node",
    )


@pytest.mark.timeout(300)
def test_a_spare_is_taken_at_launch(nodes: Lab, whole: dict[int, float], tmp_path: Path) -> None:
    cockpit = Cockpit(nodes, tmp_path, "spare")
    nodes.run(1, "umount", "/fsx")
    try:
        output = cockpit.type("train")
    finally:
        nodes.destroy(1)
        nodes.recreate(1)
        pin(nodes, 1)
    assert "a spare replaces node1: /fsx/trainfleet is" in output
    job = load_job(cockpit.run)
    assert cockpit.losses() == whole and job and job[0].hosts == ("node0", "node2", "node3")
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 30)
    said = "it is excluded, with the reason, and a spare takes its place"
    told("a host unfit at launch (its shared folder is another)", None, None, 0, "equal", said)
