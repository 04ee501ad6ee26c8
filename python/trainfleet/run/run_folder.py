"""Run folder: file names and formats, shared by the control plane and the nodes.

runs/<name>/
  config.yaml  results.json  metrics.jsonl  report.html
  given.yaml             the user's config with SET and NODES applied; a resume reads it
  events/<writer>.jsonl  events (run/records.py)
  heartbeats/node-<i>    latest heartbeats of a node's ranks (health/heartbeat.py)
  heartbeats/attempts/   one file per attempt, for fencing (health/fence.py)
  heartbeats/dump        request for stack dumps (health/heartbeat.py)
  logs/node-<i>.log      output of a node's ranks
  logs/engine-<i>.log    the scheduler's log for a node without a log (backends/aws_managed.py)
  checkpoints/step-<8 digits>/
  huggingface/step-<8 digits>/
  tensorboard/  plots/*.png  profile/
  handle.json            the last submitted job; any process can query, follow or stop it
  request.json           the request for that job
  nodes/node-<i>         PID of a simulated node, next to its script and exit code
  stop                   stop request, kept until the ranks have stopped; begins with "engine:" if
                         only the scheduler requested it (a signal, a time limit)
  lock                   the launcher's flock while the job runs
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ..process import file_systems
from ..trust import untrusted_input
from ..trust.errors import InputError, RunError
from ..trust.redaction import hide_all
from ..trust.untrusted_input import show
from ..trust.validation import fit
from . import contents, records
from .records import FORMAT, LARGEST_LOG, Feed, Results, check_metric, require_object

RUNS = Path("runs")
DATA = Path("data")
# Environment variable with the path at which a scheduler has mounted the complete dataset.
MOUNTED = "TRAINFLEET_MOUNTED"
# Environment variable with a folder on the node's disk for a local copy of an S3 dataset.
COPY = "TRAINFLEET_COPY"
COMPILED = Path(".compiled")  # torch.compile cache, which can be regenerated
LOCK = contents.LOCK.name
LOG = re.compile(r"(?:node|engine)-([0-9]{1,9})\.log")
ENGINE = "engine:"  # prefix of a stop file written by a scheduler rather than a user
Record = records.Record


class Run:
    """A run folder's paths, and methods to read and write its files."""

    def __init__(self, folder: Path, writer: str = "") -> None:
        """Opens the run in `folder`.

        `writer` names the author of new events (run/records.py) and defaults to this host's
        launcher.
        """
        untrusted_input.seal(folder)
        self.folder, self.writer = folder, writer or records.launcher()
        self.config, self.given = folder / "config.yaml", folder / "given.yaml"
        self.results = folder / "results.json"
        self.metrics = folder / "metrics.jsonl"
        self.events = folder / "events"
        self.report = folder / "report.html"
        self.stop = folder / "stop"
        self.logs = folder / "logs"
        self.checkpoints = folder / "checkpoints"
        self.tensorboard = folder / "tensorboard"
        self.plots = folder / "plots"
        self.profile = folder / "profile"
        self.rehearsal = folder / "rehearsal.json"

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def document(self) -> Path:
        """Returns the config file that is used to resume this run.

        This is the user's config, or the resolved config if the user's is missing.
        """
        return self.given if self.given.exists() else self.config

    def ask_to_stop(self, engine: str = "") -> None:
        """Asks the ranks to save and stop at their next step. `engine` names the scheduler that
        requests the stop, or is "" for a user's request.
        """
        if not engine:
            with open(self.stop, "wb", opener=untrusted_input.opener):
                pass
        elif not self.stop.exists():
            # Replaced in one step, because an empty file is a user's request.
            file_systems.replace_file(self.stop, f"{ENGINE} {engine}\n".encode())

    def is_asked_to_stop(self) -> bool:
        """Returns whether the user has asked the run to stop."""
        try:
            return (
                untrusted_input.read_bytes(self.stop, untrusted_input.KIBIBYTE)[: len(ENGINE)]
                != ENGINE.encode()
            )
        # A link or folder with that name is not a stop request.
        except (OSError, InputError):
            return False

    def exported(self, step: int) -> Path:
        return self.folder / "huggingface" / step_name(step)

    def read_results(self) -> Record:
        """Returns the contents of results.json, or {} if the file does not exist.

        Raises:
            RunError: the run folder has another format.
            InputError: the file's contents are invalid.
        """
        results = read_json(self.results) or {}
        # Format 1 kept all events in one file.
        is_first = (self.folder / "events.jsonl").exists()
        if (found := 1 if is_first else results.get("format", FORMAT)) != FORMAT:
            raise RunError(
                f"has run folder format {show(found)}, but this program reads format {FORMAT}",
                where=str(self.folder),
                why="another version of trainfleet wrote it",
                next=f"use that version, or remove the folder: rm -r {self.folder}",
            )
        return dict(fit(Results, results, str(self.results), remedy(self.results)))

    def read_metrics(self) -> Iterator[Record]:
        """Yields the records in metrics.jsonl. Raises InputError for invalid lines.

        If several records have the same step, the last one counts.
        """
        return read_lines(self.metrics, check_metric)

    def update_results(self, **fields: Any) -> Record:
        """Atomically updates the given keys in results.json.

        This is safe because there is only one writer at a time: first the launcher, then rank 0,
        then the launcher again.
        """
        results = self.read_results() | {"format": FORMAT} | fields
        write_json(self.results, hide_all(results))
        return results

    def record(self, event: str, **fields: Any) -> None:
        """Appends an event defined in events.yaml to this writer's file."""
        make_folder(self.events)
        append_line(
            self.events / f"{self.writer}.jsonl", {"time": time.time(), "event": event, **fields}
        )

    def note(self, event: str, **fields: Any) -> None:
        """Records an event like `record`, but drops it if it can't be written."""
        with suppress(RunError):
            self.record(event, **fields)

    def read_events(self) -> list[Record]:
        """Returns the events from all writers, sorted by time."""
        return Feed(self.folder).new()


def run_of(name: str, root: Path = RUNS) -> Run:
    """Returns the run called `name`, whether or not its folder exists."""
    return Run(root / name)


def named_runs(file: str = "config.yaml") -> list[str]:
    """Returns the names of the run folders on this machine that contain `file`."""
    return [path.parent.name for path in RUNS.glob(f"*/{file}")]


def step_name(step: int) -> str:
    """Returns a step's folder name, such as step-00000100."""
    return f"step-{step:08d}"


def node_log(folder: Path, node: int) -> Path:
    """Returns the path of a node's rank output log in a run or dataset folder."""
    return contents.NODE_LOG.at(folder, node=node)


def job_log(folder: Path) -> Path:
    """Returns the path of the log for the batch script, srun and slurmstepd.

    Its parent folder must exist before submission. Otherwise, Slurm ends the job without a message.
    """
    return contents.JOB_LOG.at(folder)


def engine_log(folder: Path, node: int) -> Path:
    """Returns the path of the scheduler's log for a node that left no log
    (backends/aws_managed.py).
    """
    return contents.ENGINE_LOG.at(folder, node=node)


def logs_of(run: Run) -> list[Path]:
    """Returns the node logs, sorted by node."""
    found = [*run.logs.glob("node-*.log"), *run.logs.glob("engine-*.log")]
    named = {path: match for path in found if (match := LOG.fullmatch(path.name))}
    return sorted(filter(Path.is_file, named), key=lambda path: int(named[path][1]))


def scratch(log: Path) -> Path:
    """Returns the temporary folder for torchrun's copies of the ranks' output, which is removed
    when the node's process ends.
    """
    return log.with_suffix(".parts")


def write_atomic(path: Path, text: str, durable: bool = True) -> None:
    """Replaces a file atomically. After a power failure, the file contains either the old or the
    new text in full, unless `durable` is false.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file_systems.replace_file(path, text.encode(), durable)
    except OSError as error:
        raise unwritable(path, error) from error
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        file_systems.offered(lambda: os.fsync(descriptor))
    finally:
        os.close(descriptor)


def no_place(folder: Path) -> str:
    """Returns the reason why a command can't write output to this folder, or "" if it can."""
    if folder.parent.resolve() in (RUNS.resolve(), DATA.resolve()):
        return f"{folder.parent}/ is reserved for runs and datasets"
    there = next(
        one for one in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(one)
    )
    if not there.is_dir():
        return f"{there} is not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


REMEDIES = {
    errno.ENOSPC: "free some space (df -h .), then run the same command again",
    errno.EFBIG: (
        "run ulimit -f unlimited to remove the file size limit, then run the same command again"
    ),
    errno.EROFS: (
        "use a writable folder; the disk of this one is mounted read-only (findmnt -T {folder})"
    ),
    **dict.fromkeys(
        (errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
        "check what is at this path: ls -ld {folder} {path}",
    ),
}


def unwritable(path: Path, error: OSError) -> RunError:
    """Returns the error for an unwritable path, with its cause and a remedy."""
    then = REMEDIES.get(error.errno or 0, "make {folder} writable for your user: ls -ld {folder}")
    return RunError(
        f"can't write {path}",
        why=error.strerror or str(error),
        next=then.format(folder=path.parent, path=path),
    )


def make_folder(folder: Path) -> None:
    """Creates a folder unless it exists. Raises RunError on failure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error


def append_line(path: Path, record: Record) -> None:
    """Appends a JSON line in a single write, so that readers on this machine never see a partial
    line.

    If a full disk or power failure left a partial line at the end of the file, terminates that line
    first, so that it does not corrupt the new one.
    """
    try:
        with open(path, "ab+", opener=untrusted_input.opener) as file:
            torn = (
                file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            )
            file.write(b"\n" * bool(torn) + json.dumps(hide_all(record)).encode() + b"\n")
    except OSError as error:
        raise unwritable(path, error) from error


def write_json(path: Path, record: object) -> None:
    """Writes a record as indented JSON, atomically."""
    write_atomic(path, json.dumps(record, indent=2) + "\n")


def read_json(path: Path) -> Record | None:
    """Returns the object in a JSON file, or None if the file does not exist. Raises InputError if
    the contents are invalid.
    """
    try:
        found = untrusted_input.read_json(path)
        return require_object(found)
    except FileNotFoundError:
        return None
    except InputError as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: InputError) -> InputError:
    """Returns the error with the file's path and advice added."""
    where = error.where or str(path)
    return InputError(error.what, where=where, key=error.key, why=error.why, next=remedy(path))


def remedy(path: Path) -> str:
    """Returns advice on how to handle a damaged file."""
    return f"inspect it, or remove it: rm {path}"


def read_lines(path: Path, check: Callable[[Any], Record] = require_object) -> Iterator[Record]:
    """Yields the validated records in a .jsonl file. Skips partial lines, which a crash or full
    disk leaves behind.

    Raises:
        InputError: a complete line fails `check`, no line is valid, or the file can't be read.
    """
    good, strange = False, ""
    try:
        with _open(path) as stream:
            for number, line in enumerate(untrusted_input.lines_of(stream), 1):
                try:
                    record = _whole(line)
                except InputError as error:  # A partial line followed by more lines.
                    strange = error.why
                    continue
                if record is not None:
                    good = True
                    yield _checked(record, check, path, number)
    except FileNotFoundError:
        return
    if strange and not good:
        raise InputError(
            "has no valid line of a run", where=f"{path}:1", why=strange, next=remedy(path)
        )


def _whole(line: bytes) -> Any:
    """Returns the JSON value in a line, or None for an incomplete last line or zeros left by a
    power failure. Raises InputError for any other invalid line.
    """
    if line.endswith(b"\n"):
        return untrusted_input.parse_line(line, "")
    if not line.startswith((b"{", b"\0")):
        raise InputError("is not a line of JSON", why="it does not begin with {")
    return None


def _open(path: Path) -> BinaryIO:
    """Opens a run's .jsonl file.

    Raises the errors of `untrusted_input.open_regular`, and InputError if the file is too large.
    """
    stream = untrusted_input.open_regular(path)
    if os.fstat(stream.fileno()).st_size <= LARGEST_LOG:
        return stream
    stream.close()
    raise InputError(
        f"is larger than {LARGEST_LOG // 2**30} GiB, more than any run writes",
        where=str(path),
        next=remedy(path),
    )


def _checked(record: Any, check: Callable[[Any], Record], path: Path, number: int) -> Record:
    try:
        return check(record)
    except InputError as error:
        raise InputError(
            error.what,
            where=f"{path}:{number}",
            key=error.key,
            next=f"correct the line, or remove it: sed -i {number}d {path}",
        ) from error


def take_lock(folder: Path) -> TextIO | None:
    """Locks a run or dataset folder until the returned file is closed.

    Returns None if another launcher holds the lock.
    """
    make_folder(folder)
    try:
        return file_systems.take_lock(folder / LOCK)
    except BlockingIOError:
        return None
    except OSError as error:
        raise unwritable(folder / LOCK, error) from error


def is_locked(folder: Path) -> bool:
    """Returns whether a launcher on this machine is running in this folder."""
    return file_systems.is_locked(folder / LOCK)
