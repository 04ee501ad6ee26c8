"""facts.sh and its parser: on this machine for real, and on what a GPU node prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainfleet.config.host_list import Host
from trainfleet.hosts.facts import SCRIPT, Gpu, parse

P3DN = """Welcome to Ubuntu 22.04! Last login yesterday.
== facts
clock=1000.50
os=ubuntu 22.04
kernel=6.8.0-1040-aws
hostname=p3dn-1
boot_id=abc
user=ubuntu
root=yes
cores=96
memory_kib=790000000
memlock=unlimited
nofile=unlimited
disk=123456789 ext4 /dev/root
shared=9999 lustre 10.0.0.5@tcp:/fsx /fsx
shared_folder=writable
has=env/cuda-volta-1/.complete
has=ssh/ubuntu.pub
lacks=docker
bus=nvidia
bus=efa
gpu=580.126.09, 32768, 0, Tesla V100-SXM2-32GB
gpu=580.126.09, 32768, 3, Tesla V100-SXM2-32GB
neuron_ecc=neuron3/stats/hardware/mem_ecc_uncorrected/total 2
infiniband=efa_0
uverbs=yes
efa=EFA installer version: 1.51.0
fi_info=1
package=libnccl-ofi 1.21.1-1
lnet=8
mount=/fsx lustre 10.0.0.5@tcp:/fsx
mtu=ens5 9001
mtu=lo 65536
address=lo 127.0.0.1
address=ens5 172.31.4.7
resolves=172.31.4.7 p3dn-1 ip-172-31-4-7.ec2.internal
kernel_says=[42.0] NVRM: Xid (PCI:0000:00:1b): 79, GPU has fallen off the bus.
== end
bye
"""


def test_a_gpu_node_is_read_as_it_printed_itself() -> None:
    facts = parse(P3DN, seconds=0.2, now=1000.7)
    assert (facts.os, facts.cores, facts.root, facts.nofile > 1 << 20) == (
        "ubuntu 22.04",
        96,
        True,
        True,
    )
    assert facts.gpus[1] == Gpu("580.126.09", 32768, 3, "Tesla V100-SXM2-32GB")
    assert (facts.efa, facts.fi_info, facts.packages) == ("1.51.0", 1, {"libnccl-ofi": "1.21.1-1"})
    assert facts.lnet == 8
    assert facts.shared and (facts.shared.kind, facts.shared.mounted) == ("lustre", "/fsx")
    assert facts.resolves["ip-172-31-4-7.ec2.internal"] == "172.31.4.7"
    assert facts.clock_offset == pytest.approx(0.0)
    assert facts.neuron_ecc == {"neuron3/stats/hardware/mem_ecc_uncorrected/total": 2}
    assert "Xid" in facts.kernel_says[0]


def test_a_node_behind_a_public_address_is_known_to_its_peers_by_its_own() -> None:
    facts = parse(P3DN)
    public, private = Host("a", "54.1.2.3"), Host("a", "172.31.4.7")
    assert (facts.card(public), facts.address(public)) == ("ens5", "172.31.4.7")
    assert facts.address(private) == "172.31.4.7"


def test_an_answer_that_breaks_off_is_no_facts() -> None:
    with pytest.raises(ValueError, match="the beginning or end is missing"):
        parse(P3DN.partition("gpu=")[0])


def test_the_script_runs_on_this_machine_whatever_it_lacks() -> None:
    done = subprocess.run(["sh", "-s", "--", "/no/such/folder", "", "", "localhost"], input=SCRIPT.read_text(), capture_output=True,
                          text=True, check=True, timeout=60)  # fmt: skip
    facts = parse(done.stdout)
    assert (
        facts.cores > 0
        and facts.memory_kib > 0
        and facts.disk
        and facts.hostname
        and facts.shared_folder == ""
    )
    assert done.stderr == ""


def test_the_script_tells_which_loggers_each_interpreter_has(tmp_path: Path) -> None:
    (tmp_path / "env/cpu-1/bin").mkdir(parents=True)
    python = tmp_path / "env/cpu-1/bin/python"
    python.symlink_to(sys.executable)
    words = ["sh", "-s", "--", str(tmp_path), "", "json wandb"]
    done = subprocess.run(
        words, input=SCRIPT.read_text(), capture_output=True, text=True, check=True, timeout=60
    )
    assert parse(done.stdout).loggers == (f"json {python}",) and done.stderr == ""
