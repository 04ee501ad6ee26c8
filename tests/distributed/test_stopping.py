"""A run that is asked to leave, in every way in which a cluster asks: it saves one step, leaves, and goes on bit for bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from ranks import Bench

from metadata import Service
from trainfleet.node.placement import LOOPBACK, Placement, torchrun
from trainfleet.run.run_folder import node_log, scratch


@pytest.fixture(scope="module")
def unbroken(bench: Bench) -> Path:
    return bench.train("unbroken", 2)


def assert_goes_on(bench: Bench, run: Path, unbroken: Path) -> None:
    """It stopped at a step that it saved, and from there on is the unbroken run."""
    told = ranks.results(run)
    assert (
        told["status"] == "stopped"
        and 1 <= told["steps"] < 20
        and (run / "checkpoints" / f"step-{told['steps']:08d}").is_dir()
    )
    bench.train(run.name, 2)
    assert [event["step"] for event in ranks.events(run, "resumed")] == [told["steps"]]
    assert ranks.metrics(run) == ranks.metrics(unbroken)


def test_a_spot_notice_stops_all(
    bench: Bench, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    monkeypatch.setenv(
        "AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{service.server_port}"
    )
    service.notice = '{"action": "terminate", "time": "2026-11-20T08:22:00Z"}'
    run = bench.train("spot", 2, **{"fleet.spot": "true", "checkpoint.every": 1000})
    assert ranks.events(run, "notice")[0]["notice"] == "terminate at 2026-11-20T08:22:00Z"
    assert "spot/instance-action: terminate" in bench.output
    service.notice = ""
    assert_goes_on(bench, run, unbroken)
    service.shutdown()
    service.server_close()


def test_nobody_looks_for_a_notice_where_there_is_none_to_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    monkeypatch.setenv(
        "AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{service.server_port}"
    )
    bench.train("elsewhere", 1, **{"train.steps": 2})
    assert service.tokens == []
    service.shutdown()
    service.server_close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_scheduler_signals_the_process_of_one_node(
    bench: Bench, unbroken: Path, number: signal.Signals
) -> None:
    """As Slurm (--signal=USR1@90, or SIGTERM), Batch and SageMaker do: not a rank hears of it, but what runs torchrun there."""
    run, port = bench.prepare(f"node-{number}", 2, **{"checkpoint.every": 1000}), ranks.free_port()
    environment = ranks.environment() | {"GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "trainfleet.node.supervisor", str(log := node_log(run, node)), "--",
             *torchrun(Placement(node, 2, LOOPBACK, port, address=LOOPBACK), 1, "trainfleet.engine", sys.executable, scratch(log)),
             str(run)],
            cwd=bench.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for node in range(2)
    ]  # fmt: skip
    ranks.await_step(run, 2, nodes[1])
    nodes[1].send_signal(number)
    outputs = [node.communicate(timeout=60)[0] for node in nodes]
    assert nodes[0].returncode == 0, (
        outputs,
        (run / "logs" / "node-0.log").read_text(),
        (run / "logs" / "node-1.log").read_text(),
    )
    assert_goes_on(bench, run, unbroken)
