"""Prints a training sample as text: `python -m trainfleet.data.inspect CONFIG_YAML [SAMPLE]`.
VERIFY=1 checks every file first, and JSON=1 prints JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..config import load_resolved
from ..config.types import Config
from ..run import run_folder
from ..trust.errors import telling
from ..trust.safe_output import run_program
from .dataset import Dataset
from .description import table
from .shards import verify
from .tokenizer import load

# manifest fields that JSON=1 prints
FACTS = ("identity", "tokens", "validation_tokens", "documents", "validation_documents",
         "text_bytes", "vocabulary_size", "dtype")  # fmt: skip


def inspect(config: Config, sample: int, full: bool) -> Iterator[str]:
    """Yields lines that describe the dataset, the position of global sample `sample`, and its text.
    If `full`, verifies every file first.
    """
    dataset = Dataset.open(run_folder.DATA / config.data.name, config.data)
    if full:
        yield from verify(dataset.store, dataset.manifest)
    yield from (f"{name:>16}  {value}" for name, value in table(dataset.manifest))
    position, source, ids = read_sample(config, dataset, sample)
    end = dataset.manifest.end_of_document
    yield (
        f"{'sample':>16}  {sample:,}: position {position:,} in {source}, {len(ids)} "
        f"tokens, {ids.count(end)} documents end in it"
    )
    yield ""
    yield _marked(load(dataset.folder).decode, ids, end)


def facts(config: Config, sample: int, full: bool) -> dict[str, Any]:
    """Returns the dataset's facts and one sample, as `make inspect JSON=1` prints them."""
    dataset = Dataset.open(run_folder.DATA / config.data.name, config.data)
    files = sum(1 for _ in verify(dataset.store, dataset.manifest)) if full else 0
    position, source, ids = read_sample(config, dataset, sample)
    return {name: getattr(dataset.manifest, name) for name in FACTS} | {
        "dataset": config.data.name,
        "shards": len(dataset.manifest.shards),
        "files_verified": files,
        "sample": sample,
        "position": position,
        "source": source,
        "ids": ids,
        "text": load(dataset.folder).decode(ids),
    }


def read_sample(config: Config, dataset: Dataset, sample: int) -> tuple[int, str, list[int]]:
    """Returns a global sample's position, its source, and its token ids."""
    length, seed = config.train.sequence_length, config.train.seed
    sources, positions = dataset.positions("train", sample, 1, length, seed)
    ids = dataset.batch("train", sample, 1, length, seed)[0]
    source = config.data.mixture[int(sources[0])].path if dataset.weights else "all sources"
    return int(positions[0]), source, ids.tolist()


def _marked(decode: Callable[[list[int]], str], ids: list[int], end: int) -> str:
    """Decodes ids to text, with a marker line at the end of each document."""
    parts: list[list[int]] = [[]]
    for id_ in ids:
        parts.append([]) if id_ == end else parts[-1].append(id_)
    return "\n──────── end of document ────────\n".join(decode(part) for part in parts)


@telling
def main(arguments: list[str]) -> int:
    config, full = load_resolved(Path(arguments[0])), os.environ.get("VERIFY") == "1"
    sample = int(arguments[1]) if arguments[1:] else 0
    if os.environ.get("JSON"):
        print(json.dumps(facts(config, sample, full)))
        return 0
    for line in inspect(config, sample, full):
        print(line)
    return 0


if __name__ == "__main__":
    run_program(main)
