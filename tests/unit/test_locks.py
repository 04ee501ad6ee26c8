"""What is downloaded is what was locked: every file of every package by its SHA-256, every repository by its key."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from wheels import make_wheel

ROOT = Path(__file__).parents[2]
LOCKS = (
    "requirements.lock",
    "requirements-test.lock",
    "requirements-extras.lock",
    "requirements-cuda.lock",
)
LINE = re.compile(r"([a-z0-9][a-z0-9.-]*)==([^ ]+)( ; [^\\]+)? \\")
HASH = re.compile(r"    --hash=sha256:([0-9a-f]{64})( \\)?")
PLATFORM = yaml.safe_load((ROOT / "docker" / "platforms.lock.yaml").read_text())


def locked(name: str) -> dict[str, set[str]]:
    """`package==version` → the hashes of its files; a line that is neither fails."""
    found: dict[str, set[str]] = {}
    package = ""
    for line in (ROOT / name).read_text().splitlines():
        if match := HASH.fullmatch(line):
            found[package].add(match[1])
        else:
            match = LINE.fullmatch(line)
            assert match, f"{name}: {line}"
            package = f"{match[1]}=={match[2]}"
            found[package] = set()
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_is_pinned_with_the_hashes_of_its_files(name: str) -> None:
    found = locked(name)
    assert len(found) > 15 and all(found.values())


def test_what_pyproject_asks_for_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        "requirements.lock": project["dependencies"],
        "requirements-test.lock": [*extras["data"], *extras["test"], *extras["check"]],
        "requirements-extras.lock": [*extras["data"], *extras["fp8"], *extras["eval"]],
    }
    for name, requirements in wanted.items():
        packages = {
            re.sub(r"\[.*\]", "", line.partition(";")[0].strip()).lower() for line in requirements
        }
        assert packages <= set(locked(name)), name
    assert all("==" in line for lines in extras.values() for line in lines)


def test_the_cpu_builds_of_torch_are_locked_beside_the_usual_ones() -> None:
    torch = PLATFORM["components"]["torch"]
    for name in LOCKS[:3]:
        hashes = locked(name)[f"torch=={torch['version']}"]
        assert set(torch["cpu_wheels"].values()) < hashes and len(hashes) > 10
    cuda = {package.partition("==")[0] for package in locked("requirements-cuda.lock")}
    assert "nvidia-nccl-cu13" in cuda and not cuda & {
        package.partition("==")[0] for package in locked("requirements.lock")
    }


@pytest.mark.thorough
def test_a_node_takes_what_the_platform_pins_by_its_hash_alone(tmp_path: Path) -> None:
    """The real python.sh, with pip and without a network, as for Trn1: torch and torch-xla have hashes, Neuron's own have none."""
    (tmp_path / "scripts").mkdir()
    for name in ("pip_sources.py", "python.sh", "unpinned.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "requirements.lock").write_text(
        "torch==2.0 \\\n    --hash=sha256:" + "0" * 64 + "\n"
    )
    wheels = {
        name: make_wheel(tmp_path, name, f"1.0{build}")
        for name, build in (("torch", "+cpu"), ("torch_xla", ""), ("neuron", ""))
    }
    sums = {name: hashlib.sha256(wheel.read_bytes()).hexdigest() for name, wheel in wheels.items()}
    path = ":".join(part for part in os.environ["PATH"].split(":") if not Path(part, "uv").exists())
    environment = os.environ | {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONSTRAINT": "none.txt",
        "PATH": path,
    }
    for xla, code in (("0" * 64, 1), (sums["torch_xla"], 0)):
        pins = ["torch==1.0", f"--hash=sha256:{sums['torch']}", "torch-xla==1.0", f"--hash=sha256:{'1' * 64}",
                f"--hash=sha256:{xla}", "neuron==1.0"]  # fmt: skip
        done = subprocess.run(
            ["bash", "scripts/python.sh", "apply", str(tmp_path / "environment"), "file:///none/cpu", "file:///none", *pins],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert code == 0 or "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.thorough
def test_another_file_of_a_locked_version_is_not_installed(tmp_path: Path) -> None:
    """The real venv.sh, with pip and without a network: a wheel that fits its hash is installed, one that does not is refused."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    wheel = make_wheel(tmp_path, "plain")
    environment = os.environ | {
        "TRAINFLEET_PIP": "pip",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONSTRAINT": "none.txt",
    }
    for digest, code in (("0" * 64, 1), (hashlib.sha256(wheel.read_bytes()).hexdigest(), 0)):
        (tmp_path / "one.lock").write_text(f"plain==1.0 \\\n    --hash=sha256:{digest}\n")
        done = subprocess.run(
            ["bash", "scripts/venv.sh", "apply", "one.lock"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert code == 0 or "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.parametrize(
    ("python", "named"),
    [("", "there is none: install python3 and python3-venv"), ("3.9.2", "Python 3.9.2")],
)
def test_a_machine_without_a_python_that_will_do_is_told_so_in_one_line(
    python: str, named: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "dirname", "sleep", "awk", "uname", "env"):
        (programs / name).symlink_to(str(shutil.which(name)))
    if python:
        (programs / "python3").write_text(
            f"#!/bin/sh\n[ $1 = --version ] && echo Python {python} || exit 1\n"
        )
        (programs / "python3").chmod(0o755)
    done = subprocess.run(
        ["bash", "scripts/venv.sh", "apply", "a.lock"],
        cwd=tmp_path,
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"trainfleet needs Python 3.11 or newer as python3; {named}\n"


def test_of_an_index_that_does_not_answer_a_word_is_said_while_it_is_waited_for(
    tmp_path: Path,
) -> None:
    """The real pip; and whoever reminds ends with it."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    (tmp_path / ".venv/bin/python").chmod(0o755)
    (tmp_path / "one.lock").write_text(f"plain==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        environment = os.environ | {
            "TRAINFLEET_PIP": "pip", "TRAINFLEET_REMIND": "1", "PIP_INDEX_URL": address, "PIP_DEFAULT_TIMEOUT": "3", "PIP_RETRIES": "0",
            "PIP_CONFIG_FILE": os.devnull,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "scripts/venv.sh", "apply", "one.lock"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
    said = [line for line in done.stdout.splitlines() if line.startswith("still at it: ")]
    assert (
        done.returncode != 0 and len(said) == 1 and "the package index does not answer" in said[0]
    ), done.stdout + done.stderr


def test_a_package_of_neuron_that_is_pinned_nowhere_is_named(tmp_path: Path) -> None:
    for name, asks in {  # as tests/recorded_indexes.yaml has them, and what an extra asks for
        "torch-neuronx": ["libneuronxla<2.3,>=2.2", "numpy"],
        "neuronx-cc": ["nki~=0.5.0", "nrt-x; extra == 'x'"],
    }.items():
        place = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        place.mkdir()
        lines = [f"Requires-Dist: {ask}" for ask in asks]
        (place / "METADATA").write_text(
            "\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *lines, ""])
        )
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "unpinned.py", "torch-neuronx", "neuronx-cc"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "libneuronxla nki\n"
