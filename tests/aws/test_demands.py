"""What no account could give is refused in the config's own words, before anything is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aws.fleets import every, fleet
from trainfleet.cloud.checks import MOST_NODES, refuse

LUSTRE_EFA = {"fsx_efa": True, "fsx_type": "persistent", "fsx_size_gib": 19200}


@pytest.mark.parametrize(("name", "config"), [(name, config) for name, config, inputs in every()])
def test_what_has_a_template_is_not_refused(name: str, config: Any) -> None:
    assert list(refuse(config)) == []


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (
            {"capacity": "block", "instance_type": "p3dn.24xlarge"},
            "fleet.aws.capacity",
            "set on-demand, spot or reservation",
        ),
        ({"vpc": "vpc-0123456789abcdef0"}, "fleet.aws.vpc", "together"),
        ({"subnets": ("subnet-0123456789abcdef0",)}, "fleet.aws.subnets", "together"),
        (
            {"region": "us-east-1", "zones": ("us-east-1a", "us-east-2a")},
            "fleet.aws.zones",
            "us-east-2a is not in",
        ),
        (
            {"allow_ssh_from": ("0.0.0.0/0",), "bastion_type": "c7i.xlarge"},
            "fleet.aws.allow_ssh_from",
            "complete Internet",
        ),
        (
            {"allow_ssh_from": ("300.1.1.1/32",), "bastion_type": "c7i.xlarge"},
            "fleet.aws.allow_ssh_from",
            "is not a network",
        ),
        (
            {"allow_ssh_from": ("203.0.113.7/24",), "bastion_type": "c7i.xlarge"},
            "fleet.aws.allow_ssh_from",
            "host bits",
        ),
        (
            {"allow_ssh_from": ("203.0.113.7/32",)},
            "fleet.aws.allow_ssh_from",
            "set fleet.aws.bastion_type, such as c7i.xlarge",
        ),
        (
            {"bastion_type": "c7i.xlarge"},
            "fleet.aws.bastion_type",
            "set fleet.aws.allow_ssh_from",
        ),
        (
            {"bastion_type": "p5.48xlarge", "allow_ssh_from": ("203.0.113.7/32",)},
            "fleet.aws.bastion_type",
            "needs no accelerator",
        ),
        ({"fsx_size_gib": 3600}, "fleet.fsx.size_gib", "set 4800"),
        (
            {"instance_type": "p4d.24xlarge", **LUSTRE_EFA},
            "fleet.fsx.efa",
            "p4d.24xlarge can't reach FSx over EFA",
        ),
        (
            {"instance_type": "trn2.48xlarge", **LUSTRE_EFA},
            "fleet.fsx.efa",
            "paid for unused; set false, or use trn1",
        ),
        ({"nodes": MOST_NODES + 1}, "fleet.nodes", "one stack makes"),
    ],
)
def test_what_aws_can_t_do_is_told_with_what_works(
    words: dict[str, Any], key: str, said: str
) -> None:
    told = dict(refuse(fleet(**words)))
    assert key in told and said in told[key]


def test_reservations_go_with_what_uses_them() -> None:
    config = fleet(capacity="block")
    without = replace(
        config, fleet=replace(config.fleet, aws=replace(config.fleet.aws, reservation=None))
    )
    assert "needs a reservation" in dict(refuse(without))["fleet.aws.reservation"]
    unused = replace(
        config, fleet=replace(config.fleet, aws=replace(config.fleet.aws, capacity="spot"))
    )
    assert "not used with spot" in dict(refuse(unused))["fleet.aws.reservation"]
    both = replace(config, fleet=replace(config.fleet, spot=True))
    assert "set false" in dict(refuse(both))["fleet.spot"]


def test_folders_leave_room_for_what_is_linked() -> None:
    config = fleet()
    for folder, said in (
        ("/fsx", "set /fsx/trainfleet"),
        ("/fsx/linked/x", "set another folder"),
    ):
        told = dict(refuse(replace(config, fleet=replace(config.fleet, shared_folder=folder))))
        assert said in told["fleet.shared_folder"]
    linked = replace(
        config.fleet, shared_folder="/mnt", fsx=replace(config.fleet.fsx, s3_import="s3://a-b-c/d")
    )
    assert (
        "only for a new file system"
        in dict(refuse(replace(config, fleet=linked)))["fleet.fsx.s3_import"]
    )
