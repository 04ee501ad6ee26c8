"""A caller who lacks any one statement of the policy that a plan writes: `make setup` names what is missing, and makes nothing.

Each article's recipe is planned and set up as it is, in a pretended account that evaluates every request, and all that CloudFormation
does in the caller's name, by an evaluator that is not ours (aws/identity.py, iam_judge.py). Nothing that a service makes for itself
is in the account yet.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from aws import resources, scheduler_crashes, watchers
from aws.account import Account
from aws.crashes import World
from aws.world import aws
from oracles.iam_judge import may
from oracles.recording import Recording, made
from oracles.test_permissions import ARTICLES, config_of
from trainfleet.backends import BACKENDS, terms_of
from trainfleet.cloud.calls import through_agent
from trainfleet.cloud.permissions import FILE, policy
from trainfleet.cloud.template_inputs import own_tags
from trainfleet.config import Settings, load
from trainfleet.launch import job_image
from trainfleet.plan.job import train_job
from trainfleet.recipes import FOLDER
from trainfleet.storage import s3

BUCKETS = ("my-trainfleet-bucket", "your-bucket")
SHORT = "trn1-single-node"
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
            marks = [] if recipe == SHORT else [pytest.mark.thorough]
            yield pytest.param(
                recipe, number, id=f"{recipe}-{number + 1:02}-{statement['Action'][0]}", marks=marks
            )


def said(recipe: str, own: bool = False) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text())
    config["fleet"]["aws"] |= {"region": "us-east-1"}
    if config["fleet"]["backend"] in ("batch", "sagemaker"):
        config["fleet"]["secrets"] = ["THE_KEY"]
    if own:
        role = f"arn:aws:iam::{Account.number}:role/train"
        config["fleet"].setdefault("batch", {}).update(
            job_role=role, execution_role=f"{role}-execution"
        )
    return config


def buckets(account: Account) -> None:
    for name in BUCKETS:
        account.add("bucket", name, {}, {})


@contextmanager
def desk() -> Iterator[None]:
    """Where a user sits: with a key, what SSM needs, and a pcluster that knows no cluster."""
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        for name in (
            ".ssh/id_ed25519.pub",
            ".ssh/fleet.pub",
            "bin/aws",
            "bin/session-manager-plugin",
            "bin/pcluster",
        ):
            file = Path(home, name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(
                "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ1qkUmTbFzOXSxV7b9fXkD6wzhTnnZlZ0Yb0a3m0000 me@here\n"
            )
        file.write_text(PCLUSTER.format(python=sys.executable))
        for program in Path(home, "bin").iterdir():
            program.chmod(0o755)
        patch.setattr(
            s3, "write", lambda address, content: None
        )  # a node's script, for ParallelCluster
        patch.setenv("HOME", home)
        patch.setenv("PATH", f"{home}/bin{os.pathsep}{os.environ['PATH']}")
        yield


@functools.cache
def planned(recipe: str, own: bool = False) -> list[dict[str, Any]]:
    """The statements that a plan writes."""
    with desk(), tempfile.TemporaryDirectory() as out:
        world = World(buckets, said(recipe, own))
        code, told = world.type("plan", f"OUT={out}/plan")
        assert code == 0 and "account: no obstacle found" in told, told
        files = sorted(Path(out).glob("plan/policy*.json"), key=lambda file: len(file.name))
        return [one for file in files for one in json.loads(file.read_text())["Statement"]]


@contextmanager
def by_policy(
    recipe: str, own: bool = False, without: int | None = None
) -> Iterator[tuple[World, list[str]]]:
    """An account that evaluates each request against the policy, but for one statement; what it refuses."""
    whole, refused = planned(recipe, own), list[str]()
    judge = may([one for number, one in enumerate(whole) if number != without])

    def allowed(action: str, resource: str, context: dict[str, str]) -> bool:
        if not (is_allowed := judge(action, resource, context)):
            refused.append(f"{action} on {resource}")
        return is_allowed

    with desk():
        world = World(buckets, said(recipe, own))
        world.account.may = allowed
        yield world, refused


@pytest.mark.parametrize("stuck", [False, True], ids=["whole", "stuck"])
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name != SHORT)) for name in ARTICLES],
)
def test_with_the_policy_alone_all_is_made_listed_and_removed(recipe: str, stuck: bool) -> None:
    """`stuck`: CloudFormation can delete nothing of the stack, and make clean goes piece by piece."""
    with by_policy(recipe) as (world, refused):
        code, told = world.type("setup")
        assert not refused and (code == 0 or "parallelcluster" in recipe), told
        if "allow_ssh_from" not in said(recipe)["fleet"]["aws"] and "ec2" in recipe:
            assert all(world.account.may(*one) for one in of_command(through_agent("us-east-1")))  # type: ignore[misc]
        code, told = world.type("ls")
        assert (code, refused) == (0, []), told
        if stuck:
            left_by_a_crash(world.account, said(recipe)["name"])
        code, told = world.type("clean", "PURGE=1", "YES=1")
        assert (code, refused) == (0, []) and not world.ours and world.untouched, (
            f"{world.ours} {told}"
        )


def of_command(command: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """What a command of the AWS CLI needs: SSM user guide, "Sample IAM policies for Session Manager", SSH connections."""
    _, service, verb, *words = shlex.split(
        command.replace("%h", "i-0123456789abcdef0").replace("%p", "22")
    )
    options = dict(zip(words[::2], words[1::2], strict=True))
    action = f"{service}:{verb.title().replace('-', '')}"
    yield (
        action,
        f"arn:aws:ec2:{options['--region']}:{Account.number}:instance/{options['--target']}",
        {},
    )
    yield (
        action,
        f"arn:aws:ssm:{options['--region']}:{Account.number}:document/{options['--document-name']}",
        {},
    )


def left_by_a_crash(account: Account, config: str) -> None:
    """What a stack can't delete, and what none knows."""
    account.stuck = dict.fromkeys(resources.TYPES, 99)
    tags, disk, ours = own_tags(config), {"Size": 8}, {thing.kind for thing in account.ours()}
    beside = {
        "vpc": ("volume", "flow-log", "network-interface", "address"),
        "file-system": ("snapshot",),
    }
    for kind in [kind for there, kinds in beside.items() if there in ours for kind in kinds]:
        account.add(kind, account.new_id("left-"), disk, tags)


def submitted(world: World) -> None:
    """A job of the config is submitted, looked at and stopped."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("THE_KEY", "x")
        Path(folder, "config.yaml").write_text(yaml.safe_dump(world.config))
        config = job_image.named(load(Settings(Path(folder, "config.yaml")), terms_of)[0])
        with aws(world.account):
            backend = BACKENDS[config.fleet.backend](config)
            handle = backend.submit(backend.plan(train_job(config), {}))
            assert not backend.status(handle).ended
            backend.stop(handle, at_once=False)


def has_jobs(world: World) -> bool:
    """Whether a scheduler makes the machines; then the account has that scheduler, with others at work."""
    if world.config["fleet"]["backend"] not in ("batch", "sagemaker"):
        return False
    watchers.Watched(world.account)
    scheduler_crashes.others(world.account)
    return True


@pytest.mark.parametrize(
    ("recipe", "own"), [(ARTICLES[1], False), (ARTICLES[1], True), (ARTICLES[2], False)]
)
def test_with_the_policy_alone_a_job_is_submitted_seen_and_stopped(recipe: str, own: bool) -> None:
    with by_policy(recipe, own) as (world, refused):
        assert has_jobs(world) and world.type("setup")[0] == 0
        submitted(world)
        assert not refused and {"SubmitJob", "CreateTrainingJob"} & {
            operation for _, operation, _ in world.account.calls
        }


def recorded() -> Recording:
    """What the verbs of all articles' recipes ask, and CloudFormation for them."""
    found = Recording()
    for recipe, stuck in [(recipe, stuck) for recipe in ARTICLES for stuck in (False, True)]:
        with desk():
            world = World(buckets, said(recipe))
            jobs = has_jobs(world)
            with found.on(world.account):
                for verb in ("plan", "setup", "ls", "train", "stop", "image", "clean"):
                    found.source = verb
                    if verb == "train" and jobs and not stuck:
                        submitted(world)
                    if verb == "clean" and stuck:
                        left_by_a_crash(world.account, said(recipe)["name"])
                    world.type(verb, *(("PURGE=1", "YES=1") if verb == "clean" else ()))
    return found


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_the_table_of_permissions_is_what_was_recorded() -> None:
    found = recorded()
    assert len(found.asked) > 150
    assert made(FILE.read_text(), found.sources(), found.asked) == FILE.read_text(), (
        "python -m oracles.recording"
    )


@pytest.mark.parametrize(("recipe", "number"), list(cases()))
def test_without_a_statement_setup_names_it_and_makes_nothing(recipe: str, number: int) -> None:
    left_out = planned(recipe)[number]
    with by_policy(recipe, without=number) as (world, _):
        code, told = world.type("setup")
    words = " ".join(told.split())
    named = [name for name in left_out["Action"] if name in words]
    assert code == 1 and "your credentials may not do" in words, told
    assert (
        named
        if "iam:SimulatePrincipalPolicy" in left_out["Action"]
        else named == left_out["Action"]
    ), told
    assert told.count("error:") == 1 and "Traceback" not in told
    assert not [row for row in world.account.calls if row[1].startswith(MAKES)] and world.untouched
