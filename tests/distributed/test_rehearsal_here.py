"""make rehearse with real ranks: promises are kept, and with a mechanism taken out they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_line import Desk

from trainfleet.cli.jobs import rehearse
from trainfleet.launch.rehearsal import RehearsalStage
from verbs import enter

WITHOUT_RESTARTS = "import trainfleet.watch.retry_loop as attempts\nattempts.ATTEMPTS = 1\n"


def test_a_killed_rank_and_numbers_that_are_none(tmp_path: Path) -> None:
    said = enter(Desk(tmp_path).folder, "rehearse", "FAULTS=rank-killed nan")
    table = {line.split()[0] for line in said.splitlines() if line.endswith("kept")}
    assert table == {"rank-killed", "nan"} and "survived 2 of 2 faults as promised" in said
    (run,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in run.iterdir()} == {
        "config.yaml",
        "results.json",
        "metrics.jsonl",
        "rehearsal.json",
        "report.html",
    }
    assert "survived 2 of 2 faults as promised" in (run / "report.html").read_text()


def test_with_a_mechanism_taken_out_a_promise_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Desk(tmp_path)
    begin = RehearsalStage.begin

    def begin_without(self: RehearsalStage, name: str, words: str = "") -> Any:
        self.alter(name, WITHOUT_RESTARTS)
        return begin(self, name, words)

    monkeypatch.setattr(RehearsalStage, "begin", begin_without)
    assert rehearse({"CONFIG": str(tmp_path / "config.yaml"), "FAULTS": "rank-killed"}, 0.0) == 1
    assert "BROKEN: the command ended with 1" in capsys.readouterr().out
