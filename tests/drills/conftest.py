"""One lab of four hosts for all drills, and the losses of a run to which nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from cockpit import TABLE, Cockpit, pin

import verbs
from fleet.lab import Lab, lab


@pytest.fixture(scope="package")
def nodes(tell: Callable[[str], None]) -> Iterator[Lab]:
    with lab(4) as up:
        verbs.write_text(up.shared / "text")
        pin(up)
        yield up
        tell("\n".join(["", *TABLE]))


@pytest.fixture(scope="package")
def whole(nodes: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run to which nothing happens; setting up and tokenizing are done with it."""
    cockpit = Cockpit(nodes, tmp_path_factory.mktemp("whole"), "whole")
    cockpit.type("setup")
    output = cockpit.type("train")
    assert cockpit.results()["restarts"] == 0 and cockpit.results()["world_size"] == 3, output
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 25)
    return cockpit.losses()
