"""What finished runs took corrects the next plan of the same hardware: this layout's first, then this model's, then any."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import verbs
from trainfleet.cli import main as command
from trainfleet.config import Config, Settings, dump_resolved, load
from trainfleet.config.speed_inputs import predict
from trainfleet.data.dataset import Dataset
from trainfleet.data.tokenize_worker import Share, tokenize
from trainfleet.launch.calibration import experience_of
from trainfleet.plan.estimate import PROFILED, Bill, Experience, estimate

TEXT = """
name: {name}
data: {{vocab_size: 500}}
model: {{layers: 2, hidden_size: 64, heads: 4, intermediate_size: 128, max_position_embeddings: 128}}
train: {{global_batch_size: 8, sequence_length: 64, steps: 50}}
"""


def config(name: str, settings: str = "") -> Config:
    Path("config.yaml").write_text(TEXT.format(name=name))
    return load(Settings(Path("config.yaml"), settings))[0]


def finished(name: str, ratio: float, settings: str = "", **results: object) -> None:
    """A run that had `ratio` times the predicted speed."""
    one, folder = config(name, settings), Path("runs") / name
    step = predict(one)
    assert step
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_resolved(one))
    speed = ratio * one.train.global_batch_size * one.train.sequence_length / step.total
    (folder / "results.json").write_text(
        json.dumps({"status": "finished", "steps": 50, "tokens_per_second": speed} | results)
    )


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_nearest_runs_count() -> None:
    assert experience_of(config("new")) is None
    finished("other-model", 0.5, "model.layers=4")
    found = experience_of(config("new"))
    assert found and found.of == "this hardware" and found.ratio == pytest.approx(0.5)
    finished("other-layout", 0.7, "train.parallelism.tensor=2")
    found = experience_of(config("new"))
    assert found and found.of == "this model" and found.ratio == pytest.approx(0.7)
    for name, ratio in (("a", 0.8), ("b", 0.9), ("c", 1.9)):
        finished(name, ratio)
    found = experience_of(config("new"))
    assert (
        found and (found.of, found.runs) == ("this layout", 3) and found.ratio == pytest.approx(0.9)
    )
    before, after = estimate(config("new"), Bill(0.0)), estimate(config("new"), Bill(0.0), found)
    assert before.seconds and after.seconds == pytest.approx(before.seconds / 0.9**0.75)


def test_one_disturbed_run_moves_the_model_only_halfway_and_widens_the_range() -> None:
    """Such a run had 0.21 times the speed; without it, four of five such runs were within 10 %."""
    finished("disturbed", 0.21)
    found, before = experience_of(config("new")), estimate(config("new"), Bill(0.0))
    after = estimate(config("new"), Bill(0.0), found)
    assert before.seconds and after.seconds == pytest.approx(before.seconds / 0.21**0.5)
    low, high = after.between(after.seconds)
    assert low < before.seconds * 1.11 and high > before.seconds / 0.21
    for name in ("b", "c", "d", "e"):
        finished(name, 1.0)
    corrected = estimate(config("new"), Bill(0.0), experience_of(config("new")))
    assert corrected.seconds == pytest.approx(before.seconds)
    assert corrected.spread == pytest.approx(PROFILED)


def test_a_run_is_compared_with_what_was_predicted_on_its_own_cores() -> None:
    """A run on half as many cores had half the speed, as was predicted for it."""
    step = predict(config("new"))
    assert step
    finished(
        "half",
        0.5,
        predicted=estimate(config("new"), Bill(0.0)).predicted(1)
        | {"step_seconds": 2 * step.total},
    )
    found = experience_of(config("new"))
    assert found and found.ratio == pytest.approx(1.0)
    # what the plan of a run is stored with is the model's own prediction, before any correction
    corrected = estimate(config("new"), Bill(0.0), Experience(9, "this layout", 0.5))
    assert corrected.predicted(1)["step_seconds"] == pytest.approx(step.total)
    assert corrected.step and corrected.step.total == pytest.approx(2 * step.total)


def test_runs_that_teach_nothing_are_left_out() -> None:
    finished("short", 0.5, steps=5)
    finished("disturbed", 0.01)
    finished("elsewhere", 0.5, "fleet.nodes=1")
    (Path("runs/elsewhere/config.yaml")).write_text("{")
    Path("runs/hostile").mkdir()
    Path("runs/hostile/results.json").write_text('{"tokens_per_second": "x", "steps": 1e999}')
    assert experience_of(config("new")) is None


def test_the_plan_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    config("new")
    assert command(["plan"]) == 0
    assert "no representative run on this machine has been measured yet" in " ".join(
        capsys.readouterr().out.split()
    )
    finished("a", 0.8)
    config("new")
    assert command(["plan"]) == 0
    assert (
        "corrected by 1 finished run of this layout, which reached 0.80 times the predicted speed (weight 50%)"
        in " ".join(capsys.readouterr().out.split())
    )


def test_the_plan_says_how_often_training_goes_through_the_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of what is not tokenized yet roughly; of a dataset exactly."""
    verbs.write_text(Path("text"))
    data = "{name: text, sources: [text], vocab_size: 340}"
    Path("config.yaml").write_text(TEXT.format(name="new").replace("{vocab_size: 500}", data))
    assert command(["plan"]) == 0
    told = re.search(
        r"training sees 25,600 tokens: about ([0-9.]+) epochs",
        " ".join(capsys.readouterr().out.split()),
    )
    assert told and 0.5 < float(told[1]) < 5
    one = load(Settings(Path("config.yaml")))[0]
    tokenize(one.data, Share(0, 1, 1))
    tokens = Dataset.open(Path("data/text"), one.data).manifest.tokens
    capsys.readouterr()
    assert command(["plan"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"data/text exists: {tokens:,} tokens in 80 documents" in words  # each is in both splits
    assert (
        f"training sees 25,600 tokens: {25_600 / tokens:.2g} epochs" in words
        and "tokens: about" not in words
    )


def test_the_plan_names_the_sources_that_training_repeats(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("a").mkdir()
    verbs.write_text(Path("a/few"))
    for number in range(10):
        shutil.copytree("a/few", f"a/many/{number}")
    mixed = "[{path: a/few, weight: 1}, {path: a/many, weight: 1}]"
    text = TEXT.format(name="new").replace(
        "{vocab_size: 500}", f"{{vocab_size: 320, sources: {mixed}}}"
    )
    Path("config.yaml").write_text(text)
    for verb in ("plan", "tokenize", "plan"):
        assert command([verb, "SET='train.steps=300'"]) == 0
        words = " ".join(capsys.readouterr().out.split())
        assert verb == "plan" or "warning: training repeats" not in words, "only an estimate"
    told = re.search(r"epochs \(few ([0-9.]+), many ([0-9.]+)\)", words)
    assert told
    few, many = map(float, told.groups())
    assert few > 4 > many and few == pytest.approx(10 * many, rel=0.1)
    assert f"warning: training repeats few ({few:.0f} epochs); more than 4 epochs teach" in words


def profiled(name: str, factor: float, waited: float = 0.001, settings: str = "") -> None:
    """A profile of the config whose forward and backward passes took `factor` times what is predicted of them."""
    one, folder = config(name, f"train.profile_steps='\"4-6\"' {settings}"), Path("runs") / name
    step = predict(one)
    assert step
    computing = sum(step.group(kind) for kind in ("products", "attention", "traffic"))
    forward = factor * computing / 3 + step.launches
    spent = {
        "forward": forward,
        "backward": 2 * (forward - step.launches),
        "communication": waited,
        "optimizer": step.update,
    }
    seconds = sum(spent.values()) + step.other
    speed = one.train.global_batch_size * one.train.sequence_length / seconds
    line = {f"{part}_seconds": value for part, value in spent.items()} | {
        "seconds": seconds,
        "tokens_per_second": speed,
    }
    slow = {key: 50 * value for key, value in line.items()}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_resolved(one))
    (folder / "results.json").write_text(
        json.dumps({"status": "finished", "steps": 16, "tokens_per_second": 1.0})
    )
    lines = [
        {"step": number} | (slow if number < 8 else line) for number in range(1, 17)
    ]  # warming up, or profiled
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_a_profile_teaches_of_other_layouts_part_by_part() -> None:
    """What launching and exchanges take stays as it is predicted: a profile of another layout does not tell it."""
    profiled("new-profile-1", 1.5)
    found = experience_of(other := config("new", "train.parallelism.tensor=2"))
    assert found and (found.runs, found.of) == (1, "this model")
    assert found.parts["update"] == pytest.approx(1.0)
    for part in ("products", "attention", "traffic"):
        assert found.parts[part] == pytest.approx(1.5)
    before, after = estimate(other, Bill(0.0)).step, estimate(other, Bill(0.0), found).step
    assert (
        before and after and after.launches == before.launches and after.tensor == before.tensor > 0
    )
    assert after.products == pytest.approx(1.5**0.9 * before.products)
    same = experience_of(config("new"))
    assert same and same.of == "this layout" and not same.parts and 0.5 < same.ratio < 1


def test_a_profile_of_one_node_measures_products_and_attention_and_no_link_between_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its kernels say how the time of the passes divides, also if the profiled steps were slow."""
    step = predict(config("one"))
    assert step
    waited = 2 * step.gradients
    profiled("one-profile-1", 1.5, waited=waited)
    computing = 1.5 * sum(step.group(kind) for kind in ("products", "attention", "traffic"))
    whole = computing + step.launches * 3 - 2 * step.launches + waited + step.update + step.other
    kinds = {"products": 2 * step.products, "attention": 0.5 * step.attention}
    summary = {
        "seconds": 3 * 4 * whole,  # three steps, of four times the usual duration
        "steps": [4, 6],
        "parts": {},
        "kinds": {kind: 3 * 4 * seconds for kind, seconds in kinds.items()},
        "communication": {"seconds": 0.0, "not_hidden": 3 * 4 * waited},
        "top": [],
    }
    (folder := Path("runs/one-profile-1/profile")).mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    found = experience_of(config("other", "train.sequence_length=32"))
    assert found and found.of == "this hardware"
    ratios = {name: found.parts[name] for name in kinds}
    assert ratios == pytest.approx({"products": 2.0, "attention": 0.5})
    traffic = computing - sum(kinds.values())
    assert found.parts["traffic"] == pytest.approx(traffic / step.group("traffic"))
    assert found.parts["gradients"] == pytest.approx(2.0)
    alone = experience_of(config("alone", "fleet.nodes=1"))
    assert alone and alone.parts.keys() == found.parts.keys() - {"gradients"}
    Path("runs/one-profile-1").rename("runs/of-two-nodes")
    Path("runs/of-two-nodes/results.json").unlink()
    profiled("one-profile-1", 1.5, settings="fleet.nodes=1")
    Path("runs/of-two-nodes/profile").rename(folder)
    assert command(["plan", "SET=fleet.nodes=4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"over predicted time: matrix products [0-9.]+, attention [0-9.]+, mem", said)
    assert "not measured: kernel launches, gradient exchange" in said


def test_a_profile_too_short_to_time_teaches_nothing() -> None:
    profiled("new-profile-1", 1.5)
    lines = Path("runs/new-profile-1/metrics.jsonl").read_text().splitlines()
    Path("runs/new-profile-1/metrics.jsonl").write_text("\n".join(lines[:10]) + "\n")
    assert experience_of(config("new")) is None
