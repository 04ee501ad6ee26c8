"""The host keys of a fleet: checked strictly, and never trusted on first use without the user's word."""

from __future__ import annotations

import base64
import hashlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.types import SshConfig
from ..trust.errors import BackendError
from .ssh_config import expanded
from .state_dir import STATE

if TYPE_CHECKING:
    from paramiko import HostKeys, PKey, SSHClient


class UnknownKey(Exception):
    """A host shows a key that is not known: its name as known_hosts writes it, and the key."""

    def __init__(self, name: str, key: PKey) -> None:
        super().__init__(name)
        self.name, self.key = name, key

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)


def fingerprint(key: PKey) -> str:
    """`SHA256:...`, as ssh-keygen -l shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


class Policy:
    """What paramiko asks about a key that is in no list."""

    def __init__(self, known: KnownHosts) -> None:
        self.known = known

    def missing_host_key(self, client: SSHClient, name: str, key: PKey) -> None:
        self.known.meet(name, key)


class KnownHosts:
    """Which key each host must show: the fleet's own file, your ~/.ssh/known_hosts, and the fingerprints in the config."""

    def __init__(self, own: Path, read_only: tuple[Path, ...], fingerprints: tuple[str, ...]) -> None:
        self.own, self.read_only, self.fingerprints = own, read_only, fingerprints
        self.seen: dict[str, PKey] = {}  # name → key, of hosts that showed one nobody vouches for
        self._lock = threading.Lock()
        self._keys: HostKeys | None = None

    @classmethod
    def of(cls, ssh: SshConfig) -> KnownHosts:
        """As the config says: a file of its own alone, or else the fleet's and yours."""
        if ssh.known_hosts:
            return cls(expanded(ssh.known_hosts, "fleet.ssh.known_hosts"), (), ssh.fingerprints)
        return cls(STATE / "known_hosts", (Path("~/.ssh/known_hosts").expanduser(),), ssh.fingerprints)

    def guard(self, client: SSHClient) -> None:
        """From now on the client connects only to a host with the right key."""
        client._host_keys = self._load()
        client.set_missing_host_key_policy(Policy(self))

    def meet(self, name: str, key: PKey) -> None:
        """Takes a key that the config names by its fingerprint; UnknownKey for any other."""
        if fingerprint(key) in self.fingerprints:
            self.trust({name: key})
            return
        self.seen[name] = key
        raise UnknownKey(name, key)

    def files_with(self, name: str) -> list[Path]:
        """The lists in which a host has a key."""
        from paramiko import HostKeys

        paths = [path for path in (self.own, *self.read_only) if path.is_file()]
        return [path for path in paths if HostKeys(str(path)).lookup(name)]

    def trust(self, keys: dict[str, PKey]) -> None:
        """Keeps these keys in the fleet's own file."""
        with self._lock:
            self.own.parent.mkdir(parents=True, exist_ok=True)
            with open(self.own, "a", encoding="utf-8") as file:
                file.writelines(f"{name} {key.get_name()} {key.get_base64()}\n" for name, key in keys.items())
            for name, key in keys.items():
                self._load().add(name, key.get_name(), key)
                self.seen.pop(name, None)

    def _load(self) -> HostKeys:
        """The known keys, read once."""
        from paramiko import HostKeys

        if self._keys is None:
            keys = HostKeys()
            for path in (self.own, *self.read_only):
                try:
                    keys.load(str(path))
                except FileNotFoundError:
                    continue
                except Exception as error:
                    what, then = "can't read the known host keys", f"ssh-keygen -l -f {path}"
                    raise BackendError(what, where=str(path), why=str(error), next=then) from error
            self._keys = keys
        return self._keys
