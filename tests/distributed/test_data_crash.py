"""Tokenizing that is killed at any moment, by any number of nodes, ends in the same bytes.

KILLS=50 pytest tests/distributed/test_data_crash.py  for the long form.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainfleet.config import Settings, dump_resolved, load

KILLS = int(os.environ.get("KILLS", "6"))
PACKAGE = Path(__file__).parents[2] / "python"
CONFIG = """
name: crash
data: {name: set, sources: [text], vocab_size: 600}
"""


def start(folder: Path, nodes: int) -> list[subprocess.Popen[bytes]]:
    """The nodes of one job, each the leader of its own process group, the last with two processes."""
    processes = []
    for node in range(nodes):
        environment = os.environ | {
            "PYTHONPATH": str(PACKAGE),
            "NODE_RANK": str(node),
            "NODES": str(nodes),
        }
        environment["WORKERS"] = "2" if node == nodes - 1 else "1"
        command = [sys.executable, "-m", "trainfleet.data", "resolved.yaml"]
        processes.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        )
    return processes


def content(folder: Path) -> dict[str, str]:
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in (".bin", ".idx", ".json")
    ]
    kept = [path for path in files if path.parent.name != "progress" and path.name != "head.json"]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in kept
    }


def prepare(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    before = Path.cwd()
    os.chdir(folder)
    try:
        config, _ = load(Settings(Path("config.yaml")))
    finally:
        os.chdir(before)
    (folder / "resolved.yaml").write_text(dump_resolved(config))
    (folder / "text").symlink_to(folder.parent / "text")


def finish(folder: Path, nodes: int) -> None:
    for process in start(folder, nodes):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()


def test_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    source = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    for i in range(10):  # a unit each: files of about 4 MB
        (text / f"{i}.txt").write_text(
            "\n".join(f"{i} {j} {source}" for j in range(-(-4_000_000 // len(source))))
        )
    prepare(tmp_path / "whole")
    began = time.monotonic()
    finish(tmp_path / "whole", 1)
    took = time.monotonic() - began
    expected = content(tmp_path / "whole" / "data" / "set")
    assert sum(name.startswith("units/") for name in expected) >= 8

    prepare(tmp_path / "killed")
    dataset, draw, during = tmp_path / "killed" / "data" / "set", random.Random(KILLS), 0
    for _ in range(KILLS):
        processes = start(tmp_path / "killed", draw.randint(1, 4))
        time.sleep(
            draw.uniform(0.15, 0.55) * took
        )  # on any machine, most of them in the middle of work
        during += any(process.poll() is None for process in processes)
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            _, errors = process.communicate()
            assert process.returncode in (0, -signal.SIGKILL), errors.decode()
        if (
            dataset / "manifest.json"
        ).exists():  # it was quicker: some of it is lost, and made again
            for path in [
                dataset / "manifest.json",
                *draw.sample(sorted(dataset.glob("units/*")), 7),
            ]:
                path.unlink()
    assert during > KILLS // 3, "most of the kills came while there was work"
    finish(tmp_path / "killed", draw.randint(1, 4))
    assert content(dataset) == expected
    assert not list(dataset.rglob("*.partial"))
