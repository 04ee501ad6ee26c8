"""make rehearse on instances that a pretended AWS made, and that are sshd nodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.lab import lab
from fleet.test_cloud import Place, account_on


@pytest.mark.timeout(900)
def test_a_rehearsal_on_instances_keeps_its_promise_and_leaves_nothing(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    with lab(2) as nodes, account_on(nodes) as (account, _, address):
        place = Place(tmp_path / "laptop", address, nodes)
        assert (
            "a rehearsal needs two hosts, or three to cut one off; the fleet has 0"
            in place.type("rehearse", "YES=1", code=2)
        )
        place.type("setup", "NODES=2")
        assert "needs your consent" in place.type("rehearse", code=1)
        living = [thing.id for thing in account.living()]
        said = place.type("rehearse", "FAULTS=rank-killed link-slowed", "YES=1")
        tell(said)
        assert re.search(r"(?m)^rank-killed .* killed, right .* equal .* kept$", said), said
        assert (
            "link-slowed        not tried here: with two nodes" in said and "1 of 1 faults" in said
        ), said
        assert [thing.id for thing in account.living()] == living
        assert not list(nodes.shared.glob("trainfleet/rehearsal*"))
