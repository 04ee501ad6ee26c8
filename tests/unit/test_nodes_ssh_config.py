"""fleet.ssh.config: no program of it runs at a look, none at make plan, and none ever that came with somebody's config."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

import verbs
from trainfleet.config.host_list import Host
from trainfleet.config.types import SshConfig
from trainfleet.nodes import ssh_config
from trainfleet.nodes.transport import Transport
from trainfleet.trust.errors import ConfigError

HOST = Host("gpu-1", "127.0.0.1", 1)


def ssh(path: Path) -> SshConfig:
    return SshConfig(user=None, key=None, jump=None, known_hosts=None, fingerprints=(), config=str(path))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/.ssh").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


EXECS = [
    'Match exec "{program}"\n  User root\n', 'Match host * exec "{program}"\n', "match EXEC={program}\n", 'Match !exec "{program}"\n',
    'Match=exec "{program}"\n', '  MATCH   originalhost gpu-1 Exec "{program}"\n', "Match \"exec\" '{program}'\n", 'Host a\nMatch user x exec {program}\n',
]  # fmt: skip


@pytest.mark.parametrize("where", ["config", "home/.ssh/config"])
@pytest.mark.parametrize("text", EXECS)
def test_match_exec_is_never_run(home: Path, text: str, where: str) -> None:
    path, ran = home / where, home / "ran"
    path.write_text(f"Host *\n  Port 22\n{text.format(program=f'touch {ran}')}")
    with pytest.raises(ConfigError, match=r"config:|can't be read"):
        Transport([HOST], ssh(path)).ask(HOST, "true", timeout=1)
    with pytest.raises(ConfigError):
        ssh_config.runs_programs(ssh(path))
    assert not ran.exists()


COMMANDS = [
    "ProxyCommand {program}\n",
    "proxycommand={program}\n",
    "Host gpu-*\n  ProxyCommand = {program}\n",
    'Host 127.*\n  ProxyCommand "{program}"\n',
]


@pytest.mark.parametrize("text", COMMANDS)
def test_a_proxy_command_runs_only_from_your_own_folder(home: Path, text: str) -> None:
    ran = home / "ran"
    (home / "fleet.config").write_text(text.format(program=f"touch {ran}"))
    with pytest.raises(ConfigError, match=r"fleet\.config:[12]: fleet\.ssh\.config: has a ProxyCommand") as refused:
        Transport([HOST], ssh(home / "fleet.config")).ask(HOST, "true", timeout=1)
    assert "fleet.ssh.jump" in refused.value.next and not ran.exists()
    (home / "home/.ssh/config").symlink_to(home / "fleet.config")
    with pytest.raises(ConfigError, match="ProxyCommand"):
        ssh_config.read(ssh(home / "home/.ssh/config"))
    (home / "home/.ssh/mine").write_text(text.format(program=f"touch {ran}"))
    assert ssh_config.read(ssh(home / "home/.ssh/mine")).lookup("127.0.0.1") and ssh_config.runs_programs(
        ssh(home / "home/.ssh/mine")
    )
    assert not ran.exists(), "a look ran it"


def test_a_proxy_command_of_your_own_is_used_to_connect(home: Path) -> None:
    ran = home / "ran"
    (home / "home/.ssh/config").write_text(f"Host 127.*\n  ProxyCommand sh -c 'touch {ran}'\n")
    Transport([HOST], ssh(home / "home/.ssh/config")).ask(HOST, "true", timeout=1)
    assert ran.exists()


@pytest.mark.parametrize("text", ["ProxyCommand none\n", "Host *\n  Port 2222\nMatch host gpu-1\n  User x\n", ""])
def test_what_runs_nothing_is_taken(home: Path, text: str) -> None:
    (home / "config").write_text(text)
    assert not ssh_config.runs_programs(ssh(home / "config")) and ssh_config.read(ssh(home / "config"))


@pytest.mark.parametrize("kind", ["missing", "folder", "device", "binary"])
def test_a_file_that_can_not_be_read_is_named(home: Path, kind: str) -> None:
    path = {"missing": home / "none", "folder": home, "device": Path("/dev/zero"), "binary": home / "binary"}[kind]
    if kind == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"fleet\.ssh\.config: can't be read"):
        ssh_config.read(ssh(path))


def test_make_plan_runs_no_program_and_says_so(home: Path) -> None:
    ran = home / "ran"
    (home / "home/.ssh/config").write_text(f"Host *\n  ProxyCommand touch {ran}\n")
    fleet = {
        "backend": "ssh",
        "nodes": 1,
        "hosts": ["127.0.0.1:1"],
        "shared_folder": "/fsx/x",
        "ssh": {"config": "~/.ssh/config"},
    }
    (home / "config.yaml").write_text(yaml.safe_dump({"name": "x", "fleet": fleet, "data": {"sources": ["/fsx/text"]}}))
    said = verbs.enter(home, "plan", variables={"HOME": str(home / "home")}, timeout=60, python=sys.executable)
    assert "hosts: not asked" in said and "ProxyCommand" in said and said.endswith("next: make setup\n") and not ran.exists()
    (home / "home/.ssh/config").write_text(f'Match exec "touch {ran}"\n')
    said = verbs.enter(home, "plan", variables={"HOME": str(home / "home")}, timeout=60, code=2)
    assert "Match exec" in said and "config:1" in said and "Traceback" not in said and not ran.exists()
