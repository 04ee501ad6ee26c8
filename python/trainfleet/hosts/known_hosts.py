"""The host keys of a fleet: checked strictly, and never trusted on first use without the user's
consent.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.types import SshConfig
from ..trust.errors import BackendError
from .ssh_config import expanded

if TYPE_CHECKING:
    from paramiko import PKey, SSHClient


STATE = Path(".fleet")


# types of keys that paramiko can check
TYPES = re.compile("ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(256|384|521)")
REVOKED, AUTHORITY = "@revoked", "@cert-authority"
LINE = re.compile(
    r"(?:(@revoked|@cert-authority)\s+)?([^#@\s]\S*)\s+(\S+)\s+([A-Za-z0-9+/]+={0,2})(?:\s.*)?"
)


class UnknownKey(Exception):
    """A host shows an unknown key: its name as known_hosts writes it, and the key."""

    def __init__(self, name: str, key: PKey) -> None:
        super().__init__(name)
        self.name, self.key = name, key

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)


class RevokedKey(UnknownKey):
    """A host shows a key that a list marks as @revoked."""


class KnownKey(NamedTuple):
    """A line of a known_hosts file (sshd(8)): its mark, its hosts, the key's type, and its
    bytes.
    """

    mark: str
    hosts: str
    kind: str
    key: bytes

    def names(self, host: str) -> bool:
        """Tells whether the line is about this host: by patterns, of which one with `!` decides, or
        by the hash of its name.
        """
        with suppress(ValueError):  # a malformed hash matches no host
            if self.hosts.startswith("|"):
                salt, digest = map(base64.b64decode, self.hosts.split("|")[2:])
                return hmac.digest(salt, host.lower().encode(), "sha1") == digest
        found = [one for one in self.hosts.split(",") if fits(one.removeprefix("!"), host)]
        return bool(found) and not any(one.startswith("!") for one in found)


def fits(pattern: str, host: str) -> bool:
    """Tells whether an ssh pattern matches a host: only `*` and `?` are special in it
    (ssh_config(5), PATTERNS).
    """
    if not {*"*?"} & {*pattern}:
        return pattern.lower() == host.lower()
    return bool(
        re.fullmatch(
            re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), host, re.IGNORECASE
        )
    )


def read_lines(path: Path) -> Iterator[KnownKey]:
    """Yields the lines of a known_hosts file. Skips malformed ones, like ssh."""
    for text in path.read_bytes().decode(errors="replace").split("\n"):
        with suppress(ValueError):  # not base64
            if match := LINE.fullmatch(text.strip()):
                line = KnownKey(match[1] or "", match[2], match[3], base64.b64decode(match[4]))
                if line.key[4:].startswith(line.kind.encode()):
                    yield line


class Expected(tuple[KnownKey, ...]):
    """The keys that a host may show, with the methods that paramiko calls."""

    def keys(self) -> list[str]:
        return [line.kind for line in self]

    def get(self, kind: str) -> Expected:
        return Expected(line for line in self if line.kind == kind)

    def get_base64(self) -> str:
        """Returns the types of the keys, for paramiko's error message."""
        return ", ".join(self.keys())

    def __ne__(self, key: Any) -> bool:
        return key.asbytes() not in [line.key for line in self]


def fingerprint(key: PKey) -> str:
    """Returns `SHA256:...`, like ssh-keygen -l."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


class KnownHosts:
    """The keys that hosts must show: from the fleet's known_hosts file, your ~/.ssh/known_hosts,
    and the fingerprints in the config.
    """

    def __init__(
        self, own: Path, read_only: tuple[Path, ...], fingerprints: tuple[str, ...]
    ) -> None:
        self.own, self.read_only, self.fingerprints = own, read_only, fingerprints
        self.seen: dict[str, PKey] = {}  # name → key, of hosts that showed an unknown key
        self._lock = threading.Lock()
        self._lines: list[KnownKey] | None = None

    @classmethod
    def of(cls, ssh: SshConfig) -> KnownHosts:
        """Returns the known hosts of a config: only those of its file if it names one, or else the
        fleet's and yours.
        """
        if ssh.known_hosts:
            return cls(expanded(ssh.known_hosts, "fleet.ssh.known_hosts"), (), ssh.fingerprints)
        return cls(
            STATE / "known_hosts", (Path("~/.ssh/known_hosts").expanduser(),), ssh.fingerprints
        )

    def guard(self, client: SSHClient) -> None:
        """Lets the client connect only to hosts with the right key."""
        client._host_keys = self
        client.set_missing_host_key_policy(self)

    def get(self, name: str) -> Expected | None:
        """Returns the keys that a host may show; None if no list has any, and paramiko then calls
        `missing_host_key`.
        """
        revoked = self._revoked(name)
        lines = [
            line for line in self._load() if line.mark != AUTHORITY and line.key not in revoked
        ]
        found = [line for line in lines if TYPES.fullmatch(line.kind) and line.names(name)]
        return Expected(found) if found else None

    def has_authority(self, name: str) -> bool:
        """Tells whether ssh would accept a certificate for this host, which paramiko can't
        check.
        """
        return any(line.mark == AUTHORITY and line.names(name) for line in self._load())

    def _revoked(self, name: str) -> list[bytes]:
        return [line.key for line in self._load() if line.mark == REVOKED and line.names(name)]

    def missing_host_key(self, client: SSHClient, name: str, key: PKey) -> None:
        """Answers paramiko's question about a key that is in no list."""
        self.meet(name, key)

    def meet(self, name: str, key: PKey) -> None:
        """Accepts a key that the config names by its fingerprint; raises RevokedKey or UnknownKey
        for any other.
        """
        if key.asbytes() in self._revoked(name):
            raise RevokedKey(name, key)
        if fingerprint(key) in self.fingerprints:
            self.trust({name: key})
            return
        self.seen[name] = key
        raise UnknownKey(name, key)

    def files_with(self, name: str) -> list[Path]:
        """Returns the lists in which a host has a key."""
        paths = [path for path in (self.own, *self.read_only) if path.is_file()]
        return [
            path
            for path in paths
            if any(line.mark != AUTHORITY and line.names(name) for line in read_lines(path))
        ]

    def trust(self, keys: dict[str, PKey]) -> None:
        """Adds these keys to the fleet's known_hosts file."""
        with self._lock:
            self.own.parent.mkdir(parents=True, exist_ok=True)
            with open(self.own, "a", encoding="utf-8") as file:
                file.writelines(
                    f"{name} {key.get_name()} {key.get_base64()}\n" for name, key in keys.items()
                )
            for name, key in keys.items():
                self._load().append(KnownKey("", name, key.get_name(), key.asbytes()))
                self.seen.pop(name, None)

    def _load(self) -> list[KnownKey]:
        """Returns the lines of all lists, read once."""
        if self._lines is None:
            lines = list[KnownKey]()
            for path in (self.own, *self.read_only):
                try:
                    lines += read_lines(path)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    what, then = "can't read the known host keys", f"ls -l {path}"
                    raise BackendError(what, where=str(path), why=str(error), next=then) from error
            self._lines = lines
        return self._lines
