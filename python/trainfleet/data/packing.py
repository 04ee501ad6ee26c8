"""Where documents begin and end inside packed rows, for attention that stays within them.

A row of tokens holds parts of several documents, each closed by the end-of-document id. Attention across the bounds trains
on pairs that mean nothing; these functions say, from the ids alone, what belongs together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


def document_numbers(rows: Rows, end_of_document: int) -> Rows:
    """For each token the number of its document in its row, from 0; an end belongs to the document that it closes."""
    ends = (rows == end_of_document).astype(np.int64)
    return np.asarray(np.cumsum(ends, axis=1) - ends, np.int64)


def positions(rows: Rows, end_of_document: int) -> Rows:
    """For each token its place in its document as far as the row shows it: 0 at the row's begin and after every end."""
    index = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    after_end = np.zeros_like(rows)
    after_end[:, 1:] = np.where(rows[:, :-1] == end_of_document, index[:, 1:], 0)
    return index - np.maximum.accumulate(after_end, axis=1)


def bounds(rows: Rows, end_of_document: int) -> npt.NDArray[np.int32]:
    """Where the documents of all rows, laid end to end, begin, and the total last: what variable-length attention takes."""
    first = positions(rows, end_of_document).ravel() == 0
    return np.append(np.flatnonzero(first), rows.size).astype(np.int32)
