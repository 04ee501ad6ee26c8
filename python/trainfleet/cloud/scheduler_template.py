"""The CloudFormation template for AWS Batch, SageMaker and ParallelCluster: the resources that all
their jobs share; and its stack, which has no nodes, because the scheduler makes them.

Batch: a network, an environment whose launch template has every EFA interface, in one placement
group, and its queue. SageMaker makes machines itself and needs a role. Both: the roles of
containers, a log group. ParallelCluster: a network. The definition of a job is not in it: it holds
the image, and is registered with the job (backends/batch_request.py).

Tested: every instance type passes cfn-lint and our own rules. Not tested: no stack of it has been
made in an account.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..config import Config
from ..config.tokenizing import tokenizing
from ..hardware import node_types
from ..trust.errors import CloudError
from .instances import hardened, interfaces, newest, placement, reserved, together
from .stack_nodes import FleetStack, StackNode
from .template import assemble
from .template_inputs import SCHEDULERS, Inputs, stack_name, tags_of, tokenizing_queue
from .template_parts import (
    AGENT,
    Resources,
    allow,
    attribute,
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
from .template_storage import logs

GRACE = 110  # seconds from SIGTERM to SIGKILL: ranks save and leave
TASKS_OWN = 1  # interface of a task of a multi-node job, on card 0
# GiB at least: training images are large, and ECS pulls them to the root volume
ROOT, DISK = ("/dev/xvda", 300)
BOUNDARY = "==TRAINFLEET=="
# The ECS agent starts when user data has ended, even after an error. The console keeps these
# messages when the instance is gone.
REFUSE = """refuse() {
  set +e
  trap - ERR
  echo "trainfleet: $1: this instance takes no jobs, and shuts down" | tee /dev/console
  systemctl mask --now ecs
  shutdown -h now
  exit 1
}
trap 'refuse "user data, line $LINENO: $BASH_COMMAND"' ERR"""
INSTANCES, TASKS = (
    "service-role/AmazonEC2ContainerServiceforEC2Role",
    "service-role/AmazonECSTaskExecutionRolePolicy",
)


def render(config: Config, inputs: Inputs, scheduler: str) -> str:
    """Renders the template of `scheduler` (batch, sagemaker or parallelcluster) as JSON."""
    return json.dumps(template(config, inputs, scheduler), separators=(",", ":"))


def template(config: Config, inputs: Inputs, scheduler: str) -> dict[str, Any]:
    """Returns the template as data."""
    made = MAKERS[scheduler](config, inputs)
    values: dict[str, Any] = {"In": ref("Zone"), "Made": ref("Created"), "By": ref("Owner")}
    values |= {
        name: attribute(name, "Arn") for name in ("JobRole", "ExecutionRole") if name in made
    }
    values |= {"LogGroup": ref("Log")} if "Log" in made else {}
    if SCHEDULERS[scheduler].by_ssh:
        values |= {
            name: ref(f"{name}Subnet") for name in ("Private", "Public") if f"{name}Subnet" in made
        }
    about = f"trainfleet {config.fleet_name}: {scheduler} on {config.fleet.instance_type}"
    return assemble(
        config, inputs, made, {name: {"Value": value} for name, value in values.items()}, about
    )


def batch(config: Config, inputs: Inputs) -> Resources:
    """Makes the resources for AWS Batch's multi-node jobs."""
    name, group = stack_name(config), placement(config, inputs)
    return {
        **network(config, inputs), **walls(config, inputs), **logs(config), **together(config),
        "NodeRole": role(inputs, "ec2.amazonaws.com", (), [INSTANCES, AGENT]),
        "NodeProfile": resource("AWS::IAM::InstanceProfile", Roles=[ref("NodeRole")]),
        "JobRole": role(inputs, "ecs-tasks.amazonaws.com", statements(config, inputs)),
        "ExecutionRole": role(inputs, "ecs-tasks.amazonaws.com", _reads(config, inputs), [TASKS]),
        **_queue(config, inputs, (f"{name}-nodes", name), group),
        **(_tokenizing(config, inputs) if config.data.tokenize_instance_type else {}),
    }  # fmt: skip


def _tokenizing(config: Config, inputs: Inputs) -> Resources:
    """Makes the resources for the machines that tokenize: a launch template, an environment and a
    queue.
    """
    name = tokenizing_queue(config)
    return _queue(
        tokenizing(config),
        replace(inputs, image=inputs.tokenizing),
        (f"{name}-nodes", name),
        None,
        "Tokenizing",
    )


def _queue(
    config: Config, inputs: Inputs, names: Sequence[str], group: Any, prefix: str = ""
) -> Resources:
    """Makes a launch template, the environment of these names that uses it, and its queue."""
    row, tags = node_types.INSTANCE_TYPES[config.fleet.instance_type or ""], tags_of(config, inputs)
    return {
        f"{prefix}Template": resource(
            "AWS::EC2::LaunchTemplate", LaunchTemplateData=_data(config, inputs, tags)
        ),
        # group of the tasks' interfaces: else they get the VPC's default group
        f"{prefix}Environment": resource(
            "AWS::Batch::ComputeEnvironment",
            ComputeEnvironmentName=names[0],
            Type="MANAGED",
            State="ENABLED",
            ReplaceComputeEnvironment=False,
            Tags=tags,
            ComputeResources={
                "Type": "EC2",
                "AllocationStrategy": "BEST_FIT_PROGRESSIVE",
                "MinvCpus": 0,
                "MaxvCpus": row.vcpus * config.fleet.nodes,
                "InstanceTypes": [row.name],
                "Subnets": [subnet(inputs)],
                **({"PlacementGroup": group} if group else {}),
                "SecurityGroupIds": [attribute("Wall", "GroupId")],
                "InstanceRole": attribute("NodeProfile", "Arn"),
                "Ec2Configuration": [_image(inputs, row)],
                "Tags": tags,
                "LaunchTemplate": newest(f"{prefix}Template"),
            },
        ),
        f"{prefix}Queue": resource(
            "AWS::Batch::JobQueue",
            JobQueueName=names[1],
            Priority=1,
            State="ENABLED",
            Tags=tags,
            ComputeEnvironmentOrder=[
                {"Order": 1, "ComputeEnvironment": ref(f"{prefix}Environment")}
            ],
        ),
    }


def sagemaker(config: Config, inputs: Inputs) -> Resources:
    """Makes the role that SageMaker's training jobs need; it also pulls the image, writes the log
    and reads secrets.
    """
    return {
        **logs(config),
        "JobRole": role(inputs, "sagemaker.amazonaws.com", of_a_training_job(config, inputs)),
    }


def of_a_training_job(config: Config, inputs: Inputs) -> list[dict[str, Any]]:
    """Lists the permissions of a training job's role, both for the stack's role and the user's."""
    return [
        *statements(config, inputs),
        *pulls(config, inputs),
        *_reads(config, inputs),
        *_of_sagemaker(config, inputs),
        *keys(config, inputs),
    ]


def of_a_start(config: Config, inputs: Inputs) -> list[dict[str, Any]]:
    """Lists the permissions of a user's role with which ECS starts containers; a stack's role also
    has an AWS policy.
    """
    *_, log = statements(config, inputs)
    return [*_reads(config, inputs), *pulls(config, inputs), log]


def parallelcluster(config: Config, inputs: Inputs) -> Resources:
    """Makes a cluster's network. The head gets its public address from the subnet: ParallelCluster
    does not assign one.
    """
    made = network(config, inputs)
    if "PublicSubnet" in made:
        made["PublicSubnet"]["Properties"]["MapPublicIpOnLaunch"] = True
    return made


NETWORK = "parallelcluster"
MAKERS = {"batch": batch, "sagemaker": sagemaker, NETWORK: parallelcluster}


def _reads(config: Config, inputs: Inputs) -> list[dict[str, Any]]:
    """Allows reading a job's secrets."""
    return [_parameters(config, inputs), *_secrets(config)]


def _parameters(config: Config, inputs: Inputs) -> dict[str, Any]:
    """Allows reading the parameters that keep this config's secrets (backends/aws_managed.py)."""
    store = f"arn:{inputs.partition}:ssm:{inputs.region}:{inputs.account}"
    where = f"{store}:parameter/trainfleet/{config.fleet_name}/*"
    return allow(["ssm:GetParameter", "ssm:GetParameters"], [where])


def _secrets(config: Config) -> Iterator[dict[str, Any]]:
    """Allows reading the secrets that the config names by ARN."""
    arns = sorted({entry.partition("=")[2] for entry in config.fleet.secret_arns})
    actions = ["secretsmanager:GetSecretValue", "ssm:GetParameter", "ssm:GetParameters"]
    if arns:
        yield allow(actions, arns)


def _of_sagemaker(config: Config, inputs: Inputs) -> Iterator[dict[str, Any]]:
    group = (
        f"arn:{inputs.partition}:logs:{inputs.region}:{inputs.account}:log-group:/aws/sagemaker/*"
    )
    actions = [
        "logs:CreateLogGroup",
        "logs:CreateLogStream",
        "logs:PutLogEvents",
        "logs:DescribeLogStreams",
    ]
    yield allow(actions, [group])
    yield allow(["cloudwatch:PutMetricData"], ["*"])  # AWS allows no narrower resource here
    if config.fleet.sagemaker.remote_debug:
        yield allow(
            [
                f"ssmmessages:{step}{kind}Channel"
                for step in ("Create", "Open")
                for kind in ("Control", "Data")
            ],
            ["*"],
        )
    if config.fleet.sagemaker.subnets:
        faces = [
            "CreateNetworkInterface",
            "CreateNetworkInterfacePermission",
            "DeleteNetworkInterface",
            "DeleteNetworkInterfacePermission",
            "DescribeNetworkInterfaces",
            "DescribeVpcs",
            "DescribeDhcpOptions",
            "DescribeSubnets",
            "DescribeSecurityGroups",
        ]
        yield allow([f"ec2:{action}" for action in faces], ["*"])


def _image(inputs: Inputs, row: node_types.NodeType) -> dict[str, str]:
    """Returns the machine image, and the image type that Batch needs to be given.

    Source: docs.aws.amazon.com/batch/latest/userguide/batch-ami-type.html
    """
    return {
        "ImageType": "ECS_AL2023_NVIDIA" if row.kind == "cuda" else "ECS_AL2023",
        "ImageIdOverride": inputs.image,
    }


def _data(config: Config, inputs: Inputs, tags: dict[str, str]) -> dict[str, Any]:
    """Makes the launch template: every EFA interface, but no subnet, because the environment sets
    it.
    """
    return {
        **hardened(
            inputs.root if config.fleet.aws.ami else ROOT, config.fleet.aws.volume_gib, tags
        ),
        **reserved(config),
        "NetworkInterfaces": [
            {
                "NetworkCardIndex": one.card,
                "DeviceIndex": one.device,
                "InterfaceType": one.kind,
                "Groups": [attribute("Wall", "GroupId")],
                "DeleteOnTermination": True,
            }
            for one in interfaces(config.fleet.instance_type or "", TASKS_OWN)
        ],
        "UserData": base64.b64encode(user_data(config).encode()).decode(),
    }


def user_data(config: Config) -> str:
    """Writes the commands that an instance runs before it takes jobs, as a multi-part MIME message:
    Batch adds its own part.
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
    """Mounts the file system. Until it is mounted no user can write into its folder, which is then
    on the instance's own disk.
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
    """The stack of `scheduler`: batch, sagemaker or parallelcluster."""

    def __init__(self, config: Config, scheduler: str) -> None:
        super().__init__(config)
        self.scheduler = scheduler

    def render(self, inputs: Inputs) -> str:
        return render(self.config, inputs, self.scheduler)

    def _wanted(
        self, bad: Collection[str]
    ) -> tuple[tuple[int, ...], tuple[int, ...], list[StackNode]]:
        return (), (), []

    def outputs(self) -> dict[str, str]:
        """Returns the stack's outputs by name. Raises CloudError without a stack."""
        state = self.stack.look()
        if state is None or not state.whole:
            why = (
                f"the stack {self.stack.name} is {state.status}"
                if state
                else f"the stack {self.stack.name} does not exist"
            )
            raise CloudError(
                "nothing is set up for this config", where=self.where, why=why, next="make setup"
            )
        return dict(state.outputs)
