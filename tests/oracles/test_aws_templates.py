"""cfn-lint, AWS's own judge of templates, on every template that we make: all instance types, kinds of capacity and networks.

`make test` has it judge one in STEP of them, CI and `make drills` all.
"""

from __future__ import annotations

import base64
import email
import functools
import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest
from cfnlint.config import ConfigMixIn
from cfnlint.decode.decode import decode_str
from cfnlint.runner import Runner

from aws.fleets import ELSEWHERE, INPUTS, every, fleet
from trainfleet.cloud import scheduler_template
from trainfleet.cloud.template import render
from trainfleet.hardware import node_types

CASES = {name: (config, inputs) for name, config, inputs in every()}
# The image is a plain string in the stack's parameters, so that an update keeps it.
IGNORED = ["W2506"]
NEW = tuple(
    f"'{name}' is not one of" for name in ("trn2.3xlarge", "trn2u.48xlarge")
)  # cfn-lint 1.51.0 has no such types yet


STEP = 6


def all_of(names: Iterable[str]) -> list[Any]:
    """One case a name."""
    return [
        pytest.param(name, marks=[pytest.mark.thorough] if number % STEP else [])
        for number, name in enumerate(names)
    ]


@functools.cache
def judge(region: str) -> Runner:
    return Runner(ConfigMixIn(regions=[region], ignore_checks=IGNORED))


def problems(text: str, region: str) -> list[str]:
    data, unread = decode_str(text)
    found = [*unread, *judge(region).validate_template(data)]
    wrong = [match for match in found if not match.message.startswith(NEW)]
    return [
        f"{match.rule.id} {'/'.join(map(str, match.path or ()))}: {match.message[:300]}"
        for match in wrong
    ]


@pytest.mark.parametrize("name", all_of(CASES))
def test_every_template_is_sound_to_cfn_lint(name: str) -> None:
    config, inputs = CASES[name]
    assert problems(render(config, inputs), inputs.region) == []


@pytest.mark.parametrize("kept", [False, True])
def test_the_network_of_a_cluster_is_sound_to_cfn_lint(kept: bool) -> None:
    text = scheduler_template.render(
        fleet("c7i.8xlarge"), replace(INPUTS, kept=kept), scheduler_template.NETWORK
    )
    assert problems(text, INPUTS.region) == []
    assert ("Nat" in json.loads(text)["Resources"]) is not kept


@pytest.mark.parametrize("kept", [False, True])
def test_a_cluster_s_network_in_several_zones_is_sound_to_cfn_lint(kept: bool) -> None:
    """It has the file system too, which every subnet reaches; the kept one has no subnet without it."""
    config = fleet("c7i.8xlarge")
    aws = replace(config.fleet.aws, zones=("us-east-1b", "us-east-1a", "us-east-1c"))
    config = replace(config, fleet=replace(config.fleet, aws=aws, shared_folder="/fsx/work"))
    text = scheduler_template.render(config, replace(INPUTS, kept=kept), scheduler_template.NETWORK)
    found = problems(text, INPUTS.region)
    assert not [one for one in found if not one.startswith("W3010")], "the config names the zones"
    made = json.loads(text)["Resources"]
    subnets = [one for one in made.values() if one["Type"] == "AWS::EC2::Subnet"]
    networks = [ip_network(one["Properties"]["CidrBlock"]) for one in subnets]
    assert len(subnets) == (1 if kept else 4) and "FileSystem" in made
    assert not any(one.overlaps(other) for one, other in itertools.combinations(networks, 2))
    opened = ip_network(made["WallFromNodes"]["Properties"]["CidrIp"])
    assert all(one.subnet_of(opened) for one in networks)


@pytest.mark.parametrize("name", all_of(node_types.INSTANCE_TYPES))
@pytest.mark.parametrize("scheduler", ["batch", "sagemaker"])
def test_what_schedulers_need_is_sound_to_cfn_lint(scheduler: str, name: str) -> None:
    """Its environment and queue are Batch's; the launch template has every EFA interface, and no subnet, which Batch sets."""
    config, inputs = fleet(name), replace(INPUTS, region=ELSEWHERE.get(name, "us-east-1"))
    text = scheduler_template.render(config, inputs, scheduler)
    assert problems(text, inputs.region) == []
    made = json.loads(text)["Resources"]
    if scheduler == "batch":
        data = made["Template"]["Properties"]["LaunchTemplateData"]
        kinds = [one["InterfaceType"] for one in data["NetworkInterfaces"]]
        assert sum(kind.startswith("efa") for kind in kinds) == node_types.INSTANCE_TYPES[name].efa
        assert not any("SubnetId" in one for one in data["NetworkInterfaces"])
        parts = email.message_from_bytes(base64.b64decode(data["UserData"]))
        assert parts.is_multipart() and [
            part.get_content_type() for part in parts.get_payload()
        ] == ["text/x-shellscript"]


def test_a_second_queue_for_tokenizing_is_sound_to_cfn_lint() -> None:
    config = fleet("trn1.32xlarge", "block")
    config = replace(config, data=replace(config.data, tokenize_instance_type="c7i.8xlarge"))
    text = scheduler_template.render(config, replace(INPUTS, tokenizing=INPUTS.image), "batch")
    assert (
        problems(text, INPUTS.region) == [] and "TokenizingQueue" in json.loads(text)["Resources"]
    )


def test_cfn_lint_would_see_what_is_wrong() -> None:
    config, inputs = CASES["p5.48xlarge-on-demand"]
    for good, bad in (
        ('"HttpTokens":"required"', '"HttpTokens":"must"'),
        ('{"Ref":"Vpc"}', '{"Ref":"Vcp"}'),
        ('"gp3"', '"gp9"'),
    ):
        text = render(config, inputs)
        assert good in text and problems(text.replace(good, bad), inputs.region)
