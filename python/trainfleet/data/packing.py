"""Packs whole conversations into rows of T inputs and their targets.

A row contains one conversation after the other, then padding. A conversation is never split, and
one with more than T inputs is left out. The rows depend only on the dataset and T.
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
    of targets to learn in each row.
    """

    starts: Rows
    lengths: Rows
    order: Rows
    bounds: Rows
    learned: Rows


def read_pack(store: DatasetStore, tokens: Tokens, room: int) -> Pack:
    """Packs the conversations of one source. Raises DataError if an index is damaged."""
    found = [np.empty((2, 0), np.int64)]
    found += [read_index(store, shard) for shard in tokens.shards]
    lengths, learned = np.concatenate(found, 1)
    return pack(lengths, learned, room)


def fill(row: Rows, pack: Pack, tokens: Tokens, position: int) -> None:
    """Writes a row's conversations to `row` [T, 3]: input, target and the conversation's number."""
    at = 0
    for number, index in enumerate(pack.order[slice(*pack.bounds[position : position + 2])]):
        found = np.empty(pack.lengths[index], np.int64)
        tokens.read(int(pack.starts[index]), found)
        place = row[at : at + len(found) - 1]
        place[:, 0], place[:, 2] = unsigned(found)[:-1], number
        place[:, 1] = np.where(found[1:] < 0, IGNORED, found[1:])
        at += len(place)


def pack(lengths: Rows, learned: Rows, room: int) -> Pack:
    """Packs conversations into rows of `room` inputs."""
    fitting = np.flatnonzero(lengths <= room + 1)
    longest_first = fitting[np.argsort(-lengths[fitting], kind="stable")]
    # The last token is only a target.
    rows = best_fit(longest_first.tolist(), (lengths - 1).tolist(), room)
    order = np.array([index for row in rows for index in row], np.int64)
    bounds = np.cumsum([0, *map(len, rows)])
    totals = np.append(0, np.cumsum(learned[order]))[bounds]
    return Pack(np.cumsum(lengths) - lengths, lengths, order, bounds, np.diff(totals))


def best_fit(items: list[int], sizes: list[int], room: int) -> list[list[int]]:
    """Puts each item, in this order, into the row whose free room it fills best, or a new row."""
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
