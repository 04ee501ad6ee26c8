"""Explains connection failures and suggests a next command for each kind."""

from __future__ import annotations

import shlex
import socket
from dataclasses import replace
from pathlib import Path

from ..config.types import SshConfig
from .host_results import Host, HostFailure
from .ssh_config import KnownHosts, RevokedKey, UnknownKey

MOST_SAID = 24 << 20  # maximum bytes per response


class LinkLost(Exception):
    """Raised if the connection is lost while a command is running."""


class TooMuch(Exception):
    """Raised if a command prints more than MOST_SAID bytes."""


class JumpFailed(Exception):
    """Raised if the jump host can't be reached."""

    __match_args__ = ("host", "cause")

    def __init__(self, host: Host, cause: Exception) -> None:
        super().__init__(str(host))
        self.host, self.cause = host, cause


def explain(
    host: Host, ssh: SshConfig, known: KnownHosts, error: Exception, seconds: float, proxy: str = ""
) -> HostFailure:
    """Converts a connection error to a host failure with an explanation.

    Reraises unexpected errors.
    """
    import paramiko

    user = host.user or ssh.user
    login = f"{user}@{host.address}" if user else host.address
    try_it = _attempt(host, ssh, login, proxy)
    match error:
        case JumpFailed(jump, Exception() as cause):
            failure = explain(jump, ssh, known, cause, seconds)
            return replace(failure, message=f"the jump host {jump}: {failure.message}")
        case UnknownKey() | paramiko.BadHostKeyException():
            return _explain_key(host, known, error)
        case paramiko.PasswordRequiredException():
            return locked(ssh)
        case _ if is_late(error):
            return HostFailure("timeout", f"no answer within {seconds:.0f} s", try_it)
        case paramiko.AuthenticationException():
            return HostFailure(
                "auth",
                f"it rejected the SSH key of {login}",
                f"run {try_it}, then check fleet.ssh.user and fleet.ssh.key",
            )
        case socket.gaierror():
            return HostFailure(
                "name",
                f"its address {host.address} does not resolve",
                f"run getent hosts {host.address}, then check fleet.hosts",
            )
        case TooMuch():
            why = f"its answer is too long: more than {MOST_SAID >> 20} MiB"
            return HostFailure("untrue", why, try_it)
        case LinkLost() | EOFError() | ConnectionResetError():
            return HostFailure("lost", f"the connection was lost after {seconds:.1f} s", try_it)
        case paramiko.SSHException() | OSError():
            return HostFailure("down", f"can't be reached ({_words(error)})", try_it)
    raise error


def _explain_key(host: Host, known: KnownHosts, error: Exception) -> HostFailure:
    """Explains why a host's key is not trusted."""
    if isinstance(error, RevokedKey):
        why = f"{_key(host, error)} is marked @revoked"
        return HostFailure("host-key", why, forget(host, known))
    if not isinstance(error, UnknownKey):
        why = "its host key differs from the known one: reinstalled, or another host answers"
        return HostFailure("host-key", why, forget(host, known))
    why = f"{_key(host, error)} is not known yet"
    if known.has_authority(error.name):
        why += "; trainfleet does not check certificates (@cert-authority)"
    then = "run make setup to confirm it, or add it to fleet.ssh.fingerprints"
    return HostFailure("unknown-key", why, then)


def _key(host: Host, error: UnknownKey) -> str:
    """Describes the key that a host presented.

    Includes the name in known_hosts if it differs from the host's address.
    """
    is_own = error.name in (host.address, f"[{host.address}]:{host.port}")
    if is_own:
        return f"its host key {error.fingerprint}"
    return f"the host key {error.fingerprint} of {error.name}"


def is_late(error: Exception) -> bool:
    """Returns whether the error is a timeout, so the host may merely be busy."""
    import paramiko

    timed = isinstance(error, paramiko.SSHException) and (
        "banner" in str(error).lower() or "timeout" in str(error).lower()
    )
    return isinstance(error, TimeoutError) or timed


def _attempt(host: Host, ssh: SshConfig, login: str, proxy: str) -> str:
    """Returns a command that lets the user try the same connection."""
    if proxy:
        return proxy.replace("%h", host.address).replace("%p", str(host.port))
    key = f" -i {ssh.key}" if ssh.key else ""
    return f"ssh{key}{f' -p {host.port}' if host.port != 22 else ''} {login} true"


def forget(host: Host, known: KnownHosts) -> str:
    """Returns the commands that remove a host's key from each known_hosts file that contains it."""
    name = host.address if host.port == 22 else f"[{host.address}]:{host.port}"
    commands = [
        f"ssh-keygen -R {shlex.quote(name)} -f {shlex.quote(str(path))}"
        for path in known.files_with(name)
    ]
    return (
        f"find out why, then run: {'; '.join(commands) or f'ssh-keygen -R {shlex.quote(name)}'}; "
        "make setup"
    )


def locked(ssh: SshConfig) -> HostFailure:
    """Returns the failure for a passphrase-protected key, which must be loaded into an SSH
    agent.
    """
    if ssh.key is not None:
        return HostFailure(
            "auth",
            f"the key {ssh.key} has a passphrase",
            f"run ssh-add {ssh.key}, and remove fleet.ssh.key",
        )
    mine = sorted(path.with_suffix("") for path in Path("~/.ssh").expanduser().glob("id_*.pub"))
    names = ", ".join(f"~/.ssh/{path.name}" for path in mine) or "in ~/.ssh"
    return HostFailure(
        "auth",
        f"the SSH agent has no key for it, and your key ({names}) has a passphrase",
        "run ssh-add, then run the same command again",
    )


def _words(error: Exception) -> str:
    """Returns an error's main message as one line in lower case."""
    inner = next(iter(getattr(error, "errors", {}).values()), error)
    text = getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
    return str(text).strip().splitlines()[0].lower()
