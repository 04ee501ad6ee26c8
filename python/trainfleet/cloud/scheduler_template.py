"""Builds the CloudFormation templates for AWS Batch, SageMaker and ParallelCluster: the resources
that all jobs share. The stacks contain no nodes, because the scheduler launches them.

AWS Batch requires a network, a compute environment and its queue. The environment's launch template
has every EFA interface, in one placement group. SageMaker launches machines itself, and requires a
role. Both stacks include the container roles and a log group. ParallelCluster requires a network
with a private subnet in each of fleet.aws.zones and, with several zones, the file system. Job
definitions are not part of the stack, because they name the image. They are registered with the job
(backends/batch_request.py).

Tested: every instance type passes cfn-lint and our own rules. Not tested: creating these stacks in
an account.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from ..config import Config
from ..config.derive import tokenizing
from ..hardware import node_types
from ..trust.errors import CloudError
from .calls import Json
from .stack_nodes import FleetStack, Slots, StackNode
from .template import assemble, attached, hardened, interfaces, placement, reserved, together
from .template_inputs import SCHEDULERS, Inputs, Tags, stack_name, tags_of, tokenizing_queue
from .template_parts import (
    AGENT,
    Resources,
    allow,
    attribute,
    fixed,
    keys,
    network,
    pulls,
    ref,
    resource,
    role,
    statements,
    subnet,
    walls,
)
from .template_storage import file_system, logs, makes_file_system

GRACE = 110  # seconds from SIGTERM to SIGKILL, for ranks to save a checkpoint and exit
TASKS_OWN = 1  # network interfaces that ECS adds to card 0 for a task of a multi-node job
SUBNET = "AWS::EC2::Subnet"
# root device and its minimum size in GiB; ECS pulls training images, which are large, to it
ROOT, DISK = ("/dev/xvda", 300)
BOUNDARY = "==TRAINFLEET=="
# The ECS agent starts when user data ends, even after an error, so `refuse` disables it first. The
# console output keeps these messages after the instance is terminated.
REFUSE = """refuse() {
  set +e
  trap - ERR
  echo "trainfleet: $1: this instance takes no jobs, and shuts down" | tee /dev/console
  systemctl mask --now ecs
  shutdown -h now
  exit 1
}
trap 'refuse "user data, line $LINENO: $BASH_COMMAND"' ERR"""
INSTANCES = "service-role/AmazonEC2ContainerServiceforEC2Role"
TASKS = "service-role/AmazonECSTaskExecutionRolePolicy"


def render(config: Config, inputs: Inputs, scheduler: str) -> str:
    """Renders the template of `scheduler` (batch, sagemaker or parallelcluster) as JSON."""
    return json.dumps(template(config, inputs, scheduler), separators=(",", ":"))


def template(config: Config, inputs: Inputs, scheduler: str) -> Json:
    """Returns the template as a dict."""
    made = MAKERS[scheduler](config, inputs)
    values: Json = {"In": ref("Zone"), "Made": ref("Created"), "By": ref("Owner")}
    roles = [name for name in ("JobRole", "ExecutionRole") if name in made]
    values |= {name: attribute(name, "Arn") for name in roles}
    if "Log" in made:
        values["LogGroup"] = ref("Log")
    if SCHEDULERS[scheduler].by_ssh:
        subnets = [name for name in made if made[name]["Type"] == SUBNET]
        values |= {name.removesuffix("Subnet"): ref(name) for name in subnets}
    if "FileSystem" in made:
        values |= {name: attribute("FileSystem", name) for name in ("DNSName", "LustreMountName")}
    outputs = {name: {"Value": value} for name, value in values.items()}
    about = f"trainfleet {config.fleet_name}: {scheduler} on {config.fleet.instance_type}"
    return assemble(config, inputs, made, outputs, about)


def batch(config: Config, inputs: Inputs) -> Resources:
    """Builds the resources for AWS Batch multi-node jobs."""
    group = placement(config, inputs)
    return {
        **network(config, inputs), **walls(config, inputs), **logs(config), **together(config),
        "NodeRole": role(inputs, "ec2.amazonaws.com", (), [INSTANCES, AGENT]),
        "NodeProfile": resource("AWS::IAM::InstanceProfile", Roles=[ref("NodeRole")]),
        "JobRole": role(inputs, "ecs-tasks.amazonaws.com", statements(config, inputs)),
        "ExecutionRole": role(inputs, "ecs-tasks.amazonaws.com", _reads(config, inputs), [TASKS]),
        **_queue(config, inputs, stack_name(config), group),
        **(_tokenizing(config, inputs) if config.data.tokenize_instance_type else {}),
    }  # fmt: skip


def _tokenizing(config: Config, inputs: Inputs) -> Resources:
    """Builds the launch template, compute environment and queue for tokenizing."""
    own, name = replace(inputs, image=inputs.tokenizing), tokenizing_queue(config)
    return _queue(tokenizing(config), own, name, None, "Tokenizing")


def _queue(config: Config, inputs: Inputs, name: str, group: Any, prefix: str = "") -> Resources:
    """Builds a launch template, its compute environment and the queue `name`.

    Source of the image types: docs.aws.amazon.com/batch/latest/userguide/batch-ami-type.html
    """
    row, tags = node_types.INSTANCE_TYPES[config.fleet.instance_type or ""], tags_of(config, inputs)
    return fixed(
        "queue",
        PREFIX=prefix,
        NAME=name,
        KIND=row.name,
        IMAGE=inputs.image,
        SYSTEM="ECS_AL2023_NVIDIA" if row.kind == "cuda" else "ECS_AL2023",
        CORES=row.vcpus * config.fleet.nodes,
        SUBNET=subnet(inputs),
        GROUP=group,
        TAGS=tags,
        DATA=_data(config, inputs, tags),
    )


def sagemaker(config: Config, inputs: Inputs) -> Resources:
    """Builds the role and log group for SageMaker training jobs."""
    return {
        **logs(config),
        "JobRole": role(inputs, "sagemaker.amazonaws.com", of_a_training_job(config, inputs)),
    }


def of_a_training_job(config: Config, inputs: Inputs) -> list[Json]:
    """Returns the policy statements that a training job's role needs, whether the role is the
    stack's or the user's.
    """
    return [
        *statements(config, inputs),
        *pulls(config, inputs),
        *_reads(config, inputs),
        *_of_sagemaker(config, inputs),
        *keys(config, inputs),
    ]


def of_a_start(config: Config, inputs: Inputs) -> list[Json]:
    """Returns the policy statements that the user's execution role needs. ECS uses that role to
    start containers.

    In the stack's role, an AWS managed policy (TASKS) replaces the image and log statements.
    """
    *_, log = statements(config, inputs)
    return [*_reads(config, inputs), *pulls(config, inputs), log]


def parallelcluster(config: Config, inputs: Inputs) -> Resources:
    """Builds a cluster's network. Its public subnet assigns the head's public address, because
    ParallelCluster does not.

    With several zones, the network includes the file system.
    """
    made, zones = network(config, inputs), config.fleet.aws.zones
    if "PublicSubnet" in made:
        made["PublicSubnet"]["Properties"]["MapPublicIpOnLaunch"] = True
        for number, zone in enumerate((one for one in zones if one != inputs.zone), 1):
            where = {"NAME": f"Private{number}", "THIRD": f"{16 * number}", "ZONE": zone}
            made |= fixed("another zone", **where)
    if len(zones) < 2 or not makes_file_system(config):
        return made
    # ParallelCluster can't create a file system for subnets in several zones
    aws = replace(config.fleet.aws, bastion_type=None, allow_ssh_from=())
    fsx = replace(config.fleet.fsx, s3_export=config.fleet.fsx.s3_export and bool(aws.bucket))
    own = replace(config, fleet=replace(config.fleet, aws=aws, fsx=fsx))
    return made | walls(own, inputs) | file_system(own, inputs) | fixed("lustre")


NETWORK = "parallelcluster"
MAKERS = {"batch": batch, "sagemaker": sagemaker, NETWORK: parallelcluster}


def _reads(config: Config, inputs: Inputs) -> list[Json]:
    """Returns the policy statements for reading a job's secrets."""
    return [_parameters(config, inputs), *_secrets(config)]


def _parameters(config: Config, inputs: Inputs) -> Json:
    """Returns the policy statement for the SSM parameters that contain the config's secrets
    (backends/aws_managed.py).
    """
    store = f"arn:{inputs.partition}:ssm:{inputs.region}:{inputs.account}"
    where = f"{store}:parameter/trainfleet/{config.fleet_name}/*"
    return allow("parameters", [where])


def _secrets(config: Config) -> Iterator[Json]:
    """Yields the policy statement for secrets that the config lists by ARN."""
    if arns := sorted({entry.partition("=")[2] for entry in config.fleet.secret_arns}):
        yield allow("secrets", arns)


def _of_sagemaker(config: Config, inputs: Inputs) -> Iterator[Json]:
    logs = f"arn:{inputs.partition}:logs:{inputs.region}:{inputs.account}:log-group"
    yield allow("training log", [f"{logs}:/aws/sagemaker/*"])
    yield allow("metrics", ["*"])
    if config.fleet.sagemaker.remote_debug:
        yield allow("remote debug", ["*"])
    if config.fleet.sagemaker.subnets:
        yield allow("network interfaces", ["*"])


def _data(config: Config, inputs: Inputs, tags: Tags) -> Json:
    """Builds the launch template's data: every EFA interface, but no subnet, because the compute
    environment sets it.
    """
    root = inputs.root if config.fleet.aws.ami else ROOT
    return {
        **hardened(root, config.fleet.aws.volume_gib, tags),
        **reserved(config),
        "NetworkInterfaces": attached(interfaces(config.fleet.instance_type or "", TASKS_OWN)),
        "UserData": base64.b64encode(user_data(config).encode()).decode(),
    }


def user_data(config: Config) -> str:
    """Returns the script that an instance runs before it accepts jobs. It is a multipart MIME
    message, because Batch adds a part to it.
    """
    lines = [
        "#!/bin/bash",
        "set -eu",
        REFUSE,
        f"echo ECS_CONTAINER_STOP_TIMEOUT={GRACE}s >> /etc/ecs/ecs.config",
    ]
    if node_types.INSTANCE_TYPES[config.fleet.instance_type or ""].efa:
        lines.append("modprobe efa")
    lines += _mounting(config)
    head = [
        "MIME-Version: 1.0",
        f'Content-Type: multipart/mixed; boundary="{BOUNDARY}"',
        "",
        f"--{BOUNDARY}",
        'Content-Type: text/x-shellscript; charset="us-ascii"',
        "",
    ]
    return "\n".join([*head, *lines, "", f"--{BOUNDARY}--", ""])


def _mounting(config: Config) -> list[str]:
    """Returns the commands that mount the file system.

    The mount point is immutable, so that jobs can't write to the instance's disk if the mount
    fails.
    """
    fsx, folder = config.fleet.fsx, config.fleet.fsx.mount_point
    if not fsx.dns_name:
        return []
    source = f"{fsx.dns_name}@tcp:/{fsx.mount_name}"
    return [
        "dnf install -y lustre-client",
        f"mkdir -p {folder}",
        f"chattr +i {folder}",
        f"for wait in 5 10 20 40 0; do mount -t lustre -o relatime,flock {source} {folder} && "
        "break; sleep $wait; done",
        f"mountpoint -q {folder} || refuse '{source} can not be mounted at {folder}'",
    ]


class SchedulerStack(FleetStack):
    """CloudFormation stack for `scheduler`: batch, sagemaker or parallelcluster."""

    def __init__(self, config: Config, scheduler: str) -> None:
        super().__init__(config)
        self.scheduler = scheduler

    def render(self, inputs: Inputs) -> str:
        return render(self.config, inputs, self.scheduler)

    def _wanted(self, bad: Collection[str]) -> tuple[Slots, Slots, list[StackNode]]:
        return (), (), []

    def outputs(self) -> dict[str, str]:
        """Returns the stack's outputs by name. Raises CloudError if the stack is missing or
        incomplete.
        """
        state, what = self.stack.look(), "nothing is set up for this config"
        if state is None or not state.whole:
            condition = f"is {state.status}" if state else "does not exist"
            why = f"the stack {self.stack.name} {condition}"
            raise CloudError(what, where=self.where, why=why, next="make setup")
        return dict(state.outputs)
