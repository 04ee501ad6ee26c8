"""A machine image of a fleet's node: baked once for its versions, used by the next stack of its config alone, kept and removed by tag."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aws.account import Account, Thing
from aws.amis import AMIS, UBUNTU
from aws.crashes import World, deaths
from aws.test_crashes import proven_empty
from aws.validation import problems_of
from aws.world import config_of, said
from trainfleet.cloud import baking
from trainfleet.cloud.baking import Oven
from trainfleet.cloud.calls import Calls
from trainfleet.cloud.stack_nodes import FleetStack
from trainfleet.config import Config
from trainfleet.trust.errors import CloudError

CALLS = Calls("us-east-1")


def images(account: Account) -> list[Thing]:
    return [thing for thing in account.things.values() if thing.kind == "ami"]


def snapshots(account: Account) -> list[Thing]:
    return [thing for thing in account.things.values() if thing.kind == "snapshot"]


@pytest.fixture
def config(account: Account, tmp_path: Path) -> Config:
    return config_of(tmp_path)


@pytest.fixture
def oven(account: Account, config: Config) -> Iterator[Oven]:
    """Over a fleet that is there; every request is as EC2's model has it."""
    FleetStack(config).make((), lambda *_: None, lambda _: None)
    yield Oven(config, CALLS)
    for service, operation, request in account.calls:
        assert problems_of(service, operation, request) == [], (operation, request)


def baked(oven: Oven, account: Account) -> Thing:
    image = oven.begin(FleetStack(oven.config).nodes()[-1].id)
    oven.await_snapshots(image)
    oven.confirm(image)
    oven.follow(image, lambda _: None)
    return account.things[image]


def test_an_image_is_of_the_root_disk_alone_and_its_node_is_not_booted(
    oven: Oven, account: Account
) -> None:
    booted, heard = list[Thing](), list[str]()
    account.on_boot = booted.append
    node = FleetStack(oven.config).nodes()[-1].id
    account.add("volume", "vol-0mine", {"Size": 500, "Attachment": node}, {}, device="/dev/sdf")
    image = oven.begin(node)
    assert (
        baking.fitting(oven.config, CALLS) is None and not baking.baked(oven.config, CALLS)[0].lock
    ), "not sealed for sure yet"
    oven.await_snapshots(image)
    (snapshot,) = snapshots(account)
    assert snapshot.state == "pending" and snapshot.properties["Size"] == 300
    oven.confirm(image)
    assert baking.fitting(oven.config, CALLS) is None, "it is on its way"
    oven.follow(image, heard.append)
    found = baking.fitting(oven.config, CALLS)
    assert found and found.id == image and found.gib == 300 and not booted
    assert heard[0] == f"{image}: snapshot 42%"
    assert oven.cost(image) == "at most 300.0 GiB snapshot: $15.00 a month at list price"
    for thing in (account.things[image], snapshot):
        assert thing.tags["trainfleet:config"] == "cloudy" and thing.tags[
            "trainfleet:lock"
        ] == baking.versions(oven.config)


def test_the_next_stack_is_made_from_it_and_the_head_is_not(
    oven: Oven, account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    image, fleet = baked(oven, account), FleetStack(oven.config)
    assert fleet.foresee(()).inputs.image == AMIS[UBUNTU].id, "the nodes that are there keep theirs"
    told = list(baking.describe(oven.config, CALLS, AMIS[UBUNTU].id))
    assert (
        told[0].startswith(f"image {AMIS[UBUNTU].id}: the image of platform cpu")
        and "until make clean" in told[1]
    )
    stay = fleet.remove(False, lambda _: None)
    assert {thing.kind for thing in account.living() if thing.id in stay} == {"ami", "snapshot"}
    assert {one.kind for one in fleet.left()} == {"AMI", "snapshot"}, "no network stays for it"

    fleet.make((), lambda *_: None, lambda _: None)
    assert fleet.foresee(()).requests == []
    used = {node.id: account.things[node.id].properties["ImageId"] for node in fleet.everyone()}
    head = fleet.head()
    assert head and used.pop(head.id) == AMIS[UBUNTU].id and set(used.values()) == {image.id}
    (told,) = baking.describe(oven.config, CALLS, image.id)
    assert (
        told
        == f"image {image.id}: baked from this fleet on 2026-09-21 (make image), with the versions {baking.versions(oven.config)}"
    )


def test_an_image_that_does_not_fit_is_not_used_and_the_plan_says_why(
    oven: Oven, account: Account
) -> None:
    image, config = baked(oven, account), oven.config
    aws = config.fleet.aws

    def used(config: Config) -> str:
        assert baking.fitting(config, CALLS) is None
        return "\n".join(baking.describe(config, CALLS, "ami-0"))

    named = replace(config, fleet=replace(config.fleet, aws=replace(aws, ami="ami-0")))
    assert (
        used(named)
        == f"image ami-0: set by fleet.aws.ami\n  baked image {image.id} is not used: fleet.aws.ami names another"
    )
    small = replace(config, fleet=replace(config.fleet, aws=replace(aws, volume_gib=299)))
    assert "its disk has 300 GiB, more than fleet.aws.volume_gib 299" in used(small)
    other = replace(config, fleet=replace(config.fleet, platform="cuda"))
    assert f"it has the versions {baking.versions(config)}, but the lock now has cuda " in used(
        other
    )
    image.tags.pop("trainfleet:lock")
    assert "it is unfinished" in used(config)
    assert baking.baked(replace(config, name="another"), CALLS) == []


@pytest.mark.parametrize("how", ["failed", "no snapshot"])
def test_what_could_not_be_made_is_said_and_removed_before_the_next_try(
    oven: Oven, account: Account, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "failed":
        account.faults["CreateImage"] = "Internal error"
        with pytest.raises(CloudError, match=r"could not be made[\s\S]*Internal error"):
            baked(oven, account)
        account.faults.clear()
    else:
        with monkeypatch.context() as patch:
            patch.setattr("aws.baked.BEGINS", 1e6)
            with pytest.raises(CloudError, match="has no snapshot"):
                baked(oven, account)
    (old,) = images(account)
    assert oven.begun() is None
    heard = list[str]()
    oven.clear(heard.append)
    assert heard == [f"removed {old.id}, which an earlier make image left unfinished"]
    image = baked(oven, account)
    assert images(account) == [image] and len(snapshots(account)) == 1


def test_image_makes_it_once_ls_lists_it_clean_keeps_it_and_purge_takes_it() -> None:
    world = World()
    assert world.type("setup")[0] == 0
    code, told = world.type("image")
    (image,) = images(world.account)
    assert (
        code == 0 and f"{image.id} is ready; at most 300.0 GiB snapshot: $15.00 a month" in told
    ), told
    code, told = world.type("image")
    assert (
        code == 0
        and f"{image.id} already has these versions" in told
        and len(images(world.account)) == 1
    )
    assert "$0.49 a day" in world.type("ls")[1] and image.id in world.told
    code, told = world.type("clean", "YES=1")
    assert (
        code == 0
        and f"kept AMI                {image.id}" in told
        and "PURGE=1 removes them too" in told
    ), told
    assert sorted(world.ours.values()) == ["ami", "snapshot"]
    assert world.type("setup")[0] == 0
    assert f"image {image.id}: baked from this fleet" in world.type("plan")[1]
    proven_empty(world, "purge", "PURGE=1", "YES=1")


def test_who_may_not_make_images_is_told_before_anything_is_made() -> None:
    world = World(lambda account: account.denied.add("ec2:CreateImage"))
    code, told = world.type("setup")
    assert code and "may not do ec2:CreateImage" in told and not world.ours


@pytest.mark.thorough
def test_an_image_that_died_is_made_again_and_purged() -> None:
    for number, (what, world) in enumerate(deaths("image", after=("setup",), step=5)):
        if number % 2 == 0:
            code, told = world.type("image")
            assert code == 0 and len(images(world.account)) == len(snapshots(world.account)) == 1, (
                f"{what}: {told}"
            )
        proven_empty(world, what, "PURGE=1", "YES=1")


def test_another_backend_and_another_config_s_machines_make_none() -> None:
    world = World()
    code, told = world.type("image", "SET=name=guest fleet.aws.share_fleet_of=cloudy")
    assert (
        code == 1
        and "belong to the config cloudy; only that config can make an image of them" in told
    ), told
    world = World(config=said() | {"fleet": {"backend": "local"}})
    code, told = world.type("image")
    assert (
        code == 1
        and "the local backend can't make machines from an image of its nodes; use ec2" in told
        and "make build" in told
    ), told
