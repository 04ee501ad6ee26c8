"""The whole line on AWS Batch and SageMaker, pretended: their nodes share no disk, so all that machines know goes through S3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import verbs
from aws import containers
from aws.batch import Job as BatchJob
from aws.sagemaker import SageMaker
from aws.schedulers import Site as Account
from aws.schedulers import site as account_and_bucket
from trainfleet.backends.run_storage import VACANT
from trainfleet.run.run_folder import Run
from trainfleet.storage import s3

CONFIG = """
name: line
data: {name: text, sources: ["s3://bucket/text"], tokenized_path: "s3://bucket/sets", vocab_size: 340, validation_fraction: 0.1}
model: {layers: 2, hidden_size: 32, heads: 2, kv_heads: 1, intermediate_size: 64}
train: {steps: 12, precision: fp32, compile: false, global_batch_size: 8, sequence_length: 32, log_every: 1, validate_every: 6, validation_sequences: 8}
checkpoint: {every: 4, path: "s3://bucket/checkpoints"}
"""
SECRET = "canary-5d1f9b"


class Site:
    """An engine of the account, S3, and machines at which verbs are typed."""

    def __init__(self, account: Account, engine: str, folder: Path) -> None:
        self.account, self.cluster, self.engine, self.folder = (
            account,
            account.cluster,
            engine,
            folder,
        )
        self.service = account.batch if engine == "batch" else account.sagemaker

    def machine(self, name: str) -> Path:
        """A machine that has the config and nothing else."""
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            fleet = {
                "fleet": {"nodes": 2, "secrets": ["THE_KEY"]} | self.account.fleet(self.engine)
            }
            (folder / "config.yaml").write_text(CONFIG + yaml.safe_dump(fleet))
        return folder

    def begin(self, machine: str, verb: str, *words: str) -> subprocess.Popen[str]:
        program = [sys.executable, str(verbs.ROOT / "tests/aws/elsewhere.py"), verb, *words]
        environment = os.environ | self.account.environment | {
            "PYTHONPATH": verbs.PACKAGES,
            "NO_COLOR": "1",
            "THE_KEY": SECRET,
        }  # fmt: skip
        return subprocess.Popen(program, cwd=self.machine(machine), env=environment, text=True, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip

    def type(self, machine: str, verb: str, *words: str, code: int = 0) -> str:
        return verbs.finish(self.begin(machine, verb, *words), code, timeout=200)

    def type_any(self, machine: str, verb: str, *words: str) -> str:
        """What a verb says, however it ends."""
        return self.begin(machine, verb, *words).communicate(timeout=200)[0]

    def run(self, machine: str, name: str = "line") -> Run:
        return Run(self.machine(machine) / "runs" / name)

    def job(self) -> str:
        """The newest job."""
        return max(self.service.jobs.items(), key=lambda item: item[1].created)[0]

    def attempts(self) -> int:
        """How often the engine has started the newest job."""
        job = self.service.jobs[self.job()]
        return len(job.attempts) if isinstance(job, BatchJob) else job.attempt

    def until(self, true: Callable[[], object], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def freeze(self, name: str) -> list[int]:
        """The ranks of the newest job, stopped (SIGSTOP) after their first steps, so that it lasts until they are continued."""
        self.until(lambda: self.run("desk", name).folder.joinpath("handle.json").exists())
        metrics = self.cluster.disk(self.job(), 1, 0) / "runs" / name / "metrics.jsonl"
        self.until(lambda: metrics.exists() and metrics.read_text())
        ranks = [
            pid
            for pid in self.cluster.processes(self.job())
            if "trainfleet.engine" in self.cluster.words(pid)
        ]
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        return ranks

    def lose(self, node: int) -> None:
        """The machine of a node goes, with all that runs on it."""
        if isinstance(self.service, SageMaker):
            self.service.break_host(self.job(), node)
        else:
            self.account.containers.lose(self.job(), node)

    def wait(self, seconds: float) -> None:
        """How long jobs wait for machines from now on."""
        if isinstance(self.service, SageMaker):
            self.service.waits = seconds
        else:
            self.service.runnable = seconds

    def thaw(self, ranks: list[int]) -> None:
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module", params=["batch", "sagemaker"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with account_and_bucket(folder / "engine") as account:
        for path in verbs.write_text(folder / "text").iterdir():
            s3.write(f"s3://bucket/text/{path.name}", path.read_bytes())
        yield Site(account, request.param, folder)


@pytest.fixture(scope="module")
def unbroken(site: Site) -> Run:
    """A run that nothing happened to, which tokenized first; on the machine where it was launched."""
    said = site.type("desk", "train")
    waits = (
        "RUNNABLE: machines are starting"
        if site.engine == "batch"
        else "Starting: requesting machines"
    )
    assert waits in said and "running      attempt 1" in said, said
    return site.run("desk")


def test_it_tokenizes_and_trains(site: Site, unbroken: Run) -> None:
    results = unbroken.read_results()
    assert (
        results["status"] == "finished"
        and results["steps"] == 12
        and len(verbs.losses(unbroken.folder)) == 12
    )
    assert (
        results["last_checkpoint"] == "s3://bucket/checkpoints/line/step-00000012"
        and not unbroken.checkpoints.exists()
    )
    assert unbroken.report.exists() and all(
        (unbroken.logs / f"node-{node}.log").exists() for node in (0, 1)
    )


def test_a_machine_that_never_saw_the_run_sees_all_of_it_by_its_name(
    site: Site, unbroken: Run
) -> None:
    assert "finished · step 12 of 12" in site.type("elsewhere", "status")
    assert "rank 1 of 2" in site.type("elsewhere", "logs")
    assert "nothing to stop" in site.type("elsewhere", "stop")
    site.type("elsewhere", "report")
    there = site.run("elsewhere")
    assert there.report.exists() and verbs.losses(there.folder) == verbs.losses(unbroken.folder)
    assert there.read_results() == unbroken.read_results()
    assert "nothing to do" in site.type("elsewhere", "train")


def test_a_machine_that_never_saw_the_run_samples_its_model(site: Site, unbroken: Run) -> None:
    assert site.type("fresh", "sample", "PROMPT=def ", "LENGTH=8", "SEED=1").startswith("def")
    assert "\n  12  " in site.type("fresh", "checkpoints")


@pytest.mark.parametrize("site", ["sagemaker"], indirect=True, scope="module")
@pytest.mark.parametrize("mode", ["file", "fastfile", "stream"])
def test_nodes_read_the_dataset_as_the_input_mode_says(
    site: Site, unbroken: Run, mode: str
) -> None:
    """File and FastFile put it into a folder of the host, and nothing of it is fetched from S3 by ranks; streams are. The fake's
    FastFile is a copy too: that SageMaker mounts the prefix and reads on demand is not seen here."""
    site.type("desk", "train", f"SET=name=by-{mode} fleet.sagemaker.input_mode={mode}")
    assert verbs.losses(site.run("desk", f"by-{mode}").folder) == verbs.losses(unbroken.folder)
    request = site.account.sagemaker.jobs[site.job()].request
    copies = list(
        (site.cluster.folder / "ml" / site.job()).glob("*/input/data/dataset/train/*.bin")
    )
    cached = list(site.cluster.disk(site.job(), 1, 0).glob("data/text/cache/*"))
    channels = [channel["InputMode"] for channel in request.get("InputDataConfig", ())]
    assert channels == {"file": ["File"], "fastfile": ["FastFile"], "stream": []}[mode]
    assert (len(copies) >= 2 and not cached) if channels else (cached and not copies), (
        copies,
        cached,
    )


def test_what_died_before_the_entrypoint_is_heard_from_the_engine(
    site: Site, unbroken: Run
) -> None:
    site.account.containers.broken = "exec /usr/bin/python3: exec format error"
    try:
        said = site.type("desk", "train", "SET=name=unborn", code=1)
    finally:
        site.account.containers.broken = ""
    assert "exec format error" in said and "does not match the program (environment)" in said, said
    logs = site.type("elsewhere", "logs", "SET=name=unborn")
    assert (
        "engine-0  scheduler  " in logs and "| exec /usr/bin/python3: exec format error" in logs
    ), logs
    asked = [
        request
        for _, operation, request in site.account.account.calls
        if operation == "GetLogEvents"
    ]
    group = {"batch": "/aws/batch/job", "sagemaker": "/aws/sagemaker/TrainingJobs"}[site.engine]
    assert asked and all(
        request["logGroupName"] == group and request["startFromHead"] for request in asked
    )


def test_an_engine_that_kills_before_the_grace_time_is_named(
    site: Site, unbroken: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody ends the job in the console, ranks can't save, and the containers are killed long before the 20 or 110 s are over.

    The time is for the nodes to have told S3 that they were asked to leave."""
    monkeypatch.setattr(containers, "GRACE", 6.0)
    launcher = site.begin("desk", "train", "SET=name=cut")
    frozen = site.freeze("cut")
    site.thaw(
        [pid for pid in frozen if "trainfleet.node.entrypoint" in site.cluster.words(pid)]
    )  # a node hears, its ranks do not
    service = site.service
    if isinstance(service, SageMaker):
        service.account.respond(
            "us-east-1", "sagemaker", "StopTrainingJob", {"TrainingJobName": site.job()}
        )
    else:
        service.account.respond(
            "us-east-1", "batch", "TerminateJob", {"jobId": site.job(), "reason": "by hand"}
        )
    said = verbs.finish(launcher, code=1)
    assert (
        "the job was cancelled (cancelled)" in said and "kills a job before the grace time" in said
    ), said
    assert not site.cluster.processes()


def test_stopped_from_elsewhere_it_goes_on_from_a_third_machine_bit_for_bit(
    site: Site, unbroken: Run
) -> None:
    words = ["SET=name=stopped"]
    launcher = site.begin("desk", "train", *words)
    ranks = site.freeze("stopped")
    follower, stop = (
        site.begin("elsewhere", "logs", "FOLLOW=1", *words),
        site.begin("elsewhere", "stop", *words),
    )
    site.until(lambda: (site.cluster.disk(site.job(), 1, 0) / "runs/stopped/stop").exists())
    site.thaw(ranks)
    assert "stopped; no process is running" in verbs.finish(stop)
    verbs.finish(launcher, code=130)
    assert "step 1" in verbs.finish(follower)
    assert (
        site.run("desk", "stopped").read_results()["status"] == "stopped"
        and not site.cluster.processes()
    )
    site.type("third", "train", *words)
    assert verbs.losses(site.run("third", "stopped").folder) == verbs.losses(unbroken.folder)


def test_the_engine_tries_again_by_itself_when_a_node_is_lost(site: Site, unbroken: Run) -> None:
    """What the node wrote in its last two seconds is lost with it; what it trained goes on bit for bit."""
    words = ["SET=name=lost checkpoint.every=2"]
    launcher = site.begin("desk", "train", *words)
    site.until(lambda: s3.list_objects("s3://bucket/checkpoints/lost/step-00000002/"))
    site.lose(1)
    verbs.finish(launcher)
    run, whole = site.run("desk", "lost"), verbs.losses(unbroken.folder)
    resumed = [event["step"] for event in run.read_events() if event["event"] == "resumed"]
    losses = verbs.losses(run.folder)
    assert (
        resumed
        and resumed[0] >= 2
        and losses.items() <= whole.items()
        and set(losses) >= set(range(resumed[0] + 1, 13))
    )
    assert site.attempts() == 2, "of the engine's own; nobody submitted again"
    assert run.read_results()["restarts"] == 0


def test_a_launcher_that_is_killed_is_followed_by_one_elsewhere(site: Site, unbroken: Run) -> None:
    words = ["SET=name=left"]
    launcher = site.begin("desk", "train", *words)
    ranks, job = site.freeze("left"), site.job()
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    assert "is already running" in site.type("third", "train", *words, code=1), "its lease is young"
    time.sleep(VACANT)
    launcher = site.begin("third", "train", *words)
    site.until(lambda: (site.run("third", "left").folder / "lock").exists())
    site.thaw(ranks)
    assert "is still running from the previous launch" in verbs.finish(launcher)
    run = site.run("third", "left")
    assert site.job() == job and run.read_results()["status"] == "finished"
    assert verbs.losses(run.folder) == verbs.losses(unbroken.folder)


def test_a_job_that_waits_costs_nothing_and_is_stopped_from_elsewhere(
    site: Site, unbroken: Run
) -> None:
    words = ["SET=name=waiting"]
    site.wait(-1.0)
    try:
        launcher = site.begin("desk", "train", *words)
        site.until(lambda: (site.run("desk", "waiting").folder / "handle.json").exists())
        site.until(lambda: "queued" in site.type("elsewhere", "status", *words))
        assert "stopped; no process is running" in site.type("elsewhere", "stop", *words)
        assert ("RUNNABLE" if site.engine == "batch" else "Starting") in verbs.finish(
            launcher, code=130
        )
        assert not site.cluster.processes()
    finally:
        site.wait(0.2)


def test_a_program_that_fails_is_judged_and_not_tried_again(site: Site, unbroken: Run) -> None:
    shard = next(
        found
        for found in s3.list_objects("s3://bucket/sets/text/train/")
        if found.address.endswith(".bin")
    )
    content = s3.read(shard.address) or b""
    s3.write(shard.address, bytes(len(content)))
    try:
        said = site.type("desk", "train", "SET=name=broken", code=1)
    finally:
        s3.write(shard.address, content)
    assert "is damaged" in said and "the data is broken or missing" in said, said
    assert site.attempts() == 1, "the engine does not try again what the program would do again"
    assert "verdict  rank " in site.type("elsewhere", "status", "SET=name=broken")


def test_a_secret_reaches_the_ranks_and_is_nowhere(site: Site, unbroken: Run) -> None:
    for found in s3.list_objects("s3://bucket/"):
        assert SECRET.encode() not in (s3.read(found.address) or b""), found.address
    for path in site.folder.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_clean_leaves_nothing_of_a_run_and_its_dataset_in_the_bucket(
    site: Site, unbroken: Run
) -> None:
    def others() -> set[str]:
        found = {found.address for found in s3.list_objects("s3://bucket/")}
        return {
            address
            for address in found
            if not any(part in address for part in ("/broken/", "/sets/text/", "/data/text/"))
        }

    before = others()
    said = site.type("elsewhere", "clean", "PURGE=1", "YES=1", "SET=name=broken")
    assert "s3://bucket/some/runs/broken" in said and others() == before
    assert len(s3.list_objects("s3://bucket/")) == len(before)
