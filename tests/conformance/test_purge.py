"""After `make train` and `make clean PURGE=1` nothing of the run is left where it was, on any backend."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from aws.schedulers import site as account_and_bucket
from fleet.lab import lab
from fleet.slurmlab import cluster
from fleet.test_cloud import Place, account_on
from trainfleet.backends import BACKENDS
from trainfleet.storage import s3
from verbs import PACKAGES, ROOT, enter, finish, write_text

CONFIG = {
    "name": "gone",
    "data": {"name": "text", "sources": ["text"], "vocab_size": 340, "validation_fraction": 0.1},
    "model": {"layers": 2, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
    "train": {"steps": 4, "precision": "fp32", "global_batch_size": 8, "sequence_length": 32, "log_every": 1, "validate_every": 0},
    "checkpoint": {"every": 2},
}  # fmt: skip


@dataclass
class Desk:
    """Where verbs are typed, and the folders and addresses that runs and datasets are in."""

    type: Callable[..., str]
    parents: tuple[Path, ...]
    bucket: str = ""

    def add(self, name: str) -> None:
        """A file of the user's, in the folder of the dataset."""
        for parent in self.parents[-1:]:
            (parent / name).parent.mkdir(parents=True, exist_ok=True)
            (parent / name).write_text("mine")
        if self.bucket:
            s3.write(f"{self.bucket}sets/{name.removeprefix('data/')}", b"mine")

    def left(self) -> list[str]:
        """What is in runs/ and data/, at any depth."""
        here = [
            path
            for parent in self.parents
            for room in ("runs", "data")
            for path in (parent / room).rglob("*")
        ]
        there = [found.address for found in s3.list_objects(self.bucket)] if self.bucket else []
        return sorted(map(str, [*here, *there]))


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | changes))
    return folder


@contextmanager
def local(folder: Path) -> Iterator[Desk]:
    write_text(write(folder / "desk", fleet={"nodes": 2}) / "text")
    yield Desk(lambda *words: enter(folder / "desk", *words), (folder / "desk",))


@contextmanager
def ssh(folder: Path) -> Iterator[Desk]:
    with lab(2) as nodes:
        write_text(nodes.shared / "text")
        data = CONFIG["data"] | {"sources": ["/fsx/text"]}  # type: ignore[operator]
        desk = write(folder / "desk", fleet=nodes.fleet(nodes=2), data=data)
        enter(desk, "setup")
        yield Desk(lambda *words: enter(desk, *words), (desk, nodes.shared / "trainfleet"))


@contextmanager
def slurm(folder: Path) -> Iterator[Desk]:
    with lab(2) as nodes, cluster(nodes):
        desk = write(nodes.shared / "work", fleet={"backend": "slurm", "nodes": 2})
        write_text(desk / "text")
        yield Desk(lambda *words: enter(desk, *words), (desk,))


@contextmanager
def ec2(folder: Path) -> Iterator[Desk]:
    with lab(2) as nodes, account_on(nodes) as (_, _, address):
        write_text(nodes.shared / "text")
        place = Place(folder / "desk", address, nodes)
        place.type("setup", "NODES=2")
        # The file system of the nodes goes with the stack.
        yield Desk(
            lambda *words: (
                place.type(*words, "NODES=2") if words[0] == "train" else place.type(*words)
            ),
            (place.folder,),
        )


@contextmanager
def engine(name: str, folder: Path) -> Iterator[Desk]:
    with account_and_bucket(folder / "engine") as account:
        for path in write_text(folder / "text").iterdir():
            s3.write(f"s3://bucket/text/{path.name}", path.read_bytes())
        data = CONFIG["data"] | {
            "sources": ["s3://bucket/text"],
            "tokenized_path": "s3://bucket/ours/sets",
        }  # type: ignore[operator]
        fleet = account.fleet(name) | {"nodes": 2, "shared_folder": "s3://bucket/ours/some"}
        desk = write(
            folder / "desk",
            data=data,
            fleet=fleet,
            checkpoint={"every": 2, "path": "s3://bucket/ours/saved"},
        )

        def type(*words: str) -> str:
            environment = (
                os.environ | account.environment | {"PYTHONPATH": PACKAGES, "NO_COLOR": "1"}
            )
            program = [sys.executable, str(ROOT / "tests/aws/elsewhere.py"), *words]
            return finish(subprocess.Popen(program, cwd=desk, env=environment, text=True, stdin=subprocess.DEVNULL,
                                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT))  # fmt: skip

        yield Desk(type, (desk,), "s3://bucket/ours/")


DESKS: dict[str, Callable[[Path], Any]] = {
    "local": local, "ssh": ssh, "slurm": slurm, "ec2": ec2,
    "batch": lambda folder: engine("batch", folder), "sagemaker": lambda folder: engine("sagemaker", folder),
}  # fmt: skip


pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_purge_leaves_an_empty_parent(name: str, tmp_path: Path) -> None:
    with DESKS[name](tmp_path) as desk:
        desk.type("train")
        assert len(desk.left()) > 10
        said = desk.type("clean", "PURGE=1", "YES=1")
        assert desk.left() == [], said
        assert "did not write" not in said, said


@pytest.mark.parametrize(
    "name", sorted(set(BACKENDS) - {"ec2"})
)  # where the whole file system goes
def test_a_purge_leaves_a_text_of_the_user_s_in_the_folder_of_the_dataset(
    name: str, tmp_path: Path
) -> None:
    with DESKS[name](tmp_path) as desk:
        desk.type("tokenize")
        desk.add("data/text/book.txt")
        said = desk.type("clean", "PURGE=1", "YES=1")
        assert [Path(path).name for path in desk.left() if not Path(path).is_dir()] in (
            ["book.txt"],
            ["book.txt"] * 2,
        ), said
        assert (
            "data/text/book.txt: trainfleet did not write it" in said
            or "sets/text/book.txt: trainfleet did not" in said
        )


@pytest.mark.parametrize(
    "name", sorted(set(BACKENDS) - {"ec2"})
)  # where another config has machines of its own
def test_a_purge_beside_another_config_s_run_leaves_that_run_alone(
    name: str, tmp_path: Path
) -> None:
    theirs = "SET=name=stays data.name=theirs train.steps=30 train.schedule_steps=30"
    with DESKS[name](tmp_path) as desk, ThreadPoolExecutor(1) as pool:
        desk.type("train")
        running = pool.submit(desk.type, "train", theirs)
        while not any("/runs/stays/" in path for path in desk.left()) and not running.done():
            time.sleep(0.1)
        with suppress(
            AssertionError
        ):  # it is refused where both run folders are on this machine: "still running"
            desk.type("clean", "PURGE=1", "YES=1")
        running.result()
        assert "finished" in desk.type("status", theirs)
        said = desk.type("clean", "PURGE=1", "YES=1")
        assert not [
            path for path in desk.left() if "gone" in Path(path).parts or "text" in Path(path).parts
        ], said
        assert {"stays", "theirs"} <= {part for path in desk.left() for part in path.split("/")}, (
            said
        )
