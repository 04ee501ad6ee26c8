"""Tokenizes one node's share of the data for `make tokenize`.

Processes share only the dataset's folder, and there is no merge step. Node 0 commits the
preparation (plan.json and the tokenizer). Unit i belongs to node i mod N, and each process takes
the next of its node's units. Every unit is committed as a whole, so a restart with any number of
nodes processes only the missing units. Every node writes the same bytes for a given unit.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import multiprocessing.connection
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ..config.conversion import SETTINGS
from ..config.types import Data
from ..config.vocabulary import FILE, TRAINED, folder_named
from ..process.processes import die_with_parent
from ..run import run_folder
from ..trust.errors import DataError, TrainfleetError
from . import bpe, manifest, progress
from .chat import ChatEncoder, ChatTemplate
from .dataset_store import DatasetStore, only_job
from .manifest import Manifest, Preparation
from .sources import Unit, UnitPlan, plan_units
from .tokenizer import Tokenizer, load

if TYPE_CHECKING:
    from .work_units import UnitWork

POLL = 0.05  # seconds between checks whether node 0 has committed the preparation
PATIENCE = 60.0  # seconds to wait for node 0 to replace an earlier job's preparation
REMIND = 30.0


@dataclass(frozen=True)
class Share:
    """This node's share of a job: its node number, the node count and its process count."""

    node: int
    nodes: int
    workers: int


def tokenize(data: Data, share: Share, root: Path = run_folder.DATA) -> Manifest | None:
    """Tokenizes this node's units. Returns the manifest if that completes the dataset, or None if
    other nodes are still working.
    """
    store = manifest.store_of(data, root)
    if (finished := manifest.find(data, root)) is not None:
        print(f"dataset {data.name} is already finished: {finished.tokens:,} tokens")
        return finished
    with only_job(store) if share.node == 0 else nullcontext():
        progress.clear(store, share.node, share.nodes)
        plan = plan_units(data)
        preparation = (
            prepare(data, plan, store)
            if share.node == 0
            else await_preparation(data, plan, store, share.node)
        )
        _mirror_tokenizer(store, preparation)
        _do_units(data, plan, preparation, store, share)
        return finish(data, plan, preparation, store)


def prepare(data: Data, plan: UnitPlan, store: DatasetStore) -> Preparation:
    """Commits plan.json and tokenizer.json, or reuses those of an interrupted job with the same
    settings and files.
    """
    for line in (*plan.notes, *(f"warning: {warning}" for warning in plan.warnings)):
        print(line)
    existing = manifest.read_preparation(store)
    if existing and _fits(existing, data, plan) and _tokenizer_of(store, existing) is not None:
        print(f"continuing with the dataset in {store.describe('')}")
        return existing
    if existing:
        print(
            f"starting again in {store.describe('')}: the unfinished dataset there has "
            "different settings or files"
        )
        # If the old plan stayed in place, it would mark the new tokenizer as ready.
        store.remove(manifest.PLAN)
    began = time.monotonic()
    trained = data.tokenizer == TRAINED
    tokenizer = (
        Tokenizer(bpe.train(data, plan), "the trained tokenizer")
        if trained
        else load(folder_named(data))
    )
    # Fail early if the tokenizer has no end-of-document token, or the chat template does not work.
    preparation = manifest.preparation_of(data, plan, tokenizer)
    if data.conversations:
        template = ChatTemplate.read(folder_named(data))
        with template.limited("a greeting"):
            template.end_of_turn(ChatEncoder(tokenizer.definition))
        store.write(SETTINGS, template.definition.encode())
    store.write(FILE, tokenizer.definition.encode())
    manifest.write(store, manifest.PLAN, preparation)
    print(
        f"tokenizer of {tokenizer.vocabulary_size:,} tokens ready in "
        f"{time.monotonic() - began:.1f} s"
    )
    return preparation


def await_preparation(data: Data, plan: UnitPlan, store: DatasetStore, node: int) -> Preparation:
    """Waits until node 0 commits the preparation. Raises DataError if node 0 sees different files
    than this node.
    """
    began, reminded = time.monotonic(), 0.0
    while True:
        existing, waited = manifest.read_preparation(store), time.monotonic() - began
        if existing and _fits(existing, data, plan):
            return existing
        if existing and waited > PATIENCE:
            raise DataError(
                f"node {node} sees {plan.files} files with {plan.bytes} bytes, but "
                f"node 0 sees {existing.files} with {existing.bytes}",
                where="data.sources",
                next="put the sources on a file system that all nodes share",
            )
        if waited - reminded > REMIND:
            reminded = waited
            print(f"waiting for node 0 to prepare the tokenizer ({waited:.0f} s)")
        time.sleep(POLL)


def finish(
    data: Data, plan: UnitPlan, preparation: Preparation, store: DatasetStore
) -> Manifest | None:
    """Writes the manifest if every unit is done. Any node can call it.

    Raises:
        DataError: there is no document to train on, or more bad records were skipped than
            data.on_bad_record allows.
    """
    if len(store.sizes("units")) < len(plan.units):
        return None
    records = manifest.read_records(store, range(len(plan.units)), preparation)
    if len(records) < len(plan.units):
        return None
    finished = manifest.assemble(
        preparation,
        [records[unit.index] for unit in plan.units],
        (*plan.notes, *plan.warnings),
    )
    manifest.require_few(finished, data, store)
    manifest.write(store, manifest.MANIFEST, finished)
    return finished


def _tokenizer_of(store: DatasetStore, preparation: Preparation) -> bytes | None:
    """Returns the content of tokenizer.json, or None if it is missing or not the preparation's
    tokenizer.
    """
    content = store.read(FILE)
    return (
        content
        if content is not None
        and hashlib.sha256(content).hexdigest() == preparation.tokenizer_sha256
        else None
    )


def _mirror_tokenizer(store: DatasetStore, preparation: Preparation) -> None:
    """Copies the tokenizer to this machine's folder, because the original may exist only in S3."""
    path = store.folder / FILE
    if not path.exists() or load(path).sha256 != preparation.tokenizer_sha256:
        run_folder.write_atomic(path, (_tokenizer_of(store, preparation) or b"").decode())
    if preparation.settings.conversations:
        run_folder.write_atomic(store.folder / SETTINGS, (store.read(SETTINGS) or b"").decode())


def _fits(preparation: Preparation, data: Data, plan: UnitPlan) -> bool:
    return (
        preparation.settings == manifest.settings_of(data) and preparation.listing == plan.identity
    )


def _do_units(
    data: Data, plan: UnitPlan, preparation: Preparation, store: DatasetStore, share: Share
) -> None:
    mine = plan.units[share.node :: share.nodes]
    done = manifest.read_records(store, [unit.index for unit in mine], preparation)
    missing = [unit for unit in mine if unit.index not in done]
    _sweep(store.folder, {unit.index for unit in missing})
    meter = progress.Meter(store, share.node, 0)
    for record in done.values():
        tokens = sum(shard.tokens for shard in record.shards)
        meter.add(bytes_=record.bytes, documents=record.documents, tokens=tokens, units=1)
    meter.write()
    print(f"node {share.node}: {len(missing)} of {len(mine)} units left")
    workers = min(share.workers, len(missing))
    if workers > 1:
        _in_processes(_Task(data, preparation, store, share.node), missing, workers)
    elif missing:
        from .work_units import UnitWork

        _work(UnitWork(data, preparation, store, meter), iter(missing))


def _sweep(folder: Path, units: set[int]) -> None:
    """Removes partial files that killed processes left behind for these units."""
    for path in (path for split in manifest.SPLITS for path in (folder / split).glob("*.partial")):
        if int(path.name.split(".")[0]) in units:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Task:
    """Arguments that all processes of a node share."""

    data: Data
    preparation: Preparation
    store: DatasetStore
    node: int


def _work(work: UnitWork, units: Iterator[Unit]) -> None:
    for unit in units:
        work.do(unit)
    work.flush()
    work.meter.write()


def _in_processes(task: _Task, units: list[Unit], workers: int) -> None:
    """Runs worker processes, each of which requests its next unit through a pipe.

    Workers are spawned rather than forked, because a fork would copy locks held by the tokenizer
    libraries' threads.
    """
    context = multiprocessing.get_context("spawn")
    links = dict[Connection, SpawnProcess]()
    try:
        for number in range(workers):
            ours, theirs = context.Pipe()
            links[ours] = context.Process(target=_worker, args=(task, number + 1, theirs))
            links[ours].start()
            theirs.close()
        _serve(links, iter(units))
    finally:
        for process in links.values():
            if process.pid is not None:
                process.terminate()
                process.join()


def _serve(links: dict[Connection, SpawnProcess], units: Iterator[Unit]) -> None:
    """Distributes units until all workers have exited successfully. Raises an error that a worker
    sends, or exits with the code of the first worker that fails.
    """
    waiting = dict(links)
    while waiting:
        for link in multiprocessing.connection.wait(list(waiting)):
            assert isinstance(link, Connection)
            found: TrainfleetError | None = None
            try:
                found = link.recv()
                if found is None:
                    link.send(next(units, None))
            except (EOFError, OSError):
                _require_well(waiting.pop(link), list(links).index(link) + 1)
            if found is not None:
                raise found


def _require_well(process: SpawnProcess, number: int) -> None:
    process.join()
    if process.exitcode:
        print(f"worker {number} exited with code {process.exitcode}", file=sys.stderr)
        sys.exit(process.exitcode if process.exitcode > 0 else 128 - process.exitcode)


def _worker(task: _Task, number: int, link: Connection) -> None:
    die_with_parent()
    # Ctrl-C reaches all processes, but the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_on(signal.SIGTERM)
    # Imported here, because the parent does not need numpy and the tokenizer libraries.
    from .work_units import UnitWork

    try:
        meter = progress.Meter(task.store, task.node, number)
        _work(UnitWork(task.data, task.preparation, task.store, meter), _in_turn(link))
    except TrainfleetError as error:
        link.send(error)
        sys.exit(1)


def _in_turn(link: Connection) -> Iterator[Unit]:
    """Requests units from the parent process and yields them."""
    link.send(None)
    while (unit := link.recv()) is not None:
        yield unit
        link.send(None)


def exit_on(number: signal.Signals) -> None:
    """Makes this signal raise SystemExit, so that partial files are removed as after an error."""

    def leave(received: int, frame: FrameType | None) -> None:
        sys.exit(128 + received)

    signal.signal(number, leave)
