"""One node's part of `make tokenize`: nothing is shared between processes but the folder, and nothing is merged afterwards.

Node 0 commits the preparation (plan.json and the tokenizer), unit i belongs to node i mod N, and each process takes the next of
its node's units. Every unit is committed whole, so a restart with any number of nodes does only what is missing, and the bytes
are the same whoever makes them.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import multiprocessing.connection
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from types import FrameType

from .. import runs
from ..config.types import Data
from ..errors import DataError, TrainfleetError
from ..processes import die_with_parent
from . import bpe, manifest, progress
from .manifest import Manifest, Preparation
from .sources import Unit, UnitPlan, plan_units
from .tokenizer import FILE, TRAINED, Tokenizer, load
from .units import UnitWork

POLL = 0.05  # seconds between two looks for what another node commits
PATIENCE = 60.0  # seconds in which node 0 must have replaced the preparation of an earlier job
REMIND = 30.0


@dataclass(frozen=True)
class Share:
    """Which part of a job this process's node has."""

    node: int
    nodes: int
    workers: int


def tokenize(data: Data, share: Share, root: Path = runs.DATA) -> Manifest | None:
    """Does this node's units; returns the manifest if the dataset is finished then, None if other nodes are still at work."""
    folder = manifest.folder_of(data, root)
    with _only_job(folder, share):
        if (finished := manifest.find(data, root)) is not None:
            print(f"dataset {data.name} is finished already: {finished.tokens:,} tokens", flush=True)
            return finished
        progress.clear(folder, share.node, share.nodes)
        plan = plan_units(data)
        preparation = prepare(data, plan, folder) if share.node == 0 else await_preparation(data, plan, folder, share.node)
        _do_units(data, plan, preparation, folder, share)
        return finish(plan, preparation, folder)


def prepare(data: Data, plan: UnitPlan, folder: Path) -> Preparation:
    """Commits plan.json and tokenizer.json, or keeps those of an interrupted job with the same settings and files."""
    for warning in plan.warnings:
        print(f"warning: {warning}", flush=True)
    existing = manifest.read_preparation(folder)
    if (
        existing
        and _fits(existing, data, plan)
        and (folder / FILE).exists()
        and load(folder / FILE).sha256 == existing.tokenizer_sha256
    ):
        print(f"goes on with the dataset in {folder}", flush=True)
        return existing
    if existing:
        print(f"starts again in {folder}: what was unfinished there has other settings or files", flush=True)
    began = time.monotonic()
    tokenizer = (
        Tokenizer(bpe.train(data, plan), "the trained tokenizer") if data.tokenizer == TRAINED else load(Path(data.tokenizer))
    )
    preparation = manifest.preparation_of(data, plan, tokenizer)  # refuses a tokenizer without an end before any work is done
    runs.write_atomic(folder / FILE, tokenizer.definition)
    manifest.write_preparation(folder, preparation)
    print(f"tokenizer of {tokenizer.vocabulary_size:,} tokens ready in {time.monotonic() - began:.1f} s", flush=True)
    return preparation


def await_preparation(data: Data, plan: UnitPlan, folder: Path, node: int) -> Preparation:
    """What node 0 has committed. DataError when it sees other files than this node does."""
    began, reminded = time.monotonic(), 0.0
    while True:
        existing, waited = manifest.read_preparation(folder), time.monotonic() - began
        if existing and _fits(existing, data, plan):
            return existing
        if existing and waited > PATIENCE:
            raise DataError(
                f"node {node} sees {plan.files} files with {plan.bytes} bytes, node 0 {existing.files} with {existing.bytes}",
                where="data.sources",
                next="put the sources on a file system that all nodes share",
            )
        if waited - reminded > REMIND:
            reminded = waited
            print(f"waits for node 0 to prepare the tokenizer ({waited:.0f} s)", flush=True)
        time.sleep(POLL)


def finish(plan: UnitPlan, preparation: Preparation, folder: Path) -> Manifest | None:
    """Writes the manifest when every unit is done, whichever node that finds out."""
    records = [manifest.read_record(folder, unit.index, preparation) for unit in plan.units]
    done = [record for record in records if record is not None]
    if len(done) < len(records):
        return None
    finished = manifest.assemble(folder, preparation, done)
    manifest.write_manifest(folder, finished)
    return finished


def _fits(preparation: Preparation, data: Data, plan: UnitPlan) -> bool:
    return preparation.settings == manifest.settings_of(data) and preparation.listing == plan.identity


def _do_units(data: Data, plan: UnitPlan, preparation: Preparation, folder: Path, share: Share) -> None:
    mine = plan.units[share.node :: share.nodes]
    records = [(unit, manifest.read_record(folder, unit.index, preparation)) for unit in mine]
    missing = [unit for unit, record in records if record is None]
    meter = progress.Meter(folder, share.node, 0)
    for unit, record in records:
        if record is not None:
            tokens = sum(shard.tokens for shard in (record.train, record.validation) if shard)
            meter.add(bytes=unit.bytes, documents=record.documents, tokens=tokens, units=1)
    meter.write()
    print(f"node {share.node}: {len(missing)} of {len(mine)} units to do", flush=True)
    workers = min(share.workers, len(missing))
    if workers > 1:
        _in_processes(_Task(data, preparation, folder, share.node), missing, workers)
    elif missing:
        _work(UnitWork(data, preparation, folder, meter), iter(missing))


@dataclass(frozen=True)
class _Task:
    """What every process of a node is told."""

    data: Data
    preparation: Preparation
    folder: Path
    node: int


def _work(work: UnitWork, units: Iterator[Unit]) -> None:
    for unit in units:
        work.do(unit)
    work.flush()
    work.meter.write()


def _in_processes(task: _Task, units: list[Unit], workers: int) -> None:
    """Spawned processes (fork would copy the threads' locks of the tokenizer libraries) take units in turn until none is left."""
    context = multiprocessing.get_context("spawn")
    turn = context.Value("q", 0)
    processes = [context.Process(target=_worker, args=(task, i + 1, units, turn)) for i in range(workers)]
    try:
        for process in processes:
            process.start()
        _await_all(processes)
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()


def _await_all(processes: list[SpawnProcess]) -> None:
    """Returns when all have ended well; ends this process with the code of the first that did not."""
    waiting = list(processes)
    while waiting:
        multiprocessing.connection.wait([process.sentinel for process in waiting])
        for process in [process for process in waiting if process.exitcode is not None]:
            waiting.remove(process)
            if process.exitcode:
                print(f"worker {processes.index(process) + 1} ended with code {process.exitcode}", file=sys.stderr, flush=True)
                sys.exit(1)


def _worker(task: _Task, number: int, units: list[Unit], turn: Synchronized[int]) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent decides
    exit_on(signal.SIGTERM)
    try:
        meter = progress.Meter(task.folder, task.node, number)
        _work(UnitWork(task.data, task.preparation, task.folder, meter), _in_turn(units, turn))
    except TrainfleetError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(1)


def _in_turn(units: list[Unit], turn: Synchronized[int]) -> Iterator[Unit]:
    """The units that no other process has taken."""
    while True:
        with turn.get_lock():
            index, turn.value = turn.value, turn.value + 1
        if index >= len(units):
            return
        yield units[index]


def exit_on(number: signal.Signals) -> None:
    """From now on this signal leaves the program the way an error does, so that partial files are removed."""

    def leave(received: int, frame: FrameType | None) -> None:
        sys.exit(128 + received)

    signal.signal(number, leave)


@contextmanager
def _only_job(folder: Path, share: Share) -> Iterator[None]:
    """Held by node 0 for as long as it works. DataError when another job is at work on this dataset."""
    if share.node != 0:
        yield
        return
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")  # noqa: SIM115  closed below
    except OSError as error:
        raise runs.unwritable(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                "another job is tokenizing this dataset", where=str(folder), next="wait for it, or: make stop"
            ) from None
        yield
