"""hf:// sources: one grammar for the config check and the reader, and for each form that a document or a message prints."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError

from trainfleet.cli import main
from trainfleet.config.addresses import DATASET_FORMS, HubDataset, dataset_of
from trainfleet.data import hub_datasets
from trainfleet.data.hub_datasets import list_shards, open_dataset
from trainfleet.report import panels
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import DataError, InputError

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "schema/config.schema.json").read_text())
FORM = re.compile(r"hf://(?:\[[@/:][a-z]+\]|[\w./@:+-])+")
NAMES = {
    "hf://owner/name": HubDataset("owner/name", None, "train", None),
    "hf://name:test": HubDataset("name", None, "test", None),
    "hf://owner/name/config": HubDataset("owner/name", "config", "train", None),
    "hf://owner/name@main/20231101.en:train+test": HubDataset(
        "owner/name", "20231101.en", "train+test", "main"
    ),
    "hf://owner/name@1a2b?split=validation": HubDataset("owner/name", None, "validation", "1a2b"),
    "hf://owner/name@refs/convert/parquet/en": HubDataset(
        "owner/name", "en", "train", "refs/convert/parquet"
    ),
    "hf://allenai/c4/en.noblocklist:train": HubDataset(
        "allenai/c4", "en.noblocklist", "train", None
    ),
    "hf://HuggingFaceFW/fineweb-edu/CC-MAIN-2013-20": HubDataset(
        "HuggingFaceFW/fineweb-edu", "CC-MAIN-2013-20", "train", None
    ),
    "hf://name@main/config": HubDataset("name", "config", "train", "main"),
    "hf:///data/set:test": HubDataset("/data/set", None, "test", None),
}
NONE = ["hf://", "hf://:train", "hf://a b", "hf://a/b/c/d", "hf://a//b", "hf://a/", "hf://a/b:", "hf://owner/name@/x", "hf://@main",
        "hf://me/..", "hf:///", "hf://a/b:train[:10%]", "hf://a/b:x:y", "hf://a/b\n"]  # fmt: skip


def without_readme(*_: object, **__: object) -> str:
    raise EntryNotFoundError("the Hub has no such file in it")


def printed() -> list[str]:
    """Each form of a dataset that the README, the pages of docs, the schema and the messages print; brackets in and out."""
    said = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    lines = [line for path in said for line in path.read_text().splitlines() if "sources" in line]
    lines += [SCHEMA["properties"]["data"]["properties"]["sources"]["description"], DATASET_FORMS]
    forms = {form.rstrip(".") for line in lines for form in FORM.findall(line)}
    parted = [re.split(r"(\[[^]]+\])", form) for form in forms]
    every = [
        itertools.product(
            *(("", part[1:-1]) if part.startswith("[") else (part,) for part in parts)
        )
        for parts in parted
    ]
    return sorted({"".join(one) for product in every for one in product})


def test_the_documents_print_every_part_of_the_grammar() -> None:
    assert {
        "hf://owner/name",
        "hf://owner/name@revision/config:split",
        "hf:///folder:split",
        "hf://roneneldan/TinyStories",
    } <= {*printed()}


@pytest.mark.parametrize("form", sorted({*printed(), *NAMES}))
def test_each_form_passes_make_plan_and_reaches_the_library(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets

    (tmp_path / "set").mkdir()
    (tmp_path / "set/part.jsonl").write_text('{"text": "some words"}\n' * 50)
    load, asked = datasets.load_dataset, list[tuple[Any, ...]]()

    class Local:
        """What the library would give for a dataset of the Hub: with files of its repository."""

        hash = "0" * 40

        def __init__(self, name: str, config: str | None, *, revision: str | None) -> None:
            self.asked = name, config, revision
            files = [
                f"{name}/part.jsonl"
                if name[0] in "/."
                else f"hf://datasets/{name}@{self.hash}/part.jsonl"
            ]
            self.config = SimpleNamespace(data_files={"train": files})

        def as_streaming_dataset(self, split: str) -> Any:
            name, config, revision = self.asked
            asked.append((name, config, split, revision))
            return load(str(tmp_path / "set"), split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset_builder", Local)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", without_readme)
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(f"name: x\ndata: {{sources: ['{form}']}}\ntrain: {{steps: 2}}\n")
    assert main(["plan"]) == 0, capsys.readouterr().err
    found = NAMES.get(form, dataset_of(form))
    assert {*asked} == {(found.name, found.config, found.split, found.revision)}


@pytest.mark.parametrize("source", NONE)
def test_what_names_no_dataset_is_refused_by_plan_and_reader_alike(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(f"name: x\ndata: {{sources: [{json.dumps(source)}]}}\n")
    assert main(["plan"]) == 2
    assert "data.sources[0]" in capsys.readouterr().err
    with pytest.raises(InputError):
        dataset_of(source)
    with pytest.raises(DataError, match=r"is not a dataset address|part of a split"):
        open_dataset(source)


def test_splits_are_those_that_the_library_streams(tmp_path: Path) -> None:
    """The reason that no slice is taken: the library itself has none where it streams."""
    import datasets

    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"text": "some words"}\n' * 3)
    assert len(list_shards(f"hf://{tmp_path}:train+test")) == 2
    with pytest.raises(ValueError, match="Bad split"):
        datasets.load_dataset(str(tmp_path), split="train[:10%]", streaming=True)


def test_aliases_that_repeat_without_end_are_refused_at_once(tmp_path: Path) -> None:
    """400 bytes: nine values, nine times repeated, fourteen times."""
    rows = ["a0: &a0 [x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 15)]
    nested = "\n".join([*rows, "configs: [{config_name: x, data_files: *a14}]"])
    (tmp_path / "README.md").write_text(f"---\n{nested}\n---\n")
    with pytest.raises(InputError, match="after its aliases are expanded"):
        list(hub_datasets._names(tmp_path / "README.md"))
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.given.write_text(nested)
    assert not [*panels.given(run)]
