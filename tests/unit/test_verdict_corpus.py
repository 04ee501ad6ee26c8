"""The verdict against real-shaped logs: cause, rank and node. tests/bench/bench_verdict.py prints the figures of both halves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from verdict_cases import (
    PRINTED,
    Case,
    naming,
    printed,
    read_cases,
    score,
    who,
    with_counters,
    with_skew,
    without_kernel,
    without_ranks,
    without_stamps,
)
from verdict_tracebacks import FORMS, HEAD, python, told

from trainfleet.watch.causes import CAUSES
from trainfleet.watch.diagnosis import diagnose

CASES = read_cases()
TUNED = [case for case in CASES if not case.judging]
JUDGING = [case for case in CASES if case.judging]
UNTOUCHED = [case for case in CASES if case.untouched]


def some(forms: Iterable[str]) -> list[Any]:
    """Every fourth form in make test, all of them among the thorough cases."""
    return [
        form if number % 4 == 0 else pytest.param(form, marks=pytest.mark.thorough)
        for number, form in enumerate(forms)
    ]


def test_the_corpus_is_large_and_labelled() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 1180
    for case in CASES:
        assert case.cause in (*CAUSES, "none"), case.name
        assert case.labels["from"], case.name
        assert case.lines, case.name
    labels = Counter(case.cause for case in CASES)
    assert set(CAUSES) - {"unknown"} <= set(labels), "every cause has a log"
    assert labels["none"] >= 180 and len(CASES) - labels["none"] >= 1000


def test_the_halves_are_split_by_source_and_about_equal() -> None:
    assert not {case.source for case in TUNED} & {case.source for case in JUDGING}
    assert (
        0.48 < len(JUDGING) / len(CASES) < 0.62
    )  # a file that is kept for judging takes its sources along
    assert UNTOUCHED and all(case.judging for case in UNTOUCHED)


@pytest.mark.parametrize("half", [TUNED, JUDGING, UNTOUCHED], ids=["tuned", "judging", "untouched"])
def test_precision_and_recall(half: list[Case]) -> None:
    found = score(half)
    assert found.precision >= 0.95 and found.recall >= 0.9, found.wrong
    assert not found.fooled, found.fooled
    assert found.placed >= 0.9 * found.right, found.wrong
    assert not found.wrong_and_sure, found.wrong_and_sure
    assert found.sure >= 0.32 * found.right, "sure of nothing is never wrong either"


@pytest.mark.parametrize(
    "half, lost",
    [
        pytest.param(JUDGING, 2, id="judging"),
        pytest.param(TUNED, 2, id="tuned", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("change", [without_ranks, with_skew, with_counters])
def test_without_prefixes_with_clocks_that_differ_and_the_kernel_s_log_closed_the_causes_are_the_same(
    change: Callable[[Case], Case], half: list[Case], lost: int
) -> None:
    """Three of all are lost: systemd-oomd, NFS and a fabric manager have no counter."""
    as_is, changed = score(half), score(half, change)
    assert changed.right >= as_is.right - lost and len(changed.fooled) <= len(as_is.fooled) + 2, (
        changed.wrong
    )


def test_without_the_kernels_log_no_other_cause_is_sure() -> None:
    """Nor counters: what only the kernel knew is not known then; nothing else is named instead, for certain."""
    as_is, changed = score(CASES), score(CASES, without_kernel)
    assert set(changed.wrong_and_sure) <= set(as_is.wrong_and_sure) and changed.precision >= 0.9, (
        changed.wrong
    )


def test_logs_without_our_stamps_are_read_as_well() -> None:
    """What the watchdog and the backends saw is in no log of a stranger, and which of several nodes was first is not known."""
    as_is, found = score(CASES), score(CASES, without_stamps)
    assert (
        found.precision >= 0.98 and found.right >= 0.99 * as_is.right and len(found.fooled) <= 2
    ), found.wrong
    assert len(found.wrong_and_sure) <= 0.01 * found.sure, found.wrong_and_sure


@pytest.mark.parametrize("how", some(PRINTED))
def test_what_stands_before_each_line_hides_little(how: str) -> None:
    """Another launcher's, logger's or shipper's form of the same lines; what the watchdog saw is in none of them."""
    cases = [case for case in CASES[::2] if not any(line.who == "watch" for line in case.lines)]
    found = score(cases, printed(how))
    assert found.precision >= 0.95 and found.recall >= 0.91, found.wrong
    assert len(found.fooled) <= 8 and len(found.wrong_and_sure) <= 2, (
        found.fooled,
        found.wrong_and_sure,
    )


@pytest.mark.parametrize("form", some(FORMS))
def test_exceptions_are_read_in_every_form_in_which_they_are_printed(form: str) -> None:
    """A root's cause stands, whatever box it is in and whatever failed because of it."""
    cases = [case for case in CASES if any(line.text == HEAD for line in case.lines)][::2]
    plain = score(cases, lambda case: told(case, python))
    write, lost = FORMS[form]
    found = score(cases, lambda case: told(case, write))
    assert len(cases) > 200 and found.right >= (1 - lost) * plain.right - 2, set(found.wrong) - set(
        plain.wrong
    )
    assert found.precision >= plain.precision - 0.05 and len(found.wrong_and_sure) <= len(
        plain.wrong_and_sure
    )


@pytest.mark.parametrize("case", TUNED, ids=lambda case: case.name)
def test_the_first_rank_and_its_node_are_named(case: Case) -> None:
    finding = naming(case)
    assert (finding.cause if finding else "none") == case.cause, finding
    assert who(finding) == case.who, finding


def test_words_shuffled_between_nodes_do_not_change_the_verdict() -> None:
    """Which file is read first, and what order lines of different nodes have, must not matter."""
    for case in CASES:
        by_node = sorted(case.lines, key=lambda line: -(line.node or 0))
        one, other = diagnose(case.lines), diagnose(by_node)
        assert (one and (one.cause, who(one))) == (other and (other.cause, who(other))), case.name
