"""Machines that are no EC2 type (fleet.accelerator): what they are called, what is planned for them, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainfleet.backends import backend_of, terms_of, terms_to_examine
from trainfleet.config import Config, Settings, load
from trainfleet.config.owned_machines import Gpus, expand, gpus_of
from trainfleet.config.speed_inputs import as_device
from trainfleet.hardware import node_types
from trainfleet.hardware.accelerators import (
    ACCELERATORS,
    NAMES,
    NVIDIA,
    find_accelerator,
    unsupported,
)
from trainfleet.plan.estimate import Bill, Estimate, estimate
from trainfleet.plan.fabric_environment import (
    fabric_environment,
    fabric_settings,
    judge_nccl,
    least_bandwidth,
)
from trainfleet.plan.job import train_job
from trainfleet.plan.plan import make_plan
from trainfleet.trust.errors import ConfigError

ROOT = Path(__file__).parents[2]
REST = """
data: {name: text, sources: [stdlib], tokenizer: bpe, vocab_size: 32000}
model: {preset: llama-3.2-1b}
train: {steps: 10000, global_batch_size: 256, sequence_length: 4096, seed: 1, learning_rate: 3e-4, parallelism: auto}
"""
PATH_B = "backend: slurm, nodes: 4, platform: cuda, ranks_per_node: 8, slurm: {gres: 'gpu:8'}"  # a user's, word for word
IB = "accelerator: {name: h100, per_node: 8, network: infiniband}"


@pytest.fixture(autouse=True)
def no_device_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_types, "local_accelerators", lambda: 0)
    monkeypatch.setattr(node_types, "local_accelerator", lambda: None)


def config(folder: Path, fleet: str, set: str = "") -> Config:
    (folder / "config.yaml").write_text(f"name: x\nfleet: {{{fleet}}}\n{REST}")
    return load(Settings(folder / "config.yaml", set), terms_of)[0]


def refused(folder: Path, fleet: str, set: str = "") -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        config(folder, fleet, set)
    return {problem.key: problem.message for problem in error.value.problems}


def foretold(config: Config) -> Estimate:
    return estimate(config, Bill(0.0))


def test_gpus_of_which_nobody_has_told_are_refused_and_not_planned_as_cpus(tmp_path: Path) -> None:
    found = refused(tmp_path, PATH_B)
    assert list(found) == ["fleet.accelerator"], found
    for word in (
        "fleet.slurm.gres gpu:8",
        "fleet.accelerator: 8xh100",
        "a100",
        "rtx-4090",
        "fleet.instance_type",
        "make doctor",
    ):
        assert word in found["fleet.accelerator"], word
    for fleet in (
        "backend: slurm, nodes: 4, slurm: {gres: 'gpu:8'}",
        "backend: ssh, nodes: 2, shared_folder: /s, platform: cuda",
    ):
        assert "fleet.accelerator" in refused(tmp_path, fleet), fleet
    assert "fleet.instance_type" in refused(tmp_path, "backend: slurm, nodes: 4, platform: neuron")
    (tmp_path / "config.yaml").write_text(f"name: x\nfleet: {{{PATH_B}}}\n{REST}")
    assert load(Settings(tmp_path / "config.yaml"), terms_to_examine)[0].fleet.device == "cuda", (
        "make doctor is to find it out"
    )


def test_with_it_days_micro_batch_and_layouts_are_those_of_such_nodes(tmp_path: Path) -> None:
    own, aws = (
        config(tmp_path, f"{PATH_B}, {IB}"),
        config(tmp_path, "backend: slurm, nodes: 4, instance_type: p5.48xlarge"),
    )
    assert own.train.micro_batch_size > 1 and own.train == aws.train, (
        "the same nodes, but for what they are called"
    )
    found = foretold(own)
    assert found.seconds == pytest.approx(foretold(aws).seconds) and found.seconds < 86400 / 4, (
        "10,964 days as CPUs"
    )
    assert found.usable and found.memory.total < found.usable == pytest.approx(0.9 * 79.2 * 2**30)
    assert (
        config(tmp_path, f"backend: slurm, nodes: 4, {IB}, slurm: {{gres: 'gpu:4'}}").world_size
        == 16
    ), "what Slurm gives counts"


def test_a_typed_gres_says_it_all_but_the_network(tmp_path: Path) -> None:
    found = config(
        tmp_path, "backend: slurm, nodes: 4, slurm: {gres: 'gpu:nvidia_h100_80gb_hbm3:8'}"
    )
    assert (
        found.fleet.node_type
        and found.fleet.node_type.name == "8 x H100-80GB"
        and found.fleet.platform == "cuda"
    )
    assert (
        found.fleet.ranks_per_node,
        found.fleet.node_type.fabric,
        found.fleet.node_type.network_gbps,
    ) == (8, "", 100)


@pytest.mark.parametrize(("words", "keys"), [
    ("h100", {"name": "h100"}), ("8xH100", {"name": "H100", "per_node": 8}), ("2 x rtx 4090", {"name": "rtx 4090", "per_node": 2}),
    ("4090", {"name": "4090"}), ("", {"name": ""}), ("8x", {"name": "8x"})])  # fmt: skip
def test_the_short_form(words: str, keys: dict[str, object]) -> None:
    assert expand(words) == keys


@pytest.mark.parametrize(("gres", "gpus"), [
    ("gpu:8", Gpus("", 8)), ("gpu", Gpus("", 1)), ("gpu:h100:8", Gpus("h100", 8)), ("gpu:a100", Gpus("a100", 1)),
    ("gpu:h100:8(S:0-1),nvme:1", Gpus("h100", 8)), ("gpu:a:2,gpu:b:3", Gpus("a", 5)), ("nvme:1", None), ("", None), (None, None), ("gpu:8:8:8", None)])  # fmt: skip
def test_the_gpus_of_a_gres(gres: str | None, gpus: Gpus | None) -> None:
    assert gpus_of(gres) == gpus


def test_short_and_long_form_are_one_and_set_changes_a_part(tmp_path: Path) -> None:
    base = "backend: slurm, nodes: 4"
    assert (
        config(tmp_path, f"{base}, accelerator: 8xh100").fleet
        == config(tmp_path, f"{base}, accelerator: {{name: h100, per_node: 8}}").fleet
    )
    changed = config(
        tmp_path,
        f"{base}, accelerator: 8xh100",
        "fleet.accelerator.network=roce fleet.accelerator.network_gbps=1600",
    ).fleet.node_type
    assert changed and (
        changed.fabric,
        changed.network_gbps,
        changed.assumed,
        changed.accelerators,
    ) == ("roce", 1600, False, 8)
    assert (
        config(
            tmp_path, base, "fleet.accelerator=4xa100 fleet.accelerator.memory_gib=80"
        ).fleet.node_type.name
        == "4 x A100-80GB"
    )  # type: ignore[union-attr]
    assert config(tmp_path, f"{base}, accelerator: a100").fleet.node_type.name == "8 x A100-40GB", (
        "the lesser, and said"
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(("accelerator", "key", "words"), [
    ("h1000", "fleet.accelerator.name", "did you mean h100?"), ("rtx-409", "fleet.accelerator.name", "did you mean rtx-4090?"),
    ("MI300X", "fleet.accelerator.name", "is not supported, because no platform has ROCm"), ("gaudi3", "fleet.accelerator.name", "is not supported, because no platform has Intel's software"),
    ("P100", "fleet.accelerator.name", "older than Volta"), ("trainium2", "fleet.accelerator.name", "set fleet.instance_type"),
    ("p5.48xlarge", "fleet.accelerator.name", "fleet.instance_type: p5.48xlarge"), ("'NVIDIA GeForce RTX 4090 Laptop GPU'", "fleet.accelerator.name", "not in the table"),
    ("{per_node: 8}", "fleet.accelerator.name", "set the accelerator"), ("{name: h100, memory_gib: 8}", "fleet.accelerator.memory_gib", "h100 has 80"),
    ("{name: h100, network: infinband}", "fleet.accelerator.network", "did you mean infiniband?"), ("{name: h100, gpus: 8}", "fleet.accelerator.gpus", "unknown key"),
    ("0xh100", "fleet.accelerator.per_node", "at least 1"), ("[h100]", "fleet.accelerator", "must be a group of keys or text"),
    ("{name: h100, network_gbps: 1e9}", "fleet.accelerator.network_gbps", "at most 100000"), ("true", "fleet.accelerator", "must be")])  # fmt: skip
def test_what_is_no_accelerator_gets_one_message_with_what_fits(
    tmp_path: Path, accelerator: str, key: str, words: str
) -> None:
    found = refused(tmp_path, f"backend: slurm, nodes: 4, accelerator: {accelerator}")
    assert list(found) == [key] and words in found[key], found


def test_an_instance_type_that_is_an_accelerator_proposes_the_key(tmp_path: Path) -> None:
    for name, words in {"h100": "fleet.accelerator: h100; on EC2: p5.4xlarge, p5.48xlarge", "8xH100": "fleet.accelerator: 8xh100", "rtx4090": "fleet.accelerator: rtx-4090",
                        "mi300x": "no platform has ROCm", "p5.48xlrge": "did you mean p5.48xlarge?"}.items():  # fmt: skip
        found = refused(tmp_path, f"backend: slurm, nodes: 4, instance_type: {name}")
        assert (
            words in found["fleet.instance_type"] and "trn1" not in found["fleet.instance_type"]
        ), found


def test_both_may_be_given_where_they_agree_and_differing_ones_are_refused(tmp_path: Path) -> None:
    p5 = "backend: slurm, nodes: 4, instance_type: p5.48xlarge"
    same = config(
        tmp_path,
        f"{p5}, accelerator: {{name: h100, per_node: 8, memory_gib: 80, network: efa, network_gbps: 3200, usd_per_hour: 20}}",
    )
    assert same.fleet.node_type is node_types.INSTANCE_TYPES["p5.48xlarge"] and backend_of(
        same
    ).bill() == Bill(20)
    for part, theirs in {
        "name: a100": "h100",
        "name: h100, per_node: 4": "8",
        "name: h100, network: infiniband": "efa",
        "name: h100, network_gbps: 400": "3200",
    }.items():
        found = refused(tmp_path, f"{p5}, accelerator: {{{part}}}")
        (message,) = found.values()
        assert f"p5.48xlarge has {theirs}; remove fleet.accelerator or" in message, found


def test_ranks_and_stack_are_held_to_the_devices(tmp_path: Path) -> None:
    assert (
        "two ranks can't share one"
        in refused(tmp_path, "backend: slurm, nodes: 2, ranks_per_node: 16, accelerator: 8xh100")[
            "fleet.ranks_per_node"
        ]
    )
    assert (
        "gives each node 4 GPUs"
        in refused(
            tmp_path,
            "backend: slurm, nodes: 2, ranks_per_node: 8, accelerator: 8xh100, slurm: {gres: 'gpu:4'}",
        )["fleet.ranks_per_node"]
    )
    for gres in ("gpu:a100:8", "gpu:16"):
        said = refused(
            tmp_path, f"backend: slurm, nodes: 2, accelerator: 8xh100, slurm: {{gres: '{gres}'}}"
        )
        assert f"{gres} contradicts fleet.accelerator (8 x h100)" in said["fleet.slurm.gres"]
    for gres in ("gpu:h100:8", "gpu:big:8", "gpu:nvidia_h100_80gb_hbm3:8"):
        config(
            tmp_path,
            f"backend: slurm, nodes: 2, accelerator: 8xh100-nvl, slurm: {{gres: '{gres}'}}",
        )
    assert (
        config(tmp_path, "backend: slurm, nodes: 2, accelerator: 8xv100").fleet.platform
        == "cuda-volta"
    )
    assert (
        "use cuda-volta"
        in refused(tmp_path, "backend: slurm, nodes: 2, platform: cuda, accelerator: 8xv100")[
            "fleet.platform"
        ]
    )
    assert (
        "has no fp8 instructions"
        in refused(
            tmp_path, "backend: slurm, nodes: 2, accelerator: 8xa100", "train.precision=fp8"
        )["train.precision"]
    )
    assert (
        config(
            tmp_path,
            "backend: slurm, nodes: 2, accelerator: 8xl40s",
            "train.precision=fp8 train.parallelism.tensor=1",
        ).train.precision
        == "fp8"
    )


def test_this_machine_is_what_its_driver_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        "this machine's drivers report no accelerator"
        in refused(tmp_path, "backend: local, nodes: 1, accelerator: h100")["fleet.accelerator"]
    )
    monkeypatch.setattr(node_types, "local_accelerators", lambda: 2)
    monkeypatch.setattr(
        node_types, "local_accelerator", lambda: find_accelerator("NVIDIA GeForce RTX 4090")
    )
    found = config(
        tmp_path,
        "backend: local, nodes: 2, accelerator: rtx-4090",
        "train.sequence_length=512 model.preset=tiny",
    ).fleet
    assert (found.accelerator.per_node, found.ranks_per_node, found.platform) == (2, 1, "cuda")  # type: ignore[union-attr]
    assert (
        "this machine has rtx-4090"
        in refused(tmp_path, "backend: local, nodes: 1, accelerator: 2xh100")[
            "fleet.accelerator.name"
        ]
    )
    assert (
        "this machine has 2"
        in refused(tmp_path, "backend: local, nodes: 1, accelerator: 4xrtx-4090")[
            "fleet.accelerator.per_node"
        ]
    )


def test_own_machines_cost_nothing_until_their_price_is_given(tmp_path: Path) -> None:
    free = config(tmp_path, f"{PATH_B}, {IB}")
    assert backend_of(free).bill() == Bill(0) and foretold(free).usd == 0
    with pytest.raises(ConfigError, match=re.escape("fleet.accelerator.usd_per_hour")):
        make_plan(config(tmp_path, f"{PATH_B}, {IB}", "budget.max_usd=100"), [], [], [], Bill(0.0))
    paid = config(
        tmp_path, f"{PATH_B}, {IB}", "fleet.accelerator.usd_per_hour=20 budget.max_usd=1000"
    )
    bill = backend_of(paid).bill()
    assert bill == Bill(20) and make_plan(paid, [], [], [], bill).estimate.usd == pytest.approx(
        20 * 4 * foretold(paid).elapsed / 3600
    )  # type: ignore[operator]


def own(network: str | None, gbps: float | None = None, name: str = "h100") -> node_types.NodeType:
    found = node_types.own_machine(name, 8, None, network, gbps, None)
    assert found
    return found


def test_the_variables_follow_the_fabric_and_not_a_name() -> None:
    infiniband = fabric_environment(own("infiniband"), "ens3", "mlx5_0:1,mlx5_1:1")
    assert infiniband == {
        "GLOO_SOCKET_IFNAME": "ens3",
        "NCCL_SOCKET_IFNAME": "=ens3",
        "NCCL_NET": "IB",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
    }
    left = {
        setting.name: setting.why
        for setting in fabric_settings(own("roce"), "ens3")
        if setting.value is None
    }
    assert {"FI_PROVIDER", "NCCL_IB_GID_INDEX"} <= left.keys() and all(left.values())
    assert fabric_environment(own("ethernet"), "ens3")["NCCL_IB_DISABLE"] == "1"
    assert fabric_environment(own(None), "ens3") == {
        "GLOO_SOCKET_IFNAME": "ens3",
        "NCCL_SOCKET_IFNAME": "=ens3",
    }
    assert fabric_environment(own("efa"), "ens3")["FI_PROVIDER"] == "efa"
    assert fabric_environment(own("infiniband"), "ens3", alone=True).keys() == {
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    }
    assert all(
        "FI_PROVIDER" not in fabric_environment(own(fabric), "x")
        for fabric in ("infiniband", "roce", "ethernet", None)
    )


def test_a_slurm_job_leaves_cards_and_ports_to_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = config(tmp_path, f"backend: slurm, nodes: 4, shared_folder: /s, {IB}")
    script = backend_of(found).plan(train_job(found), {}).artifacts[0].text
    assert (
        "export TRAINFLEET_CARDS='GLOO_SOCKET_IFNAME=* NCCL_SOCKET_IFNAME==* NCCL_IB_HCA==%infiniband'"
        in script
    )
    assert "export NCCL_NET=IB" in script and "FI_PROVIDER" not in script


def test_nobody_is_held_to_a_rate_that_nobody_has_said() -> None:
    assert (
        least_bandwidth(own("infiniband")) is None
        and least_bandwidth(own("ethernet", 100)) is None
        and least_bandwidth(own(None, 100)) is None
    )
    assert (
        least_bandwidth(own("infiniband", 3200))
        == pytest.approx(0.6 * 400)
        == least_bandwidth(node_types.instance("p5.48xlarge"))
    )


# NCCL's own lines, github.com/NVIDIA/nccl/issues/1519 and 1866
IB_LOG = """n:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ens3:10.0.0.1<0>
n:1:1 [0] NCCL INFO Using network IB
n:1:1 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
"""


@pytest.mark.parametrize(("log", "network", "wrong"), [
    (IB_LOG, "infiniband", []), (IB_LOG.replace("/IB [", "/RoCE [").replace("/IB [RO]", "/RoCE [RO]"), "roce", []),
    (IB_LOG.replace("/IB [", "/RoCE ["), "infiniband", ["NCCL uses RoCE, not InfiniBand"]), (IB_LOG.replace("/GDRDMA", ""), "infiniband", ["GPUDirect is off"]),
    ("x NCCL INFO NET/IB : No device found.\nx NCCL INFO NET/Socket : Using [0]ens3:10.0.0.1<0>\nx NCCL INFO Using network Socket", "infiniband", ["NCCL did not choose InfiniBand: NCCL INFO NET/Socket"]),
    ("x NCCL INFO Using network Socket", "ethernet", []), ("", "roce", ["NCCL printed nothing"])])  # fmt: skip
def test_nccl_s_words_are_held_against_the_fabric(log: str, network: str, wrong: list[str]) -> None:
    found = judge_nccl(log.splitlines(), own(network))
    assert len(found) == len(wrong) and all(
        line.startswith(start) for line, start in zip(found, wrong, strict=True)
    ), found


def test_every_row_has_its_figures_and_their_source() -> None:
    for row in ACCELERATORS:
        assert re.search(r", 20[12][0-9]-[01][0-9]$", row.source), f"{row.name}: {row.source}"
        assert (
            row.memory_gib
            and row.bandwidth >= 0.3e12
            and row.fp32 > 5e12
            and row.peak(row.half) >= row.fp32
        ), row.name
        assert 0.3 <= row.efficiency <= 0.8 and 0.2 <= row.attention <= 0.6, row.name
    for row in NVIDIA:
        assert 0.85 < row.memory_gib / row.size < 1.01, (
            f"{row.name}: what torch reports is less than the name says"
        )
        assert find_accelerator(row.name) is row and find_accelerator(row.label) in [
            each for each in NVIDIA if each.words == row.words
        ]
        assert bool(row.links) == (row.neighbours > 16e9), row.name
    assert len({row.name for row in NVIDIA}) == len(NVIDIA)
    assert {
        "a100",
        "h100",
        "h200",
        "b200",
        "gb200",
        "l40s",
        "l4",
        "a10g",
        "v100",
        "t4",
        "rtx-3090",
        "rtx-4090",
        "rtx-5090",
        "rtx-6000-ada",
        "rtx-pro-6000",
    } <= set(NAMES)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "Quadro RTX 6000", "NVIDIA RTX 6000D", "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
                                  "Tesla V100S-PCIE-32GB", "NVIDIA A100-SXM-64GB", "NVIDIA H100 20c", "x" * 100_000, "", "\x00", "h100\nrm"])  # fmt: skip
def test_what_is_like_a_device_is_not_taken_for_it(name: str) -> None:
    assert find_accelerator(name) is None


@pytest.mark.parametrize(("name", "row"), [
    ("rtx4090", "RTX-4090-24GB"), ("4090", "RTX-4090-24GB"), ("A6000", "RTX-A6000-48GB"), ("rtx6000ada", "RTX-6000-Ada-48GB"), ("a100_80gb", "A100-80GB"),
    ("nvidia_a100-sxm4-40gb", "A100-40GB"), ("H100-NVL", "H100-NVL-94GB"), ("NVIDIA H100 PCIe", "H100-PCIe-80GB"), ("NVIDIA GH200 480GB", "GH200-96GB"),
    ("NVIDIA GB200", "GB200-186GB"), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-96GB")])  # fmt: skip
def test_people_drivers_and_clusters_call_one_device_by_many_names(name: str, row: str) -> None:
    found = find_accelerator(name)
    assert found and found.name == row and not unsupported(name)


def test_another_size_of_memory_is_taken_at_its_word(tmp_path: Path) -> None:
    found = config(
        tmp_path, "backend: slurm, nodes: 4, accelerator: {name: h100, memory_gib: 96}"
    ).fleet.rank_device
    assert found and found.name == "H100-96GB" and found.memory_gib == pytest.approx(95.04)


def test_a_rack_is_joined_beyond_a_node(tmp_path: Path) -> None:
    found = config(tmp_path, "backend: slurm, nodes: 16, accelerator: gb200")
    device = found.fleet.rank_device
    assert found.world_size == 64 and device and as_device(found, device).joined == 72


def test_what_is_built_for_other_processors_is_refused(tmp_path: Path) -> None:
    hosts = "backend: ssh, nodes: 2, hosts: [a, b], shared_folder: /s, accelerator: gb200"
    assert "nodes have ARM CPUs" in refused(tmp_path, hosts)["fleet.python"]
    assert config(tmp_path, f"{hosts}, python: /opt/torch/bin/python").world_size == 8
    assert (
        "nodes have ARM CPUs"
        in refused(
            tmp_path,
            "backend: slurm, nodes: 2, accelerator: gh200, container: build, slurm: {container_runtime: pyxis}",
        )["fleet.container"]
    )


def test_plan_says_in_words_what_is_reckoned_with(tmp_path: Path) -> None:
    """As a user types it, with the reviewer's own lines."""
    (tmp_path / "config.yaml").write_text(f"name: x\nfleet: {{{PATH_B}}}\n{REST}")
    words, env = (
        [sys.executable, "-m", "trainfleet", "plan"],
        {**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )
    said = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (
        said.returncode == 2
        and "config.yaml:2: fleet.accelerator: null" in said.stderr
        and "make doctor" in said.stderr
    ), said
    told = subprocess.run(
        [*words, f"SET=fleet.accelerator={IB.partition(': ')[2]}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    for part in ("4 nodes x 8 ranks (8 x H100-80GB)", "NVIDIA data sheet H100, 2023-04", "infiniband between nodes: 3,200 Gbit/s each, the usual rate",
                 "fleet.accelerator.network_gbps", "NCCL_IB_HCA", "layouts, fastest first", "$0: your own machines"):  # fmt: skip
        assert part in " ".join(told.split()), told
    assert "on CPUs" not in told and re.search(r"about \d h \d+ min", told)
