"""Sends AWS control requests: each is checked against botocore's model, sent, and explained if it
is refused. Finds the region that they go to.

`send` is the hook: the fakes of the tests and the crash matrix put their own function there.
Objects in S3 have their own module (storage/s3.py), as nodes use it too. The first request loads
boto3.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..config import Config
from ..trust.errors import CloudError, ConfigError
from . import api_errors

# tries of a request, in boto3's standard mode: it waits up to 20 s between two of them while AWS
# throttles
TRIES = 8
SECONDS = 30  # for an answer
# requests that must not be repeated automatically: each is paid for
ONCE = ("PurchaseCapacityBlock", "CreateTrainingPlan")
PAGES = 10_000  # pages of one listing: a server may never end it

Send = Callable[[str, str, str, dict[str, Any]], dict[str, Any]]


def by_boto3(region: str, service: str, operation: str, request: dict[str, Any]) -> dict[str, Any]:
    """Sends a request with boto3 and returns AWS's answer. Raises botocore's errors, and NotAws."""
    from botocore import xform_name

    with _LOCK:  # making a client is not safe in threads; using one is
        client = _client(region, service, 1 if operation in ONCE else TRIES)
    answer: dict[str, Any] = getattr(client, xform_name(operation))(**request)
    if "html" in answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("content-type", ""):
        # botocore reads a page as an empty answer of some services
        raise api_errors.NotAws(f"{operation} was answered with a page")
    return answer


send: Send = by_boto3
_LOCK = threading.Lock()


class Calls:
    """Requests to the services of one region: `calls("ec2", "DescribeVpcs", Filters=[...])`.

    An operation has its name in botocore's model, which is AWS's own.
    """

    def __init__(self, region: str) -> None:
        self.region = region

    def __call__(self, service: str, operation: str, **request: Any) -> dict[str, Any]:
        """Sends the request and returns the answer.

        Raises:
            CloudError: the request is invalid, AWS refused it, or no answer
                came; `code` is AWS's.
        """
        with api_errors.explained(self.region, service, operation):
            require_valid(service, operation, request)
            return send(self.region, service, operation, request)

    def pages(self, service: str, operation: str, key: str, **request: Any) -> Iterator[Any]:
        """Yields the entries under `key` in the answer and in all later pages. Raises CloudError
        like a call, on any page.
        """
        pairs = _tokens(service, operation)
        seen: set[str] = set()
        for _ in range(PAGES):
            answer = self(service, operation, **request)
            yield from answer.get(key) or ()
            following = {name: answer[token] for name, token in pairs if answer.get(token)}
            if not following or str(following) in seen:
                return
            seen.add(str(following))
            request |= following
        raise CloudError(
            f"{operation} has more than {PAGES:,} pages",
            where=f"{service} in {self.region}",
            next="run the same command again",
        )


def require_valid(service: str, operation: str, request: dict[str, Any]) -> None:
    """Validates a request against the service's model. Raises botocore's ParamValidationError with
    every violation.
    """
    from botocore.exceptions import ParamValidationError
    from botocore.validate import ParamValidator

    shape = _model(service).operation_model(operation).input_shape
    if shape is None:
        return
    report = ParamValidator().validate(request, shape)
    if report.has_errors():
        raise ParamValidationError(report=report.generate_report())


@functools.cache
def _session() -> Any:
    import botocore.session

    return botocore.session.get_session()


@functools.cache
def _model(service: str) -> Any:
    return _session().get_service_model(service)


@functools.cache
def _client(region: str, service: str, tries: int) -> Any:
    """Returns a client with the credentials that boto3 finds; threads may share it."""
    import boto3
    from botocore.config import Config

    wait = {"connect_timeout": 10, "read_timeout": SECONDS}
    config = Config(retries={"mode": "standard", "total_max_attempts": tries}, **wait)
    return boto3.client(service, region_name=region, config=config)


@functools.cache
def _tokens(service: str, operation: str) -> tuple[tuple[str, str], ...]:
    """Returns the parameters of the next request and their places in the answer; None for an
    operation with one page.
    """
    from botocore.exceptions import UnknownServiceError
    from botocore.paginate import PaginatorModel

    loader = _session().get_component("data_loader")
    try:
        pagination = PaginatorModel(
            loader.load_service_model(service, "paginators-1")
        ).get_paginator(operation)
    except (UnknownServiceError, ValueError):
        return ()
    into, out = pagination["input_token"], pagination["output_token"]
    return ((into, out),) if isinstance(into, str) else tuple(zip(into, out, strict=True))


PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}  # by the beginning of a region's name


def region_of(config: Config) -> str:
    """Returns fleet.aws.region, AWS_REGION, AWS_DEFAULT_REGION or the profile's region, in this
    order. Raises ConfigError if none is set.
    """
    if config.fleet.aws.region:
        return config.fleet.aws.region
    import botocore.exceptions
    import botocore.session

    try:
        found = os.environ.get("AWS_REGION") or botocore.session.get_session().get_config_variable(
            "region"
        )
    except botocore.exceptions.BotoCoreError as error:  # a missing profile, an unreadable file
        raise ConfigError.of(
            "fleet.aws.region", str(error), next="check AWS_PROFILE and ~/.aws/config"
        ) from error
    if not found:
        message = "null, and neither AWS_REGION, AWS_DEFAULT_REGION nor your profile names a region"
        raise ConfigError.of(
            "fleet.aws.region",
            message,
            next="add SET='fleet.aws.region=us-east-1', or set fleet.aws.region in config.yaml",
        )
    return str(found)


def through_agent(region: str) -> str:
    """Returns the command by which SSH reaches an instance, %h, through SSM Session Manager (a
    ProxyCommand of ssh_config).
    """
    return (
        "aws ssm start-session --target %h --document-name AWS-StartSSHSession --parameters "
        f"portNumber=%p --region {region}"
    )


def partition_of(region: str) -> str:
    """Returns the region's partition as its ARNs name it."""
    return next((name for start, name in PARTITIONS.items() if region.startswith(start)), "aws")
