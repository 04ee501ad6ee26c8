"""make runs, make compare and RUN: many runs, beside each other and by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from trainfleet.backends import backend_of
from trainfleet.cli import main as command
from trainfleet.config import Settings, dump_resolved, load
from trainfleet.engine.generate import choose
from trainfleet.launch import command as launch
from trainfleet.launch.run_location import require_known_tasks
from trainfleet.process.install_paths import ROOT
from trainfleet.report import json_output
from trainfleet.trust.errors import ConfigError

TEXT = """
name: {name}
data: {{vocab_size: 500}}
model: {{layers: 2, hidden_size: 64, heads: 4, intermediate_size: 128, max_position_embeddings: 128}}
train: {{global_batch_size: 8, sequence_length: 64, steps: 50}}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rate, losses in (("slow", "0.001", (5.0, 4.0)), ("fast", "0.01", (5.0, 3.0))):
        Path("config.yaml").write_text(TEXT.format(name=name))
        folder = Path("runs") / name
        folder.mkdir(parents=True)
        config = load(Settings(Path("config.yaml"), f"train.learning_rate={rate}"))[0]
        (folder / "config.yaml").write_text(dump_resolved(config))
        lines = [
            {"step": 25 * (at + 1), "loss": loss, "tokens_per_second": 1000.0}
            for at, loss in enumerate(losses)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        results = {
            "status": "finished",
            "steps": 50,
            "tokens": 25600,
            "sequence_length": 64,
            "global_batch_sequences": 8,
        }
        (folder / "results.json").write_text(json.dumps(results | {"usd": 12.5}))


def test_every_run_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/broken").mkdir()
    Path("runs/broken/results.json").write_text('{"status": "<script>", "steps": 1e999}')
    Path("runs/empty").mkdir()
    Path("runs/empty/results.json").touch()
    assert command(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[1:5]}
    assert "unreadable: is empty" in rows["empty"]
    assert "finished" in rows["slow"] and "50 of 50" in rows["slow"] and "$12.50" in rows["slow"]
    assert "unreadable" in rows["broken"] and "script" not in rows["broken"]


def test_a_run_in_format_1_is_refused_by_name_and_hides_no_other_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree("runs/slow", "runs/old")
    old = Path("runs/old/config.yaml")
    old.write_text(old.read_text().replace("name: slow", "name: old", 1))
    Path("runs/old/events.jsonl").write_text('{"time": 1, "event": "launched"}\n')
    refused = "runs/old: has run folder format 1, but this program reads format 2"
    for words in (["compare", "RUNS=slow old"], *([verb, "RUN=old"] for verb in ("status", "report", "watch"))):  # fmt: skip
        assert command(words) == 1
        said = capsys.readouterr().err
        assert refused in said and "next: use that version, or remove the folder: rm -r" in said
    assert command(["runs"]) == 0 and command(["clean"]) == 0
    said = capsys.readouterr().out
    assert "unreadable: has run folder format 1" in said and "50 of 50" in said
    assert "kept runs/old" in said


@pytest.mark.parametrize("verb", ["clean", "stop", "status", "checkpoints", "logs"])
def test_a_copied_folder_is_not_the_run_that_it_was_copied_from(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("runs/slow", "runs/copy")
    words = ["PURGE=1", "YES=1"] if verb == "clean" else []
    for more in (["RUN=copy"], ["RUN=fast", "SET=name=slow"]):
        assert command([verb, *more, *words]) == 2
        said = capsys.readouterr().err
        assert f"config.yaml or SET gives {more[0][4:]} the name slow" in said, said
    assert Path("runs/slow/results.json").exists()
    path = Path("runs/copy/config.yaml")
    path.write_text(path.read_text().replace("name: slow", "name: copy", 1))  # as the message says
    assert command(["status", "RUN=copy"]) == 0
    assert capsys.readouterr().out.startswith("copy ")
    path.unlink()
    assert command(["status", "RUN=copy"]) == 2  # make runs lists it
    assert "runs/copy has lost its config.yaml" in capsys.readouterr().err


def test_a_run_that_has_not_begun_is_begun_with_the_config_that_was_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("other.yaml").write_text(TEXT.format(name="other"))
    train = "make train CONFIG=other.yaml SET=train.steps=5"
    assert answer(["status", *train.split()[2:]], capsys)["run"]["next"] == [train]


def test_one_file_is_not_several() -> None:
    Path("a.txt").write_text("some text\n" * 99)
    config = load(Settings(Path("config.yaml"), "data.sources=[a.txt]"))[0]
    (note, *_), _ = launch._data(config, backend_of(config))
    assert " in 1 file, 1 unit," in note, note


MEASURED = "fast-scaling-1123-101112-n2"  # a part of make scaling


@pytest.mark.parametrize(("words", "named"), [
    ([], {"slow", "fast", MEASURED}), (["CONFIG=fast.yaml"], {"fast", MEASURED}), (["SET=name=slow"], {"slow"}),
    (["RUN=slow"], {"slow"}), (["CONFIG=new.yaml"], set()),
])  # fmt: skip
def test_a_config_has_its_own_runs_alone(
    words: list[str], named: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The parts of its make scaling are among them."""
    shutil.copytree("runs/fast", part := Path("runs") / MEASURED)
    (part / "config.yaml").write_text(
        (part / "config.yaml").read_text().replace("name: fast", f"name: {MEASURED}", 1)
    )
    for name in ("fast", "new"):
        Path(f"{name}.yaml").write_text(TEXT.format(name=name))
    assert command(["runs", *words]) == 0
    told = capsys.readouterr().out
    assert {
        line.split()[0] for line in told.splitlines()[1:] if line.startswith(("slow", "fast"))
    } == named
    assert named or told == "no runs of this config here yet\nnext: make train CONFIG=new.yaml\n"


def test_differences_outcomes_and_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    text = Path("config.yaml").read_text() + "watch: [two words, b]\n"
    Path("config.yaml").write_text(text)
    fast = load(Settings(Path("config.yaml"), "train.learning_rate=0.01"))[0]
    Path("runs/fast/config.yaml").write_text(dump_resolved(fast))
    assert command(["compare", "RUNS=slow,fast"]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["watch", "[]", '["two', 'words",', '"b"]'] in words
    assert ["train.learning_rate", "0.001", "0.01"] in words and ["loss", "4.000", "3.000"] in words
    assert not any(
        line and line[0] in ("name", "train.steps") for line in words
    )  # what is the same is left out
    assert Path("runs/slow/plots/compare.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "names",
    [
        "slow",
        "slow slow",
        "slow fsat",
        "",
        "../x slow",
        " ".join(f"r{number}" for number in range(9)),
    ],
)
def test_what_can_not_be_compared_is_refused(
    names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["compare", f"RUNS={names}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: RUNS: ") and "run make runs to list them" in told
    assert ("did you mean fast?" in told) == ("fsat" in names)


def test_a_run_is_named_by_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").unlink()
    assert command(["status", "RUN=fast"]) == 0
    assert capsys.readouterr().out.startswith("fast ")
    for name in ("fsat", "../runs/fast", "", "."):
        assert command(["status", f"RUN={name}"]) == 2
        assert "there is no run named" in capsys.readouterr().err


def test_top_p_leaves_the_fewest_that_have_the_share() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(top_p: float) -> set[int]:
        return {choose(logits, 1.0, 50, generator, top_p) for _ in range(300)}

    assert drawn(1e-9) == {0} and drawn(0.6) == {0, 1} and drawn(1.0) == {0, 1, 2, 3}


def test_how_to_sample_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("TEMPERATURE=-1", "TOP_P=0", "LENGTH=0", "SEED=x", "TEMPERATURE=nan"):
        assert command(["sample", "RUN=fast", word]) == 2
        assert word.partition("=")[0] in capsys.readouterr().err


def test_a_task_that_lm_eval_does_not_have_is_refused_with_the_nearest_it_has() -> None:
    known = ["hellaswag", "arc_easy", "arc_challenge", "winogrande"]
    require_known_tasks("hellaswag, arc_easy,arc_*", known)
    require_known_tasks("anything", [])  # it could not be asked
    with pytest.raises(
        ConfigError, match=r'TASKS: lm-eval has no task "helaswag"; nearest: hellaswag, '
    ) as told:
        require_known_tasks("helaswag,arc_easy,nonsense", known)
    assert len(told.value.problems) == 2


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """What a verb prints with JSON=1, after jsonschema has judged it by the published schema."""
    capsys.readouterr()
    command([*words, "JSON=1"])
    found = json.loads(capsys.readouterr().out)
    schema = json.loads(json_output.FILE.read_text())
    part = schema | {"$ref": f"#/$defs/{words[0]}"}
    jsonschema.validate(found, part, cls=jsonschema.Draft202012Validator)
    return found


def test_scripts_get_json_that_its_schema_describes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/broken").mkdir()
    Path("runs/broken/results.json").write_text('{"status": "<script>", "steps": 1e999}')
    runs = {run["name"]: run for run in answer(["runs"], capsys)["runs"]}
    assert runs["broken"]["status"] == "unreadable" and "finite" in runs["broken"]["fault"]
    slow = runs["slow"]
    assert (slow["status"], slow["step"], slow["loss"], slow["usd"]) == ("finished", 50, 4.0, 12.5)
    assert answer(["status", "RUN=slow"], capsys)["run"] == slow
    compared = answer(["compare", "RUNS=slow fast"], capsys)
    assert compared["differences"] == {"train.learning_rate": [0.001, 0.01]}
    assert Path(compared["plot"]).is_file() and answer(["ls"], capsys)["resources"] == []
    plan = answer(["plan"], capsys)
    assert plan["config"]["train"]["steps"] == 50 and plan["world_size"] == plan["nodes"] == 2
    assert plan["seconds_range"][0] < plan["seconds"] < plan["seconds_range"][1]
    assert {"train.warmup_steps"} <= {row["key"] for row in plan["derived"]}
    assert command(["plan", "JSON=1", "TOKENS=1e9"]) == 2
    assert "can't be combined" in capsys.readouterr().err
    doctor = answer(["doctor"], capsys)
    assert doctor["healthy"] and doctor["lines"] and doctor["hosts"] == []
    assert command(["eval", "RUN=slow", "TASKS=x", "JSON=1"]) == 2
    assert "lm-eval writes JSON" in capsys.readouterr().err
    assert "first-run" in {recipe["name"] for recipe in answer(["recipes"], capsys)["recipes"]}
    assert json.loads(json_output.FILE.read_text()) == json_output.schema()


def test_the_script_of_the_docs_waits_for_a_run_and_prints_its_loss() -> None:
    page = (ROOT / "docs/how-to/scripts.md").read_text()
    script = page.partition("```python\n")[2].partition("```")[0]
    Path("trainfleet").write_text(f'#!/bin/sh\nexec {sys.executable} -m trainfleet "$@"\n')
    Path("trainfleet").chmod(0o755)
    path = {"PATH": f".:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "python")}
    said = subprocess.run(
        [sys.executable, "-c", script, "fast"], env=path, capture_output=True, text=True, check=True
    )
    assert float(said.stdout) == 3.0


def test_a_loss_that_is_no_number_is_null_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    with Path("runs/slow/metrics.jsonl").open("a") as file:
        file.write('{"step": 60, "loss": NaN, "tokens_per_second": 1000.0}\n')
    assert answer(["status", "RUN=slow"], capsys)["run"]["loss"] is None
