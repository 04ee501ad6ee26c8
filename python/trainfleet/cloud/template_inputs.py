"""Gathers the inputs of a template in addition to the config: facts of the account, and values that
an earlier stack of the same name has fixed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..config import Config

PROJECT = "trainfleet"
TAG = f"{PROJECT}:"  # before each of our keys
LONGEST, LONGEST_WITH_DATABASE = 60, 40  # characters of a cluster's name
MOST_SLUG = 20  # letters of a config's name in the name of its bucket, which has 63


@dataclass(frozen=True)
class Scheduler:
    """A maker of a config's nodes.

    in_account  whether the nodes are instances of the account
    in_zone     whether they are in the stack's zone
    by_ssh      whether SSH reaches them or their head, and they mount the stack's file
                system
    image       key of a platform in docker/platforms.lock.yaml that names their machine image
    services    AWS services that act in the account by a separate role
    """

    in_account: bool = True
    in_zone: bool = True
    by_ssh: bool = True
    image: str = ""
    services: tuple[str, ...] = ()


SCHEDULERS = {
    "": Scheduler(image="ami"),  # the stack itself
    "batch": Scheduler(by_ssh=False, image="ecs", services=("batch.amazonaws.com",)),
    "parallelcluster": Scheduler(in_zone=False),
    "sagemaker": Scheduler(in_account=False, in_zone=False, by_ssh=False),
}


@dataclass(frozen=True)
class Inputs:
    """Facts of the account that the template needs.

    account, owner     the account's number, and the identity that makes the stack
    zone               the zone of all resources; `subnet`: the user's own subnet there
    image, root        the machine image and its root device. An update keeps those of the stack:
                       others would replace every node
    head_image         the head's image, which needs nothing that is baked into the nodes'
    created            when the stack was first made, ISO 8601 in UTC; an update keeps it for the
                       same reason
    slots              a node each, `Node<slot>`; nodes whose slots stay are unchanged, so leaving
                       a slot out replaces its node
    public_key         OpenSSH's line for the key pair that is made; "" where the config names one
    group              the placement group of the reservation, if it has one
    has_bucket         whether the bucket that would be made exists already, kept by an earlier
                       `make clean`
    plain              yes: the one node has one network interface and no placement group, as the
                       console launches it. A stack
                       with a fabric keeps it: another launch template would replace the node
    scheduler          a row of SCHEDULERS
    tokenizing         the machine image of data.tokenize_instance_type, if it is set
    kept               only resources that hold data are wanted, and the network that they need
    """

    region: str
    zone: str
    account: str
    owner: str
    image: str
    created: str
    slots: tuple[int, ...]
    root: str = "/dev/sda1"
    public_key: str = ""
    subnet: str | None = None
    group: str | None = None
    has_bucket: bool = False
    kept: bool = False
    partition: str = "aws"
    plain: str = "no"
    scheduler: str = ""
    tokenizing: str = ""
    head_image: str = ""

    @property
    def kind(self) -> Scheduler:
        return SCHEDULERS[self.scheduler]


def stack_name(config: Config) -> str:
    """Returns the stack's name: the config's name in the characters that CloudFormation accepts:
    letters, digits and hyphens.
    """
    return f"{PROJECT}-{slug(config.fleet_name)}"


def cluster_name(config: Config) -> str:
    """Returns the name of the cluster that ParallelCluster makes."""
    wanted = config.fleet.slurm.parallelcluster
    most = LONGEST_WITH_DATABASE if wanted.database_uri else LONGEST
    plain = slug(config.fleet_name, most)
    return wanted.name or (
        plain if plain[:1].isalpha() else f"c-{slug(config.fleet_name, most - 2)}"
    )


def tokenizing_queue(config: Config) -> str:
    """Returns the queue of data.tokenize_instance_type's machines. The underscore keeps it apart
    from any config's stack name.
    """
    return f"{stack_name(config)}_tokenize"


def slug(name: str, most: int = 100) -> str:
    """Returns a config's name in lower-case letters, digits and single hyphens; if that loses
    something, with a hash of the complete name.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    if plain == name and len(plain) <= most:
        return plain
    digits = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{plain[: most - 7].strip('-')}-{digits}"


def bucket_of(config: Config, inputs: Inputs) -> str:
    """Returns the bucket for data and checkpoints: the user's, or our own, with a name that no
    other account can have.
    """
    return (
        config.fleet.aws.bucket
        or f"{PROJECT}-{slug(config.fleet_name, MOST_SLUG)}-{inputs.account}-{inputs.region}"
    )


def own_tags(config: str) -> dict[str, str]:
    """Returns the tags of all resources and jobs of the config with this name."""
    return {f"{TAG}project": PROJECT, f"{TAG}config": config}


def pairs(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns tags in the form that most services use."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tags_of(config: Config, inputs: Inputs) -> dict[str, str]:
    """Returns the tags of every resource: only they find it again."""
    hours = config.fleet.max_lifetime_hours
    expires = (
        "never"
        if hours is None
        else (datetime.fromisoformat(inputs.created) + timedelta(hours=hours)).isoformat()
    )
    values = {
        "project": PROJECT,
        "config": config.fleet_name,
        "owner": inputs.owner,
        "created": inputs.created,
        "expires": expires,
    }
    return {f"{TAG}{key}": _fit(value) for key, value in values.items()}


def _fit(value: str) -> str:
    """Returns a value that every service accepts: letters, digits and `_.:/=+-@`, at most 256."""
    return re.sub(r"[^A-Za-z0-9 _.:/=+@-]", "-", value)[:256]
