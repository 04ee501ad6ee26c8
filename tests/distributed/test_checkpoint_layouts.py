"""A state keeps every bit through any chain of layouts, on real ranks and shapes that no degree divides."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks

CHAIN = ("dp4", "dp2", "dp1", "dp4", "tp4", "pp2", "fsdp3", "fsdptp4", "fsdp4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each layout of the chain has resumed what the one before it saved, and saved it again."""
    folder = tmp_path_factory.mktemp("layouts")
    command = [sys.executable, str(Path(__file__).with_name("layouts.py")), str(folder), *CHAIN]
    done = subprocess.run(
        command, env=ranks.environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def state_of(folder: Path, step: int) -> dict[str, Any]:
    """The model and the optimizer of a checkpoint."""
    state = ranks.state_of(folder / "checkpoints" / f"step-{step:08d}")
    return {name: value for name, value in state.items() if not name.startswith("random")}


@pytest.mark.parametrize(
    "place", range(1, len(CHAIN)), ids=[f"{a}-{b}" for a, b in itertools.pairwise(CHAIN)]
)
def test_every_bit_comes_through(folder: Path, place: int) -> None:
    first, later = state_of(folder, 1), state_of(folder, place + 1)
    assert len(first) == 11 * 4  # eleven parameters, each with two moments and a count of steps
    assert ranks.different(first, later) == []


def test_each_rank_wrote_its_part_only(folder: Path) -> None:
    """A tensor that four ranks hold is written by one of them: the files together hold it once."""
    for step, count in ((1, 4), (9, 4)):
        files = sorted((folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
        assert [file.name for file in files] == [
            f"rank-{rank:05d}.safetensors" for rank in range(count)
        ]
    sizes = [
        sum(
            file.stat().st_size
            for file in (folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
        )
        for step in (1, 3)
    ]
    assert sizes[0] < sizes[1] + 4 * 40_000  # four ranks' random numbers, and not four models


def test_as_many_ranks_go_on_with_their_random_numbers(folder: Path) -> None:
    """dp4 → tp4 keeps each rank's; dp4 → dp2 begins anew, so that two ranks never draw the same."""

    def draws(step: int, rank: int) -> dict[str, list[float]]:
        return dict(json.loads((folder / f"draws-{step}-{rank}.json").read_text()))

    for rank in range(4):
        assert draws(4, rank)["resumed"] == draws(3, rank)["next"]
    assert (
        draws(1, 0)["resumed"] != draws(0, 0)["next"]
        and draws(1, 0)["resumed"] != draws(1, 1)["resumed"]
    )
