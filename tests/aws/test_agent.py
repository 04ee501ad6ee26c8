"""Where no port is open SSH goes through SSM Session Manager: what is asked, in which words, and whose host keys are believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from aws.account import Account
from aws.crashes import KEY
from aws.test_fleet import make
from aws.world import config_of
from trainfleet.backends.ec2 import Ec2
from trainfleet.backends.head import HEAD
from trainfleet.cloud.template import template
from trainfleet.config import Config
from trainfleet.trust.errors import BackendError

INGRESS = "AWS::EC2::SecurityGroupIngress"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path, aws={"allow_ssh_from": [], "bastion_type": None})


@pytest.fixture
def backend(account: Account, config: Config) -> Ec2:
    """Of two nodes whose agents answer; their consoles are empty, as those of new instances are."""
    account.on_launch = lambda instance: instance.more.update(ssm=f"{KEY} root@node\n")
    make(config)
    return Ec2(config)


def test_nothing_is_open_to_the_outside(account: Account, config: Config, backend: Ec2) -> None:
    made = template(config, backend.cloud.foresee(()).inputs)["Resources"]
    rules = [entry["Properties"] for entry in made.values() if entry["Type"] == INGRESS]
    assert [rule.get("SourceSecurityGroupId") for rule in rules] == [
        {"Ref": "Wall"}
    ] and "Head" not in made
    policies = made["NodeRole"]["Properties"]["ManagedPolicyArns"]
    assert policies == ["arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"], (
        "what the agent needs, and no more"
    )


def test_host_keys_are_asked_of_the_agent_and_stand_under_the_instance_s_id(
    account: Account, backend: Ec2
) -> None:
    ids = [node.id for node in backend.cloud.nodes()]
    assert [host.partition("=")[2] for host in backend.head().located.fleet.hosts] == ids
    asked = [request for _, operation, request in account.calls if operation == "SendCommand"]
    shown = {"commands": ["cat /etc/ssh/ssh_host_*_key.pub"]}
    assert [request["InstanceIds"] for request in asked] == [[id] for id in ids]
    assert all(
        request["DocumentName"] == "AWS-RunShellScript" and request["Parameters"] == shown
        for request in asked
    )
    known = Path(backend.head().located.fleet.ssh.known_hosts or "").read_text()
    assert known == "".join(f"{id} {KEY}\n" for id in ids)


def test_the_way_to_a_node_is_the_documented_command(
    backend: Ec2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs.aws.amazon.com/systems-manager, "Allow and control permissions for SSH connections through Session Manager"."""
    assert backend.head().transport.proxy == (
        "aws ssm start-session --target %h --document-name AWS-StartSSHSession --parameters portNumber=%p --region us-east-1"
    )
    monkeypatch.setenv(HEAD, "1")
    assert not Ec2(backend.head().located).head().by_agent, (
        "the head of the fleet reaches the others by their addresses"
    )


def test_what_this_machine_lacks_is_told_before_anything_is_made(
    account: Account, config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("trainfleet.cloud.checks.PROGRAMS", ("aws", "session-manager-plugin"))
    with pytest.raises(
        BackendError, match="SSH through SSM needs aws, which is not installed here"
    ) as told:
        Ec2(config).machines().apply()
    assert "Session Manager plugin" in told.value.next and not account.stacks
