"""The whole line on a real Slurm of four nodes: what is typed on its head, and what happens to nodes, limits and launchers meanwhile."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fleet.lab import Lab, lab
from fleet.slurmlab import Slurm, cluster
from trainfleet.runs import Run
from verbs import begin, enter, finish, losses, write_text

STEPS = 60
PACE = 0.05  # seconds that a step takes at least, so that a run can be met under way


def config(name: str, **changes: object) -> dict[str, object]:
    fleet = {"backend": "slurm", "nodes": 2, "slurm": {"notice": 10}} | dict(changes.pop("fleet", {}))  # type: ignore[call-overload]
    train = {"steps": STEPS, "precision": "fp32", "global_batch": 8, "sequence_length": 32, "log_every": 1,
             "validate_every": 0, "validation_sequences": 8} | dict(changes.pop("train", {}))  # type: ignore[call-overload]  # fmt: skip
    return {
        "name": name, "fleet": fleet, "train": train,
        "data": {"name": "text", "sources": ["text"], "vocabulary_size": 340, "validation_fraction": 0.1},
        "model": {"layers": 2, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
        "checkpoint": {"every": 10}, **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def nodes() -> Iterator[Lab]:
    with lab(4) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def slurm(nodes: Lab) -> Iterator[Slurm]:
    with cluster(nodes, patience=8) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def desk(nodes: Lab, slurm: Slurm) -> Path:
    """The folder on the head, which every node sees, where commands are typed; with a dataset that is tokenized by two nodes."""
    folder = nodes.shared / "work"
    folder.mkdir()
    write_text(folder / "text")
    write(folder, "whole")
    said = enter(folder, "train")
    assert "train.steps" not in said and Run(folder / "runs/whole").read_results()["status"] == "finished", said
    return folder


def write(folder: Path, name: str, **changes: object) -> Run:
    (folder / "config.yaml").write_text(yaml.safe_dump(config(name, **changes)))
    return Run(folder / "runs" / name)


def until(done: Callable[[], object], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.2)


def steps(run: Run) -> int:
    return max((line["step"] for line in run.read_metrics()), default=0)


def job_of(run: Run) -> str:
    record = json.loads((run.folder / "handle.json").read_text())
    return str(record["id"]).rpartition(":")[2]


def hasten(slurm: Slurm, number: str) -> None:
    """Lets a job that was queued again begin now: Slurm holds it for two minutes."""
    until(lambda: "PENDING" in slurm.run("squeue", "-h", "-j", number, "-o", "%T").stdout, "the queue", 240)
    slurm.run("scontrol", "update", f"jobid={number}", "StartTime=now")


def test_tokenize_train_status_logs_scaling(desk: Path, slurm: Slurm) -> None:
    write(desk, "whole")
    run = Run(desk / "runs/whole")
    assert len(losses(run.folder)) == STEPS and run.read_results()["nodes"] == 2
    assert "finished" in enter(desk, "status")
    said = enter(desk, "logs")
    assert "node-0  rank 0" in said and "node-1  rank 1" in said
    planned = enter(desk, "plan")
    assert "job.sbatch" in planned and "#SBATCH --nodes=2" in planned and "trainfleet.entrypoint --on slurm" in planned
    enter(desk, "plan", "OUT=planned")
    script = (desk / "planned").glob("train-job.sbatch")
    assert [path.read_text() for path in script] == [
        json.loads((run.folder / "request.json").read_text())["artifacts"][0]["text"]
    ]
    table = enter(desk, "scaling", "NODES=1 2", "SET=train.steps=12")
    assert re.search(r"(?m)^ *2 ", table), table


def test_a_stop_saves_and_the_same_command_goes_on_bit_for_bit(desk: Path, slurm: Slurm) -> None:
    run = write(desk, "stopped")
    first = begin(desk, "train")
    until(lambda: steps(run) >= 5, "step 5")
    assert "stopped" in enter(desk, "stop")
    finish(first, code=130)
    assert not slurm.run("squeue", "-h", "--me", "-t", "R,PD").stdout.strip()
    assert 5 <= steps(run) < STEPS
    enter(desk, "train")
    assert losses(run.folder) == losses(desk / "runs/whole")


def test_a_launcher_is_killed_and_another_one_attaches_to_the_same_job(desk: Path, slurm: Slurm) -> None:
    run = write(desk, "attached", train={"steps": 400})
    first = begin(desk, "train")
    until(lambda: steps(run) >= 5, "step 5")
    first.kill()
    first.communicate()
    number = job_of(run)
    assert "attached" in enter(desk, "status")
    said = enter(desk, "train")
    assert "runs on, as the launcher before this one left it" in said and job_of(run) == number
    assert run.read_results()["status"] == "finished" and len(losses(run.folder)) == 400
    assert not [event for event in run.read_events() if event["event"] == "restarted"]


def test_the_time_limit_comes_and_no_step_is_lost(desk: Path, slurm: Slurm) -> None:
    fleet = {"slurm": {"time_limit": 10, "notice": 60, "partition": "short"}}
    run = write(desk, "limited", fleet=fleet, train={"steps": 100000}, checkpoint={"every": 100000})
    first = begin(desk, "train")
    until(lambda: steps(run) >= 5, "step 5")
    number = job_of(run)
    slurm.run(
        "scancel", "--signal=USR1", "--batch", number
    )  # what Slurm sends itself a minute before the limit (--signal=B:USR1@60)
    hasten(slurm, number)
    before = steps(run)
    until(lambda: steps(run) > before, "the next step", 240)
    enter(desk, "stop")
    finish(first, code=130)
    assert job_of(run) == number, "one job, started twice"
    resumed = [event for event in run.read_events() if event["event"] == "resumed"]
    assert [event["step"] for event in resumed] == [before], "it went on from the very step at which it was told to leave"
    lines = [line["step"] for line in run.read_metrics()]
    assert lines == sorted(set(lines)) == list(range(1, lines[-1] + 1))


def test_a_node_dies_without_any_launcher_and_slurm_goes_on_bit_for_bit(desk: Path, nodes: Lab, slurm: Slurm) -> None:
    whole, run = write(desk, "long", train={"steps": 300}), write(desk, "killed", train={"steps": 300})
    write(desk, "long", train={"steps": 300})
    enter(desk, "train")
    write(desk, "killed", train={"steps": 300})
    first = begin(desk, "train")
    until(lambda: (run.checkpoints / "step-00000010").exists(), "a checkpoint")
    first.kill()
    first.communicate()
    number = job_of(run)
    host = slurm.run(
        "scontrol", "show", "hostnames", slurm.run("squeue", "-h", "-j", number, "-o", "%N").stdout.strip()
    ).stdout.split()[1]
    nodes.destroy(int(host.removeprefix("node")))
    try:
        hasten(slurm, number)
        said = enter(desk, "train")
        assert "runs on, as the launcher before this one left it" in said, said
    finally:
        nodes.recreate(int(host.removeprefix("node")))
        slurm.start_node(int(host.removeprefix("node")))
    assert run.read_results()["status"] == "finished" and job_of(run) == number
    assert losses(run.folder) == losses(whole.folder)
    slurm.await_idle()


def test_what_waits_says_why_and_costs_nothing(desk: Path, slurm: Slurm) -> None:
    blocker = slurm.run("sbatch", "--parsable", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 300").stdout.strip()
    run = write(desk, "waits", fleet={"instance_type": "c7i.8xlarge"}, train={"steps": 5})
    first = begin(desk, "train")
    until(lambda: (run.folder / "handle.json").exists(), "a job")
    until(lambda: "queued: (Resources): it is the next one" in enter(desk, "status"), "the reason", 60)
    slurm.run("scancel", blocker)
    said = finish(first)
    assert re.search(r"\((Resources|Priority)\): .*; next: ", said), said
    assert not [event for event in run.read_events() if event["event"] in ("verdict", "slow")]
    waited = next(event for event in run.read_events() if event["event"] == "running")["time"] - run.read_results()["started"]
    assert waited > 3 and run.read_results()["usd"] < 2 * 1.43 * (run.read_results()["seconds"].get("total", 60)) / 3600


def test_two_who_submit_one_token_at_once_have_one_job(desk: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainfleet.backends import terms_of
    from trainfleet.backends.slurm import Slurm as Backend
    from trainfleet.config import Settings, load
    from trainfleet.plan.job import tokenize_job

    monkeypatch.chdir(desk)
    write(desk, "twice")
    settings, _ = load(Settings(desk / "config.yaml"), terms_of)
    job = replace(
        tokenize_job(settings), module="probe", arguments=("x",), launch="twice", name="twice", folder=Path("runs/twice")
    )
    (desk / "probe.py").write_text("print('here')\n")
    request = Backend(settings).plan(job, {})
    request = replace(request, artifacts=(replace(request.artifacts[0]),))
    threads = [threading.Thread(target=lambda: Backend(settings).submit(request)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    backend = Backend(settings)
    handle = backend.submit(request)
    until(lambda: backend.status(handle).ended, "its end")
    until(lambda: not slurm.run("squeue", "-h", "--me", "-t", "R,PD,CG").stdout.strip(), "the end of all")
    said = Path("runs/twice/logs/node-0.log").read_text() + Path("runs/twice/logs/node-1.log").read_text()
    assert said.count("here") == 2, said


def test_bad_inputs_are_named_with_the_next_command(desk: Path, slurm: Slurm) -> None:
    for fleet, expected in (
        ({"slurm": {"partition": "gpu"}}, "fleet.slurm.partition: there is no partition gpu; there are: main, short, shut"),
        ({"slurm": {"partition": "shut"}}, "the partition shut takes no jobs now; others: main, short"),
        (
            {"slurm": {"partition": "short", "time_limit": 60, "notice": 60}},
            "60 min is more than the partition short allows, 10 min",
        ),
        ({"slurm": {"gres": "gpu:8"}}, "fleet.slurm.gres: no node has such resources"),
        ({"slurm": {"constraint": "h100"}}, "fleet.slurm.constraint: no node has such a feature"),
        ({"slurm": {"reservation": "ours"}}, "fleet.slurm.reservation: there is no such reservation"),
        ({"nodes": 8}, "8 nodes are wanted, 4 of 4 hosts can take a job"),
        ({"slurm": {"time_limit": 1, "notice": 60}}, "fleet.slurm.notice: 60 s: fleet.slurm.time_limit is 1 min in all"),
    ):
        write(desk, "bad", fleet=fleet)
        for verb in ("train",):
            said = subprocess_of(desk, verb)
            assert expected in said and "next: " in said and "Traceback" not in said, said
    assert not (desk / "runs/bad").exists()


def subprocess_of(desk: Path, verb: str) -> str:
    process = begin(desk, verb)
    said = process.communicate(timeout=60)[0]
    assert process.returncode in (1, 2), said
    return str(said)


def test_a_node_that_is_drained_is_named_while_the_job_waits(desk: Path, slurm: Slurm) -> None:
    slurm.run("scontrol", "update", "nodename=node[1-3]", "state=drain", "reason=test")
    run = write(desk, "drained", train={"steps": 5})
    first = begin(desk, "train")
    try:
        until(lambda: "nodes that it needs are down, drained or reserved" in enter(desk, "status") if run.config.exists() else False,
              "the reason", 60)  # fmt: skip
        assert "node1 is drained, test" in enter(desk, "status")
    finally:
        slurm.run("scontrol", "update", "nodename=node[1-3]", "state=resume")
    finish(first)


def test_slurmctld_is_restarted_under_a_run(desk: Path, slurm: Slurm) -> None:
    run = write(desk, "restarted", train={"steps": 400})
    first = begin(desk, "train")
    until(lambda: steps(run) >= 5, "step 5")
    slurm.stop_controller()
    time.sleep(5)
    slurm.start_controller()
    finish(first)
    assert run.read_results()["status"] == "finished" and not run.read_results()["restarts"]


@pytest.mark.parametrize("accounting", [True, False])
def test_with_accounting_and_without_a_job_of_old_is_known(accounting: bool) -> None:
    with lab(2) as nodes, cluster(nodes, accounting=accounting, age=2) as slurm:
        folder = nodes.shared / "work"
        folder.mkdir()
        write_text(folder / "text")
        run = write(folder, "kept", fleet={"slurm": {"account": "vision"}} if accounting else {}, train={"steps": 10})
        enter(folder, "train")
        number = job_of(run)
        until(lambda: not slurm.run("squeue", "-h", "-t", "all", "--me").stdout.strip(), "that squeue forgets", 90)
        assert "finished" in enter(folder, "status")
        assert "nothing is left to do" in enter(folder, "train")
        accounted = subprocess.run(
            ["sacct", "-X", "-n", "-P", "-j", number, "-o", "State"], capture_output=True, text=True, check=False
        )
        assert ("COMPLETED" in accounted.stdout) is accounting
        if not accounting:
            return
        for fleet, expected in (
            (
                {"account": "vision", "qos": "long"},
                "fleet.slurm.qos: the account has no such quality of service; root has account",
            ),
            ({"account": "nobody"}, "fleet.slurm.account: the account may not run jobs there; root has account"),
        ):
            write(folder, "bad", fleet={"slurm": fleet})
            said = subprocess_of(folder, "train")
            assert expected in said and "account vision with " in said, said
        slurm.stop_accounting()
        run = write(folder, "without", fleet={"slurm": {"account": "vision"}}, train={"steps": 10})
        enter(folder, "train")
        assert run.read_results()["status"] == "finished" and "finished" in enter(folder, "status")


def test_typed_on_a_machine_without_slurm_it_is_handed_to_the_head_by_ssh(tmp_path: Path) -> None:
    with lab(2) as nodes, cluster(nodes) as slurm:
        write_text(nodes.shared / "text")
        for node in range(2):  # the second one is the login node too: it has sbatch, and finds the cluster as others do
            (nodes.root(node) / "etc/profile.d/slurm.sh").write_text(f"export SLURM_CONF={slurm.folder}/slurm.conf\n")
            nodes.run(node, "ln", "-sfn", str(slurm.folder), "/etc/slurm-lab")
        fleet = nodes.fleet(backend="slurm", hosts=[nodes.hosts()[1]], nodes=2, slurm={"notice": 10})
        changes = {"data": {"name": "text", "sources": ["/fsx/text"], "vocabulary_size": 340, "validation_fraction": 0.1}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config("afar", train={"steps": 40}) | changes | {"fleet": fleet}))
        bare = {"SLURM_CONF": "/nowhere/slurm.conf"}
        assert "partition main: 2 nodes" in enter(tmp_path, "setup", variables=bare)
        said = enter(tmp_path, "train", variables=bare)
        run = Run(nodes.shared / "trainfleet/runs/afar")
        assert run.read_results()["status"] == "finished" and len(losses(run.folder)) == 40, said
        assert "finished" in enter(tmp_path, "status", variables=bare)
        (tmp_path / "config.yaml").write_text(
            yaml.safe_dump(config("bad") | changes | {"fleet": fleet | {"slurm": {"partition": "gpu"}}})
        )
        process = begin(tmp_path, "train", variables=bare)
        assert "there is no partition gpu; there are: main, short, shut" in process.communicate(timeout=60)[0]
