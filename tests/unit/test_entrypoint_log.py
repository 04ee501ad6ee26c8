"""The entrypoint: it knows where it runs, its log is where the run's Place looks, and each engine gets what it asks for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainfleet.node import entrypoint, placements
from trainfleet.node.entrypoint import parse
from trainfleet.node.placement import Placement, PlacementSource, Terms
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import BackendError

ROOT = Path(__file__).parents[2]
BATCH = {"AWS_BATCH_JOB_ID": "876da822", "AWS_BATCH_JOB_ATTEMPT": "2"}
# Runs on a node: says where it is, and does what its word tells.
PART = """
import os, sys, time
print("node", os.environ["NODE_RANK"], "of", os.environ["NODES"], "in", os.getcwd(), "again", os.environ["TRAINFLEET_AGAIN"], flush=True)
if sys.argv[1] == "stay":
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "part.py").write_text(PART)
    return tmp_path / "home"


def start(home: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRAINFLEET_", "AWS_BATCH", "SLURM"))
    }
    told = plain | {"PYTHONPATH": f"{ROOT / 'python'}:{home.parent}"} | environment
    command = [
        sys.executable,
        "-m",
        "trainfleet.node.entrypoint",
        "--folder",
        "data/x",
        "--in",
        str(home),
        *words,
    ]
    return subprocess.Popen(
        command, env=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_on_batch_it_finds_out_by_itself_and_the_engine_keeps_its_lines(home: Path) -> None:
    process = start(home, "--", "part", "7", **BATCH)
    said, _ = process.communicate(timeout=20)
    log = (home / "data/x/logs/node-0.log").read_text()
    assert process.returncode == 7 and said == log
    assert f"node 0 of 1 in {home} again 1" in log


def test_on_a_host_nothing_is_said_twice(home: Path) -> None:
    process = start(
        home, "--", "part", "0", TRAINFLEET_AGAIN="0", **Placement(0, 1, "127.0.0.1").environment()
    )
    assert process.communicate(timeout=20)[0] == "" and process.returncode == 0
    assert "node 0 of 1" in (home / "data/x/logs/node-0.log").read_text()


def test_secrets_are_in_neither_log_nor_console(home: Path) -> None:
    process = start(home, "--", "part", "0", TRAINFLEET_SECRETS="KEY", KEY=str(home), **BATCH)
    assert "in *** again" in process.communicate(timeout=20)[0]
    assert "in *** again" in (home / "data/x/logs/node-0.log").read_text()


def test_sigterm_ends_it_with_the_command_s_own_code(home: Path) -> None:
    process = start(home, "--", "part", "stay", **BATCH)
    assert process.stdout and "node 0" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM


def test_who_nobody_started_is_told_so(home: Path) -> None:
    process = start(home, "--", "part", "0")
    _, said = process.communicate(timeout=20)
    assert (
        process.returncode == 1
        and "was not started as a node of a job" in said
        and "next: " in said
    )
    assert not home.exists()


@pytest.mark.parametrize(
    "words", [[], ["--folder", "x"], ["--folder", "x", "--"], ["--on", "lsf", "--folder", "x", "--", "m"],
              ["--folder", "x", "--ranks", "-1", "--", "m"], ["--folder", "x", "--ranks", "two", "--", "m"], ["train"]]
)  # fmt: skip
def test_a_wrong_line_is_refused_with_how_it_should_be(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(words)
    assert (
        caught.value.code == 2
        and "python -m trainfleet.node.entrypoint [--on SCHEDULER]" in capsys.readouterr().err
    )


def test_the_command_s_words_are_its_own() -> None:
    order = parse(
        [
            "--on",
            "batch",
            "--folder",
            "runs/x",
            "--ranks",
            "2",
            "--",
            "m",
            "--folder",
            "y",
            "--",
            "-n",
        ]
    )
    assert order.command == ("m", "--folder", "y", "--", "-n") and (order.ranks, order.wait) == (
        2,
        placements.BATCH.terms.wait,
    )


def test_every_engine_of_ours_has_its_name_and_its_terms() -> None:
    assert [placements.source(name).name for name in placements.OURS] == list(placements.OURS)
    assert placements.FLEET.terms.wait == 0 and placements.SAGEMAKER.terms.grace < 120


def test_engines_are_told_apart_by_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(**environment: str) -> str:
        for name in ("TRAINFLEET_NODE", "SLURM_JOB_ID", *BATCH):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return placements.here().name

    monkeypatch.setattr(placements, "RESOURCES", tmp_path / "resourceconfig.json")
    assert found(**BATCH) == "batch" and found(SLURM_JOB_ID="7") == "slurm"
    assert found(**Placement(0, 1, "x").environment(), SLURM_JOB_ID="7") == "fleet"
    with pytest.raises(BackendError, match="not started as a node"):
        found()
    (tmp_path / "resourceconfig.json").write_text("{}")
    assert found() == "sagemaker"


def as_sagemaker(monkeypatch: pytest.MonkeyPatch, placement: Placement, failure: Path) -> None:
    """This process is a host of SageMaker, with this placement and this file for a failure's reason."""
    monkeypatch.setitem(
        placements.OURS,
        "sagemaker",
        PlacementSource("sagemaker", lambda: placement, lambda: True, Terms(failure=failure)),
    )


@pytest.fixture
def sagemaker(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The failure file of a SageMaker host, which this process plays."""
    monkeypatch.setattr(placements, "own_address", lambda: "127.0.0.1")
    file = home.parent / "ml" / "output" / "failure"
    as_sagemaker(monkeypatch, Placement(0, 1, "127.0.0.1"), file)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'python'}:{home.parent}")
    monkeypatch.chdir(home.parent)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
    return file


def run_node(home: Path, *words: str) -> int:
    return entrypoint.run_node(
        parse(["--on", "sagemaker", "--folder", "runs/x", "--in", str(home), "--", *words])
    )


def test_an_image_of_another_lock_than_the_job_s_is_refused_with_both(
    sagemaker: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(entrypoint.IMAGE_LOCK, "cpu 2026-01-01 0123456789ab")
    assert run_node(home, "part", "0") == 0, "who planned it did not say"
    monkeypatch.setenv(entrypoint.LOCK, "cpu 2026-11-20 ba9876543210")
    with pytest.raises(
        BackendError, match="versions differ from those of the config's platform"
    ) as caught:
        run_node(home, "part", "0")
    assert (
        caught.value.why
        == "its versions are cpu 2026-01-01 0123456789ab, but the config's platform has cpu 2026-11-20 ba9876543210"
    )
    assert caught.value.why in sagemaker.read_text()
    log = (home / "runs/x/logs/node-0.log").read_text()
    assert caught.value.why in log and log.count("node 0 of 1") == 1, (
        "the job did not start a second time"
    )
    sagemaker.unlink()
    monkeypatch.setenv(entrypoint.IMAGE_LOCK, "cpu 2026-11-20 ba9876543210")
    assert run_node(home, "part", "0") == 0 and not sagemaker.exists()


def test_a_failure_s_reason_is_left_for_sagemaker(sagemaker: Path, home: Path) -> None:
    assert run_node(home, "part", "0") == 0 and not sagemaker.exists()
    assert run_node(home, "part", "3") == 3
    assert (
        sagemaker.read_text().startswith("node 0: exit code 3; its last lines:\n")
        and "node 0 of 1" in sagemaker.read_text()
    )


def test_what_a_rank_said_of_itself_is_the_reason(sagemaker: Path, home: Path) -> None:
    run = Run(home / "runs" / "x", "node-0-1")
    for order, message in ((1, "old"), (2, "first"), (2, "second")):
        run.record(
            "fault",
            order=order,
            rank=0,
            node=0,
            error="DataError",
            message=message * 999,
            why="w",
            next="make tokenize",
        )
        time.sleep(0.01)
    assert run_node(home, "part", "1") == 1
    assert (
        sagemaker.read_text().startswith("node 0: DataError: firstfirst")
        and len(sagemaker.read_text()) == entrypoint.REASON
    )


def test_a_reason_hides_secrets_and_is_no_reason_to_fail_where_it_can_t_be_left(
    sagemaker: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEY", str(home))
    monkeypatch.setenv("TRAINFLEET_SECRETS", "KEY")
    assert run_node(home, "part", "1") == 1
    assert str(home) not in sagemaker.read_text() and "***" in sagemaker.read_text()
    as_sagemaker(monkeypatch, Placement(0, 1, "127.0.0.1"), Path("/proc/none/failure"))
    assert run_node(home, "part", "5") == 5
    assert "can't write the failure reason" in capsys.readouterr().err


def test_a_node_that_can_t_begin_leaves_why(
    sagemaker: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_sagemaker(monkeypatch, Placement(1, 2, "127.0.0.1", 1), sagemaker)
    order = [
        "--on",
        "sagemaker",
        "--folder",
        "runs/x",
        "--in",
        str(home),
        "--ranks",
        "1",
        "--wait",
        "0.3",
        "--",
        "part",
        "0",
    ]
    with pytest.raises(BackendError, match="node 0 of 2 did not arrive"):
        entrypoint.run_node(parse(order))
    assert (
        "node 0 of 2 did not arrive" in sagemaker.read_text() and "next: " in sagemaker.read_text()
    )
    log = (home / "runs/x/logs/node-1.log").read_text()
    assert "waiting for node 0" in log and "node 0 of 2 did not arrive" in log
    (fault,) = Run(home / "runs" / "x").read_events()
    assert fault["event"] == "fault" and json.dumps(fault["message"]) and fault["node"] == 1
