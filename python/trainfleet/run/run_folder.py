"""The run folder: the one owner of its file names and formats, used by both planes.

runs/<name>/
  config.yaml  results.json  metrics.jsonl  report.html
  events/<writer>.jsonl  what happened (run/records.py); events.jsonl in runs that began before
                         format 2
  heartbeats/node-<i>    the newest beats of that node's ranks (health/heartbeat.py); attempts/ and
                         dump: health/fence.py,
                         health/heartbeat.py
  given.yaml   what was asked for: the user's config with SET and NODES in it, from which all is
               derived when the run goes on
  logs/node-<i>.log  checkpoints/step-<8 digits>/  huggingface/step-<8
                     digits>/  tensorboard/  plots/*.png
  logs/engine-<i>.log    of a node that left no log, what its engine has heard
                         (backends/aws_managed.py)
  profile/
  handle.json, request.json   the job that was submitted last: by these any process asks for it,
                              follows it and stops it
  nodes/node-<i>   which process is that node, on a machine that plays all of them; with its script
                   and its exit code
  stop         exists from the moment that a stop was asked for until the ranks have obeyed; begins
               with "engine:" where none but
               the engine wants it (a signal, a time limit)
  lock         held (flock) by the launcher while the job runs
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ..process import file_systems
from ..trust import untrusted_input
from ..trust.errors import InputError, RunError
from ..trust.redaction import hide_all
from ..trust.validation import fit
from . import contents, records
from .records import Results, check_event, check_metric, require_object

RUNS = Path("runs")
DATA = Path("data")
# names the folder where an engine has put the whole dataset on this node, to be read
MOUNTED = "TRAINFLEET_MOUNTED"
# names this node's own disk, to which a dataset in S3 is copied before ranks read it
COPY = "TRAINFLEET_COPY"
COMPILED = Path(".compiled")  # what torch.compile made; it can be made again
LOCK = contents.LOCK.name
ENGINE = "engine:"  # the first word of a stop file that no person asked for
LARGEST = 4096 * untrusted_input.MEBIBYTE  # of a .jsonl file: ten million lines
MOST = 64 * untrusted_input.MEBIBYTE  # of a growing file, at a look
Record = dict[str, Any]


class Run:
    """The paths of one run folder and the few ways to read and write them."""

    def __init__(self, folder: Path, writer: str = "") -> None:
        """`writer` is who records events here (run/records.py): by default this host's launcher."""
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
        self.tensorboard, self.plots, self.profile = (
            folder / "tensorboard",
            folder / "plots",
            folder / "profile",
        )
        self.rehearsal = folder / "rehearsal.json"

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def document(self) -> Path:
        """Returns the config by which a command continues this run: as it was asked for, or as it
        was resolved if that file is lost.
        """
        return self.given if self.given.exists() else self.config

    def ask_to_stop(self, engine: str = "") -> None:
        """Asks the ranks to save and stop at their next step: for a person, or for the engine's
        reason.
        """
        if not engine or not self.stop.exists():
            with open(self.stop, "w", encoding="utf-8", opener=untrusted_input.opener) as file:
                file.write(f"{ENGINE} {engine}\n" if engine else "")

    def is_asked_to_stop(self) -> bool:
        """Tells whether a person wants the run to stop."""
        try:
            return (
                untrusted_input.read_bytes(self.stop, untrusted_input.KIBIBYTE)[: len(ENGINE)]
                != ENGINE.encode()
            )
        except (FileNotFoundError, InputError):  # a link or a folder of that name does not ask
            return False

    def exported(self, step: int) -> Path:
        return self.folder / "huggingface" / step_name(step)

    def read_results(self) -> Record:
        """results.json as written last; {} before the first write.

        Raises:
            RunError: a newer trainfleet wrote it.
            InputError: it is not what a run writes.
        """
        results = read_json(self.results) or {}
        if isinstance(format_ := results.get("format"), int) and format_ > records.FORMAT:
            why = f"its format is {format_}, and this version reads up to {records.FORMAT}"
            raise RunError(
                f"a newer trainfleet wrote {self.name}",
                where=str(self.results),
                why=why,
                next="git pull, then again",
            )
        return dict(fit(Results, results, str(self.results), remedy(self.results)))

    def read_metrics(self) -> Iterator[Record]:
        """Yields the lines of metrics.jsonl; of several about one step the last counts. Raises
        InputError for any other line.
        """
        return read_lines(self.metrics, check_metric)

    def update_results(self, **fields: Any) -> Record:
        """Replaces the given keys of results.json, atomically; one writer at a time (launcher, then
        rank 0, then launcher).
        """
        results = self.read_results() | {"format": records.FORMAT} | fields
        write_json(self.results, hide_all(results))
        return results

    def record(self, event: str, **fields: Any) -> None:
        """Appends an event, one of events.yaml, to this writer's file."""
        make_folder(self.events)
        append_line(
            self.events / f"{self.writer}.jsonl", {"time": time.time(), "event": event, **fields}
        )

    def note(self, event: str, **fields: Any) -> None:
        """As `record`, for what nothing should end for: where the disk has no room, the event is
        lost.
        """
        with suppress(RunError):
            self.record(event, **fields)

    def read_events(self) -> list[Record]:
        """Returns the events of all writers, by time."""
        return Feed(self.folder).new()


def run_of(name: str, root: Path = RUNS) -> Run:
    """The run called `name`, whether or not its folder exists."""
    return Run(root / name)


def step_name(step: int) -> str:
    """Returns the name of a folder that was made at a step."""
    return f"step-{step:08d}"


def node_log(folder: Path, node: int) -> Path:
    """Returns the log to which node `node` of a job in `folder` (a run's or a dataset's) writes
    all that its ranks print.
    """
    return contents.NODE_LOG.at(folder, node=node)


def job_log(folder: Path) -> Path:
    """Returns the log for the batch script, srun and slurmstepd. Its folder must exist, or Slurm
    ends the job without a word.
    """
    return contents.JOB_LOG.at(folder)


def engine_log(folder: Path, node: int) -> Path:
    """Returns the log that an engine has kept for node `node`, if the node itself has left none
    (backends/aws_managed.py).
    """
    return contents.ENGINE_LOG.at(folder, node=node)


def scratch(log: Path) -> Path:
    """The folder of torchrun's own copies of what goes to a node's log; it is removed when the
    node's part has ended.
    """
    return log.with_suffix(".parts")


def write_atomic(path: Path, text: str) -> None:
    """Leaves either the old file or the whole new one, also after a power cut."""
    # threads, and hosts that share the folder, may write the same file at once
    unique = int.from_bytes(os.urandom(6))
    temporary = path.with_name(f".{path.name}.{unique}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8", opener=untrusted_input.opener) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise unwritable(path, error) from error
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        file_systems.offered(lambda: os.fsync(descriptor))
    finally:
        os.close(descriptor)


def no_place(folder: Path) -> str:
    """Returns why a folder for a command's own files can't be made or written there; "" if it
    can.
    """
    if folder.parent.resolve() in (RUNS.resolve(), DATA.resolve()):
        return f"{folder.parent}/ has what runs leave"
    there = next(
        one for one in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(one)
    )
    if not there.is_dir():
        return f"{there} is not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} can't be written"


def unwritable(path: Path, error: OSError) -> RunError:
    """The error to raise when `path` can't be written: names the file, the cause and the remedy."""
    why = error.strerror or str(error)
    remedy = f"make {path.parent} writable for you: ls -ld {path.parent}"
    if error.errno == errno.ENOSPC:
        remedy = "free some space (df -h .), then run the same command again"
    elif error.errno == errno.EFBIG:
        remedy = (
            "ulimit -f unlimited, as a limit on files' sizes is set; then run the same "
            "command again"
        )
    elif error.errno == errno.EROFS:
        remedy = (
            "work in a folder that can be written: its disk is mounted read-only (findmnt "
            f"-T {path.parent})"
        )
    elif error.errno in (errno.EISDIR, errno.ENOTDIR, errno.ELOOP):
        remedy = f"look at what is in its place: ls -ld {path.parent} {path}"
    return RunError(f"can't write {path}", why=why, next=remedy)


def size_of(path: Path) -> int:
    """Bytes of a file; 0 before it is there. Whoever opens it asks the file server; a stat may give
    what a client remembers.
    """
    try:
        with os.fdopen(
            untrusted_input.opener(str(path), os.O_RDONLY | os.O_NONBLOCK), "rb"
        ) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        # a reader of the link reports it
        if isinstance(error, FileNotFoundError) or untrusted_input.is_in_the_way(error):
            return 0
        raise


def make_folder(folder: Path) -> None:
    """RunError when the folder is not there and can't be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error


def append_line(path: Path, record: Record) -> None:
    """Appends one JSON line in a single write, so that readers never see half a line from one
    machine.

    Where a full disk or a power cut has left half a line at the end, that one is closed first: it
    must not spoil this one too.
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
    """Leaves a record as people and programs read it, as `write_atomic` does."""
    write_atomic(path, json.dumps(record, indent=2) + "\n")


def read_json(path: Path) -> Record | None:
    """The object in a JSON file; None when the file is not there. InputError when it holds anything
    else.
    """
    try:
        found = untrusted_input.read_json(path)
        return require_object(found)
    except FileNotFoundError:
        return None
    except InputError as error:
        raise InputError(
            error.what,
            where=error.where or str(path),
            key=error.key,
            why=error.why,
            next=remedy(path),
        ) from error


def remedy(path: Path) -> str:
    """Returns what to type if a file of a run is damaged."""
    return f"look at it, or remove it: rm {path}"


def read_lines(path: Path, check: Callable[[Any], Record] = require_object) -> Iterator[Record]:
    """The records of a .jsonl file, each checked; a line that a crash or a full disk has cut off is
    left out.

    Raises:
        InputError: a line is whole, and not what `check` takes; no line of the file is one; or it
            can't be read.
    """
    good, strange = False, ""
    try:
        with _open(path) as stream:
            for number, line in enumerate(untrusted_input.lines_of(stream), 1):
                try:
                    record = _whole(line)
                except InputError as error:  # half a line, which another has followed
                    strange = error.why
                    continue
                if record is not None:
                    good = True
                    yield _checked(record, check, path, number)
    except FileNotFoundError:
        return
    if strange and not good:
        raise InputError(
            "has no line that a run has written", where=f"{path}:1", why=strange, next=remedy(path)
        )


def _whole(line: bytes) -> Any:
    """The value in a line; None where it is the beginning of one, or the zeros that a power cut
    leaves. InputError else.
    """
    if line.endswith(b"\n"):
        return untrusted_input.parse_line(line, "")
    if not line.startswith((b"{", b"\0")):
        raise InputError("is not a line of JSON", why="it does not begin as one")
    return None


def _open(path: Path) -> BinaryIO:
    """A .jsonl file of a run. Raises as `untrusted_input.open_regular`, InputError for a larger one
    than a run writes.
    """
    stream = untrusted_input.open_regular(path)
    if os.fstat(stream.fileno()).st_size <= LARGEST:
        return stream
    stream.close()
    what = f"has more than {LARGEST // 2**30} GiB, which is more than any run writes"
    raise InputError(what, where=str(path), next=remedy(path))


def _checked(record: Any, check: Callable[[Any], Record], path: Path, number: int) -> Record:
    try:
        return check(record)
    except InputError as error:
        then = f"correct the line, or remove it: sed -i {number}d {path}"
        raise InputError(error.what, where=f"{path}:{number}", key=error.key, next=then) from error


def whole_lines(path: Path, start: int) -> tuple[list[bytes], int]:
    """The lines behind byte `start` of a file that is still being written, and where they end; none
    when it is not there.

    Of more than MOST bytes the first part: the next call continues there. A longer line comes in
    pieces.
    """
    try:
        with untrusted_input.open_regular(path) as file:
            file.seek(start)
            chunk = file.read(MOST)
    except FileNotFoundError:
        return [], start
    whole = chunk[: chunk.rfind(b"\n") + 1] or (chunk if len(chunk) == MOST else b"")
    return whole.splitlines(), start + len(whole)


class Lines:
    """A .jsonl file that is still being written: `new()` gives the records that came since the last
    call.
    """

    def __init__(
        self, path: Path, check: Callable[[Any], Record] = require_object, *, from_end: bool = False
    ) -> None:
        self.path, self.check = path, check
        self.offset = size_of(path) if from_end else 0

    def new(self) -> list[Record]:
        """The new records; bad lines are skipped here, and reported when the finished file is
        read.
        """
        # it was cut back by a resume
        if self.path.exists() and self.path.stat().st_size < self.offset:
            self.offset = 0
        found: list[Record] = []
        while self.offset < LARGEST:
            lines, end = whole_lines(self.path, self.offset)
            if end == self.offset:
                break
            for line in lines:
                with suppress(InputError):
                    found.append(self.check(untrusted_input.parse_line(line, "")))
            self.offset = end
        return found


class Feed:
    """The events of a run that is still under way: `new()` gives those that came since the last
    call, of all writers by time.
    """

    def __init__(self, folder: Path, *, from_end: bool = False) -> None:
        self.folder, self.files = folder, dict[Path, Lines]()
        for path in self._paths() if from_end else ():
            self.files[path] = Lines(path, check_event, from_end=True)

    def new(self) -> list[Record]:
        return records.merge(
            [self.files.setdefault(path, Lines(path, check_event)).new() for path in self._paths()]
        )

    def _paths(self) -> list[Path]:
        return [self.folder / "events.jsonl", *sorted((self.folder / "events").glob("*.jsonl"))]


def take_lock(folder: Path) -> TextIO | None:
    """Returns the lock of a run's or dataset's folder, held while that file is open; None when
    another launcher has it.
    """
    make_folder(folder)
    try:
        return file_systems.take_lock(folder / LOCK)
    except BlockingIOError:
        return None
    except OSError as error:
        raise unwritable(folder / LOCK, error) from error


def is_locked(folder: Path) -> bool:
    """Tells whether a launcher of this machine is running in this folder now."""
    return file_systems.is_locked(folder / LOCK)
