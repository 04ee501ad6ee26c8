"""Real ranks over gloo: what a world of any size computes, and that neither a crash nor a stop changes any of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from ranks import Bench

AGREE = """
import sys
from trainfleet.devices.cpu import Cpu
from trainfleet.engine.world import join
Cpu.native_bf16 = sys.argv[1] == "native"
with join(Cpu()) as world:
    print(world.precision("auto"))
"""


class Unbroken(dict[int, Path]):
    """One run for each world size that a test asks for, from the first step to the last without a break."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def __missing__(self, size: int) -> Path:
        self[size] = self.bench.train(f"unbroken-{size}", size)
        return self[size]


@pytest.fixture(scope="module")
def unbroken(bench: Bench) -> Unbroken:
    return Unbroken(bench)


def assert_equal(run: Path, unbroken: Path) -> None:
    """Every logged number and every bit of the last checkpoint are those of the unbroken run."""
    assert ranks.metrics(run) == ranks.metrics(unbroken)
    ours, theirs = (
        ranks.state_of(folder / "checkpoints" / "step-00000020") for folder in (run, unbroken)
    )
    assert any("exp_avg_sq" in name for name in ours) and ranks.different(ours, theirs) == []


def assert_close(run: Path, other: Path) -> None:
    """Every logged number but for the order in which fp32 sums were taken, which tells in the norm first."""
    for ours, theirs in zip(ranks.metrics(run), ranks.metrics(other), strict=True):
        assert ours.pop("grad_norm") == pytest.approx(theirs.pop("grad_norm"), rel=1e-3)
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_world_size_does_not_change_the_losses(unbroken: Unbroken, size: int) -> None:
    assert_close(unbroken[size], unbroken[1])


@pytest.mark.thorough
def test_accumulation_does_not_change_the_losses(bench: Bench, unbroken: Unbroken) -> None:
    assert_close(bench.train("accumulated", 2, train__micro_batch_size=1), unbroken[1])


def test_loss_falls_and_results_tell_it(unbroken: Unbroken) -> None:
    told = ranks.results(unbroken[2])
    assert (
        told["status"] == "finished"
        and told["world_size"] == 2
        and told["steps"] == 20
        and told["tokens"] == 20 * 8 * 64
    )
    assert told["final_loss"] < 0.9 * told["first_loss"] and told["model"]["parameters"] > 10_000
    assert told["seconds"].keys() >= {
        "startup",
        "first_step",
        "train",
        "validate",
        "checkpoint",
        "total",
    }
    way = [told["seconds"][name] for name in ("loaded", "met", "built", "first_step")]
    assert way[0] >= 0 and way == sorted(way)
    assert len(told["sample"]["prompt"]) > 0 and len(told["sample"]["text"]) > 0


def continued(bench: Bench, name: str, run: Path, last: int) -> Path:
    """A copy of a finished run as it was when its checkpoint of step `last` was its newest."""
    copy = shutil.copytree(run, bench.prepare(name, 1), dirs_exist_ok=True)
    for step in range(last + 4, 21, 4):
        shutil.rmtree(copy / "checkpoints" / f"step-{step:08d}")
    return copy


def test_another_world_size_goes_on_with_the_same_batches(bench: Bench, unbroken: Unbroken) -> None:
    run = continued(bench, "reshaped", unbroken[1], 16)
    bench.train("reshaped", 2)
    assert ranks.events(run, "resumed")[0]["step"] == 16
    assert_close(run, unbroken[1])


@pytest.mark.thorough
def test_the_stop_file_stops_all_ranks_with_a_checkpoint(bench: Bench, unbroken: Unbroken) -> None:
    process = bench.start(run := bench.prepare("stopped", 2, **{"checkpoint.every": 1000}), 2)
    ranks.await_step(run, 2, process)
    (run / "stop").touch()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and ranks.results(run)["status"] == "stopped", output
    step = ranks.results(run)["steps"]
    assert (
        2 <= step < 20
        and (run / "checkpoints" / f"step-{step:08d}").is_dir()
        and not (run / "stop").exists()
    )
    bench.train("stopped", 2)
    assert_equal(run, unbroken[2])


@pytest.mark.parametrize(
    ("number", "size"),
    [
        (signal.SIGTERM, 2),
        pytest.param(signal.SIGTERM, 4, marks=pytest.mark.thorough),
        pytest.param(signal.SIGUSR1, 2, marks=pytest.mark.thorough),
    ],
)
def test_killed_then_stopped_by_a_signal_to_one_rank_it_goes_on_bit_for_bit(
    bench: Bench, unbroken: Unbroken, number: signal.Signals, size: int
) -> None:
    name = f"signalled-{number}-{size}"
    process = bench.start(run := bench.prepare(name, size), size)
    ranks.await_that((run / "checkpoints" / "step-00000004").exists, process)
    ranks.kill(process)
    assert ranks.results(run)["status"] == "running"
    process = bench.start(run, size)
    ranks.await_that(lambda: bool(ranks.events(run, "resumed")), process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and ranks.results(run)["status"] == "stopped", output
    stopped = ranks.events(run, "stopped")[0]["step"]
    bench.train(name, size)
    resumed = [event["step"] for event in ranks.events(run, "resumed")]
    assert 4 <= resumed[0] <= stopped == resumed[1]
    assert_equal(run, unbroken[size])


@pytest.mark.thorough
def test_a_finished_run_is_left_alone_and_can_be_extended(bench: Bench) -> None:
    run = bench.train("extended", 1, train__steps=4)
    before = (run / "metrics.jsonl").read_bytes()
    bench.train("extended", 1, train__steps=4)
    assert (run / "metrics.jsonl").read_bytes() == before and ranks.results(run)[
        "status"
    ] == "finished"
    bench.train("extended", 1, train__steps=6)
    assert [line["step"] for line in ranks.metrics(run)] == [1, 2, 3, 4, 5, 6]


def test_a_refusal_is_said_once_and_recorded(bench: Bench, unbroken: Unbroken) -> None:
    run = continued(bench, "changed", unbroken[2], 20)
    bench.train("changed", 2, code=1, train__steps=24, train__seed=9)
    assert (
        bench.output.count("train.seed changed from 1 to 9") == 1
        and "Traceback" not in bench.output
    ), bench.output
    assert {fault["rank"] for fault in ranks.events(run, "fault")} == {0, 1}


def test_hosts_of_unlike_cpus_agree_on_a_precision() -> None:
    """A rank in bf16 shards its weights, one in fp32 does not: they would wait for each other for ever."""
    world = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ranks.free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    environment = (
        os.environ | world | {"PYTHONPATH": str(ranks.ROOT / "python"), "OMP_NUM_THREADS": "1"}
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", AGREE, kind],
            env=environment | {"RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
        )
        for rank, kind in enumerate(("native", "not"))
    ]
    said = [process.communicate(timeout=100)[0] for process in started]
    assert [words.splitlines()[-1] for words in said] == [
        "torch.float32"
    ] * 2  # gloo of torch 2.9 speaks before


def test_ranks_that_do_not_find_the_planned_device_end_the_run(bench: Bench) -> None:
    """They don't train on what they find instead: the plan says GPUs, and this torch or machine has none."""
    config = (run := bench.prepare("planned", 2)) / "config.yaml"
    config.write_text(config.read_text().replace("platform: cpu", "platform: cuda"))
    code, output = bench.attempt(run, 2)
    assert (
        code == 1
        and "this rank can't use a GPU, but the plan requires one" in output
        and "Traceback" not in output
    ), output
    assert {fault["rank"] for fault in ranks.events(run, "fault")} == {0, 1} and not (
        run / "metrics.jsonl"
    ).exists()
