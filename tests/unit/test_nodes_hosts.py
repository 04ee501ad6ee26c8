"""fleet.hosts and its rules, and the recipes: every one is a config that loads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from requirement import need_program
from trainfleet.backends import terms_of
from trainfleet.cli import recipes
from trainfleet.config import Settings, load
from trainfleet.config.host_list import Host, parse_hosts
from trainfleet.hosts.host_results import Finding
from trainfleet.hosts.host_setup import meet
from trainfleet.recipes import all_recipes, recipe_named
from trainfleet.trust.errors import ConfigError, TrainfleetError

FLEET = {"backend": "ssh", "nodes": 2, "hosts": ["gpu-[1-2]"], "shared_folder": "/fsx/x"}


def problems(tmp_path: Path, **fleet: object) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"name": "a", "fleet": FLEET | fleet}))
    with pytest.raises(ConfigError) as caught:
        load(Settings(path), terms_of)
    return str(caught.value)


def test_hosts_are_written_as_people_write_them() -> None:
    written = ["gpu-[08-10].x", "spare=ubuntu@10.0.0.9:2222", "10.0.0.7"]
    assert [host.name for host in parse_hosts(written)] == [
        "gpu-08.x",
        "gpu-09.x",
        "gpu-10.x",
        "spare",
        "10.0.0.7",
    ]
    assert parse_hosts(written)[3] == Host("spare", "10.0.0.9", 2222, "ubuntu")
    with pytest.raises(ValueError, match="is not a host"):
        parse_hosts(["gpu 1"])


@pytest.mark.parametrize("words", ["n[01,03-05]", "r[1-2]n[001,9-11]", "n[9-010]", "n[3,1]", "n[5]", "n[5-3]", "n[1,3-2]", "n[1,]", "n[]",
                                   "n[1-2-3]", "n[-1]", "n[a]", "n[1,2"])  # fmt: skip
def test_many_hosts_are_those_that_slurm_reads(words: str, tmp_path: Path) -> None:
    """What Slurm refuses is refused with the forms that are read."""
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=x\nSlurmctldHost=x\nNodeName=x\nPartitionName=p Nodes=x\n"
    )
    scontrol = need_program("scontrol", "apt-get install slurm-client")
    judged = subprocess.run([scontrol, "show", "hostnames", words], env=os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")},
                            capture_output=True, text=True, check=False)  # fmt: skip
    if (
        judged.stdout and "]" in words
    ):  # without it Slurm answers with hosts that nobody has: `n]` and `2`
        assert [host.name for host in parse_hosts([words])] == judged.stdout.split()
        return
    with pytest.raises(ValueError, match=r"gpu-\[01,03-08\]|write the smaller number first"):
        parse_hosts([words])


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        ({"hosts": ["a", "a"]}, "two hosts have the name a"),
        ({"hosts": ["a=10.0.0.1", "b=10.0.0.1"]}, "two hosts have the address 10.0.0.1:22"),
        ({"hosts": ["a b"]}, "'a b' is not a host"),
        ({"nodes": 3}, "3 nodes need more than the 2 hosts in fleet.hosts; set NODES=2"),
        ({"min_nodes": 3}, "3 is more than fleet.nodes 2"),
        ({"shared_folder": None}, "needs a folder that all nodes share"),
        ({"fsx": {"dns_name": "fs-1"}}, "set both dns_name and mount_name, or neither"),
        (
            {"fsx": {"dns_name": "fs-1", "mount_name": "a", "mount_point": "/data"}},
            "/fsx/x is outside fleet.fsx.mount_point /data",
        ),
        ({"ssh": {"fingerprints": ["MD5:aa"]}}, "fleet.ssh.fingerprints"),
    ],
)
def test_a_fleet_that_can_not_be_is_refused(
    tmp_path: Path, fleet: dict[str, object], message: str
) -> None:
    assert message in problems(tmp_path, **fleet)


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda recipe: recipe.name)
def test_every_recipe_is_a_config_with_a_line_and_a_next_step(recipe, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "config.yaml"
    path.write_text(recipe.text)
    config, _ = load(Settings(path))
    assert config.name == recipe.name and len(recipe.line) < 120 and "make" in recipe.next


def test_a_recipe_never_writes_over_what_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"

    def write(**words: str) -> int:
        return recipes.config({"CONFIG": str(path)} | words, 0.0)

    assert (
        write(RECIPE="first-run") == 0 and write(RECIPE="ssh-4-nodes") == 0
    )  # one recipe over another as it came
    path.write_text(path.read_text() + "# mine\n")
    with pytest.raises(TrainfleetError, match="has changes that would be lost"):
        write(RECIPE="first-run")
    assert path.read_text().endswith("# mine\n")
    assert write(RECIPE="first-run", YES="1") == 0
    link, *lines = path.read_text().splitlines()
    assert (
        lines == recipe_named("first-run").text.splitlines()[1:]
        and (path.parent / link.partition("$schema=")[2]).exists()
    )
    with pytest.raises(ConfigError, match="did you mean ssh-4-nodes"):
        write(RECIPE="ssh-4-node")
    with pytest.raises(ConfigError, match="must name a recipe"):
        write()


@pytest.mark.parametrize(
    ("count", "words"),
    [(1, "Trust this host key from now on?"), (3, "Trust these 3 host keys from now on?")],
)
@pytest.mark.parametrize("agreed", [True, False])
def test_unknown_keys_are_asked_about_once_and_counted(
    count: int, words: str, agreed: bool
) -> None:
    seen = {f"node{number}": object() for number in range(count)}
    trusted: dict[str, object] = {}
    transport: Any = SimpleNamespace(known=SimpleNamespace(seen=seen, trust=trusted.update))
    findings = [
        Finding(
            Host(name, "10.0.0.1"), "unknown-key", f"its host key SHA256:{name} is not known yet"
        )
        for name in seen
    ]
    findings.append(Finding(Host("other", "10.0.0.2"), "disk", "is full"))
    asked: list[str] = []
    assert meet(transport, findings, lambda text: asked.append(text) or agreed) == agreed
    lines = [f"{name}  its host key SHA256:{name} is not known yet" for name in seen]
    assert asked == ["\n".join([*lines, words])] and trusted == (seen if agreed else {})
    assert not meet(transport, findings[-1:], lambda text: pytest.fail(text))
