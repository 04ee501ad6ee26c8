"""64 real sshd nodes: set up from a plain state, then seen unchanged in under ten seconds, with a dead and a slow one named."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from fleet.conftest import Run, lines, run
from fleet.lab import lab

__all__ = ["run"]


@pytest.mark.timeout(200)
def test_sixty_four_hosts_are_seen_in_ten_seconds(run: Run, tell: Callable[[str], None]) -> None:
    with lab(64) as nodes:
        first = run(nodes, "setup")
        assert "64 of 64 hosts ready, 64 changed" in first.stdout, first.stdout + first.stderr

        began = time.monotonic()
        second = run(nodes, "setup")
        tell(f"64 hosts, nothing to do: {time.monotonic() - began:.1f} s")
        assert second.returncode == 0 and "64 of 64 hosts ready, 0 changed" in second.stdout
        assert time.monotonic() - began < 10

        nodes.cut(13)
        nodes.slow(21, "8kbit")
        began = time.monotonic()
        third = run(nodes, "setup")
        seconds = time.monotonic() - began
        tell(f"with one dead and one slow: {seconds:.1f} s")
        table = lines(third.stdout)
        assert "FAILED" in table["node13"] and "FAILED" in table["node21"], third.stdout
        assert "62 of 64 hosts ready" in third.stdout and third.returncode == 1
        assert seconds < 15  # 7 on two quiet cores, of which 6 are the slow host's
