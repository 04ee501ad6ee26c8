"""The whole line on a real Slurm of four nodes: what is typed on its head, and what happens to nodes, limits and launchers meanwhile."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fleet.lab import Lab, lab
from fleet.slurmlab import Slurm, cluster
from trainfleet.backends import terms_of
from trainfleet.backends.slurm import Slurm as Backend
from trainfleet.config import Settings, load, load_resolved
from trainfleet.health.lease import read_holder
from trainfleet.plan.estimate import list_price
from trainfleet.plan.job import Request, tokenize_job
from trainfleet.run.run_folder import Run
from trainfleet.watch.causes import Then
from trainfleet.watch.monitor import AttemptOutcome
from trainfleet.watch.verdict import judge, start_now
from verbs import ROOT, begin, enter, finish, losses, write_text

STEPS, LONG = 80, 300  # the longer ones can be met under way


def config(name: str, **changes: object) -> dict[str, object]:
    fleet = {"backend": "slurm", "nodes": 2, "slurm": {"warn_before_seconds": 10}} | dict(
        changes.pop("fleet", {})
    )  # type: ignore[call-overload]
    train = {"steps": STEPS, "precision": "fp32", "global_batch_size": 8, "sequence_length": 32, "log_every": 1,
             "validate_every": 0, "validation_sequences": 8} | dict(changes.pop("train", {}))  # type: ignore[call-overload]  # fmt: skip
    return {
        "name": name, "fleet": fleet, "train": train,
        "data": {"name": "text", "sources": ["text"], "vocab_size": 340, "validation_fraction": 0.1},
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
    assert (
        "train.steps" not in said
        and Run(folder / "runs/whole").read_results()["status"] == "finished"
    ), said
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
    until(
        lambda: re.search("Restarts=[1-9]", slurm.run("scontrol", "show", "job", number).stdout),
        "the queue",
        240,
    )
    until(
        lambda: "PENDING" in slurm.run("squeue", "-h", "-j", number, "-o", "%T").stdout,
        "the queue",
        60,
    )
    time.sleep(
        3
    )  # credentials of a start are revoked to the second, and those of the next must be younger
    slurm.run(
        "scontrol", "update", f"jobid={number}", "StartTime=now", check=False
    )  # it may have begun by itself


def test_tokenize_train_status_logs_scaling(desk: Path, slurm: Slurm) -> None:
    write(desk, "whole")
    run = Run(desk / "runs/whole")
    assert len(losses(run.folder)) == STEPS and run.read_results()["nodes"] == 2
    told = {
        "dataset": "text",
        "total_steps": STEPS,
        "gradient_accumulation_steps": 1,
        "global_batch_sequences": 8,
    }
    assert told.items() <= run.read_results().items(), "as the article's results.json has them"
    assert "finished" in enter(desk, "status")
    said = enter(desk, "logs")
    assert "node-0  rank 0" in said and "node-1  rank 1" in said
    planned = enter(desk, "plan", "VERBOSE=1")
    assert (
        "job.sbatch" in planned
        and "#SBATCH --nodes=2" in planned
        and "trainfleet.node.entrypoint --on slurm" in planned
    )
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


def test_slurmctld_is_restarted_a_launcher_is_killed_and_another_one_attaches_to_the_same_job(
    desk: Path, slurm: Slurm
) -> None:
    run = write(desk, "attached", train={"steps": LONG})
    first = begin(desk, "train")
    until(lambda: steps(run) >= 5, "step 5")
    slurm.stop_controller()
    time.sleep(3)
    slurm.start_controller()
    before = steps(run)
    until(lambda: steps(run) > before, "the next step")
    assert first.poll() is None, "its launcher goes on too"
    first.kill()
    first.communicate()
    number = job_of(run)
    assert "attached" in enter(desk, "status")
    said = enter(desk, "train")
    assert "is still running from the previous launch" in said and job_of(run) == number
    assert run.read_results()["status"] == "finished" and len(losses(run.folder)) == LONG
    assert not [event for event in run.read_events() if event["event"] == "restarted"]


def test_the_time_limit_comes_and_no_step_is_lost(desk: Path, slurm: Slurm) -> None:
    """Slurm's own signal, before the limit of the shortest job that there can be: one minute."""
    fleet = {"slurm": {"time_limit_minutes": 1, "warn_before_seconds": 20, "partition": "short"}}
    run = write(desk, "limited", fleet=fleet, train={"steps": 100000}, checkpoint={"every": 100000})
    first = begin(desk, "train")
    until(lambda: (run.folder / "handle.json").exists() or first.poll() is not None, "a job")
    assert first.poll() is None, finish(first)
    number = job_of(run)
    hasten(slurm, number)
    before = steps(run)
    assert before, "it had begun when its limit came"
    until(lambda: steps(run) > before, "the next step", 240)
    enter(desk, "stop")
    finish(first, code=130)
    assert job_of(run) == number, "one job, started twice"
    resumed = [event for event in run.read_events() if event["event"] == "resumed"]
    assert [event["step"] for event in resumed] == [before], (
        "it went on from the very step at which it was told to leave"
    )
    lines = [line["step"] for line in run.read_metrics()]
    assert lines == sorted(set(lines)) == list(range(1, lines[-1] + 1))
    assert (
        "engine: the time limit is near" in (run.logs / "slurm.log").read_text()
        or not run.read_results()["restarts"]
    )


def test_a_node_dies_without_any_launcher_and_slurm_goes_on_bit_for_bit(
    desk: Path, nodes: Lab, slurm: Slurm
) -> None:
    run = write(desk, "killed")
    first = begin(desk, "train")
    until(lambda: steps(run) >= 1, "step 1")
    number = job_of(run)
    hosts = slurm.run("squeue", "-h", "-j", number, "-o", "%N").stdout.strip()
    host = slurm.run("scontrol", "show", "hostnames", hosts).stdout.split()[1]
    until(lambda: (run.checkpoints / "step-00000010").exists(), "a checkpoint")
    nodes.destroy(int(host.removeprefix("node")))
    first.kill()
    first.communicate()
    try:
        hasten(slurm, number)
        said = enter(desk, "train")
        assert "is still running from the previous launch" in said, said
    finally:
        nodes.recreate(int(host.removeprefix("node")))
        slurm.start_node(int(host.removeprefix("node")))
    assert run.read_results()["status"] == "finished" and job_of(run) == number
    assert losses(run.folder) == losses(desk / "runs/whole")
    slurm.await_idle()


def test_what_waits_says_why_and_costs_nothing(desk: Path, slurm: Slurm) -> None:
    """First for nodes that others have, then for nodes that are drained."""
    blocker = slurm.run(
        "sbatch", "--parsable", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 300"
    ).stdout.strip()
    own = {
        "warn_before_seconds": 10,
        "options": ["--nice=100", "--mail-type=NONE"],
    }  # as a site may demand
    run = write(
        desk, "waits", fleet={"instance_type": "c7i.8xlarge", "slurm": own}, train={"steps": 5}
    )
    first = begin(desk, "train")
    until(lambda: (run.folder / "handle.json").exists(), "a job")
    until(
        lambda: "queued: (Resources): it is next in the queue" in enter(desk, "status"),
        "the reason",
        60,
    )
    assert "Nice=100" in slurm.run("scontrol", "show", "job", job_of(run)).stdout
    slurm.run("scontrol", "update", "nodename=node[1-3]", "state=drain", "reason=test")
    try:
        slurm.run("scancel", blocker)
        until(
            lambda: "nodes that it needs are down, drained or reserved" in enter(desk, "status"),
            "the other reason",
            60,
        )
        assert "node1 is drained, test" in enter(desk, "status")
        queued = next(event["time"] for event in run.read_events() if event["event"] == "queued")
        until(lambda: time.time() - queued > 3, "three seconds in the queue")
    finally:
        slurm.run("scontrol", "update", "nodename=node[1-3]", "state=resume")
    said = finish(first)
    assert re.search(r"\((Resources|Priority)\): .*; next: ", said), said
    assert not [event for event in run.read_events() if event["event"] in ("verdict", "slow")]
    times = {
        event["event"]: event["time"] for event in run.read_events() if event["event"] != "queued"
    }
    assert times["running"] - queued > 3
    paid = (
        run.read_results()["usd"] * 3600 / (2 * (list_price(load_resolved(run.config)) or 0))
    )  # seconds of both nodes
    assert paid < time.time() - times["running"], "what it waited costs nothing"


def test_what_somebody_else_cancels_is_named_and_not_tried_again(desk: Path, slurm: Slurm) -> None:
    run = write(desk, "cancelled", train={"steps": 100000})
    first = begin(desk, "train")
    until(lambda: steps(run) >= 5, "step 5")
    slurm.run("scancel", job_of(run))
    said = finish(first, code=1)
    assert "failed: the job: the job was cancelled (cancelled)" in said and "CANCELLED" in said, (
        said
    )
    assert not [event for event in run.read_events() if event["event"] == "restarted"]
    waiting = slurm.run(
        "sbatch", "--parsable", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 300"
    ).stdout.strip()
    first = begin(desk, "train")
    until(lambda: "queued" in enter(desk, "status"), "the queue", 60)
    slurm.run("scancel", job_of(run), waiting)
    assert "the job was cancelled (cancelled)" in finish(first, code=1)


def test_the_gate_of_an_allocation_names_a_slow_node_which_is_left_out_from_then_on(
    desk: Path, nodes: Lab, slurm: Slurm
) -> None:
    run = write(
        desk,
        "gated",
        fleet={"nodes": 3, "slurm": {"preflight": True, "warn_before_seconds": 10}},
        train={"steps": 10, "global_batch_size": 12},
    )
    nodes.slow(1, "200mbit")
    try:
        said = enter(desk, "train")
    finally:
        nodes.fast(1)
    verdict = next(event for event in run.read_events() if event["event"] == "verdict")
    assert (verdict["cause"], verdict["host"], verdict["node"]) == ("hardware", "node1", 1), said
    assert (
        "the preflight found a hardware fault: its link reaches 0.0" in said
        and run.read_results()["status"] == "finished"
    ), said
    assert "all-reduce over 3 nodes" in (run.logs / "slurm.log").read_text()
    write(desk, "after")
    enter(desk, "plan", "OUT=excluded")
    assert (
        "#SBATCH --exclude=node1\n"
        in next((desk / "excluded").glob("train-job.sbatch")).read_text()
    )
    assert "released from quarantine: node1" in enter(desk, "doctor", "LIFT=node1")
    enter(desk, "plan", "OUT=included")
    assert "--exclude" not in next((desk / "included").glob("train-job.sbatch")).read_text()


def probe(desk: Path, name: str, program: str) -> tuple[Backend, Request]:
    """A request for two nodes that run this program."""
    write(desk, name)
    settings, _ = load(Settings(desk / "config.yaml"), terms_of)
    (desk / f"{name}.py").write_text(program)
    job = replace(
        tokenize_job(settings), module=name, arguments=("x",), launch="once", name=name, folder=Path("runs/probes"),
        environment={"PYTHONSAFEPATH": ""},  # the program lies where nodes start, where no module of a job is looked for
    )  # fmt: skip
    return Backend(settings), Backend(settings).plan(job, {})


def test_two_who_submit_one_token_at_once_have_one_job(
    desk: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    backend, request = probe(desk, "twice", "print('here')\n")
    threads = [
        threading.Thread(target=lambda: Backend(backend.config).submit(request)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle = backend.submit(request)
    until(lambda: backend.status(handle).ended, "its end")
    until(
        lambda: not slurm.run("squeue", "-h", "--me", "-t", "R,PD,CG").stdout.strip(),
        "the end of all",
    )
    said = (
        Path("runs/probes/logs/node-0.log").read_text()
        + Path("runs/probes/logs/node-1.log").read_text()
    )
    assert said.count("here") == 2, said


def test_a_job_that_is_to_follow_another_waits_for_it_and_ends_where_that_fails(
    desk: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    (desk / "after.py").write_text("print('here')\n")
    for name, end, code in (("leads", "", 0), ("fails", "raise SystemExit(3)", 137)):
        backend, first = probe(desk, name, f"import time\ntime.sleep(4)\n{end}\n")
        second = backend.plan(
            replace(first.job, module="after", after=backend.submit(first).id), {}
        )
        handle = backend.submit(second)
        assert backend.submit(second) == handle, "submitting twice is submitting once"
        assert backend.status(handle).reason.startswith(
            "(Dependency): it waits for the job that it depends on"
        )
        until(lambda: backend.status(handle).ended, "its end")  # noqa: B023
        status = backend.status(handle)
        assert dict(status.exits) == {0: code, 1: code}, status
    verdict = judge(
        second, AttemptOutcome(status, None), Run(Path("runs/probes")), start_now(second)
    )
    assert (verdict.cause, verdict.then) == ("dependency", Then.STOP), verdict


def test_a_node_that_fails_before_its_ranks_begin_is_named_and_not_those_that_srun_ends_for_it(
    desk: Path, slurm: Slurm
) -> None:
    """The others are starting, with no handler of SIGTERM yet, and none of them leaves an exit code."""
    python = desk / "early"
    fails = 'case "$*" in *entrypoint*) [ "$SLURM_NODEID" = 0 ] && sleep 60; exit 9;; esac'
    python.write_text(f'#!/bin/sh\n{fails}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    run = write(desk, "early", fleet={"python": str(python)}, train={"steps": 4})
    said = enter(desk, "train", code=1)
    verdict = next(event for event in run.read_events() if event["event"] == "verdict")
    assert verdict["node"] == 1 and "ended with exit code 9" in verdict["words"], (
        f"{said}\n{(run.logs / 'slurm.log').read_text()}"
    )
    write(desk, "early", fleet={"python": "/nowhere/python"}, train={"steps": 4})
    said = enter(desk, "train", code=1)
    assert (
        "(environment)" in said and "ended with exit code 127: a command was not found" in said
    ), said
    assert re.search("/nowhere/python: (not found|No such file)", said), (
        said
    )  # a shell's words, or Slurm's of the step behind it
    assert "next: less runs/early/logs/slurm.log" in said, said


# The nodes' Python: it finds what stands in for AWS's closed compiler (tests/neuron_tools), and compiles while no `hold` is there.
# It lists the folder, as its client of the file server may remember a name for seconds.
PYTHON = """#!/bin/sh
there() {{ ls {desk} | grep -qx "$1"; }}
case "$*" in *--ahead*) while there hold; do sleep 0.2; done; ! there breaks || exit 3;; esac
export PATH={tools}:$PATH PYTHONPATH={tools}:$PYTHONPATH TOLD={desk}/told
exec {python} "$@"
"""


def names(slurm: Slurm) -> dict[str, str]:
    """The jobs that are in the queue: name → state."""
    return dict(
        line.split("|")
        for line in slurm.run(
            "squeue", "-h", "--me", "-o", "%j|%T", "-t", "R,PD"
        ).stdout.splitlines()
    )


def test_training_is_queued_with_what_compiles_and_begins_when_that_has_ended_well(
    desk: Path, slurm: Slurm
) -> None:
    python, hold = desk / "python", desk / "hold"
    python.write_text(
        PYTHON.format(desk=desk, tools=ROOT / "tests/neuron_tools", python=sys.executable)
    )
    python.chmod(0o755)
    fleet = {
        "platform": "neuron-xla",
        "instance_type": "trn1.32xlarge",
        "ranks_per_node": 1,
        "python": str(python),
    }
    train = {
        "steps": 6,
        "compile": False,
        "activation_checkpointing": "none",
        "spike_sigmas": 0,
        "sequence_length": 128,
    }
    run = write(desk, "behind", fleet=fleet, train=train)
    hold.touch()
    first = begin(desk, "train")
    until(lambda: names(slurm).get("behind") == "PENDING", "both jobs")
    (compiles,) = set(names(slurm)) - {"behind"}
    assert compiles.startswith("compile-")
    until(
        lambda: (
            "job that it depends on; next: wait; run squeue to see that job; job"
            in enter(desk, "status")
        ),
        "the reason",
    )
    number = job_of(run)
    until(lambda: names(slurm).get(compiles) == "RUNNING", "what compiles")
    said = enter(desk, "stop")
    assert (
        "stopped; no process is running" in said and "killing" not in said and not names(slurm)
    ), said
    assert "stopping" in finish(first, code=130)

    first = begin(desk, "train")
    until(
        lambda: job_of(run) != number and names(slurm).get("behind") == "PENDING",
        "both jobs once more",
    )
    number = job_of(run)
    first.kill()
    first.communicate()
    second = begin(desk, "train")
    until(
        lambda: read_holder(run.folder).pid == second.pid,
        "the launcher that follows the job in the queue",
    )  # type: ignore[union-attr]
    (desk / "breaks").touch()
    hold.unlink()
    said = finish(second, code=1)
    assert "behind was queued behind the compile job" in said and job_of(run) == number, said
    assert "failed: the job: a job that this job depends on failed (dependency)" in said, said
    assert f"({compiles}) is FAILED: run make logs RUN={compiles}" in said and not names(slurm), (
        said
    )
    (desk / "breaks").unlink()

    said = enter(desk, "train")
    assert (
        said.index("compiling ahead")
        < said.index("behind is queued behind the compile job")
        < said.index("compiled 2 programs")
    ), said
    assert said.index("compiled 2 programs") < said.index(
        "behind was queued behind the compile job"
    ), said
    assert run.read_results()["status"] == "finished" and len(losses(run.folder)) == 6
    assert run.read_results()["restarts"] == 0, said
    asked = slurm.run("scontrol", "show", "job", job_of(run)).stdout
    assert "JobState=COMPLETED" in asked
    kept = json.loads((run.folder / "request.json").read_text())
    assert (
        kept["job"]["after"]
        == json.loads((desk / "runs" / compiles / "handle.json").read_text())["id"]
    )


def test_bad_inputs_are_named_with_the_next_command(desk: Path, slurm: Slurm) -> None:
    for fleet, expected in (
        (
            {"slurm": {"partition": "gpu"}},
            "fleet.slurm.partition: partition gpu does not exist; the cluster has main, short, shut",
        ),
        (
            {"slurm": {"partition": "shut"}},
            "partition shut does not accept jobs now; partitions that do: main, short",
        ),
        (
            {"slurm": {"partition": "short", "time_limit_minutes": 60, "warn_before_seconds": 60}},
            "60 min exceeds the limit of partition short, 10 min",
        ),
        ({"slurm": {"gres": "license:8"}}, "fleet.slurm.gres: no node has such resources"),
        ({"slurm": {"constraint": "h100"}}, "fleet.slurm.constraint: no node has such a feature"),
        (
            {"slurm": {"reservation": "ours"}},
            "fleet.slurm.reservation: the reservation does not exist",
        ),
        ({"nodes": 8}, "the job needs 8 nodes, but only 4 of 4 hosts can take a job"),
        (
            {"slurm": {"time_limit_minutes": 1, "warn_before_seconds": 60}},
            "fleet.slurm.warn_before_seconds: 60 s: fleet.slurm.time_limit_minutes is only 1 min",
        ),
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
