"""The template of a fleet: sound by our own rules for every type, capacity and network, and stable where nodes must live on."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aws.fleets import INPUTS, every, fleet
from aws.rules import described, judge
from trainfleet.cloud.template import (
    MOST_BYTES,
    Interface,
    addresses,
    interfaces,
    quota_of,
    read_back,
    render,
    template,
)
from trainfleet.cloud.template_inputs import Inputs, bucket_of, slug, stack_name
from trainfleet.cloud.template_storage import refuse_size
from trainfleet.config import Config
from trainfleet.hardware import node_types
from trainfleet.trust.errors import ConfigError

CASES = {name: (config, inputs) for name, config, inputs in every()}
DATA = ("Resources", "Template", "Properties", "LaunchTemplateData")


@pytest.mark.parametrize("name", CASES)
def test_every_template_keeps_our_own_rules(name: str) -> None:
    config, inputs = CASES[name]
    assert judge(template(config, inputs)) == []
    assert json.loads(render(config, inputs)) == template(config, inputs)


def set_at(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(whole: Any) -> None:
        for step in path[:-1]:
            whole = whole[step]
        whole[path[-1]] = value

    return change


def drop(*path: Any) -> Callable[[Any], None]:
    def change(whole: Any) -> None:
        for step in path[:-1]:
            whole = whole[step]
        del whole[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_at(*DATA, "NetworkInterfaces", 0, "InterfaceType", value="efa-only"), "primary"),
        (set_at(*DATA, "NetworkInterfaces", 3, "InterfaceType", value="interface"), "31 EFA interfaces, the type has 32"),
        (set_at(*DATA, "NetworkInterfaces", 3, "InterfaceType", value="efaonly"), "is not one of"),
        (set_at(*DATA, "NetworkInterfaces", 3, "NetworkCardIndex", value=32), "no network card 32"),
        (set_at(*DATA, "NetworkInterfaces", 3, "NetworkCardIndex", value=5), "one place"),
        (set_at(*DATA, "NetworkInterfaces", 3, "SubnetId", value="subnet-1"), "different subnets"),
        (set_at(*DATA, "InstanceMarketOptions", value={"MarketType": "spot"}), "can't be stopped"),
        (set_at(*DATA, "InstanceMarketOptions", value={"MarketType": "spots"}), "is not one of"),
        (set_at("Resources", "FileSystem", "Properties", "StorageType", value="SDD"), "is not one of"),
        (set_at("Resources", "FileSystem", "Properties", "LustreConfiguration", "DeploymentType", value="SCRATCH_3"), "not one of"),
        (set_at("Resources", "FileSystem", "Properties", "StorageCapacity", value=3600), "3600 GiB is no size"),
        (drop("Resources", "FileSystem", "Properties", "FileSystemTypeVersion"), "2.10"),
        (drop("Resources", "FileSystem", "DeletionPolicy"), "goes with the stack"),
        (drop("Resources", "WallIn"), "not open to itself: in"),
        (drop("Resources", "WallOut"), "not open to itself: out"),
        (set_at("Resources", "WallIn", "Properties", "IpProtocol", value="tcp"), "not open to itself: in"),
        (set_at("Resources", "WallOut", "Type", value="AWS::EC2::SecurityGroupIngress"), "not open to itself: out"),
        (set_at(*DATA, "MetadataOptions", "HttpTokens", value="optional"), "without a token"),
        (set_at(*DATA, "BlockDeviceMappings", 0, "Ebs", "Encrypted", value=False), "not encrypted"),
        (drop("Resources", "Bucket", "Properties", "LifecycleConfiguration"), "for ever"),
        (set_at("Resources", "Vpc", "Properties", "Tags", value=[]), "Vpc lacks tags"),
        (set_at(*DATA, "UserData", value="aWYgdGhlbg=="), "Template"),
        (drop("Resources", "Log", "Properties", "RetentionInDays"), "kept for ever"),
        (set_at("Resources", "NodeRole", "Properties", "Policies", 0, "PolicyDocument", "Statement", -1, "Resource", value=["*"]), "may not write to it"),
    ],
)  # fmt: skip
def test_our_rules_would_see_what_is_wrong(change: Callable[[Any], None], said: str) -> None:
    bad = copy.deepcopy(template(fleet(), INPUTS))
    change(bad)
    assert any(said in problem for problem in judge(bad)), judge(bad)


@pytest.mark.parametrize("name", node_types.INSTANCE_TYPES)
def test_the_table_agrees_with_what_ec2_describes(name: str) -> None:
    told, row = described(name), node_types.INSTANCE_TYPES[name]
    info, sold = told["NetworkInfo"], set(told["SupportedUsageClasses"])
    assert (
        row.vcpus == told["VCpuInfo"]["DefaultVCpus"]
        and row.memory_gib == told["MemoryInfo"]["SizeInMiB"] // 1024
    )
    assert row.efa == info.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    slots = info["NetworkCards"][0]["MaximumNetworkInterfaces"]
    assert min(4, slots) == row.slots and len(on_card_0(interfaces(name))) <= slots
    assert len(on_card_0(interfaces(name, 1))) + 1 <= slots, (
        "a task of Batch has an interface of its own"
    )
    assert row.nvme_gb == told.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0)
    assert row.sold == {{"capacity-block": "block"}.get(kind, kind) for kind in sold}


def on_card_0(found: tuple[Interface, ...]) -> list[Interface]:
    return [one for one in found if one.card == 0]


def test_every_type_has_its_quotas() -> None:
    assert all(quota_of(name, "on-demand") for name in node_types.INSTANCE_TYPES)
    assert (
        quota_of("p5.48xlarge", "spot") != quota_of("p4d.24xlarge", "spot")
        and quota_of("p5.48xlarge", "block") is None
    )


def test_interfaces_are_numbered_as_aws_has_them() -> None:
    p4d, p5, b300 = (
        interfaces("p4d.24xlarge"),
        interfaces("p5.48xlarge"),
        interfaces("p6-b300.48xlarge"),
    )
    assert [(place.card, place.device, place.kind) for place in p4d] == [
        (0, 0, "efa"),
        (1, 1, "efa"),
        (2, 1, "efa"),
        (3, 1, "efa"),
    ]
    assert [(place.card, place.device, place.kind) for place in p5[:3]] == [
        (0, 0, "interface"),
        (0, 1, "efa-only"),
        (1, 0, "efa-only"),
    ]
    assert [(place.card, place.device, place.kind) for place in b300[:2]] == [
        (0, 0, "interface"),
        (1, 0, "efa-only"),
    ]
    on_batch = interfaces("p5.48xlarge", 1)
    assert (on_batch[0].kind, on_batch[1].card, on_batch[1].kind, len(on_batch)) == (
        "efa",
        1,
        "efa-only",
        32,
    )
    assert (addresses("trn1.32xlarge"), addresses("p5.48xlarge"), addresses("c7i.8xlarge")) == (
        8,
        1,
        1,
    )


def test_nodes_whose_slots_stay_are_left_alone() -> None:
    config = fleet()
    four, two = (
        template(config, replace(INPUTS, slots=(0, 1, 2, 3))),
        template(config, replace(INPUTS, slots=(0, 1))),
    )
    replaced = template(config, replace(INPUTS, slots=(0, 2, 3, 4)))
    assert {
        name for name in four["Resources"] if four["Resources"][name] != two["Resources"].get(name)
    } == {"Node2", "Node3"}
    changed = {name for name in {**four["Resources"], **replaced["Resources"]}
               if four["Resources"].get(name) != replaced["Resources"].get(name)}  # fmt: skip
    assert changed == {"Node1", "Node4"}


def test_an_update_keeps_what_would_replace_every_node() -> None:
    made = template(fleet(), INPUTS)
    parameters = {name: entry["Default"] for name, entry in made["Parameters"].items()}
    later = replace(
        INPUTS,
        image="ami-0fedcba9876543210",
        created="2026-12-24T06:00:00+00:00",
        owner="another",
        zone="us-east-1a",
    )
    assert template(fleet(), read_back(later, parameters)) == made
    assert template(fleet(), later)["Resources"]["Template"] != made["Resources"]["Template"]


def test_a_node_alone_is_launched_plainly_and_a_fabric_stays() -> None:
    """One interface and no placement group; several nodes need EFA, and the one that is left of them is not made anew."""
    one, two = fleet("trn1.32xlarge", nodes=1), fleet("trn1.32xlarge")
    alone, several = replace(INPUTS, slots=(0,), plain="yes"), replace(INPUTS, slots=(0, 1))
    plain, fabric = template(one, alone), template(two, several)
    data = plain["Resources"]["Template"]["Properties"]["LaunchTemplateData"]
    assert [face["InterfaceType"] for face in data["NetworkInterfaces"]] == ["interface"]
    assert "Placement" not in data and "Together" not in plain["Resources"]

    def after(made: dict[str, Any], config: Config, inputs: Inputs) -> Any:
        fixed = {name: entry["Default"] for name, entry in made["Parameters"].items()}
        return template(config, read_back(inputs, fixed))["Resources"]["Template"]

    assert after(plain, two, several) == fabric["Resources"]["Template"]
    assert after(fabric, one, alone) == fabric["Resources"]["Template"]
    assert after(plain, one, alone) == plain["Resources"]["Template"]


def test_what_is_kept_holds_data_and_costs_nothing_else() -> None:
    config, _ = CASES["kept"]
    kinds = {
        entry["Type"]
        for entry in template(config, replace(INPUTS, kept=True, slots=()))["Resources"].values()
    }
    assert not kinds & {
        "AWS::EC2::Instance",
        "AWS::EC2::NatGateway",
        "AWS::EC2::EIP",
        "AWS::IAM::Role",
    }
    assert kinds >= {"AWS::S3::Bucket", "AWS::FSx::FileSystem", "AWS::EC2::Subnet"}


def test_names_are_what_each_service_takes() -> None:
    config = replace(fleet(), name="a.b_c-" + "x" * 50)
    assert stack_name(config).replace("-", "").isalnum() and len(bucket_of(config, INPUTS)) <= 63
    assert (
        slug("a.b") != slug("a-b")
        and slug("plain-1") == "plain-1"
        and len(slug("y" * 63, 20)) == 20
    )


def test_a_hundred_nodes_fit_one_template_and_too_many_are_refused() -> None:
    assert len(render(fleet(), replace(INPUTS, slots=tuple(range(100))))) < MOST_BYTES
    with pytest.raises(
        ConfigError, match=r"fleet.nodes: 400: too many nodes for one template; (\d+) is the most"
    ) as caught:
        render(fleet(), replace(INPUTS, slots=tuple(range(400))))
    works = int(str(caught.value).split("template; ")[1].split()[0])
    render(fleet(), replace(INPUTS, slots=tuple(range(works))))


@pytest.mark.parametrize(
    ("fsx", "said"),
    [
        ({"size_gib": 1200}, ""),
        ({"size_gib": 4800}, ""),
        ({"size_gib": 3600}, "a multiple of 2400; set 4800"),
        ({"size_gib": 2000}, "a multiple of 2400; set 2400"),
        ({"efa": True}, "scratch file systems have no EFA"),
        (
            {"type": "persistent", "efa": True, "throughput": 250, "size_gib": 4800},
            "a multiple of 19200; set 19200",
        ),
        ({"type": "persistent", "efa": True, "throughput": 1000, "size_gib": 9600}, ""),
    ],
)
def test_sizes_that_fsx_would_not_make_are_refused(fsx: dict[str, Any], said: str) -> None:
    told = " ".join(
        message
        for _, message in refuse_size(
            fleet(**{f"fsx_{key}": value for key, value in fsx.items()}).fleet.fsx
        )
    )
    assert said in told and bool(said) == bool(told)
