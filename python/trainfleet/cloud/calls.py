"""Sends control requests to AWS: validates them by botocore's model, and explains refusals.

`send` is a hook, which the tests' fakes and the crash matrix replace. S3's objects have a separate
module (storage/s3.py), because nodes use it too. boto3 is loaded by the first request.
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

# Tries of a request in boto3's standard mode, which waits up to 20 s between two tries while AWS
# throttles.
TRIES = 8
SECONDS = 30  # timeout for an answer
# requests that are never retried, because each one costs money
ONCE = ("PurchaseCapacityBlock", "CreateTrainingPlan")
PAGES = 10_000  # most pages of one listing, because a faulty server may never end it

Send = Callable[[str, str, str, dict[str, Any]], dict[str, Any]]


def by_boto3(region: str, service: str, operation: str, request: dict[str, Any]) -> dict[str, Any]:
    """Sends a request with boto3 and returns the response. Raises botocore's errors, or NotAws."""
    from botocore import xform_name

    with _LOCK:  # clients are thread-safe, but their creation is not
        client = _client(region, service, 1 if operation in ONCE else TRIES)
    answer: dict[str, Any] = getattr(client, xform_name(operation))(**request)
    if "html" in answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("content-type", ""):
        # For some services, botocore parses a web page as an empty answer.
        raise api_errors.NotAws(f"{operation} was answered with a page")
    return answer


send: Send = by_boto3
_LOCK = threading.Lock()


class Calls:
    """Requests to the services of one region: `calls("ec2", "DescribeVpcs", Filters=[...])`.

    Operations have AWS's names, as in botocore's model.
    """

    def __init__(self, region: str) -> None:
        self.region = region

    def __call__(self, service: str, operation: str, **request: Any) -> dict[str, Any]:
        """Sends the request and returns the response.

        Raises:
            CloudError: the request is invalid, or AWS refused it or did not respond. `code` is
                AWS's error code.
        """
        with api_errors.explained(self.region, service, operation):
            require_valid(service, operation, request)
            return send(self.region, service, operation, request)

    def pages(self, service: str, operation: str, key: str, **request: Any) -> Iterator[Any]:
        """Yields the entries under `key` on all pages. Raises CloudError as a call does."""
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
        what, where = f"{operation} has more than {PAGES:,} pages", f"{service} in {self.region}"
        raise CloudError(what, where=where, next="run the same command again")


def require_valid(service: str, operation: str, request: dict[str, Any]) -> None:
    """Raises botocore's ParamValidationError with every violation of the service's model."""
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
    """Returns a client with boto3's credentials. Threads may share it."""
    import boto3
    from botocore.config import Config

    wait = {"connect_timeout": 10, "read_timeout": SECONDS}
    config = Config(retries={"mode": "standard", "total_max_attempts": tries}, **wait)
    return boto3.client(service, region_name=region, config=config)


@functools.cache
def _tokens(service: str, operation: str) -> tuple[tuple[str, str], ...]:
    """Returns the pagination tokens: pairs of a request parameter and its key in the previous
    response. Empty if the operation is not paginated.
    """
    from botocore.exceptions import UnknownServiceError
    from botocore.paginate import PaginatorModel

    loader = _session().get_component("data_loader")
    try:
        model = PaginatorModel(loader.load_service_model(service, "paginators-1"))
        pagination = model.get_paginator(operation)
    except (UnknownServiceError, ValueError):
        return ()
    into, out = pagination["input_token"], pagination["output_token"]
    return ((into, out),) if isinstance(into, str) else tuple(zip(into, out, strict=True))


PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}  # by prefix of a region's name


def region_of(config: Config) -> str:
    """Returns the first of fleet.aws.region, AWS_REGION, AWS_DEFAULT_REGION and the profile's
    region. Raises ConfigError if none is set.
    """
    if config.fleet.aws.region:
        return config.fleet.aws.region
    import botocore.exceptions
    import botocore.session

    session, key = botocore.session.get_session(), "fleet.aws.region"
    try:
        found = os.environ.get("AWS_REGION") or session.get_config_variable("region")
    except botocore.exceptions.BotoCoreError as error:  # a missing profile, an unreadable file
        then = "check AWS_PROFILE and ~/.aws/config"
        raise ConfigError.of(key, str(error), next=then) from error
    if not found:
        message = "null, and neither AWS_REGION, AWS_DEFAULT_REGION nor your profile names a region"
        then = "add SET='fleet.aws.region=us-east-1', or set fleet.aws.region in config.yaml"
        raise ConfigError.of(key, message, next=then)
    return str(found)


def through_agent(region: str) -> str:
    """Returns an ssh_config ProxyCommand that reaches the instance %h through SSM."""
    document = "--document-name AWS-StartSSHSession --parameters portNumber=%p"
    return f"aws ssm start-session --target %h {document} --region {region}"


def partition_of(region: str) -> str:
    """Returns the region's partition, which is part of ARNs."""
    return next((name for start, name in PARTITIONS.items() if region.startswith(start)), "aws")
