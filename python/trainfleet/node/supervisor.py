"""Runs a command as this node's part of a job: `python -m trainfleet.node.supervisor LOG --
COMMAND...`.

The supervisor writes all output of the command to LOG, with the time and rank on each line, and
forwards stop requests. No process of the command outlives the supervisor, however it exits. It uses
only the standard library, so it starts within milliseconds.

node/entrypoint.py does the same for nodes that derive their command and log from their placement.

`--detach FILE < TASK` returns immediately, and the task continues in a separate session,
independent of the process that started it. TASK is a JSON object on stdin, {script, environment,
token}, so that it does not appear in process lists. FILE.sh contains the script, and FILE contains
`pid start boot token` (the pid's start time and the kernel's boot ID). FILE.said contains the
script's output until it becomes a supervisor, and FILE.exit its exit code. A task whose token
matches an existing one is not started again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ..health import fence
from ..health.kernel_log import Kernel
from ..health.watchdog import Alarm, Sentry
from ..process import file_systems
from ..process.file_systems import replace_file
from ..process.node_log import Log, say, stamp
from ..process.processes import SUPERVISOR, announce, die_with_parent, identity, signal_group
from ..run.run_folder import Run
from ..run.run_folder import scratch as scratch_of
from ..storage.cloudwatch import forwarding
from ..storage.s3_sync_agent import uplink_for
from ..trust import untrusted_input
from ..trust.errors import TrainfleetError, telling
from .placement import TERM_GRACE

# log messages about stop requests
ASKED, LATE = "asked to stop", "killed, because it did not stop"
EXIT = "TRAINFLEET_EXIT"  # environment variable with the path of the exit code file
OCCUPIED = 75  # exit code if another run uses the host (EX_TEMPFAIL in sysexits.h)
# Exit code if the command failed and its log could not be written (EX_IOERR in sysexits.h)
UNLOGGED = 74
# Exit code if the command failed and the node lost the connection to the log's file server
# (EX_OSFILE in sysexits.h)
SEVERED = 72
WATCH = "TRAINFLEET_WATCH"  # environment variable: number of ranks that this node watches
POLL = 0.5  # seconds
TOLD = 600  # maximum characters to keep of a node's output outside its log
SCRATCH = "trainfleet-scratch-"
TORCHRUN = "torch.distributed.run"
RANK_PREFIX = "rank ${rank} | "  # torchrun's template for the line prefix of workers with --tee
SMALL = 64 * untrusted_input.KIBIBYTE  # maximum bytes to read of a small file
_NODE = re.compile(r"(([0-9]{1,9})(?: \S+ \S+)?) (\S+)")


@telling
def main(arguments: list[str]) -> int:
    if arguments[0] == "--detach":
        return detach(Path(arguments[1]), json.load(sys.stdin))
    return run_part(lambda: supervise(arguments))


def run_part(part: Callable[[], int]) -> int:
    """Runs a node's part in this process, which dies with its parent. Returns the exit code, and
    also writes it to the file that EXIT specifies.
    """
    if (
        os.getpid() != 1
        # The first process of a container is exempt, because its parent is a thread of the
        # container runtime, which may end at any time.
    ):
        die_with_parent()
    if other := announce():
        then = "wait for it, use other hosts, or set fleet.exclusive: false"
        print(
            f"error: {other} is running on this host, and fleet.exclusive is set; next: {then}",
            flush=True,
        )
        return OCCUPIED
    exit_file, code = os.environ.pop(EXIT, None), 1
    try:
        code = part()
    except TrainfleetError as error:
        code = error.exit_code
        raise
    except SystemExit as left:  # a stop request arrived before the command started
        code = left.code if isinstance(left.code, int) else 1
        raise
    finally:
        if exit_file:
            # If this disk is full too, the missing file reveals the failure
            # (hosts/host_commands.py).
            with contextlib.suppress(OSError):
                write(Path(exit_file), str(code))
    return code


def supervise(arguments: list[str]) -> int:
    """Runs `LOG -- COMMAND...` to completion and returns its exit code."""
    log, separator, *command = arguments
    assert separator == "--" and command, arguments
    with on_own_disk(scratch_of(Path(log))), uplink_for(Path(log)), forwarding(Path(log)):
        return run(Log(Path(log)), command)


@contextlib.contextmanager
def on_own_disk(scratch: Path) -> Iterator[None]:
    """Links `scratch` to a folder on this node's disk, so that a full shared disk can't stop ranks
    that write output there.
    """
    file_systems.sweep(Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"))
    remove(scratch)  # left by a killed supervisor
    with contextlib.ExitStack() as stack:
        folder = scratch  # fallback if the node's disk is full
        with contextlib.suppress(OSError):
            made = Path(tempfile.mkdtemp(prefix=SCRATCH))
            stack.callback(os.close, file_systems.hold(made))
            stack.callback(shutil.rmtree, made, ignore_errors=True)
            scratch.parent.mkdir(parents=True, exist_ok=True)
            scratch.symlink_to(made)
            folder = made
        stack.callback(remove, scratch, folder)
        yield


def remove(scratch: Path, folder: Path | None = None) -> None:
    """Removes `scratch`. If `folder` is given, a link to any other folder is kept, because it may
    belong to a later attempt.
    """
    with contextlib.suppress(OSError):
        if not scratch.is_symlink():
            shutil.rmtree(scratch)
        elif folder in (None, scratch.readlink()):
            scratch.unlink()


def detach(file: Path, task: dict[str, Any]) -> int:
    """Runs `task` in a separate process. Returns 0 once `file` identifies that process, or 1 if it
    dies first.
    """
    script = file.with_name(f"{file.name}.sh")
    exit_file = file.with_name(f"{file.name}.exit")
    pid, said, token = process_in(file)
    if token == task["token"] and (exit_file.exists() or said == identity(pid)):
        return 0
    exit_file.unlink(missing_ok=True)
    write(script, task["script"])
    ready, started = os.pipe()
    starter = os.getpid()
    if not os.fork():
        _become(file, script, task, exit_file, starter, started)
    os.close(started)
    # The pipe is empty if the child died before it was ready.
    return 0 if os.read(ready, 1) else 1


def _become(
    file: Path, script: Path, task: dict[str, Any], exit_file: Path, starter: int, started: int
) -> NoReturn:
    """Turns this fork of the process `starter` into the task, and writes to the pipe `started` when
    `file` identifies it.
    """
    os.setsid()
    untrusted_input.seal(file.parent.parent)
    said_by_script = untrusted_input.opener(
        str(said_file(file)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    )
    file_systems.offered(lambda: os.fchmod(said_by_script, 0o600), errno.EPERM)
    for descriptor, target in (
        (0, os.open(os.devnull, os.O_RDONLY)),
        (1, said_by_script),
        (2, said_by_script),
    ):
        os.dup2(target, descriptor)
    write(file, f"{identity(os.getpid())} {task['token']}")
    os.write(started, b".")
    # The supervisor dies with its parent, so wait until this process has been reparented.
    while os.getppid() == starter:
        time.sleep(0.001)
    os.execve(
        "/bin/sh", ["sh", str(script)], os.environ | task["environment"] | {EXIT: str(exit_file)}
    )


def write(path: Path, text: str) -> None:
    """Atomically replaces a small file. Ensures that its last line ends with a newline."""
    replace_file(path, f"{text.rstrip()}\n".encode())


def read(path: Path) -> str:
    """Returns the text that `write` wrote, or "" if the file does not exist."""
    try:
        return untrusted_input.read_text(path, SMALL).strip()
    except FileNotFoundError:
        return ""


def process_in(file: Path) -> tuple[int, str, str]:
    """Returns pid, identity and token from a node's file (`pid start boot token`). Returns 0 and
    empty strings if the file has another format.
    """
    match = _NODE.fullmatch(read(file))
    return (int(match[2]), match[1], match[3]) if match else (0, "", "")


def said_file(file: Path) -> Path:
    """Returns the file for a node's output outside its log."""
    return file.with_name(f"{file.name}.said")


def told(said: str) -> str:
    """Returns why a node refused to run its part: the last error outside its log, with its reason
    and fix, as one line.
    """
    return " ".join(said.rpartition("error: ")[2].split())[:TOLD]


def run(file: Log, command: list[str], grace: float = TERM_GRACE) -> int:
    """Runs the command until all its processes have ended. Returns its exit code, or 128 + n if
    signal n killed it. `grace` is the time from SIGTERM to SIGKILL in seconds.
    """
    kernel = Kernel()
    folder = file.path.parent.parent
    child = start(command)
    pass_on(child, Run(folder) if TORCHRUN in command else None, grace, file.path)
    guard = RankGuard(folder, child.pid)
    assert child.stdout
    for line in child.stdout:
        file.write(stamp(line))
    code = child.wait()
    signal_group(child.pid, signal.SIGKILL)  # kill the group's remaining processes
    guard.ended.set()
    if guard.alarm:
        file.note("watch", guard.alarm.words)
    elif code < 0:
        file.note(
            "node", f"{Path(command[0]).name} was killed by signal {-code}; no process is left"
        )
    for words in kernel.words() if code else ():
        file.note("kernel", words.text, words.time)
    if not file.close() and code:
        return SEVERED if file.severed else UNLOGGED
    return code if code >= 0 else 128 - code


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """Starts the command as a session that does not outlive this process."""
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": RANK_PREFIX,
        SUPERVISOR: str(os.getpid()),
    }
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


class RankGuard(threading.Thread):
    """Thread that watches all nodes' ranks if WATCH is set, which means that there is no launcher
    to watch them. On an alarm, it kills this node's part.

    The scheduler then retries the job or gives up. The reason is in the node's log
    (watch/verdict.py).
    """

    def __init__(self, folder: Path, group: int) -> None:
        super().__init__(name="watch", daemon=True)
        self.group = group
        self.ended = threading.Event()
        self.alarm: Alarm | None = None
        if ranks := int(os.environ.get(WATCH, "0")):
            self.sentry = Sentry(folder, ranks, int(os.environ.get(fence.VARIABLE, "0")))
            self.start()

    def run(self) -> None:
        while not self.ended.wait(POLL):
            try:
                self.alarm = self.sentry.look()
            except OSError:  # the shared folder is unavailable; ranks that need it will report this
                continue
            if self.alarm:
                signal_group(self.group, signal.SIGKILL)
                return


def pass_on(child: subprocess.Popen[bytes], run: Run | None, grace: float, log: Path) -> None:
    """Installs signal handlers that forward stop requests. SIGTERM asks the child to stop and is
    followed by SIGKILL after `grace` seconds. SIGUSR1, which Slurm sends as an early notice, only
    asks.

    SIGTERM and SIGKILL are logged with their times, so that a verdict can detect that a node was
    killed early (watch/verdict.py). Ranks of a `run` are asked to stop through its stop file. If
    torchrun received the signal, it would kill its ranks and skip the exit barrier, and the
    torchruns on other nodes would wait at the barrier for five minutes.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        try:
            if run:
                return run.ask_to_stop(f"signal {number}")
        except OSError:  # no space for the file, so torchrun signals its ranks instead
            pass
        signal_group(child.pid, signal.SIGTERM)

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, grace)
        say(log, f"{ASKED} (SIGTERM) with {grace:.0f} s to save and exit")
        ask(number, frame)

    def kill(number: int, frame: FrameType | None) -> None:
        say(log, f"{LATE} within {grace:.0f} s")
        signal_group(child.pid, signal.SIGKILL)

    signal.signal(signal.SIGUSR1, ask)
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGALRM, kill)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
