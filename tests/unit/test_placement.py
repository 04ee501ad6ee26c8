"""Placements from what each engine tells a node, as its documentation has it, and torchrun's line from a placement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainfleet.node import placement
from trainfleet.node.placement import Placement, expand_hosts, torchrun
from trainfleet.node.placements import read_batch, read_fleet, read_sagemaker, read_slurm
from trainfleet.trust.errors import BackendError

# srun of 4 nodes, one task each (slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES)
SLURM = {
    "SLURM_JOB_ID": "65541",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "trn[1-3,07]",
    "SLURM_STEP_NODELIST": "trn[1-3,07]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NODEID": "3",
    "SLURM_PROCID": "3",
    "SLURMD_NODENAME": "trn07",
}
# docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html: the address is there on child nodes only
BATCH = {
    "AWS_BATCH_JOB_ID": "876da822-4198-45f2-a252-6cea32512ea8#2",
    "AWS_BATCH_JOB_ATTEMPT": "2",
    "AWS_BATCH_JOB_NODE_INDEX": "2",
    "AWS_BATCH_JOB_NUM_NODES": "4",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.3.17",
}
# docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
SAGEMAKER = {
    "current_host": "algo-2",
    "current_instance_type": "ml.trn1.32xlarge",
    "current_group_name": "homogeneousCluster",
    "hosts": ["algo-1", "algo-2", "algo-3"],
    "network_interface_name": "eth0",
}


def resources(tmp_path: Path, **changes: object) -> Path:
    file = tmp_path / "resourceconfig.json"
    file.write_text(json.dumps(SAGEMAKER | changes))
    return file


def test_a_placement_of_our_own_comes_back_whole() -> None:
    given = Placement(1, 4, "10.0.0.1", 29401, address="10.0.0.2")
    assert read_fleet(given.environment()) == given
    assert read_fleet(given.environment() | {"TRAINFLEET_ATTEMPT": "3"}).attempt == 3


def test_slurm() -> None:
    assert read_slurm(SLURM) == Placement(3, 4, "trn1", 25541, 1, "trn07")
    again = read_slurm(SLURM | {"SLURM_RESTART_COUNT": "2"})
    assert (again.attempt, again.port) == (3, 25543)
    outside_a_step = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert read_slurm(outside_a_step) == read_slurm(SLURM)


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        ("a1", ["a1"]),
        ("a[1-3]", ["a1", "a2", "a3"]),
        ("a[08-10],login", ["a08", "a09", "a10", "login"]),
        ("ip-10-0-0-[4,17-18]", ["ip-10-0-0-4", "ip-10-0-0-17", "ip-10-0-0-18"]),
        (
            "queue1-st-trn-[1-2],queue1-dy-trn-5",
            ["queue1-st-trn-1", "queue1-st-trn-2", "queue1-dy-trn-5"],
        ),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_a_node_list_of_slurm_is_its_hosts_in_order(words: str, hosts: list[str]) -> None:
    assert list(expand_hosts(words)) == hosts


def test_batch() -> None:
    assert read_batch(BATCH) == Placement(2, 4, "10.0.3.17", 29400, 2)


def test_the_main_node_of_batch_is_node_0_whatever_its_index() -> None:
    moved = BATCH | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "2"}
    placements = {
        index: read_batch(moved | {"AWS_BATCH_JOB_NODE_INDEX": str(index)}).node
        for index in range(4)
    }
    assert placements == {2: 0, 0: 1, 1: 2, 3: 3}


def test_the_main_node_of_batch_is_not_told_its_own_address() -> None:
    alone = {name: value for name, value in BATCH.items() if "ADDRESS" not in name} | {
        "AWS_BATCH_JOB_NODE_INDEX": "0"
    }
    assert read_batch(alone).meet == placement.own_address()
    with pytest.raises(BackendError, match="has no rendezvous address"):
        read_batch(alone | {"AWS_BATCH_JOB_NODE_INDEX": "1"})


def test_a_batch_job_of_one_node_has_no_such_variables() -> None:
    assert read_batch({"AWS_BATCH_JOB_ID": "876da822", "AWS_BATCH_JOB_ATTEMPT": "1"}) == Placement(
        0, 1, "127.0.0.1"
    )


def test_sagemaker(tmp_path: Path) -> None:
    assert read_sagemaker(resources(tmp_path)) == Placement(1, 3, "algo-1", 29400, 1, "algo-2")
    many = [f"algo-{number}" for number in range(1, 13)]
    assert read_sagemaker(resources(tmp_path, hosts=many)) == Placement(
        1, 12, "algo-1", 29400, 1, "algo-2"
    ), "as consoles count"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"hosts": [], "current_host": "algo-1"}',
        '{"hosts": 3, "current_host": 1}',
    ],
)
def test_a_broken_resource_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "resourceconfig.json"
    file.write_text(text)
    with pytest.raises(BackendError, match="this host in the job") as caught:
        read_sagemaker(file)
    assert caught.value.where == str(file) and caught.value.why


@pytest.mark.parametrize("reader", [read_fleet, read_slurm])
def test_what_no_engine_started_has_no_placement(reader: object) -> None:
    with pytest.raises(BackendError, match="is not set"):
        reader({})  # type: ignore[operator]


def test_what_is_no_number_or_out_of_range_is_refused() -> None:
    for changed, told in (
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID is 'x'"),
        ({"SLURM_NODEID": "4"}, "node 4 of 4"),
    ):
        with pytest.raises(BackendError, match=told):
            read_slurm(SLURM | changed)


def test_torchruns_line_follows_from_the_placement_alone() -> None:
    words = torchrun(
        Placement(1, 2, "10.0.0.1", 29401, address="10.0.0.2"),
        8,
        "trainfleet.engine",
        "python3",
        Path("logs/node-1.parts"),
    )
    assert " ".join(words) == (
        "python3 -m trainfleet.devices.meeting torch.distributed.run --nnodes=2 --nproc-per-node=8 --node-rank=1 --master-addr=10.0.0.1 --master-port=29401 "
        "--local-addr=10.0.0.2 --max-restarts=0 --monitor-interval=0.5 --tee=3 --log-dir=logs/node-1.parts -m trainfleet.engine"
    )
    bare = torchrun(Placement(0, 1, "127.0.0.1"), 1, "m", "python3")
    assert not any(word.startswith(("--tee", "--log-dir", "--local-addr")) for word in bare)


def test_there_is_one_builder_of_torchruns_line() -> None:
    package = Path(placement.__file__).parents[1]
    naming = [path.name for path in package.rglob("*.py") if "--nproc-per-node" in path.read_text()]
    assert naming == ["placement.py"]


def test_the_card_is_that_of_the_default_route_with_the_lowest_metric(tmp_path: Path) -> None:
    rows = ["Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT",
            "docker0 000011AC 00000000 0001 0 0 0 0000FFFF 0 0 0",
            "ens33 00000000 0100000A 0003 0 0 200 00000000 0 0 0",
            "ens32 00000000 0100000A 0003 0 0 100 00000000 0 0 0"]  # fmt: skip
    (tmp_path / "route").write_text("\n".join(rows) + "\n")
    assert placement.card(tmp_path / "route") == "ens32"
    assert placement.card(tmp_path / "none") == ""
