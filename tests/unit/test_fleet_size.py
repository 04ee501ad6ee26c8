"""Fleets of more hosts than the transport asks at once: they pass their gate, stay healthy, and are refused where SSH ends."""

from __future__ import annotations

import heapq
import json
import subprocess
import threading
from pathlib import Path

import pytest

from trainfleet.backends import terms_of
from trainfleet.backends.ssh import Ssh
from trainfleet.config import Settings, load
from trainfleet.config.host_list import Host
from trainfleet.health import lease
from trainfleet.hosts import fleet as hosts_fleet
from trainfleet.hosts import preflight
from trainfleet.hosts.fleet import ANSWERS, MOST_NODES, look_every, lost_after
from trainfleet.hosts.host_results import LAUNCH, HostFailure, Result
from trainfleet.hosts.node_checks import judge
from trainfleet.hosts.transport import THREADS, Transport
from trainfleet.plan.job import Job
from trainfleet.trust.errors import ConfigError
from unit.test_nodes_health import P3DN, fleet
from unit.test_nodes_operations import wanted

MANY = 2000


class Fake(Transport):
    """A transport that reaches nothing."""

    def __init__(self, count: int) -> None:
        self.hosts = tuple(
            Host(f"n{number}", f"10.0.{number // 250}.{number % 250 + 1}")
            for number in range(count)
        )
        self._left_behind = {}


class Shell(Fake):
    """Hosts that are this machine's shell."""

    def ask(
        self, host: Host, command: str, *, timeout: float, stdin: str | bytes | None = None
    ) -> Result | HostFailure:
        done = subprocess.run(
            ["sh", "-c", command], capture_output=True, text=True, timeout=timeout, check=False
        )
        return Result(done.returncode, done.stdout, done.stderr, 0.0)


def test_commands_that_wait_for_one_another_meet_however_many_hosts_there_are(
    tmp_path: Path,
) -> None:
    """As `Transport.run` gave them to 64 threads, the first 64 waited for the others for ever."""
    count = THREADS + 6
    meet = f'touch {tmp_path}/$$; for _ in $(seq 150); do [ "$(ls {tmp_path} | wc -l)" = {count} ] && echo met && exit 7; sleep 0.2; done'
    shell = Shell(count)
    answers = hosts_fleet.run_together(shell, lambda host: meet, timeout=40, hosts=shell.hosts)
    assert [
        (answer.exit_code, answer.stdout)
        for answer in answers.values()
        if isinstance(answer, Result)
    ] == [(7, "met\n")] * count
    assert not list(Path("/tmp").glob(f"trainfleet-{16 * '[0-9a-f]'}-0"))


def test_what_does_not_end_is_ended_and_the_others_answers_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hosts_fleet, "END_SECONDS", 1)
    shell, commands = (
        Shell(2),
        {"n0": "echo first", "n1": f"echo second; sleep 60; touch {tmp_path}/late"},
    )
    answers = hosts_fleet.run_together(
        shell, lambda host: commands[host.name], timeout=30, hosts=shell.hosts
    )
    assert [
        (answer.exit_code, answer.stdout)
        for answer in answers.values()
        if isinstance(answer, Result)
    ] == [
        (0, "first\n"),
        (124, "second\n"),
    ]


class Simulated(Fake):
    """A fleet whose hosts answer as the preflight's commands do; the trial meets only while all of its ranks run."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.begun: set[Host] = set()
        self.asking, self.most, self.lock = 0, 0, threading.Lock()

    def ask(
        self, host: Host, command: str, *, timeout: float, stdin: str | bytes | None = None
    ) -> Result | HostFailure:
        with self.lock:
            self.asking += 1
            self.most = max(self.most, self.asking)
        try:
            return Result(0, self.say(host, command), "", 0.0)
        finally:
            with self.lock:
                self.asking -= 1

    def say(self, host: Host, command: str) -> str:
        if "umask 077; mkdir /tmp/" in command:
            self.begun.add(host)
        elif command.startswith("for _ in"):
            assert len(self.begun) == len(self.hosts), (
                "the first host waits for ranks that nobody has started"
            )
        elif "kill -KILL" in command:
            record = {"bandwidth": 95.0, "bytes": 1 << 30, "nodes": len(self.hosts), "pairs": []}
            return f"connected\n{preflight.BANDWIDTH}{json.dumps(record)}\nNET/OFI Selected provider is efa, fabric is efa (found 4 nics)\n"
        elif command.startswith("cat "):
            return command.rpartition(".")[2]  # the token
        return "there"


def test_a_simulated_fleet_of_2000_hosts_passes_its_gate() -> None:
    simulated, goal = Simulated(MANY), wanted("p3dn.24xlarge")
    facts = dict(zip(simulated.hosts, fleet(MANY, P3DN).values(), strict=True))
    assert not list(judge(LAUNCH, facts, goal))
    assert preflight.try_shared_folder(simulated, goal, facts) == []
    assert preflight.try_port(simulated, goal, facts) == []
    simulated.begun.clear()
    found, findings = preflight.try_fabric(simulated, goal, facts)
    assert found and found.nodes == MANY and not [finding for finding in findings if finding.host]
    assert simulated.most <= THREADS


def longest_silence(count: int, answers: float, seconds: float = 600.0) -> float:
    """For how long any of so many healthy hosts is not heard of, by a head that takes in so many answers a second."""
    heard, free, worst = [0.0] * count, 0.0, 0.0
    due = [(look_every(count), host) for host in range(count)]
    heapq.heapify(due)
    while due[0][0] < seconds:
        moment, host = heapq.heappop(due)
        free = max(free, moment) + 1 / answers
        worst, heard[host] = max(worst, free - heard[host]), free
        heapq.heappush(due, (free + look_every(count), host))
    return worst


@pytest.mark.parametrize("count", [1, 64, 65, 128, 640, 1000, MANY])
def test_no_healthy_host_of_any_fleet_is_taken_for_lost(count: int) -> None:
    assert longest_silence(count, ANSWERS) < lost_after(count)


@pytest.mark.parametrize("count", [2, 64, 640, MANY])
def test_a_lost_host_is_noticed_in_some_looks(count: int) -> None:
    assert lost_after(count) <= 9 + 3 * look_every(count)


def test_what_one_head_cant_carry_is_refused_by_name_of_what_can(tmp_path: Path) -> None:
    text = "name: x\nfleet: {{backend: ssh, shared_folder: /fsx/x, nodes: {}}}\ntrain: {{global_batch_size: {}}}\n"
    for nodes in (MOST_NODES, MOST_NODES + 1):
        (tmp_path / "config.yaml").write_text(text.format(nodes, nodes))
        if nodes == MOST_NODES:
            assert load(Settings(tmp_path / "config.yaml"), terms_of)[0].fleet.nodes == nodes
            continue
        with pytest.raises(ConfigError) as refused:
            load(Settings(tmp_path / "config.yaml"), terms_of)
        assert "config.yaml:2: fleet.nodes: one head can't watch 513 nodes" in str(refused.value)
        assert "slurm, batch or sagemaker" in str(refused.value)


def test_ranks_on_hosts_are_told_how_long_they_may_be_without_a_launcher(tmp_path: Path) -> None:
    text = "name: x\nfleet: {backend: ssh, shared_folder: /fsx/x, nodes: 2, hosts: [a, b]}\n"
    (tmp_path / "config.yaml").write_text(text)
    backend = Ssh(load(Settings(tmp_path / "config.yaml"), terms_of)[0])
    known = list(fleet(2, P3DN).values())
    chosen = [Host("a", "10.0.0.1"), Host("b", "10.0.0.2")]
    backend.head().facts = dict(zip(chosen, known, strict=True))
    script = backend._script(
        Job("train", "x", Path("runs/x"), 2, 1, "trainfleet.engine", (), True), 1, chosen
    ).text
    assert f"{lease.VARIABLE}={lease.ORPHANED_AFTER}" in script.replace("'", "")
    tokens = backend._script(
        Job("tokenize", "x", Path("runs/x"), 2, 1, "trainfleet.data", (), False), 1, chosen
    ).text
    assert lease.VARIABLE not in tokens
