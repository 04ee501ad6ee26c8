"""What the program writes is declared: what backends and clean take for theirs is the same, here, by find(1) on a host, and in S3."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from trainfleet.backends import job_starts
from trainfleet.data.manifest import MANIFEST, PLAN, shard_path, unit_name
from trainfleet.hosts import host_commands
from trainfleet.hosts.host_results import Implausible
from trainfleet.run import contents
from trainfleet.run.run_folder import engine_log, job_log, node_log, scratch
from trainfleet.storage.folder_sync import STATE, file_of

HERE = Path()
DATASET = [
    PLAN, MANIFEST, "tokenizer.json", "lock", STATE, "lengths.png", unit_name(7), f"{shard_path('train', 12)}.bin", "train/00000.idx",
    "train/00001.77.partial", "train/00001.bin.77.partial", "validation/123456.bin", "progress/0-12.json", "progress/.3-1.json.7",
    str(node_log(HERE, 0)), str(engine_log(HERE, 12)), str(job_log(HERE)), f"{scratch(node_log(HERE, 3))}/0/stdout.log",
    "nodes/node-3", "nodes/node-3.sh", "nodes/node-3.exit", "nodes/node-3.said", str(job_starts.claim(HERE, "0123456789abcdef")),
    str(job_starts.claim(HERE, "")), "nodes/by-hand-7", "nodes/slurm-7-0/node-1.exit", "nodes/slurm-7-0/gate/logs/node-0.log",
    "cache/0123456789abcdef-3", "cache/0123456789abcdef-3.7.partial", ".plan.json.4711", "units/.00000.json.4711", "nodes/.node-3.0a1b2c3d",
]  # fmt: skip
OTHERS = [
    "book.txt", "train/book.txt", "plan.json.bak", "units/notes.json", "logs/mine.log", "nodes/readme", "text/lock", "manifest.jsonx",
    "cache/picture.png", "nodes/slurm-notes/a", "train/00000.bin.txt", "a b.txt", "ü.txt", "-rf",
]  # fmt: skip


def test_each_kind_of_file_is_the_program_s_and_no_other() -> None:
    assert contents.strangers(contents.DATASET, [*DATASET, *OTHERS]) == OTHERS


def test_a_path_that_a_row_gives_is_one_that_it_matches() -> None:
    words = {
        "split": "train",
        "digest": "0" * 16,
        "token": "0" * 16,
        "unit": "00000",
        "step": "step-00000007",
        "file": "loss",
    }
    for kind in contents.KINDS:
        path = str(
            kind.at("", **dict.fromkeys(contents.WORDS, 3) | words)
        ) + "/a" * kind.name.endswith("/")
        assert re.fullmatch(kind.pattern, path), kind


def test_a_host_removes_the_same_files_and_names_the_same_others(tmp_path: Path) -> None:
    folder = tmp_path / "data/a.b"
    for name in (*DATASET, *OTHERS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1")
    (folder / "train/00009.bin").symlink_to("/etc/passwd")
    (folder / "logs/node-9.parts").symlink_to(tmp_path)
    (tmp_path / "data/a_b").mkdir()
    (tmp_path / "data/a_b/plan.json").write_text("another's")
    command = host_commands.remove(str(tmp_path), ["data/a.b", "runs/gone"])
    said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    left = {f"data/a.b/{name}" for name in (*OTHERS, "train/00009.bin")}
    assert set(host_commands.read_left(said.stdout, ["data/a.b"])) == left and not said.stderr
    assert (tmp_path / "data/a_b/plan.json").exists()
    shutil.rmtree(folder)
    assert not subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    "text", ["/etc/passwd\n", "data/other/x\n", "data/text/a\x1b[2J\n", "data/text/x\n" * 300]
)
def test_what_a_host_says_that_it_left_is_not_believed_blindly(text: str) -> None:
    with pytest.raises(Implausible):
        host_commands.read_left(text, ["data/text"])


def test_the_objects_of_a_file_in_s3_are_known_by_its_name() -> None:
    assert (
        file_of("logs/node-0.log/1-00000042") == "logs/node-0.log"
        and file_of("asked/stop") == "stop"
    )
    assert (
        file_of("train/00000.bin") == "train/00000.bin"
        and file_of("book/1-00000042") == "book/1-00000042"
    )
