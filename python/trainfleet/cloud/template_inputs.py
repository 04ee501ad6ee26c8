"""Defines a template's inputs other than the config, and the names and tags of its resources."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from ..config import Config
from ..config.tables import read_table

PROJECT = "trainfleet"
Tags = dict[str, str]
TAG = f"{PROJECT}:"  # prefix of our tags' keys
LONGEST, LONGEST_WITH_DATABASE = 60, 40  # maximum characters in a cluster's name
MOST_SLUG = 20  # maximum characters of the config's name in a bucket name, which is limited to 63
TEMPLATE_TYPES = read_table(Path(__file__).with_name("template_types.yaml"))


@dataclass(frozen=True)
class Scheduler:
    """A type of scheduler, which launches a config's nodes and runs jobs on them.

    in_account  whether the nodes are EC2 instances in the user's account.
    in_zone     whether the nodes are in the stack's availability zone.
    by_ssh      whether the nodes or their head are reachable over SSH; if so, the nodes can also
                mount the stack's FSx.
    image       key of the nodes' machine image in docker/platforms.lock.yaml.
    services    AWS services that require a service-linked role in the account.
    """

    in_account: bool = True
    in_zone: bool = True
    by_ssh: bool = True
    image: str = ""
    services: tuple[str, ...] = ()


SCHEDULERS = {
    "": Scheduler(image="ami"),  # no scheduler: the stack's instances, over SSH
    "batch": Scheduler(by_ssh=False, image="ecs", services=("batch.amazonaws.com",)),
    "parallelcluster": Scheduler(in_zone=False),
    "sagemaker": Scheduler(in_account=False, in_zone=False, by_ssh=False),
}


@dataclass(frozen=True)
class Inputs:
    """Account details that the template needs.

    account, owner     account number, and the identity that creates the stack
    zone               zone of all resources; `subnet`: the user's own subnet in that zone
    image, root        the nodes' machine image and its root device. An update keeps the stack's
                       values, because different ones would replace every node
    head_image         the head's machine image, never one baked from a node
    created            when the stack was first created (ISO 8601, UTC); an update keeps it, too
    slots              slots of the nodes, `Node<slot>`. An update leaves the nodes in existing
                       slots unchanged, and creates a node for each new slot
    public_key         OpenSSH public key for the key pair to create; "" if the config names one
    group              the reservation's placement group, if any
    has_bucket         whether an earlier `make clean` kept the bucket that the stack would create
    plain              yes: the only node has one network interface and no placement group. A stack
                       with EFA keeps it, because another launch template would replace the node
    scheduler          a key of SCHEDULERS
    tokenizing         the machine image for data.tokenize_instance_type, if that is set
    kept               whether to keep only resources that hold data, and their network
    builds             whether the stack has a cheap machine that builds the Python environment
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
    builds: bool = False
    partition: str = "aws"
    plain: str = "no"
    scheduler: str = ""
    tokenizing: str = ""
    head_image: str = ""

    @property
    def kind(self) -> Scheduler:
        return SCHEDULERS[self.scheduler]


def stack_name(config: Config) -> str:
    """Returns the stack's name. CloudFormation accepts only letters, digits and hyphens."""
    return f"{PROJECT}-{slug(config.fleet_name)}"


def cluster_name(config: Config) -> str:
    """Returns the name of the cluster that ParallelCluster creates."""
    wanted = config.fleet.slurm.parallelcluster
    if wanted.name:
        return wanted.name
    most = LONGEST_WITH_DATABASE if wanted.database_uri else LONGEST
    plain = slug(config.fleet_name, most)
    return plain if plain[:1].isalpha() else f"c-{slug(config.fleet_name, most - 2)}"


def tokenizing_queue(config: Config) -> str:
    """Returns the job queue for data.tokenize_instance_type. The underscore prevents a clash with
    stack names.
    """
    return f"{stack_name(config)}_tokenize"


def slug(name: str, most: int = 100) -> str:
    """Returns a config's name in lowercase letters, digits and single hyphens. A hash of the full
    name is appended if characters were lost.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    if plain == name and len(plain) <= most:
        return plain
    digits = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{plain[: most - 7].strip('-')}-{digits}"


def bucket_of(config: Config, inputs: Inputs) -> str:
    """Returns the bucket for data and checkpoints: the user's, or a uniquely named one."""
    name = f"{PROJECT}-{slug(config.fleet_name, MOST_SLUG)}-{inputs.account}-{inputs.region}"
    return config.fleet.aws.bucket or name


def own_tags(config: str) -> Tags:
    """Returns the tags that identify a config's resources and jobs."""
    return {f"{TAG}project": PROJECT, f"{TAG}config": config}


def pairs(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns tags as a list of Key/Value objects, the format that most services use."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tags_of(config: Config, inputs: Inputs) -> Tags:
    """Returns the tags for every resource in the stack."""
    hours, expires = config.fleet.max_lifetime_hours, "never"
    if hours is not None:
        end = datetime.fromisoformat(inputs.created) + timedelta(hours=hours)
        expires = end.isoformat()
    values = {
        "project": PROJECT,
        "config": config.fleet_name,
        "owner": inputs.owner,
        "created": inputs.created,
        "expires": expires,
    }
    return {f"{TAG}{key}": _fit(value) for key, value in values.items()}


def _fit(value: str) -> str:
    """Returns a tag value restricted to the characters and length that every service accepts."""
    return re.sub(r"[^A-Za-z0-9 _.:/=+@-]", "-", value)[:256]
