"""A network and a callback of one's own, as docs/how-to/own-model.md has them, typed and trained as a user does: every process is real."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import verbs

ROOT = Path(__file__).parents[2]
EXAMPLES = dict(
    re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```",
        (ROOT / "docs" / "how-to" / "own-model.md").read_text(),
        re.DOTALL,
    )
)
CONFIG = """
name: own
data: {name: text, sources: [text], vocab_size: 340, validation_fraction: 0.1}
model: {module: my_model.py, layers: 2, hidden_size: 32, heads: 2, kv_heads: 2, intermediate_size: 64}
train: {callback: my_callback.py, steps: 12, precision: fp32, global_batch_size: 8, sequence_length: 32, log_every: 1}
checkpoint: {every: 4}
"""


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "my_model.py").write_text(EXAMPLES["my_model.py"])
    (tmp_path / "my_callback.py").write_text(EXAMPLES["my_callback.py"].replace("% 100", "% 5"))
    verbs.write_text(tmp_path / "text")
    return tmp_path


def test_it_trains_goes_on_writes_and_is_not_exported(desk: Path) -> None:
    verbs.enter(desk, "train", timeout=120)
    results, run = json.loads((desk / "runs/own/results.json").read_text()), desk / "runs/own"
    assert (
        results["status"] == "finished"
        and results["final_loss"] < 0.95 * results["first_loss"]
        and results["sample"]["text"]
    )
    said = [(run / f"logs/node-{node}.log").read_text() for node in (0, 1)]
    assert [("step 5: 1,280 tokens" in each, "step 10: 2,560 tokens" in each) for each in said] == [
        (True, True),
        (False, False),
    ]
    weights = "".join(
        path.read_bytes().decode("latin1")
        for path in (run / "checkpoints/step-00000012").rglob("*")
    )
    assert "up_proj" in weights and "gate_proj" not in weights

    verbs.enter(desk, "train", "SET=train.steps=20", timeout=120)
    assert sorted(verbs.losses(run)) == list(range(1, 21))
    assert "Document 3" in verbs.enter(desk, "sample", "PROMPT=Document 3", "LENGTH=5", timeout=60)
    assert "bits per byte" in verbs.enter(desk, "eval", timeout=60)
    refused = verbs.enter(desk, "export", "OUT=out", code=1, timeout=60)
    assert (
        "transformers has no class for the model in my_model.py" in refused
        and not (desk / "out").exists()
    )


def test_its_plan_divides_it_and_the_losses_stay(desk: Path) -> None:
    for name, words in (
        ("whole", ""),
        ("split", "train.parallelism.tensor=2 train.parallelism.fsdp=1"),
    ):
        verbs.enter(
            desk,
            "train",
            "NODES=1",
            f"SET=name={name} fleet.ranks_per_node=2 train.steps=6 {words}",
            timeout=120,
        )
    results = json.loads((desk / "runs/split/results.json").read_text())
    assert results["layout"] == {"dp": 1, "fsdp": 1, "tp": 2, "pp": 1, "cp": 1}
    assert verbs.losses(desk / "runs/split") == pytest.approx(
        verbs.losses(desk / "runs/whole"), rel=1e-4
    )


def test_a_callback_that_fails_ends_the_run_with_its_rank(desk: Path) -> None:
    fails = "def after_step(step, trainer):\n    if step == 3 and trainer.world.rank == 1:\n        raise ValueError('as planned')\n"
    (desk / "my_callback.py").write_text(fails)
    said = verbs.enter(desk, "train", code=1, timeout=120)
    assert "rank 1" in said and "as planned" in said and "my_callback.py" in said
