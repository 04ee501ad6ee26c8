"""The local backend's plan, and what it refuses."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from trainfleet.backends import BACKENDS
from trainfleet.backends.local import Local
from trainfleet.config.rules import BUILT
from trainfleet.errors import BackendError
from trainfleet.plan.job import Job


def job(**changes: object) -> Job:
    fields = {"kind": "train", "name": "x", "folder": Path("runs/x"), "nodes": 2, "ranks_per_node": 1, "module": "trainfleet.engine",
              "arguments": ("runs/x",), "torchrun": True}  # fmt: skip
    return Job(**(fields | changes))  # type: ignore[arg-type]


def test_every_node_is_a_torchrun_that_meets_on_loopback() -> None:
    commands = Local().plan(job()).commands
    assert [command.node for command in commands] == [0, 1]
    for node, command in enumerate(commands):
        assert "torch.distributed.run" in command.argv and f"--node-rank={node}" in command.argv and "--nnodes=2" in command.argv
        assert "--master-addr=127.0.0.1" in command.argv and "--local-addr=127.0.0.1" in command.argv
        assert command.environment["OMP_NUM_THREADS"] and command.environment["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert len({word for command in commands for word in command.argv if word.startswith("--master-port")}) == 1


def test_a_tokenize_job_runs_without_torchrun_and_knows_its_place() -> None:
    commands = Local().plan(job(torchrun=False)).commands
    assert [(command.environment["NODE_RANK"], command.environment["NODES"]) for command in commands] == [("0", "2"), ("1", "2")]
    assert not any("torch" in word for command in commands for word in command.argv)


def test_a_port_in_use_is_refused_with_what_to_type() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BackendError, match=f"port {port} is in use") as caught:
            Local().plan(job(port=port))
    assert "ss -ltnp" in str(caught.value)


def test_more_ranks_than_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    shares = [command.environment["CUDA_VISIBLE_DEVICES"] for command in Local().plan(job()).commands]
    assert shares == ["0", "1"]
    with pytest.raises(BackendError, match="on 2 accelerators"):
        Local().plan(job(nodes=4))


def test_the_backends_that_a_config_may_name_are_those_that_are_built() -> None:
    assert tuple(BACKENDS) == BUILT
