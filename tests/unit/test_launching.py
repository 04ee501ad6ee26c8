"""A launch without a launcher yet: seen by all that share the run folder, taken over when its command is gone, and a later stop survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from s3server import serve
from trainfleet.backends.head import Hosts
from trainfleet.backends.run_storage import BucketPlace, Here, Place
from trainfleet.health.lease import Holder, Launching, Lease, newest_holder
from trainfleet.hosts.host_results import Host, Result
from trainfleet.hosts.preflight import Bandwidth, PreflightReport
from trainfleet.launch import execution, launching, remote_launch, run_location
from trainfleet.launch.launching import mine
from trainfleet.run.claims import ROOM, rewrite
from trainfleet.run.run_folder import run_of, take_lock
from trainfleet.storage import s3
from trainfleet.trust.errors import BackendError, RunError
from trainfleet.watch import monitor
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


class Machine:
    """A host that is this machine, for whoever sees the shared folder only through its shell."""

    hosts = (Host("node-0", "node-0"),)

    def ask(self, host: Host, command: str, *, stdin: str = "", timeout: float = 0) -> Result:
        done = subprocess.run(["sh", "-c", command], input=stdin, capture_output=True, text=True)
        return Result(done.returncode, done.stdout, done.stderr, 0.0)

    def run(self, command: str, *, hosts: Any, **more: Any) -> Any:
        return SimpleNamespace(ok=dict.fromkeys(hosts))

    def close(self) -> None: ...


@pytest.fixture(params=["here", "host", "bucket"])
def place(request: pytest.FixtureRequest, here: Here) -> Iterator[Place]:
    if request.param == "bucket":
        with serve(lambda application: application):
            yield BucketPlace(run_of("demo"), "s3://bucket/some", "set")
    elif request.param == "host":
        fleet = SimpleNamespace(shared_folder=str(Path.cwd()))
        config: Any = SimpleNamespace(fleet=fleet, name="demo")
        hosts = Hosts(cast(Any, Machine()), config, "python3", "", run_of("demo"))
        hosts.ask_to_stop = here.ask_to_stop  # type: ignore[method-assign]
        yield hosts
    else:
        yield here


def holder_in(place: Place, text: bytes | None = None) -> bytes:
    """What head.json has of a launcher; or leaves that there first."""
    if isinstance(place, BucketPlace):
        if text is not None:
            s3.write(f"{place.address}/head.json", text)
        return (s3.read(f"{place.address}/head.json") or b"")[:ROOM]
    path = Path("runs/demo/head.json")
    if text is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return path.read_bytes()[:ROOM] if path.exists() else b""


def is_empty(place: Place) -> bool:
    if isinstance(place, BucketPlace):
        return not s3.list_objects(f"{place.address}/")
    return not Path("runs/demo").exists()


def test_a_launch_is_shown_renewed_and_leaves_nothing_behind(place: Place) -> None:
    shown = mine("make train")
    assert place.launching() is None
    if not isinstance(place, BucketPlace):
        Path("runs/demo").mkdir(parents=True)
    place.ask_to_stop()
    place.show(shown, obeyed=True)
    assert place.launching() == shown, "an older request is over"
    place.ask_to_stop()
    place.show(replace(shown, beat=10), obeyed=False)
    assert place.launching() == replace(shown, beat=10, asked=True)
    place.show(shown)
    assert place.launching() == replace(shown, asked=True), "of a longer text nothing is left"
    place.show(None)
    assert place.launching() is None and not is_empty(place), "the run obeys the request"
    place.show(None, obeyed=True)
    assert is_empty(place), "what was made for it goes with it"


def test_what_the_launcher_before_left_stays_beside_a_launch(place: Place) -> None:
    led = json.dumps(asdict(Holder("head", 7, 3, 5.0))).encode().ljust(ROOM)
    holder_in(place, led)
    place.show(mine("make train"))
    assert holder_in(place) == led and place.launching() == mine("make train")
    place.show(None)
    assert holder_in(place) == led and place.launching() is None


def test_a_launcher_s_lease_ends_the_launch(here: Here) -> None:
    here.show(mine("make train"))
    assert newest_holder(here.run.folder) is None
    with Lease(here.run.folder) as lease:
        assert here.launching() is None and lease.term == 1 and lease.predecessor is None
        lease.code = 0
    here.show(mine("make train"))
    assert (holder := newest_holder(here.run.folder)) and holder.code == 0


def test_a_bucket_s_run_is_not_led_by_a_launch_after_a_launcher_that_died(here: Here) -> None:
    with serve(lambda application: application):
        place = BucketPlace(run_of("demo"), "s3://bucket/some", "set")
        died = json.dumps(asdict(Holder("desk", 1, 1, 5.0))).encode().ljust(ROOM)
        s3.write(f"{place.address}/head.json", died)
        place.refresh()
        assert place.is_running()
        place.show(mine("make train"))
        place.refresh()
        assert not place.is_running()


def test_a_launch_is_gone_with_its_process_at_once_here_and_elsewhere_once_it_is_silent(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clocks are: no time is read."""
    monkeypatch.setattr(launching, "QUIET", 0.5)
    monkeypatch.setattr(launching, "PACE", 0.1)
    alive = mine("make train")
    assert launching.gone(here, alive) == ""
    assert "its process has ended" in launching.gone(here, replace(alive, pid=1 << 30))
    number_used_again = replace(alive, process=f"{alive.pid} 7 boot")
    elsewhere = Launching(
        "make train, typed by ada on laptop (process 9)", alive.pid, alive.process
    )
    for shown in (number_used_again, elsewhere):
        here.show(shown)
        os.utime(here.run.folder / "head.json", (time.time() + 3600, time.time() + 3600))
        assert "it has been silent for" in launching.gone(here, shown)
        renewing = threading.Timer(0.2, here.show, [replace(shown, beat=1)])
        renewing.start()
        assert launching.gone(here, shown) == ""
        renewing.join()
    here.show(None)
    assert launching.gone(here, elsewhere) == "it has ended"


def test_of_two_launches_at_once_the_one_that_finds_the_other_ends(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "PACE", 0.05)
    other = Launching("make train, typed by ada on laptop (process 9)", 9, "9 7 boot")
    here.show(shown := mine("make train"))
    phase = launching.FirstPhase(here, shown)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        while True:  # a renewal may overwrite it once
            here.show(other)
            time.sleep(0.2)
    signal.signal(signal.SIGINT, before)
    phase.end(begun=False)
    assert phase.cancelled and here.launching() == other, "it leaves the other's alone"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"user": 1}', "\x00", json.dumps(asdict(mine("x")) | {"pid": "9" * 5000}),
                                  json.dumps(asdict(mine("x")) | {"words": "a\x1b[2Jb"}), "[" * 900])  # fmt: skip
def test_a_hostile_launch_is_none(place: Place, text: str) -> None:
    holder_in(place, b" " * ROOM + text.encode())
    assert place.launching() is None


CONFIG = """
name: line
data: {name: text, sources: [text], vocab_size: 340, validation_fraction: 0.1}
model: {layers: 2, hidden_size: 32, heads: 2, kv_heads: 1, intermediate_size: 64}
train: {steps: 4, precision: fp32, global_batch_size: 8, sequence_length: 32, log_every: 1, validate_every: 0}
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
    assert "the run is being launched: make train, typed by" in enter(desk, "status")
    assert "is already being launched" in enter(desk, "train", code=1)
    said = enter(desk, "stop", timeout=200)
    assert (
        "asked the launch of line to end: make train, typed by" in said
        and "was canceled; no process is running" in said
    )
    assert "stopped" in finish(process, code=130, timeout=100)
    assert (
        not (desk / "runs/line/results.json").exists()
        and not (desk / "runs/line/head.json").exists()
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
    assert "this launch replaces make train, typed by" in said and "its process has ended" in said


def test_stop_does_not_offer_to_resume_what_had_finished(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainfleet.cli import runs

    monkeypatch.chdir(desk)
    run = run_of("line")
    run.update_results(status="finished", steps=4)
    assert "finished before it could stop" in runs._ended(
        run, True
    ) and "resumes" not in runs._ended(run, True)
    run.update_results(status="stopped")
    assert "make train resumes it" in runs._ended(run, True)


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


def test_a_launcher_that_sees_late_that_its_job_has_ended_is_waited_for(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = take_lock(here.run.folder)
    assert held
    threading.Timer(0.5, held.close).start()
    run_location.require_over(here.run)
    monkeypatch.setattr(run_location, "LAUNCHER_ENDS", 0.2)
    held = take_lock(here.run.folder)
    assert held
    with held, pytest.raises(RunError, match="has not exited"):
        run_location.require_over(here.run)


def test_a_preflight_that_passes_is_one_line_for_all_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = PreflightReport({}, (), Bandwidth(11.5, 1 << 24, 2, ()), 3.21)
    monkeypatch.setattr(remote_launch, "examine", lambda *words, **more: report)
    head: Any = SimpleNamespace(located=SimpleNamespace(fleet=SimpleNamespace(nodes=2, is_told=True)), transport=None)  # fmt: skip
    assert remote_launch.pass_preflight(head, [Host("a", "a"), Host("b", "b")]) == {}
    said = capsys.readouterr().out
    assert said == (
        "preflight passed: all-reduce over 2 nodes: 11.50 GB/s bus bandwidth; checked 0 hosts in 3.2 s\n"
    )


def test_a_launcher_is_waited_for_through_a_look_that_fails(here: Here) -> None:
    looks = list[int]()

    def refresh() -> None:
        looks.append(1)
        if len(looks) == 1:
            raise BackendError("no host of the fleet answers")
        rewrite(here.run.folder / "head.json", json.dumps(asdict(Holder("a", 7, 4, 5.0))))

    here.run.folder.mkdir(parents=True)
    place: Any = SimpleNamespace(run=here.run, refresh=refresh, head=SimpleNamespace(has_ended=lambda host: False))  # fmt: skip
    remote_launch.await_lease(place, Host("a", "a"), 3, remote_launch.LauncherLogs(here.run))
    assert len(looks) == 2


@pytest.mark.parametrize("step", ["appoint", "await_lease"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, BackendError("it takes too long")])
def test_a_launcher_that_is_waited_for_no_more_is_ended_first(
    here: Here, monkeypatch: pytest.MonkeyPatch, error: BaseException, step: str
) -> None:
    done, hosts = list[str](), [Host("a", "a"), Host("b", "b")]
    fleet, train = SimpleNamespace(secrets=()), SimpleNamespace(steps=1)
    config = SimpleNamespace(name="demo", world_size=2, fleet=fleet, train=train)
    head: Any = SimpleNamespace(
        interpreter="python", facts=dict.fromkeys(hosts), ends=None, config=config
    )
    place: Any = SimpleNamespace(run=here.run, refresh=lambda: None, head=SimpleNamespace(
        run="runs/demo", prepare=lambda *words: None, start=lambda *words: done.append("start"),
        dismiss=lambda host: done.append(f"dismiss {host.name}")))  # fmt: skip
    backend: Any = SimpleNamespace(
        bill=lambda: None, find=lambda run: None, stop=lambda *words, at_once: done.append("stop")
    )
    plan: Any = SimpleNamespace(config=config, requests=(), asked="")

    def wait(*words: object) -> None:
        raise error

    monkeypatch.setattr(remote_launch, "backend_of", lambda config: backend)
    monkeypatch.setattr(remote_launch, "Budget", lambda *words: SimpleNamespace(require=list))
    monkeypatch.setattr(remote_launch, "fit_hosts", lambda *words: (plan, hosts))
    monkeypatch.setattr(remote_launch, "dump_resolved", lambda config: "")
    monkeypatch.setattr(remote_launch, "appoint", lambda *words: None)
    monkeypatch.setattr(remote_launch, step, wait)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        remote_launch.launch("train", plan, head, place, 0.0)
    assert done == ["start", "stop", "dismiss b"]


def test_a_tokenizer_may_be_silent_for_long_only_until_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = dict[str, Any]()

    def execute(self: object, request: object, live: object, running: object, **more: Any) -> bool:
        told.update(more, live=live)
        return True

    monkeypatch.setattr(execution.Launch, "_execute", execute)
    config = SimpleNamespace(name="x", data=SimpleNamespace(tokenized_path=None))
    unused = cast(Any, None)
    launch = execution.Launch(cast(Any, SimpleNamespace(config=config)), unused, unused, unused, 0)
    job = SimpleNamespace(kind="tokenize", folder=tmp_path, name="text", after="")
    assert launch.do(cast(Any, SimpleNamespace(job=job)), None)
    assert told["still"]() == monitor.STILL
    told["live"].progress = SimpleNamespace(bytes_total=9)
    assert told["still"]() == monitor.STUCK < monitor.STILL
