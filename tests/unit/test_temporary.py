"""Folders that last as long as some process uses them, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trainfleet.process import file_systems

HOLD = """import sys, time; from pathlib import Path; from trainfleet.process import file_systems as temporary
lock = temporary.hold(Path(sys.argv[1])); print("holds", flush=True); time.sleep(60)"""


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        env={"PYTHONPATH": "python"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "holds\n"
    return process


def test_what_a_kill_left_is_swept_and_what_is_in_use_stays(tmp_path: Path) -> None:
    used, left = holder(tmp_path / "used"), holder(tmp_path / "left")
    (tmp_path / "left" / "file").write_text("a")
    left.kill()
    left.communicate()
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "link").symlink_to(tmp_path / "used")
    file_systems.sweep(tmp_path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "used"]
    used.kill()
    used.communicate()


def test_a_folder_that_is_swept_before_it_is_held_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    for _ in range(50):
        descriptor = file_systems.hold(folder)
        file_systems.sweep([folder])
        assert folder.exists(), "two may hold it, none may remove it then"
        os.close(descriptor)
        file_systems.sweep([folder])
        assert not folder.exists()
