"""A short run of its own, broken on purpose, and what is measured of it: noticed when, judged how, what it cost, what is left.

All of it is in one folder outside the user's runs, which is made for it and goes with it. Every process of it dies with this one,
so it is gone also after kill -9; the folder that such a death leaves behind is emptied by the next rehearsal.

What is covered: nodes that this machine plays, real torchruns. Hosts and Slurm have stages of their own: rehearsal_hosts.py,
rehearsal_slurm.py.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from .. import fence
from ..beats import read_beats
from ..errors import BackendError, RunError
from ..origin import CODE
from ..processes import die_with_parent
from ..runs import Record, Run, run_of, take_lock

STEPS, EVERY, BREAK_AT = 120, 20, 50  # steps of the run, between two checkpoints, and done when it is broken
LONGER = 400  # steps, where what nodes do is seen here some seconds later
LONGEST = 8000  # steps, of a run that is stopped once a fault is noticed
PATIENCE = 240.0  # seconds that one command may take
LEFT_WITHIN = 10.0  # seconds in which every process must be gone
STRUCK = "struck"  # what a command says that has broken something
PARENT = "p=$(sed 's/.*) //' /proc/$p/stat | cut -d ' ' -f 2); "
OWN_LINKS = "nodes that one machine plays have no links of their own"
LACKING = {"link-cut": OWN_LINKS, "link-slowed": OWN_LINKS, "head-lost": "the head is this machine; launcher-killed is near it"}


def config_of_run(fleet: Mapping[str, object], text: str, batch: int = 8, steps: int = STEPS) -> str:
    """The config.yaml of a short run on this fleet, of the documents in the folder `text`."""
    return yaml.safe_dump(
        {
            "name": "whole",
            "data": {"name": "text", "sources": [text], "vocabulary_size": 340, "validation_fraction": 0.1},
            "model": {"layers": 4, "hidden_size": 128, "heads": 4, "kv_heads": 2, "intermediate_size": 256},
            "train": {"steps": steps, "precision": "fp32", "global_batch": batch, "sequence_length": 32, "log_every": 1,
                      "validate_every": 0, "warmup_steps": 20, "schedule_steps": LONGEST},
            "checkpoint": {"every": EVERY},
            "fleet": dict(fleet),
        }
    )  # fmt: skip


def documents() -> dict[str, str]:
    """What the run learns from: forty small files by name."""
    lines = {number: " ".join(f"word{(number * step) % 97} is {step}." for step in range(60)) for number in range(40)}
    return {f"{number}.txt": f"Document {number}. {words}\n" for number, words in lines.items()}


@dataclass
class Stage:
    """The folder in which runs are broken: `type` enters a command there, as a user would."""

    folder: Path
    whole: Mapping[int, float] = field(default_factory=dict)  # the losses of a run that nothing happens to
    steps: int = STEPS
    patience: float = PATIENCE
    apart: float = 0.0  # seconds that the clocks of its nodes may be behind this one's
    things: str = "processes"  # that could be left over
    outlives: bool = False  # a run goes on without the command that launched it
    said: str = ""  # by the command that ended last

    def lacks(self, fault: str) -> str:
        """Why a fault can't be played here, or ""."""
        return LACKING.get(fault, "")

    def called(self, name: str) -> str:
        """The name of the run in which the fault `name` is played."""
        return name

    def run(self, name: str) -> Run:
        return Run(run_of(self.called(name), self.folder / "runs").folder)

    def begin(
        self, name: str, words: str = "", environment: Mapping[str, str] | None = None, limit: Callable[[], None] = lambda: None
    ) -> subprocess.Popen[str]:
        """`make train` of the run called `name`; `words` are further keys, `limit` is called in the new process first."""

        def prepare() -> None:
            die_with_parent()
            limit()

        return self.type("train", name, words, environment, prepare)

    def type(
        self,
        verb: str,
        name: str,
        words: str = "",
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] = die_with_parent,
    ) -> subprocess.Popen[str]:
        """The process of a verb on the run called `name`."""
        package = str(CODE)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "TRAINFLEET"))}
        given = inherited | {"PYTHONPATH": package, "NO_COLOR": "1"} | dict(environment or {})
        if environment and "PYTHONPATH" in environment:
            given["PYTHONPATH"] = f"{environment['PYTHONPATH']}{os.pathsep}{package}"
        command = [*self.alone, sys.executable, "-m", "trainfleet", verb, f"SET=name={self.called(name)} {words}"]
        return subprocess.Popen(
            command, cwd=self.folder, env=given, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=prepare,
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str]) -> int:
        """The exit code of a command, once it has ended; a command that does not end in time is killed, and counts as 124."""
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

    def losses(self, name: str) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.run(name).read_metrics()}

    def await_step(self, name: str, process: subprocess.Popen[str], step: int = BREAK_AT) -> None:
        """Returns when the run has logged that step.

        Raises:
            RunError: it ended before, or the step never came.
        """
        until = time.monotonic() + self.patience
        while max(self.losses(name), default=0) < step:
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                said = process.communicate()[0]
                raise RunError(
                    f"the run {name} never came to step {step}", where=str(self.folder), why=said[-400:], next="make logs"
                )
            time.sleep(0.05)

    def pid_of(self, name: str, rank: int) -> int:
        """The process of a rank, from its heartbeat.

        Raises:
            RunError: it has none.
        """
        folder = self.run(name).folder
        beats = read_beats(folder, fence.current(folder).number)
        if rank not in beats:
            raise RunError(f"rank {rank} of {name} has no heartbeat", where=str(folder), next="make rehearse again")
        return beats[rank].pid

    def strike(self, name: str, whom: str, number: signal.Signals) -> None:
        """A signal to rank 1, or to the torchrun `agent` that is its parent.

        Raises:
            RunError: it is nowhere.
        """
        parent = PARENT if whom == "agent" else ""
        self.require(self.at_rank(name, f"{parent}kill -{number.value} $p && echo {STRUCK}"), name)

    def at_rank(self, name: str, command: str) -> str:
        """What a shell's command says on rank 1's machine: its process is $p, the run's checkpoints are in $c.

        Raises:
            RunError: it is nowhere.
        """
        words = self.words_at_rank(name, command)
        return subprocess.run(["sh", "-c", words], cwd="/", capture_output=True, text=True, check=False).stdout.strip()

    def words_at_rank(self, name: str, command: str) -> str:
        """The command with $p and $c, where the run's folder is at hand."""
        return f"p={self.pid_of(name, 1)} c={shlex.quote(str(self.run(name).checkpoints))}\n{command}"

    def require(self, said: str, name: str) -> None:
        """Raises RunError where a command that breaks something has said anything but STRUCK."""
        if said != STRUCK:
            raise RunError(f"{name} could not be played", where=str(self.folder), why=said[-400:], next="make rehearse again")

    def alter(self, name: str, program: str) -> Mapping[str, str]:
        """Has the nodes' Pythons run a program when they start, until `restore`; what the command's environment needs for it."""
        folder = self.folder / f"{name}.site"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(program, encoding="utf-8")
        return {"PYTHONPATH": str(folder)}

    def restore(self) -> None:
        """Has the nodes' Pythons be as they were."""

    def let_write(self, name: str) -> None:
        """Has the checkpoints' folder be as it was."""
        self.run(name).checkpoints.chmod(0o755)

    @property
    def alone(self) -> list[str]:
        """The words before a command by which what it mounts goes with it: only root needs them (faults.READ_ONLY)."""
        return ["unshare", "--mount"] if os.getuid() == 0 and not self.outlives and can_unshare() else []

    def is_right(self, verdict: Record, rank: int) -> bool:
        """Whether a verdict blames the node of that rank: each node has one."""
        return bool(verdict["node"] == rank)

    def shape(self, name: str, rate: str, seconds: int) -> str:
        """Has tc send what rank 1's host sends at this rate, for so many seconds; why that can't be, or ""."""
        return self.lacks(name)

    def free(self) -> None:
        """Has the links be as they were."""

    def lose_head(self, name: str) -> None:
        """Kills all of the run on its head, the launcher too.

        Raises:
            RunError: the head is not this user's to kill.
        """
        raise RunError(f"{name} can't be played", where=str(self.folder), why=self.lacks(name), next="make rehearse")

    def stop(self, name: str, process: subprocess.Popen[str]) -> None:
        """Ends a run as its user would, with a checkpoint."""
        process.send_signal(signal.SIGINT)
        self.end(process)

    def damage(self, name: str) -> None:
        """The largest file of the newest checkpoint loses its second half."""
        newest = max(self.run(name).checkpoints.glob("step-*"))
        largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)

    def events(self, name: str, since: float = 0.0) -> list[Record]:
        return [event for event in self.run(name).read_events() if event["time"] >= since - self.apart]

    def processes(self) -> list[int]:
        """Every process that works in the folder."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "cwd").readlink() == self.folder and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found

    def left_over(self) -> Sequence[object]:
        """What is still there when all should be gone: processes."""
        until = time.monotonic() + LEFT_WITHIN
        while (found := self.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        return found


@contextmanager
def stage() -> Iterator[Stage]:
    """A stage with data and the losses of an unbroken run; nothing of it is left behind.

    Raises:
        BackendError: another rehearsal of this user is under way.
        RunError: even the unbroken run failed.
    """
    with own_folder() as folder:
        made = Stage(folder)
        try:
            empty(made)
            (folder / "config.yaml").write_text(config_of_run({"backend": "local", "nodes": 2}, "text"), encoding="utf-8")
            (folder / "text").mkdir()
            for document, text in documents().items():
                (folder / "text" / document).write_text(text, encoding="utf-8")
            rehearse_unbroken(made)
            yield made
        finally:
            empty(made)


@cache
def can_unshare() -> bool:
    """Whether a command can have mounts of its own."""
    words = ["unshare", "--mount", "true"]
    return shutil.which(words[0]) is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0


@contextmanager
def own_folder(parent: Path | None = None) -> Iterator[Path]:
    """A folder of this user's rehearsals, for one of them at a time; it goes with the block.

    Raises:
        BackendError: another rehearsal of this user is under way.
    """
    folder = (parent or Path(tempfile.gettempdir()).resolve()) / f"trainfleet-rehearsal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise BackendError("the folder of rehearsals is not yours", where=str(folder), next=f"ls -ld {folder}")
    lock = take_lock(folder)
    if lock is None:
        raise BackendError("another rehearsal is under way", where=str(folder), next="wait for it, or stop it with Ctrl-C")
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def empty(made: Stage) -> None:
    """Ends what still runs in the folder, also of a rehearsal that was killed, and removes what is in it but the lock."""
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


def rehearse_unbroken(made: Stage) -> None:
    """Plays the run to which nothing happens, and keeps its losses.

    Raises:
        RunError: even that one failed.
    """
    process = made.begin("whole")
    if code := made.end(process):
        said = [str(event.get("words", "")) for event in made.events("whole") if event["event"] == "verdict"]
        why = "\n".join(said) or f"it ended with {code}: {made.said.strip()[-800:]}"
        raise RunError("even the run that nothing happens to has failed", where=str(made.folder), why=why, next="make doctor")
    made.whole = made.losses("whole")
