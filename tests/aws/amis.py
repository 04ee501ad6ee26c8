"""What is in each machine image that a recipe can meet, pinned as docker/platforms.lock.yaml pins it, and what package sources add to it.

Every row names what was read, and when that was true. `seen` is not AWS's word but what somebody reports of such a machine.
What nobody says of an image is left out, as if it were not there: setup must then be able to bring it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/20260714/amd64/hvm/ebs-gp3/ami-id"
GPU = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20260721"
NEURON = "Deep Learning Base Neuron AMI (Ubuntu 24.04) *"  # of one SDK, which its description names


@dataclass(frozen=True)
class Ami:
    """An image: its kernel, and what it brings. Packages are apt's, with their versions. `python`: one that can make environments."""

    id: str
    name: str
    kernel: str
    sources: tuple[str, ...]
    date: str
    description: str = ""
    driver: str = ""
    efa: str = ""  # the EFA installer's version
    packages: tuple[tuple[str, str], ...] = ()
    lustre: bool = False
    builds: bool = False  # a compiler and make
    headers: bool = True  # of its kernel
    python: bool = False


FSX_GUIDE = "FSx for Lustre user guide, Configuring EFA clients: the Deep Learning AMI has client, EFA and GDS (read 2026-11-23)"
BARE = (
    "seen: a plain Ubuntu 24.04 of that name in us-west-2, ami-0ac74609c6396bed3, before anything was installed: kernel, headers, "
    "no compiler, no driver, the kernel's own efa module, no Lustre (August 2026)"
)
AMIS = {
    UBUNTU: Ami("ami-00000000000002404", "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20260714", "6.17.0-1019-aws", (
        "Canonical, Find Ubuntu images on AWS: a serial in place of `current`", "describe-images in four public repositories", BARE,
        "ParallelCluster's cookbook, install_packages: Ubuntu has python3 without python3-venv"), "2026-08-26"),
    GPU: Ami("ami-00000000000000a91", GPU, "6.17.0-1019-aws", (
        "driver: a public repository that pins the image and cites its release notes (2026-07)",
        "EFA and OFI-NCCL: release notes of 2026-06-16, the last before it that were read",
        "seen: kernel and Lustre client 2.15.6 with kefalnd 1.2.2, on p6-b300 with an image of these weeks (August 2026)", FSX_GUIDE),
        "2026-07-21", driver="595.71.05", efa="1.47.0", packages=(("libnccl-ofi-ubuntu", "1.18.0-1"),), lustre=True, builds=True),
    NEURON: Ami("ami-00000000000000a92", "Deep Learning Base Neuron AMI (Ubuntu 24.04) 20261019", "6.17.0-1019-aws", (
        "Neuron DLAMI user guide: names, and the SDK in the description", "components: release notes of SDK 2.33.0",
        "its kernel is on no page that was read: taken as plain Ubuntu's; EFA, compiler and Lustre as if they were not there"),
        "2026-10-19", description="Neuron SDK 2.33.0", packages=(
            ("aws-neuronx-dkms", "2.31.7.0"), ("aws-neuronx-runtime-lib", "2.35.30.0-abc"), ("aws-neuronx-collectives", "2.35.43.0-abc"),
            ("aws-neuronx-tools", "2.33.38.0"))),
}  # fmt: skip
BUILD = "amazon-ecs-ami at its release of 2026-08-21: Amazon Linux 2023, kernel 6.1, no EFA installer, no Lustre client (dnf has one)"
LISTED = "name: describe-images of 2026-08-06 in a public repository"
AMIS |= {  # what AWS Batch starts: nothing of setup runs there
    name: Ami(id, name, "6.1", (LISTED, BUILD, *more), "2026-08-06", driver=driver)
    for id, name, driver, more in (
        ("ami-00000000000000ec1", "al2023-ami-ecs-hvm-2023.0.20260805-kernel-6.1-x86_64", "", ()),
        ("ami-00000000000000ec2", "al2023-ami-ecs-gpu-hvm-2023.0.20260805-kernel-6.1-x86_64-ebs", "580.159.03", ()),
        ("ami-00000000000000ec3", "al2023-ami-ecs-neuron-hvm-2023.0.20260805-kernel-6.1-x86_64", "",
         ("its Neuron driver is the newest of the day it was built",)),
    )
}  # fmt: skip
# What ParallelCluster starts its nodes from: an image of its own for each release, which its command finds (no SSM parameter, no pin).
CLUSTER = Ami("ami-00000000000000c16", "aws-parallelcluster-3.16.1-ubuntu-2404", "6.17.0-1019-aws", (
    "driver and EFA: release pages of ParallelCluster 3.16.0 to 3.16.3 (3.16.1: 2026-09-08), read 2026-11-23",
    "packages: its cookbook, install_packages_ubuntu22+.rb: dkms, curl, jq, python3 and python3-pip; neither python3-venv nor build-essential",
    "open kernel modules alone since 3.8.0: github.com/aws/aws-parallelcluster/issues/6014 (2024-01-16)",
    "Lustre: its cookbook installs FSx's client modules; its Python 3.14 is in a folder of its own, and not for users",
    "its kernel is on no page that was read: taken as plain Ubuntu's; OFI-NCCL of EFA 1.49.0 is on none either: as if it was not there"),
    "2026-09-08", driver="595.71.05", efa="1.49.0", packages=(("dkms", "3.0.11"),), lustre=True)  # fmt: skip
SEPTEMBER = {  # what fleet.aws.ami may name: kernels for which FSx has no module
    "ubuntu": Ami("ami-00000000000000a94", "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20260904", "7.0.0-1012-aws", (
        "seen: a public project's table of its stock image and kernel",), "2026-09-04"),
    "gpu": Ami("ami-00000000000000a95", "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20260915", "7.0.0-1012-aws", (
        "a public project's table, from AWS's release notes of 2026-09-16; whether it has a Lustre client is on no page that was read",),
        "2026-09-15", driver="595.91.07", efa="1.50.0", packages=(("libnccl-ofi-ubuntu", "1.21.1-1"),), builds=True),
}  # fmt: skip

# What sources offer for Ubuntu 24.04. FSx: its user guide's client kernel compatibility (middle of 2026), and 6.17.0-1019 as seen in
# August 2026; it ends before 7.0. The driver: seen in August 2026, one version of all three in Ubuntu's archive.
LUSTRE_KERNELS = ("6.8.0-1033-aws", "6.14.0-1018-aws", "6.17.0-1017-aws", "6.17.0-1019-aws")
DRIVER = "580.173.02-0ubuntu0.24.04.1"
ARCHIVE = {
    "build-essential": "12.10ubuntu1", "curl": "8.5.0", "git": "1:2.43.0", "tar": "1.35", "dkms": "3.0.11", "python3.12-venv": "3.12.3",
    "lustre-client-utils": "2.15.6-1fsx33",
    **{f"lustre-client-modules-{kernel}": "2.15.6-1fsx32" for kernel in LUSTRE_KERNELS},
    **{f"linux-{part}-{kernel}": "1" for kernel in (*LUSTRE_KERNELS, "7.0.0-1012-aws") for part in ("image", "headers")},
    **dict.fromkeys(("nvidia-headless-580-server", "nvidia-headless-580-server-open", "nvidia-utils-580-server",
                     "nvidia-fabricmanager-580"), DRIVER),
}  # fmt: skip
EFA_BRINGS = {
    "1.51.0": "1.21.1-1"
}  # installer → OFI-NCCL: 1.50.0 has it (release notes of the GPU image, 2026-10-09), 1.51.0 no less
INDEXES = yaml.safe_load((Path(__file__).parents[1] / "recorded_indexes.yaml").read_text())
(NEURON_PACKAGES,) = [
    row["packages"] for row in INDEXES["apt"] if "/noble/" in row["page"]
]  # versions in Neuron's repository
