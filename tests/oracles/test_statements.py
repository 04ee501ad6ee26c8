"""A caller who lacks any one statement of the policy that a plan writes: `make setup` names what is missing, and makes nothing.

Each article's recipe is planned and set up as it is, in a pretended account whose simulator of permissions is one that is not ours
(iam_judge.py). Nothing that a service makes for itself is in the account yet.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from aws.account import Account
from aws.crashes import World
from oracles.iam_judge import Asked, judged_each, policy_of
from oracles.test_permissions import ARTICLES, config_of
from trainfleet.cloud.permissions import policy
from trainfleet.recipes import FOLDER

BUCKETS = ("my-trainfleet-bucket", "your-bucket")
MAKES = ("Create", "Run", "Put", "Delete", "Import", "Register", "Allocate", "Purchase")
PCLUSTER = """#!{python}
import json, sys
print(json.dumps({{"message": "Cluster 'x' does not exist or belongs to an incompatible ParallelCluster major version."}}))
sys.exit(1)
"""


def cases() -> Iterator[Any]:
    """One a statement; `make test` tries those of one recipe."""
    for recipe in ARTICLES:
        for number, statement in enumerate(policy(*config_of(recipe))["Statement"]):
            marks = [] if recipe == "trn1-single-node" else [pytest.mark.thorough]
            yield pytest.param(recipe, number, id=f"{recipe}-{number + 1:02}-{statement['Action'][0]}", marks=marks)


def said(recipe: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text())
    config["fleet"]["aws"] |= {"region": "us-east-1"}
    return config


def buckets(account: Account) -> None:
    for name in BUCKETS:
        account.add("bucket", name, {}, {})


@contextmanager
def desk() -> Iterator[None]:
    """Where a user sits: with a key, what SSM needs, and a pcluster that knows no cluster."""
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        for name in (".ssh/id_ed25519.pub", ".ssh/fleet.pub", "bin/aws", "bin/session-manager-plugin", "bin/pcluster"):
            file = Path(home, name)
            file.parent.mkdir(exist_ok=True)
            file.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ1qkUmTbFzOXSxV7b9fXkD6wzhTnnZlZ0Yb0a3m0000 me@here\n")
        file.write_text(PCLUSTER.format(python=sys.executable))
        for program in Path(home, "bin").iterdir():
            program.chmod(0o755)
        patch.setenv("HOME", home)
        patch.setenv("PATH", f"{home}/bin{os.pathsep}{os.environ['PATH']}")
        yield


@functools.cache
def planned(recipe: str) -> tuple[list[dict[str, Any]], list[Asked]]:
    """The statements that a plan writes, and what it asks the simulator."""
    asked = list[Asked]()
    with desk(), tempfile.TemporaryDirectory() as out:
        world = World(buckets, said(recipe))
        world.account.may = lambda action, resource, context: asked.append(Asked(action, resource, context)) or True
        code, told = world.type("plan", f"OUT={out}/plan")
        assert code == 0 and "account: nothing stands against it" in told, told
        files = sorted(Path(out).glob("plan/policy*.json"), key=lambda file: len(file.name))
        return [one for file in files for one in json.loads(file.read_text())["Statement"]], asked


@functools.cache
def answers(recipe: str) -> list[dict[str, bool]]:
    """What the simulator answers: to a caller who has all but one statement, for each in turn, and to one who has all."""
    statements, asked = planned(recipe)
    several = [policy_of(statements[:number] + statements[number + 1 :]) for number in range(len(statements) + 1)]
    said = judged_each([(one, asked) for one in several])
    return [{repr(one): answer == "Allowed" for one, answer in zip(asked, found, strict=True)} for found in said]


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=[pytest.mark.thorough]) for name in ARTICLES])
def test_with_the_whole_policy_nothing_is_missing(recipe: str) -> None:
    statements, asked = planned(recipe)
    assert len(statements) == sum(case.values[0] == recipe for case in cases())
    assert all(answers(recipe)[-1].values()) and len(asked) > 40


@pytest.mark.parametrize(("recipe", "number"), list(cases()))
def test_without_a_statement_setup_names_it_and_makes_nothing(recipe: str, number: int) -> None:
    left_out, may = planned(recipe)[0][number], answers(recipe)[number]
    with desk():
        world = World(buckets, said(recipe))
        world.account.may = lambda action, resource, context: may[repr(Asked(action, resource, context))]
        if looks := "iam:SimulatePrincipalPolicy" in left_out["Action"]:  # these are not simulated, but denied
            world.account.denied = set(left_out["Action"])
        code, told = world.type("setup")
    words = " ".join(told.split())
    named = [name for name in left_out["Action"] if name in words]
    assert code == 1 and "your credentials may not do" in words, told
    assert named if looks else named == left_out["Action"], told
    assert told.count("error:") == 1 and "Traceback" not in told
    assert not [row for row in world.account.calls if row[1].startswith(MAKES)] and world.untouched
