"""Every bad input of tests/foreign: some 14,000, each in at most two seconds of CPU. tests/unit/test_foreign_sample.py takes a sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from foreign import commands, configs, documents, folders, models, spelling, wholes
from foreign.cases import Case, judge_all

SEED = 2026
EVERY = [
    configs.values, configs.texts, configs.duplicates, configs.contradictions, configs.sources, lambda: configs.drawn(SEED, 1500), commands.sets, commands.variables, commands.config_files, models.shapes, models.tokenizers, lambda: models.encoders(SEED, 600),
    folders.configs, folders.manifests, folders.summaries, lambda: folders.drawn(SEED, 100), lambda: some(folders.files(), 250), lambda: some(folders.values(), 400), lambda: some(folders.values("report"), 60), lambda: some(folders.files("report"), 40),
    lambda: some(wholes.files(), 600), wholes.weights, wholes.manifests, documents.records, documents.tables, documents.bombs, documents.tars, lambda: documents.drawn(SEED, 1500),
]  # fmt: skip


def some(cases: Iterable[Case], count: int) -> list[Case]:
    """What copies a run's folder and looks at it takes half a second: of these a part, drawn anew with another SEED."""
    return random.Random(SEED).sample(list(cases), count)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cases", EVERY, ids=lambda cases: getattr(cases, "__name__", ""))
def test_every_bad_input_is_refused_at_once_with_its_place(
    cases: Callable[[], Iterable[Case]], tmp_path: Path
) -> None:
    faults = judge_all(list(cases()), tmp_path / "cases")
    assert not faults, "\n".join(faults[:50])


@pytest.mark.parametrize(
    "meant",
    [
        lambda: spelling.slips(SEED),
        lambda: spelling.slips(SEED + 1),
        spelling.cases,
        spelling.synonyms,
    ],
)
def test_the_key_that_was_meant_is_named(
    meant: Callable[[], Iterable[spelling.Meant]], tmp_path: Path
) -> None:
    count, wrong = spelling.missed(iter(meant()), tmp_path)
    assert len(wrong) <= 0.05 * count, "\n".join(wrong)
