"""make setup and make plan on real sshd nodes in a plain state: all is done once, the second time nothing, the unfit are named."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.conftest import Run, lines
from fleet.lab import Lab, address_of, lab
from fleet.test_transport import transport
from trainfleet.hosts import facts as reading
from trainfleet.hosts import host_setup
from trainfleet.hosts.facts import Facts
from trainfleet.hosts.host_results import Board
from trainfleet.hosts.host_setup import boot
from trainfleet.hosts.install_steps import InstallStep, Wanted
from trainfleet.hosts.platform import load_platform


def test_setup_makes_plain_nodes_ready_and_then_changes_nothing(
    pair: Lab, run: Run, tmp_path: Path
) -> None:
    planned = run(pair, "plan", "trainer", OUT="out")
    script = (tmp_path / "out/setup-node1.sh").read_text()
    assert (
        "sudo -n scripts/limits.sh apply 65536 && sudo -n scripts/limits.sh verify 65536\n"
        in script
    ), planned.stderr
    assert not (
        pair.root(1) / "etc/security/limits.d/90-trainfleet.conf"
    ).exists()  # planning writes nothing

    first = run(pair, "setup", "trainer")
    assert first.returncode == 0, first.stdout + first.stderr
    assert (
        all(" changed " in line for line in lines(first.stdout).values())
        and len(lines(first.stdout)) == 2
    )
    written = [pair.root(node) / path for node in (0, 1) for path in ("etc/security/limits.d/90-trainfleet.conf",
               "etc/ssh/sshd_config.d/10-trainfleet.conf", "home/trainer/.ssh/authorized_keys")]  # fmt: skip
    stamps = [path.stat().st_mtime_ns for path in written]

    second = run(pair, "setup", "trainer")
    assert second.returncode == 0 and "2 of 2 hosts ready, 0 changed" in second.stdout
    assert [path.stat().st_mtime_ns for path in written] == stamps
    key = [
        "-i",
        "/home/trainer/.ssh/id_trainfleet",
        "-o",
        "StrictHostKeyChecking=accept-new",
        "-o",
        "BatchMode=yes",
    ]
    hop = pair.run(0, "su", "trainer", "-c", f"cd && ssh {' '.join(key)} {address_of(1)} hostname")
    assert hop.stdout == "node1\n"  # the head reaches the other without a password
    assert not (pair.root(1) / "home/trainer/.ssh/id_trainfleet").exists()


def test_every_unfit_host_is_named_in_one_table_and_not_touched(run: Run) -> None:
    with lab(9) as nodes:
        nodes.destroy(1)
        nodes.new_host_key(2)
        full = '#!/bin/sh\n/usr/bin/df "$@" | awk \'$NF == "/" { $5 = 9 } 1\'\n'
        (nodes.root(5) / "usr/local/bin/df").write_text(full)
        (nodes.root(5) / "usr/local/bin/df").chmod(0o755)
        nodes.run(6, "umount", "/fsx")
        nodes.run(7, "hostname", "node8")
        hosts = nodes.hosts()
        hosts[3] = f"node3=nobody-here@{address_of(3)}"
        hosts[4] = f"node4=guest@{address_of(4)}"
        done = run(nodes, "setup", hosts=hosts)
        table = lines(done.stdout)
        expected = {
            "node1": "", "node2": "its host key differs", "node3": "rejected the SSH key of nobody-here", "node4": "needs passwordless sudo",
            "node5": "GB free", "node6": "/fsx/trainfleet is on overlay at /", "node7": "host name node8", "node8": "host name node8"}  # fmt: skip
        for name, words in expected.items():
            assert "FAILED" in table[name] and words in table[name] and "next: " in table[name], (
                table[name]
            )
        assert " changed " in table["node0"]
        assert done.returncode == 1 and "1 of 9 hosts ready, 1 changed" in done.stdout
        untouched = [
            nodes.root(node) / "etc/ssh/sshd_config.d/10-trainfleet.conf"
            for node in (2, 3, 4, 5, 6, 7, 8)
        ]
        assert not any(path.exists() for path in untouched)


def test_a_stranger_is_not_trusted_without_a_person(pair: Lab, run: Run, tmp_path: Path) -> None:
    pair.known_hosts.write_text("")
    done = run(pair, "setup")
    assert done.returncode == 1 and "its host key SHA256:" in lines(done.stdout)["node0"]
    assert pair.known_hosts.read_text() == ""


def test_a_host_that_boots_is_waited_for(pair: Lab) -> None:
    with transport(pair) as fleet:
        config = replace_fleet()
        before = reading.read(fleet, config)
        first = before[fleet.hosts[0]]
        assert isinstance(first, Facts) and boot(fleet, fleet.hosts[0], first)
        after = reading.read(fleet, config)
        assert isinstance(now := after[fleet.hosts[0]], Facts) and now.boot_id != first.boot_id
        assert after[fleet.hosts[1]].boot_id == before[fleet.hosts[1]].boot_id  # type: ignore[union-attr]


DRIVER = """#!/bin/sh
now=$(cat /proc/sys/kernel/random/boot_id)
[ -e /var/driver ] || echo "$now" > /var/driver
[ "$(cat /var/driver)" != "$now" ] || { echo "driver: it loads at the next boot"; exit 3; }
echo "driver: loaded"
"""


def test_what_counts_after_a_boot_is_done_after_one_and_never_on_two_hosts_at_once(
    pair: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in (0, 1):
        (pair.root(node) / "driver.sh").write_text(DRIVER)
        (pair.root(node) / "driver.sh").chmod(0o755)
    down: list[tuple[float, float]] = []

    def timed(*words: Any) -> bool:
        began, back = time.monotonic(), boot(*words)
        down.append((began, time.monotonic()))
        return back

    monkeypatch.setattr(host_setup, "boot", timed)
    monkeypatch.setattr(host_setup, "steps", lambda *facts, **head: ())  # when it looks again
    monkeypatch.setattr(host_setup.Application, "send_scripts", lambda *hosts: "/")
    with transport(pair) as fleet:
        config = replace_fleet()
        config = replace(
            config, fleet=replace(config.fleet, shared_folder="/tmp")
        )  # which hosts have
        facts = {
            host: fact
            for host, fact in reading.read(fleet, config).items()
            if isinstance(fact, Facts)
        }
        found = host_setup.Survey(
            facts, dict.fromkeys(facts, (InstallStep("driver.sh", (), "there is none"),)), ()
        )
        board = Board(fleet.hosts)
        host_setup.Application(
            fleet, config, Wanted(config, load_platform("cpu")), found, board
        ).run()
    assert [board.rows[host] for host in fleet.hosts] == [("changed", "booted; driver: loaded")] * 2
    assert len(down) == 2 and down[0][1] <= down[1][0]


def replace_fleet():  # type: ignore[no-untyped-def]
    from trainfleet.config import Settings, load

    config = load(Settings(Path(__file__).parents[2] / "config.yaml"))[0]
    return replace(config, fleet=replace(config.fleet, shared_folder="/fsx/trainfleet"))
