"""Killed at every request of setup and of clean in turn, with all local state gone: `make clean` proves the account empty each time.

Each request is two cases: AWS has not heard it, and AWS has done it. tests/aws/test_crashes.py tries some of them in make test.
"""

from __future__ import annotations

import pytest

from aws import scheduler_crashes
from aws.account import Account
from aws.crashes import World, deaths
from aws.test_crashes import proven_empty


def no_room(account: Account) -> None:
    """The first zone has room for the head alone: the second is tried."""
    account.capacity["us-east-1a", "c7i.8xlarge"] = 2


def hindered(account: Account) -> None:
    """CloudFormation can't delete some things at first, and what is new is not seen at once."""
    account.stuck |= {"AWS::EC2::SecurityGroup": 1, "AWS::EC2::PlacementGroup": 50}
    account.lag = 3.0


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "prepare", [lambda account: None, no_room, hindered], ids=["plain", "no-room", "hindered"]
)
def test_setup(prepare: object) -> None:
    cases = 0
    for what, world in deaths("setup", prepare=prepare):  # type: ignore[arg-type]
        proven_empty(world, what)
        cases += 1
    print(f"{cases} cases")
    assert cases > 80


@pytest.mark.timeout(3000)
def test_setup_of_more_nodes_and_of_fewer() -> None:
    cases = 0
    for words in ("NODES=3", "NODES=1"):
        for what, world in deaths("setup", words, after=("setup",)):
            proven_empty(world, what)
            cases += 1
    print(f"{cases} cases")
    assert cases > 100


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("prepare", [lambda account: None, hindered], ids=["plain", "hindered"])
def test_clean(prepare: object) -> None:
    cases = 0
    for what, world in deaths("clean", "YES=1", after=("setup",), prepare=prepare):  # type: ignore[arg-type]
        proven_empty(world, what)
        cases += 1
    print(f"{cases} cases")
    assert cases > 400


@pytest.mark.timeout(3000)
def test_purge_of_what_holds_data() -> None:
    cases, words = 0, ("PURGE=1", "YES=1")
    for what, world in deaths("clean", *words, after=("setup",), holds_data=True):
        proven_empty(world, what, *words)
        cases += 1
    print(f"{cases} cases")
    assert cases > 400


@pytest.mark.timeout(3000)
def test_clean_that_keeps_what_holds_data() -> None:
    cases = 0
    for what, world in deaths("clean", "YES=1", after=("setup",), holds_data=True):
        code, told = world.type("clean", "YES=1")
        assert (
            code == 0
            and "no other resources of cloudy are left" in told
            and "kept file system" in told
            and "kept bucket" in told
        ), f"{what}: {told}"
        assert (
            not set(world.ours.values()) & {"instance", "nat-gateway", "address", "volume", "role"}
            and world.untouched
        ), f"{what}: {world.ours}"
        proven_empty(world, what, "PURGE=1", "YES=1")
        cases += 1
    print(f"{cases} cases")
    assert cases > 200


def at_peace(world: World, what: str) -> None:
    """The account is empty of ours, and others' jobs have not noticed."""
    proven_empty(world, what)
    assert scheduler_crashes.undisturbed(world.account), what


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("engine", ["batch", "sagemaker"])
def test_setup_for_an_engine(engine: str) -> None:
    cases = 0
    for what, world in deaths(
        "setup", config=scheduler_crashes.said(engine), prepare=scheduler_crashes.others
    ):
        at_peace(world, what)
        cases += 1
    print(f"{cases} cases")
    assert cases > 20


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("engine", ["batch", "sagemaker"])
def test_clean_while_an_engine_is_at_work(engine: str) -> None:
    """Jobs wait, run and are kept warm, definitions and a secret are there, and the process of clean dies at each request."""
    cases, config = 0, scheduler_crashes.said(engine)
    for what, world in deaths(
        "clean",
        "YES=1",
        config=config,
        prepare=scheduler_crashes.others,
        after=("setup",),
        work=scheduler_crashes.at_work,
    ):
        at_peace(world, what)
        cases += 1
    print(f"{cases} cases")
    assert cases > 100
