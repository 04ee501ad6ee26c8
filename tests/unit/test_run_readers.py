"""Verbs that read a run: each reads a checkpoint, a dataset and a tokenizer, of this machine or of a bucket."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import verbs
from s3server import serve
from trainfleet.checkpoints.marker import MARKER
from trainfleet.checkpoints.store import CheckpointStore
from trainfleet.config import dump_resolved, load_resolved
from trainfleet.report import json_output

OLD = Path(__file__).parent / "old_checkpoint"
VERBS = {
    "trainfleet.engine.generate": (["--tokens", "3", "runs/old", "word1"], "word1"),
    "trainfleet.engine.evaluate": (["runs/old"], "perplexity"),
    "trainfleet.engine.export": (["runs/old", "out", "huggingface"], "model.safetensors"),
    "trainfleet.engine.checkpoint.verify": (
        ["runs/old/checkpoints/step-00000004"],
        "every tensor is complete and finite",
    ),
    "trainfleet.data.inspect": (["runs/old/config.yaml", "1"], "end of document"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and its dataset."""
    folder = tmp_path_factory.mktemp("home")
    verbs.write_text(folder / "text")
    shutil.copytree(OLD / "step-00000004", folder / "runs/old/checkpoints/step-00000004")
    config = load_resolved(OLD / "config.yaml")
    config = replace(config, data=replace(config.data, validation_fraction=0.3))
    (folder / "runs/old/config.yaml").write_text(dump_resolved(config))
    assert "finished" in enter(folder, "trainfleet.data", "runs/old/config.yaml")
    return folder


def enter(
    folder: Path, module: str, *words: str, code: int = 0, errors: bool = True, **variables: str
) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    done = subprocess.run([sys.executable, "-m", module, *words], cwd=folder, env=environment, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT if errors else subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.mark.parametrize("module", VERBS)
def test_a_verb_answers_and_leaves_the_run_as_it_was(home: Path, module: str) -> None:
    words, answer = VERBS[module]
    shutil.rmtree(home / "out", ignore_errors=True)
    assert answer in (said := enter(home, module, *words)), said
    assert {path.name for path in home.iterdir()} - {"out"} == {"text", "runs", "data"}
    if module.endswith("export"):
        exported = {path.name for path in (home / "out").iterdir()}
        assert exported >= {"config.json", "model.safetensors", "README.md"}


def test_scripts_get_json_of_a_checkpoint_its_scores_and_its_data(home: Path) -> None:
    """A damaged checkpoint gets the same object with its fault, and the exit code of the text."""
    schema = json.loads(json_output.FILE.read_text())
    words = {"eval": (), "inspect": ("SAMPLE=1", "VERIFY=1"), "verify": (), "checkpoints": ()}
    found = {}
    for verb, more in words.items():
        found[verb] = json.loads(enter(home, "trainfleet", verb, "RUN=old", "JSON=1", *more))
        jsonschema.validate(found[verb], schema | {"$ref": f"#/$defs/{verb}"})
    assert found["verify"]["checkpoint"]["step"] == 4 and not found["verify"]["checkpoint"]["fault"]
    assert found["checkpoints"]["checkpoints"][-1]["step"] == 4
    assert found["eval"]["loss"] > 1 and found["eval"]["name"] == "old"
    looked = found["inspect"]
    assert looked["sample"] == 1 and looked["files_verified"] == 2 * looked["shards"]
    assert len(looked["ids"]) > 8 and "word" in looked["text"]
    whole = home / "runs/old/checkpoints/step-00000004"
    file = max(whole.iterdir(), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    try:
        said = enter(home, "trainfleet", "verify", "RUN=old", "JSON=1", code=1, errors=False)
    finally:
        file.write_bytes(content)
    assert file.name in json.loads(said)["checkpoint"]["fault"]


def test_a_checkpoint_in_a_bucket_is_read_too(home: Path) -> None:
    """Nothing of what is fetched is left in the folder for temporary files."""
    (home / "temporary").mkdir()
    with serve(lambda application: application):
        store, step = CheckpointStore("s3://bucket/kept/far"), OLD / "step-00000004"
        for path in set(step.iterdir()) - {step / MARKER}:
            with store.create(4, path.name) as stream:
                stream.write(path.read_bytes())
        store.commit(4, (step / MARKER).read_text())
        config = load_resolved(home / "runs/old/config.yaml")
        far = replace(
            config,
            name="far",
            checkpoint=replace(config.checkpoint, path="s3://bucket/kept"),
        )
        (home / "runs/far").mkdir()
        (home / "runs/far/config.yaml").write_text(dump_resolved(far))
        try:
            temporary = str(home / "temporary")
            said = enter(home, "trainfleet", "export", "RUN=far", "OUT=far", TMPDIR=temporary)
            assert "model.safetensors" in said, said
            assert not list((home / "temporary").iterdir())
            assert (home / "far/model.safetensors").exists()
        finally:
            for place in ("runs/far", "far", "temporary"):
                shutil.rmtree(home / place, ignore_errors=True)
