"""What Slurm, a start's folder and a log may say where nobody means well: free text with separators, numbers without an end."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from test_walls import FILES, PACKAGE

from trainfleet.backends import job_starts
from trainfleet.backends.sagemaker import exits_of as exits_in_words
from trainfleet.backends.slurm import client
from trainfleet.backends.slurm.client import Said, SlurmClient, how_it_ended
from trainfleet.trust import untrusted_input
from trainfleet.watch.diagnosis import diagnose
from trainfleet.watch.lines import parse

ENDLESS = "9" * 5000  # digits, of which int() takes 4,300


def answering(command: str, out: str) -> SlurmClient:
    """Slurm, of which this command says `out`, and every other one nothing."""
    return SlurmClient(
        lambda words, stdin, environment: Said(0, out if words[0] == command else "", "")
    )


def test_a_separator_in_what_somebody_wrote_moves_no_other_field() -> None:
    down = answering("sinfo", "n1|drained|disk a|b\nn2|down|x\n").unavailable()
    assert down == {"n1": "drained, disk a|b", "n2": "down, x"}
    job = answering("squeue", "7|PENDING|2|n[1-2]||trainfleet 0123 2 /f /g|held by a|b|\n").look(
        "7"
    )
    assert (job.reason, job.nodes, job.restarts, job.comment) == (
        "held by a|b",
        "n[1-2]",
        2,
        "trainfleet 0123 2 /f /g",
    )


def test_squeue_is_asked_for_what_may_hold_a_separator_last() -> None:
    assert client.FIELDS[-1] == "Reason"


@pytest.mark.parametrize("number", [ENDLESS, "٣", "+1", "", " 3", "1e3", "²", str(10**18 + 1)])
def test_what_is_no_number_of_ours_is_none(number: str, tmp_path: Path) -> None:
    assert untrusted_input.whole(number) is None
    assert answering("squeue", f"7|RUNNING|{number}|n1||c|None|\n").look("7").restarts == 0
    assert "CANCELLED" in how_it_ended(answering("sacct", f"7|CANCELLED by {number}|n\n").look("7"))
    rows = f"PartitionName=a TotalNodes={number.strip()} MaxTime={number.strip()}:00:00\n"
    assert [
        (row.nodes, row.most_minutes) for row in client.read_partitions(rows) if number != " 3"
    ] in ([(0, None)], [])
    start = tmp_path / "nodes" / "slurm-7-0"
    start.mkdir(parents=True)
    (start / "logs").write_text(f"{number} /x/logs/job.log\n")
    (start / "node-0.exit").write_text(number)
    (tmp_path / "nodes" / f"slurm-7-{number[:200]}").mkdir()
    assert job_starts.exits_of(start) == ({0: 3} if number == " 3" else {})
    assert job_starts.exits(tmp_path, "7")[0] == 0
    assert job_starts.lengths(start) in ({}, {Path("/x/logs/job.log"): 3})
    assert set(exits_in_words(f"node {number}: exit code: {number}")) <= {0, 3}


def test_a_uid_that_no_machine_can_have_is_told_as_it_is() -> None:
    assert how_it_ended(answering("sacct", "7|CANCELLED by 9999999999|n\n").look("7")).endswith(
        "by user 9999999999"
    )


def test_a_rank_without_an_end_in_a_log_is_no_rank() -> None:
    for text in (
        f"rank {ENDLESS[:3500]} 12:00:00.000 | Traceback (most recent call last)",
        f"[rank{ENDLESS[:3500]}]: died",
    ):
        assert [line.rank for line in parse([text], 0)] == [None]
    said = (f"error on rank {ENDLESS}", f"{ENDLESS}/{ENDLESS} clients joined")
    assert diagnose(
        list(parse([f"rank 0  12:00:00.000 | RuntimeError: {words}" for words in said], 0))
    )


def test_foreign_digits_are_read_as_untrusted_input_alone() -> None:
    """str.isdecimal and its like take other alphabets' digits, and thousands of them: untrusted_input.whole takes neither."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        if path.name != "untrusted_input.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("isdecimal", "isdigit", "isnumeric")
    ]
    assert not found
