"""The wall (host/sandbox.py) around a process that reads what a run is made of: somebody may have sent its folder.

make sample, eval, export and verify put it up before they read a checkpoint, a dataset or a tokenizer. Where a GPU computes,
sample and eval do not (devices.confinable); export and verify need none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ..checkpoints.store import CheckpointStore, FolderStore, store_of
from ..config import Config, load_resolved
from ..config.sizes import count_parameters
from ..host import sandbox
from ..host.sandboxed_reader import ask
from ..run import run_folder
from ..run.run_folder import Run

T = TypeVar("T")
COPIES = 6  # of a model's weights: its own, one in another format and its bytes; a file's part; room
NUMBERS = 64  # of a token in one layer at work, for each feature of the model; and as many for each head and token that it sees
LOGITS = 6  # copies of what a model says of a token: as it is, in float32, with its softmax and its loss


def enclose(run: Run, writes: Iterable[Path] = ()) -> None:
    """Puts up the wall around this process: it reads what the run's config names, writes `writes` and has no network.

    A run whose checkpoints or dataset are in S3 keeps the network for them, and its folder of temporary files.
    """
    config = load_resolved(run.config)
    store = store_of(run, config.checkpoint.destination)
    network = not isinstance(store, FolderStore) or bool(config.data.store)
    copies = [run_folder.DATA / config.data.name] if config.data.store else []  # of what is read of S3
    sandbox.confine(_made_of(run, config, store), [*writes, *copies, *_scratch(network)], network, memory_for(config))


def apart(run: Run, reply: Callable[[], T], kind: type[T], writes: Iterable[Path] = ()) -> T:
    """What `reply` returns in a child behind the wall, for one that then writes elsewhere than `writes`; see apart.ask."""

    def enclosed() -> T:
        enclose(run, writes)
        return reply()

    return ask(enclosed, kind, str(run.folder))


def enclose_checkpoint(store: CheckpointStore, size: int) -> None:
    """Puts up the wall around this process, which reads one checkpoint of `size` bytes, a tensor at a time."""
    place = [store.path] if isinstance(store, FolderStore) else []
    sandbox.confine(place, _scratch(not place), not place, sandbox.MEMORY + 3 * size)


def memory_for(config: Config) -> int:
    """Bytes for a model of that config and a batch, beside what any reader gets."""
    model, train = config.model, config.train
    tokens, seen = train.micro_batch * train.sequence_length, train.sequence_length * model.heads
    return sandbox.MEMORY + 4 * (
        COPIES * count_parameters(model) + tokens * (LOGITS * model.vocabulary_size + NUMBERS * model.hidden_size + 4 * seen)
    )


def _scratch(network: bool) -> list[Path]:
    """Where what is fetched lies while it is read; a folder of this process's own, as verbs start it (processes.run_module)."""
    return [Path(tempfile.gettempdir())] if network else []


def _made_of(run: Run, config: Config, store: CheckpointStore) -> Iterator[Path]:
    yield from (run.folder, run_folder.DATA / config.data.name)
    if isinstance(store, FolderStore):
        yield store.path
    if config.model.module:
        yield Path(config.model.module).absolute().parent  # it may import its neighbours
