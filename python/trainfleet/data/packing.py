"""Packs whole conversations into rows of T inputs and their targets.

Each row is a sequence of conversations, followed by padding. A conversation with more than T inputs
is truncated after the last complete answer that fits, or dropped if none fits. The rows depend only
on the dataset and T.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .dataset_store import DatasetStore
from .shards import Tokens, read_index, unsigned

Rows = npt.NDArray[np.int64]
IGNORED = -100  # target that torch.nn.CrossEntropyLoss ignores


class Pack(NamedTuple):
    """Rows of one source. Row i contains conversations order[bounds[i]:bounds[i + 1]].

    `starts` and `lengths` locate each conversation in the source's tokens. `learned` is the number
    of loss targets per row, and `cut` the number of truncated conversations.
    """

    starts: Rows
    lengths: Rows
    order: Rows
    bounds: Rows
    learned: Rows
    cut: int


def read_pack(store: DatasetStore, tokens: Tokens, room: int) -> Pack:
    """Packs the conversations of one source. Raises DataError if an index is damaged."""
    found = [np.empty((2, 0), np.int64)]
    found += [read_index(store, shard) for shard in tokens.shards]
    lengths, learned = np.concatenate(found, 1)
    starts, cut = np.cumsum(lengths) - lengths, 0
    for index in np.flatnonzero(lengths > room + 1):
        tokens.read(int(starts[index]), ids := np.empty(room + 2, np.int64))
        if end := last_answer(ids):
            lengths[index], learned[index], cut = end, (ids[:end] >= 0).sum(), cut + 1
    return pack(starts, lengths, learned, room)._replace(cut=cut)


def last_answer(ids: Rows) -> int:
    """Returns the end of the last complete answer in signed ids, or 0 if all are incomplete."""
    ends = np.flatnonzero((ids[:-1] >= 0) & (ids[1:] < 0))
    return int(ends[-1]) + 1 if len(ends) else 0


def fill(row: Rows, pack: Pack, tokens: Tokens, position: int) -> None:
    """Writes a row's conversations to `row` [T, 3]: input, target and conversation index."""
    at = 0
    for number, index in enumerate(pack.order[slice(*pack.bounds[position : position + 2])]):
        found = np.empty(pack.lengths[index], np.int64)
        tokens.read(int(pack.starts[index]), found)
        place = row[at : at + len(found) - 1]
        place[:, 0], place[:, 2] = unsigned(found)[:-1], number
        place[:, 1] = np.where(found[1:] < 0, IGNORED, found[1:])
        at += len(place)


def pack(starts: Rows, lengths: Rows, learned: Rows, room: int) -> Pack:
    """Packs conversations into rows of `room` inputs."""
    fitting = np.flatnonzero(lengths <= room + 1)
    longest_first = fitting[np.argsort(-lengths[fitting], kind="stable")]
    # The last token is only a target.
    rows = best_fit(longest_first.tolist(), (lengths - 1).tolist(), room)
    order = np.array([index for row in rows for index in row], np.int64)
    bounds = np.cumsum([0, *map(len, rows)])
    totals = np.append(0, np.cumsum(learned[order]))[bounds]
    return Pack(starts, lengths, order, bounds, np.diff(totals), 0)


def best_fit(items: list[int], sizes: list[int], room: int) -> list[list[int]]:
    """Assigns each item, in order, to the row with the least free space that fits it, or to a new
    row.
    """
    rows: list[list[int]] = []
    free: dict[int, list[int]] = defaultdict(list)  # free room → rows
    spaces = 0  # bit i is set if free[i] is not empty
    for item in items:
        space, row = room, len(rows)
        if enough := spaces >> sizes[item]:
            space = sizes[item] + (enough & -enough).bit_length() - 1
            row = free[space].pop()
            spaces ^= 0 if free[space] else 1 << space
        else:
            rows.append([])
        rows[row].append(item)
        free[space - sizes[item]].append(row)
        spaces |= 1 << (space - sizes[item])
    return rows
