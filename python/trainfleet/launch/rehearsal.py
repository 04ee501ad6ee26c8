"""Plays a short separate run, broken on purpose, and measures it: noticed when, judged how, what it
cost, what is left.

All of it is in one folder outside the user's runs, which is made for it and goes with it. Every
process of it dies with this one, so it is gone also after kill -9; the folder that such a death
leaves behind is emptied by the next rehearsal.

It covers nodes that this machine plays, with real torchruns. Hosts and Slurm have other stages:
rehearsal_hosts.py, rehearsal_steps.py.
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

# steps of the run, between two checkpoints, and done when it is broken
STEPS, EVERY, BREAK_AT = (120, 20, 50)
LONGER = 400  # steps, where what nodes do is seen here some seconds later
LONGEST = 8000  # steps, of a run that is stopped once a fault is noticed
PATIENCE = 480.0  # seconds that one command may take
LEFT_WITHIN = 10.0  # seconds in which every process must be gone
APART = 5.0  # seconds that a host's clock may be behind this machine's
SITE = "site"  # the folder of what the nodes' Pythons run when they start
STRUCK = "struck"  # what a command says that has broken something
# One thread: a model this small gains nothing from more, and those of a busy node wait for each
# other.
PYTHON = """#!/bin/sh
export OMP_NUM_THREADS=1 PYTHONPATH={site}${{PYTHONPATH:+:$PYTHONPATH}}
exec {python} "$@"
"""
DAMAGE = """cd {checkpoints} && newest=$(ls -d step-* | sort | tail -n 1) &&
file=$(find "$newest" -type f -printf '%s %p\\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-) &&
truncate -s $(( $(stat -c %s "$file") / 2 )) "$file" && echo struck"""
REMOVE = "[ ! -e {folder} ] || chmod -R u+w {folder}; rm -rf {folder}"
PARENT = "p=$(sed 's/.*) //' /proc/$p/stat | cut -d ' ' -f 2); "
OWN_LINKS = "nodes that one machine plays have no separate links"
# What faults need (faults.Fault.needs), and a stage may lack, beside base.py's LINKS and OWN_HEAD:
# nodes enough to continue without one, or to call one slow, a network that tc can slow, a Python
# that can be changed, mounts that go with the run.
SPARE, MAJORITY, KERNEL = "spare", "majority", "kernel network"
PYTHON_OF_NODES, MOUNTS = "python", "mounts"
LACKING = {LINKS: OWN_LINKS, OWN_HEAD: "the head is this machine; launcher-killed is near it"}


def config_of_run(
    fleet: Mapping[str, object], text: str, batch: int = 8, steps: int = STEPS
) -> str:
    """The config.yaml of a short run on this fleet, of the documents in the folder `text`."""
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
    """Returns the text that the run learns from: forty small files by their path in the stage's
    folder.
    """
    lines = {
        number: " ".join(f"word{(number * step) % 97} is {step}." for step in range(60))
        for number in range(40)
    }
    return {
        f"text/{number}.txt": f"Document {number}. {words}\n".encode()
        for number, words in lines.items()
    }


def python_of(place: str, interpreter: str) -> bytes:
    """The Python of nodes that this machine does not start: the one there, which looks into SITE
    first (Stage.alter).
    """
    return PYTHON.format(site=quote(f"{place}/{SITE}"), python=quote(interpreter)).encode()


def furnish(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files by their path in a folder; a script may be executed."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o755 if content.startswith(b"#!") else 0o644)


def plain(value: Any) -> Any:
    """Values as YAML has them, without those that are not there."""
    if isinstance(value, dict):
        return {
            key: plain(inner) for key, inner in value.items() if inner is not None and inner != ()
        }
    return [plain(inner) for inner in value] if isinstance(value, tuple) else value


@dataclass
class RehearsalStage:
    """The folder in which runs are broken: `type` enters a command there, as a user would. This
    machine plays the nodes.

    What other nodes do otherwise: `place`, `at_rank`, `on_head`, `let_write`, `at_work`; and what
    only they can, as `shape`.
    """

    folder: Path
    # what faults need and is not here, and why
    lacking: Mapping[str, str] = field(default_factory=lambda: LACKING)
    # the losses of a run that nothing happens to
    whole: Mapping[int, float] = field(default_factory=dict)
    said: str = ""  # by the command that ended last

    steps: ClassVar[int] = STEPS
    patience: ClassVar[float] = PATIENCE
    apart: ClassVar[float] = 0.0  # seconds that the clocks of its nodes may be behind this one's
    things: ClassVar[str] = "processes"  # that could be left over
    left_within: ClassVar[float] = LEFT_WITHIN
    outlives: ClassVar[bool] = False  # a run continues without the command that launched it

    @property
    def place(self) -> str:
        """The stage's folder, as nodes see it."""
        return str(self.folder)

    def called(self, name: str) -> str:
        """The name of the run in which the fault `name` is played."""
        return name

    def run(self, name: str) -> Run:
        return Run(run_of(self.called(name), self.folder / "runs").folder)

    def checkpoints(self, name: str) -> str:
        """The folder of a run's checkpoints, as a word of a shell on a node."""
        return quote(f"{self.place}/runs/{self.called(name)}/checkpoints")

    def begin(self, name: str, words: str = "") -> subprocess.Popen[str]:
        """`make train` of the run called `name`; `words` are further keys."""
        return self.type("train", name, words)

    def type(self, verb: str, name: str, words: str = "") -> subprocess.Popen[str]:
        """The process of a verb on the run called `name`."""
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
        """The exit code of a command, once it has ended; a command that does not end in time is
        killed, and counts as 124.
        """
        try:
            self.said = process.communicate(timeout=self.patience)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            self.said = process.communicate()[0]
            return 124
        return process.returncode

    def again(self, name: str, words: str = "") -> int:
        """The exit code of the same command, typed once more."""
        return self.end(self.begin(name, words))

    def stop(self, name: str, process: subprocess.Popen[str]) -> None:
        """Ends a run as its user would, with a checkpoint."""
        self.end(self.type("stop", name))
        self.end(process)

    def losses(self, name: str) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.run(name).read_metrics()}

    def events(self, name: str, since: float = 0.0) -> list[Record]:
        return [
            event for event in self.run(name).read_events() if event["time"] >= since - self.apart
        ]

    def await_step(self, name: str, process: subprocess.Popen[str], step: int = BREAK_AT) -> None:
        """Returns when the run has logged that step; RunError where it ended before, or the step
        never came.
        """
        until = time.monotonic() + self.patience
        while max(self.losses(name), default=0) < step:
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                said = process.communicate()[0]
                what = f"the run {name} never came to step {step}"
                raise RunError(what, where=str(self.folder), why=said[-400:], next="make logs")
            time.sleep(0.05)

    def at_rank(self, name: str, command: str) -> str:
        """Returns the output of a shell's command on rank 1's machine: its process is $p, the run's
        checkpoints are in $c.

        Raises:
            RunError: it is nowhere.
        """
        return self.on_head(self.words_at_rank(name, command))

    def words_at_rank(self, name: str, command: str) -> str:
        """The command with $p and $c, where the run's folder is at hand; RunError where rank 1 has
        no heartbeat.
        """
        folder = self.run(name).folder
        beat = read_beats(folder, fence.current(folder).number).get(1)
        if beat is None:
            raise RunError(
                f"rank 1 of {name} has no heartbeat", where=str(folder), next="make rehearse again"
            )
        return f"p={beat.pid} c={self.checkpoints(name)}\n{command}"

    def on_head(self, command: str) -> str:
        """Returns the output of a shell's command on the machine with the stage's folder."""
        return subprocess.run(
            ["sh", "-c", command], cwd="/", capture_output=True, text=True, check=False
        ).stdout.strip()

    def strike(self, name: str, whom: str, number: signal.Signals) -> None:
        """Sends a signal to rank 1, or to the torchrun `agent` that is its parent. Raises RunError
        if that process is nowhere.
        """
        parent = PARENT if whom == "agent" else ""
        self.require(name, self.at_rank(name, f"{parent}kill -{number.value} $p && echo {STRUCK}"))

    def damage(self, name: str) -> None:
        """Cuts the largest file of the newest checkpoint in half. Raises RunError if no checkpoint
        is there.
        """
        self.require(name, self.on_head(DAMAGE.format(checkpoints=self.checkpoints(name))))

    def alter(self, name: str, program: str) -> None:
        """Has the nodes' Pythons run a program when they start, until `restore`; RunError where it
        could not be written.
        """
        site = quote(f"{self.place}/{SITE}")
        words = (
            f"mkdir -p {site} && printf %s {quote(program)} > {site}/sitecustomize.py "
            f"&& echo {STRUCK}"
        )
        self.require(name, self.on_head(words))

    def restore(self) -> None:
        """Has the nodes' Pythons be as they were."""
        self.on_head(f"rm -rf {quote(f'{self.place}/{SITE}')}")

    def let_write(self, name: str) -> None:
        """Has the checkpoints' folder be as it was."""
        self.on_head(f"chmod 755 {self.checkpoints(name)}")

    def require(self, name: str, said: str) -> None:
        """Raises RunError where a command that breaks something has said anything but STRUCK."""
        if said != STRUCK:
            why = said[-400:] or "its node says nothing"
            raise RunError(
                f"{name} could not be played", where=self.place, why=why, next="make rehearse again"
            )

    @property
    def alone(self) -> list[str]:
        """The words before a command by which what it mounts goes with it: only root needs them
        (faults.READ_ONLY).
        """
        return (
            ["unshare", "--mount"]
            if os.getuid() == 0 and not self.outlives and can_unshare()
            else []
        )

    def shape(self, name: str, rate: str, seconds: int) -> str:
        """Has tc send what rank 1's host sends at this rate, for that many seconds; why that can't
        be, or "".
        """
        return self.lacking[LINKS]

    def free(self) -> None:
        """Has the links be as they were."""

    def lose_head(self, name: str) -> str:
        """Kills all of the run on its head, the launcher too; the head's name. RunError where it is
        not this user's to kill.
        """
        raise RunError(
            f"{name} can't be played",
            where=self.place,
            why=self.lacking[OWN_HEAD],
            next="make rehearse",
        )

    def processes(self) -> list[int]:
        """Every process of this machine that works in the folder."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "cwd").readlink() == self.folder and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found

    def at_work(self) -> Sequence[object]:
        """Returns the existing ones of `things`."""
        return self.processes()

    def left_over(self) -> Sequence[object]:
        """Of `things`, those that are still there when all should be gone."""
        until = time.monotonic() + self.left_within
        while (found := self.at_work()) and time.monotonic() < until:
            time.sleep(0.2)
        return found


@contextmanager
def stage() -> Iterator[RehearsalStage]:
    """A stage with data and the losses of an unbroken run; leaves no file or process behind.

    Raises:
        BackendError: another rehearsal of this user is under way.
        RunError: even the unbroken run failed.
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
    """Tells whether a command can have separate mounts."""
    words = ["unshare", "--mount", "true"]
    return (
        shutil.which(words[0]) is not None
        and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )


@contextmanager
def own_folder(parent: Path | None = None) -> Iterator[Path]:
    """A folder of this user's rehearsals, which goes with the block; BackendError while another of
    them is under way.
    """
    folder = (
        parent or Path(tempfile.gettempdir()).resolve()
    ) / f"trainfleet-rehearsal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise BackendError(
            "the folder of rehearsals is not yours", where=str(folder), next=f"ls -ld {folder}"
        )
    lock = take_lock(folder)
    if lock is None:
        raise BackendError(
            "another rehearsal is under way",
            where=str(folder),
            next="wait for it, or stop it with Ctrl-C",
        )
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def empty(made: RehearsalStage) -> None:
    """Ends what still runs in the folder, also of a rehearsal that was killed, and removes what is
    in it but the lock.
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
    """Plays the run to which nothing happens, and keeps its losses; RunError where even that one
    fails.
    """
    process = made.begin("whole")
    if code := made.end(process):
        said = [
            str(event.get("words", ""))
            for event in made.events("whole")
            if event["event"] == "verdict"
        ]
        why = "\n".join(said) or f"it ended with {code}: {made.said.strip()[-800:]}"
        raise RunError(
            "even the run that nothing happens to has failed",
            where=str(made.folder),
            why=why,
            next="make doctor",
        )
    made.whole = made.losses("whole")
