"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str] = ()) -> Iterator[str]:
    """Aligned lines, the head first: the columns in `words` to the left, all others, which are numbers, to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        columns = zip(row, widths, head, strict=True)
        yield "  ".join(cell.ljust(width) if name in words else cell.rjust(width) for cell, width, name in columns).rstrip()
