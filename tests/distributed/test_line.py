"""The whole line on this machine, as a user types it: every process is real, only the model is small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import verbs
from trainfleet.run.run_folder import Run

ROOT = Path(__file__).parents[2]
KEYS = {
    "name", "status", "backend", "nodes", "world_size", "device", "layout", "model", "global_batch_sequences", "sequence_length", "steps",
    "tokens", "first_loss", "final_loss", "tokens_per_second", "mfu", "goodput", "seconds", "last_checkpoint", "restarts",
}  # fmt: skip
CONFIG = """
name: line
data: {name: text, sources: [text], vocab_size: 340, validation_fraction: 0.1}
model: {layers: 2, hidden_size: 32, heads: 2, kv_heads: 1, intermediate_size: 64}
train: {steps: 12, precision: fp32, global_batch_size: 8, sequence_length: 32, log_every: 1, validate_every: 6, validation_sequences: 8}
checkpoint: {every: 4}
"""


class Desk:
    """A folder with a config and some text, and the commands typed in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "runs" / "line"
        (folder / "config.yaml").write_text(CONFIG)
        verbs.write_text(folder / "text")

    def start(self, verb: str, *words: str, **options: object) -> subprocess.Popen[str]:
        return verbs.begin(self.folder, verb, *words, **options)

    def type(self, verb: str, *words: str, code: int = 0) -> str:
        return verbs.enter(self.folder, verb, *words, code=code, timeout=120)

    def results(self, name: str = "line") -> dict[str, object]:
        return json.loads((self.folder / "runs" / name / "results.json").read_text())

    def losses(self, name: str = "line") -> dict[int, float]:
        return verbs.losses(self.folder / "runs" / name)

    def await_step(self, step: int, name: str = "line") -> None:
        for _ in range(3600):
            if max(self.losses(name), default=0) >= step:
                return
            time.sleep(0.05)
        raise AssertionError(f"step {step} never came")

    def await_checkpoint(self, step: int) -> None:
        """A checkpoint is written beside training, so it comes some time after its step."""
        until = time.monotonic() + 60
        while not (self.run / "checkpoints" / f"step-{step:08d}").is_dir():
            assert time.monotonic() < until, f"no checkpoint of step {step} came"
            time.sleep(0.02)

    def processes(self) -> list[str]:
        """Every process that works in this folder, but for ourselves."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes()
                if (entry / "cwd").readlink() == self.folder and b"trainfleet" in command:
                    found.append(f"{entry.name}: {command.decode().replace(chr(0), ' ')}")
            except OSError:
                continue
        return found

    def assert_nothing_runs(self, within: float = 3.0) -> None:
        until = time.monotonic() + within
        while self.processes() and time.monotonic() < until:
            time.sleep(0.05)
        assert not self.processes()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_text_that_can_not_be_read_is_the_verdict(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    (tmp_path / "text" / "bad.jsonl").write_text('{"text": "fine"}\n{"text": broken}\n')
    output = desk.type("tokenize", code=1)
    assert (
        "the data is broken or missing (data)" in output
        and "bad.jsonl:2: is not valid JSON" in output
    )
    assert "next: correct or remove the line" in output and "Traceback" not in output


def test_train_report_sample_extend_clean(desk: Desk) -> None:
    output = desk.type("train", "SET=checkpoint.export_hf=true")
    results = desk.results()
    assert results.keys() >= KEYS
    assert (
        results["status"],
        results["world_size"],
        results["nodes"],
        results["steps"],
        results["restarts"],
    ) == (
        "finished",
        2,
        2,
        12,
        0,
    )
    assert results["layout"] == {"dp": 2, "fsdp": 1, "tp": 1, "pp": 1, "cp": 1}
    assert 0 < float(results["goodput"]) <= 1  # type: ignore[arg-type]
    assert {"tokenize", "first_step", "train", "total"} <= results["seconds"].keys()  # type: ignore[attr-defined]
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "plots/loss.png",
        "huggingface/step-00000012/model.safetensors",
        "logs/node-0.log",
        "logs/node-1.log",
    ):
        assert (desk.run / name).stat().st_size > 0, name
    assert {path.name for path in (desk.run / "events").iterdir()} >= {"node-0-2.jsonl"}
    assert (
        list((desk.run / "tensorboard").glob("events.out.*"))
        and (desk.run / "checkpoints" / "step-00000012").is_dir()
    )
    assert "make sample" in output.strip().splitlines()[-1]
    assert not (desk.run / "stop").exists()
    desk.assert_nothing_runs()

    again = desk.type("train")
    assert "finished" in again and "train.steps=24" in again
    assert "--Document 3" in desk.type("sample", "PROMPT=--Document 3"), (
        "a prompt is data, whatever it begins with"
    )
    assert "finished" in desk.type("status")
    assert "node-1" in desk.type("logs")

    (desk.folder / "text" / "0.txt").write_text("Another text.\n")
    assert (
        "warning: data.sources changed after data/text was created; run rm -r data/text"
        in desk.type("train", "SET=train.steps=15", "NODES=1")
    )
    assert desk.results()["steps"] == 15 and desk.results()["world_size"] == 1
    assert sorted(desk.losses()) == list(range(1, 16))

    kept = desk.type("clean")
    assert (
        not (desk.run / "report.html").exists()
        and (desk.run / "checkpoints" / "step-00000015").is_dir()
        and "kept" in kept
    )
    assert "there is no terminal" in desk.type("clean", "PURGE=1", code=1) and desk.run.exists()
    desk.type("clean", "PURGE=1", "YES=1")
    assert (
        not desk.run.exists()
        and not (desk.folder / "data" / "text").exists()
        and (desk.folder / "text" / "0.txt").exists()
    )


@pytest.mark.thorough
def test_any_number_of_nodes_gives_the_same_losses(desk: Desk) -> None:
    for nodes in (1, 2, 4):
        desk.type("train", f"NODES={nodes}", f"SET=name=n{nodes} train.steps=6")
        assert desk.results(f"n{nodes}")["world_size"] == nodes
    again = next(
        line for line in desk.type("status", "SET=name=n4").splitlines() if "make train" in line
    )
    assert (
        "CONFIG=runs/n4/given.yaml" in again
    )  # what SET gave it is in there, and nothing that another size derives anew
    plan = desk.type("plan", "CONFIG=runs/n4/given.yaml", "SET=train.steps=12", "NODES=1")
    assert (
        "n4: 12 steps on the local backend, 1 node x" in plan and "train.micro_batch_size" in plan
    )
    for other in ("n2", "n4"):
        assert desk.losses(other) == pytest.approx(desk.losses("n1"), rel=1e-5)


@pytest.mark.thorough  # tests/distributed/test_training.py has one such case in make test
def test_after_kill_9_of_everything_it_goes_on_as_if_never_killed(desk: Desk) -> None:
    desk.type("train", "SET=name=whole train.steps=30")
    launcher = desk.start("train", "SET=train.steps=30", start_new_session=True)
    desk.await_step(6)
    desk.await_checkpoint(4)
    for line in desk.processes():
        os.kill(int(line.split(":")[0]), signal.SIGKILL)
    launcher.communicate()
    desk.assert_nothing_runs()
    assert "interrupted" in desk.type("status")
    desk.type("train", "SET=train.steps=30")
    assert desk.losses() == desk.losses("whole")
    assert any(event["event"] == "resumed" for event in Run(desk.run).read_events())


def test_nothing_is_left_when_the_launcher_is_killed(desk: Desk) -> None:
    launcher = desk.start("train", "SET=train.steps=100000")
    desk.await_step(2)
    assert (
        len(desk.processes()) >= 7
    )  # launcher, and for each node a supervisor, a torchrun and a rank
    launcher.kill()
    desk.assert_nothing_runs()
    launcher.communicate()


def test_ctrl_c_saves_and_stops(desk: Desk) -> None:
    settings = "SET=train.steps=100000 checkpoint.every=100000"
    # test_training has a stop of several ranks at one step
    launcher = desk.start("train", settings, "NODES=1", start_new_session=True)
    desk.await_step(2)
    assert "running" in desk.type("status") and "is already running" in desk.type("train", code=1)
    said = desk.type("clean", code=2)
    assert "is running; nothing was changed" in said and "or make watch RUN=" in said, said
    os.killpg(launcher.pid, signal.SIGINT)
    output = launcher.communicate(timeout=60)[0]
    assert launcher.returncode == 130 and "with a checkpoint" in output, output
    assert desk.results()["status"] == "stopped"
    saved = int(str(desk.results()["steps"]))
    assert (desk.run / "checkpoints" / f"step-{saved:08d}").is_dir()
    desk.assert_nothing_runs()


@pytest.mark.thorough
def test_ctrl_c_twice_stops_at_once(desk: Desk) -> None:
    launcher = desk.start(
        "train", "SET=train.steps=100000 checkpoint.every=100000", start_new_session=True
    )
    desk.await_step(2)
    began = time.monotonic()
    for _ in range(2):
        os.killpg(launcher.pid, signal.SIGINT)
        time.sleep(0.05)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130 and time.monotonic() - began < 10
    desk.assert_nothing_runs()


@pytest.mark.thorough
def test_stop_works_from_another_terminal(desk: Desk) -> None:
    launcher = desk.start("train", "SET=train.steps=100000", start_new_session=True)
    desk.await_step(2)
    assert "stopped" in desk.type("stop")
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130 and desk.results()["status"] == "stopped"
    assert "not running" in desk.type("stop")


def test_what_another_backend_lacks_is_told_before_anything_is_made(desk: Desk) -> None:
    output = desk.type("train", "SET=fleet.backend=batch fleet.instance_type=trn1.32xlarge", code=2)
    assert (
        "batch nodes have no shared disk; set s3://bucket/prefix" in output
        and not (desk.folder / "runs").exists()
    )


@pytest.mark.parametrize(
    "setting",
    [
        "train.parallelism.tensor=3",
        "train.learning_rate=-1",
        "train.learning_rate=abc",
        "fleet.nodes=0",
    ],
)
def test_a_refused_config_leaves_nothing_behind(desk: Desk, setting: str) -> None:
    output = desk.type("train", f"SET={setting}", code=2)
    assert setting.split("=")[0] in output
    assert not (desk.folder / "runs").exists() and not (desk.folder / "data").exists()
