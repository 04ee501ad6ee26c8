"""The local backend's plan, and what it refuses."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest

import verbs
from trainfleet.backends import terms_of
from trainfleet.backends.local import Local
from trainfleet.config import Settings, load
from trainfleet.node import entrypoint
from trainfleet.plan.job import Job
from trainfleet.trust.errors import BackendError, ConfigError


def job(**changes: object) -> Job:
    fields = {"kind": "train", "name": "x", "folder": Path("runs/x"), "nodes": 2, "ranks_per_node": 1, "module": "trainfleet.engine",
              "arguments": ("runs/x",), "torchrun": True}  # fmt: skip
    return Job(**(fields | changes))  # type: ignore[arg-type]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scripts(**changes: object) -> list[str]:
    return [artifact.text for artifact in Local().plan(job(**changes), {}).artifacts]


def test_every_node_is_a_torchrun_that_meets_on_loopback() -> None:
    planned = Local().plan(job(), {})
    assert [artifact.name for artifact in planned.artifacts] == ["node-0.sh", "node-1.sh"]
    for node, text in enumerate(scripts(port=free_port())):
        assert (
            "-m trainfleet.devices.meeting torch.distributed.run" in text
            and f"--node-rank={node}" in text
            and "--nnodes=2" in text
        )
        assert "--master-addr=127.0.0.1" in text and "--local-addr=127.0.0.1" in text
        assert "export OMP_NUM_THREADS=" in text and "export GLOO_SOCKET_IFNAME=lo" in text
        assert (
            f"export TRAINFLEET_NODE={node}\n" in text
            and "--on fleet --folder runs/x --ranks 1 -- trainfleet.engine runs/x"
            in text.replace(" \\\n  ", " ")
        )
    assert (
        len(
            {
                line
                for artifact in planned.artifacts
                for line in artifact.text.split()
                if line.startswith("--master-port")
            }
        )
        == 1
    )


def test_the_line_that_a_script_shows_is_the_line_that_its_node_builds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One pure function makes both, from the same placement."""
    for text in scripts():
        shown = next(line for line in text.splitlines() if line.startswith("# runs ")).removeprefix(
            "# runs "
        )
        for line in text.splitlines():
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").partition("=")
                monkeypatch.setenv(name, shlex.split(value)[0] if value else "")
        command = text.replace("\\\n", " ").splitlines()[-1]
        words = shlex.split(command)
        order = entrypoint.parse(words[words.index("trainfleet.node.entrypoint") + 1 :])
        assert " ".join(entrypoint.command_of(order, order.engine.read())) == shown


def test_a_tokenize_job_runs_without_torchrun_and_knows_its_place() -> None:
    for node, text in enumerate(scripts(torchrun=False)):
        assert (
            f"export TRAINFLEET_NODE={node}\n" in text
            and "export TRAINFLEET_NODES=2\n" in text
            and "export WORKERS=" in text
        )
        assert (
            "torch" not in text
            and "--on fleet --folder runs/x -- trainfleet.engine" in text.replace(" \\\n  ", " ")
        )


def test_a_port_in_use_is_refused_with_what_to_type() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BackendError, match=f"port {port} is in use") as caught:
            Local().plan(job(port=port), {})
    assert "ss -ltnp" in str(caught.value)


def test_more_ranks_than_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for node, text in enumerate(scripts()):
        assert f"export CUDA_VISIBLE_DEVICES={node}\n" in text
    with pytest.raises(BackendError, match="than the 2 accelerators"):
        Local().plan(job(nodes=4), {})


def test_more_nodes_than_one_machine_plays_are_refused_in_the_one_list_of_errors(
    tmp_path: Path,
) -> None:
    settings = Settings(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text(
        "name: x\nfleet:\n  nodes: 65\ntrain: {warmup_steps: 900, steps: 3}\n"
    )
    with pytest.raises(
        ConfigError, match=r"config.yaml:3: fleet.nodes: 65: the local backend simulates at most 64"
    ) as caught:
        load(settings, terms_of)
    assert "train.warmup_steps" in str(caught.value)


def test_a_node_that_refuses_before_it_has_a_log_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "name: base\ndata: {name: d, sources: [text], vocab_size: 300}\n"
    )
    verbs.write_text(tmp_path / "text")
    said = verbs.enter(
        tmp_path, "tokenize", code=1, timeout=60, variables={"TRAINFLEET_GRACE": "x"}
    )
    assert (
        "why: TRAINFLEET_GRACE is 'x', not a number\n" in said
        and "without an error message" not in said
    )
