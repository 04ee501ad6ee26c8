"""Who leads next: a host stands by as long as a launcher leads, whichever host that is, and a launcher without a link leaves."""

from __future__ import annotations

import json
import platform
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainfleet.backends.base import Handle
from trainfleet.backends.head import Hosts
from trainfleet.backends.ssh import Looks, Ssh
from trainfleet.config.host_list import Host
from trainfleet.health.lease import FILE, SUCCEEDS, TO_BEGIN, Holder, Lease, Standby, write_standby
from trainfleet.hosts.host_commands import PartState
from trainfleet.hosts.host_results import Answers, HostFailure, Result
from trainfleet.launch import execution, failover, remote_launch, training
from trainfleet.launch.failover import Succession
from trainfleet.launch.remote_launch import Leads
from trainfleet.report.summary import status
from trainfleet.run.claims import rewrite
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import BackendError

HOSTS = [Host(name, f"10.0.0.{number}") for number, name in enumerate("abcd")]


def write_holder(folder: Path, holder: Holder) -> None:
    rewrite(folder / FILE, json.dumps(asdict(holder)))


class Head:
    """Keeps who was appointed; hosts that are `down` can't be."""

    def __init__(self, *_: object) -> None:
        self.appointed: list[tuple[str, int]] = []
        self.opened: list[tuple[str, list[str]]] = []
        self.down: set[str] = set()

    def open_doors(self, heads: list[Host], hosts: list[Host]) -> dict[Host, HostFailure]:
        if heads[0].name in self.down:
            raise BackendError("can't create the head's SSH key", where=heads[0].name)
        self.opened.append((heads[0].name, [host.name for host in hosts]))
        return {
            host: HostFailure("down", "no answer", "") for host in hosts if host.name in self.down
        }

    def appoint(self, host: Host, launcher: object, number: int, term: int) -> None:
        self.appointed.append((host.name, number))


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Succession:
    """Of a launcher on host a, which no terminal has given a standby: one that has taken over itself."""
    monkeypatch.setattr(failover, "FleetHead", Head)
    monkeypatch.setattr(failover, "is_here", lambda host: host.name == "a")
    monkeypatch.setattr(failover, "AGAIN", 0.2)
    monkeypatch.setattr(failover, "KNOCK_EVERY", 0.2)
    monkeypatch.setattr(failover, "EVERY", 0.05)
    monkeypatch.setattr(failover, "PATIENCE", 0.4)
    monkeypatch.setenv(SUCCEEDS, "1 5.0")
    backend: Any = SimpleNamespace(
        transport=SimpleNamespace(hosts=HOSTS), config=SimpleNamespace(fleet=SimpleNamespace(secrets=())), interpreter="python",
        code="/code", name_of=lambda host: f"ip-{host.name}", quarantine=SimpleNamespace(held=lambda hosts: {}),
    )  # fmt: skip
    return Succession(backend, Lease(tmp_path))


def beat(keeper: Succession, host: str, number: int, times: int = 1) -> None:
    for _ in range(times):
        write_standby(keeper.lease.folder, Standby(host, 7, number, time.time()))
        time.sleep(0.06)


def until(holds: Any) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_after_a_takeover_another_host_is_appointed_at_once_and_after_its_loss_the_next(
    keeper: Succession,
) -> None:
    head: Any = keeper.head
    with keeper:
        until(lambda: head.appointed == [("b", 1)])
        beat(keeper, "b", 1, 3)
        assert keeper.lease.standby == "b"
        until(lambda: head.appointed[1:] == [("c", 2)])  # b has fallen silent
        assert keeper.lease.standby == ""
        beat(keeper, "c", 2, 3)
        until(lambda: head.appointed[2:] == [("d", 3)])
        beat(keeper, "d", 3, 3)
        until(lambda: head.appointed[3:] == [("b", 4)])  # without a limit
    assert {name for name, _ in head.opened} == {"b", "c", "d"} and all(
        hosts == list("abcd") for _, hosts in head.opened
    )


def test_a_host_that_is_down_is_passed_over_and_told_of_the_new_head_once_it_is_back(
    keeper: Succession,
) -> None:
    head: Any = keeper.head
    head.down = {"b"}
    with keeper:
        until(lambda: head.appointed == [("c", 1)])
        beat(keeper, "c", 1, 8)
        assert head.opened[-1] == ("c", ["b"])
        head.down = set()
        beat(keeper, "c", 1, 8)
        told = len(head.opened)
        beat(keeper, "c", 1, 8)
    assert len(head.opened) == told and head.appointed == [("c", 1)]


def test_nobody_is_appointed_while_the_terminal_s_choice_may_still_begin(
    keeper: Succession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SUCCEEDS)
    keeper = Succession(keeper.fleet, Lease(tmp_path))
    assert TO_BEGIN - 5 < keeper.until - time.monotonic() <= TO_BEGIN
    keeper.look(Standby("b", 7, 1, 1.0))
    keeper.look(Standby("b", 7, 1, 2.0))
    assert keeper.lease.standby == "b" and keeper.until == 0.0, "from now on its silence counts"


def test_on_a_fleet_of_one_host_nobody_is_looked_for(keeper: Succession) -> None:
    fleet: Any = keeper.fleet
    fleet.leads = True
    backend: Any = SimpleNamespace(head=lambda: fleet)
    assert isinstance(failover.kept(backend, keeper.lease), Succession)
    fleet.transport.hosts = HOSTS[:1]
    assert not isinstance(failover.kept(backend, keeper.lease), Succession)


def test_that_no_host_can_stand_by_is_said_once_and_ends_no_thread(
    keeper: Succession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries = list[int]()

    def appoint(self: Succession) -> None:
        tries.append(1)
        raise (OSError if len(tries) % 2 else BackendError)("no route to host")

    monkeypatch.setattr(Succession, "_appoint", appoint)
    with keeper:
        until(lambda: len(tries) > 3)
        assert keeper.thread.is_alive()
    assert not keeper.thread.is_alive()
    assert capsys.readouterr().out.count("no route to host") == 1


def test_a_standby_that_leads_now_itself_does_not_stand_by(keeper: Succession) -> None:
    keeper.look(Standby(platform.node(), 7, 1, 1.0))
    keeper.look(Standby(platform.node(), 7, 1, 2.0))
    assert keeper.lease.standby == ""


def test_status_says_who_leads_and_who_stands_by(tmp_path: Path) -> None:
    run = Run(tmp_path / "x")
    run.update_results(status="running", unattended=True)
    write_holder(run.folder, Holder("node0", 1, 1, time.time()))
    assert "led by  node0\n" in status(run)
    write_standby(run.folder, Standby("node1", 1, 1, time.time()))
    assert "led by  node0; no standby yet" in status(run)
    write_holder(run.folder, Holder("node0", 1, 1, time.time(), standby="node1"))
    assert "led by  node0; node1 is the standby" in status(run)
    write_holder(run.folder, Holder("node0", 1, 1, time.time(), code=0, standby="node1"))
    assert "led by" not in status(run)


def test_a_terminal_waits_as_long_as_a_host_stands_by(tmp_path: Path) -> None:
    write_holder(tmp_path, Holder("node0", 1, 1, 5.0))
    leads = Leads(Run(tmp_path))
    for _ in range(100):
        leads.look(1.0)
    assert leads.look(1.0) > remote_launch.SILENCE, "its launcher is gone, whatever any clock says"
    write_standby(tmp_path, Standby("node1", 1, 1, 5.0))
    assert leads.look(1.0) == 0.0


class There:
    """What a fleet's hosts show of a run, at each look."""

    def __init__(self, run: Run, shows: Any) -> None:
        self.run, self.shows, self.looks = run, shows, 0

    def refresh(self, host: object) -> float:
        self.looks += 1
        write_holder(self.run.folder, self.shows(self.looks))
        return 1000.0


@pytest.mark.parametrize(
    ("shows", "running"),
    [
        (lambda look: Holder("node0", 1, 1, 995.0), True),
        (lambda look: Holder("node0", 1, 1, 90000.0 + look), True),  # a day ahead, and at work
        (lambda look: Holder("node0", 1, 1, 90000.0), False),  # a day ahead, and dead
        (lambda look: Holder("node0", 1, 1, 10.0 + look), True),
        (lambda look: Holder("node0", 1, 1, 10.0), False),
        (lambda look: Holder("node0", 1, 1, 995.0, 0), False),
    ],
)
def test_whether_a_run_is_led_does_not_depend_on_its_host_s_clock(
    tmp_path: Path, shows: Any, running: bool
) -> None:
    run = Run(tmp_path / "x")
    run.folder.mkdir()
    place = object.__new__(Hosts)
    place.run, place.pace, place.entry, place.silent, place.now = run, 0.05, None, (None, None), 0.0  # type: ignore[misc]
    place.transport = SimpleNamespace(hosts=HOSTS)  # type: ignore[assignment]
    place.mirror = There(run, shows)  # type: ignore[assignment]
    place.refresh()
    assert place.is_running() is running
    began = time.monotonic()
    assert place.is_running() is running and time.monotonic() - began < 1, (
        "it is not waited for twice"
    )


class Links:
    """A transport of which only some hosts answer."""

    hosts = HOSTS

    def __init__(self, answering: str) -> None:
        self.answering, self.asked = answering, list[str]()

    def run(self, command: str, timeout: float, hosts: list[Host]) -> Answers:
        self.asked += [host.name for host in hosts]
        dead = HostFailure("down", "no answer", "")
        return Answers(
            {
                host: Result(0, "", "", 0.1) if host.name in self.answering else dead
                for host in hosts
            }
        )


@pytest.mark.parametrize(
    ("heard", "ended", "answering", "cut_off", "asked"),
    [
        ({"b": 60.0, "c": 60.0}, "", "", "a", "bcd"),
        ({"b": 60.0, "c": 0.5}, "", "", "", ""),  # b alone is lost
        ({"b": 60.0, "c": 60.0}, "", "c", "", "bcd"),  # back just now
        ({"b": 60.0, "c": 60.0}, "", "d", "", "bcd"),  # a spare, which has no part in the job
        ({"b": 3.0, "c": 3.0}, "b", "b", "", "b"),  # its part has ended, and is asked no more
    ],
)
def test_a_head_that_no_other_host_answers_suspects_itself(
    monkeypatch: pytest.MonkeyPatch,
    heard: dict[str, float],
    ended: str,
    answering: str,
    cut_off: str,
    asked: str,
) -> None:
    monkeypatch.setattr("trainfleet.backends.ssh.is_here", lambda host: host.name == "a")
    backend, now = object.__new__(Ssh), time.monotonic()
    looks = Looks(
        tuple(HOSTS[:3]), heard={host: now - heard.get(host.name, 0.0) for host in HOSTS[:3]}
    )
    looks.said = {host: PartState("ended", 1) for host in HOSTS[:3] if host.name in ended}
    links = Links(answering)
    backend.__dict__ |= {
        "_head": SimpleNamespace(transport=links, leads=True),
        "_looks": {"t": looks},
    }
    assert (
        backend.cut_off(Handle("ssh", "x-train", "t", 3)) == cut_off
        and "".join(links.asked) == asked
    )


def test_the_host_whose_launcher_fell_silent_is_appointed_last(keeper: Succession) -> None:
    keeper.lease.before = Holder("ip-b", 1, 1, 5.0)
    assert [host.name for host in keeper._candidates()] == ["c", "d", "b"]
    keeper.lease.before = Holder("ip-b", 1, 1, 5.0, 0)  # it has ended well
    assert [host.name for host in keeper._candidates()] == ["b", "c", "d"]


def test_who_takes_over_a_finished_run_ends_what_is_left_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher was killed while it waited for nodes: a frozen one stays, and others wait for that one."""
    run, ended, alive = Run(tmp_path), list[tuple[str, bool]](), False
    write_holder(tmp_path, Holder("node0", 7, 1, time.time()))
    handle = Handle("ssh", "the-job", "train-x", 2)
    monkeypatch.setattr(execution, "load_job", lambda run: (handle, None))
    place: Any = SimpleNamespace(refresh=lambda: None, is_running=lambda: alive)
    backend: Any = SimpleNamespace(
        hands_over=False, is_here=False, place=lambda run: place,
        stop=lambda handle, at_once: ended.append((handle.id, at_once)),
    )  # fmt: skip
    monkeypatch.setattr(training, "backend_of", lambda config: backend)
    monkeypatch.setattr(training, "launching", lambda config, verb: nullcontext())
    monkeypatch.setattr(training, "require_same", lambda config, run: None)
    monkeypatch.setattr(training.run_folder, "run_of", lambda name: run)
    run.update_results(status="finished", steps=600)
    plan: Any = SimpleNamespace(config=SimpleNamespace(name="x", train=SimpleNamespace(steps=600)))
    monkeypatch.setattr(execution, "status", lambda run: "finished")
    assert training.train(plan, time.time(), False) == 0 and ended == [("the-job", True)]
    alive = True
    assert training.train(plan, time.time(), False) == 0 and len(ended) == 1, (
        "a launcher is at work, which does it"
    )
