"""A lab of two nodes for one test, and the commands as a user types them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.lab import Lab, lab

ROOT = Path(__file__).parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def pair() -> Iterator[Lab]:
    with lab(2) as nodes:
        yield nodes


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(nodes, "setup", user="trainer", hosts=[...], NODES=2): a verb in a folder of its own, on these nodes."""

    def call(
        nodes: Lab, verb: str, user: str = "root", hosts: list[str] | None = None, **words: Any
    ) -> subprocess.CompletedProcess[str]:
        fleet = nodes.fleet(user, nodes=2) | ({"hosts": hosts} if hosts else {})
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"name": "lab", "fleet": fleet}))
        arguments = [f"{name}={value}" for name, value in words.items()]
        return subprocess.run([sys.executable, "-m", "trainfleet", verb, *arguments], cwd=tmp_path, capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": str(ROOT / "python")}, stdin=subprocess.DEVNULL, check=False, timeout=280)  # fmt: skip

    return call


def lines(output: str) -> dict[str, str]:
    """Host → its line of a table."""
    return {line.split()[0]: line for line in output.splitlines() if line.startswith("node")}
