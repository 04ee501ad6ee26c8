"""The entrypoint as AWS Batch and SageMaker start it: four nodes, each in a network namespace of its own, on a folder that all see."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Bench, environment, metrics

from aws.containers import ML, Container, Containers
from conformance.cluster import Cluster
from trainfleet.run.run_folder import Run, node_log
from trainfleet.watch.lines import parse

pytestmark = pytest.mark.timeout(600)
NODES = 4
# As the ranks of a bench compute: the same numbers, whatever shares the machine.
ARITHMETIC = {name: environment()[name] for name in ("OMP_NUM_THREADS", "TRAINFLEET_TRIAL")}
LATE = 20.0  # seconds
LIMIT = 25.0
HOSTS = [f"algo-{number}" for number in range(1, NODES + 1)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Containers]:
    with Cluster(tmp_path / "engine", NODES) as cluster:
        if not cluster.isolated:
            pytest.skip("network namespaces need root")
        containers = Containers(cluster)
        yield containers
        for container in containers.all.values():
            containers.kill(container)


def words(bench: Bench, run: Path, engine: str, wait: float = 300) -> list[str]:
    """The arguments that the image gets."""
    own = [
        "--in",
        str(bench.folder),
        "--folder",
        f"runs/{run.name}",
        "--ranks",
        "1",
        "--wait",
        str(wait),
    ]
    return [
        "trainfleet.node.entrypoint",
        "--on",
        engine,
        *own,
        "--",
        "trainfleet.engine",
        f"runs/{run.name}",
    ]


def start_batch(
    nodes: Containers, bench: Bench, run: Path, node: int, wait: float = 300
) -> Container:
    told = (
        nodes.cluster.as_batch(NODES, str(node), "1")
        | {"AWS_BATCH_JOB_ID": "876da822"}
        | ARITHMETIC
    )
    return nodes.start(run.name, 1, node, NODES, words(bench, run, "batch", wait), told)


def codes(containers: list[Container], seconds: float) -> list[int | None]:
    deadline = time.monotonic() + seconds
    while any(container.code is None for container in containers) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [container.code for container in containers]


def told(run: Path, node: int) -> str:
    log = node_log(run, node)
    return log.read_text() if log.exists() else ""


def test_on_batch_a_main_node_that_is_late_is_waited_for(nodes: Containers, bench: Bench) -> None:
    alone = bench.train("alone", 4)
    run = bench.prepare("late", NODES)
    early = [start_batch(nodes, bench, run, node) for node in (1, 2, 3)]
    time.sleep(LATE)
    assert (
        codes(early, 0) == [None] * 3
        and "waiting for node 0" in told(run, 1)
        and not (run / "metrics.jsonl").exists()
    )
    assert codes([start_batch(nodes, bench, run, 0), *early], 300) == [0] * NODES, told(run, 0)
    assert "all 4 nodes have arrived" in told(run, 0) and metrics(run) == metrics(alone)
    assert early[0].lines() == told(run, 1).splitlines(), "CloudWatch has the node's log"


def test_on_batch_one_that_never_comes_is_named_by_all_within_the_limit(
    nodes: Containers, bench: Bench
) -> None:
    run, began = bench.prepare("never", NODES), time.monotonic()
    came = [start_batch(nodes, bench, run, node, LIMIT) for node in (0, 1, 3)]
    assert codes(came, 3 * LIMIT) == [69] * 3 and LIMIT < time.monotonic() - began < 2 * LIMIT + 10
    for node in (0, 1, 3):
        assert "node 2 of 4 did not arrive" in told(run, node) and "next: " in told(run, node)
        assert any(
            "did not arrive" in line.text for line in parse(told(run, node).splitlines(), node)
        )
    faults = [event for event in Run(run).read_events() if event["event"] == "fault"]
    assert {fault["node"] for fault in faults} == {0, 1, 3} and all(
        "make train" in fault["next"] for fault in faults
    )


def start_host(
    nodes: Containers, bench: Bench, run: Path, host: int, wait: float = 300
) -> Container:
    folder = nodes.cluster.folder / HOSTS[host]
    (folder / "input/config").mkdir(parents=True)
    (folder / "output").mkdir()
    resources = {"current_host": HOSTS[host], "hosts": HOSTS, "network_interface_name": "eth0"}
    (folder / "input/config/resourceconfig.json").write_text(json.dumps(resources))
    addresses = "".join(
        f"{nodes.cluster.address(number)} {name}\n" for number, name in enumerate(HOSTS)
    )
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
    return nodes.start(
        run.name, 1, host, NODES, words(bench, run, "sagemaker", wait), ARITHMETIC, folder
    )


def await_step_two(run: Path, host: Container) -> None:
    deadline = time.monotonic() + 240  # four nodes load torch at once
    while not (
        (run / "metrics.jsonl").exists() and any(line["step"] >= 2 for line in metrics(run))
    ):
        assert host.code is None and time.monotonic() < deadline, told(run, 0)
        time.sleep(0.1)


def test_on_sagemaker_sigterm_leads_to_a_checkpoint_within_its_two_minutes(
    nodes: Containers, bench: Bench
) -> None:
    if not ML.is_dir():
        ML.mkdir(parents=True)  # where each host's own is mounted, in its own namespace
    run = bench.prepare("stopped", NODES, **{"train.steps": 100000, "checkpoint.every": 100000})
    hosts = [start_host(nodes, bench, run, host) for host in range(NODES)]
    await_step_two(run, hosts[0])
    asked = time.monotonic()
    for host in hosts:
        host.process.terminate()
    assert codes(hosts, 120) == [0] * NODES and time.monotonic() - asked < 120, told(run, 0)
    saved, results = sorted((run / "checkpoints").glob("step-*")), Run(run).read_results()
    assert saved and saved[-1].name in results["last_checkpoint"] and results["status"] == "stopped"
    assert not list(nodes.cluster.folder.glob("algo-*/output/failure")), "a stop is no failure"


def test_on_sagemaker_a_failure_leaves_its_reason(nodes: Containers, bench: Bench) -> None:
    if not ML.is_dir():
        ML.mkdir(parents=True)
    run = bench.prepare("fails", NODES)
    began = time.monotonic()
    came = [start_host(nodes, bench, run, host, LIMIT) for host in (0, 1, 2)]
    assert codes(came, 3 * LIMIT) == [69] * 3 and time.monotonic() - began < 3 * LIMIT
    for host in (0, 1, 2):
        reason = (nodes.cluster.folder / HOSTS[host] / "output" / "failure").read_text()
        assert "node 3 of 4 did not arrive" in reason and "next: " in reason and len(reason) <= 1024
