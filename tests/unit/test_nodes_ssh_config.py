"""fleet.ssh.config: no program of it runs at a look, none at make plan, and none ever that came with somebody's config."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import verbs
from trainfleet.config.host_list import Host
from trainfleet.config.types import SshConfig
from trainfleet.hosts import ssh_config
from trainfleet.hosts.transport import Transport
from trainfleet.trust.errors import ConfigError

HOST = Host("gpu-1", "127.0.0.1", 1)


def ssh(path: Path) -> SshConfig:
    return SshConfig(
        user=None, key=None, jump=None, known_hosts=None, fingerprints=(), config=str(path)
    )


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
    with pytest.raises(
        ConfigError, match=r"fleet\.config:[12]: fleet\.ssh\.config: has a ProxyCommand"
    ) as refused:
        Transport([HOST], ssh(home / "fleet.config")).ask(HOST, "true", timeout=1)
    assert "fleet.ssh.jump" in refused.value.next and not ran.exists()
    (home / "home/.ssh/config").symlink_to(home / "fleet.config")
    with pytest.raises(ConfigError, match="ProxyCommand"):
        ssh_config.read(ssh(home / "home/.ssh/config"))
    (home / "home/.ssh/mine").write_text(text.format(program=f"touch {ran}"))
    assert ssh_config.read(ssh(home / "home/.ssh/mine"), HOST).lookup(
        "127.0.0.1"
    ) and ssh_config.runs_programs(ssh(home / "home/.ssh/mine"))
    assert not ran.exists(), "a look ran it"


def test_a_proxy_command_of_your_own_is_used_to_connect(home: Path) -> None:
    ran = home / "ran"
    (home / "home/.ssh/config").write_text(f"Host 127.*\n  ProxyCommand sh -c 'touch {ran}'\n")
    Transport([HOST], ssh(home / "home/.ssh/config")).ask(HOST, "true", timeout=1)
    assert ran.exists()


@pytest.mark.parametrize(
    "text", ["ProxyCommand none\n", "Host *\n  Port 2222\nMatch host gpu-1\n  User x\n", ""]
)
def test_what_runs_nothing_is_taken(home: Path, text: str) -> None:
    (home / "config").write_text(text)
    assert not ssh_config.runs_programs(ssh(home / "config")) and ssh_config.read(
        ssh(home / "config")
    )


@pytest.mark.parametrize("kind", ["missing", "folder", "device", "binary"])
def test_a_file_that_can_not_be_read_is_named(home: Path, kind: str) -> None:
    path = {
        "missing": home / "none",
        "folder": home,
        "device": Path("/dev/zero"),
        "binary": home / "binary",
    }[kind]
    if kind == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"fleet\.ssh\.config: can't be read"):
        ssh_config.read(ssh(path))


def test_make_plan_runs_no_program_and_says_so(home: Path) -> None:
    ran = home / "ran"
    (home / "home/.ssh/config").write_text(
        f"Host *\n  ProxyCommand touch {ran}\n  CertificateFile x\n"
    )
    fleet = {
        "backend": "ssh",
        "nodes": 1,
        "hosts": ["127.0.0.1:1"],
        "shared_folder": "/fsx/x",
        "ssh": {"config": "~/.ssh/config"},
    }
    (home / "config.yaml").write_text(
        yaml.safe_dump({"name": "x", "fleet": fleet, "data": {"sources": ["/fsx/text"]}})
    )
    said = verbs.enter(
        home, "plan", variables={"HOME": str(home / "home")}, timeout=60, python=sys.executable
    )
    assert said.count("~/.ssh/config has settings that trainfleet ignores: certificatefile") == 1
    assert (
        "hosts: not queried" in said
        and "ProxyCommand" in said
        and said.endswith("next: make setup\n")
        and not ran.exists()
    )
    (home / "home/.ssh/config").write_text(f'Match exec "touch {ran}"\n')
    said = verbs.enter(home, "plan", variables={"HOME": str(home / "home")}, timeout=60, code=2)
    assert (
        "Match exec" in said and "config:1" in said and "Traceback" not in said and not ran.exists()
    )


def lookup(path: Path, text: str, host: Host = HOST, **more: str) -> dict[str, Any]:
    path.write_text(text)
    return dict(ssh_config.read(replace(ssh(path), **more), host).lookup(host.address))


def test_the_file_means_what_ssh_makes_of_it(home: Path) -> None:
    """Included files, tokens, Match, first value wins; only keys that are there, as ssh tries no others."""
    (home / "conf.d").mkdir()
    (home / "home/.ssh/id_x").touch()
    (home / "conf.d/a.conf").write_text("Host gpu-?\n  HostName %h.cluster\n  User first\n")
    text = f'Include "{home}/conf.d/*.conf"\nHost *\n  User second\nMatch final host *.cluster user first\n  Port 2200\n'
    text += f"Host gpu-a\n  IdentityFile {home}/home/.ssh/id_x\n  IdentityFile ~/none\n  IdentitiesOnly yes\n  ProxyJump me@jump:23\n"
    found = lookup(home / "config", text, Host("a", "gpu-a"))
    assert (found["hostname"], found["user"], found["port"], found["proxyjump"]) == (
        "gpu-a.cluster",
        "first",
        "2200",
        "me@jump:23",
    )
    assert found["identityfile"] == [f"{home}/home/.ssh/id_x"] and found["identitiesonly"] == "yes"
    known = lookup(
        home / "config",
        "Match user bob\n  HostName bobs\nMatch user ann\n  HostName anns\n",
        Host("a", "a"),
        user="ann",
    )
    assert known["hostname"] == "anns", "a user of the config is one that ssh is given"


def test_a_connection_goes_where_ssh_would(home: Path) -> None:
    text = "Host gpu-a\n  HostName 127.0.0.9\n  Port 2200\n  User ann\n  ProxyJump far,me@jump:23\nHost jump\n  HostName 127.0.0.8\n"
    (home / "config").write_text(text)
    with Transport([], ssh(home / "config")) as transport:
        made = transport._made(Host("a", "gpu-a"), None)
        assert (made.host, made.port, made.user) == ("127.0.0.9", 2200, "ann")
        jump = made.gateway
        assert (jump.host, jump.port, jump.user, jump.gateway.host, jump.gateway.gateway) == (
            "127.0.0.8",
            23,
            "me",
            "far",
            None,
        )
        assert all(
            hop.client._host_keys is transport.known for hop in (made, jump, jump.gateway)
        ), "each must show a known key"
        given = transport._made(Host("a", "gpu-a", 2300, "bob"), None)
        assert (given.port, given.user) == (2300, "bob"), "the config's own words count"
        (home / "config").write_text("Host *\n  ProxyJump jump\n")
        with pytest.raises(ConfigError, match="jumphost loop via jump"):  # as ssh says it
            transport._made(Host("a", "gpu-a"), None)


def test_a_proxy_command_knows_the_port_that_the_config_names(home: Path) -> None:
    found = lookup(
        home / "home/.ssh/config",
        "Host *\n  ProxyCommand nc %h %p %r\n",
        Host("a", "gpu-a", 2300, "bob"),
    )
    assert found["proxycommand"] == "nc gpu-a 2300 bob"


@pytest.mark.parametrize(
    "text",
    [
        *EXECS,
        'Match host gpu-1 e"xe"c "{program}"\n',
        '"Match" exec {program}\n',
        "Match host x,exec={program}\n",
        '\t=Match\thost *,exec "exec""{program}"\n',
        '""="Match"\tuser root "exec"" {program}\n',
    ],
)
def test_match_exec_of_an_included_file_is_never_run(home: Path, text: str) -> None:
    """However deep; and where ssh's own home is not HOME, the files that ssh would read are looked at."""
    ran = home / "ran"
    (home / "outer").write_text(f"Host x\nInclude={home}/in?er\n")
    (home / "inner").write_text(f"Include {home}/outer\n{text.format(program=f'touch {ran}')}")
    (home / "config").write_text(f"Host *\n  inCLUDE '{home}/none' \"{home}/outer\" # not /x\n")
    with pytest.raises(ConfigError, match=r"inner:[23]: .*(Match exec|quoted word)"):
        ssh_config.read(ssh(home / "config"))
    (home / "config").write_text("Include ${HOME}/outer\n")
    with pytest.raises(ConfigError, match=r"config:1: .*may hide a command"):
        ssh_config.runs_programs(ssh(home / "config"))
    assert not ran.exists()


@pytest.mark.parametrize(
    "text",
    [
        "Host *\n  Match host exec-1,*exec\n",
        "# Match exec x\nHost exec\n",
        "Match host gpu-1\n  User exec\n",
    ],
)
def test_what_only_looks_like_match_exec_is_taken(home: Path, text: str) -> None:
    assert lookup(home / "config", text)["hostname"]


def test_an_included_proxy_command_counts_where_it_lies(home: Path) -> None:
    (home / "mine").write_text("ProxyCommand nc %h %p\n")
    (home / "home/.ssh/config").write_text(f"Include {home}/mine\n")
    assert ssh_config.runs_programs(ssh(home / "home/.ssh/config"))
    with pytest.raises(ConfigError, match=r"mine:1: .*ProxyCommand"):
        ssh_config.read(ssh(home / "home/.ssh/config"))


def test_what_ssh_would_go_by_and_paramiko_does_not_is_named(home: Path) -> None:
    (home / "config").write_text(
        "Host gpu-*\n  CertificateFile a\n  LogLevel ERROR\nHost b\n  GSSAPIAuthentication yes\n  HostKeyAlias c\n"
    )
    hosts = [Host("a", "gpu-a"), Host("b", "b"), Host("c", "c")]
    assert ssh_config.unheard(ssh(home / "config"), hosts) == [
        "certificatefile",
        "gssapiauthentication",
        "hostkeyalias",
    ]
    assert ssh_config.unheard(ssh(home / "config"), hosts[2:]) == []


def test_what_ssh_can_not_read_is_told_in_its_words(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"can't be read: .*line 2: Bad configuration option: frob"
    ):
        lookup(home / "config", "Host *\n  Frob 1\n")
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(ConfigError, match="ssh is not installed"):
        lookup(home / "config", "Host *\n  Port 23\n")
