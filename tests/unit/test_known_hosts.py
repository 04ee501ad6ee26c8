"""known_hosts means what OpenSSH says: `ssh-keygen -F` judges the same files."""

from __future__ import annotations

import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest

from requirement import need_program
from trainfleet.config.host_list import Host
from trainfleet.config.types import SshConfig
from trainfleet.hosts.ssh_config import KnownHosts, RevokedKey, UnknownKey, fingerprint
from trainfleet.hosts.ssh_errors import explain
from trainfleet.trust.errors import BackendError

SSH = SshConfig(user=None, key=None, jump=None, known_hosts=None, fingerprints=(), config=None)
KEYS = [paramiko.Ed25519Key.from_type_string("ssh-ed25519", b"\0\0\0\x0bssh-ed25519\0\0\0 " + hashlib.sha256(seed).digest())
        for seed in (b"a", b"b", b"c")]  # fmt: skip
A, B, C = (f"ssh-ed25519 {key.get_base64()}" for key in KEYS)
DSS = "ssh-dss AAAAB3NzaC1kc3MAAAAA"
FILES = {
    "authority": f"@cert-authority *.example {A}\nh.example {B}\n",
    "patterns": f"*.example {A}\nh?.other {B}\n",
    "negation": f"*.example,!h.example {A}\nh.example {B} a comment\n",
    "only negation": f"!h.example {A}\n",
    "port": f"[h.example]:2222 {A}\nh.example {B}\n[*.example]:22?? {C}\n",
    "cases": f"H.Example {A}\n  \th.example\t{B}\n",
    "malformed": f"# h.example {A}\n\nh.example\nh.example ssh-ed25519 %%%\nh.example ssh-rsa {KEYS[1].get_base64()}\n|1|x h.example {A}\n|1|x|y {A}\nh.example {C}",
    "unknown types": f"h.example {DSS}\nh.example sk-ssh-ed25519@openssh.com AAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29t\nh.example {A}\n",
    "sets": f"h[.]example,[h].example {A}\nh.example {B}\n",
    "bytes": f"# caf\xe9\nh.example {A}\r\n",
}  # fmt: skip
NAMES = [
    "h.example",
    "H.EXAMPLE",
    "g.example",
    "[h.example]:2222",
    "[g.example]:2299",
    "h1.other",
    "h12.other",
    "other",
]


def known(*paths: Path, fingerprints: tuple[str, ...] = ()) -> KnownHosts:
    return KnownHosts(paths[0], paths[1:], fingerprints)


def accepted(lists: KnownHosts, name: str) -> set[str]:
    """The keys that a host may show, as paramiko finds out."""
    found = set()
    for key, text in zip(KEYS, (A, B, C), strict=True):
        expected = lists.get(name)
        if expected is not None and not expected.get(key.get_name()) != key:  # noqa: SIM202 - paramiko's own comparison
            found.add(text)
    return found


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_ssh_keygen_finds_the_same_keys(tmp_path: Path, content: str) -> None:
    keygen, path = (
        need_program("ssh-keygen", "apt-get install openssh-client"),
        tmp_path / "known_hosts",
    )
    path.write_bytes(content.encode("latin-1"))
    for hashed in (False, True):
        if hashed:
            subprocess.run([keygen, "-H", "-f", str(path)], capture_output=True, check=False)
        for name in NAMES:
            done = subprocess.run(
                [keygen, "-F", name.lower(), "-f", str(path)],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
            lines = [
                line.split() for line in done.stdout.splitlines() if not line.startswith(("#", "@"))
            ]
            assert accepted(known(path), name) == {" ".join(words[1:3]) for words in lines} & {
                A,
                B,
                C,
            }, (name, done.stdout)


def test_a_revoked_key_is_refused_whoever_lists_it(tmp_path: Path) -> None:
    (own, mine) = tmp_path / "own", tmp_path / "mine"
    own.write_text(f"h.example {A}\nh.example {B}\n")
    mine.write_text(f"@revoked *.example {A}\n@revoked * {C}\n")
    lists = known(own, mine, fingerprints=(fingerprint(KEYS[2]),))
    assert accepted(lists, "h.example") == {B} and accepted(known(own), "h.example") == {A, B}
    for name, key in (("g.example", KEYS[0]), ("other", KEYS[2])):
        with pytest.raises(RevokedKey) as refused:
            lists.meet(name, key)
        failure = explain(Host(name, name), SSH, lists, refused.value, 0.0)
        assert (
            failure.kind == "host-key"
            and "is marked @revoked" in failure.message
            and str(mine) in failure.next
        )
    assert not lists.seen, "make setup must not offer it"
    with pytest.raises(UnknownKey):
        lists.meet("other", KEYS[0])


def test_the_type_that_paramiko_is_to_ask_for_is_one_that_it_has(tmp_path: Path) -> None:
    (path := tmp_path / "known_hosts").write_text(FILES["unknown types"])
    client: Any = SimpleNamespace(set_missing_host_key_policy=lambda policy: None)
    known(path).guard(client)
    assert (
        client._host_keys.get("h.example").keys() == ["ssh-ed25519"]
        and client._host_keys.get("x") is None
    )
    assert client._host_keys.get("h.example").get("ssh-rsa") != KEYS[0]
    assert "ssh-ed25519" in str(
        paramiko.BadHostKeyException("h", KEYS[1], client._host_keys.get("h.example"))
    )


def test_threads_that_ask_at_once_all_see_the_lists(tmp_path: Path) -> None:
    (path := tmp_path / "known_hosts").write_text(f"h.example {A}\n" * 2000)
    for _ in range(10):
        lists = known(path)
        with ThreadPoolExecutor(8) as pool:
            assert all(
                pool.map(lambda _, lists=lists: lists.get("h.example") is not None, range(8))
            )


def test_a_key_that_was_trusted_is_known_from_then_on(tmp_path: Path) -> None:
    lists = known(tmp_path / "new" / "known_hosts")
    lists.trust({"[h.example]:2222": KEYS[0]})
    assert (
        accepted(lists, "[h.example]:2222") == {A} == accepted(known(lists.own), "[h.example]:2222")
    )
    assert lists.files_with("[h.example]:2222") == [lists.own]


def test_a_list_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="can't read the known host keys") as refused:
        known(tmp_path).get("x")
    assert refused.value.where == str(tmp_path)
