"""Resolves secret references, for schedulers that can't pass secrets to a node.

TRAINFLEET_SECRET_AT_<NAME> contains a reference to the value of the variable NAME: the ARN of a
Secrets Manager secret, or the ARN or name of an SSM parameter. The node's role grants read access.
The value exists only in the environment of this process and its children.

Also checks whether this machine has AWS credentials.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from .errors import BackendError

PREFIX = "TRAINFLEET_SECRET_AT_"
SECONDS = 10  # boto3 timeout per attempt, in seconds
TRIES = 5
# AWS SDK environment variables that are unrelated to credentials.
HARMLESS = {"AWS_CA_BUNDLE", "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED", "AWS_REGION"}
KEPT = ("~/.aws", "~/.boto", "/etc/boto.cfg")  # files and folders that may contain credentials
MACHINE = Path("/sys/class/dmi/id")  # system vendor: Amazon or Xen on EC2


def take(environment: MutableMapping[str, str] = os.environ) -> None:
    """Replaces every secret reference in the environment with its value.

    Raises:
        BackendError: a secret can't be read.
    """
    for variable in [name for name in environment if name.startswith(PREFIX)]:
        where, name = environment.pop(variable), variable.removeprefix(PREFIX)
        try:
            environment[name] = read(where)
        except Exception as error:
            import botocore.exceptions

            if not isinstance(
                error, (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)
            ):
                raise
            why = " ".join(str(error).split())
            raise BackendError(
                f"the secret {name} can't be read",
                where=where,
                why=why,
                next="allow the job's role to read it: ssm:GetParameter, or "
                "secretsmanager:GetSecretValue",
            ) from error


def read(where: str) -> str:
    """Returns the secret at an ARN or SSM parameter name. Propagates botocore's exceptions."""
    import boto3
    from botocore.config import Config

    arn = re.fullmatch(r"arn:[a-z-]+:(secretsmanager|ssm):([a-z0-9-]+):\d{12}:.+", where)
    service, region = (arn[1], arn[2]) if arn else ("ssm", None)
    config = Config(
        connect_timeout=SECONDS,
        read_timeout=SECONDS,
        retries={"mode": "standard", "total_max_attempts": TRIES},
    )
    client = boto3.client(service, region_name=region, config=config)
    if service == "secretsmanager":
        return str(client.get_secret_value(SecretId=where)["SecretString"])
    return str(client.get_parameter(Name=where, WithDecryption=True)["Parameter"]["Value"])


def is_keyless() -> bool:
    """Returns whether this machine certainly has no AWS credentials.

    Checks the same places as botocore's create_credential_resolver, but without loading botocore
    (0.4 s of CPU time) or waiting for instance metadata.
    """
    named = {name for name in os.environ if name.startswith(("AWS_", "BOTO_"))}
    # os.path, because pathlib fails for a user without a home, as in some containers
    if named - HARMLESS or any(os.path.exists(os.path.expanduser(path)) for path in KEPT):  # noqa: PTH110, PTH111
        return False
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return True
    with suppress(OSError):
        maker = [(MACHINE / name).read_text() for name in ("sys_vendor", "bios_version")]
        return "amazon" not in " ".join(maker).lower()
    return False  # unknown hardware, possibly an instance with a role
