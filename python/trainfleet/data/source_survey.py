"""What a config's sources and tokenizer are, for `make plan`: listed and tried, by the readers of
`make tokenize`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config.types import Data
from .archives import look_into
from .bad_records import STOP
from .documents import read_piece
from .format_table import format_of
from .sources import UnitPlan, plan_units, seconds_for
from .tokenizer import require_use


@dataclass(frozen=True)
class SourceSurvey:
    """How much there is to tokenize, and what a user should hear of it. `largest`: the bytes of the
    largest unit.
    """

    files: int
    bytes: int
    units: int
    largest: int
    warnings: tuple[str, ...]

    def seconds(self, processes: int) -> float:
        """About how long tokenizing takes with so many processes."""
        return seconds_for(self.bytes, self.largest, processes)


def look(data: Data) -> SourceSurvey:
    """Looks. DataError where a source or the tokenizer can't be used."""
    plan = plan_units(data)
    require_use(data)
    if data.bad_records == STOP:
        _read_first_records(plan, data)
    warnings = (*plan.warnings, *look_into(plan.units, data))
    return SourceSurvey(
        plan.files, plan.bytes, len(plan.units), max(unit.bytes for unit in plan.units), warnings
    )


def _read_first_records(plan: UnitPlan, data: Data) -> None:
    """Reads the first record of each source of JSON lines on this disk. DataError where tokenizing
    would end with it.
    """
    for source, piece in {unit.source: unit.pieces[0] for unit in reversed(plan.units)}.items():
        row = format_of(piece.path)
        if row and row.divided and row.by_jq and Path(piece.path).is_file():
            next(read_piece(piece, data.text_field_of(source)), None)
