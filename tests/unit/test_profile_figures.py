"""Profiles and scaling: the arithmetic of times that overlap, the sizes of a job, and what is shown of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType

from trainfleet.backends import shared
from trainfleet.config import Settings, load
from trainfleet.devices.cpu import Cpu
from trainfleet.devices.cuda import Cuda
from trainfleet.devices.neuron import Neuron
from trainfleet.engine.timing import Stopwatch, merge, summarize
from trainfleet.health.heartbeat_format import Beat
from trainfleet.health.watchdog import is_slow
from trainfleet.launch.command import sized
from trainfleet.plan.measurement import counts_of, measured, measures_of, steady
from trainfleet.report import measurements
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import ConfigError
from trainfleet_nxd.device import NeuronXla

CONFIG = """
name: base
data: {vocab_size: 400}
fleet: {nodes: 4}
train: {steps: 500, global_batch_size: 8, sequence_length: 64}
"""


def event(name: str, begin: float, end: float, device: object = DeviceType.CPU) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=device,
        time_range=SimpleNamespace(start=begin, end=end),
        self_cpu_time_total=end - begin,
    )


def test_a_collective_is_hidden_while_something_is_computed() -> None:
    found = summarize(
        [event("forward", 0, 400), event("backward", 400, 1000), event("aten::mm", 0, 300), event("aten::mm", 500, 700), event("gloo:all_reduce", 600, 900)]
    )  # fmt: skip
    assert found["seconds"] == pytest.approx(1000e-6) and found["parts"] == pytest.approx(
        {"forward": 400e-6, "backward": 600e-6}
    )
    assert found["communication"] == pytest.approx({"seconds": 300e-6, "not_hidden": 200e-6})
    assert found["top"][0] == {"name": "aten::mm", "seconds": pytest.approx(500e-6), "calls": 2}


def test_where_a_device_works_its_kernels_count_and_not_the_host() -> None:
    gpu = DeviceType.CUDA
    events = [event("forward", 0, 500), event("aten::mm", 0, 500), event("gemm", 100, 300, gpu), event("ncclDevKernel_AllReduce", 250, 450, gpu)]  # fmt: skip
    found = summarize(events)
    assert found["communication"] == pytest.approx({"seconds": 200e-6, "not_hidden": 150e-6})
    assert {row["name"] for row in found["top"]} == {"gemm", "ncclDevKernel_AllReduce"}
    assert merge([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]


def test_products_and_attention_are_summed_outside_of_the_optimizer() -> None:
    """Muon's products are the optimizer's time. The names are kernels of cuBLAS, CUTLASS, cuDNN and FlashAttention."""
    gpu = DeviceType.CUDA
    named = [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN", 10),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", 20),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", 40),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", 100),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", 200),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", 400),
        ("void at::native::vectorized_elementwise_kernel<4>", 1000),
    ]
    events = [event(name, 0, length, gpu) for name, length in named]
    events += [event("optimizer", 5000, 6000, gpu), event("gemm", 5100, 5900, gpu)]
    assert summarize(events)["kinds"] == pytest.approx({"attention": 700e-6, "products": 70e-6})
    host = [event("aten::mm", 0, 7), event("aten::addmm", 0, 5), event("aten::add", 0, 3)]
    host += [event("aten::_scaled_dot_product_flash_attention_for_cpu", 0, 11)]
    host += [event("optimizer", 100, 200), event("aten::baddbmm", 110, 150)]
    assert summarize(host)["kinds"] == pytest.approx({"attention": 11e-6, "products": 12e-6})


def test_parts_are_timed_in_sampled_steps_only_and_on_the_device_s_clock() -> None:
    ticks = map(float, range(100))
    watch = Stopwatch(0.0, clock=lambda: next(ticks))
    for sampled, parts in ((False, {}), (True, {"data": 3.0, "forward": 2.0, "backward": 1.0})):
        watch.begin(1, sampled=sampled)
        for _ in watch.fetch(iter((1, 2))):  # two batches, and the end of them
            with watch.own_work():
                pass
        with watch.part("backward"):
            pass
        assert watch.parts() == parts


def test_what_backward_waits_for_when_all_is_computed_is_communication() -> None:
    now = [0.0]
    first, watch = (
        nn.Linear(2, 2),
        Stopwatch(0.0, clock=lambda: now[0]),
    )
    watch.hear(first)

    def advance(seconds: float) -> Callable[[torch.Tensor], None]:
        return lambda gradient: now.__setitem__(0, now[0] + seconds)

    for sampled, parts in (
        (True, {"forward": 0.0, "backward": 2.0, "communication": 3.0}),
        (False, {}),
    ):
        watch.begin(1, sampled=sampled)
        with watch.own_work():
            features = first(torch.ones(1, 2))
            loss = (features * 2).sum()
        loss.register_hook(
            advance(2.0)
        )  # the blocks' gradients take 2 s, and what comes after the first module's output 3 s
        with watch.part("backward"):
            loss.backward()
            now[0] += 3.0
        assert watch.parts() == parts


class Queue:
    """A device that the host only gives work to: it is done later, one after the other, and its clock is not the host's."""

    def __init__(self) -> None:
        self.until = 0.0  # when all that was given so far will be done

    def work(self, seconds: float) -> None:
        self.until += seconds

    def clock(self) -> float:
        return self.until


class Takes(nn.Module):
    """A block that takes the device so many seconds, after weights that it waits for as long as others take."""

    def __init__(self, queue: Queue, seconds: float, waits: float) -> None:
        super().__init__()
        self.queue, self.seconds = queue, seconds
        self.register_forward_pre_hook(lambda *_: queue.work(waits))  # as FSDP's gathers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.queue.work(self.seconds)
        return x


def judged(seconds: float, waits: float, by_blocks: bool) -> float:
    """What a rank's heartbeat says of its own work, after ten steps on a device; each forward pass has three blocks."""
    queue, heart = Queue(), SimpleNamespace(at=lambda *_: None, busy=0.0)
    watch = Stopwatch(0.0, heart=heart, clock=queue.clock)  # type: ignore[arg-type]
    blocks = [Takes(queue, seconds, waits) for _ in range(3)]
    if by_blocks:
        watch.hear_blocks(blocks)
    for step in range(1, 11):
        watch.begin(step, sampled=step == 10)
        with watch.own_work():
            for block in blocks:
                block(torch.zeros(1))
        queue.work(5.0)  # the backward pass, and gradients that are summed over ranks
        if step == 1:
            queue.work(100.0)
            watch.first_step()
    assert heart.busy == 0.0, "nothing is read before the device is waited for"
    watch.tell()
    return float(heart.busy)


@pytest.mark.parametrize(("by_blocks", "waits"), [(False, 0.0), (True, 0.0), (True, 0.7)])
def test_a_rank_is_slow_by_its_device_s_time_and_not_by_when_the_host_had_launched(
    by_blocks: bool, waits: float
) -> None:
    """The host launches at once on every rank. A device that is throttled takes longer; one that waits for it does not."""
    usual, slow = (judged(seconds, waits, by_blocks) for seconds in (0.1, 0.3))
    assert (usual, slow) == (pytest.approx(0.3), pytest.approx(0.9))
    beats = [
        Beat(rank, rank, 1, 1, "step", 10, 0.0, 0.0, 3.0, busy)
        for rank, busy in enumerate((usual, slow, usual, usual))
    ]
    busy = sorted(beat.busy_seconds for beat in beats)
    assert [beat.rank for beat in beats if is_slow(beat, busy)] == [1]


def test_no_rank_is_judged_by_a_clock_that_only_sees_the_host() -> None:
    assert not NeuronXla.tells_time and all(kind.tells_time for kind in (Cpu, Cuda, Neuron))


def test_a_profile_is_shown_on_one_screen(tmp_path: Path) -> None:
    run = Run(tmp_path / "p")
    run.profile.mkdir(parents=True)
    summary = {"steps": [4, 6], "seconds": 3.0, "parts": {"forward": 1.0, "backward": 1.5}, "communication": {"seconds": 0.6, "not_hidden": 0.3}, "kinds": {},
               "top": [{"name": "aten::mm", "seconds": 1.2, "calls": 1234}]}  # fmt: skip
    (run.profile / "summary.json").write_text(json.dumps(summary))
    said = list(measurements.describe_profile(run))
    assert (
        said[-1].startswith("next   make train")
        and len(said) < 24
        and "steps 4 to 6 of rank 0: 3 s in total, 1 s per step" in said[0]
    )
    words = [" ".join(line.split()) for line in said]
    assert "backward 50.0 % 1.5 s ████████████" in words
    assert "communication 20.0 % of the time, 10.0 % not overlapped with computation" in words
    assert "aten::mm 40.0 % 1.2 s 1,234 calls" in words


def test_sizes_are_read_and_refused_by_name() -> None:
    assert (
        counts_of("", 8) == [1, 2, 4, 8]
        and counts_of("", 6) == [1, 2, 4, 6]
        and counts_of("4 1,2", 8) == [1, 2, 4]
    )
    for wrong in ("two", "0 1", "3", "1 1"):
        with pytest.raises(ConfigError, match="NODES='1 2 4'"):
            counts_of(wrong, 8)


@pytest.mark.parametrize(("weak", "batches"), [(False, [8, 8, 8]), (True, [8, 16, 32])])
def test_strong_scaling_keeps_the_batch_and_weak_scaling_a_rank_s_part(
    tmp_path: Path, weak: bool, batches: list[int]
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    sizes = sized({"CONFIG": str(tmp_path / "config.yaml"), "NODES": "1 2 4"}, weak)
    assert [config.fleet.nodes for config, _ in sizes] == [1, 2, 4]
    assert [config.train.global_batch_size for config, _ in sizes] == batches
    work = [config.train.global_batch_size // config.data_parallel for config, _ in sizes]
    assert work == ([8, 8, 8] if weak else [8, 4, 2])


def test_a_size_that_can_not_be_is_refused_before_any_runs(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=r"train.global_batch_size: 8 is not a multiple of the 3"):
        sized({"CONFIG": str(tmp_path / "config.yaml"), "NODES": "1 3"}, weak=False)


def test_a_measured_run_has_its_own_name_and_leaves_nothing_to_resume(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    config, _ = load(Settings(tmp_path / "config.yaml"))
    short = measured(config, "base-profile-1", 6, "4-6")
    assert (short.name, short.train.steps, short.checkpoint.is_off) == ("base-profile-1", 6, True)
    assert short.checkpoint.every_steps == 0 and short.checkpoint.every_seconds == 0
    assert (
        short.train.schedule_steps == config.train.schedule_steps == 500
    )  # it is the long run that is looked at
    assert steady([{"step": step} for step in range(1, 7)]) == [
        {"step": 4},
        {"step": 5},
        {"step": 6},
    ]
    longer = measured(config, "base-profile-2", config.train.schedule_steps + 4)
    assert longer.train.schedule_steps == longer.train.steps  # or rules.py would refuse it
    assert shared(config) == config, "this machine is nobody's but its own"


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ("6-4", "is empty or begins after train.steps 500"),
        ("900-910", "is empty or begins after"),
        ("4", 'is not valid; write it like "4-6"'),
    ],
)
def test_steps_that_are_none_are_refused(tmp_path: Path, steps: str, told: str) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=f"train.profile_steps.*{told}"):
        load(Settings(tmp_path / "config.yaml", f"train.profile_steps='\"{steps}\"'"))


def test_efficiency_is_against_the_smallest_size(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    done = [
        (load(Settings(tmp_path / "config.yaml", f"fleet.nodes={nodes}"))[0], "1 data-parallel", {"tokens_per_second": speed, "mfu": 0.4})
        for nodes, speed in ((2, 1000.0), (4, 1800.0))
    ]  # fmt: skip
    measures = measures_of(done)
    assert [measure.efficiency for measure in measures] == pytest.approx([1.0, 0.9])
    table = measurements.describe_scaling(measures, weak=False)
    assert table[0].startswith("strong") and table[-1].split() == [
        "4",
        "4",
        "1",
        "data-parallel",
        "8",
        "1.8k",
        "450",
        "40.0",
        "%",
        "90.0",
        "%",
    ]
    measurements.write(Run(tmp_path / "s"), measures, weak=True)
    assert (
        "| 4 | 4 |" in (tmp_path / "s/scaling.md").read_text()
        and (tmp_path / "s/plots/scaling.png").stat().st_size > 5000
    )
    assert json.loads((tmp_path / "s/scaling.json").read_text())["scaling"] == "weak"
