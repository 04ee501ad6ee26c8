"""The verbs that need what a run has made, where one of its files is not what it was: a sample of tests/foreign/wholes.py."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from foreign import wholes
from foreign.cases import Case, judge_all


@pytest.mark.parametrize("verb", wholes.VERBS)
def test_a_whole_run_is_shown_continued_and_exported(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(wholes.template(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    code, said = wholes.typed(verb, *wholes.VERBS[verb])
    assert code == 0 and said, said


@pytest.mark.parametrize(
    ("cases", "count"), [(wholes.files, 10), (wholes.weights, 5), (wholes.manifests, 8)]
)
def test_a_changed_run_is_told_of_and_nothing_breaks(
    cases: Callable[[], Iterable[Case]], count: int, tmp_path: Path
) -> None:
    some = random.Random(11).sample(list(cases()), count)
    assert judge_all(some, tmp_path / "cases") == []
