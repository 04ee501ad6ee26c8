"""Surveys a config's sources and tokenizer for `make plan`, using the same readers as `make
tokenize`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ..config.types import Data
from ..trust.errors import DataError
from .archives import look_into
from .bad_records import STOP, Skipped
from .documents import read_piece
from .format_table import TAR, is_record, name_of
from .source_files import is_remote
from .sources import UnitPlan, plan_units, seconds_for
from .tokenizer import require_use

FIRST = 2**24  # maximum size of a .json file that `make plan` reads, in bytes
SAMPLE = 2**22  # text to read per source for its ratio of text to file size, in bytes


@dataclass(frozen=True)
class SourceSurvey:
    """Amount of text to tokenize, with warnings for the user. `largest` is the size of the largest
    unit in bytes, and `by_source` the estimated size of each source's text.
    """

    files: int
    bytes: int
    units: int
    largest: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    by_source: Mapping[int, int]

    def seconds(self, processes: int) -> float:
        """Estimates the tokenization time in seconds for a number of processes."""
        return seconds_for(self.bytes, self.largest, processes)


def look(data: Data) -> SourceSurvey:
    """Surveys the sources and the tokenizer. Raises DataError if a source or the tokenizer is
    unusable.
    """
    plan = plan_units(data)
    require_use(data)
    ratios = _text_ratios(plan, data)
    warnings = (*plan.warnings, *look_into(plan.units, data))
    by_source = Counter[int]()
    for unit in plan.units:
        by_source[unit.source] += int(unit.bytes * ratios.get(unit.source, 1))
    return SourceSurvey(
        plan.files,
        plan.bytes,
        len(plan.units),
        max(unit.bytes for unit in plan.units),
        warnings,
        tuple(plan.notes),
        by_source,
    )


def _text_ratios(plan: UnitPlan, data: Data) -> dict[int, float]:
    """Returns the bytes of text per byte of file, from the first records of each source on this
    disk. Raises DataError if a source's first record would make tokenization fail.
    """
    ratios = {}
    for source, piece in {unit.source: unit.pieces[0] for unit in reversed(plan.units)}.items():
        kind = name_of(piece.path)
        large = kind == "json" and piece.bytes > FIRST  # .json files are read as a whole
        if is_record(piece.path) and kind != TAR and not large and not is_remote(piece.path):
            field = data.text_field_of(source)
            if data.on_bad_record == STOP:
                next(read_piece(piece, field), None)
            with suppress(DataError):  # of a later record, or of one that may be skipped
                text = consumed = 0
                for document in read_piece(piece, field, Skipped()):
                    text, consumed = text + document.size, consumed + document.consumed
                    if text >= SAMPLE:
                        break
                ratios[source] = text / max(consumed, 1)
    return ratios
