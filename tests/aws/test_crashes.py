"""Killed at a request of setup and of clean, with all local state gone: `make clean` leaves nothing. All of them are in tests/drills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aws import scheduler_crashes
from aws.crashes import World, deaths
from trainfleet.launch import cleaning

ASKS_ONLY = ("Describe", "Get", "List", "Simulate", "Head")
STEP = 37  # of so many requests one is a case here


def proven_empty(world: World, what: str, *words: str) -> None:
    code, told = world.type("clean", "YES=1", *words)
    assert code == 0 and "no resources of cloudy are left in us-east-1" in told, f"{what}: {told}"
    assert world.ours == {} and not world.held and world.untouched, (
        f"{what}: {world.ours} {world.held}"
    )


def test_setup_and_clean_as_they_are_typed() -> None:
    world = World()
    code, told = world.type("setup")
    assert code == 0 and "Node1" in told, told
    code, told = world.type("ls")
    assert code == 0 and "another: $" in told and "cloudy: $" in told and "free: " in told, told
    proven_empty(world, "whole")
    code, told = world.type("ls")
    assert "cloudy" not in told and "another" in told


HIDDEN = {
    "association": "fsx:DescribeDataRepositoryAssociations",
    "training job": "sagemaker:ListTrainingJobs",
    "instance": "ec2:DescribeInstances",
    "any other": "resourcegroupstaggingapi:GetResources",
}


@pytest.mark.parametrize("verb", ["ls", "clean"])
def test_what_may_not_be_looked_at_is_told_and_all_else_goes(verb: str) -> None:
    world = World()
    assert world.type("setup")[0] == 0
    world.account.denied |= {*HIDDEN.values()}
    code, told = world.type(verb, *(["YES=1"] if verb == "clean" else []))
    assert code == 1 and told.count("error:") == 1 and "Traceback" not in told, told
    rows = [
        f"  {kind:18} was not checked: your credentials may not do {action}\n"
        for kind, action in HIDDEN.items()
    ]
    assert all(row in told for row in rows) and told.count("was not checked") == len(rows), told
    assert not world.ours if verb == "clean" else "NAT gateway" in told, f"{world.ours} {told}"
    assert world.untouched


def test_a_folder_here_that_is_in_use_keeps_no_machine_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    assert world.type("setup")[0] == 0
    monkeypatch.setattr(cleaning, "is_locked", lambda folder: True)
    monkeypatch.setattr(cleaning, "_runs", lambda: [Path("runs/another")])
    code, told = world.type("clean", "YES=1")
    assert code == 1 and "still running: runs/another" in told and not world.ours, told


@pytest.mark.parametrize("action", ["cloudformation:DeleteStack", "ec2:DeleteLaunchTemplate"])
def test_what_may_not_be_removed_is_told_and_all_else_goes(action: str) -> None:
    world = World()
    assert world.type("setup")[0] == 0
    world.account.denied.add(action)
    world.account.stuck["AWS::EC2::LaunchTemplate"] = 99
    code, told = world.type("clean", "YES=1")
    kinds = {"DeleteStack": "stack", "DeleteLaunchTemplate": "launch template"}
    assert (
        code == 1
        and f"{kinds[action.partition(':')[2]]} " in told
        and f"your credentials may not do {action}" in told
    ), told
    assert set(world.ours.values()) <= {"launch-template"} and world.untouched, (
        f"{world.ours} {told}"
    )


def test_clean_ends_instances_before_it_lists_anything() -> None:
    world = World()
    assert world.type("setup")[0] == 0
    world.type("clean", "YES=1")
    asked = [operation for _, operation, _ in world.account.calls[world.before :]]
    assert asked.index("TerminateInstances") < min(
        map(asked.index, ("ListTrainingJobs", "DescribeNatGateways", "DeleteStack"))
    )


def test_a_setup_that_died_is_cleaned_up() -> None:
    for what, world in deaths("setup", step=STEP):
        proven_empty(world, what)


@pytest.mark.parametrize(("words", "after"), [(("setup",), ()), (("clean", "YES=1"), ("setup",))])
def test_ctrl_c_says_what_goes_on_and_how_to_end_it(
    words: tuple[str, ...], after: tuple[str, ...]
) -> None:
    for what, world in deaths(*words, after=after, step=STEP, killer=KeyboardInterrupt):
        assert world.told.splitlines()[-1] == "stopped" and "Traceback" not in world.told, (
            f"{what}: {world.told}"
        )
        if any(
            not operation.startswith(ASKS_ONLY)
            for _, operation, _ in world.account.calls[world.before :]
        ):
            assert (
                "run make ls to list the resources" in world.told and "make clean" in world.told
            ), f"{what}: {world.told}"
        proven_empty(world, what)


@pytest.mark.thorough
def test_a_clean_that_died_is_done_again() -> None:
    for what, world in deaths("clean", "YES=1", after=("setup",), step=STEP):
        proven_empty(world, what)


@pytest.mark.thorough
@pytest.mark.parametrize("words", [("PURGE=1", "YES=1")])
def test_a_purge_that_died_is_done_again(words: tuple[str, ...]) -> None:
    for what, world in deaths("clean", *words, after=("setup",), holds_data=True, step=STEP):
        proven_empty(world, what, *words)


@pytest.mark.thorough
@pytest.mark.parametrize("scheduler", ["batch", "sagemaker"])
def test_a_clean_that_died_while_an_scheduler_was_at_work_is_done_again(scheduler: str) -> None:
    for what, world in deaths("clean", "YES=1", config=scheduler_crashes.said(scheduler), prepare=scheduler_crashes.others, after=("setup",),
                              work=scheduler_crashes.at_work, step=STEP):  # fmt: skip
        proven_empty(world, what, "YES=1")
        assert scheduler_crashes.undisturbed(world.account), what


def test_what_runs_and_what_is_kept_warm_has_a_price() -> None:
    world = World(scheduler_crashes.others, scheduler_crashes.said("sagemaker"))
    assert world.type("setup")[0] == 0
    scheduler_crashes.at_work(world.account)
    _, told = world.type("ls")
    assert (
        "2 x ml.c7i.8xlarge, InProgress" in told
        and "2 x ml.c7i.8xlarge, warm" in told
        and "$82.27 a day" in told
    ), told


def test_clean_asks_before_it_ends_what_costs_money() -> None:
    world = World()
    world.type("setup")
    before, first = world.ours, len(world.account.calls)
    code, told = world.type("clean")
    assert code == 2 and world.ours == before
    assert re.search(
        r"instance +i-\w+ .*\$\d+\.\d\d a day.*\nerror: make clean: would remove machines that cost \$4\.\d\d an hour",
        told,
        re.DOTALL,
    ), told
    assert "nothing was changed\n  next: make clean YES=1" in told
    assert all(operation.startswith(ASKS_ONLY) for _, operation, _ in world.account.calls[first:])
    proven_empty(world, "YES=1")
    assert world.type("clean")[0] == 0, "nothing is left that costs money, so nothing is asked"


def test_purge_asks_first_and_nothing_goes_without_an_answer() -> None:
    world = World()
    world.type("setup")
    before = world.ours
    code, told = world.type("clean", "PURGE=1")
    assert code == 1 and "make clean PURGE=1 YES=1" in told and world.ours == before
