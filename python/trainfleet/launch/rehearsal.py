"""Fault rehearsal: injects faults into short separate runs, and measures detection time, verdict,
cost and leftovers.

A rehearsal works in one temporary folder outside the user's runs, and starts its runs with the
ordinary `make train`. Their ranks inject the faults (health/faults.py). At the end, the runs are
ended and all files are removed, even after Ctrl-C. After kill -9, a guard process does that. If
this machine dies, the runs continue to their end, and the next rehearsal removes the files.

Links and heads are only disrupted on hosts that are reached by SSH (rehearsal_hosts.py).
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ..backends import backend_of
from ..backends.base import Backend, Can, Handle, load_job
from ..config import Config
from ..health.faults import BREAK_AT, LINKS, LONGEST, OWN_HEAD, PREFIX, RANK, VARIABLE
from ..process.install_paths import CODE
from ..process.processes import die_with_parent
from ..run.run_folder import Record, Run, run_of, take_lock
from ..storage import s3
from ..trust.errors import BackendError, RunError

WHOLE = "whole"  # name of the fault-free run
# Steps in the run on this machine and elsewhere, where progress is seen only seconds later, and
# steps between checkpoints
STEPS, LONGER, EVERY = 120, 240, 20
PATIENCE = 1800.0  # timeout in seconds for a command, including its queue time
LEFT_WITHIN = 60.0  # timeout in seconds for all processes to end, including a scheduler's cleanup
APART = 5.0  # maximum lag of a host's clock behind this machine's, in seconds
LAG = 60.0  # seconds by which detection may be later on other machines
SEEN = 30.0  # seconds until a node's record or a launcher's death is known everywhere
# Name of the folder in a shared folder or bucket, unique per user and machine.
OWN = f"rehearsal-{platform.node()}-{os.getuid()}"
LACKING = {
    LINKS: "only the links of hosts reached by SSH can be cut",
    OWN_HEAD: "only a head reached by SSH can be lost; launcher-killed tests a similar fault",
}
# Keys that the rehearsal's config copies from the user's fleet.
KEPT = (
    "backend", "platform", "python", "slurm", "aws", "batch", "sagemaker", "options",
    "instance_type", "accelerator", "container", "container_base",
)  # fmt: skip


def config_of_run(
    fleet: Mapping[str, object],
    text: str,
    steps: int = STEPS,
    tokenized: str | None = None,
    checkpoints: str | None = None,
) -> str:
    """Returns a short run's config.yaml for this fleet, with training text from the folder `text`.
    `tokenized` and `checkpoints` are addresses in S3.
    """
    return yaml.safe_dump(
        plain(
            {
                "name": f"{PREFIX}{WHOLE}",
                "data": {
                    "name": "text",
                    "sources": [text],
                    "vocab_size": 340,
                    "validation_fraction": 0.1,
                    "tokenized_path": tokenized,
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
                    "global_batch_size": 4 * int(str(fleet["nodes"])),
                    "sequence_length": 32,
                    "log_every": 1,
                    "validate_every": 0,
                    "warmup_steps": 20,
                    "schedule_steps": LONGEST,
                },
                "checkpoint": {"every": EVERY, "path": checkpoints},
                "fleet": dict(fleet),
            }
        )
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


def furnish(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files to a folder, keyed by relative path."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def plain(value: Any) -> Any:
    """Converts a value for YAML: tuples become lists, and unset keys are dropped."""
    if isinstance(value, dict):
        return {
            key: plain(inner) for key, inner in value.items() if inner is not None and inner != ()
        }
    return [plain(inner) for inner in value] if isinstance(value, tuple) else value


def kept(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """Returns these keys of the user's fleet, without those that are not set."""
    return plain({key: value for key, value in asdict(config.fleet).items() if key in keys})  # type: ignore[no-any-return]


@dataclass
class RehearsalStage:
    """Environment for injecting faults into runs: a folder in which `type` runs commands as a user
    would, and the nodes of the user's config.
    """

    folder: Path
    config: Config  # the user's config
    # features that this stage lacks, with reasons
    lacking: Mapping[str, str]
    # losses of the fault-free baseline run, by step
    whole: Mapping[int, float] = field(default_factory=dict)
    said: str = ""  # output of the last finished command

    @property
    def backend(self) -> Backend:
        return backend_of(self.config)

    @property
    def lag(self) -> float:
        return 0.0 if self.backend.is_here else LAG

    @property
    def prefixes(self) -> list[str]:
        """Returns the stage's folders for the run, the dataset and the checkpoints in S3, or an
        empty list if the nodes share a folder.
        """
        if Can.SHARED in self.backend.can:
            return []
        fleet, data, checkpoint = self.config.fleet, self.config.data, self.config.checkpoint
        roots = fleet.shared_folder, data.tokenized_path, checkpoint.path
        return [f"{str(root).rstrip('/')}/{OWN}" for root in roots]

    def furnish(self) -> None:
        """Writes the config and the training text."""
        fleet = kept(self.config, KEPT) | {"nodes": 2, "ranks_per_node": 1}
        steps = STEPS if self.backend.is_here else LONGER
        if not self.prefixes:
            files = documents() | {"config.yaml": config_of_run(fleet, "text", steps).encode()}
            return furnish(self.folder, files)
        root, tokenized, checkpoints = self.prefixes
        for name, content in documents().items():
            s3.write(f"{root}/{name}", content)
        fleet["shared_folder"] = root
        text = config_of_run(fleet, f"{root}/text", steps, tokenized, checkpoints)
        furnish(self.folder, {"config.yaml": text.encode()})

    def run(self, name: str) -> Run:
        """Returns the run for the fault `name`."""
        return Run(run_of(PREFIX + name, self.folder / "runs").folder)

    def begin(self, name: str, words: str = "", plays: bool = False) -> subprocess.Popen[str]:
        """Starts `make train` for the run `name`. `words` contains additional config overrides. If
        `plays` is set, the run's ranks inject the fault.
        """
        return self.type(
            "train", name, words, {VARIABLE: f"{name}@{BREAK_AT}:{RANK}"} if plays else {}
        )

    def type(
        self, verb: str, name: str, words: str = "", more: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[str]:
        """Starts the command `verb` for the run `name`. Returns its process."""
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("MAKE", "TRAINFLEET"))
        }
        path = (str(CODE), *filter(None, [os.environ.get("PYTHONPATH")]))
        environment = {"PYTHONPATH": os.pathsep.join(path), "NO_COLOR": "1", **more}
        return subprocess.Popen(
            [sys.executable, "-m", "trainfleet", verb, f"SET=name={PREFIX}{name} {words}"],
            cwd=self.folder,
            env=inherited | environment,
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
            self.said = process.communicate(timeout=PATIENCE)[0]
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
        return [event for event in self.run(name).read_events() if event["time"] >= since - APART]

    def await_step(self, name: str, process: subprocess.Popen[str], step: int = BREAK_AT) -> None:
        """Waits until the run has logged the given step. Raises RunError if the run ends earlier or
        times out.
        """
        until = time.monotonic() + PATIENCE
        while max(self.losses(name), default=0) < step:
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                said = process.communicate()[0]
                what = f"the run {name} never reached step {step}"
                raise RunError(what, where=str(self.folder), why=said[-400:], next="make logs")
            time.sleep(0.05)

    def struck(self, name: str) -> float:
        """Returns when a rank injected the fault, by its clock. Raises RunError if no rank did."""
        until = time.monotonic() + SEEN
        while True:
            for event in self.events(name):
                if event["event"] == "struck":
                    return float(event["time"])
            if time.monotonic() > until:
                what, then = f"no rank injected the fault {name}", "run make rehearse again"
                raise RunError(what, where=str(self.folder), why=self.said[-800:], next=then)
            time.sleep(0.2)

    def shape(self, name: str, rate: str, seconds: int) -> str:
        """Limits the traffic from node 1's host to `rate` for `seconds` seconds, using tc. Returns
        "" on success, or the reason if that fails.
        """
        return self.lacking[LINKS]

    def free(self) -> None:
        """Removes the traffic limits that `shape` has set."""

    def lose_head(self, name: str) -> str:
        """Kills the run's processes on its head, including the launcher. Returns the head's name.
        Raises RunError if the stage has no separate head.
        """
        what, why = f"the fault {name} can't be caused here", self.lacking[OWN_HEAD]
        raise RunError(what, where=str(self.folder), why=why, next="make rehearse")

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

    def jobs(self) -> list[Handle]:
        """Returns the jobs of the stage's runs that have not ended."""
        found = [load_job(Run(folder)) for folder in self.folder.glob("runs/*")]
        return [job[0] for job in found if job and not self.backend.status(job[0]).ended]

    def at_work(self) -> Sequence[object]:
        """Returns the stage's remaining processes and jobs, or the hosts that still run them."""
        return [*self.processes(), *self.jobs()]

    def left_over(self) -> Sequence[object]:
        """Waits up to LEFT_WITHIN seconds for the stage's runs to end. Returns the leftovers."""
        until = time.monotonic() + LEFT_WITHIN
        while (found := self.at_work()) and time.monotonic() < until:
            time.sleep(0.2)
        return found

    def end_all(self) -> None:
        """Ends the runs, including those of a killed rehearsal, and removes the nodes' files."""
        for job in self.jobs():
            self.backend.stop(job, at_once=True)
        for prefix in self.prefixes:
            s3.remove_all(found.address for found in s3.list_objects(f"{prefix}/"))

    def clear(self) -> None:
        """Ends all runs and processes, and removes everything but the lock."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.end_all()
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "lock":
                path.unlink(missing_ok=True)


@contextmanager
def prepared(made: RehearsalStage) -> Iterator[RehearsalStage]:
    """Yields the stage holding the training data and the losses of a fault-free baseline run.
    Removes its files, processes and jobs on exit.

    Raises:
        BackendError: something can't be removed, or a host can't be reached.
        RunError: the baseline run failed.
    """
    with _guarded(made):
        made.clear()
        made.furnish()
        rehearse_unbroken(made)
        yield made


@contextmanager
def _guarded(made: RehearsalStage) -> Iterator[None]:
    """Clears the stage on exit. If this process is killed, a child process clears the stage."""
    reader, writer = os.pipe()
    if (guard := os.fork()) == 0:
        os.setsid()
        os.close(writer)
        for descriptor in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        try:
            if not os.read(reader, 1):
                made.clear()
        finally:
            shutil.rmtree(made.folder, ignore_errors=True)
            os._exit(0)
    os.close(reader)
    try:
        yield
    finally:
        made.clear()
        os.write(writer, b".")
        os.close(writer)
        os.waitpid(guard, 0)


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """Yields this user's rehearsal folder, and removes it afterwards. Raises BackendError if
    another rehearsal is running, or if the folder belongs to another user.
    """
    folder = parent / f"trainfleet-rehearsal-{os.getuid()}"
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


def rehearse_unbroken(made: RehearsalStage) -> None:
    """Runs the fault-free baseline and stores its losses in the stage. Raises RunError if the run
    fails.
    """
    process = made.begin(WHOLE)
    if code := made.end(process):
        said = [
            str(event.get("words", ""))
            for event in made.events(WHOLE)
            if event["event"] == "verdict"
        ]
        why = "\n".join(said) or f"it ended with exit code {code}: {made.said.strip()[-800:]}"
        raise RunError(
            "the unbroken run failed before any fault was caused",
            where=str(made.folder),
            why=why,
            next="make doctor",
        )
    made.whole = made.losses(WHOLE)
