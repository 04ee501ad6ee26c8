"""The transport against real sshd: every host its own answer, and each way to be unreachable told apart."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet import lab as fleet_lab
from fleet.lab import Lab, address_of
from trainfleet.cloud.calls import through_agent
from trainfleet.config.host_list import Host, parse_hosts
from trainfleet.config.types import SshConfig
from trainfleet.hosts.host_results import Result
from trainfleet.hosts.mirror import Mirror, fetch
from trainfleet.hosts.tar import code_files, content_hash
from trainfleet.hosts.transport import Transport, _pulse

SSH = SshConfig(user=None, key=None, jump=None, known_hosts=None, fingerprints=(), config=None)


def transport(nodes: Lab, **changes: Any) -> Transport:
    user = changes.pop("user", "root")
    return Transport(parse_hosts(nodes.hosts()), replace(SSH, **(nodes.ssh(user) | changes)))


def test_every_host_answers_for_itself_over_one_kept_connection(pair: Lab) -> None:
    with transport(pair) as fleet:
        assert [answer.stdout for answer in fleet.run("hostname", timeout=10).ok.values()] == [
            "node0\n",
            "node1\n",
        ]
        ports = "echo $SSH_CONNECTION"
        assert fleet.run(ports, timeout=10).keys() == set(fleet.hosts)
        first, again = fleet.run(ports, timeout=10), fleet.run(ports, timeout=10)
        assert [a.stdout for a in first.ok.values()] == [a.stdout for a in again.ok.values()]
        mixed = fleet.run(
            lambda host: "exit 3" if host.name == "node1" else "cat", stdin="secret", timeout=10
        )
        assert [host.name for host in mixed.ok] == ["node0"] and mixed.ok[
            fleet.hosts[0]
        ].stdout == "secret"
        assert str(mixed.failed[fleet.hosts[1]]) == "exit code 3: no output"


def test_much_output_on_both_streams_and_much_input_come_through(pair: Lab) -> None:
    with transport(pair) as fleet:
        answer = fleet.run(
            "cat; seq 1 300000 >&2", stdin=b"x" * 3_000_000, timeout=20, hosts=fleet.hosts[:1]
        )[fleet.hosts[0]]
    assert isinstance(answer, Result)
    assert len(answer.stdout) == 3_000_000 and answer.stderr.endswith("300000\n")


def test_one_session_at_a_time_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sshd frees a session late, so the next one right after it is refused for a moment."""
    monkeypatch.setattr(fleet_lab, "SSHD", f"{fleet_lab.SSHD}MaxSessions 1\n")
    monkeypatch.chdir(tmp_path)
    with fleet_lab.lab(1) as nodes, transport(nodes) as fleet:
        logs = nodes.shared / "runs/x/logs"
        logs.mkdir(parents=True)
        for number in range(40):
            (logs / f"node-{number}.log").write_text(f"{number}\n")
        mirror = Mirror(fleet, "/fsx", Path("runs/x"))
        assert isinstance(mirror.refresh(fleet.hosts[0]), float)
        assert len(fetch(fleet, fleet.hosts[0], "/fsx/runs/x/logs", Path("got"))) == 40
        for name in ("runs/x/logs", "got"):
            assert (tmp_path / name / "node-39.log").read_text() == "39\n"


def test_a_cut_link_is_noticed_in_eight_seconds_and_the_connection_comes_back(pair: Lab) -> None:
    with transport(pair) as fleet:
        fleet.run("true", timeout=10)
        threading.Timer(0.5, pair.cut, [1]).start()
        began = time.monotonic()
        answers = fleet.run(lambda host: "sleep 20" if host.name == "node1" else "true", timeout=30)
        assert time.monotonic() - began < 0.5 + 8.5
        assert [host.name for host in answers.ok] == ["node0"]
        assert answers.failed[fleet.hosts[1]].kind == "lost"
        pair.join(1)
        assert len(fleet.run("true", timeout=10).ok) == 2


def test_a_command_that_is_over_its_time_is_ended_on_the_node_too(pair: Lab) -> None:
    with transport(pair) as fleet:
        answers = fleet.run("sleep 77 & sleep 77", timeout=1)
        assert {failure.kind for failure in answers.failed.values()} == {"timeout"}
        time.sleep(0.2)
        assert pair.processes(0, "sleep 77") == []


def test_each_way_to_be_unreachable_has_its_own_words(pair: Lab) -> None:
    pair.new_host_key(1)
    odd = (
        Host("none", "no-such-host.invalid"),
        Host("shut", address_of(0), 2222),
        Host("guest", address_of(0), user="nobody-here"),
    )
    with transport(pair) as fleet:
        fleet.hosts = (*fleet.hosts, *odd)
        failed = fleet.run("true", timeout=10).failed
    assert {host.name: failure.kind for host, failure in failed.items()} == {
        "node1": "host-key", "none": "name", "shut": "down", "guest": "auth"}  # fmt: skip
    assert all(failure.next for failure in failed.values())


def test_an_unknown_key_is_refused_until_its_fingerprint_is_in_the_config(
    pair: Lab, tmp_path: Path
) -> None:
    empty = str(tmp_path / "known")
    with transport(pair, known_hosts=empty) as fleet:
        failed = fleet.run("true", timeout=10).failed
        assert {failure.kind for failure in failed.values()} == {"unknown-key"}
        prints = tuple(failure.message.split()[3] for failure in failed.values())
        assert not (tmp_path / "known").exists()
    pair.root(0)
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", str(pair.known_hosts)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert all(fingerprint in shown for fingerprint in prints)
    with transport(pair, known_hosts=empty, fingerprints=prints[:1]) as fleet:
        assert [host.name for host in fleet.run("true", timeout=10).ok] == ["node0"]
    with transport(pair, known_hosts=empty) as fleet:  # it was written down
        assert [host.name for host in fleet.run("true", timeout=10).ok] == ["node0"]


def test_through_a_jump_host_a_dead_node_is_noticed_as_fast(pair: Lab) -> None:
    with transport(pair, jump=f"root@{address_of(0)}") as fleet:
        came_from = (
            fleet.run("echo $SSH_CONNECTION", timeout=10).ok[fleet.hosts[1]].stdout.split()[0]
        )
        assert came_from == address_of(0)
        threading.Timer(0.5, pair.cut, [1]).start()
        began = time.monotonic()
        answer = fleet.run("sleep 20", timeout=30, hosts=fleet.hosts[1:])
        assert time.monotonic() - began < 0.5 + 9 and answer.failed[fleet.hosts[1]].kind == "lost"


def test_a_way_that_ends_while_a_sign_of_life_is_sent_leaves_no_traceback() -> None:
    """As paramiko does when the channel through a jump host is gone: whatever is sent, also that the link is closed, raises."""

    class Link:
        alive = True

        def is_active(self) -> bool:
            return self.alive

        def global_request(self, kind: str, wait: bool) -> None:
            raise EOFError

        def close(self) -> None:
            self.alive = False
            raise EOFError

    _pulse(link := Link())
    assert not link.alive


def test_an_agent_serves_as_well_as_a_key_file(pair: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    words = dict(
        part.split("=", 1) for part in agent.replace(";", "\n").splitlines() if "=" in part
    )
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", words["SSH_AUTH_SOCK"])
        subprocess.run(["ssh-add", "-q", str(pair.key)], check=True)
        with transport(pair, key=None) as fleet:
            assert len(fleet.run("true", timeout=10).ok) == 2
    finally:
        os.kill(int(words["SSH_AGENT_PID"]), 15)


def test_files_arrive_whole_and_once(pair: Lab) -> None:
    files = {"a/run.sh": b"#!/bin/sh\necho ran\n", "b.txt": b"text"}
    with transport(pair) as fleet:
        assert not fleet.put(files, "/opt/x").failed
        assert fleet.run("/opt/x/a/run.sh", timeout=10).ok[fleet.hosts[0]].stdout == "ran\n"
        for folder in (
            "/fsx/code/1",
            "/opt/code/1",
        ):  # one that all see, and one of each node's own
            assert not fleet.put_once(files, folder).failed
            before = fleet.run(f"stat -c %Y.%i {folder}/b.txt", timeout=10)
            assert not fleet.put_once(files, folder).failed
            after = fleet.run(
                f"stat -c %Y.%i {folder}/b.txt; ls /fsx/code /opt/code | grep -v :", timeout=10
            )
            assert [a.stdout.split()[0] for a in after.ok.values()] == [
                b.stdout.strip() for b in before.ok.values()
            ]
        assert all(answer.stdout.split()[1:] == ["1", "1"] for answer in after.ok.values())


def test_the_code_has_one_name_for_one_content() -> None:
    files = code_files("")
    assert "python/trainfleet/hosts/transport.py" in files and "schema/config.schema.json" in files
    assert not any("__pycache__" in name for name in files)
    assert (
        content_hash(files)
        == content_hash(dict(reversed(files.items())))
        != content_hash(files | {"x": b""})
    )


def test_nothing_of_the_lab_outlives_it(pair: Lab) -> None:
    with transport(pair) as fleet:
        fleet.run("setsid sleep 88 > /dev/null 2>&1 &", timeout=10)
    assert len(pair.processes(0, "sleep 88")) == 1
    pair.destroy(0)
    assert pair.pids(0) == [] and len(pair.processes(1, "sleep 88")) == 1
    pair.recreate(0)
    assert pair.processes(0, "sleep 88") == []


SSM = """#!{python}
import os, select, socket, sys
words = sys.argv[1:]
assert words[:3] == ["ssm", "start-session", "--target"] and words[4:] == {rest!r}, words
link = socket.create_connection(({addresses!r}[words[3]], 22))
while True:
    for ready in select.select([0, link], [], [])[0]:
        data = link.recv(65536) if ready is link else os.read(0, 65536)
        if not data:
            sys.exit()
        os.write(1, data) if ready is link else link.sendall(data)
"""


def test_ssh_through_a_session_of_ssm(
    pair: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in place of the AWS CLI takes its documented words, and carries the bytes to the instance's sshd."""
    ids = {"i-0123456789abcdef0": 0, "i-0123456789abcdef1": 1}
    rest = [
        "--document-name",
        "AWS-StartSSHSession",
        "--parameters",
        "portNumber=22",
        "--region",
        "us-east-1",
    ]
    program = tmp_path / "aws"
    addresses = {id: address_of(node) for id, node in ids.items()}
    program.write_text(SSM.format(python=sys.executable, rest=rest, addresses=addresses))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    known = tmp_path / "known_hosts"
    known.write_text("".join(f"{id} {pair.host_key(node)}\n" for id, node in ids.items()))
    ssh = replace(SSH, **(pair.ssh("root") | {"known_hosts": str(known)}))
    with Transport(
        parse_hosts([f"{id}={id}" for id in ids]), ssh, proxy=through_agent("us-east-1")
    ) as fleet:
        assert [answer.stdout for answer in fleet.run("hostname", timeout=20).ok.values()] == [
            "node0\n",
            "node1\n",
        ]
        first, again = (fleet.run("echo $SSH_CONNECTION", timeout=20) for _ in range(2))
        assert [one.stdout for one in first.ok.values()] == [
            one.stdout for one in again.ok.values()
        ], "one kept session"
    known.write_text("".join(f"{id} {pair.host_key(1 - node)}\n" for id, node in ids.items()))
    with Transport(
        parse_hosts([f"{id}={id}" for id in ids]), ssh, proxy=through_agent("us-east-1")
    ) as fleet:
        assert {failure.kind for failure in fleet.run("true", timeout=20).failed.values()} == {
            "host-key"
        }
    with Transport(parse_hosts(["i-0f=i-0f"]), ssh, proxy=through_agent("us-east-1")) as fleet:
        (failure,) = fleet.run("true", timeout=20).failed.values()
        assert failure.next.startswith(
            "aws ssm start-session --target i-0f --document-name AWS-StartSSHSession"
        ), failure
