"""Each pinned version can be had for each system that nodes and images run: its wheel for that Python, and all that it asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from trainfleet.backends.slurm import cluster_file
from trainfleet.config import Config, Settings, load
from trainfleet.hardware import node_types
from trainfleet.hosts.platform import load_platform, load_system
from trainfleet.recipes import FOLDER

ROOT = Path(__file__).parents[2]
LOCK = yaml.safe_load((ROOT / "docker/platforms.lock.yaml").read_text())
RECORDED = yaml.safe_load((ROOT / "tests/recorded_indexes.yaml").read_text())
PAGES = {row["page"]: row["files"] for row in RECORDED["pip"]}
PACKAGES = {row["page"].split("/")[4]: row["packages"] for row in RECORDED["apt"]}
WHEEL = re.compile(r"[^-]+-([^-+]+)(?:\+[^-]*)?-(cp\d+|py3)-[^-]+-(?:any|.*linux.*x86_64)\.whl")
NEURON = [name for name in LOCK["platforms"] if load_platform(name).neuron_packages]
HOSTS = [
    (platform, system)
    for platform in LOCK["platforms"]
    for system, row in LOCK["systems"].items()
    if platform not in NEURON or (row["apt"] and row["python"] >= load_platform(platform).python)
]
LOCKED = {kind: (ROOT / f"requirements{kind}.lock").read_text() for kind in ("", "-cuda")}


def wheels(page: str, version: str, python: str) -> dict[str, str]:
    """The files of a recorded page that are this version's, for this Python on x86_64, each with its SHA-256."""
    found = {name: (WHEEL.fullmatch(name), sum_) for name, sum_ in PAGES[page].items()}
    tags = (f"cp{python.replace('.', '')}", "py3")
    return {
        name: sum_
        for name, (match, sum_) in found.items()
        if match and match[1] == version and match[2] in tags
    }


@pytest.mark.parametrize(("name", "system"), HOSTS)
def test_every_package_has_a_wheel_with_its_hash_for_the_python_of_the_system(
    name: str, system: str
) -> None:
    platform, python, row = load_platform(name), load_system(system).python, LOCK["platforms"][name]
    tag, usual = f"cp{python.replace('.', '')}", platform.torch_index == "-"
    own = {"torch": (platform.torch, platform.torch_wheels)} | {
        package: (version, sums) for package, version, sums in platform.checked_packages
    }
    for package, (version, sums) in own.items():
        page = f"{'usual' if usual or package != 'torch' else platform.torch_index}/{package}/"
        (there,) = wheels(page, version, python).values()
        lock = dict(sums).get(tag, "") if sums else row["torch"].get("cpu_wheels", {}).get(tag, "")
        assert lock == there or (usual and f"--hash=sha256:{there} " in LOCKED[""]), (
            f"{package} {version} for {tag}: {there}"
        )
    for package, version in platform.python_packages:
        assert wheels(f"{platform.neuron_index}/{package}/", version, python), (
            f"{package} {version} for {tag}"
        )
    for package, version in platform.neuron_packages:
        (there,) = [
            found
            for found in PACKAGES[load_system(system).apt][package]
            if found.split("-")[0] == version
        ]


def test_the_table_has_every_system_that_nodes_and_images_can_have() -> None:
    of_clusters = yaml.safe_load((ROOT / "schema/config.schema.json").read_text())
    assert set(LOCK["systems"]) == set(str_enum(of_clusters, "os"))
    for row in LOCK["platforms"].values():
        assert "24.04" in row["ami"]["version"] and "ubuntu:24.04@" in row["base"]["version"]
    kinds = {
        (yaml.safe_load(path.read_text())["fleet"] or {}).get("instance_type")
        for path in FOLDER.glob("*.yaml")
    }
    platforms = {node_types.platform_of(node_types.instance(kind)) for kind in kinds if kind}
    assert {"cuda", "cuda-volta", "neuron", "neuron-xla"} <= platforms <= set(LOCK["platforms"])


def str_enum(schema: object, key: str) -> list[str]:
    """The values of the key's only enum of systems, wherever the schema has it."""
    if isinstance(schema, dict):
        if "ubuntu2404" in (
            found := (schema.get(key) or {}).get("enum", ())
            if isinstance(schema.get(key), dict)
            else ()
        ):
            return list(found)
        return next(filter(None, (str_enum(value, key) for value in schema.values())), [])
    return []


@pytest.mark.parametrize("name", NEURON)
def test_all_that_neuron_s_wheels_ask_for_is_pinned_and_fits(name: str, tmp_path: Path) -> None:
    """By the script that ends a set-up where it is not, on the metadata that the wheels have."""
    platform = load_platform(name)
    pins = (
        dict(platform.python_packages)
        | {"torch": platform.torch}
        | {package: version for package, version, _ in platform.checked_packages}
    )
    for package, version in pins.items():
        asks = requires(package, version)
        place = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
        place.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {package}",
            f"Version: {version}",
            *(f"Requires-Dist: {ask}" for ask in asks),
            "",
        ]
        (place / "METADATA").write_text("\n".join(lines))
        for ask in map(Requirement, asks if f"{package} {version}" in RECORDED["metadata"] else ()):
            assert ask.name not in pins or ask.specifier.contains(
                pins[ask.name], prereleases=True
            ), f"{package} asks for {ask}"
    command = [sys.executable, ROOT / "scripts" / "unpinned.py", *dict(platform.python_packages)]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


def requires(package: str, version: str) -> list[str]:
    """What the wheel asks for, as recorded of it, or of the nearest older or newer one."""
    rows = {
        row.split()[1]: found["requires"]
        for row, found in RECORDED["metadata"].items()
        if row.split()[0] == package
    }
    line = [known for known in rows if known.split(".")[:2] == version.split(".")[:2]]
    return list(
        rows.get(version) or next((rows[known] for known in [*line, *list(rows)[::-1]]), [])
    )


@pytest.mark.parametrize(
    ("name", "system"), [(platform, system) for platform in NEURON for system in LOCK["systems"]]
)
def test_neuron_on_a_system_that_has_no_packages_for_it_is_refused_in_plan(
    name: str, system: str, cluster: Config
) -> None:
    slurm = replace(
        cluster.fleet.slurm, parallelcluster=replace(cluster.fleet.slurm.parallelcluster, os=system)
    )
    fleet = replace(cluster.fleet, platform=name, slurm=slurm)
    said = [
        what
        for key, what in cluster_file.refuse(replace(cluster, fleet=fleet))
        if key.endswith(".os") and "set ubuntu2404" in what
    ]
    assert bool(said) == ((name, system) not in HOSTS), said
    assert not said or re.match(
        f"{system}: (Neuron's packages need apt|its Python is 3.11)", said[0]
    )


@pytest.fixture(scope="module")
def cluster() -> Config:
    return load(Settings(FOLDER / "bert-large-trn1-parallelcluster.yaml"))[0]
