"""Fault rehearsal: injects faults into a short separate run, and measures detection time, verdict,
cost and leftovers.

A rehearsal works in one temporary folder outside the user's runs, which is removed afterwards. All
its processes die with this process. After kill -9, the next rehearsal empties the folder. This
module handles nodes that this machine simulates with real torchruns. See rehearsal_hosts.py for
hosts and rehearsal_steps.py for Slurm.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar

import yaml

from ..backends.base import LINKS, OWN_HEAD
from ..health import fence
from ..health.heartbeat_format import read_beats
from ..process.install_paths import CODE
from ..process.processes import die_with_parent
from ..run.run_folder import Record, Run, run_of, take_lock
from ..trust.errors import BackendError, RunError

# Steps in the run, steps between checkpoints, and the step at which the fault is injected.
STEPS, EVERY, BREAK_AT = (120, 20, 50)
LONGER = 400  # number of steps if this machine sees progress only seconds later
LONGEST = 8000  # number of steps in a run that is stopped as soon as its fault is detected
PATIENCE = 480.0  # timeout in seconds for a command
LEFT_WITHIN = 10.0  # timeout in seconds for all processes to end
APART = 5.0  # maximum lag of a host's clock behind this machine's, in seconds
SITE = "site"  # folder with the program that the nodes' Python runs at startup
STRUCK = "struck"  # printed by a command once it has injected its fault
# A model this small does not benefit from more threads, which would contend on a busy node.
PYTHON = """#!/bin/sh
export OMP_NUM_THREADS=1 PYTHONPATH={site}${{PYTHONPATH:+:$PYTHONPATH}}
exec {python} "$@"
"""
DAMAGE = """cd {checkpoints} && newest=$(ls -d step-* | sort | tail -n 1) &&
file=$(find "$newest" -type f -printf '%s %p\\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-) &&
truncate -s $(( $(stat -c %s "$file") / 2 )) "$file" && echo struck"""
REMOVE = "[ ! -e {folder} ] || chmod -R u+w {folder}; rm -rf {folder}"
PARENT = "p=$(sed 's/.*) //' /proc/$p/stat | cut -d ' ' -f 2); "
OWN_LINKS = "nodes simulated on one machine have no separate links"
# Features that faults require (faults.Fault.needs) and stages may lack, besides LINKS and OWN_HEAD
# (backends/base.py). SPARE: enough nodes to continue without one. MAJORITY: enough nodes to
# identify a slow one. KERNEL: a network that tc can slow down. PYTHON_OF_NODES: nodes whose Python
# startup can be modified. MOUNTS: mounts that disappear when the run ends.
SPARE, MAJORITY, KERNEL = "spare", "majority", "kernel network"
PYTHON_OF_NODES, MOUNTS = "python", "mounts"
LACKING = {
    LINKS: OWN_LINKS,
    OWN_HEAD: "the head is this machine; launcher-killed tests a similar fault",
}


def config_of_run(
    fleet: Mapping[str, object], text: str, batch: int = 8, steps: int = STEPS
) -> str:
    """Returns a short run's config.yaml for this fleet, with training text from the folder
    `text`.
    """
    return yaml.safe_dump(
        {
            "name": "whole",
            "data": {
                "name": "text",
                "sources": [text],
                "vocab_size": 340,
                "validation_fraction": 0.1,
            },
            "model": {
                "layers": 4,
                "hidden_size": 128,
                "heads": 4,
                "kv_heads": 2,
                "intermediate_size": 256,
            },
            "train": {
                "steps": steps,
                "precision": "fp32",
                "global_batch_size": batch,
                "sequence_length": 32,
                "log_every": 1,
                "validate_every": 0,
                "warmup_steps": 20,
                "schedule_steps": LONGEST,
            },
            "checkpoint": {"every": EVERY},
            "fleet": dict(fleet),
        }
    )


def documents() -> dict[str, bytes]:
    """Returns the training text as 40 small files, keyed by path relative to the stage's folder."""
    lines = {
        number: " ".join(f"word{(number * step) % 97} is {step}." for step in range(60))
        for number in range(40)
    }
    return {
        f"text/{number}.txt": f"Document {number}. {words}\n".encode()
        for number, words in lines.items()
    }


def python_of(place: str, interpreter: str) -> bytes:
    """Returns a wrapper script for the Python interpreter on nodes that this machine does not
    start. With it, Python runs the program in SITE at startup (RehearsalStage.alter).
    """
    return PYTHON.format(site=quote(f"{place}/{SITE}"), python=quote(interpreter)).encode()


def furnish(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files to a folder, keyed by relative path. Makes scripts executable."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o755 if content.startswith(b"#!") else 0o644)


def plain(value: Any) -> Any:
    """Converts a value for YAML: tuples become lists, and unset keys are dropped."""
    if isinstance(value, dict):
        return {
            key: plain(inner) for key, inner in value.items() if inner is not None and inner != ()
        }
    return [plain(inner) for inner in value] if isinstance(value, tuple) else value


@dataclass
class RehearsalStage:
    """Environment for injecting faults into runs. `type` runs commands in its folder as a user
    would.

    This class simulates all nodes on this machine. Stages with real nodes override `place`,
    `at_rank`, `on_head`, `let_write` and `at_work`, and implement what only they support, such as
    `shape`.
    """

    folder: Path
    # features that this stage lacks, with reasons
    lacking: Mapping[str, str] = field(default_factory=lambda: LACKING)
    # losses of the fault-free baseline run, by step
    whole: Mapping[int, float] = field(default_factory=dict)
    said: str = ""  # output of the last finished command

    steps: ClassVar[int] = STEPS
    patience: ClassVar[float] = PATIENCE
    # maximum lag of the nodes' clocks behind this machine's, in seconds
    apart: ClassVar[float] = 0.0
    things: ClassVar[str] = "processes"  # noun for leftovers in messages
    left_within: ClassVar[float] = LEFT_WITHIN
    outlives: ClassVar[bool] = False  # whether a run survives the command that launched it

    @property
    def place(self) -> str:
        """Returns the stage folder's path on the nodes."""
        return str(self.folder)

    def called(self, name: str) -> str:
        """Returns the run name for the fault `name`."""
        return name

    def run(self, name: str) -> Run:
        return Run(run_of(self.called(name), self.folder / "runs").folder)

    def checkpoints(self, name: str) -> str:
        """Returns the run's checkpoint folder, quoted for a node's shell."""
        return quote(f"{self.place}/runs/{self.called(name)}/checkpoints")

    def begin(self, name: str, words: str = "") -> subprocess.Popen[str]:
        """Starts `make train` for the run `name`. `words` contains additional config overrides."""
        return self.type("train", name, words)

    def type(self, verb: str, name: str, words: str = "") -> subprocess.Popen[str]:
        """Starts the command `verb` for the run `name`. Returns its process."""
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("MAKE", "TRAINFLEET"))
        }
        path = (str(self.folder / SITE), str(CODE), *filter(None, [os.environ.get("PYTHONPATH")]))
        environment = inherited | {"PYTHONPATH": os.pathsep.join(path), "NO_COLOR": "1"}
        command = [
            *self.alone,
            sys.executable,
            "-m",
            "trainfleet",
            verb,
            f"SET=name={self.called(name)} {words}",
        ]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )

    def end(self, process: subprocess.Popen[str]) -> int:
        """Waits for a command to end and returns its exit code. After a timeout, kills the command
        and returns 124.
        """
        try:
            self.said = process.communicate(timeout=self.patience)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            self.said = process.communicate()[0]
            return 124
        return process.returncode

    def again(self, name: str, words: str = "") -> int:
        """Reruns `make train` for the run `name`, waits for it to end, and returns its exit
        code.
        """
        return self.end(self.begin(name, words))

    def stop(self, name: str, process: subprocess.Popen[str]) -> None:
        """Stops a run with `make stop`, which writes a checkpoint."""
        self.end(self.type("stop", name))
        self.end(process)

    def losses(self, name: str) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.run(name).read_metrics()}

    def events(self, name: str, since: float = 0.0) -> list[Record]:
        return [
            event for event in self.run(name).read_events() if event["time"] >= since - self.apart
        ]

    def await_step(self, name: str, process: subprocess.Popen[str], step: int = BREAK_AT) -> None:
        """Waits until the run has logged the given step. Raises RunError if the run ends earlier or
        times out.
        """
        until = time.monotonic() + self.patience
        while max(self.losses(name), default=0) < step:
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                said = process.communicate()[0]
                what = f"the run {name} never reached step {step}"
                raise RunError(what, where=str(self.folder), why=said[-400:], next="make logs")
            time.sleep(0.05)

    def at_rank(self, name: str, command: str) -> str:
        """Runs a shell command on rank 1's machine and returns its output. The command can use $p
        for the rank's PID and $c for the run's checkpoint folder.

        Raises:
            RunError: no host runs rank 1.
        """
        return self.on_head(self.words_at_rank(name, command))

    def words_at_rank(self, name: str, command: str) -> str:
        """Returns the shell command with $p and $c set. Requires a run folder that is readable on
        this machine. Raises RunError if rank 1 has no heartbeat.
        """
        folder = self.run(name).folder
        beat = read_beats(folder, fence.current(folder).number).get(1)
        if beat is None:
            raise RunError(
                f"rank 1 of {name} has no heartbeat",
                where=str(folder),
                next="run make rehearse again",
            )
        return f"p={beat.pid} c={self.checkpoints(name)}\n{command}"

    def on_head(self, command: str) -> str:
        """Runs a shell command on the machine that has the stage's folder. Returns its output."""
        return subprocess.run(
            ["sh", "-c", command], cwd="/", capture_output=True, text=True, check=False
        ).stdout.strip()

    def strike(self, name: str, whom: str, number: signal.Signals) -> None:
        """Sends a signal to rank 1, or to its parent torchrun if `whom` is `agent`. Raises RunError
        if no host has that process.
        """
        parent = PARENT if whom == "agent" else ""
        self.require(name, self.at_rank(name, f"{parent}kill -{number.value} $p && echo {STRUCK}"))

    def damage(self, name: str) -> None:
        """Truncates the largest file in the newest checkpoint to half its size. Raises RunError if
        the run has no checkpoint.
        """
        self.require(name, self.on_head(DAMAGE.format(checkpoints=self.checkpoints(name))))

    def alter(self, name: str, program: str) -> None:
        """Makes the nodes' Python run a program at startup, until `restore` is called. Raises
        RunError if the program can't be written.
        """
        site = quote(f"{self.place}/{SITE}")
        words = (
            f"mkdir -p {site} && printf %s {quote(program)} > {site}/sitecustomize.py "
            f"&& echo {STRUCK}"
        )
        self.require(name, self.on_head(words))

    def restore(self) -> None:
        """Undoes `alter`."""
        self.on_head(f"rm -rf {quote(f'{self.place}/{SITE}')}")

    def let_write(self, name: str) -> None:
        """Makes the run's checkpoint folder writable again."""
        self.on_head(f"chmod 755 {self.checkpoints(name)}")

    def require(self, name: str, said: str) -> None:
        """Raises RunError unless a fault's command has printed STRUCK."""
        if said != STRUCK:
            why = said[-400:] or "the node printed nothing"
            raise RunError(
                f"the fault {name} could not be caused",
                where=self.place,
                why=why,
                next="run make rehearse again",
            )

    @property
    def alone(self) -> list[str]:
        """Returns a command prefix that confines root's mounts to the command
        (faults.READ_ONLY).
        """
        return (
            ["unshare", "--mount"]
            if os.getuid() == 0 and not self.outlives and can_unshare()
            else []
        )

    def shape(self, name: str, rate: str, seconds: int) -> str:
        """Limits the traffic from rank 1's host to `rate` for `seconds` seconds, using tc. Returns
        "" on success, or the reason if that fails.
        """
        return self.lacking[LINKS]

    def free(self) -> None:
        """Removes the traffic limits that `shape` has set."""

    def lose_head(self, name: str) -> str:
        """Kills the run's processes on its head, including the launcher. Returns the head's name.
        Raises RunError if the stage has no separate head.
        """
        raise RunError(
            f"the fault {name} can't be caused here",
            where=self.place,
            why=self.lacking[OWN_HEAD],
            next="make rehearse",
        )

    def processes(self) -> list[int]:
        """Returns the PIDs of the other processes on this machine whose working directory is the
        stage's folder.
        """
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "cwd").readlink() == self.folder and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found

    def at_work(self) -> Sequence[object]:
        """Returns the stage's remaining processes or jobs, or the hosts that still run them."""
        return self.processes()

    def left_over(self) -> Sequence[object]:
        """Waits up to `left_within` seconds for the stage's runs to end. Returns the leftovers."""
        until = time.monotonic() + self.left_within
        while (found := self.at_work()) and time.monotonic() < until:
            time.sleep(0.2)
        return found


@contextmanager
def stage() -> Iterator[RehearsalStage]:
    """Yields a stage holding the training data and the losses of a fault-free baseline run. Removes
    its files and processes on exit.

    Raises:
        BackendError: the same user is running another rehearsal.
        RunError: the baseline run failed.
    """
    with own_folder() as folder:
        made = RehearsalStage(folder)
        try:
            empty(made)
            config = config_of_run({"backend": "local", "nodes": 2}, "text")
            furnish(folder, {"config.yaml": config.encode(), **documents()})
            rehearse_unbroken(made)
            yield made
        finally:
            empty(made)


@cache
def can_unshare() -> bool:
    """Returns whether this process can start a command in a separate mount namespace."""
    words = ["unshare", "--mount", "true"]
    return (
        shutil.which(words[0]) is not None
        and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )


@contextmanager
def own_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yields this user's rehearsal folder, and removes it afterwards. Raises BackendError if
    another rehearsal is running, or if the folder belongs to another user.
    """
    folder = (
        parent or Path(tempfile.gettempdir()).resolve()
    ) / f"trainfleet-rehearsal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise BackendError(
            "the rehearsal folder belongs to another user",
            where=str(folder),
            next=f"ls -ld {folder}",
        )
    lock = take_lock(folder)
    if lock is None:
        raise BackendError(
            "another rehearsal is running",
            where=str(folder),
            next="wait until it ends, or stop it with Ctrl-C",
        )
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def empty(made: RehearsalStage) -> None:
    """Kills all processes in the stage's folder, including those of a killed rehearsal, and removes
    everything but the lock.
    """
    for pid in made.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for folder in made.folder.glob("runs/*/checkpoints"):
        folder.chmod(0o755)
    for path in made.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != "lock":
            path.unlink(missing_ok=True)


def rehearse_unbroken(made: RehearsalStage) -> None:
    """Runs the fault-free baseline and stores its losses in the stage. Raises RunError if the run
    fails.
    """
    process = made.begin("whole")
    if code := made.end(process):
        said = [
            str(event.get("words", ""))
            for event in made.events("whole")
            if event["event"] == "verdict"
        ]
        why = "\n".join(said) or f"it ended with exit code {code}: {made.said.strip()[-800:]}"
        raise RunError(
            "the unbroken run failed before any fault was caused",
            where=str(made.folder),
            why=why,
            next="make doctor",
        )
    made.whole = made.losses("whole")
