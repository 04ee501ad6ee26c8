"""A short run of its own, broken on purpose, and what is measured of it: noticed when, judged how, what it cost, what is left.

All of it is in one folder outside the user's runs, which is made for it and goes with it. Every process of it dies with this one,
so it is gone also after kill -9; the folder that such a death leaves behind is emptied by the next rehearsal.

What is covered: nodes that this machine plays, real torchruns. What is not: links, hosts and engines of a fleet.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .. import fence
from ..backends import backend_of
from ..beats import read_beats
from ..config import Config
from ..errors import BackendError, ConfigError, Problem, RunError
from ..origin import CODE
from ..processes import die_with_parent
from ..runs import Record, Run, run_of, take_lock

STEPS, EVERY, BREAK_AT = 120, 20, 50  # steps of the run, between two checkpoints, and done when it is broken
PATIENCE = 240.0  # seconds that one command may take
LEFT_WITHIN = 10.0  # seconds in which every process must be gone
CONFIG = f"""
name: whole
data: {{name: text, sources: [text], vocabulary_size: 340, validation_fraction: 0.1}}
model: {{layers: 4, hidden_size: 128, heads: 4, kv_heads: 2, intermediate_size: 256}}
train: {{steps: {STEPS}, precision: fp32, global_batch: 8, sequence_length: 32, log_every: 1, validate_every: 0}}
checkpoint: {{every: {EVERY}}}
fleet: {{backend: local, nodes: 2}}
"""


@dataclass(frozen=True)
class Outcome:
    """What became of one fault. `broken` are the promises that were not kept; `skipped` says why it could not be tried."""

    name: str
    noticed: float | None = None  # seconds after the fault
    verdict: str = "none"
    lost: int = 0  # steps done twice
    again: float | None = None  # seconds until ranks trained again
    broken: tuple[str, ...] = ()
    skipped: str = ""


@dataclass
class Stage:
    """The folder in which runs are broken: `type` enters a command there, as a user would."""

    folder: Path
    whole: Mapping[int, float] = field(default_factory=dict)  # the losses of a run that nothing happens to

    def run(self, name: str) -> Run:
        return Run(run_of(name, self.folder / "runs").folder)

    def begin(
        self, name: str, words: str = "", environment: Mapping[str, str] | None = None, limit: Callable[[], None] = lambda: None
    ) -> subprocess.Popen[str]:
        """`make train` of the run called `name`; `words` are further keys, `limit` is called in the new process first."""

        def prepare() -> None:
            die_with_parent()
            limit()

        package = str(CODE)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "TRAINFLEET"))}
        given = inherited | {"PYTHONPATH": package, "NO_COLOR": "1"} | dict(environment or {})
        if environment and "PYTHONPATH" in environment:
            given["PYTHONPATH"] = f"{environment['PYTHONPATH']}{os.pathsep}{package}"
        return subprocess.Popen(
            [sys.executable, "-m", "trainfleet", "train", f"SET=name={name} {words}"], cwd=self.folder, env=given, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=prepare,
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str]) -> int:
        """The exit code of a command, once it has ended; a command that does not end in time is killed, and counts as 124."""
        try:
            process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
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
        until = time.monotonic() + PATIENCE
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

    def events(self, name: str, since: float = 0.0) -> list[Record]:
        return [event for event in self.run(name).read_events() if event["time"] >= since]

    def processes(self) -> list[int]:
        """Every process that works in the folder."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "cwd").readlink() == self.folder and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found

    def left_over(self) -> list[int]:
        """The processes that are still there when all should be gone."""
        until = time.monotonic() + LEFT_WITHIN
        while (found := self.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        return found


def require_here(config: Config) -> None:
    """ConfigError where the nodes are not this machine's: faults are not played on hosts yet."""
    if not backend_of(config).is_here:
        message = "hosts can't be rehearsed on yet: faults are played on this machine, on nodes that it plays"
        raise ConfigError([Problem(0, "", "fleet.backend", message)], next="make rehearse SET='fleet.backend=local'")


@contextmanager
def stage() -> Iterator[Stage]:
    """A stage with data and the losses of an unbroken run; nothing of it is left behind.

    Raises:
        BackendError: another rehearsal of this user is under way.
        RunError: even the unbroken run failed.
    """
    folder = Path(tempfile.gettempdir()).resolve() / f"trainfleet-rehearsal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise BackendError("the folder of rehearsals is not yours", where=str(folder), next=f"ls -ld {folder}")
    lock = take_lock(folder)
    if lock is None:
        raise BackendError("another rehearsal is under way", where=str(folder), next="wait for it, or stop it with Ctrl-C")
    made = Stage(folder)
    with lock:
        try:
            _empty(made)
            _furnish(made)
            yield made
        finally:
            _empty(made)
            shutil.rmtree(folder, ignore_errors=True)


def _empty(made: Stage) -> None:
    """Ends what still runs in the folder, also of a rehearsal that was killed, and removes what is in it but the lock."""
    for pid in made.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in made.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != "lock":
            path.unlink(missing_ok=True)


def _furnish(made: Stage) -> None:
    (made.folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    (made.folder / "text").mkdir()
    for number in range(40):
        words = " ".join(f"word{(number * step) % 97} is {step}." for step in range(60))
        (made.folder / "text" / f"{number}.txt").write_text(f"Document {number}. {words}\n", encoding="utf-8")
    process = made.begin("whole")
    if made.end(process):
        why = "\n".join(str(event.get("words", "")) for event in made.events("whole") if event["event"] == "verdict")
        raise RunError("even the run that nothing happens to has failed", where=str(made.folder), why=why, next="make doctor")
    made.whole = made.losses("whole")
