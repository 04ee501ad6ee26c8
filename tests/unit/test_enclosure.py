"""Verbs that read a run's checkpoint, dataset and tokenizer do so behind the wall: a reader that is taken over gets nowhere."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import verbs
from s3server import serve
from takeover import ATTEMPT
from trainfleet import devices
from trainfleet.checkpoints.marker import MARKER
from trainfleet.checkpoints.s3_store import BucketStore
from trainfleet.config import dump_resolved, load_resolved
from trainfleet.engine import run_sandbox
from trainfleet.host import sandbox

OLD = Path(__file__).parent / "old_checkpoint"
WHOLE = not sandbox.lacks()
pytestmark = pytest.mark.skipif(not WHOLE and "REQUIRE_ALL" not in os.environ, reason="this kernel has no Landlock")

# What a checkpoint or a manifest that takes over its reader would try, from within that reader.
TAKEN = (
    ATTEMPT
    + """
from trainfleet.checkpoints.torch_saved import pickled
from trainfleet.data import manifest
home = Path(os.environ["PROBED"])
def taken(read):
    def reads(*words):
        attempt("secret", lambda: (home / "secret.txt").read_text())
        attempt("another's memory", lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes())
        attempt("connect", lambda: socket.create_connection(("127.0.0.1", int(os.environ["PORT"]))).close())
        attempt("results", lambda: (home / "runs/old/results.json").write_text("{}"))
        attempt("dataset", lambda: (home / "data/text/manifest.json").open("a"))
        attempt("beside the output", lambda: (home / "beside").write_text("x"))
        return read(*words)
    return reads
pickled.read, manifest.read_manifest = taken(pickled.read), taken(manifest.read_manifest)
"""
)
VERBS = {
    "trainfleet.engine.generate": (["--tokens", "3", "runs/old", "word1"], "word1"),
    "trainfleet.engine.evaluate": (["runs/old"], "perplexity"),
    "trainfleet.engine.export": (["runs/old", "out", "huggingface"], "model.safetensors"),
    "trainfleet.engine.checkpoint.verify": (["runs/old/checkpoints/step-00000004"], "every tensor is whole and finite"),
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
    (folder / "secret.txt").write_text("a secret")
    assert "finished" in enter(folder, "trainfleet.data", "runs/old/config.yaml")
    return folder


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def enter(folder: Path, module: str, *words: str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "library"), *sys.path])} | variables
    done = subprocess.run([sys.executable, "-m", module, *words], cwd=folder, env=environment, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def probed(home: Path, module: str, words: list[str], port: int, library: str) -> set[str]:
    """What the reader was refused, and what it did; both without the wall."""
    (home / "library").mkdir(exist_ok=True)
    (home / "library/sitecustomize.py").write_text(library)
    shutil.rmtree(home / "out", ignore_errors=True)
    try:
        said = enter(home, module, *words, PROBED=str(home), PORT=str(port))
    finally:
        shutil.rmtree(home / "library")
    assert VERBS[module][1] in said, said
    return {line for line in said.splitlines() if line.startswith(("DONE", "REFUSED"))}


@pytest.mark.parametrize("module", VERBS)
def test_a_verb_that_reads_a_run_reads_behind_the_wall(home: Path, port: int, module: str) -> None:
    found = probed(home, module, VERBS[module][0], port, TAKEN)
    names = ("secret", "another's memory", "connect", "results", "dataset", "beside the output")
    assert found == {f"REFUSED {name}" for name in names}
    kept = {path.name for path in home.iterdir()} - {"out"}
    assert kept == {"text", "runs", "data", "secret.txt"}


def test_an_export_is_whole_or_not_there(home: Path) -> None:
    """Its reader writes into a folder that nobody sees; what makes it visible is outside of the wall."""
    shutil.rmtree(home / "out", ignore_errors=True)
    enter(home, "trainfleet.engine.export", "runs/old", "out", "huggingface")
    assert {path.name for path in (home / "out").iterdir()} >= {"config.json", "model.safetensors", "README.md"}
    assert not list(home.glob(".out*"))


def test_a_checkpoint_in_a_bucket_is_read_behind_the_wall_too(home: Path) -> None:
    """What is fetched lies in the folder for temporary files, and nothing of it is left there."""
    (home / "temporary").mkdir()
    with serve(lambda application: application):
        store, step = BucketStore("s3://bucket/kept/far"), OLD / "step-00000004"
        for path in set(step.iterdir()) - {step / MARKER}:
            with store.create(4, path.name) as stream:
                stream.write(path.read_bytes())
        store.commit(4, (step / MARKER).read_text())
        config = load_resolved(home / "runs/old/config.yaml")
        far = replace(config, name="far", checkpoint=replace(config.checkpoint, destination="s3://bucket/kept"))
        (home / "runs/far").mkdir()
        (home / "runs/far/config.yaml").write_text(dump_resolved(far))
        try:
            wanted = {"verify": ([], "every tensor is whole and finite"), "export": (["OUT=far"], "model.safetensors")}
            for verb, (words, answer) in wanted.items():
                said = enter(home, "trainfleet", verb, "RUN=far", *words, TMPDIR=str(home / "temporary"))
                assert answer in said, said
                assert not list((home / "temporary").iterdir())
            assert (home / "far/model.safetensors").exists()
        finally:
            for place in ("runs/far", "far", "temporary"):
                shutil.rmtree(home / place, ignore_errors=True)


def test_a_model_gets_the_memory_that_its_config_asks_for_and_no_more(home: Path) -> None:
    config = load_resolved(home / "runs/old/config.yaml")
    small = run_sandbox.memory_for(config)
    assert sandbox.MEMORY < small < sandbox.MEMORY + 2**30
    deep = replace(
        config, model=replace(config.model, layers=40, hidden_size=8192, intermediate_size=28672, vocabulary_size=128256)
    )
    assert run_sandbox.memory_for(deep) > 4 * 30e9


def test_where_a_gpu_computes_sample_and_eval_have_no_wall(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver opens devices and sockets; docs/explanation/security.md says so."""
    assert devices.confinable()
    monkeypatch.setattr(devices, "nearest", lambda: object.__new__(devices.Cuda))
    assert not devices.confinable()
