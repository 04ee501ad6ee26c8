"""Services beside the run folder: what they get, and that nothing they do reaches training."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from requirement import missing
from trainfleet import loggers
from trainfleet.loggers import Loggers

JOINT: list[tuple[str, Any]] = []


class Good:
    def __init__(self, name: str, identity: str, config: Mapping[str, Any], folder: Path) -> None:
        JOINT.append(("open", (name, identity, dict(config))))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        JOINT.append(("log", (step, dict(metrics))))

    def close(self, status: str) -> None:
        JOINT.append(("close", status))


class Broken(Good):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise SystemExit("no key\nof yours")


class Hung(Good):
    def __init__(self, *_: Any) -> None:
        threading.Event().wait()


@pytest.fixture(autouse=True)
def services(monkeypatch: pytest.MonkeyPatch) -> None:
    JOINT.clear()
    monkeypatch.setattr(loggers, "SERVICES", {"good": Good, "broken": Broken, "hung": Hung, "wandb": loggers.Wandb})


def test_a_service_gets_every_line_and_how_the_run_ended(tmp_path: Path) -> None:
    one = Loggers(["good"], "x", "x-1", {"train.steps": 5}, tmp_path)
    for step in (1, 2):
        one.log(step, {"train/loss": 2.5})
    one.close("stopped")
    assert JOINT == [("open", ("x", "x-1", {"train.steps": 5})), ("log", (1, {"train/loss": 2.5})),
                     ("log", (2, {"train/loss": 2.5})), ("close", "stopped")]  # fmt: skip


def test_one_that_fails_or_hangs_is_said_once_and_holds_nothing_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    several = Loggers(["broken", "hung", "good"], "x", "x-1", {}, tmp_path)
    began = time.monotonic()
    for step in range(2 * loggers.MOST):
        several.log(step, {"loss": 1.0})
    several.close("finished", patience=0.2)
    said = capfd.readouterr().out
    assert said.count("broken has failed, training goes on without it: SystemExit: no key of yours") == 1
    assert "hung has not sent its last lines" in said and JOINT[-1] == ("close", "finished")
    assert time.monotonic() - began < 60


def test_a_package_that_is_missing_is_said_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not there
    Loggers(["wandb"], "x", "x-1", {}, tmp_path).close("finished")
    assert f"{sys.executable} -m pip install wandb" in capfd.readouterr().out


OFFLINE = {
    "wandb": {"WANDB_MODE": "offline"},
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///runs.db", "MLFLOW_DISABLE_TELEMETRY": "true"},
    "trackio": {"TRACKIO_DIR": "kept"},
}
SEND = """
import sys
from pathlib import Path
from trainfleet.loggers import Loggers
kind, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
one = Loggers([kind], "x", "x-1", {"train.steps": 4}, Path.cwd())
for step in range(first, last + 1):
    one.log(step, {"train/loss": 5.0 - step})
one.close("finished", 120)
"""
READ = {
    "wandb": "import glob; print(len(glob.glob('wandb/offline-run-*-x-1/run-x-1.wandb')))",
    "mlflow": "import mlflow; found = mlflow.search_runs(experiment_names=['trainfleet'], output_format='list'); "
    "print(len(found), found[0].data.metrics['train/loss'], found[0].data.params['train.steps'], found[0].info.status, "
    "len(mlflow.MlflowClient().get_metric_history(found[0].info.run_id, 'train/loss')))",
    "trackio": "import sqlite3; base = sqlite3.connect('kept/trainfleet.db'); "
    "print(*base.execute('select count(*), count(distinct run_name) from metrics').fetchone())",
}
WANTED = {"wandb": "2", "mlflow": "1 1.0 4 FINISHED 4", "trackio": "4 1"}


@pytest.mark.parametrize("kind", OFFLINE)
def test_the_real_library_in_its_offline_mode_keeps_a_run_that_went_on(kind: str, tmp_path: Path) -> None:
    """In whatever environment LOGGERS_PYTHON names: these packages are large, and no part of ours."""
    python = os.environ.get("LOGGERS_PYTHON")
    if not python:
        missing(f"LOGGERS_PYTHON names no Python that has {kind}; python -m venv v && v/bin/pip install {kind} pyyaml")
    environment = os.environ | OFFLINE[kind] | {"PYTHONPATH": str(Path(__file__).parents[2] / "python")}

    def run(*words: str) -> str:
        done = subprocess.run([python, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0 and "has failed" not in done.stdout, done.stdout + done.stderr
        return done.stdout

    for first in (1, 3):  # the second command goes on with the run of the first
        run("-c", SEND, kind, str(first), str(first + 1))
        time.sleep(1.1)  # wandb names its folders by the second
    assert run("-c", READ[kind]).strip() == WANTED[kind]
