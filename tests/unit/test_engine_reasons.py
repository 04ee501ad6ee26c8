"""What the engines say of a job that failed → the verdict, and whether another attempt follows: a row a documented reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trainfleet.backends.base import Phase, Status
from trainfleet.backends.node_script import FORMS
from trainfleet.plan.job import Job, Request
from trainfleet.run.run_folder import Run
from trainfleet.watch.causes import CAUSES, Then
from trainfleet.watch.monitor import AttemptOutcome
from trainfleet.watch.verdict import judge, start_now

PAGE = Path(__file__).parents[2] / "docs/reference/engine-reasons.md"
ROWS = yaml.safe_load((Path(__file__).parent / "engine_reasons.yaml").read_text())
CASES = [(engine, row) for engine, rows in ROWS.items() for row in rows]


def test_there_are_thirty_of_them_and_each_says_where_it_was_read() -> None:
    assert len(CASES) >= 30 and len({row["says"] for _, row in CASES}) == len(CASES)
    assert all(row["read"].startswith("https://") for _, row in CASES)


def table(engine: str) -> str:
    """An engine's rows as docs/reference/engine-reasons.md has them."""
    rows = [
        f"| `{row['says'].replace('|', chr(92) + '|')}` | {row['means']}: {CAUSES[row['means']].words} | "
        f"{'yes' if row['again'] else 'no'} | [read]({row['read']}) |"
        for row in ROWS[engine]
    ]
    return "\n".join(
        ["| it says | verdict | another attempt | source |", "|---|---|---|---|", *rows]
    )


@pytest.mark.parametrize("engine", ROWS)
def test_the_page_has_the_table_that_is_tested(engine: str) -> None:
    assert f"\n{table(engine)}\n" in PAGE.read_text(), f"put this into {PAGE}:\n{table(engine)}"


@pytest.mark.parametrize(
    ("engine", "row"), CASES, ids=[f"{engine}-{row['says'][:40]}" for engine, row in CASES]
)
def test_a_reason_has_its_verdict(
    engine: str, row: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is known: the containers have said nothing, and the engine's reason is all there is."""
    monkeypatch.chdir(tmp_path)
    request = Request(Job("train", "x", Path("runs/x"), 2, 1, "m", (), True), ())
    verdict = judge(
        request,
        AttemptOutcome(Status(Phase.ENDED, row["says"], exits={0: 1}), None),
        Run(Path("runs/x")),
        start_now(request),
    )
    assert (verdict.cause, verdict.then is not Then.STOP) == (row["means"], row["again"]), str(
        verdict
    )


def test_batch_itself_tries_again_what_a_machine_did_and_nothing_else() -> None:
    rules = FORMS["job definition"]["retryStrategy"]["evaluateOnExit"]
    assert rules[-1] == {"onReason": "*", "action": "EXIT"}, (
        "without it Batch tries again whatever matches no rule"
    )
    assert len(rules) <= 5 and all(rule["action"] == "RETRY" for rule in rules[:-1])
    assert {"onStatusReason": "Host EC2*", "action": "RETRY"} in rules and {
        "onExitCode": "1",
        "action": "RETRY",
    } not in rules
