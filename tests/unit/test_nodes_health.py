"""What the preflight says of a fleet, from facts alone; the fabric's environment; NCCL's own words; the slow node among pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainfleet.config.host_list import Host
from trainfleet.devices.bandwidth import tournament
from trainfleet.hardware.node_types import instance
from trainfleet.hosts.facts import Facts, Space
from trainfleet.hosts.fleet import Quarantine
from trainfleet.hosts.host_results import ALLOCATED, CHECKS, LAUNCH, SETUP, Finding, each_host
from trainfleet.hosts.install_steps import Wanted
from trainfleet.hosts.node_checks import clock, exposed, judge
from trainfleet.hosts.preflight import Bandwidth, judge_bandwidth, slow_nodes
from trainfleet.plan.fabric_environment import (
    fabric_environment,
    fabric_settings,
    judge_nccl,
    least_bandwidth,
)
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import BackendError
from trainfleet.watch.monitor import FabricLog
from unit.test_nodes_operations import P3DN_READY, PLAIN, READY, wanted


def fleet(count: int, base: Facts, odd: dict[str, Any] | None = None) -> dict[Host, Facts]:
    """`count` nodes like `base`, each with a name of its own; the last one is odd."""
    nodes = {}
    for number in range(count):
        name, address = f"n{number}", f"10.0.0.{number + 1}"
        facts = replace(base, hostname=name, boot_id=name, seconds=0.2, mtu={"ens5": 9001}, addresses={address: "ens5"},
                        resolves={name: address}, kernel="6.8")  # fmt: skip
        nodes[Host(name, address)] = replace(facts, **(odd or {})) if number == count - 1 else facts
    return nodes


def said(odd: dict[str, Any], goal: Wanted | None = None, base: Facts = READY) -> list[str]:
    return [
        f"{finding.host}: {finding.check}: {finding.message}"
        for finding in judge(LAUNCH, fleet(3, base, odd), goal or wanted())
    ]


P3DN = replace(
    P3DN_READY, bus=("nvidia",) * 8 + ("efa",), infiniband=("efa_0",), memory_kib=790_000_000
)


def test_a_sound_fleet_passes() -> None:
    assert said({}) == []
    assert said({}, wanted("p3dn.24xlarge"), P3DN) == []


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"hostname": "n0"}, "name: its host name n0 is also that of n0"),
        ({"hostname": "n0", "boot_id": "n0"}, "name: is the same machine as n0"),
        (
            {"addresses": {"10.0.0.1": "ens5"}},
            "address: its address 10.0.0.1 is also that of n0",
        ),
        (
            {"disk": Space(1_000_000, "ext4", "/dev/root")},
            "disk: its root disk has 1.0 GB free; 5 GB required",
        ),
        ({"seconds": 6.0}, "slow: takes 6.0 s to respond; the other nodes take 0.2 s"),
        ({"kernel": "6.5", "has": (*READY.has,)}, "version: kernel 6.5; 2 of 3 nodes have 6.8"),
        ({"torch": "2.9.1"}, "version: torch 2.9.1; 2 of 3 nodes have none"),
        ({"efa": "1.30.0"}, "version: EFA installer 1.30.0; 2 of 3 nodes have none"),
        (
            {"mtu": {"ens5": 1500}},
            "mtu: its network card has an MTU of 1500 bytes; most nodes have 9001",
        ),
        ({"resolves": {}}, "names: does not resolve n2"),
        ({"clock_offset": 40.0}, "clock: its clock is 40 s ahead"),
        ({"shared_folder": ""}, "shared: /fsx/trainfleet is missing"),
        (
            {"kernel_says": ("NVRM: Xid (PCI:0000:00:1b): 79, GPU has fallen off the bus.",)},
            "hardware: its kernel log has: NVRM: Xid",
        ),
        (
            {"neuron_ecc": {"neuron3/stats/hardware/mem_ecc_uncorrected/total": 1}},
            "hardware: neuron3 reports 1 uncorrected",
        ),
        ({"authorized": False}, "setup: access: the head's key is not authorized"),
    ],
)
def test_each_odd_node_is_named_with_what_is_wrong(odd: dict[str, Any], message: str) -> None:
    assert any(line.startswith(f"n2: {message}") for line in said(odd)), said(odd)
    assert not any(line.startswith("n1") for line in said(odd))


def test_one_more_check_is_one_function() -> None:
    @each_host("call a plumber", blames=True)
    def wet(fact: Facts, wanted: Wanted) -> Iterator[object]:
        yield from ["is wet", ("leaks", "mop", False)] if fact.hostname == "n2" else []

    try:
        facts = fleet(3, READY)
        found = [*judge(LAUNCH, facts, wanted())]
        assert found == [
            Finding(Host("n2", "10.0.0.3"), "wet", "is wet", "call a plumber", True),
            Finding(Host("n2", "10.0.0.3"), "wet", "leaks", "mop", False),
        ]
        assert found == [*judge(ALLOCATED, facts, wanted())]
        assert not [*judge(SETUP, facts, wanted())]
    finally:
        CHECKS.pop()


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([0.3, 86400.0], ["n1: its clock is 86400 s ahead"]),
        ([-86400.0, 0.3], ["n0: its clock is 86400 s behind"]),
        ([7200.0, 7200.4], []),  # the machine that asks is wrong itself
        ([7200.0, 7200.4, 40.0], ["n2: its clock is 7160 s behind"]),
        (
            [-7200.0, 60.0],
            ["None: the clocks differ by 7260 s, and no majority agrees"],
        ),
        (
            [60.0, 60.0, 0.0],
            ["None: the clocks differ by 60 s, and no majority agrees"],
        ),
        ([86400.0], []),
    ],
)
def test_of_two_clocks_that_differ_only_the_wrong_one_is_blamed(
    offsets: list[float], expected: list[str]
) -> None:
    """The clock of the machine that asks, whose offset is 0, decides; where it agrees with neither, nobody is blamed."""
    facts = {
        host: replace(fact, clock_offset=offset)
        for (host, fact), offset in zip(fleet(len(offsets), READY).items(), offsets, strict=True)
    }
    assert [f"{finding.host}: {finding.message}" for finding in clock(facts, wanted())] == expected


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"gpus": P3DN.gpus[:7]}, "gpus: 7 of 8 GPUs respond; 8 are on the PCI bus"),
        (
            {"gpus": (replace(P3DN.gpus[0], ecc_errors=2), *P3DN.gpus[1:])},
            "hardware: GPU 0 reports 2 uncorrected",
        ),
        (
            {"gpus": tuple(replace(gpu, driver="595.1") for gpu in P3DN.gpus)},
            "setup: nvidia: driver 595.1; the platform needs",
        ),
        ({"bus": ("nvidia",) * 8}, "efa: 0 of 1 EFA interfaces are attached"),
        ({"infiniband": ()}, "efa: 0 of 1 EFA interfaces have a driver"),
        ({"memory_kib": 64 << 20}, "memory: has 64 GiB of memory, but a p3dn.24xlarge has 768"),
    ],
)
def test_each_fault_of_a_gpu_node_is_named(odd: dict[str, Any], message: str) -> None:
    lines = said(odd, wanted("p3dn.24xlarge"), P3DN)
    assert any(line.startswith(f"n2: {message}") for line in lines), lines


def test_a_host_without_room_for_its_ranks_is_named_with_what_would_fit() -> None:
    found = said({"memory_kib": 20_000}, wanted())
    assert any(
        line.startswith("n2: room: tiny needs 0.1 GiB per rank, but the node has 0.0 GiB")
        for line in found
    ), found
    assert not any(line.startswith("n1") for line in found)
    assert not any("room" in line for line in said({"memory_kib": 64 << 20}, wanted()))


def test_a_shared_folder_without_room_for_a_checkpoint_is_told() -> None:
    full = {"shared": Space(1_000, "lustre", "x@tcp:/y", "/fsx")}
    assert any(
        "space: /fsx/trainfleet has 0.0 GB free, but a checkpoint takes 0.0 GB" in line
        for line in said(full)
    )
    assert not any(
        "space:" in line
        for line in said({"shared": Space(10_000_000, "lustre", "x@tcp:/y", "/fsx")})
    )


@pytest.mark.parametrize(
    ("address", "is_told"),
    [
        ("8.8.8.8", True),
        ("10.0.0.1", False),
        ("127.0.0.1", False),
        ("169.254.1.1", False),
        ("100.64.0.1", False),
        ("n0", False),
    ],
)
def test_ranks_that_would_meet_at_a_public_address_are_a_warning(
    address: str, is_told: bool
) -> None:
    (_, head), *others = fleet(3, READY).items()
    nodes = {
        Host("n0", address): replace(head, addresses={address: "ens5"} if address != "n0" else {}),
        **dict(others),
    }
    said = list(exposed(nodes))
    assert len(said) == is_told and all(
        f"rendezvous address {address} is public" in words for words in said
    )
    assert not list(exposed(dict(list(nodes.items())[:1]))), "a rank of one node meets nobody"


def test_setup_touches_no_host_that_is_not_fit() -> None:
    facts = fleet(3, PLAIN, {"root": False})
    (found,) = judge(SETUP, facts, wanted())
    assert found.host and found.host.name == "n2" and "needs passwordless sudo" in found.message
    (found,) = judge(SETUP, fleet(3, PLAIN, {"os": "arch rolling"}), wanted("g6.48xlarge"))
    assert "arch rolling" in found.message and "nvidia" in found.message
    assert (
        list(judge(SETUP, fleet(3, PLAIN, {"os": "arch rolling"}), wanted())) == []
    )  # nothing to install, so any Linux does


def test_the_environment_follows_from_the_instance_type_with_a_reason_each() -> None:
    assert fabric_environment(None, "eth0") == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert fabric_environment(instance("p3dn.24xlarge"), "ens5") == {
        "GLOO_SOCKET_IFNAME": "ens5", "NCCL_SOCKET_IFNAME": "=ens5", "FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"}  # fmt: skip
    assert fabric_environment(instance("trn1.32xlarge"), "ens5")["FI_EFA_FORK_SAFE"] == "1"
    for kind in (
        "trn1.32xlarge",
        "p5.48xlarge",
    ):  # one node has no EFA interface, and with FI_PROVIDER its libfabric would fail
        assert not {
            name
            for name in fabric_environment(instance(kind), "ens5", alone=True)
            if name.startswith(("FI_", "CCOM"))
        }
    left_out = {
        setting.name
        for setting in fabric_settings(instance("p3dn.24xlarge"), "ens5")
        if setting.value is None
    }
    assert {"NCCL_TREE_THRESHOLD", "FI_OFI_RXR_RX_COPY_UNEXP"} <= left_out
    assert all(setting.why for setting in fabric_settings(instance("p5.48xlarge"), "ens5"))
    assert "FI_PROVIDER" not in fabric_environment(instance("c7i.8xlarge"), "ens5")
    assert "FI_PROVIDER" not in fabric_environment(
        instance("trn1.2xlarge"), "ens5"
    )  # Trainium without EFA


GOOD = """n0:6310:6318 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
n0:6310:6318 [0] NCCL INFO Using network Libfabric
n0:6310:6318 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA
"""


@pytest.mark.parametrize(
    ("log", "kind", "wrong"),
    [
        (GOOD, "p4d.24xlarge", []),
        (GOOD, None, []),
        ("", "p4d.24xlarge", ["NCCL printed nothing"]),
        (
            "x NCCL INFO NET/Socket : Using [0]ens5:172.31.0.112<0>",
            "p4d.24xlarge",
            ["NCCL did not choose EFA: NCCL INFO NET/Socket"],
        ),
        (GOOD, "p5.48xlarge", ["NCCL found 4 EFA interfaces, p5.48xlarge has 32"]),
        (GOOD.replace("/GDRDMA", ""), "p4d.24xlarge", ["GPUDirect is off"]),
        (
            GOOD.replace("/GDRDMA", "").replace("found 4", "found 1"),
            "p3dn.24xlarge",
            [],
        ),  # a V100's EFA can't do it
    ],
)
def test_nccl_is_taken_at_its_word(log: str, kind: str | None, wrong: list[str]) -> None:
    found = judge_nccl(log.splitlines(), instance(kind))
    assert len(found) == len(wrong) and all(
        line.startswith(start) for line, start in zip(found, wrong, strict=True)
    ), found


def test_a_job_s_own_words_are_heard_once_and_after_its_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.logs.mkdir()
    log = run.logs / "node-0.log"
    log.write_text(GOOD)  # of an earlier attempt
    words = FabricLog(run, tmp_path, instance("p4d.24xlarge"))
    log.write_text(GOOD + "x NCCL INFO NET/Socket : Using [0]ens5:172.31.0.112<0>\n")
    assert words.wrong() == []
    run.metrics.write_text("{}\n")
    assert [why.partition(":")[0] for why in words.wrong()] == [
        "NCCL did not choose EFA"
    ] and words.wrong() == []
    silent = FabricLog(run, tmp_path, instance("p4d.24xlarge"))
    run.metrics.write_text("{}\n")
    assert silent.wrong() == [], "who was not asked to speak is no fault of the fabric"


def pairs(count: int, slow: set[int]) -> tuple[tuple[int, int, float], ...]:
    return tuple(
        (a, b, 0.1 if {a, b} & slow else 10.0)
        for turn in tournament(count)
        for a, b in turn.items()
        if a < b
    )


@pytest.mark.parametrize(
    ("count", "slow"), [(3, {1}), (4, {2}), (5, set()), (8, {0, 7}), (64, {13})]
)
def test_pairs_name_the_slow_nodes_and_no_others(count: int, slow: set[int]) -> None:
    assert set(slow_nodes(Bandwidth(1.0, 1, count, pairs(count, slow)))) == slow


def test_every_pair_meets_once_and_nobody_twice_in_a_round() -> None:
    for count in (2, 3, 4, 7, 8):
        met = [tuple(sorted(pair)) for turn in tournament(count) for pair in turn.items()]
        assert len(set(met)) == count * (count - 1) // 2 == len(met) // 2


def test_bandwidth_is_held_to_what_the_type_promises() -> None:
    hosts = [Host(f"n{i}", f"10.0.0.{i}") for i in range(4)]
    least = least_bandwidth(instance("p4d.24xlarge"))
    assert (
        least == 30.0
        and least_bandwidth(None) is None
        and least_bandwidth(instance("c5n.18xlarge")) is None
    )
    assert judge_bandwidth(Bandwidth(31.0, 1, 4, ()), least, hosts) == []
    (found,) = judge_bandwidth(Bandwidth(5.0, 1, 4, pairs(4, {2})), least, hosts)
    assert found.host == hosts[2] and found.blames_host
    (found,) = judge_bandwidth(Bandwidth(5.0, 1, 4, pairs(4, set())), least, hosts)
    assert found.host is None and "no node is slower than the others" in found.message


def test_quarantine_keeps_the_evidence_until_it_is_lifted(tmp_path: Path) -> None:
    quarantine, host, other = (
        Quarantine(tmp_path / "q.json"),
        Host("gpu-1", "10.0.0.1"),
        Host("gpu-2", "10.0.0.2"),
    )
    assert quarantine.held([host, other]) == {}
    quarantine.add(host, "Xid 79")
    quarantine.add(host, "slow link", by="watchdog")
    quarantine.add(host, "slow link")
    again = Quarantine(tmp_path / "q.json").held([host, other])
    assert list(again) == [host] and again[host].evidence == "Xid 79; slow link"
    with pytest.raises(BackendError, match="gpu-2 is not in quarantine; quarantined hosts: gpu-1"):
        quarantine.lift("gpu-2")
    quarantine.lift("gpu-1")
    assert quarantine.entries() == {}


def test_a_logger_that_is_installed_on_no_node_or_not_on_all_is_told() -> None:
    goal = wanted()
    goal = replace(
        goal,
        config=replace(goal.config, train=replace(goal.config.train, loggers=("wandb", "trackio"))),
    )
    has = {"loggers": ("wandb /opt/python", "trackio /opt/python", "wandb /usr/bin/python3")}
    assert said({"loggers": has["loggers"][:1]}, goal, replace(READY, **has)) == [
        "n2: loggers: trackio (train.loggers) is not installed for /opt/python"
    ]
    assert said(has, goal, replace(READY, python="")) and not any(
        "logger" in line for line in said(has, goal, replace(READY, **has))
    )
