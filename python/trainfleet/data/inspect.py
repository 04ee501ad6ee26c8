"""Prints a training sample as text: `python -m trainfleet.data.inspect CONFIG_YAML [SAMPLE]`.
VERIFY=1 checks every file first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ..config import load_resolved
from ..config.types import Config
from ..run import run_folder
from ..trust.errors import telling
from ..trust.safe_output import run_program
from .dataset import Dataset
from .description import table
from .shards import verify
from .tokenizer import load


def inspect(config: Config, sample: int, full: bool) -> Iterator[str]:
    """Yields lines that describe the dataset, the position of global sample `sample`, and its text.
    If `full`, verifies every file first.
    """
    dataset = Dataset.open(run_folder.DATA / config.data.name, config.data)
    if full:
        yield from verify(dataset.store, dataset.manifest)
    yield from (f"{name:>16}  {value}" for name, value in table(dataset.manifest))
    length, seed = config.train.sequence_length, config.train.seed
    sources, positions = dataset.positions("train", sample, 1, length, seed)
    ids = dataset.batch("train", sample, 1, length, seed)[0]
    ends = int((ids == dataset.manifest.end_of_document).sum())
    source = config.data.mixture[int(sources[0])].path if dataset.weights else "all sources"
    yield (
        f"{'sample':>16}  {sample:,}: position {int(positions[0]):,} in {source}, {len(ids)} "
        f"tokens, {ends} documents end in it"
    )
    yield ""
    yield _marked(load(dataset.folder).decode, ids.tolist(), dataset.manifest.end_of_document)


def _marked(decode: Callable[[list[int]], str], ids: list[int], end: int) -> str:
    """Decodes ids to text, with a marker line at the end of each document."""
    parts: list[list[int]] = [[]]
    for id_ in ids:
        parts.append([]) if id_ == end else parts[-1].append(id_)
    return "\n──────── end of document ────────\n".join(decode(part) for part in parts)


@telling
def main(arguments: list[str]) -> int:
    config = load_resolved(Path(arguments[0]))
    for line in inspect(
        config, int(arguments[1]) if arguments[1:] else 0, os.environ.get("VERIFY") == "1"
    ):
        print(line)
    return 0


if __name__ == "__main__":
    run_program(main)
