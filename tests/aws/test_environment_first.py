"""The Python environment is made on a cheap machine, before nodes that cost much are paid for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aws.account import Account
from aws.crashes import KEY
from aws.metal import CONSOLE
from aws.test_fleet import ours, untouched
from aws.world import config_of
from trainfleet.backends.ec2 import Ec2
from trainfleet.cloud.stack_nodes import FleetStack
from trainfleet.config import Config
from trainfleet.hosts import host_setup

GPU, HEAD = {"instance_type": "p5.4xlarge"}, "c7i.8xlarge"


def types(account: Account) -> list[str]:
    """The types of our running instances, but for the head."""
    found = [one for one in account.of("instance") if one.made_by and one.state == "running"]
    return sorted(kind for one in found if (kind := str(one.properties["InstanceType"])) != HEAD)


def test_a_cheap_machine_comes_before_the_nodes_and_goes_with_them(
    account: Account, tmp_path: Path
) -> None:
    fleet = FleetStack(config_of(tmp_path, **GPU))
    planned = [json.loads(body["TemplateBody"]) for *_, body in fleet.foresee(set()).requests]
    said = list[str]()
    fleet.make(set(), lambda *_: None, said.append)
    assert fleet.begun() and types(account) == ["c7i.xlarge"] and fleet.nodes() == []
    (machine,) = fleet.await_nodes(builder=True)
    assert "2 x p5.4xlarge, after the Python environment on 1 x c7i.xlarge" in said[0]
    (system,) = [one.id for one in account.of("file-system") if one.made_by]
    made = [fleet.stack.template()]
    assert machine.slot == -1 and fleet.head()

    fleet.make(set(), lambda *_: None, said.append)
    fleet.await_nodes()
    made.append(fleet.stack.template())
    assert not fleet.begun() and types(account) == ["p5.4xlarge"] * 2
    assert [node.slot for node in fleet.nodes()] == [0, 1] and account.things[system]
    assert [one["Resources"].keys() for one in made] == [one["Resources"].keys() for one in planned]
    assert fleet.foresee(set()).requests == []
    fleet.remove(True, said.append)
    assert ours(account) == {} and untouched(account)


def test_without_room_for_nodes_the_next_zone_gets_the_environment_too(
    account: Account, tmp_path: Path
) -> None:
    account.capacity["us-east-1a", "p5.4xlarge"] = 1
    fleet, said = FleetStack(config_of(tmp_path, **GPU)), list[str]()
    fleet.make(set(), lambda *_: None, said.append)
    for system in account.of("file-system"):
        system.more["written"] = 9e9  # the environment
    fleet.make(set(), lambda *_: None, said.append)
    assert fleet.begun() and fleet.nodes() == []
    assert any("no capacity" in line and "next zone" in line for line in said)
    fleet.make(set(), lambda *_: None, said.append)
    assert {node.zone for node in fleet.await_nodes()} == {"us-east-1b"}
    left = [*ours(account).values()]
    assert left.count("vpc") == left.count("file-system") == 1 and untouched(account)


def test_setup_makes_no_nodes_while_the_environment_fails(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.on_launch = lambda one: one.more.update(console=CONSOLE.format(key=KEY))
    calls, codes = list[tuple[object, ...]](), [1, 0, 0]

    def main(config: Config, whole: bool = True, temporary: bool = False) -> int:
        fleet = config.fleet
        calls.append((len(fleet.hosts), fleet.instance_type, whole, temporary, "p5.4xlarge" in types(account)))  # fmt: skip
        return codes.pop(0)

    monkeypatch.setattr(host_setup, "main", main)
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, **GPU)
    assert Ec2(config).machines().apply() == 1 and "p5.4xlarge" not in types(account)
    assert Ec2(config).machines().apply() == 0
    assert calls == [(1, "c7i.xlarge", False, True, False)] * 2 + [
        (2, "p5.4xlarge", True, False, True)
    ]


def test_what_gains_nothing_by_a_cheap_machine_has_none(account: Account, tmp_path: Path) -> None:
    for changes in (
        {"instance_type": "c7i.8xlarge"},
        GPU | {"python": "/opt/python"},
        GPU | {"shared_folder": "/mnt/mine"},
    ):
        fleet = FleetStack(config_of(tmp_path, **changes))
        assert [operation for _, operation, _ in fleet.foresee(set()).requests] == ["CreateStack"]
