"""Services beside the run folder: what they get, and that nothing they do reaches training."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainfleet.cli import main
from trainfleet.config import Settings, load
from trainfleet.engine.__main__ import open_loggers
from trainfleet.report import history, html
from trainfleet.report.summary import status
from trainfleet.run import loggers
from trainfleet.run.loggers import Loggers
from trainfleet.run.run_folder import Run
from unit.report_runs import make_run

JOINT: list[tuple[str, Any]] = []
CONFIG = "name: x\ndata: {sources: [stdlib]}\ntrain: {steps: 2, loggers: [wandb]}\n"


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


def told(failures: list[tuple[str, str]]) -> loggers.Failed:
    return lambda kind, why: failures.append((kind, why))


@pytest.fixture(autouse=True)
def services(monkeypatch: pytest.MonkeyPatch) -> None:
    JOINT.clear()
    monkeypatch.setattr(
        loggers, "SERVICES", {"good": Good, "broken": Broken, "hung": Hung, "wandb": loggers.Wandb}
    )


def test_a_service_gets_every_line_and_how_the_run_ended(tmp_path: Path) -> None:
    one = Loggers(["good"], "x", "x-1", {"train.steps": 5}, tmp_path, told([]))
    for step in (1, 2):
        one.log(step, {"train/loss": 2.5})
    one.close("stopped")
    assert JOINT == [("open", ("x", "x-1", {"train.steps": 5})), ("log", (1, {"train/loss": 2.5})),
                     ("log", (2, {"train/loss": 2.5})), ("close", "stopped")]  # fmt: skip


def test_one_that_fails_or_hangs_is_said_once_and_holds_nothing_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failures: list[tuple[str, str]] = []
    several = Loggers(["broken", "hung", "good"], "x", "x-1", {}, tmp_path, told(failures))
    began = time.monotonic()
    for step in range(2 * loggers.MOST):
        several.log(step, {"loss": 1.0})
    several.close("finished", patience=0.2)
    said = capfd.readouterr().out
    assert (
        said.count("broken failed: SystemExit: no key of yours; training continues without it") == 1
    )
    assert "hung failed: its last lines were not sent" in said
    assert [kind for kind, _ in failures] == ["broken", "hung"] and JOINT[-1] == (
        "close",
        "finished",
    )
    assert time.monotonic() - began < 60


def test_a_package_that_is_missing_is_said_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not there
    Loggers(["wandb"], "x", "x-1", {}, tmp_path, told([])).close("finished")
    assert f"{sys.executable} -m pip install wandb" in capfd.readouterr().out


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config that asks for wandb, at whose home nobody has logged in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    Path("config.yaml").write_text(CONFIG)
    return tmp_path


def test_one_that_is_not_installed_is_refused_by_the_plan(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan"]) == 2
    said = capsys.readouterr().err
    assert f"train.loggers: wandb is not installed: {sys.executable} -m pip install wandb" in said


@pytest.mark.parametrize("given", ["", "offline", "key", "netrc", "another netrc"])
def test_one_without_a_key_is_refused_by_the_plan(
    given: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "packages").mkdir()
    (desk / "packages/wandb.py").touch()
    monkeypatch.syspath_prepend(str(desk / "packages"))
    if given in ("offline", "key"):
        monkeypatch.setenv("WANDB_MODE" if given == "offline" else "WANDB_API_KEY", given)
    elif given:
        host = "api.wandb.ai" if given == "netrc" else "example.org"
        (desk / ".netrc").write_text(f"machine {host} login user password secret\n")
        (desk / ".netrc").chmod(0o600)
    code, said = main(["plan"]), capsys.readouterr().err
    assert code == (2 if given in ("", "another netrc") else 0), said
    assert code == 0 or "train.loggers: wandb has no API key; export WANDB_API_KEY=" in said


def test_one_that_fails_is_told_by_events_status_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, done=20, status="running", unattended=True)
    (tmp_path / "c.yaml").write_text(CONFIG.replace("wandb", "mlflow"))
    config = load(Settings(tmp_path / "c.yaml"))[0]
    monkeypatch.setitem(loggers.SERVICES, "mlflow", Broken)
    opened = open_loggers(Run(run.folder, "node-0-0"), config)
    assert opened
    opened.log(1, {"loss": 1.0})
    opened.close("finished")
    (event,) = [event for event in run.read_events() if event["event"] == "logger-failed"]
    remark = "mlflow has failed: SystemExit: no key of yours; training continues without it"
    assert event["service"] == "mlflow" and history.read(run).silent == [remark]
    assert f"logger     {remark}" in status(run)
    html.write(run)
    assert f"Logger {remark}" in run.report.read_text()
