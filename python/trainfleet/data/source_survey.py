"""What a config's sources and tokenizer are, for `make plan`: found out by a child, behind a wall."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..config.types import Data
from ..host.sandboxed_reader import ask
from ..trust.validation import Count, Pattern
from .data_sandbox import enclose
from .sources import plan_units, seconds_for
from .tokenizer import require_use


@dataclass(frozen=True)
class SourceSurvey:
    """How much there is to tokenize, and what a user should hear of it. `largest`: the bytes of the largest unit."""

    files: Count
    bytes: Count
    units: Count
    largest: Count
    warnings: tuple[Annotated[str, Pattern(r"[^\x00-\x1f\x7f-\x9f]*")], ...]

    def seconds(self, processes: int) -> float:
        """About how long tokenizing takes with so many processes."""
        return seconds_for(self.bytes, self.largest, processes)


def look(data: Data) -> SourceSurvey:
    """Looks. DataError where a source or the tokenizer can't be used."""
    with tempfile.TemporaryDirectory(prefix="trainfleet-") as scratch:

        def reply() -> SourceSurvey:
            enclose(data, [], [Path(scratch)])
            return look_here(data)

        return ask(reply, SourceSurvey, "data.sources")


def look_here(data: Data) -> SourceSurvey:
    """Looks in this process, without a wall."""
    require_use(data)
    plan = plan_units(data)
    return SourceSurvey(plan.files, plan.bytes, len(plan.units), max(unit.bytes for unit in plan.units), plan.warnings)
