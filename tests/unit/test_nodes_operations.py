"""Plans as data: facts and config in, exact commands out. A node that has everything gets none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainfleet.config import Config, Settings, load
from trainfleet.config.types import Fsx
from trainfleet.hosts.facts import Facts, Gpu, Space
from trainfleet.hosts.install_steps import HARDENING, LIMITS, Wanted, at_least, same_version, steps
from trainfleet.hosts.platform import load_platform

ROOT = Path(__file__).parents[2]
SHARED = "/fsx/trainfleet"
EFA = "4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC"
TOOLKIT = "C95B321B61E88C1809C4F759DDCAE044F796ECB0"
FSX = "9C36DD9C515F10DBC3AA835C5D5CCC3383A962E1"


def wanted(instance_type: str | None = None, **fleet: Any) -> Wanted:
    config: Config = load(Settings(ROOT / "config.yaml"))[0]
    from trainfleet.hardware.node_types import instance, platform_of

    platform = platform_of(instance(instance_type))
    fleet = {
        "backend": "ssh",
        "hosts": ("a", "b"),
        "shared_folder": SHARED,
        "python": "/opt/python",
        "platform": platform,
    } | fleet
    changed = replace(config, fleet=replace(config.fleet, instance_type=instance_type, **fleet))
    return Wanted(changed, load_platform(platform))


PLAIN = Facts(hostname="a", os="ubuntu 22.04", kernel="6.8", user="ubuntu", root=True, nofile=1024, memlock="64",
              disk=Space(50_000_000, "ext4", "/dev/root"), lacks=("gcc", "make", "docker", "mount.lustre"))  # fmt: skip
READY = replace(PLAIN, python="/usr/bin/python3", nofile=1 << 20, memlock="unlimited", has=(HARDENING, LIMITS, "/lib/modules/6.8/build", "ssh/ubuntu.pub"),
                lacks=(), shared_folder="writable", authorized=True)  # fmt: skip
V100 = (Gpu("580.126.09", 32768, 0, "V100"),) * 8


def commands(facts: Facts, goal: Wanted, head: bool = False) -> list[str]:
    return [" ".join([step.script, *step.words]) for step in steps(facts, goal, head=head)]


def test_a_plain_cpu_node_gets_only_what_it_needs() -> None:
    assert commands(PLAIN, wanted()) == [
        "limits.sh 65536",
        "sshd.sh",
        "access.sh /fsx/trainfleet/ssh/ubuntu.pub",
    ]
    assert commands(PLAIN, wanted(), head=True) == [
        "limits.sh 65536", "sshd.sh", "shared_folder.sh /fsx/trainfleet ubuntu", "head_key.sh /fsx/trainfleet/ssh",
        "access.sh /fsx/trainfleet/ssh/ubuntu.pub"]  # fmt: skip


def test_a_ready_node_gets_nothing() -> None:
    assert commands(READY, wanted(), head=True) == []


VOLTA = "nvidia.sh 560.28.03 581 580 proprietary"


def test_what_aws_s_image_of_the_day_brings_is_taken() -> None:
    """Driver and EFA of the GPU image of 2026-10-09, none of which is the lock's version."""
    facts = replace(READY, gpus=(Gpu("595.91.07", 1, 0, "H100"),) * 8, efa="1.50.0", uverbs=True, fi_info=32,
                    packages={"libnccl-ofi-ubuntu": "1.21.1-1"})  # fmt: skip
    assert commands(facts, wanted("p5.48xlarge")) == []


def test_a_single_node_needs_no_efa() -> None:
    assert not [
        line
        for line in commands(PLAIN, wanted("trn1.32xlarge", nodes=1))
        if line.startswith("efa.sh")
    ]


def test_a_plain_p3dn_gets_drivers_fabric_and_file_system_in_their_order() -> None:
    fsx = replace(
        wanted().fleet.fsx, dns_name="fs-1.fsx.us-east-1.amazonaws.com", mount_name="abcd"
    )
    facts = replace(PLAIN, bus=("nvidia",) * 8 + ("efa",), scratch_disks=("nvme1n1", "nvme2n1"))
    assert commands(facts, wanted("p3dn.24xlarge", fsx=fsx, install_docker=True)) == [
        f"lustre.sh {FSX}", "build_tools.sh headers", "limits.sh 65536", "sshd.sh", VOLTA, f"efa.sh 1.51.0 {EFA} 1.47.0",
        f"ofi_nccl.sh 1.20.0 1.51.0 {EFA}", f"docker.sh nvidia {TOOLKIT}", "fsx.sh fs-1.fsx.us-east-1.amazonaws.com@tcp:/abcd /fsx",
        "scratch.sh /scratch /dev/nvme1n1 /dev/nvme2n1", "access.sh /fsx/trainfleet/ssh/ubuntu.pub"]  # fmt: skip


@pytest.mark.parametrize(("type", "nodes", "count"), [("p5.48xlarge", 2, 8), ("p5.48xlarge", 1, 8), ("p5.4xlarge", 2, 1),
    ("p6-b300.48xlarge", 64, 16), ("p6-b300.48xlarge", 120, 8), ("trn1.32xlarge", 2, 2), ("p4d.24xlarge", 2, 0)])  # fmt: skip
def test_a_file_system_with_efa_is_reached_over_efa_before_it_is_mounted(
    type: str, nodes: int, count: int
) -> None:
    """So many interfaces as AWS's own script takes, and no more than 1,024 of all nodes together."""
    fsx = replace(
        wanted().fleet.fsx, dns_name="fs-1.fsx.us-east-1.amazonaws.com", mount_name="abcd", efa=True
    )
    goal = wanted(type, fsx=fsx, nodes=nodes)
    facts = replace(
        READY, efa="1.51.0", uverbs=True, fi_info=32, packages={"libnccl-ofi-ubuntu": "1.21.1-1"}
    )
    lines = [
        line for line in commands(facts, goal) if line.split(".")[0] in ("lustre", "lnet", "fsx")
    ]
    mount = "fsx.sh fs-1.fsx.us-east-1.amazonaws.com@tcp:/abcd /fsx"
    assert lines == [
        f"lustre.sh {FSX}",
        *([f"lnet.sh {count}", f"{mount} efa"] if count else [mount]),
    ]
    assert goal.efa == (goal.type.efa if count or nodes > 1 else 0)  # type: ignore[union-attr]
    ready = replace(facts, mounts={"/fsx": "lustre 10.0.0.5@tcp:/abcd"}, lnet=count)
    assert not {"lnet.sh", "fsx.sh", "lustre.sh"} & {
        line.split()[0] for line in commands(ready, goal)
    }
    if count:
        assert f"lnet.sh {count}" in commands(replace(ready, lnet=0), goal)  # mounted, and over TCP


P3DN_READY = replace(
    READY,
    gpus=V100,
    efa="1.51.0",
    uverbs=True,
    fi_info=1,
    packages={"libnccl-ofi-ubuntu": "1.21.1-1"},
)


@pytest.mark.parametrize(
    ("change", "command", "why"),
    [
        ({}, None, ""),
        ({"gpus": (Gpu("570.1", 1, 0, "V100"), *V100[1:])}, VOLTA, "driver 570.1, 580.126.09; the platform needs 560.28.03 or newer, but older than 581"),
        ({"gpus": ()}, VOLTA, "driver missing"),
        ({"efa": "1.30.0"}, f"efa.sh 1.51.0 {EFA} 1.47.0", "installer 1.30.0; the platform needs 1.47.0 or newer"),
        ({"uverbs": False}, f"efa.sh 1.51.0 {EFA} 1.47.0", "ib_uverbs is not loaded"),
        ({"fi_info": 0}, f"efa.sh 1.51.0 {EFA} 1.47.0", "fi_info -p efa lists no endpoints"),
        ({"packages": {"libnccl-ofi": "1.9.1"}}, f"ofi_nccl.sh 1.20.0 1.51.0 {EFA}", "libnccl-ofi 1.9.1"),
        ({"memlock": "64", "has": tuple(name for name in READY.has if name != LIMITS)}, "limits.sh 65536", "64 KiB of locked memory"),
    ],
)  # fmt: skip
def test_one_thing_that_drifted_gives_one_step_with_its_reason(
    change: dict[str, Any], command: str | None, why: str
) -> None:
    found = steps(replace(P3DN_READY, **change), wanted("p3dn.24xlarge"), head=False)
    assert [" ".join([step.script, *step.words]) for step in found] == (
        [command] if command else []
    )
    assert all(why in step.why for step in found)


def test_nvswitch_machines_get_the_fabric_manager_and_open_modules() -> None:
    assert "nvidia.sh 580.65.06 - 580 open fabric" in commands(PLAIN, wanted("p5.48xlarge"))
    assert "nvidia.sh 580.65.06 - 580 open" in commands(PLAIN, wanted("g6.48xlarge"))


def test_trainium_gets_the_packages_of_its_own_sdk() -> None:
    (one,) = [
        line for line in commands(PLAIN, wanted("trn1.32xlarge")) if line.startswith("neuron.sh")
    ]
    (two,) = [
        line for line in commands(PLAIN, wanted("trn2.48xlarge")) if line.startswith("neuron.sh")
    ]
    assert "aws-neuronx-dkms=2.29.0.0" in one and "aws-neuronx-dkms=2.31.7.0" in two
    facts = replace(READY, packages={name: f"{version}-1~jammy" for name, version in wanted("trn2.48xlarge").platform.neuron_packages},
                    efa="1.51.0", uverbs=True, fi_info=16)  # fmt: skip
    assert commands(facts, wanted("trn2.48xlarge")) == []


def test_the_environment_is_built_once_and_named_by_its_lock() -> None:
    goal = wanted(python=None)
    (line,) = [line for line in commands(READY, goal, head=True) if line.startswith("python.sh")]
    assert (
        line
        == f"python.sh {SHARED}/{goal.environment} https://download.pytorch.org/whl/cpu - torch==2.13.0"
    )
    assert commands(READY, goal) == []  # not on the others
    assert (
        commands(replace(READY, has=(*READY.has, f"{goal.environment}/.complete")), goal, head=True)
        == []
    )
    trainium = wanted("trn2.48xlarge", python=None)
    (line,) = [
        line for line in commands(READY, trainium, head=True) if line.startswith("python.sh")
    ]
    assert line.endswith(
        "https://pip.repos.neuron.amazonaws.com torch==2.13.0 torch-neuronx==2.13.3.0 neuronx-cc==2.28.7631.0 nki==0.7.0"
    )
    (line,) = [
        line
        for line in commands(READY, wanted("trn1.32xlarge", python=None), head=True)
        if line.startswith("python.sh")
    ]
    assert re.search(
        r" torch==2\.9\.1( --hash=sha256:\w{64}){2} torch-xla==2\.9\.0( --hash=sha256:\w{64}){2} torch-neuronx==2\.9\.0",
        line,
    )


def test_commands_become_root_only_where_they_must_and_quote_what_they_are_given() -> None:
    by_script = {
        step.script: step.command("s")
        for step in steps(PLAIN, wanted(shared_folder="/fsx/it's"), head=True)
    }
    assert (
        by_script["limits.sh"]
        == "sudo -n s/limits.sh apply 65536 && sudo -n s/limits.sh verify 65536"
    )
    assert by_script["access.sh"].startswith(
        "s/access.sh apply '/fsx/it'\"'\"'s/ssh/ubuntu.pub' && s/access.sh verify"
    )
    assert "sudo" not in steps(PLAIN, wanted(), head=False)[0].command("s", is_root=True)


def test_every_step_has_its_script_and_every_platform_its_source() -> None:
    import yaml

    goals = [
        wanted(name)
        for name in (None, "p3dn.24xlarge", "p5.48xlarge", "trn1.32xlarge", "trn2.48xlarge")
    ]
    scripts = {step.script for goal in goals for step in steps(PLAIN, replace(goal), head=True)}
    assert all((ROOT / "scripts" / name).stat().st_mode & 0o111 for name in scripts)
    lock = yaml.safe_load((ROOT / "docker/platforms.lock.yaml").read_text())
    for platform in lock["platforms"].values():
        for name, entry in platform.items():
            assert not isinstance(entry, dict) or {"version", "source", "date"} <= set(entry), name
    for entry in lock["keys"].values():
        assert set(entry) == {"fingerprint", "source", "date"} and len(entry["fingerprint"]) == 40


def test_versions_compare_as_numbers() -> None:
    assert (
        at_least("1.21.1-1", "1.20.0")
        and at_least("1.20.0", "1.20.0")
        and not at_least("1.9.2", "1.20.0")
        and not at_least("", "1")
    )
    assert same_version("2.31.7.0-1~jammy", "2.31.7.0") and not same_version(
        "2.31.7.01", "2.31.7.0"
    )


def test_a_machine_that_only_builds_the_environment_gets_no_driver_and_no_key() -> None:
    """A key of its own would be authorized on every node in place of the head's."""
    goal = wanted("p5.48xlarge", python=None, fsx=Fsx(dns_name="fs-1.fsx.x", mount_name="abc"))
    fleet = replace(goal.fleet, nodes=1, instance_type="c7i.xlarge")
    config = replace(goal.config, fleet=fleet)
    builder = replace(goal, config=config, whole=False, temporary=True)
    scripts = [line.split()[0] for line in commands(PLAIN, builder, head=True)]
    assert scripts == ["lustre.sh", "fsx.sh", "shared_folder.sh", "python.sh"]
