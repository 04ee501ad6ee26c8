"""Runs commands on many hosts that wait for one another: all at the same time, however few threads the transport has.

Each is started in the background of its host, in a session of its own and for a limited time, and what it printed is collected
when the first host's has ended. A command that others wait for must not wait itself until the transport has a thread for it.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Sequence

from .host_results import Answers, Host
from .polling import spread
from .transport import GRACE, Transport

START_SECONDS = 20.0
END_SECONDS = 10  # that the others get once the first has ended


def run_together(transport: Transport, command: Callable[[Host], str], *, timeout: float, hosts: Sequence[Host]) -> Answers:
    """What the commands came to, as Transport.run has it; each ends after `timeout` seconds. The first host's ends last."""
    token, numbers = secrets.token_hex(8), {host: number for number, host in enumerate(hosts)}

    def folder(host: Host) -> str:
        return f"/tmp/trainfleet-{token}-{numbers[host]}"

    limit = timeout + spread(len(hosts))
    began = transport.run(lambda host: begin(folder(host), command(host), limit), timeout=START_SECONDS, hosts=hosts)
    started = list(began.ok)
    if len(started) == len(hosts):
        transport.ask(hosts[0], wait(folder(hosts[0]), limit), timeout=limit + GRACE)
    seconds = END_SECONDS if len(started) == len(hosts) else 0  # without one, the others wait in vain
    ended = transport.run(lambda host: collect(folder(host), seconds), timeout=START_SECONDS + seconds, hosts=started)
    return Answers({host: ended.get(host, answer) for host, answer in began.items()})


def begin(folder: str, command: str, timeout: float) -> str:
    """Starts a command that leaves what it prints in `folder`/out and its exit code in `folder`/code. Returns at once."""
    inner = f"timeout -k {GRACE} {round(timeout)} sh -c {shlex.quote(command)}; echo $? > code.part; mv code.part code"
    return (
        f"umask 077; mkdir {folder} && cd {folder} && "
        f"{{ setsid sh -c {shlex.quote(inner)} < /dev/null > out 2>&1 & echo $! > pid; }}"
    )


def wait(folder: str, timeout: float) -> str:
    """Ends when the command in `folder` has, or its time is over."""
    return f"for _ in $(seq {round(timeout) * 5}); do [ -e {folder}/code ] && break; sleep 0.2; done"


def collect(folder: str, seconds: int) -> str:
    """Prints what the command in `folder` has printed, and ends as it did; what takes so many seconds more is killed (124)."""
    return f"""cd {folder} || exit 125
for _ in $(seq {seconds * 5}); do [ -e code ] && break; sleep 0.2; done
[ -e code ] || {{ kill -KILL -- "-$(cat pid)"; echo 124 > code; }}
cat out; read -r code < code; cd /; rm -rf {folder}; exit "$code\""""
