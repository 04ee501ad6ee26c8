"""The memory model against what torch allocates where a fake group will not do: pipelines on real ranks, and compiled blocks.

Not with tensor parallelism: what gloo's threads let go of, the profiler does not see.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

import allocations
from trainfleet.config import Settings, load
from trainfleet.config.memory import memory_of

PIPELINE = "train.parallelism.pipeline=2 train.global_batch_size=32"
CASES = {  # settings: ranks, and how far the model may lie off
    f"{PIPELINE} train.parallelism.virtual_stages=1": (2, 0.9, 1.2),
    f"{PIPELINE} train.parallelism.virtual_stages=1 train.activation_checkpointing=full": (
        2,
        0.9,
        1.2,
    ),
    f"{PIPELINE} train.parallelism.virtual_stages=3": (2, 0.9, 1.2),
    "train.parallelism.pipeline=4 train.global_batch_size=32": (4, 0.9, 1.2),
    "train.parallelism.pipeline=4 train.global_batch_size=64 train.parallelism.virtual_stages=2 model.layers=8": (
        4,
        0.9,
        1.2,
    ),
    "train.parallelism.pipeline=2 train.parallelism.fsdp=2 train.global_batch_size=64": (
        4,
        0.9,
        1.2,
    ),  # all gathered, all gradients whole
    "train.parallelism.pipeline=2 train.parallelism.fsdp=2 train.parallelism.zero_stage=1 train.global_batch_size=64": (
        4,
        0.9,
        1.2,
    ),
    "train.compile=true train.global_batch_size=8": (
        1,
        1.0,
        1.6,
    ),  # compiled blocks keep less, and only their own forms of it
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, int]]]:
    """For each case every rank's bytes: held, and at the fullest moment."""
    folder = tmp_path_factory.mktemp("memory")
    (folder / "config.yaml").write_text(allocations.CONFIG)
    found: dict[str, list[tuple[int, int]]] = {}
    for count in sorted({count for count, *_ in CASES.values()}):
        words = [
            f"fleet.nodes={count} {settings}"
            for settings, (size, *_) in CASES.items()
            if size == count
        ]
        program = [
            sys.executable,
            allocations.__file__,
            str(count),
            str(ranks.free_port()),
            "config.yaml",
            *words,
        ]
        environment = os.environ | {
            "PYTHONPATH": str(ranks.ROOT / "python"),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            program, cwd=folder, env=environment, text=True, capture_output=True, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr
        for line in done.stdout.splitlines():
            if line.startswith("["):
                settings, _, held, peak = json.loads(line)
                found.setdefault(settings.partition(" ")[2], []).append((held, peak))
    return found


@pytest.mark.parametrize("settings", CASES)
def test_what_is_reckoned_is_what_the_fullest_rank_allocates(
    measured: dict[str, list[tuple[int, int]]], settings: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(allocations.CONFIG)
    count, low, high = CASES[settings]
    config, _ = load(Settings(tmp_path / "config.yaml", f"fleet.nodes={count} {settings}"))
    peak, reckoned = max(peak for _, peak in measured[settings]), memory_of(config, half=False)
    print(f"{settings}: {reckoned.total / peak:.2f}")
    assert low * peak < reckoned.total < high * peak, (reckoned, measured[settings])
