"""Runs commands on many hosts in parallel over SSH, with one persistent connection per host.

The transport guarantees:
- Host key checking is strict: only keys in known_hosts, or with a fingerprint in the config, are
  accepted.
- A dead link is detected within DEAD_AFTER + KEEPALIVE seconds. If a keepalive packet is not
  acknowledged, the kernel closes the connection (TCP_USER_TIMEOUT). paramiko would wait for
  minutes.
- With a jump host, the TCP connection ends at the jump host, so dead links beyond it are detected
  by a keepalive request that requires a response.
- `timeout` is enforced on the node, even if the link is lost.
- Secrets are sent through stdin, because all users of a node can see command lines in the process
  list.
"""

from __future__ import annotations

import base64
import logging
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from ..config.host_list import parse_host
from ..config.types import SshConfig
from . import ssh_config
from .host_results import Answers, Host, HostFailure, Result
from .ssh_config import KnownHosts
from .ssh_errors import JumpFailed, LinkLost, explain, is_late
from .tar import OUTPUT_BEGINS, Sink, converse, pack, stream

if TYPE_CHECKING:
    from fabric import Connection
    from paramiko import Channel, PKey

# callers report paramiko's errors, so suppress the tracebacks that its threads log
logging.getLogger("paramiko").addHandler(logging.NullHandler())
THREADS = 64
CONNECT_TIMEOUT = 5.0  # timeout in seconds, separately for TCP connection, key exchange and login
PATIENCE = 10.0  # minimum timeout in seconds per step of a retry
JUMP_AGAIN = 2.0  # minimum seconds between attempts to connect to a jump host
KEEPALIVE = 2  # keepalive interval in seconds
DEAD_AFTER = 6.0  # seconds without an acknowledgement after which a link is dead
GRACE = 5  # seconds between SIGTERM and SIGKILL for a command that exceeds its timeout
# Fraction of the hosts that must finish before the rest get a deadline: SLOWER times as long as the
# finished ones took, but at least SLOW_AFTER seconds.
MOST = 3 / 4
SLOWER = 3
SLOW_AFTER = 6.0
PUT_TIMEOUT = 120.0  # timeout in seconds for sending a checkout's code
LONGEST = 86400.0  # timeout in seconds for a command that a user waits for
Command = str | Callable[[Host], str]
T = TypeVar("T")


class Transport:
    """SSH connections to a fleet's hosts. As a context manager, it closes them on exit."""

    def __init__(self, hosts: Sequence[Host], ssh: SshConfig, proxy: str = "") -> None:
        """Creates a transport that connects on first use.

        `proxy` is a command that connects its stdin and stdout to a host, with the placeholders %h
        and %p, as in ssh_config's ProxyCommand.
        """
        self.hosts, self.proxy = tuple(hosts), proxy
        self.ssh = ssh
        self.known = KnownHosts.of(ssh)
        self._kept: dict[Host, Connection] = {}
        self._left_behind: dict[Host, str] = {}
        self._jump_lock = threading.Lock()
        self._jump: Connection | None = None
        self._jump_failed: JumpFailed | None = None
        self._jump_tried = 0.0
        self._took: list[float] = []  # seconds that each successful connection took to open

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections.

        Commands that are still running on nodes are killed when they reach their timeout.
        """
        links = [connection.transport for connection in self._kept.values() if connection.transport]
        for connection in self._kept.values():
            connection.close()
        if self._jump:
            for link in links:
                # wait until paramiko's thread has closed the connection through the jump host
                link.join(DEAD_AFTER)
            self._jump.close()
        self._kept.clear()
        self._jump = None

    def run(
        self,
        command: Command,
        *,
        timeout: float,
        stdin: str | bytes | None = None,
        hosts: Iterable[Host] | None = None,
    ) -> Answers:
        """Runs `command` with sh on `hosts`, or on all hosts. Returns the responses.

        `timeout` is in seconds and applies to each host.
        """

        def ask(host: Host) -> Result | HostFailure:
            words = command if isinstance(command, str) else command(host)
            return self.ask(host, words, stdin=stdin, timeout=timeout)

        return Answers(self.each(ask, hosts))

    def ask(
        self, host: Host, command: str, *, timeout: float, stdin: str | bytes | None = None
    ) -> Result | HostFailure:
        """Runs `command` on one host and returns its response. See `run`."""
        began = time.monotonic()
        try:
            channel = self._session(host)
            began = time.monotonic()
            sent = stdin.encode() if isinstance(stdin, str) else stdin or b""
            limit = timeout + GRACE
            code, out, err = converse(channel, bounded(command, timeout), sent, limit)
            seconds = time.monotonic() - began
            if code == 124 and seconds >= timeout:
                raise TimeoutError
            return Result(code, out, err, seconds)
        except Exception as error:
            if why := self._left_behind.pop(host, None):
                return HostFailure("slow", why, f"ping {host.address}")
            return self._explained(host, error, began)

    def stream(
        self, host: Host, command: str, *, stdin: bytes = b"", out: Sink, err: Sink
    ) -> int | HostFailure:
        """Runs a command for at most LONGEST seconds, forwards its output, and returns its exit
        code.

        The command's stdin stays open until the command or this process exits.
        """
        began = time.monotonic()
        try:
            channel = self._session(host)
        except Exception as error:
            return self._explained(host, error, began)
        try:
            code = stream(channel, bounded(command, LONGEST), stdin, out, err)
            return code if code >= 0 else self._explained(host, LinkLost(), began)
        finally:
            channel.close()

    def _explained(self, host: Host, error: Exception, began: float) -> HostFailure:
        return explain(host, self.ssh, self.known, error, time.monotonic() - began, self.proxy)

    def put(
        self, files: Mapping[str, bytes], folder: str, *, hosts: Iterable[Host] | None = None
    ) -> Answers:
        """Writes `files` (relative path → content) to `folder` on every host. Files that start with
        `#!` become executable.
        """
        return self.run(
            f"mkdir -p {shlex.quote(folder)} && tar -xzf - -C {shlex.quote(folder)} "
            "--no-same-owner",
            stdin=pack(files),
            timeout=60,
            hosts=hosts,
        )

    def put_once(
        self, files: Mapping[str, bytes], folder: str, *, hosts: Iterable[Host] | None = None
    ) -> Answers:
        """Writes `files` to a new folder on every host, atomically.

        Skips hosts that already have the folder. If hosts share a file system, the files are sent
        only once.
        """
        target = shlex.quote(folder)
        answers = self.run(
            f"test -d {target} && echo there || echo missing", timeout=PUT_TIMEOUT, hosts=hosts
        )
        missing = [
            host for host, answer in answers.ok.items() if answer.stdout.strip().endswith("missing")
        ]
        if not missing:
            return answers
        part = f"{target}.$$"
        receive = (
            f"mkdir -p {part} && tar -xzf - -C {part} --no-same-owner && "
            # another process may have created the folder first
            f"{{ mv -T {part} {target} 2> /dev/null || rm -rf {part}; }}; test -d {target}"
        )
        data = pack(files)
        answers |= self.run(receive, stdin=data, timeout=PUT_TIMEOUT, hosts=missing[:1])
        rest = self.run(f"test -d {target}", timeout=PUT_TIMEOUT, hosts=missing[1:])
        answers |= rest
        if alone := [
            host for host, answer in rest.items() if isinstance(answer, Result) and answer.exit_code
        ]:
            answers |= self.run(receive, stdin=data, timeout=PUT_TIMEOUT, hosts=alone)
        return answers

    def read(
        self, path: str, *, timeout: float = 20, hosts: Iterable[Host] | None = None
    ) -> Answers:
        """Reads a file on every host. The content is the stdout of each result."""
        return self.run(f"cat {shlex.quote(path)}", timeout=timeout, hosts=hosts)

    def server_key(self, host: Host) -> PKey:
        """Returns the host key that a connected host presented."""
        key: PKey = self._connection(host).transport.get_remote_server_key()
        return key

    def each(
        self, ask: Callable[[Host], T], hosts: Iterable[Host] | None, *, leave_behind: bool = False
    ) -> dict[Host, T]:
        """Calls `ask` for `hosts`, or for all hosts, in parallel, and returns the results.

        With `leave_behind`, hosts that are much slower than most fail with kind `slow`.
        """
        chosen = self.hosts if hosts is None else tuple(hosts)
        if not chosen:
            return {}
        with ThreadPoolExecutor(min(THREADS, len(chosen)), thread_name_prefix="ssh") as pool:
            answers = {host: pool.submit(ask, host) for host in chosen}
            if leave_behind:
                self._wait_for_most(answers)
            found = {host: answer.result() for host, answer in answers.items()}
        self._left_behind.clear()
        return found

    def _wait_for_most(self, answers: Mapping[Host, Future[T]]) -> None:
        """Waits for most hosts, gives the rest a deadline, and disconnects those that miss it."""
        began, done = time.monotonic(), as_completed(answers.values())
        most = round(MOST * len(answers))
        for _ in range(most):
            next(done)
        usual = time.monotonic() - began
        limit = max(SLOW_AFTER, SLOWER * usual)
        wait(answers.values(), timeout=limit - usual)
        for host, answer in answers.items():
            if not answer.done() and (connection := self._kept.get(host)):
                self._left_behind[host] = (
                    f"too slow: no answer within {limit:.0f} s; {most} of {len(answers)} hosts "
                    f"answered within {usual:.1f} s"
                )
                connection.client.close()

    def _connection(self, host: Host) -> Connection:
        """Returns the open connection to a host, or opens one."""
        kept = self._kept.get(host)
        if kept is not None and kept.is_connected:
            return kept
        gateway = self._gateway() or self.proxy or None
        connection = self._kept[host] = self._opened(host, gateway)
        # the jump host comes from fleet.ssh.jump or the ssh config
        if connection.gateway is not None:
            threading.Thread(target=_pulse, args=(connection.transport,), daemon=True).start()
        return connection

    def _session(self, host: Host) -> Channel:
        """Opens a session. Retries, because sshd with MaxSessions 1 is slow to free the previous
        one.
        """
        from paramiko import ChannelException

        connection = self._connection(host)
        for pause in (0.1, 0.3, 1.0):
            with suppress(ChannelException):
                return connection.create_session()
            time.sleep(pause)
        return connection.create_session()

    def _opened(self, host: Host, gateway: Connection | str | None) -> Connection:
        """Opens a connection.

        After a timeout, retries with a longer one, unless the other hosts are fast.
        """
        connection, began = self._made(host, gateway), time.monotonic()
        try:
            self._enter(connection)
        except Exception as error:
            patience = self._patience() if is_late(error) and host not in self._left_behind else 0.0
            if not patience:
                raise
            connection.close()
            connection = self._made(host, gateway, patience)
            self._enter(connection)
        self._took.append(time.monotonic() - began)
        return connection

    def _patience(self) -> float:
        """Returns the timeout of a retry in seconds, or 0 for no retry.

        If other hosts connected quickly, this one is assumed to be down or hung, so there is no
        retry.
        """
        if not self._took:
            return PATIENCE
        usual = median(self._took)
        return max(PATIENCE, SLOWER * usual) if usual > CONNECT_TIMEOUT / SLOWER else 0.0

    def _gateway(self) -> Connection | None:
        """Returns the shared connection to the jump host, or None if there is no jump host."""
        if self.ssh.jump is None:
            return None
        with self._jump_lock:
            if self._jump is None or not self._jump.is_connected:
                host = parse_host(self.ssh.jump)
                self._jump = self._made(host, None)
                if self._jump_failed and time.monotonic() - self._jump_tried < JUMP_AGAIN:
                    # many hosts wait for the jump host, so they share the result of one attempt
                    raise self._jump_failed
                try:
                    self._enter(self._jump)
                except Exception as error:
                    self._jump_failed, self._jump_tried = JumpFailed(host, error), time.monotonic()
                    raise self._jump_failed from error
            return self._jump

    def _made(
        self, host: Host, gateway: Connection | str | None, patience: float = CONNECT_TIMEOUT
    ) -> Connection:
        """Returns an unopened connection, with a timeout of `patience` seconds for each step of
        opening it.
        """
        # this import takes 0.2 s, so only verbs that connect to hosts pay for it
        from fabric import Config, Connection

        config = Config(ssh_config=ssh_config.read(self.ssh, host), lazy=True)
        said = config.base_ssh_config.lookup(host.address)
        if gateway is None and "proxyjump" in said:
            for hop in said["proxyjump"].split(","):
                gateway = self._made(parse_host(hop.removeprefix("ssh://")), gateway, patience)
        connection = Connection(
            host.address,
            user=host.user or self.ssh.user,
            port=host.port if host.port != 22 else None,
            config=config,
            gateway=gateway,
            connect_timeout=patience,
            connect_kwargs=self._login(patience),
        )
        if said.get("identitiesonly") == "yes":
            connection.connect_kwargs["look_for_keys"] = False
        self.known.guard(connection.client)
        return connection

    def _enter(self, connection: Connection) -> None:
        connection.open()
        connection.transport.set_keepalive(KEEPALIVE)
        if connection.gateway is None:
            end_when_dead(connection.transport.sock)

    def _login(self, patience: float) -> dict[str, Any]:
        login: dict[str, Any] = dict.fromkeys(
            ("banner_timeout", "auth_timeout", "channel_timeout"), patience
        )
        if self.ssh.key is None:
            return login
        return login | {
            "key_filename": str(ssh_config.expanded(self.ssh.key, "fleet.ssh.key")),
            "allow_agent": False,
            "look_for_keys": False,
        }


def bounded(command: str, timeout: float) -> str:
    """Wraps a command so that sh runs it on the node and kills it after `timeout` seconds.

    The login shell may be csh, which interprets `!` and line breaks even inside quotes, or fish,
    which interprets backslashes. The command is therefore passed as one quoted line of base64 for
    sh to decode.
    """
    mark = f"echo '{OUTPUT_BEGINS.decode().strip()}'"
    marked = f"{mark}\n{mark} >&2\n{command}"  # separates a login shell's greeting from the output
    encoded = base64.b64encode(marked.encode()).decode()
    # without base64 on the node, the command must fail instead of doing nothing
    decoded = f"echo {encoded} | base64 -d || echo exit 127"
    return f"exec timeout -k {GRACE} {max(1, round(timeout))} sh -c 'eval \"$({decoded})\"'"


def end_when_dead(link: socket.socket) -> None:
    """Makes the kernel close a connection after DEAD_AFTER seconds without an ACK (RFC 5482)."""
    if sys.platform == "linux":
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(DEAD_AFTER * 1000))
    else:
        # 0x80 is TCP_RXT_CONNDROPTIME in Darwin's netinet/tcp.h.
        link.setsockopt(socket.IPPROTO_TCP, 0x80, int(DEAD_AFTER))


def _pulse(transport: Any) -> None:
    """Sends keepalive requests. Closes the connection if there is no response within DEAD_AFTER
    seconds.
    """
    while transport.is_active():
        alarm = threading.Timer(DEAD_AFTER, _end, [transport])
        alarm.daemon = True
        alarm.start()
        try:
            transport.global_request("keepalive@openssh.com", wait=True)
        except Exception:  # can't send the request: EOFError, OSError or SSHException
            _end(transport)
        alarm.cancel()
        time.sleep(KEEPALIVE)


def _end(transport: Any) -> None:
    """Closes a connection, ignoring errors, because the jump host connection may close at the same
    time.
    """
    with suppress(Exception):
        transport.close()
