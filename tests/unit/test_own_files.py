"""A dataset, a folder or one of the Hub, reads its own files alone: a README that names others is refused, and nobody is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError

from trainfleet.config.addresses import dataset_of
from trainfleet.data import hub_datasets
from trainfleet.trust.errors import DataError

SECRET = "a secret beside the folder"
LINE = json.dumps({"text": SECRET}) + "\n"
REVISION = "0123456789" * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset with one file, and a file beside it."""
    (tmp_path / "secret.jsonl").write_text(LINE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/train.jsonl").write_text(LINE)
    (tmp_path / "set/data").mkdir(parents=True)
    (tmp_path / "set/data/train.jsonl").write_text(json.dumps({"text": "its own"}) + "\n")
    return tmp_path / "set"


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, as a node's metadata service is one, and what it was asked."""
    asked = list[str]()

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(LINE)))
            self.end_headers()
            self.wfile.write(LINE.encode())

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}", asked
        listening.shutdown()


def describe(folder: Path, config: str) -> str:
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n{config}---\n")
    return f"hf://{folder}"


def texts(source: str) -> list[str]:
    return [record["text"] for record in hub_datasets.open_dataset(source)]


NAMED = [
    "data_files: ../secret.jsonl", "data_files: data/../../secret.jsonl", "data_files: {beside}/secret.jsonl",
    "data_files: ['data/*.jsonl', '../*.jsonl']", "data_dir: ../other", "data_dir: {beside}/other",
    "data_files: file://{beside}/secret.jsonl", "data_files: 'zip://a.jsonl::{beside}/secret.zip'",
    "data_files: {server}/latest/meta-data/a.jsonl", "data_files: hf://datasets/other/set/a.jsonl", "data_files: ~/secret.jsonl",
    "data_files:\n  - split: train\n    path: ../secret.jsonl", "data_dir: {server}/latest", "data_files: !!set {{../secret.jsonl}}",
]  # fmt: skip


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_a_folder_that_names_other_files_is_refused_and_nobody_is_asked(
    named: str, name: str, folder: Path, server: tuple[str, list[str]]
) -> None:
    address, asked = server
    config = "".join(
        f"  {line}\n" for line in named.format(beside=folder.parent, server=address).split("\n")
    )
    source = describe(folder, config)
    if name != "README.md":
        (folder / name).write_text((folder / "README.md").read_text().strip("-\n"))
        (folder / "README.md").unlink()
    with pytest.raises(DataError, match="refers to a file outside the dataset") as refusal:
        texts(source)
    assert not asked
    assert "README.md" in str(refusal.value) and source in str(refusal.value)


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "named", ["data_files: *i", "data_files: &z [*z]", f"data_files: {'[' * 500}{']' * 500}"]
)
@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_a_description_that_expands_without_end_is_refused(
    named: str, name: str, folder: Path
) -> None:
    content = f"{LAUGHS}configs:\n- config_name: default\n  {named}\n"
    (folder / name).write_text(f"---\n{content}---\n" if name == "README.md" else content)
    with pytest.raises(
        DataError, match=r"has more than 1,000,000 values|maximum recursion depth"
    ) as refusal:
        texts(f"hf://{folder}")
    assert str(folder) in refusal.value.where and refusal.value.next


def test_a_link_out_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "data/train-2.jsonl").symlink_to(folder.parent / "secret.jsonl")
    with pytest.raises(DataError, match="outside the dataset"):
        texts(f"hf://{folder}")


def test_a_folder_reads_its_own_files(folder: Path) -> None:
    assert texts(f"hf://{folder}") == ["its own"]
    assert texts(describe(folder, "  data_files: data/*.jsonl\n")) == ["its own"]
    assert texts(describe(folder, "  data_dir: data\n")) == ["its own"]


def test_a_revision_in_the_hubs_cache_is_a_folder_whose_files_are_links(tmp_path: Path) -> None:
    cached = tmp_path / "datasets--me--set"
    snapshot = cached / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (cached / "blobs").mkdir()
    (cached / "blobs/abc").write_text(LINE)
    (snapshot / "train.jsonl").symlink_to("../../blobs/abc")
    assert texts(f"hf://{snapshot}") == [SECRET]


OWN = f"hf://datasets/me/set@{REVISION}"


@pytest.mark.parametrize(
    ("files", "good"),
    [
        ([f"{OWN}/a.jsonl", f"{OWN}/b/c.jsonl"], True),
        ([f"{OWN}/a.jsonl", "hf://datasets/me/set@main/b.jsonl"], False),
        ([f"hf://datasets/me/other@{REVISION}/a.jsonl"], False),
        ([f"hf://datasets/me/settle@{REVISION}/a.jsonl"], False),
        ([f"hf://datasets/me/set@{REVISION}/../../other@main/a.jsonl"], False),
        (["/etc/passwd"], False),
        (["https://example.org/a.jsonl"], False),
        (["http://169.254.169.254/latest/meta-data/a.jsonl"], False),
        ([f"zip://a.jsonl::{OWN}/a.zip"], False),
        ([f"{OWN}/a.zip::https://example.org/a.jsonl"], False),
    ],
)
def test_a_dataset_of_the_hub_has_files_of_its_repository_and_revision(
    files: list[str], good: bool
) -> None:
    builder = SimpleNamespace(hash=REVISION, config=SimpleNamespace(data_files={"train": files}))
    found = dataset_of("hf://me/set")
    if good:
        hub_datasets._require_own(builder, found, "hf://me/set")
    else:
        with pytest.raises(DataError, match="outside the dataset"):
            hub_datasets._require_own(builder, found, "hf://me/set")


@pytest.mark.parametrize("name", hub_datasets.DESCRIPTIONS)
@pytest.mark.parametrize(("named", "good"), [("data/*.jsonl", True), ("../secret.jsonl", False), ("{server}/a.jsonl", False),
                                              ("hf://datasets/other/set/a.jsonl", False)])  # fmt: skip
def test_a_dataset_of_the_hub_is_refused_by_its_description(
    name: str,
    named: str,
    good: bool,
    tmp_path: Path,
    server: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the library looks for files: of the Hub, only the files that describe the dataset are asked for."""
    address, asked = server
    config = f"configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: '{named.format(server=address)}'\n"
    (tmp_path / name).write_text(f"---\n{config}---\n" if name.endswith(".md") else config)

    def given(repository: str, name: str, *, repo_type: str, revision: str | None) -> str:
        assert (repository, repo_type, revision) == ("me/set", "dataset", "v1")
        if not (tmp_path / name).exists():
            raise EntryNotFoundError(name)
        return str(tmp_path / name)

    loaded = list[str]()
    hub_datasets._fetched.cache_clear()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", given)
    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda name, *_, **__: loaded.append(name) or 1 / 0
    )
    with pytest.raises(DataError, match="ZeroDivisionError" if good else "outside the dataset"):
        hub_datasets.open_dataset("hf://me/set@v1")
    assert loaded == (["me/set"] if good else []) and not asked
