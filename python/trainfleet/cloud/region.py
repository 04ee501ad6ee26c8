"""The region that AWS's backends work in."""

from __future__ import annotations

import os

from ..config import Config
from ..trust.errors import ConfigError

PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}  # of regions that begin so


def region_of(config: Config) -> str:
    """fleet.aws.region; without it AWS_REGION, AWS_DEFAULT_REGION, or that of the profile;
    ConfigError without any.
    """
    if config.fleet.aws.region:
        return config.fleet.aws.region
    import botocore.exceptions
    import botocore.session

    try:
        found = os.environ.get("AWS_REGION") or botocore.session.get_session().get_config_variable(
            "region"
        )
    except (
        botocore.exceptions.BotoCoreError
    ) as error:  # a profile that is not there, a file that can't be read
        raise ConfigError.of(
            "fleet.aws.region", str(error), next="look at AWS_PROFILE and ~/.aws/config"
        ) from error
    if not found:
        message = "null, and neither AWS_REGION, AWS_DEFAULT_REGION nor your profile names a region"
        raise ConfigError.of(
            "fleet.aws.region", message, next="SET='fleet.aws.region=us-east-1', or in config.yaml"
        )
    return str(found)


def through_agent(region: str) -> str:
    """The command by which SSH reaches an instance, %h, through SSM Session Manager (a ProxyCommand
    of ssh_config).
    """
    return (
        "aws ssm start-session --target %h --document-name AWS-StartSSHSession --parameters "
        f"portNumber=%p --region {region}"
    )


def partition_of(region: str) -> str:
    """The part of AWS that a region is in, as its ARNs name it."""
    return next((name for start, name in PARTITIONS.items() if region.startswith(start)), "aws")
