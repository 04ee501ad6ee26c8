"""A platform is a package of its own: nothing in trainfleet names it but one table, and one of somebody else's is found as ours is."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_walls import CONTROL, FILES, PACKAGE

from trainfleet import devices
from trainfleet.config import platforms
from trainfleet.hosts.tar import code_files
from trainfleet.process import install_paths
from trainfleet.trust.errors import RunError

ROOT = PACKAGE.parents[1]
OWN = ROOT / "python/trainfleet_nxd"
OURS = sorted(OWN.glob("*.py"))
TOY = """
from pathlib import Path
class Toy:
    device = "toy"
    def open(self, index):
        return f"toy {index}"
    def arrange(self, config, world):
        return "divided"
    def checkpoint_at(self, address):
        return Path(address) if (Path(address) / "toy").exists() else None
"""


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, with a platform in it."""
    (tmp_path / "toys.py").write_text(TOY)
    (tmp_path / "toys-1.dist-info").mkdir()
    (tmp_path / "toys-1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: toys\nVersion: 1\n"
    )
    (tmp_path / "toys-1.dist-info/entry_points.txt").write_text(
        "[trainfleet.platforms]\ntoy = toys:Toy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    platforms.named.cache_clear()
    yield tmp_path
    platforms.named.cache_clear()
    sys.modules.pop("toys", None)


def test_nothing_in_trainfleet_names_the_package_but_the_table_and_what_is_sent() -> None:
    named = {
        str(path.relative_to(PACKAGE)) for path in FILES if "trainfleet_nxd" in path.read_text()
    }
    assert named == {"config/platforms.py", "process/install_paths.py"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(
                name.split(".")[0] in ("trainfleet_nxd", "neuronx_distributed") for name in names
            ), path


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_the_package_keeps_the_walls_and_the_measures(path: Path) -> None:
    tree = ast.parse(path.read_text())
    rooms = {
        (node.module or "").split(".")[1]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainfleet.")
    }
    assert not rooms & CONTROL
    assert path.read_text().count("\n") <= 450
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno <= 60, node.name


def test_a_plain_checkout_finds_it_and_its_checkpoints_without_metadata_and_without_torch(
    tmp_path: Path,
) -> None:
    words = "import sys; from trainfleet.config import platforms; print(sorted(platforms.devices()), platforms.checkpoint_at('.')); print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        [sys.executable, "-c", words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['neuron_xla'] None\nFalse\n"


def test_the_table_is_what_the_wheel_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"][platforms.GROUP] == platforms.OURS
    assert [
        str(ROOT / path)
        for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ] == [str(path) for path in install_paths.PACKAGES]


def test_hosts_and_images_are_sent_all_of_it() -> None:
    assert {f"python/trainfleet_nxd/{path.name}" for path in OURS} <= code_files("").keys()


def test_a_platform_of_another_package_is_found_by_its_entry_point(toys: Path) -> None:
    assert platforms.names() == ["nxd", "toy"] and set(platforms.devices()) == {"neuron_xla", "toy"}
    opened: object = devices.planned("toy")
    assert opened == "toy 0"
    config: object = None
    assert platforms.arrange("toy", config, None) == "divided"  # type: ignore[arg-type]
    assert platforms.checkpoint_at(str(toys)) is None
    (toys / "toy").touch()
    assert platforms.checkpoint_at(str(toys)) == ("toy", toys)


def test_a_device_that_nobody_brings_is_refused_with_those_that_are_there(toys: Path) -> None:
    with pytest.raises(RunError, match="ranks can't use the device tpu yet") as caught:
        devices.planned("tpu")
    assert caught.value.why == "the supported devices are cpu, cuda, neuron, neuron_xla, toy"


@pytest.mark.parametrize(
    "content", ["import nothing_that_is_there", "class Other: pass", "raise ValueError('old')"]
)
def test_a_platform_that_can_t_be_loaded_is_named(toys: Path, content: str) -> None:
    (toys / "toys.py").write_text(content)
    with pytest.raises(RunError) as caught:
        platforms.checkpoint_at(str(toys))
    assert (
        "the platform toy can't be loaded" in str(caught.value)
        and caught.value.where == "toys:Toy"
        and caught.value.next
    )


def test_a_platform_that_nobody_names_is_refused() -> None:
    with pytest.raises(RunError) as caught:
        platforms.named("nothing")
    assert "entry point of trainfleet.platforms" in caught.value.why
