"""Each source of a mixture has its own validation loss and its epochs; the whole split's loss is the one of a single source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from ranks import Bench

from trainfleet.config import load_resolved
from trainfleet.data.dataset import Dataset
from trainfleet.engine import generate
from trainfleet.report.history import read
from trainfleet.report.html import write
from trainfleet.report.summary import status
from trainfleet.run.run_folder import Run

MIXTURE = (
    "data.sources='[{path: text/code, weight: 3}, {path: text/words, weight: 1}]' data.name=both"
)
SPLIT = "data.sources='[text/code, text/words]' data.name=split"
STEPS = {"train.steps": 4, "train.validate_every": 2, "checkpoint.every": 2, "model.layers": 2}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "alone": (1, {}),
    "ddp4": (4, {}),
    "fsdp2-tp2": (4, {"train.parallelism.fsdp": 2, "train.parallelism.tensor": 2}),
    "pp2": (2, {"train.parallelism.pipeline": 2}),
}


@pytest.fixture(scope="module")
def mixed(bench: Bench) -> Bench:
    """The bench, with its files in two folders: most of them in the first."""
    for number, file in enumerate(sorted(Path("text").iterdir())):
        folder = Path("text") / ("code" if number < 30 else "words")
        folder.mkdir(exist_ok=True)
        file.rename(folder / file.name)
    return bench


def tokenized(bench: Bench, words: str) -> dict[str, object]:
    from trainfleet.config import Settings, load
    from trainfleet.data.tokenize_worker import Share, tokenize

    tokenize(load(Settings(bench.folder / "config.yaml", words))[0].data, Share(0, 1, 1))
    return {part.split("=", 1)[0]: part.split("=", 1)[1] for part in words.rsplit(" ", 1)}


def validated(run: Path) -> dict[int, dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {
        line["step"]: {key: line[key] for key in line if key.startswith("valid_loss")}
        for line in lines
        if "valid_loss" in line
    }


def test_every_layout_validates_each_source_and_a_resumed_run_to_the_bit(mixed: Bench) -> None:
    data = tokenized(mixed, MIXTURE)
    prepared = [
        (mixed.prepare(name, size, **STEPS, **data, **values), size)
        for name, (size, values) in LAYOUTS.items()
    ]
    output = mixed.train_all(prepared)
    alone = validated(prepared[0][0])
    assert list(alone) == [2, 4]
    assert list(alone[4]) == ["valid_loss", "valid_loss/code", "valid_loss/words"]
    assert alone[4]["valid_loss/code"] != alone[4]["valid_loss/words"]
    assert "  validation/code " in output and "  validation/words " in output
    for run, _ in prepared[1:]:
        for step, losses in validated(run).items():
            assert losses == pytest.approx(alone[step], rel=1e-4), run
    assert alone[4] == pytest.approx(by_hand(prepared[0][0]), rel=1e-5)
    again = mixed.folder / "runs" / "again"
    shutil.copytree(prepared[1][0], again)
    shutil.rmtree(again / "checkpoints" / "step-00000004")
    assert mixed.attempt(again, 4)[0] == 0
    assert validated(again) == validated(prepared[1][0])
    told(prepared[0][0])


def by_hand(run: Path) -> dict[str, float]:
    """Losses of the last checkpoint on the first sequences of each part, one at a time."""
    model, dataset = generate.load(Run(run))
    train = load_resolved(run / "config.yaml").train
    found = {}
    for part, most in (("validation", 6), ("validation/code", 3), ("validation/words", 3)):
        rows = dataset.batch(part, 0, most, train.sequence_length, 0)
        losses = []
        for row in torch.from_numpy(rows):
            with torch.no_grad():
                losses.append(model(row[None, :-1], targets=row[None, 1:]).item())
        found[part.replace("validation", "valid_loss")] = sum(losses) / most
    return found


def told(run: Path) -> None:
    """The run's results, its status and its page name the sources."""
    results, last = ranks.results(run), validated(run)[4]
    assert results["valid_losses"] == {
        name: last[f"valid_loss/{name}"] for name in ("code", "words")
    }
    dataset = Dataset.open(Path("data/both"), load_resolved(run / "config.yaml").data)
    counts = dict(zip(("code", "words"), dataset.counts("train", 64), strict=True))
    sources, _ = dataset.positions("train", 0, 4 * 8, 64, 1337)
    assert list(results["source_epochs"]) == ["words", "code"]
    for number, name in enumerate(counts):
        epochs = results["source_epochs"][name]
        assert epochs == pytest.approx((sources == number).sum() / counts[name], rel=0.3)
    history = read(Run(run))
    words = status(Run(run))
    assert (
        f"validation {last['valid_loss']:.3f} (code {last['valid_loss/code']:.3f}, words" in words
    )
    assert "epochs by the end: words 0." in words
    page = write(history.run).read_text()
    assert "<h2>Sources</h2>" in page and "words " in page and "epochs by the end" in page


def test_the_loss_of_the_whole_split_is_that_of_one_source_to_the_bit(mixed: Bench) -> None:
    """Two sources that are the folders of one, without weights: the same tokens in the same order."""
    runs: list[tuple[Path, int]] = []
    for name, words in (("one", "data.sources='[text]' data.name=one"), ("two", SPLIT)):
        data: dict[str, Any] = tokenized(mixed, words)
        runs.append((mixed.prepare(name, 1, **STEPS, **data), 1))
    mixed.train_all(runs)
    one, two = (validated(run) for run, _ in runs)
    assert [list(losses) for losses in one.values()] == [["valid_loss"]] * 2
    assert {step: losses["valid_loss"] for step, losses in two.items()} == {
        step: losses["valid_loss"] for step, losses in one.items()
    }
    assert "source_epochs" not in ranks.results(runs[0][0])
