"""Files that lie where a verb is typed, under the names of packages and programs: none of them is taken for one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainfleet.backends.local import Local
from trainfleet.config import Settings, load
from trainfleet.models import custom_model
from trainfleet.plan.job import train_job
from trainfleet.process.install_paths import CODE, ROOT

SHADOWS = ("yaml", "random", "signal", "locale", "json", "numpy", "rich", "test", "train")
EVIL = "import os\nos.write(2, b'SHADOWED ' + __name__.encode())\nraise SystemExit(70)\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config, and with files that are called as packages and programs are."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(EVIL)
    for name in ("git", "ssh", "sh"):
        (tmp_path / name).write_text("#!/bin/sh\necho SHADOWED >&2\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("words " * 100)
    (tmp_path / "config.yaml").write_text("name: x\ndata: {sources: [text]}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "way", [{}, {"PATH": f".:{os.environ['PATH']}"}, {"PATH": f":{os.environ['PATH']}"}]
)
def test_a_verb_takes_no_file_of_the_folder_for_a_package_or_a_program(
    here: Path, way: dict[str, str]
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    words = [sys.executable, "-m", "trainfleet", "plan"]
    done = subprocess.run(
        words,
        env=environment | {"PYTHONPATH": str(CODE)} | way,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "SHADOWED" not in done.stderr, done.stderr
    assert "next: make train" in done.stdout


def test_make_and_every_image_say_so_before_python_starts() -> None:
    assert re.search(
        r"^override export PYTHONSAFEPATH := 1\b", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert "PYTHONSAFEPATH=1" in (ROOT / "docker/Dockerfile").read_text()


def test_whoever_says_where_our_code_is_also_says_that_the_folder_is_not() -> None:
    """Every line that gives a process PYTHONPATH: scripts of nodes, errands, the preflight, the head's launcher."""
    bare = {str(path.relative_to(CODE)) for path in CODE.rglob("*.py") if re.search(r"\bPYTHONPATH\b.*=|PYTHONPATH\":", path.read_text())
            and not re.search("PYTHONSAFEPATH|python_path", path.read_text())}  # fmt: skip
    assert bare == {"trainfleet/hardware/cpu_speed.py", "trainfleet/launch/rehearsal.py"}, (
        "these two pass their own environment on"
    )


@pytest.mark.usefixtures("here")
def test_a_nodes_script_says_so() -> None:
    config = load(Settings(Path("config.yaml")))[0]
    assert "export PYTHONSAFEPATH=1" in Local(config).plan(train_job(config), {}).artifacts[0].text


def test_a_network_of_your_own_still_finds_its_neighbours_and_shadows_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(here))])
    (here / "beside.py").write_text("WIDTH = 3\n")
    (here / "my_model.py").write_text(
        "import json\nfrom beside import WIDTH\nassert json.dumps(WIDTH) == '3'\n"
    )
    assert custom_model.module_at("my_model.py", "model.module").WIDTH == 3
