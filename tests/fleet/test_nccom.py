"""nccom-test as make doctor has it run, on real nodes over SSH; the tool is AWS's and closed, so a stand-in answers in its place.

tests/neuron_tools/nccom-test takes what the tool's page documents and nothing else, and logs in on the other nodes as MPI does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fleet.lab import Lab, address_of
from fleet.test_transport import transport
from trainfleet.config import Config, Settings, load
from trainfleet.hosts import facts
from trainfleet.hosts.collectives import TOOL
from trainfleet.hosts.facts import Facts
from trainfleet.hosts.preflight import PreflightReport
from trainfleet.launch.provisioning import collectives
from trainium import CONFIG

STANDIN = Path(__file__).parents[1] / "neuron_tools" / "nccom-test"


@pytest.fixture
def config(pair: Lab, tmp_path: Path) -> Config:
    """Two trn1.32xlarge nodes, which are the lab's."""
    (tmp_path / "config.yaml").write_text(CONFIG.replace("TYPE", "trn1.32xlarge"))
    found, _ = load(Settings(tmp_path / "config.yaml", "fleet.nodes=2"))
    (pair.shared / "nccom-test").write_bytes(STANDIN.read_bytes())
    for node in (0, 1):
        pair.run(node, "install", "-D", "/fsx/nccom-test", TOOL)
    return replace(found, fleet=replace(found.fleet, hosts=tuple(pair.hosts())))


def tried(pair: Lab, config: Config) -> tuple[list[str], list[str]]:
    """What make doctor says of the trials, and what is wrong."""
    with transport(pair) as fleet:
        known = {
            host: found
            for host, found in facts.read(fleet, config).items()
            if isinstance(found, Facts)
        }
        assert len(known) == 2
        report = PreflightReport(known, (), None, 0.0)
        said, wrong = collectives(fleet, config, report)
    return said, [str(finding) for finding in wrong]


def told(pair: Lab, node: int) -> list[str]:
    """What the tool was called with on a node."""
    return pair.run(node, "cat", "/run/nccom-told").stdout.splitlines()


def let_in(pair: Lab) -> None:
    """The first node may log in on both, as MPI needs."""
    key = "/root/.ssh/id_ed25519"
    pair.run(
        0,
        "sh",
        "-c",
        f"mkdir -p /root/.ssh && ssh-keygen -q -t ed25519 -N '' -f {key} && cp {key}.pub /fsx/key.pub",
    )
    for node in (0, 1):
        pair.run(
            node,
            "sh",
            "-c",
            "mkdir -p /root/.ssh && cat /fsx/key.pub >> /root/.ssh/authorized_keys",
        )


def test_each_node_is_tried_and_then_all_of_them_over_efa(pair: Lab, config: Config) -> None:
    let_in(pair)
    said, wrong = tried(pair, config)
    size = "--minbytes 256MB --maxbytes 256MB --datatype fp32 --check --non-interactive"
    assert told(pair, 1) == [f" allr --nworkers 32 {size}"]
    addresses = f"{address_of(0)} {address_of(1)}"
    assert (
        told(pair, 0)[1]
        == f"{address_of(0)}:29400 allr --nworkers 64 {size} --nnodes 2 --hosts {addresses}"
    )
    assert (
        said[0]
        == "node0: an all-reduce of 256 MiB over 32 cores takes 6,144 us, 43.7 GB/s bus bandwidth"
    )
    assert said[2].startswith(
        "all 2 nodes: an all-reduce of 256 MiB over 64 cores takes 6,144 us, 4.5 GB/s"
    )
    assert (
        len(wrong) == 1
        and "reaches 4.5 GB/s; expected 60.0" in wrong[0]
        and said[3].startswith("fleet: ")
    )


def test_without_a_login_between_the_nodes_that_is_said_and_nobody_is_blamed(
    pair: Lab, config: Config
) -> None:
    said, wrong = tried(pair, config)
    assert (
        not wrong
        and "check that node0 can log in to the other nodes" in said[2]
        and "mpirun: unable to reach" in said[2]
    )


def test_a_node_whose_cores_do_not_answer_is_named(pair: Lab, config: Config) -> None:
    pair.run(1, "touch", "/run/nccom-broken")
    said, wrong = tried(pair, config)
    assert (
        len(wrong) == 1
        and "NRT_EXEC_HW_ERR_COLLECTIVES" in wrong[0]
        and any(line.startswith("node1: ") for line in said)
    )
    assert len(told(pair, 0)) == 1  # all together are not tried then


def test_a_node_without_the_tool_is_named(pair: Lab, config: Config) -> None:
    pair.run(1, "rm", TOOL)
    _, wrong = tried(pair, config)
    assert len(wrong) == 1 and ("No such file" in wrong[0] or "not found" in wrong[0])
