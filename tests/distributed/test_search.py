"""The search for a micro-batch, on two real ranks: it finds one that fits, all agree on it, and the run does not notice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
from ranks import Bench

SEARCH = {"train.search_micro_batch": "true", "train.compile": "false", "train.precision": "fp32", "train.global_batch": 16,
          "train.steps": 6, "model.family": "roberta", "model.kv_heads": 4, "model.tie_embeddings": "true", "model.dropout": 0.1}  # fmt: skip
PLANTED = str(Path(__file__).with_name("searching.py"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    here = Path.cwd()
    yield Bench(tmp_path_factory.mktemp("search"))
    os.chdir(here)


def found(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "search.json").read_text()))


def tried(run: Path) -> list[str]:
    return [event["message"] for event in ranks.events(run, "tried")]


def train(bench: Bench, run: Path, *program: str) -> tuple[int, str]:
    """The exit code and the output of two ranks."""
    process = bench.start(run, 2, *program)
    output = process.communicate(timeout=bench.patience)[0]
    return process.returncode, output


def test_a_run_that_searches_is_the_run_with_what_it_found_and_searches_once(bench: Bench) -> None:
    """With dropout, so that random numbers that a trial drew would show."""
    run = bench.prepare("searched", 2, **SEARCH)
    assert train(bench, run)[0] == 0
    size, told = found(run)["micro_batch"], tried(run)
    speeds = {trial["micro_batch"]: trial["tokens_per_second"] for trial in found(run)["trials"]}
    assert speeds[size] == max(speeds.values()) and len(told) == len(speeds) >= 3 and sorted(speeds)[:2] == [1, 2]
    assert ranks.results(run)["micro_batch_sequences"] == size
    given = bench.prepare("given", 2, **SEARCH | {"train.search_micro_batch": "false", "train.micro_batch": size})
    assert train(bench, given)[0] == 0
    assert ranks.metrics(run) == ranks.metrics(given) and len(ranks.metrics(run)) == 6
    ours, theirs = (ranks.state_of(folder / "checkpoints" / "step-00000006") for folder in (run, given))
    assert any("exp_avg_sq" in name for name in ours) and ranks.different(ours, theirs) == []
    run = bench.prepare("searched", 2, **SEARCH | {"train.steps": 8, "train.schedule_steps": 8})
    code, output = train(bench, run)
    assert code == 0 and ranks.metrics(run)[-1]["step"] == 8 and tried(run) == told, output
    assert ranks.results(run)["micro_batch_sequences"] == size


def test_a_size_for_which_one_rank_lacks_memory_is_left_and_its_lack_elsewhere_is_an_error(bench: Bench) -> None:
    run = bench.prepare("hindered", 2, **SEARCH)
    code, output = train(bench, run, PLANTED)
    assert code == 0 and found(run)["micro_batch"] in (1, 2), output
    assert tried(run)[-1] == "micro-batch 4: does not fit" and ranks.metrics(run)[-1]["step"] == 6
    run = bench.prepare("too-large", 2, **SEARCH | {"train.search_micro_batch": "false", "train.micro_batch": 4})
    assert train(bench, run, PLANTED)[0] != 0
    assert "out of memory, as planted" in {fault["message"] for fault in ranks.events(run, "fault")}
