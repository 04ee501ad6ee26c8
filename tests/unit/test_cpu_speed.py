"""The speed of this machine's CPUs: what it measures is true, it is measured once, and what follows from it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from trainfleet.config import Settings, load
from trainfleet.config.limits import format_of
from trainfleet.devices import cpu
from trainfleet.devices.cpu import Cpu
from trainfleet.hardware import cpu_speed, node_types
from trainfleet.hardware.cpu_speed import CpuSpeed
from trainfleet.recipes import FOLDER

AMD = CpuSpeed(
    "AMD EPYC", "2.13.0+cpu", 2, fp32=95e9, onednn=205e9, bf16=405e9, together=810e9, apart=800e9
)
INTEL = CpuSpeed(
    "Xeon, AVX-512 alone",
    "2.13.0+cpu",
    2,
    fp32=95e9,
    onednn=98e9,
    bf16=30e9,
    together=180e9,
    apart=260e9,
)
Use = Callable[[CpuSpeed], None]


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Has this process go by a given speed; afterwards the library of fp32 products is what it was."""

    def use(told: CpuSpeed) -> None:
        monkeypatch.setenv(cpu_speed.FILE, str(tmp_path / f"{told.cpu}.json"))
        Path(tmp_path / f"{told.cpu}.json").write_text(json.dumps(asdict(told)))

    yield use
    cpu.by_onednn(False)


def test_a_trial_takes_what_is_clearly_faster() -> None:
    assert (AMD.by_onednn, AMD.half, AMD.is_apart, AMD.rate("fp32")) == (True, True, False, 205e9)
    assert (INTEL.by_onednn, INTEL.half, INTEL.is_apart, INTEL.rate("fp32")) == (
        False,
        False,
        True,
        95e9,
    )
    assert not replace(AMD, bf16=225e9).half, "a gain of a tenth in products is lost by casting"


@pytest.mark.thorough
def test_the_trial_of_this_machine_is_of_this_machine() -> None:
    found = cpu_speed.measure()
    assert cpu_speed.identity(found) == cpu_speed.here()
    assert all(1e8 < rate < 1e15 for rate in (found.fp32, found.bf16)) and found.onednn >= 0
    assert (found.together > 0) == (found.apart > 0)


def test_onednn_counts_only_where_its_numbers_are_those_of_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = cpu.is_exact()
    cpu.by_onednn(True)
    x, weight, _ = cpu.batch(torch.float32)[0]
    error = float((x @ weight.T - x.double() @ weight.double().T).norm() / (x @ weight.T).norm())
    cpu.by_onednn(False)
    assert (error < 1e-5) == exact
    monkeypatch.setattr(cpu, "error_of", lambda *given: 1e-3)
    assert not cpu.is_exact()


def test_it_is_taken_once_for_a_cpu_and_a_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[CpuSpeed] = []

    def take() -> CpuSpeed:
        taken.append(replace(AMD, cpu="mine", torch=version))
        return taken[-1]

    version = "2.13"
    monkeypatch.delenv(cpu_speed.FILE)
    monkeypatch.setattr(cpu_speed, "cache_path", lambda: tmp_path / "trial.json")
    monkeypatch.setattr(cpu_speed, "here", lambda: ("mine", version, 2))
    monkeypatch.setattr(cpu_speed, "measure", take)
    for expected in (1, 1):
        cpu_speed._taken.cache_clear()
        assert cpu_speed.of_this_machine() == taken[0] and len(taken) == expected
    version = "2.14"
    cpu_speed._taken.cache_clear()
    assert cpu_speed.of_this_machine().torch == "2.14" and len(taken) == 2
    (tmp_path / "trial.json").write_text('{"cpu": 1}')
    cpu_speed._taken.cache_clear()
    assert cpu_speed.of_this_machine().torch == "2.14" and len(taken) == 3, (
        "a damaged cache is replaced"
    )
    cpu_speed._taken.cache_clear()


@pytest.mark.parametrize(("told", "format", "ranks"), [(AMD, "bf16", 1), (INTEL, "fp32", 2)])
def test_format_and_ranks_follow_from_it_and_are_shown(
    use: Use, monkeypatch: pytest.MonkeyPatch, told: CpuSpeed, format: str, ranks: int
) -> None:
    use(told)
    monkeypatch.setattr(node_types, "local_accelerators", lambda: 0)
    monkeypatch.setattr(node_types, "local_cores", lambda: 2)
    from trainfleet.backends import terms_of

    config, derived = load(Settings(FOLDER / "first-run.yaml", "fleet.nodes=1"), terms_of)
    assert (format_of(config), config.fleet.ranks_per_node, config.train.precision) == (
        format,
        ranks,
        "auto",
    )
    why = {each.key: (each.value, each.why) for each in derived}
    assert why["train.precision"] == (format, told.formats()) and why["fleet.ranks_per_node"] == (
        ranks,
        told.processes(),
    )


def test_a_cpu_computes_by_the_trial(use: Use) -> None:
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    use(AMD)
    (device := Cpu()).start()
    assert (device.native_bf16, matmul.fp32_precision) == (True, "bf16")
    assert device.peak_flops(torch.bfloat16) == 405e9 * torch.get_num_threads()
    use(INTEL)
    (device := Cpu()).start()
    assert (device.native_bf16, matmul.fp32_precision) == (False, "ieee")
