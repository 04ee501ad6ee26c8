"""The points of make sweep: every combination, or some of them; what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import verbs
from trainfleet.cli import main as command
from trainfleet.launch import sweep
from trainfleet.launch.execution import STOPPED
from trainfleet.launch.sweep import axes_of, combinations, rungs
from trainfleet.plan.plan import Plan

TEN = ",".join(map(str, range(1, 11)))


def test_every_combination_or_the_same_sample_of_them() -> None:
    axes = axes_of("train.learning_rate=1e-4,3e-4,1e-4 model.layers=1,2")
    every = combinations(axes, 0)
    assert len(every) == len(set(every)) == 4
    assert every[1] == (("train.learning_rate", "3e-4"), ("model.layers", "1"))
    many = axes_of(
        f"train.seed={TEN} train.steps={TEN} model.layers={TEN} train.warmup_steps={TEN}"
    )
    assert (
        combinations(many, 20) == combinations(many, 20) and len(set(combinations(many, 20))) == 20
    )


@pytest.mark.parametrize(("points", "stages"), [
    (1, [(1, 1)]), (2, [(2, 1), (1, 2)]), (6, [(8, 3), (4, 2), (2, 1), (1, 6)]), (8, [(8, 4), (4, 2), (2, 1), (1, 8)]),
])  # fmt: skip
def test_halves_end_with_one_point_at_all_steps(points: int, stages: list[tuple[int, int]]) -> None:
    assert rungs(points, halving=True) == stages
    assert rungs(points, halving=False) == [(1, points)]


@pytest.mark.parametrize(("words", "told"), [
    ((), "GRID: must list keys with their values"),
    (("GRID=train.seed",), '"train.seed" is not KEY=VALUE,VALUE'),
    (("GRID=data.name=a,b",), "GRID: data.name: only keys of train and model may differ"),
    (("GRID=train.seed=1 train.seed=2",), "train.seed: is listed twice"),
    ((f"GRID=train.seed={TEN} train.steps={TEN} model.layers={TEN} train.warmup_steps={TEN}",), "has 10,000 points; at most 100"),
    (("GRID=model.layers=1,0",), "GRID model.layers=0: model.layers: must be at least 1"),
    (("GRID=train.seed=1", "STOP=third"), "STOP: must be half"),
    (("GRID=train.seed=1", "SET=fleet.backend=ssh fleet.shared_folder=/fsx/me fleet.hosts=[h] fleet.instance_type=p5.48xlarge "
      "fleet.nodes=1 train.steps=9999999 budget.max_usd=1"), "over the limit of $1.00"),
])  # fmt: skip
def test_one_message_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...], told: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("name: x\ndata: {sources: [text], vocab_size: 300}\n")
    verbs.write_text(Path("text"))
    assert command(["sweep", *words]) == 2
    assert told in capsys.readouterr().err and not Path("runs").exists()


def test_each_point_trains_for_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("name: x\ndata: {sources: [text], vocab_size: 300}\n")
    verbs.write_text(Path("text"))
    trained = list[int]()

    def train(plan: Plan, *_: object, **__: object) -> int:
        return trained.append(plan.config.train.steps) or STOPPED * (len(trained) > 1)

    monkeypatch.setattr(sweep, "train", train)
    assert command(["sweep", "GRID=train.steps=20,10"]) == STOPPED and trained == [20, 10]
