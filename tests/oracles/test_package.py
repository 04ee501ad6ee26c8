"""The wheel, installed elsewhere: the command does what make does, from any folder with a config.yaml."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from trainfleet.trust.errors import RunError

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("release", ROOT / "scripts/release.py")
assert SPEC and SPEC.loader
release = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release)
SMALL = (
    "name=small train.steps=4 train.compile=false model.layers=1 model.hidden_size=32 model.heads=2 model.kv_heads=2 "
    "model.intermediate_size=64 data.vocab_size=300 train.validate_every=0"
)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a virtual environment that has the wheel, and no checkout."""
    folder = tmp_path_factory.mktemp("package")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=240)
    (wheel,) = folder.glob("trainfleet-*.whl")
    venv.create(folder / "env", with_pip=False)
    site = next((folder / "env").glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = folder / "env/bin/python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        str(wheel),
    ]
    subprocess.run(install, check=True, timeout=120)
    return folder / "env/bin/trainfleet"


def run(command: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [command, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_it_trains_and_names_commands_as_they_are_typed(command: Path, tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    for number in range(40):
        (tmp_path / f"books/{number}.txt").write_text(
            "The quick brown fox jumps over the lazy dog, once and again. " * 60
        )
    wrote = run(command, tmp_path, "config", "RECIPE=first-run")
    assert wrote.returncode == 0 and "next: trainfleet train" in wrote.stdout, wrote
    trained = run(command, tmp_path, "train", f"SET={SMALL} data.name=books data.sources=[books]")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "trainfleet sample CONFIG=" in trained.stdout and "make " not in trained.stdout
    assert (tmp_path / "runs/small/report.html").exists()
    assert run(command, tmp_path, "report", "SET=name=small").returncode == 0


def test_help_version_and_mistakes(command: Path, tmp_path: Path) -> None:
    assert run(command, tmp_path, "--version").stdout.startswith("trainfleet 0.")
    listed = run(command, tmp_path, "--help").stdout
    assert (
        "  train " in listed
        and "Begin with: trainfleet train" in listed
        and "\n  check " not in listed
    )
    assert "  NODES " in run(command, tmp_path, "train", "--help").stdout
    wrong = run(command, tmp_path, "trian")
    assert (
        wrong.returncode == 2
        and "did you mean train?\n  next: trainfleet --help shows" in wrong.stderr
    )
    assert (
        run(command, tmp_path, "train", "NODES=4; touch x").returncode == 2
        and not (tmp_path / "x").exists()
    )


def test_the_files_that_hosts_receive_are_those_of_the_checkout(command: Path) -> None:
    words = "from trainfleet.hosts.tar import code_files, content_hash; print(content_hash(code_files('')))"
    python = command.with_name("python")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    installed = subprocess.run(
        [python, "-c", words], env=clean, capture_output=True, text=True, check=True
    ).stdout
    here = subprocess.run(
        [sys.executable, "-c", words],
        env=clean | {"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert installed == here


def test_a_release_is_built_and_checked_and_an_unready_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel of the sdist is the wheel of the checkout. Packages are those of this environment."""
    wheel, sdist = release.build(tmp_path / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    monkeypatch.setattr(release, "ROOT", tmp_path / sdist.name.removesuffix(".tar.gz"))
    again, _ = release.build(tmp_path / "again")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()
    monkeypatch.setattr(release, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    with pytest.raises(RunError, match="changes that no commit has"):
        release.refuse_unready("0.2.0")
    (tmp_path / ".gitignore").write_text("*\n")
    (tmp_path / "CHANGELOG.md").write_text("## 0.2.0 (unreleased)\n")
    with pytest.raises(RunError, match="does not date this version"):
        release.refuse_unready("0.2.0")
    (tmp_path / "CHANGELOG.md").write_text("## 0.2.0 (2026-12-01)\n")
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    with pytest.raises(RunError, match=r"README\.md: have a placeholder"):
        release.refuse_unready("0.2.0")
    (tmp_path / "README.md").unlink()
    release.refuse_unready("0.2.0")
    venv.create(tmp_path / "place/env", with_pip=False)
    site = next((tmp_path / "place/env").glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    release.check(wheel, tmp_path / "place", [])
