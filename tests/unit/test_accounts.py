"""The accounts of published engines: what a paper drew exactly, and what an allocator told, come out of one sum."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from bench_accounts import GIB, ROWS, bytes_of, case_of, engine_of


def errors(words: str) -> list[float]:
    rows = [json.loads(line) for line in Path(ROWS).read_text().splitlines()]
    told = [row for row in rows if words in row["source"] and row["measured"].get("memory_gib") and case_of(row)]
    return [bytes_of(case_of(row), engine_of(row)[1]) / GIB / row["measured"]["memory_gib"] - 1 for row in told]  # type: ignore[arg-type]


def test_what_a_paper_drew_is_met_to_a_thousandth() -> None:
    assert errors("Korthikanti") == pytest.approx([0.0] * 8, abs=1e-3)


@pytest.mark.parametrize(("words", "median"), [("nanotron", 0.02), ("torchtitan", 0.05), ("dgxc", 0.06)])
def test_what_an_allocator_told_is_met(words: str, median: float) -> None:
    assert statistics.median(map(abs, errors(words))) < median
