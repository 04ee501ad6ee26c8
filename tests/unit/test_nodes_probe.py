"""What nvidia-smi, sysfs and sinfo print, as their makers' and users' pages show it, and what `make doctor` makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainfleet.backends.slurm import resources
from trainfleet.backends.slurm.client import Said, SlurmClient
from trainfleet.config import Settings, load
from trainfleet.config.host_list import Host
from trainfleet.config.types import Config, Devices
from trainfleet.hosts import node_checks, probe
from trainfleet.hosts.facts import Facts, Gpu, parse, read_gpus, read_topology
from trainfleet.hosts.fleet import wanted_of
from trainfleet.launch import provisioning
from trainfleet.node.entrypoint import CARDS, found_here
from trainfleet.process.rdma_adapters import Port, fastest, listed, ports_here, read_port
from trainfleet.trust.errors import BackendError

# github.com/NVIDIA/nccl/issues/1264, HGX H100, 2024: the rows of its GPUs; NIC3 and NIC4 are of storage
H100_TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tNIC0\tNIC1\tNIC2\tNIC3\tNIC4\tNIC5\tNIC6\tNIC7\tNIC8\tNIC9\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tNV18\tNV18\tNV18\tNV18\tNV18\tNV18\tPIX\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\t0-55,112-167\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNV18\tNV18\tNV18\tNV18\tSYS\tPIX\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\t0-55,112-167\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tNV18\tNV18\tNV18\tNV18\tSYS\tSYS\tPIX\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\t0-55,112-167\t0\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tNV18\tNV18\tNV18\tNV18\tSYS\tSYS\tSYS\tSYS\tSYS\tPIX\tSYS\tSYS\tSYS\tSYS\t0-55,112-167\t0\t\tN/A
GPU4\tNV18\tNV18\tNV18\tNV18\t X \tNV18\tNV18\tNV18\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tPIX\tSYS\tSYS\tSYS\t56-111,168-223\t1\t\tN/A
GPU5\tNV18\tNV18\tNV18\tNV18\tNV18\t X \tNV18\tNV18\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tPIX\tSYS\tSYS\t56-111,168-223\t1\t\tN/A
GPU6\tNV18\tNV18\tNV18\tNV18\tNV18\tNV18\t X \tNV18\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tPIX\tSYS\t56-111,168-223\t1\t\tN/A
GPU7\tNV18\tNV18\tNV18\tNV18\tNV18\tNV18\tNV18\t X \tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tPIX\t56-111,168-223\t1\t\tN/A

NIC Legend:

""" + "\n".join(f"  NIC{number}: mlx5_{number}" for number in range(10))
# github.com/noonghunna/club-3090/issues/1229, two RTX 5090, 2026
CARDS_TOPOLOGY = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tPHB\t0-63\t0\t\tN/A\nGPU1\tPHB\t X \t0-63\t0\t\tN/A\n"
# MiB as nvidia-smi has them: github.com/modal-labs/modal-client/pull/2797, antirez/ds4/issues/431, RLinf/RLinf/issues/255
MIB = {"NVIDIA H100 80GB HBM3": 81559, "NVIDIA A100-SXM4-80GB": 81920, "NVIDIA A100-SXM4-40GB": 40960, "NVIDIA L40S": 46068,
       "NVIDIA L4": 23034, "Tesla T4": 15360, "NVIDIA A10": 23028, "NVIDIA GeForce RTX 4090": 24564,
       "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 97887}  # fmt: skip


def node(
    name: str = "NVIDIA H100 80GB HBM3",
    count: int = 8,
    topology: str = H100_TOPOLOGY,
    ports: str = "",
    **more: object,
) -> Facts:
    """The facts of such a node, through facts.sh's own words."""
    lines = [f"gpu=570.86.15, {MIB.get(name, 81559)}, 0, {name}"] * count + ["bus=nvidia"] * count
    lines += [f"topology={line}".replace("\t", " ") for line in topology.splitlines()]
    lines += [f"port={line}" for line in ports.splitlines()]
    return replace(
        parse(
            "\n".join(
                [
                    "== facts",
                    "cores=224",
                    "memory_kib=2113000000",
                    *lines,
                    "speed=eth0 100000",
                    "== end",
                    "",
                ]
            )
        ),
        **more,
    )


def port(
    number: int,
    link: str = "InfiniBand",
    rate: str = "400 Gb/sec (4X NDR)",
    state: str = "4:",
    driver: str = "mlx5_core",
) -> str:
    return f"mlx5_{number} 1 {link} {state} {driver} {rate}"


NDR = "\n".join(
    [
        *(port(n) for n in (0, 1, 2, 5, 6, 7, 8, 9)),
        port(3),
        port(4, "Ethernet", "100 Gb/sec (4X EDR)"),
    ]
)
HGX = node(ports=NDR)


def config(tmp_path: Path, fleet: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"name: x\nfleet: {{{fleet}}}\ndata: {{name: t, sources: [stdlib]}}\ntrain: {{global_batch_size: 64}}\n"
    )
    return load(Settings(path))[0]


OWN = "backend: ssh, nodes: 2, hosts: [n1, n2], shared_folder: /s, accelerator: {name: h100, per_node: 8, network: infiniband, network_gbps: 3200}"


def test_a_topology_tells_how_gpus_are_joined_and_which_cards_are_theirs() -> None:
    found = read_topology(H100_TOPOLOGY.replace("\t", " ").splitlines())
    assert found and (found.fewest, found.most) == (18, 18)
    assert found.near == tuple(f"mlx5_{n}" for n in (0, 1, 2, 5, 6, 7, 8, 9))
    cards = read_topology(CARDS_TOPOLOGY.replace("\t", " ").splitlines())
    assert cards and (cards.fewest, cards.most, cards.near) == (0, 0, ())
    underlined = read_topology(
        H100_TOPOLOGY.replace("\tGPU0\tGPU1", "\t\x1b[4mGPU0\tGPU1")
        .replace("GPU NUMA ID", "GPU NUMA ID\x1b[0m")
        .splitlines()
    )
    assert underlined == found, "nvidia-smi underlines the head of its matrix"


@pytest.mark.parametrize("text", ["", "GPU0", "GPU0 GPU1", "Failed to initialize NVML: Driver/library version mismatch", "GPU0 GPU1\nGPU0 X",
                                  "GPU0 GPU1\nGPU0 X NV9999999\nGPU1 NV9999999 X", "GPU0\nGPU0 $(reboot)", "GPU0 " * 100_000,
                                  "\n".join(["GPU0 GPU1", "GPU0 X ٣", "GPU1 ٣ X"])])  # fmt: skip
def test_what_is_no_topology_is_none(text: str) -> None:
    assert read_topology(text.splitlines()) is None


@pytest.mark.parametrize(("name", "label", "size"), [
    ("NVIDIA H100 80GB HBM3", "h100", 80), ("NVIDIA A100-SXM4-80GB", "a100", 80), ("NVIDIA A100-SXM4-40GB", "a100", 40), ("NVIDIA L40S", "l40s", 48),
    ("NVIDIA L4", "l4", 24), ("Tesla T4", "t4", 16), ("NVIDIA A10", "a10", 24), ("NVIDIA GeForce RTX 4090", "rtx-4090", 24),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000", 96)])  # fmt: skip
def test_a_driver_s_gpu_is_found_with_the_memory_that_its_name_has(
    name: str, label: str, size: int
) -> None:
    found = probe.devices_of(node(name, 4, ""))
    assert found and (found.name, found.per_node, found.memory_gib) == (label, 4, size)


def test_a_node_is_described_and_the_block_to_write_is_what_the_config_takes(
    tmp_path: Path,
) -> None:
    lines = list(probe.describe(HGX))
    assert (
        lines[0]
        == "8 x NVIDIA H100 80GB HBM3, 79.6 GiB, driver 570.86.15; each pair has 18 NVLinks"
    )
    assert lines[1] == "224 cores, 2,015 GiB of memory"
    assert lines[2].startswith("8 InfiniBand ports of 400 Gbit/s: mlx5_0, mlx5_1, mlx5_2, mlx5_5")
    assert lines[3] == "InfiniBand ports that training does not use: mlx5_3 (400 Gbit/s)", (
        "a port of storage, next to no GPU"
    )
    devices = probe.devices_of(HGX)
    assert devices == Devices("h100", 8, 80.0, "infiniband", 3200.0)
    block = probe.block(devices)
    assert (
        block
        == "fleet:\n  accelerator: {name: h100, per_node: 8, memory_gib: 80, network: infiniband, network_gbps: 3200}"
    )
    (tmp_path / "config.yaml").write_text(
        f"name: x\n{block}\n  backend: slurm\n  nodes: 4\ndata: {{name: t, sources: [stdlib]}}\n"
    )
    written, _ = load(Settings(tmp_path / "config.yaml"))
    kind = written.fleet.node_type
    assert kind and (kind.name, kind.network_gbps, kind.assumed) == ("8 x H100-80GB", 3200, False)


def test_a_fabric_is_told_by_link_layer_and_driver() -> None:
    roce = "\n".join(port(n, "Ethernet", "200 Gb/sec (4X HDR)") for n in range(4))
    efa = "\n".join(f"rdmap{n}s0 1 Unspecified 4: efa 100 Gb/sec (4X EDR)" for n in range(4))
    found = {
        name: probe.network_of(node(topology="", ports=text))
        for name, text in (("ib", NDR), ("roce", roce), ("efa", efa), ("none", ""))
    }
    assert found == {
        "ib": ("infiniband", 3600),
        "roce": ("roce", 800),
        "efa": ("efa", 400),
        "none": ("ethernet", 100),
    }
    assert probe.network_of(node(ports=NDR.replace("4: mlx5_core", "1: mlx5_core"))) == (
        "ethernet",
        100,
    ), "all are down"


@pytest.mark.parametrize("line", ["mlx5_0 1 InfiniBand 4: mlx5_core", "mlx5_0 x InfiniBand 4: mlx5_core 400 Gb/sec", "$(x) 1 InfiniBand 4: d 400 Gb/sec (4X NDR)",
                                  "mlx5_0 1 InfiniBand 4: d 99999999 Gb/sec", "mlx5_0 ١ InfiniBand 4: d 400 Gb/sec", "a,b 1 InfiniBand 4: d 400 Gb/sec"])  # fmt: skip
def test_a_port_that_is_none_is_passed_over(line: str) -> None:
    assert node(ports=line).ports == ()


def test_only_the_fastest_active_ports_are_taken() -> None:
    ports = [read_port("mlx5_0", "1", "InfiniBand", "400 Gb/sec (4X NDR)", "4: ACTIVE", "mlx5_core"), read_port("mlx5_1", "1", "InfiniBand", "400 Gb/sec (4X NDR)", "1: DOWN", "m"),
             read_port("mlx5_2", "2", "InfiniBand", "100 Gb/sec (4X EDR)", "4: ACTIVE", "m"), read_port("mlx5_3", "1", "Ethernet", "400 Gb/sec (4X NDR)", "4: ACTIVE", "m")]  # fmt: skip
    assert listed(fastest([port for port in ports if port], "infiniband")) == "mlx5_0:1"
    assert (
        listed(fastest([port for port in ports if port], "roce")) == "mlx5_3:1"
        and listed(fastest([], "roce")) == ""
    )


def test_a_node_finds_its_own_ports_and_fills_them_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (link, rate, state) in enumerate(
        [
            ("InfiniBand", "400 Gb/sec (4X NDR)", "4: ACTIVE"),
            ("Ethernet", "100 Gb/sec (4X EDR)", "4: ACTIVE"),
            ("InfiniBand", "oops", "4: ACTIVE"),
        ]
    ):
        place = tmp_path / f"mlx5_{number}/ports/1"
        place.mkdir(parents=True)
        for name, text in (("link_layer", link), ("rate", rate), ("state", state)):
            (place / name).write_text(text + "\n")
    assert [str(port) for port in ports_here(tmp_path)] == ["mlx5_0:1", "mlx5_1:1"]
    monkeypatch.setattr("trainfleet.node.entrypoint.ports_here", lambda: ports_here(tmp_path))
    monkeypatch.setattr("trainfleet.node.entrypoint.card", lambda: "ens3")
    monkeypatch.setenv(CARDS, "GLOO_SOCKET_IFNAME=* NCCL_SOCKET_IFNAME==* NCCL_IB_HCA==%infiniband")
    assert found_here() == {
        "GLOO_SOCKET_IFNAME": "ens3",
        "NCCL_SOCKET_IFNAME": "=ens3",
        "NCCL_IB_HCA": "=mlx5_0:1",
    }
    monkeypatch.setattr("trainfleet.node.entrypoint.ports_here", lambda: ())
    assert "NCCL_IB_HCA" not in found_here(), "without a port there is nothing to name"


@pytest.mark.parametrize(("facts", "words"), [
    (node("NVIDIA A100-SXM4-80GB", ports=NDR), "its GPUs are NVIDIA A100-SXM4-80GB, but the config has h100"),
    (node(ports="\n".join([*NDR.splitlines()[:6]])), "its 6 InfiniBand ports have 2400 Gbit/s in total, but the config has 3200"),
    (node(ports=NDR.replace("4: mlx5_core", "1: mlx5_core")), "it has no active InfiniBand port (mlx5_0, mlx5_1"),
    (node(ports=NDR, slices=14), "MIG splits its GPUs into 14 slices"),
    (node(ports=NDR, gpus=(Gpu("1", 20000, 0, "NVIDIA H100 80GB HBM3"),) * 8), "its GPUs have 19.5 GiB, but the config has H100-80GB"),
])  # fmt: skip
def test_where_the_config_differs_from_a_node_the_gate_is_shut(
    tmp_path: Path, facts: Facts, words: str
) -> None:
    wanted = wanted_of(config(tmp_path, OWN))
    found = list(node_checks.accelerator({Host("n1", "n1"): HGX, Host("n2", "n2"): facts}, wanted))
    assert any(
        str(finding.host) == "n2" and finding.message.startswith(words) for finding in found
    ), found
    assert not any(str(finding.host) == "n1" for finding in found)


def test_a_node_with_a_rail_down_is_named(tmp_path: Path) -> None:
    down = node(ports=NDR.replace("mlx5_7 1 InfiniBand 4:", "mlx5_7 1 InfiniBand 1:"))
    wanted = wanted_of(config(tmp_path, OWN.replace(", network_gbps: 3200", "")))
    facts = {Host("n1", "n1"): HGX, Host("n2", "n2"): HGX, Host("n3", "n3"): down}
    (found,) = node_checks.rails(facts, wanted)
    assert (
        str(found.host) == "n3"
        and found.blames_host
        and "8 InfiniBand ports are active; most nodes have 9; down: mlx5_7" in found.message
    )


def test_a_gres_of_fewer_gpus_than_the_node_has_is_no_fault(tmp_path: Path) -> None:
    wanted = wanted_of(
        config(tmp_path, "backend: slurm, nodes: 2, accelerator: 8xh100, slurm: {gres: 'gpu:4'}")
    )
    assert wanted.fleet.ranks_per_node == 4
    assert not list(
        node_checks.gpus({Host("a", "a"): node(count=4), Host("b", "b"): node(count=8)}, wanted)
    )
    (found,) = node_checks.gpus({Host("a", "a"): node(count=3)}, wanted)
    assert "3 of 4 GPUs respond" in found.message


def test_doctor_tells_what_to_write_and_stays_silent_where_that_is_there(tmp_path: Path) -> None:
    asked = "backend: slurm, nodes: 4, slurm: {gres: 'gpu:8'}"
    lines, fits = provisioning.compare(config(tmp_path, asked), {"gpu-1": HGX})
    assert (
        not fits
        and lines[0] == "the config does not describe the nodes' devices; add:"
        and "network: infiniband" in lines[-1]
    )
    assert provisioning.compare(config(tmp_path, OWN), {"n1": HGX}) == ([], True)
    lines, fits = provisioning.compare(config(tmp_path, f"{asked}, accelerator: h100"), {"n1": HGX})
    assert fits and lines[0] == "the config does not fully describe the nodes' devices; add:", (
        "the network is open"
    )
    lines, fits = provisioning.compare(
        config(tmp_path, OWN), {"n1": node("NVIDIA A100-SXM4-80GB", ports=NDR)}
    )
    assert not fits and "name: a100, per_node: 8, memory_gib: 80" in lines[-1]
    lines, fits = provisioning.compare(
        config(tmp_path, "backend: ssh, nodes: 2, hosts: [a, b], shared_folder: /s"), {"a": HGX}
    )
    assert fits and lines[-1] == "until then, ranks compute on the CPU cores", "which may be meant"
    lines, fits = provisioning.compare(
        config(tmp_path, asked), {"n1": parse("== facts\ncores=2\n== end\n")}
    )
    assert not fits and lines == ["the hosts have no known GPU, but fleet.platform is cuda"]


def test_what_no_rank_can_compute_on_is_said() -> None:
    amd = replace(node(count=0, topology=""), bus=("amd",) * 8)
    assert any(
        line.startswith(
            "8 x AMD Instinct on the PCI bus: not supported, because no platform has ROCm"
        )
        for line in probe.describe(amd)
    )
    laptop = list(probe.describe(node("NVIDIA GeForce RTX 4090 Laptop GPU", 1, "")))
    assert (
        any("not in hardware/accelerators.json" in line for line in laptop)
        and probe.devices_of(node("NVIDIA GeForce RTX 4090 Laptop GPU", 1, "")) is None
    )
    lost = replace(node(count=0, topology=""), bus=("nvidia",) * 8)
    assert any(
        "8 NVIDIA GPUs are on the PCI bus, but no driver responds" in line
        for line in probe.describe(lost)
    )


def test_numbers_that_no_gpu_has_are_trouble_and_no_traceback() -> None:
    found, trouble = read_gpus(
        [
            "570, " + "9" * 5000 + ", 0, X",
            "570, ٣, 0, X",
            "570, 81559, 0",
            "",
            "570, 1e9, 0, X",
            "570, 81559, [N/A], NVIDIA L4",
        ]
    )
    assert (
        [gpu.name for gpu in found] == ["NVIDIA L4"]
        and len(trouble) == 5
        and all(len(line) <= 160 for line in trouble)
    )


SINFO = "4|224|2063000|h100|gpu-[01-04]|gpu:h100:8(S:0-1)|h100,ib\n16|64+|515000|cpu|c[01-16]|(null)|(null)\n"


def engine(sinfo: str = SINFO, srun: Said | None = None) -> tuple[SlurmClient, list[list[str]]]:
    asked: list[list[str]] = []

    def ask(words: object, stdin: str, environment: object) -> Said:
        asked.append(list(words))  # type: ignore[call-overload]
        return (
            Said(0, sinfo, "")
            if asked[-1][0] == "sinfo"
            else srun
            or Said(1, "", "srun: error: Unable to allocate resources: Requested nodes are busy\n")
        )

    return SlurmClient(ask), asked


def test_sinfo_tells_gres_and_features_and_by_them_what_to_write(tmp_path: Path) -> None:
    slurm, (asking, asked) = config(tmp_path, "backend: slurm, nodes: 4").fleet.slurm, engine()
    lines, facts = resources.report(asking, slurm)
    assert (
        facts is None
        and lines[0]
        == "partition h100: 4 nodes (gpu-[01-04]) with gpu:h100:8(S:0-1), 224 cores, 2,015 GiB; features h100,ib"
    )
    assert lines[1] == "partition cpu: 16 nodes (c[01-16]) with no gres, 64 cores, 503 GiB"
    assert "Requested nodes are busy" in lines[2] and lines[
        -1
    ] == "  accelerator: {name: h100, per_node: 8}".join(["fleet:\n", ""])
    assert (
        "--gres=gpu:8" in asked[1]
        and "--partition=h100" in asked[1]
        and "--immediate=20" in asked[1]
    )


def test_a_free_node_is_looked_at_by_srun(tmp_path: Path) -> None:
    said = (
        "== facts\nhostname=gpu-03\ngpu=570, 81559, 0, NVIDIA H100 80GB HBM3\n"
        + "\n".join(f"port={line}" for line in NDR.splitlines())
        + "\n== end\n"
    )
    lines, facts = resources.report(
        engine(srun=Said(0, said, ""))[0], config(tmp_path, "backend: slurm, nodes: 4").fleet.slurm
    )
    assert facts and probe.devices_of(facts) == Devices("h100", 1, 80.0, "infiniband", 3600.0)
    assert "a free node, gpu-03:" in lines and any("1 x NVIDIA H100" in line for line in lines)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "|" * 9,
        "4|2|3",
        "x|2|3|a|b|gpu:8|",
        "٤|2|3|a|b|gpu:8|",
        "9" * 5000 + "|2|3|a|b|gpu:8|f",
        "\x1b[2J|1|1|a|b|c|d\n" * 5000,
    ],
)
def test_sinfo_s_answer_is_not_trusted(text: str) -> None:
    assert resources.read_nodes(text) == []
    found = resources.read_nodes(f"2|2|1000|main|n[1-2]|gpu:8|a|b|\x1b[31mred\n{text}")
    assert len(found) == 1 and found[0].features == "a|b|\\u001b[31mred", (
        "free text is last, and shown as what it is"
    )


def test_a_cluster_without_gpus_is_not_asked_for_a_node(tmp_path: Path) -> None:
    asking, asked = engine("4|2|1000|main|n[0-3]|(null)|(null)\n")
    lines, facts = resources.report(
        asking, config(tmp_path, "backend: slurm, nodes: 4").fleet.slurm
    )
    assert len(lines) == 1 and facts is None and len(asked) == 1


def test_an_srun_that_never_answers_leaves_sinfo_s_words(tmp_path: Path) -> None:
    def ask(words: object, stdin: str, environment: object) -> Said:
        if next(iter(words)) == "srun":  # type: ignore[call-overload]
            raise BackendError("srun gives no answer", next="sinfo")
        return Said(0, SINFO, "")

    lines, facts = resources.report(
        SlurmClient(ask), config(tmp_path, "backend: slurm, nodes: 4").fleet.slurm
    )
    assert facts is None and any("srun gives no answer" in line for line in lines)


def test_port_says_itself_as_nccl_takes_it() -> None:
    assert str(Port("mlx5_0", 2, "InfiniBand", 400, True, "mlx5_core")) == "mlx5_0:2"
