"""fleet.ssh.config: an ssh_config file, limited to the settings that may affect connections to
hosts. `ssh -G` reports its meaning.

Two of its keywords run programs on this machine. `Match exec` is always refused, also in an
included file: reading the file would run it, so the files are searched for it before ssh reads
them. `ProxyCommand` runs when hosts are connected to, if the file is in your ~/.ssh, which only you
can write; `make plan` then asks no host. A file elsewhere, which may have arrived with another
user's config, is refused if it has a ProxyCommand. A jump host that the file names (`ProxyJump`)
must show a known key like any other host. The host keys of a fleet are checked strictly, and never
trusted on first use without the user's consent.
"""

from __future__ import annotations

import base64
import functools
import glob
import hashlib
import hmac
import re
import shlex
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.host_list import Host
from ..config.types import SshConfig
from ..process import host_marker
from ..trust import untrusted_input
from ..trust.errors import BackendError, ConfigError, InputError, Problem

if TYPE_CHECKING:
    from paramiko import PKey, SSHClient
    from paramiko.config import SSHConfig


LARGEST = 1 << 20  # bytes
PATIENCE = 10.0  # seconds for ssh to read the file: it may resolve names (CanonicalizeHostname)
HONOURED = (
    "hostname",
    "user",
    "port",
    "proxyjump",
    "proxycommand",
    "identityfile",
    "identitiesonly",
)
# Other keywords that change how a host is reached: ssh obeys them, and paramiko does not.
UNHEARD = re.compile(
    "addressfamily|bind.*|casignature.*|certificatefile|ciphers|gssapi.*|host(based|key).*|identityagent|kbdinteractive.*|"
    "kexalgorithms|.*knownhosts.*|macs|password.*|pkcs11.*|preferred.*|proxyusefdpass|pubkey.*|required.*|revoked.*|securitykey.*|"
    "stricthost.*|verifyhost.*"
)
EXEC = re.compile(r"(?i)(?<![\w.*?-])exec(?![\w.*?-])")


class ConfigLine(NamedTuple):
    """A line of the file, or of one that it includes."""

    path: Path
    number: int
    text: str

    @property
    def words(self) -> tuple[str, str]:
        """Returns the keyword of the line, in lower case, and the rest."""
        found = re.fullmatch(r"\s*(\w*)[\s=]*(.*)", self.text, re.DOTALL)
        return (found[1].lower(), found[2]) if found else ("", "")

    @property
    def is_command(self) -> bool:
        word, rest = self.words
        return word == "proxycommand" and rest.strip("\"' \r\t").lower() != "none"


@functools.cache
def _asked(path: str, text: str, *words: str) -> dict[str, list[str]]:
    """Returns the output of `ssh -G`, by keyword. `text` is the file's text, and part of the
    cache's key.
    """
    then = f"ssh -G -F {path} {words[-1]}"
    try:
        command = ["ssh", "-G", "-F", path, *words]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=True,
        )
    except FileNotFoundError as error:
        raise _unreadable(
            path, "reading it needs ssh, which is not installed", "install OpenSSH's client"
        ) from error
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise _unreadable(
            path, untrusted_input.printable(str(error.stderr or "ssh does not end").strip()), then
        ) from error
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        word, _, value = line.partition(" ")
        found.setdefault(word, []).append(value)
    return found


def read(ssh: SshConfig, host: Host | None = None) -> SSHConfig:
    """Returns the file's settings for a host that paramiko can follow; ConfigError if the file
    can't be read, or would run a forbidden program.
    """
    from paramiko.config import SSHConfig

    if ssh.config is None:
        return SSHConfig()
    home = Path("~/.ssh").expanduser().resolve()
    for line in _lines_of(ssh):
        if line.is_command and not line.path.resolve().is_relative_to(home):
            what = (
                "has a ProxyCommand, which runs on this machine; only a file in your ~/.ssh may "
                "have one"
            )
            raise _refusal(
                line,
                what,
                "use fleet.ssh.jump to reach hosts through another one, or move the file to ~/.ssh",
            )
    said = _said(ssh, host) if host else {}
    said["identityfile"] = [
        path
        for path in said.get("identityfile", [])
        if "%" in path or Path(path).expanduser().is_file()
    ]
    lines = [f"{word} {value}" for word in HONOURED for value in said.get(word, ())]
    return SSHConfig.from_text("\n".join(["Host *", *lines]))


def unheard(ssh: SshConfig, hosts: Iterable[Host]) -> list[str]:
    """Returns the keywords of the file that change how ssh reaches these hosts, and are not
    supported here.
    """
    return sorted(
        {
            word
            for host in hosts
            if ssh.config
            for word in _said(ssh, host)
            if UNHEARD.fullmatch(word)
        }
    )


def _said(ssh: SshConfig, host: Host) -> dict[str, list[str]]:
    """Returns the file's changes, by keyword, for a host that is reached with the config's user and
    port.
    """
    lines, words = _lines_of(ssh), [f"-p{host.port}"] if host.port != 22 else []
    if user := host.user or ssh.user:
        words.append(f"-l{user}")
    found = _asked(str(lines[0].path), "\n".join(line.text for line in lines), *words, host.address)
    plain = _asked("none", "", host.address)
    return {word: values for word, values in found.items() if values != plain.get(word)}


def expanded(path: str, key: str) -> Path:
    """Returns the path of a key, with ~ for a home. ConfigError if this machine does not know that
    user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        what = (
            f"{untrusted_input.show(path)} is in the home of a user whom this machine does not know"
        )
        raise ConfigError.of(key, what, next=f"make plan SET='{key}=/path/to/the/file'") from error


def runs_programs(ssh: SshConfig) -> bool:
    """Tells whether connecting would run a program that the file names. Does not run any."""
    return ssh.config is not None and any(line.is_command for line in _lines_of(ssh))


def _lines_of(ssh: SshConfig) -> list[ConfigLine]:
    """Returns all lines that ssh would read; ConfigError if reading one would run a program, or
    fails.
    """
    path = expanded(ssh.config or "", "fleet.ssh.config")
    try:
        lines = list(_lines(path, set()))
    except (InputError, OSError, ValueError, RuntimeError) as error:
        raise _unreadable(str(path), str(error), f"ls -l {path}") from error
    for line in lines:
        word, rest = line.words
        if re.match(r"\s*(\w*[\"'\\]|=)", line.text) or (
            word == "include" and re.search(r"[$%\\]", rest)
        ):
            what = "has a quoted word or a variable, so it can't be searched before ssh reads it"
            raise _refusal(line, what, "write plain words, and the plain path of a file to include")
        if word == "match" and any(
            EXEC.search(re.sub("[\"'\\\\]", instead, rest)) for instead in ("", " ")
        ):
            what = "has a `Match exec`, which would run a program on this machine"
            raise _refusal(line, what, "match by host instead: Host, Match host, Match user")
    return lines


def _lines(path: Path, seen: set[Path]) -> Iterator[ConfigLine]:
    """Yields the lines of a file, and of those that it includes, relative to ~/.ssh as in
    ssh_config(5).
    """
    seen.add(path)
    home = f"~{host_marker.user()}"  # ssh does not ask HOME
    for number, text in enumerate(
        untrusted_input.read_bytes(path, LARGEST).decode().split("\n"), 1
    ):
        line = ConfigLine(path, number, text)
        yield line
        word, rest = line.words
        for name in shlex.split(rest, comments=True) if word == "include" else ():
            whole = Path(
                home, ".ssh", re.sub("^~(?=/)", home, name) if name[:1] == "~" else name
            ).expanduser()
            for found in map(Path, sorted(glob.glob(str(whole)))):  # noqa: PTH207 - `**` is no more than `*`, as for glob(3)
                yield from _lines(found, seen) if found not in seen else ()


def _unreadable(path: str, why: str, then: str) -> ConfigError:
    return ConfigError([Problem(0, path, "fleet.ssh.config", f"can't be read: {why}")], next=then)


def _refusal(line: ConfigLine, what: str, then: str) -> ConfigError:
    return ConfigError(
        [Problem(line.number, f"{line.path}:{line.number}", "fleet.ssh.config", what)], next=then
    )


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
