"""The card of an exported model, read by huggingface_hub: what it began from, and nothing of this machine's folders."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from trainfleet.checkpoints.marker import MARKER
from trainfleet.config import Config, Settings, addresses, load
from trainfleet.config.addresses import pinned
from trainfleet.config.types import Source
from trainfleet.engine.export import card, name_of
from trainfleet.run.run_folder import Run
from unit.report_runs import make_run

COMMIT = "1a2b" * 10
README = "---\nlicense: apache-2.0\nlanguage: en\n---\n# theirs\nlicense: mit\n"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "c.yaml").write_text("name: mine\ndata: {sources: [stdlib]}\n")
    found = load(Settings(tmp_path / "c.yaml"))[0]
    sources = (
        "/home/me/secret/books",
        Source("s3://bucket/a/*.jsonl", 0.5),
        "hf://owner/set@main/en:train",
        "hf:///home/me/x",
    )
    return replace(found, data=replace(found.data, sources=sources))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path, done=20, status="finished")


def begun(run: Run, source: str) -> Run:
    run.record("initialized", source=source)
    return run


def folder(path: Path, name: str = "") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"_name_or_path": name}))
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "README.md").write_text(README)
    return path


def test_a_run_that_began_from_nothing_says_so_and_tells_no_folder(
    run: Run, config: Config
) -> None:
    read = ModelCard(text := card(run, config))
    assert (
        read.data.library_name == "transformers"
        and read.data.base_model is None
        and read.data.license is None
    )
    assert (
        "Trained from scratch with trainfleet, on `books`, `a`, `hf://owner/set@main/en:train`, `x`."
        in text
    )
    assert "/home/me" not in text and "bucket" not in text


@pytest.mark.parametrize("name", ["", "Qwen/Qwen3-0.6B", "/home/me/secret"])
def test_one_that_goes_on_from_a_folder_names_it_with_its_checksum_and_licence(
    name: str, run: Run, config: Config, tmp_path: Path
) -> None:
    base = folder(tmp_path / "secret/qwen", name)
    read = ModelCard(text := card(begun(run, str(base)), config))
    assert read.data.license == "apache-2.0" and read.data.base_model == (
        name if name.startswith("Qwen") else None
    )
    named = (
        "[qwen](https://huggingface.co/Qwen/Qwen3-0.6B)" if name.startswith("Qwen") else "`qwen`"
    )
    digest = hashlib.sha256(b"weights").hexdigest()
    assert (
        f"Continued with trainfleet from {named} (sha256 of model.safetensors: {digest}), on `books`"
        in text
    )
    assert (
        "from scratch" not in text
        and "secret" not in text
        and "after those that qwen was trained on" in text
    )


def test_one_of_several_files_has_the_checksum_that_sha256sum_gives(
    run: Run, config: Config, tmp_path: Path
) -> None:
    base = folder(tmp_path / "big")
    (base / "model.safetensors").rename(base / "a.safetensors")
    (base / "b.safetensors").write_bytes(b"more")
    (base / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}})
    )
    lines = "".join(
        f"{hashlib.sha256(text).hexdigest()}  {name}.safetensors\n"
        for name, text in (("a", b"weights"), ("b", b"more"))
    )
    assert hashlib.sha256(lines.encode()).hexdigest() in card(begun(run, str(base)), config)


def test_one_of_the_hub_is_linked_by_its_name_and_revision(
    run: Run, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = folder(tmp_path / "snapshots" / COMMIT)
    monkeypatch.setattr(addresses, "_fetched", lambda address, weights: snapshot)
    assert (
        pinned("hf://me/small") == f"hf://me/small@{COMMIT}"
        and pinned("hf://me/small@main") == "hf://me/small@main"
    )
    read = ModelCard(text := card(begun(run, pinned("hf://me/small")), config))
    assert (read.data.base_model, read.data.license) == ("me/small", "apache-2.0")
    assert f"[me/small](https://huggingface.co/me/small) (revision {COMMIT})" in text


def test_one_that_goes_on_from_another_run_names_its_step_marker_and_tokens(
    run: Run, config: Config
) -> None:
    base = Path(__file__).with_name("old_checkpoint") / "step-00000004"
    text = card(begun(run, str(base)), config)
    digest = hashlib.sha256((base / MARKER).read_bytes()).hexdigest()
    tokens = json.loads((base / MARKER).read_text())["commit"]["tokens"]
    assert (
        f"sha256 of its {MARKER}: {digest}" in text
        and f"after the {tokens:,} that step 4 of" in text
    )
    assert ModelCard(text).data.base_model is None


def test_a_base_that_is_gone_is_named_all_the_same(run: Run, config: Config) -> None:
    assert "Continued with trainfleet from `gone`, on" in card(begun(run, "/home/me/gone"), config)


@pytest.mark.parametrize(
    "source, name",
    [
        ("stdlib", "stdlib"),
        ("../../*.txt", "text"),
        ("a/`b|c`/**/*.md", "_b_c_"),
        ("hf://name", "hf://name"),
    ],
)
def test_a_source_is_named_without_its_folders(source: str, name: str) -> None:
    assert name_of(source) == name
