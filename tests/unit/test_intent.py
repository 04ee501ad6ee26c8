"""The intent of a launch: seen by all that share the run folder, taken over when who left it is gone, and a later stop survives."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from s3server import serve
from trainfleet.backends.run_storage import Here
from trainfleet.backends.s3_run import BucketPlace
from trainfleet.hosts import intent_commands
from trainfleet.hosts.host_results import Implausible
from trainfleet.launch import intent_watch, remote_launch
from trainfleet.run.launch_intent import DeclaredIntent, mine, parse
from trainfleet.run.run_folder import run_of
from trainfleet.storage import s3
from verbs import begin, enter, finish, write_text

SLOWLY = """
import sys, time
from trainfleet.launch import preflight
require = preflight.require
preflight.require = lambda config: (open("begun", "w").close(), time.sleep(float({seconds})), require(config))
from trainfleet.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.chdir(tmp_path)
    return Here(run_of("demo"))


def test_one_launch_at_a_time_leaves_its_intent(here: Here) -> None:
    first, second = mine("make train"), mine("make train")
    here.run.folder.mkdir(parents=True)
    here.run.ask_to_stop()
    assert here.declare(first) is None and not here.run.stop.exists(), "an older request is over"
    assert here.declare(second).intent == first  # type: ignore[union-attr]
    here.run.ask_to_stop()
    assert here.declared().asked  # type: ignore[union-attr]
    here.withdraw(second, begun=False)
    assert here.declared() is not None and here.run.stop.exists(), "another's intent stays"
    here.withdraw(first, begun=True)
    assert here.declared() is None and here.run.stop.exists(), "the run obeys it"
    assert here.declare(first) is None
    here.run.ask_to_stop()
    here.withdraw(first, begun=False)
    assert not here.run.folder.exists(), "a folder that was made for it goes with it"


def test_a_launch_is_gone_with_its_process_at_once_here_and_elsewhere_once_it_is_silent(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clocks are: a file that is touched in the future, or was an hour ago, may be one that is touched still."""
    monkeypatch.setattr(intent_watch, "QUIET", 0.5)
    monkeypatch.setattr(intent_watch, "PACE", 0.1)
    alive, pid = mine("make train"), os.getpid()
    assert intent_watch.gone(here, DeclaredIntent(alive, 0.0)) == ""
    ended = replace(alive, process=alive.process.replace(f"{pid} ", f"{pid} 1", 1))
    assert "its process has ended" in intent_watch.gone(here, DeclaredIntent(ended, 0.0))
    path = here.run.folder / "intent.json"
    for other in (replace(alive, process=f"{pid} 77 another-boot"), replace(alive, host="laptop")):
        for clock in (0.0, time.time() - 3600, time.time() + 3600):
            path.unlink(missing_ok=True)
            assert here.declare(other) is None
            os.utime(path, (clock, clock))
            found = here.declared()
            assert found and "nothing was heard of it" in intent_watch.gone(here, found)
            touching = threading.Timer(0.2, os.utime, (path, (clock + 1, clock + 1)))
            touching.start()
            assert intent_watch.gone(here, found) == ""
            touching.join()


def test_a_launch_that_was_killed_is_told_and_taken_over(here: Here) -> None:
    killed, second = (
        replace(mine("make train"), process="1 0 -", host=platform.node()),
        mine("make train"),
    )
    assert here.declare(killed) is None and here.declare(second).intent == killed  # type: ignore[union-attr]
    assert here.declare(second, killed.token) is None and here.declared().intent == second  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"user": 1}', "\x00", json.dumps(asdict(mine("x")) | {"process": "9" * 5000}),
                                  json.dumps(asdict(mine("x")) | {"user": "a\x1b[2Jb"})])  # fmt: skip
def test_a_hostile_intent_is_none(here: Here, text: str) -> None:
    here.run.folder.mkdir(parents=True)
    (here.run.folder / "intent.json").write_text(text)
    assert parse(text) is None and here.declared() is None


def shell(command: str, stdin: str = "") -> DeclaredIntent | None:
    said = subprocess.run(
        ["sh", "-c", command], input=stdin, capture_output=True, text=True, check=True
    )
    return intent_commands.read_found(said.stdout)


def test_a_host_leaves_reads_and_removes_it_as_this_machine_does(here: Here) -> None:
    shared, first, second = str(Path.cwd()), mine("make train"), mine("make train")
    assert shell(intent_commands.look(shared, "demo", touch=True)) is None
    assert shell(intent_commands.leave(shared, "demo", first, ""), first.text).intent == first  # type: ignore[union-attr]
    assert shell(intent_commands.leave(shared, "demo", second, ""), second.text).intent == first  # type: ignore[union-attr]
    assert here.declared().intent == first  # type: ignore[union-attr]
    here.run.ask_to_stop()
    found = shell(intent_commands.look(shared, "demo", touch=True))
    assert found is not None and found.asked and abs(time.time() - found.touched) < 5
    assert (
        shell(intent_commands.leave(shared, "demo", second, first.token), second.text).intent
        == second
    )  # type: ignore[union-attr]
    assert not here.run.stop.exists()
    shell(intent_commands.withdraw(shared, "demo", first, True))
    assert here.declared().intent == second  # type: ignore[union-attr]
    shell(intent_commands.withdraw(shared, "demo", second, False))
    assert not here.run.folder.exists()


@pytest.mark.parametrize("text", ["x\n{}", "1 maybe\n{}", "\x1b[2J\n"])
def test_what_a_host_says_of_it_is_checked(text: str) -> None:
    with pytest.raises(Implausible):
        intent_commands.read_found(text)


def test_it_is_in_the_bucket_where_nodes_share_no_disk(here: Here) -> None:
    with serve(lambda application: application):
        place, first, second = (
            BucketPlace(run_of("demo"), "s3://bucket/some", "set"),
            mine("make train"),
            mine("make train"),
        )
        place.ask_to_stop()
        assert place.declare(first) is None and place.declare(second).intent == first  # type: ignore[union-attr]
        found = place.declared(touch=True)
        assert found is not None and not found.asked and abs(time.time() - found.touched) < 5
        place.ask_to_stop()
        assert place.declared().asked  # type: ignore[union-attr]
        place.withdraw(first, begun=False)
        assert place.declared() is None and not s3.list_objects("s3://bucket/some/runs/demo/")


CONFIG = """
name: line
data: {name: text, sources: [text], vocabulary_size: 340, validation_fraction: 0.1}
model: {layers: 2, hidden_size: 32, heads: 2, kv_heads: 1, intermediate_size: 64}
train: {steps: 4, precision: fp32, global_batch: 8, sequence_length: 32, log_every: 1, validate_every: 0}
"""


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    write_text(tmp_path / "text")
    return tmp_path


def launch(desk: Path, seconds: float) -> subprocess.Popen[str]:
    """A `make train` that is still at its plan."""
    (desk / "slowly.py").write_text(SLOWLY.format(seconds=seconds))
    process = begin(desk, "train", python=str(interpreter(desk)))
    deadline = time.monotonic() + 60
    while not (desk / "begun").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return process


def interpreter(desk: Path) -> Path:
    """Runs slowly.py in the place of the module that is typed."""
    path = desk / "python"
    path.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {desk}/slowly.py "$@"\n')
    path.chmod(0o755)
    return path


def test_stop_cancels_a_launch_that_has_not_begun(desk: Path) -> None:
    process = launch(desk, 900)
    assert "it is being launched: make train, typed by" in enter(desk, "status")
    assert "is being launched already" in enter(desk, "train", code=1)
    said = enter(desk, "stop", timeout=200)
    assert (
        "asked the launch of line to end: make train, typed by" in said
        and "none of its processes runs" in said
    )
    assert "stopped" in finish(process, code=130, timeout=100)
    assert (
        not (desk / "runs/line/results.json").exists()
        and not (desk / "runs/line/intent.json").exists()
    )
    assert "is not running" in enter(desk, "stop")


def test_clean_cancels_it_too(desk: Path) -> None:
    process = launch(desk, 900)
    enter(desk, "clean", "PURGE=1", "YES=1", timeout=200)
    finish(process, code=130, timeout=100)
    assert not (desk / "runs/line").exists()


def test_a_request_that_comes_after_the_command_is_not_lost(desk: Path) -> None:
    """The launch takes its lock before it looks again."""
    process = launch(desk, 1.0)
    run = run_of("line", desk / "runs")
    run.ask_to_stop()
    assert "stopped" in finish(process, code=130, timeout=60)
    assert max((line["step"] for line in run.read_metrics()), default=0) == 0


@pytest.mark.thorough
def test_a_launch_that_was_killed_is_no_obstacle(desk: Path) -> None:
    process = launch(desk, 900)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "is not running" in enter(desk, "stop")
    said = enter(desk, "train")
    assert (
        "this launch takes the place of make train, typed by" in said
        and "its process has ended" in said
    )


def test_stop_does_not_offer_to_resume_what_had_finished(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainfleet.cli import stop

    monkeypatch.chdir(desk)
    run = run_of("line")
    run.update_results(status="finished", steps=4)
    assert "had finished before it could stop" in stop._ended(
        run, True
    ) and "resumes" not in stop._ended(run, True)
    run.update_results(status="stopped")
    assert "make train resumes it" in stop._ended(run, True)


def test_a_launch_that_is_cancelled_as_it_is_handed_over_says_that_it_is_stopped(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher on the head may end without a word: it had not begun."""

    def follow(place: Here, words: remote_launch.LauncherLogs) -> int:
        if not here.run.stop.exists():
            raise remote_launch.LeftAlone
        return 130

    here.run.folder.mkdir(parents=True)
    monkeypatch.setattr(remote_launch, "follow_launcher", follow)
    monkeypatch.setattr(remote_launch, "is_cancelled", lambda: True)
    place, backend = cast(Any, here), cast(Any, None)
    assert remote_launch.attend(place, backend, remote_launch.LauncherLogs(here.run), False) == 130
    assert capsys.readouterr().out == "demo is stopped\n"
