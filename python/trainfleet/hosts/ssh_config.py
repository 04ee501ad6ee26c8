"""Reads the ssh_config file named in fleet.ssh.config, and applies only settings that affect
connections.

`ssh -G` interprets the file. Two keywords can run programs on this machine. `Match exec` runs one
while ssh reads the file, so it is always rejected. All files, including included ones, are searched
for it before ssh reads them. `ProxyCommand` runs one per connection, so it is allowed only in files
below ~/.ssh, which only the user can write. Other files may have arrived with someone else's
config. `make plan` does not contact any host if the file contains a ProxyCommand.

A jump host (`ProxyJump`) must present a known key, like any other host. Host key checking is
strict, and new keys are trusted only with the user's consent.
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
from ..process import processes
from ..trust import untrusted_input
from ..trust.errors import BackendError, ConfigError, InputError, Problem

if TYPE_CHECKING:
    from paramiko import PKey, SSHClient
    from paramiko.config import SSHConfig


LARGEST = 1 << 20  # maximum bytes per file
PATIENCE = 10.0  # timeout in seconds for `ssh -G`, which may resolve names (CanonicalizeHostname)
HONOURED = (
    "hostname",
    "user",
    "port",
    "proxyjump",
    "proxycommand",
    "identityfile",
    "identitiesonly",
)
# Keywords that affect connections but are not supported by paramiko.
UNHEARD = re.compile(
    "addressfamily|bind.*|casignature.*|certificatefile|ciphers|gssapi.*|host(based|key).*|identityagent|kbdinteractive.*|"
    "kexalgorithms|.*knownhosts.*|macs|password.*|pkcs11.*|preferred.*|proxyusefdpass|pubkey.*|required.*|revoked.*|securitykey.*|"
    "stricthost.*|verifyhost.*"
)
EXEC = re.compile(r"(?i)(?<![\w.*?-])exec(?![\w.*?-])")


class ConfigLine(NamedTuple):
    """Line of the file or of an included file."""

    path: Path
    number: int
    text: str

    @property
    def words(self) -> tuple[str, str]:
        """Returns the line's keyword in lower case, and its arguments."""
        found = re.fullmatch(r"\s*(\w*)[\s=]*(.*)", self.text, re.DOTALL)
        return (found[1].lower(), found[2]) if found else ("", "")

    @property
    def is_command(self) -> bool:
        word, rest = self.words
        return word == "proxycommand" and rest.strip("\"' \r\t").lower() != "none"


@functools.cache
def _asked(path: str, text: str, *words: str) -> dict[str, list[str]]:
    """Returns the output of `ssh -G` as keyword → values.

    `text` is the content of all files, used only as part of the cache key.
    """
    then = f"ssh -G -F {path} {words[-1]}"
    try:
        done = subprocess.run(
            ["ssh", "-G", "-F", path, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=True,
        )
    except FileNotFoundError as error:
        raise _unreadable(path, "ssh is not installed", "install the OpenSSH client") from error
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise _unreadable(
            path, untrusted_input.printable(str(error.stderr or "ssh timed out").strip()), then
        ) from error
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        word, _, value = line.partition(" ")
        found.setdefault(word, []).append(value)
    return found


def read(ssh: SshConfig, host: Host | None = None) -> SSHConfig:
    """Returns the host's settings that paramiko supports.

    Raises ConfigError if the file can't be read or contains a command that is not allowed.
    """
    from paramiko.config import SSHConfig

    if ssh.config is None:
        return SSHConfig()
    home = Path("~/.ssh").expanduser().resolve()
    for line in _lines_of(ssh):
        if line.is_command and not line.path.resolve().is_relative_to(home):
            raise _refusal(
                line,
                "has a ProxyCommand, which runs a program on this machine; only files in ~/.ssh "
                "may have one",
                "set fleet.ssh.jump to use a jump host, or move the file to ~/.ssh",
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
    """Returns the keywords in the file that affect connections to these hosts but are not
    supported.
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
    """Returns keyword → values for the settings that the file changes for a host.

    The host's user and port come from the config instead.
    """
    lines, words = _lines_of(ssh), [f"-p{host.port}"] if host.port != 22 else []
    if user := host.user or ssh.user:
        words.append(f"-l{user}")
    found = _asked(str(lines[0].path), "\n".join(line.text for line in lines), *words, host.address)
    plain = _asked("none", "", host.address)
    return {word: values for word, values in found.items() if values != plain.get(word)}


def expanded(path: str, key: str) -> Path:
    """Expands ~ in a path. `key` is the config key that contains the path.

    Raises ConfigError if ~ refers to an unknown user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError.of(
            key,
            f"{untrusted_input.show(path)} is in the home folder of an unknown user",
            next=f"make plan SET='{key}=/path/to/the/file'",
        ) from error


def runs_programs(ssh: SshConfig) -> bool:
    """Returns whether connecting would run a program specified in the file. Does not run it."""
    return ssh.config is not None and any(line.is_command for line in _lines_of(ssh))


def _lines_of(ssh: SshConfig) -> list[ConfigLine]:
    """Returns all lines that ssh would read.

    Raises ConfigError if a file can't be read, or if ssh would run a program while reading it.
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
            what = "has a quoted word or a variable, which may hide a command"
            raise _refusal(
                line, what, "write keywords and Include paths without quotes and variables"
            )
        if word == "match" and any(
            EXEC.search(re.sub("[\"'\\\\]", instead, rest)) for instead in ("", " ")
        ):
            what = "has a `Match exec`, which would run a program on this machine"
            raise _refusal(line, what, "use Host, Match host or Match user instead")
    return lines


def _lines(path: Path, seen: set[Path]) -> Iterator[ConfigLine]:
    """Yields the lines of a file and its included files.

    Relative includes are below ~/.ssh (ssh_config(5)).
    """
    seen.add(path)
    home = f"~{processes.user()}"  # ssh ignores $HOME
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
            for found in map(Path, sorted(glob.glob(str(whole)))):  # noqa: PTH207 - `**` means `*`, as in glob(3)
                yield from _lines(found, seen) if found not in seen else ()


def _unreadable(path: str, why: str, then: str) -> ConfigError:
    return ConfigError([Problem(0, path, "fleet.ssh.config", f"can't be read: {why}")], next=then)


def _refusal(line: ConfigLine, what: str, then: str) -> ConfigError:
    return ConfigError(
        [Problem(line.number, f"{line.path}:{line.number}", "fleet.ssh.config", what)], next=then
    )


STATE = Path(".fleet")
# key types that paramiko can verify
TYPES = re.compile("ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(256|384|521)")
REVOKED, AUTHORITY = "@revoked", "@cert-authority"
LINE = re.compile(
    r"(?:(@revoked|@cert-authority)\s+)?([^#@\s]\S*)\s+(\S+)\s+([A-Za-z0-9+/]+={0,2})(?:\s.*)?"
)


class UnknownKey(Exception):
    """Raised if a host presents an unknown key.

    `name` is the host's name as written in known_hosts.
    """

    def __init__(self, name: str, key: PKey) -> None:
        super().__init__(name)
        self.name, self.key = name, key

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)


class RevokedKey(UnknownKey):
    """Raised if a host presents a key marked as @revoked."""


class KnownKey(NamedTuple):
    """Line of a known_hosts file (sshd(8)): marker, host patterns, key type and key."""

    mark: str
    hosts: str
    kind: str
    key: bytes

    def names(self, host: str) -> bool:
        """Returns whether the line applies to a host.

        The line contains a hash of the host's name, or patterns. A matching pattern with `!`
        excludes the host.
        """
        with suppress(ValueError):  # malformed hashes match no host
            if self.hosts.startswith("|"):
                salt, digest = map(base64.b64decode, self.hosts.split("|")[2:])
                return hmac.digest(salt, host.lower().encode(), "sha1") == digest
        found = [one for one in self.hosts.split(",") if fits(one.removeprefix("!"), host)]
        return bool(found) and not any(one.startswith("!") for one in found)


def fits(pattern: str, host: str) -> bool:
    """Returns whether an ssh_config(5) pattern matches a host. Only `*` and `?` are special
    characters.
    """
    if not {*"*?"} & {*pattern}:
        return pattern.lower() == host.lower()
    return bool(
        re.fullmatch(
            re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), host, re.IGNORECASE
        )
    )


def read_lines(path: Path) -> Iterator[KnownKey]:
    """Yields the lines of a known_hosts file. Skips malformed lines, as ssh does."""
    for text in path.read_bytes().decode(errors="replace").split("\n"):
        with suppress(ValueError):  # skip keys that are not valid base64
            if match := LINE.fullmatch(text.strip()):
                line = KnownKey(match[1] or "", match[2], match[3], base64.b64decode(match[4]))
                if line.key[4:].startswith(line.kind.encode()):
                    yield line


class Expected(tuple[KnownKey, ...]):
    """Keys that a host may present, exposed through the interface that paramiko expects."""

    def keys(self) -> list[str]:
        return [line.kind for line in self]

    def get(self, kind: str) -> Expected:
        return Expected(line for line in self if line.kind == kind)

    def get_base64(self) -> str:
        """Returns the key types, for paramiko's error message."""
        return ", ".join(self.keys())

    def __ne__(self, key: Any) -> bool:
        return key.asbytes() not in [line.key for line in self]


def fingerprint(key: PKey) -> str:
    """Returns the fingerprint as `SHA256:...`, in the format of ssh-keygen -l."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


class KnownHosts:
    """Accepted host keys: from the fleet's known_hosts file, ~/.ssh/known_hosts, and the config's
    fingerprints.
    """

    def __init__(
        self, own: Path, read_only: tuple[Path, ...], fingerprints: tuple[str, ...]
    ) -> None:
        self.own, self.read_only, self.fingerprints = own, read_only, fingerprints
        self.seen: dict[str, PKey] = {}  # host name → unknown key that it presented
        self._lock = threading.Lock()
        self._lines: list[KnownKey] | None = None

    @classmethod
    def of(cls, ssh: SshConfig) -> KnownHosts:
        """Returns the known hosts for a config.

        They come from the known_hosts file in the config if set, otherwise from the fleet's and the
        user's files.
        """
        if ssh.known_hosts:
            return cls(expanded(ssh.known_hosts, "fleet.ssh.known_hosts"), (), ssh.fingerprints)
        return cls(
            STATE / "known_hosts", (Path("~/.ssh/known_hosts").expanduser(),), ssh.fingerprints
        )

    def guard(self, client: SSHClient) -> None:
        """Makes the client verify host keys against this list."""
        client._host_keys = self
        client.set_missing_host_key_policy(self)

    def get(self, name: str) -> Expected | None:
        """Returns the keys that a host may present.

        If no key is known, returns None, so that paramiko calls `missing_host_key`.
        """
        revoked = self._revoked(name)
        lines = [
            line for line in self._load() if line.mark != AUTHORITY and line.key not in revoked
        ]
        found = [line for line in lines if TYPES.fullmatch(line.kind) and line.names(name)]
        return Expected(found) if found else None

    def has_authority(self, name: str) -> bool:
        """Returns whether ssh would accept a certificate for this host, which paramiko can't
        verify.
        """
        return any(line.mark == AUTHORITY and line.names(name) for line in self._load())

    def _revoked(self, name: str) -> list[bytes]:
        return [line.key for line in self._load() if line.mark == REVOKED and line.names(name)]

    def missing_host_key(self, client: SSHClient, name: str, key: PKey) -> None:
        """Handles the key of a host without known keys.

        Called by paramiko.
        """
        self.meet(name, key)

    def meet(self, name: str, key: PKey) -> None:
        """Trusts a key if the config contains its fingerprint. Raises RevokedKey or UnknownKey
        otherwise.
        """
        if key.asbytes() in self._revoked(name):
            raise RevokedKey(name, key)
        if fingerprint(key) in self.fingerprints:
            self.trust({name: key})
            return
        self.seen[name] = key
        raise UnknownKey(name, key)

    def files_with(self, name: str) -> list[Path]:
        """Returns the known_hosts files that contain a key for the host."""
        paths = [path for path in (self.own, *self.read_only) if path.is_file()]
        return [
            path
            for path in paths
            if any(line.mark != AUTHORITY and line.names(name) for line in read_lines(path))
        ]

    def trust(self, keys: dict[str, PKey]) -> None:
        """Adds keys to the fleet's known_hosts file."""
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
        """Returns the lines of all known_hosts files, which are read only once."""
        if self._lines is None:
            lines = list[KnownKey]()
            for path in (self.own, *self.read_only):
                try:
                    lines += read_lines(path)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise BackendError(
                        "can't read the known host keys",
                        where=str(path),
                        why=str(error),
                        next=f"ls -l {path}",
                    ) from error
            self._lines = lines
        return self._lines
