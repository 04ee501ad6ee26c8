"""What a resume changes is said before anything starts: by the plan, and by the launch."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

import verbs
from trainfleet.config import load_resolved

OLD, STEP = Path(__file__).parent / "old_checkpoint", "step-00000004"
KEPT = f"runs/old/checkpoints/{STEP}"


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A config whose run has a checkpoint of its last step, 4."""
    shape = {
        key: value
        for key, value in asdict(load_resolved(OLD / "config.yaml").model).items()
        if value is not None
    }
    shape |= {"preset": None}
    train = {"steps": 4, "global_batch_size": 8, "micro_batch_size": 4, "sequence_length": 64}
    content = {
        "name": "old",
        "data": {"sources": ["text"], "vocab_size": 300},
        "model": shape,
        "train": train,
    }
    (tmp_path / "config.yaml").write_text(json.dumps(content))
    shutil.copytree(OLD / STEP, tmp_path / KEPT)
    verbs.write_text(tmp_path / "text")
    return tmp_path


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_another_optimizer_is_refused_before_anything_starts(desk: Path, verb: str) -> None:
    said = verbs.enter(desk, verb, "SET=train.optimizer=muon", code=1)
    assert (
        "can't resume with a different train.optimizer" in said
        and f"SET='name=again train.init_from={KEPT}'" in said
    )
    assert not (desk / "data").exists() and not (desk / "runs/old/events").exists()


def test_the_proposed_way_to_another_optimizer_works(desk: Path) -> None:
    assert "\nnext: make train" in verbs.enter(
        desk, "plan", f"SET=train.optimizer=muon name=again train.init_from={KEPT}"
    )


def test_the_plan_of_a_longer_run_tells_both_rates_and_what_holds_the_first(desk: Path) -> None:
    said = verbs.enter(desk, "plan", "SET=train.steps=8")
    assert (
        f"resumes from {KEPT}; train.steps changed from 4 to 8; train.schedule_steps changed from 4 to 8"
        in said
    )
    assert "the learning rate jumps from 0.0003 at step 4 to 0.001" in said
    held = said.partition("; use SET='")[2].partition("'")[0]
    assert "jumps" not in verbs.enter(desk, "plan", f"SET=train.steps=8 {held}")
    assert "jumps" not in verbs.enter(desk, "plan")
