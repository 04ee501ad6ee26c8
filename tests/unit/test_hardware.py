"""The table of hardware: devices are found by what drivers call them, and its figures are in keeping with one another."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trainfleet.config import platforms
from trainfleet.devices import KINDS
from trainfleet.hardware import accelerators, node_types
from trainfleet.hardware.accelerators import ACCELERATORS, find_accelerator
from trainfleet.hardware.node_types import INSTANCE_TYPES
from trainfleet.recipes import FOLDER


@pytest.mark.parametrize(
    ("name", "memory_gib", "row"),
    [
        ("NVIDIA H200", None, "H200-141GB"),
        ("NVIDIA H100 80GB HBM3", None, "H100-80GB"),
        ("NVIDIA A100-SXM4-80GB", None, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", None, "A100-40GB"),
        ("NVIDIA A100", 79.2, "A100-80GB"),
        (
            "NVIDIA A100",
            None,
            "A100-40GB",
        ),  # of which the name says too little: the one that less fits
        ("Tesla V100-SXM2-32GB", None, "V100-32GB"),
        ("NVIDIA L40S", None, "L40S-48GB"),
        ("NVIDIA L4", None, "L4-24GB"),
        ("NVIDIA B200", None, "B200-180GB"),
    ],
)
def test_a_device_is_found_by_its_driver_s_name(
    name: str, memory_gib: float | None, row: str
) -> None:
    found = find_accelerator(name, int(memory_gib * 2**30) if memory_gib else None)
    assert found and found.name == row


def test_an_unknown_device_is_not_taken_for_another() -> None:
    assert node_types.instance("t3.micro") is None


def test_products_have_the_peak_of_their_format() -> None:
    assert (
        accelerators.BY_NAME["V100-32GB"].peak("bf16")
        == accelerators.BY_NAME["V100-32GB"].peak("fp32")
        == 15.7e12
    )  # it has no bf16
    assert accelerators.BY_NAME["V100-32GB"].peak("fp16") == 125e12 and accelerators.BY_NAME[
        "H100-80GB"
    ].peak("fp16") == accelerators.BY_NAME["H100-80GB"].peak("bf16")
    assert [
        row.half
        for row in (
            accelerators.BY_NAME["V100-32GB"],
            accelerators.BY_NAME["H100-80GB"],
            accelerators.BY_NAME["NeuronCore-v3 x2"],
        )
    ] == ["fp16", "bf16", "bf16"]
    assert (
        accelerators.BY_NAME["H100-80GB"].peak("bf16") == 989.4e12
        and accelerators.BY_NAME["H100-80GB"].peak("fp32") == 494.7e12
    )  # TF32
    assert accelerators.BY_NAME["H100-80GB"].peak("fp8") == 1978.9e12 and all(
        row.fp8 / row.peak("bf16") == pytest.approx(2, rel=0.02) for row in ACCELERATORS if row.fp8
    )
    assert all(row.fp32 <= row.peak("bf16") for row in ACCELERATORS)


def test_every_platform_has_a_device() -> None:
    lock = yaml.safe_load((FOLDER.parents[2] / "docker/platforms.lock.yaml").read_text())
    assert {node_types.device_of(platform) for platform in lock["platforms"]} == {
        *KINDS,
        *platforms.devices(),
    }


@pytest.mark.parametrize(
    ("said", "row", "ranks"),
    [
        ("Trn1\n", accelerators.BY_NAME["NeuronCore-v2"], 32),
        ("trn2.48xlarge\n", accelerators.BY_NAME["NeuronCore-v3 x2"], 64),
    ],
)
def test_neuron_cores_of_this_machine_are_counted(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    said: str,
    row: accelerators.Accelerator,
    ranks: int,
) -> None:
    (place := tmp_path / "neuron0/info/architecture").mkdir(parents=True)
    (place / "instance_type").write_text(said)
    monkeypatch.setattr(node_types, "NEURON_DEVICES", tmp_path)
    node_types.local_chip.cache_clear()
    assert node_types.local_chip()[0] is row and 16 * node_types.local_chip()[1] == ranks
    node_types.local_chip.cache_clear()


def test_figures_agree_with_one_another() -> None:
    for row in INSTANCE_TYPES.values():
        assert (row.accelerator is None) == (row.accelerators == 0), row.name
        assert row.efa == 0 or row.network_gbps / row.efa in (50, 100, 200, 400), (
            row.name
        )  # Gbit/s of one EFA interface
        assert row.usd_per_hour is None or 0.2 < row.usd_per_hour < 200, row.name
