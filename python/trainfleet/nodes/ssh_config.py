"""fleet.ssh.config: an ssh_config file, as far as it may decide how hosts are reached.

Two of its words run programs on this machine. `Match exec` is refused, always: it would run at a mere look at the file.
`ProxyCommand` runs when hosts are connected to, if the file lies in your ~/.ssh, where only you write; `make plan` then asks no
host. A file elsewhere may have come with somebody's config, and is refused with it. A jump host that the file names (`ProxyJump`)
must show a known key like any other host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.types import SshConfig
from ..trust import untrusted_input
from ..trust.errors import ConfigError, InputError, Problem

if TYPE_CHECKING:
    from paramiko.config import SSHConfig

LARGEST = 1 << 20  # bytes


def read(ssh: SshConfig) -> SSHConfig:
    """The file's settings, empty without one; ConfigError where it can't be read, or would run what it may not."""
    config, path = _parsed(ssh)
    home = Path("~/.ssh").expanduser().resolve()
    if _commands(config) and not path.resolve().is_relative_to(home):
        what = "has a ProxyCommand, which runs on this machine, and only from a file in your ~/.ssh"
        raise _refusal(path, "proxycommand", what, "fleet.ssh.jump reaches hosts through another one; or move the file to ~/.ssh")
    return config


def expanded(path: str, key: str) -> Path:
    """The path that a key names, with ~ for a home. ConfigError where that is nobody's here."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        what = f"{untrusted_input.show(path)} is in the home of a user whom this machine does not know"
        raise ConfigError.of(key, what, next=f"make plan SET='{key}=/path/to/the/file'") from error


def runs_programs(ssh: SshConfig) -> bool:
    """Whether connecting would run a program of the file's on this machine. Nothing is run to find out."""
    return _commands(_parsed(ssh)[0])


def _parsed(ssh: SshConfig) -> tuple[SSHConfig, Path]:
    from paramiko.config import ConfigParseError, SSHConfig

    if ssh.config is None:
        return SSHConfig(), Path()
    path = expanded(ssh.config, "fleet.ssh.config")
    try:
        config = SSHConfig.from_text(untrusted_input.read_bytes(path, LARGEST).decode())
    except (InputError, OSError, UnicodeDecodeError, ConfigParseError) as error:
        raise ConfigError([Problem(0, str(path), "fleet.ssh.config", f"can't be read: {error}")], next=f"ls -l {path}") from error
    if any(match["type"].lower().startswith("exec") for block in _blocks(config) for match in block.get("matches", ())):
        what = "has a `Match exec`, which would run a program on this machine"
        raise _refusal(path, "match.*exec", what, "match by host instead: Host, Match host, Match user")
    return config, path


def _commands(config: SSHConfig) -> bool:
    return any(block["config"].get("proxycommand") for block in _blocks(config))


def _blocks(config: SSHConfig) -> Iterator[dict[str, Any]]:
    """What paramiko made of the file, and will go by: lines can be written in many ways."""
    yield from config._config


def _refusal(path: Path, word: str, what: str, then: str) -> ConfigError:
    """The error that names the file's first line that begins with this word."""
    found = re.search(rf"^\s*{word}", path.read_text(encoding="utf-8"), flags=re.IGNORECASE | re.MULTILINE)
    line = found.string.count("\n", 0, found.end()) + 1 if found else 1
    return ConfigError([Problem(line, f"{path}:{line}", "fleet.ssh.config", what)], next=then)
