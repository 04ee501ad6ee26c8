"""Services beside the run folder: what they get, and that nothing they do reaches training."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

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
    assert said.count("broken has failed, training continues without it: SystemExit: no key of yours") == 1
    assert "hung has not sent its last lines" in said and JOINT[-1] == ("close", "finished")
    assert time.monotonic() - began < 60


def test_a_package_that_is_missing_is_said_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not there
    Loggers(["wandb"], "x", "x-1", {}, tmp_path).close("finished")
    assert f"{sys.executable} -m pip install wandb" in capfd.readouterr().out
