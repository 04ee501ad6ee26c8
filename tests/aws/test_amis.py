"""Machine images are pinned, known, and enough: for each one that a recipe meets, setup's scripts bring what it lacks, run for real."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from aws import machine
from aws.account import Account
from aws.amis import (
    AMIS,
    ARCHIVE,
    CLUSTER,
    EFA_BRINGS,
    GPU,
    NEURON,
    NEURON_PACKAGES,
    SEPTEMBER,
    UBUNTU,
    Ami,
)
from aws.world import config_of
from fleet.lab import Lab, lab
from trainfleet.backends.slurm import cluster_file
from trainfleet.cloud import discovery
from trainfleet.cloud.calls import Calls
from trainfleet.config import Settings, load
from trainfleet.hardware import node_types
from trainfleet.hosts.facts import SCRIPT, Facts, parse
from trainfleet.hosts.host_setup import NEEDS_BOOT
from trainfleet.hosts.install_steps import Wanted, is_within, steps
from trainfleet.hosts.platform import load_platform
from trainfleet.recipes import FOLDER
from trainfleet.trust.errors import ConfigError

ROOT = Path(__file__).parents[2]
PATH = ("env", "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin")

PINNED = {"cpu": UBUNTU, "cuda": GPU, "cuda-volta": UBUNTU, "neuron": NEURON, "neuron-xla": UBUNTU}


@pytest.mark.parametrize("stack", PINNED)
def test_the_image_of_a_stack_is_one_version_that_is_known(
    stack: str, account: Account, tmp_path: Path
) -> None:
    ami = load_platform(stack).ami
    assert ami == PINNED[stack] and not {"latest", "current", "recommended"} & set(ami.split("/"))
    assert AMIS[ami].sources and AMIS[ami].date
    config = config_of(tmp_path)
    config = replace(config, fleet=replace(config.fleet, platform=stack))
    assert discovery.image_of(config, Calls("us-east-1")) == AMIS[ami].id
    account.lacks_images.add(ami)
    with pytest.raises(ConfigError) as caught:
        discovery.image_of(config, Calls("us-east-1"))
    assert f"does not have the image of platform {stack}" in str(
        caught.value
    ) and "fleet.aws.ami" in str(caught.value)


@pytest.mark.parametrize("stack", [name for name in PINNED if load_platform(name).ecs])
def test_batch_starts_one_known_image_and_sagemaker_needs_none(
    stack: str, account: Account, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    config = replace(config, fleet=replace(config.fleet, platform=stack))
    account.lacks_images = set(PINNED.values())  # which neither of them uses
    pinned = load_platform(stack)
    ecs = AMIS[pinned.ecs]
    assert not pinned.nvidia or is_within(ecs.driver, pinned.nvidia_least, pinned.nvidia_below)
    assert discovery.image_of(config, Calls("us-east-1"), "batch") == ecs.id and ecs.sources
    assert discovery.image_of(config, Calls("us-east-1"), "sagemaker") == ""
    account.lacks_images.add(ecs.name)
    with pytest.raises(ConfigError, match="does not have the image of platform"):
        discovery.image_of(config, Calls("us-east-1"), "batch")


def test_of_neuron_s_images_the_one_of_the_stack_s_sdk(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    config = replace(config, fleet=replace(config.fleet, platform="neuron"))
    newer = replace(
        AMIS[NEURON], id="ami-00000000000000a93", description="Neuron SDK 2.34.0", date="2026-11-20"
    )
    monkeypatch.setitem(AMIS, "Deep Learning Base Neuron AMI (Ubuntu 24.04) newer", newer)
    assert discovery.image_of(config, Calls("us-east-1")) == AMIS[NEURON].id


RECIPES = {  # one of each kind of machine and file system that recipes ask for
    (fleet["instance_type"], fleet.get("fsx", {}).get("efa"), fleet["nodes"] > 1): path.stem
    for path in sorted(FOLDER.glob("*.yaml"))
    if (fleet := yaml.safe_load(path.read_text())["fleet"]).get("instance_type")
    and fleet["backend"] in ("ec2", "ssh")
}
DRIVERS = (
    "lustre.sh",
    "build_tools.sh",
    "nvidia.sh",
    "neuron.sh",
    "efa.sh",
    "ofi_nccl.sh",
    "lnet.sh",
    "fsx.sh",
)  # of what an image has


@pytest.fixture(scope="module")
def node() -> Iterator[Lab]:
    with lab(1) as found:
        yield found


def wanted_of_recipe(name: str) -> Wanted:
    """The recipe's fleet as setup sees it once its file system is there."""
    config = load(Settings(FOLDER / f"{name}.yaml"))[0]
    fsx = replace(config.fleet.fsx, dns_name="fs-1.fsx.us-east-1.amazonaws.com", mount_name="abcd")
    return Wanted(
        replace(config, fleet=replace(config.fleet, fsx=fsx)), load_platform(config.fleet.platform)
    )


def become(node: Lab, ami: Ami, wanted: Wanted) -> None:
    """Makes the node a machine of that image: nothing is left of an earlier one."""
    node.destroy(0)
    shutil.rmtree(node._disks / "0")
    node.recreate(0)
    root, kind = node.root(0), wanted.type
    assert kind is not None
    archive = dict(ARCHIVE) | {"libnccl-ofi-ubuntu": " ".join(EFA_BRINGS.values())}
    archive |= {name: " ".join(versions) for name, versions in NEURON_PACKAGES.items()}
    state = {"kernel": ami.kernel, "packages": dict(ami.packages) | {f"linux-image-{ami.kernel}": "1"}, "archive": archive,
             "driver": ami.driver, "driver_kernel": ami.kernel, "lustre_kernel": ami.kernel if ami.lustre else "", "lnet": 0, "sent": 0,
             "efa_offered": EFA_BRINGS, "keys": {part: wanted.platform.key(key) for part, key in (
                 ("efa-installer", "efa"), ("NEURON", "neuron"), ("fsx-ubuntu", "fsx"))}}  # fmt: skip
    (root / "var/machine.json").write_text(json.dumps(state))
    # Its own copy: the scripts below remove the Python of such a machine, which may be ours.
    shutil.copy(Path(sys.base_prefix, "bin/python3"), root / "var/python3")
    tool = "#!/var/python3 -IS\n" + Path(machine.__file__).read_text()
    (root / "var/machine.py").write_text(tool)
    tools = [*machine.ALWAYS, *(["nvidia-smi"] if ami.driver else []), *(["mount.lustre"] if ami.lustre else []),
             *(["gcc", "make"] if ami.builds else [])]  # fmt: skip
    lines = ["rm -f /usr/bin/gcc /usr/bin/make /usr/bin/python3.1[1-9] /usr/local/bin/python3* /usr/bin/dkms; mkdir -p /opt/amazon /boot/grub",
             "chmod 755 /var/machine.py; touch /var/mounts; mount -t tmpfs none /sys; mkdir -p /sys/module /sys/class/net",
             f"mkdir -p /lib/modules/{ami.kernel}/build /drivers/efa",
             *(f"mkdir -p /sys/class/infiniband/rdmap{at}/device; ln -s /drivers/efa /sys/class/infiniband/rdmap{at}/device/driver"
               for at in range(kind.efa)),
             *([f"echo 'EFA installer version: {ami.efa}' > /opt/amazon/efa_installed_packages; mkdir -p /opt/amazon/efa/bin; "
                "printf '#!/bin/sh\\necho provider: efa\\n' > /opt/amazon/efa/bin/fi_info; chmod 755 /opt/amazon/efa/bin/fi_info; "
                "mkdir -p /sys/module/ib_uverbs"] if ami.efa else []),
             *(["mkdir /sys/module/nvidia"] if ami.driver else []),
             *(f"ln -sf /var/machine.py /usr/local/bin/{name}" for name in tools)]  # fmt: skip
    node.run(0, "/bin/sh", "-ec", "\n".join(lines))
    subprocess.run(["cp", "-r", str(ROOT / "scripts"), str(root / "scripts")], check=True)


def facts_of(node: Lab) -> Facts:
    """What facts.sh says there, with the mounts that the machine pretends."""
    script = SCRIPT.read_text().replace("/proc/mounts", "/var/mounts")
    done = node.run(0, *PATH, "sh", "-c", script, "-", "", "", "", "localhost")
    return parse(done.stdout)


def set_up(node: Lab, wanted: Wanted) -> list[str]:
    """Does what setup would do of what images bring or lack; the scripts' last lines, up to one that fails, which begins with a !."""
    said = list[str]()
    for step in [
        step for step in steps(facts_of(node), wanted, head=False) if step.script in DRIVERS
    ]:
        for _ in range(2):
            words = [f"/scripts/{step.script}", "apply", *step.words]
            done = node.run(0, *PATH, "TRAINFLEET_MOUNTS=/var/mounts", *words, check=False)
            if done.returncode != NEEDS_BOOT:
                break
            said.append(done.stdout.strip().splitlines()[-1])
            boot(node)
        if done.returncode:
            return [*said, "!" + (done.stdout + done.stderr).strip().splitlines()[-1]]
        said.append(done.stdout.strip().splitlines()[-1])
    return said


def boot(node: Lab) -> None:
    """The kernel that GRUB was told runs then, in another boot."""
    root = node.root(0)
    state = json.loads((root / "var/machine.json").read_text())
    told = re.search(
        r"with Linux ([^\"]+)", (root / "etc/default/grub.d/99-trainfleet.cfg").read_text()
    )
    state["kernel"] = told[1] if told else state["kernel"]
    (root / "var/machine.json").write_text(json.dumps(state))
    (root / "proc/sys/kernel/random/boot_id").write_text("another\n")


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES.values())
def test_each_operation_is_satisfied_by_the_image_or_by_what_sources_offer(
    name: str, node: Lab
) -> None:
    wanted = wanted_of_recipe(name)
    become(node, AMIS[wanted.platform.ami], wanted)
    said = set_up(node, wanted)
    assert not said or not said[-1].startswith("!"), said
    left = [step for step in steps(facts_of(node), wanted, head=False) if step.script in DRIVERS]
    assert not left, (said, left)


def test_an_image_whose_kernel_has_no_lustre_client_boots_one_that_has(node: Lab) -> None:
    wanted = wanted_of_recipe("roberta-large-p3dn-ec2")
    become(node, SEPTEMBER["ubuntu"], wanted)
    said = set_up(node, wanted)
    assert "kernel 6.17.0-1019-aws, which has one, is GRUB's default and boots next" in said[0]
    assert said[1] == "lustre: client for kernel 6.17.0-1019-aws" and not said[-1].startswith(
        "!"
    ), said
    assert any(line.startswith("nvidia: driver 580.173.02") for line in said)


def test_an_image_whose_driver_is_for_such_a_kernel_alone_is_refused_in_one_line(node: Lab) -> None:
    wanted = wanted_of_recipe("llama-3-8b-p5-ec2")
    become(node, SEPTEMBER["gpu"], wanted)
    (said,) = set_up(node, wanted)
    assert (
        said.startswith("!lustre: FSx has no module for kernel 7.0.0-1012-aws")
        and "fleet.aws.ami" in said
    )


CLUSTERS = {
    "bert-large-trn1-parallelcluster": (),
    "llama-3-8b-p5": ("ofi_nccl.sh",),
}  # what node.sh leaves undone on each


@pytest.mark.thorough
@pytest.mark.parametrize("name", CLUSTERS)
def test_the_script_of_a_cluster_s_nodes_brings_what_its_image_lacks(name: str, node: Lab) -> None:
    config = load(Settings(FOLDER / f"{name}.yaml"))[0]
    wanted = Wanted(
        config, load_platform(config.fleet.platform)
    )  # ParallelCluster itself mounts the file system
    wanted = replace(
        wanted,
        config=replace(
            config, fleet=replace(config.fleet, fsx=replace(config.fleet.fsx, dns_name=None))
        ),
    )
    become(node, CLUSTER, wanted)
    lacked = {step.script for step in steps(facts_of(node), wanted, head=False)} & set(DRIVERS)
    assert "build_tools.sh" in lacked and not {"nvidia.sh", "efa.sh"} & lacked, (
        "its driver and its EFA are new enough"
    )
    script = cluster_file.node_script(config)
    (node.root(0) / "root/node.sh").write_text(script)
    done = node.run(0, *PATH, "bash", "/root/node.sh", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    left = [
        step.script for step in steps(facts_of(node), wanted, head=False) if step.script in DRIVERS
    ]
    assert left == list(CLUSTERS[name]), left


def test_a_cluster_s_image_is_refused_where_its_driver_knows_no_such_gpu(tmp_path: Path) -> None:
    def refused(kind: str, image: str | None = None) -> list[str]:
        fleet = config.fleet
        other = replace(
            config, fleet=replace(fleet, instance_type=kind, aws=replace(fleet.aws, ami=image))
        )
        return [
            message
            for key, message in cluster_file.refuse(other)
            if key == "fleet.slurm.parallelcluster.queues"
        ]

    slurm = {"create": "parallelcluster"}
    config = config_of(
        tmp_path,
        backend="slurm",
        shared_folder="/fsx/work",
        aws={"allow_ssh_from": [], "bastion_type": None},
        slurm=slurm,
    )
    for kind in ("p3dn.24xlarge", "p4d.24xlarge", "p5.48xlarge"):
        stack = load_platform(node_types.platform_of(node_types.instance(kind)))
        fits = (
            is_within(CLUSTER.driver, stack.nvidia_least, stack.nvidia_below)
            and stack.kernel_modules == "open"
        )
        assert bool(refused(kind)) != fits, kind
        assert not refused(kind, image="ami-0123456789abcdef0")
    assert (
        "does not support p3dn.24xlarge" in refused("p3dn.24xlarge")[0]
        and "fleet.aws.ami" in refused("p3dn.24xlarge")[0]
    )
