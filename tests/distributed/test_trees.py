"""Votes among real ranks over gloo: in one group, in a tree, and in trees with a group of one, which talks on a higher level alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import environment, free_port


@pytest.mark.parametrize(
    ("size", "local", "fan"),
    [(1, 1, 16), (3, 1, 16), (5, 1, 2), (6, 3, 2), (7, 1, 3), (8, 4, 4)],
    ids=str,
)
def test_every_rank_has_the_same_sum_at_every_turn(size: int, local: int, fan: int) -> None:
    words = [
        sys.executable,
        str(Path(__file__).with_name("trees.py")),
        *map(str, (size, local, free_port(), fan)),
    ]
    done = subprocess.run(
        words, env=environment(), text=True, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [[size * (size - 1) / 2, float(turn < size), float(size)] for turn in range(5)]
    assert done.stdout.splitlines() == [str(expected)] * size
