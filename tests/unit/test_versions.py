"""A version that stands outside the locks is found, wherever it is put; what only tells of one is left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def look(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "versions.py", *files],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.thorough  # `make check` runs it
def test_the_tree_has_none() -> None:
    done = look()
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("scripts/efa.sh", "version=${2:?$usage}", "version=${2:-1.43.2}"),
        ("scripts/efa.sh", "aws-efa-installer-$version.tar.gz", "aws-efa-installer-1.51.0.tar.gz"),
        ("scripts/python.sh", 'install --no-deps --index-url "$other"', 'install --no-deps "torch==2.8"'),
        ("scripts/docker.sh", "install -y -qq -o", "install -y docker.io=24.0.7 -y -qq -o"),
        ("docker/Dockerfile", "FROM ${BASE_IMAGE} AS base", "FROM ubuntu:24.04 AS base"),
        ("docker/Dockerfile", "FROM ${BASE_IMAGE} AS base", "FROM registry.example/library/ubuntu:22.04 AS base"),
        ("docker/Dockerfile", "ARG EFA_VERSION=", "ARG EFA_VERSION=1.40.0"),
        ("docker/Dockerfile", "ARG TORCH_INDEX", "ARG CUDA_VERSION=12.6"),
        ("python/trainfleet/recipes/llama-3-8b-p5.yaml", "fleet:", "fleet:\n  container: 123.dkr/x/trainfleet:2.1"),
        ("python/trainfleet/hosts/install_steps.py", 'NOFILE = 65536', 'EFA = "1.51.0"'),
        ("python/trainfleet/hosts/install_steps.py", 'NOFILE = 65536', 'PIN = "neuronx-cc==2.21"'),
        (".ci/run", "make check", "pip install uv==0.9.2\nmake check"),
        ("README.md", "\n", "\nIt is tested with EFA 1.51.0.\n"),
        ("README.md", "\n", "\npip install neuronx-cc of 2.28.7631.0\n"),
    ],
)  # fmt: skip
def test_one_that_is_written_by_hand_is_named(
    tmp_path: Path, file: str, before: str, after: str
) -> None:
    text = (ROOT / file).read_text()
    assert before in text
    copy = tmp_path / Path(file).name
    copy.write_text(text)
    assert look(copy).returncode == 0
    copy.write_text(text.replace(before, after, 1))
    done = look(copy)
    assert (
        done.returncode == 1
        and f"{copy}:" in done.stdout
        and "docker/platforms.lock.yaml" in done.stdout
    )


@pytest.mark.parametrize(
    "line",
    [
        "# seen with torch 2.13, and in EFA 1.38",
        "address=10.0.0.1/16",
        'echo "Python 3.11 or newer"',
        "sleep 0.5",
        "x=$((1 + 2))",
        "ratio=1.25",
    ],
)
def test_what_is_no_version_or_only_tells_of_one_is_left_alone(tmp_path: Path, line: str) -> None:
    script = tmp_path / "a.sh"
    script.write_text(f"#!/usr/bin/env bash\n{line}\n")
    assert look(script).returncode == 0, look(script).stdout


def test_code_may_say_where_it_met_a_version(tmp_path: Path) -> None:
    code = tmp_path / "a.py"
    code.write_text(
        '"""As torch 2.13.0 has it."""\n# libfabric 2.7.0\nWORDS = "gone since NCCL 2.5"\n'
    )
    assert look(code).returncode == 0, look(code).stdout
    code.write_text('PIN = "torch 2.13.0"\n')
    assert look(code).returncode == 1
