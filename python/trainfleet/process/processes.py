"""Process trees without orphans: children die with their parent, and process groups are signaled as
a unit. Also counts requests to stop.
"""

from __future__ import annotations

import os
import pwd
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from ..trust.errors import RunError
from ..trust.safe_output import visible

try:  # imported here, because code between fork and exec must not import anything
    import ctypes
except ImportError:  # this Python was built without libffi, so it can't run torch either
    ctypes = None  # type: ignore[assignment]

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
# Variable with the supervisor's pid, in the environment of all its processes
SUPERVISOR = "TRAINFLEET_SUPERVISOR"
# Signals that request a stop
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def die_with_parent(ancestor: str | None = None) -> None:
    """Makes the kernel kill this process when its parent dies for any reason.

    The workers of a killed torchrun agent keep training (observed with torch 2.13), and only the
    kernel can kill them reliably. `ancestor` is the pid of a process that remains an ancestor of
    this one as long as its parent lives. It is required if the process imports torch before this
    call, because its parent may have died in the meantime. On systems other than Linux, or without
    ctypes, a thread checks twice per second whether the parent has changed.
    """
    parent = os.getppid()
    if sys.platform == "linux" and ctypes:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # Exit if the parent died before the prctl call.
        if os.getppid() != parent or not (ancestor is None or _is_below(int(ancestor))):
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _is_below(ancestor: int) -> bool:
    """Returns whether `ancestor` is this process's parent or a more distant ancestor. Returns True
    if /proc does not reveal it.
    """
    above = os.getppid()
    try:
        while above not in (0, ancestor):
            above = int(Path(f"/proc/{above}/stat").read_text().rpartition(")")[2].split()[1])
    # /proc is missing or hides other users' processes (hidepid). In doubt, let training continue.
    except OSError:
        return True
    return above == ancestor


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def limit_memory(size: int) -> None:
    """Limits the private memory of this process, and of each process that it starts, to `size`
    bytes. Mapped files are not counted.
    """
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def run_module(module: str, *words: str, **environment: str) -> int:
    """Runs `python -m module words` in a process that dies with this one, and returns its exit
    code.

    CLI verbs run code that needs torch in a separate process, because the control plane never
    imports torch.

    Raises:
        RunError: torch is not installed.
    """
    return _run(None, module, words, environment).returncode


def ask_module(module: str, *words: str, **environment: str) -> tuple[int, str]:
    """Returns the exit code and the stdout of a module that runs as in `run_module`."""
    done = _run(subprocess.PIPE, module, words, environment)
    return done.returncode, done.stdout


def _run(
    stdout: int | None, module: str, words: tuple[str, ...], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    if find_spec("torch") is None:
        raise RunError(
            "torch is not installed in this Python", where=sys.executable, next="make setup"
        )
    command = [sys.executable, "-m", module, *words]
    variables = os.environ | environment
    return subprocess.run(
        command, env=variables, preexec_fn=die_with_parent, check=False, stdout=stdout, text=True
    )


def identity(pid: int) -> str:
    """Returns a process identity that remains unique if the pid is reused: `pid start boot`.
    Returns "" if the process has ended.
    """
    if sys.platform != "linux":
        said = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout
        return f"{pid} {'-'.join(said.split())} -" if said.strip() else ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends during the read
        return ""
    if fields[0] in "ZX":  # the process is a zombie or dead
        return ""
    # Field 22 is the start time in ticks since boot.
    return f"{pid} {fields[19]} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def signal_group(group: int, number: signal.Signals) -> bool:
    """Sends a signal to all processes of a group. Returns False if the group no longer exists."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


JOB = "TRAINFLEET_JOB"  # variable that identifies a run's processes (hosts/host_commands.py)
# Environment variable that is set if the run does not share this host with other runs
# (fleet.exclusive)
ALONE = "TRAINFLEET_ALONE"
# Prefix of every run's socket name, and the socket name of a run with exclusive use of the host
ANNOUNCED = "trainfleet:"
ONLY = "trainfleet-alone"
NAME = 107  # maximum bytes of a socket name (unix(7))
PATIENCE = 5.0  # seconds to wait for a fenced run on this host to end
_held: list[socket.socket] = []  # sockets to keep open for the lifetime of this process


def announce() -> str:
    """Announces this process to all users of this host. Returns the run that prevents this one from
    running here, or "".
    """
    mark = os.environ.get(JOB)
    if not mark or sys.platform != "linux":
        return ""
    _hold(f"{ANNOUNCED}{secrets.token_hex(4)}:{user()}:{mark}")
    deadline = time.monotonic() + PATIENCE
    while os.environ.get(ALONE) and not _hold(ONLY):
        if time.monotonic() > deadline:
            return others(mark) or "another run"
        time.sleep(0.1)
    return ""


def others(mark: str) -> str:
    """Returns the other runs announced on this host, with their users."""
    found = set()
    with suppress(OSError):
        for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
            _, begins, rest = line.partition(f" @{ANNOUNCED}")
            whose, _, what = rest.partition(":")[2].partition(":")
            if begins and what and not (whose == user() and mark.startswith(what)):
                found.add(visible(f"{what} (of {whose})"))
    return ", ".join(sorted(found))


def _hold(name: str) -> bool:
    """Binds a socket with this name for the lifetime of this process. Returns False if the name is
    taken.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(b"\0" + name.encode()[:NAME])
    except OSError:
        held.close()
        return False
    _held.append(held)
    return True


def user() -> str:
    """Returns this process's user name, as printed by `id -un`."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


class Interrupts:
    """Context manager that counts stop requests instead of letting them kill the process. Ctrl-C,
    SIGTERM or a closed terminal requests a clean stop, and a second Ctrl-C stops at once.

    Timeouts and service managers send a single SIGTERM to a process group, but it arrives twice
    because make also forwards its own. When a terminal closes, both the kernel and the shell send
    SIGHUP. All signals other than SIGINT therefore count as one request.
    """

    def __init__(self) -> None:
        # number of SIGINTs, and whether any other signal arrived
        self.pressed = 0
        self.signalled = False

    @property
    def count(self) -> int:
        return self.pressed + self.signalled

    def __enter__(self) -> Interrupts:
        self._before = [signal.signal(number, self._count) for number in SIGNALS]
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in zip(SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.pressed += 1
        else:
            self.signalled = True
