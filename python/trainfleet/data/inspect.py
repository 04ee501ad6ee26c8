"""Prints a training sample as text: `python -m trainfleet.data.inspect CONFIG_YAML [SAMPLE]`.
VERIFY=1 checks every file first, and JSON=1 prints JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import load_resolved
from ..config.types import Config
from ..run import run_folder
from ..trust.errors import telling
from ..trust.safe_output import run_program
from .dataset import Dataset
from .description import table
from .packing import IGNORED
from .shards import verify
from .tokenizer import Tokenizer, load

if TYPE_CHECKING:
    from .packing import Rows

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
    position, source, row = read_sample(config, dataset, sample)
    ids, ends, text = decoded(dataset, row)
    yield (
        f"{'sample':>16}  {sample:,}: position {position:,} in {source}, {len(ids)} "
        f"tokens, {ends} documents end in it"
    )
    yield ""
    yield text


def facts(config: Config, sample: int, full: bool) -> dict[str, Any]:
    """Returns the dataset's metadata and one sample, for `make inspect JSON=1`."""
    dataset = Dataset.open(run_folder.DATA / config.data.name, config.data)
    files = sum(1 for _ in verify(dataset.store, dataset.manifest)) if full else 0
    position, source, row = read_sample(config, dataset, sample)
    ids, _, text = decoded(dataset, row)
    return {name: getattr(dataset.manifest, name) for name in FACTS} | {
        "dataset": config.data.name,
        "shards": len(dataset.manifest.shards),
        "files_verified": files,
        "sample": sample,
        "position": position,
        "source": source,
        "ids": ids,
        "text": text,
    }


def read_sample(config: Config, dataset: Dataset, sample: int) -> tuple[int, str, Rows]:
    """Returns a global sample's position, its source, and its row of the batch."""
    length, seed = config.train.sequence_length, config.train.seed
    sources, positions = dataset.positions("train", sample, 1, length, seed)
    row = dataset.batch("train", sample, 1, length, seed)[0]
    source = config.data.mixture[int(sources[0])].path if dataset.weights else "all sources"
    return int(positions[0]), source, row


def decoded(dataset: Dataset, row: Rows) -> tuple[list[int], int, str]:
    """Returns a sample's token ids, how many documents end in it, and its text."""
    tokenizer = load(dataset.folder)
    if dataset.manifest.settings.conversations:
        return row[:, 0].tolist(), int(row[:, 2].max()) + 1, _told_apart(tokenizer, row)
    ids, end = row.tolist(), dataset.end_of_document
    return ids, ids.count(end), _marked(tokenizer.decode, ids, end)


def _told_apart(tokenizer: Tokenizer, row: Rows) -> str:
    """Decodes a row of conversations, with ⟦ ⟧ around the tokens to learn."""
    ids, learned = row[:, 0], [False, *(row[:-1, 1] != IGNORED)]
    pairs, text = zip(ids[row[:, 2] >= 0], learned, strict=False), ""
    for flag, group in groupby(pairs, itemgetter(1)):
        part = tokenizer.reference.tokenizer.decode([int(id_) for id_, _ in group], False)
        text += f"⟦{part}⟧" if flag else part
    return text


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
