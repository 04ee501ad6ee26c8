"""A run folder of format 1, as the landed version of 2026-11-21 left it: it is resumed, sampled, listed and reported."""

from __future__ import annotations

import tarfile
from pathlib import Path

import verbs
from trainfleet.health import fence
from trainfleet.health.heartbeat_format import read_beats
from trainfleet.run.run_folder import Run


def test_a_run_of_the_first_format_goes_on(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).with_name("landed.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    run = Run(tmp_path / "runs" / "landed")
    assert (run.folder / "events.jsonl").exists() and fence.current(run.folder).number == 2
    assert [event["event"] for event in run.read_events()] == ["launched", "checkpointed", "checkpointed", "finished"]

    assert "step 6 of 6" in verbs.enter(tmp_path, "status")
    verbs.enter(tmp_path, "train", "SET=train.steps=8")
    told = run.read_events()
    assert [event["step"] for event in told if event["event"] in ("resumed", "finished")] == [6, 6, 8]
    assert fence.current(run.folder).number == 3 and {beat.phase for beat in read_beats(run.folder, 3).values()} == {"end"}
    assert run.read_results()["format"] == 2
    assert "good" in verbs.enter(tmp_path, "checkpoints")
    assert verbs.enter(tmp_path, "sample", "PROMPT=the", "SET=train.steps=8")
    assert "report.html" in verbs.enter(tmp_path, "report")
