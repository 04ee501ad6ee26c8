"""make setup, make tokenize, make train NODES=4 on four hosts as Debian leaves them: an environment built there, this machine's losses."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fleet.lab import Lab, lab
from requirement import missing
from verbs import enter, losses

ROOT = Path(__file__).parents[2]
STEPS = "SET=train.precision=fp32 train.steps=20 train.log_every=1 train.validate_every=0"
PIP = "[global]\nno-index = true\nfind-links = /fsx/wheels\n"


def python_of_nodes() -> str:
    """The interpreter that setup finds on the lab's nodes, whose /usr is this machine's."""
    for minor in (13, 12, 11):
        path = shutil.which(f"python3.{minor}", path="/usr/local/bin:/usr/bin:/bin")
        if (
            path
            and not subprocess.run(
                [path, "-c", "import ensurepip"], check=False, capture_output=True
            ).returncode
        ):
            return path
    missing(
        "this machine's own Python is older than 3.11 or can't make environments: apt-get install python3-venv"
    )


def put_wheels(folder: Path) -> None:
    """What a node would load from the index, as the lab is cut off from it."""
    environment = folder.with_name("downloader")
    subprocess.run([python_of_nodes(), "-m", "venv", environment], check=True)
    download = [
        f"{environment}/bin/pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        "--find-links",
        str(folder),
    ]
    torch = next(
        line.split()[0]
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if line.startswith("torch==")
    )
    cpu = [
        "--retries",
        "0",
        "--timeout",
        "8",
        "--index-url",
        "https://download.pytorch.org/whl/cpu",
        torch,
    ]
    folder.mkdir()
    subprocess.run(
        [*download, *cpu], check=False, capture_output=True
    )  # a tenth of the usual build, where it can be had
    for lock in ("requirements.lock", "requirements-cuda.lock"):
        if lock == "requirements-cuda.lock" and list(folder.glob("torch-*+cpu-*")):
            return
        done = subprocess.run(
            [*download, "--requirement", str(ROOT / lock)],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            missing(f"the wheels of {lock} can't be downloaded: {done.stderr[-500:]}")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Lab]:
    wheels = tmp_path / "wheels"
    put_wheels(wheels)
    with lab(4) as up:
        shutil.move(wheels, up.shared / "wheels")
        for node in range(4):
            (up.root(node) / "etc/pip.conf").write_text(PIP)
        yield up


@pytest.mark.timeout(900)
def test_four_plain_hosts_train_what_this_machine_trains(
    nodes: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRAINFLEET_TRIAL")  # hosts go by their own trial, so this machine does
    there, here = tmp_path / "there", tmp_path / "here"
    default = yaml.safe_load((ROOT / "config.yaml").read_text())
    fleet = nodes.fleet("trainer", nodes=4, python=None)  # setup builds the environment
    for folder, changes in ((there, {"fleet": fleet}), (here, {})):
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(default | changes))

    assert "4 of 4 hosts ready, 4 changed" in enter(there, "setup")
    enter(there, "tokenize", "NODES=4")
    enter(there, "train", "NODES=4", STEPS)
    assert "4 of 4 hosts ready, 0 changed" in enter(there, "setup")
    stamps = {
        path: path.stat().st_mtime_ns for path in (nodes.shared / "trainfleet/data").rglob("*.bin")
    }
    enter(there, "tokenize", "NODES=4")
    assert stamps and stamps == {path: path.stat().st_mtime_ns for path in stamps}
    assert "nothing to do" in enter(there, "train", "NODES=4", STEPS)

    environment = next(
        (nodes.shared / "trainfleet/env").glob("*/bin/python")
    )  # of the same standard library, which is the data
    enter(here, "train", "NODES=2", STEPS, python=str(environment))
    assert (
        losses(there / "runs/first-run") == pytest.approx(losses(here / "runs/first-run"), rel=1e-5)
        and len(losses(there / "runs/first-run")) == 20
    )
