"""make status: how the run stands, from its folder alone."""

from __future__ import annotations

from ..report.summary import status
from .place import place_of
from .settings import run_named
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    with place_of(variables) as place:
        place.refresh()
    print(status(run_named(variables)))
    return 0
