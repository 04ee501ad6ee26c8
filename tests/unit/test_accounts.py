"""The accounts of published engines: what a paper drew exactly, and what an allocator told, come out of one sum."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

from trainfleet.plan.estimate import LIKELY_MEMORY

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from bench_accounts import GIB, ROWS, UNTOLD, bytes_of, case_of, engine_of, fullness, ran_out


def errors(words: str, file: Path = ROWS) -> list[float]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [
        row
        for row in rows
        if words in row["source"] and not any(word in row["id"] for word in UNTOLD)
    ]
    told = [row for row in rows if row["measured"].get("memory_gib") and case_of(row)]
    return [
        bytes_of(case_of(row), engine_of(row)[1]) / GIB / row["measured"]["memory_gib"] - 1
        for row in told
    ]  # type: ignore[arg-type]


def test_what_a_paper_drew_is_met_to_a_thousandth() -> None:
    assert errors("Korthikanti") == pytest.approx([0.0] * 8, abs=1e-3)


@pytest.mark.parametrize(
    ("words", "median"), [("nanotron", 0.02), ("torchtitan", 0.05), ("dgxc", 0.06)]
)
def test_what_an_allocator_told_is_met(words: str, median: float) -> None:
    assert statistics.median(map(abs, errors(words))) < median


def test_what_runs_told_that_no_account_was_set_by_is_met() -> None:
    kempner = errors("KempnerForge", ROWS.with_name("unseen.jsonl"))
    bloom = errors("chronicles-prequel", ROWS.with_name("unseen_memory.jsonl"))
    assert (
        len(kempner) == 14
        and statistics.median(map(abs, kempner)) < 0.03
        and max(map(abs, kempner)) < 0.08
    )
    assert (
        len(bloom) == 40
        and statistics.median(map(abs, bloom)) < 0.06
        and sorted(map(abs, bloom))[36] < 0.12
    )


def test_the_range_that_plan_states_holds_for_four_of_five_runs_that_told_their_memory() -> None:
    files = (
        ROWS,
        *(ROWS.with_name(f"unseen{name}.jsonl") for name in ("", "_second", "_third", "_memory")),
    )
    told = [abs(error) for file in files for error in errors("", file)]
    assert len(told) > 150 and sum(error < LIKELY_MEMORY for error in told) > 0.79 * len(told)


def test_runs_that_ran_out_of_memory_are_foreseen_and_those_that_ran_are_not_refused() -> None:
    full: dict[bool, list[float]] = {True: [], False: []}
    for row in map(json.loads, ROWS.with_name("unseen_memory.jsonl").read_text().splitlines()):
        case = case_of(row)
        part = fullness(row, case, engine_of(row)[1]) if case else None
        assert part is not None, row["id"]
        full[ran_out(row)].append(part)
    assert (
        len(full[True]) == 26
        and sum(part > 1 for part in full[True]) >= 22
        and sum(part > 0.9 for part in full[True]) >= 25
    )
    assert len(full[False]) == 70 and not any(part > 1 for part in full[False])
