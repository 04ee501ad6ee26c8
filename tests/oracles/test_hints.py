"""Each command that a message names to install what is missing, run as it is typed (with --dry-run: nothing is installed)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainfleet.process import install_paths
from trainfleet.run.loggers import SERVICES
from wheels import make_wheel

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "package",
    [
        "boto3",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("pyarrow", "zstandard", *SERVICES)
        ),
    ],
)
def test_a_hint_installs_the_package(package: str, tmp_path: Path) -> None:
    """Real pip takes the command, from a folder of wheels; the name is one that the locks and the judges' environments install."""
    make_wheel(tmp_path, package)
    assert re.search(
        rf"^{package}==",
        (ROOT / "requirements.lock").read_text() + (ROOT / "tests/oracles/loggers.txt").read_text(),
        re.M,
    )
    command = install_paths.installing_package(package)
    assert command == f"{sys.executable} -m pip install {package}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    given = kept | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }
    words = f"{command} --dry-run --no-deps --quiet"
    done = subprocess.run(
        words, shell=True, env=given, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_to_name_the_command_spoils_no_later_import() -> None:
    """torch.compile loads setuptools, which fails in a process that has looked for pip as a module."""
    code = "from trainfleet.process import install_paths as origin; origin.installing_package('wandb'); import setuptools"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_extra_that_a_message_names_is_one_and_is_in_the_lock_that_the_command_installs() -> (
    None
):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    code = "".join(path.read_text() for path in (ROOT / "python").rglob("*.py"))
    named = set(re.findall(r"""installing\(["'](\w+)["']\)""", code))
    assert named == {"data", "eval", "fp8"} and named <= set(extras)
    words = install_paths.installing("data").split()
    assert words[:2] == ["scripts/venv.sh", "apply"] and (ROOT / words[0]).exists()
    locked = (ROOT / words[2]).read_text().lower()
    for extra in named:
        assert all(
            re.sub(r"\[.*\]", "", requirement).lower() in locked for requirement in extras[extra]
        )
