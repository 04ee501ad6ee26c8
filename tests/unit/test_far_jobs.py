"""A job that goes on far away: a look that fails does not end it, and its end is written down by whoever sees it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_slurm_words import config_of

from trainfleet.backends import backend_of, batch_request, terms_of
from trainfleet.backends.aws_managed import Hosted
from trainfleet.backends.base import Can, Handle, Phase, Status
from trainfleet.backends.batch import Batch, status_of
from trainfleet.backends.slurm import Slurm, client
from trainfleet.backends.slurm.client import Said
from trainfleet.cloud import calls, clock
from trainfleet.config import Settings, load
from trainfleet.health import fence
from trainfleet.launch import aftermath, execution, training
from trainfleet.plan.job import Artifact, Job, Request
from trainfleet.recipes import FOLDER
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import CloudError, InputError, NotAsked
from trainfleet.watch.monitor import AttemptOutcome, CutOff
from trainfleet.watch.retry_loop import worth_it
from trainfleet.watch.verdict import Start, judge

HANDLE = Handle("far", "job-1", "token", 1)


def test_a_service_that_is_out_of_reach_has_ended_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Status | CloudError] = [
        Status(Phase.RUNNING),
        NotAsked("AWS did not answer"),
        CloudError("throttled", code="ServerException"),
        Status(Phase.ENDED),
    ]

    class Far(Hosted):
        def look(self, handle: Handle) -> Status:
            found = looks.pop(0)
            if isinstance(found, CloudError):
                raise found
            return found

    Far.__abstractmethods__ = frozenset()
    monkeypatch.setattr(Hosted, "pace", lambda *words: 0.0)
    far = cast(Any, Far)(None)
    phases = [far.status(HANDLE).phase for _ in range(4)]
    assert phases == [Phase.RUNNING] * 3 + [Phase.ENDED]
    far.stop(HANDLE, at_once=True)  # an ended job is not looked for again
    looks += [NotAsked("AWS did not answer"), Status(Phase.RUNNING), CloudError("denied")]
    new = cast(Any, Far)(None)
    with pytest.raises(NotAsked):
        new.status(HANDLE)
    new.status(HANDLE)
    with pytest.raises(CloudError, match="denied"):
        new.status(HANDLE)


def test_a_job_that_somebody_ended_in_batch_s_queue_has_not_ended_well() -> None:
    record = {"status": "FAILED", "isTerminated": True, "statusReason": "not today"}
    status = status_of(record, {}, "")
    assert status.ended_by and not status.exits


def test_a_new_job_that_batch_does_not_know_yet_has_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "send", lambda *words: {"jobs": []})
    batch = Batch(load(Settings(FOLDER / "llama-2-7b-trn1-batch.yaml"), terms_of)[0])
    batch._sent["new"] = clock.now()
    handle = Handle("batch", "job-1", "new", 1)
    assert batch.look(handle).phase is Phase.QUEUED
    batch._sent["new"] -= 100
    assert batch.look(handle).phase is Phase.ENDED


@pytest.mark.parametrize("name", ["llama-2-7b-trn1-batch", "llama-2-7b-p4d-sagemaker"])
def test_a_stop_waits_until_ranks_that_hang_are_killed(name: str) -> None:
    config, _ = load(Settings(FOLDER / f"{name}.yaml"), terms_of)
    backend = cast(Any, backend_of(config))
    grace = batch_request.grace(config) if name.endswith("batch") else backend.terms.grace
    assert backend.gone > grace + 30


def test_a_slurm_job_that_could_not_open_its_log_says_so(tmp_path: Path) -> None:
    """slurmd fails it before its script, with RaisedSignal:53 and no word in any log."""
    queue = "7|FAILED|0|node0|||RaisedSignal:53(Real-time_signal_19)|"
    slurm = Slurm(config_of(tmp_path))
    slurm.engine.ask = lambda *words: Said(0, queue, "")
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "token").write_text("7\n")
    request = Request(Job("train", "x", tmp_path, 2, 1, "m", (), True), ())
    status = slurm.status(Handle("slurm", f"{tmp_path}:7", "token", 2))
    assert "can't open the job's log in fleet.shared_folder" in status.reason
    verdict = judge(request, AttemptOutcome(status, None), Run(tmp_path), Start(0.0, {}))
    assert verdict.cause == "storage" and "findmnt" in verdict.next, verdict
    assert worth_it(verdict, 1, Run(tmp_path)), "its client may have cached that there is no folder"


def test_a_slurm_job_waits_while_no_squeue_has_answered_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(line: Any, stdin: str, environment: object) -> Said:
        if line[0] == "sbatch":
            return Said(0, "17\n", "")
        return Said(0, "", "") if "--me" in line else Said(1, "", "Socket timed out")

    monkeypatch.chdir(tmp_path)
    slurm = Slurm(config_of(tmp_path))
    slurm.engine.ask = ask
    job = Job("train", "x", Path("runs/x"), 1, 1, "m", (), True)
    handle = slurm.submit(Request(job, (Artifact("job.sbatch", "#!/bin/sh"),)))
    assert slurm.status(handle).phase is Phase.QUEUED


def test_what_a_login_profile_prints_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".bash_profile").write_text("echo Welcome\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(client.HEAD, "1")
    assert client.ask_here(["printf", "17\n"]).out == "17\n"


def launch_of(run: Run, **more: Any) -> Any:
    config, _ = load(Settings(FOLDER / "first-run.yaml"))
    request = SimpleNamespace(job=SimpleNamespace(kind="train"))
    lease = SimpleNamespace(confirm=lambda: None, left=False, leave=lambda: None)
    plan = SimpleNamespace(requests=[request])
    backend = SimpleNamespace(learn=lambda run: None)
    given = {"run": run, "config": config, "lease": lease, "plan": plan, "backend": backend}
    return SimpleNamespace(**given | more)


def test_a_job_that_outlived_a_failed_launcher_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launch_of(Run(tmp_path))
    launch.lease.predecessor, launch.backend.can = None, {Can.OUTLIVES}
    monkeypatch.setattr(execution, "left_running", lambda config, run: "running")
    assert execution.Launch.following(launch) == (launch, "running")
    launch.backend.can = set()
    assert execution.Launch.following(launch) == (launch, None)


def test_a_run_that_was_ended_in_the_queue_is_stopped(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.update_results(status="running")
    assert training.carry_out(launch_of(run, do=lambda *words: True), None) == 130
    assert run.read_results()["status"] == "stopped"


def test_a_run_goes_on_while_its_progress_can_t_be_read(tmp_path: Path) -> None:
    def update(waits: str) -> None:
        raise InputError("metrics.jsonl can't be read", why="Input/output error")

    more = {"place": None, "interrupts": SimpleNamespace(signalled=0)}
    launch = launch_of(Run(tmp_path), **more)
    launch.backend.bill = lambda: None
    live: Any = SimpleNamespace(update=update, line=SimpleNamespace(unread=False, say=print))
    execution.Launch._watch(launch, live).show("")


def test_a_request_to_stop_outlives_a_head_that_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lead(launch: Any) -> int:
        raise CutOff("no other host is reached")

    run = Run(tmp_path)
    launch = launch_of(run)
    launch.lease.leave = lambda: setattr(launch.lease, "left", True)
    monkeypatch.setattr(training, "lead", lead)
    run.ask_to_stop()
    assert training._led(launch) is None and run.is_asked_to_stop()


def test_a_job_that_fails_for_good_without_a_launcher_says_so(tmp_path: Path) -> None:
    run, start = Run(tmp_path), tmp_path / "nodes" / "slurm-7-0"
    run.update_results(status="running")
    start.mkdir(parents=True)
    run.logs.mkdir()
    (run.logs / "node-0.log").write_text(
        "rank 0  10:00:00.000 | NameError: name 'loss' is not defined\n"
    )
    fence.begin(run.folder)
    request = Request(Job("train", "x", run.folder, 1, 1, "m", (), True), ())
    assert not aftermath.is_worth_it(run, request, {0: 1}, start)
    assert run.read_results()["status"] == "failed"


def test_a_killed_rank_s_folder_is_no_obstacle_to_the_next_attempt(tmp_path: Path) -> None:
    assert fence.begin(tmp_path) == 1
    (tmp_path / "heartbeats" / ".node-0-1").mkdir(parents=True)
    assert fence.begin(tmp_path) == 2
