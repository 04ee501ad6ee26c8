"""What a team meets in its first week: a reinstalled host, a jump host that nobody knows, a Python that is not there, an end."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fleet.conftest import Run, lines
from fleet.lab import Lab, address_of
from fleet.test_transport import transport
from verbs import enter


def test_the_remedy_for_a_reinstalled_host_works(pair: Lab, run: Run) -> None:
    assert run(pair, "setup").returncode == 0
    pair.new_host_key(1)
    failed = lines(run(pair, "setup").stdout)["node1"]
    command = f"ssh-keygen -R {address_of(1)} -f {pair.known_hosts}"
    assert "its host key differs" in failed and command in failed
    pair.run(0, "true")
    known = pair.known_hosts.read_text().splitlines()
    pair.known_hosts.write_text(
        "\n".join(line for line in known if address_of(1) not in line) + "\n"
    )
    assert "its host key SHA256:" in lines(run(pair, "setup").stdout)["node1"]


def test_a_jump_host_that_nobody_knows_is_named_once(pair: Lab, tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text(
        "\n".join(
            line for line in pair.known_hosts.read_text().splitlines() if address_of(1) in line
        )
        + "\n"
    )
    with transport(pair, jump=f"root@{address_of(0)}", known_hosts=str(known)) as fleet:
        failed = fleet.run("true", timeout=10, hosts=fleet.hosts[1:]).failed[fleet.hosts[1]]
        assert failed.kind == "unknown-key" and failed.message.startswith(
            f"the jump host {address_of(0)}: "
        )


def test_a_key_with_a_passphrase_is_named(
    pair: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess

    (tmp_path / ".ssh").mkdir()
    mine = tmp_path / ".ssh/id_ed25519"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "a passphrase", "-f", str(mine)], check=True
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with transport(pair, key=None) as fleet:
        failure = fleet.run("true", timeout=10).failed[fleet.hosts[0]]
    assert (
        failure.kind == "auth"
        and "~/.ssh/id_ed25519) has a passphrase" in str(failure)
        and "None" not in str(failure)
    )
    with transport(pair, key=str(mine)) as fleet:
        assert f"the key {mine} has a passphrase" in str(
            fleet.run("true", timeout=10).failed[fleet.hosts[0]]
        )


def test_setup_is_not_green_where_a_job_could_not_run(pair: Lab, tmp_path: Path) -> None:
    fleet = pair.fleet(nodes=2)
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"name": "lab", "fleet": fleet | {"python": "/opt/none/bin/python"}})
    )
    failed = enter(tmp_path, "setup", code=1)
    assert (
        "/opt/none/bin/python (fleet.python) is missing or not executable" in failed
        and "0 of 2 hosts ready" in failed
    )
    pair.run(1, "mount", "-o", "remount,ro,bind", "/fsx")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"name": "lab", "fleet": fleet}))
    failed = enter(tmp_path, "setup", code=1)
    assert "/fsx/trainfleet is read-only" in failed and "1 of 2 hosts ready" in failed


def test_a_purge_says_what_it_leaves_and_removes_it_when_asked(pair: Lab, run: Run) -> None:
    assert (done := run(pair, "setup", "trainer")).returncode == 0, done.stdout
    kept = run(pair, "clean", "trainer", PURGE="1", YES="1").stdout
    for words in ("left node0: ~/.ssh/id_trainfleet, the SSH key of a head", "left node1: 1 SSH keys of heads in ~/.ssh/authorized_keys",
                  "left node1: /etc/ssh/sshd_config.d/10-trainfleet.conf", "PURGE=all removes these too"):  # fmt: skip
        assert words in kept, kept
    home = pair.root(0) / "home/trainer"
    assert (home / ".ssh/id_trainfleet").exists()
    gone = run(pair, "clean", "trainer", PURGE="all", YES="1").stdout
    assert "only drivers and packages are left on the hosts" in gone, gone
    assert not (home / ".ssh/id_trainfleet").exists() and not (home / ".trainfleet").exists()
    assert not (pair.root(1) / "etc/ssh/sshd_config.d/10-trainfleet.conf").exists()
    assert (done := run(pair, "setup", "trainer")).returncode == 0, done.stdout
