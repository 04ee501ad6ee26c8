"""A pretended account in place of AWS for this process: its requests, its clock, and a config whose machines it makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainfleet.backends import terms_of
from trainfleet.cloud import calls, checks, clock, discovery
from trainfleet.config import Config, Settings, load

from . import batch, cloudformation, compute, limits, sagemaker, selling, storage, watchers  # noqa: F401  what they answer
from .account import Account, Thing

KEY = Path(__file__).with_name("somebody")  # the user's key, of which only the public half is here


@contextmanager
def aws(account: Account) -> Iterator[pytest.MonkeyPatch]:
    """From now on this is AWS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "send", account.respond)
        patch.setattr(discovery, "USUAL_KEYS", (str(KEY),))
        patch.setattr(checks, "PROGRAMS", ())
        patch.setattr(clock, "sleep", account.sleep)
        patch.setattr(clock, "now", lambda: account.now)
        yield patch


def said(**changes: Any) -> dict[str, Any]:
    """A config of two nodes with a file system, a bucket and a head. `changes` are of fleet; `aws` is added to what stands there."""
    aws = {
        "region": "us-east-1",
        "allow_ssh_from": ["198.51.100.0/24"],
        "bastion_type": "c7i.8xlarge",
    } | changes.pop("aws", {})
    fleet = {
        "backend": "ec2",
        "nodes": 2,
        "instance_type": "c7i.8xlarge",
        "shared_folder": "/fsx/trainfleet",
        "aws": aws,
    } | changes
    return {"name": "cloudy", "fleet": fleet, "train": {"global_batch_size": 12},
            "data": {"name": "text", "sources": ["/fsx/text"], "vocab_size": 340}}  # fmt: skip


def config_of(folder: Path, **changes: Any) -> Config:
    """That config, loaded."""
    path = folder / "cloudy.yaml"
    path.write_text(yaml.safe_dump(said(**changes)))
    return load(Settings(path, "", {}), terms_of)[0]


def strangers(account: Account) -> dict[str, Thing]:
    """What others have in the account: it looks much like ours, and must be there as it is afterwards."""
    account.add("vpc", "vpc-0foreign", {"CidrBlock": "10.0.0.0/16"}, {"Name": "theirs"})
    account.add(
        "instance",
        "i-0f0e1a2b3c4d5e6f7",
        {"InstanceType": "p5.48xlarge"},
        {"trainfleet:config": "cloudy"},
        zone="us-east-1a",
        address="10.9.0.1",
    ).state = "running"
    account.add(
        "instance",
        "i-0f0e1a2b3c4d5e6f8",
        {"InstanceType": "c7i.8xlarge"},
        {"trainfleet:project": "trainfleet", "trainfleet:config": "another"},
        zone="us-east-1a",
        address="10.9.0.2",
    ).state = "running"
    account.add("bucket", "trainfleet-theirs", {}, {"team": "theirs"}, objects={"a": 1})
    account.add("bucket", "theirs", {}, {"team": "theirs"})
    account.add(
        "file-system",
        "fs-0f0e1a2b3c4d5e6f7",
        {"StorageCapacity": 1200},
        {},
        mount="abc",
        written=9.0,
    ).state = "AVAILABLE"
    account.add("role", "trainfleet-like", {"Path": "/"}, {"team": "theirs"})
    account.add("log-group", "/trainfleet/theirs", {}, {})
    return dict(account.things)
