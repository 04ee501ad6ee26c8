"""make rehearse with real ranks: promises are kept, and with a mechanism taken out they are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_line import Desk

from trainfleet.cli.jobs import rehearse
from trainfleet.launch import rehearsal
from verbs import enter

# A fault, and programs that every Python of its rehearsal runs first, each of which takes one mechanism out.
WITHOUT = {
    "retries": ("rank-killed", "import trainfleet.watch.retry_loop as it; it.ATTEMPTS = 1"),
    "watchdog": (
        "rank-stopped",
        "import trainfleet.health.watchdog as it; it.Sentry.look = lambda self: None",
    ),
    "marker": (
        "checkpoint-damaged",
        "import trainfleet.checkpoints.store as it; it.CheckpointStore.damage = lambda *_: ''",
    ),
}


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


@pytest.mark.parametrize(("fault", "program"), WITHOUT.values(), ids=WITHOUT)
def test_with_a_mechanism_taken_out_a_promise_is_broken(
    fault: str,
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Desk(tmp_path)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setattr(rehearsal, "PATIENCE", 120.0)
    assert rehearse({"CONFIG": str(tmp_path / "config.yaml"), "FAULTS": fault}, 0.0) == 1
    assert "BROKEN: the command ended with exit code" in capsys.readouterr().out
